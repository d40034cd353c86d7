"""Data about the ends of workers and jobs: failures, verdicts and outcomes."""

from __future__ import annotations

import signal
from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from holdfast.protocol.errors import HoldfastError
from holdfast.protocol.exit_codes import EXIT_FAILURE, EXIT_HUNG, EXIT_SIGNAL_BASE
from holdfast.protocol.policy import ITEMS_MAX, Count, ExitCode, LocalRank, Rank, Seconds, Words
from holdfast.protocol.rank_progress import Collective, Finding, RankStory
from holdfast.text import visible

TEXT_BYTES_MAX = 16_384
"""Tracebacks and log tails are cut to this size before they are sent."""


_STOPS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGABRT, signal.SIGPIPE, signal.SIGSEGV)
_OF_A_STOP = frozenset({0, 1, 120, *(-number for number in _STOPS), *(128 + number for number in _STOPS)})


class Failure(Struct, frozen=True, kw_only=True):
    """The end of one worker, as its agent saw it: with a status other than 0, or with 0 while its peers went on."""

    rank: Rank
    local_rank: LocalRank
    host: str
    pid: Count
    exit_code: ExitCode
    """Exit code 1..255, or -N for signal N; 0 only if it left while its peers went on."""
    error_type: str = ""
    """Exception class as written in the error file, e.g. `ValueError`; empty when unknown."""
    message: str = ""
    """`Type: text`, the error file's message; empty when there is none."""
    traceback: str = ""
    stderr_tail: str = ""
    """Last lines of the worker's stderr, at most TEXT_BYTES_MAX."""
    stdout_tail: str = ""
    """Last lines of its stdout, if it ended without an exception."""
    in_group: bool = False
    """It had its process group, so it may have ended because the ranks agreed to."""
    collective: str = ""
    """The collective in which it raised, with types and shapes: `all_reduce(float32[5000])`; empty: in none, or
    unknown."""
    tensors: Words = {}
    """Types and shapes of tensors in the script's variables at that moment."""
    collectives: Annotated[tuple[Collective, ...], Meta(max_length=ITEMS_MAX)] = ()
    """The newest collectives of each of its process groups when it raised, oldest first, as torch's flight recorder has
    them; empty: it raised elsewhere, or that is not known."""
    error_file: str = ""
    stderr_file: str = ""
    out_of_memory: bool = False
    """The kernel's out-of-memory killer killed processes in this worker's cgroup."""
    started: bool = True
    """False: the program could not even be executed."""
    after_stop: bool = False
    """It ended after its agent had started to stop it: at most a consequence, never the culprit."""
    lived_s: Seconds = 0.0
    timestamp: Count = 0
    """Epoch seconds by this node's clock. For users only: no decision depends on it."""
    facts: Words = {}
    """Facts about its machine that its agent collected because of the error's text: `interfaces`, `shm`, `disks` …"""
    stack: str = ""
    """The place at which it hung: the text of its stack, the most recent call last; empty: it did not hang."""
    step: int = 0
    """The steps that it has made: of the whole job if its script reports them, else since its start; 0: unknown."""
    stepped: bool = False
    """Whether it made a step in the generation in which it failed."""

    @property
    def stop_may_cause(self) -> bool:
        """Whether the order to stop explains this exit status: the signals of a stop, also as a shell's exit code; what
        a program makes of them (0, 1, 120); and the signals by which native code ends while the program exits."""
        return self.exit_code in _OF_A_STOP

    @property
    def status(self) -> int:
        """The exit status a shell would show: 128+N for signal N."""
        return shell_status(self.exit_code)

    @property
    def signature(self) -> str:
        """Equal for two failures with the same error, on whatever rank."""
        return f"{self.exit_code}|{self.error_type}|{self.message[:200]}"


class Verdict(Struct, frozen=True, kw_only=True):
    """The judgement on a failed generation: its cause, the culprit, and the failures that are consequences."""

    code: str
    """Error code, HF2xx or HF3xx."""
    cause: str
    """One line: the primary failure in words."""
    advice: str = ""
    """One line: what to do; empty when there is nothing useful to say."""
    culprit: Failure | None = None
    """The primary failure; None if no worker was the cause, but for example a node."""
    noticed_by: Failure | None = None
    """The worker whose failure shows the cause, if there is no culprit: another one is to blame."""
    collateral: tuple[Failure, ...] = ()
    lost_nodes: tuple[str, ...] = ()
    generation: Count = 0
    restarts: Rank = 0
    gave_up: str = ""
    """The reason why there was no further restart; empty: there was one, or none was due."""
    hang: bool = False
    """A hang ended the generation."""
    collectives: str = ""
    """The collectives in which the ranks were, as torch's flight recorder has them; empty: that is not known."""

    @property
    def shown(self) -> Failure | None:
        """The failure whose last words and exit code stand for the generation's."""
        return self.culprit or self.noticed_by

    @property
    def signature(self) -> str:
        """Equal for two generations that ended by the same error. The text of the cause does not belong to it: it may
        contain a time, or the host of a device."""
        return self.code if self.shown is None else self.shown.signature

    @property
    def victims(self) -> tuple[int, ...]:
        """Ranks whose failure is a consequence of the cause; none if no cause is known."""
        named = self.shown is not None or self.lost_nodes
        return tuple(sorted(each.rank for each in self.collateral)) if named else ()


