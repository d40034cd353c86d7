"""The watch of network cards: events with their time, one for many losses, and none that is lost with the link."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.doctor.device_events import DeviceEvent, of_link
from holdfast.doctor.machine_state import NetworkCard
from holdfast.doctor.network_cards import LinkEvents
from holdfast.extensions.health import node as health_node
from holdfast.extensions.health.card_watch import CardWatch, _Comparison
from holdfast.extensions.health.event_limit import EVENTS_MAX
from holdfast.extensions.health.messages import DeviceNoted, DeviceSeen
from holdfast.extensions.health.node import OnNode
from tests.support.limits import limit_s

ETH0 = NetworkCard(name="eth0", routed=True, up=True, carrier_losses=0)
LOST = DeviceEvent("eth0", "the link lost its carrier 2 times", severe=True)


class KernelDouble:
    """Says when a link has changed, and what the cards are then."""

    come = True

    def __init__(self) -> None:
        self.cards: tuple[NetworkCard, ...] = (ETH0,)
        self.waits: queue.Queue[None] = queue.Queue()
        """Gets an item with each wait."""
        self._changed: queue.Queue[None] = queue.Queue()
        self.closed = threading.Event()

    def wait(self, limit_s: float) -> None:
        assert limit_s > 0
        self.waits.put(None)
        self._changed.get()

    def changes(self, **values: Any) -> None:
        self.waits.get(timeout=limit_s(30))
        self.cards = tuple(replace(card, **values) for card in self.cards)
        self._changed.put(None)

    def end(self) -> None:
        self._changed.put(None)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def kernel() -> KernelDouble:
    return KernelDouble()


def watch_of(kernel: KernelDouble, events: queue.Queue[Any]) -> CardWatch:
    links = cast("LinkEvents", kernel)
    return CardWatch(lambda event, _: events.put(event), events.put, lambda: kernel.cards, links)


def test_a_lost_carrier_is_reported_when_the_kernel_says_so_and_the_watch_ends(kernel: KernelDouble) -> None:
    events: queue.Queue[Any] = queue.Queue()
    watch = watch_of(kernel, events)
    watch.start()
    kernel.changes()  # a message about something else
    kernel.changes(carrier_losses=2, up=False)
    assert events.get(timeout=limit_s(30)) == LOST
    watch.stop()
    assert kernel.closed.wait(limit_s(30))
    assert events.empty()


def test_a_lost_carrier_is_reported_after_many_events_with_bad_packets(kernel: KernelDouble) -> None:
    events: queue.Queue[Any] = queue.Queue()
    watch = watch_of(kernel, events)
    dropped = DeviceEvent("eth0", "40 of 1000 packets were dropped in 30 s", severe=False)
    assert [watch._limit.admits(dropped) for _ in range(EVENTS_MAX + 1)] == [True] * EVENTS_MAX + [False]
    watch.start()
    kernel.changes(carrier_losses=2, up=False)
    assert events.get(timeout=limit_s(30)) == LOST
    watch.stop()
    assert kernel.closed.wait(limit_s(30))


def test_a_machine_without_cards_has_no_watch(kernel: KernelDouble) -> None:
    kernel.cards = ()
    watch_of(kernel, queue.Queue()).start()
    assert kernel.closed.wait(limit_s(30))


def test_what_happens_soon_after_an_event_is_in_the_next_one() -> None:
    looks = _Comparison(lambda before, after, _: of_link(before, after), 10.0)

    def look(now_s: float, losses: int) -> list[str]:
        return [event.text for event in looks.look(now_s, [replace(ETH0, carrier_losses=losses)])]

    assert look(0.0, 7) == []
    assert look(5.0, 8) == ["the link lost its carrier 1 time"]
    assert look(6.0, 9) == []
    assert look(7.0, 12) == []
    assert looks.due_s == 15.0
    assert look(15.0, 12) == ["the link lost its carrier 4 times"]
    assert look(40.0, 12) == []


class Reporting:
    """The half on a node, whose clock is the test's, and what it has sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.sent: list[DeviceSeen] = []
        monkeypatch.setattr(health_node, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        options = SimpleNamespace(preflight="off", health_command="")
        node: Any = SimpleNamespace(options=options, write=lambda *_, **__: None)
        self.half = OnNode(node, self._send)

    def _send(self, message: msgspec.Struct) -> None:
        assert isinstance(message, DeviceSeen)
        self.sent.append(message)

    def ages(self) -> list[float]:
        return [round(each.age_s, 3) for each in self.sent]


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> Reporting:
    return Reporting(monkeypatch)


async def test_an_event_without_a_link_is_reported_when_the_node_is_back(reporting: Reporting) -> None:
    half = reporting.half
    half._device(LOST, 99.5)
    reporting.now_s = 140.0
    assign: Any = SimpleNamespace(generation=2, group_world_size=2)
    assert await half.unfit(assign) == ""
    assert [(each.number, each.device) for each in reporting.sent] == [(1, "eth0"), (1, "eth0")]
    assert reporting.ages() == [0.5, 40.5]
    half.heard(DeviceNoted(1))
    await half.unfit(assign)
    assert len(reporting.sent) == 2


async def test_an_event_that_the_network_has_held_is_sent_again_with_its_age(reporting: Reporting) -> None:
    half = reporting.half
    half._device(LOST, 100.0)
    reporting.now_s += 3.0
    half.heard(DeviceNoted(1))
    assert reporting.ages() == [0.0, 3.0]
    reporting.now_s += 0.1
    half.heard(DeviceNoted(1))
    half.heard(DeviceNoted(1))
    assert len(reporting.sent) == 2


async def test_an_event_that_is_not_severe_is_sent_once(reporting: Reporting) -> None:
    reporting.half._device(DeviceEvent("eth0", "20 of 900 packets were dropped in 30 s", severe=False), 100.0)
    assert len(reporting.sent) == 1
    assert not reporting.half._pending
