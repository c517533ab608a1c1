"""What a run is made of: cells (a model, a defense, a ball), and units (a cell, a batch, an attack)."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

NATURAL = "natural"  # not an attack, but a unit like the others: the batch as it is
PROTOCOL = "autoattack"  # the reference implementation on the whole cell, as the paper used it
ABOUT = "about"  # what is known of a cell besides its points: cost and findings
BATTLE = "battle"  # an attack on few images of a cell, step by step, for people to look at
SPECIAL = (NATURAL, PROTOCOL, ABOUT, BATTLE)  # units that are no attacks of a suite
WHOLE = -1  # the batch of units that take all points at once


def eps_text(eps: float) -> str:
    """A radius as people write it.

    >>> eps_text(8 / 255), eps_text(1.5 / 255), eps_text(0.5)
    ('8/255', '1.5/255', '0.5')
    """
    over = eps * 255
    plain, is_short = f"{eps:g}", abs(eps * 100 - round(eps * 100)) < 1e-9
    return plain if is_short or abs(over * 4 - round(over * 4)) > 1e-9 else f"{over:g}/255"


@dataclass(frozen=True)
class Cell:
    """A model with a defense, and the ball in which its inputs may be perturbed."""

    model: str
    defense: str  # a preset with what was overridden, "dent:steps=10"; "static" is the model alone
    eps: float
    norm: str

    @property
    def static(self) -> bool:
        return self.defense == "static"

    def __str__(self) -> str:
        return f"{self.model}, {self.defense}, {self.norm} {eps_text(self.eps)}"

    @cached_property
    def slug(self) -> str:
        """A name for files: readable, and of this cell alone."""
        readable = re.sub(r"[^A-Za-z0-9.+=-]+", "_", f"{self.model}_{self.defense}_{self.norm}")[:80]
        exact = repr((self.model, self.defense, float(self.eps), self.norm))
        return f"{readable}_{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Unit:
    """A piece of work that is done or not done: one attack on one batch of a cell."""

    cell: Cell
    batch: int
    attack: str

    @cached_property
    def file(self) -> str:
        """Where its outcome is kept, in the run's folder of units."""
        attack = re.sub(r"[^A-Za-z0-9.+=-]+", "_", self.attack)
        batch = "all" if self.batch == WHOLE else f"{self.batch:05d}"
        return f"{self.cell.slug}/{batch}_{attack}.json"

    def seed(self, seed: int) -> int:
        """All that is random in this unit comes from here, whoever does it and when.

        >>> unit = Unit(Cell("m", "static", 0.1, "linf"), 0, "apgd-ce")
        >>> unit.seed(0) == unit.seed(0) != unit.seed(1)
        True
        """
        digest = hashlib.sha256(f"{seed} {self.file}".encode()).digest()
        return int.from_bytes(digest[:4], "big")  # what every generator takes as a seed

    def __str__(self) -> str:
        batch = "all points" if self.batch == WHOLE else f"batch {self.batch}"
        return f"{self.cell}, {self.attack}, {batch}"


@dataclass(frozen=True)
class Outcome:
    """What a unit found. Points are counted as in the data set, so that runs can be paired.

    Where inputs do not depend on one another, an attack is given only what the ones before it left
    standing: `given` is False for the rest, which are broken already and not `correct`.
    """

    points: tuple[int, ...] = ()  # the points that count
    correct: tuple[bool, ...] = ()  # which of them the model got right, in the batch as submitted
    given: tuple[bool, ...] = ()  # which of them were attacked
    queries: int = 0  # forwards of the model, in inputs
    gradients: int = 0  # backwards
    largest: float = 0.0  # perturbation, in the cell's norm
    figures: dict[str, float] = field(default_factory=dict)  # of `ABOUT`: cost
    findings: tuple[dict[str, Any], ...] = ()  # of `ABOUT`: name, message, figures
    battle: dict[str, Any] = field(default_factory=dict)  # of `BATTLE`, as `record_battle` has it

    def to_json(self) -> dict[str, Any]:
        """With a digit for each point: small, and readable.

        >>> Outcome((7, 9), (True, False), (True, True)).to_json()["correct"]
        '10'
        """
        bits = {key: "".join("01"[one] for one in getattr(self, key)) for key in ("correct", "given")}
        return asdict(self) | {"points": list(self.points), "findings": list(self.findings)} | bits

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Outcome:
        """What `to_json` wrote; anything else is a ValueError, KeyError or TypeError.

        >>> outcome = Outcome((7, 9), (True, False), (True, True), queries=3)
        >>> Outcome.from_json(outcome.to_json()) == outcome
        True
        """
        bits = {}
        for key in ("correct", "given"):
            if not isinstance(content[key], str) or set(content[key]) - set("01"):
                raise ValueError(f"expected {key} as digits 0 and 1, got {content[key]!r}")
            bits[key] = tuple(one == "1" for one in content[key])
        points = tuple(int(one) for one in content["points"])
        if not len(points) == len(bits["correct"]) == len(bits["given"]):
            raise ValueError(f"expected a digit for each of {len(points)} points")
        findings = tuple(content["findings"])
        return cls(**(content | bits | {"points": points, "findings": findings}))


@dataclass(frozen=True)
class Done:
    """A unit with its outcome, or with the error that it ended in; and what varies from run to run."""

    unit: Unit
    outcome: Outcome | None = None
    error: str | None = None
    took: dict[str, float] = field(default_factory=dict)  # seconds; of `ABOUT`, of each forward
