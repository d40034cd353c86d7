"""The report's page: well-formed, self-contained, and nothing of a run's text becomes markup."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from holdfast.diagnosis.history import Activity, History, history, incidents
from holdfast.diagnosis.page import POINTS_MAX, Block, bar, lines, thinned
from tests.support.limits import limit_s

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


# --- the page in a real browser: it loads, logs nothing on the console and requests nothing ---------------------------


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OWN = {"time": 1.0, "monotonic": 1.0}
EVENTS = [
    {"event": "begins", "member": "a#1", "run_id": "demo", "endpoint": "e"},
    {"time": 2.0, "event": "generation", "generation": 1, "world_size": 2, "nproc": 2, "rank_base": 0},
    {"time": 9.0, "event": "phases", "generation": 1, "restart_count": 0, "spawn_s": 0.5, "first_step_s": 1.0,
     "until_monotonic": 1.0},
    {"time": 20.0, "event": "progress", "generation": 1, "steps": [5, 5], "began_at": [0, 0], "at": [5, 5]},
]  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(OWN | event) + "\n" for event in EVENTS))
    page = tmp_path / "page.html"
    assert main(["report", "--html", str(page), str(tmp_path)]) == 0
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    own = [f"--user-data-dir={tmp_path / 'profile'}", "--disable-background-networking"]
    shot = ["--window-size=390,844", f"--screenshot={tmp_path / 'shot.png'}"]
    done = subprocess.run(
        [str(CHROMIUM), *options, *own, *shot, page.as_uri()], capture_output=True, text=True, timeout=limit_s(60)
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "shot.png").stat().st_size > 5_000
    assert "CONSOLE" not in done.stderr, done.stderr  # whatever the page asked for would be refused, and told there


# --- where a run's time went: journals in, stretches without gaps out -------------------------------------------------


T = 1000.0
"""The first event's time."""


class Journal:
    """One node's events, at seconds after T."""

    def __init__(self, node: str = "a") -> None:
        self.events: list[dict[str, Any]] = []
        self.at(0, "begins", member=f"{node}#1", run_id="r", endpoint="")

    def at(self, second: float, event: str, **fields: Any) -> Journal:
        self.events.append({"time": T + second, "monotonic": second, "event": event, **fields})
        return self

    def starts(self, second: float, generation: int, ready: float | None = None, nproc: int = 2) -> Journal:
        """Told a second after it was."""
        self.at(second, "generation", generation=generation, world_size=nproc, nproc=nproc, rank_base=0)
        if ready is None:
            return self
        phases = {"spawn_s": 0.1, "first_step_s": 0.1, "until_monotonic": ready}
        return self.at(ready + 1, "phases", generation=generation, restart_count=0, **phases)

    def ends(self, second: float, generation: int, *codes: int, stopped: bool = False) -> Journal:
        for rank, code in enumerate(codes):
            place = {"generation": generation, "local_rank": rank, "rank": rank, "pid": 1}
            self.at(second + rank, "worker_ended", **place, exit_code=code, stopped=stopped)
        return self

    def progress(self, second: float, generation: int, steps: int, began_at: int = -1, at: int = -1) -> Journal:
        return self.at(
            second, "progress", generation=generation, steps=[steps, steps], began_at=[began_at] * 2, at=[at] * 2
        )

    def over(self, second: float) -> Journal:
        return self.at(second, "ended", kind="succeeded", exit_code=0)


def told(*journals: Journal) -> History:
    found = history([journal.events for journal in journals])
    assert found is not None
    for before, after in zip(found.stretches, found.stretches[1:], strict=False):
        assert before.to_s == after.from_s
    return found


def spent(past: History) -> dict[str, float]:
    return {doing.name: seconds for doing in Activity if (seconds := round(past.spent_s(doing), 6))}


def test_a_run_that_goes_well() -> None:
    past = told(Journal().starts(2, 1, ready=5).ends(20, 1, 0, 0).over(23))
    assert spent(past) == {"STARTUP": 5, "TRAINING": 16, "END": 2}
    assert past.total_s == 23
    assert past.effective == pytest.approx(16 / 23)
    assert past.lost_steps is None


