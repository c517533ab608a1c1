"""Defensive entropy minimization: a classifier that adapts to every batch it is given (section 3).

`minimize_entropy` is the method. `Dent` turns it and a model into a defense: a call adapts, then
predicts. What makes it fast and leaves the model alone is in `layers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial, reduce
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dent.defense.dent.blur import bound_blur, get_deviations, make_blur, smooth
from dent.defense.dent.checks import (
    Layers,
    affine_names,
    check_chunk,
    check_inputs,
    check_logits,
    check_model,
    find_layers,
    find_own_layers,
    warn_of_low_diversity,
)
from dent.defense.dent.descent import OBJECTIVES, OPTIMIZERS
from dent.defense.dent.layers import AdaptableModel, Tensors
from dent.defense.dent.settings import Gradient, Settings
from dent.defense.dent.state import State, Trace
from dent.defense.protocol import read_independence

# For each of "delta" and "blur" that is adapted: its value, then the moments of the optimizer.
Variables = dict[str, tuple[Tensor, ...]]


def minimize_entropy(
    f: AdaptableModel,
    theta: Tensors,
    x: Tensor,
    variables: Variables,
    steps: Iterable[int],
    settings: Settings,
    *,
    chunk: int | None = None,
    keep_graph: bool = False,
) -> Iterator[tuple[Tensor, Variables]]:
    """Minimize H(f(g(x; Sigma); theta + Delta)) over Delta and Sigma by gradient steps (section 3.2).

    Yield for each step the logits that it saw and the variables after it.

    steps: numbers of the steps, from 1.
    keep_graph: build the graph from `x` and `variables` to the variables that are yielded.
    """
    objective, optimizer = OBJECTIVES[settings.objective], OPTIMIZERS[settings.optimizer]
    rates, options = {"delta": settings.lr, "blur": settings.blur_lr}, settings.optimizer_options()
    total = len(x) if settings.reduction == "mean" else 1
    for step in steps:
        values = {name: value for name, (value, *_) in variables.items()}
        if not keep_graph:
            values = {name: value.detach().requires_grad_() for name, value in values.items()}
        seen, grads = [], []
        with torch.enable_grad():
            for x_piece, delta, sigma in _cut(x, values, chunk):  # one piece, unless `chunk` is given
                logits = f(smooth(x_piece, sigma), theta, delta, eager=keep_graph)
                loss = objective(logits) * (len(x_piece) / total)
                grads.append(_differentiate(loss, list(values.values()), keep_graph))
                seen.append(logits.detach())
        after: Variables = {}
        with torch.set_grad_enabled(keep_graph):
            for (name, value), *parts in zip(values.items(), *grads, strict=True):
                grad, moments = reduce(torch.add, parts), variables[name][1:]
                value, moments = optimizer.update(value, grad, moments, step, lr=rates[name], **options)
                after[name] = (bound_blur(value, x.shape[2:]) if name == "blur" else value, *moments)
        variables = after
        yield torch.cat(seen), variables


class Dent(nn.Module):
    """A model defended at test time: inputs to logits, adapted to each batch.

    The model is shared and never changed. Its parameters are constants here: a backward pass through
    the defense reaches `inputs` only. Several threads may call it at once.

    compile: compile the inner loop, at the first call for each shape of inputs.
    channels_last: memory layout of the inner loop. None chooses channels last on a CPU, where it is
    faster, for models that accept it.
    chunk: take at most this many inputs at a time through an update. The updates are the same and need
    less memory. Not possible if the inputs of a batch see one another.
    layers: normalization layers of your own to adapt besides torch's, by class or by name in the model.

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
        layers: Layers = (),
    ) -> None:
        super().__init__()
        model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
        self.layers = find_own_layers(model, layers)
        check_model(model, settings, self.layers)
        check_chunk(chunk, model, settings)
        self.model = model
        self.settings = settings
        self.name = name
        self.chunk = chunk
        self.training = False
        self._net = AdaptableModel(
            model, test_share=settings.test_share, compile=compile, channels_last=channels_last,
            layers=self.layers,
        )  # fmt: skip
        self._has_warned = False

    @property
    def updates(self) -> int:
        """The number of updates that a call makes."""
        return self.settings.steps

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
        """Return Delta and Sigma after `steps` updates on the inputs.

        start: continue from this state. None starts from the model's own parameters.
        steps: number of updates (default: the setting).
        gradient: what a later backward pass to `inputs` sees (default: the setting). `stale`: the state
        is a constant. `unrolled`: every update, exactly. Each is computed again in the backward pass, so
        that memory does not grow with the steps.
        freeze_statistics: also keep the normalization statistics of this batch, for one more forward, so
        that `predict` takes any inputs, even a single one, as if they came with this batch.
        """
        steps = self.settings.steps if steps is None else steps
        is_unrolled = self._check_call(inputs, steps, gradient or self.settings.gradient)
        with torch.inference_mode(False):
            inputs = inputs.clone() if inputs.is_inference() else inputs
            inputs = inputs if is_unrolled else inputs.detach()
            is_fixed = self.settings.blur != "off" and not self.settings.adapts_blur
            fixed_blur = self._make_blur(inputs, 1) if is_fixed else None
            x, theta = self._net.lay_out(smooth(inputs, fixed_blur)), self._net.read_tensors()
            variables, done = self._start(inputs, theta, start), start.steps if start else 0
            logits: list[Tensor] = []
            sizes = [_measure(inputs, variables, fixed_blur)]

            def record(seen: Tensor, after: Variables) -> None:
                if not logits:
                    self._check_first(seen)
                logits.append(seen)
                sizes.append(_measure(inputs, after, fixed_blur))

            run = partial(minimize_entropy, self._net, theta, settings=self.settings, chunk=self.chunk)
            numbers = range(done + 1, done + steps + 1)
            if is_unrolled:
                names, flat = list(variables), _flatten(variables)
                variables = _group(names, _Unrolled.apply(run, record, numbers, names, x, *flat))  # type: ignore[no-untyped-call]
            else:
                for seen, after in run(x, variables, numbers):
                    record(seen, after)
                    variables = after
            delta, blur = (_get_value(variables, name) for name in ("delta", "blur"))
            statistics = None
            if freeze_statistics:
                statistics = self._net.measure_statistics(smooth(x, blur), theta, delta)
            norms, deviations = (torch.stack(column) for column in zip(*sizes, strict=True))
            seen = torch.stack(logits) if logits else inputs.new_empty(0, len(inputs), 0)
            moments = {name: group[1:] for name, group in variables.items()}
            blur, trace = fixed_blur if blur is None else blur, Trace(seen, norms, deviations)
            layers = len({name.rpartition(".")[0] for name in self._net.affine_names})
            return State(delta, blur, moments, done + steps, trace, statistics, layers)

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
        theta = self._net.read_tensors() | (state.statistics or {})
        logits = self._net(smooth(inputs, state.blur), theta, state.delta)
        check_logits(logits, type(self.model).__name__)
        return logits

    def affine(self, state: State) -> dict[str, Tensor]:
        """Return the adapted scales and shifts by name, each (1 or N, *shape)."""
        if state.delta is None:
            return {}
        adapted = self._net.add_delta(self._net.read_tensors(), state.delta)
        return {name: adapted[name] for name in self._net.affine_names}

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
        layers = [one for one in find_layers(model, self.layers).values() if affine_names(one)]
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

    def _check_call(self, inputs: Tensor, steps: int, gradient: Gradient) -> bool:
        """Raise if `adapt` cannot run with these arguments. Return True if it must build a graph."""
        if gradient not in ("stale", "unrolled"):
            raise ValueError(f"gradient: expected stale or unrolled, got {gradient!r}")
        adapts = self.settings.adapts_affine or self.settings.adapts_blur
        if steps < 0 or (steps > 0 and not adapts):
            raise ValueError(f"steps: expected {'>= 0' if adapts else '0'}, got {steps}")
        check_inputs(inputs, self.model, self.settings)
        return gradient == "unrolled" and steps > 0 and torch.is_grad_enabled() and inputs.requires_grad

    def _check_first(self, logits: Tensor) -> None:
        """Check the logits that the first update saw. Warn once if they all are of one class."""
        check_logits(logits, type(self.model).__name__)
        if self.settings.objective == "information-maximization" and not self._has_warned:
            self._has_warned = warn_of_low_diversity(logits)

    def _start(self, inputs: Tensor, theta: Tensors, start: State | None) -> Variables:
        """Return Delta = 0 and the initial Sigma, or the variables of `start`."""
        if start is not None:
            return {name: (getattr(start, name), *moments) for name, moments in start.moments.items()}
        settings, values = self.settings, {}
        if settings.adapts_affine:
            rows = len(inputs) if settings.affine == "sample" else 1
            values["delta"] = torch.zeros_like(self._net.flatten_affine(theta)).repeat(rows, 1)
        if settings.adapts_blur:
            values["blur"] = self._make_blur(inputs, len(inputs) if settings.blur_per == "sample" else 1)
        count = OPTIMIZERS[settings.optimizer].moments
        return {name: (value, *repeat(torch.zeros_like(value), count)) for name, value in values.items()}

    def _make_blur(self, inputs: Tensor, rows: int) -> Tensor:
        """Return the initial Sigma, in float32 at least."""
        params = make_blur(self.settings.sigma, self.settings.covariance, rows)
        exact = torch.promote_types(inputs.dtype, torch.float32)
        return bound_blur(params.to(inputs.device, exact), inputs.shape[2:])


