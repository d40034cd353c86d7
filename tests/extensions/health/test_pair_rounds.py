"""Nodes that measure each other before a generation: who measures whom, who is named, and what nobody waits for."""

from __future__ import annotations

import asyncio
import random
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.coordinator.coordinator_events import LinkClosed
from holdfast.doctor.slow_pairs import Pair
from holdfast.extensions.health.messages import (
    ROUNDS_MAX,
    Measurable,
    MeasurePairs,
    PairsMeasured,
    PairsOver,
)
from holdfast.extensions.health.pair_measure import take_part
from holdfast.extensions.health.pair_rounds import all_rounds
from tests.coordinator.coordinator_harness import CoordinatorHarness
from tests.support.limits import limit_s

KEY = bytes(16)
USUAL = 1e9


class Fleet:
    """Nodes on links 1 … n, whose networks are as the test says, and a coordinator."""

    def __init__(self, nodes: int, *, spares: int = 0, seed: int = 0) -> None:
        self.harness = CoordinatorHarness(nodes, nodes)
        self.nodes = nodes
        self.slow: dict[frozenset[int], float] = {}
        """Rates by the links of a pair, or of one node."""
        self.silent: set[int] = set()
        self.orders: dict[int, list[msgspec.Struct]] = {}
        self._random = random.Random(seed)
        for link in range(1, nodes + spares + 1):
            self.harness.join(link)

    def in_order(self) -> list[int]:
        world = self.harness.machine.world
        assert world is not None
        return [self.harness.machine.members[name].link for name in world.order]

    def offers(self) -> None:
        for link in self.in_order():
            offer = Measurable(self.harness.machine.generation, self.nodes, 1000 + link, KEY)
            self.harness.extend(link, "health", offer)

    def takes(self) -> dict[int, MeasurePairs]:
        """The orders to measure that were sent since the last call; the others are kept."""
        found, self.harness.extended = self.harness.extended, []
        kinds: Any = MeasurePairs | PairsOver
        measure = {}
        for link, each in found:
            order = msgspec.msgpack.decode(each.body, type=kinds)
            self.orders.setdefault(link, []).append(order)
            if isinstance(order, MeasurePairs):
                measure[link] = order
        return measure

    def measures(self, noise: dict[Pair, float] | None = None) -> None:
        """All nodes carry out their orders, until there are none. `noise`: rates of the first time alone."""
        while orders := self.takes():
            for link, order in orders.items():
                if link in self.silent:
                    continue
                rates = {}
                for peer in order.partners:
                    if peer is not None:
                        rates[peer.index] = self._rate(link, peer.port - 1000)
                        if order.attempt == 1 and noise and (link, peer.port - 1000) in noise:
                            rates[peer.index] = noise[link, peer.port - 1000]
                message = PairsMeasured(order.generation, order.attempt, rates)
                self.harness.extend(link, "health", message)

    def _rate(self, one: int, other: int) -> float:
        pair = frozenset({one, other})
        rates = [rate for who, rate in self.slow.items() if who <= pair]
        return min([*rates, USUAL]) * self._random.uniform(0.6, 1.0)

    def named(self) -> list[tuple[str, ...]]:
        return [
            tuple(str(member).partition("#")[0] for member in each["members"])  # type: ignore[attr-defined]
            for each in self.harness.noted("slow_network")
        ]

    def released(self) -> set[int]:
        return {link for link, orders in self.orders.items() if isinstance(orders[-1], PairsOver)}


@pytest.mark.parametrize("nodes", range(2, 12))
def test_each_node_meets_each_other_one_once(nodes: int) -> None:
    rounds = all_rounds(nodes, nodes)
    assert len(rounds) == nodes - 1 + nodes % 2
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (one, other) for one in range(nodes) for other in range(one + 1, nodes)
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["node", "link"])
def test_one_slow_node_or_link_among_eight_is_named(seed: int, kind: str) -> None:
    fleet = Fleet(8, seed=seed)
    chosen = random.Random(seed).sample(range(1, 9), 1 if kind == "node" else 2)
    fleet.slow = {frozenset(chosen): 0.02 * USUAL}
    fleet.offers()
    fleet.measures()
    assert [set(each) for each in fleet.named()] == [{f"n{link}" for link in chosen}]
    assert fleet.released() == set(range(1, 9))


def test_a_slow_node_is_parked_and_the_next_generation_measures_the_spare() -> None:
    fleet = Fleet(5, spares=1)
    fleet.slow = {frozenset({3}): 0.0}
    fleet.offers()
    fleet.measures()
    assert sorted(fleet.in_order()) == [1, 2, 4, 5, 6]
    (parked,) = fleet.harness.noted("parked")
    assert parked["reason"] == "its network is slow with all others: no answer in time"
    fleet.offers()
    fleet.measures()
    assert fleet.named() == [("n3",)]
    assert len(fleet.harness.noted("pairs")) == 2


