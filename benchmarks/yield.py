"""Measure what each attack breaks that no other one breaks, at the same cost for each.

    python benchmarks/yield.py [--models resnet20-at "2b2 (eth-sri)"] [--defenses dent+ hedge]
        [--attacks lazy chained:rounds=5] [--n 64] [--forwards 300] [--json FILE]

In the tables a number is a sum over the defenses.

Each attack gets as many steps as its estimated cost allows (`--forwards`, forwards of the static model
for each input; a backward counts as one), at least one. All images are one batch. Seconds are those of
the processor. The JSON file keeps every (model, defense, attack) that is done; the same command
continues there, and `--show` prints what is stored and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import environment  # noqa: F401
import third_party
import torch
from torch import Tensor, nn

import dent
from dent.evaluation.attacks import Forwards, find_attack
from dent.evaluation.defenses import Subject, find_parts
from dent.evaluation.suites import ADAPTIVE, explain_missing, format_attack, parse_attack
from dent.report.terminal import progress_bar
from dent.storage import replace_file
from dent.testing import count_updates

Entry = dict[str, Any]  # of one attack on one defense of one model


class Threat(NamedTuple):
    """A model, the images that it is for, and the ball of the attacks."""

    load: Callable[[], nn.Module]
    eps: float = 8 / 255
    norm: str = "linf"
    data: str = "cifar10"


THREATS = {
    "2b2 (eth-sri)": Threat(third_party.load_resnet_2b2),
    "resnet20-at": Threat(lambda: dent.load_model("resnet20-at")),
    "resnet20-at-l2": Threat(lambda: dent.load_model("resnet20-at-l2"), 0.5, "l2"),
    "resnet20-at-cifar100": Threat(lambda: dent.load_model("resnet20-at-cifar100"), data="cifar100"),
}
DEFENSES = ("dent+", "dent:steps=10", "dent+solo", "anti-adversary")
DIRECT = ("apgd-ce", "apgd-t:order=distance,targets=3")
LEFT_OUT = ("gmsa-avg", "trajectory", "lazy (targeted):targets=3")  # of the suites, by this table
ATTACKS = (*DIRECT, *(name for name in ADAPTIVE if find_attack(name).kind == "adaptive"), *LEFT_OUT)
# Attacks of suites before they had a version; a second table shows what the others add to these.
EARLIER = (
    "apgd-ce", "apgd-t:order=distance,targets=3", "denying updates", "high confidence", "fpa",
    "gmsa-avg", "gmsa-min", "unrolled", "averaged", "short", "lazy",
)  # fmt: skip
RESULTS = Path(__file__).with_name("yield.json")


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
    subject: Subject, text: str, forwards: float, images: Tensor, labels: Tensor, threat: Threat
) -> Entry:
    """Attack the batch, submit it as deployed, and return which images stand and the time."""
    options = fit_steps(text, count_updates(subject.defense) or 0, len(labels), forwards)
    everyone = torch.ones_like(labels, dtype=torch.bool)
    started = time.process_time()
    result = find_attack(parse_attack(text)[0]).run(
        subject, images, labels, mask=everyone, eps=threat.eps, norm=threat.norm, seed=0, **options
    )
    with torch.no_grad():
        correct = subject.model(result.inputs).argmax(1) == labels
    return {
        "steps": options.get("steps"),
        "seconds": round(time.process_time() - started, 2),
        "correct": "".join(map(str, correct.int().tolist())),
    }


def find_broken(entry: Entry) -> Tensor:
    return torch.tensor([letter == "0" for letter in entry["correct"]])


def count_alone(entries: dict[str, Entry]) -> dict[str, int]:
    """Count, for each attack, the images that no other attack breaks."""
    broken = {name: find_broken(entry) for name, entry in entries.items()}
    once = torch.stack(list(broken.values())).sum(0) == 1
    return {name: int((own & once).sum()) for name, own in broken.items()}


def count_left(entries: dict[str, Entry], attacks: Iterable[str]) -> int:
    """Count the images that all of these attacks leave correct."""
    return int((~torch.stack([find_broken(entries[name]) for name in attacks]).any(0)).sum())


Cells = dict[tuple[str, str], dict[str, Entry]]  # by model and defense


def tabulate(cells: Cells) -> list[str]:
    """Return what each attack leaves of the images of each model, in Markdown; the highest yield first.

    A number is a sum over the defenses; in parentheses, the images that no other attack breaks.
    """
    alone = {cell: count_alone(entries) for cell, entries in cells.items()}
    rows = []
    for name in _list_attacks(cells):
        texts, total, standing, minutes = [], 0, 0, 0.0
        for model in _list_models(cells):
            here = {cell: entries for cell, entries in cells.items() if cell[0] == model}
            known = {cell: entries for cell, entries in here.items() if name in entries}
            left = sum(count_left(entries, [name]) for entries in known.values())
            own = sum(alone[cell][name] for cell in known)
            minutes += sum(entries[name]["seconds"] for entries in known.values()) / 60
            total, standing = total + own, standing + left
            texts.append(f"{left} ({own})" if own else f"{left}" if len(known) == len(here) else "-")
        line = f"| {name} | {' | '.join(texts)} | {total} | {total / minutes:.2f} |"
        rows.append((-total / minutes, standing, line))
    union = _sum_models(cells, {cell: count_left(entries, entries) for cell, entries in cells.items()})
    return [
        f"| attack | {' | '.join(_name_models(cells))} | alone | alone per minute |",
        f"|---|{'---:|' * (len(_list_models(cells)) + 2)}",
        *(line for _, _, line in sorted(rows)),
        f"| all together | {' | '.join(map(str, union))} | | |",
    ]


def tabulate_new(cells: Cells) -> list[str]:
    """Return what each newer attack takes from what the earlier ones leave, in Markdown."""
    earlier = {cell: [name for name in EARLIER if name in entries] for cell, entries in cells.items()}
    left = {cell: count_left(entries, earlier[cell]) for cell, entries in cells.items()}
    lines = [
        f"| attack | {' | '.join(_name_models(cells))} |",
        f"|---|{'---:|' * len(_list_models(cells))}",
        f"| left by the earlier attacks | {' | '.join(map(str, _sum_models(cells, left)))} |",
    ]
    newer = [name for name in _list_attacks(cells) if name not in EARLIER]
    for title, names in [*((name, [name]) for name in newer), ("all of these", newer)]:
        taken = {
            cell: left[cell]
            - count_left(entries, [*earlier[cell], *(name for name in names if name in entries)])
            for cell, entries in cells.items()
        }
        lines.append(f"| {title} | {' | '.join(str(-one) for one in _sum_models(cells, taken))} |")
    return lines


def _list_models(cells: Cells) -> list[str]:
    return list(dict.fromkeys(model for model, _ in cells))


def _name_models(cells: Cells) -> list[str]:
    """Return the models with their number of images, over all defenses."""
    sizes = {cell: len(next(iter(entries.values()))["correct"]) for cell, entries in cells.items()}
    totals = zip(_list_models(cells), _sum_models(cells, sizes), strict=True)
    return [f"{model}, of {total}" for model, total in totals]


def _list_attacks(cells: Cells) -> list[str]:
    return list(dict.fromkeys(name for entries in cells.values() for name in entries))


def _sum_models(cells: Cells, counts: dict[tuple[str, str], int]) -> list[int]:
    """Return the sums over the defenses of each model."""
    return [
        sum(count for cell, count in counts.items() if cell[0] == model) for model in _list_models(cells)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=THREATS, choices=THREATS, help="Models.")
    parser.add_argument("--defenses", nargs="+", default=DEFENSES, help="Defenses, as text.")
    parser.add_argument("--attacks", nargs="+", default=ATTACKS, help="Attacks, as text.")
    parser.add_argument("--n", type=int, default=64, help="Number of test images (default: 64).")
    parser.add_argument(
        "--forwards", type=float, default=300, help="Cost of each attack (default: 300)."
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="File of results, to continue.")
    parser.add_argument("--show", action="store_true", help="Print what is stored; run nothing.")
    given = parser.parse_args()
    done: dict[str, Entry] = json.loads(given.json.read_text()) if given.json.exists() else {}
    texts = list(dict.fromkeys(format_attack(text) for text in given.attacks))
    pairs = [(model, defense) for model in given.models for defense in given.defenses]
    cells: Cells = {}
    with progress_bar("yield of attacks") as move:
        for number, (model, text) in enumerate(pairs):
            threat, subject, images, labels = THREATS[model], None, torch.empty(0), torch.empty(0)
            entries = cells[model, text] = {}
            for at, attack in enumerate(texts):
                key = f"{model}, {text}, {attack}, n={given.n}, forwards={given.forwards:g}"
                if key not in done:
                    if given.show:
                        continue
                    move(number * len(texts) + at, len(pairs) * len(texts), f"{model}, {text}: {attack}")
                    if subject is None:
                        images, labels = dent.load_data(threat.data, n=given.n)
                        static = threat.load()
                        defense = dent.defend(static, text)
                        subject = Subject(defense, static, defense, defense.independent is True)
                        lacks = find_parts(defense, images[:2])
                    if explain_missing(find_attack(parse_attack(attack)[0]), lacks):
                        continue
                    done[key] = measure(subject, attack, given.forwards, images, labels, threat)
                    with replace_file(given.json) as file:
                        file.write((json.dumps(done, indent=0) + "\n").encode())
                entries[attack] = done[key]
    cells = {cell: entries for cell, entries in cells.items() if entries}
    print("\n".join(tabulate(cells)) + "\n")
    print("\n".join(tabulate_new(cells)))


if __name__ == "__main__":
    main()
