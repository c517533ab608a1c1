"""What the Square attack tries (Andriushchenko et al., 2020): the start, and the point of every query.

All that is random about a query is in tables, drawn for the whole batch before the walk: where its
squares are, and its signs. So a query proposes the same from the same point, whenever it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dent.attacks.norms import NORMS, lengths, project
from dent.seeds import generator

# After these queries the area of the squares is halved.
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
DECAY = {"l2": 2, "l1": 4}  # how fast a bump falls off, as a power
TINY = 1e-12


def schedule(queries: int, share: float) -> Tensor:
    """The share of the image that the square of each query takes, (queries,).

    >>> schedule(52, 0.8)[[0, 10, 11, 50, 51]].tolist()
    [0.8, 0.8, 0.4, 0.4, 0.2]
    """
    halved = torch.bucketize(torch.arange(queries), torch.tensor(HALVINGS))
    return share * 0.5 ** halved.double()


def bump(size: int, norm: str) -> Tensor:
    """A square of length one: two halves of opposite sign and equal length, highest in their middles.

    >>> round(bump(3, "l1")[1:].sum().item(), 6)
    -0.5
    """
    halves = torch.cat([_half(size // 2, size, norm), -_half(size - size // 2, size, norm)])
    return halves / lengths(halves[None], norm)[0]


def _half(height: int, width: int, norm: str) -> Tensor:
    """Nested squares around the middle, added up: that of distance d counts for 1 / (1 + d)^power."""
    down, right = (torch.arange(length) - length // 2 for length in (height, width))
    distance = torch.maximum(down.abs()[:, None], right.abs())
    weights = torch.arange(1, max(height, width) // 2 + 2).double() ** -DECAY[norm]
    half = weights.flip(0).cumsum(0).flip(0)[distance]
    return half / lengths(half[None], norm)[0].clamp(min=TINY)


class Window:
    """A square in each row's image, of its own size and place, within a window of the largest size.

    Where all rows are at the same query, and so at the same square, it is a slice.
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
        place = pixel - corner[..., None]  # rows and columns as counted from the square's corner
        self.place = place.where((place >= 0) & (place < size[:, None, None]), -1)
        self.inside = ((self.place[:, 0, :, None] >= 0) & (self.place[:, 1, None, :] >= 0))[:, None]
        self.index = (pixel[:, 0, :, None] * sides[1] + pixel[:, 1, None, :]).flatten(1)[:, None]

    def read(self, images: Tensor, at: Tensor | None = None) -> Tensor:
        """The windows (rows, C, side, side) of images: the rows' own, or those `at` an index."""
        if self.slices:
            part = images[..., *self.slices]
            return part if at is None else part.index_select(0, at)
        rows, channels = len(self.index), images.shape[1]
        at = torch.arange(rows, device=images.device) if at is None else at
        image = at[:, None] * channels + torch.arange(channels, device=images.device)
        index = image[..., None] * images[0, 0].numel() + self.index
        return images.take(index).view(rows, channels, self.side, self.side)

    def write(self, images: Tensor, values: Tensor | float) -> None:
        """Put values into the squares of the rows' images, in place."""
        if self.slices:
            images[..., *self.slices] = values
            return
        values = torch.where(self.inside, values, self.read(images)).flatten(2)
        images.view(*images.shape[:2], -1).scatter_(2, self.index.expand_as(values), values)


