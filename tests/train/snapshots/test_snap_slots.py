"""Memory slots: what is found again, by whom, after which deaths; and what is refused."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import linux, memory_folder
from holdfast.linux import group_room_bytes
from holdfast.protocol.errors import SnapshotMemoryError
from holdfast.train.snapshots import saver_connection, slots
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.mapping import MappedFile, Mappings
from holdfast.train.snapshots.slots import HEADER_BYTES, SlotOwner, Slots
from tests.support.limits import limit_s
from tests.train.snapshots import saves

SIZE = 3 * (1 << 20) + 17


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Slots]:
    """The slots of local rank 0."""
    own = Slots(tmp_path, SlotOwner(0))
    yield own
    own.close()


def request(step: int) -> SaveRequest:
    return SaveRequest("x", step, 1, 0, 1, metadata={"loss": 0.5})


def put(own: Slots, step: int, byte: int, size: int = SIZE) -> slots.Slot:
    return saves.put(own, step, bytes([byte]) * size, request(step))


def test_a_successor_finds_the_newest_whatever_its_rank(tmp_path: Path) -> None:
    first = Slots(tmp_path, SlotOwner(local_rank=1, rank=5, world=8, generation=3))
    put(first, 20, 1)
    put(first, 40, 2)
    first.close()
    second = Slots(tmp_path, SlotOwner(local_rank=1, rank=0, world=2, generation=4))
    found = second.committed()[0]
    assert (found.step, found.rank, found.world, found.generation, found.local_rank) == (40, 5, 8, 3, 1)
    assert bytes(found.data) == b"\2" * SIZE
    assert found.request == request(40)
    assert [slot.step for slot in second.committed()] == [40, 20]
    assert Slots(tmp_path, SlotOwner(0)).committed() == []
    assert memory_folder.local_ranks(tmp_path) == [1]
    second.close()


def test_the_older_slot_is_the_one_that_is_staged_into(own: Slots) -> None:
    for step in range(1, 6):
        put(own, step, step)
        assert [slot.step for slot in own.committed()] == [step, step - 1][: min(step, 2)]


def test_an_added_slot_keeps_both_others_and_belongs_to_the_successor(tmp_path: Path, own: Slots) -> None:
    put(own, 1, 1)
    put(own, 2, 2)
    assert own.add()
    put(own, 3, 3)
    assert [slot.step for slot in own.committed()] == [3, 2, 1]
    assert not own.add()
    own.close()
    successor = Slots(tmp_path, SlotOwner(0))
    put(successor, 4, 4)
    assert [slot.step for slot in successor.committed()] == [4, 3, 2]
    successor.close()


def test_an_added_slot_is_removed_when_another_one_is_newer(tmp_path: Path, own: Slots) -> None:
    """Its memory is given back though somebody maps it, as the saver does with what it has written."""
    put(own, 1, 1)
    put(own, 2, 2)
    assert not own.remove_added()
    assert own.add()
    put(own, 3, 3)
    assert not own.remove_added(), "it has the newest state"
    (newest, *_) = slots.committed_slots(tmp_path, 0)
    put(own, 4, 4)
    lent = slots.lend(newest)
    assert not own.remove_added(), "it is being written"
    slots.release(lent)
    assert own.remove_added()
    assert bytes(newest.data) == bytes(SIZE)
    assert sorted(path.name for path in tmp_path.glob("0.[0-9]")) == ["0.0", "0.1"]
    assert [slot.step for slot in own.committed()] == [4, 2]
    put(own, 5, 5)
    assert own.add()
    put(own, 6, 6)
    own.close()
    successor = Slots(tmp_path, SlotOwner(0))
    assert successor.count == 3
    put(successor, 7, 7)
    assert successor.remove_added()
    assert [slot.step for slot in successor.committed()] == [7, 5]
    successor.close()


def test_what_is_not_committed_is_not_there_and_the_other_one_is(tmp_path: Path, own: Slots) -> None:
    put(own, 1, 1)
    put(own, 2, 2)
    memory = own.stage(3, SIZE)
    assert memory is not None
    memory[: SIZE // 2] = bytes(SIZE // 2)
    assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [2]
    own.abandon()
    assert own.stage(4, SIZE) is not None  # the torn one again, not the last good one
    assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [2]


@pytest.mark.parametrize("where", [0, 64 * -(-SIZE // slots.SAMPLES), SIZE - 1])
def test_a_body_that_was_written_after_commit_is_refused(own: Slots, where: int) -> None:
    memory = own.stage(1, SIZE)
    assert memory is not None
    own.commit()
    memory[where] = 1
    assert own.committed() == []


@pytest.mark.parametrize("where", [0, 8, 16, 24, 40])
def test_a_header_with_a_flipped_bit_is_refused(tmp_path: Path, own: Slots, where: int) -> None:
    put(own, 1, 1)
    own.close()
    path = memory_folder.slot_path(tmp_path, 0, 0)
    with path.open("r+b") as file:
        file.seek(where)
        old = file.read(1)[0]
        file.seek(where)
        file.write(bytes([old ^ 4]))
    assert slots.committed_slots(tmp_path, 0) == []


def test_a_slot_of_another_version_is_none(tmp_path: Path, own: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """`holdfast snaps ls` reads the slots of all jobs of a host."""
    written = SaveRequest.to_json
    monkeypatch.setattr(SaveRequest, "to_json", lambda request: {**written(request), "new": 1})
    with pytest.raises(ValueError, match="'new'"):
        put(own, 1, 1)  # it reads what it has written
    assert slots.committed_slots(tmp_path, 0) == []
    monkeypatch.setattr(slots, "_slot_of", lambda *all_of_it: all_of_it)
    assert slots.read_file(memory_folder.slot_path(tmp_path, 0, 0)) is not None, "it is whole"


def test_a_truncated_file_is_refused_without_touching_what_is_not_there(tmp_path: Path, own: Slots) -> None:
    put(own, 1, 1)
    own.close()
    path = memory_folder.slot_path(tmp_path, 0, 0)
    for size in (HEADER_BYTES + SIZE // 2, HEADER_BYTES, HEADER_BYTES - 1, 3, 0):
        os.truncate(path, size)
        assert slots.committed_slots(tmp_path, 0) == []


def test_a_file_that_was_never_committed_is_not_mapped(tmp_path: Path) -> None:
    """Its worker makes it shorter when it ends: a process that reads it from a mapping in that moment gets a SIGBUS."""

    class NoMappings(Mappings):
        def of(self, fd: int) -> MappedFile:
            raise AssertionError("mapped")

    never = tmp_path / "never"
    never.write_bytes(bytes(HEADER_BYTES + SIZE))
    with never.open("r+b") as file:
        assert slots.read_descriptor(file.fileno(), mappings=NoMappings()) is None


def test_a_slot_that_is_written_out_is_not_staged_into(tmp_path: Path, own: Slots) -> None:
    lent = slots.lend(put(own, 1, 1))
    put(own, 2, 2)
    put(own, 3, 3)  # over 2: slot 1 is still being read
    assert [slot.step for slot in own.committed()] == [3, 1]
    both = slots.lend(own.committed()[0])
    assert own.stage(4, SIZE) is None
    os.close(lent)
    put(own, 5, 5)
    assert [slot.step for slot in own.committed()] == [5, 3]
    os.close(both)


def test_an_overwritten_slot_is_not_lent(tmp_path: Path, own: Slots) -> None:
    old = put(own, 1, 1)
    put(own, 2, 2)
    put(own, 3, 3)
    with pytest.raises(ValueError, match="staged into since"):
        slots.lend(old)


def test_a_history_that_was_given_up_is_forgotten(own: Slots) -> None:
    put(own, 20, 1)
    put(own, 40, 2)
    own.forget(above_step=20)
    assert [slot.step for slot in own.committed()] == [20]
    put(own, 30, 3)
    assert [slot.step for slot in own.committed()] == [30, 20]


def test_slots_grow_and_are_used_again(tmp_path: Path, own: Slots) -> None:
    list(own.reserving(SIZE))
    room = [os.stat(memory_folder.slot_path(tmp_path, 0, index)).st_size for index in range(2)]
    put(own, 1, 1, SIZE // 2)
    put(own, 2, 2)
    assert [os.stat(memory_folder.slot_path(tmp_path, 0, index)).st_size for index in range(2)] == room
    put(own, 3, 3, 2 * SIZE)
    put(own, 4, 4, 5)
    assert [(slot.step, len(slot.data)) for slot in own.committed()] == [(4, 5), (3, 2 * SIZE)]


def test_too_long_a_note_is_refused_and_harms_nothing(own: Slots) -> None:
    put(own, 1, 1)
    own.stage(2, SIZE)
    with pytest.raises(ValueError, match="at most"):
        own.commit(SaveRequest("x", 1, 1, 0, 1, {"x": "y" * HEADER_BYTES}))
    assert own.committed()[0].step == 1


@pytest.mark.parametrize(("count", "fits"), [(800, True), (HEADER_BYTES, False)])
def test_parts_to_search_that_do_not_fit_into_the_header_are_left_out(own: Slots, count: int, fits: bool) -> None:
    """Each layer of a model may be frozen in part: then there are many."""
    own.stage(1, SIZE)
    parts = [[8 * each, 8 * each + 4, "float32"] for each in range(count)]
    own.commit(SaveRequest("x", 1, 1, 0, 1, {"save": 3}, trained=parts))
    found = own.committed()[0].request
    assert found is not None
    assert (found.trained, found.save) == (parts if fits else None, 3)


# --- deaths -----------------------------------------------------------------------------------------------------------

STAGER = """
import sys
from pathlib import Path
from holdfast.train.snapshots.slots import SlotOwner, Slots
own = Slots(Path(sys.argv[1]), SlotOwner(0))
size = 8 << 20
list(own.reserving(size))
for step in range(1, 1000000):
    memory = own.stage(step, size)
    body = bytes([step % 251]) * (64 << 10)
    for start in range(0, size, len(body)):
        memory[start:start + len(body)] = body
    own.commit()
    if step == 2:
        print("up", flush=True)
