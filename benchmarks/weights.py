"""Pack the weights that come with dent, and measure them for their cards.

    python benchmarks/weights.py mean runs/resnet26-4-nominal --other resnet26-4-nominal --out runs/mean
    python benchmarks/weights.py pack runs/resnet20-at --name resnet20-at --summary "..." --command "..."
    python benchmarks/weights.py measure resnet20-at --eps 8/255
    python benchmarks/weights.py table

`mean` averages the weights of a `dent train` folder and of the model that it started from, and measures
the BatchNorm statistics of the mean anew, on training images. The ends of several cycles of the learning
rate lie around a better point (Izmailov et al., 2018).

`pack` puts the model of a `dent train` folder into the package, with a card. `--average` takes the
averaged weights, `--half` stores the parameters as float16 (they are loaded as float32). `measure`
completes the card: the accuracy on all test images and on the 1,000 in the package, and what the
reference implementation of APGD-CE and targeted APGD-DLR (100 steps, nine targets) leave of the 1,000
together. This takes hours for large models: each batch is stored when it is done, in
`benchmarks/weights`, and the same command continues there. `table` prints the cards for docs/models.md.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dent
from dent.attacks.fused import fuse_batch_norm
from dent.data import open_data
from dent.models.checkpoint import find_state, read_checkpoint, split_normalization
from dent.models.shipped import load_shipped, read_cards
from dent.precision import refuse_slow_bfloat16, search_in_bfloat16
from dent.report.terminal import accuracy_text, progress_bar
from dent.seeds import make_generator
from dent.storage import replace_file
from dent.texts import read_number
from dent.training import Recipe
from dent.training.card import CARD, count_correct, make_accuracy
from dent.training.loop import crop_and_flip, draw_crops, split_images
from dent.training.train import AVERAGE, CHECKPOINT

WEIGHTS = Path(dent.__file__).parent / "models" / "weights"
STORE = Path(__file__).parent / "weights"


def write_card(folder: Path, name: str, card: dict[str, Any]) -> None:
    """Write the card of a model."""
    with replace_file(folder / f"{name}.json") as file:
        file.write(json.dumps(card, indent=2).encode() + b"\n")


def average_runs(
    run: Path, other: str, out: Path, *, average: bool = False, images: int = 10_240
) -> None:
    """Write a folder like that of `dent train`, with the mean of its weights and those of another model.

    other: model or checkpoint of the same architecture. average: take the averaged weights of the run.
    images: number of training images, cropped and flipped as in training, for the BatchNorm statistics.
    """
    file = run / (AVERAGE if average else CHECKPOINT)
    checkpoint, trained = read_checkpoint(file), json.loads((run / CARD).read_text())
    model, second = dent.load_model(file), dent.load_model(other)
    recipe, dataset = Recipe(**trained["recipe"]), open_data(trained["data"], split="train")
    own, others = model.state_dict(), second.state_dict()
    if own.keys() != others.keys():
        raise ValueError(f"expected a model of the architecture {trained['architecture']}, got {other}")
    means = {
        key: (value + others[key]) / 2 if value.is_floating_point() else value
        for key, value in own.items()
    }
    model.load_state_dict(means)
    chosen, _ = split_images(dataset, recipe)
    measure_statistics(model, dataset, chosen[:images], recipe)
    out.mkdir(parents=True, exist_ok=True)
    with replace_file(out / file.name) as opened:
        torch.save(checkpoint | {"model": model.state_dict(), "average": None}, opened)
    with replace_file(out / CARD) as opened:
        opened.write(json.dumps(trained, indent=2).encode() + b"\n")


def measure_statistics(
    model: nn.Module, dataset: dent.data.Dataset, chosen: Tensor, recipe: Recipe
) -> None:
    """Set the statistics of BatchNorm layers to their means over batches of training images."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a plain mean over the batches
    random, batches = make_generator(recipe.seed, 1), chosen.split(256)
    model.train()
    with torch.no_grad(), progress_bar("statistics") as move:
        for number, batch in enumerate(batches):
            inputs = dataset.read(batch)
            if recipe.augment:
                inputs = crop_and_flip(inputs, draw_crops(len(batch), generator=random))
            model(inputs.contiguous(memory_format=torch.channels_last))
            move(number + 1, len(batches), "")
    model.eval()


