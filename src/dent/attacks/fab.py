"""The fast adaptive boundary attack (Croce and Hein, 2020): the nearest point that is misclassified."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dent.attacks.apgd import likeliest
from dent.attacks.calls import Calls, Model
from dent.attacks.checks import check_numbers
from dent.attacks.found import Found, begin
from dent.attacks.hyperplane import Look, Plane, to_hyperplane
from dent.attacks.norms import lengths, like, project, random_in_ball
from dent.attacks.result import AttackResult
from dent.seeds import generator

ALPHA = 0.1  # the largest share of the input in a step
OVERSHOOT = 1.05
BACK = 0.9  # how much of a perturbation is kept after a success


def fab(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    steps: int = 100,
    restarts: int = 1,
    minimize: bool = False,
    joint: bool | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """Cross the nearest boundary of the linearised model, go back towards the input, and again.

    A step takes as many backwards as there are other classes. An input leaves the search at its first
    misclassified point in the ball. Inputs that were not broken end in the ball, on the way to the
    nearest misclassified point beyond it, for transfer. The first run is from the inputs, and others are
    from random points at half of eps.

    For models that depend on the batch, `joint=True` keeps it together. The walk leads out of the ball,
    so it is no submission; what it found is submitted after each run.

    minimize: nobody leaves, and inputs end at the nearest misclassified points that are found. With a
    large `eps`, that is the search for the smallest perturbation.
    The other settings are those of `apgd`.

    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> inputs = torch.full((2, 1, 2, 2), 0.5)
    >>> result = fab(model, inputs, model(inputs).argmax(1), eps=0.9, steps=10, minimize=True)
    >>> bool(result.success.all())
    True
    """
    calls, found, logits = begin(
        model, inputs, labels, eps=eps, norm=norm, steps=steps, restarts=restarts, joint=joint, mask=mask
    )
    rivals = torch.stack(likeliest(logits, found.labels, logits.shape[1] - 1), 1)
    search = _Search(calls, found, inputs, eps=eps, norm=norm, steps=steps, minimize=minimize)
    for restart in range(restarts):
        search.run(rivals, generator(seed, restart) if restart else None)
    return found.result(calls)


def fab_targeted(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    targets: int | None = None,
    steps: int = 100,
    restarts: int = 1,
    minimize: bool = False,
    joint: bool | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """FAB across the boundary to each of the `targets` likeliest other classes in turn.

    Any wrong class is a success. If not given, the targets are nine, or all that there are.
    """
    check_numbers(targets=targets)
    calls, found, logits = begin(
        model, inputs, labels, eps=eps, norm=norm, steps=steps, restarts=restarts, joint=joint, mask=mask
    )
    search = _Search(calls, found, inputs, eps=eps, norm=norm, steps=steps, minimize=minimize)
    for rank, classes in enumerate(likeliest(logits, found.labels, targets)):
        for restart in range(restarts):
            search.run(classes[:, None], generator(seed, restart, rank) if restart else None)
    return found.result(calls)


@dataclass
class _Rows:
    """The inputs of a run that are still searched for."""

    at: Tensor  # the input's index in the batch
    center: Tensor
    points: Tensor
    labels: Tensor
    rivals: Tensor  # (n, k) the classes that a boundary is looked for to

    def keep(self, rows: Tensor) -> _Rows:
        return _Rows(*(getattr(self, part.name)[rows] for part in fields(self)))


class _Search:
    """What the runs of an attack share: the nearest misclassified point that any of them met."""

    def __init__(
        self,
        calls: Calls,
        found: Found,
        inputs: Tensor,
        *,
        eps: float,
        norm: str,
        steps: int,
        minimize: bool,
    ) -> None:
        self.calls, self.found, self.inputs = calls, found, inputs.detach()
        self.eps, self.norm, self.steps = eps, norm, steps
        self.leaves = not minimize and not found.joint
        self.everyone = found.open()
        self.moves = like(found.mask & ~found.broken, inputs)  # what is misclassified need not
        self.nearest = self.inputs.clone()
        self.distances = torch.full_like(found.values, torch.inf).to(inputs)

    def run(self, rivals: Tensor, random: torch.Generator | None) -> None:
        """Walk from the inputs, or from random points about them; submit what is known then."""
        at = self.found.open() if self.leaves else self.everyone
        if not len(at):
            return
        points = self.inputs if random is None else self._around(random)
        points = torch.where(self.moves, points, self.inputs)
        rows = _Rows(at, self.inputs[at], points[at], self.found.labels[at], rivals[at])
        rows = self._walk(rows)
        points = points.index_copy(0, rows.at, rows.points)
        self._submit(at, points[at])

    def _around(self, random: torch.Generator) -> Tensor:
        """Random points at half of eps, or of the least distance known."""
        noise = random_in_ball(self.inputs.shape, self.norm, random).to(self.inputs)
        radius = like(self.distances.clamp(max=self.eps) / 2, noise)
        return (self.inputs + radius * noise / lengths(noise, self.norm).clamp(min=1e-12)).clamp(0, 1)

    def _walk(self, rows: _Rows) -> _Rows:
        """All steps; who is left at the end, and where.

        What tells whether a point is misclassified leads to its next gradient too, unless it goes back.
        Where inputs do not depend on one another, that saves a forward while few of them go back (to
        have two backwards for these costs more than it saves).
        """
        look, few, back = None, not self.found.joint, torch.ones_like(rows.at, dtype=torch.bool)
        for _ in range(self.steps):
            rows.points = _crossed(rows, self._plane(rows, look, back), self.norm)
            if self.found.joint:
                rows.points = torch.where(self.moves, rows.points, self.inputs)
            look = Look.at(rows.points, self.calls) if few else None
            logits = look.logits.detach() if look else self.calls.logits(rows.points)
            back = logits.argmax(1) != rows.labels
            stays = self._note(rows.at, rows.center, rows.points, back)
            keep = torch.where(back, BACK, 1.0).to(rows.points)
            rows.points = torch.lerp(rows.center, rows.points, like(keep, rows.points))
            if not stays.all():
                rows, back, look = rows.keep(stays), back[stays], look and look.keep(stays)
            if not len(rows.at):
                break
            backwards = rows.rivals.shape[1]  # each about as long as two forwards
            few = not self.found.joint and int(back.sum()) * (1 + 2 * backwards) < len(back)
            look = look if few else None
        return rows

    def _plane(self, rows: _Rows, look: Look | None, back: Tensor) -> Plane:
        """The nearest boundary of each, from the `look` at those that did not go back since."""
        if look is None:
            return Look.at(rows.points, self.calls).plane(rows.labels, rows.rivals, self.norm)
        plane = look.plane(rows.labels, rows.rivals, self.norm)
        if back.any():
            plane.gaps[back], plane.normals[back] = self._plane(rows.keep(back), None, back)
        return plane

    def _note(self, at: Tensor, center: Tensor, points: Tensor, wrong: Tensor) -> Tensor:
        """Keep misclassified points that are nearer than any before; returns who stays in the search."""
        distances = lengths(points - center, self.norm).flatten()
        nearer = wrong & (distances < self.distances[at])
        self.nearest[at[nearer]] = points[nearer]
        self.distances[at[nearer]] = distances[nearer]
        return ~(wrong & (distances <= self.eps)) if self.leaves else torch.ones_like(wrong)

    def _submit(self, at: Tensor, ends: Tensor) -> None:
        """Ask for what is known, as one batch.

        In a joint batch, what has only just crossed a boundary hardly stays across it once the others
        are elsewhere. So all that is known is submitted at full length too.
        """
        least = torch.finfo(torch.float32).min
        for full in (False, True) if self.found.joint else (False,):
            points = self._in_ball(at, ends, full=full)
            wrong = self.calls.logits(points).argmax(1) != self.found.labels[at]
            self._note(at, self.inputs[at], points, wrong)
            distances = self.distances[at].clamp(min=self.eps if full else 0)
            self.found.keep(at, points, (-distances).float().clamp(min=least), wrong)

    def _in_ball(self, at: Tensor, ends: Tensor, *, full: bool) -> Tensor:
        """The nearest points known, those beyond the ball (or all: `full`) drawn to its surface.

        In place of a point that was never misclassified goes the one nearest to where its walk ended.
        """
        center, nearest, distances = self.inputs[at], self.nearest[at], self.distances[at]
        share = self.eps / distances.clamp(min=1e-12)
        drawn = torch.lerp(center, nearest, like(share, center))
        drawn = torch.where(like(distances.isinf(), center), ends, drawn)
        drawn = project(drawn, center, eps=self.eps, norm=self.norm)
        return torch.where(like((distances <= self.eps) & (not full), center), nearest, drawn)


def _crossed(rows: _Rows, plane: Plane, norm: str) -> Tensor:
    """A step across the boundary, drawn towards the input's own nearest point of it."""
    both = torch.stack([rows.points, rows.center])
    beyond = plane.gaps + ((rows.center - rows.points) * plane.normals).flatten(1).sum(1)
    moves = to_hyperplane(
        both.flatten(2), plane.normals.flatten(1), torch.stack([plane.gaps, beyond]), norm
    ).view_as(both)
    here, there = (lengths(move, norm).clamp(min=1e-8) for move in moves)
    point, center = both.add_(moves, alpha=OVERSHOOT)
    return torch.lerp(point, center, (here / (here + there)).clamp(max=ALPHA)).clamp_(0, 1)
