"""What a defense refuses, before any long work starts, and why."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from dent.defense.normalization import (
    affine_names,
    is_batch_norm,
    is_normalization,
    needs_batch_statistics,
)
from dent.defense.settings import Settings


def check_model(model: nn.Module, settings: Settings) -> None:
    """Refuse, with the reason, a model that these settings cannot defend."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        kind, where = type(module), f"{name!r} ({type(module).__name__})" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{where} is scripted and cannot be adapted; defend the model before scripting"
            )
        if kind.__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise TypeError(f"{where} is quantised and has no gradient; defend the float model")
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise TypeError(f"{where} is spread over devices; defend its .module instead")
        if any(
            isinstance(value, (UninitializedParameter, UninitializedBuffer))
            for value in (*module.parameters(False), *module.buffers(False))
        ):
            raise TypeError(f"{where} is not initialized yet; run the model once before defending it")
    layers = [layer for layer in model.modules() if is_normalization(layer)]
    if settings.affine != "off" and not any(affine_names(layer) for layer in layers):
        found = "have no affine parameters" if layers else "are missing"
        raise ValueError(
            f"nothing to adapt in {type(model).__name__}: normalization layers (BatchNorm, GroupNorm, "
            f"LayerNorm, InstanceNorm, RMSNorm) {found}; use affine='off' with a blur"
        )
    batch_norms = [layer for layer in layers if is_batch_norm(layer)]
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
    """Refuse to cut a batch whose inputs see one another."""
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
        raise ValueError(f"chunk: a batch cannot be cut where its inputs see one another: {reason}")


def check_inputs(inputs: Tensor, model: nn.Module, settings: Settings) -> None:
    """Refuse inputs that no model could take, or this one not."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        got = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
        raise TypeError(
            f"expected inputs as a float tensor, got {got}; images go in as floats in [0, 1]"
        )
    shape = tuple(inputs.shape)
    if settings.blur != "off" and inputs.dim() != 4:
        raise ValueError(f"expected images (N, C, H, W) to smooth, got shape {shape}; use blur='off'")
    if inputs.dim() < 2 or not len(inputs):
        raise ValueError(f"expected a batch of inputs (N, ...) with N >= 1, got shape {shape}")
    device = next((p.device for p in model.parameters()), inputs.device)
    if inputs.device != device:
        raise ValueError(f"expected inputs on {device}, where the model is, got {inputs.device}")
    if not all_finite(inputs.detach()):
        raise ValueError("expected finite inputs, got NaN or infinity")


def all_finite(values: Tensor) -> bool:
    """Whether there is neither NaN nor infinity: both show in the sum, which is faster to look at."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def check_logits(logits: object, inputs: Tensor, name: str) -> None:
    """Refuse a model that returns no logits."""
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
    values = logits.detach().float()
    if not all_finite(values):
        raise ValueError(f"expected {name} to return finite logits, got NaN or infinity")
    if (values >= 0).all() and torch.allclose(values.sum(1), torch.ones_like(values[:, 0]), atol=1e-4):
        raise ValueError(
            f"expected {name} to return logits, got probabilities (rows that sum to 1); drop its softmax"
        )