def pack(
    run: Path,
    name: str,
    *,
    summary: str,
    command: str,
    data: str | None = None,
    average: bool = False,
    half: bool = False,
    folder: Path = WEIGHTS,
) -> None:
    """Write the weights of a `dent train` folder, and a card without accuracies.

    data: name of the training data on the card (default: as it was given to `dent train`).
    """
    checkpoint = read_checkpoint(run / (AVERAGE if average else CHECKPOINT))
    trained = json.loads((run / CARD).read_text())
    state, _ = split_normalization(find_state({"model": checkpoint["model"]}, source=str(run)))
    buffer = io.BytesIO()
    torch.save(halve_parameters(state) if half else state, buffer)
    card = {
        "name": name,
        "summary": summary,
        "architecture": checkpoint["architecture"],
        "classes": checkpoint["classes"],
        "labels": checkpoint["labels"],
        "normalization": {"mean": checkpoint["mean"], "std": checkpoint["std"]},
        "precision": "float16" if half else "float32",
        "averaged": average,
        "data": {
            "name": data or trained["data"],
            "images": checkpoint["asked"]["images"] - trained["recipe"]["hold_out"],
            "held out": trained["recipe"]["hold_out"],
        },
        "recipe": trained["recipe"],
        "command": command,
        "seconds": trained["seconds"],
        "torch": trained["torch"],
        "accuracies": [],
        "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
    }
    with replace_file(folder / f"{name}.pt") as file:
        file.write(buffer.getvalue())
    write_card(folder, name, card)


