"""Architectures as published, normalization inside the model, and every kind of name."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import Tensor, nn

import dent
from dent.models import (
    MODELS,
    Normalized,
    PerImageNormalized,
    PreActResNet18,
    WideResNet,
    build,
    list_models,
    load_model,
    resnet20,
)
from dent.models import external as external_room
from dent.models import shipped as shipped_room
from dent.models.checkpoint import make_network
from dent.models.shipped import load_shipped, read_cards
from dent.names import import_function


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


# Parameters of layers by their shapes, to count networks by hand: kernel, in, out; two per channel.


def conv(kernel: int, channels: int, out: int) -> int:
    return kernel * kernel * channels * out


def basic_stages(stem: int, widths: list[int], blocks: int, *, projection: bool) -> int:
    """Post-activation: two convolutions, each normalized; a normalized 1x1 where the width changes."""
    total, channels = conv(3, 3, stem) + 2 * stem, stem
    for width in widths:
        for _ in range(blocks):
            total += conv(3, channels, width) + conv(3, width, width) + 4 * width
            if channels != width and projection:
                total += conv(1, channels, width) + 2 * width
            channels = width
    return total


def pre_stages(channels: int, widths: list[int], blocks: int) -> int:
    """Pre-activation: each convolution takes a normalized input; a bare 1x1 where the width changes."""
    total = conv(3, 3, channels)
    for width in widths:
        for _ in range(blocks):
            total += 2 * channels + conv(3, channels, width) + 2 * width + conv(3, width, width)
            total += conv(1, channels, width) if channels != width else 0
            channels = width
    return total


def bottleneck_stages() -> int:
    total, channels = conv(7, 3, 64) + 2 * 64, 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for _ in range(blocks):
            total += conv(1, channels, width) + conv(3, width, width) + conv(1, width, 4 * width)
            total += 2 * (width + width + 4 * width)
            if channels != 4 * width:
                total += conv(1, channels, 4 * width) + 2 * 4 * width
            channels = 4 * width
    return total


def head(channels: int, classes: int = 10) -> int:
    return channels * classes + classes


NARROW, FOUR = [16, 32, 64], [64, 128, 256, 512]
BY_HAND = {
    "resnet20": basic_stages(16, NARROW, 3, projection=False) + head(64),
    "resnet32": basic_stages(16, NARROW, 5, projection=False) + head(64),
    "resnet56": basic_stages(16, NARROW, 9, projection=False) + head(64),
    "resnet26-4": basic_stages(16, [64, 128, 256], 4, projection=True) + head(256),
    "resnet32-10": basic_stages(16, [160, 320, 640], 5, projection=True) + head(640),
    "resnet18": basic_stages(64, FOUR, 2, projection=True) + head(512),
    "preact-resnet18": pre_stages(64, FOUR, 2) + head(512),
    "preact-resnet18-bn": pre_stages(64, FOUR, 2) + 2 * 512 + head(512),
    "wrn-28-4": pre_stages(16, [64, 128, 256], 4) + 2 * 256 + head(256),
    "wrn-28-10": pre_stages(16, [160, 320, 640], 4) + 2 * 640 + head(640),
    "wrn-34-10": pre_stages(16, [160, 320, 640], 5) + 2 * 640 + head(640),
    "resnet50": bottleneck_stages() + head(2048, 1000),
}
PUBLISHED = {  # as their papers, RobustBench and torchvision have them
    "resnet20": 269_722,
    "resnet26-4": 5_849_946,
    "resnet18": 11_173_962,
    "preact-resnet18": 11_171_146,
    "wrn-28-4": 5_849_050,
    "wrn-28-10": 36_479_194,
    "wrn-34-10": 46_160_474,
    "resnet50": 25_557_032,
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters(name: str) -> None:
    with torch.device("meta"):
        net = MODELS[name].make(classes=MODELS[name].classes)
    assert count(net) == BY_HAND[name] == PUBLISHED.get(name, BY_HAND[name])
    rows = {row["name"]: row for row in list_models()}
    assert rows[name]["parameters"] == BY_HAND[name]


@pytest.mark.parametrize("name", MODELS)
def test_depth(name: str) -> None:
    """The number in a name: convolutions in a row and the final layer; WRN's counts all convolutions."""
    with torch.device("meta"):
        net = MODELS[name].make(classes=10)
    convs = [part for part, module in net.named_modules() if isinstance(module, nn.Conv2d)]
    in_a_row = [part for part in convs if not re.search("shortcut|convShortcut|downsample", part)]
    depth = int(re.search(r"\d+", name)[0])  # type: ignore[index]
    assert (len(convs) if name.startswith("wrn") else len(in_a_row) + 1) == depth


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "preact-resnet18-bn", "wrn-28-4", "resnet50"])
def test_any_size_and_number_of_classes(name: str) -> None:
    model = build(name, classes=7).eval()
    assert isinstance(model, Normalized)
    for size in (32, 40):
        assert model(torch.rand(2, 3, size, size)).shape == (2, 7)


