"""Memory for the states of one rank, taken in the background before it is needed.

Fresh memory costs many times as much as a copy into it, so it must not be taken while training waits for a save: it is
begun as soon as the model is there, and goes on beside the first step. What an optimizer makes in its first step is
foreseen from its options; the plan of the first save puts that right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.protocol.errors import SnapshotMemoryError
from holdfast.train.sharding import local_tensor

PAUSE = 1.0
"""Pause until the next piece of the other states' memory is taken in the background, in multiples of the processor
time for one. For the first state there is none: all the time until the first save may be one short step."""


class MemoryReservation:
    """Memory that is taken in the background, a piece now and then. Who cannot wait for it takes the rest at once.

    Not by a thread of low priority: on a busy machine that may not run for seconds, and who needs the memory waits."""

    def __init__(self, pieces: Generator[int, None, None], states: int) -> None:
        """`pieces`: of `Tier.reserving`; `states`: as many as it has room for."""
        self._pieces, self.states = pieces, states
        self._turn = threading.Lock()
        self._wanted = threading.Event()
        self._ready = 0
        self._error: SnapshotMemoryError | None = None
        self._thread = threading.Thread(target=self._in_background, name="holdfast-reserve", daemon=True)
        self._thread.start()

    def _in_background(self) -> None:
        began_s = time.thread_time()
        while self._take(self.states):
            if self._wanted.wait(PAUSE * (time.thread_time() - began_s) * (self._ready > 0)):
                return
            began_s = time.thread_time()

    def _take(self, states: int) -> bool:
        """One more piece. False: that number of states has room, or never will."""
        with self._turn:
            if self._ready >= states or self._error is not None:
                return False
            try:
                self._ready = next(self._pieces, self.states)
            except SnapshotMemoryError as error:
                self._error = error
            return True

    def stop(self) -> None:
        """Take nothing more."""
        self._wanted.set()
        self._thread.join()
        self._pieces.close()

    def finish(self, states: int) -> SnapshotMemoryError | None:
        """Wait until this number of states has room, or all; returns the error, if there was one."""
        states = min(states, self.states)
        if states == self.states:
            self._wanted.set()
            self._thread.join()
        while self._take(states):
            pass
        return self._error


def foreseen_bytes(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], ranks: int) -> int:
    """Bytes of one rank's state after the first step, as far as it is known now. `ranks`: of this node, which share
    what is not sharded."""
    states = {id(each): each for model in models for each in chain(model.parameters(), model.buffers())}
    more_bytes = 0
    for optimizer in optimizers:
        for state in optimizer.state.values():
            states.update({id(each): each for each in state.values() if isinstance(each, torch.Tensor)})
        for group in optimizer.param_groups:
            missing = [each for each in group["params"] if each.requires_grad and each not in optimizer.state]
            more_bytes += _moments(group) * sum(_own_bytes(each, ranks) for each in missing)
    return more_bytes + sum(_own_bytes(each, ranks) for each in states.values())


def _moments(group: Mapping[str, Any]) -> int:
    """Tensors that the optimizer will keep for each parameter, by its options; 0 for an unknown one."""
    return 2 if "betas" in group else int(bool(group.get("momentum")))


def _own_bytes(tensor: torch.Tensor, ranks: int) -> int:
    local = local_tensor(tensor)
    # Also of one that has no bytes: it is refused when it is saved.
    size_bytes: int = local.numel() * local.element_size()
    return size_bytes if isinstance(tensor, DTensor) else size_bytes // ranks
