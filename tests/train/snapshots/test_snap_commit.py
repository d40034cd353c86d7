"""The commit protocol: whole or not at all, however the writer ends."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.protocol.errors import (
    NoValidSnapshotError,
    SnapshotDamagedError,
    SnapshotIncompleteError,
    SnapshotWriteError,
)
from holdfast.train.snapshots import changes, disk, folder
from holdfast.train.snapshots.changes import PHASES, SaveRequest
from holdfast.train.snapshots.disk import CHUNK_BYTES, ChunkDigests, root_digest
from holdfast.train.snapshots.layout import (
    ALIGNMENT_BYTES,
    ITEM_BYTES,
    MANIFEST,
    Image,
    Key,
    TensorEntry,
    parse_name,
    rank_file,
    record_file,
)
from tests.support.limits import limit_s
from tests.train.snapshots.saves import content, is_whole, newest, save

NAN = float("nan")
SAVE = """
import os, signal, sys
from tests.train.snapshots.saves import save
path, first, last, phase = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
def at(reached):
    print(reached, flush=True)
    if reached == phase:
        os.kill(os.getpid(), signal.SIGKILL)
for step in range(first, last + 1):
    save(path, step, at=at)
"""


def saver(path: Path, first: int, last: int, phase: str = "") -> subprocess.Popen[str]:
    """A process that saves these steps, and kills itself when it reaches the phase."""
    command = [sys.executable, "-c", SAVE, str(path), str(first), str(last), phase]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_snapshot_is_read_as_it_was_saved(tmp_path: Path) -> None:
    path = save(tmp_path, 7, 3, {"metrics": {"loss": 0.5}, "epoch": 2})
    found = newest(tmp_path)
    assert found.path == path == tmp_path / "step_000000007.0001"
    assert (found.step, found.manifest.world, found.manifest.metrics) == (7, 3, {"loss": 0.5})
    assert is_whole(found)
    assert sorted(os.listdir(path)) == sorted(
        [
            MANIFEST,
            *(rank_file(rank) for rank in range(3)),
            *(record_file(rank) for rank in range(3)),
        ]
    )
    folder.verify(found)


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = save(tmp_path, 1, 1)
    with safetensors.safe_open(str(path / rank_file(0)), "np") as file:
        assert sorted(file.keys()) == ["bias", "step", "weight"]


@pytest.mark.parametrize(
    "size_bytes", [0, 1, 4095, 4096, 4097, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, (16 << 20) + 5000]
)
@pytest.mark.parametrize("shift", [0, 1])
def test_files_of_all_sizes_from_any_address(tmp_path: Path, size_bytes: int, shift: int) -> None:
    """shift=1 is an address that O_DIRECT does not take."""
    memory = folder._memory(size_bytes + shift)
    memory[shift:] = random.Random(size_bytes).randbytes(size_bytes)
    begun: list[int] = []
    disk.write_all(tmp_path / "file", memory[shift:], lambda: begun.append((tmp_path / "file").stat().st_size))
    assert begun == [min(size_bytes, disk.FIRST_BYTES)]
    assert (tmp_path / "file").read_bytes() == bytes(memory[shift:])


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a memory file system at /dev/shm")
def test_a_file_system_in_memory() -> None:
    path = Path(f"/dev/shm/holdfast-test-{os.getpid()}")
    try:
        disk.write_all(path, memoryview(b"x" * 10_000), lambda: None)
        assert path.read_bytes() == b"x" * 10_000
    finally:
        path.unlink()


def digest(data: bytes | bytearray) -> str:
    with ChunkDigests(memoryview(data)) as digests:
        digests.start()
        return root_digest(len(data), digests.results())


def test_the_digest_sees_every_bit_and_the_length() -> None:
    data = bytearray(random.Random(3).randbytes(CHUNK_BYTES + 100))
    seen = {digest(data), digest(data[:-1]), digest(bytes(len(data))), digest(b"")}
    for bit in (0, 8 * CHUNK_BYTES - 1, 8 * CHUNK_BYTES, 8 * len(data) - 1):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(digest(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8


def test_attempts_are_numbered_and_never_shared(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(lambda _: changes.begin(tmp_path, 5), range(8))) == list(range(1, 9))


def test_the_order_is_step_then_attempt_never_time(tmp_path: Path) -> None:
    for step in (30, 10, 20, 20):
        save(tmp_path, step, 1)
    os.utime(tmp_path / "step_000000010.0001")
    assert [snapshot.key for snapshot in folder.survey(tmp_path).committed] == [(10, 1), (20, 1), (20, 2), (30, 1)]


def test_a_rename_replaces_nothing(tmp_path: Path) -> None:
    """Two savers that believe in the same attempt: the second fails, the first one's snapshot is untouched."""
    committed = save(tmp_path, 5, 1)
    request = SaveRequest(str(tmp_path), 5, 1, 0, 1)
    request.attempt_path.mkdir()
    changes.write_rank(request, content(99, 0))
    with pytest.raises(SnapshotWriteError, match=r"not empty|exists"):
        changes.commit(request)
    assert newest(tmp_path).path == committed
    assert is_whole(newest(tmp_path))
    assert not folder.survey(tmp_path).debris