"""


def test_a_worker_killed_while_staging_leaves_a_whole_slot(tmp_path: Path) -> None:
    """At any time: what is found is never torn, and there is always one."""
    torn = 0
    for number in range(8):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subprocess.Popen([sys.executable, "-c", STAGER, str(folder)], stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            worker.stdout.readline()
            time.sleep(0.0023 * number)
            worker.send_signal(signal.SIGKILL)
        found = slots.committed_slots(folder, 0)
        assert found, "no slot survived"
        for slot in found:
            assert bytes(slot.data) == bytes([slot.step % 251]) * len(slot.data)
        torn += len(found) == 1
        successor = Slots(folder, SlotOwner(0))
        assert successor.stage(1, 100) is not None  # no lock is left
        successor.close()
    assert torn, "no kill hit a staging: the test proves nothing"


@contextlib.contextmanager
def forked_child() -> Iterator[None]:
    """A data loader's worker, which has this process's descriptors and does nothing."""
    pid = os.fork()
    if not pid:
        time.sleep(600)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_lock_goes_with_its_holder_not_with_a_forked_child(tmp_path: Path, own: Slots) -> None:
    put(own, 1, 1)
    with forked_child():
        own.stage(2, SIZE)
        saver_connection._claimed.clear()  # as if it were another process, whose previous leader is dead
        successor = Slots(tmp_path, SlotOwner(0))
        assert successor.stage(3, SIZE) is None, "the only good slot must not be overwritten"
        own.abandon()
        put(successor, 4, 4)
        put(successor, 5, 5)
    own.close()
    successor.close()


def test_two_of_one_process_do_not_overwrite_each_other(tmp_path: Path) -> None:
    first, second = Slots(tmp_path, SlotOwner(0)), Slots(tmp_path, SlotOwner(0))
    put(first, 1, 1)
    for ask in (lambda size: list(second.reserving(size)), lambda size: second.stage(2, size)):
        with pytest.raises(SnapshotMemoryError, match="other snapshots of this process"):
            ask(SIZE)
    second.close()
    put(first, 3, 3)
    first.close()
    again = Slots(tmp_path, SlotOwner(0))
    assert [slot.step for slot in again.committed()] == [3, 1]
    put(again, 4, 4)
    again.close()


def test_a_second_process_of_the_same_local_rank_is_refused(tmp_path: Path) -> None:
    """And a forked child of the first does not count as one that lives on."""
    first = Slots(tmp_path, SlotOwner(0))
    put(first, 1, 1)
    program = """
