"""The interval of a share, from n trials."""

from __future__ import annotations

import math


def wilson(successes: int, n: int, *, z: float = 1.959963984540054) -> tuple[float, float]:
    """Return the Wilson score interval of a share, by default of 95 %; (0, 1) without trials.

    >>> low, high = wilson(81, 100)
    >>> round(low, 3), round(high, 3)
    (0.722, 0.875)
    """
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)