class _Unrolled(torch.autograd.Function):
    """The steps of `minimize_entropy` with their exact gradient to `x` and to the variables.

    Only the variables of each step are kept. Backward makes the steps again, from the last to the first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Iterator[tuple[Tensor, Variables]]],
        record: Callable[[Tensor, Variables], None],
        steps: range,
        names: list[str],
        x: Tensor,
        *flat: Tensor,
    ) -> tuple[Tensor, ...]:
        path = [flat]
        for logits, variables in run(x.detach(), _group(names, flat), steps):
            record(logits, variables)
            path.append(_flatten(variables))
        ctx.run, ctx.steps, ctx.names = run, steps, names
        ctx.save_for_backward(x, *(tensor for before in path[:-1] for tensor in before))
        return path[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        x_grad, size = torch.zeros_like(x), len(grads)
        for step in reversed(ctx.steps):
            saved, before = saved[:-size], saved[-size:]
            leaves = [tensor.detach().requires_grad_() for tensor in (x, *before)]
            ((_, after),) = ctx.run(leaves[0], _group(ctx.names, leaves[1:]), [step], keep_graph=True)
            part, *before = torch.autograd.grad(_flatten(after), leaves, grads, materialize_grads=True)
            grads, x_grad = tuple(before), x_grad + part
        return None, None, None, None, x_grad, *grads


def _cut(
    x: Tensor, values: Tensors, chunk: int | None
) -> Iterable[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Return pieces of at most `chunk` inputs, each with its rows of Delta and Sigma."""
    delta, sigma = values.get("delta"), values.get("blur")
    if chunk is None:
        return [(x, delta, sigma)]
    rows = (repeat(v) if v is None or len(v) == 1 else v.split(chunk) for v in (delta, sigma))
    return zip(x.split(chunk), *rows, strict=False)


