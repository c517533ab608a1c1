"""Attacks: one function, one file each. Any callable from inputs to logits can be attacked."""

from __future__ import annotations

from dent.attacks.apgd import apgd, apgd_targeted
from dent.attacks.pgd import pgd
from dent.attacks.result import AttackResult

__all__ = ["AttackResult", "apgd", "apgd_targeted", "pgd"]
