"""What a worker answers about its collectives, with recorders as torch's backends have them."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.extensions.hangs.worker import Recorder


def entry(number: int, operation: str = "all_reduce", *, retired: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "process_group": ["0", "default_pg"],
        "pg_id": 0,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": f"gloo:{operation}",
        "input_sizes": [[4096]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": retired,
        "time_created_ns": number,
        **more,
    }


class Torch:
    """torch._C._distributed_c10d and torch.distributed.distributed_c10d, as far as they are used."""

    FlightRecorderHook = object

    def __init__(self, backends: str, entries: dict[str, list[dict[str, Any]]]) -> None:
        self._world = SimpleNamespace(pg_backend_config={1: backends}, pg_names={}, pg_group_ranks={})
        self.entries = entries
        self.dumps = 0

    def _dump_fr_trace_json(self, collectives: bool, _: bool, backend: str) -> bytes:
        own = self.entries.get(backend, [])
        status = {str(each["pg_id"]): {"last_enqueued_collective": str(each["collective_seq_id"])} for each in own}
        self.dumps += collectives
        return json.dumps({"pg_status": status, **({"entries": own} if collectives and own else {})}).encode()


class TorchWithNccl(Torch):
    """With the older NCCL backend, which has a recorder of its own."""

    def _dump_nccl_trace_json(self, collectives: bool, _: bool) -> bytes:
        return self._dump_fr_trace_json(collectives, False, "own recorder")


@pytest.fixture
def recorder_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(torch: Torch) -> Recorder:
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", torch)
        return Recorder(torch)

    return made


def test_the_oldest_collective_that_is_not_done_and_the_newest_that_is(recorder_of: Any) -> None:
    ended = [entry(number, retired=True) for number in range(1, 812)]
    torch = Torch("cpu:gloo,cuda:gloo", {"gloo": [*ended, entry(812), entry(813, "broadcast", input_sizes=[[1]])]})
    assert recorder_of(torch).collectives() == [
        ["default_pg", 812, "all_reduce", "[4096] float32", False, False, []],
        ["default_pg", 811, "all_reduce", "[4096] float32", True, False, []],
    ]


def test_all_are_written_out_again_only_if_the_counts_have_changed(recorder_of: Any) -> None:
    torch = Torch("cpu:gloo", {"gloo": [entry(1)]})
    recorder = recorder_of(torch)
    recorder.collectives()
    recorder.collectives()
    assert torch.dumps == 1
    torch.entries["gloo"] = [entry(1, retired=True), entry(2)]
    assert [each[1] for each in recorder.collectives()] == [2, 1]


def test_on_a_gpu_the_state_counts_because_an_entry_may_be_retired_by_its_time_out(recorder_of: Any) -> None:
    own = [entry(1, state="completed", retired=True), entry(2, state="started", retired=True)]
    for torch in (Torch("cuda:nccl", {"nccl2": own}), TorchWithNccl("cuda:nccl", {"own recorder": own})):
        assert [(each[1], each[4]) for each in recorder_of(torch).collectives()] == [(2, False), (1, True)]


def test_a_group_with_the_name_of_one_that_was_destroyed_is_another_one(recorder_of: Any) -> None:
    torch = Torch("cpu:gloo", {"gloo": [entry(7), entry(8, pg_id=1, collective_seq_id=1, retired=True)]})
    assert [each[1:5] for each in recorder_of(torch).collectives()] == [[1, "all_reduce", "[4096] float32", True]]


def test_what_an_earlier_default_group_has_not_done_is_left_out(recorder_of: Any) -> None:
    recorder = recorder_of(Torch("cpu:gloo", {"gloo": [entry(7)]}))
    recorder.begin_group()
    assert recorder.collectives() == []


def test_groups_are_told_apart_and_the_newest_comes_first(recorder_of: Any) -> None:
    pair = {"process_group": ["3", "pair"], "pg_id": 1}
    torch = Torch("cpu:gloo", {"gloo": [entry(1), entry(2, **pair), entry(3, "barrier", input_sizes=[], **pair)]})
    assert [each[:4] for each in recorder_of(torch).collectives()] == [
        ["3 pair", 2, "all_reduce", "[4096] float32"],
        ["default_pg", 1, "all_reduce", "[4096] float32"],
    ]


@pytest.mark.parametrize(
    ("sizes", "types", "words"),
    [
        ([[2, 3]], ["BFloat16"], "[2, 3] bfloat16"),
        ([[]], ["Long"], "[] int64"),
        ([], [], ""),
        ([[1]] * 5, ["Half"] * 5, "[1] float16, [1] float16, [1] float16 and 2 more"),
    ],
)
def test_tensors_in_words(recorder_of: Any, sizes: list[list[int]], types: list[str], words: str) -> None:
    torch = Torch("cpu:gloo", {"gloo": [entry(1, input_sizes=sizes, input_dtypes=types)]})
    assert recorder_of(torch).collectives()[0][3] == words


def test_sends_have_numbers_of_their_own(recorder_of: Any) -> None:
    sent = entry(4, "send 0->1", is_p2p=True, p2p_seq_id=9)
    assert recorder_of(Torch("cpu:gloo", {"gloo": [sent]})).collectives() == [
        ["default_pg", 9, "send 0->1", "[4096] float32", False, True, []]
    ]


@pytest.mark.parametrize(
    ("ranks", "spans"),
    [
        ([0, 1], [[0, 1, 1]]),
        ([5], [[5, 5, 1]]),
        ([0, 8, 16, 24], [[0, 24, 8]]),
        ([0, 1, 4, 5, 8, 9], [[0, 1, 1], [4, 5, 1], [8, 9, 1]]),
        ([number * number for number in range(3, 30)], []),
        (range(64), []),
    ],
)
def test_the_ranks_of_a_smaller_group_are_told_as_spans(
    recorder_of: Any, ranks: list[int], spans: list[list[int]]
) -> None:
    torch = Torch("cpu:gloo", {"gloo": [entry(1, process_group=["3", "pair"])]})
    torch._world.pg_names = {"all": "0", "some": "3"}
    torch._world.pg_group_ranks = {"all": dict.fromkeys(range(64), 0), "some": dict.fromkeys(ranks, 0)}
    assert recorder_of(torch).collectives()[0][6] == spans


def test_the_newest_collectives_of_a_rank_that_raised_come_oldest_first_and_the_newest_group_first(
    recorder_of: Any,
) -> None:
    pair = {"process_group": ["3", "pair"], "pg_id": 1}
    own = [entry(number, retired=number < 20) for number in range(1, 21)]
    torch = Torch("cpu:gloo", {"gloo": [*own, entry(2, time_created_ns=99, **pair)]})
    found = recorder_of(torch).newest()
    assert [each[:2] for each in found] == [["3 pair", 2], *(["default_pg", number] for number in range(13, 21))]


def test_collectives_of_groups_that_the_program_has_destroyed_are_found(recorder_of: Any) -> None:
    torch = Torch("cpu:gloo", {"gloo": [entry(7, time_created_ns=2**63)]})
    recorder = recorder_of(torch)
    recorder.begin_group()
    torch._world.pg_backend_config.clear()
    assert [each[1] for each in recorder.newest()] == [7]


def test_a_torch_that_does_not_record_every_backend_has_no_newest_collectives(recorder_of: Any) -> None:
    assert recorder_of(object()).newest() == []
