"""FAB finds the nearest point where it is known, and takes the same walk as the reference."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyautoattack.fab_projections import projection_l1, projection_l2, projection_linf
from pyautoattack.fab_pt import FABAttack_PT
from scipy.optimize import brentq, linprog
from torch import Tensor, nn

import dent
from dent.attacks.fab import fab, fab_targeted, find_move
from dent.attacks.norms import DUALS, NORMS, lengths

PROJECTIONS = {"linf": projection_linf, "l2": projection_l2, "l1": projection_l1}
ATTACKS: dict[str, Any] = {"fab": fab, "fab_targeted": fab_targeted}
Task = tuple[nn.Module, Tensor, Tensor]


@pytest.fixture(scope="module")
def robust() -> Task:
    """Return a robust model and images that it classifies correctly; some are hard to break."""
    net = dent.load_model("resnet20-at")
    inputs, labels = dent.load_data("cifar10", n=24)
    with torch.no_grad():
        right = (net(inputs).argmax(1) == labels).nonzero().squeeze(1)[:12]
    return net, inputs[right], labels[right]


@pytest.fixture
def small() -> Task:
    """Return a small network of five classes, eight images, and its predictions."""
    net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 5)).double().eval()
    inputs = torch.rand(8, 2, 4, 4, dtype=torch.double)
    return net, inputs, net(inputs).argmax(1)


def planes(seed: int, d: int, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return points (some values at the border), normals (some values zero) and an excess.

    share: the excess as a share of the largest possible change within [0, 1].
    """
    random = torch.Generator().manual_seed(seed)
    points = (torch.rand(2, 3, d, generator=random, dtype=torch.double) * 1.4 - 0.2).clamp(0, 1)
    normals = torch.randn(3, d, generator=random, dtype=torch.double) ** 3
    normals[torch.rand(3, d, generator=random) < 0.1] = 0
    side = (torch.rand(2, 3, generator=random) - 0.5).sign()
    corner = (normals * -side[..., None] > 0).double()
    return points, normals, (normals * (points - corner)).sum(-1) * share


def shortest(norm: str, point: Any, normal: Any, excess: float) -> float:
    """Return the length of the shortest move by scipy: a linear program, or a root."""
    low, high, d = -point, 1 - point, len(point)
    if norm == "l2":  # by duality, the move is clip(-t normal)
        root: Any = brentq(
            lambda t: normal @ np.clip(-t * normal, low, high) + excess, -1e9, 1e9, rtol=1e-14
        )
        return float(np.linalg.norm(np.clip(-root * normal, low, high)))
    program: dict[str, Any] = {"b_eq": [-excess]}
    if norm == "linf":  # minimize the bound of all values
        program |= {"c": np.append(np.zeros(d), 1), "A_eq": np.append(normal, 0)[None]}
        program["A_ub"] = np.block([[np.eye(d), -np.ones((d, 1))], [-np.eye(d), -np.ones((d, 1))]])
        program |= {"b_ub": np.zeros(2 * d), "bounds": [*zip(low, high, strict=True), (0, None)]}
    else:  # minimize the sum of all moves up and down
        program |= {"c": np.ones(2 * d), "A_eq": np.append(normal, -normal)[None]}
        program["bounds"] = [(0, room) for room in np.append(high, point)]
    solved: Any = linprog(**program)
    assert solved.success
    return float(solved.fun)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.4, 0.999])
