"""One copy of the defended model, which computes batches one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dent.defense import Dent
from dent.serving.answers import Answer, Failed, answer_batch
from dent.serving.batches import Answered, Batch
from dent.serving.settings import Serving


class Replica:
    """Computes batches in a thread of its own, so that it can be asked how it is meanwhile."""

    def __init__(self, serving: Serving, defense: Dent) -> None:
        self._serving, self._defense = serving, defense
        self._thread = ThreadPoolExecutor(1)  # only one, for each has torch start threads of its own
        self._began: float | None = None  # the batch that is being computed

    @property
    def busy_for(self) -> float:
        """Seconds that the batch in work has taken so far."""
        began = self._began
        return 0.0 if began is None else time.perf_counter() - began

    async def answer(self, images: NDArray[np.float32], sizes: list[int], steps: int) -> list[Answered]:
        """Answer a batch of images, (N, 3, H, W), that consists of groups of these sizes."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._compute, images, sizes, steps)

    def _compute(self, images: NDArray[np.float32], sizes: list[int], steps: int) -> list[Answered]:
        def answer(inputs: Tensor) -> list[Answer]:
            return answer_batch(self._defense, inputs, steps, classes=self._serving.classes)

        self._began = time.perf_counter()
        try:
            # A copy, for what comes out of Ray's store cannot be written to.
            inputs = torch.tensor(images, device=self._serving.device)
            first, *others = answer_groups(answer, list(inputs.split(sizes)))
            return [replace(first, batches=(Batch(len(images), self.busy_for),)), *others]
        finally:
            self._began = None


def answer_groups(answer: Callable[[Tensor], list[Answer]], groups: list[Tensor]) -> list[Answered]:
    """Answer groups of images together, and each group for itself.

    If that fails, each half is tried without the other, and so on: who sends what the model fails on
    fails alone, and the others wait about three times as long, however many they are.
    """
    try:
        answers = iter(answer(torch.cat(groups)))
        return [Answered(tuple(islice(answers, len(group)))) for group in groups]
    except Failed as error:
        if len(groups) == 1:
            return [Answered(failed=str(error))]
    half = len(groups) // 2
    return answer_groups(answer, groups[:half]) + answer_groups(answer, groups[half:])
