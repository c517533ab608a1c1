"""`hf:owner/name`: models of the Hugging Face Hub, played by a server on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import dent
from dent.models import Normalized, build, external, find_class_names

constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hf")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Answers for files as the Hub does; `files` has them by owner/name and file name."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[tuple[str, str], bytes] = {}
        self.asked: list[str] = []

    def publish(self, repository: str, **files: bytes) -> None:
        for name, content in files.items():
            self.files[repository, name.replace("__", ".")] = content


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        self.server.asked.append(self.path)
        owner, name, _, revision, file = self.path.strip("/").split("/", 4)
        known = {repository for repository, _ in self.server.files}
        content = self.server.files.get((f"{owner}/{name}", file))
        if f"{owner}/{name}" not in known:
            return self._send(404, {"X-Error-Code": "RepoNotFound"}, b"")
        if revision not in ("main", "v1"):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"")
        if content is None:
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b"")
        digest = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(content))}
        return self._send(200, headers, content if has_body else b"")

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # They are read from HF_ENDPOINT and HF_HOME when the package is imported.
    endpoint = f"http://127.0.0.1:{server.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()


def save_tensors(state: dict[str, torch.Tensor]) -> bytes:
    content: bytes = pytest.importorskip("safetensors.torch").save(state)
    return content


def save_pickle(tmp_path: Path, content: object) -> bytes:
    torch.save(content, tmp_path / "content.pt")
    return (tmp_path / "content.pt").read_bytes()


def save_json(**config: object) -> bytes:
    return json.dumps(config).encode()


def test_a_model_of_dent(hub: Hub) -> None:
    model, inputs = build("resnet20", classes=4, mean=0.5, std=0.25).eval(), torch.rand(2, 3, 32, 32)
    labels = ["a", "b", "c", "d"]
    config = save_json(
        library_name="dent",
        architecture="resnet20",
        classes=4,
        mean=[0.5] * 3,
        std=[0.25] * 3,
        labels=labels,
    )
    hub.publish(
        "me/robust", config__json=config, model__safetensors=save_tensors(model.model.state_dict())
    )
    loaded = dent.load_model("hf:me/robust")
    assert not loaded.training
    torch.testing.assert_close(loaded(inputs), model(inputs))
    assert find_class_names(loaded) == tuple(labels)
    dent.load_model("hf:me/robust@v1")
    assert any("/v1/" in path for path in hub.asked)
    with pytest.raises(
        ValueError, match="hf:me/robust was trained with mean=.*got mean=0.4 and std=0.25"
    ):
        dent.load_model("hf:me/robust", mean=0.4, std=0.25)
    with pytest.raises(ValueError, match="brings its own weights and classes"):
        dent.load_model("hf:me/robust", weights="random", classes=3)
    assert dent.defend(loaded, "dent+solo", steps=1)(inputs).shape == (2, 4)


def test_what_was_loaded_once_needs_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    state = build("resnet20").model.state_dict()
    config = save_json(library_name="dent", architecture="resnet20")
    hub.publish("me/robust", config__json=config, model__safetensors=save_tensors(state))
    dent.load_model("hf:me/robust")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    dent.load_model("hf:me/robust")
    with pytest.raises(ValueError, match="hf:me/other has no config.json and no checkpoint.pt: "):
        dent.load_model("hf:me/other")


def test_a_checkpoint_of_dent_train(hub: Hub, tmp_path: Path) -> None:
    model = build("resnet20", classes=4).eval()
    about = {"architecture": "resnet20", "classes": 4, "mean": [0.5] * 3, "std": [0.25] * 3}
    content = save_pickle(tmp_path, about | {"model": model.state_dict()})
    hub.publish("me/trained", checkpoint__pt=content)
    inputs = torch.rand(2, 3, 32, 32)
    expected = Normalized(model.model, 0.5, 0.25)(inputs)
    torch.testing.assert_close(dent.load_model("hf:me/trained")(inputs), expected)
    with pytest.raises(ValueError, match="hf:me/trained was trained with"):
        dent.load_model("hf:me/trained", mean=0, std=1)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def test_code_in_a_file_is_never_run(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = save_json(library_name="dent", architecture="resnet20")
    hub.publish("me/bad", config__json=config, pytorch_model__bin=save_pickle(tmp_path, Harmful()))
    hub.publish("me/worse", checkpoint__pt=save_pickle(tmp_path, {"model": Harmful()}))
    for name in ("hf:me/bad", "hf:me/worse"):
        with pytest.raises(ValueError, match=f"{name} holds more than tensors: .*mkdir"):
            dent.load_model(name)
    assert not (tmp_path / "harmed").exists()


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Play timm, which makes a linear model; keep what it was asked for."""
    calls: list[Any] = []

    def create_model(name: str, *, pretrained: bool, num_classes: int = 2, **options: Any) -> nn.Module:
        calls.append((name, pretrained, num_classes, options))
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, num_classes))
        net.pretrained_cfg = {"mean": (0.485,) * 3, "std": (0.229,) * 3}  # type: ignore[assignment]
        return net

    module: Any = ModuleType("timm")
    module.create_model, module.is_model = create_model, lambda name: name == "tiny"
    module.list_models = lambda: ["tiny"]
    monkeypatch.setattr(external, "import_module", {"timm": module}.__getitem__)
    return calls


