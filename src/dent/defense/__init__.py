"""The method: Delta, Sigma, the objective, the update, and the paper's settings by name."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import nn

from dent.defense.dent import Dent
from dent.defense.online import Online
from dent.defense.settings import PRESET_NOTES, PRESETS, Settings, make_settings
from dent.defense.state import State, Trace
from dent.defense.text import parse_defense

__all__ = ["PRESETS", "PRESET_NOTES", "Dent", "Online", "Settings", "State", "Trace", "defend"]


@overload
def defend(
    model: nn.Module,
    preset: Literal["tent"],
    *,
    compile: bool = False,
    channels_last: bool | None = None,
    chunk: int | None = None,
    **settings: Any,
) -> Online: ...


@overload
def defend(
    model: nn.Module,
    preset: str = "dent",
    *,
    compile: bool = False,
    channels_last: bool | None = None,
    chunk: int | None = None,
    continual: Literal[True],
    **settings: Any,
) -> Online: ...


@overload
def defend(
    model: nn.Module,
    preset: str = "dent",
    *,
    compile: bool = False,
    channels_last: bool | None = None,
    chunk: int | None = None,
    **settings: Any,
) -> Dent: ...


def defend(
    model: nn.Module,
    preset: str = "dent",
    *,
    compile: bool = False,
    channels_last: bool | None = None,
    chunk: int | None = None,
    **settings: Any,
) -> Dent | Online:
    """Defend a classifier at test time, with the paper's settings or any of them replaced.

    model: any module from inputs (N, ...) to logits (N, classes); it is shared and never changed.
    preset: a name of `PRESETS` (`dent list presets` prints them), or a text such as `dent+:steps=3`.
    compile, channels_last, chunk: how it is computed, as in `Dent`; they do not change the result.
    settings: fields of `Settings` that replace the preset's.

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
