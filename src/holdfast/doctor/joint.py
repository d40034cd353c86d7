"""This node's part of a check of several nodes, from the rendezvous to the common report.

Other modules judge the result. It ends within a few times its time-out, whatever the other nodes do.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.detached import run_detached
from holdfast.doctor.findings import (
    DoctorFinding,
    JointCheck,
    Level,
    ListEntry,
    LocalFacts,
    NodeReport,
    Reduced,
    Summary,
    TorchState,
    fatal,
    retry,
)
from holdfast.doctor.gpu_full import full_traits
from holdfast.doctor.joint_server import (
    BACKEND,
    REPORT_S_MIN,
    SLACK_S,
    Channel,
    CheckServer,
    FromServer,
    Ready,
    Roster,
    SharedMessages,
    StorePort,
    decode_from_server,
    why_no_reduce,
)
from holdfast.doctor.machine_state import used_gpus
from holdfast.doctor.majority import profile
from holdfast.doctor.probe import ProbeServer, Reducer, probe_all
from holdfast.protocol.errors import (
    AuthenticationError,
    CoordinatorUnreachableError,
    HoldfastError,
    PeerError,
    PortInUseError,
    ProtocolError,
    RefusedError,
    UnresolvedHostError,
)
from holdfast.protocol.options import Endpoint
from holdfast.protocol.policy import JobSpec, NodeSpec
from holdfast.protocol.session import ClientHandshake, Session
from holdfast.rendezvous.bind import Claim, claim, who_holds
from holdfast.runtime.connection import Connection, dial_endpoint, fresh_nonce
from holdfast.text import is_loopback

PROBES_PER_REPORT = 0.6
"""Share of the time for a report in which all peers are probed: what has not answered by then is reported as silent."""
RETRY_S = 0.25
"""Pause between two attempts to reach the endpoint."""
SAY_S = 5.0
"""Interval of the lines that say that nobody answers, and of the search at the other entries of the endpoint list."""
MEETING = "meeting"
"""Name of the check in findings about how the nodes come together."""

Kind = TypeVar("Kind", bound=Struct)
Value = TypeVar("Value")


class JointOptions(NamedTuple):
    """Options of the command line."""

    endpoint: Endpoint
    others: tuple[Endpoint, ...]
    """The other entries of the endpoint list."""
    run_id: str
    nodes: tuple[int, int]
    """Minimum and maximum number of nodes."""
    token: bytes | None
    is_host: bool | None
    """Whether this node is at the endpoint; None: found out by binding."""
    local_addr: str | None
    timeout_s: float
    """Limit for the nodes to join, and for each exchange between them."""
    reduce: bool
    """Whether an all-reduce is wanted."""
    python: str
    """Path of the workers' interpreter."""
    gpu_test_s: float = 0.0
    """Limit of the test of what the GPUs compute, which a node makes before its report; 0: none is made."""

    @property
    def report_s(self) -> float:
        """Limit for a node's report (s)."""
        return max(self.timeout_s, REPORT_S_MIN) + self.gpu_test_s


class JointResult(NamedTuple):
    """What this node learned from the check."""

    check: JointCheck | None
    me: int = 0
    """Index of this node."""
    trouble: DoctorFinding | None = None
    """The reason why there is no check, or why it did not finish; None: it is complete."""


Examine = Callable[[LocalFacts], Sequence[DoctorFinding]]
NewSession = Callable[[], Session[FromServer]]


async def check_together(
    asked: JointOptions, facts: asyncio.Task[LocalFacts], examine: Examine, say: Callable[[str], None]
) -> JointResult:
    """Meet the other nodes, test every pair, and return all results. A network error is a finding, not an exception."""
    host = socket.gethostname()
    job = JobSpec(run_id=asked.run_id, min_nodes=asked.nodes[0], max_nodes=asked.nodes[1], backend=BACKEND)
    node = NodeSpec(member=f"{host}#{os.urandom(4).hex()}", host=host, nproc=1)

    def session() -> Session[FromServer]:
        return Session(ClientHandshake(job, node, asked.token, fresh_nonce()), decode_from_server)

    async with asyncio.TaskGroup() as tasks:
        met = await _meet(asked, job, session, tasks, say)
        if isinstance(met, DoctorFinding):
            return JointResult(None, trouble=met)
        client = CheckClient(asked, host, session, *met)
        try:
            return await client.run(facts, examine)
        except RefusedError as error:  # the check had begun, or had all its nodes, when this one came
            return JointResult(None, trouble=retry("HF552", MEETING, str(error), "start it on all nodes together"))
        except (PeerError, TimeoutError) as error:
            why = f"the doctor at {asked.endpoint} was lost: {error or 'it did not answer in time'}"
            return JointResult(client.check, client.me, retry("HF554", MEETING, why, "see doctor's output there"))
        finally:
            await client.close()


