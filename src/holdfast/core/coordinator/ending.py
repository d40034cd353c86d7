"""What follows when no worker of a generation is alive any more: another generation, or the end of the job."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from holdfast.core.coordinator.budget import Budget, GiveUp, Retry
from holdfast.core.coordinator.state import World
from holdfast.core.errors import EXIT_REQUEUE
from holdfast.core.outcome import Evidence, Outcome, OutcomeKind, Verdict, job_exit_code
from holdfast.core.protocol import StopReason
from holdfast.core.spans import spans

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
