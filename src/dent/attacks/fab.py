"""The fast adaptive boundary attack (Croce and Hein, 2020): the nearest misclassified point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from dent.attacks.checks import Eps, Labels, check_numbers, read_arguments
from dent.attacks.norms import DUALS, lengths, project, sample_in_ball, unsqueeze_like
from dent.attacks.search import AttackedModel, AttackResult, BestPoints, Model, begin, compute_gradient
from dent.attacks.targets import rank_targets, select_targets
from dent.seeds import make_generator

ALPHA = 0.1  # the largest weight of the input in a step
OVERSHOOT = 1.05
BACK = 0.9  # the share of a perturbation that remains after a success
NEWTON_STEPS = 25  # at most; three or four are usual
LARGEST = 256  # the number of values that L1 tries first


def fab(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    steps: int = 100,
    restarts: int = 1,
    minimize: bool = False,
    joint: bool | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Cross the nearest boundary of the linearized model, move back towards the input, and repeat.

    A step needs one backward pass for each other class. An input leaves the search at its first
    misclassified point in the ball. Inputs that were not broken end in the ball, on the way to the
    nearest misclassified point outside, for transfer. The first run starts from the inputs, the others
    from random points at a distance of eps / 2.

    joint: True for a model that depends on the batch; as in `apgd`. The walk leaves the ball, so its
    steps are not submissions: the points found are submitted after each run.
    minimize: True to search for the smallest perturbation (with a large `eps`). Then no input leaves,
    and each ends at the nearest misclassified point that was found.
    The other settings are those of `apgd`.

    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> inputs = torch.full((2, 1, 2, 2), 0.5)
    >>> result = fab(model, inputs, model(inputs).argmax(1), eps=0.9, steps=10, minimize=True)
    >>> bool(result.success.all())
    True
    """
    labels, eps = read_arguments(inputs, labels, eps)
    attacked, best, logits = begin(
        model, inputs, labels, eps=eps, norm=norm, steps=steps, restarts=restarts, joint=joint, mask=mask
    )
    rivals = torch.stack(select_targets(logits, best.labels, logits.shape[1] - 1), 1)
    search = _Search(attacked, best, inputs, eps=eps, norm=norm, steps=steps, minimize=minimize)
    for restart in range(restarts):
        search.run(rivals, make_generator(seed, restart) if restart else None)
    return best.submit(attacked)


