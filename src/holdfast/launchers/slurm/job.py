"""A job as `scontrol show job` tells of it: one that was submitted here, and whether these processes are still meant by
Slurm: a job that was put back into the queue may have left some of them alive.

Where a node's slurmd dies, its tasks live on, and Slurm starts the job again on other nodes two minutes later. Tasks of
the first start that need nobody else (one node, or an elastic job) would train beside those of the second and save over
them. So the first node's agent asks Slurm now and then, and ends when its life is over. The others need not ask: they
end with their coordinator.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import NamedTuple

from holdfast.launchers.slurm.step import ScontrolOutput, ask_scontrol
from holdfast.protocol.errors import EXIT_FAILURE, EXIT_SIGNAL_BASE

CHECK_S = 30.0
"""Well below the two minutes for which Slurm holds a requeued job back; one question per job, not per node."""

_STATE = re.compile(r"\bJobState=(\S+)")
_RESTARTS = re.compile(r"\bRestarts=([0-9]+)")
_GONE = "Invalid job id"
OVER = (
    *("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"),  # it starts again
    *("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"),
    *("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED"),
)
"""Not COMPLETING: then Slurm is ending the tasks itself, and gives them time to save."""


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


def over(answer: ScontrolOutput, job_id: int, restarts: int) -> str:
    """Why this life of the job is over, in words; empty while it is not, or where nobody can say."""
    if answer.failed:
        return "Slurm knows it no more" if _GONE in answer.text else ""
    # An array's own number is that of one of its tasks too, and stands for all of them: a line each.
    record = next((line for line in answer.text.splitlines() if line.startswith(f"JobId={job_id} ")), "")
    state, told = _STATE.search(record), _RESTARTS.search(record)
    if state is None or state[1] == "COMPLETING":
        return ""
    if told is not None and int(told[1]) > restarts:
        return f"Slurm has put it back into the queue (restart {told[1]})"
    return f"its state is {state[1]}" if state[1] in OVER else ""


def watch(
    job_id: int,
    restarts: int,
    end: Callable[[str], None],
    *,
    check_s: float = CHECK_S,
    ask: Callable[..., ScontrolOutput] = ask_scontrol,
) -> None:
    """Calls `end` with the reason once, from a thread of its own that lives as long as the process."""

    def look() -> None:
        forever = threading.Event()
        while not forever.wait(check_s):
            reason = over(ask("show", "job", str(job_id)), job_id, restarts)
            if reason:
                end(reason)
                return

    threading.Thread(target=look, name="holdfast-slurm", daemon=True).start()
