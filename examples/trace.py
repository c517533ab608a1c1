"""What adaptation does, step by step: a picture of `state.trace` on natural and on attacked images.

    python examples/trace.py [trace.png]

Left: the entropy of the predictions falls, on both. Middle: Delta moves away from the model. Right: the
smoothing of the input shrinks towards the identity.
"""

from __future__ import annotations

import sys

from torch import Tensor

import dent

EPS = 1.5 / 255


def main(path: str) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("this example needs matplotlib: pip install 'dent-defense[demo]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    model = dent.load_model("resnet20-nominal")
    inputs, labels = dent.load_data("cifar10", n=128)
    defended = dent.defend(model, "dent-nominal", steps=15)
    attacked = dent.attacks.pgd(model, inputs, labels, eps=EPS, steps=10).inputs
    traces = {
        "natural": defended.adapt(inputs).trace,
        "attacked (PGD, 1.5/255)": defended.adapt(attacked).trace,
    }
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    for (label, trace), color in zip(traces.items(), ("tab:blue", "tab:red"), strict=True):
        curves: list[Tensor] = [trace.entropy.mean(1), trace.delta[:, 0], trace.sigma[:, 0, 0]]
        for axis, curve in zip(axes, curves, strict=True):
            axis.plot(range(len(curve)), curve.tolist(), "o-", ms=3, color=color, label=label)
    titles = ("mean entropy (nats)", "size of Delta (L2)", "Sigma (pixels)")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="updates", ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "trace.png")
