"""Check and evaluate a defense of your own. This one lowers the contrast of each image, in two updates.

python examples/own_defense.py
cd examples && dent evaluate --model resnet20-at --defense own_defense:Soften --defense static
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import dent
from dent.report.terminal import show_results
from dent.testing import check_defense


class Soften:
    independent = True  # no answer depends on the rest of its batch
    updates = 2  # number of updates of a call

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def adapt(
        self, inputs: Tensor, *, start: Tensor | None = None, steps: int | None = None,
        gradient: str | None = None,
    ) -> Tensor:  # fmt: skip
        inputs = inputs if gradient == "unrolled" else inputs.detach()
        offset = torch.zeros_like(inputs) if start is None else start
        for _ in range(self.updates if steps is None else steps):
            moved = inputs + offset
            offset = offset + 0.1 * (moved.mean((1, 2, 3), keepdim=True) - moved)
        return offset

    def predict(self, inputs: Tensor, state: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs + state)
        return logits

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.predict(inputs, self.adapt(inputs))


if __name__ == "__main__":
    model = dent.load_model("resnet20-at")
    check_defense(Soften(model), torch.rand(4, 3, 32, 32))
    results = dent.evaluate(model, {"soften": Soften, "static": "static"}, n=16, steps=5)
    show_results(results)
