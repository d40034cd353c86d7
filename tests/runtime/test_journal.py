"""events.jsonl."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from holdfast import journal as journal_module
from holdfast.journal import Journal
from tests.support.limits import limit_s, until


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_object_per_event_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    for number in range(500):
        journal.write("tick", number=number)
    journal.write("odd", path=path, text="a\nb", nan=float("nan"), event="mine")
    assert journal.close(limit_s(20))
    *ticks, odd = records(path)
    assert [each["number"] for each in ticks] == list(range(500))
    assert set(ticks[0]) == {"time", "monotonic", "event", "number"}
    assert abs(float(str(ticks[0]["time"])) - time.time()) < 60
    assert (odd["event"], odd["path"], odd["text"], odd["nan"]) == ("odd", str(path), "a\nb", "nan")


def test_an_existing_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for name in ("first", "second"):
        journal = Journal(path)
        journal.write(name)
        assert journal.close(limit_s(20))
    assert [each["event"] for each in records(path)] == ["first", "second"]


def test_no_thread_and_no_file_before_the_first_event(tmp_path: Path) -> None:
    threads = threading.active_count()
    assert Journal(tmp_path / "events.jsonl").close()
    nowhere = Journal(None)
    nowhere.write("lost")
    assert nowhere.close()
    assert threading.active_count() == threads
    assert not os.listdir(tmp_path)


def test_a_stalled_disk_never_blocks_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A FIFO that nobody reads stands for the disk: opening it blocks.
    monkeypatch.setattr(journal_module, "EVENTS_MAX", 10)
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    journal = Journal(path)
    journal.write("taken")
    until(lambda: not journal._lines, "the first event to be taken")
    for number in range(30):  # nobody reads: the first write that blocked would never return
        journal.write("tick", number=number)
    assert not journal.close(0.05)
    with path.open() as reader:
        got = [json.loads(line) for line in reader]
    assert [each["event"] for each in got] == ["taken"] + ["tick"] * 10 + ["journal_dropped"]
    assert got[-1]["count"] == 20


def test_a_file_that_cannot_be_written_is_survived(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "missing" / "events.jsonl")
    journal.write("lost")
    assert journal.close(limit_s(20))


def test_a_listener_that_fails_is_noted_and_not_told_again(tmp_path: Path) -> None:
    heard: list[str] = []
    journal = Journal(tmp_path / "events.jsonl")

    def broken(event: str, fields: object) -> None:
        heard.append(event)
        raise KeyError(event)

    journal.listen(broken)
    journal.write("one")
    journal.write("two")
    assert journal.close(limit_s(20))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [each["event"] for each in events] == ["observer_fault", "one", "two"]
    assert (events[0]["what"], events[0]["error"], heard) == ("listener", "KeyError: 'one'", ["one"])
