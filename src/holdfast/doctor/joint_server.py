"""The messages of nodes that check each other, and the server at the endpoint that passes them on.

The listener, the handshake, the token and its MACs are those of a run. `doctor` is the backend that the nodes name, so
a check and a job at one endpoint refuse each other. All messages go through the endpoint, so a check also works if a
firewall closes all other ports.

    node      Ready ──▶        server       the port at which the other nodes can reach this one
              ◀── Roster | Full             all nodes and their addresses
              NodeReport ──▶                results of this node
              ◀── SharedMessages            results of all nodes
              StorePort ──▶                 if an all-reduce follows: the port of its store; only the first node has one
              ◀── SharedMessages
              Reduced ──▶                   result of the all-reduce on this node
              ◀── SharedMessages            and on all nodes

The server makes no tests and judges nothing: the node in its process takes part in the check like the others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.doctor.findings import NodeReport, Reached, Reduced
from holdfast.doctor.probe import KEY_BYTES, Peer
from holdfast.doctor.together import part_of
from holdfast.protocol import codec
from holdfast.protocol.errors import HoldfastError, PeerError, ProtocolError, RefusedError
from holdfast.protocol.policy import JobSpec, Port, PortOrNone, Rank
from holdfast.protocol.session import Hello
from holdfast.rendezvous.bind import Claim
from holdfast.runtime.connection import Connection
from holdfast.runtime.listener import Listener

BACKEND = "doctor"
"""The backend's name in a check; no job uses it."""
REPORT_S_MIN = 60.0
"""Minimum time limit of a report: the import of torch from a slow disk takes long, and is one of the checks."""
SLACK_S = 15.0
"""Additional time for the server, after the time limit of the nodes' messages."""
LINKS_SHARED_MAX = 8192
"""Limit of shared links: with very many nodes only the worst are shared, so that all reports fit into a frame."""
FINDINGS_SHARED_MAX = 4096
FINDINGS_OF_ONE_MAX = 32
TEXT_CHARS_MAX = 500
"""Limit of each text of a node that is sent to the others."""
MESSAGES_WAITING_MAX = 16

Kind = TypeVar("Kind", bound=Struct)
Value = TypeVar("Value")
Received = TypeVar("Received")


class Ready(Struct, frozen=True, tag=True):
    """A node's first message: its ProbeServer listens."""

    host: str
    port: Port
    """Port of this node's ProbeServer."""
    address: str = ""
    """The node's --local-addr; empty: the server uses the address of the connection."""
    at_endpoint: bool = False
    """Whether the server is in the same process."""


NOT_READY = Ready("", 1)
"""The value of a node that has not sent its Ready yet."""


class StorePort(Struct, frozen=True, tag=True):
    """The port at which the all-reduce's store is served, on the first node."""

    port: PortOrNone = 0
    """Port of the store on this node; 0: there is none."""


class Roster(Struct, frozen=True, tag=True):
    """All nodes of the check, for one of them."""

    me: Rank
    """Index of the node that gets this."""
    key: bytes
    """Secret key of the ProbeServers of this check."""
    reduce: bool
    """Whether an all-reduce is wanted."""
    peers: tuple[Peer, ...]


class Full(Struct, frozen=True, tag=True):
    """The check continues without this node."""

    text: str


class SharedMessages(Struct, frozen=True, tag=True):
    """One message of each node, by index; None: the node is gone or did not send one in time."""

    values: tuple[NodeReport | StorePort | Reduced | None, ...]


FromNode = Ready | NodeReport | StorePort | Reduced
FromServer = Roster | Full | SharedMessages

_node_decoder: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_server_decoder: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def decode_from_node(data: bytes) -> FromNode:
    """Raises ProtocolError."""
    return codec.decode(_node_decoder, data, "a doctor's node")


def decode_from_server(data: bytes) -> FromServer:
    """Raises ProtocolError."""
    return codec.decode(_server_decoder, data, "a doctor's server")


