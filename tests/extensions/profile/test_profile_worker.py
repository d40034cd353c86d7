"""A worker's side of a profile, with a torch that only notes what it is asked: CUDA, orders that are withdrawn, signals."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.extensions.profile import worker as profile
from holdfast.protocol import board_layout
from tests.support.limits import until


class Torch(types.ModuleType):
    """As much of torch as a profile uses, with a GPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.did: list[str] = []
        self.recording = False
        self.key, self.count, self.self_device_time_total, self.device_time_total = "aten::mm", 3, 2e6, 5e6
        self._C = types.SimpleNamespace(_cuda_isHistoryEnabled=lambda: self.recording)
        memory = types.SimpleNamespace(_record_memory_history=self.record, _dump_snapshot=self.write)
        self.cuda = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, memory=memory)
        self.profiler = types.SimpleNamespace(profile=lambda: self)

    def record(self, enabled: str | None = "all", max_entries: int = 0) -> None:
        self.did.append(f"record {enabled} {max_entries}")

    def write(self, path: str) -> None:
        Path(path).write_text("{}")

    def start(self) -> None:
        self.did.append("start")

    def stop(self) -> None:
        self.did.append("stop")

    def export_chrome_trace(self, path: str) -> None:
        self.write(path)

    def key_averages(self) -> Any:
        return Averages([self])


class Averages(list[Any]):
    def table(self, sort_by: str, **_: Any) -> str:
        return f"by {sort_by}"


class Bench:
    """The agent's end of an order."""

    def __init__(self, folder: Path) -> None:
        profile.layout = board_layout  # type: ignore[attr-defined] # as the bootstrap does
        self.profiler = profile.Profiler(f"/proc/{os.getpid()}/fd")
        self.folder = folder
        self.file = os.memfd_create("order")
        self.number = 0

    def order(self, **told: Any) -> int:
        self.number += 1
        os.truncate(self.file, 0)
        line = {"folder": str(self.folder), "name": "rank3", "steps": 0, "for_s": 0.0, **told}
        os.pwrite(self.file, json.dumps(line).encode() + b"\n", 0)
        return self.number << 32 | self.file

    @property
    def said(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in os.pread(self.file, 1 << 20, 0).splitlines()[1:]]

    def last(self) -> dict[str, Any]:
        until(lambda: self.said and self.said[-1]["is"] in ("done", "failed"), lambda: f"an end; {self.said}")
        return self.said[-1]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    os.close(made.file)


def test_a_rank_with_a_gpu_has_its_times_and_its_memory(bench: Bench, torch: Torch) -> None:
    order = bench.order(steps=2)
    assert bench.profiler.follow(order, stepped=True)
    assert bench.profiler.follow(order, stepped=True)
    assert not bench.profiler.follow(order, stepped=True)
    last = bench.last()
    assert last["operations"] == [["aten::mm", 3, 2.0, 5.0]]
    assert last["files"] == ["rank3.trace.json", "rank3.operations.txt", "rank3.memory.pickle"]
    assert (bench.folder / "rank3.operations.txt").read_text() == "by self_device_time_total"
    until(lambda: torch.did[-1] == "record None 0", lambda: str(torch.did))
    assert torch.did == ["record all 100000", "start", "stop", "record None 0"]
    assert not bench.profiler.follow(order, stepped=True), "the same order again"


def test_what_the_program_records_itself_is_left_to_it(bench: Bench, torch: Torch) -> None:
    torch.recording = True
    order = bench.order(for_s=0.0)
    bench.profiler.follow(order, stepped=False)
    bench.profiler.follow(order, stepped=False)
    assert bench.last()["files"] == ["rank3.trace.json", "rank3.operations.txt"]
    assert torch.did == ["start", "stop"]


def test_an_order_that_is_withdrawn_or_replaced_leaves_no_profiler_on(bench: Bench, torch: Torch) -> None:
    torch.recording = True
    assert bench.profiler.follow(bench.order(steps=5), stepped=True)
    assert not bench.profiler.follow(0, stepped=True)
    assert torch.did == ["start", "stop"]
    assert bench.profiler.follow(bench.order(steps=5), stepped=True)
    assert bench.profiler.follow(bench.order(steps=5), stepped=True)
    assert torch.did == ["start", "stop"] * 2 + ["start"]
    bench.profiler.follow(0, stepped=True)
    assert list(bench.folder.iterdir()) == []


def test_a_torch_that_cannot_ends_no_training(bench: Bench, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy() -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr(torch, "start", busy)
    assert not bench.profiler.follow(bench.order(steps=5), stepped=True)
    assert bench.last()["why"] == "RuntimeError: Profiler is already enabled on this thread"


def test_a_signal_inside_our_own_code_does_nothing(bench: Bench, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    order = bench.order(steps=1)

    def start() -> None:
        torch.did.append("start")
        bench.profiler.follow(order, stepped=False)

    monkeypatch.setattr(torch, "start", start)
    assert bench.profiler.follow(order, stepped=True)
    assert torch.did.count("start") == 1
    bench.profiler.follow(0, stepped=False)
