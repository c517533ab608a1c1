"""Show where the claim of dent+ comes from: which stages adapt, how fast, and what the attacker sees.

    python benchmarks/claim.py [--n 128] [--json FILE] [--picture docs/claim.png]

Only the normalization layers of some stages adapt; all others are fixed. Each defense is attacked three
times with the same few steps: by APGD on its own (stale) gradient, as papers claim; by APGD on the exact
(unrolled) gradient; and by points of highest loss of the static model. The cosine is that between the
stale and the exact gradient of the cross-entropy at the natural images, a mean over images. The JSON
file keeps what is done; the same command continues there.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import environment  # noqa: F401
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dent
from dent.attacks import adaptive, apgd
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
Row = dict[str, Any]


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


def compare_gradients(defended: dent.Dent, inputs: Tensor, labels: Tensor) -> float:
    """Return the mean cosine between the stale and the exact gradient."""
    gradients = []
    for kind in ("stale", "unrolled"):
        points = inputs.clone().requires_grad_()
        loss = F.cross_entropy(defended(points, gradient=kind), labels, reduction="sum")
        gradients.append(torch.autograd.grad(loss, points)[0].flatten(1))
    stale, exact = gradients
    return float(F.cosine_similarity(stale, exact).mean())


def measure(stage: str, lr: float, n: int, steps: int) -> Row:
    """Return the accuracies, in %, of dent+ on these stages under each attack."""
    model = dent.load_model(MODEL)
    inputs, labels = dent.load_data("cifar10", n=n)
    defended = dent.defend(fix_other_stages(model, STAGES[stage]), "dent+", lr=lr)
    assert isinstance(defended, dent.Dent)
    threat: dict[str, Any] = {"eps": EPS, "norm": "linf", "steps": steps, "seed": 0}
    attacks = {
        "stale": apgd(defended, inputs, labels, joint=True, **threat),
        "exact": adaptive.unrolled(defended, inputs, labels, **threat),
        "transfer": adaptive.denying_updates(defended, model, inputs, labels, **threat),
    }
    with torch.no_grad():
        natural = 100 * float((defended(inputs).argmax(1) == labels).float().mean())
        static = apgd(model, inputs, labels, joint=True, **threat)
    return {
        "adapts": stage,
        "lr": lr,
        "n": n,
        "natural": natural,
        "static": 100 - 100 * float(static.success.float().mean()),
        **{name: 100 - 100 * float(result.success.float().mean()) for name, result in attacks.items()},
        "cosine": compare_gradients(defended, inputs, labels),
    }


def draw(rows: list[Row], path: Path) -> None:
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
        panel = [row for row in rows if row["lr"] == lr]
        places = range(len(panel))
        for name, (color, marker) in looks.items():
            heights = [row[name] for row in panel]
            axis.plot(places, heights, marker, ms=7, color=color, label=names[name])
        axis.axhline(panel[0]["static"], color="gray", ls="--", lw=1, label="static model, direct")
        axis.set_xticks(places, [row["adapts"].replace(" and ", "\nand ") for row in panel])
        axis.set_xlim(-0.5, len(panel) - 0.5)
        axis.set_title(f"lr {lr:g}" + (" (dent+)" if lr == 0.006 else ""))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"correct of {rows[0]['n']}, %")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, default=128, help="Number of test images (default: 128).")
    parser.add_argument("--steps", type=int, default=10, help="Steps of each attack (default: 10).")
    parser.add_argument("--json", type=Path, default=RESULTS, help="File of results, to continue.")
    parser.add_argument("--picture", type=Path, help="File of the picture, such as docs/claim.png.")
    given = parser.parse_args()
    done: dict[str, Row] = json.loads(given.json.read_text()) if given.json.exists() else {}
    wanted = [(stage, lr) for lr in RATES for stage in STAGES]
    rows = []
    with progress_bar("claims by stage") as move:
        for number, (stage, lr) in enumerate(wanted):
            move(number, len(wanted), f"{stage}, lr {lr:g}")
            key = f"{stage}, lr={lr:g}, n={given.n}, steps={given.steps}"
            if key not in done:
                done[key] = measure(stage, lr, given.n, given.steps)
                with replace_file(given.json) as file:
                    file.write((json.dumps(done, indent=1) + "\n").encode())
            rows.append(done[key])
    percents = ("natural", "static", "stale", "exact", "transfer")
    show_table(
        [
            {
                "adapts": row["adapts"], "lr": f"{row['lr']:g}",
                **{name: f"{row[name]:.1f}" for name in percents}, "cosine": f"{row['cosine']:.2f}",
            }
            for row in rows
        ],
        right=("lr", *percents, "cosine"),
    )  # fmt: skip
    if given.picture:
        draw(rows, given.picture)


if __name__ == "__main__":
    main()
