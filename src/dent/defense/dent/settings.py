"""The settings of a defense, and presets: the paper's settings by name (sections 3.2 and 4.1)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from dent.declared import Declared, Number, raise_faults

Per = Literal["batch", "sample"]
Affine = Literal["off", "batch", "sample"]
Blur = Literal["off", "static", "dynamic"]
Covariance = Literal["spherical", "diagonal", "full"]
Objective = Literal["entropy", "information-maximization"]
Reduction = Literal["mean", "sum"]
Optimizer = Literal["adam", "adamod", "sgd"]
Gradient = Literal["stale", "unrolled"]
Predict = Literal["after", "before"]


def _check_statistics(value: Any) -> Any:
    if value not in ("train", "test") and not (_is_number(value) and 0 <= value <= 1):
        raise ValueError(f"expected train, test or a weight in [0, 1], got {value!r}")
    return value


def _check_betas(value: Any) -> Any:
    numbers = value if isinstance(value, tuple) else ()
    is_pair = len(numbers) == 2 and all(_is_number(one) and 0 <= one < 1 for one in numbers)
    if value is not None and not is_pair:
        raise ValueError(f"expected two numbers in [0, 1), got {value!r}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Settings(Declared):
    """Everything that defines a defense. `dent list settings` prints the fields.

    >>> Settings(steps=-1, affine="layer")
    Traceback (most recent call last):
    ...
    dent.declared.SettingsError: 2 wrong settings of the defense:
      affine: expected one of off, batch, sample, got 'layer'
      steps: expected an integer >= 0, got -1
    """

    title = "defense"
    affine: Affine = Field(
        "batch",
        description="Delta, for scales and shifts of normalization layers: one per batch or sample",
    )
    statistics: Annotated[Literal["train", "test"] | float, BeforeValidator(_check_statistics)] = Field(
        "train", description="BatchNorm statistics: train, test, or the weight of test in [0, 1]"
    )
    blur: Blur = Field("off", description="Gaussian smoothing of the input with covariance Sigma")
    sigma: Number = Field(
        0.7, description="initial standard deviation of the smoothing, in pixels", gt=0,
        allow_inf_nan=False,
    )  # fmt: skip
    covariance: Covariance = Field("spherical", description="shape of Sigma")
    blur_per: Per = Field("batch", description="one dynamic Sigma per batch or sample")
    blur_lr: Number = Field(
        0.25, description="learning rate of the logarithm of Sigma", gt=0, allow_inf_nan=False
    )
    objective: Objective = Field("entropy", description="objective to minimize")
    reduction: Reduction = Field("mean", description="reduction of the objective over the batch")
    optimizer: Optimizer = Field("adam", description="optimizer of the updates")
    lr: Number = Field(1e-3, description="learning rate of Delta", gt=0, allow_inf_nan=False)
    betas: Annotated[tuple[float, float] | None, BeforeValidator(_check_betas)] = Field(
        None, description="of adam (default: 0.9, 0.999) and adamod (default: 0.99, 0.999)"
    )
    beta3: Number | None = Field(None, description="of adamod (default: 0.6)", ge=0, lt=1)
    momentum: Number | None = Field(None, description="of sgd (default: 0.9)", ge=0, lt=1)
    steps: int = Field(
        10, description="number of updates per batch; 0 leaves only smoothing and statistics", ge=0
    )
    gradient: Gradient = Field(
        "stale", description="what an attacker's gradient sees of the updates: constants, or all"
    )
    continual: bool = Field(False, description="carry the adaptation from batch to batch until reset()")
    predict: Predict = Field("after", description="predict after or before the updates")

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_faults(self._optimizer_faults() + self._contradictions())
        return self

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

    def _optimizer_faults(self) -> list[str]:
        applies = {"betas": ("adam", "adamod"), "beta3": ("adamod",), "momentum": ("sgd",)}
        return [
            f"{name}: applies to {' and '.join(applies[name])}, not to {self.optimizer}; leave it out"
            for name in self.optimizer_options()
            if self.optimizer not in applies[name]
        ]

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
