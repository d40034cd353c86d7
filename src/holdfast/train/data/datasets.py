"""Datasets as torch's loader reads them: seeded for each sample, and in sequence from shards.

**Seeds.** The random numbers of a sample's augmentation come from (seed, epoch, the sample's index), never from worker
or rank, also those of generators that the dataset or its transforms have as attributes: in an epoch a sample looks the
same whichever rank and worker reads it, and however often the job was restarted.

**Shards.** Data that can only be read in sequence are a fixed number of logical shards, dealt to any number of ranks.
The shards are the dataset's, chosen once (files, or ranges of them) and never changed by a resize. The epoch's order
goes round them: the first sample of every shard, then the second of every shard that has one, and so on, the shards
in an order of their own in each epoch. So how far every shard has been read follows from the one cursor, and the
state of all shards survives a resize in a single number.

Each optimizer step's samples are sorted by shard before they are dealt, so a rank reads from neighbouring shards only.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import operator
import random
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, get_worker_info

from holdfast.protocol.errors import DataError
from holdfast.train.data import EpochOrder, Integers, Share, order_of

SHARDS_OPEN_MAX = 256
"""Limit of the shards that one process reads at the same time. Beyond it the one unused for longest is closed."""
LEVELS_MAX = 6
OBJECTS_MAX = 512
ITEMS_MAX = 64
"""Limits of the search for a dataset's generators: how deep it goes, of the objects at each depth, and of the length of
a list or dict. A longer one has samples, and no transforms."""
CHEAP_OBJECTS_MAX = 100
"""A search over so few objects takes about 10 us, and is made for each batch."""
TWISTS_MAX = 32
"""Limit of the draws of a Mersenne Twister between two states that are compared, in units of 624 words."""
KINDS_MAX = 1024
"""Limit of the classes of which it is kept how they are searched."""
Generator: TypeAlias = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_of_modules: tuple[Any, Any] = (random.getstate, np.random.get_state)
EVERYWHERE: tuple[Generator, ...] = (*(each.__self__ for each in _of_modules), torch.default_generator)
"""The global generators."""
_NOT_SEARCHED = (str, int, float, torch.Tensor, np.ndarray, type, ModuleType)
_ITEMS: dict[Any, Any] = {list: list.__iter__, tuple: tuple.__iter__, dict: dict.values}
"""The functions that read items, also of a subclass that has its own way."""
_SETTINGS = (bool, int, float, str, type(None))
_WORD = (1 << 64) - 1


# --- seeds ------------------------------------------------------------------------------------------------------------


class BatchKey(NamedTuple):
    """The key with which torch's loader requests one batch."""

    epoch: int
    samples: list[int]


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """A seed of 64 bits for one sample in one epoch; for pipelines with generators of their own."""
    return _mixed(_mixed(_mixed(seed & _WORD) ^ epoch) ^ index)


class Seeded:
    """A map-style dataset that is read with seeded generators, for each sample: those of `random`, numpy and torch
    (CPU), and those that it has as attributes, as many libraries of augmentations do.

    In the training process the generators are put back afterwards, so that loading draws nothing from the trainer's.
    A dataset that reads whole batches (`__getitems__`) is read by batches, and seeded once for each by its first
    sample. Reading or setting any other attribute goes to the dataset, because `get_worker_info().dataset` is this
    object.
    """

    __slots__ = ("_dataset", "_enabled", "_own", "_seed")

    def __init__(self, dataset: Any, seed: int, *, enabled: bool) -> None:
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_own", _OwnGenerators(dataset))
        object.__setattr__(self, "_seed", seed)
        object.__setattr__(self, "_enabled", enabled)

    def __getitems__(self, key: BatchKey) -> list[Any]:
        if not self._enabled:
            return list(self._read_all(key.samples))
        own = self._own.in_batch(key.epoch)
        with contextlib.nullcontext() if get_worker_info() else _generators_kept(own):
            if _reads_batches(self._dataset):
                _seed_generators(sample_seed(self._seed, key.epoch, key.samples[0]), own)
                return list(self._read_all(key.samples))
            return [self._read_one(key.epoch, index, own) for index in key.samples]

    def _read_one(self, epoch: int, index: int, own: Sequence[Generator]) -> Any:
        _seed_generators(sample_seed(self._seed, epoch, index), own)
        return self._dataset[index]

    def _read_all(self, samples: list[int]) -> Any:
        if _reads_batches(self._dataset):
            return self._dataset.__getitems__(samples)
        return [self._dataset[index] for index in samples]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _seeded, (self._dataset, self._seed, self._enabled)


