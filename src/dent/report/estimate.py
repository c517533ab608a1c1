"""What a run would do, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dent.evaluation.estimate import Estimate


def estimate_rows(estimates: Sequence[Estimate]) -> list[dict[str, Any]]:
    """A row for each attack on each cell."""
    return [
        {
            "model, defense, ball": str(one.cell),
            "attack": one.attack,
            "units": one.units,
            "forwards": f"{one.forwards:,.0f}",
            "minutes": f"{one.seconds / 60:.1f}",
        }
        for one in estimates
    ]


def total_line(estimates: Sequence[Estimate]) -> str:
    """All of it."""
    units, forwards, seconds = (
        sum(getattr(one, name) for one in estimates) for name in ("units", "forwards", "seconds")
    )
    return (
        f"{units:,} units, at most {forwards:,.0f} forwards of an image through a static model, "
        f"about {duration(seconds)}"
    )


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(40), duration(600), duration(20000), duration(1e9)
    ('40 seconds', '10 minutes', '5.6 hours', '11,574 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds > 72 * 3600:
        return f"{seconds / 86400:,.0f} days"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
