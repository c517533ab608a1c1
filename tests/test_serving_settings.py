"""What a server is asked for: its defaults, its flags, and what is refused before it starts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import dent
from dent.defense import defend
from dent.flags import add_flags
from dent.serving.settings import Serving


def read_settings(given: dict[str, Any]) -> Serving:
    """Settings as they come from a file or from flags."""
    return Serving(**given)


def test_the_default_listens_here_and_mixes_clients_only_where_it_may() -> None:
    serving = Serving()
    assert (serving.host, serving.port) == ("127.0.0.1", 8000)
    assert (serving.shared_batches, serving.resize, serving.shed) == (False, False, 0)
    defended = defend(dent.load_model(serving.model), serving.defense)
    assert serving.defense == "dent+solo"
    assert defended.independent
    assert (defended.settings.affine, defended.settings.steps) == ("sample", 6)
    assert not defend(defended.model, "dent+").independent
    assert len(serving.classes) == 10
    assert (serving.max_wait, serving.deadline, serving.max_body) == (0.01, 30.0, 10_000_000)


TEXTS: list[tuple[str, Any, Any]] = [
    ("max_wait", "250ms", 0.25),
    ("max_wait", "0s", 0.0),
    ("max_wait", 0.5, 0.5),
    ("max_wait", "1.5 s", 1.5),
    ("deadline", "2min", 120.0),
    ("deadline", "7", 7.0),
    ("max_body", "500kB", 500_000),
    ("max_body", "1.5MB", 1_500_000),
    ("max_body", "2MiB", 2**21),
    ("max_body", 12, 12),
    ("size", "224x224", (224, 224)),
    ("size", "32 x 16", (32, 16)),
    ("size", [8, 9], (8, 9)),
    ("classes", "numbers", ()),
    ("classes", "cat, dog", ("cat", "dog")),
    ("classes", ["cat", "dog"], ("cat", "dog")),
    ("defense", "dent: steps=3, lr=1e-3", "dent:steps=3"),
    ("threads", 2, 2),
]


@pytest.mark.parametrize(("name", "given", "read"), TEXTS)
def test_what_is_typed_is_read(name: str, given: Any, read: Any) -> None:
    made = getattr(read_settings({name: given}), name)
    assert made == read
    assert type(made) is type(read)


def test_names_of_classes_come_from_data_sets_and_files(tmp_path: Path) -> None:
    assert Serving().classes[3] == "cat"
    assert len(read_settings({"classes": "cifar100"}).classes) == 100
    names = tmp_path / "names.txt"
    names.write_text("tench, Tinca tinca\n goldfish \n\n", encoding="utf-8")
    assert read_settings({"classes": str(names)}).classes == ("tench, Tinca tinca", "goldfish")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("defense", "dentt", "defense: unknown defense 'dentt'; did you mean 'dent'"),
        ("defense", "tent", "defense: tent carries its adaptation from batch to batch"),
        ("defense", "dent:steps=-1", "steps: expected an integer >= 0, got -1"),
        ("max_wait", "soon", "max_wait: expected a time such as 10ms, 30s or 2min, got 'soon'"),
        ("max_wait", "10m", "max_wait: expected a time"),
        ("max_wait", -1, "max_wait: expected a time"),
        ("max_wait", float("nan"), "max_wait: expected a time"),
        ("max_wait", None, "max_wait: expected a time"),
        ("max_wait", True, "max_wait: expected a time"),
        ("deadline", "0s", "deadline: expected a number > 0, got 0.0"),
        ("deadline", [], "deadline: expected a time"),
        ("max_body", "10 potatoes", "max_body: expected a size such as 500kB or 10MB"),
        ("max_body", 0, "max_body: expected a size"),
        ("max_body", 0.5, "max_body: expected a size"),
        ("max_body", float("inf"), "max_body: expected a size"),
        ("size", "32", "size: expected height x width, as 32x32, got '32'"),
        ("size", (32, 0), "size: expected height x width"),
        ("size", (32, 3.5), "size: expected height x width"),
        ("size", 32, "size: expected height x width"),
        ("classes", "cifar11", "classes: expected one of cifar10, cifar100, numbers, names as a,b,c"),
        ("classes", ["a", 3], "classes: expected names, got"),
        ("classes", "a,,b", "classes: expected names, got"),
        ("port", 65536, "port: expected an integer >= 1 and <= 65535, got 65536"),
        ("port", True, "port: expected an integer >= 1 and <= 65535, got True"),
        ("queue", 0, "queue: expected an integer >= 1, got 0"),
        ("replicas", 1.5, "replicas: expected an integer >= 1, got 1.5"),
        ("threads", 0, "threads: expected an integer >= 1, got 0"),
        ("max_replicas", 0, "max_replicas: expected an integer >= 1, got 0"),
        ("batch_size", "64", "batch_size: expected an integer >= 1, got '64'"),
        ("shed", 257, "shed: expected at most the queue, 256, got 257"),
        ("model", "", "model: expected a name, got ''"),
        ("host", None, "host: expected a name, got None"),
        ("resize", "yes", "resize: expected true or false, got 'yes'"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match="1 wrong setting of the server") as error:
        read_settings({name: value})
    assert message in str(error.value)


def test_all_faults_are_told_at_once_and_unknown_names_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"(?s)3 wrong settings.*port:.*max_wait:.*resize:"):
        read_settings({"port": 0, "resize": 1, "max_wait": "x"})
    with pytest.raises(TypeError, match="unknown settings of the server: ports; did you mean 'port'"):
        read_settings({"ports": 1})


def test_there_are_no_fewer_replicas_at_most_than_at_least() -> None:
    with pytest.raises(ValueError, match="max_replicas: expected at least the replicas, 3, got 2"):
        Serving(replicas=3, max_replicas=2)
    assert Serving(replicas=3).most_replicas == 3
    assert Serving(replicas=3, max_replicas=4).most_replicas == 4


def test_what_was_asked_can_be_asked_again() -> None:
    asked = Serving(size=(8, 9), classes=("a", "b"), defense="dent", shed=3, threads=1)
    assert Serving(**asked.model_dump()) == asked
    assert asked.replace(port=1) == Serving(**asked.model_dump() | {"port": 1})


def make_command() -> tuple[typer.Typer, list[Serving]]:
    """A command with the flags of a server, and a list of the settings that it was given."""
    app, seen = typer.Typer(), []

    @app.command()
    @add_flags(Serving)
    def serve(**settings: Any) -> None:
        seen.append(Serving(**settings))

    return app, seen


def test_fields_are_flags() -> None:
    app, seen = make_command()
    run = CliRunner().invoke(
        app,
        shlex.split(
            "--model resnet20-nominal --defense dent+ --batch-size 32 --max-wait 5ms --replicas 2"
            " --resize --max-body 1MB --size 32x32 --classes cifar10 --shared-batches --deadline 2s"
        ),
    )
    assert run.exit_code == 0, run.output
    wanted = Serving(
        model="resnet20-nominal", defense="dent+", batch_size=32, max_wait=0.005, replicas=2,
        resize=True, max_body=10**6, shared_batches=True, deadline=2,
    )  # fmt: skip
    assert seen == [wanted]
    text = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "400"}).output.split())
    assert "poisoning" in text
    assert all(str(one.description) in text for one in Serving.model_fields.values())


def test_the_help_tells_the_defaults() -> None:
    """Who types all the defaults that the help tells gets the default settings."""
    typed: list[str] = []
    for name, field in Serving.model_fields.items():
        (text,) = re.findall(r"\(default: ([^ )]+)", str(field.description))
        if field.default is not None and field.annotation is not bool:
            typed += [f"--{name.replace('_', '-')}", text.rstrip(",")]
    app, seen = make_command()
    assert CliRunner().invoke(app, typed).exit_code == 0
    assert seen == [Serving()]
    assert len(typed) == 2 * (len(Serving.model_fields) - 4)


# The policy under load


@given(
    own=st.integers(0, 40),
    queue=st.integers(1, 300),
    shed=st.integers(0, 300),
    waiting=st.integers(0, 400),
)
def test_updates_drop_only_if_asked_for_and_never_to_none(
    own: int, queue: int, shed: int, waiting: int
) -> None:
    shed = min(shed, queue)
    serving = Serving(queue=queue, shed=shed)
    steps = serving.choose_steps(own, waiting)
    if not shed or waiting < shed:
        assert steps == own
    else:
        assert min(own, 1) <= steps <= own
        assert steps < own or own <= 1
    assert serving.choose_steps(own, waiting + 1) <= steps
    assert serving.choose_steps(own, queue) == (min(own, 1) if shed else own)
