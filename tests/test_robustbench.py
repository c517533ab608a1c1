"""RobustBench's models: our architectures against its own, on the same weights, for every id."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dent.models import MODELS, ROBUSTBENCH, ResNet50, WideResNet, list_models, load_model
from dent.models.robustbench import resolve_id

State = dict[str, Tensor]


def source(name: str) -> Any:
    """One of its files of architectures, as a module: the package itself needs many others."""
    try:
        path = Path(
            str(
                distribution("robustbench").locate_file(f"robustbench/model_zoo/architectures/{name}.py")
            )
        )
    except PackageNotFoundError:
        pytest.skip("robustbench is not installed: pip install --no-deps robustbench")
    if not path.is_file():
        pytest.skip(f"this robustbench has no {path.name}")
    spec = spec_from_file_location(f"robustbench_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wide(width: int, *, twice: bool = False) -> nn.Module:
    net: nn.Module = source("wide_resnet").WideResNet(depth=28, widen_factor=width, sub_block1=twice)
    return net


def wong() -> nn.Module:
    resnet = source("resnet")
    net: nn.Module = resnet.PreActResNet(resnet.PreActBlock, [2, 2, 2, 2])
    return net


def rice() -> nn.Module:
    resnet = source("resnet")
    net: nn.Module = resnet.PreActResNet(resnet.PreActBlockV2, [2, 2, 2, 2], bn_before_fc=True)
    return net


class ImageNetReference(nn.Module):
    """RobustBench takes torchvision's ResNet-50: here its stem, around RobustBench's bottlenecks."""

    def __init__(self) -> None:
        super().__init__()
        resnet = source("resnet")
        net = resnet.ResNet(resnet.Bottleneck, [3, 4, 6, 3], num_classes=1000)
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), net.bn1
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            net.layer1,
            net.layer2,
            net.layer3,
            net.layer4,
        )
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            layer[0].downsample = layer[0].shortcut  # torchvision's name for it
        self.fc = net.linear

    def forward(self, inputs: Tensor) -> Tensor:
        features = F.max_pool2d(self.bn1(self.conv1(inputs)).relu(), 3, 2, 1)
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        return self.fc(F.adaptive_avg_pool2d(features, 1).flatten(1))  # type: ignore[no-any-return]

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {key: value for key, value in super().state_dict().items() if "shortcut" not in key}


def by_channel(mean: tuple[float, ...], std: tuple[float, ...]) -> Callable[[Tensor], Tensor]:
    return lambda x: (x - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)


def by_image(x: Tensor) -> Tensor:
    std = torch.stack([image.std() for image in x]).clamp(min=(3 * 32 * 32) ** -0.5)
    return (x - x.flatten(1).mean(1).view(-1, 1, 1, 1)) / std.view(-1, 1, 1, 1)


CIFAR = ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Its network, and what it does to the input first.
REFERENCES: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "cifar10/Linf/Wu2020Adversarial_extra": (lambda: wide(10, twice=True), lambda x: x),
    "cifar10/Linf/Carmon2019Unlabeled": (lambda: wide(10, twice=True), lambda x: x),
    "cifar10/Linf/Sehwag2020Hydra": (lambda: wide(10, twice=True), lambda x: x),
    "cifar10/Linf/Wang2020Improving": (lambda: wide(10, twice=True), lambda x: x),
    "cifar10/Linf/Hendrycks2019Using": (lambda: wide(10), lambda x: 2 * x - 1),
    "cifar10/Linf/Wong2020Fast": (wong, by_channel(*CIFAR)),
    "cifar10/Linf/Ding2020MMA": (lambda: wide(4), by_image),
    "cifar10/L2/Rice2020Overfitting": (rice, by_channel(*CIFAR)),
    "cifar10/L2/Rony2019Decoupling": (
        lambda: wide(10),
        by_channel((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    ),
    "cifar10/L2/Ding2020MMA": (lambda: wide(4), by_image),
    "imagenet/Linf/Wong2020Fast": (ImageNetReference, by_channel(*IMAGENET)),
}


def as_if_trained(net: nn.Module) -> nn.Module:
    """Statistics, scales and shifts that are not those of a start: a wrong order of layers shows."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.2)
            module.running_mean.normal_(0, 0.2)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    return net.eval()


def prefixed(state: State, prefix: str) -> State:
    return {f"{prefix}{key}": value for key, value in state.items()}


FORMS: dict[str, Callable[[State], Any]] = {
    "plain": lambda state: state,
    "module": lambda state: prefixed(state, "module."),
    "nested": lambda state: {"epoch": 9, "state_dict": prefixed(state, "module."), "best": 0.5},
    "model": lambda state: {"state_dict": prefixed(state, "model.")},
    "net": lambda state: {"net": prefixed(state, "module.model.")},
}


