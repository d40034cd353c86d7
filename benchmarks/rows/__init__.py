"""One file per row of the table; ALL is the order in which they run."""

from __future__ import annotations

from benchmarks.harness import Row
from benchmarks.rows import (
    elastic,
    formation,
    hangs,
    help_text,
    idle,
    orphans,
    progress,
    recovery,
    restart,
    simulated,
    ssh,
    start,
    tee,
    train_samples,
    train_save,
    tutorial,
    warm,
)

ALL: tuple[Row, ...] = (
    help_text.ROW,
    start.ROW,
    restart.ROW,
    *warm.ROWS,
    recovery.ROW,
    idle.ROW,
    orphans.ROW,
    progress.ROW,
    tee.ROW,
    *formation.ROWS,
    *elastic.ROWS,
    ssh.ROW,
    simulated.ROW,
    *train_save.ROWS,
    train_samples.ROW,
    *hangs.ROWS,
    tutorial.ROW,
)
