"""Every adaptive attack returns the defense's own answer to a batch in the ball."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from test_adaptive import make_centered, make_dent
from torch import Tensor

import dent
from dent.attacks import AttackResult, adaptive, pgd
from dent.attacks.norms import lengths

ATTACKS: dict[str, Any] = {
    "unrolled": adaptive.unrolled,
    "averaged": partial(adaptive.averaged, updates=3),
    "short": partial(adaptive.short, updates=1),
    "lazy": partial(adaptive.lazy, every=3),
    "by PGD": partial(adaptive.unrolled, attack=pgd),
    "towards classes": partial(adaptive.unrolled, attack=dent.attacks.apgd_targeted),
    "fpa": partial(adaptive.fpa, rounds=2),
    "gmsa-avg": partial(adaptive.gmsa_avg, rounds=2, restarts=2),
    "gmsa-min": partial(adaptive.gmsa_min, rounds=2, targets=1),
    "sharply averaged": partial(adaptive.averaged, updates=3, sharpness=-2),
    "denying most updates": partial(adaptive.denying_most_updates, updates=1),
    "trajectory": partial(adaptive.trajectory, updates=3, every=2),
}


def of_static(
    attack: Any, static: Any, defense: Any, inputs: Tensor, labels: Tensor, **rest: Any
) -> Any:
    return attack(defense, static, inputs, labels, **rest)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("make", [make_centered, make_dent])
def test_results_are_the_defense_s_own_and_lie_in_the_ball(make: Any, norm: str) -> None:
    defense, inputs, labels = make()
    mask, eps = torch.arange(len(inputs)) % 3 != 1, {"linf": 0.05, "l2": 0.2, "l1": 0.8}[norm]

    def static(points: Tensor) -> Tensor:
        return defense.predict(points, defense.adapt(points, steps=0))  # type: ignore[no-any-return]

    attacks = ATTACKS | {
        "denying updates": partial(of_static, adaptive.denying_updates, static),
        "high confidence": partial(of_static, adaptive.high_confidence, static),
        "balanced": partial(of_static, adaptive.balanced, static, every=2, rounds=2),
        "chained": partial(of_static, adaptive.chained, static, every=2, rounds=2),
    }
    for name, attack in attacks.items():
        result: AttackResult = attack(
            defense, inputs, labels, eps=eps, norm=norm, steps=4, mask=mask, seed=3
        )
        torch.testing.assert_close(result.logits, defense(result.inputs), msg=name)
        assert torch.equal(result.success, result.logits.argmax(1) != labels)
        assert torch.equal(result.inputs[~mask], inputs[~mask])
        assert not torch.equal(result.inputs, inputs), name
        assert (lengths(result.inputs - inputs, norm) <= eps * (1 + 1e-6) + 1e-9).all()
        assert result.inputs.min() >= 0
        assert result.inputs.max() <= 1
        again = attack(defense, inputs, labels, eps=eps, norm=norm, steps=4, mask=mask, seed=3)
        assert torch.equal(again.inputs, result.inputs)


def test_wrong_settings_are_told() -> None:
    defense, inputs, labels = make_centered()
    for attack, message in (
        (partial(adaptive.lazy, every=0), "expected every >= 1, got 0"),
        (partial(adaptive.short, updates=-1), "expected updates >= 0, got -1"),
        (partial(adaptive.averaged, updates=-2), "expected updates >= 0, got -2"),
        (partial(adaptive.unrolled, steps=-1), "expected steps >= 0, got -1"),
        (partial(adaptive.gmsa, rounds=0), "expected rounds >= 1, got 0"),
        (partial(adaptive.gmsa, over="median"), "unknown combination of models 'median'"),
        (partial(adaptive.gmsa_min, targets=-1), "expected targets >= 1, got -1"),
        (partial(adaptive.mixing, share=0), r"expected a share in \(0, 1\], got 0"),
        (partial(adaptive.one_among, pool=inputs), "expected 0 to 7 companions"),
        (partial(adaptive.one_among, pool=inputs[:, :2]), "expected a pool of inputs"),
        (partial(adaptive.sorted_batches, batch_size=0), "expected batch_size >= 1, got 0"),
        (
            partial(adaptive.poisoning, malicious=torch.zeros(8, dtype=torch.bool)),
            "got 0 malicious of 8",
        ),
        (partial(of_static, adaptive.offline, defense, attacks=()), "expected one attack or more"),
        (partial(of_static, adaptive.offline, defense, attacks=("apgd",)), "did you mean 'apgd-t'"),
        (partial(of_static, adaptive.high_confidence, defense, targets=4), "at most 3 targets"),
    ):
        with pytest.raises(ValueError, match=message):
            attack(defense, inputs, labels, eps=0.1)
    with pytest.raises(ValueError, match="expected labels from 0 to 3"):
        adaptive.fpa(defense, inputs, labels + 4, eps=0.1)
    with pytest.raises(ValueError, match="expected integer labels"):
        adaptive.fpa(defense, inputs, labels.double(), eps=0.1)
