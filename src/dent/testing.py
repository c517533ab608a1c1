"""Check that a defense keeps the promises that attacks and evaluation rely on."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dent.attacks.findings import LARGEST_DIFFERENCE, measure_difference
from dent.defense import Defended, Dent, is_independent
from dent.names import accepts
from dent.seeds import preserve_random_state, use_seed

__all__ = ["BrokenPromiseError", "check_defense"]


class BrokenPromiseError(AssertionError):
    """A defense breaks promises of the protocol `dent.defense.Defense`. The message lists them all."""


def check_defense(defense: Any, inputs: Tensor) -> None:
    """Raise BrokenPromiseError if a defense breaks a promise of the protocol `dent.defense.Defense`.

    The error names every broken promise and says how to mend it. Several promises are checked only if
    the defense offers them: the arguments `steps`, `start` and `gradient` of `adapt` are optional.

    defense: as in `dent.defense.Defense`. Set `randomized = True` on it if its answers are random.
    inputs: at least two that differ, (N, ...). Double precision avoids false alarms of `independent`.

    >>> import dent
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    >>> check_defense(dent.defend(model, "hedge"), torch.rand(4, 3, 2, 2))
    >>> check_defense(model, torch.rand(4, 3, 2, 2))
    Traceback (most recent call last):
    ...
    dent.testing.BrokenPromiseError: Sequential breaks 1 promise:
      interface: expected adapt(inputs) and predict(inputs, state), got neither; make two of `forward`
    """
    if not isinstance(inputs, Tensor) or inputs.dim() < 2 or len(inputs) < 2:
        raise ValueError("expected a tensor of at least two inputs (N, ...), got too few")
    faults = list(find_faults(defense, inputs.detach()))
    if faults:
        count = "1 promise" if len(faults) == 1 else f"{len(faults)} promises"
        raise BrokenPromiseError(
            f"{type(defense).__name__} breaks {count}:\n  " + "\n  ".join(map(str, faults))
        )


# The promises without which answers mean nothing to an evaluation, or to the clients of a server.
RELIED_ON = (
    *("logits", "clean state", "adapt and predict", "start", "stale gradient"),
    *("unchanged model", "unchanged inputs"),
)


def refuse_broken_promises(
    defense: Any, inputs: Tensor, promises: Collection[str] = RELIED_ON, *, of: str
) -> None:
    """Raise ValueError if a defense breaks one of these promises; those of dent keep them."""
    if isinstance(defense, Dent | Defended):
        return
    faults = [str(fault) for fault in find_faults(defense, inputs) if fault.promise in promises]
    if faults:
        raise ValueError(f"{of}: the defense breaks a promise: {'; '.join(faults)}")


# What a defense may declare, as evaluation and serving read it.


def count_updates(defense: Any) -> int | None:
    """Return the number of updates of a call; None if the defense does not say, by `updates`."""
    updates = getattr(defense, "updates", None)
    if updates is None or (isinstance(updates, int) and not isinstance(updates, bool) and updates >= 0):
        return updates
    raise ValueError(f"expected `updates` of the defense as an integer >= 0, got {updates!r}")


def find_independence(
    model: Callable[[Tensor], Any],
    inputs: Tensor,
    declared: bool | None,
    *,
    is_own: bool,
    of: str,
    check: Callable[[Callable[[Tensor], Any], Tensor], bool] = is_independent,
) -> bool:
    """Return what a defense declares; if it is the user's or declares nothing, check it on the inputs.

    Raise ValueError if the user's own declares to be independent and is not.
    """
    if declared is not None and not (is_own and declared):
        return bool(declared)
    with preserve_random_state(str(inputs.device)):
        found = check(model, inputs)
    if declared and not found:
        refuse_broken_promises(model, inputs[:2], of=of)  # another one may be the cause
        raise ValueError(
            f"{of}: the defense declares independent = True, but it answers inputs otherwise together "
            "than one by one; set independent = False"
        )
    return found


def is_random(model: Callable[[Tensor], Any], inputs: Tensor) -> bool:
    """Return True if answers differ with the random seed, and agree if the seeds do.

    >>> is_random(torch.nn.Dropout(), torch.rand(2, 9)), is_random(torch.nn.ReLU(), torch.rand(2, 9))
    (True, False)
    """
    with torch.no_grad():
        first, other, again = (_call(model, inputs, seed) for seed in (0, 1, 0))
    return differ(first, other) and not differ(first, again)


def differ(one: Any, other: Any) -> bool:
    """Return True if two answers differ by more than rounding. What is no tensor is no answer."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.shape != other.shape:
        return False
    return one.numel() > 0 and measure_difference(one, other) > LARGEST_DIFFERENCE


class Fault(NamedTuple):
    """A promise that is broken: its name, and what was expected, came and is to be done."""

    promise: str
    message: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.message}"


