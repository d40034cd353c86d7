"""What the saver writes of its own accord when all workers of the node have died, and what it must not put together."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from holdfast.train.snapshots.changes import Keep, SaveRequest, begin, prune
from holdfast.train.snapshots.flush import (
    PATIENCE_S,
    Inventory,
    PendingFlush,
    Save,
    StepInMemory,
    carry_out,
    rescue_attempt,
)
from holdfast.train.snapshots.folder import being_written
from holdfast.train.snapshots.mapping import Mappings
from holdfast.train.snapshots.read_back import ReadBacks
from holdfast.train.snapshots.refusals import Refusals
from holdfast.train.snapshots.saver_client import SaverClient
from holdfast.train.snapshots.saver_connection import Packet
from holdfast.train.snapshots.slots import SlotOwner, Slots, lend, release
from tests.support.limits import limit_s, until
from tests.train.snapshots.saves import Memory, is_whole, newest, put
from tests.train.snapshots.test_snap_saver import SIZE, committed, run, run_lives


def test_a_crash_among_saves_of_one_step_mixes_nothing(tmp_path: Path, memory: Memory) -> None:
    """One rank died before it had staged the third one."""
    folder, number = tmp_path / "snaps", rescue_attempt()
    folder.mkdir()
    clients = []
    for rank, saves in ((0, (2, 3)), (1, (1, 2))):
        clients.append(SaverClient(memory.address(rank, 3)))
        own = Slots(memory.path, SlotOwner(rank, rank, 2, 3))
        for save in saves:
            request = SaveRequest(str(folder), 40, number, rank, 2, {"save": save})
            put(own, 40, bytes([save]) * SIZE, request)
        own.close()
    for client in clients:
        client._drop()
    until(lambda: list(committed(folder)) == [40], "the newest is saved")
    assert [path.read_bytes()[:1] for path in sorted(folder.glob("step_*/*.safetensors"))] == [b"\2", b"\2"]


def test_a_life_that_went_back_to_an_older_step_is_rescued_too(tmp_path: Path) -> None:
    """What its previous leader saved of later steps was found damaged."""
    number = rescue_attempt()
    first = "persist(40)\nsaver.wait(LIMIT_S)\nsay()\ndie()"
    second = f"import shutil\nshutil.rmtree(FOLDER + '/step_000000040.0001')\nstage(30, {number})\ndie()"
    done = run_lives(tmp_path, first, second)
    until(lambda: list(committed(tmp_path)) == [30], done.stderr)
    until(lambda: not Path(done.stdout.strip()).exists(), "the shared-memory folder is gone")


@pytest.mark.parametrize("slow", [False, True])
def test_a_save_that_only_one_rank_had_handed_over_is_made_good(tmp_path: Path, memory: Memory, slow: bool) -> None:
    """The other one was killed between rank 0's word and its own: both have the step in memory. `slow`: that save is
    still being written when the step is on the disk."""
    folder, number = tmp_path / "snaps", rescue_attempt()
    clients = []
    for rank in (0, 1):
        clients.append(SaverClient(memory.address(rank, 3)))
        own = Slots(memory.path, SlotOwner(rank, rank, 2, 3))
        slot = put(own, 40, bytes(SIZE), SaveRequest(str(folder), 40, number, rank, 2, {"save": 1}))
        if rank == 0:
            clients[0]._committed = slot
            request = SaveRequest(str(folder), 40, begin(folder, 40), 0, 2)
            writing = contextlib.ExitStack()
            if slow:
                writing.enter_context(being_written(request.attempt_path))
            clients[0].persist(request)
        own.close()
    for client in clients:
        client._drop()
    memory.end()
    until(lambda: list(committed(folder)) == [40], "the newest is saved")
    time.sleep(slow)  # the rescue looks at it after its commit
    writing.close()
    until(lambda: not memory.path.exists(), "nobody waits for what rank 1 never handed over")
    assert [path.name for path in folder.iterdir()] == [f"step_000000040.{number}"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rescue_ends_when_the_others_have_gone_on_and_saved_a_newer_step(tmp_path: Path, rank: int) -> None:
    """The last worker of this node was lost; those of the others live, in ht.survive, and leave no list."""
    (tmp_path / "memory").mkdir()
    own = Slots(tmp_path / "memory", SlotOwner(rank, rank, 2, 3))
    request = SaveRequest(str(tmp_path), 40, rescue_attempt(), rank, 2)
    here = StepInMemory(40, 1)
    pending = PendingFlush({here: (put(own, 40, bytes(SIZE), request), request)}, Inventory((here,), -1, 20))
    with ThreadPoolExecutor() as threads:
        met = threads.submit(pending.meet, threading.Event(), limit_s(60))
        (tmp_path / "step_000000030.0001").mkdir()  # older than what is in memory
        assert not wait([met], 0.2).done
        (tmp_path / "step_000000050.0001").mkdir()
        assert met.result(limit_s(20)) is None
    own.close()


@pytest.mark.parametrize(("rank", "started_for"), [(0, 4), (1, 4), (1, 5)])
def test_a_rescue_that_waits_for_another_node_ends_when_a_replacement_joins_the_survivors(
    tmp_path: Path, memory: Memory, rank: int, started_for: int
) -> None:
    """They rescue nothing. Else the job would end 30 s later, with a warning of a save that nobody needs."""
    first, folder = SaverClient(memory.address(0, 3)), tmp_path / "snaps"
    folder.mkdir()
    own = Slots(memory.path, SlotOwner(0, rank, 2, 3))
    slot = put(own, 40, bytes(SIZE), SaveRequest(str(folder), 40, rescue_attempt(), rank, 2))

    def is_free() -> bool:
        fd = own._lock(slot.number)
        if fd is not None:
            release(fd)
        return fd is not None

    first._drop()
    until(lambda: not is_free(), "the rescue waits for the other node")
    replacement = SaverClient(memory.address(0, started_for))
    assert not is_free(), "it has not joined"
    replacement.regroup(rank, 2, 5)
    until(is_free, "the slot is free", PATIENCE_S / 3)
    until(lambda: not list(folder.iterdir()), "nothing is left of the rescue")
    replacement.check()
    own.close()
    replacement.close()


def test_a_folder_that_was_closed_while_the_job_goes_on_in_another(tmp_path: Path, memory: Memory) -> None:
    """What is in memory alone is written when all ranks have let go of the folder, not when the job ends."""
    first, number, slots = tmp_path / "a", rescue_attempt(), []
    first.mkdir()
    clients = [SaverClient(memory.address(rank, 0)) for rank in (0, 1)]
    for rank in (0, 1):
        slots.append(Slots(memory.path, SlotOwner(rank, rank, 2, 0)))
        put(slots[-1], 40, bytes(SIZE), SaveRequest(str(first), 40, number, rank, 2))
    again = []
    for rank, client in enumerate(clients):
        client.close(ahead=True)
        again.append(SaverClient(memory.address(rank, 0)))
    until(lambda: list(committed(first)) == [40], "the newest of the first folder is saved")
    for client in again:
        client.close()
    for own in slots:
        own.close()


# --- while the interpreter ends its thread pools take nothing, and saves and retention go on --------------------------


SCRIPT = """
import atexit, sys
sys.path.insert(0, {root!r})
from holdfast.train.snapshots.changes import Keep, prune
from tests.train.snapshots import saves

