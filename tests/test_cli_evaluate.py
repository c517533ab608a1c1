"""The verbs evaluate, attack and compare, as a person types them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import run

import dent
from dent.evaluation import Evaluation
from dent.report.evaluation import results_text

TINY = [
    "--model",
    "runs:model",
    "--data",
    "runs:images",
    "--n",
    "8",
    "--batch-size",
    "4",
    "--steps",
    "1",
]
TINY += ["--eps", "5/255", "--threads", "1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: a and b, which has another defense."""
    folder = tmp_path_factory.mktemp("runs")
    for name, defense in (("a", "static"), ("b", "dent+:steps=1")):
        done = run("evaluate", *TINY, "--defense", defense, "--out", folder / name, cwd=folder)
        assert done.returncode == 0, done.stderr
        (folder / f"{name}.txt").write_text(done.stdout)
        (folder / f"{name}.err").write_text(done.stderr)
    return folder


def test_the_table_and_where_the_report_is(runs: Path) -> None:
    shown = (runs / "b.txt").read_text()
    for part in ("natural", "worst case", "95 %", "dent+:steps=1", "linf 5/255", "n = 8", "report.html"):
        assert part in shown
    for name in ("report.html", "report.md", "results.json", "results.csv", "run.json"):
        assert (runs / "b" / name).stat().st_size > 100
    assert shown.splitlines()[0] in results_text(dent.load_results(runs / "b"))


def test_without_a_terminal_every_finished_unit_is_a_line(runs: Path) -> None:
    lines = [line for line in (runs / "b.err").read_text().splitlines() if "batch" in line]
    units = list((runs / "b" / "units").rglob("*.json"))
    assert len(lines) == len(units) > 4
    shares = [int(line.removeprefix("evaluating: ").partition(" %")[0]) for line in lines]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert all(" seconds left, model, dent+:steps=1, " in line.replace("runs:", "") for line in lines)


def test_own_images_are_all_taken(tmp_path: Path) -> None:
    inputs, labels = load_own()
    np.savez(tmp_path / "own.npz", images=inputs[:6], labels=labels[:6])
    asked = ["--model", "runs:model", "--data", "own.npz", "--defense", "static", "--suite", "none"]
    done = run("evaluate", *asked, "--json", "--out", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    assert cell["natural"]["n"] == 6
    for name, n in (("own.npz", None), ("a.b:images", None), ("cifar10", 256), ("imagenet:/x", 256)):
        assert Evaluation(data=name).n == n
    assert Evaluation(data="own.npz", n=3).n == 3
    table = run("evaluate", *asked, "--out", "x", cwd=tmp_path).stdout
    page = (tmp_path / "x" / "report.html").read_text()
    for shown in (table, page):  # the natural accuracy is no worst case
        assert "o attack was made" in shown
        assert "% stands" not in shown
    (row,) = [line.split() for line in table.splitlines() if line.startswith("  static")]
    assert row.count("-") >= 2  # the worst case, and the submitted one


def test_a_missing_extra_is_planned_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    asked = ["evaluate", *TINY, "--suite", "full", "--defense", "static"]
    says = (
        "the attack autoattack (the reference AutoAttack) needs: pip install 'dent-defense[reference]'"
    )
    planned = run(*asked, "--dry-run", cwd=tmp_path)
    assert planned.returncode == 0
    assert says in planned.stdout
    refused = run(*asked, cwd=tmp_path)
    assert refused.returncode == 2
    assert says in refused.stderr
    assert "--no-protocol" in refused.stderr
    assert not list(tmp_path.iterdir())
    rest = run(*asked, "--no-protocol", "--dry-run", cwd=tmp_path)
    assert "fab-t" in rest.stdout
    assert "autoattack" not in rest.stdout


def test_a_file_that_cannot_be_written_is_refused_before_the_attack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dent.cli.evaluate.attack_data", None)
    (tmp_path / "file").touch()
    (tmp_path / "folder.npz").mkdir()
    for out in ("file/made.npz", "folder.npz"):
        done = run("attack", "runs:model", "--data", "runs:images", "--out", out, cwd=tmp_path)
        assert done.returncode == 2
        assert "expected a file to write, got" in done.stderr


def load_own() -> tuple[np.ndarray, np.ndarray]:
    inputs, labels = dent.load_data("runs:images")
    return inputs.numpy(), labels.numpy()


def test_the_same_command_again_computes_nothing(runs: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (runs / "a" / "units").rglob("*.json")}
    again = run(
        "evaluate", *TINY, "--defense", "static", "--out", runs / "a", "--json", cwd=runs
    )  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in (runs / "a" / "units").rglob("*.json")} == before
    assert json.loads(again.stdout) == dent.load_results(runs / "a").to_json()


def test_without_out_the_same_command_finds_its_run(tmp_path: Path) -> None:
    folders = []
    for _ in range(2):
        done = run("evaluate", *TINY, "--defense", "static", cwd=tmp_path)
        folders.append(done.stdout.splitlines()[-1])
    assert folders[0] == folders[1]
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_comparison(runs: Path) -> None:
    rows = json.loads(run("compare", "a", "b", "--json", cwd=runs).stdout)
    assert [row["what"] for row in rows] == ["natural", "worst case"]
    assert {(row["first_defense"], row["second_defense"]) for row in rows} == {
        ("static", "dent+:steps=1")
    }
    shown = run("compare", "a", "b", cwd=runs).stdout
    assert "difference" in shown
    assert "n" in shown


