"""Training: nominal, adversarial (AT, fast AT) and TRADES."""

from __future__ import annotations

from dent.training.loop import Step
from dent.training.recipe import RECIPE_NOTES, RECIPES, Recipe, make_recipe
from dent.training.train import Trained, train
from dent.training.watch import Epoch, TrainingError

__all__ = [
    "RECIPES", "RECIPE_NOTES", "Epoch", "Recipe", "Step", "Trained", "TrainingError", "make_recipe",
    "train",
]  # fmt: skip
