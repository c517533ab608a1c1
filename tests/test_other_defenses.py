"""The defenses beside dent, each against a plain loop written here; their gradients and promises."""

from __future__ import annotations

import copy
import math
import pickle
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from nets import affine_parameters, randomized, small
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

import dent
from dent.defense import MethodName
from dent.defense.anti_adversary import AntiAdversary
from dent.defense.bn_mix import BnMix
from dent.defense.defended import Adaptation, Defended, Method
from dent.defense.eata import Eata
from dent.defense.energy import Energy
from dent.defense.hedge import Hedge
from dent.defense.lame import Lame, measure_affinity
from dent.defense.medbn import MedBn
from dent.defense.memo import Memo
from dent.defense.sar import Sar
from dent.defense.views import Crops, Views, make_views
from dent.testing import check_defense

Plain = Callable[[nn.Module, Tensor], Tensor]


def move(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], offset: Tensor) -> Tensor:
    """Return the gradient of the summed loss at x + offset, with its graph."""
    point = x + offset
    point = point if point.requires_grad else point.requires_grad_()
    return torch.autograd.grad(loss(model(point)).sum(), point, create_graph=True)[0]


def plain_hedge(model: nn.Module, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    noise = 2 * torch.rand(x.shape[1:], generator=generator, dtype=torch.double) - 1
    offset = (0.05 * noise).expand_as(x)

    def loss(logits: Tensor) -> Tensor:
        classes = range(logits.shape[1])
        return sum(F.cross_entropy(logits, torch.full((len(x),), c)) for c in classes) * len(x)  # type: ignore[return-value]

    for _ in range(3):
        offset = (offset + 0.02 * move(model, x, loss, offset).sign()).clamp(-0.05, 0.05)
        offset = (x + offset).clamp(0, 1) - x
    return model(x + offset)  # type: ignore[no-any-return]


def plain_anti_adversary(model: nn.Module, x: Tensor) -> Tensor:
    labels, offset = model(x).argmax(1), torch.zeros_like(x)
    for _ in range(2):
        offset = offset - 0.15 * move(model, x, lambda z: F.cross_entropy(z, labels), offset).sign()
    return model(x + offset)  # type: ignore[no-any-return]


def plain_energy(model: nn.Module, x: Tensor) -> Tensor:
    offset, radius = torch.zeros_like(x), 0.82 * 0.04 * math.sqrt(x[0].numel())
    for _ in range(3):
        slope = move(model, x, lambda z: -z.exp().sum(1).log(), offset)
        length = slope.square().sum((1, 2, 3), keepdim=True).sqrt()
        offset = offset - 0.7 * radius * slope / length
        offset = (x + offset).clamp(0, 1) - x
        length = offset.square().sum((1, 2, 3), keepdim=True).sqrt()
        offset = torch.where(length > radius, offset * radius / length, offset)
    return model(x + offset)  # type: ignore[no-any-return]


def plain_views(model: nn.Module, x: Tensor) -> Tensor:
    height, width = x.shape[2:]
    padded = F.pad(x, (2, 2, 2, 2))
    total = torch.zeros(())
    for top, left in ((2, 2), (0, 2), (4, 2), (2, 0), (2, 4)):
        view = padded[:, :, top : top + height, left : left + width]
        total = total + model(view) + model(view.flip(-1))
    return total / 10


def plain_crops(model: nn.Module, x: Tensor) -> Tensor:
    """Four shifts, written as what they show of the image; those that move it up are mirrored."""
    inside = torch.zeros_like(x)
    inside[:, :, 1:-1, 1:-1] = 1
    total = model(x * inside) + model((x * inside).flip(-1))
    for rows, above in ((slice(None, -3), 3), (slice(3, None), 0)):
        for columns, left in ((slice(None, -3), 3), (slice(3, None), 0)):
            view = F.pad(x[:, :, rows, columns], (left, 3 - left, above, 3 - above))
            total = total + model(view if above else view.flip(-1))
    return total / 6  # type: ignore[no-any-return]


def plain_lame(model: nn.Module, x: Tensor) -> Tensor:
    entered: list[Tensor] = []
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    hook = last.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    logits = model(x)
    hook.remove()
    features = entered[0] / entered[0].norm(dim=1, keepdim=True)
    distances = torch.stack([(features - one + 1e-30).norm(dim=1) for one in features])
    width = distances.sort(1).values[:, 2].mean()
    kernel = torch.exp(-(distances**2) / (2 * width**2))
    z = logits.softmax(1)
    added = torch.zeros_like(z)
    for _ in range(4):
        added = 1.5 * kernel @ z
        z = (logits.log_softmax(1) + added).softmax(1)
    return logits + added  # type: ignore[no-any-return]


def plain_memo(model: nn.Module, x: Tensor) -> Tensor:
    """One input at a time, as the paper has it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    affine = {names[id(one)]: one.detach().requires_grad_() for one in affine_parameters(model)}
    answers = []
    for image in x:
        values = dict(affine)
        for _ in range(2):
            views = [image, image.flip(-1)]
            mean = torch.stack([functional_call(model, values, view[None])[0] for view in views])
            mean = mean.softmax(1).mean(0)
            slopes = torch.autograd.grad(
                -(mean * mean.log()).sum(), list(values.values()), create_graph=True
            )
            values = {
                name: value - 0.3 * slope
                for (name, value), slope in zip(values.items(), slopes, strict=True)
            }
        answers.append(functional_call(model, values, image[None]))
    return torch.cat(answers)


def with_batch_statistics(model: nn.Module) -> nn.Module:
    """Return a copy whose BatchNorm layers use the statistics of the batch, as tent's authors do it."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    return model


def plain_sar(model: nn.Module, x: Tensor) -> Tensor:
    model = with_batch_statistics(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values = {names[id(one)]: one.detach().requires_grad_() for one in affine_parameters(model)}
    velocity = {name: torch.zeros_like(value) for name, value in values.items()}
    margin = 0.5 * math.log(10)
    for _ in range(2):
        p = functional_call(model, values, x).softmax(1)
        entropies = -(p * p.log()).sum(1)
        sure = entropies < margin
        slopes = torch.autograd.grad(entropies[sure].mean(), list(values.values()), create_graph=True)
        length = sum(slope.square().sum() for slope in slopes) ** 0.5
        worst = {
            name: value + 0.3 * slope / length
            for (name, value), slope in zip(values.items(), slopes, strict=True)
        }
        p = functional_call(model, worst, x).softmax(1)
        entropies = -(p * p.log()).sum(1)[sure]
        slopes = torch.autograd.grad(
            entropies[entropies < margin].mean(), list(worst.values()), create_graph=True
        )
        velocity = {n: 0.9 * velocity[n] + slope for n, slope in zip(values, slopes, strict=True)}
        values = {name: value - 0.2 * velocity[name] for name, value in values.items()}
    return functional_call(model, values, x)  # type: ignore[no-any-return]


def plain_eata(model: nn.Module, x: Tensor) -> Tensor:
    model = with_batch_statistics(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values = {names[id(one)]: one.detach().requires_grad_() for one in affine_parameters(model)}
    velocity = {name: torch.zeros_like(value) for name, value in values.items()}
    margin, average = 0.6 * math.log(10), None
    for _ in range(3):
        p = functional_call(model, values, x).softmax(1)
        entropies = -(p * p.log()).sum(1)
        chosen = [i for i in range(len(x)) if entropies[i] < margin]
        if average is not None:
            known: Tensor = average
            chosen = [i for i in chosen if (known @ p[i] / known.norm() / p[i].norm()).abs() < 0.7]
        assert chosen
        new = p[chosen].mean(0).detach()
        average = new if average is None else 0.9 * average + 0.1 * new
        slopes = [torch.zeros_like(value) for value in values.values()]
        for i in chosen:
            each = torch.autograd.grad(entropies[i], list(values.values()), create_graph=True)
            weight = (margin - entropies[i]).exp() / len(chosen)
            slopes = [slope + weight * one for slope, one in zip(slopes, each, strict=True)]
        velocity = {n: 0.9 * velocity[n] + slope for n, slope in zip(values, slopes, strict=True)}
        values = {name: value - 0.2 * velocity[name] for name, value in values.items()}
    return functional_call(model, values, x)  # type: ignore[no-any-return]


def with_statistics(
    model: nn.Module, measure: Callable[[nn.BatchNorm2d, Tensor], tuple[Tensor, Tensor]]
) -> nn.Module:
    """Return a copy whose BatchNorm layers use what `measure` returns, written out."""

    def normalize(layer: nn.BatchNorm2d, args: tuple[Tensor], _: Tensor) -> Tensor:
        mean, var = (one[:, None, None] for one in measure(layer, args[0]))
        scale, shift = layer.weight[:, None, None], layer.bias[:, None, None]
        return (args[0] - mean) / (var + layer.eps).sqrt() * scale + shift

    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_hook(normalize)
    return model


def plain_medbn(model: nn.Module, x: Tensor) -> Tensor:
    def measure(layer: nn.BatchNorm2d, features: Tensor) -> tuple[Tensor, Tensor]:
        channels = [features[:, c].flatten().sort().values for c in range(features.shape[1])]
        medians = torch.stack([values[(len(values) - 1) // 2] for values in channels])
        return medians, ((features - medians[:, None, None]) ** 2).mean((0, 2, 3))

    return with_statistics(model, measure)(x)  # type: ignore[no-any-return]


def plain_bn_mix(model: nn.Module, x: Tensor) -> Tensor:
    def measure(layer: nn.BatchNorm2d, features: Tensor) -> tuple[Tensor, Tensor]:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        n, mean = len(x), features.mean((0, 2, 3))
        var = (features - mean[:, None, None]).square().mean((0, 2, 3))
        return (
            8 / (8 + n) * layer.running_mean + n / (8 + n) * mean,
            8 / (8 + n) * layer.running_var + n / (8 + n) * var,
        )

    return with_statistics(model, measure)(x)  # type: ignore[no-any-return]


CASES: list[tuple[Method, Plain]] = [
    (Hedge(steps=3, eps=0.05, lr=0.02, seed=3), plain_hedge),
    (AntiAdversary(), plain_anti_adversary),
    (Energy(steps=3, eps=0.04, lr=0.7), plain_energy),
    (Views(shifts=2), plain_views),
    (Crops(), plain_crops),
    (Lame(steps=4, strength=1.5, neighbors=3), plain_lame),
    (Memo(steps=2, lr=0.3, shifts=0), plain_memo),
    (Sar(steps=2, lr=0.2, margin=0.5, rho=0.3), plain_sar),
    (Eata(steps=3, lr=0.2, margin=0.6, similarity=0.7), plain_eata),
    (MedBn(), plain_medbn),
    (BnMix(prior=8), plain_bn_mix),
]
METHODS = [method for method, _ in CASES]
UPDATING = [method for method in METHODS if method.steps]
by_name = pytest.mark.parametrize(("method", "plain"), CASES, ids=lambda one: getattr(one, "name", ""))
each = pytest.mark.parametrize("method", METHODS, ids=lambda one: one.name)
each_updating = pytest.mark.parametrize("method", UPDATING, ids=lambda one: one.name)


@by_name
def test_logits_and_exact_gradient_of_a_plain_loop(
    method: Method, plain: Plain, net: nn.Module, images: Tensor
) -> None:
    """By autograd through the loop, in double precision."""
    ours, theirs = (images.clone().requires_grad_() for _ in range(2))
    got, wanted = Defended(net, method)(ours, gradient="unrolled"), plain(net, theirs)
    torch.testing.assert_close(got, wanted)
    assert not torch.allclose(got, net(images)), "the defense did nothing"
    weights = torch.randn_like(wanted)
    (slope,) = torch.autograd.grad((got * weights).sum(), ours)
    (expected,) = torch.autograd.grad((wanted * weights).sum(), theirs)
    torch.testing.assert_close(slope, expected)


@each
def test_exact_gradient_by_finite_differences(method: Method, net: nn.Module, images: Tensor) -> None:
    if isinstance(method, Eata):  # far from the borders of its filters, where it jumps
        method = Eata(steps=2, lr=0.05, margin=2, similarity=2)
    defended, images = Defended(net, method), (0.2 + 0.6 * images).requires_grad_()
    weights = torch.randn(len(images), 10, dtype=torch.double)
    (slope,) = torch.autograd.grad((defended(images, gradient="unrolled") * weights).sum(), images)
    direction = torch.randn_like(images)
    with torch.no_grad():
        ahead, behind = ((defended(images + way * 1e-7 * direction) * weights).sum() for way in (1, -1))
    measured = ((ahead - behind) / 2e-7).item()
    assert (slope * direction).sum().item() == pytest.approx(measured, rel=1e-4, abs=1e-5)


@each_updating
def test_exact_gradient_keeps_no_activations_from_step_to_step(
    method: Method, net: nn.Module, images: Tensor
) -> None:
    def count_held(steps: int) -> tuple[int, int]:
        """Return the bytes that the graph keeps for its backward, and those of the variables."""
        packed: list[weakref.ref[Tensor]] = []

        def pack(tensor: Tensor) -> Tensor:
            held = tensor.detach()  # a node that keeps its own output would keep itself alive
            packed.append(weakref.ref(held))
            return held

        defended, inputs = Defended(net, method), images.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            state = defended.adapt(inputs, steps=steps, gradient="unrolled")
            logits = defended.predict(inputs, state)
        held = [tensor for ref in packed if (tensor := ref()) is not None]
        sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}
        logits.sum().backward()
        return sum(sizes.values()), sum(one.numel() * one.element_size() for one in state.variables)

    (one, variables), (six, _) = count_held(1), count_held(6)
    assert six - one <= 6 * variables
    assert 6 * variables < one


@each
def test_promises(method: Method, net: nn.Module, images: Tensor) -> None:
    net.train()  # the model's mode is its owner's
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    check_defense(Defended(net, method), images)
    assert net.training


@each
def test_independent_is_true_and_not_too_modest(method: Method, net: nn.Module, images: Tensor) -> None:
    defended = Defended(net, method)
    alone = torch.cat([defended(image[None]) for image in images])
    assert torch.allclose(defended(images), alone, rtol=0, atol=1e-9) is defended.independent
    unknown = randomized(small(nn.BatchNorm2d(8)))
    assert Defended(unknown, method).independent is (None if method.independent else False)


@pytest.mark.parametrize("method", [Hedge(), Views(), Energy()], ids=lambda one: one.name)
def test_a_model_that_sees_its_batch_makes_the_defense_dependent(method: Method) -> None:
    net = randomized(small(nn.BatchNorm2d(8, track_running_stats=False)))
    assert Defended(net, method).independent is False


@each
def test_no_updates_is_the_model_with_its_statistics(
    method: Method, net: nn.Module, images: Tensor
) -> None:
    defended = Defended(net, method)
    logits = defended.predict(images, defended.adapt(images, steps=0))
    if method.name in ("sar", "eata"):
        net = with_batch_statistics(net)
    if method.name not in ("views", "crops", "medbn", "bn-mix"):
        torch.testing.assert_close(logits, net(images), rtol=0, atol=1e-12)


@each_updating
def test_updates_can_be_continued(method: Method, net: nn.Module, images: Tensor) -> None:
    defended = Defended(net, method)
    state = defended.adapt(images, steps=0)
    for _ in range(method.steps):
        state = defended.adapt(images, start=state, steps=1)
    whole = defended.adapt(images)
    assert state.steps == whole.steps == method.steps
    for got, wanted in zip(state.variables, whole.variables, strict=True):
        torch.testing.assert_close(got, wanted)


@each
def test_cost_in_forwards(method: Method, net: nn.Module, images: Tensor) -> None:
    """A backward to the first layer that adapts is a forward, or less by what comes before it."""

    def count(call: Callable[[], object]) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call()
        return int(counter.get_total_flops())

    defended = Defended(net, method)
    defended(images)  # tries a memory layout once
    share = count(lambda: defended(images)) / count(lambda: net(images))
    assert 0.85 * method.forwards < share < 1.01 * method.forwards


@each
def test_defense_and_state_survive_pickle(method: Method, net: nn.Module, images: Tensor) -> None:
    defended = Defended(net, method)
    state = defended.adapt(images.clone().requires_grad_(), gradient="unrolled").detach()
    again, copied = pickle.loads(pickle.dumps((defended, state)))
    assert isinstance(copied, Adaptation)
    torch.testing.assert_close(again.predict(images, copied), defended.predict(images, state))


@pytest.mark.parametrize(
    "method", [Hedge(steps=2), AntiAdversary(), Energy(steps=2), Lame(steps=2)], ids=lambda one: one.name
)
def test_no_normalization_layer_is_needed(method: Method) -> None:
    torch.manual_seed(0)
    check_defense(
        Defended(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)), method), torch.rand(5, 6)
    )


# By name.


def test_each_is_in_the_list_under_its_name() -> None:
    named = {
        name: entry.settings
        for name, entry in dent.DEFENSES.items()
        if isinstance(entry.settings, Method)
    }
    assert [method.name for method in named.values()] == list(named) == list(get_args(MethodName))
    assert {type(method) for method in named.values()} == {type(method) for method in METHODS}
    assert set(dent.PRESETS) == dent.DEFENSES.keys() - named.keys()
    for entry in dent.DEFENSES.values():
        if isinstance(entry.settings, Method):
            assert entry.source
            assert entry.settings == type(entry.settings)(), "the list has the defaults"


@pytest.mark.parametrize("name", get_args(MethodName))
def test_defaults_keep_the_promises(name: MethodName, net: nn.Module, images: Tensor) -> None:
    check_defense(dent.defend(net, name), images)


def test_the_same_defense_in_many_words(net: nn.Module, images: Tensor) -> None:
    asked: list[Any] = ["hedge:steps=3,eps=4/255", {"preset": "hedge", "steps": 3, "eps": "4/255"}]
    asked += [Hedge(steps=3, eps=4 / 255)]
    wanted = dent.defend(net, "hedge", steps=3, eps=4 / 255)
    for one in asked:
        defended = dent.defend(net, one)
        assert isinstance(defended, Defended)
        assert defended.settings == wanted.settings
        assert torch.equal(defended(images), wanted(images))
    assert dent.defend(net, Hedge(steps=3), steps=1).settings == Hedge(steps=1)
    assert dent.defend(net, dent.PRESETS["dent+"], steps=2).settings.steps == 2


def test_what_only_dent_can_do_is_refused(net: nn.Module) -> None:
    with pytest.raises(TypeError, match="expected with dent alone, got with hedge"):
        dent.defend(net, "hedge", compile=True)
    with pytest.raises(TypeError, match="unknown settings of the defense: objective"):
        dent.defend(net, "hedge", objective="entropy")
    with pytest.raises(ValueError, match="unknown defense 'hedg'; did you mean 'hedge'"):
        dent.defend(net, "hedg")


# Special cases.


def test_views_of_a_symmetric_model_are_the_model(images: Tensor) -> None:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + x.flip(3)).square().mean((2, 3))

    defended = Defended(Symmetric(), Views())
    torch.testing.assert_close(defended(images), Symmetric()(images), rtol=0, atol=1e-12)


def test_each_view_is_the_image_shifted() -> None:
    image = torch.zeros(1, 1, 5, 5)
    image[0, 0, 2, 2] = 1
    found = {
        directions: [
            tuple(view[0, 0].nonzero()[0].tolist())
            for view in make_views(image, mirror=False, shifts=1, directions=directions, padding="edge")
        ]
        for directions in ("straight", "diagonal")
    }
    assert found["straight"] == [(2, 2), (2, 3), (3, 2), (2, 1), (1, 2)]
    assert set(found["diagonal"]) == {(2, 2), (3, 3), (3, 1), (1, 3), (1, 1)}


def test_a_frame_takes_its_pixels_from_the_attacker(net: nn.Module, images: Tensor) -> None:
    images = images.requires_grad_()
    (slope,) = torch.autograd.grad(Defended(net, Views(frame=2))(images).square().sum(), images)
    inside = slope[:, :, 2:-2, 2:-2]
    assert (inside != 0).all()
    assert slope.count_nonzero() == inside.numel()


def test_a_frame_without_an_image_and_half_of_no_mirrors_are_refused(
    net: nn.Module, images: Tensor
) -> None:
    with pytest.raises(ValueError, match="leaves some of 12 x 12 pixels, got 6"):
        dent.defend(net, "views", frame=6)(images)
    for settings in ({"mirror": False, "shifts": 1}, {"shifts": 0}):
        with pytest.raises(ValueError, match="halve: expected with mirror=True and shifts"):
            Views(halve=True, **settings)  # type: ignore[arg-type]


def test_hedge_stays_in_the_ball_and_in_the_image(net: nn.Module, images: Tensor) -> None:
    (offset,) = Defended(net, Hedge(steps=5)).adapt(images).variables
    assert offset.abs().max() <= 8 / 255 + 1e-12
    assert (images + offset).min() >= 0
    assert (images + offset).max() <= 1


def test_hedge_starts_by_its_seed(net: nn.Module, images: Tensor) -> None:
    first, same, other = (Defended(net, Hedge(steps=1, seed=seed))(images) for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.allclose(first, other)


def test_hedge_raises_and_anti_adversary_and_energy_lower_what_they_say(
    net: nn.Module, images: Tensor
) -> None:
    labels = net(images).argmax(1)
    for method, measure, sign in (
        (Hedge(steps=5, lr=1 / 255, random_start=False), lambda z: -z.log_softmax(1).sum(1), 1),
        (AntiAdversary(lr=0.002), lambda z: F.cross_entropy(z, labels, reduction="none"), -1),
        (Energy(steps=2), lambda z: -z.logsumexp(1), -1),
    ):
        change = measure(Defended(net, method)(images)) - measure(net(images))
        assert (sign * change > 0).all(), method


def test_energy_stays_in_the_ball(net: nn.Module, images: Tensor) -> None:
    (offset,) = Defended(net, Energy(steps=5)).adapt(images).variables
    radius = 0.82 * 8 / 255 * math.sqrt(images[0].numel())
    assert offset.flatten(1).norm(dim=1).max() <= radius + 1e-9
    assert (images + offset).min() >= -1e-12
    assert (images + offset).max() <= 1 + 1e-12


def test_lame_without_affinity_is_the_model(net: nn.Module, images: Tensor) -> None:
    assert torch.equal(Defended(net, Lame(strength=0))(images).argmax(1), net(images).argmax(1))


def test_lame_lowers_its_objective_in_every_step(net: nn.Module, images: Tensor) -> None:
    """The kernel is positive semi-definite, so the fixed point is a minimization by upper bounds."""
    defended, method = Defended(net, Lame(strength=2)), Lame(strength=2)
    entered: list[Tensor] = []
    last = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
    hook = last.register_forward_pre_hook(lambda _, args: entered.append(args[0].detach()))
    log_p = net(images).log_softmax(1).detach()
    hook.remove()
    kernel = measure_affinity(entered[0], method.affinity, method.neighbors)
    assert torch.linalg.eigvalsh(kernel).min() > -1e-10
    values, state = [], defended.adapt(images, steps=0)
    for _ in range(8):
        z = defended.predict(images, state).softmax(1).detach()
        values.append((z * (z.log() - log_p)).sum() - (z * (kernel @ z)).sum())
        state = defended.adapt(images, start=state, steps=1)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(values))
    assert values[-1] < values[0] - 1e-3


@pytest.mark.parametrize("affinity", ["rbf", "knn", "linear"])
def test_lame_takes_one_input_and_equal_ones(affinity: Any, net: nn.Module, images: Tensor) -> None:
    defended = Defended(net, Lame(affinity=affinity))
    assert defended(images[:1]).isfinite().all()
    twice = images[:1].repeat(3, 1, 1, 1).requires_grad_()
    logits = defended(twice, gradient="unrolled")
    assert torch.autograd.grad(logits.sum(), twice)[0].isfinite().all()
    torch.testing.assert_close(logits[0], logits[1])


def test_median_resists_what_moves_the_mean(images: Tensor) -> None:
    net = randomized(small(nn.BatchNorm2d(8)))
    poisoned = torch.cat([images, torch.full_like(images[:1], 50.0)])

    def measure_offset(method: Method) -> float:
        """Return how far the mean that the layer uses goes."""
        features = net[0](images), net[0](poisoned)  # type: ignore[index]
        zero, one = torch.zeros(8, dtype=torch.double), torch.ones(8, dtype=torch.double)
        clean, moved = (method.estimate(x.detach(), zero, one)[0] for x in features)
        return float((moved - clean).abs().mean())

    assert measure_offset(MedBn()) < measure_offset(BnMix(prior=0)) / 10


def test_statistics_of_training_alone_are_the_model(net: nn.Module, images: Tensor) -> None:
    for method in (MedBn(share=0), BnMix(prior=1e12)):
        torch.testing.assert_close(Defended(net, method)(images), net(images))


def test_without_a_sure_prediction_sar_and_eata_learn_nothing(net: nn.Module, images: Tensor) -> None:
    for method in (Sar(margin=1e-9, lr=1), Eata(margin=1e-9, lr=1)):
        state = Defended(net, method).adapt(images, steps=3)
        assert not state.variables[0].any()


def test_sar_without_a_ball_and_eata_without_weights_are_one_step_of_sgd(
    net: nn.Module, images: Tensor
) -> None:
    """With rho = 0 and every input sure, SAR is the plain entropy."""
    (delta, _) = Defended(net, Sar(rho=0, margin=10, lr=0.1)).adapt(images).variables
    tented = with_batch_statistics(net)
    p = tented(images).softmax(1)
    slopes = torch.autograd.grad(-(p * p.log()).sum(1).mean(), affine_parameters(tented))
    torch.testing.assert_close(delta[0], -0.1 * torch.cat([slope.flatten() for slope in slopes]))


# Errors.


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="eps: expected a number > 0, got -1"):
        Hedge(eps=-1)
    with pytest.raises(TypeError, match="unknown settings of the defense: step; did you mean 'steps'"):
        Energy(step=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="steps: expected"):
        Views(steps=1)
    assert Hedge(eps="8/255").eps == 8 / 255  # type: ignore[arg-type]


def test_errors_say_what_to_do(net: nn.Module, images: Tensor) -> None:
    linear = nn.Sequential(nn.Flatten(), nn.Linear(432, 3)).double()
    for method in (Memo(), Sar(), Eata()):
        with pytest.raises(ValueError, match=f"{method.name}: expected normalization layers"):
            Defended(linear, method)
    for statistics in (MedBn(), BnMix()):
        with pytest.raises(ValueError, match=f"{statistics.name}: expected BatchNorm layers, got none"):
            Defended(linear, statistics)
    defended = Defended(net, Hedge(steps=1))
    with pytest.raises(ValueError, match="expected the 5 inputs that this state was adapted to, got 2"):
        defended.predict(images[:2], defended.adapt(images))
    with pytest.raises(ValueError, match="gradient: expected stale or unrolled, got 'exact'"):
        defended.adapt(images, gradient="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps: expected 0, because views makes no updates, got 2"):
        Defended(net, Views()).adapt(images, steps=2)
    with pytest.raises(ValueError, match="expected images"):
        Defended(linear, Views())(torch.rand(2, 432, dtype=torch.double))
    with pytest.raises(ValueError, match="to end in a linear layer"):
        Defended(nn.Flatten(), Lame())(images)
    with pytest.raises(TypeError, match="the model is defended already"):
        Defended(defended, Views())