def compare(key: str, form: str, stored: bool, folder: Path) -> None:
    make, normalize = REFERENCES[key]
    reference = as_if_trained(make())
    state = reference.state_dict()
    if stored and ROBUSTBENCH[key].normalization is not None:
        mean, std = ROBUSTBENCH[key].normalization or ((), ())
        names = ("normalize.mean", "normalize.std") if key.startswith("imagenet") else ("mu", "sigma")
        inner = prefixed(state, "model.") if key.startswith("imagenet") else state
        values = (torch.tensor(value).view(1, 3, 1, 1) for value in (mean, std))
        state = {**dict(zip(names, values, strict=True)), **inner}
    torch.save(FORMS[form](state), folder / "published.pt")
    model = load_model(f"robustbench:{key}", weights=folder / "published.pt")
    (folder / "published.pt").unlink()  # up to 150 MB, which pytest would keep
    assert not model.training
    inputs = torch.rand(2, 3, 32, 32)
    inputs[1] = 0.5 + 0.01 * inputs[1]  # of little contrast: below the floor of Ding2020MMA
    with torch.no_grad():
        expected = reference(normalize(inputs))
        torch.testing.assert_close(
            model(inputs), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item()
        )
        assert (expected[0] - expected[1]).abs().max() > 0.01 * expected.abs().max()


@pytest.mark.parametrize(("key", "form"), list(zip(ROBUSTBENCH, [*FORMS] * 3, strict=False)))
def test_every_id(key: str, form: str, tmp_path: Path) -> None:
    compare(key, form, False, tmp_path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["cifar10/Linf/Wong2020Fast", "cifar10/Linf/Ding2020MMA"])
def test_every_form(key: str, form: str, tmp_path: Path) -> None:
    compare(key, form, True, tmp_path)


def test_stored_normalization_of_imagenet(tmp_path: Path) -> None:
    compare("imagenet/Linf/Wong2020Fast", "nested", True, tmp_path)


@pytest.mark.parametrize("key", ROBUSTBENCH)
def test_keys_are_the_same_both_ways(key: str) -> None:
    with torch.device("meta"):
        ours, theirs = ROBUSTBENCH[key].make().state_dict(), REFERENCES[key][0]().state_dict()
    assert {name: value.shape for name, value in ours.items()} == {
        name: value.shape for name, value in theirs.items()
    }


def test_resnet18() -> None:
    theirs = as_if_trained(source("resnet").ResNet18())
    ours = MODELS["resnet18"].make().eval()
    ours.load_state_dict(theirs.state_dict())
    inputs = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(ours(inputs), theirs(inputs), rtol=1e-4, atol=1e-4)


def test_resnet50_is_torchvision_s() -> None:
    try:
        resnet50 = import_module("torchvision.models").resnet50
    except Exception as error:  # for another torch it raises a RuntimeError
        pytest.skip(f"torchvision cannot be imported: {error}")
    theirs = as_if_trained(resnet50())
    ours = ResNet50().eval()
    ours.load_state_dict(theirs.state_dict())
    inputs = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(ours(inputs), theirs(inputs), rtol=1e-4, atol=1e-4)


def test_the_duplicate_block_is_never_called() -> None:
    net = WideResNet(10, 1, duplicate=True)
    net(torch.rand(2, 3, 8, 8)).sum().backward()
    without = {name for name, parameter in net.named_parameters() if parameter.grad is None}
    assert without == {name for name, _ in net.named_parameters() if name.startswith("sub_block1.")}
    assert without


# Names


def test_resolve() -> None:
    assert (
        resolve_id("linf/Ding2020MMA") == resolve_id("cifar10/Ding2020MMA") == "cifar10/Linf/Ding2020MMA"
    )
    assert (
        resolve_id("Linf/cifar10/Wong2020Fast")
        == resolve_id("Wong2020Fast")
        == "cifar10/Linf/Wong2020Fast"
    )
    assert resolve_id("imagenet/Linf/Wong2020Fast") == "imagenet/Linf/Wong2020Fast"
    assert (
        resolve_id("Linf/Rice2020Overfitting") == "cifar10/Linf/Rice2020Overfitting"
    )  # of the package only
    assert resolve_id("cifar100/New2030Model") == "cifar100/Linf/New2030Model"
    for wrong in ("", "L3/Ding2020MMA", "Linf/", "a/b/c/d"):
        with pytest.raises(ValueError, match="expected robustbench:.*threat models: Linf, L2"):
            resolve_id(wrong)


