"""Refusals that could not be left by the process that wrote. They are left as soon as the disk takes them.

A rank that cannot write its part leaves a refusal for rank 0, or renames the attempt (changes.refuse). Under a quota of
btrfs both may fail. If the disk stays like that, rank 0 finds out by itself (disk.RefusalWatch). If there is room again
a moment later, it cannot, and would wait for this rank's part until its patience ends. It also would if the process
that wrote was killed: then the worker leaves the refusal.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import NamedTuple

from holdfast.train.snapshots import disk
from holdfast.train.snapshots.changes import PATIENCE_S, SaveRequest, refuse
from holdfast.train.snapshots.layout import MANIFEST, record_file, refusal_file
from holdfast.train.snapshots.remote import RemotePath


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
        """Leave this refusal if it is not there; rank 0 ends the attempt. It returns at once, in any thread."""
        if not isinstance(request.attempt_path, RemotePath) and _is_over(request):
            return
        with self._lock:
            self._unreported.append(_Unreported(request, why, time.monotonic() + PATIENCE_S))
            if not self._at_work:
                with contextlib.suppress(RuntimeError):  # no more threads now: the next refusal starts one for both
                    threading.Thread(target=self._work, name="holdfast-refusals", daemon=True).start()
                    self._at_work = True

    def _work(self) -> None:
        while True:
            time.sleep(disk.REFUSAL_TRY_S)
            with self._lock:
                unreported = list(self._unreported)
            over = [each for each in unreported if _left(each)]
            with self._lock:
                self._unreported = [each for each in self._unreported if each not in over]
                if not self._unreported:
                    self._at_work = False
                    return


def _left(unreported: _Unreported) -> bool:
    """Leave the refusal. Returns whether nothing is left to do."""
    # Looked at first: a part whose record is there may be in a committed snapshot at any time, and must stay.
    if not _is_over(unreported.request):
        refuse(unreported.request, unreported.why)  # it tries both ways, and raises nothing
    return _is_over(unreported.request) or time.monotonic() > unreported.until_s


def _is_over(request: SaveRequest) -> bool:
    """Whether rank 0 does not wait for this rank's part: it is there, or its refusal, or the attempt is over. Of rank 0
    itself: whether the attempt is over."""
    folder = request.attempt_path
    try:
        names = disk.names(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    if isinstance(folder, RemotePath) and MANIFEST in names:
        return True  # an attempt keeps its name there: the manifest, or what is put in its place, ends it
    return request.rank > 0 and (record_file(request.rank) in names or refusal_file(request.rank) in names)
