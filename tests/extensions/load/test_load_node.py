"""The load of a node, read in a thread now and then while workers run."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.extensions.load.messages import SHOWN_MAX, NodeLoad
from holdfast.extensions.load.node import EVERY, FIRST, Machine, OnNode
from holdfast.protocol.messages import Start
from holdfast.runtime.node_extension import WorkersGone, WorkersStarted
from tests.support.limits import limit_s, settled

LOAD = NodeLoad(64, 37, 1, 2, 3, 4, 5, 6)
INTERVAL_S = 0.01
PLACE: Any = None
START = Start(1, "localhost", 1, progress_interval_s=INTERVAL_S)


class MadeUpMachine(Machine):
    """Answers when it may."""

    def __init__(self, may: threading.Event) -> None:
        self.may, self.asked = may, 0

    def load(self, _folder: Path | None) -> NodeLoad:
        self.asked += 1
        self.may.wait(limit_s(30))
        return LOAD


class Reading:
    """The half on a node whose folder does not exist, and what it has sent."""

    def __init__(self, machine: MadeUpMachine, group_rank: int = 0) -> None:
        self.sent: list[Any] = []
        node: Any = SimpleNamespace(folder=None, place=SimpleNamespace(group_rank=group_rank))
        self.half = OnNode(node, self.sent.append, lambda: machine)


async def test_it_is_sent_again_and_again_until_the_workers_are_gone() -> None:
    machine = MadeUpMachine(threading.Event())
    machine.may.set()
    reading = Reading(machine)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    reading.half.happened(WorkersStarted(PLACE, START))
    await settled(lambda: len(reading.sent) >= 2)
    assert loop.time() - began_s >= (FIRST + EVERY) * INTERVAL_S
    assert [msgspec.structs.replace(load, lag_ms=0) for load in reading.sent[:2]] == [LOAD, LOAD]
    reading.half.happened(WorkersGone())
    await settled(lambda: not any(each.name == "holdfast-load" for each in threading.enumerate()))
    asked = machine.asked
    await asyncio.sleep(2 * EVERY * INTERVAL_S)
    assert machine.asked == asked


async def test_a_driver_that_hangs_costs_one_thread_and_the_figures_alone() -> None:
    machine = MadeUpMachine(threading.Event())
    reading = Reading(machine)
    reading.half.happened(WorkersStarted(PLACE, START))
    await settled(lambda: machine.asked == 1)
    await asyncio.sleep(2 * EVERY * INTERVAL_S)
    assert (machine.asked, reading.sent) == (1, [])
    machine.may.set()
    await settled(lambda: bool(reading.sent))
    await reading.half.close(None)
    await settled(lambda: not any(each.name == "holdfast-load" for each in threading.enumerate()))


async def test_a_node_whose_load_nobody_is_shown_reads_none() -> None:
    machine = MadeUpMachine(threading.Event())
    reading = Reading(machine, SHOWN_MAX)
    reading.half.happened(WorkersStarted(PLACE, START))
    await asyncio.sleep(2 * EVERY * INTERVAL_S)
    await reading.half.close(None)
    assert machine.asked == 0


async def test_without_room_for_a_thread_the_figures_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = asyncio.Event()

    def no_room(*_: object) -> None:
        tried.set()
        raise RuntimeError("can't start new thread")

    reading = Reading(MadeUpMachine(threading.Event()))
    monkeypatch.setattr(threading.Thread, "start", no_room)
    reading.half.happened(WorkersStarted(PLACE, START))
    await asyncio.wait_for(tried.wait(), limit_s(10))
    await reading.half.close(None)
    assert reading.sent == []


def test_the_load_of_this_machine_can_be_read(tmp_path: Path) -> None:
    load = Machine().load(tmp_path)
    assert (load.cores > 0, load.memory_total_bytes > load.memory_bytes > 0, load.disk_total_bytes > 0) == (True,) * 3


def test_a_gpu_that_cannot_be_read_is_left_out_and_the_others_keep_their_numbers() -> None:
    def rates(gpu: int) -> SimpleNamespace:
        if gpu == 1:
            raise RuntimeError("Not Supported")
        return SimpleNamespace(gpu=10 * gpu)

    machine = Machine.__new__(Machine)
    machine._gpus = [0, 1, 2]
    machine._nvml = SimpleNamespace(
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=1, total=2),
        nvmlDeviceGetUtilizationRates=rates,
        nvmlDeviceGetTemperature=lambda *_: 40,
        NVML_TEMPERATURE_GPU=0,
    )
    for _ in range(2):
        assert [(each.index, each.percent) for each in machine._gpu_loads()] == [(0, 0), (2, 20)]
