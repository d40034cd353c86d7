"""A dataset whose random numbers hang on the sample alone.

The random numbers of a sample's augmentation come from (seed, epoch, the sample's index), never from worker or rank: a
sample looks the same in an epoch whichever rank and worker reads it, and however often the job was restarted.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, get_worker_info

_WORD = (1 << 64) - 1


class BatchKey(NamedTuple):
    """The key with which torch's loader requests one batch."""

    epoch: int
    samples: list[int]


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """64 bits for one sample in one epoch; for pipelines with generators of their own."""
    return _mixed(_mixed(_mixed(seed & _WORD) ^ epoch) ^ index)


class Seeded:
    """A map-style dataset whose `random`, numpy and torch (CPU) generators are seeded for each sample.

    In the training process the generators are put back afterwards, so that loading draws nothing from the trainer's.
    A dataset that reads whole batches (`__getitems__`) is read so, and seeded once for each batch by its first sample.
    Other attributes are the dataset's own, to read and to set: `get_worker_info().dataset` is this object.
    """

    __slots__ = ("_dataset", "_enabled", "_seed")

    def __init__(self, dataset: Any, seed: int, *, enabled: bool) -> None:
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_seed", seed)
        object.__setattr__(self, "_enabled", enabled)

    def __getitems__(self, key: BatchKey) -> list[Any]:
        if not self._enabled:
            return list(self._read_all(key.samples))
        with contextlib.nullcontext() if get_worker_info() else _generators_kept():
            if _reads_batches(self._dataset):
                _seed_generators(sample_seed(self._seed, key.epoch, key.samples[0]))
                return list(self._read_all(key.samples))
            return [self._read_one(key.epoch, index) for index in key.samples]

    def _read_one(self, epoch: int, index: int) -> Any:
        _seed_generators(sample_seed(self._seed, epoch, index))
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
    """A Subset always has the method; it helps only if the dataset below has it too."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def _mixed(number: int) -> int:
    """splitmix64."""
    number = (number + 0x9E3779B97F4A7C15) & _WORD
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _WORD
    return number ^ (number >> 31)
