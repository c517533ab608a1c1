"""Made-up results with the figures of the demo, and attacks that were never made."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from made_up import tally_units
from numpy.typing import NDArray

import dent
from dent.evaluation.attacks import find_attack
from dent.evaluation.plan import Unit
from dent.evaluation.results import Results
from dent.evaluation.score import summarize
from dent.evaluation.spec import Cell
from dent.evaluation.store import Outcome, UnitResult
from dent.evaluation.suites import ABOUT, NATURAL
from dent.report.blocks import Plot
from dent.report.evaluation import evaluation_page

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
N = 128
# Of each cell: the points that are correct naturally and under each attack, and the cost.
DEMO: dict[tuple[str, str, float], tuple[dict[str, range], float]] = {
    ("resnet20-at", "static", 8 / 255): (
        {NATURAL: range(100), "apgd-ce": range(52), "denying updates": range(44), "fpa": range(44)},
        1.0,
    ),
    ("resnet20-at", "dent:steps=10", 8 / 255): (
        {NATURAL: range(92), "apgd-ce": range(43), "denying updates": range(5, 53), "fpa": range(2, 38)},
        21.0,
    ),
    ("resnet20-at", "dent+", 8 / 255): (
        {NATURAL: range(92), "apgd-ce": range(81), "denying updates": range(53), "fpa": range(2, 51)},
        13.0,
    ),
    ("resnet20-nominal", "static", 1.5 / 255): (
        {NATURAL: range(117), "apgd-ce": range(5), "denying updates": range(3), "fpa": range(3)},
        1.0,
    ),
    ("resnet20-nominal", "dent-nominal", 1.5 / 255): (
        {NATURAL: range(117), "apgd-ce": range(43), "denying updates": range(11), "fpa": range(1)},
        21.0,
    ),
}


def demo(*, model: str | None = None, failed: Sequence[str] = (), battles: bool = True) -> Results:
    """The demo's figures. model: another name for the first; failed: attacks without outcomes."""
    made, attacks = [], {}
    for (name, defense, eps), (stands, cost) in DEMO.items():
        cell = Cell(model if model and name == "resnet20-at" else name, defense, eps, "linf")
        attacks[cell] = [*stands, ABOUT]
        for attack, points in stands.items():
            bits = tuple(point in points for point in range(N))
            outcome = Outcome(tuple(range(N)), bits, (True,) * N)
            error = "RuntimeError: no memory" if attack in failed else None
            made.append(UnitResult(Unit(cell, 0, attack), None if error else outcome, error))
        found = () if cell.static else (FINDING,)
        known = Outcome(figures={"flops": 1e6 * cost, "static_flops": 1e6}, findings=found)
        took = {"seconds": 9.0, "forward_seconds": 0.02 * cost, "static_seconds": 0.02}
        made.append(UnitResult(Unit(cell, 0, ABOUT), known, took=took))
    asked = {"models": ["resnet20-at"], "suite": "quick", "data": "cifar10", "n": N, "batch_size": N}
    tallies = tally_units(
        attacks,
        [range(N)],
        made,
        cumulative=lambda cell: cell.static,
        kind_of=lambda name: find_attack(name).kind,
    )
    about = {"asked": asked | {"norm": "linf", "seed": 0}, "versions": {"dent": "0.1.0"}}
    results = summarize(tallies, about=about)
    cells = (
        replace(one, battle=battle(seed=number, eps=one.cell.eps, sigma=number > 3))
        if battles and not one.cell.static
        else one
        for number, one in enumerate(results.cells)
    )
    return replace(results, cells=tuple(cells))


FINDING = {
    "name": "adaptive is stronger",
    "message": "attacks made for adaptation break what all attacks on the defended model do not",
    "figures": {"inputs": 32.0},
}


