"""The battle: what is recorded is what was asked and answered, and nothing is changed by it."""

from __future__ import annotations

import base64
import json
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import toys
from cells import EPS, INDEPENDENT, labeled, tiny
from numpy.typing import NDArray
from torch import Tensor, nn

import dent
from dent.defense import defend
from dent.evaluation.battle import (
    KINDS,
    RECORDED,
    adapt_and_predict,
    choose_telling,
    list_recordable,
    list_recordings,
    pool_images,
    record_battle,
)
from dent.evaluation.defenses import Subject

DEFENSES = [
    "dent:steps=2",
    "dent+:steps=2",
    "dent-nominal:steps=2,lr=0.01",
    "dent-nominal:steps=2,blur_per=sample,covariance=diagonal",
    INDEPENDENT,
    "norm",
    "blur",
]
STEPS = 4
ROUNDING = 6e-4  # relative, of four digits


def subject_of(net: nn.Module, defense: str) -> Subject:
    defended = defend(net, defense)
    return Subject(defended, net, defended, defended.settings.independent)


def battle(
    defense: str = "dent:steps=2",
    norm: str = "linf",
    seed: int = 0,
    attack: str = "apgd-ce",
    **settings: Any,
) -> tuple[Subject, Tensor, Tensor, dict[str, Any]]:
    """A recording of one attack, with what was attacked."""
    net = tiny()
    subject, (inputs, labels) = subject_of(net, defense), labeled(net, 6)
    asked_for: dict[str, Any] = {"eps": EPS.get(norm, 0.1), "norm": norm, "steps": STEPS, "seed": seed}
    return subject, inputs, labels, record(subject, inputs, labels, attack, **asked_for | settings)


def record(
    subject: Subject, inputs: Tensor, labels: Tensor, attack: str = "apgd-ce", **settings: Any
) -> dict[str, Any]:
    """The recording of one attack."""
    (found,) = record_battle(subject, inputs, labels, attacks=[attack], **settings)["recordings"]
    assert found["attack"] == attack
    recording: dict[str, Any] = found
    return recording


def asked(model: nn.Module, inputs: Tensor, labels: Tensor, norm: str = "linf") -> list[Tensor]:
    """The batches that APGD asks a model for: the natural one, and that of each step."""
    batches: list[Tensor] = []

    def model_watched(points: Tensor) -> Tensor:
        batches.append(points.detach().clone())
        answer: Tensor = model(points)
        return answer

    dent.attacks.apgd(
        model_watched, inputs, labels, eps=EPS[norm], norm=norm, steps=STEPS, joint=True, seed=0
    )
    natural, _start, *climbed, _score = batches
    return [natural, *climbed]


def decoded(text: str, found: dict[str, Any], kind: type) -> Tensor:
    """(C, H, W), as the page reads it: rows, pixels, channels."""
    values: NDArray[Any] = np.frombuffer(base64.b64decode(text), kind)
    height, width = found["size"]
    return torch.tensor(values.reshape(height, width, found["channels"]).copy()).permute(2, 0, 1)


def delta_of(frame: dict[str, Any], found: dict[str, Any]) -> Tensor:
    scale: float = frame["scale"]
    return decoded(frame["delta"], found, np.int8) * (scale / 127)


def entropy_of(logits: Tensor) -> Tensor:
    probabilities = logits.double().softmax(1)
    return -(probabilities * probabilities.log()).sum(1)


def models_of(subject: Subject) -> dict[str, nn.Module]:
    return {"static": subject.static, "defended": subject.defense}


# What was asked


