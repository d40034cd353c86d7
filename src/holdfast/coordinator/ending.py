"""Decides what follows when no worker of a generation is alive any more: another generation, if the restart budget
allows it, or the end of the job with its outcome for each node.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from msgspec import Struct, structs

from holdfast.coordinator.incident import Incident
from holdfast.coordinator.membership import HostBackoff
from holdfast.coordinator.world import World
from holdfast.protocol.errors import JoinTimeoutError, NodesError, UnfitNodesError
from holdfast.protocol.exit_codes import REQUESTS, ExitCode, Scheduler
from holdfast.protocol.extension import DeviceFault
from holdfast.protocol.messages import Notice, StopReason, Waiting
from holdfast.protocol.outcome import Evidence, Failure, Outcome, OutcomeKind, Verdict, job_exit_code
from holdfast.protocol.policy import JobSpec, Limits, doubled
from holdfast.text import ranks_text

UNBOUNDED = 2**31 - 1
"""`max_restarts` of a job whose restarts are counted elsewhere."""
FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
KILLED_FROM_OUTSIDE = "HF204"
"""Code of the verdict on a worker that was ended by a signal, other than one of the kernel's out-of-memory killer."""
END_CHARACTERS_MAX = 200
"""Characters of the text in `previous_end`."""
DEVICE_S_MAX = 120.0
"""Time before the end of a generation in which the event of a device may be its cause (s)."""
DEVICES_NAMED_MAX = 3


class Retry(Struct, frozen=True):
    backoff_s: float


class GiveUp(Struct, frozen=True):
    reason: str


@dataclass(slots=True, eq=False, repr=False)
class Budget:
    """The job's restart budget: decides whether a failed generation is followed by another, and when. A generation that
    failed costs one restart, however many ranks failed. Membership changes cost nothing."""

    max_restarts: int
    limits: Limits
    used: int = 0
    streak: int = 0
    """Quick failures in a row, charged or not. The back-off grows with them."""
    last_signature: str = ""
    identical: int = 0

    @property
    def newest(self) -> str:
        """The number of this restart, in words."""
        return f"restart {self.used}" + (f" of {self.max_restarts}" if self.max_restarts < UNBOUNDED else "")

    @property
    def allows_restart(self) -> bool:
        """Whether the next failure is followed by a restart, whatever it is."""
        return self.used < self.max_restarts and self.identical + 1 < self.limits.identical_failures_max

    def charge(self, signature: str, lived_s: float) -> Retry | GiveUp:
        """Charge a generation that failed by its own fault after running for `lived_s`."""
        if self.used >= self.max_restarts:
            return GiveUp(_spent(self.max_restarts))
        pause = self._count(signature, lived_s)
        if isinstance(pause, Retry):
            self.used += 1
        return pause

    def pause(self, signature: str, lived_s: float) -> Retry | GiveUp:
        """A generation ended without a fault of the training code: charge nothing, but let the back-off grow."""
        return self._count(signature, lived_s)

    def _count(self, signature: str, lived_s: float) -> Retry | GiveUp:
        # A failure after a long life is no loop: it counts as a first one
        # (test_a_healthy_generation_ends_the_streak).
        if lived_s >= self.limits.healthy_s:
            self.streak, self.identical = 0, 0
        self.streak += 1
        self.identical = self.identical + 1 if signature == self.last_signature else 1
        self.last_signature = signature
        if self.identical >= self.limits.identical_failures_max:
            return GiveUp(f"the same error {self.identical} times in a row, each within {self.limits.healthy_s:g} s")
        # Only a loop is slowed down: the first failure of a row waits for nothing.
        if self.streak == 1:
            return Retry(0.0)
        return Retry(doubled(self.limits.backoff_first_s, self.streak - 2, self.limits.backoff_max_s))


def _spent(max_restarts: int) -> str:
    if max_restarts == 0:
        return "no restarts were allowed (--max-restarts 0)"
    return "the one restart is used" if max_restarts == 1 else f"all {max_restarts} restarts are used"


