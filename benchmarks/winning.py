"""Search a test-time defense that keeps more images than its static model under all attacks together.

    python benchmarks/winning.py --out FOLDER [--models resnet20-at 2b2] [--candidates static views]
        [--stage 1] [--bfloat16] [--table] [--run FOLDER]

`docs/winning.md` has the protocol. Stage 1 attacks the search images (training images that no shipped
model saw), stage 2 the shipped test images. Stage "natural" attacks nothing, and counts natural accuracy
on all 10,000 test images. Each pair of model and candidate is a JSON file in the
folder, with all batches that are done; the same command continues there. `--table` attacks nothing and
prints what is done. `--bfloat16` searches in bfloat16; what it finds is judged in float32. `--run` adds
a run of `dent evaluate`, whose attacks are those of a suite, as stage "suite".

An image that an attack breaks is broken and leaves. So a column "after ..." counts the images that stand
after this attack and all before it, and the last one is the worst case.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import environment  # noqa: F401
import third_party
import torch
from torch import Tensor, nn
from winning_candidates import CANDIDATES, find_control

import dent
from dent.attacks import apgd, apgd_targeted, autoattack
from dent.attacks.adaptive import unrolled
from dent.attacks.fused import fuse_batch_norm
from dent.defense.defended import Defended, Method
from dent.evaluation.paired import Paired, correct_pairs
from dent.evaluation.pipeline import load_results
from dent.precision import refuse_slow_bfloat16, search_in_bfloat16
from dent.seeds import make_generator
from dent.storage import replace_file

Network = Callable[[Tensor], Tensor]
Entry = dict[str, Any]  # of one candidate on one model


class Target(NamedTuple):
    """A model to defend, the ball that it was trained for, and its data."""

    load: Callable[[], nn.Module]
    eps: float
    norm: str
    data: str = "cifar10"


class Stage(NamedTuple):
    """The images and the strength of the attacks; without steps nothing is attacked.

    whole: run all of AutoAttack on what is left. Only a defense without updates gets it.
    """

    load: Callable[[str], tuple[Tensor, Tensor]]  # from the name of the data
    steps: int
    targets: int
    whole: bool = False
    batch_size: int = 128


def load_search_images(data: str, n: int = 256) -> tuple[Tensor, Tensor]:
    """Return the first n images that `dent train --hold-out 500` holds out with seed 0."""
    images, labels = dent.load_data(data, split="train")
    chosen = torch.randperm(len(labels), generator=make_generator(0, 0))[:n]
    return images[chosen], labels[chosen]


MODELS = {
    "resnet20-at": Target(partial(dent.load_model, "resnet20-at"), 8 / 255, "linf"),
    "resnet20-at-l2": Target(partial(dent.load_model, "resnet20-at-l2"), 0.5, "l2"),
    "2b2": Target(third_party.load_resnet_2b2, 8 / 255, "linf"),
    "resnet26-4-at": Target(partial(dent.load_model, "resnet26-4-at"), 8 / 255, "linf"),
    "resnet20-at-cifar100": Target(
        partial(dent.load_model, "resnet20-at-cifar100"), 8 / 255, "linf", "cifar100"
    ),
}
PRESETS = {"views:frame=1": "framed views 1", "crops": "frame 1, square 3"}  # named otherwise there
SUITE = "suite"  # the stage of runs of `dent evaluate`
SUMS = ("direct", "worst")  # verdicts of several attacks
STAGES = {
    "1": Stage(load_search_images, 30, 3),
    "1-few": Stage(partial(load_search_images, n=64), 30, 3),
    "2": Stage(partial(dent.load_data, n=1000), 50, 3),
    "natural": Stage(partial(dent.load_data, n=10_000), 0, 0, batch_size=1000),
    "2-autoattack": Stage(partial(dent.load_data, n=256), 50, 3, whole=True),
}


def find_points(
    network: Network, images: Tensor, labels: Tensor, *, target: Target, steps: int
) -> dict[str, Tensor]:
    """Return points of highest loss of the static model, and of the model on mirror images.

    Every image stays in the search (`joint`), also after it is broken.
    """

    def plain(points: Tensor) -> Tensor:
        return network(points).float()  # a search in bfloat16 has halved them

    def mirrored(points: Tensor) -> Tensor:
        return plain(points.flip(3))

    attack = partial(
        apgd, inputs=images, labels=labels, eps=target.eps, norm=target.norm, steps=steps, joint=True
    )
    towards = partial(
        apgd_targeted, plain, images, labels, eps=target.eps, norm=target.norm, steps=steps, targets=1
    )
    return {
        "static, apgd-ce": attack(plain).inputs,
        "static, apgd-t": towards(joint=True).inputs,
        "mirror, apgd-ce": attack(mirrored).inputs,
    }


def attack_defense(
    model: nn.Module, method: Method, images: Tensor, labels: Tensor, points: dict[str, Tensor], *,
    target: Target, stage: Stage, in_half: bool = False,
) -> dict[str, list[bool]]:  # fmt: skip
    """Attack one batch in the order of the protocol; return which images stand after each attack."""
    defense = Defended(model, method)
    stands = judge(defense, images, labels)
    after = {"natural": stands.tolist()}
    if not stage.steps:
        return after
    at: dict[str, Any] = {"eps": target.eps, "norm": target.norm, "steps": stage.steps}
    attacks: dict[str, Callable[[Tensor, Tensor], Any]]
    if method.steps:  # an exact gradient goes through the updates
        whole = partial(unrolled, defense)
        attacks = {
            "apgd-ce": partial(whole, **at),
            "apgd-t": partial(whole, attack=apgd_targeted, targets=stage.targets, **at),
            "stale apgd-t": partial(apgd_targeted, defense, targets=stage.targets, **at),
        }
    else:
        # Search on a faster copy with the same answers; below, the defense itself judges the points.
        # A method that moves the normalization layers needs them.
        faster = fuse_batch_norm(model, images[:8]) if method.needs == "nothing" else None

        def searched(inputs: Tensor) -> Tensor:
            if faster is None:
                return defense(inputs)  # type: ignore[no-any-return]
            return method.predict(faster, inputs, ()).float()  # type: ignore[arg-type]

        joint = not method.independent
        attacks = {
            "apgd-ce": partial(apgd, searched, joint=joint, **at),
            "apgd-t": partial(apgd_targeted, searched, targets=stage.targets, joint=joint, **at),
        }
        if stage.whole:
            attacks["autoattack"] = partial(autoattack, searched, eps=target.eps, norm=target.norm)

    for one in points.values():
        stands = stands & judge(defense, one, labels)
    after["transfer"] = stands.tolist()
    for name, attack in attacks.items():
        # A batch that answers depend on stays whole.
        left = stands if method.independent else torch.ones_like(stands)
        if some := left.nonzero().squeeze(1).tolist():
            with search_in_bfloat16(model, images.device, enabled=in_half):
                found = attack(images[some], labels[some]).inputs
            stands[some] &= judge(defense, found, labels[some])
        after[name] = stands.tolist()
    return after


def judge(defense: Network, points: Tensor, labels: Tensor) -> Tensor:
    """Return which points the defense classifies correctly, (N,)."""
    with torch.no_grad():
        return defense(points).argmax(1) == labels


def read_worst(entry: Entry) -> Tensor:
    """Return which images stand after all attacks that were run, (N,) bool."""
    return torch.tensor(list(entry["after"].values())[-1])


def compare(entry: Entry, control: Entry) -> Paired:
    """Return the comparison of the worst cases of a control and a candidate, on the images of both."""
    first, second = read_worst(control), read_worst(entry)
    n = min(len(first), len(second))
    first, second = first[:n], second[:n]
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    return Paired(len(first), only_first, only_second, int((first & second).sum()))


def correct_for_all(pairs: dict[str, Paired]) -> dict[str, Paired]:
    """Return the comparisons with p by Holm over all candidates, also those that are not shown.

    A candidate that was dropped counts as one that showed nothing (p = 1).
    """
    dropped = [Paired(1, 0, 0, 0)] * (len(CANDIDATES) - 1 - len(pairs))
    return dict(zip(pairs, correct_pairs([*pairs.values(), *dropped]), strict=False))


def tabulate(entries: dict[str, Entry]) -> list[str]:
    """Return an aligned table: what stands after each attack, and the comparison with both controls."""
    attacks = list(dict.fromkeys(name for entry in entries.values() for name in entry["after"]))
    controls = {name: entries[name] for name in ("static", "views") if name in entries}
    pairs = {
        control: correct_for_all(
            {name: compare(entry, own) for name, entry in entries.items() if name != control}
        )
        for control, own in controls.items()
    }
    rows = [
        ["candidate", "forwards", "n", "natural", *(f"after {name}" for name in attacks[1:])]
        + [text for control in controls for text in (f"only it/{control}", "points", "p (Holm)")]
    ]
    for name, entry in entries.items():
        n = len(entry["after"]["natural"])
        row = [name, str(entry["forwards"]), str(n)]
        for attack in attacks:
            stands = entry["after"].get(attack)
            row.append("" if stands is None else f"{100 * sum(stands) / n:.1f}")
        for control in controls:
            pair = pairs[control].get(name)
            row += (
                ["", "", ""]
                if pair is None
                else [
                    f"{pair.only_second} / {pair.only_first}",
                    f"{pair.difference:+.1f}",
                    f"{pair.p_corrected:.2g}",
                ]
            )
        rows.append(row)
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(width) if place == 0 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def run_model(name: str, chosen: list[str], stage: str, folder: Path, *, in_half: bool = False) -> None:
    """Attack batch after batch of images, each by every chosen candidate, and store what is done."""
    target, setting = MODELS[name], STAGES[stage]
    images, labels = setting.load(target.data)
    model = target.load().eval().requires_grad_(False)
    network = fuse_batch_norm(model, images[:8])
    search = "bfloat16" if in_half else "float32"
    for one in chosen:
        entry = read_entry(find_file(folder, name, one, stage))
        known = entry.get("search", "float32")
        if entry and known != search:
            raise ValueError(
                f"expected a search in {known}, as {one} was begun in {folder}, got {search}"
            )
    for start in range(0, len(images), setting.batch_size):
        batch, truth = (values[start : start + setting.batch_size] for values in (images, labels))
        done = {one: read_entry(find_file(folder, name, one, stage)) for one in chosen}
        todo = [one for one in chosen if count_images(done[one]) <= start]
        todo = [one for one in todo if stage[0] != "1" or not is_behind(one, done)]
        if not todo:
            continue
        points = {}
        if setting.steps:
            stored = folder / f"points, {name}, stage {stage}, from {start}.pt"
            if not stored.exists():
                with search_in_bfloat16(network, batch.device, enabled=in_half):
                    found = find_points(network, batch, truth, target=target, steps=setting.steps)
                torch.save(found, stored)
            points = torch.load(stored, weights_only=True)
        for one in todo:
            print(f"{name}, stage {stage}, from image {start}: {one}", flush=True)
            started, entry, method = time.process_time(), done[one], CANDIDATES[one]
            after = attack_defense(
                model, method, batch, truth, points, target=target, stage=setting, in_half=in_half
            )
            stood = entry.get("after", {})
            entry = {
                "settings": str(method),
                "search": search,
                "forwards": method.forwards,
                "after": {attack: [*stood.get(attack, []), *new] for attack, new in after.items()},
                "seconds": entry.get("seconds", 0) + time.process_time() - started,
            }
            with replace_file(find_file(folder, name, one, stage)) as file:
                file.write((json.dumps(entry) + "\n").encode())


def add_run(run: Path, folder: Path) -> str:
    """Store what each defense of a run of `dent evaluate` keeps after each attack; return the model."""
    for one in load_results(run).cells:
        if one.missing or one.convergence is None:
            raise ValueError(f"expected a run that is done and has attacks, got {one.cell} in {run}")
        attacks = {name: standing for name, standing in one.verdicts.items() if name not in SUMS}
        name = PRESETS.get(one.cell.defense, one.cell.defense)
        entry = {
            "settings": str(CANDIDATES[name]),
            "forwards": CANDIDATES[name].forwards,
            "after": {
                attack: [standing[image] for image in sorted(standing)]
                for attack, standing in attacks.items()
            },
            "converged": one.convergence.converged,
            "broken by the last doubling": one.convergence.change,
        }
        with replace_file(find_file(folder, one.cell.model, name, SUITE)) as file:
            file.write((json.dumps(entry) + "\n").encode())
    return one.cell.model


def is_behind(candidate: str, done: dict[str, Entry]) -> bool:
    """Return True if fewer images stand than with the candidate's control, on the same images."""
    control, own = done.get(find_control(candidate)), done[candidate]
    if not control or not own or candidate in ("static", "views"):
        return False
    return compare(own, control).difference < 0


