"""The settings of a defense, and presets: the paper's settings by name (sections 3.2 and 4.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from dent.declared import raise_faults
from dent.defense.dent.descent import OBJECTIVES, OPTIMIZERS

Per = Literal["batch", "sample"]
Affine = Literal["off", "batch", "sample"]
Blur = Literal["off", "static", "dynamic"]
Covariance = Literal["spherical", "diagonal", "full"]
Reduction = Literal["mean", "sum"]
Gradient = Literal["stale", "unrolled"]
Predict = Literal["after", "before"]


def setting(default: Any, doc: str, choices: Any = None) -> Any:
    """Declare a field of `Settings`: its default, a line that describes it, and its choices if any."""
    return field(default=default, metadata={"doc": doc, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that defines a defense. `dent list settings` prints the fields.

    >>> Settings(steps=-1, affine="layer")
    Traceback (most recent call last):
    ...
    dent.declared.SettingsError: 2 wrong settings:
      affine: expected one of off, batch, sample, got 'layer'
      steps: expected an integer >= 0, got -1
    """

    affine: Affine = setting(
        "batch",
        "Delta, for the scale and shift of the normalization layers: one per batch or sample",
        get_args(Affine),
    )
    statistics: Literal["train", "test"] | float = setting(
        "train", "BatchNorm statistics: train, test, or the weight of test in [0, 1]"
    )
    blur: Blur = setting("off", "Gaussian smoothing of the input with covariance Sigma", get_args(Blur))
    sigma: float = setting(0.7, "initial standard deviation of the smoothing, in pixels")
    covariance: Covariance = setting("spherical", "shape of Sigma", get_args(Covariance))
    blur_per: Per = setting("batch", "one dynamic Sigma per batch or sample", get_args(Per))
    blur_lr: float = setting(0.25, "learning rate of the logarithm of Sigma")
    objective: str = setting("entropy", "objective to minimize", tuple(OBJECTIVES))
    reduction: Reduction = setting(
        "mean", "reduction of the objective over the batch", get_args(Reduction)
    )
    optimizer: str = setting("adam", "optimizer of the updates", tuple(OPTIMIZERS))
    lr: float = setting(1e-3, "learning rate of Delta")
    betas: tuple[float, float] | None = setting(
        None, "of adam (default: 0.9, 0.999) and adamod (default: 0.99, 0.999)"
    )
    beta3: float | None = setting(None, "of adamod (default: 0.6)")
    momentum: float | None = setting(None, "of sgd (default: 0.9)")
    steps: int = setting(10, "number of updates per batch; 0 leaves only smoothing and statistics")
    gradient: Gradient = setting(
        "stale",
        "what an attacker's gradient sees of the updates: constants, or all",
        get_args(Gradient),
    )
    continual: bool = setting(
        False, "carry the adaptation from batch to batch until reset()", (False, True)
    )
    predict: Predict = setting("after", "predict after or before the updates", get_args(Predict))

    def __post_init__(self) -> None:
        raise_faults(self._faults())

    @property
    def test_share(self) -> float:
        """Weight of the test batch in the BatchNorm statistics."""
        if isinstance(self.statistics, str):
            return float(self.statistics == "test")
        return float(self.statistics)

    @property
    def adapts_affine(self) -> bool:
        return self.affine != "off" and self.steps > 0

    @property
    def adapts_blur(self) -> bool:
        return self.blur == "dynamic" and self.steps > 0

    @property
    def independent(self) -> bool:
        """True if dent answers a batch as it answers its inputs alone, on a model that does so.

        It needs `sum`: the mean divides the gradient by the size of the batch, which changes the steps
        of SGD, and through their eps slightly those of Adam and AdaMod.
        """
        adapts = self.adapts_affine or self.adapts_blur
        return (
            self.test_share == 0
            and not self.continual
            and not (self.adapts_affine and self.affine == "batch")
            and not (self.adapts_blur and self.blur_per == "batch")
            and (not adapts or (self.objective == "entropy" and self.reduction == "sum"))
        )

    @property
    def forwards(self) -> int:
        """The cost of a call, in forwards of the model. A backward to the inputs counts as one."""
        return 2 * self.steps + (0 if self.predict == "before" else 1)

    def optimizer_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the optimizer, without its learning rate."""
        options = {"betas": self.betas, "beta3": self.beta3, "momentum": self.momentum}
        return {name: value for name, value in options.items() if value is not None}

    def _faults(self) -> list[str]:
        faults, share = [], self.statistics
        for one in fields(self):
            choices, value = one.metadata["choices"], getattr(self, one.name)
            if choices and value not in choices:
                faults.append(
                    f"{one.name}: expected one of {', '.join(map(str, choices))}, got {value!r}"
                )
        if share not in ("train", "test") and not (_is_number(share) and 0 <= float(share) <= 1):
            faults.append(f"statistics: expected train, test or a weight in [0, 1], got {share!r}")
        for name in ("sigma", "blur_lr", "lr"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 < value < math.inf):
                faults.append(f"{name}: expected a number > 0, got {value!r}")
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 0:
            faults.append(f"steps: expected an integer >= 0, got {self.steps!r}")
        return faults or self._optimizer_faults() + self._contradictions()

    def _optimizer_faults(self) -> list[str]:
        applies = {"betas": ("adam", "adamod"), "beta3": ("adamod",), "momentum": ("sgd",)}
        faults = []
        for name, value in self.optimizer_options().items():
            numbers = value if isinstance(value, tuple) else (value,)
            if self.optimizer not in applies[name]:
                whose = " and ".join(applies[name])
                faults.append(f"{name}: applies to {whose}, not to {self.optimizer}; leave it out")
            elif len(numbers) != (2 if name == "betas" else 1) or not all(
                _is_number(number) and 0 <= number < 1 for number in numbers
            ):
                what = "two numbers" if name == "betas" else "a number"
                faults.append(f"{name}: expected {what} in [0, 1), got {value!r}")
        return faults

    def _contradictions(self) -> list[str]:
        faults = []
        if self.steps and not self.adapts_affine and not self.adapts_blur:
            faults.append(
                f"steps: {self.steps} updates of nothing; set affine, a dynamic blur, or steps=0"
            )
        if self.continual and (
            (self.adapts_affine and self.affine == "sample")
            or (self.adapts_blur and self.blur_per == "sample")
        ):
            faults.append(
                "continual: sample-wise parameters belong to their inputs and cannot be carried over"
            )
        if self.predict == "before" and not self.continual:
            faults.append("predict: before needs continual=True, else the updates would change nothing")
        return faults


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


PRESETS: dict[str, Settings] = {
    "static": Settings(affine="off", steps=0),
    "norm": Settings(affine="off", statistics="test", steps=0),
    "blur": Settings(affine="off", blur="static", steps=0),
    "tent": Settings(statistics="test", steps=1, continual=True, predict="before"),
    "dent": Settings(steps=30),
    "dent+": Settings(
        affine="sample", objective="information-maximization", optimizer="adamod", lr=6e-3, steps=6
    ),
    "dent+solo": Settings(affine="sample", reduction="sum", optimizer="adamod", lr=6e-3, steps=6),
    "dent-nominal": Settings(statistics="test", blur="dynamic", steps=10),
}