async def _meet(
    asked: JointOptions, job: JobSpec, session: NewSession, tasks: asyncio.TaskGroup, say: Callable[[str], None]
) -> tuple[Connection[FromServer], Claim | None] | DoctorFinding:
    """Connect to the server, which starts here if the endpoint is this machine's. Returns the connection and, on that
    machine, the claim; or the finding that ends the check."""
    loop = asyncio.get_running_loop()
    began = said_s = next_search_s = loop.time()
    while True:
        try:
            claimed = await run_detached(lambda: claim(asked.endpoint, is_host=asked.is_host))
            if claimed.is_host:
                server = CheckServer(job, asked.token, asked.timeout_s, asked.report_s, reduce=asked.reduce, say=say)
                await server.open(claimed, tasks)
            return await dial_endpoint(claimed.endpoint, session), claimed if claimed.is_host else None
        except (UnresolvedHostError, CoordinatorUnreachableError) as error:
            now = loop.time()
            # The job may have moved to another entry of the list after its first host was lost.
            if now >= next_search_s:
                next_search_s = now + SAY_S
                if (elsewhere := await _job_elsewhere(asked, session)) is not None:
                    return elsewhere
            if now - began > asked.timeout_s:
                return _nobody(asked, error)
            if now - said_s > SAY_S:
                said_s = now
                say(f"no answer at {asked.endpoint} yet: {error}")
            await asyncio.sleep(RETRY_S)
        except (RefusedError, AuthenticationError, PortInUseError, ProtocolError) as error:
            return _refused(asked.endpoint, error)
        except OSError as error:
            return fatal("HF553", MEETING, f"cannot bind {asked.endpoint}: {error.strerror}", "use another port")


def _nobody(asked: JointOptions, error: HoldfastError) -> DoctorFinding:
    """The finding that nobody answers at the endpoint. Silence points to a firewall, a refusal to a late node."""
    text = str(error).removeprefix(f"no coordinator at {asked.endpoint}: ")
    why = f"no answer at {asked.endpoint} within {asked.timeout_s:g} s: {text}"
    instead = "; a job begins only there: if that node is gone, name another one first, on all nodes"
    fix = instead if asked.others else ""
    if "no answer" in text:
        return fatal("HF551", MEETING, why, f"check firewalls and security groups of that node, and open the port{fix}")
    return retry("HF551", MEETING, why, f"run doctor on the node that owns the endpoint, too; check its name{fix}")


async def _job_elsewhere(asked: JointOptions, session: NewSession) -> DoctorFinding | None:
    """The job may run although nobody answers at the first entry of the list: another one leads to it, or a witness."""
    entries = list(asked.others)
    for entry in entries:  # which grows: a witness names the address at which the job is
        try:
            connection = await dial_endpoint(entry, session)
        except RefusedError as error:
            if _is_a_job(error):
                return _refused(entry, error)
        except HoldfastError:
            continue
        else:
            accepted = connection.accepted
            connection.close()
            if accepted.witness and accepted.port:
                entries.append(Endpoint(host=accepted.address, port=accepted.port))
    return None


def _is_a_job(error: HoldfastError) -> bool:
    """Whether a job's listener refused this check. Its text names both backends; another doctor's names `doctor` twice
    or not at all. The text is all that the refusal carries."""
    return str(error).count(f"backend {BACKEND!r}") == 1


def _refused(endpoint: Endpoint, error: HoldfastError) -> DoctorFinding:
    text = str(error)
    fix = "wait for it to end, or use another port on all nodes"
    if isinstance(error, PortInUseError):  # the error names the process if it is on this machine
        return retry("HF553", MEETING, f"another program listens at {endpoint}: {text}", fix)
    if _is_a_job(error):
        holder = who_holds(endpoint.port)
        here = f" (on this machine the port is used by {holder})" if holder else ""
        return retry("HF553", MEETING, f"a job runs at {endpoint}: {text}{here}", fix)
    return fatal("HF552", MEETING, text, "run the same line, with the same token, on all nodes")


async def check_entry(entry: Endpoint, session: NewSession) -> ListEntry:
    """Find out who answers at an entry of the endpoint list: this node, a witness or nobody."""
    # Whether the address is this machine's shows when it is bound.
    try:
        claimed = await run_detached(lambda: claim(entry))
        claimed.close()
        if claimed.is_host:
            return ListEntry(address=str(entry), own=True)
        connection = await dial_endpoint(entry, session)
    except (HoldfastError, OSError) as error:
        return ListEntry(address=str(entry), error=str(error).removeprefix(f"no coordinator at {entry}: "))
    witness = connection.accepted.witness
    connection.close()
    return ListEntry(address=str(entry), error="" if witness else "another doctor answers there")


