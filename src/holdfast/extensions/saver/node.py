"""The process that writes snapshots (train/snapshots/saver.py): starts it, ends it, and passes on what it says.

It writes to disk what workers leave in memory slots. The agent makes a folder in /dev/shm and listens there; the
connection that starts the saver waits in the backlog, and the saver accepts it. When the saver dies, the next
connection starts another one. It is also started to fetch states for a node that has none. When the agent ends, it
waits for saves in flight, at most FINISH_LIMIT_S. When the agent is killed, the supervisor kills the saver and removes
its folder; if the supervisor was killed too, the next start removes the folder.

Must not know what a snapshot is.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

from holdfast import seqpacket
from holdfast.extensions.saver.messages import HeldStates, Holds, StateSources
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
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.train_contract import FINISH_LIMIT_S, SAVER_VARIABLE, saver_argv
from holdfast.runtime.node_extension import (
    GenerationPrepared,
    Node,
    NodeExtension,
    NodeHappened,
    Send,
    SupervisorReplaced,
    WorkersStarted,
    rank_in,
)
from holdfast.supervisor.client import SpawnFailed, SupervisorEvent
from holdfast.supervisor.generation import taking_part
from holdfast.supervisor.service_process import CONTROL_FD, ServiceProcess

SAVER = "saver"
SAVER_LISTENING_FD = 4
SAY_AFTER_S = 2.0
"""Time after which a wait for the saver is reported on the console (s)."""
FAILURES_MAX = 3
"""Number of savers in a row that ended before they reported their start. Then no other one is started."""


class OnNode(NodeExtension):
    """The saver of one node, over all generations."""

    messages = StateSources

    def __init__(self, node: Node, send: Send) -> None:
        super().__init__(node, send)
        self._gone = asyncio.Event()
        self._saver = ServiceProcess(lambda: node.supervisor, SAVER, self._on_packet, self._gone.set)
        self._sources = StateSources(0)
        """The newest message of the coordinator."""
        self._loop = asyncio.get_running_loop()
        self._memory_folder: MemoryFolder | None = None
        self._listening: socket.socket | None = None
        self._failures = 0
        """Number of savers in a row that ended before they reported their start."""
        self._serving: dict[int, seqpacket.Message] = {}
        """The saver's newest answer to the worker of each rank of this node, by rank, in this life of the job."""
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

    def heard(self, message: StateSources) -> None:
        self._sources = message

    def happened(self, event: NodeHappened) -> None:
        match event:
            case GenerationPrepared(assign):
                if states := self.states():
                    self.send(Holds(assign.generation, states))
            case WorkersStarted(assign, _):
                sources = self._sources
                if sources.generation == assign.generation:
                    local_ranks = taking_part(assign, self.node.options.nproc)
                    self.prefetch({each: rank_in(assign, each) for each in local_ranks}, sources.states)

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

    def supervisor(self, event: SupervisorEvent | SupervisorReplaced) -> None:
        if isinstance(event, SupervisorReplaced):
            self._renew()
        elif why := self._saver.why_ended(event):
            if isinstance(event, SpawnFailed):
                self._failures = FAILURES_MAX - 1  # another one could not be started either
            self._ended(why)

    def _renew(self) -> None:
        """Go on under another supervisor; the saver died with the previous one."""
        if self._memory_folder is not None:
            self.node.supervisor.remove_at_end(str(self._memory_folder.path))
        if self._saver.running:
            self._ended("was killed with the supervisor")
        elif self._listening is not None:
            self._loop.add_reader(self._listening, self._start)

    async def close(self, outcome: Outcome | None) -> None:  # noqa: ARG002
        """Wait for saves in flight, then end the saver and remove the shared-memory folder."""
        if self._memory_folder is None:
            return
        if self._listening is not None and not self._saver.running and seqpacket.is_readable(self._listening):
            self._start()  # a worker left a save a moment ago, and died
        if self._saver.running:
            await self._finish()
        self._stop_listening()
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
            self.node.say,
            f"a snapshot is still being written; waiting for it, at most {FINISH_LIMIT_S:g} s.",
        )
        try:
            await asyncio.wait_for(self._gone.wait(), FINISH_LIMIT_S)
        except TimeoutError:
            self.node.say(f"a snapshot was not written within {FINISH_LIMIT_S:g} s and is given up.")
        finally:
            notice.cancel()

    def _open_once(self) -> None:
        if self._opened:
            return
        self._opened, opened = True, None
        try:
            opened = MemoryFolder.make(self.node.run_id)
            self._listening = listen(opened.path / SOCKET)
            token = self.node.options.token
            if token is not None:
                key = hmac.digest(token, b"holdfast snapshots " + self.node.run_id.encode(), "sha256")
                (opened.path / KEY).write_bytes(key)
        except OSError:  # /dev/shm is not writable: a worker that needs it gets an error
            if opened is not None:
                _remove(opened)
            return
        self._memory_folder = opened
        self.node.supervisor.remove_at_end(str(opened.path))
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._start)
        self._cleaning = self._loop.create_task(asyncio.to_thread(clean))

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._listening = None

    def _start(self) -> None:
        """Start the saver. A worker has connected, or a node needs states."""
        assert self._listening is not None
        assert self._memory_folder is not None
        self._loop.remove_reader(self._listening)
        if not self.node.supervisor.alive:
            return  # `renew` follows
        self._gone.clear()
        argv = saver_argv(self._memory_folder.path, listening=SAVER_LISTENING_FD, control=CONTROL_FD)
        self._saver.start(argv, {SAVER_LISTENING_FD: self._listening.fileno()})

    def _on_packet(self, packet: seqpacket.Message) -> None:
        if packet.get("is") == "up":
            self._failures = 0
        elif packet.get("is") == "news":
            self.node.say(f"snapshots: {packet.get('text')}")
        elif packet.get("is") == "serving":
            # Another word begins another life of the job: what was offered before belongs to the one before.
            if any(each["word"] != packet["word"] for each in self._serving.values()):
                self._serving.clear()
            if packet["port"] and packet["folder"].isprintable():
                self._serving[packet["rank"]] = packet
        elif packet.get("is") == "saved":
            about = {name: packet[name] for name in ("path", "step", "took_s", "stall_s", "metrics") if name in packet}
            self.node.write("snapshot", **about)
        elif packet.get("is") == "copy":
            del packet["is"]
            self.node.write("snapshot_copy", **packet)
        elif packet.get("is") == "fetched":
            del packet["is"]
            self.node.write("snapshot_fetched", **packet)

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
            self._stop_listening()  # workers must see it: they save by themselves then, or get an error
            self.node.say(f"snapshots: the process that writes them {why}. It is not started again.")


def _remove(memory_folder: MemoryFolder) -> None:
    try:
        memory_folder.remove()
    except OSError:
        memory_folder.close()  # the next start tries again
