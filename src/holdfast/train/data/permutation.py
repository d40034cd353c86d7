"""The order of an epoch's samples, a function of (length, seed, epoch) alone, the same for ever on every machine.

numpy and torch do not promise that `permutation` and `randperm` give the same order in their next version; a snapshot
outlives versions. So the order is specified here, from what cannot change:

- up to ARRAY_LENGTH_MAX samples: the i-th output of Philox4x64-10 (a published algorithm; numpy keeps its raw streams) with
  the key (seed, epoch) and the counter 0 is sample i's number; its lowest 24 bits are replaced by i; the samples are sorted.
- above: a Feistel network of ROUNDS rounds on pairs (a, b) of about the square root of the length, its round keys the
  first outputs of the same Philox. It needs no memory, and any stretch of the order is computed alone.

Knows no rank, no batch and no dataset.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias

import numpy as np

from holdfast.core.errors import DataError
from holdfast.train.batch import Share

ARRAY_LENGTH_MAX = 10_000_000
"""Samples. Part of the specification: another bound is another order."""
ROUNDS = 8
SEQUENTIAL = "sequential"
SHUFFLED = "shuffled-1"
"""Names of orders, kept in snapshots; another specification gets another number."""
_INDEX_BITS = 24
_WORD = 1 << 64

Integers: TypeAlias = Any
"""A numpy array of whole numbers (mypy does not read numpy)."""


class EpochOrder(Protocol):
    """An epoch's order."""

    name: str
    """Says which kind it is; kept in snapshots, so that a position is never read in another order."""

    def take(self, positions: Integers) -> Integers:
        """The samples at these positions, each in 0 … length - 1."""

    def share(self, share: Share) -> list[int]:
        """The samples of one rank's batch."""


class Sequential:
    """The dataset's own order."""

    name = SEQUENTIAL

    def __init__(self, length: int) -> None:
        self.length = length

    def take(self, positions: Integers) -> Integers:
        return positions

    def share(self, share: Share) -> list[int]:
        samples: list[int] = self.take(np.arange(share.start, share.stop) % self.length).tolist()
        return samples


class Shuffled(Sequential):
    """Up to ARRAY_LENGTH_MAX samples: 4 bytes each, and about 80 ns each at the epoch's start."""

    name = SHUFFLED

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


class Feistel(Sequential):
    """Any length, no memory. Outputs outside the length are sent through the network again until they are inside."""

    name = SHUFFLED

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
        return Sequential(length)
    return Shuffled(length, seed, epoch) if length <= ARRAY_LENGTH_MAX else Feistel(length, seed, epoch)


def philox(seed: int, epoch: int) -> Any:
    """Philox4x64-10 under the key (seed, epoch). Raises DataError for an epoch below 0."""
    if epoch < 0:
        raise DataError(f"Epochs are counted from 0; {epoch} is none.")
    return np.random.Philox(key=np.array([seed % _WORD, epoch], dtype=np.uint64), counter=0)


def _mixed(numbers: Integers) -> Integers:
    """splitmix64's finaliser: every bit of the input reaches every bit of the output."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
