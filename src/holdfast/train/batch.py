"""The global batch: which samples each rank takes of one optimizer step, in how many micro-batches, and what each weighs.

Pure arithmetic on positions in an epoch's order. Knows no dataset, no process group and no torch.

One optimizer step takes the next `size` positions of the epoch, on however many ranks. They are cut into
`world * every` parts as equal as whole samples allow (they differ by one sample at most), and rank r takes the parts
r * every … r * every + every - 1, one after the other. A part's *weight* is its size divided by the mean size of the
step's parts, so the weights of a step have the mean 1, and

    loss = loss_fn(model(batch)) * share.weight / share.every        # loss_fn gives the mean over the batch's samples

summed over the micro-batches and averaged over the ranks, as DDP and FSDP do, is the mean over all samples of the step:
exactly the gradient that one process would have computed. `ht.accumulate(model, loader)` does this multiplication.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, Protocol, get_args
from weakref import ref

from holdfast.core.errors import DataError

Tail = Literal["even", "drop", "pad"]
"""What becomes of the last, smaller global batch of an epoch:

even  dealt evenly with corrected weights: nothing is lost or repeated. A rank for which no sample is left gets the step's
      first one with weight 0, so that it takes part in the collectives and learns nothing from it
drop  left out: up to `size - 1` samples of the epoch are not trained
pad   filled with samples from the epoch's start until all parts are equal: up to `world * every - 1` are trained twice
"""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's batch as a part of its optimizer step. All positions are in the epoch's order."""

    start: int
    stop: int
    """The batch's positions are start … stop - 1; those at or above the epoch's length wrap to its start (`pad` alone)."""
    step_start: int
    step_stop: int
    """The positions of the whole optimizer step, all ranks together."""
    micro: int
    """Which micro-batch of the optimizer step this is, from 0."""
    every: int
    """Micro-batches per optimizer step, the same on every rank."""
    weight: float
    """The batch's size by the mean size of the step's batches; 0 for one that only keeps the ranks in step."""

    @property
    def last(self) -> bool:
        """Whether the optimizer steps after this batch."""
        return self.micro == self.every - 1

    @property
    def scale(self) -> float:
        """What the batch's mean loss has to be multiplied by before `backward()`."""
        return self.weight / self.every

    @property
    def cursor(self) -> int:
        """How much of the epoch counts as trained once this batch is: micro-batches count when their step is complete."""
        return self.step_stop if self.last else self.step_start


class HasShare(Protocol):
    """What `ht.accumulate` needs of a loader."""

    @property
    def share(self) -> Share | None:
        """Of the batch that was handed out last; None before the first."""

    @property
    def every(self) -> int:
        """Micro-batches per optimizer step."""


class Ahead(HasShare, Protocol):
    """What it needs besides, to make optimizer steps of several of a loader's."""

    @property
    def is_kept(self) -> bool:
        """The loader keeps a global batch of its own."""

    def samples_ahead(self, count: int) -> list[int]:
        """Samples, of all ranks, of the batch in hand and of those after it in its epoch; at most `count` numbers."""


_in_hand: ContextVar[ref[Ahead] | None] = ContextVar("holdfast.train.in_hand", default=None)


def in_hand() -> Ahead | None:
    """The loader whose batch the loop's body has, so that `ht.accumulate` need not be given it."""
    found = _in_hand.get()
    return None if found is None else found()


def set_in_hand(loader: Ahead | None) -> None:
    """A loader hands out a batch, or its pass is over and the loop around it goes on. Keeps no loader alive."""
    _in_hand.set(None if loader is None else ref(loader))


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """How many samples an optimizer step takes and into how many parts they are cut."""

    size: int
    """Samples per optimizer step, of all ranks together."""
    world: int
    every: int
    """Micro-batches per rank and optimizer step."""
    tail: Tail = "even"

    def __post_init__(self) -> None:
        for name, value in (("global_batch_size", self.size), ("world", self.world), ("every", self.every)):
            _positive(name, value)
        if self.tail not in get_args(Tail):
            raise DataError(f"tail={self.tail!r} is none of {', '.join(map(repr, get_args(Tail)))}.")

    @classmethod
    def following(cls, world: int, batch_size: int, every: int = 1, tail: Tail = "even") -> GlobalBatch:
        """`batch_size` samples per rank and micro-batch: the global batch changes with the world, as with torch's loader."""
        for name, value in (("batch_size", batch_size), ("every", every)):
            _positive(name, value)
        return cls(batch_size * world * every, world, every, tail)

    @classmethod
    def kept(cls, size: int, world: int, batch_size_max: int | None = None, tail: Tail = "even") -> GlobalBatch:
        """`size` samples whatever the world; no rank takes more than `batch_size_max` of them at once."""
        _positive("global_batch_size", size)
        per_rank = -(-size // world)
        if batch_size_max is None:
            return cls(size, world, 1, tail)
        _positive("batch_size", batch_size_max)
        return cls(size, world, -(-per_rank // batch_size_max), tail)

    @property
    def parts(self) -> int:
        """Batches of one optimizer step, of all ranks together."""
        return self.world * self.every

    @property
    def batch_size(self) -> int:
        """Samples of the largest batch that a rank gets at once."""
        return -(-self.size // self.parts)

    def steps(self, cursor: int, length: int) -> int:
        """Optimizer steps left in an epoch of `length` samples of which `cursor` are trained."""
        left = max(0, length - cursor)
        return left // self.size if self.tail == "drop" else -(-left // self.size)

    def batches(self, cursor: int, length: int) -> int:
        """Batches left for each rank, the same number on all of them."""
        return self.steps(cursor, length) * self.every

    def deal(self, rank: int, cursor: int, length: int) -> Iterator[Share]:
        """This rank's batches of the rest of the epoch."""
        for step in range(self.steps(cursor, length)):
            start = cursor + step * self.size
            yield from self._deal_step(rank, start, min(start + self.size, length))

    def samples_ahead(self, cursor: int, length: int, count: int) -> list[int]:
        """Samples of each of the next optimizer steps of this epoch, at most `count`; with "pad" the repeated ones count."""
        steps = min(count, self.steps(cursor, length))
        return [
            self._samples(start, min(start + self.size, length))
            for start in range(cursor, cursor + steps * self.size, self.size)
        ]

    def _samples(self, start: int, stop: int) -> int:
        if self.tail == "pad" and stop - start < self.size:
            return -(-(stop - start) // self.parts) * self.parts
        return stop - start

    def _deal_step(self, rank: int, start: int, stop: int) -> Iterator[Share]:
        samples = self._samples(start, stop)
        size, larger = divmod(samples, self.parts)
        for micro in range(self.every):
            part = rank * self.every + micro
            first = start + part * size + min(part, larger)
            own = size + (part < larger)
            weight = own * self.parts / samples
            if own == 0:
                first, own = start, 1
            yield Share(first, first + own, start, stop, micro, self.every, weight)


def _positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"{name}={value!r} is not a positive whole number.")