def find_faults(defense: Any, inputs: Tensor) -> Iterator[Fault]:
    """Yield the promises that a defense breaks, those that others build on first.

    One that lacks adapt and predict is asked for what its call alone promises.
    """
    lacks_parts = _find_interface_fault(defense)
    if lacks_parts:
        yield lacks_parts
    if not callable(defense):
        return
    declared = getattr(defense, "independent", "no attribute")
    if not lacks_parts and declared is not None and not isinstance(declared, bool):
        yield Fault("interface", f"expected `independent` to be True, False or None, got {declared!r}")
    modules = _list_modules(defense)
    before, original = _take_snapshot(modules), inputs.clone()
    logits = _call(defense, inputs)
    fault = _find_logits_fault(logits, len(inputs))
    if fault:
        yield fault
        return
    state_faults = list(_find_state_faults(defense, inputs, logits))
    yield from state_faults
    if not lacks_parts:
        yield from _find_parts_faults(defense, inputs, logits)
        yield from _find_gradient_faults(defense, inputs)
    mode_faults = list(_find_mode_faults(defense, inputs, logits))
    yield from mode_faults
    is_comparable = not (state_faults or mode_faults or getattr(defense, "randomized", False))
    if declared is True and is_comparable and not is_independent(defense, inputs):
        yield Fault(
            "independent",
            "expected every answer to be the same alone and in the batch, because "
            "`independent` is True, got answers that differ; set it to False, or to None if unknown",
        )
    changed = sorted(_compare_snapshots(before, _take_snapshot(modules)))
    if changed:
        some = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        yield Fault(
            "unchanged model",
            f"expected the model as it was before the calls, got another {some}; work "
            "on tensors of your own (torch.func.functional_call) and use torch.autograd.grad instead "
            "of backward()",
        )
    if not torch.equal(inputs, original):
        yield Fault("unchanged inputs", "expected the inputs as they were, got others; clone them first")


def _find_interface_fault(defense: Any) -> Fault | None:
    missing = [name for name in ("adapt", "predict") if not callable(getattr(defense, name, None))]
    if missing:
        got = "neither" if len(missing) == 2 else f"no {missing[0]}"
        return Fault(
            "interface",
            f"expected adapt(inputs) and predict(inputs, state), got {got}; make two of `forward`",
        )
    if not callable(defense):
        return Fault(
            "interface", "expected defense(inputs) to return logits, got an object that is not callable"
        )
    return None


def _find_logits_fault(logits: object, rows: int) -> Fault | None:
    if not isinstance(logits, Tensor):
        return Fault("logits", f"expected a tensor ({rows}, classes), got {type(logits).__name__}")
    if not logits.is_floating_point() or logits.dim() != 2 or len(logits) != rows:
        return Fault(
            "logits",
            f"expected floats ({rows}, classes), got {logits.dtype} of shape "
            f"{tuple(logits.shape)}; return one row for each input, for all classes",
        )
    if not logits.isfinite().all():
        return Fault("logits", "expected finite values, got NaN or infinity")
    return None


def _find_state_faults(defense: Any, inputs: Tensor, logits: Tensor) -> Iterator[Fault]:
    """Check that a call returns the same whatever was called before, and draws no random numbers."""
    randomized = getattr(defense, "randomized", False)
    first, other, again = (_call(defense, inputs, seed) for seed in (0, 1, 0))
    if not randomized and not torch.equal(first, other) and torch.equal(first, again):
        yield Fault(
            "deterministic",
            "expected equal answers to equal inputs, got others with another random "
            "seed; draw from a torch.Generator with a fixed seed, or set `randomized = True`",
        )
    _call(defense, inputs.flip(0) / 2)
    if not torch.equal(_call(defense, inputs), logits):
        yield Fault(
            "clean state",
            "expected a call to return the same after other calls, got another answer to "
            "the same inputs; start from the model in every adapt(), and keep nothing on the defense",
        )


def _find_parts_faults(defense: Any, inputs: Tensor, logits: Tensor) -> Iterator[Fault]:
    """Check adapt and predict against the call, and the state as a value."""

    def predict_from(state: Any) -> Tensor:
        logits: Tensor = _call_seeded(lambda: defense.predict(inputs, state))
        return logits

    state = _call_seeded(lambda: defense.adapt(inputs))
    both = _call_seeded(lambda: defense.predict(inputs, defense.adapt(inputs)))
    if not _is_close(both, logits):
        yield Fault(
            "adapt and predict",
            "expected predict(inputs, adapt(inputs)) to equal defense(inputs), got "
            f"logits that differ by {_measure_difference(both, logits)}; define the call by these two",
        )
    try:
        copied = pickle.loads(pickle.dumps(_detach(state)))
    except Exception as error:
        yield Fault(
            "picklable state",
            f"expected a state that pickle can store, got {type(error).__name__} "
            f"({error}); keep tensors and plain values in it, in a class at the top of a module",
        )
    else:
        if not _is_close(predict_from(copied), predict_from(state)):
            yield Fault(
                "picklable state",
                "expected equal predictions from a state and its copy, got others; "
                "keep all that predict() reads in the state",
            )
    if accepts(defense.adapt, "start") and accepts(defense.adapt, "steps"):
        first = _call_seeded(lambda: defense.adapt(inputs, steps=0))
        continued = _call_seeded(lambda: defense.adapt(inputs, start=first))
        if not _is_close(predict_from(continued), predict_from(state)):
            yield Fault(
                "start",
                "expected adapt(inputs, start=adapt(inputs, steps=0)) to equal adapt(inputs), "
                "got other predictions; keep in the state all that the next update needs",
            )