saves.WEIGHT_ITEMS = 3 << 20                     # three chunks and more: one alone needs no pool
def late():
    for step in (1, 2):
        saves.save(saves.Path(sys.argv[1]), step, 1)
    assert len(prune(sys.argv[1], Keep(last=1)).deleted) == 1
    print("done")

atexit.register(late)
"""


def test_saves_and_retention_at_exit(tmp_path: Path) -> None:
    script = SCRIPT.format(root=str(Path(__file__).parents[3]))
    done = run("-c", script, str(tmp_path))
    assert (done.stdout, done.stderr) == ("done\n", "")
    assert newest(tmp_path).step == 2
    assert prune(tmp_path, Keep(last=1)).deleted == ()
    assert is_whole(newest(tmp_path))


def test_a_rescue_that_waits_for_another_node_ends_when_the_next_life_goes_on_from_memory(
    tmp_path: Path, memory: Memory
) -> None:
    """Else each loss would keep a slot for half a minute, and after some there would be none for new states."""
    address = memory.address(0, 0)
    first, folder = SaverClient(address), tmp_path / "snaps"
    folder.mkdir()
    own = Slots(memory.path, SlotOwner(0, 0, 2, 0))
    slot = put(own, 40, bytes(SIZE), SaveRequest(str(folder), 40, rescue_attempt(), 0, 2))
    first._drop()
    until(lambda: list(folder.glob("*/*.offer")), "the rescue waits for the other node")
    assert own._lock(slot.number) is None
    following = SaverClient(address)
    following.serve("a life", "127.0.0.1", 0, str(tmp_path / "another"), (0, 2))
    following.await_served()
    assert own._lock(slot.number) is None
    following.serve("a life", "127.0.0.1", 0, str(folder), (0, 2))
    fd = until(lambda: own._lock(slot.number), "the slot is free", PATIENCE_S / 3)
    release(fd)
    until(lambda: not list(folder.iterdir()), "nothing is left of the rescue")
    following.check()
    own.close()
    following.close()


@pytest.mark.parametrize("after_crash", [False, True])
def test_a_store_whose_driver_the_saver_lacks_is_an_answer_and_frees_the_slot(
    memory: Memory, after_crash: bool
) -> None:
    """The worker would wait ten minutes for it, and the end of the job, too."""
    own = Slots(memory.path, SlotOwner(0))
    slot = put(own, 40, bytes(4096), SaveRequest("nodriver://bucket/run", 40, rescue_attempt(), 0, 1, {"save": 1}))
    assert slot.request is not None
    step = StepInMemory(40, 1)
    flush = PendingFlush({step: (slot, slot.request)}, Inventory((step,), -1, -1), step) if after_crash else None
    told: list[Packet] = []
    save = Save(lend(slot), slot.sequence, slot.request, 1.0, 0, Mappings(), Refusals(), flush)
    carry_out(save, ReadBacks(lambda: False), told.append)
    assert [each["is"] for each in told] == ["failed"]
    assert "nodriver" in told[0]["text"]
    for later in (41, 42):
        put(own, later, bytes(4096))
    own.close()
