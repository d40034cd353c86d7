"""The agent's process as the caller sees it: start, console, interrupts, time-out, report.

All of it runs in the caller's own thread. The agent's report comes through a pipe, and so does its output if
`sys.stdout` has no descriptor (in a notebook); one selector watches these pipes. Knows nothing of functions or ranks.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from msgspec import Struct, json

from holdfast.protocol.errors import InternalError, LaunchTimeoutError, StoppedError
from holdfast.protocol.outcome import Outcome

READ_BYTES = 65_536
WAKE_S = 1.0
"""Interval of wake-ups: a signal may be delivered to another thread, and the main thread handles it when it wakes."""
ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))
# The package is found by its path: a PYTHONPATH would be inherited by the workers, and change what they import.
PROGRAM = (
    f"import sys; sys.path.insert(0, {ROOT!r}); from holdfast.cli.run import main_for_caller; "
    "sys.exit(main_for_caller(sys.argv[1:]))"
)


class AgentReport(Struct, frozen=True, kw_only=True):
    """The agent's final report: how the job ended, or the error that prevented its start."""

    outcome: Outcome | None
    """The job's outcome; None: it did not start."""
    folder: str
    """The run folder; empty: none was made."""
    code: str
    """Code of the error that prevented the start; empty: it started."""
    message: str
    """Text of that error."""


def descriptor_of(stream: Any) -> int | None:
    """The descriptor to which a text stream writes; None: it writes elsewhere.

    fileno() is not enough: in a notebook it returns the terminal in which the kernel was started.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return None
    raw = getattr(stream.buffer, "raw", stream.buffer)
    try:
        return raw.fileno() if isinstance(raw, io.FileIO) else None
    except (ValueError, OSError):  # closed
        return None


class AgentSession:
    """One agent from start to end. Call `serve` until it has ended, then `close`; `end` stops it early."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], call_fd: int, result_fds: Sequence[int]
    ) -> None:
        """Start the agent. `call_fd` and `result_fds` are the memory files of the call and the answers, which it passes
        on to the workers. Raises OSError."""
        self._selector = selectors.DefaultSelector()
        self._report = bytearray()
        with contextlib.ExitStack() as writing_ends:  # closed here once the agent has them: their ends are its end
            report_write = self._pipe(writing_ends, self._take_report)
            outputs = [self._output(writing_ends, stream) for stream in (sys.stdout, sys.stderr)]
            fds = (report_write, call_fd, *result_fds)
            own = (str(os.getpid()), str(report_write), str(call_fd), ",".join(map(str, result_fds)))
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", PROGRAM, *own, *argv],
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=outputs[0],
                    stderr=outputs[1],
                    pass_fds=fds,
                    start_new_session=True,  # only the caller gets Ctrl-C, and passes it on once
                )
            except BaseException:
                self.close()
                raise

    def _pipe(self, writing_ends: contextlib.ExitStack, take: Any) -> int:
        """Make a pipe for whose data, and for whose end with no data, `take` is called. Returns the writing end, which
        the stack closes."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._selector.register(reading, selectors.EVENT_READ, take)
        writing_ends.callback(os.close, writing)
        return writing

    def _output(self, writing_ends: contextlib.ExitStack, stream: TextIO | None) -> int:
        """The descriptor for the agent's output: the stream's own, or a pipe whose data is written to the stream."""
        if stream is None:
            return subprocess.DEVNULL
        with contextlib.suppress(OSError, ValueError):
            stream.flush()  # what the caller printed before comes first
        fd = descriptor_of(stream)
        if fd is not None:
            return fd

        # A character may be in two reads.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def show(data: bytes) -> None:
            stream.write(decoder.decode(data, final=not data))
            stream.flush()

        return self._pipe(writing_ends, show)

    def _take_report(self, data: bytes) -> None:
        self._report += data

    def serve(self, timeout_s: float | None = None) -> None:
        """Show the agent's output until it has ended. On LaunchTimeoutError it still runs."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._selector.get_map():
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready = self._selector.select(WAKE_S if left_s is None else min(left_s, WAKE_S))
            if not ready and left_s is not None and deadline is not None and time.monotonic() >= deadline:
                raise LaunchTimeoutError(f"the job did not end within {timeout_s:g} s")
            for key, _ in ready:
                self._read(key)
        self._process.wait()

    def _read(self, key: selectors.SelectorKey) -> None:
        data = os.read(key.fd, READ_BYTES)
        if not data:  # every process that had the writing end has ended
            self._selector.unregister(key.fd)
            os.close(key.fd)
        key.data(data)

    def end(self, signum: int) -> None:
        """Stop the job with this signal, and serve until the end.

        Another interrupt of the caller sends SIGINT, which kills the workers at once. A third one ends the wait:
        `close` then kills the agent.
        """
        for each in (signum, signal.SIGINT):
            try:
                self._process.send_signal(each)
                self.serve()
            except KeyboardInterrupt:
                continue
            return

    def close(self) -> None:
        """End the agent and free its resources, in any state. Safe to call twice."""
        if getattr(self, "_process", None) is not None and self._process.returncode is None:
            self._process.kill()  # its supervisor ends the workers
            self._process.wait()
        for key in list(self._selector.get_map().values() if self._selector.get_map() else ()):
            self._selector.unregister(key.fd)
            os.close(key.fd)
        self._selector.close()

    def report(self) -> AgentReport:
        """The agent's report, after `serve`. Raises StoppedError or InternalError when the agent ended without one."""
        if self._report:
            return json.decode(self._report, type=AgentReport)
        code = self._process.returncode
        if code < 0:
            error = StoppedError(f"{signal.Signals(-code).name} ended the agent of this node")
            error.exit_code = 128 - code
            raise error
        raise InternalError(f"the agent of this node ended with exit code {code} and no report; see its output")
