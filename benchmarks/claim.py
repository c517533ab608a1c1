"""Show where the claim of dent+ comes from: which stages adapt, how fast, and what the attacker sees.

    python benchmarks/claim.py [--n 256] [--json FILE] [--picture docs/claim.png]

Only the normalization layers of some stages adapt; all others are fixed. Each defense is attacked three
times with the same few steps: by APGD on its own (stale) gradient, as papers claim; by APGD on the exact
(unrolled) gradient; and by points of highest loss of the static model. The cosine is that between the
stale and the exact gradient of the cross-entropy at the natural images, a mean over images. The gain is
the accuracy under the stale gradient, less that of the static model under APGD. Intervals are over the
batches. The JSON file keeps every batch that is done; the same command continues there.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import environment  # noqa: F401
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dent
from dent.attacks import AttackResult, adaptive, apgd
from dent.evaluation.paired import JudgedPoints, Paired, pair_points
from dent.evaluation.results import Score, score_points
from dent.report.terminal import progress_bar, show_table
from dent.storage import replace_file

MODEL, EPS = "resnet20-at", 8 / 255
STAGES = {
    "all": ("bn1", "layer1", "layer2", "layer3"),
    "stem and stage 1": ("bn1", "layer1"),
    "stage 2": ("layer2",),
    "stage 3": ("layer3",),
}
RATES = (0.002, 0.006)  # 0.006 is that of dent+
RESULTS = Path(__file__).with_name("claim.json")
ACCURACIES = ("natural", "static", "stale", "exact", "transfer")
Batch = dict[str, list[Any]]  # which images stand, by what was done to them; and the cosines


class Fixed(nn.Module):
    """A batch norm with the statistics of training, as a layer that no defense adapts."""

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
        self.register_buffer("scale", scale[:, None, None])
        self.register_buffer("shift", (norm.bias.detach() - norm.running_mean * scale)[:, None, None])

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale + self.shift


def fix_other_stages(model: nn.Module, stages: tuple[str, ...]) -> nn.Module:
    """Return a copy in which only the normalization layers of these stages can adapt."""
    fixed = copy.deepcopy(model)
    for name, layer in list(fixed.named_modules()):
        if isinstance(layer, nn.BatchNorm2d) and name.split(".")[1] not in stages:
            parent, _, last = name.rpartition(".")
            setattr(fixed.get_submodule(parent), last, Fixed(layer))
    return fixed


def compare_gradients(defended: dent.Dent, inputs: Tensor, labels: Tensor) -> list[float]:
    """Return the cosine between the stale and the exact gradient for each input."""
    gradients = []
    for kind in ("stale", "unrolled"):
        points = inputs.clone().requires_grad_()
        loss = F.cross_entropy(defended(points, gradient=kind), labels, reduction="sum")
        gradients.append(torch.autograd.grad(loss, points)[0].flatten(1))
    stale, exact = gradients
    return F.cosine_similarity(stale, exact).tolist()


def measure(stage: str, lr: float, inputs: Tensor, labels: Tensor, steps: int) -> Batch:
    """Attack dent+ on these stages with one batch; return which images stand, and the cosines."""
    model = dent.load_model(MODEL)
    defended = dent.defend(fix_other_stages(model, STAGES[stage]), "dent+", lr=lr)
    assert isinstance(defended, dent.Dent)
    threat: dict[str, Any] = {"eps": EPS, "norm": "linf", "steps": steps, "seed": 0}
    attacks: dict[str, AttackResult] = {
        "static": apgd(model, inputs, labels, joint=True, **threat),
        "stale": apgd(defended, inputs, labels, joint=True, **threat),
        "exact": adaptive.unrolled(defended, inputs, labels, **threat),
        "transfer": adaptive.denying_updates(defended, model, inputs, labels, **threat),
    }
    with torch.no_grad():
        natural = defended(inputs).argmax(1) == labels
    return {
        "natural": natural.tolist(),
        **{name: (~result.success).tolist() for name, result in attacks.items()},
        "cosine": compare_gradients(defended, inputs, labels),
    }


class Setting(NamedTuple):
    """One choice of stages and learning rate, with all its batches."""

    stage: str
    lr: float
    batches: list[Batch]

    def judge(self, kind: str) -> JudgedPoints:
        """Return which images stand. The static model's answers do not depend on the batch."""
        standing = [(number, one) for number, batch in enumerate(self.batches) for one in batch[kind]]
        points = {image: bool(stands) for image, (_, stands) in enumerate(standing)}
        batch_of = {image: number for image, (number, _) in enumerate(standing)}
        return JudgedPoints(points, kind == "static", batch_of)

    def score(self, kind: str) -> Score:
        return score_points(self.judge(kind))

    @property
    def gain(self) -> Paired:
        return pair_points(self.judge("static"), self.judge("stale"))

    @property
    def cosine(self) -> float:
        return fmean(one for batch in self.batches for one in batch["cosine"])


