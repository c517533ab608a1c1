"""A run: what is asked becomes units; an engine does them, the store keeps them, all are counted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from dent.data import Dataset, from_arrays, take_first
from dent.evaluation.attacks import kind_of
from dent.evaluation.config import make_evaluation
from dent.evaluation.engines import ENGINES, Engine
from dent.evaluation.perform import Task
from dent.evaluation.plan import Plan, make_plan
from dent.evaluation.results import Results
from dent.evaluation.sources import Sources, data_digest, weights_digest
from dent.evaluation.store import RUN, Store, read_run, room
from dent.evaluation.summary import count_units, judged_points, summarize
from dent.evaluation.tally import Tally
from dent.evaluation.units import NATURAL, SPECIAL, Cell, Done, Unit
from dent.names import lookup
from dent.storage import lock_folder, replace_file

Progress = Callable[[float, float | None, str], None]


def evaluate(
    models: str | Sequence[str] | nn.Module | Mapping[str, nn.Module] | None = None,
    defenses: str | Sequence[str] | None = None,
    *,
    data: str | Path | Dataset | tuple[Tensor, Tensor] | None = None,
    out: str | Path | None = None,
    engine: str = "here",
    threads: int | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    progress: Progress | None = None,
    on_unit: Callable[[Done], None] | None = None,
    **settings: Any,
) -> Results:
    """Attack models with and without defenses, and count what stands.

    models: names (see `load_model`), or models in memory, one or by name.
    data: a name (see `load_data`), a `Dataset`, or images in [0, 1] with labels; of these, all points
    unless n is given.
    out: the folder of the run. The same call goes on where a run there was stopped. Without one,
    nothing is kept.
    engine: "here", or "ray" for `workers` of Ray on this machine or, by `ray_address`, on a cluster.
    threads: of each worker; one with Ray, torch's own here.
    settings: fields of `Evaluation`.

    >>> results = evaluate("resnet20-at", ["static"], n=4, steps=1)
    >>> [cell.worst.n for cell in results.cells]
    [4]
    """
    named, given = _named(models)
    images = _dataset(data, settings.get("n"))
    if images is not None:
        settings.setdefault("n", None)
    name = None if data is None else str(data) if images is None else images.name
    asked = {"models": named, "defenses": defenses, "data": name}
    evaluation = make_evaluation(
        {key: value for key, value in asked.items() if value is not None}, **settings
    )
    with TemporaryDirectory() if out is None else nullcontext(out) as folder:
        results = run(
            Sources(evaluation, given, images), Path(folder), engine=engine, threads=threads,
            workers=workers, ray_address=ray_address, progress=progress, on_unit=on_unit,
        )  # fmt: skip
    return results if out is not None else results.without_folder()


def run(
    sources: Sources,
    folder: Path,
    *,
    engine: str = "here",
    threads: int | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    progress: Progress | None = None,
    on_unit: Callable[[Done], None] | None = None,
) -> Results:
    """Do what is not done yet of an evaluation, and count all of it."""
    start = lookup("engine", engine, ENGINES)
    store = Store(folder)
    store.refuse_foreign()
    with lock_folder(folder, doing="evaluates"):
        plan = make_plan(sources)
        about = identity(sources, plan, progress)
        store.begin(about)
        ended = store.check(plan.units(), tidy=True)
        sources.digests = about["weights"]
        todo = [unit for unit in plan.units() if not ended.get(unit.file, False)]
        if todo:
            with start(sources, threads=threads, workers=workers, address=ray_address) as working:
                for done in work(plan, store, working, set(todo), progress):
                    if on_unit:
                        on_unit(done)
        results = counted(plan, store, about)
        save(results, folder)
    return results


def work(
    plan: Plan, store: Store, engine: Engine, todo: set[Unit], progress: Progress | None = None
) -> Iterator[Done]:
    """Give the engine the units that are ready, and keep what it gives back.

    A unit of a chain is ready when the one before it is done. Of a chain, what follows a unit that
    failed is done as if that had broken nothing.
    """
    total = sum(map(plan.forwards, todo))
    done_so_far = 0.0
    waiting = ([unit for unit in chain if unit in todo] for chain in plan.chains())
    chains = filter(None, waiting)  # one at a time, however many there are
    follows: dict[Unit, list[Unit]] = {}

    def submit(chain: list[Unit]) -> None:
        unit, *rest = chain
        follows[unit] = rest
        standing = _standing(plan, store, unit) if plan.is_chained(unit.cell) else None
        engine.submit(Task(unit, plan.settings(unit), standing))

    while True:
        while len(follows) < engine.slots and (chain := next(chains, None)):
            submit(chain)
        if not follows:
            return
        if progress:
            progress(done_so_far, total, str(next(iter(follows))))
        done = engine.finished()
        store.write(done)
        yield done
        done_so_far += plan.forwards(done.unit)
        if rest := follows.pop(done.unit):
            submit(rest)


def _standing(plan: Plan, store: Store, unit: Unit) -> tuple[bool, ...] | None:
    """What of the unit's batch was left by all units before it in its chain; None if nothing was."""
    if unit.attack in SPECIAL:
        return None
    standing = [True] * plan.sizes[unit.batch]
    for attack in plan.attacks[unit.cell]:
        if attack == unit.attack:
            break
        judges = attack == NATURAL or attack not in SPECIAL
        before = store.read(Unit(unit.cell, unit.batch, attack)) if judges else None
        if before and before.outcome:
            standing = [a and b for a, b in zip(standing, before.outcome.correct, strict=True)]
    return tuple(standing)


