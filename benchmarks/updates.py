"""Measure accuracy, entropy and calibration over the updates of dent, on natural and attacked images.

    python benchmarks/updates.py --model resnet20-at --model resnet26-4-at --eps 8/255 [--json FILE]
    python benchmarks/updates.py --model resnet20-at --defense dent+ --updates 0 6 --direct [--bfloat16]

Each batch is adapted as it is, and again as attacked: by APGD on the cross-entropy of the static model,
where every image keeps its point of highest loss, or, with `--first-success`, where an attack stops at
the first point that breaks it. They are the same images for every defense, so that a table shows what
the updates change, and not what an attack made of it. Confidence is the mean largest probability; it
should equal the accuracy. Entropy is the mean in nats.

`--direct` measures instead what APGD leaves that attacks the defense itself, through its stale gradient,
once for each number of updates. `--bfloat16` searches in bfloat16; what it finds is judged in float32.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import environment  # noqa: F401
import torch
from torch import Tensor

import dent
from dent.attacks import apgd
from dent.attacks.adaptive.transfer import stop_at_success
from dent.attacks.fused import fuse_batch_norm
from dent.precision import refuse_slow_bfloat16, search_in_bfloat16
from dent.report.terminal import progress_bar, show_table
from dent.storage import replace_file
from dent.texts import read_number

UPDATES = (0, 1, 3, 10, 30)


Batches = list[tuple[Tensor, Tensor]]
Row = dict[str, Any]


def attack_static(
    model: torch.nn.Module, batches: Batches, *, eps: float, steps: int, first_success: bool
) -> dict[str, Batches]:
    """Return the batches as attacked: of highest loss, and at the first success if asked."""
    static = fuse_batch_norm(model, batches[0][0])
    # No image leaves the search for the highest loss when it is broken.
    attacks = {"highest loss": partial(apgd, static, joint=True)}
    if first_success:
        attacks["first success"] = partial(stop_at_success, static, norm="linf")
    return {
        kind: [
            (attack(inputs, labels, eps=eps, steps=steps).inputs, labels) for inputs, labels in batches
        ]
        for kind, attack in attacks.items()
    }


def describe_answers(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy and confidence in %, and the entropy."""
    log_p = logits.log_softmax(1)
    return {
        "accuracy": round(100 * float((logits.argmax(1) == labels).float().mean()), 2),
        "confidence": round(100 * float(log_p.exp().amax(1).mean()), 2),
        "entropy": round(-float((log_p.exp() * log_p).sum(1).mean()), 2),
    }


def measure(
    name: str, defense: str, batches: dict[str, Batches], numbers: Sequence[int], move: Any
) -> Iterator[Row]:
    """Yield a row for each kind of images and number of updates."""
    defended = dent.defend(dent.load_model(name), defense)
    assert isinstance(defended, dent.Dent)
    for kind, pairs in batches.items():
        states: list[dent.State | None] = [None] * len(pairs)
        for before, updates in zip((0, *numbers), numbers, strict=False):
            move(f"{name}, {defense}, {kind}, {updates} updates")
            logits = []
            for number, (inputs, _) in enumerate(pairs):
                state = defended.adapt(inputs, start=states[number], steps=updates - before)
                states[number] = state
                with torch.no_grad():
                    logits.append(defended.predict(inputs, state))
            answers = describe_answers(torch.cat(logits), torch.cat([labels for _, labels in pairs]))
            yield {"model": name, "defense": defense, "images": kind, "updates": updates} | answers


def measure_direct(
    name: str, defense: str, batches: Batches, numbers: Sequence[int], move: Any, *,
    eps: float, steps: int, in_half: bool,
) -> Iterator[Row]:  # fmt: skip
    """Yield a row for each number of updates: of images that attack the defense itself."""
    for updates in numbers:
        defended = dent.defend(dent.load_model(name), defense, steps=updates)
        logits = []
        for number, (inputs, labels) in enumerate(batches, 1):
            move(f"{name}, {defense}, direct, {updates} updates, batch {number}")
            with search_in_bfloat16(defended, inputs.device, enabled=in_half):
                found = apgd(defended, inputs, labels, eps=eps, steps=steps, joint=True).inputs
            with torch.no_grad():
                logits.append(defended(found))
        answers = describe_answers(torch.cat(logits), torch.cat([labels for _, labels in batches]))
        yield {"model": name, "defense": defense, "images": "direct", "updates": updates} | answers


def store_row(file: Path, row: Row) -> None:
    """Write a row to a file, in place of one that was measured with the same settings."""
    rows: list[Row] = json.loads(file.read_text()) if file.exists() else []
    keys = ("model", "defense", "batch_size", "images", "updates")
    rows = [one for one in rows if any(one[key] != row[key] for key in keys)]
    with replace_file(file) as opened:
        opened.write((json.dumps([*rows, row], indent=2) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", required=True, help="Model; may be repeated.")
    parser.add_argument("--defense", action="append", help="Settings of dent; may be repeated.")
    parser.add_argument("--eps", default="8/255", help="Radius in Linf.")
    parser.add_argument("--n", type=int, default=256, help="Number of images.")
    parser.add_argument("--batch-size", type=int, default=128, help="Number of images in a batch.")
    parser.add_argument("--steps", type=int, default=20, help="Steps of APGD.")
    parser.add_argument(
        "--updates", type=int, nargs="+", default=UPDATES, help="Numbers of updates, in rising order."
    )
    parser.add_argument(
        "--first-success", action="store_true", help="Add points that stop at the first success."
    )
    parser.add_argument("--direct", action="store_true", help="Attack the defense itself.")
    parser.add_argument(
        "--bfloat16", action="store_true", help="With --direct, search in bfloat16, judge in float32."
    )
    parser.add_argument("--json", type=Path, help="File to add the rows to; it keeps its other rows.")
    given = parser.parse_args()
    if given.bfloat16:
        refuse_slow_bfloat16(torch.device("cpu"))
    defenses = given.defense or ["dent", "dent:statistics=test", "dent+"]
    inputs, labels = dent.load_data("cifar10", n=given.n)
    natural = list(zip(inputs.split(given.batch_size), labels.split(given.batch_size), strict=True))
    attack: dict[str, Any] = {"eps": read_number(given.eps), "steps": given.steps}
    rows, done = [], 0
    kinds = len(natural) if given.direct else 3 if given.first_success else 2
    total = len(given.model) * (1 + kinds * len(given.updates) * len(defenses))
    with progress_bar("updates") as show:

        def move(text: str) -> None:
            nonlocal done
            show(done, total, text)
            done += 1

        for name in given.model:
            move(f"{name}, attack on the static model")
            run: Callable[..., Iterator[Row]]
            if given.direct:
                run = partial(measure_direct, batches=natural, **attack, in_half=given.bfloat16)
            else:
                attacked = attack_static(
                    dent.load_model(name), natural, first_success=given.first_success, **attack
                )
                run = partial(measure, batches={"natural": natural} | attacked)
            for defense in defenses:
                for row in run(name, defense, numbers=given.updates, move=move):
                    row["batch_size"] = given.batch_size
                    rows.append(row)
                    if given.json:  # row by row, so that a run that is stopped leaves what it has
                        store_row(given.json, row)
    show_table(rows, right=("updates", "accuracy", "confidence", "entropy"))


if __name__ == "__main__":
    main()