def _find_gradient_faults(defense: Any, inputs: Tensor) -> Iterator[Fault]:
    """Check that the stale gradient is that of predict at a constant state."""
    if not accepts(defense.adapt, "gradient"):
        return
    points = inputs.clone().requires_grad_()
    with torch.enable_grad():
        constant = _call_seeded(lambda: defense.adapt(inputs, gradient="stale"))
        wanted = _read_gradient(_call_seeded(lambda: defense.predict(points, constant)), points)
        state = _call_seeded(lambda: defense.adapt(points, gradient="stale"))
        got = _read_gradient(_call_seeded(lambda: defense.predict(points, state)), points)
    if wanted is None:
        yield Fault(
            "gradient",
            "expected predict(inputs, state) to have a gradient to the inputs, got none; do "
            "not detach them, and do not switch gradients off",
        )
    elif got is None or not _is_close(got, wanted):
        yield Fault(
            "stale gradient",
            "expected adapt(inputs, gradient='stale') to return a constant, so that the "
            "gradient is that of predict() alone, got another; detach what adapt() returns",
        )


def _find_mode_faults(defense: Any, inputs: Tensor, logits: Tensor) -> Iterator[Fault]:
    for mode in (torch.no_grad, torch.inference_mode):
        try:
            with mode():
                got = _call_seeded(lambda: defense(inputs)).clone()
        except RuntimeError as error:
            yield Fault(
                "callers",
                f"expected answers under torch.{mode.__name__}(), got an error ({error}); "
                "enter torch.inference_mode(False) and torch.enable_grad() inside adapt()",
            )
            continue
        if not _is_close(got, logits):
            yield Fault(
                "callers",
                f"expected the same answers under torch.{mode.__name__}(), got logits that "
                f"differ by {_measure_difference(got, logits)}; enable gradients inside adapt()",
            )


# Calls that leave the random numbers of the caller alone.


def _call_seeded(function: Any, seed: int = 0) -> Any:
    with use_seed(seed):
        return function()


def _call(defense: Any, inputs: Tensor, seed: int = 0) -> Any:
    logits = _call_seeded(lambda: defense(inputs), seed)
    return logits.detach() if isinstance(logits, Tensor) else logits


def _read_gradient(logits: Tensor, points: Tensor) -> Tensor | None:
    """Return the gradient of a fixed weighted sum of the logits, or None if there is none."""
    if not logits.requires_grad:
        return None
    weights = torch.linspace(-1, 1, logits.numel()).to(logits).view_as(logits)
    return torch.autograd.grad((weights * logits).sum(), points, allow_unused=True)[0]


def _detach(state: Any) -> Any:
    return state.detach() if hasattr(state, "detach") else state


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def _measure_difference(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f"their shape: {tuple(one.shape)} and {tuple(other.shape)}"
    return f"{(one - other).abs().max().item():.3g}"


# The model before and after.


def _list_modules(defense: Any) -> list[tuple[str, nn.Module]]:
    """Return all modules of the defense, by name: its own, or those that it holds as attributes."""
    if isinstance(defense, nn.Module):
        return list(defense.named_modules())
    held = [
        (name, value)
        for name, value in getattr(defense, "__dict__", {}).items()
        if isinstance(value, nn.Module)
    ]
    return [
        (f"{name}.{inner}".strip("."), module)
        for name, value in held
        for inner, module in value.named_modules()
    ]


def _take_snapshot(modules: list[tuple[str, nn.Module]]) -> dict[str, Any]:
    """Return all that must not change, by what it is called in the error."""
    snapshot: dict[str, Any] = {}
    for name, module in modules:
        snapshot[f"mode of {name or 'the defense'}"] = module.training
        for values in (module._parameters, module._buffers):
            for key, value in values.items():
                if value is not None:
                    path = f"{name}.{key}".strip(".")
                    grad = None if value.is_inference() else value.grad
                    snapshot[path] = value.detach().clone()
                    snapshot[f"requires_grad of {path}"] = value.requires_grad
                    snapshot[f"grad of {path}"] = None if grad is None else grad.detach().clone()
    return snapshot


def _compare_snapshots(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in before.keys() | after.keys():
        one, other = before.get(name), after.get(name)
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            is_same = one.shape == other.shape and torch.equal(one, other)
        else:
            is_same = one is other or (type(one) is type(other) and one == other)
        if not is_same:
            yield name
