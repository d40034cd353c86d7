"""Two nodes whose trainers, savers and memory are killed and lost at random: each life goes on from what all ranks have."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.snapshots import folder, shelf
from holdfast.snapshots.attempt import SaveRequest
from holdfast.snapshots.saver_client import SaverClient
from holdfast.snapshots.saving import rescue_attempt
from holdfast.snapshots.shelf import SaverAddress
from holdfast.snapshots.slots import SlotOwner, Slots
from tests.conftest import alive
from tests.support.limits import until
from tests.warm import Warm

SCRIPT = Path(__file__).parent / "scripts" / "node_kills.py"
KILLS = 7
"""Each of the script's kinds once."""
pytestmark = [pytest.mark.xdist_group("torch lives"), pytest.mark.timeout(200)]


def test_every_rank_goes_on_from_the_newest_step_that_all_have(warm: Warm, tmp_path: Path) -> None:
    done = warm.run([SCRIPT, tmp_path / "runs", str(KILLS), "0"], timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["faults"] == [], done.stderr[-3000:]
    assert sum(found["resumed"].values()) == KILLS + 1
    assert found["newest"] > 0


# --- what is in memory alone goes to the disk, or stays there -----------------------------------------------------------


class Nodes:
    """Two pretended nodes of one rank each."""

    def __init__(self) -> None:
        self.anchor = subprocess.Popen(["sleep", "600"])
        self.shelves = [shelf.Shelf.make(f"pretend{rank}") for rank in range(2)]
        self.savers: list[int] = []

    def crash(self, *states: tuple[tuple[Path, int], ...]) -> None:
        """Both die at one moment, with these states (folder, step) in memory."""
        clients = []
        numbers = {path: rescue_attempt() for each in states for path, _ in each}
        for rank, (held, its_states) in enumerate(zip(self.shelves, states, strict=True)):
            clients.append(SaverClient(SaverAddress(held.path, 0, 1, self.anchor.pid, held)))
            own = Slots(held.path, SlotOwner(0, rank, 2, 1))
            for path, step in its_states:
                memory = own.stage(step, 4096)
                assert memory is not None
                memory[:] = bytes([step + rank]) * 4096
                own.commit(SaveRequest(str(path), step, numbers[path], rank, 2, metadata={"step": step}))
            own.close()
        self.savers = savers_of(self.shelves)
        for client in clients:
            client._drop()  # as death does it

    def end(self) -> None:
        """Launchers' ends let savers end when they have nothing left to do."""
        self.anchor.kill()
        self.anchor.wait()

    def await_savers_ends(self) -> None:
        until(lambda: not any(map(alive, self.savers)), "the savers have ended")

    def close(self) -> None:
        for pid in savers_of(self.shelves):
            os.kill(pid, signal.SIGKILL)
        for held in self.shelves:
            held.remove()
        self.end()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


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


def of(folder: Path, *steps: int) -> tuple[tuple[Path, int], ...]:
    return tuple((folder, step) for step in steps)


@pytest.mark.parametrize("other", [(20, 40), (40, 60)])
def test_two_nodes_write_the_newest_step_that_both_have(tmp_path: Path, nodes: Nodes, other: tuple[int, ...]) -> None:
    nodes.crash(of(tmp_path, 20, 40), of(tmp_path, *other))
    nodes.end()
    nodes.await_savers_ends()
    (path,) = tmp_path.iterdir()  # the meeting has left nothing
    assert path.name.startswith("step_000000040.")
    assert [(path / f"rank_0000{rank}.safetensors").read_bytes() for rank in (0, 1)] == [
        bytes([40 + rank]) * 4096 for rank in (0, 1)
    ]
    assert folder.inspect(path).manifest.world == 2


def test_rank_0_goes_back_too(tmp_path: Path, nodes: Nodes) -> None:
    nodes.crash(of(tmp_path, 40, 60), of(tmp_path, 20, 40))
    until(lambda: committed(tmp_path) == ["step_000000040"], "the newest step of both")


def test_every_folder_gets_its_newest_step(tmp_path: Path, nodes: Nodes) -> None:
    """A job that closed one and opened another."""
    one, other = tmp_path / "a", tmp_path / "b"
    for each in (one, other):
        each.mkdir()
    nodes.crash((*of(one, 60), *of(other, 40)), (*of(one, 60), *of(other, 40)))
    until(lambda: committed(one) == ["step_000000060"], "of the first folder")
    until(lambda: committed(other) == ["step_000000040"], "of the second")


def test_what_is_on_the_disk_is_not_written_again_nor_waited_for(tmp_path: Path, nodes: Nodes) -> None:
    """The other node is lost: its saver says nothing."""
    (tmp_path / "step_000000040.0001").mkdir()
    nodes.crash(of(tmp_path, 40), ())
    nodes.end()
    nodes.await_savers_ends()  # before a rescue's patience ends
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000040.0001"]


def test_steps_are_not_mixed(tmp_path: Path, nodes: Nodes) -> None:
    nodes.crash(of(tmp_path, 40), of(tmp_path, 60))
    nodes.end()
    nodes.await_savers_ends()
    assert list(tmp_path.iterdir()) == []


def test_no_rank_is_left_out(tmp_path: Path, nodes: Nodes) -> None:
    nodes.crash(of(tmp_path, 40), ())
    until(lambda: list(tmp_path.glob("attempt.step_*/rank_00000.offer")), "rank 0 waits for the other")
    (other,) = savers_of(nodes.shelves[1:])
    nodes.end()
    until(lambda: not alive(other), "the saver that has nothing has ended")
    assert committed(tmp_path) == []
    folder.clear_debris(folder.survey(tmp_path))  # as the next life does
    nodes.await_savers_ends()
    assert list(tmp_path.iterdir()) == []