@pytest.mark.parametrize("is_old", [False, True])
def test_a_model_of_timm(is_old: bool, hub: Hub, timm: list[Any], tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    inputs, known = torch.rand(2, 3, 2, 2), {"mean": [0.5] * 3, "std": [0.25] * 3}
    config = known if is_old else {"pretrained_cfg": known, "model_args": {"width": 7}}
    hub.publish(
        "timm/tiny.in1k",
        config__json=save_json(architecture="tiny", num_classes=3, **config),
        pytorch_model__bin=save_pickle(tmp_path, net.state_dict()),
    )
    loaded = dent.load_model("hf:timm/tiny.in1k")
    torch.testing.assert_close(loaded(inputs), net((inputs - 0.5) / 0.25))
    assert timm == [("tiny", False, 3, {} if is_old else {"width": 7})]  # timm itself loads nothing
    dent.load_model("hf:timm/tiny.in1k", mean=0.5, std=0.25)
    with pytest.raises(ValueError, match="hf:timm/tiny.in1k was trained with mean=.0.5, 0.5, 0.5."):
        dent.load_model("hf:timm/tiny.in1k", mean=0.485, std=0.229)


def test_a_repository_may_not_have_timm_load_other_files(hub: Hub, timm: list[Any]) -> None:
    state = save_tensors({"1.weight": torch.zeros(2, 12), "1.bias": torch.zeros(2)})
    hub.publish(
        "me/sly",
        config__json=save_json(architecture="tiny", model_args={"checkpoint_path": "/tmp/a.pt"}),
        model__safetensors=state,
    )
    with pytest.raises(ValueError, match="may not say checkpoint_path"):
        dent.load_model("hf:me/sly")
    config = save_json(architecture="hf-hub:me/other")
    hub.publish("me/chain", config__json=config, model__safetensors=state)
    with pytest.raises(ValueError, match="may not say /, :"):
        dent.load_model("hf:me/chain")
    assert not timm


def test_what_cannot_be_loaded_says_why(hub: Hub) -> None:
    hub.publish("me/bert", config__json=save_json(architectures=["BertModel"], model_type="bert"))
    with pytest.raises(ValueError, match="names no `architecture`.*package.module:function"):
        dent.load_model("hf:me/bert")
    hub.publish("me/text", config__json=b"not JSON")
    with pytest.raises(ValueError, match="config.json of hf:me/text is no JSON"):
        dent.load_model("hf:me/text")
    hub.publish("me/empty", README__md=b"")
    with pytest.raises(ValueError, match="hf:me/empty has no config.json and no checkpoint.pt"):
        dent.load_model("hf:me/empty")
    config = save_json(library_name="dent", architecture="resnet20")
    hub.publish("me/light", config__json=config)
    with pytest.raises(ValueError, match="has no model.safetensors and no pytorch_model.bin"):
        dent.load_model("hf:me/light")
    hub.publish("me/cut", config__json=config, model__safetensors=b"12345678901")
    with pytest.raises(ValueError, match="hf:me/cut is no safetensors file"):
        dent.load_model("hf:me/cut")
    with pytest.raises(ValueError, match="hf:me/nothing cannot be read: RepositoryNotFoundError"):
        dent.load_model("hf:me/nothing")
    with pytest.raises(ValueError, match="hf:me/light@v9 cannot be read: RevisionNotFoundError"):
        dent.load_model("hf:me/light@v9")
    with pytest.raises(ValueError, match="hf:a b/c cannot be read: HFValidationError"):
        dent.load_model("hf:a b/c")


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"hf:me/robust needs: pip install 'dent-defense\[hf\]'"):
        dent.load_model("hf:me/robust")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(ImportError, match=r"needs safetensors: pip install 'dent-defense\[hf\]'"):
        dent.load_model("resnet20", weights=tmp_path / "a.safetensors")