def test_a_dry_run_does_nothing(tmp_path: Path) -> None:
    shown = run("evaluate", *TINY, "--suite", "full", "--dry-run", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "gmsa-min" in shown.stdout
    assert "forwards" in shown.stdout.splitlines()[-1]
    assert not list(tmp_path.iterdir())
    rows = json.loads(run("evaluate", *TINY, "--dry-run", "--json", cwd=tmp_path).stdout)
    assert all(row["units"] > 0 and row["forwards"] > 0 and row["seconds"] > 0 for row in rows)


def test_a_file_of_settings_which_flags_override(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(
        "models: [runs:model]\ndata: runs:images\nn: 8\nbatch_size: 8\nsteps: 1\neps: 5/255\n"
        "defenses: [static, {preset: dent+, steps: 1}]\n"
    )
    done = run("evaluate", "e.yaml", "--n", "4", "--out", "x", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert [(cell["defense"], cell["worst"]["n"]) for cell in cells] == [
        ("static", 4),
        ("dent+:steps=1", 4),
    ]


def test_chosen_attacks_instead_of_a_suite(tmp_path: Path) -> None:
    chosen = ["--attack", "square:queries=3", "--attack", "fpa: steps=2, rounds=1", "--defense", "norm"]
    done = run("evaluate", *TINY[:-4], "--eps", "0.02", *chosen, "--no-battle", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["about"]["asked"]["attacks"] == ["square:queries=3", "fpa:rounds=1,steps=2"]
    assert list(content["cells"][0]["attacks"]) == ["square", "fpa"]
    assert content["cells"][0]["missing"] == []
    (folder,) = (tmp_path / "runs").iterdir()  # named after no suite
    assert folder.name.startswith("chosen-")
    assert dent.load_results(folder).to_json() == content
    (tmp_path / "e.yaml").write_text("attacks: [apgd-ce, fab]\n")
    rows = json.loads(
        run("evaluate", "e.yaml", *TINY, *chosen, "--dry-run", "--json", cwd=tmp_path).stdout
    )
    assert {"square", "fpa"} <= {row["attack"] for row in rows}
    assert not {"apgd-ce", "fab"} & {row["attack"] for row in rows}  # flags win


def test_one_attack_keeps_its_images(tmp_path: Path) -> None:
    arguments = ["--data", "runs:images", "--n", "8", "--eps", "0.02", "--steps", "2"]
    done = run("attack", "runs:model", *arguments, "--out", "made.npz", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    made = np.load(tmp_path / "made.npz")
    assert made["images"].shape == (8, 3, 8, 8)
    assert content["attacked"]["correct"] == int(made["correct"].sum())
    assert content["attacked"]["correct"] <= content["natural"]["correct"]
    inputs, labels = dent.load_data(str(tmp_path / "made.npz"))
    assert np.array_equal(inputs.numpy(), made["images"])
    assert labels.tolist() == made["labels"].tolist()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["evaluate", "--suite", "quik"], "quick, standard"),
        (["evaluate", "--eps", "eight"], "8/255"),
        (["evaluate", "--eps", "8"], "got 8; did you mean 8/255?"),
        (["attack", "resnet20-at", "--eps", "8"], "got 8; did you mean 8/255?"),
        (["evaluate", "--defense", "dentt"], "did you mean 'dent'"),
        (["evaluate", "--model", "resnet21"], "resnet20"),
        (["evaluate", "--engine", "rey"], "here, ray"),
        (["evaluate", "none.yaml"], "none.yaml"),
        (["evaluate", "--n", "-3"], "n: expected an integer >= 1, got -3"),
        (["evaluate", "--attack", "apgd"], "attacks.0: unknown attack 'apgd'; did you mean"),
        (
            ["evaluate", "--attack", "fpa:round=3"],
            "did you mean 'rounds'? Expected any of: steps",
        ),
        (["evaluate", "--attack", "fpa", "--attack", "fpa:steps=3"], "name a variant as fpa (other)"),
        (["evaluate", "--attack", "mixed"], "share: expected a number > 0 and < 1"),
        (["attack", "resnet20-at", "--attack", "poisoning"], "unknown attack 'poisoning'"),
        (["attack", "resnet20-at", "--attack", "lazy"], "makes none"),
        (["attack", "resnet20-at", "--out", "x.png"], "x.png"),
        (["compare", "a", "b"], "run.json"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("dent: ")
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_failed_unit_is_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Odd(nn.Module):\n"
        "    def forward(self, x):\n"
        "        bad = float('nan') if torch.is_grad_enabled() and x.requires_grad else 0.0\n"
        "        return x.flatten(1)[:, :4] + bad\n"
        "def model():\n    return Odd().eval()\n"
    )
    arguments = ["--model", "odd:model", "--data", "runs:images", "--n", "4", "--steps", "1"]
    done = run("evaluate", *arguments, "--defense", "static", "--out", "x", cwd=tmp_path)
    assert done.returncode == 1
    assert "apgd-ce" in done.stdout
    assert "NaN" in done.stdout
    assert "run the same command to try them again" in done.stderr
    assert list((tmp_path / "x" / "units").rglob("*.error"))


def test_tensorboard_gets_the_scores(tmp_path: Path) -> None:
    done = run(
        "evaluate", *TINY, "--defense", "static", "--out", "x", "--log", "tensorboard", cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (events,) = (tmp_path / "x" / "tensorboard").glob("events*")
    assert b"worst case" in events.read_bytes()
