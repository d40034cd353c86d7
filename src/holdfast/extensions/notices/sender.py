"""Sends notices to URLs and commands, in threads of their own, with a time limit and a few tries.

A URL gets a POST with JSON, whose `text` Slack and its like show; a command gets the same JSON on its standard input.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import shlex
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from holdfast.supervisor.attached import attached
from holdfast.text import plural

QUEUE_MAX = 64
TRIES = 4
PAUSE_S = 1.0
"""Pause before the second try (s); it doubles before each further one."""
SEND_S_MAX = 10.0
CLOSE_S_MAX = 5.0
"""Limit for the notices that wait at the end of the job (s)."""

Notice = dict[str, Any]


class Sender:
    """Sends notices to all targets. Each has a thread of its own: one that does not answer holds up no other."""

    def __init__(self, targets: Sequence[str], failed: Callable[[str, str], None]) -> None:
        """`failed` gets a target without its secrets, and the reason, for each notice that was not sent."""
        self._closing = threading.Event()
        self._lines = [_Line(target, failed, self._closing) for target in targets]

    def send(self, notice: Notice) -> None:
        """Queue a notice without waiting. If the queue of a target is full, the notice is lost there, and reported."""
        body = json.dumps(notice).encode()
        for line in self._lines:
            line.send(body)

    def close(self) -> None:
        """Wait until all are sent, for at most CLOSE_S_MAX; what is left then is reported. From now on there are no
        pauses between tries, and at most two of them."""
        self._closing.set()
        until_s = time.monotonic() + CLOSE_S_MAX
        for line in self._lines:
            line.end()
        for line in self._lines:
            line.wait(until_s)


class _Line:
    """The notices for one target, and the thread that sends them."""

    def __init__(self, target: str, failed: Callable[[str, str], None], closing: threading.Event) -> None:
        self._target = target
        self._failed = failed
        self._closing = closing
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUE_MAX)
        self._given_up = threading.Event()
        """The job's end does not wait any longer: what is left was reported."""
        self._thread = threading.Thread(target=self._run, name="holdfast-notify", daemon=True)
        self._thread.start()

    def send(self, body: bytes) -> None:
        try:
            self._queue.put_nowait(body)
        except queue.Full:
            self._failed(shown(self._target), f"{QUEUE_MAX} notices wait already")

    def end(self) -> None:
        """Let the thread end after the last notice."""
        with contextlib.suppress(queue.Full):  # it will not get through the others in time
            self._queue.put_nowait(None)

    def wait(self, until_s: float) -> None:
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._thread.is_alive():
            self._given_up.set()
            left = 1 + sum(body is not None for body in list(self._queue.queue))
            text = f"{plural(left, 'notice')} not sent within {CLOSE_S_MAX:g} s of the job's end"
            self._failed(shown(self._target), text)

    def _run(self) -> None:
        while (body := self._queue.get()) is not None and not self._given_up.is_set():
            self._deliver(body)

    def _deliver(self, body: bytes) -> None:
        why = ""
        for number in range(TRIES):
            if number and self._closing.wait(PAUSE_S * 2.0 ** (number - 1)) and number > 1:
                break
            why = deliver(self._target, body)
            if not why:
                return
        if not self._given_up.is_set():
            self._failed(shown(self._target), why)


def is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def shown(target: str) -> str:
    """The target without its secrets: the path of a web hook is one, and so may be an argument."""
    if is_url(target):
        try:
            return f"{urlsplit(target).scheme}://{urlsplit(target).hostname}/…"
        except ValueError:
            return target[:8] + "…"
    return shlex.split(target)[0]


def deliver(target: str, body: bytes) -> str:
    """Send it once. Returns why it was not taken; empty: it was."""
    try:
        if is_url(target):
            request = urllib.request.Request(target, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=SEND_S_MAX):
                return ""
        return _run(shlex.split(target), body)
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return type(error).__name__ if is_url(target) else str(error)


def _run(argv: Sequence[str], body: bytes) -> str:
    """Run a command once, until all its processes have ended. A late one is killed with them, and its output is dropped
    unread."""
    line, silent = attached(argv), subprocess.DEVNULL
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True) as process:
        try:
            process.communicate(body, SEND_S_MAX)
        except subprocess.TimeoutExpired:
            process.terminate()
            return f"it did not end within {SEND_S_MAX:g} s"
    return f"exit code {process.returncode}" if process.returncode else ""
