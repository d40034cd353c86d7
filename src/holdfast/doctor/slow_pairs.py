"""Names the one node or link that is slow, from two rounds of measurements between pairs of nodes. PURE.

In a round each node measures with one other, all pairs at once. A slow pair of the first round says that one of its
nodes, or the link between them, is slow. In the second round each of the two measures with a node of a good pair: the
node that is slow again is at fault; if none is, the link between the two was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

SLOW_SHARE = 0.9
"""A pair is slow below this share of the median of all pairs."""

Pair = tuple[int, int]


class Slow(NamedTuple):
    """One node, or the link between two."""

    nodes: tuple[int, ...]
    share: float
    """Its rate, as a share of the median."""

    @property
    def is_link(self) -> bool:
        return len(self.nodes) == 2


def first_round(nodes: int) -> tuple[Pair, ...]:
    """Neighbours. With an odd number of nodes the last one measures in the second round alone.

    >>> first_round(5)
    ((0, 1), (2, 3))
    """
    return tuple((node, node + 1) for node in range(0, nodes - 1, 2))


def second_round(nodes: int, first: Mapping[Pair, float]) -> tuple[Pair, ...]:
    """Each node of a slow pair with one of a good pair, as long as there are such; then the rest among themselves. No
    pair is measured twice."""
    slow = [pair for pair, _ in _slow(first)]
    suspects = [node for pair in slow for node in pair]
    known = {node for pair in first for node in pair}
    good = [node for pair in first if pair not in slow for node in pair]
    rest = [node for node in range(nodes) if node not in known]
    # The two of a slow pair get partners of different pairs, where there are enough.
    partners = good[::2] + good[1::2]
    pairs = [_sorted(suspect, partners.pop(0)) for suspect in suspects if partners]
    left = [*rest, *partners]
    half = len(left) // 2
    ways = [_joined(left[:half], left[half + turn :] + left[half : half + turn]) for turn in range(max(1, half))]
    best = min(ways, key=lambda way: sum(pair in first for pair in way))
    return (*pairs, *(pair for pair in best if pair not in first))


def _joined(ones: Sequence[int], others: Sequence[int]) -> list[Pair]:
    return [_sorted(one, other) for one, other in zip(ones, others, strict=False)]


def judge(rates: Mapping[Pair, float], slow_share: float = SLOW_SHARE) -> tuple[Slow, ...]:
    """The slow nodes and links of both rounds, or of all pairs; the slowest first. Rates may have any unit."""
    if len(rates) < 3:  # of two rates none is the usual one
        return ()
    usual = _median(rates)
    slow = {pair: rate / usual for pair, rate in rates.items() if rate < slow_share * usual}
    found = []
    explained: set[Pair] = set()
    for node in sorted({node for pair in slow for node in pair}):
        own = [pair for pair in rates if node in pair]
        # At least one partner is good with another node.
        cleared = any(
            any(other in pair and pair not in slow for pair in rates) for mine in own for other in mine if other != node
        )
        if len(own) > 1 and all(pair in slow for pair in own) and cleared:
            found.append(Slow((node,), min(slow[pair] for pair in own)))
            explained |= set(own)
    found += [Slow(pair, share) for pair, share in slow.items() if pair not in explained]
    return tuple(sorted(found, key=lambda each: each.share))


def _slow(rates: Mapping[Pair, float]) -> Sequence[tuple[Pair, float]]:
    usual = _median(rates) if len(rates) > 1 else 0.0
    return [(pair, rate) for pair, rate in rates.items() if rate < SLOW_SHARE * usual]


def _median(rates: Mapping[Pair, float]) -> float:
    from statistics import median  # the coordinator imports this file at each start, and most jobs measure no pairs

    return median(rates.values())


def _sorted(one: int, other: int) -> Pair:
    return (min(one, other), max(one, other))
