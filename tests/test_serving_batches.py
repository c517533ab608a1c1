"""Who shares a batch with whom, and that it makes no difference; without Ray."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from nets import small
from torch import Tensor, nn

from dent.defense import Dent, defend
from dent.serving.answers import Answer, ModelError
from dent.serving.batches import Batches, Reply
from dent.serving.inputs import Refusal
from dent.serving.replica import Replica, answer_groups
from dent.serving.settings import Serving

TOLERANCE = 1e-5  # of probabilities, between one batch and another; what is documented
BATCHWISE = "dent:steps=10,lr=0.1"


class Extreme(nn.Module):
    """A network that no image of a single color can be given."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        if bool((inputs.flatten(1).std(1) == 0).any()):
            raise RuntimeError("one color")
        logits: Tensor = self.net(inputs)
        return logits


def net() -> nn.Module:
    torch.manual_seed(1)
    model = small(nn.BatchNorm2d(8)).eval()
    model[-1].weight.data *= 2  # type: ignore[index]
    return model


def serving(**settings: Any) -> Serving:
    defaults: dict[str, Any] = {
        "size": (8, 8), "classes": "numbers", "batch_size": 8, "max_wait": "5ms", "defense": "dent+solo",
    }  # fmt: skip
    return Serving(**defaults | settings)


def defense(asked: Serving, model: nn.Module | None = None) -> Dent:
    return defend(model or net(), asked.defense)


def images(n: int, seed: int = 0) -> Tensor:
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def poison(n: int) -> Tensor:
    """Images of black and white pixels only, which draw a shared adaptation to their own class."""
    return (images(n, seed=9) > 0.5).float()


class Recorded:
    """A replica, without Ray, and the sizes of the batches that it was given."""

    def __init__(self, asked: Serving, model: nn.Module | None = None) -> None:
        self.defense = defense(asked, model)
        self.sizes: list[int] = []
        self._replica = Replica(asked, self.defense)

    async def __call__(self, inputs: Any, sizes: list[int], steps: int | None) -> list[Reply]:
        self.sizes.append(len(inputs))
        return await self._replica.answer(inputs, sizes, steps)


def batches_of(asked: Serving, replica: Recorded) -> Batches:
    return Batches(
        asked, replica, steps=replica.defense.settings.steps,
        shared=replica.defense.settings.independent or asked.shared_batches,
    )  # fmt: skip


def served(
    asked: Serving, *requests: Tensor, model: nn.Module | None = None, sizes: list[int] | None = None
) -> list[Reply]:
    """The answers to requests that come at once."""

    async def all_at_once() -> list[Reply]:
        replica = Recorded(asked, model)
        batches = batches_of(asked, replica)
        found = await asyncio.gather(*(batches.predict(one.numpy()) for one in requests))
        if sizes is not None:
            sizes.extend(replica.sizes)
        return found

    return asyncio.run(all_at_once())


def same(one: Reply, other: Reply, tolerance: float) -> bool:
    pairs = list(zip(one.answers, other.answers, strict=True))
    assert pairs
    return all(
        a.label == b.label
        and torch.allclose(
            torch.tensor(a.probabilities), torch.tensor(b.probabilities), rtol=0, atol=tolerance
        )
        for a, b in pairs
    )


def test_an_independent_defense_answers_as_if_each_client_were_alone() -> None:
    sizes: list[int] = []
    benign = images(3).split(1)
    beside = served(serving(), *benign, *poison(5).split(1), sizes=sizes)
    assert sizes == [8]  # they did share a batch
    for request, answered in zip(benign, beside, strict=False):
        (alone,) = served(serving(), request)
        assert same(alone, answered, TOLERANCE)
        assert answered.answers[0].steps == 6


def test_other_defenses_have_batches_of_one_client() -> None:
    sizes: list[int] = []
    benign = images(4)
    asked = serving(defense=BATCHWISE)
    first, *_ = served(asked, benign, *poison(8).split(4), sizes=sizes)
    assert sizes == [4, 4, 4]
    (alone,) = served(asked, benign)
    assert same(alone, first, 0)


