"""A save of a state on GPUs that overlaps with the next step: the state is copied into memory of the host beside the
program's work, and from there into its slot by a thread, while training goes on.

The order is what makes it right:

- the copy comes behind all that the program had begun before the save: behind the kernels of the step;
- parameters and optimizer states are copied beside the next forward and backward pass, which only read them. All work
  that an optimizer begins waits on the GPU for the end of the copy;
- everything else that is on a GPU (buffers, which a forward pass writes; averages and other tracked objects; parameters
  of no tracked optimizer) is copied in the program's own order, before the next step's first kernel;
- the slot is committed when all of it is there. Until then the older state is what a restart finds.

A program may write parameters in other places than an optimizer's step. Then the copy may have parts of two steps. So
each write that torch counts is noticed (kept.WatchedTensors), and for the 1st, 2nd, 4th, 8th … save the values
themselves are compared, on the GPU, because torch does not count writes through `.data` and those of a replayed graph.
Such a state is dropped, and saves do not overlap any more in this process.

Knows tensors and their order on devices. Knows neither slots nor ranks.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.linux import check_memory
from holdfast.protocol.errors import SnapshotWriteError
from holdfast.train.copying import copy_alike
from holdfast.train.device_streams import DeviceStreams, Event
from holdfast.train.kept import WatchedTensors

BLOCK_BYTES = 128 << 20
"""Size of the pieces in which the host's memory is taken: torch rounds each up to a power of two."""
ALIGNMENT_BYTES = 512
LOOK_S = 0.001
"""Pause between two looks at the copy's end."""
CHANGED = "parameters or optimizer states were changed outside of an optimizer's step while they were copied"


class Arrival(Enum):
    """The state of a copy."""

    UNDER_WAY = "under way"
    THERE = "there"
    """The slot has all of it."""
    TORN = "torn"
    """It may have parts of two steps."""
    FAILED = "failed"


