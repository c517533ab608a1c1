"""Read and check inputs, settings, models and answers; each error says what was expected."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from dent.attacks.norms import NORMS, find_largest
from dent.names import lookup
from dent.texts import read_number

TOLERANCE = 1e-5  # of a distance, for rounding
# The smallest value of each setting. A number that is not listed, such as a step size, is positive.
SMALLEST = {
    **{"eps": 0, "steps": 0, "restarts": 1, "targets": 1, "queries": 0, "draws": 1, "batch_size": 1},
    **{"every": 1, "rounds": 1, "updates": 0, "window": 1},  # of the adaptive attacks
}


class Array(Protocol):
    """An array of another library, such as NumPy's."""

    def tolist(self) -> Any: ...


Labels = Tensor | Sequence[int] | Array  # what attacks accept as labels
Eps = float | str  # and as eps: a text may be a fraction, "8/255"


def read_arguments(inputs: Tensor, labels: Labels, eps: Eps) -> tuple[Tensor, float]:
    """Return labels as a tensor, on the device of the inputs if they are none yet, and eps as a number.

    >>> read_arguments(torch.rand(2, 3), [0, 1], "1/4")
    (tensor([0, 1]), 0.25)
    """
    return read_labels(labels, inputs.device), read_number(eps)


def read_labels(labels: Labels, device: torch.device | None = None) -> Tensor:
    """Return labels as a tensor: a tensor as it is, a list or an array as a new one on the device."""
    if isinstance(labels, Tensor):
        return labels
    try:
        values = labels if isinstance(labels, Sequence) else labels.tolist()
        read = torch.tensor(values, device=device)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"expected labels as integers, one for each input, got {reprlib.repr(labels)}"
        ) from error
    return read if read.numel() else read.long()  # torch takes an empty list to be floats


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
    """Raise ValueError if the inputs, labels or settings of an attack are invalid."""
    lookup("norm", norm, NORMS)
    check_numbers(eps=eps, **numbers)
    check_radius(eps, norm)
    if not inputs.is_floating_point():
        raise ValueError(f"expected float inputs, got {inputs.dtype}; divide images by 255")
    if labels.dim() != 1 or len(labels) != len(inputs):
        raise ValueError(
            f"expected a label for each of {len(inputs)} inputs, got labels {tuple(labels.shape)}"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"expected integer labels, got {labels.dtype}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != labels.shape):
        raise ValueError(f"expected mask as {len(inputs)} bools, got {mask.dtype} {tuple(mask.shape)}")
    if towards is not None and (towards.is_floating_point() or towards.shape != labels.shape):
        raise ValueError(
            f"expected a target class for each of {len(inputs)} inputs, "
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


def check_radius(eps: float, norm: str) -> None:
    """Raise ValueError if eps is a count of gray levels, such as 8 for 8/255: images are in [0, 1].

    >>> check_radius(8, "linf")
    Traceback (most recent call last):
    ...
    ValueError: expected eps up to 1 for linf, because images are in [0, 1], got 8; did you mean 8/255?
    """
    if norm == "linf" and eps > 1:
        raise ValueError(
            f"expected eps up to 1 for linf, because images are in [0, 1], got {eps:g}; did you mean "
            f"{eps:g}/255?"
        )


def check_numbers(**numbers: float | None) -> None:
    """Raise ValueError if a setting is below the smallest value in `SMALLEST`; skip None."""
    for name, value in numbers.items():
        smallest = SMALLEST.get(name)
        if value is None:
            continue
        if smallest is None and not 0 < value < float("inf"):
            raise ValueError(f"expected {name} > 0, got {value}")
        if smallest is not None and not smallest <= value < float("inf"):
            raise ValueError(f"expected {name} >= {smallest}, got {value}")


def check_start(start: Tensor, inputs: Tensor) -> None:
    """Raise ValueError if `start` is not a finite point for each input."""
    if start.shape != inputs.shape or not start.is_floating_point():
        raise ValueError(
            f"expected a point to start from for each input, {tuple(inputs.shape)}, "
            f"got {start.dtype} {tuple(start.shape)}"
        )
    if start.device != inputs.device or not start.isfinite().all():
        raise ValueError(f"expected finite points to start from on {inputs.device}, as the inputs")


def check_draws(draws: int, has_view: bool) -> None:
    """Raise ValueError if the number of draws is invalid, or if a view would have to be averaged."""
    check_numbers(draws=draws)
    if draws > 1 and has_view:
        raise ValueError("draws average over a random model; with `through`, let the view average")


def check_model(model: object) -> None:
    """Raise ValueError if the model is in training mode, and answers otherwise than deployed by that.

    Dropout that is on in a model that is otherwise deployed is there on purpose: a random defense.
    """
    if not isinstance(model, nn.Module) or hasattr(model, "adapt"):
        return
    learning = [part for part in model.modules() if part.training]
    is_updated = any(isinstance(part, _NormBase) and part.track_running_stats for part in learning)
    if is_updated or (model.training and any(isinstance(part, _DropoutNd) for part in learning)):
        raise ValueError(
            "expected the model as it is deployed, got it in training mode; call model.eval()"
        )


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise ValueError if a label is not one of the model's classes."""
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(
            f"expected labels from 0 to {classes - 1}, the model's {classes} classes, "
            f"got {int(labels.min())} to {int(labels.max())}"
        )


def check_logits(logits: object, inputs: Tensor) -> None:
    """Raise ValueError if a model's answer is not a row of finite logits for each input."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(inputs):
        got = f"a tensor {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"expected logits ({len(inputs)}, classes) from the model, got {got}")
    if logits.shape[1] < 2:
        raise ValueError("expected logits of two or more classes, got one; add a logit of zero")
    finite = logits.detach().isfinite().all(1)
    if not finite.all():
        count = int((~finite).sum())
        raise ValueError(
            f"expected finite logits, got NaN or infinity for {count} of {len(inputs)} inputs"
        )


class InvalidPointsError(ValueError):
    """An attack returned what the rules do not allow to submit: an evaluation stops."""


def check_points(points: object, inputs: Tensor, *, eps: float, norm: str, of: str) -> Tensor:
    """Return the points of an attack without a gradient; raise InvalidPointsError if not allowed.

    They must be a tensor like the inputs, finite, in the ball and in [0, 1].

    of: what the points are of, for the message.
    """
    if not isinstance(points, Tensor):
        raise InvalidPointsError(
            f"{of}: expected a tensor {tuple(inputs.shape)} or an AttackResult from the attack, got "
            f"{type(points).__name__}; nothing is scored"
        )
    points = points.detach()
    for what in ("shape", "dtype", "device"):
        expected, got = getattr(inputs, what), getattr(points, what)
        if got != expected:
            expected, got = (tuple(one) if what == "shape" else one for one in (expected, got))
            raise InvalidPointsError(
                f"{of}: expected points of the inputs' {what}, {expected}, from the attack, got {got}; "
                "nothing is scored"
            )
    if not points.isfinite().all():
        count = int((~points.isfinite().flatten(1).all(1)).sum())
        raise InvalidPointsError(
            f"{of}: NaN or infinity in {count} of {len(inputs)} points left the ball; nothing is scored"
        )
    distance = find_largest(points, inputs, norm)
    if not distance <= eps + TOLERANCE * max(eps, 1):
        raise InvalidPointsError(
            f"{of}: a perturbation of {distance:g} left the ball of {eps:g}; nothing is scored"
        )
    low, high = (float(bound) for bound in torch.aminmax(points)) if points.numel() else (0.0, 1.0)
    if not (low >= 0 and high <= 1):
        raise InvalidPointsError(f"{of}: values from {low:g} to {high:g} left [0, 1]; nothing is scored")
    return points


def refuse_probabilities(model: Callable[[Tensor], Tensor], inputs: Tensor, logits: Tensor) -> None:
    """Raise ValueError if the model returns probabilities instead of logits."""
    if returns_probabilities(model, inputs, logits):
        raise ValueError(
            "expected logits, got probabilities (rows in [0, 1] that sum to 1), through which gradients "
            "vanish; return the input of the softmax, or the logarithm of its output"
        )


def returns_probabilities(model: Callable[[Tensor], Tensor], inputs: Tensor, logits: Tensor) -> bool:
    """Return True if all logits of the inputs are probabilities: rows in [0, 1] that sum to 1.

    A single row of logits can look like that by chance: (1, 0, 0). Two different rows hardly can. So if
    all rows are the same, the model is asked for the inverted inputs too. If the answer is still the
    same row, nothing can be told and the result is False.
    """
    if not len(logits) or not _are_probabilities(logits):
        return False
    if _are_equal(logits):
        with torch.no_grad():
            logits = torch.cat([logits.detach(), model(1 - inputs.detach())])
    return _are_probabilities(logits) and not _are_equal(logits)


def _are_probabilities(rows: Tensor) -> bool:
    rows = rows.detach()
    half = rows.is_floating_point() and torch.finfo(rows.dtype).bits < 32
    tolerance = 1e-2 if half else 1e-4
    inside = (rows >= 0) & (rows <= 1 + tolerance)
    return bool(inside.all()) and bool(((rows.sum(1) - 1).abs() < tolerance).all())


def _are_equal(rows: Tensor) -> bool:
    return bool((rows - rows[:1]).abs().max() < 1e-4)
