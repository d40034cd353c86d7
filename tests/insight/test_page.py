"""The report's page: well-formed, self-contained, and nothing of a run's text becomes markup."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from holdfast.insight.history import incidents
from holdfast.insight.page import POINTS_MAX, Block, bar, lines, thinned

VOID = {"meta", "br"}
WORKER = {"rank": 1, "local_rank": 1, "host": "a", "pid": 7, "exit_code": 1}
EVIL = "<script>alert('x')</script> & \"quoted\""


class Page(HTMLParser):
    """Every tag is closed in order, nothing is loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: dict[str, int] = {}
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        assert not {"src", "href", "onload", "onclick", "style"} & {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def records(node: str, *, evil: str = "", generations: int = 2) -> list[dict[str, Any]]:
    """A node's journal: generations of ten seconds, of which all but the last fail."""
    events: list[dict[str, Any]] = [{"event": "begins", "member": f"{node}#1", "run_id": f"r{evil}", "endpoint": "e"}]
    for number in range(1, generations + 1):
        at, last = number * 20.0, number == generations
        events += [
            {"time": at, "event": "coordinator.assigned", "generation": number, "world_size": 2, "order": [node]},
            {"time": at, "event": "generation", "generation": number, "world_size": 2, "nproc": 2, "rank_base": 0},
            {
                "time": at + 3,
                "event": "phases",
                "generation": number,
                "restart_count": number - 1,
                "spawn_s": 0.5,
                "first_step_s": 1.0,
                "until_monotonic": at + 2,
            },
            *(
                {
                    "time": at + second,
                    "event": "progress",
                    "generation": number,
                    "steps": [second, second + 1],
                    "began_at": [number * 5] * 2,
                    "at": [number * 5 + second] * 2,
                }
                for second in (4, 8, 12)
            ),
            {
                "time": at + 12,
                "event": "worker_ended",
                "generation": number,
                "local_rank": 1,
                "rank": 1,
                "pid": 7,
                "exit_code": 0 if last else 1,
                "stopped": False,
            },
        ]
        if not last:
            cause = {"cause": f"rank 1 raised {evil}", "code": "HF201", "advice": f"mend it {evil}"}
            events.append({"time": at + 13, "event": "coordinator.verdict", "generation": number, **cause})
    events.append(
        {
            "time": 45.0,
            "event": "coordinator.hang",
            "generation": 2,
            "kind": "hung",
            "code": "HF240",
            "text": f"rank 1 is in sleep {evil}",
            "culprits": [1],
            "groups": [{"ranks": [1], "place": f"sleep {evil}"}, {"ranks": [0, 2, 3], "place": "all_reduce at t.py:4"}],
            "files": {"1": f"/x/rank1{evil}.txt"},
            "still_s": 61.0,
        }
    )
    return [{"time": 10.0, "monotonic": event.get("time", 10.0), **event} for event in events]


def folder_of(place: Path, events: list[dict[str, Any]], verdict: dict[str, Any] | None = None) -> Path:
    place.mkdir()
    (place / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (place / "verdict.json").write_text(json.dumps({"kind": "failed", "exit_code": 1, "verdict": verdict}))
    return place


def page_of(tmp_path: Path, *folders: Path) -> Page:
    file = tmp_path / "page.html"
    assert main(["report", "--html", str(file), *map(str, folders)]) == 0
    text = file.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert "@import" not in text
    page = Page(text)
    assert not page.open
    return page


def test_everything_is_on_it(tmp_path: Path) -> None:
    verdict = {
        "code": "HF203",
        "cause": "out of memory",
        "advice": "use less",
        "culprit": {**WORKER, "traceback": "Tr\n  ace"},
    }
    page = page_of(tmp_path, folder_of(tmp_path / "a", records("a"), verdict), folder_of(tmp_path / "b", records("b")))
    for words in (
        "HF203: why it failed", "out of memory", "use less", "Tr\n  ace", "Where the time went", "training", "lost work",
        "Steps", "Until the first step", "rank 1 raised", "mend it", "HF240", "0, 2-3", "all_reduce at t.py:4", "/x/rank1",
    ):  # fmt: skip
        assert words in page.words, words
    assert page.tags["svg"] == 3 + 1 + 2
    assert page.tags["polyline"] == 4


def test_nothing_of_a_run_becomes_markup(tmp_path: Path) -> None:
    verdict = {"code": EVIL, "cause": EVIL, "advice": EVIL, "culprit": {**WORKER, "stderr_tail": EVIL}}
    page = page_of(tmp_path, folder_of(tmp_path / "a", records(f"a{EVIL}", evil=EVIL), verdict))
    assert "script" not in page.tags
    assert page.words.count(EVIL) >= 10


def test_a_run_of_which_little_is_known(tmp_path: Path) -> None:
    page = page_of(tmp_path, folder_of(tmp_path / "a", records("a")[:1]))
    assert "not yet" in page.words
    assert "svg" not in page.tags


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "a", records("a"))
    assert main(["report", "--html", str(tmp_path / "no" / "page.html"), str(folder)]) == 2
    assert "HF101: --html" in capsys.readouterr().err


def test_a_page_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--html", "-", str(folder_of(tmp_path / "a", records("a")))]) == 0
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")


def test_json_has_the_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--json", str(folder_of(tmp_path / "a", records("a")))]) == 0
    told = json.loads(capsys.readouterr().out)["history"]
    assert (told["startup_s"], told["lost_steps"]) == (12.0, 7)
    parts = ("startup_s", "training_s", "lost_s", "hung_s", "down_s", "end_s")
    assert sum(told[part] for part in parts) == pytest.approx(told["total_s"])
    assert [each["doing"] for each in told["stretches"]][:4] == ["startup", "training", "lost", "down"]


def test_that_everybody_goes_home_is_no_incident() -> None:
    lost = {"event": "coordinator.lost", "time": 2.0, "member": "a#1", "reason": "gone", "silent_s": 0.0}
    over = {"event": "coordinator.over", "time": 1.0, "kind": "succeeded", "exit_code": 0}
    assert [each.text for each in incidents([[lost, over]])] == ["a: gone"]
    assert incidents([[over, lost]]) == []


def test_pictures_keep_their_ends() -> None:
    curve = [(float(x), float(x)) for x in range(10 * POINTS_MAX)]
    assert len(thinned(curve)) == POINTS_MAX
    assert (thinned(curve)[0], thinned(curve)[-1]) == (curve[0], curve[-1])
    assert 'points="0.0,300.0 1000.0,0.0"' in lines([(0, [(5, 0), (7, 4)])], (5, 7, 0, 4), "")
    assert 'x="500.00" y="0" width="500.00"' in bar([Block(1, 2, "training", "")], 0, 2, "")
    assert 'width="1.00"' in bar([Block(1, 1, "down", "")], 0, 2, "")