@pytest.mark.parametrize(("defense", "norm"), [*product(DEFENSES, ["linf", "l2"])])
def test_frames_are_what_the_attack_asked_at_each_step(defense: str, norm: str) -> None:
    subject, inputs, labels, found = battle(defense, norm)
    assert found["steps"] == STEPS
    assert found["batch"] == len(inputs)
    for side, model in models_of(subject).items():
        expected = asked(model, inputs, labels, norm)
        for image in found["images"]:
            frames, place = image[side]["frames"], image["point"]
            for frame, batch in zip(frames, expected, strict=True):
                delta = (batch - inputs)[place]
                assert frame["scale"] == pytest.approx(float(delta.abs().max()), rel=ROUNDING)
                quantum = frame["scale"] * (0.5 / 127 + ROUNDING)
                assert torch.allclose(delta_of(frame, found), delta, rtol=0, atol=quantum + 1e-9)


@pytest.mark.parametrize(("side", "norm"), [*product(["static", "defended"], ["linf", "l2"])])
def test_frames_lie_in_the_ball_and_begin_with_the_natural_image(side: str, norm: str) -> None:
    _, inputs, labels, found = battle(norm=norm)
    order = {"linf": float("inf"), "l2": 2.0}[norm]
    for image in found["images"]:
        place = image["point"]
        assert image["label"] == int(labels[place])
        natural = decoded(image["natural"], found, np.uint8)
        assert torch.equal(natural, (inputs[place] * 255).round())
        first, *others = image[side]["frames"]
        assert not delta_of(first, found).any()
        assert first["scale"] == first["size"] == 0
        for frame in others:
            assert 0 < frame["size"] <= EPS[norm] * (1 + ROUNDING)
            length = torch.linalg.vector_norm(delta_of(frame, found), order)
            quantum = frame["scale"] / 254 * (1 if norm == "linf" else inputs[0].numel() ** 0.5)
            assert float(length) == pytest.approx(frame["size"], abs=quantum)


def test_l1_ends_in_its_ball() -> None:
    *_, found = battle(norm="l1", steps=10)
    assert found["steps"] == 12  # two more, where its balls become smaller
    for image in found["images"]:
        sizes = [frame["size"] for frame in image["static"]["frames"]]
        assert len(sizes) == 13
        assert max(sizes[9:]) <= EPS["l1"] * (1 + ROUNDING) < max(sizes)


def test_no_steps_show_the_natural_image_alone() -> None:
    subject, inputs, _, found = battle(steps=0)
    assert found["steps"] == 0
    image = found["images"][0]
    for side, model in models_of(subject).items():
        assert len(image[side]["frames"]) == 1
        with torch.no_grad():
            expected = model(inputs).softmax(1)[image["point"]]
        assert image[side]["answers"][side] == pytest.approx(expected.tolist(), abs=6e-5)


# What was answered


@pytest.mark.parametrize("defense", DEFENSES)
def test_probabilities_and_entropy_are_the_attacked_models_own(defense: str) -> None:
    subject, inputs, labels, found = battle(defense)
    for side, model in models_of(subject).items():
        for number, batch in enumerate(asked(model, inputs, labels)):
            with torch.no_grad():
                logits = model(batch)
            for image in found["images"]:
                frame, place = image[side]["frames"][number], image["point"]
                assert frame["probabilities"] == pytest.approx(
                    logits.softmax(1)[place].tolist(), abs=6e-5
                )
                assert frame["entropy"] == pytest.approx(entropy_of(logits)[place].item(), rel=ROUNDING)
                assert ("entropies" in frame) == ("moves" in frame) == (side == "defended")


@pytest.mark.parametrize("defense", DEFENSES)
def test_the_adaptation_is_that_of_fewer_updates_in_turn(defense: str) -> None:
    """An independent way to it: adapt 0, 1, ... updates, and look at each state."""
    subject, inputs, labels, found = battle(defense)
    updates = subject.defense.settings.steps
    for number, batch in enumerate(asked(subject.defense, inputs, labels)):
        for update in range(updates + 1):
            state = subject.defense.adapt(batch, steps=update)
            entropies = entropy_of(subject.defense.predict(batch, state).detach())
            for image in found["images"]:
                frame, place = image["defended"]["frames"][number], image["point"]
                assert len(frame["entropies"]) == len(frame["moves"]) == updates + 1
                assert frame["entropies"][-1] == frame["entropy"]
                assert frame["entropies"][update] == pytest.approx(entropies[place].item(), rel=ROUNDING)
                move = 0.0
                if state.delta is not None:
                    move = float(state.delta[place % len(state.delta)].norm())
                assert frame["moves"][update] == pytest.approx(move, rel=ROUNDING)
                if state.blur is None:
                    assert frame["sigma"] is None
                else:
                    sigma = float(state.blur[place % len(state.blur)].exp().mean())
                    assert frame["sigma"][update] == pytest.approx(sigma, rel=ROUNDING)


