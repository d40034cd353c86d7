"""Finds the rank that called a collective with other sizes than its peers, from the calls with types and shapes that
the ranks recorded when they raised.

gloo's check of sizes aborts a process that received more than it expects. This process is rarely the one that is wrong,
and it records no call itself. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

from msgspec import Struct

from holdfast.coordinator.complaints import NOTICED
from holdfast.protocol.outcome import Failure
from holdfast.text import ranks_text

CALL = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
DUMPED_CALL = re.compile(
    r'^[ \t]+File "[^"\n]*/torch/distributed/distributed_c10d\.py", line \d+ in ([a-z]\w*)', re.MULTILINE
)
SHAPE = re.compile(r"\b\w++\[([\d, ]*)\]")
SIZED = re.compile(r"\b[a-z]++(\d*+)\w*+\[([\d, ]*)\]")
"""The bits of a type, which its name has, and a shape: `bfloat16[4, 2]`, `bool[7]`."""
BITS_OF_BOOL = 8
SIDES_DIFFER = frozenset(["gather", "scatter", "reduce", "broadcast"])
"""Collectives in which one rank gives more arguments. The first tensor is that of every rank."""
UNEVEN = frozenset(["all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv"])
"""Operations in which sizes may differ."""
FROM_ONE = frozenset(["broadcast", "scatter"])
"""Collectives in which one rank sends and the others receive."""


class OtherSizes(Struct, frozen=True):
    """The rank that is wrong, and how it differs."""

    failure: Failure
    difference: str
    """The difference in words: `called all_reduce(float32[5]), and ranks 0, 2 all_reduce(float32[4])`."""


def is_noticed(failure: Failure) -> bool:
    """Whether it failed because a check found that ranks called different collectives."""
    return bool(NOTICED.search(failure.message) or NOTICED.search(failure.stderr_tail))


def other_sizes(failures: Sequence[Failure]) -> OtherSizes | None:
    """The rank with another call than its peers; None: they are equal, or it is unknown which one is wrong."""
    noticed = [each for each in failures if not each.collective and is_noticed(each)]
    others = [each for each in failures if each not in noticed and (each.collective or each.tensors)]
    if not noticed:
        others = [each for each in others if each.collective]
        return _odd_call([each for each in others if _name(each) == _name(others[0])], receiver=False)

    called = _dumped(noticed[0])
    if len(noticed) > 1:
        rest = [each for each in failures if each not in noticed]
        if called in FROM_ONE and len(rest) == 1:
            return OtherSizes(rest[0], f"gave {called} a larger size than its peers")
        return None  # in a ring one of the two is wrong, and the sizes of its parts may hide which one

    same = [each for each in others if _name(each) == called]
    found = _odd_call(same, receiver=True) or _odd_tensor(others)
    if found is not None:
        return found
    if len(same) > 1 and len({_given(each) for each in same}) == 1:
        return OtherSizes(noticed[0], f"called {called} with a smaller size, and {_ranks(same)} {same[0].collective}")
    if called in FROM_ONE and len(others) > 1 and not same:
        return OtherSizes(noticed[0], f"called {called} with a smaller size than its peers, which have left it")
    return None


def _odd_call(same: Sequence[Failure], *, receiver: bool) -> OtherSizes | None:
    """The one of these, which call the same function, that gives other sizes than the others.

    With `receiver`, another rank received more than it expects, so the larger one of two is wrong.
    """
    if not same or _name(same[0]) in UNEVEN:
        return None
    odd = _odd({each.rank: _given(each) for each in same}, receiver=receiver)
    if odd is None:
        return None
    failure = next(each for each in same if each.rank == odd)
    others = [each for each in same if each.rank != odd]
    return OtherSizes(failure, f"called {failure.collective}, and {_ranks(others)} {others[0].collective}")


def _odd_tensor(others: Sequence[Failure]) -> OtherSizes | None:
    """The rank whose script has a variable of another size, if the ranks have left the collective that failed. All
    variables that differ must differ on the same rank."""
    found: dict[int, str] = {}
    for name in dict.fromkeys(name for each in others for name in each.tensors):
        shapes = {each.rank: each.tensors[name] for each in others if name in each.tensors}
        if len(set(shapes.values())) < 2:
            continue
        odd = _odd(shapes, receiver=True)
        if odd is None:
            return None
        usual = next(shape for rank, shape in shapes.items() if rank != odd)
        found.setdefault(odd, f"has another size than its peers: {name} is {shapes[odd]}, and {usual} there")
    if len(found) != 1:
        return None
    rank, text = next(iter(found.items()))
    return OtherSizes(next(each for each in others if each.rank == rank), text)


def _odd(shapes: Mapping[int, str], *, receiver: bool) -> int | None:
    """The rank with another shape than all others; None: there is none."""
    counts = Counter(shapes.values())
    if len(counts) != 2:
        return None
    (_, most), (rare, least) = counts.most_common()
    if most == least:
        if most > 1 or not receiver:
            return None
        rare = max(counts, key=_bits)
    elif least > 1:
        return None
    return next(rank for rank, shape in shapes.items() if shape == rare)


def _bits(shapes: str) -> int:
    """The size of all tensors in memory, which is what gloo compares, whatever their types are (bits)."""
    return sum(
        int(bits or BITS_OF_BOOL) * prod(int(size) for size in sizes.split(",") if size.strip())
        for bits, sizes in SIZED.findall(shapes)
    )


def _name(failure: Failure) -> str:
    found = CALL.fullmatch(failure.collective)
    return found[1] if found else failure.collective


def _given(failure: Failure) -> str:
    """The tensors of the failure's call that must be alike on all ranks."""
    found = CALL.fullmatch(failure.collective)
    if found is None:
        return failure.collective
    first = SHAPE.search(found[2]) if found[1] in SIDES_DIFFER else None
    return first[0] if first else found[2]


def _dumped(failure: Failure) -> str:
    """The collective that the script called, from the stacks that an aborted process wrote, innermost first."""
    found = DUMPED_CALL.findall(failure.stderr_tail)
    return found[-1] if found else ""


def _ranks(failures: Sequence[Failure]) -> str:
    return ranks_text(each.rank for each in failures)
