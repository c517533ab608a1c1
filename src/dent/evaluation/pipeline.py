"""The run of an evaluation: spec, plan, execute, store, score."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from dent.data import Dataset, from_arrays, take_first
from dent.evaluation.converge import list_rounds
from dent.evaluation.defenses import is_defended, name_defenses
from dent.evaluation.digests import digest_data
from dent.evaluation.execute import Engine, LocalEngine, Task
from dent.evaluation.own_attacks import name_attacks
from dent.evaluation.plan import Plan, Unit, check_needs, make_plan
from dent.evaluation.results import Results
from dent.evaluation.score import summarize
from dent.evaluation.sources import Sources
from dent.evaluation.spec import Cell, Evaluation
from dent.evaluation.store import RUN, Store, UnitResult, read_run
from dent.evaluation.suites import SPECIAL, SUITE_VERSION
from dent.evaluation.tally import Tally, make_tallies
from dent.names import lookup
from dent.storage import lock_folder

READING = "reading the images"  # what a run does before its units
Progress = Callable[[float, float | None, str], None]
ENGINES = {"here": "this process", "ray": "workers of Ray"}


def evaluate(
    models: str | Sequence[str] | nn.Module | Mapping[str, nn.Module] | Any = None,
    defenses: Any = None,
    *,
    attacks: Any = None,
    data: str | Path | Dataset | tuple[Tensor, Tensor] | None = None,
    out: str | Path | None = None,
    engine: str = "here",
    threads: int | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    progress: Progress | None = None,
    on_unit: Callable[[UnitResult], None] | None = None,
    **settings: Any,
) -> Results:
    """Attack models with and without defenses, and return what stands.

    models: names (see `load_model`), or models in memory, one or by name. They are never changed. A
        defended model (`dent.defend(...)`, or a defense of yours with its static model as `model`) is
        evaluated as a defense of its static model.
    defenses: texts of dent's list ("dent+", "hedge:steps=5") or import paths of your own
        ("package.module:function", which gets the model and returns the defense); or by name, as
        {"mine": my_defense, "static": "static"}, also what is in memory: a defense, or a function from
        the model to one. See `dent.Defense`.
    attacks: instead of those of a suite: texts ("fpa:rounds=3"), names of suites, and your own:
        functions `(model, inputs, labels, *, eps, norm, ...)` to adversarial inputs, or their import
        paths ("package.module:function"); or by name, as {"mine": my_attack, "fpa": "fpa:rounds=3"}.
    data: a name (see `load_data`), a `Dataset`, or images in [0, 1] with labels. Images in memory are
        all used, unless n is given.
    out: folder of the run. The same call resumes a run that was stopped. Without a folder, nothing is
        kept.
    engine: "here", or "ray" for workers of Ray on this machine or, by `ray_address`, on a cluster.
    threads: number of threads of each worker (default: 1 with Ray, torch's own here).
    workers: number of Ray workers (default: as many as there is room for).
    on_unit: called with the result of each unit.
    settings: fields of `Evaluation`.

    >>> results = evaluate("resnet20-at", ["static"], n=4, steps=1)
    >>> [cell.worst.n for cell in results.cells]
    [4]
    """
    names, given = _name_models(models)
    listed, own = name_defenses(defenses)
    chosen, own_attacks = name_attacks(attacks)
    images = _make_dataset(data, settings.get("n") or None)
    if images is not None:
        settings.setdefault("n", None)
    name = None if data is None else str(data) if images is None else images.name
    asked = {
        "models": names, "own": tuple(own), "defenses": listed, "own_attacks": tuple(own_attacks),
        "attacks": chosen, "data": name,
    }  # fmt: skip
    evaluation = Evaluation(
        **{key: value for key, value in asked.items() if value is not None} | settings
    )
    with TemporaryDirectory() if out is None else nullcontext(out) as folder:
        results = run_evaluation(
            Sources(evaluation, given, images, own, own_attacks), Path(folder), engine=engine,
            threads=threads, workers=workers, ray_address=ray_address, progress=progress,
            on_unit=on_unit,
        )  # fmt: skip
    return results if out is not None else replace(results, folder=None)


def run_evaluation(
    sources: Sources,
    folder: Path,
    *,
    engine: str = "here",
    threads: int | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    progress: Progress | None = None,
    on_unit: Callable[[UnitResult], None] | None = None,
) -> Results:
    """Run the units that are not done yet, and return the numbers of all."""
    lookup("engine", engine, ENGINES)
    check_needs(sources.evaluation)
    store = Store(folder)
    store.refuse_foreign()
    with lock_folder(folder, doing="evaluates"):
        plan = make_plan(sources)
        about = describe_run(sources, plan, progress)
        store.begin(about)
        tallies, others = make_tallies(plan), list(plan.largest.units())
        with ExitStack() as stack:
            working: Engine | None = None
            for planned, units in list_rounds(plan, tallies):
                for result in store.read(units, others=others, tidy=True):
                    tallies[result.unit.cell].add(result)
                todo = {unit for unit in units if not tallies[unit.cell].has(unit)}
                if not todo:
                    continue
                working = working or stack.enter_context(
                    start_engine(engine, sources, threads=threads, workers=workers, address=ray_address)
                )
                for result in run_units(planned, tallies, working, todo, progress):
                    store.write(result)
                    if on_unit:
                        on_unit(result)
        results = summarize(tallies, about, folder)
        results.write(folder)
    return results


@contextmanager
def start_engine(
    engine: str, sources: Sources, *, threads: int | None, workers: int | None, address: str | None
) -> Iterator[Engine]:
    """Start what runs the tasks: this process, or workers of Ray."""
    if engine == "ray":
        from dent.evaluation.ray_engine import start_workers

        with start_workers(sources, threads=threads or 1, workers=workers, address=address) as started:
            yield started
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield LocalEngine(sources)
    finally:
        torch.set_num_threads(before)


def run_units(
    plan: Plan,
    tallies: Mapping[Cell, Tally],
    engine: Engine,
    todo: set[Unit],
    progress: Progress | None = None,
) -> Iterator[UnitResult]:
    """Give the engine the units that are ready, and yield and tally their results.

    A unit of a chain is ready when the unit before it is done. A unit that failed counts as if it had
    broken nothing.
    """
    total = sum(map(plan.forwards, todo))
    forwards = 0.0
    waiting = ([unit for unit in chain if unit in todo] for chain in plan.chains())
    chains = filter(None, waiting)  # made one at a time, however many there are
    follows: dict[Unit, list[Unit]] = {}

    def submit(chain: list[Unit]) -> None:
        unit, *follows[unit] = chain
        needs_rest = plan.is_chained(unit.cell) and unit.attack not in SPECIAL
        standing = tallies[unit.cell].find_standing(unit) if needs_rest else None
        engine.submit(Task(unit, plan.options(unit), standing))

    while True:
        while len(follows) < engine.slots and (chain := next(chains, None)):
            submit(chain)
        if not follows:
            return
        if progress:
            progress(forwards, total, str(next(iter(follows))))
        result = engine.wait()
        tallies[result.unit.cell].add(result)
        yield result
        forwards += plan.forwards(result.unit)
        if progress:
            progress(forwards, total, str(result.unit))
        if rest := follows.pop(result.unit):
            submit(rest)


def load_results(folder: str | Path) -> Results:
    """Return the results of a run as far as it is done."""
    folder = Path(folder)
    about = read_run(folder)
    try:
        plan = Plan.from_json(about["plan"])
        tallies, others = make_tallies(plan), list(plan.largest.units())
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / RUN} is not of a run ({type(error).__name__}: {error})") from error
    for _, units in list_rounds(plan, tallies):
        for result in Store(folder).read(units, others=others):
            tallies[result.unit.cell].add(result)
    return summarize(tallies, about, folder)


def describe_run(sources: Sources, plan: Plan, progress: Progress | None = None) -> dict[str, Any]:
    """Return all that decides the numbers of a run; who resumes it must ask for the same."""
    from dent import __version__

    def move(done: int, total: int) -> None:
        if progress:
            progress(done, total, READING)

    return {
        "asked": sources.evaluation.to_json(),
        "suite_version": SUITE_VERSION,
        "plan": plan.to_json(),
        "models_sha256": {name: sources.digests[name] for name in sources.evaluation.models},
        "defenses_sha256": sources.digest_defenses(),
        **({"attacks_sha256": attacks} if (attacks := sources.attack_digests) else {}),
        "data_sha256": digest_data(sources.dataset(), move),
        "versions": {
            "dent": __version__,
            "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:2])),
        },
    }


def _name_models(
    models: str | Sequence[str] | nn.Module | Mapping[str, nn.Module] | Any,
) -> tuple[tuple[str, ...] | None, dict[str, Any]]:
    """Return the names of the models, and the models that are in memory."""
    if models is None:
        return None, {}
    if isinstance(models, nn.Module) or is_defended(models):
        static = getattr(models, "model", None) if is_defended(models) else models
        models = {type(static).__name__: models}
    if isinstance(models, Mapping):
        return tuple(models), dict(models)
    names = (models,) if isinstance(models, str) else tuple(models)
    if any(isinstance(name, nn.Module) for name in names):
        raise ValueError("expected several models in memory by name: models={'mine': model, ...}")
    return names, {}


def _make_dataset(
    data: str | Path | Dataset | tuple[Tensor, Tensor] | None, n: int | None
) -> Dataset | None:
    """Return images in memory, all or the first n; None if data is a name."""
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