@pytest.mark.parametrize("defense", ["dent:steps=2", "dent-nominal:steps=2"])
def test_answers_are_of_both_models_to_the_last_batch(defense: str) -> None:
    subject, inputs, labels, found = battle(defense)
    for side, attacked in models_of(subject).items():
        last = asked(attacked, inputs, labels)[-1]
        for of, model in models_of(subject).items():
            with torch.no_grad():
                expected = model(last).softmax(1)
            for image in found["images"]:
                answer = image[side]["answers"][of]
                assert answer == pytest.approx(expected[image["point"]].tolist(), abs=6e-5)
            if of == side:
                assert answer == image[side]["frames"][-1]["probabilities"]


@pytest.mark.parametrize("defense", [*DEFENSES, "dent:steps=2,gradient=unrolled"])
def test_the_recorded_answer_is_the_defenses_to_the_bit_and_so_is_its_gradient(defense: str) -> None:
    net = tiny()
    defended, (inputs, labels) = defend(net, defense), labeled(net, 6)
    answers, gradients = [], []
    for model in (defended, lambda points: adapt_and_predict(defended, points)[0]):
        points = inputs.clone().requires_grad_()
        logits = model(points)
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), points)
        answers.append(logits)
        gradients.append(gradient)
    assert gradients[0].any()
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(gradients[0], gradients[1])


def test_each_batch_is_adapted_to_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count, adapt = 0, dent.Dent.adapt

    def counting(of: dent.Dent, *tensors: Tensor, **options: Any) -> dent.State:
        nonlocal count
        count += 1
        return adapt(of, *tensors, **options)

    monkeypatch.setattr(dent.Dent, "adapt", counting)
    battle()
    # Natural, start, steps and the score of the attack; and the batch that broke the static model.
    assert count == STEPS + 4


# Attacks that are not made on the defended model itself


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("defense", ["dent:steps=2", "dent+:steps=2", INDEPENDENT, "norm"])
def test_transfer_asks_both_models_what_the_static_model_was_asked(defense: str, norm: str) -> None:
    subject, inputs, labels, found = battle(defense, norm, attack="denying updates")
    own = battle(defense, norm)[-1]
    batches = asked(models_of(subject)["static"], inputs, labels, norm)
    assert found["shared"]
    assert found["steps"] == STEPS
    for number, batch in enumerate(batches):
        for side, model in models_of(subject).items():
            with torch.no_grad():
                logits = model(batch)
            for image in found["images"]:
                frame = image[side]["frames"][number]
                expected = logits.softmax(1)[image["point"]].tolist()
                assert frame["probabilities"] == pytest.approx(expected, abs=6e-5)
                assert ("delta" in frame) == (side == "static")  # stored once
    deltas = {image["point"]: image["static"]["frames"] for image in own["images"]}
    for image in found["images"]:
        assert image["static"]["frames"] == deltas.get(image["point"], image["static"]["frames"])
        last = {side: image[side]["frames"][-1]["probabilities"] for side in models_of(subject)}
        assert image["static"]["answers"] == image["defended"]["answers"] == last