def test_names_of_the_table_lead_back() -> None:
    names = [row["name"] for row in list_models() if row["name"].startswith("robustbench:")]
    assert [resolve_id(name.removeprefix("robustbench:")) for name in names] == list(ROBUSTBENCH)
    rows = {row["name"]: row for row in list_models()}
    row = rows["robustbench:L2/Ding2020MMA"]
    assert (row["norm"], row["eps"]) == ("l2", "0.5")
    assert [(a["what"], a["n"], a["percent"]) for a in row["accuracies"]] == [
        ("natural", 10_000, 88.02),
        ("AutoAttack", 10_000, 66.09),
    ]


# With the package, without it, and with one that cannot be imported


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No package, and empty folders to look in."""
    monkeypatch.setitem(sys.modules, "robustbench", None)
    monkeypatch.setenv("DENT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(place: Path) -> nn.Module:
    place.parent.mkdir(parents=True)
    net = as_if_trained(WideResNet(28, 4))
    torch.save(net.state_dict(), place)
    return net


@pytest.mark.parametrize(
    "place", ["models/cifar10/L2/Ding2020MMA.pt", "home/models/cifar10/L2/Ding2020MMA.pt"]
)
def test_files_are_found_in_its_layout(place: str, nowhere: Path) -> None:
    net = put(nowhere / place)
    inputs = torch.rand(2, 3, 32, 32)
    model = load_model("robustbench:L2/Ding2020MMA")
    torch.testing.assert_close(model(inputs), net(by_image(inputs)), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="which is not at"):
        load_model("Ding2020MMA")  # Linf, another file


def test_without_package_and_file(nowhere: Path) -> None:
    with pytest.raises(ValueError, match="needs the package") as caught:
        load_model("Carmon2019Unlabeled")
    message = str(caught.value)
    for part in (
        "cifar10/Linf/Carmon2019Unlabeled needs the package robustbench (not installed)",
        str(Path("models/cifar10/Linf/Carmon2019Unlabeled.pt")),
        str(nowhere / "home/models/cifar10/Linf/Carmon2019Unlabeled.pt"),
        "pip install 'dent-defense[robustbench]'",
        "weights=",
    ):
        assert part in message
    with pytest.raises(
        ValueError, match="unknown RobustBench model 'cifar10/Linf/New2030Model': without its"
    ):
        load_model("robustbench:New2030Model")


def test_with_the_package(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def load(**options: Any) -> nn.Module:
        calls.append(options)
        if options["model_name"] == "New2030Model":
            raise KeyError(options["model_name"])
        return nn.Linear(1, 1)

    package: Any = ModuleType("robustbench")
    package.load_model = load
    monkeypatch.setitem(sys.modules, "robustbench", package)
    assert not load_model("robustbench:L2/Ding2020MMA").training
    assert calls[-1] == {
        "model_name": "Ding2020MMA",
        "dataset": "cifar10",
        "threat_model": "L2",
        "model_dir": nowhere / "home" / "models",
    }
    put(Path("models/cifar10/Linf/Ding2020MMA.pt"))
    load_model("Ding2020MMA")
    assert calls[-1]["model_dir"] == Path("models")  # where the file is already
    load_model("robustbench:imagenet/Linf/Salman2020Do_R50")  # any that it knows
    assert calls[-1]["dataset"] == "imagenet"
    with pytest.raises(ValueError, match="robustbench has no model 'New2030Model' for cifar10 and Linf"):
        load_model("robustbench:New2030Model")


def test_package_that_cannot_be_imported(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nowhere / "broken" / "robustbench").mkdir(parents=True)
    (nowhere / "broken" / "robustbench" / "__init__.py").write_text(
        "raise RuntimeError('no operator nms')"
    )
    monkeypatch.delitem(sys.modules, "robustbench")
    monkeypatch.syspath_prepend(nowhere / "broken")
    with pytest.raises(
        ValueError, match=r"needs the package robustbench \(RuntimeError: no operator nms\)"
    ):
        load_model("Ding2020MMA")
    put(Path("models/cifar10/Linf/Ding2020MMA.pt"))
    with pytest.warns(
        UserWarning, match="cannot be used .RuntimeError: no operator nms.; .*own architecture"
    ):
        model = load_model("Ding2020MMA")
    assert model(torch.rand(1, 3, 32, 32)).shape == (1, 10)


def test_what_a_published_model_brings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Ding2020MMA brings its own classes and mean"):
        load_model("Ding2020MMA", classes=4, mean=0, std=1)
    assert load_model("Ding2020MMA", weights="random")(torch.rand(1, 3, 32, 32)).shape == (1, 10)
    torch.save(WideResNet(28, 4, duplicate=True).state_dict(), tmp_path / "wrong.pt")
    with pytest.raises(ValueError, match=r"does not fit WideResNet; unexpected \(\d+\): sub_block1"):
        load_model("Ding2020MMA", weights=tmp_path / "wrong.pt")
