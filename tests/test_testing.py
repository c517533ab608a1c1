"""`check_defense` passes what keeps the promises, and names the promise that is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dent
from dent.testing import BrokenPromiseError, check_defense


@dataclass(frozen=True)
class Offset:
    value: Tensor

    def detach(self) -> Offset:
        return Offset(self.value.detach())


class Right:
    """Moves each input toward lower entropy, by one step: keeps every promise."""

    independent: Any = True

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)).double()

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.predict(inputs, self.adapt(inputs))

    def adapt(
        self,
        inputs: Tensor,
        *,
        start: Offset | None = None,
        steps: int | None = None,
        gradient: str | None = None,
    ) -> Offset:
        with torch.inference_mode(False), torch.enable_grad():
            offset = torch.zeros_like(inputs.clone()) if start is None else start.value
            for _ in range(1 if steps is None else steps):
                points = (inputs.clone() + offset).detach().requires_grad_()
                log_p = self.model(points).log_softmax(1)
                (slope,) = torch.autograd.grad((log_p.exp() * log_p).sum(), points)
                offset = offset + 0.1 * slope
            return Offset(offset.detach())

    def predict(self, inputs: Tensor, state: Offset) -> Tensor:
        return self.model(inputs + state.value)  # type: ignore[no-any-return]


class WithoutParts(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1)


class NotDeclared(Right):
    independent = "yes"


class OneLogit(Right):
    def predict(self, inputs: Tensor, state: Offset) -> Tensor:
        return super().predict(inputs, state)[:, 0]


class Infinite(Right):
    def predict(self, inputs: Tensor, state: Offset) -> Tensor:
        return super().predict(inputs, state) / 0


class KeepsState(Right):
    kept: Offset | None = None

    def adapt(self, inputs: Tensor, **given: Any) -> Offset:
        self.kept = super().adapt(inputs, start=self.kept)
        return self.kept


class RemembersOthers(Right):
    """Differs only after a call with other inputs: equal calls in a row agree."""

    seen: Tensor | None = None

    def predict(self, inputs: Tensor, state: Offset) -> Tensor:
        if self.seen is None or not torch.equal(self.seen, inputs):
            self.seen, self.calls = inputs.detach().clone(), getattr(self, "calls", 0) + 1
        return super().predict(inputs, state) + self.calls


class Random(Right):
    def predict(self, inputs: Tensor, state: Offset) -> Tensor:
        return super().predict(inputs + 0.1 * torch.rand_like(inputs), state)


class DeclaredRandom(Random):
    independent = None
    randomized = True


class OtherCall(Right):
    def __call__(self, inputs: Tensor) -> Tensor:
        return super().__call__(inputs) + 1


class SeesBatch(Right):
    def predict(self, inputs: Tensor, state: Offset) -> Tensor:
        logits = super().predict(inputs, state)
        return logits - logits.mean(0)


class Leaks(Right):
    """Calls its state stale, and returns one with a gradient."""

    def adapt(self, inputs: Tensor, *, gradient: str | None = None, **given: Any) -> Offset:
        return Offset(super().adapt(inputs, **given).value + 0.1 * (inputs - inputs.detach()))


class NoGradient(Right):
    def predict(self, inputs: Tensor, state: Offset) -> Tensor:
        with torch.no_grad():
            return super().predict(inputs, state)


class ChangesWeights(Right):
    def adapt(self, inputs: Tensor, **given: Any) -> Offset:
        with torch.no_grad():
            next(self.model.parameters()).add_(1)
        return super().adapt(inputs)


class ChangesMode(Right):
    def adapt(self, inputs: Tensor, **given: Any) -> Offset:
        self.model.eval()
        return super().adapt(inputs)


class FillsGrad(Right):
    def adapt(self, inputs: Tensor, **given: Any) -> Offset:
        with torch.inference_mode(False), torch.enable_grad():
            self.model(inputs.clone()).sum().backward()
        return super().adapt(inputs)


class FreezesWeights(Right):
    def adapt(self, inputs: Tensor, **given: Any) -> Offset:
        self.model.requires_grad_(False)
        return super().adapt(inputs)


class ChangesInputs(Right):
    def adapt(self, inputs: Tensor, **given: Any) -> Offset:
        state = super().adapt(inputs)
        with torch.no_grad():
            inputs.clamp_(0.1, 0.9)
        return state


class NotPicklable(Right):
    def adapt(self, inputs: Tensor, **given: Any) -> Any:
        offset = super().adapt(inputs).value
        return lambda: offset

    def predict(self, inputs: Tensor, state: Any) -> Tensor:
        return super().predict(inputs, Offset(state()))


class NeedsGradients(Right):
    def adapt(self, inputs: Tensor, **given: Any) -> Offset:
        points = inputs.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.model(points).logsumexp(1).sum(), points)
        return Offset(slope)


@pytest.fixture
def points() -> Tensor:
    return torch.rand(4, 3, 2, 2, dtype=torch.double)


@pytest.mark.parametrize("made", [Right, DeclaredRandom])
def test_a_right_defense_passes(made: Callable[[], Any], points: Tensor) -> None:
    check_defense(made(), points)


@pytest.mark.parametrize(
    ("made", "promise"),
    [
        (WithoutParts, "interface: expected adapt"),
        (NotDeclared, "interface: expected `independent`"),
        (OneLogit, r"logits: expected floats \(4, classes\), got torch.float64 of shape \(4,\)"),
        (Infinite, "logits: expected finite"),
        (KeepsState, "clean state"),
        (RemembersOthers, "clean state"),
        (Random, "deterministic"),
        (OtherCall, "adapt and predict"),
        (SeesBatch, "independent"),
        (Leaks, "stale gradient"),
        (NoGradient, "gradient: expected predict"),
        (ChangesWeights, "unchanged model: .*model.1.weight"),
        (ChangesMode, "unchanged model: .*mode of model"),
        (FillsGrad, "unchanged model: .*grad of model.1.bias"),
        (FreezesWeights, "unchanged model: .*requires_grad of model.1.bias"),
        (ChangesInputs, "unchanged inputs"),
        (NotPicklable, "picklable state"),
        (NeedsGradients, r"callers: expected answers under torch.no_grad\(\)"),
    ],
)
def test_a_broken_promise_is_named(made: Callable[[], Any], promise: str, points: Tensor) -> None:
    with pytest.raises(BrokenPromiseError, match=promise) as caught:
        check_defense(made(), points)
    assert str(caught.value).startswith(f"{made.__name__} breaks ")


@pytest.mark.parametrize("preset", sorted(set(dent.PRESETS) - {"tent"}))
def test_the_presets_of_dent_pass(preset: str, net: nn.Module, images: Tensor) -> None:
    check_defense(dent.defend(net, preset), images)


def test_a_state_that_cannot_be_continued_is_named(points: Tensor) -> None:
    class Restarts(Right):
        def adapt(
            self,
            inputs: Tensor,
            *,
            start: Offset | None = None,
            steps: int | None = None,
            gradient: str | None = None,
        ) -> Offset:
            state = super().adapt(inputs, steps=steps)
            return state if start is None else Offset(2 * state.value)

    with pytest.raises(BrokenPromiseError, match="start: expected adapt"):
        check_defense(Restarts(), points)


def test_arguments_may_be_taken_by_any_name(points: Tensor) -> None:
    """What takes all arguments is held to the same promises as what names them."""

    class TakesAll(Right):
        def adapt(self, inputs: Tensor, **options: Any) -> Offset:
            state = super().adapt(inputs, steps=options.get("steps"))
            return state if options.get("start") is None else Offset(2 * state.value)

    with pytest.raises(BrokenPromiseError, match="start: expected adapt"):
        check_defense(TakesAll(), points)


def test_only_the_broken_promise_is_named(points: Tensor) -> None:
    """One fault gives one line, so that the reader knows where to look."""
    for made in (SeesBatch, OtherCall, Leaks, FillsGrad, ChangesMode, NotPicklable, Random):
        with pytest.raises(BrokenPromiseError, match="breaks 1 promise") as caught:
            check_defense(made(), points)
        assert len(str(caught.value).splitlines()) == 2, made


def test_the_callers_random_numbers_are_left_alone(points: Tensor) -> None:
    defense, before = DeclaredRandom(), torch.get_rng_state()
    check_defense(defense, points)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_input_is_not_enough(points: Tensor) -> None:
    with pytest.raises(ValueError, match="expected a tensor of at least two inputs"):
        check_defense(Right(), points[:1])


def test_a_defense_that_goes_on_from_batch_to_batch_is_not_clean(net: nn.Module, images: Tensor) -> None:
    with pytest.raises(BrokenPromiseError, match="clean state"):
        check_defense(dent.defend(net, "tent"), images)
