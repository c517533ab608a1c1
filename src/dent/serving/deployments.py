"""What Ray Serve runs: a front that clients talk to, and replicas of the model behind it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from ray import serve
from ray._private import ray_constants
from ray.exceptions import RayActorError
from ray.serve._private import replica
from ray.serve.exceptions import DeploymentUnavailableError
from torch import Tensor

from dent.defense import Dent, defend
from dent.models import load_model
from dent.serving.admission import Admission
from dent.serving.answers import Failed, answer_batch
from dent.serving.app import About, Token, make_app
from dent.serving.batches import Answered, Batches, Together
from dent.serving.limits import Refused
from dent.serving.metrics import Metrics
from dent.serving.priority import yielding
from dent.serving.replica import Replica
from dent.serving.settings import Serving

ALIVE = 5.0  # seconds within which a replica says that it is there
MORE = 100  # requests beyond the predictions: how it goes, the page, metrics
STUCK = 3  # times the deadline, after which a batch is taken to hang
GRACE = 5.0  # seconds beyond the deadline, for the last answers on their way


@dataclass(frozen=True)
class Described:
    """What clients are told of what is served; whether they share batches; updates of the defense."""

    about: About
    shared: bool
    steps: int


def defended(serving: Serving) -> Dent:
    """The model that is served; what does not fit together is told here, before anyone asks it."""
    defense = defend(load_model(serving.model).to(serving.device), serving.defense)
    inputs = torch.zeros(1, 3, *serving.size, device=serving.device)
    try:
        answer_batch(defense, inputs, classes=serving.classes)
    except Failed as error:
        height, width = serving.size
        raise ValueError(
            f"expected a model of images of {height} x {width} pixels, got: {error}"
        ) from error
    return defense


def described(serving: Serving) -> Described:
    """What is served, and how its clients are kept apart; loads it, and so finds what is wrong."""
    defense = defended(serving)
    if defense.independent:
        isolation = "independent: an answer does not depend on what else is in its batch"
    elif serving.shared_batches:
        isolation = "shared batches: clients can change what others are answered"
    else:
        isolation = "own batches: an answer depends on the images of its own request only"
    return Described(
        {"model": serving.model, "defense": serving.defense, "isolation": isolation},
        shared=defense.independent or serving.shared_batches,
        steps=defense.settings.steps,
    )


def stay_here() -> None:
    """Where Ray itself is reached from this machine only, so is this replica.

    Ray Serve has each listen on all interfaces for others, who send pickles and have Ray's token. Here
    nobody does.
    """
    if not ray_constants.ENABLE_RAY_CLUSTER:
        module: Any = replica
        listen = module.add_port_to_grpc_server
        module.add_port_to_grpc_server = lambda server, address: listen(
            server, address.replace("[::]", "127.0.0.1")
        )


class Model:
    """A replica: one copy of the model in a process of its own.

    folder, path: the current folder of the program that serves, and where it finds modules.
    """

    def __init__(self, serving: Serving, threads: int, folder: str, path: list[str]) -> None:
        stay_here()
        torch.set_num_threads(threads)
        with suppress(OSError):  # on another machine it may not be there
            os.chdir(folder)
        sys.path += [place for place in path if place not in sys.path]
        self.serving = serving
        self.replica = Replica(serving, defended(serving))

    async def answer(self, images: Any, sizes: list[int], steps: int) -> list[Answered]:
        return await self.replica.answer(images, sizes, steps)

    async def alive(self) -> None:
        pass

    async def check_health(self) -> None:
        """Ray asks every ten seconds; a replica that fails is replaced."""
        if (seconds := self.replica.busy_for) > STUCK * self.serving.deadline:
            raise RuntimeError(f"expected a batch to end, got none in {seconds:.0f} s")


def rays_batching(together: Together, size: int, wait: float, at_once: int) -> Any:
    """Ray Serve's: a batch is closed when it is full, or when its first item has waited so long."""

    @serve.batch(max_batch_size=size, batch_wait_timeout_s=wait, max_concurrent_batches=at_once)
    async def batched(items: list[Any]) -> list[Answered]:
        return await together(items)

    return batched


