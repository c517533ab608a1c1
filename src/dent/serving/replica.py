"""One copy of the defended model: load it, say what it is, and compute batches one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dent.defense.own import is_import_path, make_by_text
from dent.devices import find_device
from dent.models import load_model
from dent.serving.answers import Answer, ModelError, answer_batch, count_steps
from dent.serving.batches import BatchRecord, Reply
from dent.serving.settings import Serving
from dent.testing import find_independence, is_random, refuse_broken_promises


@dataclass(frozen=True)
class Service:
    """What is served.

    isolation: how the answers of one client are kept apart from the images of another, in a sentence.
    shared: True if clients share batches.
    steps: number of updates of the defense; None if it does not say, or cannot make fewer.
    """

    model: str
    defense: str
    isolation: str
    shared: bool
    steps: int | None


def load_defense(serving: Serving) -> tuple[Any, nn.Module]:
    """Load the defense and its static model; raise ValueError if the settings do not fit together."""
    device = find_device(serving.device)
    static = load_model(serving.model, device=device)
    defense = make_by_text(serving.defense, static)
    inputs = torch.zeros(1, 3, *serving.size, device=device)
    try:
        answer_batch(defense, inputs, classes=serving.classes, static=static)
    except ModelError as error:
        height, width = serving.size
        raise ValueError(
            f"expected a model of images of {height} x {width} pixels, got: {error}"
        ) from error
    return defense, static


def describe_service(serving: Serving) -> Service:
    """Load the model once, to find what is wrong before a server starts, and describe it."""
    defense, _ = load_defense(serving)
    steps = count_steps(defense)
    if serving.shed and steps is None:
        raise ValueError(
            f"shed: expected a defense that can make fewer updates, got {serving.defense}; give its "
            "adapt() the argument `steps` and the defense the attribute `updates`, or leave shed out"
        )
    if is_import_path(serving.defense):
        refuse_broken_promises(defense, _draw_images(serving), of=serving.defense)
    independent = _find_independence(serving, defense)
    if independent:
        isolation = "independent: an answer does not depend on what else is in its batch"
    elif serving.shared_batches:
        isolation = "shared batches: any client can change the answers of the others"
    else:
        isolation = "own batches: an answer depends on the images of its own request only"
    return Service(
        serving.model,
        serving.defense,
        isolation,
        shared=independent or serving.shared_batches,
        steps=steps,
    )


def _find_independence(serving: Serving, defense: Any) -> bool:
    """Return True if no answer depends on its batch.

    A user's own that is random cannot be compared, and is not taken to be independent.
    """
    is_own, images = is_import_path(serving.defense), _draw_images(serving)
    if is_own and (getattr(defense, "randomized", False) or is_random(defense, images)):
        return False
    declared = getattr(defense, "independent", None)
    return find_independence(defense, images, declared, is_own=is_own, of=serving.defense)


def _draw_images(serving: Serving) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(4, 3, *serving.size, generator=generator).to(serving.device)


class Replica:
    """Compute batches in one thread, so that the process can still say how it is doing."""

    def __init__(self, serving: Serving, defense: Any, static: nn.Module | None = None) -> None:
        self._serving, self._defense, self._static = serving, defense, static
        self._thread = ThreadPoolExecutor(1)  # one only, because torch starts more threads for each
        self._start: float | None = None  # of the batch that is being computed

    @property
    def busy_seconds(self) -> float:
        """Return how long the current batch has taken so far; 0 if there is none."""
        start = self._start
        return 0.0 if start is None else time.perf_counter() - start

    async def answer(
        self, images: NDArray[np.float32], sizes: list[int], steps: int | None
    ) -> list[Reply]:
        """Answer a batch of images, (N, 3, H, W), that consists of groups of these sizes."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._compute, images, sizes, steps)

    def _compute(self, images: NDArray[np.float32], sizes: list[int], steps: int | None) -> list[Reply]:
        def answer(inputs: Tensor) -> list[Answer]:
            return answer_batch(
                self._defense, inputs, steps, classes=self._serving.classes, static=self._static
            )

        self._start = time.perf_counter()
        try:
            # Copy, because arrays from Ray's store are read-only.
            inputs = torch.tensor(images, device=self._serving.device)
            first, *others = answer_groups(answer, list(inputs.split(sizes)))
            return [replace(first, batches=(BatchRecord(len(images), self.busy_seconds),)), *others]
        finally:
            self._start = None


def answer_groups(answer: Callable[[Tensor], list[Answer]], groups: list[Tensor]) -> list[Reply]:
    """Answer groups of images together, with one reply for each group.

    If that fails, try each half without the other, and so on: only the group that the model fails on
    gets a failure. The others wait about three times as long, however many they are.
    """
    try:
        answers = iter(answer(torch.cat(groups)))
        return [Reply(tuple(islice(answers, len(group)))) for group in groups]
    except ModelError as error:
        if len(groups) == 1:
            return [Reply(failure=str(error))]
    half = len(groups) // 2
    return answer_groups(answer, groups[:half]) + answer_groups(answer, groups[half:])
