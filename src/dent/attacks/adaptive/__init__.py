"""Attacks for defenses that adapt.

They need `adapt` and `predict` of a defense, as in `DynamicDefense`; any defense that has both will do.
"""

from __future__ import annotations

from dent.attacks.adaptive.balanced import assign_evenly, balanced
from dent.attacks.adaptive.chained import chained
from dent.attacks.adaptive.gmsa import fpa, gmsa, gmsa_avg, gmsa_min
from dent.attacks.adaptive.mixing import draw_companions, draw_mask, mixing, one_among
from dent.attacks.adaptive.order import sort_by_label, sorted_batches
from dent.attacks.adaptive.poisoning import poisoning
from dent.attacks.adaptive.submission import PartResult
from dent.attacks.adaptive.trajectory import Trajectory, trajectory
from dent.attacks.adaptive.transfer import (
    OFFLINE,
    denying_most_updates,
    denying_updates,
    high_confidence,
    offline,
)
from dent.attacks.adaptive.views import (
    Averaged,
    Direct,
    DynamicDefense,
    Lazy,
    Short,
    Unrolled,
    averaged,
    lazy,
    short,
    unrolled,
)

__all__ = [
    "OFFLINE",
    "Averaged",
    "Direct",
    "DynamicDefense",
    "Lazy",
    "PartResult",
    "Short",
    "Trajectory",
    "Unrolled",
    "assign_evenly",
    "averaged",
    "balanced",
    "chained",
    "denying_most_updates",
    "denying_updates",
    "draw_companions",
    "draw_mask",
    "fpa",
    "gmsa",
    "gmsa_avg",
    "gmsa_min",
    "high_confidence",
    "lazy",
    "mixing",
    "offline",
    "one_among",
    "poisoning",
    "short",
    "sort_by_label",
    "sorted_batches",
    "trajectory",
    "unrolled",
]
