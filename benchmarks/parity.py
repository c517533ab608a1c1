"""Compare the verdicts of our attacks with the reference, image by image.

    python benchmarks/parity.py [--out FOLDER] [--only TEXT] [--engine dent|reference] [--n 256]
                                [--seeds 1]

For each model, norm and radius, the four attacks of AutoAttack's standard version run alone, by
`pyautoattack` and by dent, on the same images. The ensemble is the worst case over all four. The
versions plus and rand run as a whole, on the smallest model at the middle radius. Square is random: with
several `--seeds` it runs once per seed, and a second table shows the mean. Each finished unit is a small
file in the folder and is not run again; the tables show all finished units.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import third_party
import torch
from torch import Tensor, nn

import dent
from dent.report.terminal import progress_bar, show_table
from dent.storage import replace_file
from dent.texts import read_number

ENGINES = ("reference", "dent")
ATTACKS = ("apgd-ce", "apgd-t", "fab-t", "square")
RADII: dict[str, dict[str, tuple[str, ...]]] = {
    "2b2 (eth-sri)": {"linf": ("2/255", "4/255", "8/255"), "l2": ("0.25", "0.5", "1")},
    "resnet20 (akamaster)": {"linf": ("1/255", "2/255"), "l2": ("0.15", "0.3")},
    "resnet18 (pyautoattack)": {"linf": ("4/255", "8/255"), "l2": ("0.5", "1")},
}
VERSIONS = ("plus", "rand")
WITH_VERSIONS = [("2b2 (eth-sri)", "linf", "4/255"), ("2b2 (eth-sri)", "l2", "0.5")]
BALLS = [
    (model, norm, eps)
    for model, norms in RADII.items()
    for norm, radii in norms.items()
    for eps in radii
]


@dataclass(frozen=True)
class Unit:
    """One attack, or one version of AutoAttack, by one engine on one model."""

    model: str
    norm: str
    eps: str
    attack: str
    engine: str
    seed: int = 0

    @property
    def file(self) -> str:
        parts = [self.model.split()[0], self.norm, self.eps.replace("/", "-"), self.attack, self.engine]
        return "_".join(parts + [f"seed{self.seed}"] * (self.seed > 0)) + ".json"


def find_standing(unit: Unit, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return which images withstand the attack with the settings of the standard version."""
    alone = unit.attack in ATTACKS
    what = {"attacks": [unit.attack]} if alone else {"version": unit.attack}
    run = dent.attacks.autoattack(
        model, inputs, labels, eps=read_number(unit.eps), norm=unit.norm, seed=unit.seed,
        engine=unit.engine, **what,
    )  # fmt: skip
    return ~run.broken


def run_unit(unit: Unit, out: Path, n: int) -> None:
    model = third_party.MODELS[unit.model]()
    inputs, labels = dent.load_data("cifar10", n=n)
    started = time.perf_counter()
    left = find_standing(unit, model, inputs, labels)
    content = {"n": n, "seconds": time.perf_counter() - started, "standing": left.int().tolist()}
    with replace_file(out / unit.file) as file:
        file.write(json.dumps(content).encode())


def read_standing(out: Path, unit: Unit) -> Tensor | None:
    """Return which images withstand the unit's attack, or None if it has not run."""
    file = out / unit.file
    return torch.tensor(json.loads(file.read_text())["standing"]) if file.exists() else None


def list_rows(out: Path) -> list[dict[str, Any]]:
    """Return a row for each attack and for their ensemble, if both engines have run."""
    table = []
    for ball in BALLS:
        done = {}
        for attack in (*ATTACKS, *VERSIONS):
            theirs, ours = (read_standing(out, Unit(*ball, attack, engine)) for engine in ENGINES)
            if theirs is not None and ours is not None:
                done[attack] = (theirs, ours)
        if all(attack in done for attack in ATTACKS):
            alone = zip(*(done[attack] for attack in ATTACKS), strict=True)
            theirs, ours = (torch.stack(one).amin(0) for one in alone)
            done["ensemble"] = (theirs, ours)
        table += [make_row(*ball, attack, *both) for attack, both in done.items()]
    return table


def list_seed_rows(out: Path, seeds: int) -> list[dict[str, Any]]:
    """Return the mean of Square over seeds for each engine, if both ran with several seeds.

    The rows also have the share of equal verdicts: between two seeds of one engine, and between engines.
    """
    table = []
    for ball in BALLS:
        runs = []
        for engine in ENGINES:
            units = (Unit(*ball, "square", engine, seed) for seed in range(seeds))
            runs.append([left for unit in units if (left := read_standing(out, unit)) is not None])
        if min(map(len, runs)) < 2:
            continue
        theirs, ours = ([100 * float(left.float().mean()) for left in some] for some in runs)
        error = (stdev(theirs) ** 2 / len(theirs) + stdev(ours) ** 2 / len(ours)) ** 0.5
        table.append(
            dict(zip(("model", "norm", "eps"), ball, strict=True))
            | {
                "seeds": f"{len(theirs)} and {len(ours)}",
                "reference %": f"{mean(theirs):.1f} ± {stdev(theirs):.1f}",
                "dent %": f"{mean(ours):.1f} ± {stdev(ours):.1f}",
                "difference": f"{mean(ours) - mean(theirs):+.2f} ± {error:.2f}",
                "same, reference %": share_equal(combinations(runs[0], 2)),
                "same, dent %": share_equal(combinations(runs[1], 2)),
                "same, both %": share_equal(product(runs[0], runs[1])),
            }
        )
    return table


def share_equal(pairs: Iterable[tuple[Tensor, Tensor]]) -> str:
    """Return the share of equal verdicts in %, as a mean over pairs of runs."""
    return f"{100 * mean(float((one == other).float().mean()) for one, other in pairs):.1f}"


def make_row(
    model: str, norm: str, eps: str, attack: str, theirs: Tensor, own: Tensor
) -> dict[str, Any]:
    n = len(own)
    return {
        "model": model,
        "norm": norm,
        "eps": eps,
        "attack": attack,
        "n": n,
        "reference %": f"{100 * theirs.float().mean():.1f}",
        "dent %": f"{100 * own.float().mean():.1f}",
        "same verdict %": share_equal([(theirs, own)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/parity"))
    parser.add_argument("--only", default="", help="Run only units whose file name contains this text.")
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=1, help="Number of seeds for Square (default: 1).")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    units = [
        Unit(*ball, attack, engine, seed)
        for ball in BALLS
        for attack in (*ATTACKS, *(VERSIONS if ball in WITH_VERSIONS else ()))
        for seed in range(given.seeds if attack == "square" else 1)
        for engine in ENGINES
    ]
    todo = [
        unit
        for unit in units
        if given.only in unit.file
        and given.engine in (None, unit.engine)
        and not (given.out / unit.file).exists()
    ]
    with progress_bar("attacking") as move:
        for done, unit in enumerate(todo):
            move(done, len(todo), unit.file.removesuffix(".json"))
            try:
                run_unit(unit, given.out, given.n)
            except FileNotFoundError as missing:
                print(f"{unit.model}: skipped, {missing}")
    table = list_rows(given.out)
    show_table(table, right=["n", "reference %", "dent %", "same verdict %"], title="Standing, in %")
    if table := list_seed_rows(given.out, given.seeds):
        show_table(
            table,
            right=list(table[0])[3:],
            title="Square, standing in %: mean and deviation over seeds, the difference with its error, "
            "and the share of equal verdicts between seeds of one engine and between engines",
        )


if __name__ == "__main__":
    main()
