"""How a model is trained: every setting, and the published recipes by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from dent.fields import refuse, setting, wrong_choices
from dent.names import check_known, lookup

Method = Literal["nominal", "at", "trades"]
Schedule = Literal["cosine", "linear"]
Norm = Literal["linf", "l2"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that defines a training, the model and the data apart.

    >>> Recipe(epochs=0, schedule="step")
    Traceback (most recent call last):
    ...
    ValueError: 2 wrong settings of the recipe:
      schedule: expected one of cosine, linear, got 'step'
      epochs: expected an integer >= 1, got 0
    """

    method: Method = setting("nominal", "what is minimized", get_args(Method))
    epochs: int = setting(200, "passes over the training images")
    batch_size: int = setting(128, "images per update, over all processes together")
    lr: float = setting(0.1, "the highest learning rate of SGD")
    schedule: Schedule = setting("cosine", "how lr falls to zero", get_args(Schedule))
    warmup: float = setting(0.0, "share of the updates in which lr rises linearly from zero")
    momentum: float = setting(0.9, "of SGD, after Nesterov")
    weight_decay: float = setting(5e-4, "of all parameters")
    augment: bool = setting(True, "random crop from a border of 4 pixels, and random flip")
    eps: float = setting(0.0, "radius of the attack in training; 0 for nominal")
    norm: Norm = setting("linf", "norm of the attack", get_args(Norm))
    attack_steps: int = setting(0, "steps of PGD on every batch; 1 is fast AT, 0 for nominal")
    step_size: float = setting(0.0, "of each of these steps; 0 for nominal")
    beta: float | None = setting(None, "weight of TRADES' second term")
    hold_out: int = setting(1000, "training images kept for watching the accuracy; 0 trains on all")
    seed: int = setting(0, "of the weights, the order, the crops and the attack")

    def __post_init__(self) -> None:
        refuse(self._faults(), " of the recipe")

    @property
    def adversarial(self) -> bool:
        return self.method != "nominal"

    def lr_at(self, progress: float) -> float:
        """The learning rate when this share of the updates is done.

        >>> recipe = Recipe(lr=1.0, warmup=0.2, schedule="linear")
        >>> [round(recipe.lr_at(progress), 3) for progress in (0.1, 0.2, 0.6, 1.0)]
        [0.5, 1.0, 0.5, 0.0]
        """
        if progress < self.warmup:
            return self.lr * progress / self.warmup
        fall = (progress - self.warmup) / (1 - self.warmup)
        return self.lr * ((1 + math.cos(math.pi * fall)) / 2 if self.schedule == "cosine" else 1 - fall)

    def _faults(self) -> list[str]:
        faults = wrong_choices(self)
        least = {"epochs": 1, "batch_size": 1, "attack_steps": 0, "hold_out": 0, "seed": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < bound:
                faults.append(f"{name}: expected an integer >= {bound}, got {value!r}")
        for name in ("lr", "momentum", "weight_decay", "eps", "step_size", "warmup"):
            value = getattr(self, name)
            below = 1 if name in ("momentum", "warmup") else math.inf
            if not isinstance(value, int | float) or not 0 <= value < below:
                limit = " and < 1" if below == 1 else ""
                faults.append(f"{name}: expected a number >= 0{limit}, got {value!r}")
        return faults or self._contradictions()

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
        elif self.beta is not None and not 0 <= self.beta < math.inf:
            faults.append(f"beta: expected a number >= 0, got {self.beta!r}")
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
    """A recipe by name, with any setting overridden.

    >>> make_recipe("fast-at", epochs=15).lr
    0.2
    """
    recipe = lookup("recipe", name, RECIPES)
    check_known("settings of the recipe", settings, [one.name for one in fields(Recipe)])
    return replace(recipe, **settings)
