"""The desk of a visit, at the endpoint: lets nodes in, tells each of the others, gathers what they found.

It judges nothing and tries nothing itself: the node whose endpoint it is visits its own desk as the others do.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import TypeVar

import msgspec

from holdfast.core.doctor import NodePath, NodeReport, Reached, Reduced, Visit
from holdfast.core.errors import HoldfastError, PeerError, ProtocolError
from holdfast.core.policy import JobSpec
from holdfast.rendezvous.claim import Claim
from holdfast.runtime.doctor.channel import HANDSHAKE_S_MAX, Channel
from holdfast.runtime.doctor.messages import (
    KEY_BYTES,
    CheckOutcome,
    CheckOver,
    Full,
    Go,
    Here,
    Message,
    Peer,
    Result,
    Roster,
    StorePort,
    Told,
)
from holdfast.wire.handshake import NONCE_BYTES, ServerHandshake

LINKS_TOLD_MAX = 8192
"""Of very many nodes only the worst links are told, so that the outcome fits into a frame."""
FINDINGS_TOLD_MAX = 4096
FINDINGS_OF_ONE_MAX = 32
TEXT_CHARS_MAX = 500
"""Of each word of a node that is passed on to the others."""
REPORT_S_MIN = 60.0
"""Importing torch from a slow disk takes long, and is one of the things to find out."""
MESSAGES_WAITING_MAX = 16
LOST = None

Kind = TypeVar("Kind", bound=Message)
Value = TypeVar("Value")


class VisitingNode:
    """A node that came."""

    def __init__(self, channel: Channel, here: Here) -> None:
        self.channel = channel
        self.here = here
        self.inbox: asyncio.Queue[Message | None] = asyncio.Queue(MESSAGES_WAITING_MAX)
        """None: it is gone."""

    async def next(self, kind: type[Kind]) -> Kind | None:
        """Its next message, if it is of this kind; None when it is gone or says something else."""
        message = await self.inbox.get()
        if isinstance(message, kind):
            return message
        self.inbox.put_nowait(LOST)
        return None


class Desk:
    """One visit, from the first node that comes to the last word."""

    def __init__(
        self, job: JobSpec, token: bytes | None, timeout_s: float, *, reduce: bool, say: Callable[[str], None]
    ) -> None:
        self._job, self._token, self._timeout_s = job, token, timeout_s
        self._reduce, self._say = reduce, say
        self._servers: list[asyncio.Server] = []
        self._members: list[VisitingNode] = []
        self._arrivals: dict[asyncio.Task[object] | None, Channel] = {}
        self._arrivals_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._sealed = False
        self._full = asyncio.Event()

    async def open(self, place: Claim) -> None:
        for listening in place.sockets:
            self._servers.append(await asyncio.start_server(self._serve, sock=listening))

    async def run(self) -> None:
        """Ends with the visit. Each of its waits is bounded."""
        try:
            await self._gather_nodes()
            visit = await self._gather_reports()
            visit, reduce = self._plan_reduce(visit)
            self._send_all(CheckOutcome(visit, reduce))
            if reduce:
                self._send_all(CheckOver(await self._hold_reduce()))
        finally:
            for server in self._servers:
                server.close()
            await self._close()

    async def _close(self) -> None:
        """Whoever is still here gets what was sent to it, and nobody is served any more."""
        self._sealed = True
        await asyncio.gather(*(member.channel.close() for member in self._members))
        for channel in self._arrivals.values():
            channel.abort()  # strangers in the middle of a handshake
        serving = [task for task in self._arrivals if task is not None]
        if serving:
            await asyncio.wait(serving, timeout=HANDSHAKE_S_MAX)

    # ---------------------------------------------------------------- who comes

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to its last."""
        channel = Channel(reader, writer, ServerHandshake(self._job, self._token, os.urandom(NONCE_BYTES)))
        if len(self._arrivals) >= self._arrivals_max:
            channel.abort()
            return
        me = asyncio.current_task()
        self._arrivals[me] = channel
        try:
            member = await self._let_in(channel)
            if member is not None:
                await self._hear(member)
        except (HoldfastError, OSError, TimeoutError) as error:
            self._say(f"dropped a connection from {channel.peer_address}: {error or 'it said nothing'}")
            await channel.close()
        finally:
            self._arrivals.pop(me, None)

    async def _let_in(self, channel: Channel) -> VisitingNode | None:
        await channel.shake_hands()
        async with asyncio.timeout(HANDSHAKE_S_MAX):
            here = await channel.receive()
        if not isinstance(here, Here):
            raise ProtocolError(f"a {type(here).__name__} instead of the first words")
        if self._sealed or self._full.is_set():
            names = ", ".join(member.here.host for member in self._members)
            channel.send(Full(f"the visit has begun without this node; there are {names}"))
            await channel.close()
            return None
        member = VisitingNode(channel, clipped(here))
        self._members.append(member)
        self._say(f"{here.host} came: {len(self._members)} of {self._job.max_nodes}")
        if len(self._members) == self._job.max_nodes:
            self._full.set()
        return member

    async def _hear(self, member: VisitingNode) -> None:
        try:
            while True:
                member.inbox.put_nowait(await member.channel.receive())
        except (HoldfastError, asyncio.QueueFull) as error:
            if not self._sealed and member in self._members:  # it may come again
                self._members.remove(member)
                if not self._full.is_set():
                    self._say(f"{member.here.host} left: {error}")
            if not member.inbox.full():
                member.inbox.put_nowait(LOST)
            if not isinstance(error, PeerError):
                member.channel.abort()

    async def _gather_nodes(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._full.wait()
        except TimeoutError:
            self._say(f"{len(self._members)} of {self._job.max_nodes} nodes came; going on with them")
        self._sealed = True
        self._members.sort(key=lambda member: not member.here.at_desk)  # stable: then in the order they came
        key = os.urandom(KEY_BYTES)
        names = self._names()
        for me, member in enumerate(self._members):
            peers = tuple(
                Peer(name, other.here.host, self._address(other, member), other.here.port)
                for name, other in zip(names, self._members, strict=True)
            )
            member.channel.send(Roster(me, key, peers))

    def _names(self) -> tuple[str, ...]:
        """Host names; with a number where two nodes share one."""
        hosts = [member.here.host for member in self._members]
        return tuple(
            host if hosts.count(host) == 1 else f"{host}#{hosts[:index].count(host)}"
            for index, host in enumerate(hosts)
        )

    def _address(self, of: VisitingNode, seen_by: VisitingNode) -> str:
        """Who came over loopback is on this machine, and reached as the desk itself is."""
        if of.here.address:
            return of.here.address
        seen = of.channel.peer_address
        return seen_by.channel.local_address if of.here.at_desk or ip_address(seen).is_loopback else seen

    # ---------------------------------------------------------------- what they found

    async def _gather_reports(self) -> Visit:
        found = await self._collect(Told, max(self._timeout_s, REPORT_S_MIN))
        reports = tuple(
            self._trimmed(member, told.report) if told is not None else None
            for member, told in zip(self._members, found, strict=True)
        )
        return Visit(wanted=(self._job.min_nodes, self._job.max_nodes), came=self._names(), reports=reports)

    def _trimmed(self, member: VisitingNode, report: NodeReport) -> NodeReport:
        number = len(self._members)
        links_max = max(1, LINKS_TOLD_MAX // number)
        findings_max = min(FINDINGS_OF_ONE_MAX, max(1, FINDINGS_TOLD_MAX // number))
        links = report.links
        if len(links) > links_max:
            links = tuple(sorted(links, key=badness)[:links_max])
        address, findings = member.channel.peer_address, report.findings[:findings_max]
        return clipped(msgspec.structs.replace(report, address=address, links=links, findings=findings))

    async def _collect(
        self, kind: type[Kind], limit_s: float, members: Sequence[VisitingNode] | None = None
    ) -> list[Kind | None]:
        """One message of each; None for whoever is gone or does not answer in time."""
        tasks = [
            asyncio.create_task(member.next(kind)) for member in self._members if members is None or member in members
        ]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=limit_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        return [None if task.cancelled() else task.result() for task in tasks]

    def _send_all(self, message: Message) -> None:
        for member in self._members:
            member.channel.send(message)

    # ---------------------------------------------------------------- the all-reduce

    def _plan_reduce(self, visit: Visit) -> tuple[Visit, bool]:
        """Only where it can work: otherwise it would say again, and slowly, what is known already."""
        reports = [report for report in visit.reports if report is not None]
        why = ""
        if not self._reduce:
            why = "not asked for"
        elif len(visit.reports) < 2:
            why = "one node is alone"
        elif len(reports) < len(visit.reports):
            why = "a node fell silent"
        elif not all(report.summary.has_torch for report in reports):
            without = [report.summary.host for report in reports if not report.summary.has_torch]
            why = f"no torch with gloo on {', '.join(without[:8])}"
        elif any(link.reached is not Reached.YES for report in reports for link in report.links):
            why = "not all pairs work"
        return msgspec.structs.replace(visit, no_reduce=why), not why

    async def _hold_reduce(self) -> tuple[Reduced | None, ...]:
        first = await self._collect(StorePort, self._timeout_s, self._members[:1])
        port = first[0].port if first[0] is not None else 0
        for member in self._members[1:]:
            member.channel.send(Go(port))
        results = await self._collect(Result, self._timeout_s + HANDSHAKE_S_MAX)
        return tuple(result.reduced if result is not None else None for result in results)


def clipped(value: Value) -> Value:
    """The same with all its texts cut: one node's words must not keep the others' from fitting into a frame."""
    if isinstance(value, str):
        return value[:TEXT_CHARS_MAX]  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(map(clipped, value))  # type: ignore[return-value]
    if isinstance(value, msgspec.Struct):
        fields = {name: clipped(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    return value


def badness(link: NodePath) -> tuple[bool, float]:
    """Sorts the worst first."""
    return link.reached is Reached.YES, -(link.latency_s or 0.0)