def test_wrong_depth() -> None:
    with pytest.raises(ValueError, match=r"6k \+ 4.*got 27"):
        WideResNet(27, 1)


def test_build_follows_the_seed_and_starts_by_he() -> None:
    torch.manual_seed(3)
    first = build("resnet26-4")
    torch.manual_seed(3)
    again = build("resnet26-4")
    other = build("resnet26-4")
    state = first.state_dict()
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in state.items())
    assert not torch.equal(state["model.conv1.weight"], other.state_dict()["model.conv1.weight"])
    weight = state["model.layer3.0.conv1.weight"]  # 128 to 256 channels: known to about 0.1 %
    assert weight.std().item() == pytest.approx((2 / (9 * 256)) ** 0.5, rel=0.01)


def test_loading_leaves_the_seed_alone(tmp_path: Path) -> None:
    torch.save(resnet20().state_dict(), tmp_path / "net.pt")
    before = torch.get_rng_state()
    load_model("resnet20", weights=tmp_path / "net.pt")
    assert torch.equal(before, torch.get_rng_state())


# Normalization


def test_normalized() -> None:
    inputs = torch.rand(2, 3, 4, 4, dtype=torch.double)
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    outputs = Normalized(nn.Identity(), mean, std).double()(inputs)
    for channel in range(3):
        expected = (inputs[:, channel] - mean[channel]) / std[channel]
        torch.testing.assert_close(outputs[:, channel], expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(Normalized(nn.Identity(), 0, 1)(inputs), inputs)
    assert "0.2" in repr(Normalized(nn.Identity(), mean, std))


def test_normalization_is_of_the_model_and_not_of_its_state() -> None:
    model = build("resnet20", mean=0.5, std=(0.1, 0.2, 0.4))
    assert set(model.state_dict()) == {f"model.{key}" for key in resnet20().state_dict()}
    with torch.device("meta"):
        moved = Normalized(nn.Identity(), 0.5, 0.5).to("meta")
    assert moved.mean.is_meta


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((0.1, 0.2), (1, 1, 1), "as many means as stds, got 2 and 3"),
        (0.5, 0, "above 0"),
        (0.5, (1, -1, 1), "above 0"),
        (float("nan"), 1, "expected mean as finite"),
        ("0.5", 1, "expected mean as finite"),
        ((), 1, "expected mean as finite"),
    ],
)
def test_normalization_that_is_refused(mean: Any, std: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Normalized(nn.Identity(), mean, std)


def test_gray_images_do_not_become_color_ones() -> None:
    with pytest.raises(ValueError, match="expected 3 channels"):
        build("resnet20")(torch.rand(2, 1, 32, 32))
    with pytest.raises(ValueError, match="both mean and std"):
        build("resnet20", mean=0.5)


def test_per_image_normalization() -> None:
    inputs = torch.rand(4, 3, 5, 5, dtype=torch.double)
    inputs[1] = 0.3  # constant: the floor of the deviation, and a gradient that is finite
    inputs[2] = 0.3 + 1e-4 * inputs[2]  # deviation below the floor of 1 / sqrt(75)
    model = PerImageNormalized(nn.Identity())
    outputs = model(inputs.requires_grad_())
    for image, output in zip(inputs, outputs, strict=True):
        deviation = ((image - image.mean()) ** 2).sum().div(74).sqrt().clamp(min=75**-0.5)
        torch.testing.assert_close(output, (image - image.mean()) / deviation)
    outputs.square().sum().backward()
    assert inputs.grad is not None
    assert torch.isfinite(inputs.grad).all()


def test_a_normalized_model_can_be_defended() -> None:
    model = load_model("resnet20", weights="random")
    inputs = torch.rand(3, 3, 16, 16)
    torch.testing.assert_close(dent.defend(model, "static")(inputs), model(inputs))
    assert not torch.equal(dent.defend(model, "dent", steps=1, lr=0.1)(inputs), model(inputs))
    twice = WideResNet(10, 1, duplicate=True).eval()  # layers that are never called do no harm
    assert torch.isfinite(dent.defend(twice, "dent+", steps=1)(inputs)).all()


# Names


def test_random_weights_are_never_silent() -> None:
    with pytest.raises(
        ValueError, match="resnet20 is an architecture without weights.*weights='random'"
    ):
        load_model("resnet20")
    model = load_model("resnet20", weights="random", classes=3)
    assert not model.training
    assert model(torch.rand(1, 3, 32, 32)).shape == (1, 3)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown model 'resnet21'; did you mean .*'resnet20'"):
        load_model("resnet21")
    with pytest.raises(ValueError, match="did you mean 'Carmon2019Unlabeled'"):
        load_model("Carmon2019Unlabelled")
    with pytest.raises(ValueError, match="unknown architecture 'resnet21'"):
        build("resnet21")


@pytest.mark.parametrize("classes", [0, -1, 2.5, True, "ten"])
def test_wrong_number_of_classes(classes: Any) -> None:
    with pytest.raises(ValueError, match="expected classes as a whole number"):
        load_model("resnet20", weights="random", classes=classes)
    with pytest.raises(ValueError, match="expected classes as a whole number"):
        build("resnet20", classes=classes)


def test_device() -> None:
    model = load_model("resnet20", weights="random", device="meta")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


def test_table() -> None:
    rows = list_models()
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names)
    assert set(MODELS) < set(names)
    assert len({tuple(row) for row in rows}) == 1  # the same keys in the same order
    for row in rows:
        assert row["summary"]
        assert row["needs"]
        for accuracy in row["accuracies"]:
            assert 0 <= accuracy["low"] < accuracy["percent"] < accuracy["high"] <= 100


