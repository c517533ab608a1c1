"""What a server takes, and how it says that it does not take something."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol


class Refused(Exception):  # noqa: N818 - the answer to a request, not a fault of the program
    """A request that is not answered: a status of 4xx, and the reason in a sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason

    def __str__(self) -> str:
        return self.reason

    def to_json(self) -> dict[str, str]:
        """The body of the response, as FastAPI writes its own refusals."""
        return {"detail": self.reason}


class Limits(Protocol):
    """What is taken; `Serving` has these fields and says what they are."""

    @property
    def size(self) -> tuple[int, int]: ...
    @property
    def resize(self) -> bool: ...
    @property
    def max_body(self) -> int: ...
    @property
    def max_images(self) -> int: ...
    @property
    def max_pixels(self) -> int: ...


def check_shape(shape: tuple[int, ...], limits: Limits) -> None:
    """Refuse what is not (3, H, W) or (N, 3, H, W), too large, or of another size than the model's."""
    wanted = "expected an array (3, H, W) or (N, 3, H, W)"
    if len(shape) not in (3, 4):
        raise Refused(422, f"{wanted}, got {len(shape)} dimensions")
    if any(side < 1 for side in shape):
        raise Refused(422, f"{wanted} that is not empty, got ({_written(shape, ', ')})")
    channels, *sides = shape[-3:]
    if channels != 3:
        last = "; the channels come first" if shape[-1] == 3 else ""
        raise Refused(422, f"{wanted}, got ({_written(shape, ', ')}){last}")
    check_count(shape[0] if len(shape) == 4 else 1, limits)
    got = _written(sides, " x ")
    if math.prod(sides) > limits.max_pixels:
        raise Refused(413, f"expected at most {limits.max_pixels} pixels in an image, got {got}")
    if tuple(sides) != tuple(limits.size) and not limits.resize:
        size = _written(limits.size, " x ")
        raise Refused(422, f"expected height x width of {size}, got {got}; the server does not resize")


def check_count(count: int, limits: Limits) -> None:
    """Refuse too many images."""
    if count > limits.max_images:
        got = _written((count,))
        raise Refused(422, f"expected at most {limits.max_images} images in a request, got {got}")


def check_values(low: float, high: float) -> None:
    """Refuse what is not in [0, 1], given the least and the largest value, or NaN for both."""
    if low != low or high != high:  # also where an integer is too large for math.isnan
        raise Refused(422, "expected numbers in [0, 1], got NaN")
    if not (low >= 0 and high <= 1):
        raise Refused(422, "expected numbers in [0, 1], got others; divide bytes by 255")


def _written(sides: Iterable[int], between: str = "") -> str:
    """Numbers for a message; one that has hundreds of digits is not repeated."""
    return between.join(str(side) if abs(side) < 10**12 else "a huge number" for side in sides)
