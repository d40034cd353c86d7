"""Ledgers and snapshots as train.py writes them are read back, and what a killed writer left half done does no harm."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from soak import ledger, schedule
from soak.rig import WORKER_SIGNALS

BORN = {"is": "born", "t": 5.0, "host": "node2", "pid": 7, "rank": 1, "world": 2, "restarts": 0, "master": "m:1"}
JOINED = {
    "is": "joined",
    "t": 6.0,
    "generation": "g",
    "rank": 1,
    "world": 2,
    "base": "s",
    "step": 10,
    "looked": 5.5,
}
BEGIN = {"is": "begin", "t": 7.0, "step": 11, "epoch": 0, "offset": 480, "ids": [3, 4]}
END = {"is": "end", "t": 7.5, "step": 11, "seen": [4, 14]}


def written(path: Path, *lines: dict[str, object], rest: str = "") -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)
    return path


def test_a_life(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", BORN, JOINED, BEGIN, END)
    path.with_suffix(".alive").write_text("0000000000009.250000\n")
    life = ledger.read_life(path)
    assert life is not None
    assert (life.host, life.generation, life.base, life.base_step, life.looked_s) == ("node2", "g", "s", 10, 5.5)
    assert life.steps == {11: ledger.Step(11, 0, 480, [3, 4], 7.0, 7.5, (4, 14))}
    assert (life.born_s, life.alive_s) == (5.0, 9.25)


def test_a_worker_that_was_killed_over_a_line(tmp_path: Path) -> None:
    life = ledger.read_life(written(tmp_path / "a.jsonl", BORN, JOINED, BEGIN, rest='{"is":"end","t":7.'))
    assert life is not None
    assert life.steps[11].ended_s is None
    assert life.alive_s == 7.0


def test_a_worker_that_was_killed_before_its_first_line(tmp_path: Path) -> None:
    assert ledger.read_life(written(tmp_path / "a.jsonl", rest='{"is":"bo')) is None


def test_a_file_that_is_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not begin with a birth"):
        ledger.read_life(written(tmp_path / "a.jsonl", BEGIN))


def test_a_snapshot_and_when_it_got_its_name(tmp_path: Path) -> None:
    head = {"id": "s2", "parent": "s1", "step": 20, "epoch": 0, "offset": 960, "tally": [960, 5], "generation": "g"}
    (tmp_path / ".000000020-s2").write_bytes(json.dumps(head).encode() + b"\n\x00payload")
    os.utime(tmp_path / ".000000020-s2", (1.0, 1.0))  # the time of the name is not that of the writing
    before = time.monotonic()
    (tmp_path / ".000000020-s2").rename(tmp_path / "000000020-s2")
    (tmp_path / ".000000030-s3").write_text("cut off")
    (found,) = ledger.read_snapshots(tmp_path)
    assert (found.id, found.parent, found.step, found.offset, found.tally) == ("s2", "s1", 20, 960, (960, 5))
    # The kernel's stamp is of its last tick.
    assert before - 0.02 <= found.written_s <= time.monotonic() + 0.02


def test_events(tmp_path: Path) -> None:
    path = written(tmp_path / "rig.jsonl", {"t": 1.0, "event": "fault", "kind": "link down"})
    assert ledger.read_events(path) == [ledger.Event(1.0, "fault", {"kind": "link down"})]


def test_the_rig_knows_every_kind() -> None:
    source = (Path(schedule.__file__).parent / "rig.py").read_text()
    unknown = [
        kind.name for kind in schedule.KINDS if kind.name not in WORKER_SIGNALS and f'"{kind.name}"' not in source
    ]
    assert not unknown