def test_ranks_may_come_in_any_order_and_late(tmp_path: Path) -> None:
    number = changes.begin(tmp_path, 4)
    requests = [SaveRequest(str(tmp_path), 4, number, rank, 3) for rank in range(3)]
    done: list[Path] = []
    waiting = threading.Thread(target=lambda: done.append(changes.commit(requests[0], patience=limit_s(30))))
    waiting.start()
    for request in reversed(requests):
        assert not done
        changes.write_rank(request, content(4, request.rank))
    waiting.join()
    assert done == [requests[0].committed_path]
    assert is_whole(newest(tmp_path))


def test_a_rank_that_does_not_come_is_named_and_nothing_is_committed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    number = changes.begin(tmp_path, 2)
    changes.write_rank(SaveRequest(str(tmp_path), 2, number, 0, 3), content(2, 0))
    with pytest.raises(SnapshotIncompleteError, match=r"step 2 was not saved.*rank 1, 2"):
        changes.commit(SaveRequest(str(tmp_path), 2, number, 0, 3), patience=0.05)
    found = folder.survey(tmp_path)
    assert [snapshot.step for snapshot in found.committed] == [1]
    assert not found.debris
    with pytest.raises(SnapshotIncompleteError, match="gave up"):
        changes.write_rank(SaveRequest(str(tmp_path), 2, number, 1, 3), content(2, 1))


def test_a_rank_that_cannot_write_is_not_waited_for(tmp_path: Path) -> None:
    number = changes.begin(tmp_path, 2)
    requests = [SaveRequest(str(tmp_path), 2, number, rank, 2) for rank in range(2)]
    changes.write_rank(requests[0], content(2, 0))
    (requests[1].attempt_path / rank_file(1)).mkdir()
    with pytest.raises(SnapshotWriteError, match="File exists"):
        changes.write_rank(requests[1], content(2, 1))
    with pytest.raises(SnapshotIncompleteError, match=r"rank 1: cannot write"):
        changes.commit(requests[0], patience=3600)


