"""An agent's part of a regroup, for tests of workers alone: starts them, orders them to wait for the next generation, and
sends them on.

There is no coordinator: the test decides. Workers have the variables of a launcher, and share an import of torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from holdfast import memory_folder, seqpacket
from holdfast.memory_folder import MemoryFolder
from holdfast.protocol import train_contract
from holdfast.protocol.board_layout import BOARD_VARIABLE, channel_name
from holdfast.protocol.train_contract import REPLACEMENT_VARIABLE
from tests.support.limits import until
from tests.warm_jobs import Started, WarmJobs

PATIENCE_S = 60.0
"""torch's connections to its store look up names, which may take seconds each."""
STACK_S = 5.0
"""Time in which a worker writes its stack and ends."""


class NodeMemory:
    """What a node has beside its workers: a folder in memory, and the saver."""

    def __init__(self, name: str) -> None:
        self.memory = MemoryFolder.make(name)
        with memory_folder.listen(self.memory.path / memory_folder.SOCKET) as listening:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                fds = {"listening": listening.fileno(), "control": theirs.fileno()}
                line = train_contract.saver_argv(self.memory.path, **fds)
                self._saver = subprocess.Popen(line, pass_fds=fds.values())

    def close(self) -> None:
        self._control.close()
        self._saver.kill()
        self._saver.wait()
        self.memory.remove()


