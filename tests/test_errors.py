"""Each refusal, with its reason."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from nets import randomized, small
from torch import Tensor, nn

import dent
from dent.defense.dent.checks import is_finite

IMAGES = torch.rand(4, 3, 8, 8)


@pytest.fixture
def model() -> nn.Module:
    return small(nn.BatchNorm2d(8))


@pytest.mark.parametrize(
    ("preset", "settings", "message"),
    [
        ("dentt", {}, "unknown defense 'dentt'; did you mean 'dent'"),
        ("dent", {"affine": "layer"}, "affine: expected one of off, batch, sample, got 'layer'"),
        ("dent", {"statistics": "running"}, r"statistics: expected train, test or a weight in \[0, 1\]"),
        (
            "dent",
            {"statistics": 1.5},
            r"statistics: expected train, test or a weight in \[0, 1\], got 1.5",
        ),
        ("dent", {"blur": "on"}, "blur: expected one of off, static, dynamic"),
        ("dent", {"covariance": "round"}, "covariance: expected one of spherical, diagonal, full"),
        (
            "dent",
            {"objective": "tsallis"},
            "objective: expected one of entropy, information-maximization",
        ),
        ("dent", {"optimizer": "lion"}, "optimizer: expected one of adam, adamod, sgd"),
        ("dent", {"reduction": "none"}, "reduction: expected one of mean, sum"),
        ("dent", {"gradient": "bpda"}, "gradient: expected one of stale, unrolled"),
        ("dent", {"continual": "yes"}, "continual: expected true or false, got 'yes'"),
        ("dent", {"steps": -1}, "steps: expected an integer >= 0, got -1"),
        ("dent", {"steps": 1.5}, "steps: expected an integer >= 0, got 1.5"),
        ("dent", {"lr": 0}, "lr: expected a number > 0, got 0"),
        ("dent", {"sigma": float("nan")}, "sigma: expected a number > 0, got nan"),
        ("dent", {"blur_lr": "fast"}, "blur_lr: expected a number such as 0.5 or 8/255, got 'fast'"),
        ("dent", {"betas": (0.9, 1.0)}, r"betas: expected two numbers in \[0, 1\)"),
        ("dent", {"beta3": 0.5}, "beta3: applies to adamod, not to adam"),
        ("dent", {"momentum": 0.5}, "momentum: applies to sgd, not to adam"),
        ("static", {"steps": 3}, "steps: 3 updates of nothing"),
        ("dent+", {"continual": True}, "continual: sample-wise parameters belong to their inputs"),
        ("dent", {"predict": "before"}, "predict: before needs continual=True"),
        ("dent", {"steps": -1, "lr": -1.0}, "2 wrong settings of the defense:\n  lr: .*\n  steps: .*"),
    ],
)
def test_wrong_settings(model: nn.Module, preset: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dent.defend(model, preset, **settings)


def test_unknown_settings_are_named_with_the_nearest(model: nn.Module) -> None:
    with pytest.raises(
        TypeError, match="unknown settings of the defense: step, color; did you mean 'steps'"
    ):
        dent.defend(model, "dent", step=3, color="red")


class Probabilities(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).softmax(1)  # type: ignore[no-any-return]


class Returning(nn.Module):
    def __init__(self, net: nn.Module, what: Any) -> None:
        super().__init__()
        self.net, self.what = net, what

    def forward(self, x: Tensor) -> Any:
        return self.what(self.net(x))


@pytest.mark.parametrize(
    ("wrap", "error", "message"),
    [
        (Probabilities, ValueError, "got probabilities"),
        (
            lambda net: Returning(net, lambda y: (y, y)),
            TypeError,
            "to return a tensor of logits .* got tuple",
        ),
        (lambda net: Returning(net, lambda y: y[:, 0]), ValueError, r"to return logits \(4, classes\)"),
        (lambda net: Returning(net, lambda y: y.argmax(1)), ValueError, "got torch.int64"),
        (lambda net: Returning(net, lambda y: y / 0), ValueError, "finite logits, got NaN or infinity"),
        (
            lambda net: Returning(net, lambda y: y.detach()),
            ValueError,
            "do not depend on what is adapted",
        ),
    ],
)
@pytest.mark.parametrize("preset", ["static", "dent"])
def test_models_that_return_no_logits(
    model: nn.Module, preset: str, wrap: Any, error: type[Exception], message: str
) -> None:
    defended = dent.defend(wrap(model), preset)
    if preset == "static" and "depend" in message:
        assert defended(IMAGES).shape == (4, 4)
        return
    with pytest.raises(error, match=message):
        defended(IMAGES)


def test_one_row_of_non_negative_logits_is_no_probability(model: nn.Module) -> None:
    one_hot = Returning(model, lambda y: nn.functional.one_hot(y.argmax(1), 4) + 0 * y)
    for preset in ("static", "dent+solo"):
        assert dent.defend(one_hot, preset)(IMAGES[:1]).sum() == 1
        with pytest.raises(ValueError, match="got probabilities"):
            dent.defend(one_hot, preset)(IMAGES[:2])


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), TypeError, "a float tensor, got torch.uint8"),
        ([1.0], TypeError, "a float tensor, got list"),
        (torch.rand(3), ValueError, r"a batch of inputs \(N, ...\) with N >= 1, got shape \(3,\)"),
        (torch.rand(0, 3, 8, 8), ValueError, r"N >= 1, got shape \(0, 3, 8, 8\)"),
        (torch.full((4, 3, 8, 8), torch.nan), ValueError, "finite inputs, got NaN or infinity"),
        (
            torch.empty(4, 3, 8, 8, device="meta"),
            ValueError,
            "inputs on cpu, where the model is, got meta",
        ),
        (
            torch.rand(3, 8, 8),
            ValueError,
            r"a batch of images \(N, C, H, W\), got shape \(3, 8, 8\); .* inputs\[None\]",
        ),
        (
            torch.rand(4, 3, 8, 8).half(),
            ValueError,
            "inputs of torch.float32, as the parameters of Sequential, got torch.float16; convert",
        ),
    ],
)
def test_wrong_inputs(model: nn.Module, inputs: Any, error: type[Exception], message: str) -> None:
    defended = dent.defend(model, "dent", steps=1)
    with pytest.raises(error, match=message):
        defended(inputs)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("others", [0.5, torch.finfo(torch.float32).max])
def test_one_value_that_is_not_finite_is_seen(value: float, others: float) -> None:
    values = torch.full((2, 3, 4, 4), others)  # whose sum overflows, or not
    assert is_finite(values)
    values[1, 2, 3, 3] = value
    assert not is_finite(values)
    values[0, 0, 0, 0] = -value
    assert not is_finite(values)


def test_smoothing_needs_images() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(
        ValueError, match=r"expected images \(N, C, H, W\) to smooth, got shape \(5, 4\)"
    ):
        dent.defend(net, "dent-nominal")(torch.rand(5, 4))


def test_nothing_to_adapt() -> None:
    with pytest.raises(
        ValueError, match="nothing to adapt in Sequential: normalization layers .* are missing"
    ):
        dent.defend(small(nn.Identity()), "dent")
    with pytest.raises(ValueError, match="have no affine parameters"):
        dent.defend(small(nn.BatchNorm2d(8, affine=False)), "dent")
    assert dent.defend(small(nn.Identity()), "blur")(IMAGES).shape == (4, 4)


def test_statistics_need_batch_norm() -> None:
    with pytest.raises(
        ValueError, match="statistics='test' needs BatchNorm layers, and Sequential has none"
    ):
        dent.defend(small(nn.GroupNorm(2, 8)), "dent", statistics="test")
    untracked = small(nn.BatchNorm2d(8, track_running_stats=False))
    with pytest.raises(ValueError, match="statistics=0.5 mixes with those of training"):
        dent.defend(untracked, "dent", statistics=0.5)
    flat = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="need more than one value per channel"):
        dent.defend(flat, "dent", statistics="test")(torch.rand(1, 4))


def test_models_that_cannot_be_adapted(model: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got function"):
        dent.defend(lambda x: x)  # type: ignore[call-overload]
    with pytest.warns(DeprecationWarning, match="jit"):
        scripted = torch.jit.trace(model.eval(), IMAGES)
    with pytest.raises(TypeError, match="scripted and cannot be adapted"):
        dent.defend(scripted)
    with pytest.raises(TypeError, match=r"spread over devices; defend its \.module"):
        dent.defend(nn.DataParallel(model))
    lazy = nn.Sequential(nn.LazyLinear(8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(TypeError, match="not initialized yet; run the model once"):
        dent.defend(lazy)
    with pytest.raises(TypeError, match=r"'0' \(Conv2d\) has no weights, because it is on .* meta"):
        dent.defend(small(nn.BatchNorm2d(8)).to("meta"))
    for preset in ("static", "dent", "hedge"):
        with pytest.raises(ValueError, match="logits of two or more classes, got one; add a logit of"):
            dent.defend(small(nn.BatchNorm2d(8), classes=1), preset)(IMAGES)
    with pytest.raises(TypeError, match="defended already"):
        dent.defend(dent.defend(model))
    locked = small(nn.BatchNorm2d(8))
    locked.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(TypeError, match="structure of Sequential cannot be copied"):
        dent.defend(locked)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_models(model: nn.Module) -> None:
    quantized = torch.ao.nn.quantized.Linear(4, 4)
    with pytest.raises(TypeError, match="is quantized and has no gradient"):
        dent.defend(nn.Sequential(model, quantized))


class SequenceFirst(nn.Module):
    """Normalizes with the batch in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).permute(2, 0, 1)
        return self.head(self.norm(tokens).mean(0))  # type: ignore[no-any-return]