class HostMemory:
    """Memory of the host for one state, which is used again by every save."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._blocks: list[torch.Tensor] = []

    def take(self, sizes_bytes: Sequence[int], device: torch.device, enough: Callable[[], bool]) -> None:
        """Take the memory for these sizes, in a thread of its own, until the caller has enough. An error comes again in
        `pieces`."""
        with contextlib.suppress(RuntimeError, OSError):
            self._streams.use(device)
            for number in range(self._check(sizes_bytes)):
                if enough():
                    return
                self._block(number)

    def pieces(self, sizes_bytes: Sequence[int]) -> list[list[torch.Tensor]]:
        """Memory for each of these sizes, in a few pieces. Raises RuntimeError or OSError if there is too little."""
        self._check(sizes_bytes)
        pieces: list[list[torch.Tensor]] = []
        at = 0
        for size_bytes in sizes_bytes:
            mine: list[torch.Tensor] = []
            end = at + size_bytes
            while at < end:
                block, begin = divmod(at, BLOCK_BYTES)
                taken = min(end - at, BLOCK_BYTES - begin)
                mine.append(self._block(block)[begin : begin + taken])
                at += taken
            at = -(-at // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            pieces.append(mine)
        return pieces

    def _check(self, sizes_bytes: Sequence[int]) -> int:
        """The number of blocks that these sizes need. Raises OSError if the host lacks memory for them: a process that
        takes it nevertheless would be killed later, or another one."""
        whole = sum(-(-each // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for each in sizes_bytes)
        blocks = -(-whole // BLOCK_BYTES)
        if missing := max(0, blocks - len(self._blocks)):
            check_memory(missing * BLOCK_BYTES)
        return blocks

    def _block(self, number: int) -> torch.Tensor:
        while len(self._blocks) <= number:
            self._blocks.append(self._streams.memory(BLOCK_BYTES))
        return self._blocks[number]


class StateCopy:
    """One state on its way from devices into its slot.

    `advance` and `finish` are called by the thread that trains; the copy into the slot is another thread's."""

    def __init__(self, streams: DeviceStreams, *, watched: Sequence[torch.Tensor], compared: bool) -> None:
        """`watched`: the tensors that only optimizers may change. `compared`: whether their values are compared."""
        self._streams = streams
        self._sources = list(watched)
        self._watched = WatchedTensors(watched)
        self._watched.note()
        self._digest = streams.digest(watched) if compared else None
        self._digest_later: Callable[[], list[int]] | None = None
        self._ends: dict[torch.device, Event] = {}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Bytes of the slot, and the host's memory from which they come."""
        self._torn = self._held = False
        self._over = threading.Event()
        """Set when the thread has ended its work."""
        self._given_up = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._fill, name="holdfast-fill", daemon=True)
        self._hook: Any = None

    def begin(self, places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], memory: HostMemory) -> None:
        """Begin to copy each source, which is on a device, into its place in the slot. Those that are `watched` are
        copied beside the program's work."""
        pieces = memory.pieces([each.nbytes for each in places])
        aside = {id(each) for each in self._sources}
        later: dict[torch.device, list[tuple[list[torch.Tensor], torch.Tensor]]] = {}
        with torch.no_grad():
            for place, source, mine in zip(places, sources, pieces, strict=True):
                self._pairs += _cut(place, mine)
                later.setdefault(source.device, [])
                if id(source) in aside:
                    later[source.device].append((mine, source))
                else:
                    self._copy(mine, source)
            for device, copies in later.items():
                # Behind the copies above, too: the end of these is the end of all.
                with self._streams.aside(device):
                    for mine, source in copies:
                        self._copy(mine, source)
                self._ends[device] = self._streams.copied(device)
        self._hook = register_optimizer_step_pre_hook(lambda *_: self._hold())
        self._thread.start()

    def _copy(self, pieces: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        for part, piece in _cut(source, pieces):
            self._streams.copy(piece, part)

    def _hold(self) -> None:
        """Let an optimizer's work wait for the copy, before it begins."""
        self._look()
        self._held = True
        if self._over.is_set():
            return
        if self._streams.capturing():
            # torch has waited for the whole device before a capture; the thread has to see that.
            self._over.wait()
            return
        for device, end in self._ends.items():
            self._streams.wait(device, end)

    def _look(self) -> None:
        """Look whether something was changed before the first optimizer's step."""
        if self._held:
            return
        self._torn |= not self._watched.intact()
        if self._digest is not None:
            self._digest_later = self._streams.digest(self._sources)

    def _fill(self) -> None:
        try:
            for device, end in self._ends.items():
                self._streams.use(device)
                while not end.query():
                    if self._given_up.wait(LOOK_S):
                        return
            copy_alike([to for to, _ in self._pairs], [of for _, of in self._pairs])
        except Exception as error:  # noqa: BLE001 - reported by the thread that trains
            self._error = error
        finally:
            self._over.set()

    def advance(self) -> Arrival:
        """Return its state, without a wait. Call it when a step is complete."""
        self._look()  # no optimizer has stepped with a hook: a replayed graph, or none stepped at all
        return self._arrival() if self._over.is_set() else Arrival.UNDER_WAY

    def finish(self) -> Arrival:
        """Wait until it is over."""
        self._over.wait()
        self._look()
        return self._arrival()

    def give_up(self) -> None:
        """Stop: nothing is written to the slot after the return. It does not wait for the device."""
        self._given_up.set()
        self._end()

    def _end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._thread.ident is not None:
            self._thread.join()

    def _arrival(self) -> Arrival:
        self._end()
        if self._error is not None:
            return Arrival.FAILED
        if self._digest is not None and self._digest_later is not None:
            self._torn |= self._digest() != self._digest_later()
        return Arrival.TORN if self._torn else Arrival.THERE

    def error(self, step: int) -> SnapshotWriteError:
        """The error for users, if it has failed."""
        return SnapshotWriteError(f"step {step} was not saved: the copy from the GPU failed: {self._error}")


def _cut(whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of this tensor, cut like the pieces; each with its piece."""
    if not pieces:
        return []
    data = whole.detach().contiguous().reshape(-1).view(torch.uint8)
    parts, at = [], 0
    for piece in pieces:
        parts.append((data[at : at + piece.numel()], piece))
        at += piece.numel()
    return parts


class Overlapping:
    """Begins the copies of one rank, one after the other."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._memory = HostMemory(streams)
        self._begun = 0
        self.off = ""
        """The reason why saves do not overlap any more; empty: they do."""
        self._taking: threading.Thread | None = None
        self._enough = threading.Event()

    def take_ahead(self, sources: Sequence[torch.Tensor]) -> None:
        """Begin to take the memory for these tensors in the background: training would wait for it in the first
        save."""
        self.stop()
        away = [each for each in sources if self._is_away(each)]
        if not away or self.off:
            return
        self._enough.clear()
        given = ([each.nbytes for each in away], away[0].device, self._enough.is_set)
        self._taking = threading.Thread(target=self._memory.take, args=given, name="holdfast-pin", daemon=True)
        self._taking.start()

    def stop(self) -> None:
        """Take no more memory ahead."""
        self._enough.set()
        if self._taking is not None:
            self._taking.join()
            self._taking = None

    def begin(
        self, places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], optimized: Sequence[bool]
    ) -> tuple[StateCopy | None, list[int]]:
        """Begin to copy what is on a device. Returns the copy, and the numbers of those tensors that are left to the
        caller. There is no copy if none is on a device, or there is no memory for it.

        `optimized`: for each tensor whether only optimizers change it."""
        everything = list(range(len(sources)))
        away = [number for number in everything if self._is_away(sources[number])]
        if not away or self.off or self._streams.capturing():
            return None, everything
        if self._taking is not None:  # all of it is needed now
            self._taking.join()
        self._begun += 1
        watched = [sources[number] for number in away if optimized[number]]
        compared = self._begun & (self._begun - 1) == 0  # a power of two
        copy = StateCopy(self._streams, watched=watched, compared=compared)
        try:
            copy.begin([places[number] for number in away], [sources[number] for number in away], self._memory)
        except (RuntimeError, OSError) as error:  # RuntimeError is torch's
            copy.give_up()
            self.off = f"the host has no memory for copies from the GPU: {error}"
            warnings.warn(f"holdfast: saves wait for the GPU: {self.off}", RuntimeWarning, stacklevel=2)
            return None, everything
        return copy, sorted(set(everything) - set(away))

    def _is_away(self, tensor: torch.Tensor) -> bool:
        """Whether it is on a device, and its bytes are its values."""
        return self._streams.on_device(tensor) and not tensor.is_conj() and not tensor.is_neg()
