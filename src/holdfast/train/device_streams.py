"""What a save needs of a GPU: copies that nothing waits for, beside the program's own work, and their order.

One class of few methods: tests put a double in its place, which runs copies and kernels as late as their order allows
(tests/train/device_double.py). Knows torch.cuda; knows nothing of saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from holdfast.train.replicas import digests_of


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Whether it was reached. Raises RuntimeError if the device has failed."""


class DeviceStreams:
    """The streams of this process's GPUs: the program's current ones, and one of ours per GPU for copies."""

    def __init__(self) -> None:
        self._side: dict[torch.device, torch.cuda.Stream] = {}

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in the memory of a GPU."""
        return bool(tensor.is_cuda)

    def use(self, device: torch.device) -> None:
        """Let the thread that calls this work with this device. CUDA would take the first GPU for a new thread, and a
        context there costs hundreds of megabytes, on a GPU that may be another rank's."""
        torch.cuda.set_device(device)

    def memory(self, size_bytes: int) -> torch.Tensor:
        """Memory of the host that a GPU can write to while nothing waits. Raises RuntimeError."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def capturing(self) -> bool:
        """Whether the program records its work into a graph now: it may not wait for anything outside of the graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    def aside(self, device: torch.device) -> AbstractContextManager[None]:
        """Let copies in this block run beside the program's work, behind all that it has begun until now."""
        if device not in self._side:
            self._side[device] = torch.cuda.Stream(device)
        self._side[device].wait_stream(torch.cuda.current_stream(device))
        stream: AbstractContextManager[None] = torch.cuda.stream(self._side[device])
        return stream

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, in the order of the stream that is current now."""
        target.copy_(source, non_blocking=True)

    def copied(self, device: torch.device) -> Event:
        """The end of all copies beside the program's work that were begun until now."""
        event: Event = torch.cuda.Event()
        self._side[device].record_event(event)
        return event

    def wait(self, device: torch.device, event: Event) -> None:
        """Let all work that the program begins from now on wait for this event; the program itself does not wait."""
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(device).wait_event(event)

    def digest(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
        """Begin to make digests of these tensors, in the order of the program's work. Returns a function that waits for
        them."""
        digests = digests_of(tensors)
        return lambda: [int(each) for each in digests]
