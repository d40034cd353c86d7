"""The plan of an epoch: the order of its samples, the position in it, and the division of a global batch among the
ranks.

    datasets.py     the same for data that can only be read in sequence; random numbers of a sample's augmentation
    loader.py       DataLoader: all of it around torch's loader
    sampler.py      DistributedSampler: for scripts that keep torch's loader

This file is arithmetic on (seed, epoch, length, cursor): equal on all ranks, and for any number of ranks. It knows no
dataset.

**Order.** numpy and torch do not promise that `permutation` and `randperm` give the same order in their next version,
but a snapshot outlives versions. So the order is specified here, by what cannot change:

- up to ARRAY_LENGTH_MAX samples: the i-th output of Philox4x64-10 (a published algorithm; numpy keeps its raw
  streams) with the key (seed, epoch) and the counter 0 is sample i's number; its lowest 24 bits are replaced by i;
  the samples are sorted.
- above: a Feistel network of ROUNDS rounds on pairs (a, b) of about the square root of the length, its round keys the
  first outputs of the same Philox. It needs no memory, and any stretch of the order is computed alone.

**Position.** The first `cursor` positions of the order are trained and no others. A loader hands a batch out, and the
loop's body trains it. The batch counts as trained, exactly once, as soon as

- `trained()` says so (`snaps.step()` calls it), or
- the next batch is asked for, or
- `state_dict()` is called while `trained()` was never called on this loader: then a state taken in the body counts the
  batch that the body has, as torchdata's stateful loader does.

Batches that were only fetched ahead never count.

**Global batch.** One optimizer step takes the next `size` positions, on however many ranks. They are cut into
`world * micro_batches` parts as equal as whole samples allow (they differ by one sample at most), and rank r takes the
parts r * micro_batches … (r + 1) * micro_batches - 1, one after the other. A part's *weight* is its size divided by the
mean size of the step's parts, so the weights of a step have the mean 1, and

    loss = loss_fn(model(batch)) * share.weight / share.micro_batches  # loss_fn gives the mean over the batch's samples

summed over the micro-batches and averaged over the ranks, as DDP and FSDP do, is the mean over all samples of the step:
exactly the gradient that one process would have computed. `ht.accumulate(model, loader)` does this multiplication.
"""

from __future__ import annotations

import functools
import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args
from weakref import ref

import numpy as np
from torch import distributed

from holdfast.protocol.errors import DataError, DataStateError
from holdfast.train.agent_channel import is_replacement

if TYPE_CHECKING:
    from holdfast.train.data.loader import DataLoader

Tail = Literal["even", "drop", "pad"]
"""The treatment of the last, smaller global batch of an epoch:

even  dealt evenly with corrected weights: nothing is lost or repeated. A rank for which no sample is left gets the
      step's first one with weight 0, so that it takes part in the collectives and learns nothing from it
drop  left out: up to `size - 1` samples of the epoch are not trained
pad   filled with samples from the epoch's start until all parts are equal: up to `world * micro_batches - 1` are
      trained twice
"""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's batch as a part of its optimizer step. All positions are in the epoch's order."""

    start: int
    stop: int
    """The batch's positions are start … stop - 1; those at or above the epoch's length wrap to its start (`pad`
    alone)."""
    step_start: int
    step_stop: int
    """The positions of the whole optimizer step, all ranks together."""
    micro: int
    """The number of this micro-batch in its optimizer step, from 0."""
    micro_batches: int
    """Micro-batches per optimizer step, the same on every rank."""
    weight: float
    """The batch's size divided by the mean size of the step's batches; 0 for a batch that only lets its rank take part
    in the collectives."""

    @property
    def last(self) -> bool:
        """Whether the optimizer steps after this batch."""
        return self.micro == self.micro_batches - 1

    @property
    def scale(self) -> float:
        """Factor for the batch's mean loss before `backward()`."""
        return self.weight / self.micro_batches

    @property
    def cursor(self) -> int:
        """The number of samples of the epoch that count as trained once this batch is: micro-batches count when their
        step is complete."""
        return self.step_stop if self.last else self.step_start


