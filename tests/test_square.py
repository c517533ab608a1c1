"""Square takes the same walk as the reference, however many queries go into one call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import randomized, small
from pyautoattack.square import SquareAttack
from torch import Tensor, nn

import dent
from dent.attacks import square
from dent.attacks.losses import margin
from dent.attacks.norms import NORMS, lengths, project
from dent.attacks.square import PROPOSALS, Bumps, Proposals, Squares, schedule_areas

EPS = {"linf": 0.015, "l2": 0.4, "l1": 2.0}
THEIRS = {"linf": "Linf", "l2": "L2", "l1": "L1"}
module = sys.modules["dent.attacks.square"]  # the package's attribute is the function


def centered(norm: nn.Module, images: Tensor) -> tuple[nn.Module, Tensor]:
    """Return a network in double precision, so that rounding separates no walks, and its predictions.

    The images have several classes, and their logits are close to one another.
    """
    net = randomized(small(norm))
    with torch.no_grad():
        net.get_parameter("5.bias").sub_(net(images).mean(0))
        return net, net(images).argmax(1)


@pytest.fixture
def task() -> tuple[nn.Module, Tensor, Tensor]:
    images = torch.rand(8, 3, 10, 10).double()
    net, labels = centered(nn.GroupNorm(2, 8), images)
    return net, images, labels


@contextmanager
def double_by_default() -> Iterator[None]:
    """Make double the default: the reference creates tensors without a dtype."""
    torch.set_default_dtype(torch.double)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float)


def precise_projection(inputs: Tensor, differences: Tensor, eps: float) -> Tensor:
    """Replace the reference's projection, which uses a slightly smaller ball and single precision."""
    points = inputs + differences
    return project(points, inputs, eps=eps / (1 - 1e-6), norm="l1") - points


