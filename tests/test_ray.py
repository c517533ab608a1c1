"""Ray's workers do what this process does, to the last digit, whatever becomes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from nets import small
from torch import Tensor, nn

from dent.attacks.checks import InvalidPointsError
from dent.data import Dataset
from dent.evaluation import Evaluation, Results, evaluate, ray_engine
from dent.evaluation.digests import digest_model
from dent.evaluation.sources import Sources
from dent.evaluation.store import UnitResult

ray = pytest.importorskip("ray")

N, BATCH = 8, 4
SMALL: dict[str, Any] = {
    "defenses": ["static", "dent+:steps=2"],
    "batch_size": BATCH,
    "steps": 2,
    "eps": 0.1,
    "threads": 1,
}


@pytest.fixture(scope="module")
def started() -> Iterator[None]:
    """The caller's own Ray, which all runs below share, and leave as it is."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            "local", num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False,
            log_to_driver=False, logging_level="error",
        )  # fmt: skip
    yield
    assert ray.is_initialized()
    ray.shutdown()


def net() -> nn.Module:
    torch.manual_seed(1)
    return small(nn.BatchNorm2d(8)).eval()


Event = Callable[[int, int, Tensor], Tensor]  # (batch by its first point, which read of it, the images)


class Reader:
    """Images, and a file for each time that a worker reads a batch; then an event may follow."""

    def __init__(self, folder: Path, event: Event | None = None) -> None:
        self.folder, self.event, self.driver = folder, event, os.getpid()
        self.images = torch.rand(N, 3, 8, 8, generator=torch.Generator().manual_seed(2))

    def __call__(self, indices: Tensor) -> Tensor:
        images = self.images[indices]
        if os.getpid() == self.driver or len(indices) < BATCH:  # no unit's
            return images
        (self.folder / f"{indices[0]}-{uuid4().hex}.read").touch()
        if self.event is None:
            return images
        return self.event(int(indices[0]), len(list(self.folder.glob(f"{indices[0]}-*.read"))), images)

    @property
    def reads(self) -> int:
        return len(list(self.folder.glob("*.read")))

    def dataset(self) -> Dataset:
        return Dataset("random", torch.arange(N) % 4, lambda at: self(at), tuple("abcd"))


def files(folder: Path) -> dict[str, Any]:
    """All that must not vary from run to run."""
    found: dict[str, Any] = {"run": json.loads((folder / "run.json").read_text())}
    for path in (folder / "units").rglob("*"):
        if path.is_file():
            content = json.loads(path.read_text())
            assert content.pop("took")
            found[str(path.relative_to(folder))] = content
    results = json.loads((folder / "results.json").read_text())
    for cell in results["cells"]:
        for name in ("seconds", "static_seconds", "times_seconds"):
            cell["cost"].pop(name)
    return found | {"results": results}


def run(folder: Path, reader: Reader, model: nn.Module | None = None, **settings: Any) -> Results:
    return evaluate({"net": model or net()}, data=reader.dataset(), out=folder, **SMALL | settings)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert run(folder, Reader(folder)).complete
    return files(folder)


def begin_of_second_batch(unbroken: dict[str, Any]) -> int:
    (*_, content) = (unbroken[name] for name in unbroken if name.endswith("00001_natural.json"))
    point: int = content["outcome"]["points"][0]
    return point


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    (tmp_path / "reads").mkdir()
    return Reader(tmp_path / "reads")


