"""The Square attack (Andriushchenko et al., 2020): random squares, kept if they help; no gradient.

A rejected proposal leaves the point where it was. So the proposals of several queries can be asked in
one call, all from the same point, and the first that helps is taken. The walk is the same as one query
after the other, with fewer and larger calls.

Everything random about a query (the place of its squares, its signs) is drawn for the whole batch before
the walk. So a query always proposes the same from the same point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dent.attacks.checks import Eps, Labels, read_arguments
from dent.attacks.losses import margin
from dent.attacks.norms import NORMS, lengths, project, unsqueeze_like
from dent.attacks.search import AttackedModel, AttackResult, BestPoints, Model, begin, is_broken
from dent.seeds import make_generator

# The area of the squares is halved after these queries.
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
DECAY = {"l2": 2, "l1": 4}  # the power by which a bump decays
TINY = 1e-12
CALL_COST = 1 / 32  # the fixed cost of a call, as a share of the cost of a call with `rows` inputs
MEMORY = 0.9  # the weight of past acceptances after one more call


def square(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    queries: int = 5000,
    restarts: int = 1,
    share: float = 0.8,
    rows: int | None = None,
    joint: bool | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Change one random square after the other, and keep each change that increases the margin loss.

    A broken input leaves the search. Inputs that were not broken end at their point of highest loss.

    queries: the number of proposals for each input, after the start.
    share: the share of the image that the first squares cover; later squares are smaller.
    rows: the number of inputs in a call that uses the device well; 128 on a CPU and 512 elsewhere if it
    is None. It changes the speed, not the walk.
    joint: True for a model that depends on the batch. Then every query submits the whole batch.
    mask: (N,) bool, the inputs that may be perturbed.

    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> inputs, labels = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> result = square(model, inputs, labels, eps=0.1, queries=10)
    >>> bool(((result.inputs - inputs).abs() <= 0.1 + 1e-6).all()), result.gradients
    (True, 0)
    """
    if inputs.dim() != 4:
        raise ValueError(f"expected images (N, C, H, W), got inputs {tuple(inputs.shape)}")
    labels, eps = read_arguments(inputs, labels, eps)
    attacked, best, _ = begin(
        model, inputs, labels, eps=eps, norm=norm, queries=queries, restarts=restarts,
        share=share, rows=rows, joint=joint, mask=mask,
    )  # fmt: skip
    rows = rows or (128 if inputs.device.type == "cpu" else 512)
    for restart in range(restarts if eps > 0 else 0):
        if is_finished(best):
            break
        proposals = PROPOSALS[norm](
            inputs.detach(), eps=eps, norm=norm, share=share, queries=queries, seeds=(seed, restart)
        )
        if best.joint:
            walk_jointly(attacked, best, proposals)
        else:
            walk(attacked, best, proposals, rows=rows)
    return best.submit(attacked)


def walk(attacked: AttackedModel, best: BestPoints, proposals: Proposals, *, rows: int) -> None:
    """Make all queries for the inputs that are still open; inputs may be at different queries."""
    at, points = best.list_open(), proposals.start()
    value, broken = score_points(attacked, best, at, points[at])
    best.record(at, points[at], value, broken)
    values = value.new_full(best.mask.shape, -torch.inf).index_copy(0, at, value)
    made = torch.zeros_like(best.labels)  # the number of queries made for each input
    accepted, tried = 1.0, 1.0
    while len(at := best.list_open()) and len(at := at[made[at] < proposals.queries]):
        block = choose_block_size(rows, len(at), accepted / tried)
        query = made[at, None] + torch.arange(block, device=at.device)
        row, column = (query < proposals.queries).nonzero(as_tuple=True)
        asked = at[row]
        ahead = proposals.propose(asked, query[row, column], points)
        value, broken = score_points(attacked, best, asked, ahead)
        better = broken | (value > values[asked])
        first = torch.full_like(at, block).scatter_reduce(0, row[better], column[better], "amin")
        taken = (better & (column == first[row])).nonzero().squeeze(1)  # at most one per input
        if len(taken):
            who, ahead, value = asked[taken], ahead[taken], value[taken]
            points[who], values[who] = ahead, value
            best.record(who, ahead, value, broken[taken])
        accepted = MEMORY * accepted + len(taken)
        tried = MEMORY * tried + int((column <= first[row]).sum())
        made[at] += (first + 1).clamp(max=block)