Judge = Callable[[Evidence], Verdict]


class Again(Struct, frozen=True):
    backoff_s: float
    verdict: Verdict


def after_stop(world: World, incident: Incident, budget: Budget, judge: Judge) -> Again | Outcome:
    """First match wins.

    | the generation ended because            | then                                              |
    |-----------------------------------------|---------------------------------------------------|
    | a worker asked for it by its exit code  | over, with that code (protocol/exit_codes.py)     |
    | a node was lost                         | again, free: it explains the failures of its peers |
    | the store host died                     | again, free, with back-off                        |
    | no worker failed (arrival, leave)       | again, free                                       |
    | it was drained, or a node was leaving   | again, free, whatever its workers ended with      |
    | others could not go on after a loss     | again: the loss has been charged                  |
    | a worker failed, or all stood still     | again if the budget allows, else over             |
    """
    lived_s = world.lived_s(world.stop_began_s)
    # A worker that ends because of the stop is a victim, whatever its exit status
    # (test_the_exit_code_of_a_worker_that_was_stopped_is_no_request).
    own = [failure for failure in incident.failures if not failure.after_stop]
    # Before the budget: the worker asks the scheduler, whatever restarts are left (scenario requeue).
    request = _request_of(own)
    if request is not None and request.scheduler is Scheduler.AGAIN:
        text = f"a worker asked {request.asks} (exit code {request.number})"
        return Outcome(kind=OutcomeKind.PREEMPTED, exit_code=request.number, message=text)
    verdict = judge(_evidence(world, incident, budget, ""))
    if request is not None:
        return Outcome(kind=OutcomeKind.FAILED, exit_code=request.number, code=verdict.code, verdict=verdict)
    decision: Retry | GiveUp = Retry(0.0)
    if not (incident.lost_nodes or world.costs_no_restart or incident.charged):
        if world.stop_reason is StopReason.STORE_LOST:
            # Free, but counted: a store that dies at every start would restart the workers for ever
            # (test_what_is_free_gives_up_as_well_if_it_never_changes).
            decision = budget.pause(world.stop_reason.value, lived_s)
        elif own or world.stop_reason is StopReason.HUNG:
            harmless = verdict.code == KILLED_FROM_OUTSIDE and killed_in_training(world, own)
            decision = budget.charge(verdict.signature, inf if harmless else lived_s)
    if isinstance(decision, Retry):
        return Again(decision.backoff_s, verdict)
    # Once more: why no restart follows is known only now, and belongs to the verdict.
    verdict = judge(_evidence(world, incident, budget, decision.reason))
    verdict = structs.replace(verdict, hang=verdict.hang or world.stop_reason is StopReason.HUNG)
    return Outcome(kind=OutcomeKind.FAILED, exit_code=job_exit_code(verdict), code=verdict.code, verdict=verdict)


def _request_of(failures: Sequence[Failure]) -> ExitCode | None:
    """What these workers ask for by their exit codes; None: nothing."""
    asked = {failure.exit_code for failure in failures}
    return next((each for number, each in REQUESTS.items() if number in asked), None)


def killed_in_training(world: World, failures: Sequence[Failure]) -> bool:
    """Whether these workers were ended by SIGKILL after this generation had made a step. It is no loop if that happens
    again and again. Progress is reported once a second, so what the failures say may be newer."""
    stepped = world.stepped or any(each.stepped for each in failures)
    return stepped and all(each.exit_code == -signal.SIGKILL for each in failures)


def restart_text(again: Again, budget: Budget, *, charged: bool) -> str:
    """What failed and what follows, for all consoles; empty if nothing failed."""
    verdict, lines = again.verdict, []
    if charged:
        pause = f", in {again.backoff_s:.1f} s" if again.backoff_s else ""
        lines.append(f"{verdict.code}: {verdict.cause}; {budget.newest}{pause}")
    if verdict.victims:
        log = "its log" if len(verdict.victims) == 1 else "their logs"
        lines.append(f"{ranks_text(verdict.victims)} failed because of it; see {log}")
    return "\n".join(lines)


