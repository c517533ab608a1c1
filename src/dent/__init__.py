"""Dynamic defences against adversarial attacks: models that optimize back, on every batch."""

from __future__ import annotations

from dent.defense import PRESETS, Dent, Online, Settings, State, Trace, defend

__version__ = "0.1.0"
__all__ = ["PRESETS", "Dent", "Online", "Settings", "State", "Trace", "__version__", "defend"]