class OutcomeKind(Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PREEMPTED = "preempted"
    SIGNALLED = "signalled"
    REFUSED = "refused"
    NO_QUORUM = "no_quorum"


class Outcome(Struct, frozen=True, kw_only=True):
    """The end of the job, or of this node's part in it."""

    kind: OutcomeKind
    exit_code: ExitCode
    code: str = ""
    message: str = ""
    verdict: Verdict | None = None


class Evidence(Struct, frozen=True, kw_only=True):
    """All facts of the coordinator about the end of a generation, in order of arrival."""

    generation: int
    restarts: int
    failures: tuple[Failure, ...]
    lost_nodes: tuple[str, ...]
    gave_up: str
    hang: Finding | None = None
    """The hang that was open when it ended."""
    hung: Failure | None = None
    """The worker that caused the hang, with its last known state; None: unknown."""
    devices: tuple[str, ...] = ()
    """Severe events of GPUs and network ports around its end: `XID 79 (…) on GPU 3 of node b 0.4 s before`."""
    done: tuple[int, ...] = ()
    """Ranks that had ended with 0."""
    left: tuple[Failure, ...] = ()
    """Details of the first of these, from their agents."""
    lost_ranks: tuple[int, ...] = ()
    """Ranks of the lost nodes."""
    survivors: tuple[RankStory, ...] = ()
    """The other ranks after a time-out, with their places before they were stopped."""
    hosts: tuple[str, ...] = ()
    """Hosts of all its nodes, by group rank."""

    def verdict(
        self,
        code: str,
        cause: str,
        culprit: Failure | None,
        advice: str = "",
        *,
        noticed_by: Failure | None = None,
    ) -> Verdict:
        """A verdict in which all failures except the culprit's are consequences."""
        return Verdict(
            code=code,
            cause=visible(cause),
            advice=visible(advice),
            culprit=culprit,
            noticed_by=noticed_by,
            collateral=tuple(each for each in self.failures if each is not culprit and each is not noticed_by),
            lost_nodes=self.lost_nodes,
            generation=self.generation,
            restarts=self.restarts,
            gave_up=self.gave_up,
        )


def fault_outcome(error: HoldfastError) -> Outcome:
    """The outcome of a job that an error of an agent or the coordinator ends. Only the error's first line is sent."""
    cause = str(error).partition("\n")[0]
    verdict = Verdict(code=error.code, cause=cause)
    return Outcome(kind=OutcomeKind.FAILED, exit_code=error.exit_code, code=error.code, message=cause, verdict=verdict)


def is_own_code(exit_code: int) -> bool:
    """Whether this is an exit code of the program itself: not 0, and no signal of a shell.

    >>> [is_own_code(code) for code in (0, 1, 127, 137, 255, -9)]
    [False, True, True, False, True, False]
    """
    return 0 < exit_code <= EXIT_SIGNAL_BASE or exit_code > EXIT_SIGNAL_BASE + signal.SIGRTMAX


def shell_status(exit_code: int) -> int:
    """The status that a shell shows for waitpid's exit code (negative: a signal).

    >>> shell_status(3), shell_status(-9)
    (3, 137)
    """
    return EXIT_SIGNAL_BASE - exit_code if exit_code < 0 else exit_code


def job_exit_code(verdict: Verdict) -> int:
    """The exit code of the first worker that failed, or that noticed the cause; 1 if no worker did. After a hang
    EXIT_HUNG, whatever the workers ended with.

    A culprit that holdfast killed shows that signal, and a culprit that left its peers shows 0. Then the code is that
    of the first other worker that was not stopped.
    """
    if verdict.hang:
        return EXIT_HUNG
    culprit = verdict.shown
    if culprit is None:
        return EXIT_FAILURE
    if culprit.exit_code == 0 or (culprit.after_stop and culprit.exit_code < 0):
        return next((each.status for each in verdict.collateral if not each.after_stop), EXIT_FAILURE)
    return culprit.status
