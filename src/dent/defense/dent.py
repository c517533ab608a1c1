"""Defensive entropy minimization: a classifier that adapts to every batch it is given (section 3).

`Dent.adapt` is the method: from the model's own parameters, a few gradient steps on the entropy of
the predictions, over Delta (scales and shifts of the normalization layers) and Sigma (smoothing of
the input). `Dent.predict` is the adapted model as a static one. A forward is one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dent.defense.checks import check_chunk, check_inputs, check_model
from dent.defense.method import Method, unrolled_update
from dent.defense.normalization import affine_names, is_normalization, needs_batch_statistics
from dent.defense.settings import Gradient, Settings
from dent.defense.shadow import Shadow
from dent.defense.state import State, Trace

T = TypeVar("T")


class Dent(nn.Module):
    """A model defended at test time: inputs to logits, adapted to each batch.

    The model is shared and never changed, and its parameters are constants: a backward pass through
    the defense reaches `inputs` only. Safe to call from several threads.

    compile: compile the inner loop, at the first call for each batch size.
    channels_last: memory layout of the inner loop; if not given, channels last on the CPU, where it
    is faster, unless the model cannot take it.
    chunk: take at most this many inputs at a time through an update: the same updates in less memory,
    where the objective is a sum over inputs that do not see one another.

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
        if isinstance(model, nn.Module) and any(isinstance(part, Dent) for part in model.modules()):
            raise TypeError(
                "the model is defended already; override its settings in dent.defend instead"
            )
        check_model(model, settings)
        check_chunk(chunk, model, settings)
        self.model = model
        self.settings = settings
        self.name = name
        self._compile = compile
        self._channels_last = channels_last
        self._idle = [Shadow(model, settings, compile=compile)]
        self._method = Method(settings, chunk=chunk)
        self.training = False

    def forward(self, inputs: Tensor, *, gradient: Gradient | None = None) -> Tensor:
        """Adapt to the inputs, predict them, and forget; logits (N, classes)."""
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
        """Optimize Delta and Sigma on a batch, from the model's own parameters or from `start`.

        steps: how many updates, if not the setting's.
        gradient: what a later backward to `inputs` sees. `stale`: the state is a constant. `unrolled`:
        every update, exactly; each is computed again then, so that memory does not grow with the
        steps. If not given, the setting's.
        freeze_statistics: keep the statistics of this batch too, for one more forward, so that
        `predict` takes any inputs, even a single one, as if they came with this batch.
        """
        gradient = gradient or self.settings.gradient
        if gradient not in ("stale", "unrolled"):
            raise ValueError(f"gradient: expected stale or unrolled, got {gradient!r}")
        count = self.settings.steps if steps is None else steps
        if count < 0 or (count > 0 and not self._method.learning_rates):
            raise ValueError(
                f"steps: expected {'>= 0' if self._method.learning_rates else '0'}, got {count}"
            )
        check_inputs(inputs, self.model, self.settings)
        unrolled = gradient == "unrolled" and torch.is_grad_enabled() and inputs.requires_grad
        with torch.inference_mode(False):
            source = inputs.clone() if inputs.is_inference() else inputs
            source = source if unrolled else source.detach()

            def run(channels_last: bool) -> State:
                state = self._adapt(source, start, count, unrolled, channels_last)
                return self._frozen(source, state, channels_last) if freeze_statistics else state

            return self._in_best_layout(inputs, run)

    def predict(self, inputs: Tensor, state: State) -> Tensor:
        """Logits of the model as adapted in `state`, a static model (statistics of `inputs` apart).

        Statistics that the settings take from the test batch are those of `inputs`, with their
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

        def run(channels_last: bool) -> Tensor:
            with self._shadow(channels_last) as net:
                for site in net.sites:
                    site.frozen = (state.statistics or {}).get(site.name)
                logits = self._method.logits(net, inputs, state.delta, state.blur)
                net.check_logits(logits, inputs)
                return logits

        return self._in_best_layout(inputs, run)

    def affine(self, state: State) -> dict[str, Tensor]:
        """The adapted scales and shifts by name, each (1 or N, *shape)."""
        if state.delta is None:
            return {}
        with self._shadow(channels_last=False) as net:
            return net.split(net.theta + state.delta)

    @property
    def independent(self) -> bool:
        """Whether each input is predicted as if it came alone, whatever else is in its batch."""
        return self.settings.independent and not any(
            needs_batch_statistics(layer) for layer in self.model.modules()
        )

    def train(self, mode: bool = True) -> Dent:
        """Set the flag that attack libraries look at; the wrapped model's mode is not touched."""
        self.training = mode
        return self

    def __repr__(self) -> str:
        return describe(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": []}  # copies and pickles build shadows of their own

    def _adapt(
        self, inputs: Tensor, start: State | None, steps: int, unrolled: bool, channels_last: bool
    ) -> State:
        method, done = self._method, start.steps if start else 0
        borrow = partial(self._shadow, channels_last)
        logits: list[Tensor] = []
        if channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)  # once, not in every step
        with self._shadow(channels_last) as net:
            variables = method.initial(net, inputs, start)
            sizes = [method.sizes(variables, inputs)]
            for step in range(done + 1, done + steps + 1):
                if unrolled:
                    seen, variables = unrolled_update(method, net, borrow, inputs, variables, step)
                else:
                    seen, variables = method.update(net, inputs, variables, step)
                logits.append(seen)
                sizes.append(method.sizes(variables, inputs))
        values, moments = method.unpack(variables)
        delta_sizes, sigma_sizes = zip(*sizes, strict=True)
        return State(
            delta=values.get("delta"),
            blur=values["blur"] if "blur" in values else method.static_blur(inputs),
            moments=moments,
            steps=done + steps,
            trace=Trace(
                torch.stack(logits) if logits else inputs.new_empty(0, len(inputs), 0),
                torch.stack(delta_sizes),
                torch.stack(sigma_sizes),
            ),
        )

    def _frozen(self, inputs: Tensor, state: State, channels_last: bool) -> State:
        with torch.no_grad(), self._shadow(channels_last) as net:
            for site in net.sites:
                site.recording = True
            self._method.logits(net, inputs, state.delta, state.blur, eager=True)
            recorded = {site.name: site.recorded for site in net.sites}
        return replace(state, statistics={k: v for k, v in recorded.items() if v is not None})

    @contextmanager
    def _shadow(self, channels_last: bool) -> Iterator[Shadow]:
        """A shadow for one thread at a time, holding the model's tensors of now."""
        try:
            net = self._idle.pop()
        except IndexError:
            net = Shadow(self.model, self.settings, compile=self._compile)
        try:
            with net.bound(channels_last):
                yield net
        finally:
            self._idle.append(net)

    def _in_best_layout(self, inputs: Tensor, run: Callable[[bool], T]) -> T:
        # By default only where it was measured to help.
        auto = inputs.device.type == "cpu" and inputs.dtype in (torch.float32, torch.float64)
        if self._channels_last is not None or inputs.dim() != 4 or not auto:
            return run(bool(self._channels_last) and inputs.dim() == 4)
        try:
            return run(True)
        except RuntimeError as error:
            if "view size is not compatible" not in str(error):
                raise
            self._channels_last = False  # the model flattens with view(): the plain layout, from now on
            return run(False)


