"""Compares tensors of several ranks that have to be equal, by a digest of each, and finds values that are not finite.

A digest is one number of 64 bits: the sum of the tensor's words, each multiplied by an odd number that depends on its
position. It reads memory at about its full bandwidth (10 GB/s with two cores where crc32 has 4), costs one operation
per large tensor, and is the same number on every device. Equal bits have equal digests; different bits practically
never do.

Knows tensors and digests. Knows neither snapshots nor how ranks exchange messages.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.train.torch_private import local_part

BLOCK_WORDS = 1 << 15
"""The number of words in a block, and of factors: both fit into a core's cache."""
PASS_BLOCKS = 1 << 8
"""The number of blocks that are multiplied at once on a device that needs memory for the products."""
WORD_BYTES = 8
SMALL_BYTES_MAX = 1 << 16
"""A tensor of at most this size is joined with others."""
JOINED_MAX = 1 << 12
"""Limit of the small tensors that are joined."""


@dataclass(frozen=True)
class ReplicaGroup:
    """Tensors that have to be equal on these ranks."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    """The names of the tensors, in the order in which they were tracked."""


@dataclass(frozen=True)
class ReplicaDifference:
    """Ranks whose replicas are not those of the majority."""

    odd: tuple[int, ...]
    """The ranks that differ from the majority; empty: there is no majority."""
    ranks: tuple[int, ...]
    """All ranks that were compared."""

    def __str__(self) -> str:
        if self.odd:
            word = "rank" if len(self.odd) == 1 else "ranks"
            verb = "differs" if len(self.odd) == 1 else "differ"
            others = [rank for rank in self.ranks if rank not in self.odd]
            return f"{word} {_listed(self.odd)} {verb} from rank{'s' * (len(others) > 1)} {_listed(others)}"
        if len(self.ranks) == 2:
            return "rank {} and rank {} differ".format(*self.ranks)
        return f"ranks {_listed(self.ranks)} differ from one another"


def difference(values: Mapping[int, Hashable]) -> ReplicaDifference | None:
    """The difference between these values, by rank; None: all are equal."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    (most, votes), *_ = counts.most_common(1)
    odd = tuple(rank for rank, each in values.items() if each != most) if 2 * votes > len(values) else ()
    return ReplicaDifference(odd, tuple(values))


def first_difference(
    digests_by_rank: Mapping[int, Sequence[int]], names: Sequence[str]
) -> tuple[str, ReplicaDifference] | None:
    """The first of these tensors whose digests differ between the ranks, and the difference; None: none does."""
    for name, *digests in zip(names, *digests_by_rank.values(), strict=True):
        found = difference(dict(zip(digests_by_rank, digests, strict=True)))
        if found is not None:
            return name, found
    return None


def total(tensors: Sequence[torch.Tensor]) -> str:
    """One digest of all these tensors, or of the parts of them that this process holds."""
    # Types and shapes belong to the digest: zeros of any shape have the same sum.
    shapes = [f"{each.dtype} {tuple(each.shape)}" for each in map(_local, tensors)]
    digest = hashlib.blake2b("\n".join(shapes).encode(), digest_size=16)
    sums = _read(digests_of(tensors))
    digest.update(struct.pack(f"<{len(sums)}q", *sums))
    return digest.hexdigest()


