"""Lets the nodes of a generation measure each other in rounds (--preflight full), and names the node or the link that
is slow. Pure.

In a round every node measures with one other, all pairs at once, so that n nodes need n - 1 rounds. There are 7 at
most: of more than 8 nodes each one meets 7 others. Pairs that seem to be slow are measured once more before anybody is
named: the nodes share their processors and switches with others. A node that does not answer, or does not answer in
time, costs a bounded wait, and its pairs are not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from holdfast.doctor.slow_pairs import Pair, Slow, judge
from holdfast.extensions.health.messages import (
    ROUND_S,
    ROUNDS_MAX,
    Measurable,
    MeasurePairs,
    PairPeer,
    PairsMeasured,
    PairsOver,
)
from holdfast.protocol.extension import Job, Order, ToNode

NODES_MIN = 4
"""Number of nodes from which most pairs are good if one node is slow: with fewer, nothing says what is usual."""
SLOW_SHARE = 0.3
"""A pair is slow below this share of the median. One connection of one process is not a steady measure, and what is
slower by less is seen in the steps (extensions/stragglers)."""
AGAIN_MAX = 3
"""Pairs of one node that are measured once more."""
NOTED_MAX = 64
"""Pairs whose rates are in the journal."""
ANSWER_S_MAX = 3.0
"""Limit of the time for the answers after the last round (s)."""


class PairsFound(NamedTuple):
    """The result for one generation."""

    generation: int
    orders: list[Order]
    slow: tuple[Slow, ...] = ()
    """The slow nodes and links, by the index in `members`."""
    members: tuple[str, ...] = ()
    rates: Mapping[str, int] | None = None
    """The rates of the slowest pairs, by the names of both, if the rounds are over and were judged."""


class PairRounds:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._measured: frozenset[str] = frozenset()
        """The members among which all pairs were measured."""
        self._generation = 0
        """The generation of the rest; 0: none is measured."""
        self._offers: dict[str, Measurable] = {}
        self._members: tuple[str, ...] = ()
        """The nodes that measure now; their indices are those of the pairs. Empty: none do."""
        self._attempt = 0
        self._asked: frozenset[Pair] = frozenset()
        """The pairs of this attempt."""
        self._answers: dict[str, Mapping[int, float]] = {}
        """Rates of this attempt, by the member that has sent and the index of the receiver."""
        self._rates: dict[Pair, float] = {}
        """The rates of the attempt before."""
        self.due_s = inf

    def offered(self, now: float, member: str, offer: Measurable) -> PairsFound | None:
        """A node of this generation waits for its order to measure."""
        if offer.generation < self._job.generation:
            return None  # the node's preflight took so long that another generation is being formed
        if offer.generation != self._generation:
            self._forget(offer.generation)
        self._offers[member] = offer
        if self._members or len(self._offers) < offer.nodes:
            return None
        members = tuple(self._offers)
        if len(members) < NODES_MIN or self._measured.issuperset(members):
            return self._over(members, ())
        self._members = members
        return PairsFound(self._generation, self._orders(now, all_rounds(len(members), ROUNDS_MAX)))

    def answered(self, now: float, member: str, message: PairsMeasured) -> PairsFound | None:
        """What a node has measured in its rounds."""
        if (message.generation, message.attempt) != (self._generation, self._attempt) or member not in self._members:
            return None
        self._answers[member] = message.rates
        return self._judge(now) if len(self._answers) == len(self._members) else None

    def due(self, now: float) -> PairsFound | None:
        return self._judge(now) if self._members and now >= self.due_s else None

    def gone(self, member: str) -> list[Order]:
        """A node was lost or parked: its generation is formed again, and nobody waits for its rounds any more."""
        if member not in self._offers:
            return []
        orders: list[Order] = [ToNode(each, PairsOver(self._generation)) for each in self._offers]
        self._forget(0)
        return orders

    def _forget(self, generation: int) -> None:
        self._generation, self._offers, self._members = generation, {}, ()
        self._attempt, self._rates, self.due_s = 0, {}, inf

    def _orders(self, now: float, rounds: Sequence[Sequence[Pair]]) -> list[Order]:
        self._attempt += 1
        self._asked = frozenset(pair for pairs in rounds for pair in pairs)
        self._answers = {}
        self.due_s = now + len(rounds) * ROUND_S + ANSWER_S_MAX
        offers = [self._offers[member] for member in self._members]
        peers = [
            PairPeer(index, self._job.address(member), offer.port, offer.key)
            for index, (member, offer) in enumerate(zip(self._members, offers, strict=True))
        ]
        partners: list[list[PairPeer | None]] = [[None] * len(rounds) for _ in peers]
        for number, pairs in enumerate(rounds):
            for one, other in pairs:
                partners[one][number], partners[other][number] = peers[other], peers[one]
        return [
            ToNode(member, MeasurePairs(self._generation, self._attempt, index, tuple(partners[index])))
            for index, member in enumerate(self._members)
        ]

    def _judge(self, now: float) -> PairsFound:
        rates = dict(self._now())
        if self._attempt > 1:
            again = {pair: max(rate, self._rates[pair]) for pair, rate in rates.items()}
            # What was slow, and was not measured once more, says nothing.
            rates = {pair: rate for pair, rate in self._rates.items() if pair not in self._suspected()} | again
            return self._over(self._members, judge(rates, SLOW_SHARE), rates)
        self._rates = rates
        again_rounds = second_look(self._suspected())
        if not again_rounds:
            return self._over(self._members, (), rates)
        return PairsFound(self._generation, self._orders(now, again_rounds))

    def _suspected(self) -> list[Pair]:
        return [pair for each in judge(self._rates, SLOW_SHARE) for pair in self._rates if set(each.nodes) <= set(pair)]

    def _now(self) -> Iterator[tuple[Pair, float]]:
        """The rates of the pairs that both ends have measured: the worse direction."""
        for pair in self._asked:
            ends = [self._answers.get(self._members[one], {}).get(other) for one, other in (pair, pair[::-1])]
            known = [rate for rate in ends if rate is not None]
            if len(known) == len(ends):
                yield pair, min(known)

    def _over(
        self, members: tuple[str, ...], slow: tuple[Slow, ...], rates: Mapping[Pair, float] | None = None
    ) -> PairsFound:
        generation = self._generation
        orders: list[Order] = [ToNode(member, PairsOver(generation)) for member in members]
        shown: dict[str, int] | None = None
        if rates is not None:
            slowest = sorted(rates.items(), key=lambda each: each[1])[:NOTED_MAX]
            shown = {f"{members[one]} {members[other]}": round(rate) for (one, other), rate in slowest}
            self._measured = frozenset(members)
        self._forget(0)
        return PairsFound(generation, orders, slow, members, shown)


def all_rounds(nodes: int, most: int) -> list[list[Pair]]:
    """Rounds in which no node meets another one twice, at most so many: one node stays, and the others go round.

    >>> all_rounds(4, 7)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    ring: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    rounds = []
    for _ in range(min(most, len(ring) - 1)):
        met = zip(ring[: len(ring) // 2], reversed(ring), strict=False)
        rounds.append(sorted(_pair(one, other) for one, other in met if one is not None and other is not None))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def second_look(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Rounds for these pairs, as few as possible, and not more than AGAIN_MAX of them for one node.

    >>> second_look([(0, 1), (0, 2), (0, 3), (0, 4), (5, 6)])
    [[(0, 1), (5, 6)], [(0, 2)], [(0, 3)]]
    """
    rounds: list[list[Pair]] = [[] for _ in range(AGAIN_MAX)]
    for pair in pairs:
        for each in rounds:
            if not any(set(pair) & set(other) for other in each):
                each.append(pair)
                break
    return [each for each in rounds if each]


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)
