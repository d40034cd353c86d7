"""What the workers, the snapshots and the rig have written down, as plain data.

Knows the files of train.py and rig.py; judges nothing. Times are those of the monotonic clock, in seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Step:
    """One rank's part in one step."""

    number: int
    epoch: int
    offset: int
    ids: list[int]
    began_s: float
    ended_s: float | None = None
    """None: it never saw the end of it."""
    seen: tuple[int, int] | None = None
    """Samples of all ranks together and the sum of their numbers, as the ranks' own sum told it."""


@dataclass
class Life:
    """One worker process in one generation."""

    host: str
    pid: int
    rank: int
    world: int
    born_s: float
    alive_s: float
    """When it was last alive."""
    generation: str = ""
    """Empty: it never met its peers."""
    base: str = ""
    """The snapshot its generation went on from; empty: from the beginning."""
    base_step: int = 0
    after: str = ""
    """The generation whose state it went on with, after `base_step`, in memory; empty: with the snapshot's."""
    looked_s: float = 0.0
    """When rank 0 began to look for it."""
    steps: dict[int, Step] = field(default_factory=dict)
    unsaved: list[int] = field(default_factory=list)
    """Steps after which it could not save."""
    finished: bool = False
    """It left on purpose, after the last of its steps."""


@dataclass(frozen=True)
class Snapshot:
    """One that lies in the folder."""

    id: str
    parent: str
    step: int
    epoch: int
    offset: int
    generation: str
    written_s: float
    """When it got its name."""
    tally: tuple[int, int]
    """Samples that went into the state, and the sum of their numbers."""


@dataclass(frozen=True)
class Event:
    """What the rig did or saw."""

    t: float
    name: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class Record:
    """One run."""

    lives: list[Life]
    snapshots: list[Snapshot]
    events: list[Event]
    samples: int
    """In an epoch."""


def read(site: Path, samples: int) -> Record:
    """All of a run. `site` as the rig left it, with its disk mounted."""
    lives = [life for path in sorted((site / "ledger").glob("*.jsonl")) for life in read_lives(path)]
    return Record(lives, read_snapshots(site / "disk" / "snapshots"), read_events(site / "rig.jsonl"), samples)


def read_lives(path: Path) -> list[Life]:
    """Of one process: one for each generation that it was in; empty when it had not even begun."""
    lives: list[Life] = []
    life: Life | None = None
    for line in _lines(path):
        what, now = line["is"], line["t"]
        if what == "born":
            life = Life(line["host"], line["pid"], line["rank"], line["world"], now, now)
            lives.append(life)
            continue
        if life is None:
            raise ValueError(f"{path.name} does not begin with a fork")
        if what == "joined" and life.generation:
            life = Life(life.host, life.pid, line["rank"], line["world"], now, now)
            lives.append(life)
        life.alive_s = max(life.alive_s, now)
        if what == "joined":
            life.after = line.get("after", "")
            life.generation, life.base, life.base_step = line["generation"], line["base"], line["step"]
            life.rank, life.world, life.looked_s = line["rank"], line["world"], line["looked"]
        elif what == "begin":
            life.steps[line["step"]] = Step(line["step"], line["epoch"], line["offset"], line["ids"], now)
        elif what == "end":
            step = life.steps[line["step"]]
            step.ended_s, step.seen = now, (line["seen"][0], line["seen"][1])
        elif what == "not saved":
            life.unsaved.append(line["step"])
        elif what == "finished":
            life.finished = True
    if life is not None:
        text = path.with_suffix(".alive").read_text().strip() if path.with_suffix(".alive").exists() else ""
        life.alive_s = max(life.alive_s, float(text or 0.0))
    return lives


def read_snapshots(folder: Path) -> list[Snapshot]:
    # Being suspended between the two makes it too small.
    to_monotonic_s = max(time.monotonic() - time.time() for _ in range(5))
    found = []
    for path in sorted(folder.glob("[0-9]*")):
        with path.open("rb") as file:
            head = json.loads(file.readline())
        # A rename sets the time of change.
        written_s = path.stat().st_ctime + to_monotonic_s
        place = (head["step"], head["epoch"], head["offset"])
        tally = (head["tally"][0], head["tally"][1])
        found.append(Snapshot(head["id"], head["parent"], *place, head["generation"], written_s, tally))
    return found


def read_events(path: Path) -> list[Event]:
    return [Event(line.pop("t"), line.pop("event"), line) for line in _lines(path)]


def recent(folder: Path, within_s: float) -> list[Life]:
    """The workers that wrote something within the last seconds."""
    since = time.time() - within_s
    fresh = [path for path in folder.glob("*.jsonl") if path.stat().st_mtime > since]
    return [life for path in fresh for life in read_lives(path)[-1:]]


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    """A last line without its end is one that somebody was killed over."""
    data = path.read_bytes()
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        yield json.loads(line)