def test_a_part_whose_record_was_read_is_never_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot sync the folder, and rank 0 is at its commit already."""
    number = changes.begin(tmp_path, 2)
    requests = [SaveRequest(str(tmp_path), 2, number, rank, 2) for rank in range(2)]
    changes.write_rank(requests[0], content(2, 0))

    def fails(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync_folder", fails)
        changes.write_rank(requests[1], content(2, 1))
    changes.commit(requests[0], patience=limit_s(30))
    assert is_whole(newest(tmp_path))


def test_a_file_that_is_renamed_between_two_looks_is_a_change(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    quiet = changes._Quiet(tmp_path)
    quiet.lasts_s(["a"])
    quiet._since_s -= 1000
    assert quiet.lasts_s(["a"]) >= 1000
    assert quiet.lasts_s(["a", "b.part"]) < 1000, "it was listed, and has another name by now"


def test_a_file_that_shrank_before_the_commit_is_not_committed(tmp_path: Path) -> None:
    number = changes.begin(tmp_path, 2)
    request = SaveRequest(str(tmp_path), 2, number, 0, 1)
    changes.write_rank(request, content(2, 0))
    os.truncate(request.attempt_path / rank_file(0), 1000)
    with pytest.raises(SnapshotDamagedError, match="rank 0"):
        changes.commit(request)
    assert not folder.survey(tmp_path).committed


@pytest.mark.parametrize(
    ("searched", "value", "finite"),
    [((0, 1), 0, True), ((0,), 0, None), ((0,), NAN, False), ((1,), NAN, None), ((), NAN, None)],
)
def test_a_snapshot_is_finite_if_the_file_of_each_rank_was_searched(
    tmp_path: Path, searched: tuple[int, ...], value: float, finite: bool | None
) -> None:
    """The value is in the file of rank 0. The header of a slot may have no room for the parts of one rank."""
    image = Image.plan([TensorEntry("weight", "F32", (8,))])
    part, attempt = (len(image.header), image.size_bytes, "float32"), changes.begin(tmp_path, 1)
    requests = [
        SaveRequest(str(tmp_path), 1, attempt, each, 2, trained=[part] * (each in searched) or None) for each in (0, 1)
    ]
    for request in requests:
        values = [0.0] * 7 + [0.0 if request.rank else value]
        changes.write_rank(request, image.header + struct.pack("<8f", *values))
    changes.commit(requests[0])
    assert newest(tmp_path).manifest.finite is finite


def test_metadata_is_json_and_a_loss_may_be_nan(tmp_path: Path) -> None:
    save(tmp_path, 1, 1, {"metrics": {"loss": float("nan"), "other": 1}})
    assert newest(tmp_path).manifest.metrics == {"other": 1}
    with pytest.raises(ValueError, match="JSON"):
        save(tmp_path, 2, 1, {"model": object()})
    assert [snapshot.step for snapshot in folder.survey(tmp_path).committed] == [1]
    assert not folder.survey(tmp_path).debris


@pytest.mark.parametrize("phase", PHASES)
def test_killed_at_a_phase(tmp_path: Path, phase: str) -> None:
    """Before the rename the older snapshot is the newest, after it the new one; either is bit-exact."""
    save(tmp_path, 1)
    with saver(tmp_path, 2, 2, phase) as process:
        assert process.wait(limit_s(60)) == -signal.SIGKILL
    found = folder.survey(tmp_path)
    committed = phase in ("renamed", "durable")
    assert newest(tmp_path).step == (2 if committed else 1)
    assert is_whole(newest(tmp_path))
    assert not found.problems
    assert len(found.debris) == (0 if committed else 1)
    # The next save of the same step is another attempt, and the debris is nobody's.
    assert save(tmp_path, 2).name == "step_000000002.0002"
    folder.clear_debris(folder.survey(tmp_path))
    assert not folder.survey(tmp_path).debris
    assert is_whole(newest(tmp_path))


def test_killed_at_any_time(tmp_path: Path) -> None:
    """A saver that saves again and again, killed at random: what is newest is always whole, and never goes back."""
    chance, before = random.Random(4), 0
    for life in itertools.count():
        if life >= 8 and before:
            break
        assert life < 80, "none of them came to commit anything"
        with saver(tmp_path, before + 1, before + 1000) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            time.sleep(chance.uniform(0, 0.15 * (1 + life // 8)))  # longer on a machine where none commits in that time
            process.kill()
        found = folder.survey(tmp_path)
        assert not found.problems
        if found.committed:
            assert newest(tmp_path).step >= before
            before = newest(tmp_path).step
            assert is_whole(newest(tmp_path))


def test_debris_alone_is_no_silent_start_from_zero(tmp_path: Path) -> None:
    assert folder.choose(folder.survey(tmp_path / "none")) is None
    assert folder.choose(folder.survey(tmp_path)) is None
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "step_12.1").mkdir()
    assert folder.choose(folder.survey(tmp_path)) is None, "somebody else's folders are no debris"
    changes.begin(tmp_path, 3)
    with pytest.raises(NoValidSnapshotError, match=r"attempt\.step_000000003\.0001"):
        folder.choose(folder.survey(tmp_path))
    assert folder.choose(folder.survey(tmp_path), fresh_ok=True) is None
    save(tmp_path, 1, 1)
    chosen = folder.choose(folder.survey(tmp_path))
    assert chosen is not None
    assert chosen.step == 1


def test_names() -> None:
    for name in ("step_000000001.0001", "step_1234567890.12345", "attempt.step_000000001.0001"):
        found = parse_name(name)
        assert found is not None
        assert found.key.named(found.kind) == name
    for name in ("bad.step_000000001.0001.2", "gone.step_000000001.0001.17"):
        assert parse_name(name) is not None
    for name in (
        "step_1.1",
        "step_0000000001.0001",
        "step_000000001.0001.2",
        "x.step_000000001.0001",
        "step_000000001",
    ):
        assert parse_name(name) is None, name
    assert Key(10**9, 1).name > "", "large steps have names too"


def test_a_late_writer_leaves_nothing_in_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it wrote, the save was given up and begun again, under the same number."""
    number = changes.begin(tmp_path, 1)
    late = SaveRequest(str(tmp_path), 1, number, 1, 2)
    write = disk._write

    def slow(file: int, data: memoryview, begin: int = 0) -> None:
        write(file, data, begin)
        if not begin:
            return
        changes.abandon(late)
        assert changes.begin(tmp_path, 1) == number
        (late.attempt_path / "rank_00001.safetensors").write_bytes(bytes(len(data)))

    monkeypatch.setattr(disk, "_write", slow)
    with pytest.raises(SnapshotIncompleteError, match="rank 0 gave up this save"):
        changes.write_rank(late, content(1, 1))
    assert [path.name for path in late.attempt_path.iterdir()] == ["rank_00001.safetensors"]


# --- the bytes of a rank's file: safetensors itself reads them, and what is not safetensors is refused ----------------


