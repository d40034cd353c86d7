"""Snapshots that were damaged: every damage is found, named and set aside, and the one before is taken instead."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.protocol.errors import NoValidSnapshotError, SnapshotDamagedError, SnapshotError, SnapshotVersionError
from holdfast.train.snapshots import changes, folder
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.disk import CHUNK_BYTES
from holdfast.train.snapshots.folder import Snapshot
from holdfast.train.snapshots.layout import MANIFEST, Image, TensorEntry, rank_file, record_file
from tests.train.snapshots.saves import content, is_whole, newest, save

FILE, RECORD = rank_file(1), record_file(1)
Damage = Callable[[Path], object]


def changed(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """The file of this name has other bytes."""
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


def other_chunk(data: bytes) -> bytes:
    record = json.loads(data)
    record["chunks"][0] = "0" * 64
    return json.dumps(record).encode()


def swapped(path: Path, *files: Callable[[int], str]) -> None:
    """Those of the two ranks, which have equal sizes."""
    for file in files:
        (path / file(1)).rename(path / "aside")
        (path / file(0)).rename(path / file(1))
        (path / "aside").rename(path / file(0))


def is_folder(path: Path) -> None:
    (path / FILE).unlink()
    (path / FILE).mkdir()


def manifest_of_another(path: Path) -> None:
    shutil.copy(path.parent / "step_000000001.0001" / MANIFEST, path / MANIFEST)


DAMAGES: dict[str, Damage] = {
    "truncated": changed(FILE, lambda data: data[:-1]),
    "longer": changed(FILE, lambda data: data + b"\0"),
    "emptied": changed(FILE, lambda _: b""),
    "page_zeroed": changed(FILE, lambda data: data[: 4096 * 50] + bytes(4096) + data[4096 * 51 :]),
    "whole_zeroed": changed(FILE, lambda data: bytes(len(data))),
    "header_zeroed": changed(FILE, lambda data: bytes(64) + data[64:]),
    "swapped": lambda path: swapped(path, rank_file),
    "swapped_with_records": lambda path: swapped(path, rank_file, record_file),
    "file_of_another_step": changed(FILE, lambda _: content(1, 1)),
    "file_missing": lambda path: (path / FILE).unlink(),
    "file_is_folder": is_folder,
    "record_missing": lambda path: (path / RECORD).unlink(),
    "record_edited": changed(RECORD, other_chunk),
    "record_torn": changed(RECORD, lambda data: data[:100]),
    "manifest_missing": lambda path: (path / MANIFEST).unlink(),
    "manifest_torn": changed(MANIFEST, lambda data: data[:200]),
    "manifest_edited": changed(MANIFEST, lambda data: data.replace(b'"loss": 0.5', b'"loss": 0.1')),
    "manifest_of_another": manifest_of_another,
    "manifest_not_text": changed(MANIFEST, lambda _: b"\xff\xfe"),
    "manifest_nested": changed(MANIFEST, lambda _: b"[" * 200_000),
    "all_removed": lambda path: [each.unlink() for each in path.iterdir()],
}


def read_back(path: Path) -> Snapshot:
    """What a resume does: the newest valid one, read whole; what is damaged is set aside and the next one tried."""
    while True:
        found = folder.survey(path)
        for problem in found.problems:
            assert folder.quarantine(problem.path, str(problem.error)) is not None
        chosen = folder.choose(folder.survey(path))
        assert chosen is not None
        try:
            folder.verify(chosen)
        except SnapshotDamagedError as error:
            folder.quarantine(chosen.path, str(error))
        else:
            return chosen


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_named_and_passed_over(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    bad = save(tmp_path, 2, metadata={"metrics": {"loss": 0.5}})
    assert newest(tmp_path).step == 2
    DAMAGES[damage](bad)
    with pytest.raises(SnapshotDamagedError, match=r"step_000000002\.0001"):
        folder.verify(folder.inspect(bad))
    with pytest.raises(SnapshotDamagedError, match=r"step_000000002\.0001"):
        folder.verify(folder.inspect(bad), lambda: None)
    chosen = read_back(tmp_path)
    assert chosen.step == 1
    assert is_whole(chosen)
    aside = folder.survey(tmp_path).quarantined
    assert [path.name for path in aside] == ["bad.step_000000002.0001"]
    assert "step_000000002.0001 was set aside: " in (aside[0] / folder.WHY).read_text()
    # The step is saved again, is damaged again, and again there is a place for it.
    DAMAGES[damage](save(tmp_path, 2, metadata={"metrics": {"loss": 0.5}}))
    assert read_back(tmp_path).step == 1
    assert len(folder.survey(tmp_path).quarantined) == 2


@pytest.mark.parametrize("damage", sorted({*DAMAGES} - {"manifest_of_another"}))
def test_damage_to_the_only_one_is_no_silent_start_from_zero(tmp_path: Path, damage: str) -> None:
    DAMAGES[damage](save(tmp_path, 2, metadata={"metrics": {"loss": 0.5}}))
    with pytest.raises(NoValidSnapshotError, match=r"step_000000002\.0001"):
        read_back(tmp_path)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """Some hundred bits, in the header, at the chunks' edges and anywhere."""
    path = save(tmp_path, 1, 1)
    file, chance = path / rank_file(0), random.Random(5)
    whole = file.read_bytes()
    bits = [0, 7, 8 * 100, 8 * len(whole) - 1, *(chance.randrange(8 * len(whole)) for _ in range(200))]
    for bit in bits:
        with file.open("r+b") as opened:
            opened.seek(bit // 8)
            opened.write(bytes([whole[bit // 8] ^ (1 << bit % 8)]))
            opened.flush()
            with pytest.raises(SnapshotDamagedError, match="are not what was saved"):
                folder.verify(newest(tmp_path))
            opened.seek(bit // 8)
            opened.write(whole[bit // 8 : bit // 8 + 1])
    folder.verify(newest(tmp_path))


@pytest.mark.parametrize("odd_bytes", [-4, 0, 4, 4096])
def test_reading_back_beside_a_training_finds_it_in_any_chunk(tmp_path: Path, odd_bytes: int) -> None:
    """Whole chunks are read past the page cache, the last one through it."""
    few = len(content(1, 0, 1 << 20)) - (4 << 20)  # what the header and the small tensors take
    path = save(tmp_path, 1, 1, items=(2 * CHUNK_BYTES + odd_bytes - few) // 4)
    file = path / rank_file(0)
    size_bytes = file.stat().st_size
    assert abs(size_bytes - 2 * CHUNK_BYTES - odd_bytes) < 8
    folder.verify(newest(tmp_path), lambda: None)
    for at in (CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES - 9, size_bytes - 1):
        whole = file.read_bytes()
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(SnapshotDamagedError, match="are not what was saved"):
            folder.verify(newest(tmp_path), lambda: None)
        file.write_bytes(whole)
    snapshot = newest(tmp_path)
    os.truncate(file, CHUNK_BYTES + 100)
    with pytest.raises(SnapshotDamagedError, match="it ends after"):
        folder.verify(snapshot, lambda: None)


def test_a_file_system_that_promised_to_read_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the first read; the file is read all the same, or retention would never delete anything there."""
    save(tmp_path, 1, 1, items=3 << 20)
    real, refused = os.preadv, []

    def preadv(file: int, buffers: list[memoryview], begin: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(begin)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, buffers, begin)

    monkeypatch.setattr(os, "preadv", preadv)
    folder.verify(newest(tmp_path), lambda: None)
    assert refused == [0]


def test_the_bytes_of_the_manifest_count(tmp_path: Path) -> None:
    """A changed byte is found, or means the same (white space, the case of an escape)."""
    path = save(tmp_path, 1, 1, {"metrics": {"loss": 0.5}})
    file = path / MANIFEST
    whole, before = file.read_bytes(), newest(tmp_path)
    for position in range(0, len(whole), 3):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        try:
            found = folder.inspect(path)
        except SnapshotError:
            continue
        assert found == before, position


def test_a_newer_version_is_neither_damaged_nor_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["version"] = 2
    (path / MANIFEST).write_text(json.dumps(manifest))
    found = folder.survey(tmp_path)
    assert [problem.damaged for problem in found.problems] == [False]
    with pytest.raises(SnapshotVersionError, match="version 2"):
        folder.choose(found)


def test_no_step_is_quarantined_by_another_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no committed snapshot"):
        folder.quarantine(tmp_path / "attempt.step_000000001.0001", "x")
    assert folder.quarantine(tmp_path / "step_000000001.0001", "it is not even there") is None


# --- files of several chunks: only what is asked for is read, and all that is read is checked -------------------------


TENSORS = 5
ITEMS = 600_000


@pytest.fixture
def saved(tmp_path: Path) -> bytes:
    """One rank, five tensors of 2.4 MB, so that chunks of 4 MiB hold parts of two or three."""
    image = Image.plan([TensorEntry(f"t{number}", "F32", (ITEMS,)) for number in range(TENSORS)])
    data = image.header + b"".join(bytes([number + 1]) * (4 * ITEMS) for number in range(TENSORS))
    request = SaveRequest(str(tmp_path), 1, changes.begin(tmp_path, 1), 0, 1)
    changes.write_rank(request, data)
    changes.commit(request)
    return data


@pytest.mark.parametrize("number", range(TENSORS))
def test_one_tensor_of_many(tmp_path: Path, saved: bytes, number: int) -> None:
    with folder.RankFile(newest(tmp_path), 0) as file:
        span = file.image.spans[f"t{number}"]
        assert file.load([f"t{number}"])[span] == saved[span]
        assert file.load() == saved
        assert bytes(file.load([])) == bytes(len(saved)), "nothing is read that nobody asked for"
        with pytest.raises(KeyError):
            file.load(["other"])


@pytest.mark.parametrize("damaged", range(3))
def test_damage_hits_exactly_the_tensors_in_its_chunk(tmp_path: Path, saved: bytes, damaged: int) -> None:
    snapshot = newest(tmp_path)
    with (snapshot.path / rank_file(0)).open("r+b") as opened:
        opened.seek(damaged * CHUNK_BYTES + 2_000_000)
        opened.write(b"\xff")
    hit = 0
    for number in range(TENSORS):
        with folder.RankFile(snapshot, 0) as file:
            try:
                span = file.image.spans[f"t{number}"]
                touched = span.start < (damaged + 1) * CHUNK_BYTES and span.stop > damaged * CHUNK_BYTES
                assert file.load([f"t{number}"])[span] == saved[span]
            except SnapshotDamagedError:
                hit += 1
                assert damaged == 0 or touched
            else:
                assert not touched
    assert hit == (TENSORS if damaged == 0 else hit) > 0