def counted(plan: Plan, store: Store, about: dict[str, Any]) -> Results:
    """The numbers of all units that are done."""
    return summarize(_tallies(plan, store), about, store.folder)


def _tallies(plan: Plan, store: Store) -> dict[Cell, Tally]:
    return count_units(
        list(plan.attacks),
        {cell: list(attacks) for cell, attacks in plan.attacks.items()},
        [batch.tolist() for batch in plan.points],
        store.read_all(plan.units()),
        cumulative=plan.is_chained,
        independent=lambda cell: plan.independent[cell],
        kind_of=kind_of,
        planned=plan.batches,
    )


def load_results(folder: str | Path) -> Results:
    """The results of a run, as far as it is."""
    return counted(*_opened(Path(folder)))


def load_points(folder: str | Path) -> dict[Cell, dict[str, dict[int, bool]]]:
    """Which points of a run are correct, by cell: see `judged_points`."""
    plan, store, _ = _opened(Path(folder))
    return {cell: judged_points(tally) for cell, tally in _tallies(plan, store).items()}


def _opened(folder: Path) -> tuple[Plan, Store, dict[str, Any]]:
    about = read_run(folder)
    try:
        plan, store = Plan.from_json(about["plan"]), Store(folder)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / RUN} is not of a run ({type(error).__name__}: {error})") from error
    store.check(plan.units())
    return plan, store, about


def save(results: Results, folder: Path) -> None:
    """Write the numbers: results.json and results.csv."""
    texts = {
        "results.json": json.dumps(results.to_json(), indent=2) + "\n",
        "results.csv": results.to_csv(),
    }
    for name, text in texts.items():
        with room(folder), replace_file(folder / name) as file:
            file.write(text.encode())


def identity(sources: Sources, plan: Plan, progress: Progress | None = None) -> dict[str, Any]:
    """All that the numbers of a run depend on; another start in its folder must have the same."""
    from dent import __version__

    def move(done: int, total: int) -> None:
        if progress:
            progress(done, total, "reading the images")

    return {
        "asked": sources.evaluation.to_json(),
        "plan": plan.to_json(),
        "weights": {name: weights_digest(sources.model(name)) for name in sources.evaluation.models},
        "data_sha256": data_digest(sources.dataset(), move),
        "versions": {
            "dent": __version__,
            "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:2])),
        },
    }


def _named(
    models: str | Sequence[str] | nn.Module | Mapping[str, nn.Module] | None,
) -> tuple[tuple[str, ...] | None, dict[str, nn.Module]]:
    """The names of the models, and those that are in memory."""
    if models is None:
        return None, {}
    if isinstance(models, nn.Module):
        models = {type(models).__name__: models}
    if isinstance(models, Mapping):
        return tuple(models), dict(models)
    names = (models,) if isinstance(models, str) else tuple(models)
    if any(isinstance(name, nn.Module) for name in names):
        raise ValueError("expected several models in memory by name: models={'mine': model, ...}")
    return names, {}


def _dataset(data: str | Path | Dataset | tuple[Tensor, Tensor] | None, n: int | None) -> Dataset | None:
    """Images in memory: all of them, or the first n."""
    if data is None or isinstance(data, str | Path):
        return None
    if isinstance(data, Dataset):
        dataset = data
    elif isinstance(data, tuple | list) and len(data) == 2:
        dataset = from_arrays(*data)
    else:
        raise ValueError(
            f"expected data as a name, a Dataset or (images, labels), got {type(data).__name__}"
        )
    return dataset if n is None else take_first(dataset, n)