import sys
from pathlib import Path
from holdfast.train.snapshots.slots import SlotOwner, Slots
own = Slots(Path(sys.argv[1]), SlotOwner(0))
print(own.committed()[0].step)
try:
    print(own.stage(2, 100) is not None)
except Exception as error:
    print(error)
"""

    def told() -> list[str]:
        line = [sys.executable, "-c", program, str(tmp_path)]
        return subprocess.run(line, capture_output=True, text=True, timeout=limit_s(30)).stdout.splitlines()

    with forked_child():
        assert told() == ["1", "another process has the memory slots of local rank 0."]
        first.close()
        assert told() == ["1", "True"]


# --- no room ----------------------------------------------------------------------------------------------------------

FULL = """
import os, sys
from pathlib import Path
from holdfast.protocol.errors import SnapshotMemoryError
from holdfast.train.snapshots.slots import SlotOwner, Slots, committed_slots
from holdfast import memory_folder
made = memory_folder.MemoryFolder.make("run")
own = Slots(made.path, SlotOwner(0))
list(own.reserving(1 << 20))
for step in (1, 2):
    own.stage(step, 1 << 20)[:] = bytes([step]) * (1 << 20)
    own.commit()
for ask in (lambda: list(own.reserving(64 << 20)), lambda: own.stage(3, 64 << 20)):
    try:
        ask()
    except SnapshotMemoryError as error:
        print(error)
    else:
        sys.exit("no error")
    assert [(slot.step, bytes(slot.data[:1])) for slot in committed_slots(made.path, 0)] == [(2, b"\\2"), (1, b"\\1")]
