"""Attacks made for defenses that adapt: each says which view of the defense, or of the batch, it takes.

They know of a defense what `DynamicDefense` says, `adapt` and `predict`; any that has these will do.
"""

from __future__ import annotations

from dent.attacks.adaptive.averaged import Averaged, averaged
from dent.attacks.adaptive.climb import Itself
from dent.attacks.adaptive.confidence import high_confidence
from dent.attacks.adaptive.denying import OFFLINE, denying_updates, offline
from dent.attacks.adaptive.gmsa import fpa, gmsa, gmsa_avg, gmsa_min
from dent.attacks.adaptive.lazy import Lazy, lazy
from dent.attacks.adaptive.mixing import draw_companions, draw_mask, mixing, one_among
from dent.attacks.adaptive.order import sort_by_label, sorted_batches
from dent.attacks.adaptive.poisoning import poisoning
from dent.attacks.adaptive.protocol import DynamicDefense
from dent.attacks.adaptive.short import Short, short
from dent.attacks.adaptive.submission import PartResult
from dent.attacks.adaptive.unrolled import Unrolled, unrolled

__all__ = [
    "OFFLINE",
    "Averaged",
    "DynamicDefense",
    "Itself",
    "Lazy",
    "PartResult",
    "Short",
    "Unrolled",
    "averaged",
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
    "unrolled",
]
