"""Attack libraries that know nothing of dent run on a defended model as on any other.

Each attacks the static and the defended model with the same budget, stays in its ball, lowers the
accuracy of the defended one, and leaves the model as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dent

EPS = 0.1


@pytest.fixture(scope="module")
def task() -> tuple[nn.Module, Tensor, Tensor]:
    """Stripes of four orientations, and a network that has learned them."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(256) % 4
    rows, columns = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    waves = torch.stack([rows, columns, rows + columns, rows - columns]).mul(1.2).sin()
    noise = torch.randn(256, 3, 12, 12, generator=generator)
    inputs = (0.5 + 0.12 * waves[labels][:, None] + 0.12 * noise).clamp(0, 1)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3, stride=2),
        nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Linear(300, 4),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    net.zero_grad(set_to_none=True)
    return net.eval(), inputs[:32], labels[:32]


Attack = Callable[[nn.Module, Tensor, Tensor], Tensor]


def foolbox_pgd(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy's, about foolbox's imports
        import foolbox
    client = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    _, clipped, _ = foolbox.attacks.LinfPGD(rel_stepsize=0.25, steps=10)(
        client, inputs, labels, epsilons=EPS
    )
    return torch.as_tensor(clipped)


def torchattacks_apgd(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    import torchattacks

    return torch.as_tensor(torchattacks.APGD(model, norm="Linf", eps=EPS, steps=10)(inputs, labels))


def art_pgd(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    from art.attacks.evasion import ProjectedGradientDescentPyTorch
    from art.estimators.classification import PyTorchClassifier

    client = PyTorchClassifier(
        model,
        loss=nn.CrossEntropyLoss(),
        input_shape=(3, 12, 12),
        nb_classes=4,
        clip_values=(0.0, 1.0),
        device_type="cpu",
    )
    attack = ProjectedGradientDescentPyTorch(
        client, eps=EPS, eps_step=EPS / 4, max_iter=10, verbose=False
    )
    return torch.from_numpy(attack.generate(inputs.numpy(), np.asarray(labels)))


def autoattack(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    from pyautoattack import AutoAttack

    attack = AutoAttack(model, norm="Linf", eps=EPS, version="custom", attacks=["apgd-ce"], seed=0)
    adversarial, _ = attack.run_standard_evaluation(inputs, labels, batch_size=32)
    return torch.as_tensor(adversarial)


@pytest.mark.parametrize("attack", [foolbox_pgd, torchattacks_apgd, art_pgd, autoattack])
@pytest.mark.parametrize("preset", ["dent", "dent+"])
def test_client(attack: Attack, preset: str, task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, inputs, labels = task
    before = {name: value.clone() for name, value in net.state_dict().items()}
    defended = dent.defend(net, preset, steps=2)
    adversarial = attack(defended, inputs, labels).detach()
    assert adversarial.shape == inputs.shape
    assert (adversarial - inputs).abs().max() <= EPS + 1e-5
    natural = (defended(inputs).argmax(1) == labels).float().mean()
    robust = (defended(adversarial).argmax(1) == labels).float().mean()
    assert natural > 0.95
    assert robust < natural - 0.2
    assert not net.training
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