@pytest.mark.parametrize("d", [1, 7, 400])
def test_the_way_to_a_hyperplane_is_the_shortest(norm: str, share: float, d: int) -> None:
    points, normals, excess = planes(d, d, share)
    moves = find_move(points, normals, excess, norm)
    torch.testing.assert_close((normals * moves).sum(-1), -excess)
    for k, row in [(0, 0), (1, 1), (1, 2)]:
        expected = shortest(norm, points[k, row].numpy(), normals[row].numpy(), float(excess[k, row]))
        length = float(torch.linalg.vector_norm(moves[k, row], NORMS[norm]))
        assert length == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(
    norm=st.sampled_from(list(NORMS)),
    share=st.floats(0, 1.5),
    seed=st.integers(0, 1000),
    d=st.integers(1, 40),
    scale=st.sampled_from([1.0, 1e-30, 1e20]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_moves_end_on_the_hyperplane_or_use_all_the_room(
    norm: str, share: float, seed: int, d: int, scale: float, dtype: torch.dtype
) -> None:
    points, normals, excess = (part.to(dtype) for part in planes(seed, d, share))
    moves = find_move(points, normals * scale, excess * scale, norm)
    close = 1e-5 if dtype == torch.float32 else 1e-12
    assert (points + moves).min() >= -close
    assert (points + moves).max() <= 1 + close
    assert (moves[:, normals == 0] == 0).all()
    reached = (normals * moves).sum(-1)
    torch.testing.assert_close(reached, -excess / max(share, 1), rtol=10 * close, atol=close)


@given(
    norm=st.sampled_from(list(NORMS)),
    share=st.floats(0.001, 0.9),
    seed=st.integers(0, 1000),
    d=st.integers(2, 300),
)
def test_moves_are_no_longer_than_those_of_the_reference(
    norm: str, share: float, seed: int, d: int
) -> None:
    points, normals, excess = planes(seed, d, share)
    ours = find_move(points, normals, excess, norm).flatten(0, 1)
    flat, both, excess = points.flatten(0, 1), normals.repeat(2, 1), excess.flatten()
    theirs = PROJECTIONS[norm](flat, both, (both * flat).sum(1) - excess).double()
    on_it = ((both * theirs).sum(1) + excess).abs() < 1e-6 * excess.abs()
    assert on_it.any()
    assert (lengths(ours, norm) <= lengths(theirs, norm) * (1 + 1e-6))[on_it].all()


@pytest.mark.parametrize(
    ("name", "norm", "steps"),
    [("targeted", "linf", 10), ("targeted", "l2", 10), ("targeted", "l1", 10), ("any", "l2", 3)],
)
def test_the_same_walk_as_the_reference(robust: Task, name: str, norm: str, steps: int) -> None:
    net, inputs, labels = robust
    theirs = FABAttack_PT(net, norm=norm.capitalize(), n_iter=steps, device="cpu")
    theirs.target_class = 2  # the reference's name for the likeliest other class
    points = theirs.attack_single_run(inputs, labels, is_targeted=name == "targeted")
    settings: dict[str, Any] = {
        "eps": 1.0 if norm == "linf" else 1e3,
        "norm": norm,
        "steps": steps,
        "minimize": True,
    }
    attack = partial(fab_targeted, targets=1) if name == "targeted" else fab
    result = attack(net, inputs, labels, **settings)
    expected, distances = (lengths(end - inputs, norm).flatten() for end in (points, result.inputs))
    assert torch.equal(result.success, expected > 0)  # the reference leaves the others unchanged
    assert result.success.sum() >= 9
    close = torch.isclose(distances, expected, rtol=1e-3)[result.success]
    assert (
        close.all() if norm != "l1" else close.float().mean() > 0.8
    )  # for L1, rounding separates a few walks


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ATTACKS)
def test_the_smallest_perturbation_of_a_linear_model(name: str, norm: str) -> None:
    linear = nn.Sequential(nn.Flatten(), nn.Linear(48, 5)).double()
    inputs = torch.rand(10, 3, 4, 4, dtype=torch.double) * 0.2 + 0.4
    logits, weight = linear(inputs).detach(), linear.get_parameter("1.weight").detach()
    linear.get_parameter("1.bias").data -= logits.mean(0)  # makes the classes close
    logits -= logits.mean(0)
    labels = logits.argmax(1)
    gaps = logits.gather(1, labels[:, None]) - logits
    slopes = lengths((weight[labels][:, None] - weight).flatten(0, 1), DUALS[norm]).view(10, 5)
    expected = (gaps / slopes).scatter(1, labels[:, None], torch.inf).amin(1)
    assert expected.max() < 0.39  # closer than the border
    result = ATTACKS[name](linear, inputs, labels, eps=1.0, norm=norm, steps=30, minimize=True)
    assert result.success.all()
    distances = lengths(result.inputs - inputs, norm).flatten()
    assert (distances >= expected * (1 - 1e-9)).all()
    torch.testing.assert_close(distances, expected, rtol=0.01, atol=0)
    eps = float(expected.median())
    at_eps = ATTACKS[name](linear, inputs, labels, eps=eps, norm=norm, steps=30)
    clear = (expected / eps - 1).abs() > 0.01
    assert torch.equal(at_eps.success[clear], (expected < eps)[clear])


@given(
    name=st.sampled_from(list(ATTACKS)),
    norm=st.sampled_from(list(NORMS)),
    eps=st.floats(0, 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 100),
    joint=st.booleans(),
    minimize=st.booleans(),
)
def test_results_lie_in_the_ball(
    name: str, norm: str, eps: float, dtype: torch.dtype, seed: int, joint: bool, minimize: bool
) -> None:
    torch.manual_seed(seed)
    eps = min(eps, 1) if norm == "linf" else eps
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4)).to(dtype)
    inputs, labels = torch.rand(5, 2, 3, 5, dtype=dtype), torch.randint(4, (5,))
    settings = {"steps": 3, "restarts": 2, "seed": seed, "joint": joint, "minimize": minimize}
    result = ATTACKS[name](net, inputs, labels, eps=eps, norm=norm, **settings)
    assert result.inputs.min() >= 0
    assert result.inputs.max() <= 1
    assert (lengths(result.inputs - inputs, norm) <= eps * (1 + 1e-5) + 1e-6).all()
    assert torch.equal(result.success, net(result.inputs).argmax(1) != labels)
    assert result.success[net(inputs).argmax(1) != labels].all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ATTACKS)
