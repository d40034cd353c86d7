"""Refusals that the disk did not take. They are left as soon as it takes them.

A rank that cannot write its part leaves a refusal for rank 0, or renames the attempt (changes.refuse). Under a quota of
btrfs both may fail. If the disk stays like that, rank 0 finds out by itself (disk.RefusalWatch). If there is room again
a moment later, it cannot, and would wait for this rank's part until its patience ends.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NamedTuple

from holdfast.train.snapshots import disk
from holdfast.train.snapshots.changes import PATIENCE_S, SaveRequest, refuse
from holdfast.train.snapshots.layout import record_file, refusal_file


class _Unreported(NamedTuple):
    request: SaveRequest
    why: str
    until_s: float
    """The time from which on rank 0 does not wait for this rank (monotonic s)."""


class Refusals:
    """Those of one process. One thread leaves all of them, and ends with the last one or with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unreported: list[_Unreported] = []
        self._at_work = False

    def insist(self, request: SaveRequest, why: str) -> None:
        """Leave this refusal if it is not there. It returns at once; any thread may call it."""
        if _is_known(request):
            return
        with self._lock:
            self._unreported.append(_Unreported(request, why, time.monotonic() + PATIENCE_S))
            if not self._at_work:
                self._at_work = True
                threading.Thread(target=self._work, name="holdfast-refusals", daemon=True).start()

    def _work(self) -> None:
        while True:
            time.sleep(disk.REFUSAL_TRY_S)
            with self._lock:
                unreported = list(self._unreported)
            for each in unreported:
                refuse(each.request, each.why)  # it tries both ways again, and raises nothing
            over = [each for each in unreported if _is_known(each.request) or time.monotonic() > each.until_s]
            with self._lock:
                self._unreported = [each for each in self._unreported if each not in over]
                if not self._unreported:
                    self._at_work = False
                    return


def _is_known(request: SaveRequest) -> bool:
    """Whether rank 0 does not wait for this rank's part: it is there, or its refusal, or the attempt is over."""
    folder = request.attempt_path
    if request.rank == 0 or not isinstance(folder, Path):
        return True
    try:
        names = disk.names(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return record_file(request.rank) in names or refusal_file(request.rank) in names
