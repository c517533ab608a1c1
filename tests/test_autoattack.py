"""AutoAttack: its attacks together, its findings, and the reference behind the same call."""

from __future__ import annotations

import builtins
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dent
from dent.attacks import SuiteResult, apgd, autoattack
from dent.attacks.autoattack import VERSIONS, select_attacks
from dent.attacks.findings import detect_optimization
from dent.attacks.norms import lengths
from dent.attacks.search import AttackedModel

QUICK: dict[str, Any] = {"steps": 8, "queries": 30}


@pytest.fixture(scope="module")
def task() -> tuple[nn.Module, Tensor, Tensor]:
    net = dent.load_model("resnet20-at")
    inputs, labels = dent.load_data("cifar10", n=16)
    return net, inputs, labels


def names(run: SuiteResult) -> list[str]:
    return [finding.name for finding in run.findings]


def test_each_attack_gets_the_inputs_that_stand(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, inputs, labels = task
    before = copy.deepcopy(net.state_dict())
    run = autoattack(net, inputs, labels, eps=8 / 255, **QUICK)
    assert list(run.attacks) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    broken = torch.stack(list(run.attacks.values()))
    assert (broken.sum(0) <= 1).all()  # each input by at most one attack
    natural = net(inputs).argmax(1) != labels
    assert torch.equal(run.broken, broken.any(0) | natural)
    assert torch.equal(run.success, run.broken)
    torch.testing.assert_close(net(run.inputs), run.logits)
    assert (lengths(run.inputs - inputs, "linf") <= 8 / 255 + 1e-6).all()
    assert 0 < int(run.broken.sum()) < 16
    # Inputs that stand end at a point of high loss, not at the natural image.
    assert (lengths(run.inputs - inputs, "linf").flatten()[~run.broken] > 4 / 255).all()
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert not run.findings


def test_no_weaker_than_its_first_attack(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, inputs, labels = task
    run = autoattack(net, inputs, labels, eps=8 / 255, **QUICK)
    alone = apgd(net, inputs, labels, eps=8 / 255, steps=8)
    assert (run.broken | ~alone.success).all()


def test_the_batch_size_bounds_every_call(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, inputs, labels = task
    asked = []

    def watched(points: Tensor) -> Tensor:
        asked.append(len(points))
        return net(points)  # type: ignore[no-any-return]

    whole = autoattack(net, inputs, labels, eps=8 / 255, attacks=["apgd-ce"], **QUICK)
    parts = autoattack(watched, inputs, labels, eps=8 / 255, attacks=["apgd-ce"], batch_size=5, **QUICK)
    assert max(asked) == 5
    assert int((whole.broken != parts.broken).sum()) <= 1  # the starts differ
    again = autoattack(net, inputs, labels, eps=8 / 255, attacks=["apgd-ce"], batch_size=5, **QUICK)
    assert torch.equal(parts.broken, again.broken)


def test_a_defense_that_depends_on_its_batch_is_attacked_as_one(
    task: tuple[nn.Module, Tensor, Tensor],
) -> None:
    net, inputs, labels = task
    defended = dent.defend(net, "dent", statistics="test", steps=1)
    sizes = set()

    class Watched:
        independent = defended.independent

        def __call__(self, points: Tensor) -> Tensor:
            sizes.add(len(points))
            return defended(points)  # type: ignore[no-any-return]

    run = autoattack(Watched(), inputs, labels, eps=8 / 255, attacks=["apgd-ce", "square"], **QUICK)
    assert sizes == {16}
    torch.testing.assert_close(defended(run.inputs), run.logits)
    assert torch.equal(run.success, defended(run.inputs).argmax(1) != labels)
    assert int(run.success.sum()) <= int(
        run.broken.sum()
    )  # the worst case takes each input's own worst attack
    assert "optimization inside" in names(run)


def test_the_versions_are_those_of_autoattack() -> None:
    assert list(select_attacks("plus", "linf")) == [
        "apgd-ce",
        "apgd-dlr",
        "fab",
        "square",
        "apgd-t",
        "fab-t",
    ]
    assert (
        select_attacks("plus", "linf")["apgd-dlr"]
        == select_attacks("plus", "linf")["fab"]
        == {"restarts": 5}
    )
    assert select_attacks("rand", "l2") == {"apgd-ce": {"draws": 20}, "apgd-dlr": {"draws": 20}}
    assert select_attacks("standard", "l1") == {
        "apgd-ce": {"restarts": 5},
        "apgd-t": {"targets": 5},
        "fab-t": {},
        "square": {},
    }
    assert select_attacks("standard", "l2", ["square"]) == {"square": {}}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_every_version_in_every_norm(version: str, norm: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
    inputs = torch.rand(6, 3, 4, 4)
    eps = {"linf": 0.3, "l2": 2.0, "l1": 12.0}[norm]
    run = autoattack(
        net, inputs, net(inputs).argmax(1), eps=eps, norm=norm, version=version, steps=10, queries=20
    )
    assert run.broken.all()
    assert (lengths(run.inputs - inputs, norm) <= eps * (1 + 1e-5)).all()


# Findings


def test_a_random_model_is_noticed_and_attacked_by_its_mean() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))

    def noisy(points: Tensor) -> Tensor:
        return net(points + 0.05 * torch.randn_like(points))  # type: ignore[no-any-return]

    inputs = torch.rand(6, 3, 4, 4)
    labels = net(inputs).argmax(1)
    run = autoattack(noisy, inputs, labels, eps=0.05, attacks=["apgd-ce"], **QUICK)
    assert names(run) == ["randomized"]
    random = autoattack(noisy, inputs, labels, eps=0.05, version="rand", steps=5)
    assert names(random) == []
    assert random.gradients >= 6 * 20  # twenty draws per step


def test_draws_go_into_one_call_where_the_model_draws_for_each_input() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
    inputs = torch.rand(3, 3, 4, 4)
    labels = net(inputs).argmax(1)
    for noise, largest in (((1, 3, 4, 4), 3), ((0, 3, 4, 4), 3 * 7)):
        sizes: set[int] = set()

        def noisy(points: Tensor, noise: Any = noise, sizes: set[int] = sizes) -> Tensor:
            sizes.add(len(points))
            drawn = torch.randn(
                (noise[0] or len(points), *noise[1:])
            )  # one draw for the batch, or one per input
            return net(points + 0.01 * drawn)  # type: ignore[no-any-return]

        result = apgd(noisy, inputs, labels, eps=0.01, steps=3, draws=7)
        assert max(sizes) == largest
        assert result.gradients == 3 * 7 * 4


def test_the_gradient_of_draws_is_their_mean() -> None:
    scale = iter(torch.arange(1.0, 100.0))

    def model(points: Tensor) -> Tensor:
        first = next(scale) * points.flatten(1).sum(1, keepdim=True)
        return torch.cat([first, torch.zeros_like(first)], 1)

    attacked = AttackedModel(model, draws=4, joint=True)
    points = torch.rand(2, 1, 2, 2)
    answer = attacked.differentiate(points, lambda logits: logits[:, 0])
    torch.testing.assert_close(answer.gradient, torch.full_like(points, 2.5))
    torch.testing.assert_close(answer.logits[:, 0], 2.5 * points.flatten(1).sum(1))
    torch.testing.assert_close(answer.values, answer.logits[:, 0])


def test_probabilities_are_noticed_and_their_logarithm_is_attacked(
    task: tuple[nn.Module, Tensor, Tensor],
) -> None:
    net, inputs, labels = task
    run = autoattack(
        lambda points: net(points).softmax(1), inputs, labels, eps=8 / 255, attacks=["apgd-ce"], **QUICK
    )
    plain = autoattack(net, inputs, labels, eps=8 / 255, attacks=["apgd-ce"], **QUICK)
    assert names(run) == ["probabilities"]
    assert torch.equal(run.broken, plain.broken)


def test_masked_gradients_are_noticed(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, inputs, labels = task
    right = net(inputs).argmax(1) == labels
    inputs, labels = inputs[right], labels[right]
    scaled = autoattack(
        lambda points: 100 * net(points), inputs, labels, eps=8 / 255, attacks=["apgd-ce"], **QUICK
    )
    assert names(scaled) == ["zero gradient"]
    assert scaled.findings[0].figures["ce"] > 0 == scaled.findings[0].figures["dlr"]

    def quantised(points: Tensor) -> Tensor:
        return net((points * 16).round() / 16)  # type: ignore[no-any-return]

    run = autoattack(
        quantised, inputs, labels, eps=24 / 255, attacks=["apgd-ce", "square"], steps=5, queries=200
    )
    assert names(run) == ["zero gradient", "square is stronger"]
    assert run.findings[0].figures["dlr"] == len(inputs)
    assert run.findings[1].figures["inputs"] == int(run.attacks["square"].sum()) > 0

    detached = autoattack(
        lambda points: net(points.detach()), inputs, labels, eps=8 / 255, attacks=["apgd-ce"], **QUICK
    )
    assert "zero gradient" in names(detached)


def test_optimization_inside_is_noticed_whatever_it_is_called() -> None:
    linear = nn.Linear(48, 4)

    def static(points: Tensor) -> Tensor:
        return linear(points.flatten(1))  # type: ignore[no-any-return]

    def dynamic(points: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = points.detach().requires_grad_()
            linear(leaf.flatten(1)).logsumexp(1).sum().backward(inputs=[leaf])
        assert leaf.grad is not None
        return linear((points + 0.01 * leaf.grad).flatten(1))  # type: ignore[no-any-return]

    inputs = torch.rand(3, 3, 4, 4)
    assert detect_optimization(static, inputs) is None
    seen = detect_optimization(dynamic, inputs)
    assert seen is not None
    assert seen.figures == {"backward passes": 1}


# The reference


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_reference_behind_the_same_call(task: tuple[nn.Module, Tensor, Tensor], norm: str) -> None:
    net, inputs, labels = task
    eps = 8 / 255 if norm == "linf" else 0.5
    settings: dict[str, Any] = {"eps": eps, "norm": norm, "attacks": ["apgd-ce", "square"], **QUICK}
    channels_last = inputs.contiguous(memory_format=torch.channels_last)
    theirs = autoattack(net, channels_last, labels, engine="reference", **settings)
    ours = autoattack(net, inputs, labels, **settings)
    assert int((ours.broken != theirs.broken).sum()) <= 1
    assert torch.equal(theirs.inputs[~theirs.broken], inputs[~theirs.broken])  # clean images
    assert theirs.queries > theirs.gradients > 0


def test_without_the_extra_its_name_is_told(
    task: tuple[nn.Module, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any) -> Any:
        if name == "pyautoattack":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", missing)
    net, inputs, labels = task
    with pytest.raises(ImportError, match=r"pip install 'dent-defense\[reference\]'"):
        autoattack(net, inputs, labels, eps=0.1, engine="reference")
