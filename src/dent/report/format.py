"""Format single numbers and settings for people; every table, page and line uses these functions."""

from __future__ import annotations

import math
from typing import Any

from dent.evaluation.spec import format_eps

NOTHING = "-"  # stands where there is no number
NOT_MEASURED = "not measured"


def capitalize(text: str) -> str:
    """Return the text with a large first letter.

    >>> capitalize("mean of the logits over Linf")
    'Mean of the logits over Linf'
    """
    return f"{text[:1].upper()}{text[1:]}"


def format_ball(norm: str, eps: float) -> str:
    """Return the norm and the radius.

    >>> format_ball("linf", 8 / 255)
    'linf 8/255'
    """
    return f"{norm} {format_eps(eps)}"


def format_number(value: float | None) -> str:
    """Return a number with one digit after the point, or with three if it is small.

    >>> format_number(63.28), format_number(0.0312), format_number(0.0), format_number(None)
    ('63.3', '0.031', '0.0', '-')
    """
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:.{1 if abs(value) >= 1 or value == 0 else 3}f}"


def format_percent(value: float | None) -> str:
    """Return an accuracy in percent, with one digit after the point.

    >>> format_percent(63.28), format_percent(0.04), format_percent(None)
    ('63.3', '0.0', '-')
    """
    return NOTHING if value is None or math.isnan(value) else f"{value:.1f}"


def format_points(value: float | None, *, sign: str = "") -> str:
    """Return percentage points. A value that rounds to zero has no sign.

    >>> format_points(2.34, sign="+"), format_points(-2.34), format_points(-0.01), format_points(None)
    ('+2.3', '-2.3', '0.0', '-')
    """
    if value is None or math.isnan(value):
        return NOTHING
    return "0.0" if abs(value) < 0.05 else f"{value:{sign}.1f}"


def format_interval(low: float, high: float, *, sign: str = "", short: bool = False) -> str:
    """Return an interval, with a digit after the point if it is narrow or signed.

    short: use a dash, for tables with many columns. An interval of differences keeps its "to".

    >>> format_interval(31.9, 50.8), format_interval(40.04, 41.97), format_interval(-2, 3.1, sign="+")
    ('32 to 51', '40.0 to 42.0', '-2.0 to +3.1')
    >>> format_interval(31.9, 50.8, short=True)
    '32–51'
    """
    digits = 1 if sign or high - low < 5 else 0
    dash = "\N{EN DASH}" if short and low >= 0 and not sign else " to "
    return f"{low:{sign}.{digits}f}{dash}{high:{sign}.{digits}f}"


def format_p(p: float, *, named: bool = False) -> str:
    """Return the digits of p that matter. named: with "p" and the sign of relation.

    >>> format_p(0.4321), format_p(0.0021), format_p(1e-9)
    ('0.43', '0.002', '< 0.001')
    >>> format_p(0.4321, named=True), format_p(1e-9, named=True)
    ('p = 0.43', 'p < 0.001')
    """
    text = "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.01 else f"{p:.2f}"
    return f"p {'' if p < 0.001 else '= '}{text}" if named else text


def format_cost(times: float | None) -> str:
    """Return a multiple of the static model's cost.

    >>> format_cost(13.02), format_cost(2.1), format_cost(1.0), format_cost(None)
    ('13x', '2.1x', '1x', '-')
    """
    if times is None:
        return NOTHING
    return f"{times:.0f}x" if times >= 9.95 else f"{times:.1f}".removesuffix(".0") + "x"


def format_count(n: int) -> str:
    """Return a count with commas.

    >>> format_count(10000)
    '10,000'
    """
    return f"{n:,}"


def format_n(n: int, batches: int | None) -> str:
    """Return the number of points, and of the batches that hold them.

    >>> format_n(1280, 10), format_n(8, 1), format_n(8, None)
    ('n = 1,280, 10 batches', 'n = 8, 1 batch', 'n = 8')
    """
    if batches is None:
        return f"n = {format_count(n)}"
    return f"n = {format_count(n)}, {format_count(batches)} batch{'' if batches == 1 else 'es'}"


def format_duration(seconds: float) -> str:
    """Return a time in the unit that people would use.

    >>> format_duration(40), format_duration(600), format_duration(20000), format_duration(1e9)
    ('40 seconds', '10 minutes', '5.6 hours', '11,574 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds > 72 * 3600:
        return f"{seconds / 86400:,.0f} days"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def format_setting(value: Any, *, absent: str = "not given") -> str:
    """Return a setting as a person would write it.

    >>> format_setting(["static", "dent+"]), format_setting(None), format_setting({"lr": 0.001})
    ('static, dent+', 'not given', 'lr=0.001')
    >>> format_setting(True), format_setting(False)
    ('yes', 'no')
    """
    if isinstance(value, dict):
        items = [f"{key}={format_setting(item, absent=absent)}" for key, item in value.items()]
        return ", ".join(items) or absent
    if isinstance(value, list | tuple):
        return ", ".join(format_setting(item, absent=absent) for item in value) or absent
    if value is None:
        return absent
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
