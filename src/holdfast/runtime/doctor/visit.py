"""A visit of several nodes to each other: this node's way through it, and the desk where the endpoint is ours.

Knows the order of things; what it finds is judged elsewhere. Ends, whatever the others do, within a few times its
time-out.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from holdfast.core.doctor import (
    DoctorFinding,
    Level,
    LocalFacts,
    NodePath,
    NodeReport,
    Reached,
    Reduced,
    Summary,
    TorchState,
    Visit,
)
from holdfast.core.errors import (
    AuthenticationError,
    CoordinatorUnreachableError,
    HoldfastError,
    PeerError,
    PortInUseError,
    ProtocolError,
    RefusedError,
    UnresolvedHostError,
)
from holdfast.core.options import Endpoint
from holdfast.core.policy import JobSpec, NodeSpec
from holdfast.rendezvous.claim import Claim, claim, who_holds
from holdfast.runtime.doctor import probe, system
from holdfast.runtime.doctor.bounded import bounded, end
from holdfast.runtime.doctor.channel import Channel, dial
from holdfast.runtime.doctor.desk import REPORT_S_MIN, Desk
from holdfast.runtime.doctor.messages import (
    CheckOutcome,
    CheckOver,
    Full,
    Go,
    Here,
    Message,
    Result,
    Roster,
    StorePort,
    Told,
)
from holdfast.runtime.doctor.programs import CHECKUP, ERROR_CHARS_MAX, last_json
from holdfast.runtime.driver import run_detached


class Reducer:
    """A process that imports torch as soon as it is started, so that all nodes do so at the same time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, python: str, rank: int, world: int, limit_s: float) -> Reducer:
        """Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *(python, CHECKUP, "reduce", str(rank), str(world), str(limit_s)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        return cls(process)

    async def store_port(self) -> int:
        """Of rank 0, whose store it is; 0 when there is none."""
        told = await self._answer()
        return int(told.get("port", 0))

    def join(self, host: str, port: int) -> None:
        """For the other ranks: where the store is."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{host} {port}\n".encode())

    async def result(self) -> Reduced:
        told = await self._answer()
        if told.get("ok"):
            return Reduced(ok=True, seconds=float(told.get("seconds", 0.0)))
        error = str(told.get("error") or "its process ended without a word")
        return Reduced(ok=False, error=error[:ERROR_CHARS_MAX])

    async def close(self) -> None:
        await end(self._process)

    async def _answer(self) -> dict[str, Any]:
        """The next line that is an object; empty at the end of the process."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            told = last_json(line.decode(errors="replace"))
            if told is not None:
                return told
        return {}


BACKEND = "doctor"
"""What the nodes of a visit name as their backend: no job does."""
RETRY_S = 0.25
SAY_S = 5.0
AT_ONCE_MAX = 32
"""Probes and look-ups at a time."""
NAME_S_MAX = 10.0
TRANSFERS_S_MAX = 10.0
"""All transfers of one node together."""
SLACK_S = 15.0
"""What the desk may take after the last node's answer is due."""


class VisitOptions(NamedTuple):
    """What the command line says."""

    endpoint: Endpoint
    run_id: str
    nodes: tuple[int, int]
    token: bytes | None
    is_host: bool | None
    local_addr: str | None
    timeout_s: float
    reduce: bool
    python: str


class Visited(NamedTuple):
    """What came of it."""

    visit: Visit | None
    me: int = 0
    """This node's index."""
    trouble: DoctorFinding | None = None
    """Why there is no visit, or no end of one."""


Value = TypeVar("Value")
Examine = Callable[[LocalFacts], Sequence[DoctorFinding]]


async def pay_visit(
    asked: VisitOptions, facts: asyncio.Task[LocalFacts], examine: Examine, say: Callable[[str], None]
) -> Visited:
    """Meets the others, tries every pair, and returns what all found. Network trouble is a finding, not an exception."""
    host = socket.gethostname()
    nodes = asked.nodes
    job = JobSpec(run_id=asked.run_id, min_nodes=nodes[0], max_nodes=nodes[1], backend=BACKEND)
    node = NodeSpec(member=f"{host}#{os.urandom(4).hex()}", host=host, nproc=1)
    async with asyncio.TaskGroup() as tasks:
        met = await _meet(asked, job, node, tasks, say)
        if isinstance(met, DoctorFinding):
            return Visited(None, trouble=met)
        channel, place = met
        visitor = _Visitor(asked, host, channel, place)
        try:
            return await visitor.go(facts, examine)
        except (PeerError, ProtocolError, AuthenticationError, TimeoutError) as error:
            why = f"the doctor at {asked.endpoint} is gone: {error or 'it did not answer in time'}"
            fix = "look at what it says there"
            return Visited(visitor.visit, visitor.me, _trouble("HF554", Level.RETRY, why, fix))
        finally:
            await visitor.close()


