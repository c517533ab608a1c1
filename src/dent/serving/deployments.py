"""What Ray Serve runs: a front that clients talk to, and replicas of the model behind it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray._private import ray_constants
from ray.exceptions import RayActorError
from ray.serve._private import replica as ray_replica
from ray.serve.exceptions import DeploymentUnavailableError
from torch import Tensor

from dent.clusters import prepare_worker
from dent.serving.app import Admission, Token, make_app
from dent.serving.batches import Batches, Reply
from dent.serving.inputs import Refusal
from dent.serving.metrics import Metrics
from dent.serving.replica import Replica, Service, load_defense
from dent.serving.settings import Serving

ANSWER_SECONDS = 5.0  # within which a replica says that it is there
OTHER_REQUESTS = 100  # for health, metrics and the page, beyond the predictions
STUCK = 3  # times the deadline, after which a batch is taken to hang
GRACE = 5.0  # seconds beyond the deadline, for the last answers to arrive


def listen_locally() -> None:
    """Have this replica listen on loopback only, if Ray itself does.

    Ray Serve opens a gRPC port of every replica on all interfaces, for callers that send pickles. Nobody
    here uses it. `dent.clusters.check_open_ports` proves that this worked.
    """
    if not ray_constants.ENABLE_RAY_CLUSTER:
        module: Any = ray_replica
        add_port = module.add_port_to_grpc_server
        module.add_port_to_grpc_server = lambda server, address: add_port(
            server, address.replace("[::]", "127.0.0.1")
        )


def make_priority_lowerer() -> Callable[..., None]:
    """Return a function that gives its process the lowest CPU priority.

    When a batch is answered, all its clients ask again at once. Without priorities, talking to them
    takes a tenth of the time from the model that computes the next batch.

    The function is made here because Ray sends a local function as code. It would send any other by the
    name of its module, and a proxy would have to load dent and torch.
    """

    def lower_priority(*_: Any) -> None:
        import os
        from contextlib import suppress
        from pathlib import Path

        lowest = 19
        tasks = Path("/proc/self/task")  # on Linux, each thread has its own priority
        if tasks.exists():
            for thread in tasks.iterdir():
                with suppress(OSError):  # it has ended
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), lowest)
        else:
            os.nice(lowest)

    return lower_priority


def lower_proxies() -> None:
    """Give Ray Serve's proxies the lowest CPU priority."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith("SERVE_PROXY_ACTOR"):
            proxy = ray.get_actor(actor["name"], actor["namespace"])
            ray.get(proxy.__ray_call__.remote(make_priority_lowerer()))


class Model:
    """A replica of the model in its own process. folder, path: see `dent.clusters.prepare_worker`."""

    def __init__(self, serving: Serving, threads: int, folder: str, path: list[str]) -> None:
        listen_locally()
        prepare_worker(threads, folder, path)
        self.serving = serving
        self.replica = Replica(serving, *load_defense(serving))

    async def answer(self, images: Any, sizes: list[int], steps: int | None) -> list[Reply]:
        return await self.replica.answer(images, sizes, steps)

    async def respond(self) -> None:
        """Do nothing: a reply says that this replica is there."""

    async def check_health(self) -> None:
        """Raise RuntimeError if the current batch hangs; Ray then replaces this replica."""
        if (seconds := self.replica.busy_seconds) > STUCK * self.serving.deadline:
            raise RuntimeError(f"expected a batch to end, got none in {seconds:.0f} s")


class Front:
    """The only process that clients talk to, through Ray's proxy; it gives replicas whole batches.

    So talking to many clients takes no time from a model.
    """

    def __init__(self, model: Any, serving: Serving, service: Service, token: Token | None) -> None:
        listen_locally()
        self.model, self.serving, self.service, self.token = model, serving, service, token
        self.metrics = Metrics()
        self.admission = Admission(serving.max_requests)
        self.batches = Batches(serving, self.compute, shared=service.shared, steps=service.steps)
        # It warns of every malformed form, so clients could fill the disk with its log.
        logging.getLogger("python_multipart").setLevel(logging.ERROR)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application; Ray calls this in the front's process."""
        make_priority_lowerer()()
        return make_app(
            self.serving, self.service, predict=self.predict, check_replica=self.check_replica,
            admission=self.admission, metrics=self.metrics, token=self.token,
        )  # fmt: skip

    async def predict(self, images: Tensor) -> Reply:
        return await self.batches.predict(images.numpy())

    async def compute(self, images: Any, sizes: list[int], steps: int | None) -> list[Reply]:
        """Ask a replica, and another one if it dies: a prediction changes nothing, so it is repeated."""
        for _ in range(2):
            try:
                replies: list[Reply] = await self.model.answer.remote(images, sizes, steps)
                return replies
            except DeploymentUnavailableError:
                raise Refusal(503, "no replica of the model can be started") from None
            except RayActorError:
                self.metrics.count_retry()
        raise Refusal(503, "two replicas of the model died with this batch")

    async def check_replica(self) -> None:
        """Refuse if no replica answers."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self.model.respond.remote()
        except (TimeoutError, RayActorError, DeploymentUnavailableError):
            raise Refusal(503, "no replica of the model answers") from None

    async def drain(self, seconds: float) -> int:
        """Accept no more requests, wait for those inside, and return how many are left."""
        return await self.admission.drain(seconds)


def make_scaling(serving: Serving) -> dict[str, Any]:
    """Return Ray's options for the number of replicas: fixed, or by load between two numbers."""
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


def make_application(serving: Serving, service: Service, token: Token | None, threads: int) -> Any:
    """Return what Ray Serve runs: the front, and the replicas of the model."""
    options: dict[str, Any] = {
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": serving.deadline + GRACE,
    }
    gpus = {"num_gpus": 1} if serving.device.startswith("cuda") else {}
    model = serve.deployment(
        name="model", ray_actor_options={"num_cpus": threads, **gpus},
        max_ongoing_requests=2 * serving.most_replicas + OTHER_REQUESTS, **make_scaling(serving),
        **options,
    )(Model)  # fmt: skip
    # Twice what is accepted, so that the front can tell a crowd why; beyond that, Ray refuses.
    crowd = 2 * serving.max_requests + OTHER_REQUESTS
    front = serve.deployment(
        name="front", ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=crowd, max_queued_requests=crowd,
        backpressure_config={"status_code": 429, "retry_after_s": 1}, **options,
    )(serve.ingress()(Front))  # fmt: skip
    # A replica sees one GPU only, which is its first one, whatever its number here.
    own = serving.replace(device="cuda") if gpus else serving
    replicas = model.bind(own, threads, os.getcwd(), sys.path)
    return front.bind(replicas, serving, service, token)
