"""Measure what each attack breaks that no other one breaks, at the same cost for each.

    python benchmarks/yield.py [--models resnet20-at "2b2 (eth-sri)@8/255"] [--defenses dent+ views]
        [--attacks lazy chained:rounds=5] [--n 128] [--batch-size 128] [--forwards 1000] [--json FILE]

Each attack gets as many steps as its estimated cost allows (`--forwards`, forwards of the static model
for each input; a backward counts as one), at least one. Seconds are those of the processor. The JSON
file keeps every (model, defense, attack) that is done; the same command continues there.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import environment  # noqa: F401
import third_party
import torch
from torch import Tensor, nn

import dent
from dent.evaluation.attacks import Forwards, find_attack
from dent.evaluation.defenses import Subject, count_updates, find_parts
from dent.evaluation.suites import ADAPTIVE, explain_missing, format_attack, parse_attack
from dent.report.terminal import progress_bar
from dent.storage import replace_file
from dent.texts import read_number

Entry = dict[str, Any]  # of one attack on one defense of one model
DIRECT = ("apgd-ce", "apgd-t:order=distance,targets=3")
ATTACKS = (*DIRECT, *(name for name in ADAPTIVE if find_attack(name).kind == "adaptive"))
MODELS = ("resnet20-at", "2b2 (eth-sri)")
DEFENSES = ("dent+", "dent:steps=10")
RESULTS = Path(__file__).with_name("yield.json")


def load(text: str) -> tuple[nn.Module, float]:
    """Return a model, of dent's list or of others, and its radius (8/255 if none is given)."""
    name, _, eps = text.partition("@")
    others = third_party.MODELS
    model = others[name]() if name in others else dent.load_model(name)
    return model, read_number(eps or "8/255")


def fit_steps(text: str, updates: int, size: int, forwards: float) -> dict[str, Any]:
    """Return the options of an attack, with the most steps that the budget allows."""
    name, options = parse_attack(text)
    attack = find_attack(name)
    if "steps" not in attack.options or "steps" in options:
        return options
    costs = Forwards(updates, size)
    one, two = (attack.count_forwards(costs, options | {"steps": steps}) for steps in (1, 2))
    return options | {"steps": max(1 + int((forwards - one) / (two - one)), 1)}


def measure(
    subject: Subject, text: str, options: dict[str, Any], images: Tensor, labels: Tensor, *,
    batch_size: int, eps: float,
) -> Entry:  # fmt: skip
    """Attack each batch, submit it as deployed, and return which points stand and the time."""
    name, _ = parse_attack(text)
    correct: list[bool] = []
    started = time.process_time()
    for inputs, truth in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        everyone = torch.ones_like(truth, dtype=torch.bool)
        result = find_attack(name).run(
            subject, inputs, truth, mask=everyone, eps=eps, norm="linf", seed=0, **options
        )
        with torch.no_grad():
            correct += (subject.model(result.inputs).argmax(1) == truth).tolist()
    return {"options": options, "seconds": time.process_time() - started, "correct": correct}


def tabulate(entries: dict[str, Entry], n: int) -> list[str]:
    """Return a table in Markdown, the attacks with the highest yield first."""
    broken = {name: ~torch.tensor(entry["correct"]) for name, entry in entries.items()}
    times = torch.stack(list(broken.values())).sum(0)  # how many attacks break each point
    alone = {name: int((own & (times == 1)).sum()) for name, own in broken.items()}
    lines = [
        "| attack | steps | left correct | broken alone | seconds | alone per minute |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    ranked = sorted(entries, key=lambda name: (-alone[name], int((~broken[name]).sum())))
    for name in ranked:
        entry, left = entries[name], int((~broken[name]).sum())
        seconds = max(entry["seconds"], 1e-9)
        lines.append(
            f"| {name} | {entry['options'].get('steps', '')} | {left} ({100 * left / n:.1f} %) | "
            f"{alone[name]} | {seconds:.1f} | {60 * alone[name] / seconds:.2f} |"
        )
    union = int((times == 0).sum())
    total = sum(entry["seconds"] for entry in entries.values())
    return [*lines, f"| all | | {union} ({100 * union / n:.1f} %) | | {total:.1f} | |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="Models, as name or name@eps.")
    parser.add_argument("--defenses", nargs="+", default=DEFENSES, help="Defenses, as text.")
    parser.add_argument("--attacks", nargs="+", default=ATTACKS, help="Attacks, as text.")
    parser.add_argument("--n", type=int, default=128, help="Number of test images (default: 128).")
    parser.add_argument("--batch-size", type=int, default=128, help="Batch size (default: 128).")
    parser.add_argument(
        "--forwards", type=float, default=1000, help="Cost of each attack (default: 1000)."
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="File of results, to continue.")
    given = parser.parse_args()
    done: dict[str, Entry] = json.loads(given.json.read_text()) if given.json.exists() else {}
    images, labels = dent.load_data("cifar10", n=given.n)
    cells = [(model, defense) for model in given.models for defense in given.defenses]
    texts = list(dict.fromkeys(format_attack(text) for text in given.attacks))
    with progress_bar("yield of attacks") as move:
        for number, (name, text) in enumerate(cells):
            model, eps = load(name)
            defense = dent.defend(model, text)
            subject = Subject(defense, model, defense, defense.independent is True)
            lacks, updates = find_parts(defense, images[:2]), count_updates(defense) or 0
            cell = f"{name}, {text}, n={given.n}, batches of {given.batch_size}"
            entries: dict[str, Entry] = {}
            for at, attack in enumerate(texts):
                if explain_missing(find_attack(attack.partition(":")[0]), lacks):
                    continue
                move(number * len(texts) + at, len(cells) * len(texts), f"{name}, {text}: {attack}")
                options = fit_steps(attack, updates, given.batch_size, given.forwards)
                key = f"{cell}, {attack}, {options}"
                if key not in done:
                    done[key] = measure(
                        subject, attack, options, images, labels,
                        batch_size=given.batch_size, eps=eps,
                    )  # fmt: skip
                    with replace_file(given.json) as file:
                        file.write((json.dumps(done) + "\n").encode())
                entries[attack] = done[key]
            print(f"\n{cell}\n\n" + "\n".join(tabulate(entries, given.n)) + "\n", flush=True)


if __name__ == "__main__":
    main()
