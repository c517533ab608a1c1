"""FPA and GMSA: the models that they attack in each round, and the batch that they return."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_adaptive import Recorder, count_broken, make_centered, make_dent

from dent.attacks import adaptive, apgd
from dent.attacks.adaptive.gmsa import Average, Minimum
from dent.attacks.losses import margin
from dent.attacks.search import AttackedModel


def test_an_average_of_one_model_is_that_model() -> None:
    defense, inputs, labels = make_dent(statistics="test")
    state = defense.adapt(inputs, steps=0)
    settings: dict[str, Any] = {"eps": 0.03, "steps": 6, "loss": "margin", "seed": 5}
    alone = apgd(partial(defense.predict, state=state), inputs, labels, joint=True, **settings)
    for over in ("last", "average", "minimum"):
        recorder = Recorder(defense)
        adaptive.gmsa(recorder, inputs, labels, over=over, rounds=1, **settings)
        natural, attacked = recorder.submitted
        assert torch.equal(natural, inputs)
        torch.testing.assert_close(attacked, alone.inputs)


def test_the_gradients_of_averages_and_minima() -> None:
    defense, inputs, labels = make_dent(statistics="test", lr=0.3)
    states = [defense.adapt(torch.rand_like(inputs), steps=steps) for steps in (0, 2, 4)]
    loss = partial(margin, labels=labels)
    points = inputs.clone().requires_grad_()
    losses = torch.stack([loss(defense.predict(points, state)) for state in states])
    lowest, where = losses.min(0)
    assert len(where.unique()) > 1
    for view, expected in (
        (Average(defense, states, loss), losses.mean(0)),
        (Minimum(defense, states, loss), lowest),
    ):
        answer = AttackedModel(defense, through=view, joint=True).differentiate(inputs, loss)
        (gradient,) = torch.autograd.grad(expected.sum(), points, retain_graph=True)
        torch.testing.assert_close(answer.values, expected.detach())
        torch.testing.assert_close(
            answer.gradient / answer.gradient.norm(), gradient / gradient.norm(), rtol=1e-5, atol=1e-9
        )


@pytest.mark.parametrize("over", ["last", "average", "minimum"])
def test_every_round_brings_a_model_and_the_best_batch_is_kept_whole(over: str) -> None:
    defense, inputs, labels = make_dent(statistics="test", lr=0.1)
    recorder = Recorder(defense)
    steps, rounds = 3, 4
    result = adaptive.gmsa(
        recorder, inputs, labels, over=over, rounds=rounds, steps=steps, eps=0.015, seed=0
    )
    natural, *attacked = recorder.submitted
    assert torch.equal(natural, inputs)
    assert len(attacked) == rounds
    # It adapts to the natural inputs (without updates), then to the batch of each round but the last.
    for seen, batch in zip(recorder.adapted, [inputs, *attacked[:-1]], strict=True):
        assert torch.equal(seen, batch)
    states = [id(state) for _, state in recorder.predicted]
    assert len(set(states)) == rounds
    if over == "minimum":  # all are asked, then those that are the lowest for some inputs
        asked = (steps + 1) * sum(range(1, rounds + 1))
        assert asked < len(states) <= 2 * asked
    else:
        models = [1 if over == "last" else number for number in range(1, rounds + 1)]
        assert len(states) == (steps + 1) * sum(models)
        firsts = [sum(models[:number]) * (steps + 1) for number in range(rounds)]
        sets = [set(states[a:b]) for a, b in zip(firsts, [*firsts[1:], len(states)], strict=True)]
        assert [len(one) for one in sets] == models
        if over == "average":
            assert all(before < after for before, after in pairwise(sets))
    assert result.queries == len(inputs) * (len(states) + rounds + 1)
    counts = [count_broken(defense, batch, labels) for batch in recorder.submitted]
    assert int(result.success.sum()) == max(counts) > counts[0]
    assert torch.equal(result.inputs, recorder.submitted[counts.index(max(counts))])


def test_gmsa_returns_to_the_natural_batch_if_nothing_is_stronger() -> None:
    defense, inputs, labels = make_centered()
    result = adaptive.gmsa_avg(defense, inputs, labels, eps=0.0, rounds=2, steps=2)
    assert torch.equal(result.inputs, inputs)
    assert not result.success.any()