@pytest.mark.parametrize(("norm", "steps"), [("linf", 4), ("linf", 5), ("linf", 1), ("l2", 4)])
def test_fpa_asks_both_models_what_the_adapted_models_were_asked(
    norm: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round has a start of its own; the steps of all rounds follow one another."""
    calls: list[tuple[str, Tensor]] = []
    adapt, predict = dent.Dent.adapt, dent.Dent.predict

    def adapting(of: dent.Dent, points: Tensor, **options: Any) -> dent.State:
        calls.append(("adapt", points.detach().clone()))
        return adapt(of, points, **options)

    def predicting(of: dent.Dent, points: Tensor, state: dent.State) -> Tensor:
        if points.requires_grad:
            calls.append(("climb", points.detach().clone()))
        return predict(of, points, state)

    net = tiny()
    subject, (inputs, labels) = subject_of(net, "dent:steps=2"), labeled(net, 6)
    rounds = min(2, steps)
    budget: dict[str, Any] = {"eps": EPS[norm], "norm": norm, "seed": 0}
    with monkeypatch.context() as watching:
        watching.setattr(dent.Dent, "adapt", adapting)
        watching.setattr(dent.Dent, "predict", predicting)
        dent.attacks.adaptive.fpa(
            subject.defense, inputs, labels, rounds=rounds, steps=steps // rounds, loss="ce", **budget
        )
    climbed = [points for name, points in calls if name == "climb"]
    length = steps // rounds + 1
    batches = [inputs] + [one for place, one in enumerate(climbed) if place % length]
    found = record(subject, inputs, labels, "fpa", steps=steps, **budget)
    assert found["steps"] == len(batches) - 1 == rounds * (steps // rounds)
    for number, batch in enumerate(batches):
        for side, model in models_of(subject).items():
            with torch.no_grad():
                logits = model(batch)
            for image in found["images"]:
                place = image["point"]
                frame = image[side]["frames"][number]
                assert frame["probabilities"] == pytest.approx(
                    logits.softmax(1)[place].tolist(), abs=6e-5
                )
                shown = image["static"]["frames"][number]
                quantum = shown["scale"] * (0.5 / 127 + ROUNDING)
                delta = (batch - inputs)[place]
                assert torch.allclose(delta_of(shown, found), delta, rtol=0, atol=quantum + 1e-9)


class Masked(nn.Module):
    """The net itself, but without a gradient: the direct attack stays at its start."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.net(x.detach()) + 0 * x.sum()
        return answer


def test_the_attack_that_breaks_most_comes_first_and_chooses_the_images() -> None:
    net = tiny()
    masked, (inputs, labels) = Masked(net), labeled(net, 16, wrong=3)
    subject = Subject(masked, net, masked, independent=True)
    settings: dict[str, Any] = {"eps": 0.004, "norm": "linf", "steps": STEPS, "seed": 0}
    attacks = ("apgd-ce", "denying updates")
    made = record_battle(subject, inputs, labels, attacks=attacks, **settings, images=16)["recordings"]
    assert [one["attack"] for one in made] == ["denying updates", "apgd-ce"]
    transferred, direct = (one["right"]["defended"] for one in made)
    assert transferred == made[0]["right"]["static"] < direct
    for one in made:
        last = {image["point"]: image["defended"]["frames"][-1] for image in one["images"]}
        right = [int(np.argmax(last[place]["probabilities"])) == labels[place] for place in range(16)]
        assert one["right"]["defended"] == sum(right)
        alone = record(subject, inputs, labels, one["attack"], **settings, images=16)
        assert {image["point"]: image for image in alone["images"]} == {
            image["point"]: image for image in one["images"]
        }
    strongest = [image["point"] for image in made[0]["images"]]
    few = record_battle(subject, inputs, labels, attacks=attacks, **settings)["recordings"]
    assert [[image["point"] for image in one["images"]] for one in few] == [strongest[:4]] * 2


def test_of_equally_strong_attacks_the_direct_one_comes_last() -> None:
    net = tiny()
    subject, (inputs, labels) = subject_of(net, "dent:steps=2"), labeled(net, 4)
    found = record_battle(subject, inputs, labels, eps=0.0, norm="linf", steps=2, seed=0)["recordings"]
    assert [one["attack"] for one in found] == ["denying updates", "fpa", "apgd-ce"]


@pytest.mark.parametrize(
    ("defense", "lacks", "expected"),
    [
        ("dent:steps=2", {}, RECORDED),
        ("dent:steps=2", {"unrolled": "no"}, RECORDED),
        ("dent:steps=2", {"steps": "no"}, ("denying updates", "apgd-ce")),
        ("norm", {}, ("denying updates", "apgd-ce")),
    ],
)
def test_the_fixed_point_needs_updates_and_steps(
    defense: str, lacks: dict[str, str], expected: tuple[str, ...]
) -> None:
    assert tuple(list_recordable(subject_of(tiny(), defense), lacks)) == expected


def test_recordings_without_images_are_not_shown() -> None:
    *_, found = battle()
    empty = found | {"images": []}
    assert list_recordings({"recordings": [empty, found]}) == [found]
    assert list_recordings(None) == list_recordings({}) == []


# Seeds, models, JSON


def test_same_seed_same_json() -> None:
    found = [battle(seed=seed)[-1] for seed in (0, 0, 1)]
    texts = [json.dumps(one, allow_nan=False) for one in found]
    assert texts[0] == texts[1] != texts[2]
    assert json.loads(texts[0]) == found[0]


def test_models_that_draw_are_seeded_too() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tiny()

        def forward(self, x: Tensor) -> Tensor:
            answer: Tensor = self.net(x + 0.05 * torch.randn_like(x))
            return answer

    net = Noisy()
    subject, (inputs, labels) = subject_of(net, "dent:steps=1"), labeled(net.net, 4)
    found = []
    for drawn in (1, 2):  # whatever was drawn before
        torch.manual_seed(drawn)
        before = torch.random.get_rng_state()
        found.append(record(subject, inputs, labels, eps=0.03, norm="linf", steps=2, seed=5))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert found[0] == found[1]


def test_models_are_not_changed() -> None:
    net = tiny()
    subject, (inputs, labels) = subject_of(net, "dent-nominal:steps=2"), labeled(net, 4)
    before, batch = {name: value.clone() for name, value in net.state_dict().items()}, inputs.clone()
    record(subject, inputs, labels, eps=0.03, norm="linf", steps=2, seed=0)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(part.training for part in net.modules())
    assert all(value.requires_grad and value.grad is None for value in net.parameters())
    assert torch.equal(inputs, batch)
    assert not inputs.requires_grad


def test_points_and_names_of_classes_are_kept() -> None:
    names, points = ["a", "b", "c", "d"], [70, 60, 50, 40, 30, 20]
    *_, labels, found = battle(points=points, classes=names, images=2)
    assert found["classes"] == names
    assert len(found["images"]) == 2
    assert [one["label"] for one in found["images"]] == [
        int(labels[points.index(one["point"])]) for one in found["images"]
    ]
    assert battle()[-1]["classes"] is None


# Which images are shown


def test_kinds_take_turns_in_the_order_of_what_they_tell() -> None:
    falls_stands, both_fall, both_stand, stands_falls = KINDS
    verdicts = [both_stand, falls_stands, stands_falls, falls_stands, both_fall, falls_stands]
    static, defended = zip(*verdicts, strict=True)
    right = [True] * 6
    assert choose_telling(static, defended, right, 10) == [1, 4, 0, 2, 3, 5]
    assert choose_telling(static, defended, right, 2) == [1, 4]
    # The first falls without an attack: its kind is shown by the next one, and itself at the end.
    assert choose_telling(static, defended, [True, False, *right[2:]], 10) == [3, 4, 0, 2, 5, 1]
    assert choose_telling(static, defended, [False] * 6, 3) == [1, 4, 0]
    assert choose_telling([], [], [], 4) == []


def test_the_shown_are_chosen_by_their_last_frames() -> None:
    net = tiny()
    subject, (inputs, labels) = subject_of(net, "dent:steps=3,lr=0.05"), labeled(net, 16, wrong=3)
    settings: dict[str, Any] = {"eps": 0.02, "norm": "linf", "steps": STEPS, "seed": 0}
    found = record(subject, inputs, labels, **settings, images=16)
    stands, natural = {}, {}
    for image in found["images"]:
        ends = [image[side]["frames"][end] for end in (0, -1) for side in ("static", "defended")]
        right = [int(np.argmax(one["probabilities"])) == image["label"] for one in ends]
        natural[image["point"]] = right[0] and right[1]
        stands[image["point"]] = (right[2], right[3])
    assert len(set(stands.values())) >= 3  # a choice that has something to choose from
    order = range(16)
    expected = choose_telling(
        [stands[place][0] for place in order],
        [stands[place][1] for place in order],
        [natural[place] for place in order],
        16,
    )
    assert list(stands) == expected
    few = record(subject, inputs, labels, **settings)
    assert [image["point"] for image in few["images"]] == expected[:4]
    assert few["images"] == found["images"][:4]


# Large and gray images


def test_pooling_averages_squares() -> None:
    rows, columns = torch.arange(128.0), torch.arange(96.0)
    ramp = (1000 * rows[:, None] + columns)[None, None]
    expected = 1000 * (rows[::2, None] + 0.5) + columns[::2] + 0.5  # of a plane: the squares' centers
    assert torch.equal(pool_images(ramp)[0, 0], expected)
    assert torch.equal(pool_images(ramp[..., :64, :]), pool_images(ramp)[..., :32, :])
    small = torch.rand(2, 3, 64, 64)
    assert torch.equal(pool_images(small), small)
    # What is left at the border is the average of what is there.
    assert pool_images(torch.arange(65.0).view(1, 1, 65, 1)).flatten()[-2:].tolist() == [62.5, 64.0]


def test_large_images_are_shown_smaller_but_measured_as_they_are() -> None:
    net, eps = tiny(), 0.02
    inputs = torch.rand(3, 3, 130, 70, generator=torch.Generator().manual_seed(1))
    labels = net(inputs).argmax(1)
    found = record(
        subject_of(net, "dent:steps=1"), inputs, labels, eps=eps, norm="linf", steps=2, seed=0
    )
    assert found["size"] == [44, 24]
    for image in found["images"]:
        place = image["point"]
        natural = decoded(image["natural"], found, np.uint8)
        assert float(natural[0, 0, 0]) == round(255 * float(inputs[place, 0, :3, :3].mean()))
        frame = image["static"]["frames"][-1]
        assert frame["size"] == pytest.approx(eps, rel=ROUNDING)
        assert 0 < frame["scale"] <= eps * (1 + ROUNDING)


def test_gray_images() -> None:
    net = toys.normalized().eval()
    inputs, labels = (values[:5] for values in toys.features())
    found = record(
        subject_of(net, "dent:steps=1"), inputs, labels, eps=toys.EPS, norm="linf", steps=2, seed=0
    )
    assert found["size"] == [4, 8]
    assert found["channels"] == 1
    for image in found["images"]:
        natural = decoded(image["natural"], found, np.uint8)
        assert torch.equal(natural, (inputs[image["point"]] * 255).round())


# Errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"images": 0}, "expected images >= 1, got 0"),
        ({"points": [1, 2]}, "expected a point for each of 6 inputs, got 2"),
        ({"classes": ["cat"]}, "expected a name for each of 4 classes, got 1"),
        ({"eps": -1.0}, "expected eps >= 0"),
        ({"norm": "l3"}, "norm"),
    ],
)
def test_what_has_no_meaning_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        battle(**settings)


def test_other_inputs_and_models_that_learn_are_refused() -> None:
    net = tiny()
    subject, (inputs, labels) = subject_of(net, "dent:steps=1"), labeled(net, 2)
    for wrong in (inputs[0], inputs[:0]):
        with pytest.raises(ValueError, match="expected a batch of images"):
            record(subject, wrong, labels[: len(wrong)], eps=0.1, norm="linf", seed=0)
    net.train()
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        record(subject, inputs, labels, eps=0.1, norm="linf", seed=0)
