"""A double of the GPU at the boundary that a save uses (device_streams.py): its memory is the host's, and its work is
done late, in any order that streams and events allow.

A launched kernel, a copy, a wait and an event's record are entries of a stream's queue. Nothing runs when it is
launched. Whenever somebody asks for an event, a few entries run: which stream goes on is decided by `order`. So a copy
that should have waited for a kernel, or a kernel that should have waited for a copy, meets the wrong values.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch

from holdfast.train.device_streams import DeviceStreams
from holdfast.train.replicas import digests_of

PROGRAM, SIDE = "program", "side"
Order = Callable[[list[str]], str]


def program_first(ready: list[str]) -> str:
    """The program's kernels run as early as they may: what does not make them wait is overtaken."""
    return PROGRAM if PROGRAM in ready else SIDE


def copies_first(ready: list[str]) -> str:
    """Copies run as early as they may: what does not make them wait finds the values before the step."""
    return SIDE if SIDE in ready else PROGRAM


def at_random(seed: int) -> Order:
    return Random(seed).choice


class DoubleEvent:
    def __init__(self, device: DeviceDouble) -> None:
        self._device, self.reached = device, False

    def query(self) -> bool:
        if not self._device.held:
            self._device.run(1)
        if self._device.broken:
            raise RuntimeError(self._device.broken)
        return self.reached


class DeviceDouble(DeviceStreams):
    """One GPU. Tensors with a dimension are in its memory; single numbers are on the host, as Adam's step is."""

    def __init__(self, order: Order, *, ignores_waits: bool = False) -> None:
        """`ignores_waits`: neither streams nor kernels wait for events, which shows that a test would notice that."""
        super().__init__()
        self._order, self._ignores_waits = order, ignores_waits
        self._queues: dict[str, deque[Callable[[], bool]]] = {PROGRAM: deque(), SIDE: deque()}
        self._current = PROGRAM
        self._turn = threading.RLock()
        self.held = False
        """Whether its work stands still, as behind an operation that waits for another rank."""
        self.broken = ""
        """The error that it has; empty: it works."""
        self.taken: list[int] = []
        """Sizes of the memory that was taken on the host."""
        self.memory_max = 1 << 40

    # --- what the program does -----------------------------------------------------------------------------------------

    def launch(self, kernel: Callable[[], Any], *, on: str = "") -> None:
        """Let a kernel run some time, behind what was launched before on this stream."""

        def run() -> bool:
            with torch.no_grad():
                kernel()
            return True

        with self._turn:
            self._queues[on or self._current].append(run)

    def run(self, entries: int | None = None) -> None:
        """Run some entries of the queues; None: all."""
        with self._turn:
            while entries is None or entries > 0:
                ready = [name for name, queue in self._queues.items() if queue]
                while ready:
                    name = self._order(ready)
                    if self._queues[name][0]():
                        self._queues[name].popleft()
                        break
                    ready.remove(name)  # it waits for an event
                else:
                    return
                entries = None if entries is None else entries - 1

    # --- the boundary --------------------------------------------------------------------------------------------------

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0

    def use(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def memory(self, size_bytes: int) -> torch.Tensor:
        if sum(self.taken) + size_bytes > self.memory_max:
            raise RuntimeError("CUDA error: out of memory")
        self.taken.append(size_bytes)
        return torch.full((size_bytes,), 0xEE, dtype=torch.uint8)

    def capturing(self) -> bool:
        return False

    @contextlib.contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        begun = DoubleEvent(self)
        self._record(begun, PROGRAM)
        self._wait_for(begun, SIDE)
        self._current = SIDE
        try:
            yield
        finally:
            self._current = PROGRAM

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.launch(lambda: target.copy_(source))

    def copied(self, device: torch.device) -> DoubleEvent:
        event = DoubleEvent(self)
        self._record(event, SIDE)
        return event

    def wait(self, device: torch.device, event: Any) -> None:
        self._wait_for(event, PROGRAM)

    def digest(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
        found: list[int] = []
        self.launch(lambda: found.extend(int(each) for each in digests_of(tensors)))

        def read() -> list[int]:
            self.run()
            return found

        return read

    def _record(self, event: DoubleEvent, stream: str) -> None:
        def reach() -> bool:
            event.reached = True
            return True

        with self._turn:
            self._queues[stream].append(reach)

    def _wait_for(self, event: DoubleEvent, stream: str) -> None:
        with self._turn:
            self._queues[stream].append(lambda: event.reached or self._ignores_waits)
