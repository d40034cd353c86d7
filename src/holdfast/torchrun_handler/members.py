"""Runs a member in a thread beside torchrun's, and passes requests between the two.

torchrun's thread blocks in `next` and reads `regroup`; signals that torchrun handles still interrupt it. No torch here.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future

from holdfast.protocol.options import RunOptions
from holdfast.torchrun_handler.member import HOST_END_S_MAX, Formed, HandlerMember

LEAVE_S_MAX = 2.0
"""At the exit of the interpreter: the time limit for a message to the others."""
JOIN_S_MAX = HOST_END_S_MAX + 15.0
"""Longer than every wait of the member."""


class HandlerMembership:
    """Starts with the first `next`."""

    def __init__(self, options: RunOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._member: HandlerMember | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._lock = threading.Lock()
        self._gone = False
        """The loop takes no more calls: the member can answer from any thread now."""
        self._closed = False

    @property
    def regroup(self) -> bool:
        """torchrun must stop its workers and ask for the next generation."""
        return self._member is not None and self._member.regroup

    @property
    def over(self) -> bool:
        """There will be no further generation."""
        return self._closed or (self._member is not None and self._member.over)

    def next(self) -> Formed:
        """Block until this node has its place in a new generation. Reports to the others that it has no worker alive.

        Raises OverError when there will be none, or InternalError.
        """
        waiter: Future[Formed] = Future()
        if self._thread is None:
            self._begin(waiter)
        else:
            self._post(lambda member: member.want(waiter), otherwise=waiter.cancel)
        try:
            return waiter.result()
        except BaseException:  # a signal: nothing will use the result
            waiter.cancel()
            raise

    def end(self, failure: str = "") -> bool:
        """torchrun will not ask again: its workers succeeded, or (`failure`) the job must end for all.

        Blocks while the others are informed. False: some of the work is still going on.
        """
        self._closed = True
        if self._thread is None:
            return True
        self._post(lambda member: member.end(failure))
        return self._join(JOIN_S_MAX)

    def _leave(self) -> None:
        """torchrun was ended by a signal and does nothing more."""
        self._post(lambda member: member.leave())
        self._join(LEAVE_S_MAX)

    def _begin(self, waiter: Future[Formed]) -> None:
        # A daemon: where torchrun just ends, its end waits at most LEAVE_S_MAX.
        self._thread = threading.Thread(target=self._run, args=(waiter,), name="holdfast-member", daemon=True)
        self._thread.start()
        self._ready.wait()
        atexit.register(self._leave)

    def _run(self, waiter: Future[Formed]) -> None:
        try:
            asyncio.run(self._live(waiter))
        except Exception as error:
            if not waiter.done():  # not even a member could be made
                waiter.set_exception(error)
            raise
        finally:
            self._ready.set()

    async def _live(self, waiter: Future[Formed]) -> None:
        self._loop = asyncio.get_running_loop()
        self._member = HandlerMember(self._options, self._say)
        self._member.want(waiter)  # before the first dial: a place may be there at once
        self._ready.set()
        try:
            await self._member.live()
        finally:
            with self._lock:
                self._gone = True
            await asyncio.sleep(0)  # for what was posted until now

    def _post(self, action: Callable[[HandlerMember], None], otherwise: Callable[[], object] = lambda: None) -> None:
        member, loop = self._member, self._loop
        if member is None or loop is None:
            otherwise()
            return
        with self._lock:
            if not self._gone:
                loop.call_soon_threadsafe(action, member)
                return
        action(member)

    def _join(self, limit_s: float) -> bool:
        if self._thread is None:
            return True
        self._thread.join(limit_s)
        atexit.unregister(self._leave)
        return not self._thread.is_alive()
