"""What follows when no worker of a generation is alive any more: another generation, if the restart budget allows, or the
end of the job and how it is told to each node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct, structs

from holdfast.core.coordinator.state import World
from holdfast.core.errors import EXIT_REQUEUE, JoinTimeoutError, NodesError
from holdfast.core.outcome import Evidence, Outcome, OutcomeKind, Verdict, job_exit_code
from holdfast.core.policy import Limits
from holdfast.core.protocol import StopReason
from holdfast.core.text import spans

UNBOUNDED = 2**31 - 1
"""`max_restarts` of a job whose restarts somebody else counts."""


class Retry(Struct, frozen=True):
    backoff_s: float


class GiveUp(Struct, frozen=True):
    reason: str


@dataclass(slots=True)
class Budget:
    """The restart budget, one for the job: whether a failed generation is followed by another, and when. Worker failures cost one each, whatever the number of ranks that fell; membership changes cost nothing."""

    max_restarts: int
    limits: Limits
    used: int = 0
    streak: int = 0
    """Quick failures in a row, paid or not: they grow the back-off."""
    last_signature: str = ""
    identical: int = 0

    @property
    def newest(self) -> str:
        """Which restart this is, in words."""
        return f"restart {self.used}" + (f" of {self.max_restarts}" if self.max_restarts < UNBOUNDED else "")

    def charge(self, signature: str, lived_s: float) -> Retry | GiveUp:
        """A generation failed by itself after running for `lived_s`."""
        if self.used >= self.max_restarts:
            return GiveUp(_spent(self.max_restarts))
        pause = self._count(signature, lived_s)
        if isinstance(pause, Retry):
            self.used += 1
        return pause

    def pause(self, signature: str, lived_s: float) -> Retry | GiveUp:
        """A generation ended by no fault of the training code: free, but the back-off grows all the same."""
        return self._count(signature, lived_s)

    def _count(self, signature: str, lived_s: float) -> Retry | GiveUp:
        if lived_s >= self.limits.healthy_s:
            self.streak, self.identical = 0, 0
        self.streak += 1
        self.identical = self.identical + 1 if signature == self.last_signature else 1
        self.last_signature = signature
        if self.identical >= self.limits.identical_failures_max:
            return GiveUp(f"the same error {self.identical} times in a row, each within {self.limits.healthy_s:g} s")
        if self.streak == 1:
            return Retry(0.0)
        return Retry(min(self.limits.backoff_first_s * 2 ** (self.streak - 2), self.limits.backoff_max_s))


def _spent(max_restarts: int) -> str:
    return (
        "no restarts were allowed (--max-restarts 0)" if max_restarts == 0 else f"all {max_restarts} restarts are used"
    )


Judge = Callable[[Evidence], Verdict]


class Again(Struct, frozen=True):
    backoff_s: float
    verdict: Verdict


def after_stop(world: World, budget: Budget, judge: Judge) -> Again | Outcome:
    """First match wins.

    | the generation ended because            | then                                              |
    |-----------------------------------------|---------------------------------------------------|
    | a worker exited with 75                 | over: please requeue                              |
    | a node was lost                         | again, free: it explains the failures of its peers |
    | the store host died                     | again, free, with back-off                        |
    | no worker failed (arrival, leave)       | again, free                                       |
    | it was drained                          | again, free, whatever its workers ended with      |
    | a worker failed, or all stood still     | again if the budget allows, else over             |
    """
    lived_s = world.stop_began_s - (world.started_s if world.started_s is not None else world.stop_began_s)
    own = [failure for failure in world.failures if not failure.after_stop]
    verdict = judge(_evidence(world, budget, ""))
    if any(failure.exit_code == EXIT_REQUEUE for failure in own):
        text = f"a worker asked to be requeued (exit code {EXIT_REQUEUE})"
        return Outcome(kind=OutcomeKind.PREEMPTED, exit_code=EXIT_REQUEUE, message=text)
    decision: Retry | GiveUp = Retry(0.0)
    if not (world.lost_nodes or world.drain_agreed):
        if world.stop_reason is StopReason.STORE_LOST:
            decision = budget.pause("the store host died", lived_s)
        elif own or world.stop_reason is StopReason.HUNG:
            decision = budget.charge(verdict.culprit.signature if verdict.culprit else verdict.cause, lived_s)
    if isinstance(decision, Retry):
        return Again(decision.backoff_s, verdict)
    verdict = judge(_evidence(world, budget, decision.reason))
    return Outcome(kind=OutcomeKind.FAILED, exit_code=job_exit_code(verdict), code=verdict.code, verdict=verdict)


def restart_text(again: Again, budget: Budget, *, charged: bool) -> str:
    """What failed and what follows, for all consoles; empty where nothing failed."""
    verdict, lines = again.verdict, []
    if charged:
        pause = f", in {again.backoff_s:.1f} s" if again.backoff_s else ""
        lines.append(f"{verdict.code}: {verdict.cause}; {budget.newest}{pause}")
    if verdict.victims:
        theirs = "its log" if len(verdict.victims) == 1 else "their logs"
        lines.append(f"rank {spans(verdict.victims)} failed because of it: the words are in {theirs}")
    return "\n".join(lines)


def plain_verdict(evidence: Evidence) -> Verdict:
    """Without anybody who could tell causes: the first failure is to blame."""
    culprit = next((failure for failure in evidence.failures if not failure.after_stop), None)
    cause = "the generation was ended although no worker failed"
    if culprit is not None:
        cause = f"rank {culprit.rank} on {culprit.host} ended with exit code {culprit.exit_code}"
    return evidence.verdict("HF200" if culprit is None else "HF205", cause, culprit)


def no_quorum(reason: str, text: str, generation: int, restarts: int, lost: Verdict | None) -> Outcome:
    """Too few nodes came. `lost`: the verdict on the newest generation, if it ended because nodes were lost."""
    code, exit_code = JoinTimeoutError.code, JoinTimeoutError.exit_code
    verdict = Verdict(code=code, cause=text, generation=generation, restarts=restarts)
    if lost is not None:
        verdict = structs.replace(lost, cause=f"{lost.cause}; then {text}", gave_up=reason)
    return Outcome(kind=OutcomeKind.NO_QUORUM, exit_code=exit_code, code=code, message=text, verdict=verdict)


def ended_without(outcome: Outcome, run_id: str, other_line: str) -> Outcome:
    """How a job ended for a node that had no part in it: its own line was not run. `other_line`: what of that line is not
    the job's, in words."""
    if outcome.kind is not OutcomeKind.SUCCEEDED:
        return outcome
    if other_line:
        text = (
            f"nothing was run here: the job with --rdzv-id {run_id} at this endpoint is not this one "
            f"({other_line}: different)"
        )
        return Outcome(kind=OutcomeKind.REFUSED, exit_code=NodesError.exit_code, code=NodesError.code, message=text)
    return structs.replace(outcome, message="the job has succeeded without this node: it was never needed")


def _evidence(world: World, budget: Budget, gave_up: str) -> Evidence:
    return Evidence(
        generation=world.generation,
        restarts=budget.used,
        failures=tuple(world.failures),
        lost_nodes=tuple(world.lost_nodes),
        gave_up=gave_up,
        hang=world.hang,
        hung=world.hung,
        done=world.done_ranks(),
        left=tuple(world.left),
        lost_ranks=tuple(world.lost_ranks),
        survivors=world.survivors,
        hosts=tuple(name.rpartition("#")[0] for name in world.order),
    )
