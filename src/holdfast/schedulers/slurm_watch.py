"""Whether Slurm still means these processes: a job that was put back into the queue may have left some of them alive.

Where a node's slurmd dies, its tasks live on, and Slurm starts the job anew on other nodes two minutes later. Tasks of
the old life that need nobody else (one node, or an elastic job) would train beside those of the new one and save over
them. So the first node's agent asks Slurm now and then, and ends when its life is over. The others need not ask: they
end with their coordinator.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from holdfast.schedulers.slurm_step import ScontrolOutput, ask_scontrol

CHECK_S = 30.0
"""Well below the two minutes for which Slurm holds a requeued job back; one question per job, not per node."""

_STATE = re.compile(r"\bJobState=(\S+)")
_RESTARTS = re.compile(r"\bRestarts=([0-9]+)")
_GONE = "Invalid job id"
OVER = (
    *("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"),  # it is to start anew
    *("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"),
    *("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED"),
)
"""Not COMPLETING: then Slurm is ending the tasks itself, and gives them time to save."""


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