class Channel(Generic[Received]):
    """A connection whose messages a task waits for."""

    def __init__(self, connection: Connection[Received]) -> None:
        self.connection = connection
        self.closed = asyncio.Event()
        self.reason = ""
        """The reason why the connection is closed; empty while it is open."""
        self._messages: asyncio.Queue[Received | None] = asyncio.Queue()
        connection.start(self._take, self._end)

    async def next(self, kind: type[Kind]) -> Kind:
        """Wait for the next message. Raises PeerError when the connection is closed, RefusedError when the check
        continues without this node, ProtocolError for another kind of message."""
        message = await self._messages.get()
        if message is None:
            self._messages.put_nowait(None)  # every later call finds the end, too
            raise PeerError(self.reason)
        if isinstance(message, Full):
            raise RefusedError(message.text)
        if not isinstance(message, kind):
            raise ProtocolError(f"a {type(message).__name__} instead of a {kind.__name__}")
        return message

    def _take(self, message: Received) -> None:
        # A node waits for the others' messages after each of its own, so that more are not from a doctor.
        if self._messages.qsize() < MESSAGES_WAITING_MAX:
            self._messages.put_nowait(message)
        else:
            self.connection.abort("it sends too much")

    def _end(self, reason: str) -> None:
        self.reason = reason
        self._messages.put_nowait(None)
        self.closed.set()


# --- the server at the endpoint ---------------------------------------------------------------------------------------


class CheckedNode(Channel[FromNode]):
    """A connection to the server. Its node is part of the check once it is ready."""

    def __init__(self, connection: Connection[FromNode], server: CheckServer) -> None:
        super().__init__(connection)
        self._server = server
        self.ready = NOT_READY

    def _take(self, message: FromNode) -> None:
        if self.ready is NOT_READY and isinstance(message, Ready):
            self.ready = clipped(message)
            self._server.came(self)
        else:
            super()._take(message)

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._server.left(self)