def _seeded(dataset: Any, seed: int, enabled: bool) -> Seeded:
    return Seeded(dataset, seed, enabled=enabled)


def _reads_batches(dataset: Any) -> bool:
    """Whether the dataset reads whole batches. A Subset always has the method for it; it helps only if the dataset
    below has it too."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


class _OwnGenerators:
    """The random generators that a dataset has as attributes, or that its transforms have, in a constant order.

    They are searched for in each batch, since a dataset may make another one. If it has many objects, they are in the
    batches 1, 2, 4, 8 … of an epoch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._epoch: int | None = None
        self._batches = self._objects = 0
        """The number of batches in this epoch, and of objects in the last search."""
        self._found: list[Generator] = []

    def in_batch(self, epoch: int) -> list[Generator]:
        """The generators, for the next batch."""
        self._batches = self._batches + 1 if epoch == self._epoch else 1
        self._epoch = epoch
        if self._objects <= CHEAP_OBJECTS_MAX or self._batches & (self._batches - 1) == 0:
            self._search()
        return self._found

    def _search(self) -> None:
        self._found, self._objects = [], 0
        seen = {id(each) for each in EVERYWHERE}
        level = [self._dataset]
        for _ in range(LEVELS_MAX):
            within: list[Any] = []
            self._objects += len(level)
            for each in level[:OBJECTS_MAX]:
                kind = _searched_as(type(each))  # type: ignore[arg-type]
                if kind is None or id(each) in seen:
                    continue
                seen.add(id(each))
                if kind is Generator:
                    self._found.append(each)
                elif kind is object:
                    within += attributes_of(each).values()
                elif kind.__len__(each) <= ITEMS_MAX:
                    within += _ITEMS[kind](each)
            level = within


@functools.lru_cache(KINDS_MAX)
def _searched_as(kind: type) -> Any:
    """The kind as which objects of a class are searched: Generator, list, tuple, dict, or object, which has attributes;
    None: they are not. No object is asked, as by isinstance: one that is made when it is first used would be made."""
    if issubclass(kind, random.Random):  # one without a state, as SystemRandom, is none
        return Generator if kind.getstate is random.Random.getstate else None
    if issubclass(kind, GENERATORS):
        return Generator
    if issubclass(kind, _NOT_SEARCHED):
        return None
    return next((each for each in _ITEMS if issubclass(kind, each)), object if kind.__dictoffset__ else None)


def is_generator(each: Any) -> bool:
    """Whether it is a random generator that has a state."""
    return _searched_as(type(each)) is Generator  # type: ignore[arg-type]


def attributes_of(each: Any) -> dict[str, Any]:
    """The attributes of an object, by name; empty: it has none, or does not give them."""
    if not type(each).__dictoffset__:  # not hasattr: an object without attributes may answer for all names
        return {}
    try:
        return dict(vars(each))
    except Exception:  # noqa: BLE001 - a foreign object may have its own way
        return {}


def settings_of(dataset: Any) -> dict[str, Any]:
    """The attributes of a dataset, and of the one that a Subset takes samples of, with values that cannot change."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return {name: each for name, each in attributes_of(dataset).items() if type(each) in _SETTINGS}


def first_changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The name of a setting that has changed; empty: none has. One that was None or False below a private name is what
    a dataset finds out, or opens, when it is first asked for."""
    for name, each in now.items():
        was = before.get(name, each)
        is_lazy = name.startswith("_") and (was is None or was is False)
        if was is not each and was != each and not is_lazy:  # NaN differs from itself
            return name
    return ""


def _seed_generators(seed: int, own: Sequence[Generator]) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch.default_generator.manual_seed(seed)
    for number, each in enumerate(own, 1):
        _seed_generator(each, _mixed(seed + number & _WORD))


