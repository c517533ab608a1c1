"""The command line: help, lists, data and training; what a user got wrong; interrupts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import toys
from commands import Finished, run

import dent
from dent.cli.app import load_command
from dent.cli.verbs import VERBS
from dent.defense import DEFENSES


def test_help_says_how_to_begin() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert 'dent.defend(model, "dent+")' in result.stdout
    assert "dent list defenses" in result.stdout


def test_version() -> None:
    command = [sys.executable, "-m", "dent", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"dent {dent.__version__}"


@pytest.mark.parametrize("what", ["defenses", "settings"])
def test_listing_as_a_table_and_as_json(what: str) -> None:
    rows = json.loads(run("list", what, "--json").stdout)
    table = run("list", what)
    assert table.returncode == 0
    name = what.removesuffix("s")
    for row in rows:
        assert row[name] in table.stdout
    if what == "defenses":
        assert [row["defense"] for row in rows] == list(DEFENSES)


@pytest.mark.parametrize("arguments", [["list", "nonsense"], ["nonsense"], ["list", "--nonsense"]])
def test_what_the_user_got_wrong_is_one_line_on_stderr(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("dent: ")
    assert "nonsense" in result.stderr


def test_every_listing_is_a_table_and_json() -> None:
    for what, column, some in (
        ("models", "name", "robustbench:Carmon2019Unlabeled"),
        ("data", "data", "cifar10"),
        ("recipes", "recipe", "fast-at"),
    ):
        assert some in [row[column] for row in json.loads(run("list", what, "--json").stdout)]
        assert some in run("list", what).stdout
    timm = run("list", "models", "timm:NAME").stdout
    assert "dent-defense[timm]" in timm  # text, not markup of the terminal


def test_models_are_a_line_each_and_details_come_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    monkeypatch.setenv("COLUMNS", "80")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", run("list", "models").stdout)
    names = [row["name"] for row in json.loads(run("list", "models", "--json").stdout)]
    assert [line.split()[0] for line in plain.splitlines()[1:-1]] == names
    assert max(map(len, plain.splitlines())) <= 80
    monkeypatch.delenv("FORCE_COLOR")
    details = run("list", "models", "resnet20-at").stdout
    for part in ("ships with dent", "269,722", "natural, test images 73.79 (n = 10,000)"):
        assert part in details
    (row,) = json.loads(run("list", "models", "resnet20-at", "--json").stdout)
    assert row["name"] == "resnet20-at"
    assert "hedge" in run("list", "defenses", "hedge").stdout
    unknown = run("list", "models", "resnet20-att")
    assert unknown.returncode == 2
    assert "unknown model 'resnet20-att'; did you mean 'resnet20-at'" in unknown.stderr


@pytest.fixture
def images(tmp_path: Path) -> Path:
    inputs, labels = toys.features()
    np.savez(tmp_path / "toy.npz", images=inputs.numpy(), labels=labels.numpy())
    return tmp_path / "toy.npz"


def train(folder: Path, *arguments: str) -> Finished:
    return run("train", "toys:convolutional", *arguments, cwd=folder)


def test_train_prints_every_epoch_and_leaves_a_card(tmp_path: Path, images: Path) -> None:
    settings = ["--recipe", "fast-at", "--epochs", "2", "--eps", "25.5/255", "--batch-size", "128"]
    settings += ["--data", str(images), "--hold-out", "256", "--no-augment", "--out", "run"]
    done = train(tmp_path, *settings, "--log", "tensorboard")
    assert done.returncode == 0, done.stderr
    assert [line[:9] for line in done.stdout.splitlines()[:2]] == ["epoch   1", "epoch   2"]
    assert "natural, held-out images" in done.stdout  # the data have no test images of their own
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert card["recipe"]["eps"] == pytest.approx(0.1)
    assert card["accuracies"][0]["n"] == 256
    assert (tmp_path / "run" / "tensorboard").is_dir()
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 2
    again = train(tmp_path, *settings)  # there is nothing left to do
    assert again.returncode == 0
    assert "epoch" not in again.stdout
    other = train(tmp_path, *settings, "--lr", "0.3")
    assert other.returncode == 2
    assert "lr is 0.2 there, 0.3 was asked for" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--recipe", "at", "--eps", "8/25x"], "expected a number such as 0.5 or 8/255"),
        (["--recipe", "att"], "unknown recipe 'att'; did you mean 'at'"),
        (["--epochs", "0"], "epochs: expected an integer >= 1, got 0"),
        (["--data", "nowhere.npz"], "nowhere.npz"),
        (["--log", "paper"], "unknown logger 'paper'"),
        (["--device", "cuda:99"], "expected a device that this machine has, got 'cuda:99'"),
    ],
)
def test_a_training_that_cannot_start(
    tmp_path: Path, images: Path, arguments: list[str], says: str
) -> None:
    done = train(tmp_path, "--data", str(images), *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_data_says_where_it_is(tmp_path: Path, images: Path) -> None:
    found = json.loads(run("data", str(images), "--json").stdout)
    assert (found[0]["n"], found[0]["classes"]) == (1024, 2)
    missing = run("data", str(tmp_path / "nowhere.npz"))
    assert missing.returncode == 2
    assert len(missing.stderr.splitlines()) == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT between processes")
def test_an_interrupt_is_no_accident(tmp_path: Path, images: Path) -> None:
    command = [sys.executable, "-m", "dent", "train", "toys:convolutional", "--data", str(images)]
    process = subprocess.Popen(
        [*command, "--epochs=100000", "--batch-size=64", "--hold-out=128", "--out", "run"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()  # the first epoch is done
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines() == ["dent: stopped; the same command goes on"]
    assert (tmp_path / "run" / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    ("verb", "said"),
    [("evaluate", "dent: stopped; the same command goes on"), ("list", "dent: stopped")],
)
@pytest.mark.parametrize("package", ["typer", "torch"])
@pytest.mark.parametrize("is_swallowed", [False, True])
def test_an_interrupt_while_modules_are_loaded_is_one_line(
    verb: str, said: str, package: str, is_swallowed: bool
) -> None:
    script = f"""
import signal, sys

class Interrupt:
    def find_spec(name, *rest):
        if name == {package!r}:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                if not {is_swallowed}:
                    raise

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt)
sys.argv[1:] = [{verb!r}]
from dent.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()) == (130, [said])


def test_the_help_has_the_first_paragraph_of_every_verb() -> None:
    for name, verb in VERBS.items():
        first, *_ = str(load_command(name).help).split("\n\n")
        assert " ".join(first.split()) == verb.summary


@pytest.mark.parametrize(
    ("what", "said"), [("model", "RuntimeError: no weights for it"), ("defense", "KeyError: 'key'")]
)
def test_an_own_function_that_raises_is_one_line(what: str, said: str, tmp_path: Path) -> None:
    module = tmp_path / f"broken_{what}.py"
    module.write_text(
        "def model():\n    raise RuntimeError('no weights\\nfor it')\n"
        "def defense(model):\n    return {}['key']\n"
    )
    own = f"{module.stem}:{what}"
    given = {"model": "runs:model", "defense": "static"} | {what: own}
    command = ["evaluate", "--data", "runs:images", "--n", "8"]
    command += [f"--{name}={value}" for name, value in given.items()]
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"dent: {own} raised {said}; --debug shows where\n"
    debugged = run(*command, "--debug", cwd=tmp_path)
    assert debugged.returncode == 2
    assert "Traceback" in debugged.stderr
    assert str(module) in debugged.stderr
