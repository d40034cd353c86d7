"""Retention in the background: after a commit, a thread has what stays read back, and deletes the rest."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

from holdfast.core.errors import SnapshotError
from holdfast.snapshots import retention
from holdfast.snapshots.retention import Keep, Verified
from holdfast.train.tiers import Tier


class Pruner:
    """Rank 0's. Methods are called by one thread."""

    def __init__(self, path: Path, keep: Keep) -> None:
        self._path, self._keep = path, keep
        self._verified = Verified()
        self._due = False
        self._thread: threading.Thread | None = None

    def begin_after(self, tier: Tier) -> None:
        """There will be a new snapshot, once the tier has written it."""
        self._due = True
        self._verified.read = tier.read_back
        self.check(tier)

    def check(self, tier: Tier) -> None:
        """Start when the new snapshot is on the disk. Never waits."""
        running = self._thread is not None and self._thread.is_alive()
        if self._due and not running and not tier.busy:
            self._due = False
            self._thread = threading.Thread(target=self._prune, name="holdfast-retention")
            self._thread.start()

    def finish(self) -> None:
        """Whatever is due, now."""
        if self._thread is not None:
            self._thread.join()
        if self._due:
            self._due = False
            self._prune()

    def _prune(self) -> None:
        try:
            done = retention.prune(self._path, self._keep, verified=self._verified)
        except SnapshotError as error:
            # What was saved is there; that it takes more room than was asked for must not end the training.
            warnings.warn(f"holdfast: old snapshots were not deleted: {error}", RuntimeWarning, stacklevel=2)
            return
        for path, why in done.damaged:
            warnings.warn(f"holdfast: {path.name} was set aside: {why}", RuntimeWarning, stacklevel=2)