def draw(settings: list[Setting], path: Path) -> None:
    """Draw the accuracies under the three attacks by stage, a panel for each learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    looks = {"stale": ("tab:blue", "o"), "exact": ("tab:orange", "s"), "transfer": ("tab:red", "v")}
    names = {
        "stale": "its own gradient, stale (what is claimed)",
        "exact": "exact gradient, through the updates",
        "transfer": "transfer from the static model",
    }
    figure, axes = plt.subplots(1, len(RATES), figsize=(9, 4), layout="constrained", sharey=True)
    for axis, lr in zip(axes, RATES, strict=True):
        panel = [one for one in settings if one.lr == lr]
        for place, (name, (color, marker)) in enumerate(looks.items()):
            scores = [one.score(name) for one in panel]
            across = [number + 0.12 * (place - 1) for number in range(len(panel))]
            heights = [score.percent for score in scores]
            ends = [score.interval or (score.percent, score.percent) for score in scores]
            errors = [
                [height - low for height, (low, _) in zip(heights, ends, strict=True)],
                [high - height for height, (_, high) in zip(heights, ends, strict=True)],
            ]
            axis.errorbar(
                across, heights, errors, fmt=marker, ms=6, lw=1, color=color, label=names[name]
            )
        static = panel[0].score("static").percent
        axis.axhline(static, color="gray", ls="--", lw=1, label="static model, direct")
        stages = [one.stage.replace(" and ", "\nand ") for one in panel]
        axis.set_xticks(range(len(panel)), stages)
        axis.set_xlim(-0.5, len(panel) - 0.5)
        axis.set_title(f"lr {lr:g}" + (" (dent+)" if lr == 0.006 else ""))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"correct of {settings[0].score('static').n}, %")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    figure.savefig(path, dpi=120)


def describe(setting: Setting) -> dict[str, Any]:
    """Return the numbers of a setting, as the file keeps them."""
    scores = {name: setting.score(name) for name in ACCURACIES}
    return {
        "adapts": setting.stage,
        "lr": setting.lr,
        "n": scores["static"].n,
        "batches": len(setting.batches),
        **{name: score.percent for name, score in scores.items()},
        "intervals": {name: score.interval for name, score in scores.items()},
        "gain": setting.gain.difference,
        "gain_interval": setting.gain.interval,
        "cosine": setting.cosine,
    }


def format_row(row: dict[str, Any]) -> dict[str, str]:
    """Return a row of the table."""
    gain = f"{row['gain']:+.1f}"
    if interval := row["gain_interval"]:
        gain += f" ({interval[0]:+.1f} to {interval[1]:+.1f})"
    percents = {name: f"{row[name]:.1f}" for name in ACCURACIES}
    shown = {"adapts": row["adapts"], "lr": f"{row['lr']:g}", **percents}
    return {**shown, "gain": gain, "cosine": f"{row['cosine']:.2f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, default=256, help="Number of test images (default: 256).")
    parser.add_argument("--batch-size", type=int, default=32, help="Size of a batch (default: 32).")
    parser.add_argument("--steps", type=int, default=10, help="Steps of each attack (default: 10).")
    parser.add_argument("--json", type=Path, default=RESULTS, help="File of results, to continue.")
    parser.add_argument("--picture", type=Path, help="File of the picture, such as docs/claim.png.")
    given = parser.parse_args()
    content = json.loads(given.json.read_text()) if given.json.exists() else {}
    done: dict[str, list[Batch]] = content.get("batches", {})
    inputs, labels = dent.load_data("cifar10", n=given.n)
    batches = list(zip(inputs.split(given.batch_size), labels.split(given.batch_size), strict=True))
    wanted = [(stage, lr) for lr in RATES for stage in STAGES]
    settings: list[Setting] = []
    with progress_bar("claims by stage") as move:
        for number, (stage, lr) in enumerate(wanted):
            key = f"{stage}, lr={lr:g}, batch_size={given.batch_size}, steps={given.steps}"
            own = done.setdefault(key, [])
            settings.append(Setting(stage, lr, own))
            for place in range(len(own), len(batches)):
                move(number + place / len(batches), len(wanted), f"{stage}, lr {lr:g}")
                own.append(measure(stage, lr, *batches[place], given.steps))
                content = {"rows": list(map(describe, settings)), "batches": done}
                with replace_file(given.json) as file:
                    file.write((json.dumps(content) + "\n").encode())
    show_table(
        [format_row(describe(one)) for one in settings],
        right=("lr", *ACCURACIES, "gain", "cosine"),
    )
    if given.picture:
        draw(settings, given.picture)


if __name__ == "__main__":
    main()
