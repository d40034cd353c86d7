"""The soak's schedule: the same for a seed, all kinds, nothing that makes no sense together, all over in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

from soak import disk, ledger
from soak import schedule as schedules
from soak.checker import Violation
from soak.figures import BEGIN_AND_END, BETWEEN, Figures
from soak.report import Outcome, table, write
from soak.rig import WORKER_SIGNALS
from soak.schedule import KINDS, schedule
from tests.network.hosts import why_not
from tests.support.limits import limit_s


@pytest.mark.parametrize("seed", range(5))
def test_twenty_minutes_hold_every_kind(seed: int) -> None:
    faults = schedule(seed, 1200.0)
    assert {fault.kind for fault in faults} == {kind.name for kind in KINDS}
    gaps = [after.at_s - before.at_s for before, after in pairwise(faults)]
    assert 10 < mean(gaps) < 22
    assert max(fault.over_s for fault in faults) <= 1200.0


def test_a_seed_is_a_schedule() -> None:
    assert schedule(7, 600.0) == schedule(7, 600.0)
    assert schedule(7, 600.0) != schedule(8, 600.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_node_has_one_fault_at_a_time(seed: int) -> None:
    free_s = dict.fromkeys(range(1, 5), 0.0)
    for fault in schedule(seed, 1200.0, mean_gap_s=3.0):
        if fault.node:
            assert fault.at_s >= free_s[fault.node]
            free_s[fault.node] = fault.over_s


@pytest.mark.parametrize("seed", range(20))
def test_the_network_has_one_fault_at_a_time(seed: int) -> None:
    free_s = 0.0
    for fault in schedule(seed, 1200.0, mean_gap_s=3.0):
        if fault.kind in {"link down", "partition 2|2", "delay and loss", "node crashed"}:
            assert fault.at_s >= free_s
            free_s = fault.over_s


def test_a_partition_leaves_the_coordinator_with_one_other() -> None:
    halves = [fault.others for fault in schedule(1, 3600.0) if fault.kind == "partition 2|2"]
    assert halves
    assert all(len(half) == 2 and half[0] == 1 for half in halves)
    assert len(set(halves)) > 1


# --- ledgers and snapshots are read back, whatever a killed writer left half done -------------------------------------


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
    (life,) = ledger.read_lives(path)
    assert (life.host, life.generation, life.base, life.base_step, life.looked_s) == ("node2", "g", "s", 10, 5.5)
    assert life.steps == {11: ledger.Step(11, 0, 480, [3, 4], 7.0, 7.5, (4, 14))}
    assert (life.born_s, life.alive_s) == (5.0, 9.25)


def test_a_process_in_two_generations_has_two_lives(tmp_path: Path) -> None:
    again = {**JOINED, "generation": "h", "step": 11, "t": 8.0, "after": "g"}
    path = written(tmp_path / "a.jsonl", BORN, JOINED, BEGIN, END, again, {**BEGIN, "step": 12, "t": 8.5})
    first, second = ledger.read_lives(path)
    assert (first.generation, first.after, list(first.steps), first.alive_s) == ("g", "", [11], 7.5)
    assert (second.generation, second.after, second.base_step, list(second.steps)) == ("h", "g", 11, [12])


def test_a_worker_that_was_killed_over_a_line(tmp_path: Path) -> None:
    (life,) = ledger.read_lives(written(tmp_path / "a.jsonl", BORN, JOINED, BEGIN, rest='{"is":"end","t":7.'))
    assert life.steps[11].ended_s is None
    assert life.alive_s == 7.0


def test_a_worker_that_was_killed_before_its_first_line(tmp_path: Path) -> None:
    assert ledger.read_lives(written(tmp_path / "a.jsonl", rest='{"is":"bo')) == []


def test_a_file_that_is_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not begin with a fork"):
        ledger.read_lives(written(tmp_path / "a.jsonl", BEGIN))


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
    source = (Path(schedules.__file__).parent / "rig.py").read_text()
    unknown = [kind.name for kind in KINDS if kind.name not in WORKER_SIGNALS and f'"{kind.name}"' not in source]
    assert not unknown


# --- the soak's table and files say what was measured, and nothing of the machine's folders ---------------------------


OURS = Outcome(
    "holdfast",
    Figures(
        wall_s=100.0,
        effective_s=50.0,
        steps=900,
        faults={"link down": 2},
        pauses_s={"link down": [8.0, 9.5]},
        lost_s={"link down": 47.0, BETWEEN: 1.0, BEGIN_AND_END: 2.0},
    ),
    [],
)
THEIRS = Outcome(
    "torchrun",
    Figures(wall_s=100.0, effective_s=5.0, steps=90, faults={"link down": 1, "partition 2|2": 1}, standstills=3),
    [Violation("stands", "no step for 120 s")],
)
ABOUT = {"script": "train.py", "date": "2026-01-02T03:04:05+00:00", "cpu": "Some CPU", "cores": 2, "seed": 7}


def test_the_table() -> None:
    lines = table([OURS, THEIRS]).splitlines()
    assert lines[0] == "| | holdfast | torchrun |"
    assert "| effective training time | 50.0% | 5.0% |" in lines
    assert "| times it stood still and was restarted by hand | 0 | 3 |" in lines
    assert "| **violations** | **0** | **1** |" in lines
    assert "| lost between two steps | 1.0 s | 0.0 s |" in lines
    assert "| pause: link down | 8.0 / 9.5 / 9.5 (2×); 47.0 s lost | never (1×) |" in lines
    assert "| pause: partition 2\\|2 | – | never (1×) |" in lines


def test_a_run_replaces_the_one_before_of_the_same_script(tmp_path: Path) -> None:
    write([THEIRS], {**ABOUT, "seed": 1}, tmp_path)
    path = write([OURS, THEIRS], ABOUT, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name] == ["soak-train.json"]
    data = json.loads(path.read_text())
    assert data["facts"]["seed"] == 7
    assert data["runs"]["holdfast"]["share"] == 0.5
    assert data["runs"]["torchrun"]["violations"] == ["stands: no step for 120 s"]


# --- the soak's disk can be full and can stall, and goes on by itself -------------------------------------------------


ROOT = Path(__file__).resolve().parent.parent.parent

PROGRAM = """
import os, sys, time
from pathlib import Path
from soak.disk import mounted