def _seed_generator(generator: Generator, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _seeded_bits(generator.bit_generator, seed)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        try:
            generator.seed(seed & 0xFFFF_FFFF)
        except TypeError:  # numpy's old class can do so with a Mersenne Twister only
            name = generator.get_state(legacy=False)["bit_generator"]  # type: ignore[union-attr]
            generator.set_state(getattr(np.random, name)(seed).state)  # type: ignore[union-attr]


def _seeded_bits(bits: Any, seed: int) -> Any:
    """A state of numpy's bit generator for this seed."""
    if type(bits) is not np.random.PCG64:
        return type(bits)(seed).state
    # The class does the same in 20 us, of which each sample would pay.
    words = [_mixed(seed + each & _WORD) for each in range(4)]
    whole = {"state": words[0] << 64 | words[1], "inc": words[2] << 64 | words[3] | 1}
    return {"bit_generator": "PCG64", "state": whole, "has_uint32": 0, "uinteger": 0}


class GeneratorState(NamedTuple):
    """A state of a random generator, to be compared with a later one."""

    seed: Any
    """What only seeding changes; None: nothing is."""
    words: tuple[int, ...]
    """Those of a Mersenne Twister; empty: it is of another kind."""
    rest: Any

    def leads_to(self, later: GeneratorState) -> bool:
        """Whether a later state comes from this one by draws alone."""
        if self == later or self.seed != later.seed:
            return False
        if not self.words:
            return True
        twister = random.Random()
        twister.setstate((3, (*self.words, len(self.words)), None))
        for _ in range(TWISTS_MAX):
            if twister.getstate()[1][:-1] == later.words:
                return True
            twister.getrandbits(32 * len(self.words))
        return False


def state_of(generator: Generator) -> GeneratorState:
    """The state that a generator has now."""
    if isinstance(generator, torch.Generator):
        return GeneratorState(generator.initial_seed(), (), generator.get_state().numpy().tobytes())
    if isinstance(generator, random.Random):
        _, words, gauss = generator.getstate()
        return GeneratorState(None, words[:-1], (words[-1], gauss))
    state: Any = (
        generator.bit_generator.state
        if isinstance(generator, np.random.Generator)
        else generator.get_state(legacy=False)
    )
    within = state["state"]
    if "pos" in within:
        return GeneratorState(None, tuple(within["key"].tolist()), str((within["pos"], state.get("gauss"))))
    return GeneratorState(str(within.get("inc", within.get("key"))), (), str(state))


def _restores(generator: Generator) -> Callable[[], object]:
    """A function that sets the generator to the state that it has now."""
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state(legacy=False))
    return functools.partial(generator.set_state, generator.get_state())


@contextlib.contextmanager
def _generators_kept(own: Sequence[Generator]) -> Iterator[None]:
    """Restore the generators after the block."""
    restore = [_restores(each) for each in (*EVERYWHERE, *own)]
    try:
        yield
    finally:
        for each in restore:
            each()


def _mixed(number: int) -> int:
    """The output of splitmix64 for this state."""
    number = (number + 0x9E3779B97F4A7C15) & _WORD
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _WORD
    return number ^ (number >> 31)


PART_INDICES_MAX = 65_536
"""Limit of the indices of a Subset that are read for its digest: parts that were drawn differ everywhere."""