# Shipped models


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    torch.save(build("resnet20", classes=4).state_dict(), tmp_path / "tiny.pt")
    card = {
        "name": "tiny",
        "architecture": "resnet20",
        "classes": 4,
        "normalization": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]},
        "summary": "a test",
        "recipe": "none",
        "data": "none",
        "accuracies": [{"what": "natural", "n": 10, "percent": 50, "low": 24, "high": 76}],
        "sha256": hashlib.sha256((tmp_path / "tiny.pt").read_bytes()).hexdigest(),
    }
    (tmp_path / "tiny.json").write_text(json.dumps(card))
    (tmp_path / "without-weights.json").write_text("{}")
    return tmp_path


def test_shipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    expected = build("resnet20", classes=4, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)).eval()
    inputs = torch.rand(2, 3, 32, 32)
    assert torch.equal(load_shipped("tiny", folder=folder)(inputs), expected(inputs))
    assert list(read_cards(folder)) == ["tiny"]

    monkeypatch.setattr(shipped_room, "FOLDER", folder)
    assert torch.equal(load_model("tiny")(inputs), expected(inputs))
    row = list_models()[0]
    assert (row["name"], row["needs"], row["accuracies"][0]["n"]) == ("tiny", "ships with dent", 10)
    with pytest.raises(ValueError, match="tiny brings its own weights and classes"):
        load_model("tiny", weights="random", classes=3)


def test_shipped_weights_that_changed(folder: Path) -> None:
    content = (folder / "tiny.pt").read_bytes()
    (folder / "tiny.pt").write_bytes(content[:-1] + b"x")
    with pytest.raises(ValueError, match="weights of tiny are not those of its card: expected sha256"):
        load_shipped("tiny", folder=folder)


def test_shipped_card_that_is_none(folder: Path) -> None:
    (folder / "tiny.json").write_text('{"name": "tiny"}')
    with pytest.raises(ValueError, match=r"tiny\.json is no card: expected JSON with name, arch"):
        read_cards(folder)
    assert read_cards(folder / "absent") == {}


