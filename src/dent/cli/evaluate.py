"""`dent evaluate`, `dent attack` and `dent compare`: what a defense is worth."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dent.cli.app import AsJson, Device, Log, Threads, app, show
from dent.evaluation import Evaluation, Results, load_results, make_evaluation, read_evaluation
from dent.evaluation.compare import compare as compare_results
from dent.evaluation.estimate import estimate
from dent.evaluation.plan import make_plan
from dent.evaluation.run import run
from dent.evaluation.single import attack_data
from dent.evaluation.sources import Sources
from dent.fields import number
from dent.flags import flags
from dent.loggers import open_logger
from dent.report.terminal import (
    estimate_rows,
    progress_bar,
    show_comparison,
    show_results,
    show_table,
    total_line,
)
from dent.report.write import write_markdown, write_page

FAILED = 1  # the exit code where a unit of the run failed


@app.command()
@flags(Evaluation, without=("models", "defenses", "attacks"))
def evaluate(
    config: Annotated[Path | None, typer.Argument(help="A YAML file of settings; flags win.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Model, may be repeated.")] = None,
    defense: Annotated[
        list[str] | None, typer.Option(help="Defense, as dent+ or dent:steps=10; may be repeated.")
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(help="Attack instead of a suite, as apgd-ce:steps=20; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; one in runs/.")] = None,
    engine: Annotated[str, typer.Option(help="here, or ray.")] = "here",
    workers: Annotated[int | None, typer.Option(help="Of Ray; all cores if not given.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="Of a cluster of Ray.")] = None,
    threads: Threads = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would be done, and do nothing.")] = False,
    log: Log = None,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Attack models with and without defenses, and say what stands; the same command resumes it.

    Alone, it takes the shipped models and images with the defenses that suit them.
    """
    lists = {"models": model, "defenses": defense, "attacks": attack}
    given = settings | {name: tuple(value) for name, value in lists.items() if value}
    evaluation = read_evaluation(config, **given) if config else make_evaluation(**given)
    sources = Sources(evaluation)
    if dry_run:
        _show_estimate(sources, as_json)
        return
    suite = "chosen" if evaluation.attacks else evaluation.suite
    folder = out or Path("runs") / f"{suite}-{_digest(evaluation)}"
    with progress_bar("evaluating") as move:
        results = run(
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
        typer.echo("dent: some units failed; the same command tries these again", err=True)
        raise typer.Exit(FAILED)


@app.command()
def attack(
    model: Annotated[str, typer.Argument(help="See `dent list models`.")],
    attack: Annotated[str, typer.Option(help="See `dent list attacks`.")] = "apgd-ce",
    defense: Annotated[str, typer.Option(help="As dent+ or dent:steps=10.")] = "static",
    data: Annotated[str, typer.Option(help="See `dent list data`.")] = "cifar10",
    n: Annotated[int, typer.Option(help="How many images; all if 0.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Images of a batch.")] = 128,
    eps: Annotated[str | None, typer.Option(help="Radius, as 8/255 or 0.5.")] = None,
    norm: Annotated[str, typer.Option(help="linf, l2 or l1.")] = "linf",
    steps: Annotated[int | None, typer.Option(help="Of a gradient attack.")] = None,
    queries: Annotated[int | None, typer.Option(help="Of Square.")] = None,
    seed: Annotated[int, typer.Option(help="Of the batches and of the attack.")] = 0,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="The .npz for the images.")] = Path("adversarial.npz"),
    as_json: AsJson = False,
) -> None:
    """Run one attack on one model, and save the adversarial images as .npz.

    The file can be read as data again: `--data adversarial.npz`.
    """
    if out.suffix != ".npz":
        raise ValueError(f"expected out as a file.npz, got {out}")
    evaluation = make_evaluation(
        models=model, defenses=defense, data=data, n=n, batch_size=batch_size, norm=norm, seed=seed,
        device=device, eps=None if eps is None else number(eps),
    )  # fmt: skip
    asked = {"steps": steps, "queries": queries}
    settings = {name: value for name, value in asked.items() if value is not None}
    with progress_bar(attack) as move:
        result = attack_data(Sources(evaluation), attack, settings, progress=move)
    result.save(out)
    rows = [
        {
            "images": name,
            "accuracy %": f"{one.percent:.1f}",
            "95 % interval": f"{one.low:.1f} to {one.high:.1f}",
            "n": one.n,
        }
        for name, one in result.scores().items()
    ]
    if as_json:
        content = {name: one.to_json() for name, one in result.scores().items()}
        typer.echo(json.dumps({"cell": asdict(result.cell), "attack": attack, **content}, indent=2))
    else:
        show_table(rows, right=["accuracy %", "n"], title=f"{result.cell}, {attack}")
        typer.echo(f"images: {out}")


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Folder of a run.")],
    second: Annotated[Path, typer.Argument(help="Folder of another.")],
    as_json: AsJson = False,
) -> None:
    """Compare two runs on the points that both have: paired differences, with intervals."""
    rows = compare_results(load_results(first), load_results(second))
    if as_json:
        typer.echo(json.dumps([row.to_json() for row in rows], indent=2))
    else:
        show_comparison(rows)


def _show_estimate(sources: Sources, as_json: bool) -> None:
    rows = estimate(make_plan(sources), sources)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    show(estimate_rows(rows), False, right=("units", "forwards", "minutes"))
    typer.echo(total_line(rows))


def _log(results: Results, loggers: list[str], folder: Path) -> None:
    for name in loggers:
        with open_logger(name, folder, results.about["asked"]) as write:
            for cell in results.cells:
                write({f"{cell.cell}/{name}": score.percent for name, score in cell.scores()}, 0)


def _digest(evaluation: Evaluation) -> str:
    """So that the same command finds its run again."""
    text = json.dumps(evaluation.to_json(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
