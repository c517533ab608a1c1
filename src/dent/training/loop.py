"""The loop: every update of every epoch, and a look at the watched images after each epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dent.attacks import pgd
from dent.data.dataset import Dataset
from dent.seeds import generator
from dent.training.augment import crop_and_flip, draw_crops, resize
from dent.training.average import Average
from dent.training.methods import attacked, frozen, nominal_loss, start_offsets, trades_loss
from dent.training.processes import Processes
from dent.training.recipe import Recipe
from dent.training.watch import Epoch, fault

# Updates between two looks at the loss; each look waits for the device.
LOOK_EVERY = 10
# Images that are attacked by PGD-10 after every epoch.
WATCHED_UNDER_ATTACK = 256


@dataclass(frozen=True)
class Step:
    """Where training is: updates done and to be done in all, and the means of this epoch so far."""

    done: int
    total: int
    epoch: int
    loss: float
    accuracy: float
    last: Epoch | None  # the epoch before, with natural and robust accuracy


def split(dataset: Dataset, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Which images are trained on, and which are held out."""
    order = torch.randperm(len(dataset), generator=generator(recipe.seed, 0))
    return order[recipe.hold_out :], order[: recipe.hold_out]


class Run:
    """The model, its optimizer and the epochs behind it."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        recipe: Recipe,
        *,
        device: torch.device,
        group: Processes,
        compile: bool,
        half: torch.dtype | None,
    ) -> None:
        self.dataset, self.recipe, self.device, self.group = dataset, recipe, device, group
        if group.count > 1 and device.type == "cuda":  # there is no such layer for the CPU
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if compile:
            self.model.compile()
        self.shared = group.wrap(self.model)
        self.average = Average(self.model, recipe.average) if recipe.average else None
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.momentum > 0,
        )
        # bfloat16 has float32's range; float16, for older GPUs, needs its loss scaled.
        narrow = half == torch.float16
        self.half = torch.autocast(device.type, half, enabled=half is not None)
        self.scaler = torch.amp.GradScaler(device.type, enabled=narrow)
        self.images, held_out = split(dataset, recipe)
        # Without images held out, some that are trained on are watched: enough to see it go wrong.
        self.watched = held_out if recipe.hold_out else self.images[:1000]
        self.updates = len(self.images) // recipe.batch_size
        self.history: list[Epoch] = []

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average.state_dict() if self.average else None,
            "history": [asdict(epoch) for epoch in self.history],
        }

    def resume(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            if self.average is not None:
                self.average.load_state_dict(state["average"])
            self.history = [Epoch(**epoch) for epoch in state["history"]]

    def epoch(self, on_step: Callable[[Step], None] | None) -> Epoch:
        """One pass over the training images, and a look at the watched ones."""
        started, number, recipe = time.perf_counter(), len(self.history) + 1, self.recipe
        order = torch.randperm(len(self.images), generator=generator(recipe.seed, number))
        total = recipe.epochs * self.updates
        sums = torch.zeros(3, dtype=torch.double, device=self.device)  # loss, correct, images
        lr = recipe.lr
        self.shared.train()
        for update in range(self.updates):
            done = (number - 1) * self.updates + update
            lr = recipe.lr_at((done + 0.5) / total)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            batch = self.images[order[update * recipe.batch_size :][: recipe.batch_size]]
            with self.half:
                loss, correct = self.loss(batch, generator(recipe.seed, number, update), done / total)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.average is not None:
                self.average.update(done)
            sums += torch.stack(
                [loss.detach() * len(correct), correct.sum(), torch.ones_like(correct).sum()]
            )
            if (update + 1) % LOOK_EVERY == 0 or update + 1 == self.updates:
                loss_mean, accuracy = (sums[:2] / sums[2]).tolist()
                if not math.isfinite(loss_mean):
                    break  # the rest of the epoch cannot mend it
                if on_step is not None and self.group.rank == 0:
                    last = self.history[-1] if self.history else None
                    on_step(Step(done + 1, total, number, loss_mean, accuracy, last))
        sums = self.group.total(sums)
        loss_mean, accuracy = (sums[:2] / sums[2]).tolist()
        natural, robust, fgsm = self.watch(self.model)
        average = self.watch(self.average.model)[:2] if self.average else (None, None)
        seconds = time.perf_counter() - started
        return Epoch(number, lr, loss_mean, accuracy, natural, robust, fgsm, seconds, *average)

    def loss(self, batch: Tensor, random: torch.Generator, progress: float) -> tuple[Tensor, Tensor]:
        """The recipe's loss on this process's part of the batch, and which of its images were right.

        What is random is drawn for the whole batch, so that the number of processes changes nothing.
        """
        recipe, part = self.recipe, self.group.part(batch)
        inputs, labels = self.read(part)
        if recipe.augment:
            inputs = crop_and_flip(inputs, self.group.part(draw_crops(len(batch), generator=random)))
        inputs = resize(inputs, recipe.width_at(progress, inputs.shape[-1]))
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        if not recipe.adversarial:
            loss, logits = nominal_loss(self.shared, inputs, labels)
        else:
            shape = torch.Size([len(batch), *inputs.shape[1:]])
            offsets = self.group.part(start_offsets(shape, recipe=recipe, generator=random))
            start = (inputs + offsets.to(inputs)).clamp(0, 1)
            points = attacked(self.model, inputs, labels, start, recipe=recipe)
            if recipe.beta is None:
                loss, logits = nominal_loss(self.shared, points, labels)
            else:
                loss, logits = trades_loss(self.shared, inputs, points, labels, beta=recipe.beta)
        return loss, logits.detach().argmax(1) == labels

    def watch(self, model: nn.Module) -> tuple[float, float | None, float | None]:
        """Accuracy on the watched images: natural, and for adversarial recipes under PGD-10 and FGSM."""
        # `forward` is the model without compilation: these batches have other sizes.
        forward, recipe = model.forward, self.recipe
        with frozen(model), self.half:
            correct = 0
            for part in self.watched.split(256):
                inputs, labels = self.read(part)
                with torch.no_grad():
                    correct += int((forward(inputs).argmax(1) == labels).sum())
            natural = correct / len(self.watched)
            if not recipe.adversarial:
                return natural, None, None
            inputs, labels = self.read(self.watched[:WATCHED_UNDER_ATTACK])
            budget: dict[str, Any] = {"eps": recipe.eps, "norm": recipe.norm, "seed": recipe.seed}
            under = [
                pgd(forward, inputs, labels, steps=10, **budget),
                pgd(forward, inputs, labels, steps=1, step_size=1.25 * recipe.eps, **budget),
            ]
        robust, fgsm = (1 - float(result.success.float().mean()) for result in under)
        return natural, robust, fgsm

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self.dataset.read(indices).to(self.device)
        return inputs, self.dataset.labels[indices].to(self.device)

    def fault(self, epoch: Epoch) -> str | None:
        return fault(
            [*self.history, epoch],
            classes=len(self.dataset.classes),
            watched=len(self.watched),
            lr=self.recipe.lr,
            fast=self.recipe.attack_steps == 1,
        )
