"""What a defense can adapt, and what it refuses or warns of: models, batches, inputs and logits."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from dent.defense.dent.settings import Settings
from dent.names import lookup

Layers = Iterable[str | type[nn.Module]]  # layers of a model, by class or by name in the model


class LowDiversityWarning(UserWarning):
    """Information maximization got a batch whose inputs all look like one class."""


def is_normalization(layer: nn.Module) -> bool:
    return isinstance(layer, (_BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _InstanceNorm))


def find_layers(model: nn.Module, own: Collection[str] = ()) -> dict[str, nn.Module]:
    """Return the normalization layers of a model by name: torch's, and the user's own of these names."""
    named = model.named_modules()
    return {name: layer for name, layer in named if is_normalization(layer) or name in own}


def find_own_layers(model: nn.Module, layers: Layers) -> tuple[str, ...]:
    """Return the names of the user's own normalization layers. Raise if one cannot be adapted."""
    if isinstance(layers, str | type):
        layers = [layers]
    if not isinstance(model, nn.Module):
        return ()  # `check_model` says so
    modules, kind, names = dict(model.named_modules()), type(model).__name__, []
    for one in layers:
        if isinstance(one, str):
            lookup(f"layer of {kind}", one, modules)
            found = [one]
        elif isinstance(one, type):
            found = [name for name, module in modules.items() if isinstance(module, one)]
            if not found:
                raise ValueError(f"layers: expected layers of {one.__name__}, got none in {kind}")
        else:
            raise TypeError(f"layers: expected names or classes, got {type(one).__name__}")
        for name in found:
            if not affine_names(modules[name]):
                raise ValueError(
                    f"layers: expected parameters `weight` and `bias`, or one of them, got none in "
                    f"{name!r} ({type(modules[name]).__name__})"
                )
        names += found
    return tuple(dict.fromkeys(names))


def needs_batch_statistics(layer: nn.Module) -> bool:
    """Return True if the layer kept no statistics in training, so that it always uses its batch's."""
    return isinstance(layer, _BatchNorm) and layer.running_mean is None


def affine_names(layer: nn.Module) -> list[str]:
    """Return which of scale (`weight`) and shift (`bias`) the layer has."""
    return [name for name in ("weight", "bias") if layer._parameters.get(name) is not None]


def check_model(model: nn.Module, settings: Settings, own: Collection[str] = ()) -> None:
    """Raise, with the reason, if these settings cannot defend the model.

    own: names of normalization layers of the user's own.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        kind, where = type(module), f"{name!r} ({type(module).__name__})" if name else "the model"
        if all(callable(getattr(module, method, None)) for method in ("adapt", "predict")):
            raise TypeError(
                "the model is defended already; override its settings in dent.defend instead"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{where} is scripted and cannot be adapted; defend the model before scripting"
            )
        if kind.__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise TypeError(f"{where} is quantized and has no gradient; defend the float model")
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise TypeError(f"{where} is spread over devices; defend its .module instead")
        values = (*module.parameters(False), *module.buffers(False))
        if any(isinstance(value, (UninitializedParameter, UninitializedBuffer)) for value in values):
            raise TypeError(f"{where} is not initialized yet; run the model once before defending it")
        if any(value.is_meta for value in values):
            raise TypeError(
                f"{where} has no weights, because it is on the device meta; call model.to_empty(...) "
                "and load its weights before defending it"
            )
    layers = list(find_layers(model, own).values())
    if settings.affine != "off" and not any(affine_names(layer) for layer in layers):
        found = "have no affine parameters" if layers else "are missing"
        raise ValueError(
            f"nothing to adapt in {type(model).__name__}: normalization layers (BatchNorm, GroupNorm, "
            f"LayerNorm, InstanceNorm, RMSNorm) {found}; name those of your own by layers=[...], or use "
            "affine='off' with a blur"
        )
    batch_norms = [layer for layer in layers if isinstance(layer, _BatchNorm)]
    if settings.test_share > 0 and not batch_norms:
        raise ValueError(
            f"statistics={settings.statistics!r} needs BatchNorm layers, and {type(model).__name__} has "
            "none: other layers keep no statistics from training; use statistics='train'"
        )
    if 0 < settings.test_share < 1 and any(needs_batch_statistics(layer) for layer in batch_norms):
        raise ValueError(
            f"statistics={settings.statistics!r} mixes with those of training, and a BatchNorm layer of "
            f"{type(model).__name__} has none (track_running_stats=False); use statistics='test'"
        )


def check_chunk(chunk: int | None, model: nn.Module, settings: Settings) -> None:
    """Raise ValueError if a batch must not be cut because its inputs see one another."""
    if chunk is None:
        return
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk: expected an integer >= 1, got {chunk}")
    reason = ""
    if settings.objective != "entropy":
        reason = f"objective={settings.objective!r} looks at all predictions together"
    if settings.test_share > 0 or any(needs_batch_statistics(layer) for layer in model.modules()):
        reason = "statistics are of the whole batch"
    if reason:
        raise ValueError(f"chunk: a batch cannot be cut if its inputs see one another: {reason}")


def check_inputs(inputs: Tensor, model: nn.Module, settings: Settings) -> None:
    """Raise if the inputs are not a batch of finite floats on the model's device."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        got = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
        raise TypeError(f"expected inputs as a float tensor, got {got}; convert images to [0, 1]")
    shape = tuple(inputs.shape)
    if settings.blur != "off" and inputs.dim() != 4:
        raise ValueError(f"expected images (N, C, H, W) to smooth, got shape {shape}; use blur='off'")
    if inputs.dim() < 2 or not len(inputs):
        raise ValueError(f"expected a batch of inputs (N, ...) with N >= 1, got shape {shape}")
    device = next((p.device for p in model.parameters()), inputs.device)
    if inputs.device != device:
        raise ValueError(f"expected inputs on {device}, where the model is, got {inputs.device}")
    if not is_finite(inputs.detach()):
        raise ValueError("expected finite inputs, got NaN or infinity")