class Front:
    """The only process that clients talk to, through Ray's proxy; replicas get whole batches from it.

    So that what it takes to talk to many clients takes nothing from the time of a model.
    """

    def __init__(self, model: Any, serving: Serving, told: Described, token: Token | None) -> None:
        stay_here()
        self.model, self.serving, self.told, self.token = model, serving, told, token
        self.metrics = Metrics()
        self.admission = Admission(most_inside(serving))
        self.batches = Batches(
            serving, self.compute, shared=told.shared, steps=told.steps, batching=rays_batching
        )
        # One line for each form that is malformed, else: clients could fill the disk.
        logging.getLogger("python_multipart").setLevel(logging.ERROR)

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Ray, in the process of the front."""
        yielding()()
        return make_app(
            self.serving, self.predict, about=self.told.about, alive=self.alive,
            admission=self.admission, metrics=self.metrics, token=self.token,
        )  # fmt: skip

    async def predict(self, images: Tensor) -> Answered:
        return await self.batches.predict(images.numpy())

    async def compute(self, images: Any, sizes: list[int], steps: int) -> list[Answered]:
        """Ask a replica, and once more if it dies: a prediction changes nothing, so it is repeated."""
        for _ in range(2):
            try:
                found: list[Answered] = await self.model.answer.remote(images, sizes, steps)
                return found
            except DeploymentUnavailableError:
                raise Refused(503, "no replica of the model can be started") from None
            except RayActorError:
                self.metrics.retried()
        raise Refused(503, "two replicas of the model died with this batch")

    async def alive(self) -> None:
        """Refuse if no replica answers."""
        try:
            async with asyncio.timeout(ALIVE):
                await self.model.alive.remote()
        except (TimeoutError, RayActorError, DeploymentUnavailableError):
            raise Refused(503, "no replica of the model answers") from None

    async def drain(self, seconds: float) -> int:
        """Take no more requests, and wait for those inside; how many are left."""
        return await self.admission.empty(seconds)


def most_inside(serving: Serving) -> int:
    """Requests that are taken in at once: those that wait, and a batch of one image each in work."""
    return serving.queue + serving.most_replicas * serving.batch_size


def copies(serving: Serving) -> dict[str, Any]:
    """How many replicas: a number, or two, between which Ray chooses by the requests that they have."""
    if serving.max_replicas is None:
        return {"num_replicas": serving.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": serving.replicas,
            "max_replicas": serving.max_replicas,
            "target_ongoing_requests": 1,  # batches for each replica
            "upscale_delay_s": 10.0,
        }
    }


def application(serving: Serving, told: Described, token: Token | None, threads: int) -> Any:
    """What Ray Serve runs: the front, and the model in as many replicas as were asked for."""
    options: dict[str, Any] = {
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": serving.deadline + GRACE,
    }
    gpus = {"num_gpus": 1} if serving.device.startswith("cuda") else {}
    model = serve.deployment(
        name="model", ray_actor_options={"num_cpus": threads, **gpus},
        max_ongoing_requests=2 * serving.most_replicas + MORE, **copies(serving), **options,
    )(Model)  # fmt: skip
    # Twice what is taken in, so that a crowd hears from the front why it is not; beyond that, from Ray.
    crowd = 2 * most_inside(serving) + MORE
    front = serve.deployment(
        name="front", ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=crowd, max_queued_requests=crowd,
        backpressure_config={"status_code": 429, "retry_after_s": 1}, **options,
    )(serve.ingress()(Front))  # fmt: skip
    # The only GPU that a replica sees is its first one, whatever its number here.
    own = replace(serving, device="cuda") if gpus else serving
    there = model.bind(own, threads, os.getcwd(), sys.path)
    return front.bind(there, serving, told, token)