def previous_end(verdict: Verdict, *, charged: bool, hung: bool) -> str:
    """Say how a generation ended, for the workers of the next one (train/snapshots/lives.py).

    `failed STEP TEXT`: by a fault of the training itself, at this step (0: unknown); `hung STEP`. Else `lost`: nodes
    were lost, came or left, or a process was killed from outside.
    """
    culprit = verdict.shown
    if not charged or culprit is None:
        return "lost"
    if hung:
        return f"hung {culprit.step}"
    # Somebody killed it: that is nothing against the state from which it trained
    # (test_workers_that_are_killed_from_outside_are_no_poison).
    if culprit.exit_code in FROM_OUTSIDE and not culprit.out_of_memory:
        return "lost"
    # Workers get it as an environment variable, which holds no NUL.
    text = culprit.message.partition("\n")[0] or f"exit code {culprit.exit_code}"
    return f"failed {culprit.step} {text[:END_CHARACTERS_MAX]}".replace("\0", "")


def plain_verdict(evidence: Evidence) -> Verdict:
    """The verdict of a coordinator without a judge: the first failure is the cause."""
    culprit = next((failure for failure in evidence.failures if not failure.after_stop), None)
    cause = "the generation ended although no worker failed"
    if culprit is not None:
        cause = f"rank {culprit.rank} on {culprit.host} ended with exit code {culprit.exit_code}"
    return evidence.verdict("HF200" if culprit is None else "HF205", cause, culprit)


def ended_without(outcome: Outcome, run_id: str, other_line: str) -> Outcome:
    """The outcome for a node that took no part in the job: its own command line was not run. `other_line`: how that
    line differs from the job's, in words."""
    if outcome.kind is not OutcomeKind.SUCCEEDED:
        return outcome
    if other_line:
        text = (
            f"nothing ran on this node: the job at this endpoint (--rdzv-id {run_id}) has another command line "
            f"({other_line}: different). For another job, use another port and --rdzv-id"
        )
        return Outcome(kind=OutcomeKind.REFUSED, exit_code=NodesError.exit_code, code=NodesError.code, message=text)
    return structs.replace(outcome, message="the job succeeded before this node could join it")


def _evidence(world: World, incident: Incident, budget: Budget, gave_up: str) -> Evidence:
    return Evidence(
        generation=world.generation,
        restarts=budget.used,
        failures=tuple(incident.failures),
        lost_nodes=tuple(incident.lost_nodes),
        gave_up=gave_up,
        hang=world.hang,
        hung=world.hung,
        devices=world.devices,
        done=world.done_ranks(),
        left=tuple(world.left),
        lost_ranks=tuple(incident.lost_ranks),
        survivors=world.survivors,
        hosts=tuple(name.rpartition("#")[0] for name in world.order),
    )


def around(devices: Sequence[DeviceFault], end_s: float) -> tuple[str, ...]:
    """The newest of these events around the end of a generation, with their distance from it.

    >>> around([DeviceFault("XID 79 on GPU 3 of node b", 9.6)], 10.0)
    ('XID 79 on GPU 3 of node b 0.4 s before',)
    """
    near = [each for each in devices if end_s - each.at_s <= DEVICE_S_MAX][-DEVICES_NAMED_MAX:]
    return tuple(
        f"{each.text} {abs(end_s - each.at_s):.1f} s {'before' if each.at_s <= end_s else 'after'}" for each in near
    )


class Restart(Struct, frozen=True):
    """Decision: another generation follows."""

    backoff_s: float
    notice: Notice | None
    """What failed, for the members of the generation that ended."""
    excluded: tuple[Waiting, ...]
    """Hosts that are excluded for a time, for all members."""


