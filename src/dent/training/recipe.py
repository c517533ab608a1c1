"""Recipes: the settings of a training, and the published recipes by name."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dent.declared import Declared, Number, raise_faults
from dent.names import lookup

Method = Literal["nominal", "at", "trades"]
Schedule = Literal["cosine", "linear"]
Norm = Literal["linf", "l2"]


class Recipe(Declared):
    """The settings of a training, without the model and the data.

    >>> Recipe(epochs=0, schedule="step")
    Traceback (most recent call last):
    ...
    dent.declared.SettingsError: 2 wrong settings of the recipe:
      epochs: expected an integer >= 1, got 0
      schedule: expected one of cosine, linear, got 'step'
    """

    title = "recipe"

    method: Method = Field("nominal", description="Loss to minimize")
    epochs: int = Field(200, ge=1, description="Number of passes over the training images")
    batch_size: int = Field(
        128, ge=1, description="Number of images per update, over all processes together"
    )
    lr: Number = Field(0.1, ge=0, description="Highest learning rate of SGD")
    schedule: Schedule = Field("cosine", description="How the learning rate falls to zero")
    warmup: Number = Field(
        0.0, ge=0, lt=1, description="Share of the updates in which the learning rate rises from zero"
    )
    momentum: Number = Field(0.9, ge=0, lt=1, description="Nesterov momentum of SGD")
    weight_decay: Number = Field(5e-4, ge=0, description="Weight decay of all parameters")
    augment: bool = Field(True, description="Crop randomly from a border of 4 pixels and flip randomly")
    resize_from: int = Field(
        0, ge=0, description="Width of the images in the first update, in pixels; 0 is full size"
    )
    resize_until: Number = Field(
        0.5, ge=0, lt=1, description="Share of the updates after which images have their full size"
    )
    average: Number = Field(
        0.0, ge=0, lt=1, description="Decay per update of the moving average of the weights; 0 is none"
    )
    eps: Number = Field(0.0, ge=0, description="Radius of the attack in training; 0 for nominal")
    norm: Norm = Field("linf", description="Norm of the attack")
    attack_steps: int = Field(
        0, ge=0, description="Number of PGD steps on every batch; 1 is fast AT, 0 is nominal"
    )
    step_size: Number = Field(0.0, ge=0, description="Size of each step of PGD; 0 for nominal")
    beta: Number | None = Field(None, ge=0, description="Weight of the second term of TRADES")
    hold_out: int = Field(
        1000, ge=0, description="Number of training images held out to watch the accuracy"
    )
    seed: int = Field(0, ge=0, description="Seed of the weights, the order, the crops and the attack")

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        raise_faults(self._contradictions())
        return self

    @property
    def adversarial(self) -> bool:
        return self.method != "nominal"

    def lr_at(self, progress: float) -> float:
        """Return the learning rate when this share of the updates is done.

        >>> recipe = Recipe(lr=1.0, warmup=0.2, schedule="linear")
        >>> [round(recipe.lr_at(progress), 3) for progress in (0.1, 0.2, 0.6, 1.0)]
        [0.5, 1.0, 0.5, 0.0]
        """
        if progress < self.warmup:
            return self.lr * progress / self.warmup
        fall = (progress - self.warmup) / (1 - self.warmup)
        return self.lr * ((1 + math.cos(math.pi * fall)) / 2 if self.schedule == "cosine" else 1 - fall)

    def width_at(self, progress: float, full: int) -> int:
        """Return the width of the images when this share of the updates is done.

        It grows in steps of 8 pixels, which convolutions compute fastest, and is never above `full`.

        >>> recipe = Recipe(resize_from=16, resize_until=0.5)
        >>> [recipe.width_at(progress, 32) for progress in (0.0, 0.24, 0.25, 0.49, 0.5, 1.0)]
        [16, 16, 24, 24, 32, 32]
        """
        if not self.resize_from or progress >= self.resize_until:
            return full
        grown = (full - self.resize_from) * progress / self.resize_until
        return min(full, self.resize_from + 8 * int(grown / 8))

    def _contradictions(self) -> list[str]:
        faults = []
        for name in ("eps", "attack_steps", "step_size"):
            value = getattr(self, name)
            if self.adversarial and value == 0:
                faults.append(f"{name}: expected > 0 with method {self.method}, got 0")
            if not self.adversarial and value != 0:
                faults.append(
                    f"{name}: expected 0 with method nominal, got {value!r}; choose at or trades"
                )
        if (self.beta is None) == (self.method == "trades"):
            faults.append(f"beta: belongs to method trades, and method is {self.method}")
        return faults


_LINF: dict[str, Any] = {"eps": 8 / 255, "attack_steps": 10, "step_size": 2 / 255}
_L2: dict[str, Any] = {"norm": "l2", "eps": 0.5, "attack_steps": 10, "step_size": 0.1}
RECIPES: dict[str, Recipe] = {
    "nominal": Recipe(),
    "at": Recipe(method="at", **_LINF),
    "at-l2": Recipe(method="at", **_L2),
    "trades": Recipe(method="trades", beta=6.0, **_LINF),
    "trades-l2": Recipe(method="trades", beta=6.0, **_L2),
    "fast-at": Recipe(
        method="at", eps=8 / 255, attack_steps=1, step_size=10 / 255,
        epochs=30, lr=0.2, schedule="linear", warmup=0.4,
    ),
    "fast-at-l2": Recipe(
        method="at", norm="l2", eps=0.5, attack_steps=1, step_size=0.625,
        epochs=30, lr=0.2, schedule="linear", warmup=0.4,
    ),
}  # fmt: skip
RECIPE_NOTES = {
    "nominal": "no attack: the CIFAR reference of pycls, as the paper trains (section 4.3)",
    "at": "adversarial training on PGD-10, Linf 8/255 (Madry et al., 2018; paper, section 4.2)",
    "at-l2": "the same, L2 0.5",
    "trades": "natural loss plus 6 times the divergence under attack, Linf 8/255 (Zhang et al., 2019)",
    "trades-l2": "the same, L2 0.5",
    "fast-at": "one step from a random start, for machines without a GPU (Wong et al., 2020)",
    "fast-at-l2": "the same, L2 0.5",
}


def make_recipe(name: str, **settings: Any) -> Recipe:
    """Return the recipe called `name` with some settings replaced.

    >>> make_recipe("fast-at", epochs=15).lr
    0.2
    """
    return lookup("recipe", name, RECIPES).replace(**settings)