def test_what_sharing_the_batches_of_such_a_defense_would_do() -> None:
    """The same request beside poison: other probabilities, and another class."""
    sizes: list[int] = []
    benign = images(4)
    asked = serving(defense=BATCHWISE, shared_batches=True)
    first, *_ = served(asked, benign, *poison(4).split(1), sizes=sizes)
    assert sizes == [8]
    (alone,) = served(asked, benign)
    assert not same(alone, first, 0.1)
    labels = [[one.label for one in answered.answers] for answered in (alone, first)]
    assert all(before != after for before, after in zip(*labels, strict=True))


def test_requests_are_spread_over_batches_and_answered_in_order() -> None:
    sizes: list[int] = []
    large, small_ = images(13), images(3, seed=1)
    answered = served(serving(), large, small_, sizes=sizes)
    assert sizes == [8, 8]
    for one, request in zip(answered, (large, small_), strict=True):
        alone = [served(serving(), image)[0] for image in request.split(1)]
        together = Reply(tuple(a for each in alone for a in each.answers))
        assert same(together, one, TOLERANCE)
    assert sum(len(one.batches) for one in answered) == 2  # each batch is counted once
    assert sum(batch.size for one in answered for batch in one.batches) == 16


def test_who_makes_the_model_fail_fails_alone() -> None:
    benign = images(6).split(1)
    wrong = torch.full((1, 3, 8, 8), 0.5)
    *first, failed, last = served(serving(), *benign[:5], wrong, benign[5], model=Extreme(net()))
    assert (failed.answers, failed.failure) == ((), "the model cannot answer: one color")
    for request, answered in zip(benign, [*first, last], strict=True):
        assert same(served(serving(), request)[0], answered, TOLERANCE)


def test_a_failure_costs_others_two_more_batches() -> None:
    seen = 0

    def answer(inputs: Tensor) -> list[Any]:
        nonlocal seen
        seen += len(inputs)
        if (inputs < 0).any():
            raise ModelError("negative")
        return inputs.tolist()

    groups = list(torch.arange(64.0).split(1))
    groups[37] = -groups[37]
    found = answer_groups(answer, groups)
    assert [one.failure for one in found] == ["negative" if at == 37 else "" for at in range(64)]
    values: list[Any] = [answer for one in found for answer in one.answers]
    assert values == [float(at) for at in range(64) if at != 37]
    assert seen <= 3 * 64


def test_a_long_queue_drops_updates_if_asked_for() -> None:
    requests = images(40).split(1)
    steps = [one.answers[0].steps for one in served(serving(), *requests)]
    assert set(steps) == {6}
    steps = [one.answers[0].steps or 0 for one in served(serving(queue=40, shed=10), *requests)]
    assert steps == sorted(
        steps, key=lambda one: one or 0
    )  # the longer the queue behind a batch, the fewer
    assert (steps[0], steps[-1]) == (1, 6)


def test_how_long_a_batch_takes_is_known_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def seen() -> list[float]:
        leave = threading.Event()

        def hang(*_: Any, **__: Any) -> list[Any]:
            leave.wait(60)
            return [None]

        monkeypatch.setattr("dent.serving.replica.answer_batch", hang)
        replica = Replica(serving(), defense(serving()))
        busy = [replica.busy_seconds]
        answer = asyncio.ensure_future(replica.answer(images(1).numpy(), [1], 6))
        while not replica.busy_seconds:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        busy.append(replica.busy_seconds)
        leave.set()
        (answered,) = await answer
        return [*busy, replica.busy_seconds, answered.batches[0].seconds]

    before, during, after, took = asyncio.run(seen())
    assert before == after == 0
    assert took >= during >= 0.05


