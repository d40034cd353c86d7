"""Reads the clocks of the GPUs of ranks that slow down the others, when it is asked. Decides nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from holdfast.detached import run_detached
from holdfast.doctor.device_events import clock_text
from holdfast.doctor.machine_reader import has_gpus, read_machine
from holdfast.doctor.machine_state import MachineState, used_gpus
from holdfast.extensions.stragglers.messages import TEXT_CHARACTERS_MAX, GpuClocks, ReadClocks
from holdfast.runtime.node_extension import Node, NodeExtension, Send

READ_S_MAX = 15.0


class OnNode(NodeExtension):
    messages = ReadClocks

    def __init__(
        self,
        node: Node,
        send: Send,
        read: Callable[[], MachineState] = read_machine,
        readable: Callable[[], bool] = has_gpus,
    ) -> None:
        """`read` reads the machine's state, and may block; `readable` tells whether there are GPUs."""
        super().__init__(node, send)
        self._read_state = read
        self._readable = readable

    def heard(self, message: ReadClocks) -> None:
        if self._readable():
            self.node.start("stragglers", self._read(message))

    async def _read(self, message: ReadClocks) -> None:
        try:
            async with asyncio.timeout(READ_S_MAX):
                state = await run_detached(self._read_state)
        except TimeoutError:  # a driver that hangs: the straggler is known all the same
            return
        gpus = used_gpus(state, os.environ)
        for rank, local_rank in message.ranks.items():
            if local_rank < len(gpus):
                gpu = gpus[local_rank]
                text = gpu.error or clock_text(gpu)
                self.send(GpuClocks(message.generation, rank, gpu.index, text[:TEXT_CHARACTERS_MAX]))