class HasShare(Protocol):
    """The part of a loader that `ht.accumulate` needs in any case."""

    @property
    def share(self) -> Share | None:
        """Share of the last batch; None before the first."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimizer step."""


_current_loader: ContextVar[ref[DataLoader] | None] = ContextVar("holdfast.train.current_loader", default=None)


def current_loader() -> DataLoader | None:
    """The loader whose batch the loop's body has; None: there is none. By it `ht.accumulate` needs no argument."""
    found = _current_loader.get()
    return None if found is None else found()


def set_current_loader(loader: DataLoader | None) -> None:
    """Declare which loader's batch the loop's body has: a loader calls this when it hands out a batch, and when its
    pass is over, for the loop around it. No loader is kept alive by this."""
    _current_loader.set(None if loader is None else ref(loader))


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The size of an optimizer step, and the number of parts into which its samples are cut."""

    size: int
    """Samples per optimizer step, of all ranks together."""
    world: int
    """The number of ranks."""
    micro_batches: int
    """Micro-batches per rank and optimizer step."""
    tail: Tail = "even"

    def __post_init__(self) -> None:
        for name, value in (
            ("global_batch_size", self.size),
            ("world", self.world),
            ("micro_batches", self.micro_batches),
        ):
            positive(name, value)
        if self.tail not in get_args(Tail):
            raise DataError(f"tail={self.tail!r} is none of {', '.join(map(repr, get_args(Tail)))}.")

    @classmethod
    def following(cls, world: int, batch_size: int, micro_batches: int = 1, tail: Tail = "even") -> GlobalBatch:
        """A global batch of `batch_size` samples per rank and micro-batch: it changes with the world, as with torch's
        loader."""
        for name, value in (("batch_size", batch_size), ("micro_batches", micro_batches)):
            positive(name, value)
        return cls(batch_size * world * micro_batches, world, micro_batches, tail)

    @classmethod
    def kept(cls, size: int, world: int, batch_size_max: int | None = None, tail: Tail = "even") -> GlobalBatch:
        """A global batch of `size` samples, whatever the world. No rank takes more than `batch_size_max` of them at
        once; None: no limit."""
        positive("global_batch_size", size)
        per_rank = -(-size // world)
        if batch_size_max is None:
            return cls(size, world, 1, tail)
        positive("batch_size", batch_size_max)
        return cls(size, world, -(-per_rank // batch_size_max), tail)

    @property
    def parts(self) -> int:
        """Batches of one optimizer step, of all ranks together."""
        return self.world * self.micro_batches

    @property
    def batch_size(self) -> int:
        """The number of samples in the largest batch that a rank gets at once."""
        return -(-self.size // self.parts)

    def steps(self, cursor: int, length: int) -> int:
        """Optimizer steps left in an epoch of `length` samples of which `cursor` are trained."""
        left = max(0, length - cursor)
        return left // self.size if self.tail == "drop" else -(-left // self.size)

    def batches(self, cursor: int, length: int) -> int:
        """Batches left for each rank, the same number on all of them."""
        return self.steps(cursor, length) * self.micro_batches

    def deal(self, rank: int, cursor: int, length: int) -> Iterator[Share]:
        """This rank's batches of the rest of the epoch."""
        for step in range(self.steps(cursor, length)):
            start = cursor + step * self.size
            yield from self._deal_step(rank, start, min(start + self.size, length))

    def samples_ahead(self, cursor: int, length: int, count: int) -> list[int]:
        """The number of samples of each of the next optimizer steps of this epoch, for at most `count` steps; with
        "pad" the repeated samples count."""
        steps = min(count, self.steps(cursor, length))
        return [
            self._samples(start, min(start + self.size, length))
            for start in range(cursor, cursor + steps * self.size, self.size)
        ]

    def _samples(self, start: int, stop: int) -> int:
        """The number of samples of the optimizer step at these positions, those repeated by "pad" included."""
        if self.tail == "pad" and stop - start < self.size:
            return -(-(stop - start) // self.parts) * self.parts
        return stop - start

    def _deal_step(self, rank: int, start: int, stop: int) -> Iterator[Share]:
        samples = self._samples(start, stop)
        size, larger = divmod(samples, self.parts)
        for micro in range(self.micro_batches):
            part = rank * self.micro_batches + micro
            first = start + part * size + min(part, larger)
            own = size + (part < larger)
            weight = own * self.parts / samples
            if own == 0:  # "even" with fewer samples than parts: the step's first sample, with weight 0
                first, own = start, 1
            yield Share(first, first + own, start, stop, micro, self.micro_batches, weight)


def positive(name: str, value: int) -> None:
    """Raise DataError unless the value is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"{name}={value!r} is not a positive whole number.")


ARRAY_LENGTH_MAX = 10_000_000
"""Largest number of samples whose order is computed as an array. Part of the specification: another bound is another
order."""
ROUNDS = 8
"""Rounds of the Feistel network."""
EVALUATES = "evaluation"
"""Name in the state of a loader or sampler: only an evaluation goes over it."""
SEQUENTIAL = "sequential"
SHUFFLED = "shuffled-1"
"""Names of orders. Snapshots contain them, so that a position is never used in another order; another specification
gets another number."""
_INDEX_BITS = 24
_WORD = 1 << 64

Integers: TypeAlias = Any
"""A numpy array of whole numbers (mypy does not read numpy)."""


class EpochOrder:
    """The order of an epoch. This class is the dataset's own order; subclasses shuffle."""

    def __init__(self, length: int) -> None:
        self.length = length

    def take(self, positions: Integers) -> Integers:
        """The samples at these positions, each in 0 … length - 1."""
        return positions

    def share(self, share: Share) -> list[int]:
        """The samples of one rank's batch."""
        samples: list[int] = self.take(np.arange(share.start, share.stop) % self.length).tolist()
        return samples


class Shuffled(EpochOrder):
    """The order of up to ARRAY_LENGTH_MAX samples. It takes 4 bytes for each, and about 80 ns for each at the epoch's
    start."""

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        super().__init__(length)
        mask = np.uint64((1 << _INDEX_BITS) - 1)
        keys = philox(seed, epoch).random_raw(length)
        keys &= ~mask
        keys |= np.arange(length, dtype=np.uint64)
        keys.sort()
        self._samples = (keys & mask).astype(np.uint32)

    def take(self, positions: Integers) -> Integers:
        return self._samples[positions]


class Feistel(EpochOrder):
    """The order of more samples, computed without memory. Outputs outside the length are sent through the network again
    until they are inside."""

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        super().__init__(length)
        left = math.isqrt(max(0, length - 1)) + 1
        self._left = np.uint64(left)
        self._right = np.uint64(max(1, -(-length // left)))
        self._keys = philox(seed, epoch).random_raw(ROUNDS)

    def take(self, positions: Integers) -> Integers:
        found = self._network(np.asarray(positions, dtype=np.uint64))
        while (outside := found >= self.length).any():
            found[outside] = self._network(found[outside])
        return found.astype(np.int64)

    def _network(self, numbers: Integers) -> Integers:
        left, right = np.divmod(numbers, self._right)
        for index, key in enumerate(self._keys):
            if index % 2:
                right = (right + _mixed(left ^ key) % self._right) % self._right
            else:
                left = (left + _mixed(right ^ key) % self._left) % self._left
        return left * self._right + right


def order_of(length: int, seed: int, epoch: int, *, shuffle: bool) -> EpochOrder:
    """The order of one epoch."""
    if not shuffle:
        return EpochOrder(length)
    return _shuffled(length, seed, epoch) if length <= ARRAY_LENGTH_MAX else Feistel(length, seed, epoch)


@functools.lru_cache(maxsize=1)
def _shuffled(length: int, seed: int, epoch: int) -> Shuffled:
    """The newest order is kept: survivors begin their loop again after each loss, and for a million samples most of the
    time until their next step was for the order that they had already. Nothing changes an order."""
    return Shuffled(length, seed, epoch)


def philox(seed: int, epoch: int) -> Any:
    """The random stream of Philox4x64-10 with the key (seed, epoch). Raises DataError for an epoch below 0."""
    if epoch < 0:
        raise DataError(f"Epochs are counted from 0; {epoch} is none.")
    return np.random.Philox(key=np.array([seed % _WORD, epoch], dtype=np.uint64), counter=0)


def _mixed(numbers: Integers) -> Integers:
    """splitmix64's finaliser: every bit of the input reaches every bit of the output."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def rank_and_world(ranks: tuple[int, int] | None) -> tuple[int, int]:
    """This process's rank, and the number of ranks: `ranks`, or those of the process group, or those in the
    environment. A script gives `ranks` with tensor parallelism: its rank among the data-parallel groups.

    Raises DataError if `ranks` is no such pair.
    """
    if ranks is None:
        rank, world = _found()
    else:
        try:
            rank, world = map(operator.index, ranks)
        except (TypeError, ValueError):
            raise DataError(f"ranks={ranks!r}: write a pair, (rank, world).") from None
    if not 0 <= rank < world:
        raise DataError(f"There is no rank {rank} in a world of {world}.")
    return rank, world


def _found() -> tuple[int, int]:
    # A replacement is alone until it joins the others (train/survival.py); its variables have the job's numbers.
    if distributed.is_available() and distributed.is_initialized() and not is_replacement():
        return distributed.get_rank(), distributed.get_world_size()
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if not rank or not world:
        return 0, 1
    try:
        return int(rank), int(world)
    except ValueError:
        raise DataError(f"RANK={rank!r} and WORLD_SIZE={world!r} are not numbers.") from None


def check_same(name: str, identities: Sequence[list[Any] | None]) -> None:
    """Raise DataError if ranks that divide data among themselves do not have the same data in the same order.
    `identities`: by rank (`Position.identity`); None: this rank divides none."""
    first = identities[0]
    for rank, found in enumerate(identities):
        if found is None or first is None or found == first:
            continue
        whats = ("datasets of {} and {} samples", "seed={} and seed={}", "the orders {} and {}")
        differences = (
            what.format(*both) for what, *both in zip(whats, found, first, strict=False) if both[0] != both[1]
        )
        raise DataError(
            f"the ranks divide the data of {name} among them, and ranks {rank} and 0 have "
            f"{next(differences, 'Subsets of other samples')}: some samples would be trained twice, and others never\n"
            "Give all ranks the same dataset, seed= and shuffle=. Data that each rank has for itself: ranks=(0, 1)."
        )


class Position:
    """Position of a loader or sampler. Only the training process changes it."""

    def __init__(self, seed: int, length: int, order: str, part: str = "") -> None:
        self.seed = seed
        self.length = length
        """The number of samples in an epoch."""
        self.order = order
        """The order's name."""
        self.part = part
        """The samples that a Subset takes of a dataset (`datasets.part_of`); empty: it is no Subset."""
        self.epoch = 0
        self.cursor = 0
        """The number of samples of the epoch that are trained, of all ranks together."""
        self.pending_cursor: int | None = None
        """The cursor as it will be when the batch in the loop's body is trained; None: the body has no batch."""
        self._reported = False
        """Whether `trained` was ever called."""
        self._as_loaded = False
        """Whether a state was loaded and nothing trained since."""
        self.known = True
        """Whether the script has asked for the position, or set the epoch, since a state was loaded."""
        self._asked_is_done = False
        """Whether the epoch that was asked for had been trained to its end before the loaded state was saved."""

    @property
    def begins_epoch(self) -> bool:
        """Whether nothing of the epoch that was asked for is trained."""
        return self.cursor == 0 and not self._asked_is_done

    def begin(self) -> bool:
        """Begin a pass over the rest of the epoch. Returns False if the epoch is finished."""
        self.pending_cursor = None
        is_done, self._asked_is_done = self._asked_is_done, False
        return not is_done

    def hand_out(self, cursor: int) -> None:
        """Note that the loop's body gets a batch; when it is trained the cursor will be `cursor`."""
        self.pending_cursor = cursor

    def trained(self) -> None:
        """Count the batch in the loop's body as trained, because the script says so. A second call changes nothing."""
        self._reported = True
        self.count_pending()

    def count_pending(self) -> None:
        """Count the batch in the loop's body as trained, if it has one."""
        if self.pending_cursor is not None:
            self.cursor, self.pending_cursor = self.pending_cursor, None
            self._as_loaded = False

    def give_up(self) -> None:
        """Do not count the batch in the loop's body: it is handed out again."""
        self.pending_cursor = None

    def finish(self) -> None:
        """End the pass at the epoch's end; the next epoch follows."""
        self.count_pending()
        self._begin_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass go over `epoch`, from its start; if a state inside it was loaded just before, over its
        rest. Raises DataError."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise DataError(f"Epochs are whole numbers from 0; {epoch!r} is none.")
        self.known = True
        if self._as_loaded and epoch <= self.epoch:
            self._asked_is_done = epoch < self.epoch
        else:
            self._begin_epoch(epoch)

    def is_left_behind(self, epoch: int) -> bool:
        """Whether a state of an earlier epoch than this one was loaded, and nothing trained since."""
        return self._as_loaded and self.epoch < epoch

    def goes_back(self, epoch: int) -> bool:
        """Whether a pass of this epoch, or of a later one, is under way that was begun in this life."""
        return not self._as_loaded and self.cursor > 0 and self.epoch >= epoch

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self.cursor = epoch, 0
        self.pending_cursor, self._as_loaded, self._asked_is_done = None, False, False

    def state_dict(self) -> dict[str, Any]:
        """The position as plain numbers and a text; the same on all ranks."""
        if not self._reported:
            self.count_pending()
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "cursor": self.cursor,
            "length": self.length,
            "order": self.order,
            **({"part": self.part} if self.part else {}),
        }

    def identity(self) -> list[Any]:
        """What has to be equal on all ranks that divide the data among themselves: see `check_same`."""
        return [self.length, self.seed, self.order, self.part]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at this position. Raises DataStateError, and changes nothing, if the state belongs to something
        else."""
        if missing := {"seed", "epoch", "cursor", "length", "order"} - set(state):
            raise DataStateError(f"This is not a loader's state: {', '.join(sorted(missing))} missing.")
        for name in ("seed", "epoch", "cursor", "length"):
            value = state[name]
            if isinstance(value, bool) or not isinstance(value, int) or (value < 0 and name != "seed"):
                raise DataStateError(f"The loader's state is damaged: {name} is {value!r}.")

        if state["length"] != self.length:
            raise DataStateError(
                f"The snapshot's dataset had {state['length']:,} samples, this one has {self.length:,}: "
                "the position means nothing here.\n"
                "Train on with the dataset of the snapshot, or have the loader begin at the epoch's start: "
                "snaps.resume(optional=['loader']), by the name that it is tracked with."
            )
        for name, argument in (("seed", "seed="), ("order", "shuffle= or the shards")):
            if state[name] != getattr(self, name):
                raise DataStateError(
                    f"The snapshot's {name} is {state[name]!r}, the loader's {getattr(self, name)!r}: "
                    "samples would be lost and repeated.\n"
                    f"Give the loader the {argument} of the snapshot."
                )
        # Snapshots of earlier versions, and those of a dataset that was no Subset, have no part.
        if self.part and state.get("part", self.part) != self.part:
            raise DataStateError(
                "The snapshot's Subset had other samples than this one has: what was held back would be trained, and "
                "samples would be lost and repeated.\n"
                "Choose the same ones in each start and on each rank: "
                "random_split(…, generator=torch.Generator().manual_seed(0)), or random.Random(0).shuffle(indices)."
            )
        if state["cursor"] > self.length:
            raise DataStateError(
                f"The loader's state is damaged: {state['cursor']:,} of {self.length:,} samples trained."
            )

        self._begin_epoch(state["epoch"])
        self.cursor = state["cursor"]
        self._as_loaded, self.known = True, False
