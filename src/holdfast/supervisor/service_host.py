"""The node's two services: the process that serves a generation's TCPStore, and the saver, which writes snapshots.

A service is a process below the supervisor that outlives generations. It starts when it is needed, has one
SOCK_SEQPACKET socket to this agent, and ends when the other end of that socket is closed.

The store: the agent binds the listening socket first and publishes its port after, so that no other process can take
it. The next generation's socket is bound while the store of the present one continues. The server
(train/store_server.py) is started when the first client connects: that connection waits in the socket's backlog and is
handed over with it. The server is forked from the fork server where torch is preloaded. Otherwise it has to load torch
itself, so it is started at once if the script imports torch. Each generation gets a new store: no key of an earlier one
can be read.

The saver (train/snapshots/saver.py) writes to disk what workers leave in memory slots. The agent makes a folder in
/dev/shm and listens there; the connection that starts the saver waits in the backlog, and the saver accepts it. When
the saver dies, the next connection starts another one. It is also started to fetch states for a node that has none.
When the agent ends, it waits for saves in flight, at most FINISH_LIMIT_S. When the agent is killed, the supervisor
kills the saver and removes its folder; if the supervisor was killed too, the next start removes the folder.

Knows sockets and the supervisor; must not know torch, nor what a snapshot is.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress

from holdfast import seqpacket
from holdfast.journal import Journal
from holdfast.memory_folder import (
    COPIES,
    KEY,
    PREFETCH,
    SOCKET,
    MemoryFolder,
    clean,
    listen,
    ranks_with_states,
    remove_folder,
)
from holdfast.protocol.policy import HeldStates
from holdfast.protocol.train_contract import FINISH_LIMIT_S, SAVER_VARIABLE, STORE_SERVER, saver_argv
from holdfast.supervisor.client import ProcessEnded, SpawnFailed, SupervisorClient, SupervisorEvent

STORE, SAVER = "store", "saver"
CONTROL_FD = 3
"""The service's end of its socket."""
SAVER_LISTENING_FD = 4
BACKLOG = 16_384
"""Connections that may wait for the store's server: all ranks of a large job. The kernel has its own maximum."""
SAY_AFTER_S = 2.0
"""Time after which a wait for the saver is reported on the console (s)."""
FAILURES_MAX = 3
"""Number of savers in a row that ended before they reported their start. Then no other one is started."""

LostCallback = Callable[[int, str], None]


class ServiceProcess:
    """One service, started as often as needed. Pass every event of the supervisor to `why_ended`."""

    def __init__(
        self,
        supervisor: SupervisorClient,
        name: str,
        on_packet: Callable[[seqpacket.Message], None],
        on_silent: Callable[[], None],
    ) -> None:
        """`on_silent` is called when the process has closed its end of the socket."""
        self.supervisor = supervisor
        self._name = name
        self._on_packet = on_packet
        self._on_silent = on_silent
        self._loop = asyncio.get_running_loop()
        self._control: socket.socket | None = None
        self._started = 0

    @property
    def running(self) -> bool:
        """Whether it was started and not dropped."""
        return self._control is not None

    @property
    def _key(self) -> str:
        """The key at the supervisor. Each process has its own, so that a late event about a dead one is ignored."""
        return f"{self._name}#{self._started}"

    def start(self, argv: Sequence[str], fds: Mapping[int, int] | None = None, *, warm: bool = False) -> None:
        """Start the process. `fds`: number in the process -> descriptor of ours, beside CONTROL_FD."""
        self._started += 1
        ours, theirs = seqpacket.pair()
        with theirs, open("/dev/null", "r+b", buffering=0) as null:
            standard = dict.fromkeys((0, 1, 2), null.fileno())
            passed = {**standard, CONTROL_FD: theirs.fileno(), **(fds or {})}
            self.supervisor.spawn(self._key, argv, fds=passed, service=True, warm=warm)
        self._control = ours
        self._loop.add_reader(ours, self._readable)

    def send(self, packet: seqpacket.Message, fds: Sequence[int] = ()) -> None:
        """Send without waiting. Raises OSError: BlockingIOError when the process does not read, another when it is
        gone."""
        assert self._control is not None
        seqpacket.send(self._control, packet, fds)

    def why_ended(self, event: SupervisorEvent) -> str:
        """The reason, if this event says that the running process ended; empty for all other events."""
        if self._control is None:
            return ""
        if isinstance(event, ProcessEnded) and event.key == self._key:
            return f"ended with exit code {event.exit_code}"
        if isinstance(event, SpawnFailed) and event.key == self._key:
            return f"could not be started: {event.text}"
        return ""

    def drop(self) -> None:
        """Close the socket, which ends the process. What it has sent before is passed on: the supervisor may report its
        end first."""
        control, self._control = self._control, None
        if control is not None:
            self._loop.remove_reader(control)
            with closing(control), suppress(BlockingIOError):
                while received := seqpacket.receive(control):
                    self._on_packet(received[0])

    def _readable(self) -> None:
        assert self._control is not None
        try:
            received = seqpacket.receive(self._control)
        except BlockingIOError:
            return
        if received is None:
            self._loop.remove_reader(self._control)
            self._on_silent()
        else:
            self._on_packet(received[0])