try:
    with own.writing(3, 64 << 20) as write:
        for at in range(64):
            write(at << 20, memoryview(bytes(1 << 20)))
except SnapshotMemoryError as error:
    print(error)
assert [slot.step for slot in committed_slots(made.path, 0)] == [2]
os.posix_fallocate(os.open("/dev/shm/filler", os.O_RDWR | os.O_CREAT), 0, os.statvfs("/dev/shm").f_bavail * 4096)
own.stage(3, 1 << 20)[:] = bytes(1 << 20)     # not a byte is free, and none is needed
own.commit()
print(own.committed()[0].step, [path.name for path in memory_folder.clean()])
made.remove()
print(os.listdir("/dev/shm"))
"""


def small_shm(program: str, size: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run Python where /dev/shm is this small, in a mount namespace of its own."""
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    line = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh", sys.executable, "-c", program]
    done = subprocess.run([*line, *args], capture_output=True, text=True, timeout=limit_s(30))
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"this machine mounts nothing: {done.stderr.strip()}")
    return done


def test_a_full_shm_is_an_error_and_harms_no_slot() -> None:
    done = small_shm(FULL, "4m")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == lines[1]
    assert lines[2].partition(" (")[0] == lines[0].partition(" (")[0]
    assert lines[0].startswith("/dev/shm has no room for a copy of 67 MB: No space left on device (")
    assert lines[3:] == ["3 []", "['filler']"]


