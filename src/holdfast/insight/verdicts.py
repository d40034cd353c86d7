"""From the failures of a generation to one verdict: what failed first and why, as against what failed because of it.

Pure. The order of arrival at the coordinator is evidence, clocks of nodes are not; what a failure says of itself
outweighs both: a rank that complains about its peers' connections is a victim.
"""

from __future__ import annotations

import re
import signal

from holdfast.core.outcome import Evidence, Failure, Verdict

PEER_COMPLAINTS = re.compile(
    r"connection closed by peer|connection reset by peer|connection refused|broken pipe"
    r"|remote process exited|socket timeout|timed out waiting|wait timeout|watchdog caught collective"
    r"|nccl.{0,40}(?:remote error|system error|timeout)|software caused connection abort"
    r"|failed to (?:connect|recv|send)|recvvalue failed|sendbytes failed|read \[127\.|gloo.{0,80}(?:closed|reset|timed out)"
    r"|dist(?:network|store|backend)error",
    re.IGNORECASE,
)
"""Words by which a rank complains about its peers and not about itself."""

COLLATERAL_SIGNALS = frozenset({-signal.SIGABRT, -signal.SIGPIPE})
"""A communication library that loses its peers may abort the process."""

KILLED = -signal.SIGKILL


def judge(evidence: Evidence) -> Verdict:
    """The verdict on one generation. Deterministic: the same evidence gives the same words on every node."""
    candidates = [failure for failure in evidence.failures if not failure.after_stop]
    primary = [failure for failure in candidates if not is_collateral(failure)]
    if evidence.lost_nodes and not primary:
        return _lost(evidence)
    ordered = primary or candidates or list(evidence.failures)
    if not ordered:
        return Verdict(
            code="HF200",
            cause="the generation was ended although no worker failed",
            generation=evidence.generation,
            restarts=evidence.restarts,
            gave_up=evidence.gave_up,
        )
    culprit = ordered[0]
    code, cause, advice = explain(culprit)
    return Verdict(
        code=code,
        cause=cause,
        advice=advice,
        culprit=culprit,
        collateral=tuple(failure for failure in evidence.failures if failure is not culprit),
        lost_nodes=evidence.lost_nodes,
        generation=evidence.generation,
        restarts=evidence.restarts,
        gave_up=evidence.gave_up,
    )


def is_collateral(failure: Failure) -> bool:
    """Whether this failure, by its own words, is the consequence of another one."""
    said = failure.message or (failure.stderr_tail if failure.exit_code in COLLATERAL_SIGNALS else "")
    return bool(PEER_COMPLAINTS.search(said))


def explain(failure: Failure) -> tuple[str, str, str]:
    """(error code, cause in one line, advice in one line or empty) of a single failure."""
    who = f"rank {failure.rank} on {failure.host}"
    if not failure.started:
        return "HF202", f"{who} could not be started: {failure.message}", "check the program's path and its x bit"
    if failure.out_of_memory:
        return (
            "HF203",
            f"{who} was killed by the kernel's out-of-memory killer (SIGKILL)",
            "its cgroup or machine ran out of memory: fewer data-loader workers, a smaller batch, or more memory",
        )
    if failure.exit_code < 0:
        return "HF204", f"{who} was ended by {_signal_text(failure.exit_code)}", _signal_advice(failure.exit_code)
    if failure.message:
        return "HF201", f"{who} raised {failure.message.splitlines()[0]}", ""
    return "HF205", f"{who} ended with exit code {failure.exit_code}", "its last lines on stderr are in the log below"


def _lost(evidence: Evidence) -> Verdict:
    return Verdict(
        code="HF306",
        cause=f"lost {', '.join(evidence.lost_nodes)}",
        advice="see that machine's own logs: it was killed, rebooted or cut off from the network",
        collateral=evidence.failures,
        lost_nodes=evidence.lost_nodes,
        generation=evidence.generation,
        restarts=evidence.restarts,
        gave_up=evidence.gave_up,
    )


def _signal_text(exit_code: int) -> str:
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    meaning = {
        "SIGKILL": "killed from outside: kill -9, a scheduler, or an out-of-memory killer we could not see",
        "SIGSEGV": "invalid memory access in native code",
        "SIGBUS": "bad memory mapping, often a full /dev/shm",
        "SIGABRT": "native code gave up",
        "SIGFPE": "arithmetic error in native code",
        "SIGILL": "an instruction this processor does not have",
        "SIGTERM": "somebody asked it to end",
        "SIGINT": "interrupted",
    }.get(name, "")
    return f"{name} ({meaning})" if meaning else name


def _signal_advice(exit_code: int) -> str:
    match -exit_code:
        case signal.SIGBUS:
            return "df -h /dev/shm; give the container more shared memory"
        case signal.SIGSEGV | signal.SIGABRT | signal.SIGILL | signal.SIGFPE:
            return "the Python stack at that moment is in its stderr log"
        case signal.SIGKILL:
            return "dmesg and the scheduler's log say who sent it"
        case _:
            return ""
