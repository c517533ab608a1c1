"""Who shares a batch with whom, and that it makes no difference; without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from nets import small
from torch import Tensor, nn

from dent.defense import Dent, defend
from dent.serving.answers import Answer, Failed
from dent.serving.batches import Answered, Batches, Gate, Item, Together
from dent.serving.replica import Replica, answer_groups
from dent.serving.settings import INDEPENDENT, Serving

TOLERANCE = 1e-5  # of probabilities, between one batch and another; what is documented
BATCHWISE = "dent:steps=10,lr=0.1"


class Collecting:
    """Batching as Ray Serve does it: a batch is closed when full or late, whatever is being computed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(
        self, together: Together, size: int, wait: float, at_once: int
    ) -> Callable[[Item], Awaitable[Answered]]:
        waiting: list[tuple[Item, asyncio.Future[Answered]]] = []
        so_many = asyncio.Semaphore(at_once)
        running: set[asyncio.Task[None]] = set()

        def close() -> None:
            if waiting:
                running.add(asyncio.ensure_future(work(waiting.copy())))
                waiting.clear()

        async def work(batch: list[tuple[Item, asyncio.Future[Answered]]]) -> None:
            async with so_many:
                batch = [(item, future) for item, future in batch if not future.cancelled()]
                if batch:
                    self.sizes.append(sum(len(item.images) for item, _ in batch))
                    for answered, (_, future) in zip(
                        await together([item for item, _ in batch]), batch, strict=True
                    ):
                        if not future.done():
                            future.set_result(answered)

        async def put(item: Item) -> Answered:
            future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
            waiting.append((item, future))
            if len(waiting) == size:
                close()
            elif len(waiting) == 1:
                asyncio.get_running_loop().call_later(wait, close)
            return await future

        return put


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
        "size": (8, 8), "classes": "numbers", "batch_size": 8, "max_wait": "5ms", "defense": INDEPENDENT,
    }  # fmt: skip
    return Serving(**defaults | settings)


def defense(asked: Serving, model: nn.Module | None = None) -> Dent:
    return defend(model or net(), asked.defense)


def images(n: int, seed: int = 0) -> Tensor:
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def poison(n: int) -> Tensor:
    """Images of black and white pixels only, which draw a shared adaptation to their own class."""
    return (images(n, seed=9) > 0.5).float()


def collected(asked: Serving, batching: Collecting, model: nn.Module | None = None) -> Batches:
    """The batches of a server with one replica, without Ray."""
    made = defense(asked, model)
    return Batches(
        asked, Replica(asked, made).answer, batching=batching, steps=made.settings.steps,
        shared=made.independent or asked.shared_batches,
    )  # fmt: skip


def served(
    asked: Serving, *requests: Tensor, model: nn.Module | None = None, sizes: list[int] | None = None
) -> list[Answered]:
    """The answers to requests that come at once."""

    async def all_at_once() -> list[Answered]:
        collecting = Collecting()
        batches = collected(asked, collecting, model)
        found = await asyncio.gather(*(batches.predict(one.numpy()) for one in requests))
        if sizes is not None:
            sizes.extend(collecting.sizes)
        return found

    return asyncio.run(all_at_once())


def same(one: Answered, other: Answered, tolerance: float) -> bool:
    pairs = list(zip(one.answers, other.answers, strict=True))
    assert pairs
    return all(
        a.defended.label == b.defended.label
        and torch.allclose(
            torch.tensor(a.defended.probabilities), torch.tensor(b.defended.probabilities),
            rtol=0, atol=tolerance,
        )
        for a, b in pairs
    )  # fmt: skip


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
    labels = [[one.defended.label for one in answered.answers] for answered in (alone, first)]
    assert all(before != after for before, after in zip(*labels, strict=True))


def test_requests_are_spread_over_batches_and_answered_in_order() -> None:
    sizes: list[int] = []
    large, small_ = images(13), images(3, seed=1)
    answered = served(serving(), large, small_, sizes=sizes)
    assert sizes == [8, 8]
    for one, request in zip(answered, (large, small_), strict=True):
        alone = [served(serving(), image)[0] for image in request.split(1)]
        together = Answered(tuple(a for each in alone for a in each.answers))
        assert same(together, one, TOLERANCE)
    assert sum(len(one.batches) for one in answered) == 2  # each batch is counted once
    assert sum(batch.size for one in answered for batch in one.batches) == 16


