"""Attacks: one function, one file each. Any callable from inputs to logits can be attacked.

`autoattack` is a suite of them. What is made against defenses that adapt is in `dent.attacks.adaptive`.
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
