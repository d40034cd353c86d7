"""A pretend network: links with delay between named hosts, that can be cut, reset or go silent.

A link behaves like a TCP connection: in order, nothing lost while it stands; during a partition nothing arrives
(it arrives afterwards if both ends still hold the link); an end that closes is seen by the other end unless the
network is silent, and then only when it speaks again.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.support.simulator.clock import Agenda


class FakeEnd:
    """One end of a link."""

    def __init__(self, link: FakeLink, host: str) -> None:
        self.host = host
        self.open = True
        self.on_message: Callable[[object], None] = lambda _: None
        self.on_closed: Callable[[str], None] = lambda _: None
        self._link = link

    def send(self, message: object) -> None:
        if self.open:
            self._link.carry(self, message)

    def close(self, reason: str = "closed by the other side") -> None:
        """Close on purpose: the other end sees it; this end gets no on_closed."""
        if self.open:
            self.open = False
            self._link.carry_close(self, reason)

    def vanish(self) -> None:
        """The host lost power: nobody is told."""
        self.open = False

    def _arrive(self, message: object) -> None:
        if self.open:
            self.on_message(message)

    def _arrive_close(self, reason: str) -> None:
        if self.open:
            self.open = False
            self.on_closed(reason)


class FakeLink:
    def __init__(self, network: FakeNetwork, a: str, b: str) -> None:
        self._network = network
        self.a = FakeEnd(self, a)
        self.b = FakeEnd(self, b)
        self._free_at = {self.a: 0.0, self.b: 0.0}
        self._held: list[Callable[[], None]] = []
        self._flushed_at = 0.0

    def carry(self, sender: FakeEnd, message: object) -> None:
        receiver = self.b if sender is self.a else self.a

        def deliver() -> None:
            if receiver.open:
                receiver._arrive(message)
            elif sender.open:
                # Like a TCP stack that gets data for a connection it no longer has: it answers with a reset.
                self._schedule(receiver, lambda: sender._arrive_close("connection reset"))

        self._schedule(sender, deliver)

    def carry_close(self, sender: FakeEnd, reason: str) -> None:
        receiver = self.b if sender is self.a else self.a
        self._schedule(sender, lambda: receiver._arrive_close(reason))

    def reset(self) -> None:
        """Both ends lose the connection although both hosts live."""
        for end in (self.b, self.a):
            self._network.agenda.after(self._network.delay(), lambda end=end: end._arrive_close("connection reset"))  # type: ignore[misc]

    def release(self) -> None:
        """The network speaks again: what was held is delivered in order."""
        held, self._held = self._held, []
        self._flushed_at = self._network.agenda.clock.now + self._network.delay_s_max
        for action in held:
            self._network.agenda.at(self._flushed_at, action)

    def _schedule(self, sender: FakeEnd, action: Callable[[], None]) -> None:
        network, receiver = self._network, self.b if sender is self.a else self.a

        def pass_or_hold() -> None:
            if network.silent(sender.host, receiver.host):
                self._held.append(action)
            elif network.agenda.clock.now < self._flushed_at:
                network.agenda.at(self._flushed_at, action)
            else:
                action()

        when = max(self._free_at[sender], network.agenda.clock.now + network.delay(self.a.host, self.b.host))
        self._free_at[sender] = when
        network.agenda.at(when, pass_or_hold)


class FakeNetwork:
    """Hosts, links and the faults between them. All randomness comes from the given Random."""

    def __init__(
        self, agenda: Agenda, random: Random, *, delay_s_min: float = 0.0002, delay_s_max: float = 0.005
    ) -> None:
        self.agenda = agenda
        self.delay_s_min = delay_s_min
        self.delay_s_max = delay_s_max
        self._random = random
        self.lags: dict[str, float] = {}
        """Hosts whose messages take longer, in both directions, and by how much."""
        self._links: list[FakeLink] = []
        self._cut: set[tuple[str, str]] = set()
        """(From, to)."""

    def delay(self, a: str = "", b: str = "") -> float:
        lag_s = max(self.lags.get(a, 0.0), self.lags.get(b, 0.0)) if self.lags else 0.0
        return self._random.uniform(self.delay_s_min, self.delay_s_max) + lag_s

    def connect(self, a: str, b: str) -> FakeLink:
        link = FakeLink(self, a, b)
        self._links = [old for old in self._links if old.a.open or old.b.open]
        self._links.append(link)
        return link

    def silent(self, a: str, b: str) -> bool:
        """Nothing passes from a to b."""
        return (a, b) in self._cut

    def connected(self, a: str, b: str) -> bool:
        return not (self.silent(a, b) or self.silent(b, a))

    def partition(self, side: set[str], others: set[str], *, one_way: bool = False) -> None:
        """Nothing passes between the two sides, and nobody is told. `one_way`: only from the first to the second."""
        self._cut |= {(a, b) for a in side for b in others}
        if not one_way:
            self._cut |= {(b, a) for a in side for b in others}

    def heal(self) -> None:
        self._cut.clear()
        for link in self._links:
            link.release()

    def reset(self, a: str, b: str) -> None:
        for link in self._links:
            if {link.a.host, link.b.host} == {a, b} and link.a.open and link.b.open:
                link.reset()
