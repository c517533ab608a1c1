"""Every attack takes labels as lists and arrays, and eps as text: the results are the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cells import labeled, tiny

import dent
from dent import attacks
from dent.attacks import adaptive

NET = tiny()
DEFENDED = dent.defend(NET, "dent+", steps=1)
INPUTS, LABELS = labeled(NET, 4, wrong=1)
MASK = torch.tensor([True, False, False, True])
ATTACKS: dict[str, Callable[..., Any]] = {
    "pgd": partial(attacks.pgd, NET, INPUTS, steps=2),
    "apgd": partial(attacks.apgd, NET, INPUTS, steps=2),
    "apgd_targeted": partial(attacks.apgd_targeted, NET, INPUTS, steps=2),
    "fab": partial(attacks.fab, NET, INPUTS, steps=2),
    "fab_targeted": partial(attacks.fab_targeted, NET, INPUTS, steps=2),
    "square": partial(attacks.square, NET, INPUTS, queries=4),
    "autoattack": partial(attacks.autoattack, NET, INPUTS, steps=2, queries=4),
    "fpa": partial(adaptive.fpa, DEFENDED, INPUTS, steps=2, rounds=2),
    "gmsa": partial(adaptive.gmsa, DEFENDED, INPUTS, steps=2, rounds=2),
    "gmsa_avg": partial(adaptive.gmsa_avg, DEFENDED, INPUTS, steps=2, rounds=2),
    "gmsa_min": partial(adaptive.gmsa_min, DEFENDED, INPUTS, steps=2, rounds=2),
    "unrolled": partial(adaptive.unrolled, DEFENDED, INPUTS, steps=2),
    "averaged": partial(adaptive.averaged, DEFENDED, INPUTS, updates=1, steps=2),
    "short": partial(adaptive.short, DEFENDED, INPUTS, updates=0, steps=2),
    "lazy": partial(adaptive.lazy, DEFENDED, INPUTS, every=2, steps=2),
    "denying_updates": partial(adaptive.denying_updates, DEFENDED, NET, INPUTS, steps=2),
    "denying_most_updates": partial(
        adaptive.denying_most_updates, DEFENDED, INPUTS, updates=0, steps=2, attacks=["apgd-t"]
    ),
    "trajectory": partial(adaptive.trajectory, DEFENDED, INPUTS, updates=1, steps=2),
    "chained": partial(adaptive.chained, DEFENDED, NET, INPUTS, rounds=2, steps=2),
    "balanced": partial(adaptive.balanced, DEFENDED, NET, INPUTS, rounds=2, steps=2),
    "offline": partial(adaptive.offline, DEFENDED, NET, INPUTS, steps=2, attacks=["apgd-ce"]),
    "high_confidence": partial(adaptive.high_confidence, DEFENDED, NET, INPUTS, steps=2),
    "mixing": partial(adaptive.mixing, DEFENDED, INPUTS, share=0.5, steps=2),
    "one_among": partial(adaptive.one_among, DEFENDED, INPUTS, pool=INPUTS, companions=2, steps=2),
    "sorted_batches": partial(
        adaptive.sorted_batches, DEFENDED, INPUTS, batch_size=2, attack=attacks.apgd, steps=2
    ),
    "poisoning": partial(adaptive.poisoning, DEFENDED, INPUTS, malicious=MASK, steps=2),
}


def flatten(result: Any) -> Any:
    """The values of a result, of one attack or of several by name."""
    if isinstance(result, dict):
        return {name: flatten(one) for name, one in result.items()}
    return {name: value for name, value in vars(result).items() if name != "findings"}


def test_the_table_of_this_file_has_all_attacks() -> None:
    public = {name: getattr(room, name) for room in (attacks, adaptive) for name in room.__all__}
    functions = {name: one for name, one in public.items() if inspect.isfunction(one)}
    known = {name for name, one in functions.items() if "inputs" in inspect.signature(one).parameters}
    assert set(ATTACKS) == known


@pytest.mark.parametrize("name", ATTACKS)
def test_lists_arrays_and_texts_give_the_result_of_tensors_and_numbers(name: str) -> None:
    attack = ATTACKS[name]
    expected = flatten(attack(labels=LABELS, eps=8 / 255))
    array = LABELS.numpy()[::-1].astype(np.uint8)[::-1]  # no tensor can share this memory
    array.flags.writeable = False
    for labels, eps in ((LABELS.tolist(), "8/255"), (array, 8 / 255), (tuple(LABELS), " 8 / 255")):
        torch.testing.assert_close(flatten(attack(labels=labels, eps=eps)), expected, rtol=0, atol=0)


def test_labels_are_sorted_as_a_list_too() -> None:
    assert adaptive.sort_by_label([2, 0, 1], batch_size=2).tolist() == [1, 2, 0]


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eps": "8 of 255"}, "expected a number such as 0.5 or 8/255, got '8 of 255'"),
        ({"eps": "8/0"}, "expected a number such as 0.5 or 8/255, got '8/0'"),
        ({"eps": "-1/255"}, "expected eps >= 0"),
        ({"labels": [0, 1, 2]}, "expected a label for each of 4 inputs"),
        ({"labels": [0.0, 1.0, 2.0, 3.0]}, "expected integer labels"),
        ({"labels": ["cat", "dog", "cat", "dog"]}, "expected labels as integers.*got .'cat', 'dog'"),
        ({"labels": None}, "expected labels as integers, one for each input, got None"),
        ({"labels": [[0], [1], [2], [3]]}, "expected a label for each of 4 inputs"),
    ],
)
def test_wrong_labels_and_texts_get_the_usual_errors(name: str, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ATTACKS[name](**{"labels": LABELS, "eps": 0.1} | given)


@pytest.mark.parametrize("attack", [attacks.pgd, attacks.apgd, attacks.square, attacks.autoattack])
def test_an_empty_list_is_an_empty_batch(attack: Callable[..., Any]) -> None:
    assert attack(NET, INPUTS[:0], [], eps="0.1").success.tolist() == []