def test_no_eps_breaks_nothing_and_much_breaks_all(small: Task, name: str, norm: str) -> None:
    net, inputs, labels = small
    wrong = torch.arange(8) < 3
    labels = torch.where(wrong, (labels + 1) % 5, labels)
    assert torch.equal(ATTACKS[name](net, inputs, labels, eps=0, norm=norm, steps=5).success, wrong)
    much = 1 if norm == "linf" else 32
    assert ATTACKS[name](net, inputs, labels, eps=much, norm=norm, steps=40).success.all()


def test_those_that_stay_come_nearer(small: Task) -> None:
    net, inputs, labels = small
    first, nearest, more = (
        fab(net, inputs, labels, eps=0.5, steps=20, minimize=minimize, restarts=restarts)
        for minimize, restarts in ((False, 1), (True, 1), (True, 4))
    )
    distances = [lengths(result.inputs - inputs, "linf") for result in (first, nearest, more)]
    assert first.success.all()
    assert (distances[1] < distances[0]).all()
    assert (distances[2] <= distances[1]).all()
    assert first.queries < nearest.queries < more.queries


@pytest.mark.parametrize("norm", NORMS)
def test_what_is_not_broken_ends_nearer_to_the_boundary(robust: Task, norm: str) -> None:
    net, inputs, labels = robust
    eps = {"linf": 2 / 255, "l2": 0.1, "l1": 1.0}[norm]
    result = fab_targeted(net, inputs, labels, eps=eps, norm=norm, targets=1, steps=3)
    stands = ~result.success
    assert stands.sum() >= 6
    assert (lengths(result.inputs - inputs, norm)[stands] > 0.9 * eps).all()
    before, after = (
        logits.gather(1, labels[:, None]).squeeze(1) - logits.topk(2).values[:, 1]
        for logits in (net(inputs).detach(), result.logits)
    )
    assert (after < before)[stands].all()


def test_only_the_masked_are_perturbed(small: Task) -> None:
    net, inputs, labels = small
    mask = torch.arange(8) % 3 == 0
    labels[0] = (labels[0] + 1) % 5  # misclassified already
    for joint in (False, True):
        result = fab(net, inputs, labels, eps=0.5, steps=10, restarts=2, mask=mask, joint=joint)
        assert torch.equal(result.inputs[~mask], inputs[~mask])
        assert torch.equal(result.inputs[0], inputs[0])
        assert torch.equal(result.success, mask)


@pytest.mark.parametrize("norm", NORMS)
def test_restarts_are_from_half_of_eps(small: Task, norm: str) -> None:
    net, inputs, _ = small
    inputs, seen = inputs / 4 + 0.4, list[Tensor]()

    def watched(points: Tensor) -> Tensor:
        seen.append(points.detach())
        logits: Tensor = net(points)
        return logits

    fab(watched, inputs, net(inputs).argmax(1), eps=1e-3, norm=norm, steps=1, restarts=2)
    begin, first, _, _, second, *_ = (lengths(points - inputs, norm) for points in seen)
    assert begin.max() == first.max() == 0
    torch.testing.assert_close(second, torch.full_like(second, 0.5e-3))


def test_the_seed_decides(small: Task) -> None:
    net, inputs, labels = small
    net[0].weight.data *= 20  # type: ignore[index]  # so rough that a start matters
    settings: dict[str, Any] = {"eps": 0.3, "steps": 2, "restarts": 5, "minimize": True}
    first, same, other = (fab(net, inputs, labels, seed=seed, **settings) for seed in (0, 0, 1))
    assert torch.equal(first.inputs, same.inputs)
    assert not torch.equal(first.inputs, other.inputs)
    with torch.no_grad():
        assert torch.equal(first.inputs, fab(net, inputs, labels, **settings).inputs)


