"""Settings of a server, which are also the flags of `dent serve`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from dent.data.cifar import CIFAR10, CIFAR100
from dent.declared import Declared
from dent.defense.own import name_defense

TIMES = {"ms": 1e-3, "s": 1.0, "min": 60.0, "": 1.0}
SIZES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "": 1}
CLASSES = {"cifar10": CIFAR10.classes, "cifar100": CIFAR100.classes, "numbers": ()}


def read_name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected a name, got {value!r}")
    return value


def read_seconds(value: Any) -> float:
    """Return the seconds that "10ms", "30s", "2min" or a number stand for."""
    seconds = _scale(value, TIMES)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"expected a time such as 10ms, 30s or 2min, got {value!r}")
    return round(seconds, 9)


def read_bytes(value: Any) -> int:
    """Return the bytes that "500kB", "10MB", "1GiB" or a number stand for."""
    size = round(_scale(value, SIZES), 9)
    if not (1 <= size < math.inf and size == int(size)):
        raise ValueError(f"expected a size such as 500kB or 10MB, got {value!r}")
    return int(size)


def _scale(value: Any, units: Mapping[str, float]) -> float:
    """Return a number in its unit, or NaN if it is none; a number alone is in seconds or bytes."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", str(value).lower())
    return float(match[1]) * units.get(match[2], math.nan) if match else math.nan


def read_size(value: Any) -> tuple[int, int]:
    """Return the height and width that "32x32" or two integers stand for."""
    parts = re.split("[x,]", value) if isinstance(value, str) else value
    try:
        height, width = (int(part) if isinstance(part, str) else part for part in parts)
        if type(height) is type(width) is int and min(height, width) >= 1:
            return height, width
    except (TypeError, ValueError):
        pass
    raise ValueError(f"expected height x width, as 32x32, got {value!r}")


def read_classes(value: Any) -> tuple[str, ...]:
    """Return the names of a data set, those of a text such as "a,b,c", or those in a file."""
    if isinstance(value, str):
        if value in CLASSES:
            return CLASSES[value]
        if "," in value:
            value = [name.strip() for name in value.split(",")]
        elif Path(value).is_file():
            lines = Path(value).read_text(encoding="utf-8").split("\n")
            value = [line.strip() for line in lines if line.strip()]
        else:
            raise ValueError(
                f"expected one of {', '.join(CLASSES)}, names as a,b,c or a file of names, got {value!r}"
            )
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"expected names, got {value!r}")
    return tuple(value)


Name = Annotated[str, BeforeValidator(read_name)]
Seconds = Annotated[float, BeforeValidator(read_seconds)]
Bytes = Annotated[int, BeforeValidator(read_bytes)]


class Serving(Declared):
    """All that decides what a server answers, to whom, and how much it accepts.

    >>> Serving(port=0, max_wait="soon")
    Traceback (most recent call last):
    ...
    dent.declared.SettingsError: 2 wrong settings of the server:
      port: expected an integer >= 1 and <= 65535, got 0
      max_wait: expected a time such as 10ms, 30s or 2min, got 'soon'
    >>> serving = Serving(max_wait="5ms", max_body="1MB", size="64x48", classes="cat,dog")
    >>> serving.max_wait, serving.max_body, serving.size, serving.classes
    (0.005, 1000000, (64, 48), ('cat', 'dog'))
    """

    title = "server"

    model: Name = Field(
        "resnet20-at", description="Model, see `dent list models` (default: resnet20-at)"
    )
    defense: Annotated[str, BeforeValidator(name_defense)] = Field(
        "dent+solo",  # independent, so that clients can share batches
        description="Defense, such as dent+, hedge:steps=5 or package.module:function; static is none"
        " (default: dent+solo)",
    )
    device: Name = Field("cpu", description="Device: cpu, cuda, cuda:1 or mps (default: cpu)")
    host: Name = Field(
        "127.0.0.1",
        description="Address to listen on; 0.0.0.0 accepts other machines (default: 127.0.0.1)",
    )
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on (default: 8000)")
    replicas: int = Field(1, ge=1, description="Number of copies of the model (default: 1)")
    max_replicas: int | None = Field(
        None, ge=1, description="Largest number of copies under high load (default: as --replicas)"
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="Number of CPU threads per copy (default: the cores, divided by the copies)",
    )
    batch_size: int = Field(64, ge=1, description="Largest number of images in a batch (default: 64)")
    max_wait: Seconds = Field(
        0.01, description="Longest time that a batch waits for more images (default: 10ms)"
    )
    queue: int = Field(
        256, ge=1, description="Number of requests that may wait; others get status 429 (default: 256)"
    )
    deadline: Seconds = Field(
        30.0, gt=0, description="Longest time for a request; then it gets status 504 (default: 30s)"
    )
    max_body: Bytes = Field(10**7, description="Largest body of a request (default: 10MB)")
    max_images: int = Field(64, ge=1, description="Largest number of images in a request (default: 64)")
    max_pixels: int = Field(
        2**24, ge=1, description="Largest number of pixels in an image file (default: 16777216)"
    )
    size: Annotated[tuple[int, int], BeforeValidator(read_size)] = Field(
        (32, 32), description="Height and width of the model's images (default: 32x32)"
    )
    resize: bool = Field(
        False, description="Resize images of another size (default: refuse them with status 422)"
    )
    classes: Annotated[tuple[str, ...], BeforeValidator(read_classes)] = Field(
        CIFAR10.classes,
        description="Names of the classes: cifar10, cifar100, numbers, a list such as a,b,c, or a file"
        " with one name per line (default: cifar10)",
    )
    shared_batches: bool = Field(
        False,
        description="Let clients share batches even if the defense is not independent (default: no)."
        " RISK: any client can then change the answers of the others (poisoning)",
    )
    shed: int = Field(
        0,
        ge=0,
        description="Number of waiting requests at which answers get fewer updates (default: 0, never)",
    )

    @field_validator("max_replicas")
    @classmethod
    def _check_max_replicas(cls, most: int | None, info: ValidationInfo) -> int | None:
        if most is not None and most < (least := info.data.get("replicas", 1)):
            raise ValueError(f"expected at least the replicas, {least}, got {most}")
        return most

    @field_validator("shed")
    @classmethod
    def _check_shed(cls, shed: int, info: ValidationInfo) -> int:
        if shed > (queue := info.data.get("queue", shed)):
            raise ValueError(f"expected at most the queue, {queue}, got {shed}")
        return shed

    @property
    def most_replicas(self) -> int:
        """Return the largest number of replicas that may run at once."""
        return self.max_replicas or self.replicas

    @property
    def max_requests(self) -> int:
        """Return how many requests are accepted at once: the queue, and a full batch per replica."""
        return self.queue + self.most_replicas * self.batch_size

    def choose_steps(self, own: int, waiting: int) -> int:
        """Return how many of the defense's own updates an answer gets while so many requests wait.

        All of them, unless `shed` is set. From `shed` waiting requests on, the number falls with the
        room that is left in the queue, but never to zero: a defense that a crowd can switch off is none.

        >>> serving = Serving(shed=64, queue=256)
        >>> [serving.choose_steps(6, waiting) for waiting in (0, 63, 64, 128, 200, 256)]
        [6, 6, 5, 3, 1, 1]
        """
        if not self.shed or waiting < self.shed:
            return own
        room = max(self.queue - waiting, 0) / (self.queue - self.shed + 1)
        return min(own, max(1, math.floor(own * room)))
