"""The training loop: the updates of an epoch, and the accuracies measured after it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dent.attacks import pgd
from dent.data.dataset import Dataset
from dent.seeds import make_generator
from dent.training.losses import attack_batch, compute_loss, draw_offsets, freeze
from dent.training.machine import Processes
from dent.training.recipe import Recipe
from dent.training.watch import Epoch, find_fault

LOOK_EVERY = 10  # updates between two looks at the loss, because each look waits for the device
WATCHED_UNDER_ATTACK = 256  # images that PGD-10 attacks after every epoch
BORDER = 4  # pixels around an image that random crops are cut from (He et al., 2016)


@dataclass(frozen=True)
class Step:
    """The state of training after an update: updates done and in total, and this epoch's means."""

    done: int
    total: int
    epoch: int
    loss: float
    accuracy: float
    last: Epoch | None  # the previous epoch, with natural and robust accuracy


class Training:
    """A model in training: its optimizer, its averaged weights, and the finished epochs."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        recipe: Recipe,
        *,
        device: torch.device,
        processes: Processes,
        compile: bool,
        half: torch.dtype | None,
    ) -> None:
        self.dataset, self.recipe, self.device, self.processes = dataset, recipe, device, processes
        if processes.count > 1 and device.type == "cuda":  # torch has no such layer for the CPU
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if compile:
            self.model.compile()
        self.shared = processes.wrap(self.model)
        self.average = Average(self.model, recipe.average) if recipe.average else None
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.momentum > 0,
        )
        # bfloat16 has the range of float32. float16, for older GPUs, needs a scaled loss.
        self.half = torch.autocast(device.type, half, enabled=half is not None)
        self.scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)
        self.images, held_out = split_images(dataset, recipe)
        # Without held-out images, some training images are watched: enough to see training fail.
        self.watched = held_out if recipe.hold_out else self.images[:1000]
        self.updates = len(self.images) // recipe.batch_size
        self.history: list[Epoch] = []

    def state_dict(self) -> dict[str, Any]:
        """Return everything that `load_state_dict` needs to resume training."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average.model.state_dict() if self.average else None,
            "history": [asdict(epoch) for epoch in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.model.load_state_dict(state["average"])
        self.history = [Epoch(**epoch) for epoch in state["history"]]

    def run_epoch(self, on_step: Callable[[Step], None] | None) -> Epoch:
        """Train on all training images once, then measure the watched ones."""
        started, number, recipe = time.perf_counter(), len(self.history) + 1, self.recipe
        order = torch.randperm(len(self.images), generator=make_generator(recipe.seed, number))
        total = recipe.epochs * self.updates
        sums = torch.zeros(3, dtype=torch.double, device=self.device)  # loss, correct, images
        loss_mean = accuracy = lr = math.nan
        self.shared.train()
        for update in range(self.updates):
            done = (number - 1) * self.updates + update
            lr = recipe.lr_at((done + 0.5) / total)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            batch = self.images[order[update * recipe.batch_size :][: recipe.batch_size]]
            with self.half:
                loss, correct = self.compute_loss(
                    batch, make_generator(recipe.seed, number, update), done / total
                )
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
                # Summed over the processes, so that all of them decide alike. One that left the loop
                # alone would leave the others waiting for its gradients.
                loss_sum, correct_sum, images = self.processes.sum(sums).tolist()
                loss_mean, accuracy = loss_sum / images, correct_sum / images
                if not math.isfinite(loss_mean):
                    break  # the rest of the epoch cannot mend it
                if on_step is not None and self.processes.rank == 0:
                    last = self.history[-1] if self.history else None
                    on_step(Step(done + 1, total, number, loss_mean, accuracy, last))
        natural, robust, fgsm = self.measure(self.model)
        average = self.measure(self.average.model)[:2] if self.average else (None, None)
        seconds = time.perf_counter() - started
        return Epoch(number, lr, loss_mean, accuracy, natural, robust, fgsm, seconds, *average)

    def compute_loss(
        self, batch: Tensor, random: torch.Generator, progress: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of this process's part of the batch, and which of its images are correct.

        Random numbers are drawn for the whole batch, so the number of processes changes nothing.
        """
        recipe, take_part = self.recipe, self.processes.take_part
        inputs, labels = self.read(take_part(batch))
        if recipe.augment:
            inputs = crop_and_flip(inputs, take_part(draw_crops(len(batch), generator=random)))
        inputs = resize(inputs, recipe.width_at(progress, inputs.shape[-1]))
        points = inputs = inputs.contiguous(memory_format=torch.channels_last)
        if recipe.adversarial:
            shape = torch.Size([len(batch), *inputs.shape[1:]])
            offsets = take_part(draw_offsets(shape, recipe=recipe, generator=random))
            start = (inputs + offsets.to(inputs)).clamp(0, 1)
            points = attack_batch(self.model, inputs, labels, start, recipe=recipe)
        loss, logits = compute_loss(self.shared, inputs, points, labels, beta=recipe.beta)
        return loss, logits.detach().argmax(1) == labels

    def measure(self, model: nn.Module) -> tuple[float, float | None, float | None]:
        """Return accuracies on the watched images: natural, under PGD-10 and under FGSM.

        The last two are None for nominal recipes.
        """
        # `forward` is the model without compilation, because these batches have other sizes.
        forward, recipe = model.forward, self.recipe
        with freeze(model), self.half:
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
            results = [
                pgd(forward, inputs, labels, steps=10, **budget),
                pgd(forward, inputs, labels, steps=1, step_size=1.25 * recipe.eps, **budget),
            ]
        robust, fgsm = (1 - float(result.success.float().mean()) for result in results)
        return natural, robust, fgsm

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and labels on the device."""
        inputs = self.dataset.read(indices).to(self.device)
        return inputs, self.dataset.labels[indices].to(self.device)

    def find_fault(self, epoch: Epoch) -> str | None:
        """Return why training should stop after this epoch, or None."""
        return find_fault(
            [*self.history, epoch],
            classes=len(self.dataset.classes),
            watched=len(self.watched),
            lr=self.recipe.lr,
            fast=self.recipe.attack_steps == 1,
        )


class Average:
    """A copy of the model whose weights and buffers are an exponential moving average of the model's.

    The first updates use a smaller decay, (1 + t) / (10 + t), so that random weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.followed, self.decay = model, decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, done: int) -> None:
        """Move the average toward the model; `done` updates of the model came before this one."""
        decay = min(self.decay, (1 + done) / (10 + done))
        values = self.followed.state_dict()
        for name, average in self.model.state_dict().items():
            if average.is_floating_point():
                average.lerp_(values[name], 1 - decay)
            else:
                average.copy_(values[name])


def split_images(dataset: Dataset, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return the indices of the images to train on, and of those held out."""
    order = torch.randperm(len(dataset), generator=make_generator(recipe.seed, 0))
    return order[recipe.hold_out :], order[: recipe.hold_out]


def draw_crops(n: int, *, generator: torch.Generator) -> Tensor:
    """Return (n, 3): for each image the rows and columns cut off at the top and left, and if to flip."""
    shifts = torch.randint(2 * BORDER + 1, (n, 2), generator=generator)
    return torch.cat([shifts, torch.randint(2, (n, 1), generator=generator)], 1)


def crop_and_flip(images: Tensor, crops: Tensor) -> Tensor:
    """Return each image (N, C, H, W), cropped from a black border of 4 pixels, and flipped or not.

    >>> image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> crop_and_flip(image, torch.tensor([[4, 4, 1]])).tolist()  # not moved, but flipped
    [[[[2.0, 1.0], [4.0, 3.0]]]]
    """
    n, _, height, width = images.shape
    top, left, flip = crops.to(images.device).split(1, 1)
    across = torch.arange(width, device=images.device).expand(n, width)
    rows = top + torch.arange(height, device=images.device)
    columns = left + torch.where(flip.bool(), across.flip(1), across)
    padded = F.pad(images, (BORDER, BORDER, BORDER, BORDER))
    each = torch.arange(n, device=images.device)[:, None, None]
    # Indexing puts the channels last; as a view they are second again, and the layout stays.
    return padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def resize(images: Tensor, width: int) -> Tensor:
    """Return the images (N, C, H, W) at another width; each pixel is the mean of those it covers.

    >>> resize(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 1).tolist()
    [[[[2.5]]]]
    """
    if images.shape[-1] == width:
        return images
    height = round(images.shape[-2] * width / images.shape[-1])
    return F.interpolate(images, size=(height, width), mode="area")
