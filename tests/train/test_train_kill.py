"""Trainers killed at random moments and at the phases of a save. `python -m benchmarks train-kills` kills two hundred."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import memory_folder
from holdfast.train.snapshots import folder
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.flush import rescue_attempt
from holdfast.train.snapshots.saver_client import SaverClient
from holdfast.train.snapshots.saver_connection import SaverAddress
from holdfast.train.snapshots.slots import SlotOwner, Slots
from tests.conftest import alive
from tests.support.limits import until
from tests.train.conftest import on_ranks
from tests.train.snapshots.saves import savers
from tests.warm import Warm

SCRIPTS = Path(__file__).parent / "scripts"
RANDOM_KILLS = Path(__file__).parents[2] / "benchmarks" / "scripts" / "train_kills.py"
KILLS, SEED = 16, 0
"""Eight at random moments; at eight of the script's named points, some of each kind."""
pytestmark = [pytest.mark.xdist_group("torch lives"), pytest.mark.timeout(200)]


def test_every_life_goes_on_from_the_newest_state_bit_for_bit(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(RANDOM_KILLS, tmp_path / "runs", str(KILLS), str(SEED))
    assert found["faults"] == []
    assert sum(found["resumed"].values()) == KILLS + 1
    assert found["newest"] > 0


def test_after_the_death_of_all_ranks_the_weights_are_those_of_an_undisturbed_job(warm: Warm, tmp_path: Path) -> None:
    """Sums over more than two ranks depend in their last bit on the order of the gradients in DDP's buckets."""
    found = warm.found(SCRIPTS / "restarted.py", tmp_path)
    (whole, buckets), (again, buckets_again), (_, buckets_older) = found["whole"], found["again"], found["older"]
    assert again == whole
    assert buckets == 1, "DDP begins with one"
    assert buckets_again > 2
    assert buckets_older == 1, "what has no order is resumed all the same"


# --- lives of one job, one after the other, that hand on their state in memory ----------------------------------------


def lives(warm: Warm, count: int, case: str, folder: Path) -> list[list[dict[str, Any]]]:
    """What each life said; they have one launcher."""
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": f"lives-{os.getpid()}"}
    done = warm.run([SCRIPTS / "lives.py", str(count), case, folder / "snaps"], env=environ)
    shelves = f"holdfast-{os.getuid()}-lives-{os.getpid()}-*"
    until(lambda: not any(Path("/dev/shm").glob(shelves)), "the saver goes with the launcher")
    said = done.stdout.split("\n\n")[:count]
    assert len(said) == count, done.stderr
    return [[json.loads(text) for text in each.splitlines()] for each in said]


def test_the_last_of_several_saves_of_one_step_comes_back_whole(warm: Warm, tmp_path: Path) -> None:
    """A script that calls save() and never step(): both slots have step 0."""
    _, second, third, fourth = lives(warm, 4, "saves", tmp_path)
    assert second == [{"source": "memory", "count": 3, "bias": [3.0, 3.0]}]
    assert third == [{"source": "memory", "count": 5, "bias": [5.0, 5.0]}]
    # The life before saved once: the other slot has what its previous leader left.
    assert fourth == [{"source": "memory", "count": 6, "bias": [6.0, 6.0]}]


def test_the_end_of_a_forked_child_is_not_the_job_s(warm: Warm, tmp_path: Path) -> None:
    first, second = lives(warm, 2, "fork", tmp_path)
    assert first[-1] == {"free": False}
    assert second[0] == {"source": "memory", "count": 3, "bias": [3.0, 3.0]}


def test_a_state_in_memory_that_is_not_finite_is_passed_over_for_one_on_the_disk(warm: Warm, tmp_path: Path) -> None:
    first, (second, said) = lives(warm, 2, "poisoned", tmp_path)
    assert (second["source"], second["bias"]) == ("disk", first[0]["bias"])
    assert any("in memory: model.bias has values that are not finite" in each for each in said["skipped"])
    # What the saver wrote after the crash is marked, so that no export, and no new run, takes it.
    assert [(each.step, each.manifest.finite) for each in folder.survey(tmp_path / "snaps").committed] == [
        (0, True),
        (3, False),
    ]


def test_a_state_in_memory_that_was_not_saved_yet_comes_back(warm: Warm, tmp_path: Path) -> None:
    _, (second, _) = lives(warm, 2, "unsaved", tmp_path)
    assert second == {"source": "memory", "count": 1, "bias": [1.0, 1.0]}


@pytest.mark.parametrize("case", ["removed", "moved"])
def test_a_state_in_memory_belongs_to_its_folder_and_not_to_a_new_one(warm: Warm, tmp_path: Path, case: str) -> None:
    _, (second, _) = lives(warm, 2, case, tmp_path)
    assert (second["source"], second["count"]) == (None, 0)


# --- two nodes whose trainers, savers and memory are killed and lost at random ----------------------------------------


NODE_KILL_KINDS = 7


@pytest.mark.usefixtures("fsdp_on_cpus")
def test_every_rank_goes_on_from_the_newest_step_that_all_have(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPTS / "node_kills.py", tmp_path / "runs", str(NODE_KILL_KINDS), "0", timeout=180)
    assert found["faults"] == []
    assert sum(found["resumed"].values()) == NODE_KILL_KINDS + 1
    assert found["newest"] > 0


@pytest.mark.usefixtures("fsdp_on_cpus")
@pytest.mark.parametrize(("durable", "source"), [(0, "nothing"), (2, "disk")])
def test_a_part_that_is_lost_with_its_node_is_not_waited_for(
    warm: Warm, tmp_path: Path, durable: int, source: str
) -> None:
    """The other node's saver has begun to wait for it. Where nothing was saved, that is no unfinished save, which would
    be an error: training starts again, and says so."""
    rank_0, rank_1 = warm.found(SCRIPTS / "lost_memory.py", tmp_path / "runs", str(durable), timeout=180)
    assert [each[:2] for each in (rank_0, rank_1)] == [[durable, source]] * 2
    assert len(rank_0[2]) == (not durable)
    assert all("parts of step 3, which was in memory, are lost with their node" in each for each in rank_0[2])
    assert rank_1[2] == []


# --- what is in memory alone goes to the disk, or stays there -----------------------------------------------------------


class Nodes:
    """Two pretended nodes of one rank each."""

    def __init__(self) -> None:
        self.anchor = subprocess.Popen(["sleep", "600"])
        self.shelves = [memory_folder.MemoryFolder.make(f"pretend{rank}") for rank in range(2)]
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


def savers_of(shelves: list[memory_folder.MemoryFolder]) -> list[int]:
    return [pid for each in shelves for pid in savers(each.path)]


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


# --- the id of the training for loggers -------------------------------------------------------------------------------


def test_the_run_id_in_the_snapshot_outlives_the_launcher_s(warm: Warm, tmp_path: Path) -> None:
    """Ranks of other numbers, another launcher with another id, and one that gives none."""
    script = SCRIPTS / "run_ids.py"
    lives = [(2, "first"), (3, "second"), (1, "")]
    first, second, third = on_ranks(
        warm, "", *((world, script, (str(tmp_path / "a"), given)) for world, given in lives)
    )
    assert first.split("\n") == ["first", ""]
    told = "HOLDFAST_RUN_ID is now first, that of the snapshot, so that loggers continue its run"
    assert second.split("\n") == ["first", f"holdfast: {told}", ""]
    assert third.split("\n") == ["first", ""]


def test_a_run_id_that_no_launcher_gives_is_made_once_for_all_ranks(warm: Warm, tmp_path: Path) -> None:
    script = SCRIPTS / "run_ids.py"
    first, second, other = on_ranks(
        warm, "", *((2, script, (str(tmp_path / folder), "")) for folder in ("a", "a", "b"))
    )
    assert first.strip().isalnum()
    assert second == first
    assert other != first