class Told(SquareAttack):  # type: ignore[misc]
    """The reference, with the draws of our tables for one input."""

    def __init__(self, model: nn.Module, ours: Proposals, index: int) -> None:
        norm, queries = THEIRS[ours.norm], ours.queries
        super().__init__(
            model, norm=norm, n_queries=queries, eps=ours.eps, resc_schedule=False, device="cpu"
        )
        n, channels, _, width = ours.inputs.shape
        self.turns: Iterator[float] = iter(())
        if isinstance(ours, Bumps):
            size = min(ours.sides) // 5
            tiles = [side // size for side in ours.sides]
            turned = (ours._draw_signs(3, *tiles) > 0).flatten().tolist()
            self.turns = iter([*turned, *ours.turned.tolist()])
            first = ours._draw_signs(4, n, channels, *tiles)[index].flatten(1).T
            signs = [*first, *ours.signs[:, index]]
            self.signs: Iterator[Tensor] = iter([sign.view(1, channels, 1, 1) for sign in signs])
            self.places = iter(ours.corner.flatten().tolist())
        else:
            assert isinstance(ours, Squares)
            first = ours._draw_signs(2, n, channels, 1, width)[index, None]
            self.signs = iter([first, *(sign.view(channels, 1, 1) for sign in ours.signs)])
            self.places = iter(ours.corner[:, 0].flatten().tolist())

    def random_int(self, low: int, high: int) -> Tensor:
        return torch.tensor([next(self.places)])

    def random_choice(self, shape: list[int]) -> Tensor:
        return next(self.signs)

    def rand(self, *shape: object) -> Tensor:
        return torch.tensor([float(next(self.turns))])


@pytest.mark.parametrize("norm", NORMS)
def test_the_same_walk_as_the_reference(
    task: tuple[nn.Module, Tensor, Tensor], norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, images, labels = task
    options: dict[str, Any] = {"eps": EPS[norm], "norm": norm, "queries": 220}
    result = square(net, images, labels, **options)
    ours = PROPOSALS[norm](images, **options, share=0.8, seeds=(0, 0))
    for index in range(len(images)):
        theirs = Told(net, ours, index)
        image, label = images[index, None], labels[index, None]
        with monkeypatch.context() as patch, double_by_default():
            patch.setattr(torch, "rand", theirs.rand)
            patch.setattr("pyautoattack.square.L1_projection", precise_projection)
            theirs.init_hyperparam(image)
            _, end = theirs.attack_single_run(image, label)
        # L2 takes the root of a rounding error; everything else agrees to 1e-9.
        tolerance = 1e-6 if norm == "l2" else 1e-9
        torch.testing.assert_close(result.inputs[index, None], end, rtol=0, atol=tolerance)
        assert bool(result.success[index]) == bool(net(end).argmax(1) != label)
    assert 0 < int(result.success.sum()) < len(images)  # otherwise the test proves little


@pytest.mark.parametrize("norm", NORMS)
def test_the_walk_does_not_depend_on_how_many_queries_are_asked_for_at_once(
    task: tuple[nn.Module, Tensor, Tensor], norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, images, labels = task
    options: dict[str, Any] = {"eps": EPS[norm], "norm": norm, "queries": 120}
    adaptive = square(net, images, labels, **options)
    few = square(net, images, labels, **options, rows=1)
    assert few.queries < adaptive.queries
    for block in (1, 3, 16):
        monkeypatch.setattr(module, "choose_block_size", lambda *_, block=block: block)
        fixed = square(net, images, labels, **options)
        for other in (adaptive, few):
            torch.testing.assert_close(fixed.inputs, other.inputs, rtol=0, atol=1e-12)
            assert torch.equal(fixed.success, other.success)


@given(
    rows=st.integers(1, 5000),
    inputs=st.integers(1, 300),
    rate=st.floats(0.001, 1, allow_subnormal=False),
)
def test_the_block_size_is_close_to_the_cheapest(rows: int, inputs: int, rate: float) -> None:
    def cost(block: int) -> float:
        """Return the cost per settled query in rows, with a fixed cost of rows / 32 per call."""
        return (rows / 32 + inputs * block) * rate / (1 - (1 - rate) ** block)

    block = module.choose_block_size(rows, inputs, rate)
    most = max(rows // inputs, 1)
    assert 1 <= block <= most
    assert cost(block) <= 1.3 * min(map(cost, range(1, most + 1)))


def test_broken_inputs_leave_and_calls_stay_small(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, images, labels = task
    sizes: list[int] = []

    def counted(points: Tensor) -> Tensor:
        sizes.append(len(points))
        return net(points)  # type: ignore[no-any-return]

    result = square(counted, images, labels, eps=0.03, queries=150, rows=20)
    assert result.queries == sum(sizes)
    assert max(sizes) <= 20
    alone = square(net, images, labels, eps=0.03, queries=150, rows=1)
    assert 0 < int(alone.success.sum()) < 8
    assert alone.queries < (8 - int(alone.success.sum())) * 150 + 8 * 60


def test_the_schedule_is_that_of_the_reference() -> None:
    theirs = SquareAttack(None, p_init=0.7, resc_schedule=False)
    assert schedule_areas(9000, 0.7).tolist() == [theirs.p_selection(number) for number in range(9000)]


@pytest.mark.parametrize("norm", NORMS)
def test_squares_are_everywhere_alike(norm: str) -> None:
    images = torch.rand(1, 1, 7, 12)
    ours = PROPOSALS[norm](images, eps=1.0, norm=norm, share=0.01, queries=4000, seeds=(0,))
    side = 3 if norm != "linf" else 1
    assert (ours.size[-1000:] == side).all()
    for axis, length in enumerate((7, 12)):
        places = ours.corner[-3000:, :, axis].flatten().bincount() / 6000
        assert len(places) == length - side + 1
        torch.testing.assert_close(places, torch.full_like(places, 1 / len(places)), atol=0.02, rtol=0)


def test_as_strong_as_the_reference() -> None:
    net = dent.load_model("resnet20-at")
    inputs, labels = dent.load_data("cifar10", n=32)
    with torch.no_grad():
        right = (net(inputs).argmax(1) == labels).nonzero().squeeze(1)[:20]
    inputs, labels = inputs[right], labels[right]
    eps = 20 / 255
    theirs = SquareAttack(net, n_queries=100, eps=eps, resc_schedule=False, device="cpu")
    reference = net(theirs.perturb(inputs, labels)).argmax(1) != labels
    ours = square(net, inputs, labels, eps=eps, queries=100).success
    assert 2 < int(ours.sum()) < 18
    assert abs(int(ours.sum()) - int(reference.sum())) <= 2


@pytest.mark.parametrize(("norm", "share"), [("linf", 1.0), ("l2", 0.6), ("l1", 0.6)])
def test_the_worst_point_of_a_linear_model(norm: str, share: float) -> None:
    # For Linf the last squares are single values, which reach their ends. Bumps are at least 3 x 3.
    linear = nn.Sequential(nn.Flatten(), nn.Linear(30, 2)).double()
    inputs = torch.rand(6, 1, 5, 6).double() * 0.2 + 0.4
    weight = linear.get_parameter("1.weight").detach()
    with torch.no_grad():
        labels = linear(inputs).argmax(1)
        natural = margin(linear(inputs), labels)
    dual = {"linf": 1, "l2": 2, "l1": torch.inf}[norm]
    eps = 0.5 * float(natural.abs().min() / (weight[1] - weight[0]).norm(dual))
    most = eps * (weight[1] - weight[0]).norm(dual)  # the largest gain of the margin
    result = square(linear, inputs, labels, eps=eps, norm=norm, queries=1500)
    gain = (margin(result.logits, labels) - natural) / most
    assert not result.success.any()
    assert gain.min() > share - 1e-9
    assert gain.max() < 1 + 1e-9


@settings(max_examples=50)
@given(
    norm=st.sampled_from(list(NORMS)),
    eps=st.floats(0, 2),
    sides=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    channels=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 100),
    joint=st.booleans(),
    restarts=st.integers(1, 2),
)
def test_results_lie_in_the_ball(
    norm: str,
    eps: float,
    sides: tuple[int, int],
    channels: int,
    dtype: torch.dtype,
    seed: int,
    joint: bool,
    restarts: int,
) -> None:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    net.append(nn.Linear(16, 4)).to(dtype)
    inputs, labels = torch.rand(5, channels, *sides, dtype=dtype), torch.randint(4, (5,))
    inputs = inputs.to(memory_format=torch.channels_last)
    result = square(
        net, inputs, labels, eps=eps, norm=norm, queries=15, restarts=restarts, seed=seed, joint=joint
    )
    assert result.inputs.dtype == dtype
    assert result.inputs.min() >= 0
    assert result.inputs.max() <= 1
    assert (lengths(result.inputs - inputs, norm) <= eps * (1 + 1e-5) + 1e-6).all()
    assert torch.equal(result.success, net(result.inputs).argmax(1) != labels)
    if eps == 0:
        assert torch.equal(result.inputs, inputs)


def test_more_of_everything_breaks_no_fewer(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, images, labels = task
    more = {"queries": (0, 5, 30, 31, 200), "restarts": (1, 2, 5), "eps": (0.0, 0.01, 0.9)}
    for name, values in more.items():
        options: dict[str, Any] = {"eps": EPS["linf"], "queries": 20}
        results = [square(net, images, labels, **options | {name: value}) for value in values]
        broken = [int(result.success.sum()) for result in results]
        assert broken == sorted(broken)
        assert broken[0] < broken[-1]
        if name != "eps":  # a longer walk begins with the same queries
            for shorter, longer in pairwise(results):
                assert (longer.success | ~shorter.success).all()
    assert broken[0] == 0
    assert broken[-1] == len(images)


def test_only_the_masked_are_perturbed(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, images, labels = task
    mask = torch.arange(8) % 2 == 0
    for joint in (False, True):
        result = square(net, images, labels, eps=0.3, queries=100, mask=mask, joint=joint)
        assert torch.equal(result.inputs[~mask], images[~mask])
        assert result.success[mask].all()
        assert not result.success[~mask].any()


@pytest.mark.parametrize("norm", NORMS)
def test_who_leaves_does_not_matter_to_the_others(
    task: tuple[nn.Module, Tensor, Tensor], norm: str
) -> None:
    net, images, labels = task
    options: dict[str, Any] = {"eps": EPS[norm], "norm": norm, "queries": 150}
    alone = square(net, images, labels, **options)
    joint = square(net, images, labels, **options, joint=True)  # no input leaves
    assert torch.equal(alone.success, joint.success)
    assert 0 < int(alone.success.sum()) < len(images)
    stands = ~alone.success
    torch.testing.assert_close(alone.inputs[stands], joint.inputs[stands], rtol=0, atol=1e-12)


def test_a_joint_batch_is_submitted_whole_and_scored_as_it_is_submitted() -> None:
    images = torch.rand(6, 3, 8, 8).double()
    net, labels = centered(nn.BatchNorm2d(8, track_running_stats=False), images)
    mask = torch.arange(6) != 2
    numbers = count()

    def watched(points: Tensor) -> Tensor:
        next(numbers)
        assert torch.equal(points[2], images[2])
        assert (points - images).abs().max() <= 0.03 + 1e-9
        return net(points)  # type: ignore[no-any-return]

    result = square(watched, images, labels, eps=0.03, queries=60, joint=True, mask=mask)
    torch.testing.assert_close(net(result.inputs), result.logits)
    assert torch.equal(result.success, net(result.inputs).argmax(1) != labels)
    assert result.success[mask].any()
    assert result.queries == 6 * next(numbers)


def test_a_joint_batch_that_is_broken_is_asked_for_no_more(
    task: tuple[nn.Module, Tensor, Tensor],
) -> None:
    net, images, labels = task
    result = square(net, images, labels, eps=0.9, queries=1000, restarts=3, joint=True)
    assert result.success.all()
    assert result.queries < 8 * 100


def test_the_seed_decides(task: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, images, labels = task
    first, same, other = (
        square(net, images, labels, eps=0.01, queries=9, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(first.inputs, same.inputs)
    assert not torch.equal(first.inputs, other.inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": -1}, "expected queries >= 0, got -1"),
        ({"share": 0.0}, "expected share > 0, got 0.0"),
        ({"rows": 0}, "expected rows > 0, got 0"),
        ({"restarts": 0}, "expected restarts >= 1, got 0"),
    ],
)
def test_what_is_refused(net: nn.Module, images: Tensor, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        square(net, images, torch.zeros(5, dtype=torch.long), eps=0.1, **options)


def test_what_is_no_image_is_refused(net: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"expected images \(N, C, H, W\), got inputs \(5, 12\)"):
        square(net, torch.rand(5, 12), torch.zeros(5, dtype=torch.long), eps=0.1)