def filled(image: Image) -> bytes:
    return image.header + bytes(image.size_bytes - len(image.header))


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_safetensors_reads_each_type(dtype: str) -> None:
    safetensors = pytest.importorskip("safetensors")
    entries = [TensorEntry("a", dtype, (3, 5)), TensorEntry("b/ö", dtype, ()), TensorEntry("none", dtype, (0, 4))]
    image = Image.plan(entries, {"made": "here"})
    read = {
        name: (value["dtype"], tuple(value["shape"]), len(value["data"]))
        for name, value in safetensors.deserialize(filled(image))
    }
    assert read == {entry.name: (entry.dtype, entry.shape, entry.nbytes) for entry in entries}


def test_what_was_planned_is_read() -> None:
    image = Image.plan([TensorEntry("a", "F32", (1000,)), TensorEntry("b", "U8", (7,))], {"x": "y"})
    again = Image.read(filled(image), image.size_bytes)
    assert again == image
    assert again.spans == image.spans
    assert Image.read(image.header, image.size_bytes) == image


def test_tensors_are_aligned_and_leave_no_hole() -> None:
    chance = random.Random(1)
    for _ in range(200):
        entries = [
            TensorEntry(
                str(number), chance.choice(list(ITEM_BYTES)), tuple(chance.choices(range(9), k=chance.randrange(4)))
            )
            for number in range(chance.randrange(20))
        ]
        image = Image.plan(entries)
        assert len(image.header) % ALIGNMENT_BYTES == 0
        end = len(image.header)
        for entry in image.entries:
            span = image.spans[entry.name]
            assert span == slice(end, end + entry.nbytes)
            assert span.start % ITEM_BYTES[entry.dtype] == 0
            assert span.start % ALIGNMENT_BYTES == 0 or entry.nbytes % ALIGNMENT_BYTES
            end = span.stop
        assert end == image.size_bytes
        assert sorted(entry.name for entry in image.entries) == sorted(entry.name for entry in entries)


@pytest.mark.parametrize(
    "entries",
    [
        [TensorEntry("a", "F32", (1,)), TensorEntry("a", "F32", (2,))],
        [TensorEntry("__metadata__", "F32", (1,))],
        [TensorEntry("a", "complex", (1,))],
        [TensorEntry("a", "F32", (-1, 2))],
        [TensorEntry("a", "F64", (2**40, 2**40))],
    ],
)
def test_what_the_format_cannot_hold_is_refused(entries: list[TensorEntry]) -> None:
    with pytest.raises(ValueError, match="tensor"):
        Image.plan(entries)


def test_a_changed_header_is_refused_or_means_the_same_to_safetensors() -> None:
    """Ten thousand headers with a few bytes changed: whatever we accept, safetensors accepts and reads alike."""
    safetensors = pytest.importorskip("safetensors")
    chance = random.Random(2)
    image = Image.plan(
        [TensorEntry("a", "F32", (4,)), TensorEntry("b", "I64", (2, 2)), TensorEntry("c", "U8", (3,))], {"k": "v"}
    )
    whole, accepted = filled(image), 0
    for _ in range(10_000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(image.header))] = chance.choice(b'0123456789abc"[]{},: \x00\xff')
        try:
            read = Image.read(data, len(data))
        except SnapshotDamagedError:
            continue
        accepted += 1
        theirs = {name: (value["dtype"], tuple(value["shape"])) for name, value in safetensors.deserialize(bytes(data))}
        assert theirs == {entry.name: (entry.dtype, entry.shape) for entry in read.entries}
    assert accepted > 10, "the test must reach the comparison"


def header(described: object) -> bytes:
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        (2**60).to_bytes(8, "little"),
        header(b"[]"),
        header(b" {}"),
        header(b"{" * 100_000),
        header(b'{"a":1,"a":1}'),
        header({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}),
        header({"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}) + b"123",
        header({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}) + b"1",
        header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1.0]}}) + b"1",
        header({"a": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}}) + b"1",
        header({"a": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}}) + b"1",
        header({"__metadata__": {"a": 1}}),
        header({}) + b"1",
    ],
)
def test_damage_is_told_as_damage(data: bytes) -> None:
    with pytest.raises(SnapshotDamagedError):
        Image.read(data, len(data))


def test_a_rank_whose_part_was_committed_before_it_had_synced_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 commits as soon as it reads the last record: that renames the folder under the rank that wrote it."""
    attempt = changes.begin(tmp_path, 5)
    requests = [SaveRequest(str(tmp_path), 5, attempt, rank=rank, world=2) for rank in (0, 1)]
    changes.write_rank(requests[0], content(5, 0))
    sync = disk.sync_folder

    def late(folder: Path) -> None:
        monkeypatch.setattr(disk, "sync_folder", sync)
        changes.commit(requests[0])
        sync(folder)

    monkeypatch.setattr(disk, "sync_folder", late)
    assert changes.write_rank(requests[1], content(5, 1)).rank == 1
    assert requests[0].committed_path.exists()
