"""The connections by which the ranks of several nodes agree on steps: one from each node to that of rank 0.

On each node the rank with the lowest number speaks for it. Rank 0 listens, the others connect, and both sides prove
that they know the key of this life of the job, as savers do (snapshots/copy_connection.py). Every message is a number
with a MAC: a step that is ready on that node, or, from rank 0, one that is done on all.

If a node cannot connect, there are no links at all, and the ranks of the job do not agree on steps.

Knows sockets and the ranks of this job. Must not know what a step is."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from queue import Empty, Queue
from typing import Any

from holdfast.protocol.errors import CopyError
from holdfast.train.agreement import Peers
from holdfast.train.copies import own_addresses
from holdfast.train.snapshots.copy_connection import CopyConnection
from holdfast.train.snapshots.disk import chunk_crc

CONNECT_S = 5.0
"""Limit for one node to connect, at one address."""
MEET_S = 15.0
"""Limit for all nodes to connect."""
CUT_POLL_S = 0.02
"""Pause between two looks whether a rank was lost meanwhile (s)."""
BACKLOG = 256
END = -1
"""The message that a node agrees on no more steps."""


class NoAgreement(Enum):
    """The reason why the ranks of several nodes do not agree on steps, as rank 0 prints it."""

    STORE = "rank 0 serves the store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)"
    CONNECTION = "not every node can connect to that of rank 0"


class StepLink:
    """A connection to the rank that speaks for another node. See step_agreement.NodeLink."""

    def __init__(self, connection: CopyConnection) -> None:
        self._connection = connection
        self._newest = 0
        self.lost = self._ended = False
        """`lost`: the connection is lost. It has said nothing else then: the coordinator tells who is lost."""

    @property
    def newest(self) -> int:
        """The newest step that the other side has said; 0: none."""
        self._read()
        return self._newest

    @property
    def ended(self) -> bool:
        """Whether the other side has said that its node agrees on no more steps."""
        self._read()
        return self._ended

    def fileno(self) -> int:
        """The descriptor of its socket."""
        return self._connection.fileno()

    def say(self, step: int) -> None:
        """Send a step."""
        if not self.lost:
            try:
                self._connection.say(step=step)
            except CopyError:
                self.lost = True

    def end(self) -> None:
        """Say that this node agrees on no more steps."""
        self.say(END)

    def close(self) -> None:
        """Close the connection."""
        self.lost = True
        self._connection.close()

    def _read(self) -> None:
        """Take every message that has arrived."""
        while not self.lost and await_news([self], 0.0):
            try:
                step = self._connection.hear().get("step")
            except CopyError:
                self.lost = True
                return
            if step == END:
                self._ended = True
            elif type(step) is int:
                self._newest = max(self._newest, step)


def await_news(links: Sequence[StepLink], limit_s: float) -> bool:
    """Wait until one of these links has a message, at most for this time. Returns whether one has. Lost links have
    none."""
    poller = select.poll()
    for each in links:
        if not each.lost:
            poller.register(each.fileno(), select.POLLIN)
    return bool(poller.poll(limit_s * 1e3))


class StepListener:
    """Rank 0's side, until all nodes have connected."""

    def __init__(self, host: str) -> None:
        """`host`: this node's address, or several, separated by blanks; then it listens at all of the node. OSError."""
        family, at = socket.AF_INET6 if ":" in host else socket.AF_INET, "" if " " in host else host
        dual = not at and family == socket.AF_INET6
        self._socket = socket.create_server((at, 0), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Accept nobody any more."""
        self._socket.close()

    def accept(self, key: bytes, nodes: Sequence[int], is_cut: Callable[[], bool]) -> list[StepLink] | None:
        """The links from these nodes; None: not all have connected in time, or `is_cut`. A stranger holds nobody up:
        each caller gives its proof in a thread of its own."""
        found: dict[int, CopyConnection] = {}
        proved: Queue[tuple[int, CopyConnection]] = Queue()
        deadline_s = time.monotonic() + MEET_S
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while set(found) != set(nodes) and time.monotonic() < deadline_s and not is_cut():
            if poller.poll(CUT_POLL_S * 1e3):
                with contextlib.suppress(OSError):
                    sock, _ = self._socket.accept()
                    threading.Thread(target=_admit, args=(sock, key, proved), daemon=True).start()
            with contextlib.suppress(Empty):
                while True:
                    node, connection = proved.get_nowait()
                    found[node] = connection
        if set(found) == set(nodes):
            return [StepLink(found[node]) for node in nodes]
        for each in found.values():
            each.close()
        return None


def _admit(sock: socket.socket, key: bytes, proved: Queue[tuple[int, CopyConnection]]) -> None:
    """Let this caller prove that it is of this job, and pass it on with the number of its node."""
    try:
        connection = CopyConnection.answer(sock, key, chunk_crc)
        node: Any = connection.hear().get("node")
        if type(node) is int:
            proved.put((node, connection))
            return
    except CopyError:
        pass
    sock.close()


def connect(hosts: str, port: int, key: bytes, node: int) -> StepLink | None:
    """The link from this node to that of rank 0, at one of these addresses; None: it is not reached."""
    deadline_s = time.monotonic() + MEET_S
    for host in hosts.split():
        if time.monotonic() > deadline_s:
            break
        with contextlib.suppress(CopyError):
            connection = CopyConnection.call((host, port), key, stall_s=CONNECT_S)
            connection.say(node=node)
            return StepLink(connection)
    return None


def meet(
    peers: Peers, places: Sequence[str], key: bytes, is_cut: Callable[[], bool]
) -> Sequence[StepLink] | NoAgreement:
    """Connect the nodes; all ranks call this. Returns this rank's links; empty: another rank speaks for its node.

    `places`: for each rank a text that is equal on all ranks of its node. `is_cut`: whether a rank was lost."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return NoAgreement.STORE
    speakers = [places.index(each) for each in dict.fromkeys(places)]
    listening: StepListener | None = None
    hosts = ""
    if peers.rank == 0:
        hosts = own_addresses()
        with contextlib.suppress(OSError):
            listening = StepListener(hosts)
    hosts, port = peers.broadcast([hosts, 0 if listening is None else listening.port])

    links: Sequence[StepLink] | None = []
    if listening is not None:
        links = listening.accept(key, speakers[1:], is_cut)
        listening.close()
    elif peers.rank in speakers:
        link = _connected(partial(connect, hosts, port, key, peers.rank), is_cut) if port else None
        links = None if link is None else [link]
    if all(peers.all_gather(links is not None)) and links is not None:
        return links
    for each in links or ():
        each.close()
    return NoAgreement.CONNECTION


def _connected(connecting: Callable[[], StepLink | None], is_cut: Callable[[], bool]) -> StepLink | None:
    """The link, for which this may wait for long; None: there is none, or a rank was lost meanwhile."""
    found: list[StepLink | None] = []
    thread = threading.Thread(target=lambda: found.append(connecting()), name="holdfast-nodes", daemon=True)
    thread.start()
    while thread.is_alive() and not is_cut():
        thread.join(CUT_POLL_S)
    return found[0] if found else None
