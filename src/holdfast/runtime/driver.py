"""The one shell order: event in, machine, commands out, timer armed.

    driver = Driver(machine, execute)
    driver.feed(event)

`execute(command)` starts what the command asks for and never blocks; what it feeds back while the machine's commands
are still being executed waits its turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, NoReturn, Protocol, TypeVar

from holdfast.core.errors import HoldfastError, InternalError
from holdfast.runtime.faults import describe

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)
Event = TypeVar("Event")
Command = TypeVar("Command")

STORY_EVENTS_MAX = 40
"""A crash of a machine tells this many events before it."""


class StateMachine(Protocol[In_contra, Out_co]):
    def handle(self, now: float, event: In_contra) -> Iterable[Out_co]: ...

    def next_deadline(self) -> float | None: ...


class Driver(Generic[Event, Command]):
    """Runs one machine on the running loop, by the loop's clock."""

    def __init__(
        self,
        machine: StateMachine[Event, Command],
        tick: Event,
        execute: Callable[[Command], None],
        after: Callable[[], None] | None = None,
        on_fault: Callable[[HoldfastError, Event], None] | None = None,
    ) -> None:
        """`after` is called when the commands that an event brought about have been given; `on_fault` once, when
        machine or shell failed at an event: no other event is handled after that."""
        self.machine = machine
        self._after = after
        self._on_fault = on_fault
        self._tick = tick
        self._execute = execute
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Event] = deque()
        self._story: deque[tuple[float, Event]] = deque(maxlen=STORY_EVENTS_MAX)
        self._busy = False
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def feed(self, event: Event) -> None:
        """Hand an event to the machine, now or as soon as it is free.

        Raises InternalError with the story whatever went wrong, in the machine or in what it asked for; a HoldfastError
        that a command has raised comes as it is.
        """
        if self._stopped:
            return
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox and not self._stopped:
                event = self._inbox.popleft()
                self._step(event)
            self._arm()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is our fault: nothing may be lost in a callback
            self._break(error, event)
        finally:
            self._busy = False

    def stop(self) -> None:
        """No event is handled any more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self, event: Event) -> None:
        now = self._loop.time()
        self._story.append((now, event))
        for command in self.machine.handle(now, event):
            self._execute(command)
        if self._after is not None:
            self._after()

    def _break(self, error: Exception, event: Event) -> NoReturn:
        self.stop()
        fault = error if isinstance(error, HoldfastError) else self._internal(error)
        if self._on_fault is not None:
            self._on_fault(fault, event)
        raise fault from (None if fault is error else error)

    def _internal(self, error: Exception) -> InternalError:
        name = type(self.machine).__name__
        broke = f"broke an invariant: {error}" if isinstance(error, AssertionError) else f"failed: {describe(error)}"
        story = "\n  ".join(f"{when:.6f} {what!r:.300}" for when, what in self._story)
        return InternalError(f"{name} {broke}\n  {story}")

    def _arm(self) -> None:
        if self._stopped:
            return
        deadline = self.machine.next_deadline()
        if self._timer is not None:
            if deadline == self._timer_at:
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer_at = deadline
            self._timer = self._loop.call_at(deadline, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.feed(self._tick)
