"""What no attack can start from is refused, before it starts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dent.attacks.norms import NORMS
from dent.names import lookup

# The least that a setting of an attack can be.
LEAST = {
    **{"eps": 0, "steps": 0, "restarts": 1, "targets": 1, "queries": 0, "draws": 1, "batch_size": 1},
    **{"every": 1, "rounds": 1, "updates": 0, "window": 1},  # of attacks made for adaptation
}


def check_attack(
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str,
    mask: Tensor | None = None,
    towards: Tensor | None = None,
    **numbers: float | None,
) -> None:
    """Refuse inputs, labels and settings that have no meaning."""
    lookup("norm", norm, NORMS)
    check_numbers(eps=eps, **numbers)
    if not inputs.is_floating_point():
        raise ValueError(f"expected float inputs, got {inputs.dtype}; divide images by 255")
    if labels.dim() != 1 or len(labels) != len(inputs):
        raise ValueError(
            f"expected a label for each of {len(inputs)} inputs, got labels {tuple(labels.shape)}"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"expected whole numbers as labels, got {labels.dtype}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != labels.shape):
        raise ValueError(f"expected mask as {len(inputs)} bools, got {mask.dtype} {tuple(mask.shape)}")
    if towards is not None and (towards.is_floating_point() or towards.shape != labels.shape):
        raise ValueError(
            f"expected a class as target for each of {len(inputs)} inputs, "
            f"got {towards.dtype} {tuple(towards.shape)}"
        )
    if (mask is not None and mask.device != inputs.device) or labels.device != inputs.device:
        raise ValueError(f"expected labels and mask on {inputs.device}, where the inputs are")
    low, high = (float(bound) for bound in torch.aminmax(inputs)) if inputs.numel() else (0.0, 1.0)
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"expected inputs in [0, 1], got values from {low:g} to {high:g}; "
            "put normalization into the model"
        )


def check_model(model: object) -> None:
    """Refuse a model that every question would change: with statistics that are still learned."""
    if not isinstance(model, nn.Module) or hasattr(model, "adapt"):
        return
    learning = [part for part in model.modules() if isinstance(part, _BatchNorm) and part.training]
    if any(part.track_running_stats for part in learning):
        raise ValueError(
            "expected the model as it is deployed, got it in training mode; call model.eval()"
        )


def check_numbers(**numbers: float | None) -> None:
    """Refuse settings below the least that they can be; a step size must be positive."""
    for name, value in numbers.items():
        least = LEAST.get(name)
        if value is None:
            continue
        if least is None and not 0 < value < float("inf"):
            raise ValueError(f"expected {name} > 0, got {value}")
        if least is not None and not least <= value < float("inf"):
            raise ValueError(f"expected {name} >= {least}, got {value}")


def check_draws(draws: int, viewed: bool) -> None:
    """Refuse a number of draws without meaning."""
    check_numbers(draws=draws)
    if draws > 1 and viewed:
        raise ValueError("draws average over a random model; with `through`, let the view average")


def check_answer(logits: object, points: Tensor, *, first: bool) -> None:
    """Refuse what a model answered if it is not finite logits for each of the points."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(points):
        got = f"a tensor {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"expected logits ({len(points)}, classes) from the model, got {got}")
    if logits.shape[1] < 2:
        raise ValueError("expected logits of two classes or more, got one; give the other a zero")
    finite = logits.detach().isfinite().all(1)
    if not finite.all():
        count = int((~finite).sum())
        raise ValueError(
            f"expected finite logits, got NaN or infinity for {count} of {len(points)} inputs"
        )
    if first and len(logits) and looks_like_probabilities(logits):
        raise ValueError(
            "expected logits, got probabilities (rows in [0, 1] that sum to 1), through which gradients "
            "vanish; return what goes into the softmax, or the logarithm of what comes out"
        )


def check_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels that the model has no class for."""
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(
            f"expected labels from 0 to {classes - 1}, the model's {classes} classes, "
            f"got {int(labels.min())} to {int(labels.max())}"
        )


def looks_like_probabilities(logits: Tensor) -> bool:
    """Whether all rows lie in [0, 1] and sum to 1."""
    logits = logits.detach()
    return bool((logits >= 0).all() and (logits <= 1 + 1e-5).all()) and bool(
        ((logits.sum(1) - 1).abs() < 1e-4).all()
    )