def describe(dent: Dent) -> str:
    """What a defense adapts and how, in a few lines."""
    s = dent.settings
    layers = [layer for layer in dent.model.modules() if is_normalization(layer)]
    adapted = [layer._parameters[name] for layer in layers for name in affine_names(layer)]
    count = sum(p.numel() for p in adapted if p is not None)
    total = sum(p.numel() for p in dent.model.parameters())
    kinds = ", ".join(sorted({type(layer).__name__ for layer in layers if affine_names(layer)}))
    with_affine = sum(bool(affine_names(layer)) for layer in layers)
    lines = [
        f"model: {type(dent.model).__name__}, {total:,} parameters",
        f"Delta: {count:,} of {total:,} parameters, the scale and shift of {with_affine} layers "
        f"({kinds}), per {s.affine}"
        if s.adapts_affine
        else "Delta: off",
        f"statistics: {s.statistics}",
        "Sigma: off"
        if s.blur == "off"
        else f"Sigma: {s.blur}, {s.covariance}, from {s.sigma:g} px"
        + (f", per {s.blur_per}, lr {s.blur_lr:g}" if s.adapts_blur else ""),
        f"updates: {s.steps} of {s.optimizer}, lr {s.lr:g}, on {s.objective} ({s.reduction})"
        if s.steps
        else "updates: none",
        f"gradient: {s.gradient}; independent: {'yes' if dent.independent else 'no'}",
    ]
    return f"Dent({dent.name}\n  " + "\n  ".join(lines) + "\n)"
