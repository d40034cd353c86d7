"""The table of events: what it refuses, that its page is up to date, and that every event the source names is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.diagnosis.reference import event_table, events, problems
from tools import event_table as page

ROOT = Path(__file__).resolve().parent.parent.parent
OWN = {"time": 1.5, "monotonic": 2.5}
LEFT = {**OWN, "event": "coordinator.left", "member": "a#1"}


def test_the_page_is_up_to_date() -> None:
    assert page.PATH.read_text(encoding="utf-8") == page.render(), "run `make fmt`"


def test_no_name_is_there_twice() -> None:
    assert len(events()) == sum(len(group.event) for group in event_table().group)


def test_a_record_as_the_table_says() -> None:
    assert list(problems(LEFT)) == []
    assert list(problems({**OWN, "event": "preload", "text": "t", "trouble": False})) == []


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({**OWN, "event": "coordinator.left"}, "coordinator.left: no member"),
        ({**LEFT, "more": 1}, "coordinator.left: unknown field 'more'"),
        ({**LEFT, "member": 1}, "coordinator.left: member is no text: 1"),
        ({**LEFT, "member": None}, "coordinator.left: member is no text: None"),
        ({**OWN, "event": "nonsense"}, "unknown event 'nonsense'"),
        ({**OWN, "event": "journal_dropped", "count": True}, "journal_dropped: count is no whole number: True"),
        ({**OWN, "event": "unkillable", "pids": [1, "2"]}, "unkillable: pids is no list of whole numbers: [1, '2']"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_told(record: dict[str, object], told: str) -> None:
    assert list(problems(record)) == [told]


def written() -> set[str]:
    """Every event that the source writes, by the calls' literal names."""
    found: set[str] = set()
    for path in (ROOT / "src" / "holdfast").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"journal\.write\(\s*\"([\w.]+)\"", text))
        if re.search(r"holdfast/(runtime|supervisor)/", path.as_posix()):
            found |= set(re.findall(r"self\._write\(\s*\"([\w.]+)\"", text))
        if re.search(r"holdfast/extensions/\w+/node\.py", path.as_posix()):
            found |= set(re.findall(r"\bnode\.write\(\s*\"([\w.]+)\"", text))
        where = re.search(r"holdfast/(agent|coordinator|authority|extensions/\w+/coordinator\.py)", path.as_posix())
        if where:
            machine = "agent" if where[1] == "agent" else "coordinator"  # so are notes of authorities and extensions
            found |= {f"{machine}.{name}" for name in re.findall(r"(?:self\._note|\bNote)\(\s*\"(\w+)\"", text)}
    return found


def test_every_event_of_the_source_is_in_the_table() -> None:
    assert len(written()) > 30
    assert written() - events().keys() == set()


def test_every_event_of_the_table_is_in_the_source() -> None:
    elsewhere = {"phases", "progress", "journal_dropped", "observer_fault", "serving", "coordinator.straggler"}
    assert events().keys() - written() <= elsewhere
