"""Defenses that adapt at test time: the protocol, `defend`, the paper's method in `dent/`, and others
beside it, one file each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

from torch import nn

from dent.defense.catalog import DEFENSES, make_defense_settings
from dent.defense.defended import Adaptation, Defended, Method
from dent.defense.dent.checks import Layers, LowDiversityWarning
from dent.defense.dent.method import Dent
from dent.defense.dent.online import Online
from dent.defense.dent.settings import PRESETS, Settings
from dent.defense.dent.state import State, Trace
from dent.defense.protocol import Defense, is_independent
from dent.defense.text import parse_defense

__all__ = [
    "DEFENSES",
    "PRESETS",
    "Adaptation",
    "Defended",
    "Defense",
    "Dent",
    "LowDiversityWarning",
    "Method",
    "Online",
    "Settings",
    "State",
    "Trace",
    "defend",
    "is_independent",
]

MethodName = Literal[
    "views",
    "crops",
    "memo",
    "anti-adversary",
    "hedge",
    "energy",
    "lame",
    "medbn",
    "sar",
    "eata",
    "bn-mix",
]


@overload
def defend(model: nn.Module, defense: Literal["tent"], **settings: Any) -> Online: ...


@overload
def defend(
    model: nn.Module, defense: str = "dent", *, continual: Literal[True], **settings: Any
) -> Online: ...


@overload
def defend(model: nn.Module, defense: MethodName | Method, **settings: Any) -> Defended: ...


# A type checker takes a text with settings, or one that it does not know, for dent.
@overload
def defend(
    model: nn.Module, defense: str | Mapping[str, Any] | Settings = "dent", **settings: Any
) -> Dent: ...


def defend(
    model: nn.Module,
    defense: str | Mapping[str, Any] | Settings | Method = "dent",
    *,
    compile: bool = False,
    channels_last: bool | None = None,
    chunk: int | None = None,
    layers: Layers = (),
    **settings: Any,
) -> Dent | Online | Defended:
    """Return the model defended at test time, by a defense with any of its settings replaced.

    model: any module from inputs (N, ...) to logits (N, classes). It is shared and never changed.
    defense: a name of `DEFENSES` (`dent list defenses` prints them), a text such as `dent+:steps=3` or
    `hedge:steps=5`, the same as a mapping ({"preset": "dent+", "steps": 3}), or settings.
    compile, channels_last, chunk: how to compute dent, as in `Dent`. They do not change the result.
    layers: normalization layers of your own to adapt besides torch's, by class ([LayerNorm2d]) or by
    name in the model (["stem.norm"]). Each needs parameters `weight` and `bias`, or one of them.
    settings: fields that replace those of the defense.

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
    >>> print(defend(model, "anti-adversary:steps=3"))
    Defended(anti-adversary
      model: Sequential, 1,570 parameters
      settings: steps=3 gradient='stale' lr=0.15
      cost: 7 forwards; independent: if the model is
    )
    """
    name = "custom"
    if isinstance(defense, (Settings, Method)):
        made = defense.replace(**settings)
    else:
        name, replaced = parse_defense(defense)
        made = make_defense_settings(name, **(replaced | settings))
    if isinstance(made, Method):
        if compile or channels_last is not None or chunk is not None:
            raise TypeError(
                f"compile, channels_last and chunk: expected with dent alone, got with {made.name}"
            )
        return Defended(model, made, layers=layers)
    dent = Dent(
        model, made, name=name, compile=compile, channels_last=channels_last, chunk=chunk, layers=layers
    )
    return Online(dent) if made.continual else dent
