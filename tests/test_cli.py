from __future__ import annotations

import json
import subprocess
import sys

import pytest

import dent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dent.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_says_how_to_begin() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert 'dent.defend(model, "dent+")' in result.stdout
    assert "dent list presets" in result.stdout


def test_version() -> None:
    assert run("--version").stdout.strip() == f"dent {dent.__version__}"


@pytest.mark.parametrize("what", ["presets", "settings"])
def test_listing_as_a_table_and_as_json(what: str) -> None:
    rows = json.loads(run("list", what, "--json").stdout)
    table = run("list", what)
    assert table.returncode == 0
    name = what.removesuffix("s")
    for row in rows:
        assert row[name] in table.stdout
    if what == "presets":
        assert [row["preset"] for row in rows] == list(dent.PRESETS)


@pytest.mark.parametrize("arguments", [["list", "nonsense"], ["nonsense"], ["list", "--nonsense"]])
def test_what_the_user_got_wrong_is_one_line_on_stderr(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("dent: ")
    assert "nonsense" in result.stderr
