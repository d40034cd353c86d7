"""Memory of a slot that is filled while the rest of it is being taken."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.protocol.errors import SnapshotMemoryError
from holdfast.snapshots import mapping, slots
from holdfast.snapshots.slots import SlotOwner, Slots

SIZE = 1 << 20


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Slots]:
    """The slots of local rank 0, with two steps."""
    own = Slots(tmp_path, SlotOwner(0))
    for step in (1, 2):
        put(own, step)
    yield own
    own.close()


def put(own: Slots, step: int, size: int = SIZE) -> None:
    memory = own.stage(step, size)
    assert memory is not None
    memory[:] = bytes([step]) * size
    own.commit()


def test_memory_can_be_filled_while_the_rest_of_it_is_taken(tmp_path: Path, own: Slots) -> None:
    size = 9 << 20
    parts = own.staging(3, size)
    first = next(parts)
    assert 0 < len(first) < size
    assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [2], "not valid from the first part on"
    first[:] = bytes([3]) * len(first)
    *_, whole = parts
    assert bytes(whole[: len(first)]) == bytes(first), "the parts are the beginning of the whole"
    whole[:] = bytes([3]) * size
    assert len(whole) == size
    own.commit()
    assert [(slot.step, len(slot.data)) for slot in slots.committed_slots(tmp_path, 0)] == [(3, size), (2, SIZE)]


@pytest.mark.parametrize("end", ["stopped", "no memory"])
def test_memory_that_was_not_taken_whole_leaves_no_valid_slot(
    tmp_path: Path, own: Slots, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    parts = own.staging(3, 9 << 20)
    next(parts)
    with monkeypatch.context() as broken:
        if end == "stopped":
            parts.close()
        else:
            broken.setattr(os, "posix_fallocate", full)
            broken.setattr(mapping, "_write_zeros", full)
            with pytest.raises(SnapshotMemoryError, match="no room for a copy of 9 MB"):
                list(parts)
    assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [2]
    put(own, 4, 9 << 20)  # nothing is locked
    assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [4, 2]
