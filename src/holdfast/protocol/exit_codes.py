"""Every exit code with a meaning of its own, in one table: what it says, what a worker asks for by it, and what a
scheduler is to do.

The coordinator, the manifests and batch scripts of `holdfast submit`, the report and the page of errors read the table:
a new code is one row. Standard library only.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Scheduler(Enum):
    """What the scheduler is to do with a job that ended with a code."""

    COUNT = "it is a failure: the scheduler's own limit of attempts decides"
    AGAIN = "start the job again, whatever it counts"
    NEVER = "do not start the job again"


class ExitCode(NamedTuple):
    number: int
    meaning: str
    """The text on the page of errors, and in the comments of manifests and batch scripts."""
    scheduler: Scheduler = Scheduler.COUNT
    asks: str = ""
    """What a worker asks for that ends with this code by itself: it ends the job at once, on all nodes and whatever
    restarts are left. It is never the consequence of another failure. Empty: such a worker has failed."""


EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERNAL = 70
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h
EXIT_NO_PROGRESS = 93
EXIT_HUNG = 124  # as timeout(1)
EXIT_SIGNAL_BASE = 128
"""The end by signal N has the exit status 128+N, as in every shell."""

EXIT_CODES = (
    ExitCode(EXIT_FAILURE, "the job failed and no worker was to blame: a node was lost, too few nodes came"),
    ExitCode(
        EXIT_USAGE, "the caller's fault: bad usage, bad configuration, a missing script", scheduler=Scheduler.NEVER
    ),
    ExitCode(EXIT_INTERNAL, "a fault of holdfast itself"),
    ExitCode(
        EXIT_REQUEUE,
        "it was asked to leave, and everything is saved: please start it again",
        scheduler=Scheduler.AGAIN,
        asks="to be requeued",
    ),
    ExitCode(
        EXIT_NO_PROGRESS,
        "restarts did not come past the step that the job had reached before: please do not start it again",
        scheduler=Scheduler.NEVER,
        asks="for the end of the job",
    ),
    ExitCode(
        EXIT_HUNG,
        "the job hung: `--hang-timeout` ended it, or a time-out of its own did while holdfast had reported a hang",
    ),
)
"""If workers of one generation ask for different ends, the first one here counts."""

REQUESTS = {each.number: each for each in EXIT_CODES if each.asks}
"""The codes by which a worker asks for the end of the job."""


def codes_for(scheduler: Scheduler) -> tuple[ExitCode, ...]:
    return tuple(each for each in EXIT_CODES if each.scheduler is scheduler)