def part_of(dataset: Any) -> str:
    """A digest of the samples that a Subset, as one of `random_split`, takes of its dataset; empty: it is no Subset, or
    its indices are no numbers."""
    if isinstance(dataset, ConcatDataset):
        parts = [part_of(each) for each in dataset.datasets]
        return _digest(parts) if any(parts) else ""
    indices = getattr(dataset, "indices", None) if isinstance(dataset, Subset) else None
    if indices is None:
        return ""
    count = len(indices)
    read = range(0, count, -(-count // PART_INDICES_MAX) or 1)
    try:
        return _digest([count, [operator.index(indices[each]) for each in read], part_of(dataset.dataset)])
    except TypeError:
        return ""


def _digest(value: list[Any]) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"


# --- shards -----------------------------------------------------------------------------------------------------------


class ShardedDataset(IterableDataset, abc.ABC):  # type: ignore[misc]
    """Base of an iterable dataset that any number of ranks can continue from any position.

        class Logs(ht.ShardedDataset):
            shard_sizes = [10_000] * 64                  # samples per shard; have more shards than ranks * workers

            def read(self, shard, start):
                with open(f"logs/{shard:03}.txt") as lines:
                    yield from itertools.islice(lines, start, None)

    For an endless source, `shard_sizes` says how many samples an epoch shall have. For a random generator of your own,
    `holdfast.train.data.datasets.sample_seed(seed, epoch, index)` is the seed of one sample.
    """

    shard_sizes: Sequence[int]

    @abc.abstractmethod
    def read(self, shard: int, start: int) -> Iterator[Any]:
        """The samples of one shard from number `start` on. After a restart or resize it is called again, with a later
        number."""

    def decode(self, sample: Any) -> Any:
        """The sample as it is trained, made of one that `read` gave. The costly part belongs here: `read` also goes
        over samples that other workers take, while this is called only for the worker's own, with the generators seeded
        for the sample.
        """
        return sample

    def __iter__(self) -> Iterator[Any]:
        """All shards one after the other."""
        for shard, size in enumerate(self.shard_sizes):
            samples = self.read(shard, 0)
            for _ in range(size):
                yield self.decode(next(samples))

    def __len__(self) -> int:
        return sum(self.shard_sizes)


class ShardOrder(EpochOrder):
    """An epoch's order over shards. A sample's number is its shard's first number plus its index in the shard.

    A round takes one sample of every shard that still has one. The rounds fall into stretches between the ends of
    shards; within a stretch every round has the same shards, so a position is found by division."""

    def __init__(self, sizes: Integers, seed: int, epoch: int, *, shuffle: bool) -> None:
        super().__init__(int(sizes.sum()))
        self._first = np.cumsum(sizes) - sizes
        order = order_of(len(sizes), seed, epoch, shuffle=shuffle).take(np.arange(len(sizes))).astype(np.int64)
        self._shards = order[np.argsort(sizes[order], kind="stable")]
        """The shards by size, those of one size in the epoch's order: the shards that still have a sample in a round
        are always the last ones."""
        by_size = sizes[self._shards]
        rounds = np.diff(by_size, prepend=0)
        self._rounds_before = by_size - rounds
        """The number of rounds before each stretch."""
        self._ends = np.cumsum(rounds * np.arange(len(sizes), 0, -1))
        """The position at which each stretch ends: its rounds times the shards that still have a sample."""

    def take(self, positions: Integers) -> Integers:
        stretch = np.searchsorted(self._ends, positions, side="right")  # as many shards have ended before it
        begins = np.where(stretch > 0, self._ends[stretch - 1], 0)
        rounds, turn = np.divmod(positions - begins, len(self._shards) - stretch)
        return self._first[self._shards[stretch + turn]] + self._rounds_before[stretch] + rounds

    def share(self, share: Share) -> list[int]:
        # Sorted, so that a rank reads from neighbouring shards only. Samples that "pad" repeats come after these.
        samples = np.sort(self.take(np.arange(share.step_start, share.step_stop)))
        if wrapped := max(0, share.stop - share.step_stop):
            samples = np.concatenate([samples, self.take(np.arange(wrapped) % self.length)])
        own: list[int] = samples[share.start - share.step_start : share.stop - share.step_start].tolist()
        return own


class ShardReader:
    """Access by index for torch's loader. Within a shard it only reads forward, which suffices for ShardOrder."""

    def __init__(self, dataset: ShardedDataset) -> None:
        self._dataset = dataset
        self._ends = np.cumsum(shard_sizes(dataset))
        self._open: OrderedDict[int, tuple[int, Iterator[Any]]] = OrderedDict()
        """The open shards, in the order of their last use: index of the next sample, and the iterator over them."""

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        size = self._dataset.shard_sizes[shard]
        wanted = index - (int(self._ends[shard]) - size)
        reached, samples = self._open.pop(shard, (wanted + 1, iter(())))
        if reached > wanted:  # it is not open, or this is a new epoch
            reached, samples = wanted, self._dataset.read(shard, wanted)
        skipped = sum(1 for _ in itertools.islice(samples, wanted - reached))
        try:
            sample = next(samples)
        except StopIteration:
            raise DataError(
                f"Shard {shard} ended after {reached + skipped:,} samples; shard_sizes says {size:,}."
            ) from None

        self._open[shard] = (wanted + 1, samples)
        if len(self._open) > SHARDS_OPEN_MAX:
            self._open.popitem(last=False)
        return self._dataset.decode(sample)

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy in another process: open shards stay in this one."""
        return {**self.__dict__, "_open": OrderedDict()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._dataset, name)


def shard_sizes(dataset: ShardedDataset) -> Integers:
    """The number of samples of each shard. Raises DataError if the dataset does not say it."""
    sizes = np.asarray(getattr(dataset, "shard_sizes", ()), dtype=np.int64)
    if sizes.ndim != 1 or not len(sizes) or (sizes < 0).any():
        raise DataError(
            "A ShardedDataset needs `shard_sizes`: the number of samples of each of its shards, in a fixed order."
        )
    return sizes


def shard_order_name(sizes: Integers, *, shuffle: bool) -> str:
    """The name of an order over shards. It differs for shards of other sizes, even if the sum is the same."""
    return f"{'shuffled' if shuffle else 'sequential'}-shards-1-{len(sizes)}-{zlib.crc32(sizes.tobytes()):08x}"