class CheckClient:
    """This node's part, from its first message to the last."""

    def __init__(
        self,
        asked: JointOptions,
        host: str,
        session: NewSession,
        connection: Connection[FromServer],
        claimed: Claim | None,
    ) -> None:
        """`session` makes the sessions for connections to the endpoint list's entries; `claimed` is the endpoint's
        address if the server is in this process."""
        self._asked, self._host, self._session, self._claimed = asked, host, session, claimed
        self._connection = connection
        self._channel = Channel(connection)
        self._probes = ProbeServer()
        self._reducer: Reducer | None = None
        self.check: JointCheck | None = None
        """The check, as far as it got; None before all reports came."""
        self.me = 0
        """Index of this node, once the roster came."""

    async def run(self, facts: asyncio.Task[LocalFacts], examine: Examine) -> JointResult:
        """Take part in the check. Raises RefusedError when it joined too late, PeerError or TimeoutError when the
        server is lost."""
        timeout_s, local_addr = self._asked.timeout_s, self._asked.local_addr or ""
        await self._probes.open(self._listen_at())
        at_endpoint = self._claimed is not None
        self._connection.send(Ready(self._host, self._probes.port, local_addr, at_endpoint=at_endpoint))
        roster = await self._next(Roster, timeout_s)
        if not 0 <= roster.me < len(roster.peers):
            raise ProtocolError("no such node")
        self.me = roster.me

        self._probes.introduce(roster.me, roster.key)
        links = await probe_all(roster.me, roster.key, roster.peers, PROBES_PER_REPORT * self._asked.report_s)
        known = await facts
        problems = tuple(finding for finding in examine(known) if finding.level is not Level.PASS)
        entries = tuple(await asyncio.gather(*(check_entry(each, self._session) for each in self._asked.others)))
        report = NodeReport(summary=self._summary(known), links=links, findings=problems, entries=entries)
        reports = await self._share(report, roster, self._asked.report_s)

        why = why_no_reduce(reports, wanted=roster.reduce)
        came = tuple(peer.name for peer in roster.peers)
        self.check = JointCheck(wanted=self._asked.nodes, came=came, reports=reports, no_reduce=why)
        if not why:
            self.check = replace(self.check, reduced=await self._reduce(roster))
        return JointResult(self.check, self.me)

    async def close(self) -> None:
        await self._probes.close()
        if self._reducer is not None:
            await self._reducer.close()
        self._connection.close()
        await self._channel.closed.wait()

    def _listen_at(self) -> tuple[str, ...]:
        """Addresses for the other nodes: those of the server, or the one from which this node reached it."""
        # The others come to another address than the one seen here: --local-addr is another, or the endpoint's name
        # leads to loopback on its own machine.
        if self._asked.local_addr:  # also at the endpoint, where the claimed address may not be that one
            return ("0.0.0.0", "::")
        if self._claimed is not None:
            return self._claimed.addresses
        seen = self._connection.local_address
        if ip_address(seen).is_loopback and not is_loopback(self._asked.endpoint.host):
            return ("0.0.0.0", "::")
        return (seen,)

    def _summary(self, facts: LocalFacts) -> Summary:
        torch, seen = facts.torch, self._connection.local_address
        ours = [each for each in facts.interfaces if seen in each.addresses and each.name != "lo"]
        gpus = used_gpus(facts.machine, facts.variables)
        return Summary(
            host=facts.host,
            python=facts.python,
            torch=torch.version,
            cuda=torch.cuda,
            nccl=torch.nccl,
            holdfast=facts.holdfast,
            interface=next((each.name for each in ours), ""),
            has_torch=torch.state is TorchState.OK and torch.gloo,
            traits=profile(facts.machine, gpus, next((each.speed_mbit_s for each in ours), 0))
            | full_traits(facts.gpu_test),
        )

    async def _reduce(self, roster: Roster) -> tuple[Reduced | None, ...]:
        """Make an all-reduce with all nodes. Each step is shared even if it failed here: the others wait for it."""
        timeout_s = self._asked.timeout_s
        reduced, port = Reduced(ok=False, silent=True), 0
        try:
            self._reducer = await Reducer.start(self._asked.python, self.me, len(roster.peers), timeout_s)
        except OSError as error:
            reduced = Reduced(ok=False, error=error.strerror or str(error))
        if self._reducer is not None and self.me == 0:
            port = await _in_time(self._reducer.store_port(), timeout_s, 0)
        first = (await self._share(StorePort(port), roster, timeout_s))[0]
        if self._reducer is not None and first is not None and first.port:
            if self.me != 0:
                self._reducer.join(roster.peers[0].address, first.port)
            reduced = await _in_time(self._reducer.result(), timeout_s, reduced)
        return await self._share(reduced, roster, timeout_s)

    async def _share(self, value: Kind, roster: Roster, limit_s: float) -> tuple[Kind | None, ...]:
        """Send this node's message; returns the messages of all nodes."""
        self._connection.send(value)
        values = (await self._next(SharedMessages, limit_s)).values
        if len(values) != len(roster.peers):
            raise ProtocolError("not one message of each node")
        return tuple(each if isinstance(each, type(value)) else None for each in values)

    async def _next(self, kind: type[Kind], limit_s: float) -> Kind:
        async with asyncio.timeout(limit_s + SLACK_S):
            return await self._channel.next(kind)


async def _in_time(waited: Awaitable[Value], limit_s: float, otherwise: Value) -> Value:
    try:
        async with asyncio.timeout(limit_s):
            return await waited
    except TimeoutError:
        return otherwise
