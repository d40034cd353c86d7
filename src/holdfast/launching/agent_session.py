"""The agent's process as the caller sees it: start, console, interrupts, time-out, report.

All of it runs in the caller's own thread. The agent's report comes through a pipe, and so does its output if
`sys.stdout` is no descriptor (in a notebook); one selector watches these pipes. Knows nothing of functions or ranks.
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
SIGNALS_SEEN_S = 1.0
"""Interval of wake-ups: a signal may be delivered to another thread, and the main thread handles it when it wakes."""
ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))
# The package is found by its path. The workers would inherit a PYTHONPATH.
PROGRAM = (
    f"import sys; sys.path.insert(0, {ROOT!r}); from holdfast.cli.run import main_for_caller; "
    "sys.exit(main_for_caller(sys.argv[1:]))"
)


class AgentReport(Struct, frozen=True, kw_only=True):
    """The agent's final report: how the job ended, or the error that prevented its start."""

    outcome: Outcome | None
    folder: str
    code: str
    message: str


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
        """Start the agent. Raises OSError."""
        self._selector = selectors.DefaultSelector()
        self._report = bytearray()
        with contextlib.ExitStack() as theirs:
            report_write = self._pipe(theirs, self._hear_report)
            outputs = [self._output(theirs, stream) for stream in (sys.stdout, sys.stderr)]
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

    def _pipe(self, theirs: contextlib.ExitStack, hear: Any) -> int:
        """A pipe for whose data `hear` is called; returns the writing end, which `theirs` closes."""
        ours, writing = os.pipe()
        os.set_blocking(ours, False)
        self._selector.register(ours, selectors.EVENT_READ, hear)
        theirs.callback(os.close, writing)
        return writing

    def _output(self, theirs: contextlib.ExitStack, stream: TextIO | None) -> int:
        if stream is None:
            return subprocess.DEVNULL
        with contextlib.suppress(OSError, ValueError):
            stream.flush()  # print earlier output first
        fd = descriptor_of(stream)
        if fd is not None:
            return fd
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def show(data: bytes) -> None:
            stream.write(decoder.decode(data, final=not data))
            stream.flush()

        return self._pipe(theirs, show)

    def _hear_report(self, data: bytes) -> None:
        self._report += data

    # --- its life -----------------------------------------------------------------------------------------------------

    def serve(self, timeout_s: float | None = None) -> None:
        """Show the agent's output until it has ended. On LaunchTimeoutError it still runs."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._selector.get_map():
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready = self._selector.select(SIGNALS_SEEN_S if left_s is None else min(left_s, SIGNALS_SEEN_S))
            if not ready and left_s is not None and deadline is not None and time.monotonic() >= deadline:
                raise LaunchTimeoutError(f"the job did not end within {timeout_s:g} s")
            for key, _ in ready:
                self._hear(key)
        self._process.wait()

    def _hear(self, key: selectors.SelectorKey) -> None:
        data = os.read(key.fd, READ_BYTES)
        if not data:  # every process that could write has ended
            self._selector.unregister(key.fd)
            os.close(key.fd)
        key.data(data)

    def end(self, signum: int) -> None:
        """Stop the job with this signal, and serve until the end; another interrupt kills the workers at once."""
        for again in (signum, signal.SIGINT):
            try:
                self._process.send_signal(again)
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
        """The report, after `serve`. Raises StoppedError or InternalError when the agent ended without one."""
        if self._report:
            return json.decode(self._report, type=AgentReport)
        code = self._process.returncode
        if code < 0:
            error = StoppedError(f"{signal.Signals(-code).name} ended the agent of this node")
            error.exit_code = 128 - code
            raise error
        raise InternalError(f"the agent of this node ended with exit code {code} and no report; see its output")
