"""Rank views by the first-order worst case of their mean: stage 0 of the search in `docs/winning.md`.

    python benchmarks/winning_views.py [--model resnet20-at] [--n 128] [--views frame1 "shift3,3+mirror"]
        [--json FILE]

If the margin to a class were linear, an attack could take eps times the dual norm of its gradient from
it. A row has the share of images that this leaves, in %, for the view alone and for the mean with its
mirror image, and the length of the gradient. Nothing is attacked: the numbers propose candidates, and
prove nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import environment  # noqa: F401
import torch
from torch import Tensor
from winning import MODELS, Target, load_search_images
from winning_candidates import make_view

from dent.attacks.fused import fuse_batch_norm
from dent.attacks.search import Model
from dent.report.terminal import show_table
from dent.storage import replace_file

RIVALS = 2  # classes that an attack is assumed to aim at
WIDTH = 0.5  # of the sigmoid that counts images, in logits: a hard count says little of 128 images
VIEWS = (
    "shift0,0", "shift1,1", "shift2,2", "shift3,3", "shift4,4", "shift6,6", "shift8,8",
    "frame1", "frame2", "frame3", "frame4", "gray1", "white1", "edge1", "pad2", "pad4",
    "scale0.8", "scale0.9", "scale1.2", "rotate10", "dim0.8", "dim0.9",
)  # fmt: skip


Row = dict[str, Any]


class Linear(NamedTuple):
    """Margins to the rivals (N, RIVALS) and their gradients to the images (N, RIVALS, values)."""

    margins: Tensor
    gradients: Tensor

    def count_standing(self, eps: float, norm: str) -> float:
        """Return the share of images whose lowest margin stays positive, counted softly, in %."""
        dual = self.gradients.abs().sum(2) if norm == "linf" else self.gradients.norm(dim=2)
        lowest = (self.margins - eps * dual).amin(1)
        return 100 * (lowest / WIDTH).sigmoid().mean().item()

    @property
    def natural(self) -> float:
        return 100 * (self.margins.amin(1) > 0).float().mean().item()


def linearize(network: Model, images: Tensor, labels: Tensor, rivals: Tensor, view: str) -> Linear:
    """Return the margins of a view and their gradients to the images themselves."""
    points = images.clone().requires_grad_()
    logits = network(make_view(points, view))
    margins = logits.gather(1, labels[:, None]) - logits.gather(1, rivals)
    slopes = [
        torch.autograd.grad(margins[:, place].sum(), points, retain_graph=True)[0].flatten(1)
        for place in range(RIVALS)
    ]
    return Linear(margins.detach(), torch.stack(slopes, 1))


def measure(network: Model, images: Tensor, labels: Tensor, view: str, target: Target) -> Row:
    """Return what a view keeps, alone and in the mean with its mirror image."""
    with torch.no_grad():
        logits = network(images)
    rivals = logits.scatter(1, labels[:, None], -torch.inf).topk(RIVALS).indices
    plain, alone, mirrored = (
        linearize(network, images, labels, rivals, one) for one in ("shift0,0", view, f"{view}+mirror")
    )
    both = Linear(*((one + two) / 2 for one, two in zip(alone, mirrored, strict=True)))
    slope = alone.gradients[:, 0]
    length = slope.abs().sum(1) if target.norm == "linf" else slope.norm(dim=1)
    return {
        "view": view,
        "natural": alone.natural,
        "left": alone.count_standing(target.eps, target.norm),
        "natural with mirror": both.natural,
        "left with mirror": both.count_standing(target.eps, target.norm),
        "length": length.mean().item(),
        "cosine": torch.cosine_similarity(slope, plain.gradients[:, 0]).mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="resnet20-at", choices=MODELS, help="Model to look at.")
    parser.add_argument("--n", type=int, default=128, help="Number of search images (default: 128).")
    parser.add_argument("--views", nargs="+", default=VIEWS, help="Views, as text.")
    parser.add_argument("--json", type=Path, help="File of the results.")
    given = parser.parse_args()
    target = MODELS[given.model]
    model = target.load().eval().requires_grad_(False)
    images, labels = load_search_images(target.data, given.n)
    network = fuse_batch_norm(model, images[:8])
    rows = [measure(network, images, labels, view, target) for view in given.views]
    print(f"{given.model}, n = {given.n}, first order, nothing attacked")
    shown = [{key: one if key == "view" else f"{one:.2f}" for key, one in row.items()} for row in rows]
    show_table(shown, right=tuple(rows[0])[1:])
    if given.json:
        with replace_file(given.json) as file:
            file.write((json.dumps(rows, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
