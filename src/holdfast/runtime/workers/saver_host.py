"""The agent's side of the saver: a shelf in /dev/shm, a socket on it, and a process when the first worker connects.

The saver (snapshots/saver.py) writes what workers leave in memory slots to disk. It is a service at the keeper, so that
the end of a generation does not touch it. The agent listens; the connection that wakes it waits in the socket's backlog
and is the saver's. When the saver dies, the next connection starts another one. The agent's end waits for saves in
flight, at most FINISH_LIMIT_S; a killed agent's saver is killed with it and its shelf removed by the keeper, or by the
next start when the keeper was killed too.

Knows the shelf, the socket and the keeper; must not know what a snapshot is.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable

from holdfast.runtime.workers.keeper_client import KeeperClient, KeeperEvent, ProcessEnded, SpawnFailed
from holdfast.snapshots import shelf
from holdfast.snapshots.shelf import FINISH_LIMIT_S, SOCKET, Shelf, clean

KEY = "saver#"
"""The savers' keys at the keeper begin so; each has its own, so that a late word about a dead one is ignored."""
SAY_AFTER_S = 2.0
"""A wait that is longer is told on the console."""
ENOUGH_FAILURES = 3
"""Savers in a row that ended before they had said that they are up: it is not tried again."""


class SaverHost:
    """The saver of one node, over all generations. Every event of the keeper has to be passed to `handle`."""

    def __init__(self, keeper: KeeperClient, run_id: str, on_notice: Callable[[str], None]) -> None:
        """`on_notice` is told what the user should know."""
        self._keeper = keeper
        self._run_id = run_id
        self._on_notice = on_notice
        self._loop = asyncio.get_running_loop()
        self._shelf: Shelf | None = None
        self._listening: socket.socket | None = None
        self._control: socket.socket | None = None
        self._savers = 0
        self._failures = 0
        self._gone = asyncio.Event()
        self._cleaning: asyncio.Task[object] | None = None
        self._opened = False

    def environment(self, generation: int, local_rank: int) -> dict[str, str]:
        """What a worker finds in its environment: nothing where there is no memory to keep anything in."""
        if not self._opened:
            self._opened = True
            self._open()
        if self._shelf is None:
            return {}
        return {shelf.SAVER_VARIABLE: f"{self._shelf.path}@{generation}@{local_rank}"}

    def handle(self, event: KeeperEvent) -> None:
        """Take notice of the saver's end; events about other processes are ignored."""
        if isinstance(event, ProcessEnded) and event.key == self._key:
            self._ended(f"ended with exit code {event.exit_code}")
        elif isinstance(event, SpawnFailed) and event.key == self._key:
            self._failures = ENOUGH_FAILURES
            self._ended(f"could not be started: {event.text}")

    def renew(self, keeper: KeeperClient) -> None:
        """Another keeper; the saver died with the one before."""
        self._keeper = keeper
        if self._shelf is not None:
            keeper.remove_at_end(str(self._shelf.path))
        if self._control is not None:
            self._ended("was killed with the keeper")
        elif self._listening is not None and self._failures < ENOUGH_FAILURES:
            self._loop.add_reader(self._listening, self._start)

    async def close(self) -> None:
        """Have saves in flight finished, then end the saver and remove the shelf."""
        if self._shelf is None:
            return
        assert self._listening is not None
        if self._control is None and self._failures < ENOUGH_FAILURES and _is_readable(self._listening):
            self._start()  # somebody has left a save, and died, a moment ago
        if self._control is not None:
            await self._finish()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        self._listening = None
        self._drop_control()
        if self._cleaning is not None:
            await self._cleaning
        shelf, self._shelf = self._shelf, None
        await asyncio.to_thread(_remove, shelf)

    async def _finish(self) -> None:
        assert self._control is not None
        try:
            shelf.send(self._control, {"do": "finish"})
        except OSError:
            return
        said = self._loop.call_later(
            SAY_AFTER_S,
            self._on_notice,
            f"a snapshot is still being written; waiting for it, at most {FINISH_LIMIT_S:g} s.",
        )
        try:
            await asyncio.wait_for(self._gone.wait(), FINISH_LIMIT_S)
        except TimeoutError:
            self._on_notice(f"a snapshot was not written within {FINISH_LIMIT_S:g} s and is given up.")
        finally:
            said.cancel()

    # --- the process --------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        opened = None
        try:
            opened = Shelf.make(self._run_id)
            self._listening = shelf.listen(opened.path / SOCKET)
        except OSError:  # no /dev/shm to write to: a worker that wants one hears of it
            if opened is not None:
                _remove(opened)
            return
        self._shelf = opened
        self._keeper.remove_at_end(str(opened.path))
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._start)
        self._cleaning = self._loop.create_task(asyncio.to_thread(clean))

    @property
    def _key(self) -> str:
        return f"{KEY}{self._savers}"

    def _start(self) -> None:
        assert self._listening is not None
        assert self._shelf is not None
        self._loop.remove_reader(self._listening)
        if not self._keeper.alive:
            return  # `renew` comes
        self._savers += 1
        self._gone.clear()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening, control = 3, 4
        with theirs, open("/dev/null", "r+b", buffering=0) as null:
            self._keeper.spawn(
                self._key,
                shelf.saver_argv(self._shelf.path, listening=listening, control=control),
                fds={
                    0: null.fileno(),
                    1: null.fileno(),
                    2: null.fileno(),
                    listening: self._listening.fileno(),
                    control: theirs.fileno(),
                },
                service=True,
            )
        ours.setblocking(False)
        self._control = ours
        self._loop.add_reader(ours, self._readable)

    def _readable(self) -> None:
        assert self._control is not None
        try:
            got = shelf.receive(self._control)
        except BlockingIOError:
            return
        if got is None:
            self._loop.remove_reader(self._control)  # ProcessEnded follows, unless the keeper is gone too
            self._gone.set()
        elif got[0].get("is") == "up":
            self._failures = 0
        elif got[0].get("is") == "news":
            self._on_notice(f"snapshots: {got[0].get('text')}")

    def _ended(self, why: str) -> None:
        self._drop_control()
        self._gone.set()
        self._failures += 1
        if self._failures < ENOUGH_FAILURES:
            if self._listening is not None:
                self._loop.add_reader(self._listening, self._start)
        elif self._failures == ENOUGH_FAILURES:
            self._on_notice(f"snapshots: the process that writes them {why}. It is not started again.")

    def _drop_control(self) -> None:
        if self._control is not None:
            self._loop.remove_reader(self._control)
            self._control.close()
            self._control = None


def _is_readable(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


def _remove(shelf: Shelf) -> None:
    try:
        shelf.remove()
    except OSError:
        shelf.close()  # the next start tries again