def _differentiate(loss: Tensor, values: list[Tensor], keep_graph: bool) -> tuple[Tensor, ...]:
    """Return the gradient of the loss to each value: 0 if the value had no part in it."""
    if not loss.requires_grad:
        raise ValueError(
            "the logits do not depend on what is adapted: the model's normalization layers "
            "are not called, or its forward switches gradients off"
        )
    return torch.autograd.grad(loss, values, create_graph=keep_graph, materialize_grads=True)


def _measure(inputs: Tensor, variables: Variables, fixed_blur: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the norm of Delta and the standard deviations of Sigma, for the trace."""
    delta = variables["delta"][0].detach().norm(dim=1) if "delta" in variables else inputs.new_zeros(1)
    blur = variables["blur"][0].detach() if "blur" in variables else fixed_blur
    return delta, inputs.new_zeros(1, 2) if blur is None else get_deviations(blur)


def _get_value(variables: Variables, name: str) -> Tensor | None:
    return variables[name][0] if name in variables else None


def _flatten(variables: Variables) -> tuple[Tensor, ...]:
    return tuple(tensor for group in variables.values() for tensor in group)


def _group(names: Collection[str], flat: Sequence[Tensor]) -> Variables:
    size = len(flat) // len(names)
    return {name: tuple(flat[i * size : (i + 1) * size]) for i, name in enumerate(names)}