def halve_parameters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict with its parameters as float16; statistics of the data stay float32."""
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    halved = {key: value if key.endswith(buffers) else value.half() for key, value in state.items()}
    if too_large := [key for key, value in halved.items() if not torch.isfinite(value).all()]:
        raise ValueError(f"expected parameters in the range of float16, got larger in {too_large}")
    return halved


def measure(
    name: str,
    *,
    eps: float | None = None,
    norm: str = "linf",
    batch_size: int = 250,
    test_data: str | None = None,
    limit: int = 1000,
    bfloat16: bool = False,
    folder: Path = WEIGHTS,
    store: Path = STORE,
) -> None:
    """Measure a packed model, and write its accuracies to its card.

    test_data: file with all test images (default: the data set that the card names).
    limit: number of the package's images that are attacked.
    bfloat16: search in bfloat16, in half the time. The points that are found are judged in float32.
    store: folder of the batches that are done.
    """
    if bfloat16:
        refuse_slow_bfloat16(torch.device("cpu"))
    card = json.loads((folder / f"{name}.json").read_text())
    model, data = load_shipped(name, folder=folder), card["data"]["name"]
    whole, shipped = open_data(test_data or data), open_data(data, n=1000)
    if model.class_names is not None:
        whole, shipped = (one.match_classes(model.class_names, owner=name) for one in (whole, shipped))
    card["accuracies"] = [
        make_accuracy("natural, test images", count_correct(model, whole), len(whole)),
        make_accuracy("natural, shipped images", count_correct(model, shipped), len(shipped)),
    ]
    write_card(folder, name, card)
    if eps is None:
        return
    budget = f"{round(eps * 255, 3):g}/255" if norm == "linf" else f"{eps:g}"
    search = " in bfloat16" if bfloat16 else ""
    what = f"reference APGD-CE and APGD-T{search}, {norm.capitalize()} {budget}, shipped images"
    standing = find_standing(
        model, shipped.subset(torch.arange(limit)), eps=eps, norm=norm, batch_size=batch_size,
        bfloat16=bfloat16, store=store / f"{name}.json",
        asked={"what": what, "sha256": card["sha256"], "batch_size": batch_size},
    )  # fmt: skip
    card["accuracies"].append(make_accuracy(what, sum(standing), limit))
    write_card(folder, name, card)


def find_standing(
    model: nn.Module,
    dataset: dent.data.Dataset,
    *,
    eps: float,
    norm: str,
    batch_size: int,
    bfloat16: bool,
    store: Path,
    asked: dict[str, Any],
) -> list[bool]:
    """Return which images the reference attacks leave correct.

    store: file with the batches that are done; it begins anew if it was `asked` for something else.
    """
    from pyautoattack import AutoAttack

    done = json.loads(store.read_text()) if store.exists() else {}
    standing: list[bool] = done["standing"] if done.get("asked") == asked else []
    searched = SearchedInHalf(model, dataset.read(torch.arange(len(dataset))[:8])) if bfloat16 else model
    with progress_bar("APGD-CE and APGD-T") as move:
        move(len(standing), len(dataset), f"{sum(standing)} stand")
        for inputs, labels in dataset.subset(torch.arange(len(standing), len(dataset))).batches(
            batch_size
        ):
            attack = AutoAttack(
                searched, norm={"linf": "Linf", "l2": "L2"}[norm], eps=eps, version="custom",
                attacks=["apgd-ce", "apgd-t"], seed=0, device="cpu",
            )  # fmt: skip
            points, _ = attack.run_standard_evaluation(inputs, labels, batch_size=batch_size)
            with torch.no_grad():
                standing += (model(points).argmax(1) == labels).tolist()
            store.parent.mkdir(exist_ok=True)
            with replace_file(store) as file:
                file.write(json.dumps({"asked": asked, "standing": standing}).encode() + b"\n")
            move(len(standing), len(dataset), f"{sum(standing)} stand")
    return standing


class SearchedInHalf(nn.Module):
    """A faster copy of a model that computes in bfloat16; its points are judged by the model itself."""

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        super().__init__()
        self.faster = fuse_batch_norm(model, inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        with search_in_bfloat16(self.faster, inputs.device):
            return self.faster(inputs).float()


def print_table() -> None:
    """Print the cards as a Markdown table."""
    print("| model | what it is | accuracy in % | 95 % interval | sha256 |")
    print("|---|---|---|---|---|")
    for name, card in read_cards().items():
        shown = "<br>".join(accuracy_text(one) for one in card.accuracies)
        intervals = "<br>".join(f"{one['low']:.2f} to {one['high']:.2f}" for one in card.accuracies)
        print(f"| `{name}` | {card.summary} | {shown} | {intervals} | `{card.sha256[:12]}` |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    averaging = verbs.add_parser("mean", help="Average the weights of a training and of another model.")
    averaging.add_argument("run", type=Path, help="Folder of `dent train`.")
    averaging.add_argument("--other", required=True, help="Model or checkpoint file.")
    averaging.add_argument("--out", type=Path, required=True, help="Folder of the mean.")
    averaging.add_argument(
        "--average", action="store_true", help="Take the averaged weights of the run."
    )
    packing = verbs.add_parser("pack", help="Put the model of a training into the package.")
    packing.add_argument("run", type=Path, help="Folder of `dent train`.")
    packing.add_argument("--name", required=True, help="Name of the shipped model.")
    packing.add_argument("--summary", required=True, help="What it is, in one line.")
    packing.add_argument("--command", required=True, help="The command that trained it.")
    packing.add_argument("--data", help="Name of the training data (default: as given to dent train).")
    packing.add_argument("--average", action="store_true", help="Pack the averaged weights.")
    packing.add_argument("--half", action="store_true", help="Store the parameters as float16.")
    measuring = verbs.add_parser("measure", help="Measure a packed model and complete its card.")
    measuring.add_argument("name", help="Name of the shipped model.")
    measuring.add_argument("--eps", type=read_number, help="Radius of the attack (default: no attack).")
    measuring.add_argument("--norm", choices=("linf", "l2"), default="linf", help="Norm of the attack.")
    measuring.add_argument("--batch-size", type=int, default=250, help="Images per batch.")
    measuring.add_argument("--test-data", help="File with all test images (default: the card's data).")
    measuring.add_argument("--limit", type=int, default=1000, help="Number of images to attack.")
    measuring.add_argument(
        "--bfloat16", action="store_true", help="Search in bfloat16, judge in float32."
    )
    verbs.add_parser("table", help="Print the cards as a Markdown table.")
    given = vars(parser.parse_args())
    verb = given.pop("verb")
    if verb == "mean":
        average_runs(given.pop("run"), given.pop("other"), given.pop("out"), **given)
    elif verb == "pack":
        pack(given.pop("run"), given.pop("name"), **given)
    elif verb == "measure":
        measure(given.pop("name"), **given)
    print_table()


if __name__ == "__main__":
    main()
