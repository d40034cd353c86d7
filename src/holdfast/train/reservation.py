"""Memory for the states of one rank, taken in the background before it is needed.

Fresh memory costs many times as much as a copy into it, so it must not be taken while training waits for a save. It is
taken from the moment at which the model exists, and during the first step. The state that an optimizer makes in its
first step is foreseen from its options; the plan of the first save corrects that.
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
"""Pause after each piece of memory for all states but the first, in multiples of the processor time that the piece
took. For the first state there is no pause: the time until the first save may be one short step."""


class MemoryReservation:
    """Memory that is taken in the background, a piece now and then. A caller that needs it takes the rest at once.

    The thread has ordinary priority: with a low one it might not run for seconds on a busy machine, and a caller that
    needs the memory would wait for it."""

    def __init__(self, pieces: Generator[int, None, None], states: int) -> None:
        """`pieces`: `Tier.reserving`, which takes a piece each time. `states`: the number of states for which the tier
        has room."""
        self._pieces, self.states = pieces, states
        self._turn = threading.Lock()
        """Held by the thread that takes a piece."""
        self._wanted = threading.Event()
        """Set when the background thread shall end."""
        self._ready = 0
        """The number of states that have room."""
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
        """Take one more piece. Returns False if this number of states has room, or never will."""
        with self._turn:
            if self._ready >= states or self._error is not None:
                return False
            try:
                self._ready = next(self._pieces, self.states)
            except SnapshotMemoryError as error:
                self._error = error
            return True

    def stop(self) -> None:
        """Take no more memory."""
        self._wanted.set()
        self._thread.join()
        self._pieces.close()

    def finish(self, states: int) -> SnapshotMemoryError | None:
        """Wait until this number of states has room, or all have. Returns the error, if there was one."""
        states = min(states, self.states)
        if states == self.states:
            self._wanted.set()
            self._thread.join()
        while self._take(states):
            pass
        return self._error


def foreseen_bytes(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], ranks: int) -> int:
    """The size of one rank's state after the first step, in bytes, as far as it is known now. `ranks`: the number of
    ranks of this node, which share the tensors that are not sharded."""
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
    """The number of tensors that the optimizer will keep for each parameter, by its options; 0: it is unknown."""
    return 2 if "betas" in group else int(bool(group.get("momentum")))


def _own_bytes(tensor: torch.Tensor, ranks: int) -> int:
    """The number of bytes that this rank saves of the tensor."""
    local = local_tensor(tensor)
    # Computed, since a tensor without memory has no `nbytes`; such a one is refused when it is saved.
    size_bytes: int = local.numel() * local.element_size()
    return size_bytes if isinstance(tensor, DTensor) else size_bytes // ranks