def test_sample_wise_needs_the_batch_first() -> None:
    defended = dent.defend(randomized(SequenceFirst()), "dent+")
    with pytest.raises(
        ValueError, match="sample-wise adaptation needs the 4 inputs in the first dimension"
    ):
        defended(IMAGES.double())
    batch_wise = dent.defend(randomized(SequenceFirst()), "dent")
    assert batch_wise(IMAGES.double()).shape == (4, 4)


def test_states_belong_to_their_inputs(model: nn.Module) -> None:
    defended = dent.defend(model, "dent+")
    state = defended.adapt(IMAGES)
    with pytest.raises(
        ValueError, match="the 4 inputs that this sample-wise state was adapted to, got 3"
    ):
        defended.predict(IMAGES[:3], state)
    with pytest.raises(ValueError, match="gradient: expected stale or unrolled, got 'exact'"):
        defended(IMAGES, gradient="exact")
    with pytest.raises(ValueError, match="steps: expected >= 0, got -2"):
        defended.adapt(IMAGES, steps=-2)
    with pytest.raises(ValueError, match="steps: expected 0, got 2"):
        dent.defend(model, "static").adapt(IMAGES, steps=2)


def test_chunks_need_inputs_that_do_not_see_one_another(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="chunk: expected an integer >= 1, got 0"):
        dent.defend(model, "dent", chunk=0)
    with pytest.raises(ValueError, match="chunk: expected an integer >= 1, got 2.5"):
        dent.defend(model, "dent", chunk=2.5)
    with pytest.raises(ValueError, match="information-maximization' looks at all predictions together"):
        dent.defend(model, "dent+", chunk=2)
    with pytest.raises(ValueError, match="statistics are of the whole batch"):
        dent.defend(model, "dent-nominal", chunk=2)
