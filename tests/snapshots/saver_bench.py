"""A saver to try: its worker is the test's own process, its anchor a process that the test ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from holdfast.snapshots import attempt, shelf
from holdfast.snapshots.attempt import SaveRequest
from holdfast.snapshots.saver_client import SaverClient
from holdfast.snapshots.shelf import SaverAddress
from holdfast.snapshots.slots import Slot
from tests.support.limits import limit_s, until

SIZE = 2 << 20
WAIT_S = limit_s(20.0)


def savers(place: Path) -> list[int]:
    """Of this shelf."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"holdfast.snapshots.saver" in (line := path.read_bytes()) and os.fsencode(place) in line:
                found.append(int(path.parent.name))
    return found


class Bench:
    """A worker in this process, with a saver whose anchor is a process that the test ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.anchor = subprocess.Popen(["sleep", "600"])
        held = shelf.Shelf.make("bench")
        self.held = held
        self.place = SaverAddress(held.path, 0, 0, self.anchor.pid)
        self.connect()

    def connect(self) -> None:
        """The worker, or its successor."""
        self.client = SaverClient(self.place)
        self.slots = self.client.slots

    def hand_over(self, request: SaveRequest, size: int = SIZE) -> None:
        """Stage this step and have it saved; it is not written of the saver's own accord."""
        memory = self.client.stage(request.step, size)
        assert memory is not None
        memory[:] = bytes([request.step]) * size
        self.client.commit(None)
        self.client.persist(request)

    def stage(self, step: int, size: int = SIZE) -> Slot:
        memory = self.slots.stage(step, size)
        assert memory is not None
        memory[:] = bytes([step]) * size
        return self.slots.commit()

    def persist(self, step: int, size: int = SIZE) -> None:
        number = attempt.begin(self.folder, step)
        self.hand_over(SaveRequest(str(self.folder), step, number, 0, 1, metadata={"step": step}), size)

    @property
    def saver(self) -> int:
        (pid,) = until(lambda: savers(self.place.folder), "a saver has started")
        return int(pid)

    def close(self) -> None:
        self.client.close()
        self.held.close()
        self.anchor.kill()
        self.anchor.wait()
        for pid in savers(self.place.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        until(lambda: not self.place.folder.exists(), "the shelf is gone")
