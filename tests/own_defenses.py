"""Defenses as a user may write them: complete, with less than the protocol, and broken."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from cells import tiny
from torch import Tensor, nn

import dent


class Centered:
    """A complete defense: each update moves an input toward its mean, `rate` of the way."""

    independent = True

    def __init__(self, model: nn.Module, rate: float = 0.2, updates: int = 2) -> None:
        self.model, self.rate, self.updates = model, rate, updates

    def adapt(
        self,
        inputs: Tensor,
        *,
        start: Tensor | None = None,
        steps: int | None = None,
        gradient: str | None = None,
    ) -> Tensor:
        inputs = inputs if gradient == "unrolled" else inputs.detach()
        offset = torch.zeros_like(inputs) if start is None else start
        for _ in range(self.updates if steps is None else steps):
            moved = inputs + offset
            offset = offset + self.rate * (moved.mean((1, 2, 3), keepdim=True) - moved)
        return offset

    def predict(self, inputs: Tensor, state: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs + state)
        return logits

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.predict(inputs, self.adapt(inputs))


def make(model: nn.Module) -> Centered:
    return Centered(model)


class Plain:
    """A defense with nothing that is optional: adapt takes the inputs alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def adapt(self, inputs: Tensor) -> Tensor:
        return inputs.detach().mean((1, 2, 3), keepdim=True)

    def predict(self, inputs: Tensor, state: Tensor) -> Tensor:
        logits: Tensor = self.model(0.9 * inputs + 0.1 * state)
        return logits

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.predict(inputs, self.adapt(inputs))


class Inside(nn.Module):
    """A module that adapts inside of forward alone, by gradients, and to the whole batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            shift = torch.zeros_like(inputs[:1]).requires_grad_()
            loss = self.model(inputs.detach() + shift).logsumexp(1).sum()
            (grad,) = torch.autograd.grad(loss, shift)
        logits: Tensor = self.model(inputs + 0.01 * grad.sign())
        return logits


class Lying(Inside):
    independent = True  # it is not


def make_lying(model: nn.Module) -> Lying:
    return Lying(model)


def make_negative(model: nn.Module) -> Centered:
    return Centered(model, updates=-2)


def make_true(model: nn.Module) -> Centered:
    return Centered(model, updates=True)


class Mortal(Centered):
    """A defense that kills its process at its n-th call, if the environment says n."""

    calls = 0

    def __call__(self, inputs: Tensor) -> Tensor:
        type(self).calls += 1
        if type(self).calls == int(os.environ.get("DIE_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(inputs)


def make_mortal(model: nn.Module) -> Mortal:
    return Mortal(model)


def make_nothing(model: nn.Module) -> Any:
    return None


class Tented(nn.Module):
    """A module that changes its own parameters in every call, as the code of TENT does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            entropy = torch.distributions.Categorical(logits=self.model(inputs.detach())).entropy().sum()
            parameters = [one for one in self.model.parameters() if one.requires_grad]
            for one, grad in zip(parameters, torch.autograd.grad(entropy, parameters), strict=True):
                one.data -= 0.01 * grad
        logits: Tensor = self.model(inputs)
        return logits


class Drifting(nn.Module):
    """A module that carries the mean of all inputs so far from call to call, without a gradient."""

    mean: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = 0.5 * (self.mean + inputs.detach().mean())
        logits: Tensor = self.model(inputs - 0.1 * self.mean)
        return logits


class Each(nn.Module):
    """A module that adapts inside of forward alone, each input by itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            points = inputs.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self.model(points).logsumexp(1).sum(), points)
        logits: Tensor = self.model(inputs + 0.01 * grad.sign())
        return logits


class Remembers(Centered):
    """A defense that keeps what it saw last."""

    seen: Tensor | float = 0.0

    def adapt(self, inputs: Tensor, **options: Any) -> Tensor:
        offset, self.seen = super().adapt(inputs, **options) + 0.1 * self.seen, inputs.detach().mean()
        return offset


class ChangesModel(Centered):
    def adapt(self, inputs: Tensor, **options: Any) -> Tensor:
        next(self.model.parameters()).data.mul_(1 + 1e-6)
        return super().adapt(inputs, **options)


class OneRow(Centered):
    def predict(self, inputs: Tensor, state: Tensor) -> Tensor:
        return super().predict(inputs, state)[:1]


class OtherCall(Centered):
    def __call__(self, inputs: Tensor) -> Tensor:
        return 2 * super().__call__(inputs)


class Closure(Tensor):
    """A state that pickle refuses."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle 'Closure'")


class NotPicklable(Centered):
    def adapt(self, inputs: Tensor, **options: Any) -> Tensor:
        return super().adapt(inputs, **options).as_subclass(Closure)


def make_defended() -> Any:
    return dent.defend(tiny(), "hedge", steps=2)


def make_centered() -> Centered:
    return Centered(tiny())


def make_inside() -> Inside:
    return Inside(tiny())


class Coin(Plain):
    """A random defense: for each input, a coin decides whether it gets the model's answer or another."""

    randomized = True
    independent: bool | None = True
    share = 0.7  # of the model's own answers

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.predict(inputs, self.adapt(inputs))

    def predict(self, inputs: Tensor, state: Tensor) -> Tensor:
        logits = super().predict(inputs, state)
        own = torch.rand(len(inputs), 1) < self.share
        return torch.where(own, logits, logits.roll(1, dims=1))


class UndeclaredCoin(Coin):
    randomized = False
    independent = None


class SilentCoin(Coin):
    """It is independent, as it declares, but does not declare that it is random."""

    randomized = False


class SharedCoin(Coin):
    """One coin for the whole batch, which depends on all of its inputs too."""

    independent = False

    def predict(self, inputs: Tensor, state: Tensor) -> Tensor:
        logits = super(Coin, self).predict(inputs - 0.1 * inputs.detach().mean(0), state)
        return logits if torch.rand(()) < self.share else logits.roll(1, dims=1)


class LyingCoin(SharedCoin):
    independent = True


def make_net() -> nn.Module:
    return tiny()
