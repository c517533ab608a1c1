"""The verbs reproduce and report, as a person types them."""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from reproductions import failed, reproduction
from runs import evaluated, snapshot

from dent import load_data, load_model
from dent.cli import main
from dent.cli import reproduce as verb
from dent.evaluation.pipeline import run_evaluation
from dent.models import ROBUSTBENCH
from dent.paper import reproduce as work
from dent.paper.claims import judge_claims
from dent.paper.reproduce import CELLS
from dent.paper.results import RESULTS, load_reproduction
from dent.paper.scales import LoadedModel, find_scale
from dent.paper.tables import tables
from dent.report.paper import paper_markdown

SMALL = ["reproduce", "table-10", "--scale", "smoke", "--threads", "1"]  # one cell


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


class Command:
    """The command in this process, where it can be watched; run in a folder of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Said:
        self.capsys.readouterr()
        with self.monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["dent", *map(str, arguments)])
            with pytest.raises(SystemExit) as end:
                main()
        shown = self.capsys.readouterr()
        return Said(int(end.value.code or 0), shown.out, shown.err)


@pytest.fixture
def dent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capsys)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the smallest table was run by the command."""
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dent", *SMALL, "--out", str(folder)])
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    return folder


@pytest.fixture
def ran(small: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small, tmp_path / "ran")


# The list


def test_without_a_name_it_lists_all(dent: Command, tmp_path: Path) -> None:
    said = dent("reproduce")
    assert said.code == 0
    for table in tables().values():
        assert re.search(rf"^{table.name} +{re.escape(table.label)} ", said.out, re.MULTILINE)
    assert not list(tmp_path.iterdir())


def test_the_list_says_what_is_measured(dent: Command, ran: Path) -> None:
    rows = json.loads(dent("reproduce", "--scale", "smoke", "--out", ran, "--json").out)
    assert [row["name"] for row in rows] == list(tables())
    here = {row["name"]: row["here"] for row in rows}
    assert here["table-10"] == 11
    assert here["table-2"] == 0
    assert {row["name"]: row["published"] for row in rows}["figure-3"] == 0
    assert all(row["numbers"] >= max(row["published"], row["here"]) for row in rows)


