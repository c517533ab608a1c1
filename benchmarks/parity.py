"""Whether our attacks break what the reference breaks: verdicts per image, side by side.

    python benchmarks/parity.py [--out FOLDER] [--only TEXT] [--engine dent|reference] [--n 256]

For each model, norm and radius, the four attacks of AutoAttack's standard version run alone, by
`pyautoattack` and by dent, on the same images. The ensemble is what all four leave standing. Finished
units are kept in the folder, one small file each, and not run again; the table shows what is there.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import third_party
import torch
from torch import Tensor, nn

import dent
from dent.fields import number
from dent.report.terminal import progress_bar, show_table
from dent.storage import replacing

ATTACKS = ("apgd-ce", "apgd-t", "fab-t", "square")
RADII: dict[str, dict[str, tuple[str, ...]]] = {
    "2b2 (eth-sri)": {"linf": ("2/255", "4/255", "8/255"), "l2": ("0.25", "0.5", "1")},
    "resnet20 (akamaster)": {"linf": ("1/255", "2/255"), "l2": ("0.15", "0.3")},
    "resnet18 (pyautoattack)": {"linf": ("4/255", "8/255"), "l2": ("0.5", "1")},
}


@dataclass(frozen=True)
class Unit:
    """One attack by one engine on one model."""

    model: str
    norm: str
    eps: str
    attack: str
    engine: str

    @property
    def file(self) -> str:
        parts = (self.model.split()[0], self.norm, self.eps.replace("/", "-"), self.attack, self.engine)
        return "_".join(parts) + ".json"


def standing(unit: Unit, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Which images the attack leaves, with the settings that it has in the standard version."""
    run = dent.attacks.autoattack(
        model, inputs, labels, eps=number(unit.eps), norm=unit.norm, attacks=[unit.attack], seed=0,
        engine=unit.engine,
    )  # fmt: skip
    return ~run.broken


def run(unit: Unit, out: Path, n: int) -> None:
    model = third_party.MODELS[unit.model]()
    inputs, labels = dent.load_data("cifar10", n=n)
    started = time.perf_counter()
    left = standing(unit, model, inputs, labels)
    content = {"n": n, "seconds": time.perf_counter() - started, "standing": left.int().tolist()}
    with replacing(out / unit.file) as file:
        file.write(json.dumps(content).encode())


def rows(out: Path) -> list[dict[str, Any]]:
    """A row for each attack and for their ensemble, where both engines are done."""
    table = []
    for model, norms in RADII.items():
        for norm, radii in norms.items():
            for eps in radii:
                verdicts: dict[str, list[Tensor]] = {"reference": [], "dent": []}
                for attack in ATTACKS:
                    files = {
                        engine: out / Unit(model, norm, eps, attack, engine).file for engine in verdicts
                    }
                    if not all(file.exists() for file in files.values()):
                        continue
                    for engine, file in files.items():
                        verdicts[engine].append(torch.tensor(json.loads(file.read_text())["standing"]))
                    table.append(row(model, norm, eps, attack, *(one[-1] for one in verdicts.values())))
                if len(verdicts["dent"]) == len(ATTACKS):
                    both = (torch.stack(one).amin(0) for one in verdicts.values())
                    table.append(row(model, norm, eps, "ensemble", *both))
    return table


def row(model: str, norm: str, eps: str, attack: str, theirs: Tensor, own: Tensor) -> dict[str, Any]:
    n = len(own)
    return {
        "model": model,
        "norm": norm,
        "eps": eps,
        "attack": attack,
        "n": n,
        "reference %": f"{100 * theirs.float().mean():.1f}",
        "dent %": f"{100 * own.float().mean():.1f}",
        "same verdict %": f"{100 * (theirs == own).float().mean():.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/parity"))
    parser.add_argument("--only", default="", help="units whose name has this in it")
    parser.add_argument("--engine", choices=("dent", "reference"))
    parser.add_argument("--n", type=int, default=256)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    units = [
        Unit(model, norm, eps, attack, engine)
        for model, norms in RADII.items()
        for norm, radii in norms.items()
        for eps in radii
        for attack in ATTACKS
        for engine in ("reference", "dent")
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
                run(unit, given.out, given.n)
            except FileNotFoundError as missing:
                print(f"{unit.model}: left out, {missing}")
    table = rows(given.out)
    show_table(table, right=["n", "reference %", "dent %", "same verdict %"], title="Standing, in %")


if __name__ == "__main__":
    main()
