"""The pretend clock and network behave as the real ones would."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.simulator.clock import Agenda, ManualClock
from tests.support.simulator.network import FakeEnd, FakeNetwork


def test_time_never_goes_back() -> None:
    clock = ManualClock(5.0)
    clock.advance_to(7.0)
    with pytest.raises(AssertionError):
        clock.advance_to(6.0)


def test_equal_times_keep_the_order_of_planning() -> None:
    agenda, done = Agenda(ManualClock()), list[str]()
    agenda.at(2.0, lambda: done.append("later"))
    agenda.at(1.0, lambda: done.append("first"))
    agenda.at(1.0, lambda: done.append("second"))
    assert agenda.next_time() == 1.0
    while agenda.step():
        pass
    assert done == ["first", "second", "later"]
    assert agenda.clock.now == 2.0


class World:
    """Two hosts with a link, and what each end has seen."""

    def __init__(self) -> None:
        self.agenda = Agenda(ManualClock())
        self.network = FakeNetwork(self.agenda, Random(1))
        self.link = self.network.connect("a", "b")
        self.seen: dict[str, list[object]] = {"a": [], "b": []}
        for end in (self.link.a, self.link.b):
            self._watch(end)

    def _watch(self, end: FakeEnd) -> None:
        end.on_message = self.seen[end.host].append
        end.on_closed = lambda reason: self.seen[end.host].append(f"closed: {reason}")

    def settle(self) -> None:
        while self.agenda.step():
            pass


def test_messages_arrive_in_order_and_the_close_comes_last() -> None:
    world = World()
    for number in range(50):
        world.link.a.send(number)
    world.link.a.close()
    world.link.a.send("too late")
    world.settle()
    assert world.seen == {"a": [], "b": [*range(50), "closed: closed by the other side"]}


def test_a_partition_holds_back_and_a_healed_one_delivers_in_order() -> None:
    world = World()
    world.network.partition({"a"}, {"b"})
    world.link.a.send(1)
    world.settle()
    assert world.seen["b"] == []
    world.network.heal()
    world.link.a.send(2)
    world.settle()
    assert world.seen["b"] == [1, 2]


def test_a_host_without_power_is_noticed_only_when_somebody_speaks() -> None:
    world = World()
    world.link.b.vanish()
    world.settle()
    assert world.seen["a"] == []
    world.link.a.send("anybody there?")
    world.settle()
    assert world.seen["a"] == ["closed: connection reset"]


def test_a_reset_is_seen_by_both() -> None:
    world = World()
    world.network.reset("b", "a")
    world.settle()
    assert world.seen == {"a": ["closed: connection reset"], "b": ["closed: connection reset"]}