class Slow:
    """Replicas that answer when they are let go, and what they were given."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.given: list[int] = []

    async def __call__(self, inputs: Any, sizes: list[int], steps: int | None) -> list[Reply]:
        self.given.append(len(inputs))
        await self.go_on.wait()
        return [Reply() for _ in sizes]


async def trickle(asked: Serving, count: int) -> tuple[list[int], list[int]]:
    """Sizes of the batches that are given to replicas before one has answered, and of all."""
    slow = Slow()
    batches = Batches(asked, slow, shared=True, steps=6)
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.ensure_future(batches.predict(images(1).numpy())))
        await asyncio.sleep(0.005)
    early = slow.given.copy()
    slow.go_on.set()
    await asyncio.gather(*tasks)
    return early, slow.given


def test_what_comes_while_a_batch_is_computed_makes_one_batch() -> None:
    """Ray's batching alone would make one of each."""
    assert asyncio.run(trickle(serving(max_wait="1ms"), 7)) == ([1], [1, 6])


def test_a_full_batch_goes_ahead_and_waits_at_the_replica() -> None:
    asked = serving(max_wait="1ms", batch_size=4)
    assert asyncio.run(trickle(asked, 10)) == ([1, 4], [1, 4, 4, 1])


def test_every_replica_has_a_batch() -> None:
    asked = serving(max_wait="1ms", batch_size=4, replicas=2)
    assert asyncio.run(trickle(asked, 4)) == ([1, 1], [1, 1, 2])
    asked = serving(max_wait="1ms", batch_size=4, replicas=1, max_replicas=2)
    assert asyncio.run(trickle(asked, 14)) == ([1, 1, 4, 4], [1, 1, 4, 4, 4])


@pytest.mark.parametrize("running", [True, False])
def test_who_leaves_gives_up_the_place(running: bool) -> None:
    """Both a request that waits in line, and one whose batch is waiting to be full."""

    async def leave() -> list[int]:
        slow = Slow()
        batches = Batches(serving(max_wait="20ms", batch_size=2), slow, shared=True, steps=6)

        async def ask() -> asyncio.Task[Reply]:
            task = asyncio.ensure_future(batches.predict(images(1).numpy()))
            await asyncio.sleep(0)
            return task

        if running:  # with a batch ahead of it at the replica, nothing starts any more
            early = [await ask() for _ in range(4)]
        first = await ask()
        first.cancel()
        await asyncio.wait([first])
        last = await ask()
        slow.go_on.set()
        await asyncio.wait_for(last, 5)
        assert not running or all(task.done() for task in early)
        return slow.given

    assert asyncio.run(leave()) == ([2, 2, 1] if running else [1])


def test_an_error_of_a_batch_reaches_its_requests_and_no_others() -> None:
    async def fail() -> list[Any]:
        calls = 0

        async def compute(inputs: Any, sizes: list[int], steps: int | None) -> list[Reply]:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise Refusal(503, "gone")
            return [Reply() for _ in sizes]

        batches = Batches(serving(batch_size=2), compute, shared=True, steps=6)
        requests = [images(1), images(2), images(1)]
        return await asyncio.gather(
            *(batches.predict(one.numpy()) for one in requests), return_exceptions=True
        )

    first, second, third = asyncio.run(fail())
    assert isinstance(first, Refusal)
    assert isinstance(second, Refusal)  # half of it was in the batch that failed
    assert third == Reply()


def test_requests_that_are_canceled_block_no_others() -> None:
    async def cancel() -> Reply:
        asked = serving(batch_size=2, max_wait="20ms")
        batches = batches_of(asked, Recorded(asked))
        tasks = [asyncio.ensure_future(batches.predict(images(3).numpy())) for _ in range(3)]
        await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        return await asyncio.wait_for(batches.predict(images(3).numpy()), 10)

    assert len(asyncio.run(cancel()).answers) == 3


def test_an_answer_is_what_the_defense_computes() -> None:
    (answered,) = served(serving(), images(4))
    logits = defend(net(), "dent+", objective="entropy", reduction="sum")(images(4)).detach()
    found = torch.tensor([one.probabilities for one in answered.answers])
    assert torch.allclose(found.float(), logits.softmax(1), atol=TOLERANCE)
    assert all(isinstance(one, Answer) for one in answered.answers)