def battle(*, seed: int = 0, steps: int = 10, eps: float = 8 / 255, images: int = 4, sigma: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Two attacks on shipped images: a shared one that fools both models, and a direct one."""
    shared, direct = (
        _recording(name, seed + number, steps, eps, images, sigma)
        for number, name in enumerate(("denying updates", "apgd-ce"))
    )
    for image in shared["images"]:
        for frame in image["defended"]["frames"]:
            for key in ("delta", "scale", "size"):
                del frame[key]
        last = {side: image[side]["frames"][-1]["probabilities"] for side in ("static", "defended")}
        image["static"]["answers"] = image["defended"]["answers"] = last
    return {"recordings": [shared | {"shared": True}, direct | {"shared": False}]}


def _recording(
    attack: str, seed: int, steps: int, eps: float, images: int, sigma: bool
) -> dict[str, Any]:
    """An attack that pushes the static model from the truth, the defended one less."""
    inputs, labels = dent.load_data("cifar10", n=8)
    random = np.random.default_rng(seed)
    made = []
    for point in range(images):
        natural = inputs[point].permute(1, 2, 0).numpy()
        sides = {
            side: _side(random, int(labels[point]), natural.shape, steps, eps, side, strength, sigma)
            for side, strength in (("static", 1.2), ("defended", 0.55 + 0.25 * (point % 3)))
        }
        made.append(
            {
                "point": point,
                "label": int(labels[point]),
                "natural": _text(np.round(255 * natural), np.uint8),
            }
            | sides
        )
    about = {"attack": attack, "steps": steps, "eps": eps, "norm": "linf", "batch": 32}
    about |= {"right": {"static": 3, "defended": 9}}
    return about | {"classes": CLASSES, "size": [32, 32], "channels": 3, "images": made}


def _side(
    random: np.random.Generator, label: int, shape: tuple[int, ...], steps: int, eps: float,
    side: str, strength: float, sigma: bool,
) -> dict[str, Any]:  # fmt: skip
    start, other = random.normal(0, 0.8, 10), (label + 3) % 10
    start[label] += 4
    pattern = np.kron(random.choice([-1.0, 1.0], (8, 8, shape[2])), np.ones((4, 4, 1)))
    pattern *= random.random(shape) < 0.9
    frames = []
    for step in range(steps + 1):
        grown = 1 - np.exp(-step / 3)
        pushed = start.copy()
        pushed[label] -= 5 * strength * grown
        pushed[other] += 3 * strength * grown
        scale = eps * min(1.0, step / 2)
        probabilities = _softmax(pushed)
        frame = {
            "delta": _text(np.round(127 * pattern), np.int8),
            "scale": scale,
            "size": scale,
            "probabilities": probabilities.tolist(),
            "entropy": _entropy(probabilities),
        }
        if side == "defended":
            sharper = [_softmax(pushed * (0.6 + 0.4 * k / 6)) for k in range(7)]
            frame["entropies"] = [_entropy(one) for one in sharper]
            frame["moves"] = [(0.3 + 0.5 * grown) * np.sqrt(k / 6) for k in range(7)]
            frame["sigma"] = [0.2 + 0.05 * k for k in range(7)] if sigma else None
        frames.append(frame)
    last = _softmax(start * 0.8), frames[-1]["probabilities"]
    answers = {"static": last[1], "defended": last[0].tolist()}
    if side == "defended":
        answers = {"static": last[0].tolist(), "defended": last[1]}
    return {"frames": frames, "answers": answers}


def _softmax(logits: NDArray[Any]) -> NDArray[Any]:
    shares = np.exp(logits - logits.max())
    return np.asarray(shares / shares.sum())


def _entropy(probabilities: NDArray[Any]) -> float:
    return float(-(probabilities * np.log(probabilities)).sum())


def _text(values: NDArray[Any], kind: type[np.number[Any]]) -> str:
    return base64.b64encode(values.astype(kind).tobytes()).decode()


def plots_of(results: Results) -> dict[str, Plot]:
    return {block.title: block for block in evaluation_page(results).blocks if isinstance(block, Plot)}
