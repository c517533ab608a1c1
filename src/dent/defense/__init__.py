"""Defenses that adapt at test time: the protocol, `defend`, and the paper's method in `dent/`."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import nn

from dent.defense.dent.checks import LowDiversityWarning
from dent.defense.dent.method import Dent, State, Trace
from dent.defense.dent.online import Online
from dent.defense.dent.settings import PRESET_NOTES, PRESETS, Settings, make_settings
from dent.defense.protocol import Defense, is_independent
from dent.defense.text import parse_defense

__all__ = [
    "PRESETS",
    "PRESET_NOTES",
    "Defense",
    "Dent",
    "LowDiversityWarning",
    "Online",
    "Settings",
    "State",
    "Trace",
    "defend",
    "is_independent",
]


@overload
def defend(model: nn.Module, preset: Literal["tent"], **settings: Any) -> Online: ...


@overload
def defend(
    model: nn.Module, preset: str = "dent", *, continual: Literal[True], **settings: Any
) -> Online: ...


@overload
def defend(model: nn.Module, preset: str = "dent", **settings: Any) -> Dent: ...


def defend(
    model: nn.Module,
    preset: str = "dent",
    *,
    compile: bool = False,
    channels_last: bool | None = None,
    chunk: int | None = None,
    **settings: Any,
) -> Dent | Online:
    """Return the model defended at test time, by a preset or with any of its settings replaced.

    model: any module from inputs (N, ...) to logits (N, classes). It is shared and never changed.
    preset: a name of `PRESETS` (`dent list presets` prints them), or a text such as `dent+:steps=3`.
    compile, channels_last, chunk: how to compute it, as in `Dent`. They do not change the result.
    settings: fields of `Settings` that replace those of the preset.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    >>> defended = defend(model, "dent+", steps=3)
    >>> defended(torch.rand(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    >>> print(defended)
    Dent(dent+
      model: Sequential, 1,570 parameters
      Delta: 8 of 1,570 parameters, the scale and shift of 1 layers (BatchNorm2d), per sample
      statistics: train
      Sigma: off
      updates: 3 of adamod, lr 0.006, on information-maximization (mean)
      gradient: stale; independent: no
    )
    """
    name, replaced = parse_defense(preset)
    made = make_settings(name, **(replaced | settings))
    dent = Dent(model, made, name=name, compile=compile, channels_last=channels_last, chunk=chunk)
    return Online(dent) if made.continual else dent