def digests_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Digests of these tensors: tensors of one number, each on its device. Several small tensors of a type have one
    digest together. It waits for no device."""
    with torch.no_grad():
        return [_digest(_words(each)) for each in _joined([_local(each) for each in tensors])]


def each_digest(tensors: Sequence[torch.Tensor]) -> list[str]:
    """`total` of each tensor alone."""
    return [total([each]) for each in tensors]


def first_not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    """Name of the first of these tensors with a number that is nan or infinite; empty: there is none."""
    with torch.no_grad():
        numbers = {name: each for name, tensor in tensors.items() if _has_range(each := _local(tensor))}
        if all(_read([_is_finite(each) for each in _joined(list(numbers.values()))])):
            return ""
        return next((name for name, each in numbers.items() if not _read([_is_finite(each)])[0]), "")


# --- many tensors -----------------------------------------------------------------------------------------------------


def _joined(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The large tensors, and new ones in which the small ones of a type are joined: an operation for each of 20,000
    small tensors would take longer than to read them."""
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for each in tensors:
        if each.nbytes > SMALL_BYTES_MAX:
            yield each
            continue
        several = small.setdefault((each.dtype, each.device), [])
        several.append(each.resolve_conj().resolve_neg().reshape(-1))
        if len(several) == JOINED_MAX:
            yield torch.cat(several)
            several.clear()
    for several in small.values():
        if several:
            yield torch.cat(several)


def _read(values: Sequence[torch.Tensor]) -> list[Any]:
    """The values of tensors of one item. It waits once for each device."""
    found: dict[int, Any] = {}
    by_device: dict[torch.device, list[int]] = {}
    for number, each in enumerate(values):
        by_device.setdefault(each.device, []).append(number)
    for numbers in by_device.values():
        found |= zip(numbers, torch.stack([values[number] for number in numbers]).tolist(), strict=True)
    return [found[number] for number in range(len(values))]


# --- one tensor -------------------------------------------------------------------------------------------------------


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of the tensor that this process has."""
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of this tensor as words of 64 bits."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    rest = flat.nbytes % WORD_BYTES
    if rest or flat.storage_offset() * flat.itemsize % WORD_BYTES or flat.data_ptr() % WORD_BYTES:
        # torch views only aligned memory of whole words as words: otherwise it is copied, and padded with zeros.
        padded = torch.zeros(flat.nbytes + (WORD_BYTES - rest) % WORD_BYTES, dtype=torch.uint8, device=flat.device)
        padded[: flat.nbytes] = flat.view(torch.uint8)
        flat = padded
    return flat.view(torch.int64)


def _digest(words: torch.Tensor) -> torch.Tensor:
    """The digest of these words, as a tensor of one number."""
    while words.numel() > 1:
        words = _sums(words)
    return words.sum()


def _sums(words: torch.Tensor) -> torch.Tensor:
    """The sums of the multiplied words, one for each block."""
    factors = _factors(words.device)
    whole = words.numel() // BLOCK_WORDS * BLOCK_WORDS
    blocks, rest = words[:whole].view(-1, BLOCK_WORDS), words[whole:]
    if words.is_cpu:
        sums = [blocks @ factors] if whole else []
    else:  # devices multiply no matrices of whole numbers
        sums = [(each * factors).sum(1) for each in blocks.split(PASS_BLOCKS)] if whole else []
    if rest.numel():
        sums.append((rest * factors[: rest.numel()]).sum().view(1))
    return torch.cat(sums)


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """The odd numbers by which the words of a block are multiplied. They look random: with small ones, changes of low
    bits at two positions would often cancel."""
    state = torch.arange(1, BLOCK_WORDS + 1, dtype=torch.int64) * -7046029254386353131
    state = (state ^ (state >> 30)) * -4658895280553007687
    return ((state ^ (state >> 27)) | 1).to(device)


def _has_range(tensor: torch.Tensor) -> bool:
    """Whether the tensor may have items that are not finite."""
    return tensor.numel() > 0 and bool(tensor.is_floating_point() or tensor.is_complex())


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all items are finite, as a tensor of one truth value. The least and the greatest item show it:
    `torch.isfinite` makes a tensor of the same length, and takes twenty times as long."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.itemsize == 1:  # torch cannot compare floats of 8 bits
        tensor = tensor.to(torch.float32)
    least, greatest = torch.aminmax(tensor)
    return torch.isfinite(least) & torch.isfinite(greatest)


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    """The ranks for a message: the first `most` of them."""
    named = [str(rank) for rank in ranks[:most]]
    if len(ranks) > most:
        return f"{', '.join(named)} …"
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
