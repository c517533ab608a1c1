"""The fused copy gives the model's answers, and the model is unchanged."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from nets import Shared, Viewing, randomized, small
from torch import Tensor, nn

import dent
from dent.attacks.fused import FusedModel, fuse_batch_norm
from dent.evaluation.defenses import Subject
from dent.evaluation.runners import find_faster_copy
from dent.models import build


def layers(model: object, kind: type[nn.Module]) -> int:
    net = model.net if isinstance(model, FusedModel) else model
    assert isinstance(net, nn.Module)
    return sum(isinstance(part, kind) for part in net.modules())


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "preact-resnet18", "preact-resnet18-bn"])
def test_the_same_answers_and_gradients(name: str) -> None:
    net = randomized(build(name))
    before = copy.deepcopy(net.state_dict())
    inputs = torch.rand(3, 3, 32, 32, dtype=torch.double)
    faster = fuse_batch_norm(net, inputs)
    assert isinstance(faster, FusedModel)
    expected = net(inputs)
    torch.testing.assert_close(faster(inputs), expected)
    inputs.requires_grad_()
    ours, theirs = (
        torch.autograd.grad(call(inputs).logsumexp(1).sum(), inputs)[0] for call in (faster, net)
    )
    torch.testing.assert_close(ours, theirs)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_the_shipped_model_has_no_normalization_left() -> None:
    net, (inputs, _) = dent.load_model("resnet20-at"), dent.load_data("cifar10", n=2)
    faster = fuse_batch_norm(net, inputs)
    assert layers(net, nn.BatchNorm2d) == 19
    assert layers(faster, nn.BatchNorm2d) == 0


@pytest.mark.parametrize("name", ["views", "crops", "hedge:steps=2", "energy:steps=2", "anti-adversary"])
def test_a_defense_that_works_on_inputs_is_searched_without_normalization(name: str) -> None:
    net, inputs = randomized(build("resnet20")), torch.rand(2, 3, 32, 32, dtype=torch.double)
    defended = dent.defend(net, name)
    faster = find_faster_copy(Subject(defended, net, defended, independent=True), inputs)
    assert (layers(net, nn.BatchNorm2d), layers(faster, nn.BatchNorm2d)) == (19, 0)
    inputs.requires_grad_()
    torch.testing.assert_close(faster(inputs), defended(inputs))
    ours, theirs = (
        torch.autograd.grad(call(inputs).logsumexp(1).sum(), inputs)[0] for call in (faster, defended)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["memo", "medbn", "dent+", "lame"])
def test_a_defense_that_needs_its_layers_is_searched_as_it_is(name: str) -> None:
    net, inputs = build("resnet20").eval(), torch.rand(2, 3, 32, 32)
    defended = dent.defend(net, name)
    subject = Subject(defended, net, defended, independent=name == "memo")
    assert find_faster_copy(subject, inputs) is defended


def test_a_layer_that_is_called_twice_is_not_fused() -> None:
    net, inputs = randomized(Shared()), torch.rand(3, 3, 8, 8, dtype=torch.double)
    faster = fuse_batch_norm(net, inputs)
    torch.testing.assert_close(faster(inputs), net(inputs))
    assert layers(faster, nn.BatchNorm2d) == layers(net, nn.BatchNorm2d)


class Branching(nn.Module):
    """The output of the convolution is used twice: fusing would change one of the uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.conv(inputs)
        total: Tensor = self.linear((self.norm(features) + features).mean((2, 3)))
        return total


def test_without_a_faster_copy_the_model_is_returned() -> None:
    inputs = torch.rand(3, 3, 8, 8, dtype=torch.double)
    branching = randomized(Branching())
    faster = fuse_batch_norm(branching, inputs)
    torch.testing.assert_close(faster(inputs), branching(inputs))
    assert layers(faster, nn.BatchNorm2d) == 1
    training = small(nn.BatchNorm2d(8)).double().train()
    assert fuse_batch_norm(training, inputs) is training
    function = lambda points: branching(points)  # noqa: E731
    assert fuse_batch_norm(function, inputs) is function


def test_a_model_that_flattens_by_view_keeps_its_layout() -> None:
    net, inputs = randomized(Viewing()), torch.rand(3, 3, 12, 12, dtype=torch.double)
    faster = fuse_batch_norm(net, inputs)
    torch.testing.assert_close(faster(inputs), net(inputs))
    assert layers(faster, nn.BatchNorm2d) == 0


class Activated(nn.Module):
    """Applies ReLU to its input, to its own parameter, or to features that it uses again."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.what == "points":
            inputs = F.relu(inputs)
        elif self.what == "parameter":
            F.relu(self.first.weight)
        features = self.first(inputs)
        activated = F.relu(features)
        if self.what == "needed":
            activated = activated + features
        answer: Tensor = self.last(activated.mean((2, 3)))
        return answer


@pytest.mark.parametrize("what", ["private", "points", "parameter", "needed"])
def test_relu_overwrites_only_tensors_that_nobody_needs(what: str) -> None:
    net = randomized(Activated(what))
    inputs = torch.rand(3, 3, 8, 8, dtype=torch.double) - 0.5
    before, faster = inputs.clone(), fuse_batch_norm(net, inputs)
    assert isinstance(faster, FusedModel)
    assert faster.overwrites == (what != "needed")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(faster(inputs), net(inputs))
    assert torch.equal(inputs, before)


def test_relu_overwrites_only_without_a_gradient() -> None:
    net, inputs = randomized(Activated("private")), torch.rand(3, 3, 8, 8, dtype=torch.double)
    faster = fuse_batch_norm(net, inputs)
    assert isinstance(faster, FusedModel)
    features = []
    faster.net.first.register_forward_hook(lambda *call: features.append(call[2]))  # type: ignore[union-attr]
    with torch.no_grad():
        faster(inputs)
    faster(inputs)
    assert [bool((kept < 0).any()) for kept in features] == [False, True]


def test_the_copy_leaves_the_number_of_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that start after a call have as many threads of torch as before."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    net, inputs = randomized(build("resnet20")), torch.rand(32, 3, 32, 32, dtype=torch.double)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fuse_batch_norm(net, inputs)(inputs)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
