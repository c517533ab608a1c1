"""Checkpoint files: what fits is loaded key for key, and what does not says why."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dent.models import CifarResNet, Normalized, build, load_model, resnet20
from dent.models.checkpoint import read_checkpoint
from dent.models.normalization import IMAGENET_MEAN, IMAGENET_STD

INPUTS = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(7))
# A real checkpoint of other people's; it is no part of the repository.
THIRD_PARTY = Path(__file__).parents[2] / "shared" / "models" / "resnet20-12fca82f.th"


@pytest.fixture
def net() -> nn.Module:
    return resnet20().eval()


@pytest.fixture
def state(net: nn.Module) -> dict[str, Tensor]:
    return dict(net.state_dict())


def saved(content: Any, folder: Path, name: str = "net.pt") -> Path:
    torch.save(content, folder / name)
    return folder / name


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{key}": value for key, value in state.items()}


@pytest.mark.parametrize(
    "prefix", ["", "module.", "model.", "module.model.", "_orig_mod.module.", "net."]
)
@pytest.mark.parametrize("nest", ["", "state_dict", "model", "net", "model_state_dict"])
def test_wrappers(
    prefix: str, nest: str, net: nn.Module, state: dict[str, Tensor], tmp_path: Path
) -> None:
    content: Any = prefixed(state, prefix)
    if nest:
        content = {"epoch": 3, nest: content, "optimizer": {"state": {}, "lr": 0.1}}
    model = load_model("resnet20", weights=saved(content, tmp_path), mean=0, std=1)
    assert not model.training
    assert torch.equal(model(INPUTS), net(INPUTS))


@pytest.mark.parametrize(
    "names", [("mu", "sigma"), ("mean", "std"), ("normalize.mean", "normalize.std")]
)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_stored_normalization(
    names: tuple[str, str], prefix: str, net: nn.Module, state: dict[str, Tensor], tmp_path: Path
) -> None:
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.5, 0.6])
    inner = prefixed(state, "model.") if "." in names[0] else state
    stored = {names[0]: mean.view(1, 3, 1, 1), names[1]: std.view(1, 3, 1, 1)}
    path = saved(prefixed({**inner, **stored}, prefix), tmp_path)
    torch.testing.assert_close(
        load_model("resnet20", weights=path)(INPUTS),
        net((INPUTS - mean[:, None, None]) / std[:, None, None]),
    )
    given = load_model("resnet20", weights=path, mean=0.5, std=0.5)  # what is given goes first
    torch.testing.assert_close(given(INPUTS), net(2 * INPUTS - 1))


def test_default_normalization_is_of_the_architecture(state: dict[str, Tensor], tmp_path: Path) -> None:
    model = load_model("resnet20", weights=saved(state, tmp_path))
    assert isinstance(model, Normalized)
    torch.testing.assert_close(model.mean.flatten(), torch.tensor([0.4914, 0.4822, 0.4465]))
    torch.testing.assert_close(model.std.flatten(), torch.tensor([0.2471, 0.2435, 0.2616]))


def test_counters_of_batches_may_be_absent(
    net: nn.Module, state: dict[str, Tensor], tmp_path: Path
) -> None:
    old = {key: value for key, value in state.items() if "num_batches_tracked" not in key}
    assert len(old) < len(state)
    model = load_model("resnet20", weights=saved(old, tmp_path), mean=0, std=1)
    assert torch.equal(model(INPUTS), net(INPUTS))
    counters = [buffer for name, buffer in model.named_buffers() if "num_batches_tracked" in name]
    assert counters
    assert not any(counters)


# Checkpoints that say what they are, as `dent train` writes them


@pytest.fixture
def trained() -> dict[str, Any]:
    model = build("resnet20", classes=4, mean=0.5, std=0.25)
    return {
        "architecture": "resnet20",
        "classes": 4,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.25, 0.25, 0.25],
        "model": model.state_dict(),
        "epoch": 7,
    }


@pytest.mark.parametrize("wrapped", [True, False])
def test_own_checkpoint_needs_no_architecture(
    trained: dict[str, Any], wrapped: bool, tmp_path: Path
) -> None:
    plain = {key.removeprefix("model."): value for key, value in trained["model"].items()}
    expected = resnet20(4).eval()
    expected.load_state_dict(plain)
    path = saved(trained if wrapped else {**trained, "model": plain}, tmp_path, "run.ckpt")
    for model in (load_model(path), load_model(str(path)), load_model("resnet20", weights=path)):
        torch.testing.assert_close(model(INPUTS), expected((INPUTS - 0.5) / 0.25))


def test_own_checkpoint_contradicted(trained: dict[str, Any], tmp_path: Path) -> None:
    path = saved(trained, tmp_path)
    with pytest.raises(ValueError, match=r"net\.pt is a checkpoint of resnet20, not of resnet32"):
        load_model("resnet32", weights=path)
    with pytest.raises(ValueError, match="checkpoint of 4 classes, not of 10"):
        load_model(path, classes=10)
    with pytest.raises(ValueError, match="brings its own weights"):
        load_model(path, weights=path)
    with pytest.raises(ValueError, match="unknown architecture 'resnet21'"):
        load_model(saved({**trained, "architecture": "resnet21"}, tmp_path))


def test_a_checkpoint_does_not_choose_the_code(
    trained: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net.py").write_text(
        "from dent.models import resnet20\ndef make(): return resnet20(4)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = saved({**trained, "architecture": "own_net:make", "mean": None, "std": None}, tmp_path)
    with pytest.raises(
        ValueError, match=r"checkpoint of own_net:make: load_model\('own_net:make', weights="
    ):
        load_model(path)
    assert "own_net" not in sys.modules
    assert load_model("own_net:make", weights=path)(INPUTS).shape == (2, 4)


def test_foreign_checkpoint_needs_an_architecture(state: dict[str, Tensor], tmp_path: Path) -> None:
    path = saved(state, tmp_path, "without-an-ending")
    with pytest.raises(
        ValueError, match=r"does not say its architecture; give it: load_model\('resnet20', weights="
    ):
        load_model(path)


# What does not fit


def test_faults_are_all_named(state: dict[str, Tensor], tmp_path: Path) -> None:
    state["head.bias"] = state.pop("linear.bias")
    state["conv1.weight"] = torch.ones(16, 3, 5, 5)
    with pytest.raises(ValueError, match="does not fit") as caught:
        load_model("resnet20", weights=saved(state, tmp_path))
    message = str(caught.value)
    assert "net.pt does not fit CifarResNet" in message
    assert "missing (1): linear.bias" in message
    assert "unexpected (1): head.bias" in message
    assert "of another shape (1): conv1.weight (expected (16, 3, 3, 3), got (16, 3, 5, 5))" in message


def test_many_faults_are_counted(tmp_path: Path) -> None:
    larger, smaller = resnet20().state_dict(), CifarResNet(1, projection=False).state_dict()
    absent = [key for key in larger if key not in smaller and "num_batches_tracked" not in key]
    with pytest.raises(ValueError, match=rf"missing \({len(absent)}\): .* and {len(absent) - 8} more"):
        load_model("resnet20", weights=saved(smaller, tmp_path))
    with pytest.raises(
        ValueError, match=r"does not fit WideResNet; missing .*unexpected .*architecture"
    ):
        load_model("wrn-28-4", weights=saved(larger, tmp_path))


def test_another_number_of_classes(state: dict[str, Tensor], tmp_path: Path) -> None:
    path = saved(state, tmp_path)
    with pytest.raises(
        ValueError, match=r"linear.weight \(expected \(100, 64\), got \(10, 64\)\).*classes"
    ):
        load_model("resnet20", weights=path, classes=100)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float, state: dict[str, Tensor], tmp_path: Path) -> None:
    state["layer2.0.bn1.running_var"][3] = value
    with pytest.raises(ValueError, match=r"not finite, in layer2\.0\.bn1\.running_var"):
        load_model("resnet20", weights=saved(state, tmp_path))


@pytest.mark.parametrize(
    "content", [{}, {"epoch": 3}, [torch.ones(2)], torch.ones(2), {3: torch.ones(2)}, "text"]
)
def test_what_is_no_state_dict(content: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"net\.pt holds no state dict: expected names with tensors"):
        load_model("resnet20", weights=saved(content, tmp_path))


# Files that are no checkpoints


class Code:
    """Unpickling this makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("how", ["torch", "legacy", "pickle"])
