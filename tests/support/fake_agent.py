"""An agent's part of a regroup, for tests of workers alone: starts them, orders them to the gate, and sends them on.

There is no coordinator: the test decides. Each worker is a process of the test, with the variables of a launcher.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from holdfast import seqpacket
from holdfast.protocol.board_layout import BOARD_VARIABLE, REPLACEMENT_VARIABLE, channel_name
from holdfast.snapshots.memory_folder import SAVER_VARIABLE

PATIENCE_S = 25.0


class FakeAgent:
    """One node's agent. Use as a context manager: it ends what it has started."""

    def __init__(self, folder: Path, script: Path, *arguments: str) -> None:
        """`folder`: for logs and memory."""
        self._folder = folder
        self._run_id = f"fake-{os.getpid()}-{time.monotonic_ns()}"
        self._command = [sys.executable, "-u", str(script), *arguments]
        self._board = f"{folder}/board"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(channel_name(f"{self._board}@0"))
        self._listening.listen(64)
        self._listening.setblocking(False)
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        """By local rank."""
        self._channels: dict[int, socket.socket] = {}
        self.heard: list[tuple[int, dict[str, Any]]] = []
        """Local rank and message, in the order of arrival."""
        self._store: TCPStore | None = None
        self._stores: list[object] = []
        self.generation = 0

    def __enter__(self) -> FakeAgent:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.workers.values():
            process.kill()
            process.wait()
        for channel in self._channels.values():
            channel.close()
        self._listening.close()

    def places(self, local_ranks: Sequence[int]) -> dict[int, dict[str, str]]:
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

    def start(self, local_ranks: Sequence[int]) -> None:
        """Start the first generation."""
        for local_rank, place in self.places(local_ranks).items():
            self._spawn(local_rank, place)

    def replace(self, local_rank: int, world: int) -> None:
        """Start a replacement for a worker that has ended, for a world of this size."""
        self.workers[local_rank].wait()
        self._channels.pop(local_rank).close()
        place = {**os.environ, "RANK": str(local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world)}
        place |= {
            "TORCHELASTIC_RUN_ID": self._run_id,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            REPLACEMENT_VARIABLE: "1",
        }
        self._spawn(local_rank, place)

    def _spawn(self, local_rank: int, place: dict[str, str]) -> None:
        environment = {**os.environ, **place, "OMP_NUM_THREADS": "1", BOARD_VARIABLE: f"{self._board}@{local_rank}"}
        environment.pop(SAVER_VARIABLE, None)
        with (self._folder / f"{local_rank}.log").open("ab") as log:
            self.workers[local_rank] = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, local_rank: int, signum: int = signal.SIGKILL) -> None:
        self.workers[local_rank].send_signal(signum)

    def release(self, local_ranks: Sequence[int], *, cut: bool = True) -> None:
        """Order these workers to the gate of the next generation."""
        for each in local_ranks:
            seqpacket.send(self._channels[each], {"do": "release", "generation": self.generation + 1, "cut": cut})

    def go(self, local_ranks: Sequence[int]) -> None:
        """Send these workers into the next generation."""
        for local_rank, place in self.places(local_ranks).items():
            message = {"do": "go", "generation": self.generation, "environment": place}
            seqpacket.send(self._channels[local_rank], message)

    def said(self, what: str, **fields: object) -> set[int]:
        """The local ranks that have sent such a message."""
        return {
            rank
            for rank, message in self.heard
            if message.get("is") == what and all(message.get(name) == value for name, value in fields.items())
        }

    def await_said(self, local_ranks: Sequence[int], what: str, **fields: object) -> None:
        """Wait until each of these workers has sent such a message."""
        self.until(lambda: set(local_ranks) <= self.said(what, **fields), f"{what} {fields} of {local_ranks}")

    def until(self, reached: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < deadline_s, f"{what} never came; heard {self.heard}\n{self.logs()}"
            self._receive()
            time.sleep(0.002)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self._folder.glob("*.log")))

    def _receive(self) -> None:
        try:
            while True:
                connection, _ = self._listening.accept()
                connection.setblocking(False)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                pid = struct.unpack("3i", credentials)[0]
                local_rank = next(rank for rank, process in self.workers.items() if process.pid == pid)
                self._channels[local_rank] = connection
        except BlockingIOError:
            pass
        for local_rank, channel in self._channels.items():
            try:
                while (received := seqpacket.receive(channel)) is not None:
                    self.heard.append((local_rank, received[0]))
            except (BlockingIOError, OSError):
                continue