class StoreHost:
    """The store of one node, over all generations. Pass every event of the supervisor to `handle`."""

    def __init__(
        self,
        supervisor: SupervisorClient,
        python: str,
        on_lost: LostCallback,
        *,
        eager: bool = False,
        warm_argv: Sequence[str] = (),
    ) -> None:
        """`python`: interpreter that has torch; empty: ours. `on_lost(generation, why)` is called when a store is lost.

        `eager`: start the server with the first `open`, not with the first client. `warm_argv`: the command line with
        which the fork server runs a script under a worker's Python; empty: there is no fork server.
        """
        self._server = ServiceProcess(
            supervisor, STORE, self._on_packet, lambda: self._lose("the store's server has gone")
        )
        self._python = python or sys.executable
        self._on_lost = on_lost
        self._eager = eager
        self._warm_argv = list(warm_argv)
        self._loop = asyncio.get_running_loop()
        self._generation: int | None = None
        self._listening: socket.socket | None = None
        self._reserved: socket.socket | None = None
        """The next generation's listening socket."""

    def reserve(self, *, loopback_only: bool) -> int:
        """Bind the port of the next generation's store, and return it; the present store continues. Raises OSError when
        it cannot bind."""
        self._release_reserved()
        self._reserved = _listen(loopback_only)
        return _port(self._reserved)

    def open(self, generation: int) -> int:
        """Begin a generation's store at the reserved port, end the previous one, return the port."""
        assert self._reserved is not None
        self.close_generation()
        self._generation = generation
        self._listening, self._reserved = self._reserved, None
        port = _port(self._listening)
        if self._eager or self._server.running:
            self._hand_over()
        else:
            self._loop.add_reader(self._listening, self._hand_over)
        return port

    def close_generation(self) -> None:
        """End the store of the current generation, if any; its clients are disconnected. The server stays."""
        self._close_listening()
        if self._generation is not None and self._server.running:
            self._send(self._generation, [])
        self._generation = None

    def close(self) -> None:
        """End the server too, and release the reserved port."""
        self._release_reserved()
        self.close_generation()
        self._server.drop()

    def handle(self, event: SupervisorEvent) -> None:
        """React to the server's end; events about other processes are ignored."""
        if why := self._server.why_ended(event):
            self._lose(f"the store's server {why}")

    def _hand_over(self) -> None:
        """Give the listening socket to the server, which is started if it does not run."""
        assert self._listening is not None
        assert self._generation is not None
        self._loop.remove_reader(self._listening)
        if not self._server.running:
            program = self._warm_argv or [self._python, "-u"]
            self._server.start([*program, STORE_SERVER, str(CONTROL_FD)], warm=bool(self._warm_argv))
        self._send(self._generation, [self._listening.fileno()])
        # The server's copy is the only one left: when the server dies, clients are refused at once.
        self._close_listening()

    def _send(self, generation: int, fds: Sequence[int]) -> None:
        try:
            self._server.send({"generation": generation}, fds)
        except BlockingIOError:  # hundreds of packets wait in the socket, one or two for each generation
            self._lose("the store's server does not read")
        except OSError:
            pass  # an event will report its end

    def _on_packet(self, packet: seqpacket.Message) -> None:
        if "failed" in packet and packet["failed"] == self._generation:
            self._generation = None
            self._on_lost(packet["failed"], packet["text"])

    def _lose(self, why: str) -> None:
        self._server.drop()
        generation, self._generation = self._generation, None
        self._close_listening()
        if generation is not None:
            self._on_lost(generation, why)

    def _release_reserved(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def _close_listening(self) -> None:
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._listening = None


class SaverHost:
    """The saver of one node, over all generations. Pass every event of the supervisor to `handle`."""

    def __init__(
        self,
        supervisor: SupervisorClient,
        run_id: str,
        on_notice: Callable[[str], None],
        journal: Journal,
        token: bytes | None = None,
    ) -> None:
        """`on_notice` gets messages for the user, `journal` an event for each save, and for each copy to another
        node. `token`: the job's, if it has one."""
        self._saver = ServiceProcess(supervisor, SAVER, self._on_packet, lambda: self._gone.set())  # noqa: PLW0108
        self._run_id = run_id
        self._on_notice = on_notice
        self._journal, self._token = journal, token
        self._loop = asyncio.get_running_loop()
        self._memory_folder: MemoryFolder | None = None
        self._listening: socket.socket | None = None
        self._failures = 0
        """Number of savers in a row that ended before they reported their start."""
        self._serving: dict[int, seqpacket.Message] = {}
        """The saver's newest answer to the worker of each rank of this node, by rank, in this life of the job."""
        self._gone = asyncio.Event()
        self._cleaning: asyncio.Task[object] | None = None
        """Removes the folders that agents of other jobs have left in /dev/shm."""
        self._opened = False
        """It was tried to make the memory folder: only once, so that a job gets one notice and no second folder."""

    def environment(self, generation: int, local_rank: int) -> dict[str, str]:
        """Variables for a worker's environment; none where there is no memory folder."""
        self._open_once()
        if self._memory_folder is None:
            return {}
        return {SAVER_VARIABLE: f"{self._memory_folder.path}@{generation}@{local_rank}"}

    def states(self) -> HeldStates | None:
        """The states that the saver here gives to other nodes; None: it gives none."""
        if self._memory_folder is None or not self._serving:
            return None

        ranks = set(self._serving).union(ranks_with_states(self._memory_folder.path / COPIES))
        newest = list(self._serving.values())[-1]
        host, port, word, folder, world = (newest[name] for name in ("host", "port", "word", "folder", "world"))
        return HeldStates(host, port, word, folder, world, tuple(sorted(ranks)))

    def prefetch(self, ranks: Mapping[int, int], states: Sequence[HeldStates]) -> None:
        """Let the saver fetch states from other nodes while the workers start. Call it before they are started.

        `ranks`: the rank of each local rank. `states`: what the savers of other nodes give.
        """
        wanted: list[object] = []
        for local_rank, rank in ranks.items():
            sources = [(has.host, has.port, has.word, has.folder) for has in states if rank in has.ranks]
            wanted += [(local_rank, rank, sources)] if sources else []
        if not wanted:
            return

        self._open_once()
        if self._memory_folder is None or self._failures >= FAILURES_MAX:
            return
        with suppress(OSError):  # then the workers fetch their states themselves
            (self._memory_folder.path / PREFETCH).mkdir(mode=0o700, exist_ok=True)
            if not self._saver.running:
                self._start()
            if self._saver.running:
                self._saver.send({"do": "prefetch", "states": wanted})

    def handle(self, event: SupervisorEvent) -> None:
        """React to the saver's end; events about other processes are ignored."""
        if why := self._saver.why_ended(event):
            if isinstance(event, SpawnFailed):
                self._failures = FAILURES_MAX - 1  # another one could not be started either
            self._ended(why)

    def renew(self, supervisor: SupervisorClient) -> None:
        """Use another supervisor; the saver died with the previous one."""
        self._saver.supervisor = supervisor
        if self._memory_folder is not None:
            supervisor.remove_at_end(str(self._memory_folder.path))
        if self._saver.running:
            self._ended("was killed with the supervisor")
        elif self._listening is not None and self._failures < FAILURES_MAX:
            self._loop.add_reader(self._listening, self._start)

    async def close(self) -> None:
        """Wait for saves in flight, then end the saver and remove the shared-memory folder."""
        if self._memory_folder is None:
            return
        assert self._listening is not None
        if not self._saver.running and self._failures < FAILURES_MAX and seqpacket.is_readable(self._listening):
            self._start()  # a worker left a save a moment ago, and died
        if self._saver.running:
            await self._finish()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        self._listening = None
        self._saver.drop()
        if self._cleaning is not None:
            await self._cleaning
        closed, self._memory_folder = self._memory_folder, None
        await asyncio.to_thread(_remove, closed)

    async def _finish(self) -> None:
        try:
            self._saver.send({"do": "finish"})
        except OSError:
            return
        notice = self._loop.call_later(
            SAY_AFTER_S,
            self._on_notice,
            f"a snapshot is still being written; waiting for it, at most {FINISH_LIMIT_S:g} s.",
        )
        try:
            await asyncio.wait_for(self._gone.wait(), FINISH_LIMIT_S)
        except TimeoutError:
            self._on_notice(f"a snapshot was not written within {FINISH_LIMIT_S:g} s and is given up.")
        finally:
            notice.cancel()

    def _open_once(self) -> None:
        if self._opened:
            return
        self._opened, opened = True, None
        try:
            opened = MemoryFolder.make(self._run_id)
            self._listening = listen(opened.path / SOCKET)
            if self._token is not None:
                key = hmac.digest(self._token, b"holdfast snapshots " + self._run_id.encode(), "sha256")
                (opened.path / KEY).write_bytes(key)
        except OSError:  # /dev/shm is not writable: a worker that needs it gets an error
            if opened is not None:
                _remove(opened)
            return
        self._memory_folder = opened
        self._saver.supervisor.remove_at_end(str(opened.path))
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._start)
        self._cleaning = self._loop.create_task(asyncio.to_thread(clean))

    def _start(self) -> None:
        """Start the saver. A worker has connected, or a node needs states."""
        assert self._listening is not None
        assert self._memory_folder is not None
        self._loop.remove_reader(self._listening)
        if not self._saver.supervisor.alive:
            return  # `renew` follows
        self._gone.clear()
        argv = saver_argv(self._memory_folder.path, listening=SAVER_LISTENING_FD, control=CONTROL_FD)
        self._saver.start(argv, {SAVER_LISTENING_FD: self._listening.fileno()})

    def _on_packet(self, packet: seqpacket.Message) -> None:
        if packet.get("is") == "up":
            self._failures = 0
        elif packet.get("is") == "news":
            self._on_notice(f"snapshots: {packet.get('text')}")
        elif packet.get("is") == "serving":
            # Another word begins another life of the job: what was offered before belongs to the one before.
            if any(each["word"] != packet["word"] for each in self._serving.values()):
                self._serving.clear()
            if packet["port"] and packet["folder"].isprintable():
                self._serving[packet["rank"]] = packet
        elif packet.get("is") == "saved":
            about = {name: packet[name] for name in ("path", "step", "took_s", "stall_s", "metrics") if name in packet}
            self._journal.write("snapshot", **about)
        elif packet.get("is") == "copy":
            del packet["is"]
            self._journal.write("snapshot_copy", **packet)
        elif packet.get("is") == "fetched":
            del packet["is"]
            self._journal.write("snapshot_fetched", **packet)

    def _ended(self, why: str) -> None:
        self._saver.drop()
        self._serving.clear()
        if self._memory_folder is not None:  # workers wait for a prefetch as long as its folder is there
            with suppress(OSError):
                remove_folder(self._memory_folder.path / PREFETCH)
        self._gone.set()
        self._failures += 1
        if self._failures < FAILURES_MAX:
            if self._listening is not None:
                self._loop.add_reader(self._listening, self._start)
        elif self._failures == FAILURES_MAX:
            self._on_notice(f"snapshots: the process that writes them {why}. It is not started again.")


def _remove(memory_folder: MemoryFolder) -> None:
    try:
        memory_folder.remove()
    except OSError:
        memory_folder.close()  # the next start tries again


def _port(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


def _listen(loopback_only: bool) -> socket.socket:
    """A listening socket at a free port, for both families if there is IPv6. Raises OSError."""
    if loopback_only:
        return _bound(socket.AF_INET, "127.0.0.1")
    try:
        return _bound(socket.AF_INET6, "::")
    except OSError:
        return _bound(socket.AF_INET, "0.0.0.0")


def _bound(family: socket.AddressFamily, address: str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((address, 0))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def free_port(loopback_only: bool) -> int:
    """A port that is free now, at which rank 0's worker serves its own store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).

    Another process may take the port first: that is why the agent's own store is the default.
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as sock:
        sock.bind(("127.0.0.1" if loopback_only else "", 0))
        return int(sock.getsockname()[1])
