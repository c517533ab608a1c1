"""What a server is asked for: typed settings, which are also the flags of `dent serve`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NewType

from dent.data.cifar import CIFAR10, CIFAR100
from dent.defense.text import format_defense
from dent.fields import refuse, setting
from dent.names import check_known

Seconds = NewType("Seconds", float)  # typed as 10ms, 30s, 2min, or a number
Bytes = NewType("Bytes", int)  # typed as 500kB, 10MB, 1GB, or a number

# dent+ with the objective of each input alone: what comes in the same batch does not matter.
INDEPENDENT = "dent+:objective=entropy,reduction=sum"

_TIMES = {"ms": 1e-3, "s": 1.0, "min": 60.0, "": 1.0}
_SIZES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "": 1}
_CLASSES = {"cifar10": CIFAR10.classes, "cifar100": CIFAR100.classes, "numbers": ()}


@dataclass(frozen=True, kw_only=True)
class Serving:
    """All that decides what a server answers, to whom, and how much it takes on.

    >>> Serving(port=0, max_wait="soon")
    Traceback (most recent call last):
    ...
    ValueError: 2 wrong settings of the server:
      max_wait: expected a time such as 10ms, 30s or 2min, got 'soon'
      port: expected an integer from 1 to 65535, got 0
    """

    model: str = setting("resnet20-at", "model by name, see `dent list models`")
    defense: str = setting(INDEPENDENT, "defense, as dent+ or dent:steps=10; static is none")
    device: str = setting("cpu", "cpu, cuda, cuda:1, mps")
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is all, for other machines too")
    port: int = setting(8000, "port to listen on")
    replicas: int = setting(1, "copies of the model that work side by side")
    max_replicas: int | None = setting(
        None, "copies while more requests come than these can do; no more than replicas if not given"
    )
    threads: int | None = setting(
        None, "of the CPU, for each replica; the cores shared out if not given"
    )
    batch_size: int = setting(64, "images of a batch at most")
    max_wait: Seconds = setting("10ms", "how long a batch waits to be full, as 10ms")
    queue: int = setting(256, "requests that may wait; more are sent away with 429")
    deadline: Seconds = setting("30s", "how long a request may take, as 30s; then 504")
    max_body: Bytes = setting("10MB", "largest body of a request, as 10MB")
    max_images: int = setting(64, "images of a request at most")
    max_pixels: int = setting(4096 * 4096, "pixels of an image file at most, before it is decoded")
    size: tuple[int, int] = setting((32, 32), "height and width that the model takes, as 32x32")
    resize: bool = setting(False, "resize images of another size instead of refusing them")
    classes: tuple[str, ...] = setting(
        "cifar10", "names of the classes: cifar10, cifar100, numbers, a,b,c or a file with one in a line"
    )
    shared_batches: bool = setting(
        False,
        "put several clients into the batches of a defense that is not independent; RISK: any client can"
        " then change what the others are answered (poisoning)",
    )
    shed: int = setting(
        0, "requests waiting from which updates are dropped to answer faster; 0: never drop any"
    )

    def __post_init__(self) -> None:
        faults: list[str] = []
        readers: dict[str, Callable[[Any], Any]] = {
            "defense": format_defense,
            "max_wait": _time,
            "deadline": _deadline,
            "max_body": _bytes,
            "size": _size,
            "classes": _classes,
        }
        for name, read in readers.items():
            try:
                object.__setattr__(self, name, read(getattr(self, name)))
            except (ValueError, TypeError) as error:
                faults.append(f"{name}: {' '.join(str(error).split())}")
        refuse(faults + self._type_faults() + self._number_faults(), " of the server")

    @property
    def most_replicas(self) -> int:
        """How many there may be at once."""
        return self.max_replicas or self.replicas

    def steps_for(self, own: int, waiting: int) -> int:
        """How many updates an answer gets, of the defense's own, while so many requests wait.

        All of them, unless `shed` is set: then from `shed` requests on fewer, in proportion to the room
        that is left in the queue, but never none: a defense that a crowd can switch off is no defense.

        >>> serving = Serving(shed=64, queue=256)
        >>> [serving.steps_for(6, waiting) for waiting in (0, 63, 64, 128, 200, 256)]
        [6, 6, 5, 3, 1, 1]
        """
        if not self.shed or waiting < self.shed:
            return own
        room = max(self.queue - waiting, 0) / (self.queue - self.shed + 1)
        return min(own, max(1, math.floor(own * room)))

    def to_json(self) -> dict[str, Any]:
        """As `make_serving` takes it; times in seconds, sizes in bytes."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    def _type_faults(self) -> list[str]:
        faults = []
        for name in ("model", "device", "host"):
            if not isinstance(value := getattr(self, name), str) or not value:
                faults.append(f"{name}: expected a name, got {value!r}")
        for name in ("resize", "shared_batches"):
            if not isinstance(value := getattr(self, name), bool):
                faults.append(f"{name}: expected true or false, got {value!r}")
        return faults

    def _number_faults(self) -> list[str]:
        faults = []
        least = {"replicas": 1, "batch_size": 1, "queue": 1, "max_images": 1, "max_pixels": 1, "shed": 0}
        for name, bound in least.items():
            if not _is_whole(value := getattr(self, name)) or value < bound:
                faults.append(f"{name}: expected an integer >= {bound}, got {value!r}")
        for name in ("threads", "max_replicas"):
            value = getattr(self, name)
            if value is not None and (not _is_whole(value) or value < 1):
                faults.append(f"{name}: expected an integer >= 1, got {value!r}")
        if not _is_whole(self.port) or not 1 <= self.port <= 65535:
            faults.append(f"port: expected an integer from 1 to 65535, got {self.port!r}")
        if not faults and self.shed > self.queue:
            faults.append(f"shed: expected at most the queue, {self.queue}, got {self.shed}")
        if not faults and self.max_replicas is not None and self.max_replicas < self.replicas:
            faults.append(
                f"max_replicas: expected at least the replicas, {self.replicas}, got {self.max_replicas}"
            )
        return faults


