"""The weights that ship with dent: packed from a training, and measured for their cards.

    python benchmarks/weights.py pack runs/resnet20-at --name resnet20-at --summary "..."
    python benchmarks/weights.py measure resnet20-at --eps 8/255
    python benchmarks/weights.py table

`pack` takes the model of a `dent train` folder into the package, with a card. `measure` fills the card:
natural accuracy on all test images and on the shipped 1,000, and what the reference implementation of
APGD-CE and targeted APGD-DLR (100 steps each, five restarts, nine targets) leave of the latter together.
`table` prints the cards for docs/models.md.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import time
from pathlib import Path
from typing import Any

import torch

import dent
from dent.data import open_data
from dent.fields import number
from dent.models.shipped import cards
from dent.report.models import accuracy_text
from dent.report.terminal import progress_bar
from dent.storage import replace_file
from dent.training.card import count_correct, make_accuracy

WEIGHTS = Path(dent.__file__).parent / "models" / "weights"


def write_card(name: str, card: dict[str, Any]) -> None:
    with replace_file(WEIGHTS / f"{name}.json") as file:
        file.write(json.dumps(card, indent=2).encode() + b"\n")


def pack(run: Path, name: str, summary: str, command: str) -> None:
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    trained = json.loads((run / "card.json").read_text())
    buffer = io.BytesIO()
    torch.save(checkpoint["model"], buffer)
    with replace_file(WEIGHTS / f"{name}.pt") as file:
        file.write(buffer.getvalue())
    card = {
        "name": name,
        "summary": summary,
        "architecture": checkpoint["architecture"],
        "classes": checkpoint["classes"],
        "normalization": {"mean": checkpoint["mean"], "std": checkpoint["std"]},
        "data": {
            "name": trained["data"],
            "images": checkpoint["asked"]["images"] - trained["recipe"]["hold_out"],
            "held out": trained["recipe"]["hold_out"],
        },
        "recipe": trained["recipe"],
        "command": command,
        "seconds": trained["seconds"],
        "torch": trained["torch"],
        "accuracies": trained["accuracies"],
        "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
    }
    write_card(name, card)


def measure(name: str, eps: float | None, norm: str, batch_size: int) -> None:
    from pyautoattack import AutoAttack

    card = json.loads((WEIGHTS / f"{name}.json").read_text())
    model = dent.load_model(name)
    whole, shipped = open_data("cifar10"), open_data("cifar10", n=1000)
    card["accuracies"] = [
        make_accuracy("natural, test images", count_correct(model, whole), len(whole)),
        make_accuracy("natural, shipped images", count_correct(model, shipped), len(shipped)),
    ]
    write_card(name, card)
    if eps is None:
        return
    started, standing = time.perf_counter(), 0
    with progress_bar(f"APGD-CE and APGD-T on {name}") as move:
        for done, (inputs, labels) in enumerate(shipped.batches(batch_size), 1):
            attack = AutoAttack(
                model, norm={"linf": "Linf", "l2": "L2"}[norm], eps=eps, version="custom",
                attacks=["apgd-ce", "apgd-t"], seed=0, device="cpu",
            )  # fmt: skip
            points, _ = attack.run_standard_evaluation(inputs, labels, batch_size=batch_size)
            with torch.no_grad():
                standing += int((model(points).argmax(1) == labels).sum())
            move(done * batch_size, len(shipped), f"{standing} stand")
    budget = f"{round(eps * 255, 3):g}/255" if norm == "linf" else f"{eps:g}"
    what = f"reference APGD-CE and APGD-T, {norm.capitalize()} {budget}, shipped images"
    card["accuracies"].append(make_accuracy(what, standing, len(shipped)))
    write_card(name, card)
    print(f"{name}: {time.perf_counter() - started:.0f} s")


def table() -> None:
    print("| model | what it is | accuracy in % | 95 % interval | sha256 |")
    print("|---|---|---|---|---|")
    for name, card in cards().items():
        shown = "<br>".join(accuracy_text(one) for one in card.accuracies)
        intervals = "<br>".join(f"{one['low']:.2f} to {one['high']:.2f}" for one in card.accuracies)
        print(f"| `{name}` | {card.summary} | {shown} | {intervals} | `{card.sha256[:12]}` |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack")
    packing.add_argument("run", type=Path)
    for flag in ("--name", "--summary", "--command"):
        packing.add_argument(flag, required=True)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("name")
    measuring.add_argument("--eps", type=number)
    measuring.add_argument("--norm", choices=("linf", "l2"), default="linf")
    measuring.add_argument("--batch-size", type=int, default=250)
    verbs.add_parser("table")
    given = parser.parse_args()
    if given.verb == "pack":
        pack(given.run, given.name, given.summary, given.command)
    elif given.verb == "measure":
        measure(given.name, given.eps, given.norm, given.batch_size)
    table()


if __name__ == "__main__":
    main()
