"""Watches the network cards of this node while workers run, in a thread: carriers that are lost, as it happens, and
packets that are damaged or dropped, now and then. Decides nothing.

Knows no GPU: a job on processors has only this watch, and one with GPUs has device_watch.py beside it, which a hanging
driver may hold.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

from holdfast.extensions.health.event_limit import EventLimit

if TYPE_CHECKING:
    from holdfast.doctor.device_events import DeviceEvent
    from holdfast.doctor.machine_state import NetworkCard
    from holdfast.doctor.network_cards import LinkEvents

READ_EVERY_S = 30.0
"""Time between two readings of all counters if the kernel says when a link changes (s)."""
READ_OFTEN_S = 1.0
"""The same if it does not: the time of an event is known as exactly as this."""
SETTLE_S = 0.05
"""Pause after each reading, because one change of a link is several messages (s)."""
LINK_PAUSE_S = 10.0
"""A link that goes up and down is reported once in this time, with the number of losses (s)."""
PACKETS_PAUSE_S = 600.0
"""The same for a card with bad packets (s)."""

Rule = Callable[["NetworkCard", "NetworkCard", float], "DeviceEvent | None"]


class _Comparison:
    """Compares each card with its last reading that was reported, by one rule, and is quiet for a while after each
    event: what happens meanwhile is in the next one."""

    def __init__(self, rule: Rule, pause_s: float) -> None:
        self._rule = rule
        self._pause_s = pause_s
        self._base: dict[str, tuple[float, NetworkCard]] = {}
        """The reading to compare with, and its time, by name."""
        self._quiet_s: dict[str, float] = {}
        """The time until which an event of this card waits."""
        self.due_s = inf
        """The time at which a waiting event is to be reported."""

    def look(self, now_s: float, cards: Sequence[NetworkCard]) -> list[DeviceEvent]:
        found: list[DeviceEvent] = []
        self.due_s = inf
        for card in cards:
            base_s, base = self._base.setdefault(card.name, (now_s, card))
            event = self._rule(base, card, now_s - base_s)
            quiet_s = self._quiet_s.get(card.name, -inf)
            if event is not None and now_s < quiet_s:
                self.due_s = min(self.due_s, quiet_s)
                continue
            self._base[card.name] = (now_s, card)
            if event is not None:
                found.append(event)
                self._quiet_s[card.name] = now_s + self._pause_s
        return found


class CardWatch:
    """`report` gets each event and the time at which it was seen (monotonic s), `fault` the exception that ends the
    watch, both in the thread."""

    def __init__(
        self,
        report: Callable[[DeviceEvent, float], None],
        fault: Callable[[Exception], None],
        read: Callable[[], Sequence[NetworkCard]] | None = None,
        links: LinkEvents | None = None,
    ) -> None:
        """`read` and `links` take the place of the kernel's."""
        self._report = report
        self._fault = fault
        self._read = read
        self._links = links
        self._over = threading.Event()
        self._limit = EventLimit()

    def start(self) -> None:
        # There may be no more threads now: the job does not need this one.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._run, name="holdfast-cards", daemon=True).start()

    def stop(self) -> None:
        """The thread ends by itself, at once."""
        self._over.set()
        links = self._links
        if links is not None:
            links.end()

    def _run(self) -> None:
        try:
            # Here, because the agent's loop starts workers meanwhile.
            from holdfast.doctor.network_cards import LinkEvents, network_cards

            if self._links is None:
                self._links = LinkEvents()
            try:
                self._watch(self._links, self._read or network_cards)
            finally:
                links, self._links = self._links, None
                links.close()
        except Exception as error:  # noqa: BLE001 - what cannot be watched ends no job
            self._fault(error)

    def _watch(self, links: LinkEvents, read: Callable[[], Sequence[NetworkCard]]) -> None:
        from holdfast.doctor.device_events import of_link, of_packets

        carriers = _Comparison(lambda before, after, _: of_link(before, after), LINK_PAUSE_S)
        packets = _Comparison(of_packets, PACKETS_PAUSE_S)
        every_s = READ_EVERY_S if links.come else READ_OFTEN_S
        counted_s = -inf
        while not self._over.is_set():
            now_s, cards = time.monotonic(), read()
            if not cards:
                return
            events = carriers.look(now_s, cards)
            # A share of the packets of a moment would say nothing.
            if now_s - counted_s >= READ_EVERY_S:
                counted_s = now_s
                events += packets.look(now_s, cards)
            for event in events:
                if self._limit.admits(event):
                    self._report(event, now_s)
            if not self._over.wait(SETTLE_S):
                links.wait(max(0.0, min(every_s, carriers.due_s - time.monotonic())))
