"""Attacks on any callable from inputs to logits: one attack, one function, one file.

`autoattack` runs several of them as a suite. Attacks for defenses that adapt are in
`dent.attacks.adaptive`.
"""

from __future__ import annotations

from dent.attacks import adaptive
from dent.attacks.apgd import apgd, apgd_targeted
from dent.attacks.autoattack import SuiteResult, autoattack
from dent.attacks.fab import fab, fab_targeted
from dent.attacks.findings import Finding
from dent.attacks.pgd import pgd
from dent.attacks.search import AttackResult
from dent.attacks.square import square

__all__ = [
    "AttackResult",
    "Finding",
    "SuiteResult",
    "adaptive",
    "apgd",
    "apgd_targeted",
    "autoattack",
    "fab",
    "fab_targeted",
    "pgd",
    "square",
]
