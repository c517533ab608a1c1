"""Measure the paper's numbers: each piece of work is an evaluation of one cell in a folder of its own.

Work that several tables need is the same evaluation, so it has the same folder and is done once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from dent.data import open_data
from dent.devices import find_device
from dent.evaluation import Evaluation
from dent.evaluation.digests import digest_model
from dent.evaluation.estimate import time_forward
from dent.evaluation.pipeline import ENGINES, READING, Progress, run_evaluation
from dent.evaluation.plan import check_needs
from dent.evaluation.ray_engine import connect_ray
from dent.evaluation.sources import Sources
from dent.evaluation.store import RUN, explain_full_disk
from dent.evaluation.suites import SUITE_VERSION
from dent.models import ROBUSTBENCH, build, load_model
from dent.models.robustbench import find_checkpoint, list_folders, shorten_id
from dent.names import lookup
from dent.paper.cells import JudgedCell, load_judged_cell
from dent.paper.results import (
    RESULTS,
    Reproduction,
    count_forwards,
    list_works,
    load_reproduction,
    make_key,
    make_work_evaluation,
    name_folder,
)
from dent.paper.scales import Scale, Work, list_robustbench
from dent.paper.tables import PaperTable, tables
from dent.storage import BusyError, replace_file
from dent.texts import join_lines

CELLS = "cells"
PAUSE = 2.0  # seconds to wait while another process does all the work that is left
IMAGES = 8  # images of a timed forward


def reproduce(
    chosen: Sequence[PaperTable],
    scale: Scale,
    folder: Path,
    *,
    seed: int = 0,
    device: str = "cpu",
    engine: str = "here",
    threads: int | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    known: Mapping[str, JudgedCell] | None = None,
    progress: Progress | None = None,
) -> Reproduction:
    """Do the work for the tables that is not done yet, and return everything that is done.

    The same call resumes a stopped one, and several processes may work in the same folder at once.
    Work whose model or data cannot be loaded is left out; the results say why.

    engine, threads, workers, ray_address: as for `evaluate`; Ray is started once for all work.
    known: cells that were measured elsewhere, from `select_known`. They are not measured again.
    """
    lookup("engine", engine, ENGINES)
    asked: dict[str, tuple[Evaluation, float]] = {}
    for work in list_works(chosen, scale):
        key = make_key(work, seed, device)
        if key not in (known or {}):
            evaluation = make_work_evaluation(work, seed=seed, device=device)
            asked[key] = (evaluation, count_forwards(work))
    troubles = _find_troubles({key: evaluation for key, (evaluation, _) in asked.items()}, progress)
    if asked and len(troubles) == len(asked):
        raise ValueError(f"nothing of this can be loaded: {'; '.join(dict.fromkeys(troubles.values()))}")
    _store(folder, scale, seed=seed, device=device, troubles=troubles, known=known)
    waiting = {key: one for key, one in asked.items() if key not in troubles}
    total, done = sum(cost for _, cost in waiting.values()), 0.0
    sharing = (
        connect_ray(threads=threads or 1, workers=workers, address=ray_address, device=device)
        if engine == "ray"
        else nullcontext()
    )
    with sharing:  # one Ray for all work
        while waiting:
            busy = {}
            for key, (evaluation, cost) in waiting.items():
                try:
                    run_evaluation(
                        Sources(evaluation),
                        folder / CELLS / key,
                        progress=_scale_progress(progress, done, cost, total),
                        engine=engine,
                        threads=threads,
                        workers=workers,
                        ray_address=ray_address,
                    )
                except BusyError:
                    busy[key] = (evaluation, cost)  # another process does it
                    continue
                except (ValueError, TypeError, RuntimeError) as error:
                    troubles[key] = join_lines(error)
                done += cost
            if len(busy) == len(waiting):
                if progress:
                    progress(done, total, "waiting for another process")
                time.sleep(PAUSE)
            waiting = busy
    return _store(folder, scale, seed=seed, device=device, troubles=troubles, known=known)


def _store(
    folder: Path,
    scale: Scale,
    *,
    seed: int,
    device: str,
    troubles: dict[str, str],
    known: Mapping[str, JudgedCell] | None,
) -> Reproduction:
    """Write what is done and known, and return it."""
    results = gather(scale, folder, seed=seed, device=device, troubles=troubles)
    results.cells.update(known or {})
    folder.mkdir(parents=True, exist_ok=True)
    with explain_full_disk(folder), replace_file(folder / RESULTS) as file:
        file.write(json.dumps(results.to_json()).encode() + b"\n")
    return results


def load_current(path: Path) -> Reproduction:
    """Return a stored reproduction; if path is its folder, with what was done since it was stored.

    So the folder of a run that was killed has a report, too.
    """
    if not (path / RESULTS).exists() and (path / CELLS).is_dir():
        raise ValueError(
            f"expected {RESULTS} in {path}, which dent reproduce writes when it starts; start it again"
        )
    stored = load_reproduction(path)
    if path.is_dir():
        done = gather(
            stored.scale, path, seed=stored.seed, device=stored.device, troubles=stored.troubles
        )
        return replace(stored, cells=stored.cells | done.cells, troubles=done.troubles)
    return stored


def select_known(
    start: Reproduction,
    chosen: Sequence[PaperTable],
    scale: Scale,
    *,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, JudgedCell]:
    """Return the cells of a stored reproduction that are still true, also those of other tables.

    A cell is left out if units of it are missing, or if its attacks are of another version or its model
    has other weights by now. A search in float32 is also good for a scale in mixed precision, not the
    other way around. Raise ValueError if the tables need none of those that are left.
    """
    known, digests = {}, dict[str, str]()
    stored = {name_folder(cell.evaluation): cell for cell in start.cells.values()}

    for work in list_works(tables().values(), scale):
        key = make_key(work, seed, device)
        in_float32 = make_key(replace(work, mixed_precision=False), seed, device)
        cell = stored.get(key) or stored.get(in_float32)
        if cell is None or cell.missing or cell.versions.get("suite") != SUITE_VERSION:
            continue
        if work.model not in digests:
            try:
                digests[work.model] = digest_model(load_model(work.model, device=device))
            except Exception:  # the work is tried, and its trouble says why
                digests[work.model] = ""
        if cell.weights and cell.weights == digests[work.model]:
            known[key] = cell
    if not any(make_key(work, seed, device) in known for work in list_works(chosen, scale)):
        raise ValueError(
            f"expected results of these tables at scale {scale.name} with the weights of today to start "
            f"from, got {len(start.cells)} others at scale {start.scale.name}"
        )
    return known


def gather(
    scale: Scale,
    folder: Path,
    *,
    seed: int = 0,
    device: str = "cpu",
    troubles: dict[str, str] | None = None,
) -> Reproduction:
    """Return everything that is done in the folder, for all tables; unreadable cells are troubles."""
    cells, troubles = {}, dict(troubles or {})
    for work in list_works(tables().values(), scale):
        key = make_key(work, seed, device)
        if (folder / CELLS / key / RUN).exists():
            try:
                cells[key] = load_judged_cell(folder / CELLS / key)
            except ValueError as error:
                troubles.setdefault(key, join_lines(error))
    return Reproduction(scale, cells, troubles, seed, device)


def _scale_progress(
    progress: Progress | None, done: float, cost: float, total: float
) -> Progress | None:
    """Return a progress function for one cell that reports its part of the whole: the attacks."""
    if progress is None:
        return None

    def move(moved: float, of: float | None, text: str) -> None:
        progress(done + cost * moved / of if of and text != READING else done, total, text)

    return move


def _find_troubles(evaluations: dict[str, Evaluation], progress: Progress | None) -> dict[str, str]:
    """Open every model and data set before anything is begun; return why work cannot be done."""
    faults: dict[tuple[str, int | None], str] = {}
    troubles = {}
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
                faults[what] = _try_to_open(open_it)
        why = [f"{what[0]} cannot be loaded: {faults[what]}" for what in opens if faults[what]]
        why += filter(None, [_try_to_open(partial(check_needs, asked))])
        if why:
            troubles[key] = "; ".join(why)
    return troubles


def _try_to_open(open_it: Callable[[], object]) -> str:
    """Return why something cannot be opened, or an empty text."""
    try:
        open_it()
    except Exception as error:  # the loaders of other packages raise what they like
        return join_lines(error) or type(error).__name__
    return ""


def list_missing_checkpoints(chosen: Sequence[PaperTable], folder: Path) -> list[str]:
    """Return RobustBench's names of the files that the tables need and the folder does not have.

    Raise ValueError if the tables need no model of RobustBench, or if the folder has none that they do.
    """
    if not folder.is_dir():
        raise ValueError(f"expected a folder of RobustBench's checkpoint files, got {folder}")
    known = list_robustbench()
    asked = {one.ask.model: None for table in chosen for one in table.references().values()}
    needed = [known[name] for name in asked if name in known]
    names = ", ".join(table.name for table in chosen)
    if not needed:
        raise ValueError(f"expected a table with models of RobustBench, such as table-1, got {names}")
    missing = [key for key in needed if find_checkpoint(folder, key) is None]
    if missing == needed:
        files = ", ".join(f"{key}.pt" for key in needed)
        raise ValueError(
            f"expected a file that {names} can use in {folder}, got none of {files}; they come from "
            "RobustBench's model zoo, https://github.com/RobustBench/robustbench"
        )
    return missing


@dataclass(frozen=True)
class WorkEstimate:
    """What one evaluation would load and cost; `seconds` is None if the architecture is not known.

    table: the first table that needs it. trouble: why it cannot be loaded here and now.
    """

    table: str
    loads: str
    defense: str
    norm: str
    eps: float
    data: str
    n: int | None
    forwards: float
    seconds: float | None
    trouble: str | None


def estimate_tables(
    chosen: Sequence[PaperTable],
    scale: Scale,
    *,
    seed: int = 0,
    device: str = "cpu",
    known: Collection[str] = (),
) -> list[WorkEstimate]:
    """Return an estimate for each evaluation that the tables need, each once, without the known ones."""
    torch_device = find_device(device)
    rows, seen = [], set(known)
    speeds: dict[str, tuple[float | None, str | None]] = {}
    for table in chosen:
        for work in list_works([table], scale):
            key = make_key(work, seed, device)
            if key in seen:
                continue
            seen.add(key)
            if work.model not in speeds:
                speeds[work.model] = _time_model(work, torch_device)
            seconds, trouble = speeds[work.model]
            count = count_forwards(work)
            rows.append(
                WorkEstimate(
                    table=table.name,
                    loads=work.model,
                    defense=work.defense,
                    norm=work.norm,
                    eps=work.eps,
                    data=work.data,
                    n=work.n,
                    forwards=count,
                    seconds=None if seconds is None else count * seconds,
                    trouble=trouble,
                )
            )
    return rows


def _time_model(work: Work, device: torch.device) -> tuple[float | None, str | None]:
    """Return the seconds of a forward for each image, and why the model cannot be loaded, or None.

    The time does not depend on the weights: the untrained architecture takes as long.
    """
    key = next((key for key in ROBUSTBENCH if shorten_id(key) == work.model), None)
    if key is not None:  # its weights are large; an estimate does not fetch them
        places = [folder / f"{key}.pt" for folder in list_folders()]
        here = any(place.is_file() for place in places)
        missing = f"{work.model} is not at {' or '.join(map(str, places))}; robustbench would fetch it"
        model, trouble = load_model(work.model, weights="random"), None if here else missing
    else:
        try:
            model, trouble = load_model(work.model), None
        except Exception as error:  # functions of others raise what they like
            trouble = " ".join(filter(None, (*str(error).split(), work.note and f"({work.note})")))
            if not work.architecture:
                return None, trouble
            model = build(work.architecture)
    inputs = torch.rand(IMAGES, 3, *[_find_image_size(work)] * 2, device=device)
    return time_forward(model.to(device).eval(), inputs), trouble


def _find_image_size(work: Work) -> int:
    if work.data.startswith("cifar"):
        return 32  # an estimate does not fetch CIFAR either
    if work.data.startswith("imagenet"):
        return 288 if work.data.endswith("#crop288") else 224
    return int(open_data(work.data, n=1).read(torch.tensor([0])).shape[-1])
