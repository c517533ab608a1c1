"""What dent is worth, in two minutes: two CIFAR-10 classifiers, attacked with and without a defence.

    python examples/demo.py [number of images]

Uses the weights and the images that come with dent. It prints the accuracy of the static model and of
its defences: on natural images; under an attack on the defended model itself (PGD, stale gradient); on
images made against the static model ("denying updates", section 4.4 of the paper); and under an attack
made for adaptation (the fixed point attack of Chen et al., 2022). Then the worst of the attacks for each
image: the column to believe.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import dent
from dent.intervals import wilson
from dent.report.terminal import progress_bar, show_table

BATCH, STEPS, ROUNDS = 128, 10, 3


@dataclass(frozen=True)
class Cell:
    """A model with a defence, and the radius at which it is attacked."""

    model: str
    eps: int | float  # over 255
    preset: str
    settings: dict[str, Any]


CELLS = [
    Cell("resnet20-at", 8, "static", {}),
    Cell("resnet20-at", 8, "dent", {"steps": 10}),
    Cell("resnet20-at", 8, "dent+", {}),
    Cell("resnet20-nominal", 1.5, "static", {}),
    Cell("resnet20-nominal", 1.5, "dent-nominal", {}),
]


def correct(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.eq(model(inputs).argmax(1), labels)


def main(n: int) -> None:
    inputs, labels = dent.load_data("cifar10", n=n)
    batches = list(zip(inputs.split(BATCH), labels.split(BATCH), strict=True))
    rows = []
    with progress_bar("attacking") as move:
        for done, cell in enumerate(CELLS):
            move(done, len(CELLS), f"{cell.model}, {cell.preset}")
            static = dent.load_model(cell.model)
            model = dent.defend(static, cell.preset, **cell.settings)
            scores = []
            for images, truth in batches:
                budget: dict[str, Any] = {"eps": cell.eps / 255, "steps": STEPS}
                # The points of highest loss, of all images: these transfer best.
                made_before = dent.attacks.pgd(static, images, truth, joint=True, **budget).inputs
                attacked = [
                    ~dent.attacks.pgd(model, images, truth, **budget).success,
                    correct(model, made_before, truth),
                    ~dent.attacks.adaptive.fpa(model, images, truth, rounds=ROUNDS, **budget).success,
                ]
                worst = torch.stack(attacked).all(0)
                scores.append(torch.stack([correct(model, images, truth), *attacked, worst], 1))
            names = ("natural", "on defence", "on static", "for adaptation", "worst case")
            counts = torch.cat(scores).sum(0).tolist()
            figures = {name: f"{100 * count / n:.1f}" for name, count in zip(names, counts, strict=True)}
            low, high = (100 * bound for bound in wilson(counts[-1], n))
            figures["95 % interval"] = f"{low:.0f} to {high:.0f}"
            what = {"model": cell.model, "eps": f"{cell.eps:g}/255", "defence": cell.preset}
            rows.append(what | figures)
    title = (
        f"Accuracy in % on the first {n} test images of CIFAR-10, batches of {BATCH}, PGD-{STEPS}, Linf"
    )
    show_table(rows, right=list(rows[0])[3:], title=title)
    print(f"n = {n}; the interval is that of the last column (Wilson)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 128)
