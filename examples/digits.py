"""The method in a minute: a little classifier of handwritten digits, attacked with and without dent.

    python examples/digits.py

Trains for a few seconds on the 8 x 8 digits that come with scikit-learn, plainly and adversarially,
and prints the accuracy of the static model and of its defences: on natural images, under an attack on
the defended model itself (PGD, stale gradient), and on images made against the static model ("denying
updates", section 4.4 of the paper). The last column is the worst of the two attacks for each image:
the one to believe.
"""

from __future__ import annotations

import math
import sys

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import dent

QUIET = not sys.stdout.isatty()  # progress is for people


def load_digits() -> tuple[Tensor, Tensor]:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise SystemExit("this example needs scikit-learn: pip install 'dent-defense[demo]'") from error
    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    return images, torch.tensor(digits.target)[order]


def pgd(model: nn.Module, inputs: Tensor, labels: Tensor, *, eps: float, steps: int = 20) -> Tensor:
    """Projected gradient descent in the Linf ball, on the cross-entropy (section 3.1)."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(inputs.shape, generator=generator) * 2 - 1
    adversarial = (inputs + eps * noise).clamp(0, 1)
    for _ in range(steps):
        adversarial.requires_grad_()
        loss = F.cross_entropy(model(adversarial), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, adversarial)
        adversarial = adversarial.detach() + 2.5 * eps / steps * gradient.sign()
        adversarial = (inputs + (adversarial - inputs).clamp(-eps, eps)).clamp(0, 1)
    return adversarial


def train(inputs: Tensor, labels: Tensor, *, eps: float, epochs: int, name: str) -> nn.Module:
    """Cross-entropy on natural images, or (eps > 0) on images under attack, as Madry et al. do."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in track(range(epochs), f"training, {name}", transient=True, disable=QUIET):
        for batch in torch.randperm(len(inputs)).split(128):
            images = inputs[batch]
            if eps:
                images = pgd(model.eval(), images, labels[batch], eps=eps, steps=7)
            optimizer.zero_grad()
            F.cross_entropy(model.train()(images), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def correct(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.eq(model(inputs).argmax(1), labels)


def widest(n: int) -> float:
    """Half the width of the Wilson interval of a share of one half, in points."""
    z = 1.96
    return 100 * z / 2 / math.sqrt(n + z**2)


def main() -> None:
    images, labels = load_digits()
    train_set, (inputs, labels) = (images[512:], labels[512:]), (images[:256], labels[:256])
    models = {
        "nominal": (train(*train_set, eps=0, epochs=15, name="nominal"), 0.08),
        "adversarial": (train(*train_set, eps=0.15, epochs=15, name="adversarial"), 0.15),
    }
    table = Table(
        title=f"Accuracy in % on {len(inputs)} digits, batches of 128, PGD-20 in the Linf ball",
        box=None,
        pad_edge=False,
        caption_justify="left",
    )
    for column in ("training", "eps", "defence"):
        table.add_column(column)
    for column in ("natural", "attack on defence", "attack on static", "worst of both"):
        table.add_column(column, justify="right")
    cells = [("nominal", preset) for preset in ("static", "dent", "dent+", "dent-nominal")]
    cells += [("adversarial", preset) for preset in ("static", "dent", "dent+")]
    batches = list(zip(inputs.split(128), labels.split(128), strict=True))
    for training, preset in track(cells, "attacking", transient=True, disable=QUIET):
        static, eps = models[training]
        model = dent.defend(static, preset)
        scores = []
        for batch, truth in batches:
            on_defence = correct(model, pgd(model, batch, truth, eps=eps), truth)
            on_static = correct(model, pgd(static, batch, truth, eps=eps), truth)
            scores.append(
                torch.stack(
                    [correct(model, batch, truth), on_defence, on_static, on_defence & on_static], 1
                )
            )
        means = torch.cat(scores).float().mean(0) * 100
        table.add_row(training, f"{eps:g}", preset, *(f"{mean:.1f}" for mean in means.tolist()))
    table.caption = (
        f"n = {len(inputs)}; 95 % intervals (Wilson) reach {widest(len(inputs)):.1f} points at most"
    )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
