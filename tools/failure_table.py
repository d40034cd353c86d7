"""Make docs/failures.md: what happens when something fails, by phase, and which test shows it; from failures.toml.

A wrong word, phase or test in that file is an error here.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tools.named_tests import exists, short

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "failures.md"
DATA = ROOT / "tools" / "failures.toml"

PHASES = {
    "gathering": "nodes meet, or meet again",
    "preparing": "the world is published; each node makes its folders, the first one binds the store's port",
    "starting": "from the order to start to the first step",
    "training": "steps are made",
    "draining": "the workers are asked to stop at their next safe point",
    "saving": "a snapshot is being written",
    "stopping": "the workers are being ended",
    "finishing": "some ranks have ended with 0, others have not",
}
THEN = {
    "goes on": "training, or the current phase, continues",
    "regroup": "another generation starts with the remaining nodes; no restart is counted",
    "restart": "another generation, if `--max-restarts` allows it, else the job ends with a verdict; one restart is counted",
    "wait": "the others wait, report what is missing, and give up at the join deadline",
    "end": "this agent, or the job, ends with a message and its own exit code",
    "older one": "this save does not count; the previous one is complete and is used",
}

HEAD = """# What happens when something fails

This page is made by `make fmt` from `tools/failures.toml`. Each line names the tests that show it. A test checks that they exist.

Find the row of the failure and the phase in which it happens. An empty field means that it cannot happen there, or that nothing is special about it. Each field
is explained [below](#workers).

"""


DISK_HEAD = """
## Disks that take nothing

Full means that no block is left, no inode is left, or a quota is used up; where one of these differs from the others, the table says so.

| place | condition | what the job does | what is said | shown by |
|---|---|---|---|---|
"""


class Entry(NamedTuple):
    phase: str
    then: str
    text: str
    tests: tuple[str, ...]


class Failure(NamedTuple):
    group: str
    name: str
    text: str
    """How it is noticed, and how soon."""
    entries: tuple[Entry, ...]


class DiskRow(NamedTuple):
    """What a job does when a place takes nothing."""

    place: str
    condition: str
    then: str
    """What the job does."""
    says: str
    tests: tuple[str, ...]


@cache
def disks() -> tuple[DiskRow, ...]:
    """By place and condition."""
    given = tomllib.loads(DATA.read_text(encoding="utf-8"))["disk"]
    return tuple(DiskRow(**{**each, "tests": tuple(each["tests"])}) for each in given)


@cache
def data() -> tuple[tuple[Failure, ...], tuple[str, ...]]:
    """The failures, and the tests that put all of them into all phases. Raises LookupError for a word that is none."""
    given = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return tuple(map(failure_of, given["failure"])), tuple(given["everywhere"])


def failure_of(given: dict[str, Any]) -> Failure:
    phases = {key: value for key, value in given.items() if key not in ("group", "name", "text")}
    unknown = phases.keys() - PHASES.keys() | {each["then"] for each in phases.values()} - THEN.keys()
    if unknown:
        raise LookupError(f"{DATA.name}: {given['name']}: {sorted(unknown)} are neither phases nor what may follow")
    entries = (Entry(phase, each["then"], each["text"], tuple(each["tests"])) for phase, each in phases.items())
    return Failure(given["group"], given["name"], given["text"], tuple(entries))


# --- the page ---------------------------------------------------------------------------------------------------------


def render() -> str:
    """The whole page."""
    failures, everywhere = data()
    parts = [HEAD, matrix(failures), legend("phase", PHASES), legend("word", THEN)]
    parts.append(f"\nAll kinds of failures at random, one on top of the other: {', '.join(map(short, everywhere))}.\n")
    group = ""
    for failure in failures:
        if failure.group != group:
            group = failure.group
            parts.append(f"\n## {group}\n")
        parts.append(section(failure))
    parts.append(disk_section(disks()))
    return "".join(parts)


def matrix(failures: tuple[Failure, ...]) -> str:
    lines = ["| | " + " | ".join(PHASES) + " |", "|---" * (len(PHASES) + 1) + "|"]
    for failure in failures:
        then = {entry.phase: entry.then for entry in failure.entries}
        cells = " | ".join(then.get(phase, "") for phase in PHASES)
        lines.append(f"| [{failure.name}](#{anchor(failure.name)}) | {cells} |")
    return "\n".join(lines) + "\n"


def legend(title: str, words: dict[str, str]) -> str:
    rows = "\n".join(f"| {word} | {meaning} |" for word, meaning in words.items())
    return f"\n| {title} | meaning |\n|---|---|\n{rows}\n"


def section(failure: Failure) -> str:
    rows = "\n".join(map(row, failure.entries))
    return f"\n### {failure.name}\n\n{failure.text}\n\n| when | then | | shown by |\n|---|---|---|---|\n{rows}\n"


def row(entry: Entry) -> str:
    return f"| {entry.phase} | {entry.then} | {entry.text} | {'<br>'.join(map(short, entry.tests))} |"


def disk_section(rows: tuple[DiskRow, ...]) -> str:
    """A place is written once, above its conditions."""
    lines, before = [], ""
    for each in rows:
        place, before = (each.place if each.place != before else ""), each.place
        shown = "<br>".join(map(short, each.tests))
        lines.append(f"| {place} | {each.condition} | {each.then} | {each.says} | {shown} |")
    return DISK_HEAD + "\n".join(lines) + "\n"


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


# --- the tests that it names ------------------------------------------------------------------------------------------


def missing() -> list[str]:
    """Tests that are named and not there."""
    failures, everywhere = data()
    named = {test for failure in failures for entry in failure.entries for test in entry.tests}
    named.update(test for each in disks() for test in each.tests)
    return sorted(test for test in named.union(everywhere) if not exists(test))