class CheckServer:
    """Accepts nodes, sends the roster to all of them, and passes each node's messages on to all."""

    def __init__(
        self,
        job: JobSpec,
        token: bytes | None,
        timeout_s: float,
        report_s: float,
        *,
        reduce: bool,
        say: Callable[[str], None],
    ) -> None:
        """`timeout_s`: limit for the nodes to join, and for each exchange; `report_s`: for their reports."""
        self._job, self._token, self._timeout_s, self._report_s = job, token, timeout_s, report_s
        self._reduce, self._say = reduce, say
        self._connected: list[CheckedNode] = []
        """All connections that were ever accepted."""
        self._nodes: list[CheckedNode] = []
        """The nodes that are ready, in the order in which they joined; by index once the check is sealed."""
        self._sealed = False
        """Whether the roster was sent: nobody joins, and indices stay."""
        self._full = asyncio.Event()
        """Set when as many nodes as the job can have are ready."""

    async def open(self, claimed: Claim, tasks: asyncio.TaskGroup) -> None:
        """Listen at the claimed address, and run the check in a task of the group."""

        def connected(connection: Connection[FromNode], _: Hello) -> None:
            self._connected.append(CheckedNode(connection, self))

        listener = Listener(claimed.sockets, self._job, self._token, connected, self._say, decode=decode_from_node)
        await listener.start()
        tasks.create_task(self._run(listener))

    def came(self, node: CheckedNode) -> None:
        """Take a node into the check, unless the check is complete."""
        if self._sealed or self._full.is_set():
            names = ", ".join(each.ready.host for each in self._nodes)
            node.connection.send(Full(f"the check has begun without this node; it has {names}"))
            node.connection.close()
            return
        self._nodes.append(node)
        self._say(f"{node.ready.host} joined: {len(self._nodes)} of {self._job.max_nodes}")
        if len(self._nodes) == self._job.max_nodes:
            self._full.set()

    def left(self, node: CheckedNode) -> None:
        """Forget a node whose connection ended before the check began."""
        if node.ready is NOT_READY:
            self._say(f"dropped a connection from {node.connection.peer_address}: {node.reason}")
        elif node in self._nodes and not self._sealed:  # it may join again
            self._nodes.remove(node)
            self._say(f"{node.ready.host} left: {node.reason}")

    async def _run(self, listener: Listener) -> None:
        """The whole check. Each wait has a time limit."""
        timeout_s = self._timeout_s
        try:
            await self._gather()
            reports = [
                self._trimmed(report) if report is not None else None
                for report in await self._collect(NodeReport, self._report_s)
            ]
            self._send_all(SharedMessages(tuple(reports)))
            if not why_no_reduce(reports, wanted=self._reduce):
                self._send_all(SharedMessages(tuple(await self._collect(StorePort, timeout_s))))
                self._send_all(SharedMessages(tuple(await self._collect(Reduced, timeout_s + SLACK_S / 2))))
        finally:
            self._sealed = True
            listener.close()
            for node in self._connected:
                node.connection.close("the check is over")
            await asyncio.gather(*(node.closed.wait() for node in self._connected))

    async def _gather(self) -> None:
        """Wait until all nodes have joined or the time limit has passed, then send the roster to each."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._full.wait()
        except TimeoutError:
            self._say(f"{len(self._nodes)} of {self._job.max_nodes} nodes joined; continuing with them")
        self._sealed = True

        # The node in this process becomes the first one: its address is the one that all others can reach, so it has
        # the all-reduce's store. The sort is stable, so the others stay in the order in which they joined.
        self._nodes.sort(key=lambda node: not node.ready.at_endpoint)
        key, names = os.urandom(KEY_BYTES), self._names()
        for me, node in enumerate(self._nodes):
            peers = tuple(
                Peer(name, other.ready.host, address(other, node), other.ready.port)
                for name, other in zip(names, self._nodes, strict=True)
            )
            node.connection.send(Roster(me, key, self._reduce, peers))

    def _names(self) -> tuple[str, ...]:
        """Host names, with a number if several nodes have the same."""
        hosts = [node.ready.host for node in self._nodes]
        return tuple(
            host if hosts.count(host) == 1 else f"{host}#{hosts[:index].count(host)}"
            for index, host in enumerate(hosts)
        )

    def _trimmed(self, report: NodeReport) -> NodeReport:
        """This node's share of the frame that carries all reports: its worst links and its first findings."""
        number = len(self._nodes)
        part = part_of(report, max(1, LINKS_SHARED_MAX // number))
        findings = report.findings[: min(FINDINGS_OF_ONE_MAX, max(1, FINDINGS_SHARED_MAX // number))]
        return clipped(replace(part, findings=findings))

    async def _collect(self, kind: type[Kind], limit_s: float) -> list[Kind | None]:
        """One message of each node; None for a node that is gone or does not answer in time."""

        async def one(node: CheckedNode) -> Kind | None:
            try:
                async with asyncio.timeout_at(until):
                    return await node.next(kind)
            except (HoldfastError, TimeoutError):
                return None

        until = asyncio.get_running_loop().time() + limit_s
        return await asyncio.gather(*map(one, self._nodes))

    def _send_all(self, message: FromServer) -> None:
        for node in self._nodes:
            node.connection.send(message)


def address(of: CheckedNode, seen_by: CheckedNode) -> str:
    """The address at which `seen_by` reaches the node `of`.

    A node that connects over loopback is on the server's machine, and has the address at which `seen_by` reached it.
    """
    if of.ready.address:
        return of.ready.address
    seen = of.connection.peer_address
    on_this_machine = of.ready.at_endpoint or ip_address(seen).is_loopback
    return seen_by.connection.local_address if on_this_machine else seen


def why_no_reduce(reports: Sequence[NodeReport | None], *, wanted: bool) -> str:
    """The reason why no all-reduce is made; empty: it is made. One that must fail would only repeat known problems."""
    received = [report for report in reports if report is not None]
    without = [report.summary.host for report in received if not report.summary.has_torch]
    if not wanted:
        return "not requested"
    if len(reports) < 2:
        return "there is only one node"
    if len(received) < len(reports):
        return "a node sent no report"
    if without:
        return f"no torch with gloo on {', '.join(without[:8])}"
    if any(link.reached is not Reached.YES for report in received for link in report.links):
        return "not all pairs work"
    return ""


def clipped(value: Value) -> Value:
    """The value with all its texts cut, so that the messages of all nodes fit into one frame."""
    if isinstance(value, str):
        return value[:TEXT_CHARS_MAX]  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(map(clipped, value))  # type: ignore[return-value]
    if isinstance(value, Struct):
        fields = {name: clipped(getattr(value, name)) for name in value.__struct_fields__}
        return replace(value, **fields)
    return value