def make_serving(content: Mapping[str, Any] | None = None, **given: Any) -> Serving:
    """Settings from what a file holds, and what is given besides, which wins.

    >>> made = make_serving(max_wait="5ms", max_body="1MB", size="64x48", classes="cat,dog")
    >>> made.max_wait, made.max_body, made.size, made.classes
    (0.005, 1000000, (64, 48), ('cat', 'dog'))
    """
    asked = {str(name): value for name, value in {**(content or {}), **given}.items()}
    check_known("settings of the server", asked, [one.name for one in fields(Serving)])
    return Serving(**asked)


def _time(value: Any) -> float:
    wanted = ValueError(f"expected a time such as 10ms, 30s or 2min, got {value!r}")
    seconds = float(_scaled(value, _TIMES, wanted))
    if not 0 <= seconds < math.inf:
        raise wanted
    return seconds


def _deadline(value: Any) -> float:
    if not (seconds := _time(value)):
        raise ValueError(f"expected a time > 0, got {value!r}")
    return seconds


def _bytes(value: Any) -> int:
    wanted = ValueError(f"expected a size such as 500kB or 10MB, got {value!r}")
    size = _scaled(value, _SIZES, wanted)
    if not 1 <= size < math.inf or size != int(size):
        raise wanted
    return int(size)


def _scaled(value: Any, units: Mapping[str, float], wanted: ValueError) -> float:
    """A number with its unit; a number alone is in seconds, or in bytes."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    found = (
        re.fullmatch(r"(\d+(?:\.\d*)?)\s*([a-zA-Z]*)", value.strip()) if isinstance(value, str) else None
    )
    if found is None or (unit := found[2].lower()) not in units:
        raise wanted
    return round(float(found[1]) * units[unit], 9)


def _size(value: Any) -> tuple[int, int]:
    wanted = ValueError(f"expected height x width, as 32x32, got {value!r}")
    parts = re.split("[x,]", value) if isinstance(value, str) else value
    try:
        height, width = (int(part) if isinstance(part, str) else part for part in parts)
    except (TypeError, ValueError):
        raise wanted from None
    if not all(_is_whole(side) and side >= 1 for side in (height, width)):
        raise wanted
    return height, width


def _classes(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        if value in _CLASSES:
            return _CLASSES[value]
        if "," in value:
            value = [name.strip() for name in value.split(",")]
        elif Path(value).is_file():
            value = Path(value).read_text(encoding="utf-8").split("\n")
            value = [name.strip() for name in value if name.strip()]
        else:
            known = ", ".join(_CLASSES)
            raise ValueError(
                f"expected one of {known}, names as a,b,c or a file of names, got {value!r}"
            )
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"expected names, got {value!r}")
    return tuple(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
