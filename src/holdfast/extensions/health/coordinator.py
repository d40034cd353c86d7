"""Parks nodes whose check has failed, and lets them take part again when it passes. Compares all nodes: one that has
less than most others, or a network that is slow with all of them (pair_rounds.py), is parked if a spare is there. Keeps
what happens to devices, for the verdict. Pure.

A difference alone ends no job: without a spare it is only reported. The others can train with that node, only slower.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from math import inf
from typing import TYPE_CHECKING

from holdfast.extensions.health.messages import (
    Checked,
    DeviceNoted,
    DeviceSeen,
    Differs,
    Measurable,
    PairsMeasured,
    Recovered,
    Unfit,
)
from holdfast.protocol.extension import (
    Announce,
    CoordinatorExtension,
    DeviceFault,
    Figures,
    Happened,
    Job,
    MemberLost,
    Observed,
    Order,
    Orders,
    Park,
    Started,
    ToNode,
    Unpark,
)
from holdfast.protocol.policy import Note, agent_of

if TYPE_CHECKING:
    from holdfast.doctor.majority import NodeDifference
    from holdfast.extensions.health.pair_rounds import PairRounds, PairsFound

DEVICES_MAX = 32
NOTICES_MAX = 4


class AtCoordinator(CoordinatorExtension):
    messages = Unfit | Recovered | Checked | DeviceSeen | Measurable | PairsMeasured

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._parked: dict[str, str] = {}
        """The host and the reason, in words, by member."""
        self._traits: dict[str, Mapping[str, str]] = {}
        """What each member has, by its name."""
        self._nodes = 0
        """Number of nodes of the newest generation whose nodes have reported what they have."""
        self._differing: set[str] = set()
        """Members that are parked because they differ. Always a part of `_parked`."""
        self._reported: dict[tuple[str, str], str] = {}
        """The text of each difference that was reported and is still there, by member and trait."""
        self._pairs: PairRounds | None = None
        """None: no node has offered to measure others."""
        self._slow_links: dict[tuple[str, ...], str] = {}
        """Links that were slow in the newest rounds, and nodes for which there was no spare, in words, by members."""
        self._devices: dict[tuple[str, int], DeviceFault] = {}
        """The newest severe events of devices, by their agents and numbers."""
        self._noticed: deque[str] = deque(maxlen=NOTICES_MAX)
        """The newest of them in the running generation, in words."""

    def heard(
        self,
        now: float,
        member: str,
        message: Unfit | Recovered | Checked | DeviceSeen | Measurable | PairsMeasured,
    ) -> Orders:
        match message:
            case Recovered():
                return self._unpark(member)
            case Unfit(generation, reason):
                return self._park(member, generation, reason)
            case Checked():
                return self._compare(member, message)
            case DeviceSeen():
                return self._device(now, member, message)
            case Measurable():
                return self._paired(self._rounds().offered(now, member, message))
            case PairsMeasured():
                return self._paired(self._rounds().answered(now, member, message))

    def due_s(self) -> float:
        return inf if self._pairs is None else self._pairs.due_s

    def due(self, now: float) -> Orders:
        return self._paired(self._rounds().due(now))

    def _rounds(self) -> PairRounds:
        if self._pairs is None:
            from holdfast.extensions.health.pair_rounds import PairRounds  # most jobs measure no pairs

            self._pairs = PairRounds(self.job)
        return self._pairs

    def _gone(self, member: str) -> Orders:
        return () if self._pairs is None else self._pairs.gone(member)

    def _paired(self, found: PairsFound | None) -> list[Order]:
        """Park slow nodes as far as there are spares, and report the rest."""
        if found is None:
            return []
        orders = list(found.orders)
        if found.rates is not None:
            self._slow_links = {}
            orders.append(Note("pairs", {"generation": found.generation, "bytes_s": found.rates}))
        spares = self._spares(found.members)
        for slow in found.slow:
            names = [found.members[index] for index in slow.nodes]
            hosts = [self._host(name) for name in names]
            rate = f"{slow.share:.0%} of the usual rate between these nodes" if slow.share else "no answer in time"
            text = f"the network between {' and '.join(hosts)} is slow: {rate}"
            if not slow.is_link:
                text = f"the network of {hosts[0]} is slow with all others: {rate}"
            about = {"generation": found.generation, "members": names, "share": round(slow.share, 3), "text": text}
            orders.append(Note("slow_network", about))
            if not slow.is_link and spares:
                spares -= 1
                reason = f"its network is slow with all others: {rate}"
                orders += self._park(names[0], found.generation, reason)
            else:
                self._slow_links[tuple(names)] = text
                orders.append(Announce(text))
        return orders

    def _spares(self, taking_part: Container[str]) -> int:
        """The number of nodes that could take the place of one of these."""
        return sum(each.name not in taking_part and each.name not in self._parked for each in self.job.members())

    def _park(self, member: str, generation: int, reason: str) -> list[Order]:
        text = self._parked[member] = f"{self._host(member)} is parked: {reason}"
        note = Note("parked", {"member": member, "generation": generation, "reason": reason})
        return [*self._gone(member), note, Park(member, text)]

    def _unpark(self, member: str) -> list[Order]:
        self._parked.pop(member, None)
        self._differing.discard(member)
        return [Note("unparked", {"member": member}), Unpark(member)]

    def _compare(self, member: str, message: Checked) -> list[Order]:
        self._traits[member] = message.traits
        if member in self._parked and member not in self._differing:
            return []  # it passes its check soon, and reports then
        if not message.nodes and member not in self._differing:
            return []  # a coordinator before this one has parked it: it reports again when it is prepared here
        known = {
            each.name: self._traits[each.name]
            for each in self.job.members()
            if each.name in self._traits and (each.name == member or each.name not in self._parked)
        }
        # A majority of those who were the first to report would not be one of all, nor would one of those who are left
        # where most others have not reported yet
        # (test_a_node_that_differs_is_not_compared_with_the_few_that_have_reported).
        if message.nodes:
            self._nodes = wanted = message.nodes
        else:
            others = sum(each.name != member and each.name not in self._parked for each in self.job.members())
            wanted = 1 + min(self._nodes, others)
        if len(known) < wanted:
            return []
        found = _differences(known)
        orders = self._reports(found, known)
        slower = [each for each in found if each.slows]
        if member in self._differing:
            return orders + ([] if any(each.node == member for each in slower) else self._unpark(member))
        # The job waits for no better node: without a spare it starts with this one
        # (test_without_a_spare_the_difference_is_reported_and_the_job_starts).
        for name in list(dict.fromkeys(each.node for each in slower))[: self._spares(known)]:
            reason = "; ".join(each.text for each in slower if each.node == name)
            self._differing.add(name)
            orders += [*self._park(name, message.generation, f"it {reason}"), ToNode(name, Differs())]
        return orders

    def _reports(self, found: list[NodeDifference], known: Mapping[str, object]) -> list[Order]:
        """Report the differences that are new."""
        orders: list[Order] = []
        now = {(each.node, each.trait): each for each in found}
        # A difference of a node that is not compared now is still there, and is not reported again
        # (test_a_difference_is_reported_once_in_all_generations).
        for key in [key for key in self._reported if key[0] in known and key not in now]:
            del self._reported[key]
        for key, each in now.items():
            if key in self._reported:
                continue
            host = self._host(each.node)
            text = self._reported[key] = f"{host} {each.text}"
            about = {"member": each.node, "generation": self.job.generation, "trait": each.trait, "text": each.text}
            about["slows"] = each.slows
            orders.append(Note("node_differs", about))
            if each.slows:
                orders.append(Announce(text))
        return orders

    def _device(self, now: float, member: str, message: DeviceSeen) -> list[Order]:
        from holdfast.doctor.device_events import DeviceEvent  # no start waits for the table of what devices report

        text = DeviceEvent(message.device, message.text, message.severe).on(self._host(member))
        key, at_s = (agent_of(member), message.number), now - message.age_s
        if key in self._devices:
            # A message may be late and never early: the earliest time is the nearest.
            self._devices[key] = DeviceFault(text, min(self._devices[key].at_s, at_s))
            return [ToNode(member, DeviceNoted(message.number))]
        about = {"member": member, "generation": self.job.generation, "device": message.device, "text": message.text}
        note = Note("device", {**about, "severe": message.severe})
        if not message.severe:
            return [note]
        self._devices[key] = DeviceFault(text, at_s)
        if len(self._devices) > DEVICES_MAX:
            del self._devices[next(iter(self._devices))]
        self._noticed.append(text)
        return [note, Announce(text), ToNode(member, DeviceNoted(message.number))]

    def observed(self, now: float) -> Observed:  # noqa: ARG002
        return Observed(devices=tuple(sorted(self._devices.values(), key=lambda each: each.at_s)))

    def _host(self, member: str) -> str:
        return next((each.host for each in self.job.members() if each.name == member), member)

    def happened(self, now: float, event: Happened) -> Orders:  # noqa: ARG002
        if isinstance(event, Started):
            self._noticed.clear()
        # Else its notice would stand for ever (test_a_parked_node_that_is_lost_is_not_shown_any_more).
        if isinstance(event, MemberLost):
            self._parked.pop(event.member, None)
            self._traits.pop(event.member, None)
            self._differing.discard(event.member)
            self._reported = {key: text for key, text in self._reported.items() if key[0] != event.member}
            self._slow_links = {key: text for key, text in self._slow_links.items() if event.member not in key}
            return self._gone(event.member)
        return ()

    def view(self, now: float) -> Figures:  # noqa: ARG002
        differing = [text for (member, _), text in self._reported.items() if member not in self._parked]
        return Figures(notices=(*self._parked.values(), *differing, *self._slow_links.values(), *self._noticed))


def _differences(known: Mapping[str, Mapping[str, str]]) -> list[NodeDifference]:
    if len(known) == 1:
        return []  # nothing to compare with, and the start of such a job needs no module for it
    from holdfast.doctor.majority import differences

    return differences(known)
