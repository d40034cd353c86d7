"""Saves that failed in the background: counted by rank 0 and reported to all, so that all raise at the same step.

A disk that is full, or away for a while, must not end a training whose state is in memory: only so many failures in a row
do. Another job in the folder ends it at once. Pure; knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.errors import SnapshotBusyError, SnapshotError, SnapshotIncompleteError

Reports = Sequence[Sequence[str]]
"""Of one rank: code and text of each failure."""


@dataclass(frozen=True)
class RankFailure:
    """As it is reported to all ranks."""

    code: str
    text: str
    fatal: bool
    """All raise it; otherwise it is a warning."""
    row: str = ""
    """How many that makes in a row, for the message."""

    @property
    def message(self) -> str:
        """For a person."""
        return f"{self.text}\n{self.row}" if self.row else self.text


class FailedSaves:
    """Rank 0's count."""

    def __init__(self, failures_max: int) -> None:
        """`failures_max`: in a row, which is too many."""
        self._max = failures_max
        self._in_row = 0
        self._open = False
        """A save was handed over, and nothing is known of its end."""

    def handed_over(self) -> None:
        """Another save goes to the disk."""
        self._open = True

    def reported(self, said: Sequence[Reports], *, busy: bool) -> RankFailure | None:
        """What the ranks report, by rank; `busy`: rank 0 still writes, or waits for the others' parts."""
        reports = [
            (code, text if rank == 0 else f"rank {rank}: {text}")
            for rank, each in enumerate(said)
            for code, text in each
        ]
        for code, text in reports:
            if code == SnapshotBusyError.code:
                return RankFailure(code, text, fatal=True)
        if not reports:
            if self._open and not busy:
                self._open, self._in_row = False, 0
            return None
        # A missing part follows from another rank's failure, and rank 0 may notice it later.
        causes = [each for each in reports if each[0] != SnapshotIncompleteError.code]
        if self._open:
            self._open = False
            return self._count(*(causes or reports)[0])
        return RankFailure(*causes[0], fatal=False) if causes else None

    def not_begun(self, error: SnapshotError) -> RankFailure:
        """A save could not even begin."""
        self._open = False
        if isinstance(error, SnapshotBusyError):
            return RankFailure(error.code, str(error), fatal=True)
        return self._count(error.code, str(error))

    def _count(self, code: str, text: str) -> RankFailure:
        self._in_row += 1
        fatal = self._in_row >= self._max
        rest = "" if fatal else "; training goes on"
        return RankFailure(
            code, f"{text}\n{self._in_row} of {self._max} failed saves in a row (failures_max=){rest}.", fatal
        )