def test_an_input_is_attacked_alike_in_any_batch(small: Task) -> None:
    net, inputs, labels = small
    settings: dict[str, Any] = {"eps": 0.5, "steps": 8, "restarts": 2, "minimize": True, "targets": 2}
    whole = fab_targeted(net, inputs, labels, **settings)
    joint = fab_targeted(net, inputs, labels, joint=True, **settings)
    torch.testing.assert_close(whole.inputs, joint.inputs)
    half = fab_targeted(net, inputs[:4], labels[:4], **settings)
    torch.testing.assert_close(whole.inputs[:4], half.inputs)


@pytest.mark.parametrize("crossing", [0, 1])
def test_a_forward_that_did_not_cross_serves_for_the_next_step(crossing: int) -> None:
    linear = nn.Linear(32, 1).double()
    linear.weight.data[0, 0] = 0

    def rarely(points: Tensor) -> Tensor:
        value = linear(points.flatten(1)).tanh()
        ahead = torch.where(points[:, 0, 0, :1] > 0.5, 0.5, 3)  # a pixel that does not move
        return torch.cat([ahead + value, value.square()], 1)

    inputs, labels = torch.rand(6, 2, 4, 4).double(), torch.zeros(6, dtype=torch.long)
    inputs[:, 0, 0, 0] = (torch.arange(6) < crossing).double()
    settings: dict[str, Any] = {"eps": 1.0 if crossing else 0.01, "steps": 7, "minimize": True}
    alone, joint = (fab(rarely, inputs, labels, joint=joint, **settings) for joint in (False, True))
    torch.testing.assert_close(alone.inputs, joint.inputs)
    assert int(alone.success.sum()) == crossing
    assert (alone.inputs - inputs).abs().max() <= settings["eps"] + 1e-9
    assert joint.queries == (7 + 7 + 4) * 6
    again = alone.queries - (1 + 7 + 3) * 6
    assert 0 < again <= 7 if crossing else again == 0


@pytest.mark.parametrize("name", ATTACKS)
def test_a_joint_batch_is_scored_as_it_is_submitted(small: Task, name: str) -> None:
    net, inputs, _ = small

    def centered(points: Tensor) -> Tensor:
        assert len(points) == 8
        assert torch.equal(points[5], inputs[5])
        logits: Tensor = net(points - points.mean(0, keepdim=True))
        return logits

    labels, mask = centered(inputs).argmax(1), torch.arange(8) != 5
    result = ATTACKS[name](
        centered, inputs, labels, eps=0.2, steps=15, restarts=2, joint=True, mask=mask
    )
    assert torch.equal(result.logits, centered(result.inputs))
    assert torch.equal(result.success, result.logits.argmax(1) != labels)
    assert result.success[mask].sum() >= 5
    assert lengths(result.inputs - inputs, "linf").max() <= 0.2 + 1e-9


def test_in_a_joint_batch_the_boundaries_of_others_do_not_count(small: Task) -> None:
    net, inputs, labels = small

    def leaking(points: Tensor) -> Tensor:
        leak = torch.zeros(8, 5).double()
        leak[1:, 0] = 100
        logits: Tensor = net(points) + leak * (points[0] - inputs[0]).sum()
        return logits

    settings: dict[str, Any] = {"eps": 0.5, "steps": 6, "minimize": True}
    alone = fab(net, inputs[:1], labels[:1], **settings)
    joint = fab(leaking, inputs, labels, joint=True, mask=torch.arange(8) < 1, **settings)
    torch.testing.assert_close(joint.inputs[:1], alone.inputs)


def test_nothing_is_left_on_the_model(small: Task) -> None:
    net, inputs, labels = small
    before = copy.deepcopy(net.state_dict())
    fab(net, inputs, labels, eps=0.1, steps=3)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert not inputs.requires_grad


@pytest.mark.parametrize("name", ATTACKS)
def test_without_a_gradient_inputs_stay(name: str) -> None:
    def rounded(points: Tensor) -> Tensor:
        return torch.stack([points.flatten(1).sum(1).round(), torch.zeros(len(points))], 1)

    inputs, labels = torch.rand(4, 1, 3, 3), torch.zeros(4, dtype=torch.long)
    result = ATTACKS[name](rounded, inputs, labels, eps=0.1, norm="l2", steps=3)
    assert not result.success.any()
    torch.testing.assert_close(result.inputs, inputs)
