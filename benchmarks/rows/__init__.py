"""One file per row of the table; ALL is the order in which they run."""

from __future__ import annotations

from benchmarks.harness import Row
from benchmarks.rows import (
    descriptors,
    elastic,
    formation,
    hangs,
    help_text,
    idle,
    object_store,
    orphans,
    progress,
    raised,
    recovery,
    restart,
    simulated,
    ssh,
    start,
    survive,
    tee,
    train_samples,
    train_save,
    tutorial,
    verdicts,
    warm,
)

ALL: tuple[Row, ...] = (
    help_text.ROW,
    start.ROW,
    restart.ROW,
    *warm.ROWS,
    recovery.ROW,
    raised.ROW,
    idle.ROW,
    orphans.ROW,
    descriptors.ROW,
    progress.ROW,
    tee.ROW,
    *formation.ROWS,
    *elastic.ROWS,
    *survive.ROWS,
    ssh.ROW,
    simulated.ROW,
    *train_save.ROWS,
    train_samples.ROW,
    *object_store.ROWS,
    *hangs.ROWS,
    *verdicts.ROWS,
    tutorial.ROW,
)