with mounted(Path(sys.argv[1]), 16) as disk:
    note = disk.path / "note"
    note.write_text("before")
    disk.fill()
    try:
        note.write_bytes(bytes(100_000))
        print("not full")
    except OSError:
        print("full")
    disk.empty()
    note.write_bytes(bytes(100_000))
    stall_s = 0.25 * float(os.environ["TEST_SLOWNESS"])
    began = time.monotonic()
    disk.stall(stall_s)
    print("stalled" if disk.stalled else "goes on")
    assert note.read_bytes() == bytes(100_000), "reading goes on"
    note.write_text("after")
    print("waited" if time.monotonic() - began > 0.8 * stall_s else "did not wait")
    disk.stall(600.0)
    if "killed" in sys.argv:
        os.kill(os.getpid(), 9)
    disk.thaw()
    note.write_text("thawed")
    print("thawed")
"""


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    if why := why_not() or disk.why_not():
        pytest.skip(why)
    line = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", PROGRAM, str(folder), *more]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=limit_s(30))


def test_full_and_stalled(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.stdout.split("\n") == ["full", "stalled", "waited", "thawed", ""], done.stderr


def test_nothing_stays_of_a_stalled_disk_whose_owner_was_killed(tmp_path: Path) -> None:
    """Its thawer and its mounts go as well: the leak guard and the loop devices tell."""
    done = run(tmp_path, "killed")
    assert done.returncode == -9
    loops = subprocess.run(["losetup", "--all"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in loops