def test_work_that_a_restart_lost() -> None:
    journal = Journal().starts(2, 1, ready=5).ends(15, 1, 1, -15)
    journal.progress(15, 1, 100, began_at=0, at=100).starts(16, 2, ready=20)
    past = told(journal.progress(30, 2, 50, began_at=80, at=130).ends(30, 2, 0).over(30))
    assert spent(past) == {"STARTUP": 5, "TRAINING": 8 + 10, "LOST": 2, "DOWN": 5}
    assert past.lost_steps == 20


def test_nothing_is_lost_where_the_next_goes_on() -> None:
    journal = Journal().starts(2, 1, ready=5).ends(15, 1, 0, 0, stopped=True)
    journal.progress(15, 1, 100, began_at=0, at=100).starts(16, 2, ready=20)
    past = told(journal.progress(30, 2, 50, began_at=100, at=150).ends(30, 2, 0).over(30))
    assert (past.lost_steps, spent(past).get("LOST")) == (0, None)


def test_a_generation_that_never_came_to_a_step_is_part_of_the_wait() -> None:
    first = Journal().starts(2, 1).ends(4, 1, 1).starts(5, 2, ready=8).ends(20, 2, 1).starts(21, 3).ends(22, 3, 1)
    past = told(first.starts(23, 4, ready=30).ends(40, 4, 0).over(40))
    assert spent(past) == {"STARTUP": 8, "TRAINING": 12 + 10, "DOWN": 10}


def test_without_an_optimizer_it_trains_once_all_its_workers_run() -> None:
    journal = Journal().starts(2, 1)
    journal.at(4, "phases", generation=1, restart_count=0, form_s=1.0, spawn_s=0.5, until_monotonic=3.0)
    assert spent(told(journal.ends(13, 1, 0).over(13))) == {"STARTUP": 3, "TRAINING": 10}


def test_the_slowest_node_begins_and_the_first_failure_ends() -> None:
    one = Journal("a").starts(1, 1, ready=5).ends(12, 1, -15).over(13)
    other = Journal("b").starts(1, 1, ready=7).ends(11, 1, 1).over(13)
    assert spent(told(one, other)) == {"STARTUP": 7, "TRAINING": 4, "END": 2}


def test_a_node_that_is_done_first_does_not_end_the_generation() -> None:
    one = Journal("a").starts(1, 1, ready=5, nproc=1).ends(10, 1, 0).over(21)
    other = Journal("b").starts(1, 1, ready=5, nproc=1).ends(20, 1, 0).over(21)
    assert spent(told(one, other)) == {"STARTUP": 5, "TRAINING": 15, "END": 1}


def test_a_node_that_was_lost_has_no_say_in_when_it_ended() -> None:
    here = Journal("a").starts(1, 1, ready=5).ends(12, 1, -15, stopped=True).starts(13, 2, ready=15).ends(20, 2, 0)
    lost = Journal("b").starts(1, 1, ready=5).progress(9, 1, 10)
    assert spent(told(here.over(20), lost)) == {"STARTUP": 5, "TRAINING": 7 + 5, "DOWN": 3}


def test_a_run_that_goes_on() -> None:
    past = told(Journal().starts(2, 1, ready=5).progress(30, 1, 100))
    assert spent(past) == {"STARTUP": 5, "TRAINING": 25}
    assert not past.nodes[0].ended


def test_a_run_that_never_starts_anything() -> None:
    assert history([Journal().over(3).events]) is None
    past = told(Journal().starts(2, 1).ends(4, 1, 1).over(5))
    assert spent(past) == {"STARTUP": 5}
    assert past.effective == 0.0


def test_a_hang_is_no_training() -> None:
    """31 of 33 s: it stood still when it was found, and until it was ended."""
    run = Journal().starts(0, 1, ready=1).progress(2, 1, 10)
    run.at(12, "coordinator.hang", generation=1, kind="hung", code="HF240", still_s=10.0)
    run.ends(33, 1, 1).over(33)
    assert spent(told(run)) == {"STARTUP": 1.0, "TRAINING": 1.0, "HUNG": 31.0}


def test_a_hang_that_went_over_and_a_pause_are_training() -> None:
    run = Journal().starts(0, 1, ready=1)
    run.at(12, "coordinator.hang", generation=1, kind="hung", code="HF240", still_s=10.0)
    run.at(14, "coordinator.hang_over", generation=1, still_s=12.0)
    run.at(20, "coordinator.hang", generation=1, kind="paused", code="", still_s=5.0)
    run.ends(33, 1, 0).over(33)
    assert spent(told(run)) == {"STARTUP": 1.0, "TRAINING": 32.0}