def read_entry(file: Path) -> Entry:
    entry: Entry = json.loads(file.read_text()) if file.exists() else {}
    return entry


def count_images(entry: Entry) -> int:
    """Return the number of images that are done."""
    return len(entry["after"]["natural"]) if entry else 0


def find_file(folder: Path, model: str, candidate: str, stage: str) -> Path:
    return folder / f"{model}, {candidate}, stage {stage}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="Folder of results, to continue.")
    parser.add_argument(
        "--models", nargs="+", default=["resnet20-at"], choices=MODELS, help="Models to defend."
    )
    parser.add_argument(
        "--candidates", nargs="+", default=list(CANDIDATES), choices=CANDIDATES, metavar="NAME",
        help="Candidates (default: all).",
    )  # fmt: skip
    parser.add_argument(
        "--stage", default="1", choices=[*STAGES, SUITE], help="Images and attacks (default: 1)."
    )
    parser.add_argument("--bfloat16", action="store_true", help="Search in bfloat16, judge in float32.")
    parser.add_argument("--table", action="store_true", help="Print what is done; attack nothing.")
    parser.add_argument(
        "--run", type=Path, help="Folder of a run of dent evaluate to add; attack nothing."
    )
    given = parser.parse_args()
    if given.bfloat16:
        refuse_slow_bfloat16(torch.device("cpu"))
    given.out.mkdir(parents=True, exist_ok=True)
    if given.run:
        given.models, given.stage = [add_run(given.run, given.out)], SUITE
    for name in given.models:
        if not given.table and given.stage != SUITE:
            run_model(name, given.candidates, given.stage, given.out, in_half=given.bfloat16)
        files = {one: find_file(given.out, name, one, given.stage) for one in given.candidates}
        if done := {one: entry for one, file in files.items() if (entry := read_entry(file))}:
            print(f"\n{name}, stage {given.stage}\n" + "\n".join(tabulate(done)) + "\n", flush=True)


if __name__ == "__main__":
    main()
