"""`dent reproduce` and `dent report`: the paper's tables, and HTML pages of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dent.cli.app import (
    AsJson,
    Device,
    DryRun,
    Engine,
    RayAddress,
    Seed,
    Threads,
    Workers,
    show,
)
from dent.cli.evaluate import FAILED
from dent.evaluation import load_results
from dent.paper.claims import judge_claims
from dent.paper.reproduce import (
    CELLS,
    WorkEstimate,
    estimate_tables,
    gather,
    list_missing_checkpoints,
    load_current,
    select_known,
)
from dent.paper.reproduce import reproduce as run_tables
from dent.paper.results import RESULTS, Reproduction
from dent.paper.scales import find_scale, scales
from dent.paper.tables import PaperTable, find_table, tables
from dent.report.paper import table_rows
from dent.report.terminal import (
    missing_checkpoint_lines,
    progress_bar,
    show_claims,
    show_paper_table,
    work_rows,
    work_total_line,
)
from dent.report.write import write_page, write_paper, write_paper_pages


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Tables, such as table-1 or sota, or all (default: list the tables)."),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(help=f"Scale: {', '.join(scales())}; see docs/paper.md."),
    ] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run (default: runs/paper-SCALE).")
    ] = None,
    engine: Engine = "here",
    workers: Workers = None,
    ray_address: RayAddress = None,
    threads: Threads = None,
    imagenet: Annotated[Path | None, typer.Option(help="Folder of ImageNet, for --scale paper.")] = None,
    models: Annotated[
        Path | None,
        typer.Option(help="Folder of RobustBench's checkpoint files: cifar10/Linf/Wong2020Fast.pt, ..."),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Stored results of this scale, a file or a folder: they are not measured again."
        ),
    ] = None,
    mixed_precision: Annotated[
        bool,
        typer.Option(help="Search in bfloat16, which is faster on hardware that has it."),
    ] = False,
    n: Annotated[
        int | None,
        typer.Option(help="Number of images for most numbers (default: the scale's).", min=1),
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Measure the numbers of the paper's tables and figures, and print them beside the published ones.

    A number that several tables need is measured once. Beside every robust accuracy stands the worst
    case under attacks made for adaptation. The same command resumes a run that was stopped.
    """
    chosen_scale = find_scale(scale)
    if models is not None:
        chosen_scale = chosen_scale.with_robustbench(models)
    chosen_scale = chosen_scale.with_imagenet(imagenet)
    if n is not None:
        chosen_scale = chosen_scale.with_images(n)
    if mixed_precision:
        chosen_scale = chosen_scale.replace(mixed_precision=True)
    folder = out or Path("runs") / f"paper-{chosen_scale.name}"
    if not names:
        show(
            table_rows(gather(chosen_scale, folder, seed=seed, device=device)),
            as_json,
            right=("numbers", "published", "here"),
        )
        return
    named = dict.fromkeys(find_table(name).name for name in names if name != "all")
    chosen = [tables()[name] for name in (tables() if "all" in names else named)]
    if models is not None:
        for line in missing_checkpoint_lines(list_missing_checkpoints(chosen, models), models):
            typer.echo(line, err=True)
    known = {}
    if start is not None:
        known = select_known(load_current(start), chosen, chosen_scale, seed=seed, device=device)
        typer.echo(f"evaluations known from {start}: {len(known)}", err=True)
    if dry_run:
        estimates = estimate_tables(chosen, chosen_scale, seed=seed, device=device, known=known)
        _show_estimates(estimates, as_json)
        return
    with progress_bar("reproducing") as move:
        found = run_tables(
            chosen, chosen_scale, folder, seed=seed, device=device, progress=move, engine=engine,
            threads=threads, workers=workers, ray_address=ray_address, known=known,
        )  # fmt: skip
    write_paper(found, folder)
    _show(found, chosen, as_json)
    if not as_json:
        typer.echo(f"results: {folder / RESULTS}; report: {folder / 'report.html'}")
    if not found.is_complete(chosen):
        typer.echo("dent: some numbers are missing; run the same command to try them again", err=True)
        raise typer.Exit(FAILED)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folder of `dent evaluate` or `dent reproduce`, or a stored paper.json; several for "
            "--out FILE.md."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="HTML file (default: report.html in the folder). FILE.md writes Markdown about "
            "reproductions: an overview, and the folder FILE with a page for each table."
        ),
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Folder for the plots as PNG and SVG (default: none).")
    ] = None,
) -> None:
    """Write the report of a run again, as one HTML file, and its plots for papers."""
    if out is not None and out.suffix == ".md":
        if pictures is not None:
            raise ValueError("expected pictures with an HTML file, got a file.md")
        folder = write_paper_pages(list(map(load_current, runs)), out)
        typer.echo(f"overview: {out}; pages: {folder}")
        return
    if len(runs) > 1:
        raise ValueError(f"expected one run, or out as a file.md for several, got {len(runs)} runs")
    (run,) = runs
    file = out or (run.parent if run.is_file() else run) / "report.html"
    if file.suffix != ".html":
        raise ValueError(f"expected out as a file.html, got {file}")
    results = load_current(run) if _is_paper(run) else load_results(run)
    write_page(results, file, pictures=pictures)
    typer.echo(f"report: {file}" + (f"; pictures: {pictures}" if pictures else ""))


def _is_paper(run: Path) -> bool:
    return run.is_file() or (run / RESULTS).exists() or (run / CELLS).is_dir()


def _show(found: Reproduction, chosen: list[PaperTable], as_json: bool) -> None:
    if as_json:
        content = {
            table.name: [one.to_json() for one in found.by_reference(table).values()] for table in chosen
        }
        judged = [one.to_json() for one in judge_claims(found)]
        typer.echo(
            json.dumps({"scale": found.scale.name, "tables": content, "claims": judged}, indent=2)
        )
        return
    for table in chosen:
        show_paper_table(found, table)
    show_claims(judge_claims(found))


def _show_estimates(rows: list[WorkEstimate], as_json: bool) -> None:
    if as_json:
        show([vars(row) for row in rows], True)
        return
    show(work_rows(rows), False, right=("n", "forwards", "time"))
    for trouble in dict.fromkeys(row.trouble for row in rows if row.trouble):
        typer.echo(f"- {trouble}")
    typer.echo(work_total_line(rows))