def test_what_ships_loads() -> None:
    for name in read_cards():
        assert load_model(name)(torch.rand(1, 3, 32, 32)).isfinite().all()


# The user's own


def write_module(folder: Path, text: str) -> str:
    name = f"own_{uuid4().hex}"
    (folder / f"{name}.py").write_text(text)
    return name


OWN = """
from torch import nn
number = 3
def net(): return nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
def pair(): return net(), 0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    return write_module(tmp_path, OWN)


def test_own_function_of_the_current_folder(own: str, tmp_path: Path) -> None:
    inputs = torch.rand(2, 3, 2, 2)
    plain = load_model(f"{own}:net")
    assert not plain.training
    torch.save({"state_dict": plain.state_dict()}, tmp_path / "own.pt")
    loaded = load_model(f"{own}:net", weights=tmp_path / "own.pt", mean=0.5, std=0.5)
    assert isinstance(loaded, Normalized)
    torch.testing.assert_close(loaded(inputs), plain(2 * inputs - 1))


def test_the_current_folder_does_not_stay_in_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbors are found when the module is imported and when its function runs, and only then."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    early, late, other = (write_module(tmp_path, "number = 3\n") for _ in range(3))
    name = write_module(
        tmp_path,
        f"import {early}\n\ndef total(more=0):\n    import {late}\n"
        f"    return {early}.number + {late}.number + more\n",
    )
    before = list(sys.path)
    total = import_function(f"{name}:total")
    assert sys.path == before
    monkeypatch.chdir(tmp_path.parent)
    assert total(more=4) == 10
    assert sys.path == before
    assert list(inspect.signature(total).parameters) == ["more"]
    with pytest.raises(ModuleNotFoundError):
        import_module(other)


def test_own_function_that_is_none(own: str) -> None:
    with pytest.raises(ValueError, match=r"return a torch\.nn\.Module, got tuple"):
        load_model(f"{own}:pair")
    with pytest.raises(ValueError, match="brings its own classes"):
        load_model(f"{own}:net", classes=3)
    with pytest.raises(ValueError, match="has no meaning"):
        load_model(f"{own}:net", weights="random")
    with pytest.raises(ValueError, match="has no 'nett'; did you mean 'net'"):
        import_function(f"{own}:nett")
    with pytest.raises(ValueError, match="expected a function at .*:number', got int"):
        import_function(f"{own}:number")


@pytest.mark.parametrize("spec", ["", ":", "math", "math:", ":f", "a b:c", "../x:f", "x.py:f:g"])
def test_what_is_no_function(spec: str) -> None:
    with pytest.raises(ValueError, match="expected package.module:function"):
        import_function(spec)


def test_modules_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(
        ValueError, match="no module 'nowhere_at_all' for 'nowhere_at_all.x:f'; it is looked"
    ):
        import_function("nowhere_at_all.x:f")
    (tmp_path / "needs_more.py").write_text("import nowhere_at_all")
    with pytest.raises(
        ValueError, match="importing 'needs_more' failed: No module named 'nowhere_at_all'"
    ):
        import_function("needs_more:f")
    (tmp_path / "raises.py").write_text("1 / 0")
    with pytest.raises(ValueError, match="importing 'raises' failed: ZeroDivisionError"):
        import_function("raises:f")


# timm and torchvision, played by modules of a few lines


def tiny(num_classes: int = 2) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, num_classes))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def create_model(name: str, *, pretrained: bool, **options: int) -> nn.Module:
        calls.append((name, pretrained, options))
        if name == "offline":
            raise OSError("no network")
        net = tiny(**options)
        net.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.25,) * 3}  # type: ignore[assignment]
        return net

    def get_model(name: str, *, weights: object, **options: int) -> nn.Module:
        calls.append((name, weights, options))
        return tiny(**options)

    timm: Any = ModuleType("timm")
    timm.create_model = create_model
    timm.is_model = lambda name: name in timm.list_models()
    timm.list_models = lambda: ["tiny", "offline"]
    models: Any = ModuleType("torchvision.models")
    models.get_model = get_model
    models.list_models = lambda: ["tiny"]
    default = SimpleNamespace(transforms=lambda: SimpleNamespace(mean=[0.5] * 3, std=[0.25] * 3))
    models.get_model_weights = lambda name: SimpleNamespace(DEFAULT=default)
    modules = {"timm": timm, "torchvision.models": models}
    monkeypatch.setattr(external_room, "import_module", modules.__getitem__)
    return calls


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_external(library: str, fakes: list[Any], tmp_path: Path) -> None:
    inputs = torch.rand(2, 3, 2, 2)

    def expected(net: nn.Module) -> Tensor:
        return net((inputs - 0.5) / 0.25)  # type: ignore[no-any-return]

    model = load_model(f"{library}:tiny")
    assert not model.training
    torch.testing.assert_close(model(inputs), expected(tiny()))
    assert fakes[-1][1]  # pretrained, as told by each library's own argument
    load_model(f"{library}:tiny", weights="random", classes=5)
    assert not fakes[-1][1]
    assert fakes[-1][2] == {"num_classes": 5}
    with pytest.raises(
        ValueError, match=rf"{library}:tiny was trained with mean=.*got mean=0 and std=1"
    ):
        load_model(f"{library}:tiny", mean=0, std=1)
    given = load_model(f"{library}:tiny", weights="random", mean=0, std=1)
    torch.testing.assert_close(given(inputs), tiny()(inputs))
    load_model(f"{library}:tiny", mean=[0.5, 0.5, 0.5001], std=0.25)  # the same, as people round

    trained = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    torch.save(
        {"model": {f"module.{key}": value for key, value in trained.state_dict().items()}},
        tmp_path / "a.pt",
    )
    loaded = load_model(f"{library}:tiny", weights=tmp_path / "a.pt")
    assert not fakes[-1][1]
    torch.testing.assert_close(loaded(inputs), expected(trained))

    with pytest.raises(ValueError, match=f"{library} has no model 'tinny'; did you mean 'tiny'"):
        load_model(f"{library}:tinny")
    with pytest.raises(ValueError, match="a random final layer"):
        load_model(f"{library}:tiny", classes=5)


def test_external_offline(fakes: list[Any]) -> None:
    with pytest.raises(ValueError, match="timm could not make 'offline' .OSError: no network.; if it"):
        load_model("timm:offline")


def test_the_normalization_of_a_model_of_timm_is_checked(
    fakes: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = tiny()
    net.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.25,) * 3}  # type: ignore[assignment]
    Normalized(net, 0.5, 0.25)
    with pytest.raises(ValueError, match="Sequential was trained with mean"):
        Normalized(net, 0.5, 0.5)
    net.pretrained_cfg.update(mean=(0.0,) * 3, std=(1.0,) * 3)  # type: ignore[operator, union-attr]
    Normalized(net, 0, 1)

    (tmp_path / "bare_timm.py").write_text(
        "from torch import nn\ndef make():\n  net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))\n"
        "  net.pretrained_cfg = {'mean': (0.5,), 'std': (0.25,)}\n  return net\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="nothing normalizes its images in .0, 1.; give mean"):
        load_model("bare_timm:make")
    load_model("bare_timm:make", mean=0.5, std=0.25)
    with pytest.raises(ValueError, match="was trained with mean"):
        load_model("bare_timm:make", mean=0, std=1)
    torch.save(tiny().state_dict(), tmp_path / "own.pt")  # other weights, so another normalization
    load_model("bare_timm:make", weights=tmp_path / "own.pt", mean=0, std=1)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_external_absent(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(ValueError, match=rf"needs {library}.*pip install 'dent-defense\[{library}\]'"):
        load_model(f"{library}:tiny")


def test_external_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("raise RuntimeError('no operator nms')")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match="installed but fails .RuntimeError: no operator nms.*torch and timm"
    ):
        load_model("timm:tiny")


def test_half_precision_checkpoint_becomes_the_network_s() -> None:
    net = PreActResNet18()
    half = {
        key: value.half() if value.is_floating_point() else value
        for key, value in net.state_dict().items()
    }
    assert next(make_network(PreActResNet18, half, source="x").parameters()).dtype == torch.float32


def test_the_package_that_a_library_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timm.py").write_text("import absentvision.transforms\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(ValueError, match=r"timm:NAME needs absentvision, which .* pip install absentvi"):
        dent.load_model("timm:resnet18")