def test_who_makes_the_model_fail_fails_alone() -> None:
    benign = images(6).split(1)
    wrong = torch.full((1, 3, 8, 8), 0.5)
    *first, failed, last = served(serving(), *benign[:5], wrong, benign[5], model=Extreme(net()))
    assert (failed.answers, failed.failed) == ((), "the model cannot answer: one color")
    for request, answered in zip(benign, [*first, last], strict=True):
        assert same(served(serving(), request)[0], answered, TOLERANCE)


def test_a_failure_costs_others_two_more_batches() -> None:
    seen = 0

    def answer(inputs: Tensor) -> list[Any]:
        nonlocal seen
        seen += len(inputs)
        if (inputs < 0).any():
            raise Failed("negative")
        return inputs.tolist()

    groups = list(torch.arange(64.0).split(1))
    groups[37] = -groups[37]
    found = answer_groups(answer, groups)
    assert [one.failed for one in found] == ["negative" if at == 37 else "" for at in range(64)]
    values: list[Any] = [answer for one in found for answer in one.answers]
    assert values == [float(at) for at in range(64) if at != 37]
    assert seen <= 3 * 64


def test_a_long_queue_drops_updates_if_asked_for() -> None:
    requests = images(40).split(1)
    steps = [one.answers[0].steps for one in served(serving(), *requests)]
    assert set(steps) == {6}
    steps = [one.answers[0].steps for one in served(serving(queue=40, shed=10), *requests)]
    assert steps == sorted(steps)  # the longer the queue behind a batch, the fewer
    assert (steps[0], steps[-1]) == (1, 6)


def test_how_long_a_batch_takes_is_known_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def seen() -> list[float]:
        leave = threading.Event()

        def hang(*_: Any, **__: Any) -> list[Any]:
            leave.wait(60)
            return [None]

        monkeypatch.setattr("dent.serving.replica.answer_batch", hang)
        replica = Replica(serving(), defense(serving()))
        busy = [replica.busy_for]
        answer = asyncio.ensure_future(replica.answer(images(1).numpy(), [1], 6))
        while not replica.busy_for:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        busy.append(replica.busy_for)
        leave.set()
        (answered,) = await answer
        return [*busy, replica.busy_for, answered.batches[0].seconds]

    before, during, after, took = asyncio.run(seen())
    assert before == after == 0
    assert took >= during >= 0.05


class Slow:
    """Replicas that answer when they are let go, and what they were given."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.given: list[int] = []

    async def __call__(self, inputs: Any, sizes: list[int], steps: int) -> list[Answered]:
        self.given.append(len(inputs))
        await self.go_on.wait()
        return [Answered() for _ in sizes]


async def trickle(asked: Serving, count: int) -> tuple[list[int], list[int]]:
    """Sizes of the batches that are given to replicas before one has answered, and of all."""
    slow = Slow()
    batches = Batches(asked, slow, shared=True, steps=6, batching=Collecting())
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


@pytest.mark.parametrize("let_in", [True, False])
def test_who_leaves_gives_up_the_place(let_in: bool) -> None:
    """Both of those who wait in line, and of those who were let in."""

    async def leave() -> list[str]:
        gate, seen = Gate(1), []

        async def client(name: str) -> None:
            async with gate.place():
                seen.append(name)
                await asyncio.sleep(0 if name == "last" else 60)

        tasks = [asyncio.ensure_future(client(name)) for name in ("first", "second", "last")]
        await asyncio.sleep(0.01)
        for task in tasks[:2] if let_in else reversed(tasks[:2]):
            task.cancel()
        await asyncio.wait_for(tasks[2], 5)
        return seen

    assert asyncio.run(leave()) == ["first", "last"]


def test_nobody_is_let_in_while_a_batch_is_computed() -> None:
    async def enter() -> tuple[bool, bool]:
        gate = Gate(2)

        async def client() -> None:
            async with gate.place():
                pass

        with gate.working([]):
            task = asyncio.ensure_future(client())
            await asyncio.sleep(0.01)
            early = task.done()
        await asyncio.wait_for(task, 5)
        return early, task.done()

    assert asyncio.run(enter()) == (False, True)


def test_requests_that_are_canceled_block_no_others() -> None:
    async def cancel() -> Answered:
        asked = serving(batch_size=2, max_wait="20ms")
        batches = collected(asked, Collecting())
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
    found = torch.tensor([one.defended.probabilities for one in answered.answers])
    assert torch.allclose(found.float(), logits.softmax(1), atol=TOLERANCE)
    assert all(isinstance(one, Answer) for one in answered.answers)
