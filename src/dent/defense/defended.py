"""A model defended by a method that is not the paper's: the updates, and their exact gradient.

A method is a value: its settings, and four functions of tensors (`Method`). `Defended` turns it and a
model into a defense: it checks, runs the updates, keeps the model unchanged and differentiates through
the updates. Each file beside this one is a method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from dent.declared import Declared
from dent.defense.dent.checks import (
    Layers,
    affine_names,
    check_inputs,
    check_logits,
    check_model,
    check_shape,
    find_layers,
    find_own_layers,
    needs_batch_statistics,
)
from dent.defense.dent.layers import AdaptableModel, Tensors
from dent.defense.dent.settings import PRESETS, Gradient
from dent.defense.protocol import read_independence

Variables = tuple[Tensor, ...]

_STATIC = PRESETS["static"]  # for checks that hold for every defense


def measure_batch(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of each channel of features (N, C, ...), as BatchNorm trains with.

    >>> measure_batch(torch.tensor([[1.0], [3.0]]))
    (tensor([2.]), tensor([1.]))
    """
    var, mean = torch.var_mean(features.transpose(0, 1).flatten(1), 1, correction=0)
    return mean, var


class Network:
    """A model as a function of inputs and Delta, with the tensors that it has now."""

    def __init__(self, model: AdaptableModel) -> None:
        self._model = model
        self._tensors: Tensors = model.read_tensors()

    def __call__(self, inputs: Tensor, delta: Tensor | None = None) -> Tensor:
        """Return logits (N, classes), with `delta` added to the scales and shifts if it is given."""
        return self._model(inputs, self._tensors, delta)

    def make_delta(self, rows: int) -> Tensor:
        """Return a Delta of zeros (rows, parameters)."""
        return torch.zeros_like(self._model.flatten_affine(self._tensors)).repeat(rows, 1)

    def read_features(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (N, d) that enter the last linear layer, and the logits."""
        entered: list[Tensor] = []

        def keep(name: str, layer: nn.Module, args: tuple[Tensor]) -> None:
            entered.append(args[0])

        logits = self._model.call_hooked(inputs, self._tensors, nn.Linear, keep)
        if not entered or len(entered[-1]) != len(inputs):
            raise ValueError(
                f"expected {type(self._model.model).__name__} to end in a linear layer, which the "
                "features enter, got none"
            )
        return entered[-1].flatten(1), logits


class Method(Declared):
    """What a test-time defense does, as functions of tensors. The fields are its settings.

    independent: True if the method never lets an input of a batch see another.
    per_input: True if each variable has a row for each input.
    needs: what the model must have for the method to work.
    """

    title: ClassVar[str] = "defense"
    name: ClassVar[str]
    independent: ClassVar[bool]
    per_input: ClassVar[bool] = True
    needs: ClassVar[Literal["nothing", "normalization", "batch-norm"]] = "nothing"

    steps: int = Field(0, description="Number of updates.", ge=0, le=0)
    gradient: Gradient = Field("stale", description="What an attacker's gradient sees of the updates.")

    @property
    def forwards(self) -> int:
        """The cost of a call, in forwards of the model. A backward to the inputs counts as one."""
        return 2 * self.steps + 1

    def estimate(self, features: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and variance (C,) that a BatchNorm layer uses for features (N, C, ...).

        mean, var: those of training. A method that does not say otherwise uses them.
        """
        return mean, var

    def observe(self, network: Network, inputs: Tensor) -> Variables:
        """Return what the updates read of the inputs. It is computed once for all of them."""
        return (inputs,)

    def start(self, network: Network, inputs: Tensor) -> Variables:
        """Return the variables before the first update. With them, `predict` is the model itself."""
        return ()

    def update(
        self, network: Network, observed: Variables, step: int, variables: Variables, keep_graph: bool
    ) -> Variables:
        """Return the variables after update number `step` (from 1).

        Gradients are enabled, and the variables that are floats require them.
        keep_graph: build the graph from `observed` and `variables` to what is returned.
        """
        raise NotImplementedError(f"{self.name} makes no updates")

    def predict(self, network: Network, inputs: Tensor, variables: Variables) -> Tensor:
        """Return logits (N, classes); the first variable, if there is one, is a Delta."""
        return network(inputs, *variables[:1])


@dataclass(frozen=True)
class Adaptation:
    """What a method has learned from a batch: a value that `predict` takes.

    variables: the method's own, as its file describes them. steps: the number of updates so far.
    """

    variables: Variables
    steps: int

    def detach(self) -> Adaptation:
        """Return the same adaptation as a constant."""
        return Adaptation(tuple(one.detach() for one in self.variables), self.steps)

    def __repr__(self) -> str:
        shapes = [tuple(one.shape) for one in self.variables]
        return f"Adaptation(updates={self.steps}, variables={shapes})"


class Defended(nn.Module):
    """A model defended by a method at test time: inputs to logits, adapted to each batch.

    The model is shared and never changed. Its parameters are constants here: a backward pass through
    the defense reaches `inputs` only. Several threads may call it at once.

    >>> from dent.defense.hedge import Hedge
    >>> defended = Defended(nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), Hedge(steps=3))
    >>> defended(torch.rand(5, 3, 2, 2)).shape
    torch.Size([5, 10])
    """

    def __init__(self, model: nn.Module, settings: Method, *, layers: Layers = ()) -> None:
        super().__init__()
        model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
        self.layers = find_own_layers(model, layers)
        check_model(model, _STATIC)
        _check_needs(model, settings, self.layers)
        self.model = model
        self.settings = settings
        self.training = False
        estimates = type(settings).estimate is not Method.estimate
        self._net = AdaptableModel(
            model, test_share=settings.estimate if estimates else 0.0, layers=self.layers
        )

    @property
    def name(self) -> str:
        return self.settings.name

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
        start: Adaptation | None = None,
        steps: int | None = None,
        gradient: Gradient | None = None,
    ) -> Adaptation:
        """Return the adaptation after `steps` updates on the inputs.

        start: continue from this adaptation. None starts from the model as it is.
        steps: number of updates (default: the setting).
        gradient: what a later backward pass to `inputs` sees (default: the setting). `stale`: the
        adaptation is a constant. `unrolled`: every update, exactly; each is computed again in the
        backward pass, so that no activation is kept from step to step.
        """
        settings = self.settings
        steps = settings.steps if steps is None else steps
        gradient = gradient or settings.gradient
        if gradient not in ("stale", "unrolled"):
            raise ValueError(f"gradient: expected stale or unrolled, got {gradient!r}")
        if steps < 0 or (steps > 0 and not settings.steps):
            expected = ">= 0" if settings.steps else f"0, because {self.name} makes no updates"
            raise ValueError(f"steps: expected {expected}, got {steps}")
        check_inputs(inputs, self.model, _STATIC)
        is_unrolled = gradient == "unrolled" and torch.is_grad_enabled() and inputs.requires_grad
        with torch.inference_mode(False), torch.set_grad_enabled(is_unrolled):
            inputs = inputs.clone() if inputs.is_inference() else inputs
            inputs = inputs if is_unrolled else inputs.detach()
            network, done = Network(self._net), start.steps if start else 0
            variables = start.variables if start else settings.start(network, inputs)
            observed = settings.observe(network, inputs) if steps else ()
            for step in range(done + 1, done + steps + 1):
                update = partial(_update, settings, network, step, len(observed))
                if is_unrolled:
                    variables = _Unrolled.apply(update, *observed, *variables)  # type: ignore[no-untyped-call]
                else:
                    variables = update((*observed, *variables), keep_graph=False)
            return Adaptation(variables, done + steps)

    def predict(self, inputs: Tensor, state: Adaptation) -> Tensor:
        """Return the logits of the model as adapted in `state`."""
        check_inputs(inputs, self.model, _STATIC)
        if self.settings.per_input and len(state.variables[0]) != len(inputs):
            raise ValueError(
                f"expected the {len(state.variables[0])} inputs that this state was adapted to, "
                f"got {len(inputs)}: it has a row for each"
            )
        if inputs.is_inference() and not torch.is_inference_mode_enabled():
            inputs = inputs.clone()
        logits = self.settings.predict(Network(self._net), inputs, state.variables)
        check_shape(logits, inputs, type(self.model).__name__)
        check_logits(logits, type(self.model).__name__)
        return logits

    @property
    def independent(self) -> bool | None:
        """True if no input's answer depends on the rest of its batch, False if it may, None if unknown.

        The method decides whether the defense mixes the inputs of a batch. Only the model can say
        whether its own code does: by an attribute `independent`. Without one the answer is None.
        """
        return read_independence(self.model) if self.settings.independent else False

    def train(self, mode: bool = True) -> Defended:
        """Set the flag that attack libraries look at. The mode of the wrapped model stays as it is."""
        self.training = mode
        return self

    def __repr__(self) -> str:
        total = sum(parameter.numel() for parameter in self.model.parameters())
        independent = {True: "yes", False: "no", None: "if the model is"}[self.independent]
        return (
            f"Defended({self.name}\n  model: {type(self.model).__name__}, {total:,} parameters\n"
            f"  settings: {self.settings}\n"
            f"  cost: {self.settings.forwards} forwards; independent: {independent}\n)"
        )