# What is wrong


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["reproduce", "tabel-1"], "did you mean 'table-1'"),
        (["reproduce", "table-1", "stota"], "did you mean 'sota'"),
        (["reproduce", "all", "tabel-1"], "did you mean 'table-1'"),
        (["reproduce", "table-1", "--scale", "smok"], "did you mean 'smoke'"),
        (["reproduce", "table-1", "--dry-run", "--scale", "large"], "paper, cpu-large, cpu, smoke"),
        ([*SMALL, "--engine", "rey"], "here, ray"),
        ([*SMALL, "--device", "cuda:7"], "cannot be loaded"),
        (["report", "nowhere"], "nowhere"),
        (["report", "nowhere.json"], "nowhere.json"),
        (["report", "a", "b"], "expected one run, or out as a file.md for several, got 2 runs"),
        (["report", "a", "--out", "x.md", "--pictures", "b"], "expected pictures with an HTML file"),
        (["report", "nowhere", "--out", "x.md"], "nowhere"),
        ([*SMALL, "--models", "nowhere"], "expected a folder of RobustBench's checkpoint files"),
        ([*SMALL, "--models", "."], "expected a table with models of RobustBench, such as table-1"),
        (["reproduce", "table-2", "--models", "."], "got none of cifar10/Linf/Wong2020Fast.pt, cifar"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(
    dent: Command, tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = dent(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("dent: ")
    assert said in done.err
    assert not list(tmp_path.rglob("*.json"))


# Running


def test_a_table_is_run_and_shown(dent: Command, ran: Path, small: Path) -> None:
    before = snapshot(ran / CELLS)
    said = dent(*SMALL, "--out", ran)
    assert said.code == 0, said.err
    units = {name: content for name, content in before.items() if "/units/" in name}
    assert {name: snapshot(ran / CELLS)[name] for name in units} == units  # it was done already
    for text in ("Table 10: ", "published", "63.2", "here", "worst case", "holds", str(ran / RESULTS)):
        assert text in said.out
    assert load_reproduction(ran) == load_reproduction(small)
    assert (ran / "report.md").read_text() == paper_markdown(load_reproduction(ran))
    assert (ran / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_stored_results_are_taken_over(dent: Command, ran: Path, small: Path, tmp_path: Path) -> None:
    said = dent(*SMALL, "--out", tmp_path / "new", "--start", ran / RESULTS)
    assert said.code == 0, said.err
    assert f"evaluations known from {ran / RESULTS}: 1" in said.err
    assert not (tmp_path / "new" / CELLS).exists()
    assert load_reproduction(tmp_path / "new") == load_reproduction(small)


def test_results_as_json(dent: Command, ran: Path) -> None:
    said = dent(*SMALL, "tab:apgd_ce_steps", "--out", ran, "--json")
    assert said.code == 0, said.err
    content = json.loads(said.out)
    found = load_reproduction(ran)
    assert content["scale"] == "smoke"
    assert list(content["tables"]) == ["table-10"]  # named twice, done once
    numbers = content["tables"]["table-10"]
    assert [one["published"] for one in numbers][:2] == [63.2, 59.6]
    expected = [one.to_json() for one in found.by_reference(tables()["table-10"]).values()]
    assert numbers == expected
    assert content["claims"] == [one.to_json() for one in judge_claims(found)]


def test_missing_numbers_are_the_exit_code(dent: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "run_tables", lambda *arguments, **how: failed())
    said = dent("reproduce", "table-12", "--scale", "smoke", "--out", "x")
    assert said.code == 1
    assert "some numbers are missing; run the same command to try them again" in said.err
    assert "weights are not there" in said.out
    assert Path("x/report.html").exists()


def test_what_a_scale_leaves_out_is_not_missing(dent: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reproduction("smoke", chosen=[tables()["figure-4"]])
    monkeypatch.setattr(verb, "run_tables", lambda *arguments, **how: whole)
    said = dent("reproduce", "figure-4", "--scale", "smoke", "--out", "x")
    assert (said.code, said.err) == (0, "")
    assert "left out at this scale" in said.out


# What would be done


def test_a_dry_run_of_the_paper_needs_no_weights(
    dent: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DENT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(work, "time_forward", lambda *arguments: 0.5)
    arguments = ["reproduce", "table-2", "table-12", "imagenet", "--scale", "paper", "--dry-run"]
    said = dent(*arguments)
    assert said.code == 0, said.err
    loads = ["robustbench:Wong2020Fast", "robustbench:Ding2020MMA", "robustbench:imagenet/Wong2020Fast"]
    loads += ["runs/resnet26-4-at/checkpoint.pt", "runs/resnet26-4-nominal/checkpoint.pt"]
    for name in loads:
        assert name in said.out
    assert "dent train resnet26-4 --recipe nominal" in said.out
    assert re.search(r"forwards .*about \d[\d,]* (h|days?)\b.* on this machine", said.out), said.out
    assert not list(tmp_path.iterdir())  # nothing fetched, nothing written

    rows: list[dict[str, Any]] = json.loads(dent(*arguments, "--json").out)
    assert {row["loads"] for row in rows} == set(loads)
    assert {row["data"] for row in rows} == {"cifar10", "imagenet#crop288"}
    assert all(row["seconds"] == pytest.approx(0.5 * row["forwards"]) for row in rows)
    assert all(row["trouble"] for row in rows)
    cells = [(row["loads"], row["defense"], row["norm"], row["eps"]) for row in rows]
    assert len(cells) == len(set(cells))


def test_a_dry_run_of_what_can_be_done(dent: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "time_forward", lambda model, inputs: float(inputs.shape[-1]))
    rows = json.loads(dent("reproduce", "all", "--scale", "smoke", "--dry-run", "--json").out)
    assert len(rows) == 63
    assert {row["trouble"] for row in rows} == {None}
    assert all(row["seconds"] == 32 * row["forwards"] for row in rows)
    # A piece of work stands at the first table that needs it.
    order = [list(tables()).index(row["table"]) for row in rows]
    assert order == sorted(order)


def test_a_dry_run_on_a_device_that_is_not_there(dent: Command) -> None:
    for device in ("quantum", "cuda:99"):
        said = dent("reproduce", "text-protocol", "--scale", "smoke", "--dry-run", "--device", device)
        assert said.code == 2
        assert said.err.startswith(f"dent: expected a device that this machine has, got '{device}'")
        assert len(said.err.splitlines()) == 1


def test_another_number_of_images_but_for_tables_that_have_their_own(
    dent: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "time_forward", lambda model, inputs: 1.0)
    arguments = ["reproduce", "table-1", "table-14", "--n", "320", "--dry-run", "--json"]
    rows = json.loads(dent(*arguments).out)
    assert {(row["table"], row["n"]) for row in rows} == {("table-1", 320), ("table-14", 16)}
    refused = dent(*arguments[:-3], "0", "--dry-run")
    assert refused.code == 2
    assert "--n" in refused.err


def test_the_time_of_an_unknown_network_is_unknown() -> None:
    scale = find_scale("smoke")
    broken = LoadedModel(model="reproductions:broken")
    scale = scale.replace(models=dict.fromkeys(scale.models, broken))
    for row in work.estimate_tables([tables()["table-10"]], scale):
        assert (row.seconds, row.trouble) == (
            None,
            "reproductions:broken raised RuntimeError: no driver",
        )


# RobustBench's own checkpoints


def save_checkpoint(folder: Path, key: str) -> None:
    """A file of the published layout, with random weights."""
    file = folder / f"{key}.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.save({"state_dict": ROBUSTBENCH[key].make().state_dict()}, file)


def test_checkpoints_of_robustbench_take_the_place_of_stand_ins(dent: Command, tmp_path: Path) -> None:
    wong = "cifar10/Linf/Wong2020Fast"
    save_checkpoint(tmp_path / "zoo", wong)
    arguments = ["reproduce", "table-1", "--scale", "smoke", "--threads", "1", "--models", "zoo"]
    said = dent(*arguments, "--out", "run")
    assert said.code == 0, said.err
    absent = ["Linf/Carmon2019Unlabeled", "Linf/Ding2020MMA", "L2/Rice2020Overfitting"]
    absent += ["L2/Rony2019Decoupling", "L2/Ding2020MMA"]
    for name in absent:
        assert f"not in zoo: cifar10/{name}.pt; its row is not measured" in said.err
    assert "https://github.com/RobustBench/robustbench" in said.err
    assert f"{wong}.pt; its row" not in said.err
    assert re.findall(r"^reproducing: \d+ %, .* left, .*, apgd-ce, batch 0$", said.err, re.MULTILINE)
    found = load_reproduction(tmp_path / "run")
    numbers = found.by_reference(tables()["table-1"])
    measured = {name for name, one in numbers.items() if one.ours is not None}
    row = "table-1/linf 8/255/wong2020"
    assert measured == {f"{row}/{column}" for column in ("natural", "static", "dent", "dent+")}
    work_done = numbers[f"{row}/dent+"].work
    assert work_done is not None
    assert work_done.model == f"robustbench:zoo/{wong}.pt"
    assert not work_done.stands_in
    # What was measured is what that very file says.
    inputs, labels = load_data("cifar10", n=4)
    model = load_model("Wong2020Fast", weights=tmp_path / "zoo" / f"{wong}.pt")
    correct = model(inputs).argmax(1).eq(labels).tolist()
    judged = numbers[f"{row}/natural"].judged
    assert judged is not None
    assert [judged.points[point] for point in range(4)] == correct
    plan = dent(*arguments, "--dry-run", "--json")
    assert {one["loads"] for one in json.loads(plan.out)} == {work_done.model}


def test_other_models_keep_their_stand_ins(tmp_path: Path) -> None:
    file = tmp_path / "cifar10" / "Linf" / "Ding2020MMA.pt"
    file.parent.mkdir(parents=True)
    file.touch()
    scale, usual = find_scale("cpu").with_robustbench(tmp_path), find_scale("cpu")
    assert scale.models["madry-26-4"] == usual.models["madry-26-4"]
    assert scale.models["ding2020"] == LoadedModel(model=f"robustbench:{file}")
    assert "ding2020-l2" not in scale.models  # nothing stands in for what was asked for
    assert "cifar10/L2/Ding2020MMA.pt is not in" in scale.without["ding2020-l2"]
    number = tables()["table-11"].references()["table-11/ding2020 linf 8/255/dent/AutoAttack"]
    assert usual.explain_left_out("table-11", number)
    assert scale.explain_left_out("table-11", number) is None  # it is another model than madry2018


# The report


def test_pages_of_several_reproductions(dent: Command, tmp_path: Path) -> None:
    for name in ("cpu", "cpu-large"):
        content = json.dumps(reproduction(name, chosen=[tables()["table-10"]]).to_json())
        (tmp_path / f"{name}.json").write_text(content)
    said = dent("report", "cpu.json", "cpu-large.json", "--out", "results.md")
    assert said.code == 0, said.err
    assert said.out == "overview: results.md; pages: results\n"
    text = Path("results/table-10.md").read_text()
    assert "small (resnet20-at)" in text
    assert "large (resnet26-4-at)" in text
    for name in ("cpu", "cpu-large"):
        assert load_reproduction(Path(f"results/{name}.json")) == load_reproduction(Path(f"{name}.json"))
    again = {path: path.read_bytes() for path in Path("results").iterdir()}
    assert dent("report", "results/cpu.json", "results/cpu-large.json", "--out", "results.md").code == 0
    assert {path: path.read_bytes() for path in Path("results").iterdir()} == again


@pytest.mark.parametrize("what", ["folder", "file"])
def test_the_page_of_a_reproduction_again(dent: Command, ran: Path, what: str) -> None:
    before = (ran / "report.html").read_bytes()
    (ran / "report.html").unlink()
    said = dent("report", ran if what == "folder" else ran / RESULTS)
    assert said.code == 0, said.err
    assert str(ran / "report.html") in said.out
    assert (ran / "report.html").read_bytes() == before


def test_the_page_of_an_evaluation(dent: Command, tmp_path: Path) -> None:
    evaluated(tmp_path / "run", n=4, defenses=["static"], attacks=["square:queries=2"], battle=False)
    said = dent("report", "run", "--out", "page.html")
    assert said.code == 0, said.err
    assert "Evaluation of runs:noisy" in (tmp_path / "page.html").read_text()
    assert not (tmp_path / "run" / "report.html").exists()


def test_plots_as_files(dent: Command, ran: Path, tmp_path: Path) -> None:
    said = dent("report", ran, "--pictures", tmp_path / "plots")
    assert said.code == 0, said.err
    assert str(tmp_path / "plots") in said.out
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert "table-10-linf-8-255-across-attack-steps.png" in names
    assert {Path(name).suffix for name in names} == {".png", ".svg"}
    for path in (tmp_path / "plots").glob("*.png"):
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", content[16:24])
        assert width > 1000
        assert height > 500
        assert ElementTree.parse(path.with_suffix(".svg")).getroot().tag.endswith("}svg")


@pytest.mark.parametrize("name", ["page.pdf", "page", "page.json"])
def test_a_page_is_html(dent: Command, ran: Path, tmp_path: Path, name: str) -> None:
    before = snapshot(tmp_path)
    said = dent("report", ran, "--out", name)
    assert said.code == 2
    assert f"expected out as a file.html, got {name}" in said.err
    assert snapshot(tmp_path) == before


def test_what_is_no_result_is_refused(dent: Command, ran: Path) -> None:
    (ran / RESULTS).write_text('{"cells": []}')
    said = dent("report", ran / RESULTS)
    assert said.code == 2
    assert "is no reproduction" in said.err
    (ran / RESULTS).unlink()
    said = dent("report", ran)
    assert said.code == 2
    assert f"expected {RESULTS} in {ran}, which dent reproduce writes when it starts" in said.err


def test_a_run_that_is_killed_has_a_report_of_what_is_done(
    dent: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, done = tmp_path / "run", list[str]()

    def evaluate_once(sources: Any, into: Path, **how: Any) -> None:
        if done:
            raise KeyboardInterrupt
        done.append(into.name)
        run_evaluation(sources, into, **how)

    monkeypatch.setattr(work, "run_evaluation", evaluate_once)
    names = ["table-10", "table-3", "--scale", "smoke", "--threads", "1"]
    assert dent("reproduce", *names, "--out", folder).code != 0
    assert load_reproduction(folder).cells == {}
    said = dent("report", folder)
    assert said.code == 0, said.err
    assert (folder / "report.html").exists()
    assert list(work.load_current(folder).cells) == done
    said = dent("reproduce", "table-10", "--scale", "smoke", "--start", folder, "--dry-run")
    assert f"evaluations known from {folder}: 1" in said.err


def test_a_search_in_half_precision_is_other_work_and_the_report_says_so(
    dent: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    assert dent(*SMALL, "--mixed-precision").code == 0
    found = load_reproduction(Path("runs/paper-smoke"))
    assert found.scale.mixed_precision
    assert {cell.asked["mixed_precision"] for cell in found.cells.values()} == {True}
    assert "judged in float32" in paper_markdown(found)
    assert not work.gather(find_scale("smoke"), Path("runs/paper-smoke")).cells
