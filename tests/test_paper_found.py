"""What was found for a piece of the paper's work, and the numbers that are made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproductions import JUDGED, key_of, reproduction
from runs import evaluated

import dent
from dent.evaluation import Evaluation
from dent.evaluation.plan import Unit
from dent.evaluation.results import Cost
from dent.evaluation.store import Store, UnitResult
from dent.paper.cells import JudgedCell, load_judged_cell
from dent.paper.results import FORMAT, RESULTS, Reproduction, load_reproduction
from dent.paper.scales import find_scale, resolve
from dent.paper.tables import find_table

ATTACKS = ("apgd-ce", "square", "denying updates", "mixed (50 %)")


# As JSON


@st.composite
def founds(draw: st.DrawFn) -> JudgedCell:
    """Any: each judgment of points of its own, in an order of its own."""
    names = draw(st.lists(st.sampled_from(["natural", *ATTACKS, "protocol"]), unique=True))
    points = st.lists(st.integers(0, 10_000), unique=True, max_size=6)
    usual = draw(points)
    judged = {}
    for name in [*names, "direct", "worst"]:
        own = usual if draw(st.booleans()) else draw(points)
        judged[name] = {point: draw(st.booleans()) for point in own}
    figure = st.none() | st.floats(0.001, 1e12)
    return JudgedCell(
        asked=draw(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5))),
        judged=judged,
        cost=draw(st.none() | st.builds(Cost, figure, figure, figure, figure)),
        missing=tuple(draw(st.lists(st.text(max_size=9), max_size=3))),
        battle=draw(st.none() | st.just({"attack": "apgd-ce", "images": [1]})),
        versions=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5))),
    )


@given(founds())
def test_json_keeps_everything_and_its_order(found: JudgedCell) -> None:
    again = JudgedCell.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    assert list(again.judged) == list(found.judged)
    assert [list(one.items()) for one in again.judged.values()] == [
        list(one.items()) for one in found.judged.values()
    ]


def test_the_points_are_written_once() -> None:
    judged = {name: dict.fromkeys(range(100, 300), True) for name in ("natural", *ATTACKS)}
    content = JudgedCell({}, judged).to_json()
    assert json.dumps(content).count("199") == 1
    assert content["judged"]["square"] == "1" * 200


@pytest.mark.parametrize(
    "damage",
    [
        {"judged": {"natural": "012"}},
        {"judged": {"natural": "01"}},
        {"judged": {"natural": {"points": [1]}}},
        {"judged": ["natural"]},
        {"cost": {"gramms": 3}},
        {"points": None},
        {"missing": None},
    ],
)
def test_damage_of_a_piece_is_an_error_that_names_the_file(
    damage: dict[str, Any], tmp_path: Path
) -> None:
    found = reproduction("smoke", chosen=[find_table("table-12")])
    content = found.to_json()
    key = next(iter(content["found"]))
    content["found"][key] |= {"points": [1, 2, 3]} | damage
    (tmp_path / RESULTS).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{RESULTS} is no reproduction .*; dent reproduce writes one"):
        load_reproduction(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"{}",
        b'{"format": 99}',
        b"\xff\xfe",
        b'{"format": 1, "scale": "smoke", "seed": 0, "device": "cpu", "found": {}, "troubles": {}}',
        b'{"format": 2, "scale": "smoke", "seed": 0, "device": "cpu", "found": {}, "troubles": {}}',
        b'{"format": 2, "scale": {"n": 3}, "seed": 0, "device": "cpu", "found": {}, "troubles": {}}',
    ],
)
def test_what_is_no_reproduction_is_refused(text: bytes, tmp_path: Path) -> None:
    assert FORMAT == 2
    (tmp_path / RESULTS).write_bytes(text)
    with pytest.raises(ValueError, match="is no reproduction"):
        load_reproduction(tmp_path / RESULTS)


def test_a_reproduction_comes_back_from_its_file(tmp_path: Path) -> None:
    found = reproduction("smoke", troubles={"a": "b"})
    (tmp_path / RESULTS).write_text(json.dumps(found.to_json()))
    for place in (tmp_path, tmp_path / RESULTS):
        assert load_reproduction(place) == found


def test_the_folder_of_imagenet_is_not_lost(tmp_path: Path) -> None:
    """A report that is made later finds the numbers under the same names."""
    scale = find_scale("paper").with_imagenet(Path("/images"))
    table = find_table("imagenet")
    found = reproduction(scale, chosen=[table])
    content = found.to_json()
    assert content["scale"]["models"]["wong2020-imagenet"]["data"] == "imagenet:/images#crop288"
    (tmp_path / RESULTS).write_text(json.dumps(content))
    again = load_reproduction(tmp_path)
    assert again == found
    assert all(one.missing is None for one in again.by_reference(table).values())


def test_a_later_change_of_a_scale_changes_no_stored_number(tmp_path: Path) -> None:
    """The file has the whole scale: its numbers stay under the names that they were measured for."""
    before = find_scale("smoke").replace(n=3, without={"trades-26-4": "not measured (no model)"})
    table = find_table("table-3")
    found = reproduction(before, chosen=[table])
    (tmp_path / RESULTS).write_text(json.dumps(found.to_json()))
    again = load_reproduction(tmp_path)
    assert again.scale == before != find_scale("smoke")
    assert again.by_reference(table) == found.by_reference(table)


# Points


def test_what_all_attacks_up_to_one_leave() -> None:
    found = JudgedCell({}, JUDGED)
    assert found.points("square") == JUDGED["square"]
    assert found.points("square", cumulative=True) == {3: True, 1: False, 2: False, 0: False}
    assert found.points("apgd-ce", cumulative=True) == {3: True, 1: False, 2: True, 0: False}
    assert found.points("natural", cumulative=True) == JUDGED["natural"]


def test_cumulative_points_are_those_that_all_have() -> None:
    found = JudgedCell({}, {"natural": {1: True, 2: True}, "apgd-ce": {2: True, 3: True}})
    assert found.points("apgd-ce", cumulative=True) == {2: True}


def test_what_is_claimed_is_by_the_protocol_else_by_direct_attacks() -> None:
    found = JudgedCell({}, JUDGED)
    assert found.points("claimed") == JUDGED["direct"]
    protocol = {0: True, 1: True, 2: False, 3: False}
    assert replace(found, judged=JUDGED | {"protocol": protocol}).points("claimed") == protocol


@pytest.mark.parametrize("cumulative", [False, True])
def test_what_was_not_judged_has_no_points(cumulative: bool) -> None:
    assert JudgedCell({}, JUDGED).points("fab-t", cumulative=cumulative) is None
    assert JudgedCell({}, {"natural": {}}).points("natural", cumulative=cumulative) is None


def test_a_real_run_is_found_as_it_was_counted_and_each_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacks = ["square:queries=3", "fpa:rounds=1,steps=1", "mixed (50 %):steps=1"]
    results = evaluated(tmp_path / "run", defenses=["dent+:steps=1"], attacks=attacks, battle=False)
    read: list[Path] = []
    read_file = Store._read_file

    def watch(store: Store, path: Path, unit: Unit) -> UnitResult:
        read.append(path)
        return read_file(store, path, unit)

    monkeypatch.setattr(Store, "_read_file", watch)
    found = load_judged_cell(tmp_path / "run")
    assert sorted(read) == sorted((tmp_path / "run" / "units").rglob("*.json"))
    (cell,) = results.cells
    scores = {"natural": cell.natural, "worst": cell.worst, "direct": cell.direct}
    for name, score in (scores | cell.attacks | cell.scenarios).items():
        points = found.points(name)
        assert points is not None
        assert (sum(points.values()), len(points)) == (score.correct, score.n), name
    assert found.judged["worst"] == cell.points
    assert found.cost == cell.cost
    assert found.missing == ()
    assert found.evaluation == Evaluation(**results.about["asked"])
    assert found.versions["dent"] == dent.__version__
    assert JudgedCell.from_json(json.loads(json.dumps(found.to_json()))) == found


# All of them together


def test_a_trouble_is_why_numbers_are_missing_also_of_what_is_compared_with() -> None:
    scale, table = find_scale("smoke"), find_table("imagenet")
    static = table.references()["text-imagenet/linf 4/255/adversarial/static"]
    key = key_of(resolve(static.ask, scale, table.name))
    whole = reproduction(scale, chosen=[table])
    rest = {one: found for one, found in whole.cells.items() if one != key}
    numbers = Reproduction(scale, rest, {key: "no such file"}).by_reference(table)
    missing = {name.rpartition("/")[2] for name, one in numbers.items() if one.missing}
    assert missing == {"static", "gain"}
    assert {one.missing for one in numbers.values()} == {None, "no such file"}


def test_complete_is_what_has_every_number_of_all_points() -> None:
    table = find_table("table-12")
    found = reproduction("smoke", chosen=[table])
    assert found.is_complete([table])
    assert found.is_complete([])
    assert not found.is_complete([table, find_table("table-1")])
    key = next(iter(found.cells))
    failed = replace(found.cells[key], missing=("unit 3: no memory",))
    assert not replace(found, cells=found.cells | {key: failed}).is_complete([table])


def test_what_a_scale_skips_does_not_count_as_missing() -> None:
    table = find_table("figure-4")
    found = reproduction("smoke", chosen=[table])
    assert found.is_complete([table])
    left_out = [one for one in found.by_reference(table).values() if one.missing]
    assert {one.missing for one in left_out} == {"left out at this scale"}
    assert {one.number.column for one in left_out} == set(find_scale("smoke").tables["figure-4"].skip)
