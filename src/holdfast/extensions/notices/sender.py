"""Sends notices to URLs and commands, in a thread of its own, with a time limit and a few tries.

A URL gets a POST with JSON, whose `text` Slack and its like show; a command gets the same JSON on its standard input.
"""

from __future__ import annotations

import http.client
import json
import queue
import shlex
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from holdfast.supervisor.attached import attached

QUEUE_MAX = 64
TRIES = 4
PAUSE_S = 1.0
"""Pause before the second try (s); it doubles before each further one."""
SEND_S_MAX = 10.0
CLOSE_S_MAX = 5.0
"""Limit for the notices that wait at the end of the job (s)."""

Notice = dict[str, Any]


class Sender:
    """Sends notices to all targets, in a thread of its own."""

    def __init__(self, targets: Sequence[str], failed: Callable[[str, str], None]) -> None:
        """`failed` gets a target without its secrets, and the reason, for each notice that was not sent."""
        self._targets = targets
        self._failed = failed
        self._queue: queue.Queue[Notice | None] = queue.Queue(QUEUE_MAX)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-notify", daemon=True)
        self._thread.start()

    def send(self, notice: Notice) -> None:
        """Queue a notice without waiting. If the queue is full, the notice is lost and reported."""
        try:
            self._queue.put_nowait(notice)
        except queue.Full:
            self._failed("all", f"{QUEUE_MAX} notices wait already")

    def close(self) -> None:
        """Wait until all are sent, for at most CLOSE_S_MAX. From now on there are no pauses between tries, and at most
        two of them."""
        self._closing.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_S_MAX)

    def _run(self) -> None:
        while (notice := self._queue.get()) is not None:
            for target in self._targets:
                self._deliver(target, json.dumps(notice).encode())

    def _deliver(self, target: str, body: bytes) -> None:
        why = ""
        for number in range(TRIES):
            if number and self._closing.wait(PAUSE_S * 2.0 ** (number - 1)) and number > 1:
                break
            why = deliver(target, body)
            if not why:
                return
        self._failed(shown(target), why)


def is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def shown(target: str) -> str:
    """The target without its secrets: the path of a web hook is one, and so may be an argument."""
    if is_url(target):
        parts = urlsplit(target)
        return f"{parts.scheme}://{parts.hostname}/…"
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