def test_code_is_not_run(how: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    path, made = tmp_path / "net.pt", tmp_path / "made"
    content = {"state_dict": state, "extra": Code(made)}
    if how == "pickle":
        path.write_bytes(pickle.dumps(content["extra"], protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "torch")
    with pytest.raises(
        ValueError, match=r"net\.pt holds more than tensors: '\w+\.mkdir'.*nothing of it was loaded"
    ):
        load_model("resnet20", weights=path)
    assert not made.exists()
    pickle.loads(pickle.dumps(Code(made)))  # the proof that it would have
    assert made.exists()


def test_a_pickled_model_is_refused(net: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds more than tensors: 'dent.models.resnet.CifarResNet'"):
        load_model("resnet20", weights=saved(net, tmp_path))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9])
@pytest.mark.parametrize("zipped", [True, False])
def test_cut_short(share: float, zipped: bool, state: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"net\.pt is no checkpoint that can be read: cut short"):
        load_model("resnet20", weights=path)


@pytest.mark.parametrize("text", ["hello, this is text\n", "<!DOCTYPE html><html>", "{}", "\0\0\0\0"])
def test_other_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_text(text)
    with pytest.raises(ValueError, match=r"net\.pt is no checkpoint that can be read"):
        load_model("resnet20", weights=tmp_path / "net.pt")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.pt, but there is no such file"):
        load_model("resnet20", weights=tmp_path / "absent.pt")
    with pytest.raises(ValueError, match=r"absent\.pt, but there is no such file"):
        load_model(tmp_path / "absent.pt")
    with pytest.raises(ValueError, match="but it is not a file"):
        load_model("resnet20", weights=tmp_path)


@pytest.mark.skipif(not THIRD_PARTY.is_file(), reason=f"no {THIRD_PARTY.name} beside the repository")
def test_a_third_party_checkpoint() -> None:
    model = load_model("resnet20", weights=THIRD_PARTY, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    stored = read_checkpoint(THIRD_PARTY)["state_dict"]
    loaded = {key.replace("model.", "module."): value for key, value in model.state_dict().items()}
    assert {key for key in loaded if "num_batches_tracked" not in key} == set(stored)
    assert all(torch.equal(loaded[key], value) for key, value in stored.items())
