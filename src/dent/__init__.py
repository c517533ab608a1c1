"""Dynamic defenses against adversarial attacks: models that optimize back, on every batch."""

from __future__ import annotations

from dent import attacks
from dent.data import load_data
from dent.defense import PRESETS, Dent, Online, Settings, State, Trace, defend
from dent.evaluation import evaluate, load_results
from dent.models import load_model

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "Dent",
    "Online",
    "Settings",
    "State",
    "Trace",
    "__version__",
    "attacks",
    "defend",
    "evaluate",
    "load_data",
    "load_model",
    "load_results",
]