async def _meet(
    asked: VisitOptions, job: JobSpec, node: NodeSpec, tasks: asyncio.TaskGroup, say: Callable[[str], None]
) -> tuple[Channel, Claim | None] | DoctorFinding:
    """A connection to the desk, which is opened here if the endpoint is ours."""
    loop = asyncio.get_running_loop()
    began, said_s = loop.time(), loop.time()
    while True:
        try:
            place = await run_detached(lambda: claim(asked.endpoint, is_host=asked.is_host))
            if not place.is_host:
                return await dial(asked.endpoint, job, node, asked.token), None
            desk = Desk(job, asked.token, asked.timeout_s, reduce=asked.reduce, say=say)
            await desk.open(place)
            tasks.create_task(desk.run())
            return await dial(place.endpoint, job, node, asked.token), place
        except (UnresolvedHostError, CoordinatorUnreachableError) as error:
            now = loop.time()
            if now - began > asked.timeout_s:
                return _nobody(asked, error)
            if now - said_s > SAY_S:
                said_s = now
                say(f"nobody at {asked.endpoint} yet: {error}")
            await asyncio.sleep(RETRY_S)
        except (RefusedError, AuthenticationError, PortInUseError, ProtocolError) as error:
            return _turned_away(asked, error)
        except OSError as error:
            return _trouble(
                "HF553", Level.FATAL, f"cannot bind {asked.endpoint}: {error.strerror}", "take another port"
            )


def _nobody(asked: VisitOptions, error: HoldfastError) -> DoctorFinding:
    why = f"nobody answered at {asked.endpoint} within {asked.timeout_s:g} s: {error}"
    if "no answer" in str(error):
        return _trouble("HF551", Level.FATAL, why, "a firewall or security group before that node? Open the port")
    return _trouble("HF551", Level.RETRY, why, "run doctor on the node that owns the endpoint too; check its name")


def _turned_away(asked: VisitOptions, error: HoldfastError) -> DoctorFinding:
    text = str(error)
    if isinstance(error, PortInUseError) or text.count(f"backend {BACKEND!r}") == 1:
        what = "a job runs" if isinstance(error, RefusedError) else "something else listens"
        holder = who_holds(asked.endpoint.port)
        why = f"{what} at {asked.endpoint}: {text}{f' (here that port is held by {holder})' if holder else ''}"
        return _trouble("HF553", Level.RETRY, why, "wait for it to end, or take another port on all nodes")
    return _trouble("HF552", Level.FATAL, text, "run the same line, with the same token, on all nodes")


def _trouble(code: str, level: Level, why: str, fix: str) -> DoctorFinding:
    return DoctorFinding(code=code, level=level, what="meeting", why=why, fix=fix)


