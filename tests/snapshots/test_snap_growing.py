"""A slot that is written before its memory is mapped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.protocol.errors import SnapshotMemoryError
from holdfast.snapshots import slots
from holdfast.snapshots.changes import SaveRequest
from holdfast.snapshots.slots import SlotOwner, Slots

SIZE = 1 << 20
LARGE = (9 << 20) + 1


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


def test_bytes_can_be_written_in_any_order_and_are_valid_at_the_end(tmp_path: Path, own: Slots) -> None:
    begins = [*range(0, LARGE, SIZE)]
    with own.writing(3, LARGE) as write:
        for at in reversed(begins):
            assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [2], "not valid from the beginning on"
            write(at, memoryview(bytes([at // SIZE])) if at == begins[-1] else memoryview(bytes([at // SIZE]) * SIZE))
    assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [2], "not valid before it is committed"
    own.commit()
    newest, other = slots.committed_slots(tmp_path, 0)
    assert bytes(newest.data) == b"".join(bytes([number]) * SIZE for number in range(9)) + bytes([9])
    assert (newest.step, other.step) == (3, 2)
    put(own, 4)
    put(own, 5, LARGE)
    assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [5, 4], "it is staged into as any other"


def test_what_was_not_written_to_its_end_leaves_no_valid_slot(tmp_path: Path, own: Slots) -> None:
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("0.[01]"))]

    def interrupted() -> None:
        with own.writing(3, LARGE) as write:
            write(SIZE, memoryview(bytes(SIZE)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [2]
    assert [path.stat().st_size for path in sorted(tmp_path.glob("0.[01]"))] == sizes
    with pytest.raises(RuntimeError, match="without stage"):
        own.commit()
    put(own, 4, LARGE)  # nothing is locked
    assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [4, 2]


def test_where_all_slots_are_in_use_nothing_is_written(tmp_path: Path, own: Slots) -> None:
    lent = [slots.lend(tmp_path, slot) for slot in own.committed()]
    with pytest.raises(SnapshotMemoryError, match="in use"), own.writing(3, SIZE):
        raise AssertionError
    assert [slot.step for slot in own.committed()] == [2, 1]
    for fd in lent:
        slots.release(fd)


def test_pages_of_a_slot_that_is_held_are_mapped_all_the_same(tmp_path: Path) -> None:
    """It was written past the mapping, or comes from an earlier process."""
    own = Slots(tmp_path, SlotOwner(0))
    with own.writing(3, LARGE) as write:
        write(0, memoryview(bytes([3]) * LARGE))
    own.commit(SaveRequest("/runs", 3, 7, 0, 1, {"save": 3}))
    own.hold((3, 7, 3))
    assert not own.has_room
    assert list(own.reserving(LARGE))[-1] == 2
    assert own.has_room
    put(own, 4, LARGE)
    put(own, 5, LARGE)
    assert sorted(slot.step for slot in slots.committed_slots(tmp_path, 0)) == [3, 5], "and it stays held"
    own.close()
