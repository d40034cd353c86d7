"""Two nodes whose trainers, savers and memory are killed and lost at random: each life goes on from what all ranks have."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.snapshots import folder, shelf
from holdfast.snapshots.attempt import Ticket
from holdfast.snapshots.saver_client import Place, SaverClient, rescue_attempt
from holdfast.snapshots.slots import Owner, Slots

SCRIPT = Path(__file__).parent / "scripts" / "node_kills.py"
KILLS = 7
"""Each of the script's kinds once."""
pytestmark = [pytest.mark.xdist_group("torch"), pytest.mark.timeout(200)]


@pytest.mark.parametrize("seed", [0])
def test_every_rank_goes_on_from_the_newest_step_that_all_have(seed: int, tmp_path: Path) -> None:
    line = [sys.executable, SCRIPT, tmp_path / "runs", str(KILLS), str(seed)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["faults"] == [], done.stderr[-3000:]
    assert sum(found["resumed"].values()) == KILLS + 1
    assert found["newest"] > 0


# --- what is in memory alone goes to the disk, or stays there -----------------------------------------------------------


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Has two nodes of one rank each, with these steps in memory, die at one moment."""
    anchor = subprocess.Popen(["sleep", "600"])
    shelves = [shelf.Shelf.make(f"pretend{rank}") for rank in range(2)]

    def crash(folder: Path, *steps: tuple[int, ...]) -> None:
        clients, number = [], rescue_attempt()
        for rank, (held, its_steps) in enumerate(zip(shelves, steps, strict=True)):
            clients.append(SaverClient(Place(held.path, 0, 1, anchor.pid, held)))
            own = Slots(held.path, Owner(0, rank, 2, 1))
            for step in its_steps:
                memory = own.stage(step, 4096)
                assert memory is not None
                memory[:] = bytes([step + rank]) * 4096
                own.commit(Ticket(str(folder), step, number, rank, 2).to_json(), {"step": step})
            own.close()
        for client in clients:
            client._drop()  # as death does it

    yield crash
    for pid in savers_of(shelves):
        os.kill(pid, signal.SIGKILL)
    for held in shelves:
        held.remove()
    anchor.kill()
    anchor.wait()


def savers_of(shelves: list[shelf.Shelf]) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes()
            if b"holdfast.snapshots.saver" in line and any(str(each.path).encode() in line for each in shelves):
                found.append(int(path.parent.name))
    return found


def committed(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in folder.glob("step_*"))


def test_two_nodes_write_the_step_that_both_have(tmp_path: Path, nodes: Callable[..., None]) -> None:
    nodes(tmp_path, (20, 40), (20, 40))
    until(lambda: committed(tmp_path) == ["step_000000040"], "the newest step is committed")
    (path,) = tmp_path.glob("step_*")
    assert [(path / f"rank_0000{rank}.safetensors").read_bytes() for rank in (0, 1)] == [
        bytes([40 + rank]) * 4096 for rank in (0, 1)
    ]


@pytest.mark.parametrize("steps", [((40,), (60,)), ((20, 40), (40, 60)), ((40,), ())])
def test_steps_are_not_mixed_and_no_rank_is_left_out(
    tmp_path: Path, nodes: Callable[..., None], steps: tuple[tuple[int, ...], ...]
) -> None:
    nodes(tmp_path, *steps)
    until(lambda: list(tmp_path.glob("attempt.step_*/rank_00000.json")), "rank 0 has written its part")
    time.sleep(0.5)
    assert committed(tmp_path) == []
    assert not list(tmp_path.glob("*/rank_00001.json"))
    folder.clear_debris(folder.survey(tmp_path))  # as the next life does
    time.sleep(0.2)
    assert [path.name for path in tmp_path.glob("*step_*")] == []
