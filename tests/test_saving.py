"""A defended model is saved as the weights of its model and the text of its defense."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dent
from dent.models import build


@pytest.mark.parametrize("defense", ["dent+:steps=2", "dent-nominal:steps=2", "tent", "hedge:steps=2"])
def test_a_defended_model_answers_the_same_after_it_was_saved(defense: str, tmp_path: Path) -> None:
    inputs = torch.rand(4, 3, 16, 16)
    defended = dent.defend(build("resnet20").eval(), defense)
    before = {name: value.clone() for name, value in defended.state_dict().items()}
    answers = defended(inputs)  # what a call learns is no part of the weights
    torch.save({"defense": defense, "weights": defended.state_dict()}, tmp_path / "defended.pt")

    saved = torch.load(tmp_path / "defended.pt", weights_only=True)
    assert saved["weights"].keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in saved["weights"].items())
    again = dent.defend(build("resnet20").eval(), saved["defense"])
    assert not torch.equal(again(inputs), answers)  # its model has other weights
    again.load_state_dict(saved["weights"])
    if isinstance(again, dent.Online):
        again.reset()
    assert torch.equal(again(inputs), answers)
