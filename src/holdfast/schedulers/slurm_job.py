"""A submitted job as `scontrol show job` tells of it. PURE but for the question itself."""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast.core.errors import EXIT_FAILURE, EXIT_SIGNAL_BASE
from holdfast.schedulers.slurm_step import ScontrolOutput

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
LIVING = ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "RESIZING", "SIGNALING", "STOPPED")

_FIELD = re.compile(r"(?:^|\s)(\w+)=(\S*)")


class JobState(NamedTuple):
    state: str
    reason: str
    nodes: str
    log: str
    """Path of its output; empty: not told."""
    status: int
    """As a shell would show it."""

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def over(self) -> bool:
        return self.state not in (*WAITING, *LIVING)


def read_job(answer: ScontrolOutput) -> JobState | None:
    """None where the answer tells of no job."""
    fields = dict(_FIELD.findall(answer.text))
    if answer.failed or "JobState" not in fields:
        return None
    # A path may have spaces; another field follows it.
    log = re.search(r"\bStdOut=(.*?)(?: \w+=|$)", answer.text, re.MULTILINE)
    return JobState(
        state=fields["JobState"],
        reason=fields.get("Reason", "None"),
        nodes=fields.get("NodeList", ""),
        log=log[1] if log and log[1] != "(null)" else "",
        status=exit_status(fields["JobState"], fields.get("ExitCode", "0:0")),
    )


def exit_status(state: str, text: str) -> int:
    """Slurm's `CODE:SIGNAL`; a job that did not complete has not succeeded whatever that says.

    >>> exit_status("FAILED", "3:0"), exit_status("FAILED", "0:9"), exit_status("CANCELLED", "0:0")
    (3, 137, 1)
    """
    code, _, signum = text.partition(":")
    status = int(code) if code.isdigit() else EXIT_FAILURE
    if signum.isdigit() and int(signum):
        return EXIT_SIGNAL_BASE + int(signum)
    return status if status or state == "COMPLETED" else EXIT_FAILURE