class _Visitor:
    """This node, from its first word at the desk to the last."""

    def __init__(self, asked: VisitOptions, host: str, channel: Channel, place: Claim | None) -> None:
        self._asked, self._host, self._channel, self._place = asked, host, channel, place
        self._listener = probe.ProbeServer()
        self._reducer: Reducer | None = None
        self.visit: Visit | None = None
        self.me = 0

    async def go(self, facts: asyncio.Task[LocalFacts], examine: Examine) -> Visited:
        """Raises PeerError, ProtocolError, AuthenticationError or TimeoutError when the desk is lost."""
        timeout_s = self._asked.timeout_s
        await self._listener.open(self._listen_at())
        here = Here(self._host, self._listener.port, self._asked.local_addr or "", at_desk=self._place is not None)
        self._channel.send(here)
        roster = await self._receive(timeout_s + SLACK_S)
        if isinstance(roster, Full):
            return Visited(None, trouble=_trouble("HF552", Level.RETRY, roster.text, "start it on all nodes together"))
        if not isinstance(roster, Roster) or not 0 <= roster.me < len(roster.peers):
            raise ProtocolError("no roster")
        self.me = roster.me
        self._listener.introduce(roster.me, roster.key)
        links = await try_all(roster)
        known = await facts
        problems = tuple(finding for finding in examine(known) if finding.level is not Level.PASS)
        report = NodeReport(summary=self._summary(known), links=links, findings=problems)
        self._channel.send(Told(report))
        outcome = await self._receive(max(timeout_s, REPORT_S_MIN) + SLACK_S)
        if not isinstance(outcome, CheckOutcome):
            raise ProtocolError("no outcome")
        self.visit = outcome.visit
        if outcome.reduce:
            over = await self._reduce(roster)
            self.visit = replace(outcome.visit, reduced=over.reduced)
        return Visited(self.visit, self.me)

    async def close(self) -> None:
        await self._listener.close()
        if self._reducer is not None:
            await self._reducer.close()
        await self._channel.close()

    def _listen_at(self) -> tuple[str, ...]:
        """Where the others come to: the addresses of the desk, or the one from which we reached it."""
        if self._place is not None:
            return self._place.addresses
        seen = self._channel.local_address
        if self._asked.local_addr or (ip_address(seen).is_loopback and not _is_loopback(self._asked.endpoint.host)):
            return ("0.0.0.0",)
        return (seen,)

    def _summary(self, facts: LocalFacts) -> Summary:
        torch = facts.torch
        holding = [each.name for each in facts.interfaces if self._channel.local_address in each.addresses]
        return Summary(
            host=facts.host,
            python=facts.python,
            torch=torch.version,
            cuda=torch.cuda,
            nccl=torch.nccl,
            holdfast=facts.holdfast,
            interface=holding[0] if holding and holding[0] != "lo" else "",
            has_torch=torch.state is TorchState.OK and torch.gloo,
        )

    async def _reduce(self, roster: Roster) -> CheckOver:
        asked, me = self._asked, roster.me
        reduced = Reduced(ok=False, silent=True)
        try:
            self._reducer = await Reducer.start(asked.python, me, len(roster.peers), asked.timeout_s)
        except OSError as error:
            reduced = Reduced(ok=False, error=error.strerror or str(error))
        port = await self._store_port(roster)
        if self._reducer is not None and port:
            if me != 0:
                self._reducer.join(roster.peers[0].address, port)
            reduced = await _in_time(self._reducer.result(), asked.timeout_s, reduced)
        self._channel.send(Result(reduced))
        over = await self._receive(asked.timeout_s + SLACK_S)
        if not isinstance(over, CheckOver):
            raise ProtocolError("no end of the all-reduce")
        return over

    async def _store_port(self, roster: Roster) -> int:
        """Of the first node's store, known to all of them then; 0: there is none."""
        timeout_s = self._asked.timeout_s
        if roster.me == 0:
            port = 0
            if self._reducer is not None:
                port = await _in_time(self._reducer.store_port(), timeout_s, 0)
            self._channel.send(StorePort(port))
            return port
        go = await self._receive(timeout_s + SLACK_S)
        if not isinstance(go, Go):
            raise ProtocolError("no word of the store")
        return go.port

    async def _receive(self, limit_s: float) -> Message:
        async with asyncio.timeout(limit_s):
            return await self._channel.receive()


async def try_all(roster: Roster) -> tuple[NodePath, ...]:
    """Every peer: first all at once, then the bandwidth of those that answer, in turns that collide little."""
    number, room = len(roster.peers), asyncio.Semaphore(AT_ONCE_MAX)
    others = [(roster.me + turn) % number for turn in range(1, number)]

    async def one(index: int) -> NodePath:
        peer = roster.peers[index]
        async with room:
            late: tuple[tuple[str, ...], str] = ((), f"no answer within {NAME_S_MAX:g} s")
            names, error = await bounded(lambda: system.own_addresses(peer.host), NAME_S_MAX, late)
            link = await probe.probe(peer, index, roster.key, transfer_s=0.0)
        return replace(link, names=names, name_error=error)

    links = dict(zip(others, await asyncio.gather(*map(one, others)), strict=True))
    transfer_s = min(probe.TRANSFER_S_MAX, TRANSFERS_S_MAX / max(1, len(others)))
    for index in others:
        if links[index].reached is Reached.YES:
            again = await probe.probe(roster.peers[index], index, roster.key, transfer_s=transfer_s)
            links[index] = replace(links[index], bytes_s=again.bytes_s)
    return tuple(links[index] for index in sorted(links))


async def _in_time(waited: Awaitable[Value], limit_s: float, otherwise: Value) -> Value:
    try:
        async with asyncio.timeout(limit_s):
            return await waited
    except TimeoutError:
        return otherwise


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
