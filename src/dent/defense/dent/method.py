"""Defensive entropy minimization: a classifier that adapts to every batch it is given (section 3).

Read it from `Dent.forward` down: a call adapts, then predicts; `adapt` makes the updates; `update` is
the method. What makes it fast and leaves the model alone is in `layers.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dent.defense.dent.blur import bound_blur, get_deviations, make_blur, smooth
from dent.defense.dent.checks import (
    LowDiversityWarning,
    check_chunk,
    check_inputs,
    check_logits,
    check_model,
    find_low_diversity,
)
from dent.defense.dent.layers import (
    AdaptableModel,
    Statistics,
    Tensors,
    affine_names,
    is_normalization,
)
from dent.defense.dent.objectives import OBJECTIVES, entropy
from dent.defense.dent.optimizers import OPTIMIZERS, Moments
from dent.defense.dent.settings import Gradient, Settings
from dent.defense.protocol import read_independence

# For each of "delta" and "blur" that is adapted: its value, then the moments of the optimizer.
Variables = dict[str, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Trace:
    """The steps of an adaptation, for plots. No field has a gradient.

    logits: (steps, N, classes), seen before each update.
    delta: (steps + 1, 1 or N), the L2 norm of Delta before the first and after each update.
    sigma: (steps + 1, 1 or N, 2), standard deviations of the smoothing along y and x, in pixels.
    """

    logits: Tensor
    delta: Tensor
    sigma: Tensor

    @property
    def entropy(self) -> Tensor:
        """Entropy (steps, N) before each update, in nats."""
        return entropy(self.logits.flatten(0, 1)).view(self.logits.shape[:2])


@dataclass(frozen=True)
class State:
    """What a defense has learned from a batch: a value, never changed, that `predict` takes.

    delta: (1 or N, parameters), added to the scales and shifts of the model, or None.
    blur: (1 or N, 1 to 3), the parameters of the smoothing (see `blur.py`), or None.
    moments: what the optimizer remembers of delta and of blur, to continue from here.
    steps: number of updates that led here.
    statistics: mean and variance of each BatchNorm layer if they were frozen, else None.
    """

    delta: Tensor | None
    blur: Tensor | None
    moments: dict[str, Moments]
    steps: int
    trace: Trace
    statistics: Statistics | None = None


class Dent(nn.Module):
    """A model defended at test time: inputs to logits, adapted to each batch.

    The model is shared and never changed. Its parameters are constants here: a backward pass through
    the defense reaches `inputs` only. Several threads may call it at once.

    compile: compile the inner loop, at the first call for each shape of inputs.
    channels_last: memory layout of the inner loop. None chooses channels last on a CPU, where it is
    faster, for models that accept it.
    chunk: take at most this many inputs at a time through an update. The updates are the same and need
    less memory. Not possible if the inputs of a batch see one another.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    >>> defended = Dent(model, Settings(steps=2))
    >>> defended(torch.rand(5, 3, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        *,
        name: str = "custom",
        compile: bool = False,
        channels_last: bool | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
        check_model(model, settings)
        check_chunk(chunk, model, settings)
        self.model = model
        self.settings = settings
        self.name = name
        self.chunk = chunk
        self.training = False
        self._net = AdaptableModel(
            model, test_share=settings.test_share, compile=compile, channels_last=channels_last
        )
        adapted = {"delta": settings.adapts_affine, "blur": settings.adapts_blur}
        rates = {"delta": settings.lr, "blur": settings.blur_lr}
        self._learning_rates = {name: rates[name] for name in rates if adapted[name]}
        self._has_warned = False

    def forward(self, inputs: Tensor, *, gradient: Gradient | None = None) -> Tensor:
        """Adapt to the inputs, predict them, and forget. Return logits (N, classes)."""
        return self.predict(inputs, self.adapt(inputs, gradient=gradient))

    def adapt(
        self,
        inputs: Tensor,
        *,
        start: State | None = None,
        steps: int | None = None,
        gradient: Gradient | None = None,
        freeze_statistics: bool = False,
    ) -> State:
        """Minimize the entropy of the predictions on a batch over Delta and Sigma.

        start: continue from this state. None starts from the model's own parameters.
        steps: number of updates (default: the setting).
        gradient: what a later backward pass to `inputs` sees (default: the setting). `stale`: the state
        is a constant. `unrolled`: every update, exactly. Each is computed again in the backward pass, so
        that memory does not grow with the steps.
        freeze_statistics: also keep the normalization statistics of this batch, for one more forward, so
        that `predict` takes any inputs, even a single one, as if they came with this batch.
        """
        steps = self.settings.steps if steps is None else steps
        gradient = gradient or self.settings.gradient
        if gradient not in ("stale", "unrolled"):
            raise ValueError(f"gradient: expected stale or unrolled, got {gradient!r}")
        if steps < 0 or (steps > 0 and not self._learning_rates):
            raise ValueError(f"steps: expected {'>= 0' if self._learning_rates else '0'}, got {steps}")
        check_inputs(inputs, self.model, self.settings)
        is_unrolled = gradient == "unrolled" and torch.is_grad_enabled() and inputs.requires_grad
        with torch.inference_mode(False):
            inputs = inputs.clone() if inputs.is_inference() else inputs
            inputs = self._net.lay_out(inputs if is_unrolled else inputs.detach())
            static_blur = None if "blur" in self._learning_rates else self._start_blur(inputs, 1)
            smoothed = self._net.lay_out(smooth(inputs, static_blur))
            tensors, done = self._net.read_tensors(), start.steps if start else 0
            variables = self._start(inputs, tensors, start)
            logits: list[Tensor] = []
            sizes = [_measure(inputs, variables, static_blur)]
            for step in range(done + 1, done + steps + 1):
                if is_unrolled:
                    seen, *flat = _UnrolledUpdate.apply(  # type: ignore[no-untyped-call]
                        self, smoothed, tensors, step, list(variables), *_flatten(variables)
                    )
                    variables = _group(variables, flat)
                else:
                    seen, variables = self.update(smoothed, tensors, step, variables)
                if not logits:
                    check_logits(seen, inputs, type(self.model).__name__)
                    self._warn_of_low_diversity(seen)
                logits.append(seen)
                sizes.append(_measure(inputs, variables, static_blur))
            delta = variables["delta"][0] if "delta" in variables else None
            blur = variables["blur"][0] if "blur" in variables else static_blur
            statistics: Statistics | None = None
            if freeze_statistics:
                statistics = self._net.measure_statistics(smooth(inputs, blur), tensors, delta)
            norms, deviations = (torch.stack(column) for column in zip(*sizes, strict=True))
            trace = Trace(
                torch.stack(logits) if logits else inputs.new_empty(0, len(inputs), 0), norms, deviations
            )
            moments = {name: group[1:] for name, group in variables.items()}
            return State(delta, blur, moments, done + steps, trace, statistics)

    def update(
        self,
        inputs: Tensor,
        tensors: Tensors,
        step: int,
        variables: Variables,
        *,
        differentiable: bool = False,
    ) -> tuple[Tensor, Variables]:
        """Make one update (section 3.2). Return the logits that it saw and the variables after it.

        tensors: those of the model. step: number of the update, from 1.
        differentiable: keep the graph, for the unrolled gradient.
        """
        settings = self.settings
        values = {name: group[0] for name, group in variables.items()}
        if not differentiable:
            values = {name: value.detach().requires_grad_() for name, value in values.items()}
        pieces = math.ceil(len(inputs) / self.chunk) if self.chunk else 1
        seen: list[Tensor] = []
        grads: list[Tensor] = []
        with torch.enable_grad():
            for i, piece in enumerate(inputs.chunk(pieces)):
                delta, blur = (_take_rows(values.get(name), i, pieces) for name in ("delta", "blur"))
                # f(g(x; Sigma); theta + Delta)
                logits = self._net(smooth(piece, blur), tensors, delta, eager=differentiable)
                check_logits(logits, piece, type(self.model).__name__, values=False)
                loss = OBJECTIVES[settings.objective](logits) * len(piece)
                if settings.reduction == "mean":
                    loss = loss / len(inputs)
                if not loss.requires_grad:
                    raise ValueError(
                        "the logits do not depend on what is adapted: the model's normalization layers "
                        "are not called, or its forward switches gradients off"
                    )
                new = torch.autograd.grad(
                    loss, list(values.values()), create_graph=differentiable, materialize_grads=True
                )
                grads = [a + b for a, b in zip(grads, new, strict=True)] if grads else list(new)
                seen.append(logits.detach())
        after: Variables = {}
        with torch.set_grad_enabled(differentiable):
            options = settings.optimizer_options()
            for (name, value), grad in zip(values.items(), grads, strict=True):
                lr, moments = self._learning_rates[name], variables[name][1:]
                new_value, new_moments = OPTIMIZERS[settings.optimizer].update(
                    value, grad, moments, step, lr=lr, **options
                )
                if name == "blur":
                    new_value = bound_blur(new_value, inputs.shape[2:])
                after[name] = (new_value, *new_moments)
        return torch.cat(seen), after

    def predict(self, inputs: Tensor, state: State) -> Tensor:
        """Return the logits of the model as adapted in `state`: a static model.

        If the settings take statistics from the test batch, they are those of `inputs`, with their
        gradient, unless the state has them frozen.
        """
        check_inputs(inputs, self.model, self.settings)
        for name, rows in (("delta", state.delta), ("blur", state.blur)):
            if rows is not None and len(rows) not in (1, len(inputs)):
                raise ValueError(
                    f"expected the {len(rows)} inputs that this sample-wise state was adapted to, "
                    f"got {len(inputs)} ({name} has a row for each)"
                )
        if inputs.is_inference() and not torch.is_inference_mode_enabled():
            inputs = inputs.clone()
        tensors, smoothed = self._net.read_tensors(), smooth(inputs, state.blur)
        logits = self._net(smoothed, tensors, state.delta, statistics=state.statistics)
        check_logits(logits, inputs, type(self.model).__name__)
        return logits

    def affine(self, state: State) -> dict[str, Tensor]:
        """Return the adapted scales and shifts by name, each (1 or N, *shape)."""
        if state.delta is None:
            return {}
        return self._net.add_delta(self._net.read_tensors(), state.delta)

    @property
    def independent(self) -> bool | None:
        """True if no answer depends on the rest of its batch, False if one may, None if unknown.

        The settings decide whether dent mixes the inputs of a batch. Only the model can say whether its
        own code does, by an attribute `independent`. Without one the answer is None.
        """
        return read_independence(self.model) if self.settings.independent else False

    def train(self, mode: bool = True) -> Dent:
        """Set the flag that attack libraries look at. The mode of the wrapped model stays as it is."""
        self.training = mode
        return self

    def __repr__(self) -> str:
        s, model = self.settings, self.model
        layers = [layer for layer in model.modules() if is_normalization(layer) and affine_names(layer)]
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        count = sum(getattr(layer, name).numel() for layer in layers for name in affine_names(layer))
        total = sum(p.numel() for p in model.parameters())
        what = f"the scale and shift of {len(layers)} layers ({kinds}), per {s.affine}"
        sigma = f"{s.blur}, {s.covariance}, from {s.sigma:g} px"
        sigma += f", per {s.blur_per}, lr {s.blur_lr:g}" if s.adapts_blur else ""
        updates = f"{s.steps} of {s.optimizer}, lr {s.lr:g}, on {s.objective} ({s.reduction})"
        independent = {True: "yes", False: "no", None: "if the model is"}[self.independent]
        lines = [
            f"model: {type(model).__name__}, {total:,} parameters",
            f"Delta: {f'{count:,} of {total:,} parameters, {what}' if s.adapts_affine else 'off'}",
            f"statistics: {s.statistics}",
            f"Sigma: {'off' if s.blur == 'off' else sigma}",
            f"updates: {updates if s.steps else 'none'}",
            f"gradient: {s.gradient}; independent: {independent}",
        ]
        return f"Dent({self.name}\n  " + "\n  ".join(lines) + "\n)"

    def _start(self, inputs: Tensor, tensors: Tensors, start: State | None) -> Variables:
        """Return Delta = 0 and the initial Sigma, or the variables of `start`."""
        variables: Variables = {}
        for name in self._learning_rates:
            if start is not None:
                value, moments = getattr(start, name), start.moments[name]
            else:
                per = self.settings.affine if name == "delta" else self.settings.blur_per
                rows = len(inputs) if per == "sample" else 1
                if name == "delta":
                    value = torch.zeros_like(self._net.flatten_affine(tensors)).repeat(rows, 1)
                else:
                    value = self._start_blur(inputs, rows)
                moments = (torch.zeros_like(value),) * OPTIMIZERS[self.settings.optimizer].moments
            variables[name] = (value, *moments)
        return variables

    def _start_blur(self, inputs: Tensor, rows: int) -> Tensor | None:
        """Return the initial Sigma, or None without smoothing."""
        if self.settings.blur == "off":
            return None
        exact = torch.promote_types(inputs.dtype, torch.float32)
        params = make_blur(self.settings.sigma, self.settings.covariance, rows)
        return bound_blur(params.to(inputs.device, exact), inputs.shape[2:])

    def _warn_of_low_diversity(self, logits: Tensor) -> None:
        """Warn once if information maximization gets inputs that all look like one class."""
        if self._has_warned or self.settings.objective != "information-maximization":
            return
        if problem := find_low_diversity(logits):
            self._has_warned = True
            warnings.warn(problem, LowDiversityWarning, stacklevel=3)


class _UnrolledUpdate(torch.autograd.Function):
    """`Dent.update` with a gradient to inputs and variables. Backward makes the update again."""

    @staticmethod
    def forward(
        ctx: Any,
        dent: Dent,
        inputs: Tensor,
        tensors: Tensors,
        step: int,
        names: list[str],
        *flat: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(inputs, *flat)
        ctx.dent, ctx.tensors, ctx.step, ctx.names = dent, tensors, step, names
        logits, after = dent.update(inputs.detach(), tensors, step, _group(names, flat))
        ctx.mark_non_differentiable(logits)
        return logits, *_flatten(after)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        inputs, *flat = leaves
        variables = _group(ctx.names, flat)
        with torch.enable_grad():
            _, after = ctx.dent.update(inputs, ctx.tensors, ctx.step, variables, differentiable=True)
            back = torch.autograd.grad(_flatten(after), leaves, grads[1:], allow_unused=True)
        return None, back[0], None, None, None, *back[1:]


def _flatten(variables: Variables) -> tuple[Tensor, ...]:
    return tuple(tensor for group in variables.values() for tensor in group)


def _group(names: Collection[str], flat: Sequence[Tensor]) -> Variables:
    size = len(flat) // len(names)
    return {name: tuple(flat[i * size : (i + 1) * size]) for i, name in enumerate(names)}


def _take_rows(value: Tensor | None, i: int, pieces: int) -> Tensor | None:
    """Return the rows that belong to piece i of the batch: its own, or the one row for all."""
    return value if value is None or len(value) == 1 else value.chunk(pieces)[i]


def _measure(inputs: Tensor, variables: Variables, static_blur: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the norm of Delta and the standard deviations of Sigma, for the trace."""
    blur = variables["blur"][0].detach() if "blur" in variables else static_blur
    delta = variables["delta"][0].detach().norm(dim=1) if "delta" in variables else inputs.new_zeros(1)
    return delta, inputs.new_zeros(1, 2) if blur is None else get_deviations(blur)