def check_shape(logits: object, inputs: Tensor, name: str) -> None:
    """Raise if the model called `name` returned no logits (N, classes) of the inputs."""
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"expected {name} to return a tensor of logits (N, classes), got {type(logits).__name__}; "
            "wrap it in a module that returns the logits alone"
        )
    if not logits.is_floating_point() or logits.dim() != 2 or len(logits) != len(inputs):
        raise ValueError(
            f"expected {name} to return logits ({len(inputs)}, classes), got {logits.dtype} of shape "
            f"{tuple(logits.shape)}"
        )
    if logits.shape[1] < 2:
        raise ValueError(
            f"expected {name} to return logits of two or more classes, got one; add a logit of zero, so "
            "that the softmax of both is the sigmoid of yours"
        )


@contextmanager
def explain_failure(inputs: Tensor, model: nn.Module) -> Iterator[None]:
    """Raise ValueError with what to do if a model fails on inputs of a wrong type or shape."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        types = {value.dtype for value in model.parameters() if value.is_floating_point()}
        if types and inputs.dtype not in types:
            expected = " or ".join(sorted(map(str, types)))
            raise ValueError(
                f"expected inputs of {expected}, as the parameters of {type(model).__name__}, got "
                f"{inputs.dtype}; convert the inputs or the model"
            ) from error
        if inputs.dim() == 3 and any(isinstance(one, nn.Conv2d) for one in model.modules()):
            raise ValueError(
                f"expected a batch of images (N, C, H, W), got shape {tuple(inputs.shape)}; give a "
                "single image as inputs[None]"
            ) from error
        raise


def check_logits(logits: Tensor, name: str) -> None:
    """Raise ValueError if the model called `name` returned NaN or probabilities. A GPU waits for it."""
    rows = logits.detach().float()
    if not is_finite(rows):
        raise ValueError(f"expected {name} to return finite logits, got NaN or infinity")
    # A single row that sums to 1 is no evidence: logits may be non-negative.
    if len(rows) > 1 and (rows >= 0).all() and ((rows.sum(1) - 1).abs() < 1e-4).all():
        raise ValueError(
            f"expected {name} to return logits, got probabilities (rows that sum to 1); drop its softmax"
        )


def is_finite(values: Tensor) -> bool:
    """Return True if no value is NaN or infinite. Both show in the sum, which is faster to look at."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def warn_of_low_diversity(logits: Tensor) -> bool:
    """Warn if information maximization may harm these predictions: all look like one class."""
    if len(logits) == 1:
        problem = "a batch of one leaves the model static, at the cost of adapting it"
    elif (logits.argmax(1) == logits[0].argmax()).all():
        problem = (
            f"all {len(logits)} inputs of this batch are predicted as one class, and it makes "
            "predictions differ, so that right answers may turn wrong"
        )
    else:
        return False
    warnings.warn(
        f"information maximization needs batches of several classes: {problem}; use larger batches, or "
        "the preset dent+solo, which adapts to each input alone",
        LowDiversityWarning,
        stacklevel=5,
    )
    return True