def _update(
    method: Method, network: Network, step: int, split: int, tensors: Variables, *, keep_graph: bool
) -> Variables:
    """Make one update. The first `split` tensors are what was observed, the others the variables."""
    observed, variables = tensors[:split], tensors[split:]
    if not keep_graph:
        variables = tuple(_as_leaf(tensor) for tensor in variables)
    with torch.enable_grad():
        after = method.update(network, observed, step, variables, keep_graph)
    return after if keep_graph else tuple(tensor.detach() for tensor in after)


class _Unrolled(torch.autograd.Function):
    """One update with its gradient to what it reads. Backward computes the update again."""

    @staticmethod
    def forward(ctx: Any, update: partial[Variables], *tensors: Tensor) -> Variables:
        ctx.save_for_backward(*tensors)
        ctx.update = update
        after = update(tuple(tensor.detach() for tensor in tensors), keep_graph=False)
        ctx.mark_non_differentiable(*(one for one in after if not one.is_floating_point()))
        return after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [_as_leaf(tensor) for tensor in ctx.saved_tensors]
        after = ctx.update(tuple(leaves), keep_graph=True)
        # An update may pass a variable on as it is, or make a new one that depends on nothing.
        wanted = [(one, grad) for one, grad in zip(after, grads, strict=True) if one.requires_grad]
        sources = [leaf for leaf in leaves if leaf.requires_grad]
        back: Sequence[Tensor | None] = [None] * len(sources)
        if wanted:
            ends, end_grads = zip(*wanted, strict=True)
            back = torch.autograd.grad(ends, sources, end_grads, allow_unused=True)
        found = iter(back)
        return None, *(next(found) if leaf.requires_grad else None for leaf in leaves)


def _as_leaf(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def _check_needs(model: nn.Module, method: Method, own: tuple[str, ...]) -> None:
    """Raise ValueError if the model lacks the layers that the method works on."""
    layers, kind = list(find_layers(model, own).values()), type(model).__name__
    if method.needs == "normalization" and not any(affine_names(layer) for layer in layers):
        raise ValueError(
            f"{method.name}: expected normalization layers with scale and shift (BatchNorm, GroupNorm, "
            f"LayerNorm, InstanceNorm, RMSNorm), got none in {kind}; name those of your own by "
            "layers=[...], or use a defense that moves the inputs, such as energy"
        )
    if method.needs == "batch-norm":
        batch_norms = [layer for layer in layers if isinstance(layer, _BatchNorm)]
        if not batch_norms:
            raise ValueError(f"{method.name}: expected BatchNorm layers, got none in {kind}")
        if any(needs_batch_statistics(layer) for layer in batch_norms):
            raise ValueError(
                f"{method.name}: expected BatchNorm layers with statistics of training, got one without "
                f"(track_running_stats=False) in {kind}"
            )
