"""Runs a pure machine on asyncio: event in, machine, commands out, timer armed; and handles faults around it.

    driver = Driver(machine, tick, execute)
    driver.feed(event)

`execute(command)` starts the command's work and never blocks; events that it feeds back while the machine's commands
are still being executed are queued.

Uncaught exceptions: asyncio passes them to the loop's handler, or drops them. An exception that passed through our code
is our fault and ends the agent. Errors of asyncio alone are not, such as no descriptor left for another connection, or
a peer that disconnected: asyncio tries again by itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from holdfast.protocol.errors import HoldfastError, InternalError, PlatformError

OUR_PACKAGE = "holdfast"
NO_THREAD = "can't start new thread"
"""Python's message when no thread can be started. The exception has no number or type of its own."""
REPORT_INTERVAL_S = 60.0
"""Time in which the same error is reported once, however often asyncio meets it (s)."""
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)
Event = TypeVar("Event")
Command = TypeVar("Command")
STORY_EVENTS_MAX = 40
"""Number of events before a machine's crash that its report lists."""


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
        """`after` is called when the commands of an event have been executed. `on_fault` is called once, when the
        machine or its shell has failed at an event: no other event is handled after that."""
        self.machine = machine
        self._after = after
        self._on_fault = on_fault
        self._tick = tick
        self._execute = execute
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Event] = deque()
        """Events that came while another one was being handled."""
        self._story: deque[tuple[float, Event]] = deque(maxlen=STORY_EVENTS_MAX)
        """The newest events, each with its time."""
        self._busy = False
        """An event is being handled: its commands may feed others, which must not interrupt it."""
        self.stopped = False
        """It handles no more events: it was stopped, or has failed."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        """The deadline for which the timer is set (s of the loop's clock)."""

    def feed(self, event: Event) -> None:
        """Hand an event to the machine, now or as soon as it is free.

        Raises InternalError with the recent events for any failure of the machine or of its commands; a HoldfastError
        that a command has raised is passed unchanged.
        """
        if self.stopped:
            return
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox and not self.stopped:
                event = self._inbox.popleft()
                self._step(event)
            self._arm()
        except Exception as error:  # noqa: BLE001 - any error here is our fault: no callback may lose it
            self._break(error, event)
        finally:
            self._busy = False

    def stop(self) -> None:
        """Handle no more events."""
        self.stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self, event: Event) -> None:
        now = self._loop.time()
        # Before it is handled: the event at which the machine fails is the last one of the report.
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
        """Set the timer to the machine's next deadline."""
        if self.stopped:
            return
        deadline = self.machine.next_deadline()
        if self._timer is not None:
            if deadline == self._timer_at:  # as after most events; a new timer costs more than this comparison
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer_at = deadline
            self._timer = self._loop.call_at(deadline, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.feed(self._tick)


def fault_of(context: Mapping[str, Any]) -> Exception | None:
    """The exception that makes this context of the loop's exception handler a fault of ours; None: there is none."""
    error = context.get("exception")
    if not isinstance(error, Exception):
        return None
    return error if not isinstance(error, OSError) or _came_through_us(error.__traceback__) else None


def _came_through_us(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0] == OUR_PACKAGE:
            return True
        traceback = traceback.tb_next
    return False


def as_error(error: BaseException) -> HoldfastError:
    """The error that ends an agent, with a code: ours unchanged, anything else as a fault of ours."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # a task group's: report what went wrong first
    if isinstance(error, HoldfastError):
        return error
    fault: HoldfastError = InternalError(f"holdfast failed: {describe(error)}")
    if _lacks_threads(error):
        fault = PlatformError(f"{NO_THREAD}: this user, or this container, may have no more processes (`ulimit -u`)")
    fault.__cause__ = error
    return fault


def _lacks_threads(error: BaseException | None) -> bool:
    """Whether no thread could be started, also when that has caused this error: asyncio.run ends with "cannot join
    thread before it is started", because it joins the one that it could not start."""
    while isinstance(error, RuntimeError):
        if NO_THREAD in str(error):
            return True
        error = error.__context__
    return False


def describe(error: BaseException) -> str:
    """One exception in one line."""
    text = " ".join(str(error).splitlines())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Troubles:
    """Reports errors that asyncio meets and retries by itself, each at most once in REPORT_INTERVAL_S."""

    def __init__(self, say: Callable[[str], None], now: Callable[[], float]) -> None:
        self._say = say
        self._now = now
        self._reported_s: dict[str, float] = {}
        """The time of the newest report of each error, by its text."""

    def report(self, context: Mapping[str, Any]) -> None:
        """Report the error of this context of the loop's exception handler."""
        error = context.get("exception")
        what = str(context.get("message") or "trouble").partition("\n")[0]
        text = f"{what}: {describe(error)}" if isinstance(error, BaseException) else what
        now = self._now()
        if now - self._reported_s.get(text, -REPORT_INTERVAL_S) >= REPORT_INTERVAL_S:
            self._reported_s[text] = now
            self._say(text)