def test_two_workers_of_its_own_write_the_store_of_one_process(tmp_path: Path) -> None:
    assert not ray.is_initialized()
    settings: dict[str, Any] = SMALL | {"n": N, "defenses": ["static", "dent+:steps=1"], "steps": 1}
    folders = [tmp_path / engine for engine in ("here", "ray")]
    evaluate("resnet20-at", out=folders[0], **settings)
    evaluate("resnet20-at", out=folders[1], engine="ray", workers=2, **settings)
    assert not ray.is_initialized()
    assert "RAY_USAGE_STATS_ENABLED" not in os.environ
    assert files(folders[0]) == files(folders[1])
    # Four units of each of two batches in both cells, one more where there are updates to deny, `about`
    # of each, and a battle.
    assert len(files(folders[1])) == 2 + 16 + 2 + 2 + 1


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_no_cluster_at_the_address(tmp_path: Path, reader: Reader, address: str) -> None:
    with pytest.raises(
        ConnectionError, match=rf"expected a cluster of Ray at {address}, got .*start one"
    ):
        run(tmp_path / "run", reader, engine="ray", ray_address=address)
    assert not ray.is_initialized()


def test_models_and_images_in_memory_are_sent(
    started: None, tmp_path: Path, reader: Reader, unbroken: dict[str, Any]
) -> None:
    assert run(tmp_path / "run", reader, engine="ray").complete
    assert files(tmp_path / "run") == unbroken
    assert reader.reads == len(unbroken) - 2  # each unit was done there, once


class EnoughError(Exception):
    pass


@pytest.mark.parametrize("first", ["here", "ray"])
@pytest.mark.parametrize("ending", [EnoughError, KeyboardInterrupt])
def test_what_one_engine_began_the_other_finishes(
    started: None,
    tmp_path: Path,
    reader: Reader,
    unbroken: dict[str, Any],
    first: str,
    ending: type[BaseException],
) -> None:
    second = {"here": "ray", "ray": "here"}[first]
    seen: list[UnitResult] = []

    def stop(done: UnitResult) -> None:
        seen.append(done)
        if len(seen) == 9:
            raise ending

    with pytest.raises(ending):
        run(tmp_path / "run", reader, engine=first, on_unit=stop)
    assert ray.is_initialized()
    assert run(tmp_path / "run", reader, engine=second, on_unit=seen.append).complete
    assert len(seen) == len({done.unit for done in seen}) == len(unbroken) - 2
    assert files(tmp_path / "run") == unbroken