def test_more_than_there_is_memory_is_refused_before_it_is_taken(own: Slots) -> None:
    with pytest.raises(SnapshotMemoryError, match="too little memory is available"):
        list(own.reserving(1 << 50))
    assert own.committed() == []


def test_room_for_one_slot_alone_is_given_back(tmp_path: Path, own: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    put(own, 1, 1)
    before = [os.stat(memory_folder.slot_path(tmp_path, 0, 0)).st_size, 0]
    left = iter((9 * SIZE, 9 * SIZE, 0))
    monkeypatch.setattr(linux, "available_bytes", lambda: next(left))
    with pytest.raises(SnapshotMemoryError, match="too little memory is available"):
        list(own.reserving(2 * SIZE))
    own.close()
    assert [os.stat(memory_folder.slot_path(tmp_path, 0, index)).st_size for index in range(2)] == before
    monkeypatch.undo()
    assert [(slot.step, slot.data[0]) for slot in own.committed()] == [(1, 1)]
    put(own, 2, 2, 2 * SIZE)
    assert [(slot.step, len(slot.data)) for slot in own.committed()] == [(2, 2 * SIZE), (1, SIZE)]


def test_memory_that_is_not_taken_to_its_end_is_given_back(tmp_path: Path, own: Slots) -> None:
    put(own, 1, 1)
    sizes = [os.stat(memory_folder.slot_path(tmp_path, 0, 0)).st_size, 0]
    pieces = own.reserving(9 << 20)
    while next(pieces) < 1:
        pass
    own.close()
    pieces.close()
    assert [os.stat(memory_folder.slot_path(tmp_path, 0, index)).st_size for index in range(2)] == sizes
    assert [(slot.step, slot.data[0]) for slot in own.committed()] == [(1, 1)]
    pieces = own.reserving(9 << 20)
    while next(pieces) < 1:
        pass
    put(own, 2, 2, 9 << 20)  # beside the rest
    assert list(pieces)[-1] == 2
    put(own, 3, 3, 9 << 20)
    assert [(slot.step, len(slot.data)) for slot in own.committed()] == [(3, 9 << 20), (2, 9 << 20)]


def test_memory_that_was_taken_for_another_size_counts(tmp_path: Path, own: Slots) -> None:
    """The size was foreseen, and the plan then says another one."""
    whole = own._files[0].whole_bytes

    def sizes() -> list[int]:
        return [path.stat().st_size for path in sorted(tmp_path.glob("0.[01]"))]

    with contextlib.closing(own.reserving(9 << 20)) as pieces:
        next(pieces)
        next(pieces)
    assert [0 < size < whole(5 << 20) for size in sizes()] == [True]
    mapped = own._files[0]._growing
    assert list(own.reserving(5 << 20))[-1] == 2
    assert sizes() == [whole(5 << 20)] * 2
    assert own._files[0].mapped is mapped, "the pages stay mapped"
    list(own.reserving((5 << 20) + 9999))
    assert own._files[0].mapped is mapped, "a little more was foreseen"
    put(own, 1, 1, (5 << 20) + 9999)
    list(own.reserving(1 << 20))
    assert sorted(sizes()) == [whole(1 << 20), whole((5 << 20) + 9999)], "what holds a state stays"
    assert [(slot.step, slot.data[0]) for slot in own.committed()] == [(1, 1)]
    put(own, 2, 2, 9 << 20)
    put(own, 3, 3, 9 << 20)
    assert [(slot.step, len(slot.data)) for slot in own.committed()] == [(3, 9 << 20), (2, 9 << 20)]


def test_a_child_that_is_forked_while_memory_is_taken_locks_nothing(own: Slots) -> None:
    """A data loader's, beside the first step."""
    pieces = own.reserving(9 << 20)
    next(pieces)
    with forked_child():
        list(pieces)
        put(own, 1, 1, 9 << 20)
        put(own, 2, 2, 9 << 20)
        assert [slot.step for slot in own.committed()] == [2, 1]


def test_a_group_s_limit_counts(tmp_path: Path) -> None:
    for name, text in (
        ("memory.max", "1000"),
        ("memory.current", "900"),
        ("memory.stat", "anon 1\ninactive_file 50\n"),
    ):
        (tmp_path / name).write_text(text + "\n")
    assert group_room_bytes(tmp_path) == 150
    (tmp_path / "memory.max").write_text("max\n")
    assert group_room_bytes(tmp_path) == float("inf")


# --- the shared-memory folder -------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], memory_folder.MemoryFolder]:
    return lambda run_id: memory_folder.MemoryFolder.make(run_id, tmp_path)


def test_a_memory_folder_is_ours_alone_and_its_name_is_plain(made: Callable[[str], memory_folder.MemoryFolder]) -> None:
    own = made("team/run é " + 100 * "x")
    assert own.path.stat().st_mode & 0o777 == 0o700
    assert len(os.fsencode(Path("/dev/shm") / own.path.name / memory_folder.SOCKET)) < 107
    own.remove()
    assert not own.path.exists()


def test_only_what_dead_runs_left_is_cleaned(tmp_path: Path, made: Callable[[str], memory_folder.MemoryFolder]) -> None:
    dead, living, shared = made("dead"), made("living"), made("shared")
    for each in (dead, living, shared):
        own = Slots(each.path, SlotOwner(0))
        list(own.reserving(100))
        own.close()
    second = memory_folder.MemoryFolder.at(shared.path.name, tmp_path)
    shared.close()
    dead.close()
    (tmp_path / "holdfast-other").mkdir()
    assert memory_folder.clean(tmp_path) == [dead.path]
    assert living.path.is_dir()
    assert second.path.is_dir()
    second.close()
    assert memory_folder.clean(tmp_path) == [shared.path]
    living.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["holdfast-other"]


def test_a_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir(mode=0o755)
    with pytest.raises(PermissionError):
        memory_folder.MemoryFolder.at("x", tmp_path)


def test_a_memory_folder_about_to_be_cleaned_is_not_taken(tmp_path: Path) -> None:
    """Its maker makes another one, or waits no longer than the cleaning takes."""
    path = tmp_path / "x"
    path.mkdir(mode=0o700)
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(FileExistsError):
        memory_folder.MemoryFolder.at("x", tmp_path)
    os.close(fd)
    memory_folder.MemoryFolder.at("x", tmp_path).remove()


@pytest.mark.parametrize("held", [1, 2])
def test_a_state_is_held_without_a_look_into_the_files(
    tmp_path: Path, own: Slots, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """In each save with copies, while training waits; whichever slot of an earlier worker it is in."""
    put(own, 1, 1)
    put(own, 2, 2)
    own.close()
    successor = Slots(tmp_path, SlotOwner(0), slots.COUNT_MAX)

    def read(*_: object) -> None:
        raise AssertionError("a slot was read")

    with monkeypatch.context() as guarded:
        guarded.setattr(slots, "read", read)
        successor.hold(request(held).identity)
        for step in (3, 4, 5, 6):
            put(successor, step, step)
        successor.hold(request(held).identity, request(5).identity)
        put(successor, 7, 7)
    assert [slot.step for slot in successor.committed()] == [7, 5, held]
    successor.close()


def test_wrong_states_are_dropped_though_a_copy_is_sent_from_them(own: Slots) -> None:
    for step in (40, 60):
        put(own, step, step)
    own.hold(request(40).identity, request(60).identity)
    own.forget(above_step=20)
    assert [slot.step for slot in own.committed()] == [60, 40], "what is being sent may not be staged into"
    own.forget(above_step=40, locked=True)
    assert [slot.step for slot in own.committed()] == [40]
