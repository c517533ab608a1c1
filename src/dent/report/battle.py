"""Recorded attacks on a page: what each of them is, which is shown first, and why so few images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dent.evaluation.battle import DIRECT, FIXED_POINT, TRANSFER, list_recordings
from dent.evaluation.plan import BATTLE_STEPS, FEW
from dent.evaluation.spec import Cell
from dent.report.blocks import Battle, Block, Gallery, Note, Record

BATTLE = (
    Note(
        "One image, one attack, step by step, with the answers of the static model and of the defended "
        "model, which adapts to the whole batch at every step. It opens at the last step of the attack "
        "that breaks most; choose another attack or image, play it, or use the arrow keys."
    ),
    Note(
        f"Why {FEW} images: a defense that depends on its batch must adapt to a whole batch of several "
        "classes, and each recorded step costs another answer to all of it. The first "
        f"{FEW} images of the first batch (all, if there are fewer) and {BATTLE_STEPS} steps are enough "
        "for the first and cheap enough for the second. The battle only illustrates; the tables are "
        "about all images and the full attacks."
    ),
)
GALLERY = Note(
    "The same images at the end: natural and attacked, with the answers of both models. Perturbations "
    "are magnified; gray means no change."
)
RECORDED = {
    TRANSFER: "Both models get the images that APGD makes on the static model",
    FIXED_POINT: "Both models get the images of the fixed point attack, which is made on the model as "
    "adapted to the last round's images",
    DIRECT: "Each model gets the images that APGD makes on that model itself",
}


def make_record(cell: Cell, battle: Mapping[str, Any] | None) -> Record | None:
    """Return the recorded attacks on a cell, each with what it is; None if there are none."""
    recordings = list_recordings(battle)
    captions = [_caption_recording(one, cell.defense) for one in recordings]
    return Record(str(cell), recordings, captions, cell.defense) if recordings else None


def _caption_recording(recording: Mapping[str, Any], defense: str) -> str:
    about, right = RECORDED.get(recording["attack"], "An attack, recorded"), recording["right"]
    text = f"{about}. {recording['steps']} steps on a batch of {recording['batch']} images"
    ends = f"the static model is right on {right['static']}, {defense} on {right['defended']}"
    return f"{text}; at the end, {ends}."


def show_records(records: Sequence[Record]) -> Iterator[Block]:
    """Yield the battle and the gallery, if attacks were recorded."""
    if records:
        yield Battle("The battle", records, BATTLE)
        yield Gallery("Gallery", records, (GALLERY,))