def choose_block_size(rows: int, inputs: int, rate: float) -> int:
    """Return the number of proposals per input in one call, for the rate at which they are accepted.

    Proposals after an accepted one are wasted: k proposals settle (1 - (1 - rate)^k) / rate queries of
    an input. For n inputs they cost n k rows and the fixed cost c of a call. So the best k is about
    sqrt(2 c / (n rate)), unless that is far beyond the first accepted proposal.
    """
    cheapest = math.sqrt(2 * CALL_COST * rows / (inputs * rate))
    return max(min(round(min(cheapest, 2 / rate - 1)), rows // inputs), 1)


def walk_jointly(attacked: AttackedModel, best: BestPoints, proposals: Proposals) -> None:
    """Make all queries, each a submission of the whole batch; each input accepts by its own loss."""
    at, inputs = best.list_open(), proposals.inputs
    moves = unsqueeze_like(best.mask, inputs)
    points = torch.where(moves, proposals.start(), inputs)
    values, broken = score_points(attacked, best, at, points)
    best.record(at, points, values, broken)
    for number in range(proposals.queries):
        if is_finished(best):
            return
        ahead = torch.where(moves, proposals.propose(at, torch.full_like(at, number), points), inputs)
        value, breaks = score_points(attacked, best, at, ahead)
        best.record(at, ahead, value, breaks)
        better = (value > values) | (breaks & ~broken)
        points = torch.where(unsqueeze_like(better, points), ahead, points)
        values, broken = torch.where(better, value, values), torch.where(better, breaks, broken)


def is_finished(best: BestPoints) -> bool:
    """Return True if all masked inputs are broken; in a joint batch, by one submission."""
    if best.joint:
        return best.batch_broken == int(best.mask.sum())
    return not len(best.list_open())


def score_points(
    attacked: AttackedModel, best: BestPoints, at: Tensor, points: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of points of the inputs `at`, and which of the points are misclassified."""
    logits, labels = attacked.predict(points), best.labels[at]
    return margin(logits, labels), is_broken(logits, labels)


class Proposals:
    """The squares of every query: their size, and the places of the two squares that a query can have.

    All places are equally likely. (The reference leaves out the last row and column.)
    """

    def __init__(
        self,
        inputs: Tensor,
        *,
        eps: float,
        norm: str,
        share: float,
        queries: int,
        seeds: tuple[int, ...],
    ) -> None:
        self.inputs, self.eps, self.norm, self.queries = inputs.contiguous(), eps, norm, queries
        self.sides, self._seeds = tuple(inputs.shape[2:]), seeds
        sides = torch.tensor(self.sides)
        size = self._round_size((schedule_areas(queries, share) * sides.prod()).sqrt().round().long())
        size = size.clamp(max=int(sides.min()))
        places = torch.rand(queries, 2, 2, generator=self._random(0), dtype=torch.double)
        self.size = size.to(inputs.device)
        self.corner = (places * (sides - size[:, None, None] + 1)).long().to(inputs.device)
        self._draw_tables()

    def start(self) -> Tensor:
        """Return the start of each input's walk, (N, C, H, W)."""
        raise NotImplementedError

    def propose(self, at: Tensor, query: Tensor, points: Tensor) -> Tensor:
        """Return one proposal per row: query number `query` of the input `at`, from its point."""
        raise NotImplementedError

    def _draw_tables(self) -> None:
        """Draw the tables other than those of the squares."""
        raise NotImplementedError

    def _round_size(self, size: Tensor) -> Tensor:
        return size.clamp(min=1)

    def _random(self, table: int) -> torch.Generator:
        """Return a generator per table, so that a walk of more queries begins with the same ones."""
        return make_generator(*self._seeds, table)

    def _draw_signs(self, table: int, *shape: int) -> Tensor:
        """Draw random signs, +1 and -1."""
        signs = torch.randint(2, shape, generator=self._random(table), dtype=torch.int8)
        return (2 * signs - 1).to(self.inputs.device)

    def _place_window(self, query: Tensor, square: int) -> Window:
        return Window(self.corner[query, square], self.size[query], self.sides)


class Squares(Proposals):
    """Linf: every value is at an end of its range; a square moves to one end in each channel.

    The walk starts from vertical stripes. A query has the same signs for all inputs.
    """

    def _draw_tables(self) -> None:
        self.signs = self._draw_signs(1, self.queries, self.inputs.shape[1])

    def start(self) -> Tensor:
        n, channels, _, width = self.inputs.shape
        return self._move_to_end(self.inputs, self._draw_signs(2, n, channels, 1, width))

    def propose(self, at: Tensor, query: Tensor, points: Tensor) -> Tensor:
        ahead, window = points.index_select(0, at), self._place_window(query, 0)
        window.write(
            ahead, self._move_to_end(window.read(self.inputs, at), self.signs[query, :, None, None])
        )
        return ahead

    def _move_to_end(self, inputs: Tensor, signs: Tensor) -> Tensor:
        return (inputs + self.eps * signs.to(inputs.dtype)).clamp(0, 1)


class Bumps(Proposals):
    """L2 and L1: a square gets a bump, with the length of another square and the unused part of eps.

    The walk starts from a grid of bumps. A query has its own signs for each input and channel.
    """

    def _draw_tables(self) -> None:
        self.turned = (self._draw_signs(1, self.queries) > 0).long()
        self.signs = self._draw_signs(2, self.queries, *self.inputs.shape[:2])
        sizes, self.kind = self.size.unique(return_inverse=True)
        side = max(sizes.tolist(), default=0) + 1  # index -1 is zero: outside of the square
        self.bumps = self.inputs.new_zeros(len(sizes), 2, side, side)
        for kind, size in enumerate(sizes.tolist()):
            shape = make_bump(size, self.norm).to(self.inputs)
            self.bumps[kind, :, :size, :size] = torch.stack([shape, shape.T])

    def _round_size(self, size: Tensor) -> Tensor:
        """Return odd sizes, which have a middle."""
        return size.clamp(min=3) // 2 * 2 + 1

    def start(self) -> Tensor:
        n, channels = self.inputs.shape[:2]
        size = max(min(self.sides) // 5, 1)
        down, right = (side // size for side in self.sides)
        top, left = (side % size // 2 for side in self.sides)
        shape = make_bump(size, self.norm).to(self.inputs)
        turned = self._draw_signs(3, down, right, 1, 1) > 0
        tiles = self._draw_signs(4, n, channels, down, right, 1, 1) * torch.where(turned, shape.T, shape)
        grid = tiles.transpose(3, 4).reshape(n, channels, down * size, right * size)
        differences = torch.zeros_like(self.inputs)
        differences[:, :, top : top + down * size, left : left + right * size] = grid
        points = self._scale_to_eps(self.inputs, differences)
        # Project: the differences can be much longer than eps, and so is their rounding error.
        return project(points, self.inputs, eps=self.eps, norm=self.norm)

    def propose(self, at: Tensor, query: Tensor, points: Tensor) -> Tensor:
        inputs = self.inputs.index_select(0, at)
        differences = points.index_select(0, at).sub_(inputs)
        power = NORMS[self.norm]
        room = (self.eps**power - lengths(differences, self.norm) ** power).clamp(min=0)
        window, other = self._place_window(query, 0), self._place_window(query, 1)
        old, mass = self._take(differences, window)
        more = self._take(differences, other)[1]  # without the overlap of both squares
        new = self.signs[query, at, :, None, None] * self._shape_bumps(query, window)
        new += old / (mass ** (1 / power) + TINY)
        length = (room / inputs.shape[1] + mass + more) ** (1 / power)
        if self.norm == "l1":  # too long for one channel; the projection shortens it
            length *= inputs.shape[1]
        new *= length / (self._mass(new) ** (1 / power) + TINY)
        window.write(differences, new)
        return self._scale_to_eps(inputs, differences)

    def _take(self, differences: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Set a square to zero. Return its old values and their mass."""
        taken = window.read(differences) * window.inside
        window.write(differences, 0.0)
        return taken, self._mass(taken)

    def _mass(self, values: Tensor) -> Tensor:
        """Return each channel's length to the norm's power, (rows, C, 1, 1). Masses of parts add up."""
        return values.abs().pow(NORMS[self.norm]).sum((2, 3), keepdim=True)

    def _shape_bumps(self, query: Tensor, window: Window) -> Tensor:
        """Return the bump of each query, (rows, 1, side, side)."""
        kind, turned = self.kind[query, None, None, None], self.turned[query, None, None, None]
        down, right = window.place[:, None].unbind(2)
        return self.bumps[kind, turned, down[..., None], right[..., None, :]]

    def _scale_to_eps(self, inputs: Tensor, differences: Tensor) -> Tensor:
        if self.norm == "l1":
            return project(inputs + differences, inputs, eps=self.eps, norm="l1")
        scale = self.eps / (lengths(differences, "l2") + TINY)
        return differences.mul_(scale).add_(inputs).clamp_(0, 1)


PROPOSALS: dict[str, type[Proposals]] = {"linf": Squares, "l2": Bumps, "l1": Bumps}


class Window:
    """A square in each row's image, of its own size and place, within a window of the largest size.

    If all rows are at the same query, and so have the same square, the window is a slice.
    """

    def __init__(self, corner: Tensor, size: Tensor, sides: Sequence[int]) -> None:
        self.side = int(size.max())
        self.slices: tuple[slice, slice] | None = None
        if bool((corner == corner[0]).all()) and bool((size == self.side).all()):
            corner, size = corner[:1], size[:1]
            top, left = corner[0].tolist()
            self.slices = slice(top, top + self.side), slice(left, left + self.side)
        most = torch.tensor(sides, device=size.device) - self.side
        pixel = corner.minimum(most)[..., None] + torch.arange(self.side, device=size.device)
        place = pixel - corner[..., None]  # rows and columns relative to the square's corner
        self.place = place.where((place >= 0) & (place < size[:, None, None]), -1)
        self.inside = ((self.place[:, 0, :, None] >= 0) & (self.place[:, 1, None, :] >= 0))[:, None]
        self.index = (pixel[:, 0, :, None] * sides[1] + pixel[:, 1, None, :]).flatten(1)[:, None]

    def read(self, images: Tensor, at: Tensor | None = None) -> Tensor:
        """Return the windows (rows, C, side, side) of the images: one per row, or those at `at`."""
        if self.slices:
            part = images[..., *self.slices]
            return part if at is None else part.index_select(0, at)
        rows, channels = len(self.index), images.shape[1]
        at = torch.arange(rows, device=images.device) if at is None else at
        image = at[:, None] * channels + torch.arange(channels, device=images.device)
        index = image[..., None] * images[0, 0].numel() + self.index
        return images.take(index).view(rows, channels, self.side, self.side)

    def write(self, images: Tensor, values: Tensor | float) -> None:
        """Write values into the squares of the rows' images, in place."""
        if self.slices:
            images[..., *self.slices] = values
            return
        values = torch.where(self.inside, values, self.read(images)).flatten(2)
        images.view(*images.shape[:2], -1).scatter_(2, self.index.expand_as(values), values)


def schedule_areas(queries: int, share: float) -> Tensor:
    """Return the share of the image that each query's square covers, (queries,).

    >>> schedule_areas(52, 0.8)[[0, 10, 11, 50, 51]].tolist()
    [0.8, 0.8, 0.4, 0.4, 0.2]
    """
    halved = torch.bucketize(torch.arange(queries), torch.tensor(HALVINGS))
    return share * 0.5 ** halved.double()


def make_bump(size: int, norm: str) -> Tensor:
    """Return a square of length one: two halves of opposite sign, each highest in its middle.

    >>> round(make_bump(3, "l1")[1:].sum().item(), 6)
    -0.5
    """
    halves = torch.cat([_make_half(size // 2, size, norm), -_make_half(size - size // 2, size, norm)])
    return halves / lengths(halves[None], norm)[0]


def _make_half(height: int, width: int, norm: str) -> Tensor:
    """Add up nested squares around the middle; the one at distance d has weight 1 / (1 + d)^power."""
    down, right = (torch.arange(length) - length // 2 for length in (height, width))
    distance = torch.maximum(down.abs()[:, None], right.abs())
    weights = torch.arange(1, max(height, width) // 2 + 2).double() ** -DECAY[norm]
    half = weights.flip(0).cumsum(0).flip(0)[distance]
    return half / lengths(half[None], norm)[0].clamp(min=TINY)