class Endings:
    """Decides what follows each generation that ended: asks the judge for a verdict, charges the budget, counts the
    blame per host, and reports the verdict."""

    def __init__(
        self, job: JobSpec, budget: Budget, host_backoff: HostBackoff, judge: Judge, note: Callable[..., None]
    ) -> None:
        """`note` writes into the journal."""
        self._job = job
        self._budget = budget
        self._host_backoff = host_backoff
        self._judge = judge
        self._note = note
        self.before = ""
        """The end of the generation before, for the workers of the next one."""

    def stopped(self, now: float, world: World, incident: Incident) -> Restart | Outcome:
        """Decide, now that no worker of this world is alive any more."""
        used = self._budget.used
        end = after_stop(world, incident, self._budget, self._judged)
        if isinstance(end, Outcome):
            return end
        verdict = incident.verdict = end.verdict
        charged = incident.charged or self._budget.used > used
        self.before = previous_end(verdict, charged=charged, hung=world.stop_reason is StopReason.HUNG)
        text = restart_text(end, self._budget, charged=charged)
        self._note_verdict(world, verdict)
        notice = Notice(text, verdict.victims) if text else None
        return Restart(end.backoff_s, notice, self._excluded(now, world, incident, verdict))

    def survived(self, now: float, world: World, incident: Incident) -> tuple[Notice, tuple[Waiting, ...]]:
        """Say by what this world has lost ranks, now that the others go on without them. Also returns the hosts that
        are excluded now."""
        verdict = incident.verdict = self._judged(_evidence(world, incident, self._budget, ""))
        self._note_verdict(world, verdict)
        charged = f"; it counts as {self._budget.newest}" if incident.charged and not incident.charged_before else ""
        return Notice(f"{verdict.code}: {verdict.cause}{charged}"), self._excluded(now, world, incident, verdict)

    def _note_verdict(self, world: World, verdict: Verdict) -> None:
        judged = {"cause": verdict.cause, "code": verdict.code, "advice": verdict.advice}
        self._note("verdict", generation=world.generation, **judged)

    def _excluded(self, now: float, world: World, incident: Incident, verdict: Verdict) -> tuple[Waiting, ...]:
        """Count the end of this generation against the host that caused it. Returns the hosts that are excluded now."""
        # A lost node explains what failed on other hosts, so these are blamed only if no node was lost.
        culprits = set(incident.lost_hosts)
        if not culprits and verdict.culprit is not None and not world.costs_no_restart:
            culprits = {verdict.culprit.host}
        excluded: list[Waiting] = []
        for host in sorted(culprits):
            pause_s = self._host_backoff.blamed(host, now)
            if pause_s:
                self._note("excluded", host=host, for_s=pause_s)
                text = f"{host} was blamed {self._job.exclude_after} times: excluded for {pause_s:g} s"
                excluded.append(Waiting(text))
        return tuple(excluded)

    def no_quorum(self, reason: str, text: str, generation: int, before: Verdict | None, *, unfit: str = "") -> Outcome:
        """The outcome when too few nodes joined. If the last generation lost nodes, that is the cause. `before`: the
        verdict on the newest incident. `unfit`: the nodes that are there and must not take part, with their reasons;
        empty: there is none."""
        code, exit_code = JoinTimeoutError.code, JoinTimeoutError.exit_code
        if unfit:
            code, text = UnfitNodesError.code, f"{unfit}; {text}"
        verdict = Verdict(code=code, cause=text, generation=generation, restarts=self._budget.used)
        if before is not None and before.lost_nodes and before.generation == generation:
            verdict = structs.replace(before, cause=f"{before.cause}; then {text}", gave_up=reason)
        return Outcome(kind=OutcomeKind.NO_QUORUM, exit_code=exit_code, code=code, message=text, verdict=verdict)

    def _judged(self, evidence: Evidence) -> Verdict:
        """The judge's verdict. The judge is a parameter: an error in it goes to the journal and changes no decision."""
        try:
            return self._judge(evidence)
        except Exception as error:  # noqa: BLE001
            self._note("observer_fault", what="judge", error=f"{type(error).__name__}: {error}")
            return plain_verdict(evidence)
