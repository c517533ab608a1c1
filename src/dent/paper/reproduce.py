"""The paper's numbers, measured: each piece of work is an evaluation of one cell, with its own folder.

A piece of work that several tables need is the same evaluation, hence the same folder, and done once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from dent.data import open_data
from dent.evaluation import Evaluation
from dent.evaluation.engines import ENGINES, kept
from dent.evaluation.run import Progress, run
from dent.evaluation.sources import Sources
from dent.evaluation.store import RUN, room
from dent.models import load_model
from dent.names import lookup
from dent.paper.found import found_in
from dent.paper.reproduction import (
    RESULTS,
    Reproduction,
    evaluation_of,
    folder_name,
    forwards,
    works,
)
from dent.paper.scales import Scale
from dent.paper.tables import Table, tables
from dent.storage import BusyError, replace_file

CELLS = "cells"
PAUSE = 2.0  # seconds, where only work is left that another process is doing


def reproduce(
    chosen: Sequence[Table],
    scale: Scale,
    folder: Path,
    *,
    seed: int = 0,
    device: str = "cpu",
    engine: str = "here",
    threads: int | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    progress: Progress | None = None,
) -> Reproduction:
    """Do what is not done yet for the tables, and gather all that is done in the folder.

    The same call goes on where another was stopped; several may work in the same folder at once. Work
    whose model or data cannot be loaded is left out, and why is said in the results.

    engine, threads, workers, ray_address: as `evaluate` takes them; Ray is started once for all.
    """
    lookup("engine", engine, ENGINES)
    asked: dict[str, tuple[Evaluation, float]] = {}
    for work in works(chosen, scale):
        evaluation = evaluation_of(work, seed=seed, device=device)
        asked[folder_name(evaluation)] = (evaluation, forwards(work))
    troubles = _troubles({key: evaluation for key, (evaluation, _) in asked.items()}, progress)
    if asked and len(troubles) == len(asked):
        raise ValueError(f"nothing of this can be loaded: {'; '.join(dict.fromkeys(troubles.values()))}")
    waiting = {key: one for key, one in asked.items() if key not in troubles}
    total, done = sum(cost for _, cost in waiting.values()), 0.0
    with kept(engine, threads=threads, workers=workers, address=ray_address, device=device):
        while waiting:
            busy = {}
            for key, (evaluation, cost) in waiting.items():
                try:
                    run(
                        Sources(evaluation),
                        folder / CELLS / key,
                        progress=_part_of(progress, done, cost, total),
                        engine=engine,
                        threads=threads,
                        workers=workers,
                        ray_address=ray_address,
                    )
                except BusyError:
                    busy[key] = (evaluation, cost)  # another process does it
                    continue
                except (ValueError, TypeError, RuntimeError) as error:
                    troubles[key] = " ".join(str(error).split())
                done += cost
            if len(busy) == len(waiting):
                if progress:
                    progress(done, total, "waiting for another process")
                time.sleep(PAUSE)
            waiting = busy
    found = gather(scale, folder, seed=seed, device=device, troubles=troubles)
    with room(folder), replace_file(folder / RESULTS) as file:
        file.write(json.dumps(found.to_json()).encode() + b"\n")
    return found


def gather(
    scale: Scale,
    folder: Path,
    *,
    seed: int = 0,
    device: str = "cpu",
    troubles: dict[str, str] | None = None,
) -> Reproduction:
    """All that is done in the folder, of whatever table; what cannot be read is a trouble."""
    found, troubles = {}, dict(troubles or {})
    for work in works(tables().values(), scale):
        key = folder_name(evaluation_of(work, seed=seed, device=device))
        if (folder / CELLS / key / RUN).exists():
            try:
                found[key] = found_in(folder / CELLS / key)
            except ValueError as error:
                troubles.setdefault(key, " ".join(str(error).split()))
    return Reproduction(scale, found, troubles, seed, device)


def _part_of(progress: Progress | None, done: float, cost: float, total: float) -> Progress | None:
    """The progress of one cell as a part of all."""
    if progress is None:
        return None

    def move(moved: float, of: float | None, text: str) -> None:
        progress(done + cost * moved / of if of else done, total, text)

    return move


def _troubles(evaluations: dict[str, Evaluation], progress: Progress | None) -> dict[str, str]:
    """Of work that cannot be done, why: before anything is begun, each model and data set is opened."""
    faults: dict[tuple[str, int | None], str] = {}
    found = {}
    for key, asked in evaluations.items():
        model = asked.models[0]
        opens: dict[tuple[str, int | None], Callable[[], object]] = {
            (asked.data, asked.n): partial(open_data, asked.data, n=asked.n),
            (model, None): partial(load_model, model, device=asked.device),
        }
        for what, open_it in opens.items():
            if what not in faults:
                if progress:
                    progress(0, None, f"opening {what[0]}")
                faults[what] = _fault(open_it)
        why = [f"{what[0]} cannot be loaded: {faults[what]}" for what in opens if faults[what]]
        if why:
            found[key] = "; ".join(why)
    return found


def _fault(open_it: Callable[[], object]) -> str:
    try:
        open_it()
    except Exception as error:  # the loaders of other packages raise what they like
        return " ".join(str(error).split()) or type(error).__name__
    return ""