@pytest.fixture(scope="module")
def converged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds with doubled budgets."""
    folder = tmp_path_factory.mktemp("converged")
    assert run(folder, Reader(folder), converge=True, eps=0.03).complete
    return files(folder)


@pytest.mark.parametrize("first", ["here", "ray"])
@pytest.mark.parametrize("during", ["apgd-ce", "(x2)"])
def test_doublings_are_the_same_on_either_engine(
    started: None, tmp_path: Path, reader: Reader, converged: dict[str, Any], first: str, during: str
) -> None:
    assert any("x2" in name for name in converged)
    settings: dict[str, Any] = {"converge": True, "eps": 0.03}

    def stop(done: UnitResult) -> None:
        if during in done.unit.attack:
            raise EnoughError

    with pytest.raises(EnoughError):
        run(tmp_path / "run", reader, engine=first, on_unit=stop, **settings)
    second = {"here": "ray", "ray": "here"}[first]
    assert run(tmp_path / "run", reader, engine=second, **settings).complete
    assert files(tmp_path / "run") == converged


@pytest.mark.parametrize("by", ["itself", "another"])
def test_a_worker_that_is_killed_at_its_work(
    started: None, tmp_path: Path, unbroken: dict[str, Any], by: str
) -> None:
    busy = tmp_path / "busy"

    def wait_to_be_killed(batch: int, count: int, images: Tensor) -> Tensor:
        if count == 3 and not busy.exists():
            (tmp_path / "pid").write_text(str(os.getpid()))
            (tmp_path / "pid").rename(busy)
            if by == "itself":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return images

    def kill() -> None:
        while not busy.exists():
            time.sleep(0.01)
        os.kill(int(busy.read_text()), signal.SIGKILL)

    reader = Reader(tmp_path, wait_to_be_killed)
    if by == "another":
        threading.Thread(target=kill, daemon=True).start()
    assert run(tmp_path / "run", reader, engine="ray").complete
    assert busy.exists()
    assert files(tmp_path / "run") == unbroken
    assert reader.reads > len(unbroken) - 2  # that unit, and what else it had been given


def test_a_unit_that_always_kills_its_worker_fails_alone(
    started: None, tmp_path: Path, unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "RETRIES", 1)
    settings: dict[str, Any] = {"engine": "ray", "defenses": ["static"]}
    second = begin_of_second_batch(unbroken)

    def die(batch: int, count: int, images: Tensor) -> Tensor:
        if batch == second and count in (2, 3):  # the first attack on it, and the same again
            os.kill(os.getpid(), signal.SIGKILL)
        return images

    reader = Reader(tmp_path, die)
    seen: list[UnitResult] = []
    results = run(tmp_path / "run", reader, on_unit=seen.append, **settings)
    (failed,) = (done for done in seen if done.error)
    assert (failed.unit.batch, failed.unit.attack) == (1, "apgd-ce")
    assert failed.error is not None
    assert failed.error.startswith("WorkerCrashedError: ")
    assert not results.complete
    assert reader.reads == len(seen) + 1  # the one that failed was tried again
    again: list[UnitResult] = []
    results = run(tmp_path / "run", reader, on_unit=again.append, **settings)
    assert [done.unit for done in again] == [failed.unit]
    assert reader.reads == len(seen) + 2
    assert results.complete


class Faulty(nn.Module):
    """A network whose logits are NaN in workers, as long as a file is there."""

    def __init__(self, faulty: Path) -> None:
        super().__init__()
        self.net, self.faulty, self.driver = net(), faulty, os.getpid()

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.net(inputs)
        wrong = self.faulty.exists() and os.getpid() != self.driver
        return logits * torch.nan if wrong else logits


def test_units_that_fail_are_done_again_and_no_other(started: None, tmp_path: Path) -> None:
    healthy, run_ = tmp_path / "healthy", tmp_path / "run"
    reader = Reader(tmp_path)
    run(healthy, reader, Faulty(tmp_path / "faulty"), exhaustive=True)
    (tmp_path / "faulty").touch()
    seen: list[UnitResult] = []
    settings: dict[str, Any] = {"engine": "ray", "exhaustive": True}
    results = run(run_, reader, Faulty(tmp_path / "faulty"), on_unit=seen.append, **settings)
    failed = {done.unit for done in seen if done.error}
    assert failed
    assert all("finite" in str(done.error) for done in seen if done.error)
    assert not results.complete
    (tmp_path / "faulty").unlink()
    again: list[UnitResult] = []
    results = run(run_, reader, Faulty(tmp_path / "faulty"), on_unit=again.append, **settings)
    assert {done.unit for done in again} == failed
    assert results.complete
    assert files(run_) == files(healthy)


def test_a_broken_rule_stops_the_run(started: None, tmp_path: Path, unbroken: dict[str, Any]) -> None:
    """In a chain, the first to read the second batch is its first unit, whoever else is at work."""
    second = begin_of_second_batch(unbroken)
    settings: dict[str, Any] = {"defenses": ["static"], "engine": "ray"}

    def too_bright(batch: int, count: int, images: Tensor) -> Tensor:
        return images + 1 if (batch, count) == (second, 1) else images

    says = r"^net, static, .*, natural, batch 1: .* left \[0, 1\]; nothing is scored"
    with pytest.raises(InvalidPointsError, match=says) as error:
        run(tmp_path / "run", Reader(tmp_path, too_bright), **settings)
    assert type(error.value) is InvalidPointsError
    assert not (tmp_path / "run" / "results.json").exists()
    assert run(tmp_path / "run", Reader(tmp_path), **settings).complete
    assert run(tmp_path / "unbroken", Reader(tmp_path), defenses=["static"]).complete
    assert files(tmp_path / "run") == files(tmp_path / "unbroken")
    # Units do not know what else is in their run.
    units = {name: one for name, one in files(tmp_path / "run").items() if name.startswith("units")}
    assert units == {name: unbroken[name] for name in units}


MODULE = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4)).eval()

def images():
    torch.manual_seed(0)
    return torch.rand(8, 3, 8, 8), torch.arange(8) % 4
"""


