"""What a reproduction would load and do, and about how long it would take: `--dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dent.data import open_data
from dent.evaluation.estimate import seconds_per_image
from dent.evaluation.units import eps_text
from dent.models import ROBUSTBENCH, build, load_model
from dent.models.robustbench import list_folders, shorten_id
from dent.paper.reproduction import evaluation_of, folder_name, forwards, works
from dent.paper.scales import Scale, Work
from dent.paper.tables import Table

IMAGES = 8  # of a timed forward


@dataclass(frozen=True)
class Estimated:
    """Of one evaluation; `seconds` is None where the architecture is not known.

    trouble: why it could not be loaded here and now.
    """

    table: str  # the first that needs it
    loads: str
    defense: str
    ball: str
    data: str
    n: int | None
    forwards: float
    seconds: float | None
    trouble: str | None


def estimate_tables(chosen: Sequence[Table], scale: Scale, *, device: str = "cpu") -> list[Estimated]:
    """A row for each evaluation that the tables need, each once."""
    rows, seen = [], set()
    speeds: dict[str, tuple[float | None, str | None]] = {}
    for table in chosen:
        for work in works([table], scale):
            key = folder_name(evaluation_of(work, seed=0, device=device))
            if key in seen:
                continue
            seen.add(key)
            if work.model not in speeds:
                speeds[work.model] = _speed(work, device)
            seconds, trouble = speeds[work.model]
            count = forwards(work)
            rows.append(
                Estimated(
                    table=table.name,
                    loads=work.model,
                    defense=work.defense,
                    ball=f"{work.norm} {eps_text(work.eps)}",
                    data=work.data,
                    n=work.n,
                    forwards=count,
                    seconds=None if seconds is None else count * seconds,
                    trouble=trouble,
                )
            )
    return rows


def _speed(work: Work, device: str) -> tuple[float | None, str | None]:
    """Seconds of a forward for each image; and why the model cannot be loaded, if it cannot.

    What a model takes does not depend on its weights: untrained, its architecture tells as much.
    """
    key = next((key for key in ROBUSTBENCH if shorten_id(key) == work.model), None)
    if key is not None:  # its weights are large, and are not fetched for an estimate
        places = [folder / f"{key}.pt" for folder in list_folders()]
        here = any(place.is_file() for place in places)
        missing = f"{work.model} is not at {' or '.join(map(str, places))}; robustbench would fetch it"
        model, trouble = load_model(work.model, weights="random"), None if here else missing
    else:
        try:
            model, trouble = load_model(work.model), None
        except Exception as error:  # functions of others raise what they like
            trouble = " ".join(filter(None, (*str(error).split(), work.note and f"({work.note})")))
            if not work.architecture:
                return None, trouble
            model = build(work.architecture)
    inputs = torch.rand(IMAGES, 3, *[_image_size(work)] * 2, device=device)
    return seconds_per_image(model.to(device).eval(), inputs), trouble


def _image_size(work: Work) -> int:
    if work.data.startswith("cifar"):
        return 32  # which is not fetched for an estimate either
    if work.data.startswith("imagenet"):
        return 288 if work.data.endswith("#crop288") else 224
    return int(open_data(work.data, n=1).read(torch.tensor([0])).shape[-1])
