"""Numbers as people read them in a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dent.evaluation.units import Cell, eps_text

if TYPE_CHECKING:
    from dent.evaluation.paired import Paired
    from dent.evaluation.results import Cost, Score

NOTHING = "-"  # where there is no number


def ball_text(cell: Cell) -> str:
    return f"{cell.norm} {eps_text(cell.eps)}"


def percent_text(score: Score | None, usual: int | None = None, interval: bool = False) -> str:
    """An accuracy in %, with its interval if asked, and with its n where that is not the usual one."""
    if score is None or not score.n:
        return NOTHING
    own = [interval_text(score)] if interval else []
    own += [f"n = {score.n:,}"] if usual is not None and score.n != usual else []
    return f"{score.percent:.1f}" + (f" ({', '.join(own)})" if own else "")


def interval_text(score: Score) -> str:
    """Where the share may lie, with the digits that n allows.

    >>> from dent.evaluation.results import Score
    >>> interval_text(Score(41, 100)), interval_text(Score(4100, 10_000)), interval_text(Score(0, 0))
    ('32 to 51', '40.0 to 42.0', '-')
    """
    if not score.n:
        return NOTHING
    digits = 1 if score.high - score.low < 5 else 0
    return f"{score.low:.{digits}f} to {score.high:.{digits}f}"


def points_text(value: float | None, *, sign: str = "") -> str:
    """Percentage points; what rounds to nothing is neither more nor less.

    >>> points_text(2.34, sign="+"), points_text(-2.34), points_text(-0.01), points_text(None)
    ('+2.3', '-2.3', '0.0', '-')
    """
    if value is None or math.isnan(value):
        return NOTHING
    return "0.0" if abs(value) < 0.05 else f"{value:{sign}.1f}"


def versus_text(found: Paired | None) -> str:
    """A difference, and whether it may be chance.

    >>> from dent.evaluation.paired import Paired
    >>> versus_text(Paired(n=100, only_first=2, only_second=12, both=40))
    '+10.0 (p = 0.01)'
    """
    if found is None or not found.n:
        return NOTHING
    difference = points_text(found.difference, sign="+")
    if found.p is None:
        return difference
    sign = "" if found.p < 0.001 else "= "
    return f"{difference} (p {sign}{p_text(found.p)})"


def p_text(p: float | None) -> str:
    """The digits of p that matter.

    >>> p_text(0.4321), p_text(0.0021), p_text(1e-9)
    ('0.43', '0.002', '< 0.001')
    """
    if p is None:
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.01 else f"{p:.2f}"


def cost_text(cost: Cost | None) -> str:
    """Operations, in multiples of the static model's.

    >>> from dent.evaluation.results import Cost
    >>> cost_text(Cost(13.02, 1.0)), cost_text(Cost(2.1, 1.0)), cost_text(Cost(1.0, 1.0))
    ('13x', '2.1x', '1x')
    """
    times = cost.times_flops if cost else None
    if times is None:
        return NOTHING
    return f"{times:.0f}x" if times >= 9.95 else f"{times:.1f}".removesuffix(".0") + "x"


def value_text(value: Any) -> str:
    """What was asked for, as a person would write it.

    >>> value_text(["static", "dent+"]), value_text(None), value_text({"steps": 3})
    ('static, dent+', 'not given', 'steps=3')
    """
    if isinstance(value, dict):
        return ", ".join(f"{key}={value_text(item)}" for key, item in value.items()) or "not given"
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value)) or "not given"
    return "not given" if value is None else str(value)
