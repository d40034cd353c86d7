"""How workers and jobs end: the data of failures, verdicts and outcomes."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from holdfast.protocol.bounds import Count, ExitCode, LocalRank, Rank, Seconds, Words
from holdfast.protocol.errors import EXIT_FAILURE, EXIT_SIGNAL_BASE, HoldfastError
from holdfast.protocol.rank_progress import Finding, RankStory

TEXT_BYTES_MAX = 16_384
"""Tracebacks and log tails are cut to this before they travel."""


class Failure(Struct, frozen=True, kw_only=True):
    """One worker that ended with something other than 0, or left its peers with 0, as its agent saw it."""

    rank: Rank
    local_rank: LocalRank
    host: str
    pid: Count
    exit_code: ExitCode
    """As waitpid saw it: 1..255, or -N for signal N; 0 only of one that left while its peers went on."""
    error_type: str = ""
    """Exception class as written in the error file, e.g. `ValueError`; empty when unknown."""
    message: str = ""
    """`Type: text`, the error file's message; empty when there is none."""
    traceback: str = ""
    stderr_tail: str = ""
    """Last lines of the worker's stderr, at most TEXT_BYTES_MAX."""
    error_file: str = ""
    stderr_file: str = ""
    out_of_memory: bool = False
    """The kernel's out-of-memory killer was seen at work in this worker's cgroup."""
    started: bool = True
    """False: the program could not even be executed."""
    after_stop: bool = False
    """It ended after its agent had begun to stop it: at most a consequence, never the culprit."""
    lived_s: Seconds = 0.0
    timestamp: Count = 0
    """Epoch seconds by this node's clock; for people only, it decides nothing."""
    facts: Words = {}
    """What its agent found out about its machine because the words asked for it: `interfaces`, `shm`, `disks` …"""
    step: int = 0
    """The step that it was in, by its script's own count or else counted from its start; 0: unknown."""

    @property
    def status(self) -> int:
        """The exit status a shell would show: 128+N for signal N."""
        return shell_status(self.exit_code)

    @property
    def signature(self) -> str:
        """What makes two failures the same error, whatever rank it struck."""
        return f"{self.exit_code}|{self.error_type}|{self.message[:200]}"


class Verdict(Struct, frozen=True, kw_only=True):
    """What failed first and why, as against what failed because of it."""

    code: str
    """Error code, HF2xx or HF3xx."""
    cause: str
    """One line: the primary failure in words."""
    advice: str = ""
    """One line: what to do; empty when there is nothing useful to say."""
    culprit: Failure | None = None
    """The primary failure; None when a node and not a worker was the cause."""
    collateral: tuple[Failure, ...] = ()
    lost_nodes: tuple[str, ...] = ()
    generation: Count = 0
    restarts: Rank = 0
    gave_up: str = ""
    """Why there was no further restart."""

    @property
    def victims(self) -> tuple[int, ...]:
        """Ranks that failed because of what it names; none where it names nothing."""
        named = self.culprit is not None or self.lost_nodes
        return tuple(sorted(each.rank for each in self.collateral)) if named else ()


class OutcomeKind(Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PREEMPTED = "preempted"
    SIGNALLED = "signalled"
    REFUSED = "refused"
    NO_QUORUM = "no_quorum"


class Outcome(Struct, frozen=True, kw_only=True):
    """How the job, or this node's part in it, ended."""

    kind: OutcomeKind
    exit_code: ExitCode
    code: str = ""
    message: str = ""
    verdict: Verdict | None = None


class Evidence(Struct, frozen=True, kw_only=True):
    """All that the coordinator knows about the end of a generation, in order of arrival."""

    generation: int
    restarts: int
    failures: tuple[Failure, ...]
    lost_nodes: tuple[str, ...]
    gave_up: str
    hang: Finding | None = None
    """It stood still when it ended."""
    hung: Failure | None = None
    """The worker to blame for that, as it was when it was last seen; None: nobody can be named."""
    done: tuple[int, ...] = ()
    """Ranks that had ended with 0."""
    left: tuple[Failure, ...] = ()
    """The first of these, as their agents saw them."""
    lost_ranks: tuple[int, ...] = ()
    """Ranks of the lost nodes."""
    survivors: tuple[RankStory, ...] = ()
    """Where the others were after a wait in vain, before they were stopped."""
    hosts: tuple[str, ...] = ()
    """Of all its nodes, by group rank."""

    def verdict(self, code: str, cause: str, culprit: Failure | None, advice: str = "") -> Verdict:
        """With everybody but the culprit as its victims."""
        return Verdict(
            code=code,
            cause=cause,
            advice=advice,
            culprit=culprit,
            collateral=tuple(failure for failure in self.failures if failure is not culprit),
            lost_nodes=self.lost_nodes,
            generation=self.generation,
            restarts=self.restarts,
            gave_up=self.gave_up,
        )


def fault_outcome(error: HoldfastError) -> Outcome:
    """How a job ends by a fault of an agent's or coordinator's own. The first line says it; the rest is for its node."""
    cause = str(error).partition("\n")[0]
    verdict = Verdict(code=error.code, cause=cause)
    return Outcome(kind=OutcomeKind.FAILED, exit_code=error.exit_code, code=error.code, message=cause, verdict=verdict)


def shell_status(exit_code: int) -> int:
    """waitpid's view (negative = signal) to the status a shell shows.

    >>> shell_status(3), shell_status(-9)
    (3, 137)
    """
    return EXIT_SIGNAL_BASE - exit_code if exit_code < 0 else exit_code


def job_exit_code(verdict: Verdict) -> int:
    """The first failing worker's own code; 1 when no worker was to blame.

    A culprit whose end we hastened shows our signal, and one that left its peers shows 0: then the first other one's that was
    not stopped.
    """
    culprit = verdict.culprit
    if culprit is None:
        return EXIT_FAILURE
    if culprit.exit_code == 0 or (culprit.after_stop and culprit.exit_code < 0):
        return next((each.status for each in verdict.collateral if not each.after_stop), EXIT_FAILURE)
    return culprit.status
