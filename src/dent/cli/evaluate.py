"""`dent evaluate`, `dent attack` and `dent compare`: measure what a defense is worth."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dent.cli.app import (
    AsJson,
    Device,
    DryRun,
    Engine,
    Log,
    RayAddress,
    Seed,
    Threads,
    Workers,
    show,
)
from dent.evaluation import Evaluation, Results, load_results, read_evaluation
from dent.evaluation.compare import compare_runs as compare_results
from dent.evaluation.estimate import estimate_run
from dent.evaluation.execute import attack_data
from dent.evaluation.pipeline import run_evaluation
from dent.evaluation.plan import check_needs, make_plan
from dent.evaluation.sources import Sources
from dent.evaluation.spec import BATCH_SIZE, POINTS
from dent.flags import add_flags
from dent.loggers import open_logger
from dent.report.terminal import (
    estimate_rows,
    progress_bar,
    show_comparison,
    show_results,
    show_scores,
    total_line,
)
from dent.report.write import write_markdown, write_page
from dent.storage import check_file

FAILED = 1  # exit code if a unit of the run failed


@add_flags(Evaluation, without=("models", "own", "adaptive", "defenses", "own_attacks", "attacks"))
def evaluate(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file with settings. Flags override it.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Model, see `dent list models`. May be repeated.")
    ] = None,
    defense: Annotated[
        list[str] | None,
        typer.Option(help="Defense: dent+, hedge:steps=5 or package.module:function. May be repeated."),
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help="Attack instead of a suite: apgd-ce:steps=20, package.module:function, or a suite by "
            "name. May be repeated."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run (default: runs/SUITE-DIGEST).")
    ] = None,
    engine: Engine = "here",
    workers: Workers = None,
    ray_address: RayAddress = None,
    threads: Threads = None,
    dry_run: DryRun = False,
    log: Log = None,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Attack models with and without defenses, and report what is left of their accuracy.

    Without arguments, it evaluates the shipped models on the shipped images, each with the defenses
    that suit it. The same command resumes a run that was stopped.
    """
    lists = {"models": model, "defenses": defense, "attacks": attack}
    given = settings | {name: tuple(value) for name, value in lists.items() if value}
    evaluation = read_evaluation(config, **given) if config else Evaluation(**given)
    sources = Sources(evaluation)
    if dry_run:
        _show_estimate(sources, as_json)
        return
    suite = "chosen" if evaluation.attacks else evaluation.suite
    folder = out or Path("runs") / f"{suite}-{_digest(evaluation)}"
    with progress_bar("evaluating") as move:
        results = run_evaluation(
            sources, folder, engine=engine, threads=threads, workers=workers,
            ray_address=ray_address, progress=move,
        )  # fmt: skip
    write_markdown(results, folder)
    write_page(results, folder / "report.html")
    _log(results, log or [], folder)
    if as_json:
        typer.echo(json.dumps(results.to_json(), indent=2))
    else:
        show_results(results)
        typer.echo(f"run: {folder}; report: {folder / 'report.html'}")
    if not results.complete:
        typer.echo("dent: some units failed; run the same command to try them again", err=True)
        raise typer.Exit(FAILED)


def attack(
    model: Annotated[str, typer.Argument(help="Model, see `dent list models`.")],
    attack: Annotated[
        str, typer.Option(help="Attack: apgd-ce:steps=20 or package.module:function.")
    ] = "apgd-ce",
    defense: Annotated[
        str, typer.Option(help="Defense: dent+, hedge:steps=5 or package.module:function.")
    ] = "static",
    data: Annotated[str, typer.Option(help="Data set, see `dent list data`.")] = "cifar10",
    n: Annotated[
        int | None,
        typer.Option(help=f"Number of images; 0 is all (default: {POINTS}, or all of your own)."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Number of images per batch.")] = BATCH_SIZE,
    eps: Annotated[
        str | None, typer.Option(help="Radius, such as 8/255 or 0.5 (default: what suits the model).")
    ] = None,
    norm: Annotated[str, typer.Option(help="Norm: linf, l2 or l1.")] = "linf",
    steps: Annotated[int | None, typer.Option(help="Number of steps of a gradient attack.")] = None,
    queries: Annotated[int | None, typer.Option(help="Number of queries of Square.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="File for the images.")] = Path("adversarial.npz"),
    as_json: AsJson = False,
) -> None:
    """Run one attack on one model, and save the adversarial images as an .npz file.

    Other commands can read the file as data: `--data adversarial.npz`.
    """
    if out.suffix != ".npz":
        raise ValueError(f"expected out as a file.npz, got {out}")
    check_file(out)
    count = {} if n is None else {"n": n}
    evaluation = Evaluation(
        models=model, defenses=defense, data=data, **count, batch_size=batch_size, norm=norm, seed=seed,
        device=device, eps=eps,
    )  # fmt: skip
    asked = {"steps": steps, "queries": queries}
    settings = {name: value for name, value in asked.items() if value is not None}
    with progress_bar(attack) as move:
        result = attack_data(Sources(evaluation), attack, settings, progress=move)
    result.save(out)
    if as_json:
        content = {name: one.to_json() for name, one in result.scores().items()}
        typer.echo(json.dumps({"cell": asdict(result.cell), "attack": attack, **content}, indent=2))
    else:
        show_scores(result.scores(), title=f"{result.cell}, {attack}")
        typer.echo(f"images: {out}")


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of the first run.")],
    second: Annotated[Path, typer.Argument(help="Folder of the second run.")],
    as_json: AsJson = False,
) -> None:
    """Compare two runs on the images that both have: paired differences with intervals."""
    rows = compare_results(load_results(first), load_results(second))
    if as_json:
        typer.echo(json.dumps([row.to_json() for row in rows], indent=2))
    else:
        show_comparison(rows)


def _show_estimate(sources: Sources, as_json: bool) -> None:
    rows = estimate_run(make_plan(sources), sources)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    show(estimate_rows(rows), False, right=("units", "forwards", "minutes"))
    typer.echo(total_line(rows))
    try:
        check_needs(sources.evaluation)
    except (ImportError, ValueError) as error:
        typer.echo(f"- {error}")


def _log(results: Results, loggers: list[str], folder: Path) -> None:
    for name in loggers:
        with open_logger(name, folder, results.about["asked"]) as write:
            for cell in results.cells:
                write({f"{cell.cell}/{name}": score.percent for name, score in cell.scores()}, 0)


def _digest(evaluation: Evaluation) -> str:
    """Return a short digest of the settings, so that the same command finds its run again."""
    text = json.dumps(evaluation.to_json(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
