"""What the coordinator's machine remembers, the small steps that its decisions are made of, and who has been
silent too long (silence counts only while we were listening ourselves)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import inf

from msgspec import structs

from holdfast.core.coordinator.admission import Admission
from holdfast.core.coordinator.budget import Budget
from holdfast.core.coordinator.commands import Command, Conclude, DropLink, Tell
from holdfast.core.coordinator.ending import Judge, plain_verdict
from holdfast.core.coordinator.formation import Gathering
from holdfast.core.coordinator.membership import Membership
from holdfast.core.coordinator.predecessor import Predecessor
from holdfast.core.coordinator.probation import Probation
from holdfast.core.coordinator.state import Draining, Member, Pending, Phase, World, names
from holdfast.core.coordinator.versions import Versions
from holdfast.core.errors import JoinTimeoutError, NodesError
from holdfast.core.machines import Note
from holdfast.core.outcome import Evidence, Outcome, OutcomeKind, Verdict
from holdfast.core.pauses import Pauses
from holdfast.core.policy import Grow, JobSpec, Limits, NodeSpec
from holdfast.core.protocol import Abandon, Finish, FromCoordinator, Join, Notice, Quit, Waiting


@dataclass(slots=True)
class Liveness:
    limits: Limits
    looked_s: float
    pardoned_s: float = 0.0
    """Nobody counts as silent since before this."""
    next_expiry_s: float = inf
    """When the first of the leases seen at the last look runs out."""

    def next_look_s(self) -> float:
        return min(self.looked_s + self.limits.lease_s / 4, self.next_expiry_s)

    def silent(self, members: Iterable[Member], now: float) -> list[Member]:
        """Members whose lease has run out.

        If we come back from a pause of our own (stopped process, starved machine), the time of that pause is not
        held against anybody: what they sent meanwhile may still lie unread in our sockets.
        """
        gap = now - self.looked_s
        self.looked_s = now
        if gap > self.limits.lease_s / 2:
            self.pardoned_s, self.next_expiry_s = now - self.limits.ping_interval_s, inf
            return []
        expiries = [(max(member.last_heard_s, self.pardoned_s) + self.limits.lease_s, member) for member in members]
        self.next_expiry_s = min((expiry for expiry, _ in expiries if expiry > now), default=inf)
        return [member for expiry, member in expiries if expiry <= now]


TRANSITIONS: dict[tuple[Phase, Phase], str] = {
    (Phase.GATHERING, Phase.PREPARING): "the formation rule says so; Assign is sent to every member of the world",
    (Phase.GATHERING, Phase.OVER): "too few nodes before the join deadline",
    (Phase.GATHERING, Phase.RUNNING): "a predecessor's generation is whole: every node of it came with living workers",
    (Phase.PREPARING, Phase.RUNNING): "every member is prepared and the store has a port; Start is sent",
    (Phase.PREPARING, Phase.GATHERING): "a member of the new world was lost or left; nothing was started yet",
    (Phase.RUNNING, Phase.DRAINING): "a member arrived, or wants to leave and its workers ask for safe points",
    (
        Phase.RUNNING,
        Phase.STOPPING,
    ): "a worker failed, a member was lost, left or arrived, or all stand still; Stop is sent",
    (Phase.RUNNING, Phase.OVER): "every rank is done",
    (
        Phase.DRAINING,
        Phase.STOPPING,
    ): "all have left at the safe point; or no worker asks for one, one failed, a member "
    "was lost, or it takes too long",
    (Phase.DRAINING, Phase.OVER): "every rank is done",
    (Phase.STOPPING, Phase.GATHERING): "no worker of the generation is alive; another generation follows",
    (Phase.STOPPING, Phase.OVER): "no worker of the generation is alive; the budget is spent, or please requeue",
}


class CoordinatorBase:
    """Everything but the decisions."""

    def __init__(
        self,
        job: JobSpec,
        limits: Limits,
        judge: Judge,
        now: float,
        *,
        fixed_master: tuple[str, int] | None = None,
    ) -> None:
        """`fixed_master`: the address and port every generation announces (static rendezvous), else rank 0's own."""
        self.job = job
        self.limits = limits
        self._judge = judge
        self._fixed_master = fixed_master
        self.phase = Phase.GATHERING
        self.probation = Probation(limits, job.exclude_after)
        self._membership = Membership(self.probation)
        self.world: World | None = None
        self.generation = 0
        self._predecessor = Predecessor()
        self.outcome: Outcome | None = None
        self.budget = Budget(job.max_restarts, limits)
        self._liveness = Liveness(limits, now)
        self._versions = Versions()
        self._admission = Admission(job, self._versions.other_line)
        self._born_s = now
        self._now = now
        self._gathering = Gathering(
            present=0, began_s=now, last_arrival_s=now, quorum_s=None, not_before_s=now, regroup=False
        )
        self._gather_until_s: float | None = None
        self._phase_since_s = now
        self._waiting_said = Pauses.begin(now, limits.say_interval_s)
        self._quit: Quit | None = None
        """Somebody wants the job to end: whoever comes now is sent home."""
        self._reason = ""
        self._why = ""
        """How the newest generation that is over has ended."""
        self._lost: Verdict | None = None
        """On that generation, if nodes were lost in it and no other has been formed since."""
        self._out: list[Command] = []

    @property
    def members(self) -> dict[str, Member]:
        """By name."""
        return self._membership.members

    def is_member(self, link: int) -> bool:
        """Whether the agent behind this link has joined."""
        return self._membership.by_link(link) is not None

    @property
    def knows_predecessor(self) -> bool:
        """Some agent has told of a generation that another coordinator formed."""
        return self._predecessor.generation > 0

    def check_invariants(self) -> None:
        """Cheap enough to run after every event in tests and simulations."""
        assert self.budget.used <= self.job.max_restarts, "the restart budget is overdrawn"
        assert (self.outcome is not None) == (self.phase is Phase.OVER)
        self._membership.check_invariants()
        newest = max(self.generation, self._predecessor.generation)
        assert all(member.busy_generation <= newest for member in self._membership.busy())
        if self.phase not in (Phase.GATHERING, Phase.OVER):
            world = self.world
            assert world is not None
            assert world.generation == self.generation
            assert len(set(world.order)) == len(world.order) <= self.job.max_nodes
        if self.phase is Phase.PREPARING:
            fresh = [m for m in self._membership.busy() if m.name in self._world().nproc]
            assert not fresh, "a world is prepared where workers may live"

    # ---------------------------------------------------------------- who and what

    def _candidates(self) -> Collection[Member]:
        return self._membership.candidates(self._now)

    def _count_candidates(self, now: float) -> None:
        self._gathering.count(len(self._candidates()), self.job.min_nodes, now)

    def _who_is_here(self) -> str:
        here = names(self._candidates()) or "nobody"
        waiting = names([member for member, _ in self._membership.waiting(self._now)])
        return f"{here}; on probation: {waiting}" if waiting else here

    def _world(self) -> World:
        assert self.world is not None
        return self.world

    def _in_world(self, member: Member) -> bool:
        return (
            self.phase not in (Phase.GATHERING, Phase.OVER)
            and self.world is not None
            and member.name in self.world.nproc
        )

    def _has_room(self) -> bool:
        """Whether the running world would take in somebody who came now."""
        world = self._world()
        return self.job.grow is not Grow.NEVER and len(world.order) < self.job.max_nodes and not world.done

    def _stop_patience_s(self) -> float:
        return self.limits.stop_grace_s + self.limits.stop_slack_s

    def _at_work(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.DRAINING)

    def _draining(self) -> Draining:
        drain = self._world().drain
        assert drain is not None
        return drain

    def _newcomers(self) -> Collection[Member]:
        """Candidates outside the running world."""
        return self._membership.outsiders(self._now, self._world().nproc)

    def _is_current(self, member: Member, generation: int) -> bool:
        return generation == self.generation and self._in_world(member)

    def _tell(self, member: Member, message: FromCoordinator) -> None:
        self._out.append(Tell(member.link, message))

    def _tell_world(self, world: World, message: FromCoordinator) -> None:
        for name in world.order:
            if name in self.members:
                self._tell(self.members[name], message)

    def _drop(self, member: Member, reason: str) -> None:
        self._out.append(DropLink(member.link, reason))

    def _note(self, event: str, **fields: object) -> None:
        self._out.append(Note(event, fields))

    def _judged(self, evidence: Evidence) -> Verdict:
        """Whoever judges was given to us: a fault of his is noted, and decides nothing."""
        try:
            return self._judge(evidence)
        except Exception as error:  # noqa: BLE001
            self._note("insight_fault", what="judge", error=f"{type(error).__name__}: {error}")
            return plain_verdict(evidence)

    # ---------------------------------------------------------------- links that have not joined

    def _open_link(self, link: int, pending: Pending) -> None:
        too_many = self._membership.open_link(link, pending)
        if too_many is not None:
            self._close_unjoined(too_many, f"too many links from {pending.address} have not joined")

    def _unjoined_due_s(self) -> float:
        """When `_drop_unjoined` has something to do. An agent that waits for a rank that somebody holds has asked."""
        oldest = self._membership.oldest_link(self._admission.claims)
        return inf if oldest is None else oldest[1] + self.limits.unjoined_s

    def _drop_unjoined(self, now: float) -> None:
        while now >= self._unjoined_due_s():
            oldest = self._membership.oldest_link(self._admission.claims)
            assert oldest is not None
            self._close_unjoined(oldest[0], f"it did not join within {self.limits.unjoined_s:g} s")

    def _close_unjoined(self, link: int, reason: str) -> None:
        self._membership.close_link(link)
        self._admission.withdraw(link)
        self._out.append(DropLink(link, reason))

    # ---------------------------------------------------------------- telling

    def _compare(self, member: Member) -> None:
        """Other software than the first node's is said to both, once."""
        for difference in self._versions.compare(member.node):
            self._note("nodes_differ", member=member.name, what=difference.what, text=difference.text)
            first = [each for each in self.members.values() if each.node is self._versions.first]
            for each in (*first, member):
                self._tell(each, Notice(difference.text))

    def _standby_text(self) -> str:
        size = len(self._world().order)
        stands_by = size >= self.job.max_nodes or self.job.grow is Grow.NEVER
        fate = "this one stands by as a spare" if stands_by else "this one will be taken in"
        return f"generation {self.generation} is at work on {size} of at most {self.job.max_nodes} nodes; {fate}"

    def _abandon(self, members: list[Member]) -> None:
        for member in members:
            self._tell(member, Abandon(member.busy_generation))

    def _blame(self, now: float, world: World, verdict: Verdict) -> None:
        """Whose fault the end of this generation was is counted per host."""
        culprits = set(world.lost_hosts)
        if not culprits and verdict.culprit is not None and not world.drain_agreed:
            culprits = {verdict.culprit.host}
        for host in sorted(culprits):
            pause_s = self.probation.blamed(host, now)
            if pause_s:
                text = f"{host} was blamed {self.job.exclude_after} times: excluded for {pause_s:g} s"
                self._note("excluded", host=host, for_s=pause_s)
                for member in self.members.values():
                    self._tell(member, Waiting(text))
        self._membership.changed()

    # ---------------------------------------------------------------- phases and the end

    def _no_quorum(self, reason: str) -> None:
        before = f"; the generation before ended: {self._why}" if self._why else ""
        text = f"{reason}; here: {self._who_is_here()}{before}"
        verdict = Verdict(code=JoinTimeoutError.code, cause=text, generation=self.generation, restarts=self.budget.used)
        if self._lost is not None:
            verdict = structs.replace(self._lost, cause=f"{self._lost.cause}; then {text}", gave_up=reason)
        self._finish(
            Outcome(
                kind=OutcomeKind.NO_QUORUM,
                exit_code=JoinTimeoutError.exit_code,
                code=JoinTimeoutError.code,
                message=text,
                verdict=verdict,
            )
        )

    def _finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._enter(self._now, Phase.OVER)
        for member in self.members.values():
            self._tell(member, Finish(outcome if member.first_started_s is not None else self._end_of(member.node)))
        self._note("over", kind=outcome.kind.value, exit_code=outcome.exit_code)
        self._out.append(Conclude(outcome))

    def _greet_after_end(self, link: int, join: Join, outcome: Outcome) -> Command:
        """An agent comes when all is over. One with another line wants another job: it will find the endpoint free."""
        if join.last_generation:
            return Tell(link, Finish(outcome))
        if self._versions.other_line(join.node):
            self._membership.close_link(link)
            return DropLink(link, "the job at this endpoint is over, and is another one")
        return Tell(link, Finish(self._end_of(join.node)))

    def _end_of(self, node: NodeSpec) -> Outcome:
        """How the job, which is over, ended for a node that had no part in it: its own line was not run."""
        assert self.outcome is not None
        if self.outcome.kind is not OutcomeKind.SUCCEEDED:
            return self.outcome
        other = self._versions.other_line(node)
        if other:
            text = f"nothing was run here: the job with --rdzv-id {self.job.run_id} at this endpoint is not this one ({other}: different)"
            return Outcome(kind=OutcomeKind.REFUSED, exit_code=NodesError.exit_code, code=NodesError.code, message=text)
        return structs.replace(self.outcome, message="the job has succeeded without this node: it was never needed")

    def _enter(self, now: float, phase: Phase) -> None:
        assert (self.phase, phase) in TRANSITIONS, f"no transition {self.phase} -> {phase}"
        self.phase = phase
        self._phase_since_s = now