class FakeAgent:
    """One node's agent, or those of several pretended nodes. Use as a context manager: it ends what it has started."""

    def __init__(
        self, jobs: WarmJobs, folder: Path, script: Path, *arguments: str | Path, per_node: int | None = None
    ) -> None:
        """`folder`: for logs. `per_node`: so many workers pretend to be on one node, with a memory of its own; their
        local ranks are those in the job. None: all."""
        self._jobs = jobs
        self._folder = folder
        self._run_id = f"fake-{os.getpid()}-{time.monotonic_ns()}"
        self._per_node = per_node
        self._nodes = {0: NodeMemory(self._run_id)}
        self._command = [script, *arguments]
        self._board = folder / "board"
        self._board.mkdir()  # it has an inode, and nobody can map it: workers ask for no safe points
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(channel_name(self._board.stat().st_ino))
        self._listening.listen(64)
        self._listening.setblocking(False)
        self.workers: dict[int, Started] = {}
        """By local rank."""
        self._lost: list[Started] = []
        self._channels: dict[int, socket.socket] = {}
        self.heard: list[tuple[int, dict[str, Any]]] = []
        """Local rank and message, in the order of arrival."""
        self._store: TCPStore | None = None
        self._stores: list[object] = []
        """Of the generations before: a worker may still leave one."""
        self.generation = 0

    @property
    def memory(self) -> MemoryFolder:
        """Of the first node."""
        return self._nodes[0].memory

    def _memory_of(self, local_rank: int) -> MemoryFolder:
        node = 0 if self._per_node is None else local_rank // self._per_node
        if node not in self._nodes:
            self._nodes[node] = NodeMemory(f"{self._run_id}-{node}-{self.generation}")
        return self._nodes[node].memory

    def lose(self, node: int) -> None:
        """Everything on this node is gone; its workers have ended already."""
        self._nodes.pop(node).close()

    def __enter__(self) -> FakeAgent:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.workers.values(), *self._lost):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for channel in self._channels.values():
            channel.close()
        self._listening.close()
        for node in self._nodes.values():
            node.close()
        self._store = None
        self._stores.clear()

    def places(self, local_ranks: Collection[int]) -> dict[int, dict[str, str]]:
        """The variables of each worker in a new generation of these local ranks."""
        self.generation += 1
        self._stores.append(self._store)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return {
            local_rank: {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(len(local_ranks)),
                "LOCAL_WORLD_SIZE": str(len(local_ranks)),
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_RUN_ID": self._run_id,
            }
            for rank, local_rank in enumerate(sorted(local_ranks))
        }

    def start(self, local_ranks: Collection[int]) -> None:
        """Start the first generation."""
        for local_rank, place in self.places(local_ranks).items():
            self._spawn(local_rank, place)

    def replace(self, local_rank: int, world: int) -> None:
        """Start a replacement for a worker that has ended, for a world of this size."""
        lost = self.workers[local_rank]
        lost.wait()
        with contextlib.suppress(ProcessLookupError):  # processes of its data loader
            os.killpg(lost.pid, signal.SIGKILL)
        self._lost.append(lost)
        self._channels.pop(local_rank).close()
        place = {
            "RANK": str(local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world),
            "TORCHELASTIC_RUN_ID": self._run_id,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            REPLACEMENT_VARIABLE: "1",
        }
        self._spawn(local_rank, place)

    def _spawn(self, local_rank: int, place: dict[str, str]) -> None:
        environment = {
            **os.environ,
            **place,
            BOARD_VARIABLE: f"{self._board}@{local_rank}",
            "PYTHONFAULTHANDLER": "1",  # for `logs_with_stacks`
            train_contract.SAVER_VARIABLE: f"{self._memory_of(local_rank).path}@{self.generation}@{local_rank}",
        }
        log = self._folder / f"{local_rank}.log"
        self.workers[local_rank] = self._jobs.start(*self._command, env=environment, output=log)

    def ended(self, local_ranks: Collection[int]) -> list[int]:
        """Wait for the ends of these workers; their exit codes."""
        self.until(
            lambda: all(self.workers[each].poll() is not None for each in local_ranks), f"the end of {local_ranks}"
        )
        return [self.workers[each].wait() for each in local_ranks]

    def kill(self, local_rank: int, signum: int = signal.SIGKILL) -> None:
        self.workers[local_rank].send_signal(signum)

    def release(self, local_ranks: Collection[int], *, at_once: bool = True) -> None:
        """Order these workers to wait for the next generation."""
        for each in local_ranks:
            self._send(each, {"do": "release", "generation": self.generation + 1, "at_once": at_once})

    def go(self, local_ranks: Collection[int]) -> None:
        """Send these workers into the next generation."""
        for local_rank, place in self.places(local_ranks).items():
            message = {"do": "go", "generation": self.generation, "environment": place}
            self._send(local_rank, message)

    def _send(self, local_rank: int, message: dict[str, Any]) -> None:
        try:
            seqpacket.send(self._channels[local_rank], message)
        except OSError as error:
            raise AssertionError(f"worker {local_rank}: {error}; heard {self.heard}\n{self.logs()}") from error

    def said(self, what: str, **fields: object) -> set[int]:
        """The local ranks that have sent such a message."""
        return {
            rank
            for rank, message in self.heard
            if message.get("is") == what and all(message.get(name) == value for name, value in fields.items())
        }

    def forget(self, what: str) -> None:
        """Such messages that have come."""
        self.heard = [each for each in self.heard if each[1].get("is") != what]

    def await_said(self, local_ranks: Collection[int], what: str, **fields: object) -> None:
        """Wait until each of these workers has sent such a message."""
        self.until(
            lambda: set(local_ranks) <= self.said(what, **fields),
            f"{what} {fields} of {local_ranks}",
            may_refuse=what == "refuse",
        )

    def until(self, reached: Callable[[], bool], what: str, *, may_refuse: bool = False) -> None:
        refused = len(self.said("refuse"))

        def looked() -> bool:
            self._receive()
            done = reached()
            if not (done or may_refuse) and len(self.said("refuse")) > refused:  # nothing comes any more
                raise AssertionError(f"refused while waiting for {what}; heard {self.heard}\n{self.logs()}")
            return done

        until(looked, lambda: f"{what}; heard {self.heard}\n{self.logs_with_stacks()}", PATIENCE_S)
        self._receive()  # who connected, and what was said, before it was reached

    def logs_with_stacks(self) -> str:
        """The logs, in which each worker that is still alive shows where it is. It ends by that."""
        living = [each for each in self.workers.values() if each.poll() is None]
        for each in living:
            each.send_signal(signal.SIGABRT)
        for each in living:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(STACK_S)
        return self.logs()

    def logs(self) -> str:
        """What the workers have written, without the frames that torch shows of its C++ code."""
        texts = {path.name: path.read_text().splitlines() for path in sorted(self._folder.glob("*.log"))}
        return "\n".join(
            "\n".join([f"--- {name}", *(line for line in lines if "frame #" not in line)])
            for name, lines in texts.items()
        )

    def _receive(self) -> None:
        try:
            while True:
                connection, _ = self._listening.accept()
                connection.setblocking(False)
                pid = seqpacket.peer(connection)[0]
                local_rank = next(rank for rank, process in self.workers.items() if process.pid == pid)
                if local_rank in self._channels:  # that of a training function before
                    self._read(local_rank)
                    self._channels[local_rank].close()
                self._channels[local_rank] = connection
        except BlockingIOError:
            pass
        for local_rank in self._channels:
            self._read(local_rank)

    def _read(self, local_rank: int) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            while (received := seqpacket.receive(self._channels[local_rank])) is not None:
                self.heard.append((local_rank, received[0]))
