"""The harness counts, compares and reports as it says; what it measures is measured by `make bench`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.harness import BenchmarkError, Launcher, Metric, Result, Row, Sample, run_row, turns
from benchmarks.rows import ALL, tee
from benchmarks.scale import Story
from holdfast.protocol.policy import Limits
from tools import measured_page


def row(metric: Metric, **samples: list[float]) -> Result:
    kind = Row("name", "title", (metric,), lambda launcher, folder: {}, {})
    return Result(kind, {name: [{metric.name: value} for value in values] for name, values in samples.items()})


def test_launchers_take_turns() -> None:
    assert list(turns({"a": 2, "b": 2})) == ["a", "b", "a", "b"]
    order = list(turns({"a": 6, "b": 2}))
    assert (order.count("a"), order.count("b")) == (6, 2)
    assert "b" in order[:4]
    assert "b" in order[4:]


@pytest.mark.parametrize(
    ("metric", "ours", "theirs", "kept"),
    [
        (Metric("m", "s", ratio_max=0.5), [1.0, 9.0, 2.0], [4.0], True),
        (Metric("m", "s", ratio_max=0.5), [2.1], [4.0], False),
        (Metric("m", "s", ratio_max=0.5), [2.1], [], None),
        (Metric("m", "MB", value_max=35), [36.0], [1.0], False),
        (Metric("m", "%", value_min=100.0, summary=min), [100.0, 99.0], [1.0], False),
        (Metric("m", "s"), [1.0], [1.0], None),
    ],
)
def test_bounds(metric: Metric, ours: list[float], theirs: list[float], kept: bool | None) -> None:
    assert row(metric, holdfast=ours, torchrun=theirs).kept(metric) is kept


def test_an_error_of_a_launcher_is_a_result_and_breaks_the_bound() -> None:
    def measure(launcher: Launcher, folder: Path) -> Sample:
        if launcher.name == "holdfast":
            raise BenchmarkError("no")
        return {"m": 1.0}

    metric = Metric("m", "s", ratio_max=1.0)
    result = run_row(Row("name", "title", (metric,), measure, {"holdfast": 2, "torchrun": 2}), 1, lambda text: None)
    assert result.errors == {"holdfast": ["BenchmarkError: no"]}
    assert result.samples == {"torchrun": [{"m": 1.0}]}
    assert result.kept(metric) is False
    assert "1 of 1 repetitions failed; first: BenchmarkError: no" in report.errors([result])


def test_light_agents_form_a_generation_and_another_without_one_of_them(tmp_path: Path) -> None:
    costs = Story(6, tmp_path, Limits(ping_interval_s=0.1), settle_s=0.0, train_s=0.5).run()
    assert costs["form"]["down"]["Start"] == 5, "one of the six is in the coordinator's process"
    assert costs["train"]["down"]["Pong"] > 0
    assert costs["lose one"]["down"]["Start"] == 4
    assert costs["peak MB"] > 1


def test_the_table_shows_both_sides_and_the_bound() -> None:
    line = report.table([row(Metric("m", "s", ratio_max=0.5), holdfast=[1.0], torchrun=[4.0])]).splitlines()[-1]
    assert line == "| title: m | 4.000 s | 1.000 s | 0.250× | ≤ 0.5× | yes |"


def test_tee_counts_a_line_once_and_only_when_whole() -> None:
    text = b"node:0|line 0 00000001 xxx\n[default1]:line 1 00000001 xx\nline 1 00000001 xx\nline 1 0000\n"
    assert tee.complete(text) == 2


def test_rows_have_names_of_their_own() -> None:
    names = [one.name for one in ALL]
    assert sorted(names) == sorted(set(names))


def test_a_row_that_takes_long_runs_only_by_name() -> None:
    long, other = (
        Row(name, "", (), lambda *_: {}, {}, group="g", by_name=name == "long") for name in ("long", "other")
    )
    assert [long.called(()), other.called(())] == [False, True]
    assert [long.called({"long"}), other.called({"long"}), long.called({"g"})] == [True, False, True]


def test_a_measurement_replaces_the_one_before_of_the_same_row_alone(tmp_path: Path) -> None:
    metric = Metric("m", "s", ratio_max=0.5)
    first, other = (Row(name, name, (metric,), lambda *_: {}, {"holdfast": 1}) for name in ("first", "other"))
    report.write([Result(each, {"holdfast": [{"m": 1.0}]}) for each in (first, other)], {"date": "then"}, tmp_path)
    report.write([Result(first, {"holdfast": [{"m": 2.0}]}, {"torchrun": ["no"]})], {"date": "now"}, tmp_path)
    found = {each.result.row.name: each for each in report.stored((first, other), tmp_path)}
    assert found["first"].result.summary("holdfast", metric) == 2.0
    assert found["first"].result.errors == {"torchrun": ["no"]}
    assert [found["first"].facts["date"], found["other"].facts["date"]] == ["now", "then"]


def test_a_row_that_a_machine_cannot_measure_keeps_its_last_measurement(tmp_path: Path) -> None:
    kind = Row("row", "row", (Metric("m", "s"),), lambda *_: {}, {"holdfast": 1})
    report.write([Result(kind, {"holdfast": [{"m": 1.0}]})], {"date": "then"}, tmp_path)
    report.write([Result(kind, skipped="no network namespaces")], {"date": "now"}, tmp_path)
    assert [each.facts["date"] for each in report.stored([kind], tmp_path)] == ["then"]


def test_each_result_belongs_to_a_row_and_each_row_to_a_section_of_the_page() -> None:
    others = ("soak-", "gpu-")
    results = {path.stem for path in report.FOLDER.glob("*.json") if not path.stem.startswith(others)}
    assert results - {row.name for row in ALL} == set()
    assert measured_page.without_section() == []
