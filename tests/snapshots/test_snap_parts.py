"""Files of several chunks: only what is asked for is read, and all that is read is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.errors import SnapshotDamagedError
from holdfast.snapshots import attempt, folder
from holdfast.snapshots.attempt import SaveRequest
from holdfast.snapshots.disk import CHUNK_BYTES
from holdfast.snapshots.image import Image, TensorEntry
from holdfast.snapshots.manifest import rank_file
from tests.snapshots.saves import newest

TENSORS = 5
ITEMS = 600_000


@pytest.fixture
def saved(tmp_path: Path) -> bytes:
    """One rank, five tensors of 2.4 MB, so that chunks of 4 MiB hold parts of two or three."""
    image = Image.plan([TensorEntry(f"t{number}", "F32", (ITEMS,)) for number in range(TENSORS)])
    data = image.header + b"".join(bytes([number + 1]) * (4 * ITEMS) for number in range(TENSORS))
    request = SaveRequest(str(tmp_path), 1, attempt.begin(tmp_path, 1), 0, 1)
    attempt.write_rank(request, data)
    attempt.commit(request)
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