class Proposals:
    """The squares of every query: their size, and the places of the two that a query may have.

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
        size = self._legal((schedule(queries, share) * sides.prod()).sqrt().round().long())
        size = size.clamp(max=int(sides.min()))
        places = torch.rand(queries, 2, 2, generator=self._random(0), dtype=torch.double)
        self.size = size.to(inputs.device)
        self.corner = (places * (sides - size[:, None, None] + 1)).long().to(inputs.device)
        self._draw()

    def start(self) -> Tensor:
        """Where the walk of each input begins, (N, C, H, W)."""
        raise NotImplementedError

    def propose(self, at: Tensor, query: Tensor, points: Tensor) -> Tensor:
        """What queries propose, a row for each: that of the input `at` from its place in `points`."""
        raise NotImplementedError

    def _draw(self) -> None:
        """The tables other than those of squares."""
        raise NotImplementedError

    def _legal(self, size: Tensor) -> Tensor:
        return size.clamp(min=1)

    def _random(self, table: int) -> torch.Generator:
        """One for each table: then a walk of more queries begins with the same."""
        return generator(*self._seeds, table)

    def _signs(self, table: int, *shape: int) -> Tensor:
        """Random signs, +1 and -1."""
        signs = torch.randint(2, shape, generator=self._random(table), dtype=torch.int8)
        return (2 * signs - 1).to(self.inputs.device)

    def _window(self, query: Tensor, square: int) -> Window:
        return Window(self.corner[query, square], self.size[query], self.sides)


class Squares(Proposals):
    """Linf: every value is at an end of what it may be, and a square goes to one end in each channel.

    The walk starts from vertical stripes. A query has the same signs for all inputs.
    """

    def _draw(self) -> None:
        self.signs = self._signs(1, self.queries, self.inputs.shape[1])

    def start(self) -> Tensor:
        n, channels, _, width = self.inputs.shape
        return self._end(self.inputs, self._signs(2, n, channels, 1, width))

    def propose(self, at: Tensor, query: Tensor, points: Tensor) -> Tensor:
        ahead, window = points.index_select(0, at), self._window(query, 0)
        window.write(ahead, self._end(window.read(self.inputs, at), self.signs[query, :, None, None]))
        return ahead

    def _end(self, inputs: Tensor, signs: Tensor) -> Tensor:
        return (inputs + self.eps * signs.to(inputs.dtype)).clamp(0, 1)


class Bumps(Proposals):
    """L2 and L1: a square gets a bump, the length that another has, and what is left of eps.

    The walk starts from a grid of bumps. A query has its own signs for each input and channel.
    """

    def _draw(self) -> None:
        self.turned = (self._signs(1, self.queries) > 0).long()
        self.signs = self._signs(2, self.queries, *self.inputs.shape[:2])
        sizes, self.kind = self.size.unique(return_inverse=True)
        side = max(sizes.tolist(), default=0) + 1  # with zeros at -1, for what is outside of the square
        self.bumps = self.inputs.new_zeros(len(sizes), 2, side, side)
        for kind, size in enumerate(sizes.tolist()):
            shape = bump(size, self.norm).to(self.inputs)
            self.bumps[kind, :, :size, :size] = torch.stack([shape, shape.T])

    def _legal(self, size: Tensor) -> Tensor:
        """Odd, so that there is a middle."""
        return size.clamp(min=3) // 2 * 2 + 1

    def start(self) -> Tensor:
        n, channels = self.inputs.shape[:2]
        size = max(min(self.sides) // 5, 1)
        down, right = (side // size for side in self.sides)
        top, left = (side % size // 2 for side in self.sides)
        shape = bump(size, self.norm).to(self.inputs)
        turned = self._signs(3, down, right, 1, 1) > 0
        tiles = self._signs(4, n, channels, down, right, 1, 1) * torch.where(turned, shape.T, shape)
        grid = tiles.transpose(3, 4).reshape(n, channels, down * size, right * size)
        differences = torch.zeros_like(self.inputs)
        differences[:, :, top : top + down * size, left : left + right * size] = grid
        points = self._of_full_length(self.inputs, differences)
        # Once more, since the differences may be much longer than eps, and so the error of rounding.
        return project(points, self.inputs, eps=self.eps, norm=self.norm)

    def propose(self, at: Tensor, query: Tensor, points: Tensor) -> Tensor:
        inputs = self.inputs.index_select(0, at)
        differences = points.index_select(0, at).sub_(inputs)
        power = NORMS[self.norm]
        room = (self.eps**power - lengths(differences, self.norm) ** power).clamp(min=0)
        window, other = self._window(query, 0), self._window(query, 1)
        old, mass = self._take(differences, window)
        more = self._take(differences, other)[1]  # without what is in both squares
        new = self.signs[query, at, :, None, None] * self._bump(query, window)
        new += old / (mass ** (1 / power) + TINY)
        length = (room / inputs.shape[1] + mass + more) ** (1 / power)
        if self.norm == "l1":  # too much for one channel, but the projection takes it away
            length *= inputs.shape[1]
        new *= length / (self._mass(new) ** (1 / power) + TINY)
        window.write(differences, new)
        return self._of_full_length(inputs, differences)

    def _take(self, differences: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Make a square zero; what was there, and its mass."""
        taken = window.read(differences) * window.inside
        window.write(differences, 0.0)
        return taken, self._mass(taken)

    def _mass(self, values: Tensor) -> Tensor:
        """The length of each channel to the norm's power, (rows, C, 1, 1); masses of parts add up."""
        return values.abs().pow(NORMS[self.norm]).sum((2, 3), keepdim=True)

    def _bump(self, query: Tensor, window: Window) -> Tensor:
        """The bump of each query, (rows, 1, side, side)."""
        kind, turned = self.kind[query, None, None, None], self.turned[query, None, None, None]
        down, right = window.place[:, None].unbind(2)
        return self.bumps[kind, turned, down[..., None], right[..., None, :]]

    def _of_full_length(self, inputs: Tensor, differences: Tensor) -> Tensor:
        if self.norm == "l1":
            return project(inputs + differences, inputs, eps=self.eps, norm="l1")
        scale = self.eps / (lengths(differences, "l2") + TINY)
        return differences.mul_(scale).add_(inputs).clamp_(0, 1)


PROPOSALS: dict[str, type[Proposals]] = {"linf": Squares, "l2": Bumps, "l1": Bumps}
