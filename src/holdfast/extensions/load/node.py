"""Reads the load of this node: processors, memory, disk, network, GPUs, and the time that the agent takes to come to an
event.

It is read in a thread of its own: if a driver or a disk hangs, the figures are missing, and the agent goes on. Decides
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from holdfast.extensions.load.messages import SHOWN_MAX, GpuLoad, NodeLoad
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.policy import ITEMS_MAX
from holdfast.runtime.node_extension import (
    Node,
    NodeExtension,
    NodeHappened,
    Send,
    WorkersGone,
    WorkersRegrouped,
    WorkersStarted,
)
from holdfast.supervisor.board import Repeat

EVERY = 10
"""Number of intervals of progress between two loads. The interval grows with the job, so that the coordinator's work
stays bounded."""
FIRST = 3
"""Number of intervals until the load is read for the first time: the start of the workers needs the processors."""
FIRST_S = 0.5
"""Time over which the first rates are means (s)."""


class OnNode(NodeExtension):
    """Reads the load regularly, while workers run."""

    def __init__(self, node: Node, send: Send, make: Callable[[], Machine] | None = None) -> None:
        """`make` makes the reader of the load; it is called in the thread."""
        super().__init__(node, send)
        self._loop = asyncio.get_running_loop()
        self._make = make or Machine
        self._machine: Machine | None = None
        self._reading = False
        self._timer: Repeat | None = None

    def happened(self, event: NodeHappened) -> None:
        match event:
            case WorkersStarted(_, start) | WorkersRegrouped(_, start):
                self._stop()
                interval_s = start.progress_interval_s
                self._timer = Repeat(self._begin, FIRST * interval_s, inf, EVERY * interval_s)
            case WorkersGone():
                self._stop()

    async def close(self, outcome: Outcome | None) -> None:  # noqa: ARG002
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None

    def _begin(self) -> None:
        place = self.node.place
        if self._reading or place is None or place.group_rank >= SHOWN_MAX:
            return
        self._reading = True
        try:
            threading.Thread(target=self._read, name="holdfast-load", daemon=True).start()
        except RuntimeError:  # there may be no more threads now: the job does not need the load
            self._reading = False

    def _read(self) -> None:
        try:
            self._machine = self._machine or self._make()
            load = self._machine.load(self.node.folder)
        except Exception:  # noqa: BLE001 - psutil may fail where a container forbids a read: it must not end a job
            load = None
        asked_s = time.monotonic()
        call_soon(self._loop, lambda: self._take(load, time.monotonic() - asked_s))

    def _take(self, load: NodeLoad | None, lag_s: float) -> None:
        self._reading = False
        if load is not None:
            self.send(msgspec.structs.replace(load, lag_ms=round(lag_s * 1e3)))


def call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call this on the loop, from any thread; nothing happens if the loop has ended meanwhile."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        if not loop.is_closed():
            raise


class Machine:
    """Reads the load of this machine. It blocks, and imports its libraries: make it in a thread."""

    def __init__(self) -> None:
        import psutil  # the start of an agent has no time for it

        self._psutil = psutil
        self._nvml: Any = None
        self._gpus: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except Exception:  # noqa: BLE001 - no GPU, no driver, or one that fails: nothing is reported
            self._gpus = []
        self._before = self._counters()
        time.sleep(FIRST_S)

    def load(self, folder: Path | None) -> NodeLoad:
        """The load now; rates are means since the call before. `folder`: a folder on the disk that is meant; None: no
        disk."""
        memory = self._psutil.virtual_memory()
        try:
            usage = self._psutil.disk_usage(str(folder)) if folder is not None else None
        except OSError:  # the folder was deleted, or its file server is gone
            usage = None
        now = self._counters()
        past_s, busy_s, all_s, received, sent = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        return NodeLoad(
            cores=self._psutil.cpu_count() or 0,
            cpu_percent=_count(100 * busy_s / all_s if all_s else 0),
            memory_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            disk_free_bytes=usage.free if usage is not None else 0,
            disk_total_bytes=usage.total if usage is not None else 0,
            received_bytes_s=_count(received / past_s),
            sent_bytes_s=_count(sent / past_s),
            gpus=self._gpu_loads(),
        )

    def _counters(self) -> tuple[float, float, float, int, int]:
        """The time (monotonic s), busy and total time of the processors (s), bytes received and sent."""
        cpu = self._psutil.cpu_times()
        idle_s, all_s = cpu.idle + cpu.iowait, sum(cpu[:8])  # the fields behind are parts of these eight
        nics = [each for name, each in self._psutil.net_io_counters(pernic=True).items() if name != "lo"]
        received, sent = sum(each.bytes_recv for each in nics), sum(each.bytes_sent for each in nics)
        return time.monotonic(), all_s - idle_s, all_s, received, sent

    def _gpu_loads(self) -> tuple[GpuLoad, ...]:
        """The load of each GPU that can be read: one may be gone from the bus, and a part (MIG) has no utilization."""
        nvml, found = self._nvml, []
        for index, gpu in enumerate(self._gpus[:ITEMS_MAX]):
            with contextlib.suppress(Exception):  # NVML's own errors; its module is loaded late
                memory, percent = nvml.nvmlDeviceGetMemoryInfo(gpu), nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
                celsius = nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
                found.append(GpuLoad(percent, memory.used, memory.total, _count(celsius), index))
        return tuple(found)


def _count(value: float) -> int:
    """Round a number for a message. A difference of counters may be negative, because an interface was replaced."""
    return max(0, round(value))