def fab_targeted(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
    norm: str = "linf",
    targets: int | None = None,
    order: str = "logits",
    steps: int = 100,
    restarts: int = 1,
    minimize: bool = False,
    joint: bool | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Run FAB across the boundary to each of the likeliest other classes in turn.

    Any wrong class is a success.

    targets, order: as in `apgd_targeted`.
    The other settings are those of `fab`.
    """
    check_numbers(targets=targets)
    labels, eps = read_arguments(inputs, labels, eps)
    attacked, best, logits = begin(
        model, inputs, labels, eps=eps, norm=norm, steps=steps, restarts=restarts, joint=joint, mask=mask
    )
    search = _Search(attacked, best, inputs, eps=eps, norm=norm, steps=steps, minimize=minimize)
    ranked = rank_targets(attacked, inputs, best.labels, logits, norm=norm, count=targets, order=order)
    for rank, classes in enumerate(ranked):
        for restart in range(restarts):
            search.run(classes[:, None], make_generator(seed, restart, rank) if restart else None)
    return best.submit(attacked)


@dataclass
class _Rows:
    """The inputs of a run that are still searched."""

    at: Tensor  # the input's index in the batch
    center: Tensor
    points: Tensor
    labels: Tensor
    rivals: Tensor  # candidate target classes, (n, k)

    def select(self, rows: Tensor) -> _Rows:
        return _Rows(*(getattr(self, part.name)[rows] for part in fields(self)))


class _Search:
    """The runs of an attack, and the nearest misclassified point that any of them found."""

    def __init__(
        self,
        attacked: AttackedModel,
        best: BestPoints,
        inputs: Tensor,
        *,
        eps: float,
        norm: str,
        steps: int,
        minimize: bool,
    ) -> None:
        self.attacked, self.best, self.inputs = attacked, best, inputs.detach()
        self.eps, self.norm, self.steps = eps, norm, steps
        self.leaves = not minimize and not best.joint
        self.everyone = best.list_open()
        self.moves = unsqueeze_like(best.mask & ~best.broken, inputs)  # others are misclassified already
        self.nearest = self.inputs.clone()
        self.distances = torch.full_like(best.values, torch.inf).to(inputs)

    def run(self, rivals: Tensor, random: torch.Generator | None) -> None:
        """Walk from the inputs, or from random points around them, and submit the points found."""
        at = self.best.list_open() if self.leaves else self.everyone
        if not len(at):
            return
        points = self.inputs if random is None else self._draw_start(random)
        points = torch.where(self.moves, points, self.inputs)
        rows = _Rows(at, self.inputs[at], points[at], self.best.labels[at], rivals[at])
        rows = self._walk(rows)
        points = points.index_copy(0, rows.at, rows.points)
        self._submit(at, points[at])

    def _draw_start(self, random: torch.Generator) -> Tensor:
        """Draw points at half of eps, or at half of the smallest known distance."""
        noise = sample_in_ball(self.inputs.shape, self.norm, random).to(self.inputs)
        radius = unsqueeze_like(self.distances.clamp(max=self.eps) / 2, noise)
        return (self.inputs + radius * noise / lengths(noise, self.norm).clamp(min=1e-12)).clamp(0, 1)

    def _walk(self, rows: _Rows) -> _Rows:
        """Take all steps. Return the rows that are left at the end.

        The forward pass that tells whether a point is misclassified also serves its next gradient,
        unless the point moves back. That saves a forward pass while few points move back; the points
        that do need a second set of backward passes. In a joint batch all points are asked anew.
        """
        linear, few, back = None, not self.best.joint, torch.ones_like(rows.at, dtype=torch.bool)
        for _ in range(self.steps):
            rows.points = _cross(rows, self._find_boundary(rows, linear, back), self.norm)
            if self.best.joint:
                rows.points = torch.where(self.moves, rows.points, self.inputs)
            linear = Linearization.at(rows.points, self.attacked) if few else None
            logits = linear.logits.detach() if linear else self.attacked.predict(rows.points)
            back = logits.argmax(1) != rows.labels
            stays = self._record(rows.at, rows.center, rows.points, back)
            share = torch.where(back, BACK, 1.0).to(rows.points)
            rows.points = torch.lerp(rows.center, rows.points, unsqueeze_like(share, rows.points))
            if not stays.all():
                rows, back, linear = rows.select(stays), back[stays], linear and linear.select(stays)
            if not len(rows.at):
                break
            backwards = rows.rivals.shape[1]  # each takes about as long as two forward passes
            few = not self.best.joint and int(back.sum()) * (1 + 2 * backwards) < len(back)
            linear = linear if few else None
        return rows

    def _find_boundary(self, rows: _Rows, linear: Linearization | None, back: Tensor) -> Hyperplane:
        """Return each row's nearest boundary. `linear` is valid for the rows that did not move back."""
        if linear is None:
            linear = Linearization.at(rows.points, self.attacked)
            return linear.find_boundary(rows.labels, rows.rivals, self.norm)
        plane = linear.find_boundary(rows.labels, rows.rivals, self.norm)
        if back.any():
            plane.gaps[back], plane.normals[back] = self._find_boundary(rows.select(back), None, back)
        return plane

    def _record(self, at: Tensor, center: Tensor, points: Tensor, wrong: Tensor) -> Tensor:
        """Remember misclassified points that are nearer than before. Return which inputs stay."""
        distances = lengths(points - center, self.norm).flatten()
        nearer = wrong & (distances < self.distances[at])
        self.nearest[at[nearer]] = points[nearer]
        self.distances[at[nearer]] = distances[nearer]
        return ~(wrong & (distances <= self.eps)) if self.leaves else torch.ones_like(wrong)

    def _submit(self, at: Tensor, ends: Tensor) -> None:
        """Submit the nearest points as one batch.

        In a joint batch, a point that has just crossed a boundary rarely stays across it once the other
        points move. So a joint batch is also submitted with all points on the surface of the ball.
        """
        least = torch.finfo(torch.float32).min
        for at_surface in (False, True) if self.best.joint else (False,):
            points = self._move_into_ball(at, ends, at_surface=at_surface)
            wrong = self.attacked.predict(points).argmax(1) != self.best.labels[at]
            self._record(at, self.inputs[at], points, wrong)
            distances = self.distances[at].clamp(min=self.eps if at_surface else 0)
            self.best.record(at, points, (-distances).float().clamp(min=least), wrong)

    def _move_into_ball(self, at: Tensor, ends: Tensor, *, at_surface: bool) -> Tensor:
        """Return the nearest points; move those outside the ball, or all (`at_surface`), to its surface.

        Where no point was misclassified, use the projection of the point at which the walk ended.
        """
        center, nearest, distances = self.inputs[at], self.nearest[at], self.distances[at]
        share = self.eps / distances.clamp(min=1e-12)
        moved = torch.lerp(center, nearest, unsqueeze_like(share, center))
        moved = torch.where(unsqueeze_like(distances.isinf(), center), ends, moved)
        moved = project(moved, center, eps=self.eps, norm=self.norm)
        stays = (distances <= self.eps) & (not at_surface)
        return torch.where(unsqueeze_like(stays, center), nearest, moved)


class Hyperplane(NamedTuple):
    """The boundary of the linearized model between two classes, as seen from each point."""

    gaps: Tensor  # the other class's logit minus the label's
    normals: Tensor  # the gradient of the gap


@dataclass
class Linearization:
    """The logits of points, with the graph that leads to their gradients."""

    attacked: AttackedModel
    points: Tensor
    logits: Tensor
    rows: Tensor  # the indices of the points that the logits belong to

    @classmethod
    def at(cls, points: Tensor, attacked: AttackedModel) -> Linearization:
        points = points.detach().requires_grad_()
        with torch.enable_grad():
            logits = attacked.check(attacked.model(points), points)
        return cls(attacked, points, logits, torch.arange(len(points), device=points.device))

    def select(self, rows: Tensor) -> Linearization:
        with torch.enable_grad():
            return Linearization(self.attacked, self.points, self.logits[rows], self.rows[rows])

    def find_boundary(self, labels: Tensor, rivals: Tensor, norm: str) -> Hyperplane:
        """Return the nearest of the boundaries between each label and its rivals."""
        with torch.enable_grad():
            gaps = self.logits.gather(1, rivals) - self.logits.gather(1, labels[:, None])
            return reduce(partial(_choose_nearer, norm), self._list_boundaries(gaps))

    def _list_boundaries(self, gaps: Tensor) -> Iterator[Hyperplane]:
        """Yield one boundary after the other: the gradients of all at once may not fit into memory."""
        mask = self.attacked.mask
        for number, gap in enumerate(gaps.unbind(1), 1):
            total = (gap if mask is None else gap[mask]).sum()
            yield Hyperplane(
                gap.detach().clone(), self.compute_gradient(total, last=number == gaps.shape[1])
            )

    def compute_gradient(self, total: Tensor, *, last: bool) -> Tensor:
        self.attacked.gradients += len(self.points)
        gradient = compute_gradient(total, self.points, keep_graph=not last)
        return gradient if len(self.rows) == len(gradient) else gradient[self.rows]


def _choose_nearer(norm: str, one: Hyperplane, other: Hyperplane) -> Hyperplane:
    distance, further = (
        plane.gaps.abs() / lengths(plane.normals, DUALS[norm]).flatten().clamp(min=1e-12)
        for plane in (other, one)
    )
    nearer = distance < further
    return Hyperplane(
        torch.where(nearer, other.gaps, one.gaps),
        torch.where(unsqueeze_like(nearer, one.normals), other.normals, one.normals),
    )


def _cross(rows: _Rows, plane: Hyperplane, norm: str) -> Tensor:
    """Step across the boundary, biased towards the point of the boundary nearest to the input."""
    both = torch.stack([rows.points, rows.center])
    beyond = plane.gaps + ((rows.center - rows.points) * plane.normals).flatten(1).sum(1)
    moves = find_move(
        both.flatten(2), plane.normals.flatten(1), torch.stack([plane.gaps, beyond]), norm
    ).view_as(both)
    here, there = (lengths(move, norm).clamp(min=1e-8) for move in moves)
    point, center = both.add_(moves, alpha=OVERSHOOT)
    return torch.lerp(point, center, (here / (here + there)).clamp(max=ALPHA)).clamp_(0, 1)


def find_move(points: Tensor, normals: Tensor, excess: Tensor, norm: str) -> Tensor:
    """Return the shortest move of each point, within [0, 1], to the hyperplane `normals . point = b`.

    If the hyperplane cannot be reached within [0, 1], move as far towards it as possible. Values whose
    normal is zero do not move.

    points: (K, N, d), K points for each of the N normals. normals: (N, d).
    excess: (K, N), `normals . point - b`.

    >>> points, normals = torch.tensor([[[0.5, 0.5]]]), torch.tensor([[1.0, -2.0]])
    >>> find_move(points, normals, torch.tensor([[0.3]]), "linf")
    tensor([[[-0.1000,  0.1000]]])
    """
    sizes = normals.abs()
    # Scale by the largest value, so that gradients of any magnitude can be handled.
    scale = sizes.amax(-1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)
    sizes, need = sizes / scale, excess[..., None].abs() / scale
    direction = normals.sign() * -excess[..., None].sign()
    room = torch.addcmul(direction.relu(), direction, points, value=-1)
    if norm == "l1":
        return direction * _fill_largest(sizes, room, need)
    if norm == "linf":
        return direction * _fill_evenly(sizes, room, need)
    limits = room / sizes.clamp(min=torch.finfo(sizes.dtype).tiny)
    return direction * sizes * _fill_evenly(sizes.square(), limits, need)


def _fill_evenly(weights: Tensor, limits: Tensor, need: Tensor) -> Tensor:
    """Return min(level, limits) for the level at which its weighted sum is the need.

    The sum is concave and piecewise linear in the level. So Newton's method approaches from below and
    ends when it reaches the right piece.
    """
    tolerance = 8 * torch.finfo(need.dtype).eps * need
    level = need / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(need.dtype).tiny)
    moves, work = torch.empty_like(limits), torch.empty_like(limits)
    for _ in range(NEWTON_STEPS):
        torch.minimum(limits, level, out=moves)
        missing = need - torch.mul(moves, weights, out=work).sum(-1, keepdim=True)
        short = missing > tolerance
        if not short.any():
            return moves
        slope = torch.gt(limits, level, out=work).mul_(weights).sum(-1, keepdim=True)
        # If the slope is zero, the level becomes infinite: all of the room is used.
        higher = torch.where(short, level + missing / slope, level)
        if torch.equal(higher, level):
            return moves
        level = higher
    return torch.minimum(limits, level, out=moves)


def _fill_largest(weights: Tensor, room: Tensor, need: Tensor) -> Tensor:
    """Use the room of the largest weights first, until the weighted sum is the need."""
    d = room.shape[-1]
    count, is_reachable = min(LARGEST, d), (weights * room).sum(-1, keepdim=True) > need
    while True:
        largest, order = weights.topk(count)
        order = order.expand(*room.shape[:-1], count)
        space = room.gather(-1, order)
        used = (largest * space).cumsum(-1)
        if count == d or not (is_reachable & (used[..., -1:] < need)).any():
            break
        count = min(8 * count, d)
    left = (need - used + largest * space).clamp(min=0)
    moves = torch.minimum(left / largest.clamp(min=torch.finfo(left.dtype).tiny), space)
    return torch.where(is_reachable, torch.zeros_like(room).scatter(-1, order, moves), room)