def test_modules_of_the_current_folder_are_found(
    started: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"mine_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for engine in ("here", "ray"):
        evaluate(f"{name}:model", data=f"{name}:images", n=N, out=engine, engine=engine, **SMALL)
    assert files(tmp_path / "here") == files(tmp_path / "ray")


class Elsewhere(Reader):
    """Images that are unpacked only where their module is."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ModuleNotFoundError("No module named 'elsewhere'")


def test_what_cannot_travel(started: None, tmp_path: Path, reader: Reader) -> None:
    reader.images.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"can be sent to workers, got .*lock.*; give them by name"):
        run(tmp_path / "a", reader, engine="ray")
    with pytest.raises(
        ray_engine.WorkerError, match=r"could not begin \(ModuleNotFoundError: No module"
    ):
        run(tmp_path / "b", Elsewhere(tmp_path), engine="ray")


def test_more_threads_than_a_machine_has_cores(started: None, tmp_path: Path, reader: Reader) -> None:
    with pytest.raises(ValueError, match="expected a machine with 3 cores for a worker, got"):
        run(tmp_path / "run", reader, engine="ray", threads=3)


JOIN = """
import sys, torch
from test_ray import Reader, run
from pathlib import Path
folder, address = Path(sys.argv[1]), sys.argv[2]
print(run(folder / "run", Reader(folder), engine="ray", ray_address=address).complete)
"""


def test_a_cluster_that_is_there_is_used_and_left(
    started: None, tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    address = ray.get_runtime_context().gcs_address
    # The toy model may predict one class for a whole batch of random images.
    options = ["-W", "error", "-W", "ignore:information maximization"]
    command = [sys.executable, *options, "-c", JOIN, str(tmp_path), address]
    out = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert (out.stdout, out.stderr) == ("True\n", "")
    assert files(tmp_path / "run") == unbroken
    assert len(list(tmp_path.glob("*.read"))) == len(unbroken) - 2
    assert ray.get(ray.put(1)) == 1


class Nodes:
    """What Ray says of a cluster of three machines, one of which is gone."""

    @staticmethod
    def nodes() -> list[dict[str, Any]]:
        return [
            {"Alive": True, "Resources": {"CPU": 7.0, "GPU": 2.0}},
            {"Alive": True, "Resources": {"CPU": 5.0}},
            {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
        ]

    @staticmethod
    def cluster_resources() -> dict[str, float]:
        return {"CPU": 12.0, "GPU": 2.0}


@pytest.mark.parametrize(("threads", "gpus", "room"), [(1, 0, 12), (2, 0, 5), (6, 0, 1), (2, 1, 2)])
def test_room_is_counted_by_machine(threads: int, gpus: int, room: int) -> None:
    assert ray_engine._count_room(Nodes, threads, gpus) == room


def test_a_worker_uses_the_gpu_that_it_is_given() -> None:
    asked = Evaluation(models=["net"], device="cuda:1")
    sources = ray_engine._unpack(ray_engine._pack(ray, Sources(asked, {"net": net()}), threads=1))
    assert sources.evaluation == Evaluation(models=["net"], device="cuda")
    assert digest_model(sources.given["net"]) == digest_model(net())


def test_without_ray(tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"engine='ray' needs: pip install 'dent-defense\[ray\]'"):
        run(tmp_path / "run", reader, engine="ray")


def test_evaluation_alone_does_not_load_ray() -> None:
    script = "import sys, dent.evaluation.ray_engine; print('ray' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