def test_without_a_spare_it_is_reported_and_shown_and_nothing_is_measured_again() -> None:
    fleet = Fleet(5)
    fleet.slow = {frozenset({3}): 0.05 * USUAL}
    fleet.offers()
    fleet.measures()
    shown = [text for text in fleet.harness.machine.view(fleet.harness.now).notices if "slow" in text]
    assert len(shown) == 1
    assert shown[0].startswith("the network of n3 is slow with all others: ")
    fleet.offers()
    assert fleet.takes() == {}
    assert fleet.released() == {1, 2, 3, 4, 5}


def test_what_was_slow_once_is_not_named() -> None:
    fleet = Fleet(6)
    fleet.offers()
    fleet.measures(noise={(2, 3): 1.0, (4, 5): 0.0})
    assert fleet.named() == []
    assert len(fleet.harness.noted("pairs")) == 1


def test_a_node_that_does_not_answer_costs_a_bounded_wait_and_is_not_named() -> None:
    fleet = Fleet(5)
    fleet.silent = {2}
    fleet.offers()
    fleet.measures()
    assert fleet.released() == set()
    fleet.harness.wait(ROUNDS_MAX + 4.0)
    fleet.takes()
    assert fleet.released() == {1, 2, 3, 4, 5}
    assert fleet.named() == []


def test_nobody_waits_for_rounds_with_a_node_that_is_lost() -> None:
    fleet = Fleet(5)
    fleet.offers()
    assert len(fleet.takes()) == 5
    fleet.harness.give(LinkClosed(5, "gone"))
    fleet.takes()
    assert fleet.released() >= {1, 2, 3, 4}


def test_three_nodes_measure_nothing() -> None:
    fleet = Fleet(3)
    fleet.offers()
    assert fleet.takes() == {}
    assert fleet.released() == {1, 2, 3}


async def test_nodes_measure_each_other_and_one_that_is_not_there_is_zero() -> None:
    """Two nodes on this machine, and a third that listens nowhere."""
    sent: dict[int, asyncio.Queue[Any]] = {me: asyncio.Queue() for me in (0, 1)}
    orders: dict[int, asyncio.Queue[Any]] = {me: asyncio.Queue() for me in (0, 1)}
    assign: Any = SimpleNamespace(generation=7, group_world_size=3)
    until_s = time.monotonic() + limit_s(60)
    parts = [asyncio.create_task(take_part(assign, orders[me], sent[me].put_nowait, until_s)) for me in (0, 1)]
    offers = [await sent[me].get() for me in (0, 1)]
    for me in (0, 1):
        other = offers[1 - me]
        partners = ((1 - me, "127.0.0.1", other.port, other.key), None, (2, "127.0.0.1", 1, KEY))
        body = msgspec.msgpack.encode(
            {"type": "measure", "generation": 7, "attempt": 1, "me": me, "partners": partners}
        )
        orders[me].put_nowait(msgspec.msgpack.decode(body, type=MeasurePairs))
    for me in (0, 1):
        answer = await sent[me].get()
        assert answer.rates[1 - me] > 0
        assert answer.rates[2] == 0
        orders[me].put_nowait(PairsOver(7))
    assert await asyncio.gather(*parts) == ["", ""]


async def test_a_node_whose_others_do_not_take_part_goes_on() -> None:
    assign: Any = SimpleNamespace(generation=7, group_world_size=3)
    why = await take_part(assign, asyncio.Queue(), lambda _: None, time.monotonic() + 0.05)
    assert why == "not all nodes are ready for it: give --preflight full on all"


def test_the_notice_of_a_slow_node_goes_with_it() -> None:
    fleet = Fleet(5)
    fleet.slow = {frozenset({3}): 0.05 * USUAL}
    fleet.offers()
    fleet.measures()
    fleet.harness.give(LinkClosed(3, "gone"))
    assert not [text for text in fleet.harness.machine.view(fleet.harness.now).notices if "slow" in text]


def test_a_late_offer_of_an_older_generation_changes_nothing() -> None:
    fleet = Fleet(5)
    generation, links = fleet.harness.machine.generation, fleet.in_order()
    for link in links[:-1]:
        fleet.harness.extend(link, "health", Measurable(generation, 5, 1000 + link, KEY))
    fleet.harness.extend(links[-1], "health", Measurable(generation - 1, 5, 1000, KEY))
    fleet.harness.extend(links[-1], "health", Measurable(generation, 5, 1000 + links[-1], KEY))
    assert sorted(fleet.takes()) == sorted(links)
