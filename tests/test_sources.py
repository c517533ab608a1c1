"""Models of an evaluation: known by all that decides their answers, and never moved or changed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import small
from runs import SHORT, images, model
from torch import Tensor, nn
from torch.nn import functional as F

from dent.evaluation import Evaluation, evaluate, sources
from dent.evaluation.digests import digest_model
from dent.evaluation.sources import Sources, copy_to
from dent.models.normalization import Normalized, PerImageNormalized


class Plain(nn.Module):
    """A model with what users put into attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.scale: Any = 2.0
        self.shape = {"sizes": [1, 2], "names": {"a", "b", "c"}}
        self.shift: Any = torch.zeros(3)
        self.table = np.arange(4)
        self.act: Callable[[Tensor], Tensor] = F.relu
        self.clip = partial(torch.clamp, min=0)
        self.hidden = [nn.Linear(2, 2, bias=False)]
        with torch.no_grad():
            self.hidden[0].weight.fill_(1)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.net(inputs) * self.scale
        return logits


def change_weight(net: Plain) -> None:
    next(net.parameters()).data.flatten()[0] += 1e-6


def change_buffer(net: Plain) -> None:
    next(net.buffers()).data.flatten()[0] += 1e-6


def change_hidden(net: Plain) -> None:
    net.hidden[0].weight.data[0, 0] = 2


def change_eps(net: Plain) -> None:
    (norm,) = [one for one in net.modules() if isinstance(one, nn.BatchNorm2d)]
    norm.eps = 0.1


def change_class(net: Plain) -> None:
    (norm,) = [one for one in net.modules() if isinstance(one, nn.BatchNorm2d)]
    norm.__class__ = type("Other", (nn.BatchNorm2d,), {})


def change(name: str, value: Any) -> Callable[[Plain], None]:
    def change_attribute(net: Plain) -> None:
        setattr(net, name, value)

    return change_attribute


CHANGES: dict[str, Callable[[Plain], Any]] = {
    "a weight": change_weight,
    "a buffer": change_buffer,
    "a weight that is not registered": change_hidden,
    "eps of a layer": change_eps,
    "the class of a layer": change_class,
    "a number": change("scale", 2.5),
    "a type": change("scale", 2),
    "a nested number": change("shape", {"sizes": [1, 3], "names": {"a", "b", "c"}}),
    "a set": change("shape", {"sizes": [1, 2], "names": {"a", "b"}}),
    "a tensor that is no buffer": change("shift", torch.ones(3)),
    "its shape": change("shift", torch.zeros(3, 1)),
    "an array": change("table", np.arange(4)[::-1]),
    "a function": change("act", F.gelu),
    "an argument of a function": change("clip", partial(torch.clamp, min=1)),
    "another attribute": change("other", None),
    "a hook": lambda net: net.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_digest_knows_all_that_decides_an_answer(name: str) -> None:
    net = Plain().eval()
    before = digest_model(net)
    assert digest_model(Plain().eval()) == digest_model(deepcopy(net)) == before
    net(images(2)[0])
    assert digest_model(net) == before
    CHANGES[name](net)
    assert digest_model(net) != before


def test_a_digest_is_the_same_in_every_process() -> None:
    """Also where sets have another order."""
    script = "from test_sources import *; print(digest_model(Plain().eval()))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
            env={"PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"},
        ).stdout
        for seed in (0, 1)
    }
    assert digests == {f"{digest_model(Plain().eval())}\n"}


def test_normalization_is_part_of_a_model() -> None:
    """Its mean and std are in no state dict."""
    net = model()
    made = [net, Normalized(net, 0.5, 0.25), Normalized(net, 0.5, 0.2), Normalized(net, 0.4, 0.25)]
    made.append(PerImageNormalized(net))
    assert len({digest_model(one.eval()) for one in made}) == len(made)


def test_a_run_is_not_resumed_with_another_normalization(tmp_path: Path) -> None:
    asked: dict[str, Any] = SHORT | {"defenses": ["static"], "data": images(4), "out": tmp_path}
    evaluate({"net": Normalized(model(), 0.5, 0.25).eval()}, **asked)
    with pytest.raises(ValueError, match=r"holds another run: models_sha256.net is"):
        evaluate({"net": Normalized(model(), 0.5, 0.2).eval()}, **asked)


def test_a_worker_refuses_a_model_with_another_normalization() -> None:
    asked = Evaluation(models="net")
    first = Sources(asked, {"net": Normalized(model(), 0.5, 0.25).eval()})
    first.model("net")
    second = Sources(asked, {"net": Normalized(model(), 0.5, 0.2).eval()}, digests=first.digests)
    with pytest.raises(ValueError, match="the model net is not the one that the run began with"):
        second.model("net")


class Unmovable(nn.Module):
    """A model that must stay where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small(nn.BatchNorm2d(8))
        self.is_copy = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Unmovable:
        made = Unmovable()
        made.load_state_dict(self.state_dict())
        made.is_copy = True
        return made.train(self.training)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        assert self.is_copy, "the user's own model was moved"
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.net(inputs)
        return logits


def test_a_model_on_another_device_is_copied_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """For torch, cpu:0 is another device than cpu: what happens to a model on a GPU happens here."""
    net = Unmovable().eval()
    before = {name: (value.data_ptr(), value.clone()) for name, value in net.state_dict().items()}
    assert copy_to(net, torch.device("cpu")) is net
    copy = copy_to(net, torch.device("cpu", 0))
    assert isinstance(copy, Unmovable)
    assert copy.is_copy
    monkeypatch.setattr(sources, "find_device", lambda name: torch.device("cpu", 0))
    results = evaluate(net, ["static", "dent:steps=1"], data=images(4), steps=1, eps=0.01)
    assert results.complete
    after = net.state_dict()
    assert all(value[0] == after[name].data_ptr() for name, value in before.items())
    assert all(torch.equal(value[1], after[name]) for name, value in before.items())
    assert not net.is_copy
