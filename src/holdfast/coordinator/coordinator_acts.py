"""The state of the coordinator and what each change of phase does. `coordinator_machine.py` decides when."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf

from holdfast.coordinator.admission import Admission, Versions
from holdfast.coordinator.authority import Authority, PreviousLeader
from holdfast.coordinator.coordinator_state import (
    TRANSITIONS,
    Command,
    Conclude,
    Draining,
    DropLink,
    Formation,
    Member,
    Phase,
    Tell,
    World,
    master_address,
    names,
)
from holdfast.coordinator.ending import FINAL, Budget, Endings, Judge, ended_without
from holdfast.coordinator.extending import Extensions
from holdfast.coordinator.formation import (
    BACK_OFF,
    FENCE,
    Candidate,
    Gathering,
    all_places,
    assigned,
    offers,
    seat,
)
from holdfast.coordinator.incident import Incidents
from holdfast.coordinator.membership import HostBackoff, Liveness, Membership
from holdfast.coordinator.monitor import Monitor, cannot_tell
from holdfast.coordinator.previous_generation import PreviousGeneration
from holdfast.coordinator.regrouping import Plan, Regrouping
from holdfast.coordinator.replacements import Replacements
from holdfast.coordinator.views import job_view
from holdfast.protocol.charter import Charter
from holdfast.protocol.extension import CoordinatorHalf, MemberSeen, NodeSeen
from holdfast.protocol.messages import (
    Abandon,
    Drain,
    DrainTo,
    Finish,
    FromCoordinator,
    Join,
    Notice,
    Quit,
    Regroup,
    Resume,
    Start,
    Stop,
    StopReason,
    Waiting,
)
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.policy import Grow, HeldStates, JobSpec, Limits, NodeSpec, Note, Pauses
from holdfast.protocol.rank_progress import Examine, JobView


class CoordinatorActs:
    """State of the coordinator, and the changes of its phase. `TRANSITIONS` lists them."""

    def __init__(
        self,
        job: JobSpec,
        limits: Limits,
        judge: Judge,
        now: float,
        authority: Authority,
        *,
        fixed_master: tuple[str, int] | None = None,
        examine: Examine = cannot_tell,
        extensions: Sequence[CoordinatorHalf] = (),
    ) -> None:
        """`fixed_master`: the address and port that every generation announces (static rendezvous); None: rank 0's own.
        `judge` makes a verdict of failures, `examine` a finding of stacks."""
        self.job, self.limits = job, limits
        self._authority, self._fixed_master = authority, fixed_master
        self.stepped_down = False
        """It has no authority any more, and never will: it ignores every event."""
        self.phase = Phase.GATHERING
        """Changed by `_enter` only, along TRANSITIONS."""
        self.host_backoff = HostBackoff(limits, job.exclude_after)
        self._membership = Membership(self.host_backoff, limits)
        self._incidents = Incidents()
        """What was lost last. No world has a part of it."""
        self._monitor = Monitor(limits, self._membership.members, self._incidents, examine)
        self.world: World | None = None
        """The newest generation, also after its end. Its number is `generation`, but in GATHERING and OVER."""
        self.generation = 0
        """The newest number of a generation that was formed; it only grows. 0: none was."""
        self.job_uid = ""
        """As in Start; empty until the first generation is formed."""
        self._announced: Formation | None = None
        """The next generation, announced with the stop of the present one; None: there was no announcement."""
        self.previous = PreviousGeneration()
        """Every generation that is formed has a larger number than this one."""
        self.outcome: Outcome | None = None
        """Set when the phase becomes OVER, and never changed."""
        self.budget = Budget(job.max_restarts, limits)
        self._endings = Endings(job, self.budget, self.host_backoff, judge, self._note)
        replacements = Replacements(limits, self.budget, self._membership)
        self._regrouping = Regrouping(job, limits, self.budget, self._membership, replacements, self._incidents)
        self._regrouping.longest_step_s = lambda: self._monitor.longest_step_s
        self._regrouping.succeeded = authority.succeeds_without
        self._lost: list[str] = []
        """Nodes of the world that this event has shown to be lost, in words."""
        self._liveness = Liveness(limits, now)
        self._versions = Versions()
        self._admission = Admission(job, self._versions.other_line)
        self._job_began_s = now
        """Earlier than this coordinator if it is a successor."""
        self._now = now
        """Of the newest event that was decided."""
        self._due_s: float = -inf
        """The next deadline; -inf: not computed since the last event."""
        self.gathering = Gathering.begin(now)
        """Input of the rule that forms a generation. Means something in GATHERING."""
        self._gather_until_s: float | None = None
        """While a generation runs: when the newcomers are taken in, all at one time; None: there is none."""
        self._phase_since_s = now
        self._waiting_said = Pauses.begin(now, limits.say_interval_s)
        self._quit: Quit | None = None
        """A user asked for the end of the job: an agent that joins now is refused, and ends."""
        self._reason = ""
        """Why no generation was formed at the newest event, as it was noted last."""
        self._why = ""
        """Why the last generation ended."""
        self._out: list[Command] = []
        """The commands of this event. Empty between two events."""
        self._extensions = Extensions(extensions, JobSeen(self), self._membership.members)
        self._follow_leader(now, authority.begin(self))

    # ---------------------------------------------------------------- what others may see

    @property
    def members(self) -> dict[str, Member]:
        """All members by name."""
        return self._membership.members

    def is_member(self, link: int) -> bool:
        """Whether the agent behind this link has joined."""
        return self._membership.by_link(link) is not None

    @property
    def newest_generation(self) -> int:
        """The largest number that this coordinator has given to its members."""
        return self.generation if self._announced is None else self._announced.world.generation

    @property
    def workers_may_live(self) -> bool:
        """Whether a member may still run workers of a generation of this coordinator."""
        return self._membership.anybody_busy

    @property
    def knows_previous_leader(self) -> bool:
        """Whether an agent has reported a generation that another coordinator formed."""
        return self.previous.generation > 0

    @property
    def training_s(self) -> float:
        """As in JobView."""
        return self._monitor.training_s

    def job_s(self, now: float) -> float:
        """Age of the job."""
        return now - self._job_began_s

    def view(self, now: float) -> JobView:
        """The state of the job for users. The cost grows with the number of ranks."""
        view = job_view(
            now,
            job=self.job,
            phase=self.phase,
            generation=self.generation,
            world=self.world,
            restarts=self.budget.used,
            since_s=now - self._phase_since_s,
            job_s=self.job_s(now),
            why=self._why,
            membership=self._membership,
            monitor=self._monitor,
        )
        return self._extensions.shown_in(view, now)

    # ---------------------------------------------------------------- who and what

    def _candidates(self) -> Collection[Member]:
        return self._membership.candidates(self._now)

    def _count_candidates(self, now: float) -> None:
        self.gathering.count(len(self._candidates()), self.job.min_nodes, now)

    def _who_is_here(self) -> str:
        here = names(self._candidates()) or "nobody"
        waiting = names([member for member, _ in self._membership.waiting(self._now)])
        return f"{here}; on host back-off: {waiting}" if waiting else here

    def _world(self) -> World:
        assert self.world is not None
        return self.world

    def _in_world(self, member: Member) -> bool:
        return (
            self.phase not in (Phase.GATHERING, Phase.OVER)
            and self.world is not None
            and member.name in self.world.places
        )

    def _has_room(self) -> bool:
        """Whether the running world would accept one more node."""
        world = self._world()
        size = len(world.order) + len(self._regrouping.arriving)
        return self.job.grow is not Grow.NEVER and size < self.job.max_nodes and not world.done

    def _stop_patience_s(self) -> float:
        return self.limits.stop_grace_s + self.limits.stop_slack_s

    def _stop_deadline_s(self) -> float:
        return self._phase_since_s + self._stop_patience_s()

    def _at_work(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.DRAINING, Phase.REGROUPING)

    def _draining(self) -> Draining:
        drain = self._world().drain
        assert drain is not None
        return drain

    def _drain_limit_s(self) -> float:
        """How long the drain may take. A node that leaves limits it by itself."""
        return self.limits.safe_point_s if self._draining().regroups else self.limits.drain_s

    def _newcomers(self) -> Collection[Member]:
        """Candidates that are not in the running world."""
        outsiders, arriving = self._membership.outsiders(self._now, self._world().places), self._regrouping.arriving
        return [member for member in outsiders if member.name not in arriving] if arriving else outsiders

    def _is_current(self, member: Member, generation: int) -> bool:
        return generation == self.generation and self._in_world(member)

    # ---------------------------------------------------------------- the coordinator before

    def _follow_leader(self, now: float, before: PreviousLeader | None) -> None:
        """Begin where the coordinator before this one has ended, if there was one."""
        if before is None:
            return
        charter = before.charter
        if charter is not None:
            self._inherit(now, charter)
            self._job_began_s = now - before.job_s
            self._monitor.take_over(before.training_s)
            self.job_uid = charter.job_uid
        if before.generation:
            self.previous.generation = before.generation
            self._wait_for_fence(before.fenced_at_s)
        if charter is not None and charter.led_from is not None:
            self._why = f"lost {charter.led_from.node.host}, which had the coordinator"
        if charter is not None and charter.outcome is not None:
            self._finish(charter.outcome)

    def _inherit(self, now: float, charter: Charter) -> None:
        """Continue the counts of an earlier coordinator."""
        budget = self.budget
        budget.used, budget.streak = charter.restarts, charter.streak
        budget.identical, budget.last_signature = charter.identical, charter.signature
        self.host_backoff.take_over(charter.hosts, now)

    def _wait_for_fence(self, fenced_at_s: float) -> None:
        """Workers of an earlier coordinator may be alive until then: form nothing before."""
        if fenced_at_s > self.gathering.not_before_s:
            self.gathering.not_before_s, self.gathering.pause = fenced_at_s, FENCE

    # ---------------------------------------------------------------- changes of phase

    def _resume(self, now: float) -> None:
        """Every node of the previous leader's generation has joined with living workers: continue that generation."""
        world = self.world = self.previous.world(now)
        self._incidents.over()
        self.generation = world.generation
        known = max(self.budget.used, self.previous.restart_count)
        self.budget.used = min(known, self.job.max_restarts)
        self._enter(now, Phase.RUNNING)
        for name in world.order:
            if name in self.members:  # else it ended with the coordinator
                self.members[name].first_started_s = now
                self._tell(self.members[name], Resume(world.generation))
        self._monitor.begin(world)
        self._out += self._regrouping.started(now, world)
        self.previous.parts.clear()
        self._note("resumed", generation=world.generation, order=list(world.order))
        for _, spared in sorted(self.previous.missing.items()):
            node = spared.part.node
            self._incidents.lost(node.host, spared.reason, world.ranks_of(node.member))
            self._lost.append(f"{node.host} was lost: {spared.text}")

    def _form(self, now: float) -> None:
        announced, self._announced = self._announced, None
        formation = self._next_formation(self.generation, self.budget.used)
        if announced is not None and announced.places == formation.places:
            formation = announced
        elif announced is not None:  # some nodes prepare the announced one: the number must differ
            formation, announced = self._next_formation(announced.world.generation, self.budget.used), None
        world = self.world = formation.world
        self._incidents.over()
        self.generation = world.generation
        self.job_uid = self.job_uid or world.order[0]  # names an agent's join, which happens once
        self._enter(now, Phase.PREPARING)
        for name, assign in formation.places.items():
            if announced is None:
                self._tell(self.members[name], assign)
        self._note("assigned", generation=self.generation, world_size=world.size, order=list(world.order))

    def _next_formation(self, after: int, restart_count: int) -> Formation:
        """The formation of the present candidates, with a number that is larger than `after`."""
        previous = self.world.order if self.world is not None else ()
        seats = seat([Candidate(m.node, m.arrival) for m in self._candidates()], previous, self.job)
        generation = max(after, self.previous.generation) + 1
        order = tuple(node.member for node in seats)
        world = World(generation=generation, order=order, places=all_places(seats))
        return Formation(world, assigned(world, self.members, restart_count))

    def _announcement(self, world: World, reason: StopReason) -> Formation | None:
        """The generation that follows this stop, where a restart of the same nodes is likely. None: wait for the end of
        the stop, because what is prepared in vain costs a node some work."""
        incident = self._incidents.newest
        failed = reason in (StopReason.WORKER_FAILED, StopReason.HUNG) and not (world.drain or incident.lost_nodes)
        final = any(failure.exit_code in FINAL for failure in incident.failures)
        if not failed or final or self._quit or self.job.exclude_after or not self.budget.allows_restart:
            return None
        formation = self._next_formation(self.generation, self.budget.used + (not incident.charged))
        return formation if formation.world.order == world.order else None

    def _start(self, now: float, world: World) -> None:
        assert world.store_port is not None
        regrouped = self.phase is Phase.REGROUPING
        parting = [self.members[name] for name in world.parting]
        for member in parting:
            world.drop(member.name)
        members = [self.members[name] for name in world.order]
        world.started_s = now
        world.master = self._fixed_master or (master_address(members), world.store_port)
        self._gather_until_s = None
        self._enter(now, Phase.RUNNING)
        self._monitor.begin(world)
        offered = {} if regrouped else offers(world)  # workers that go on have their states
        for member in members:
            self._start_member(now, member, world, offered.get(member.name, ()))
        for member in parting:  # the others do not need them any more
            self._tell(member, Stop(world.generation, StopReason.MEMBER_LEFT))
        self._note("started", generation=world.generation, master="{}:{}".format(*world.master))
        self._out += self._regrouping.started(now, world)
        if regrouped:
            leaving = next((member for member in members if member.leaving), None)
            if leaving is not None:
                self._drain_for(now, leaving)

    def _start_member(self, now: float, member: Member, world: World, states: tuple[HeldStates, ...] = ()) -> None:
        self._membership.set_busy(member, world.generation)
        member.first_started_s = member.first_started_s or now
        interval_s = self.limits.progress_interval_of(len(world.order))
        before, age_s = self._endings.before, self._authority.age_s(now)
        self._tell(member, Start(world.generation, *world.master, interval_s, before, self.job_uid, age_s, states))

    def _admit(self, newcomers: Collection[Member]) -> None:
        """Let these join the running generation without a worker in it, as far as there is room."""
        world = self._world()
        room = self.job.max_nodes - len(world.order) - len(self._regrouping.arriving)
        arriving = sorted(newcomers, key=lambda member: member.arrival)[:room]
        self._regrouping.arriving.update(member.name for member in arriving)
        places = assigned(world, self.members, self.budget.used, arriving)
        for member in arriving:
            self._tell(member, places[member.name])

    def _regroup(self, now: float, plan: Plan) -> None:
        """Form the next generation of workers that are already running."""
        before = self._world()
        self.generation = max(self.generation, self.previous.generation) + 1
        world = self.world = self._regrouping.form(now, self.generation, plan, before)
        self._enter(now, Phase.REGROUPING)
        for name, assign in assigned(world, self.members, self.budget.used).items():
            self._membership.set_busy(self.members[name], world.generation)
            self._tell(self.members[name], Regroup(assign, plan.safe_point, plan.text))
        self._note(
            "regroup_begun",
            generation=world.generation,
            world_size=world.size,
            order=list(world.order),
            safe_point=plan.safe_point,
            text=plan.text,
        )

    def _drain_for(self, now: float, leaving: Member) -> None:
        """Drain because this member leaves. If the whole job is to end, nobody goes on without it."""
        text = f"{leaving.node.host} is leaving ({leaving.leaving})"
        regroups = self._quit is None and (self._world().able_count > 0 or self._regrouping.settling)
        self._drain(now, StopReason.MEMBER_LEFT, text, regroups=regroups)

    def _drain(self, now: float, reason: StopReason, text: str, *, regroups: bool = False, saves: bool = False) -> None:
        """Ask all agents how far their workers are. The safe point to stop at follows from the answers."""
        world = self._world()
        world.drain = Draining(
            reason,
            text,
            awaited={name for name in world.order if name in self.members and not world.finished(name)},
            regroups=regroups,
            saves=saves,
        )
        self._enter(now, Phase.DRAINING)
        self._tell_world(world, Drain(world.generation, text))
        self._note("draining", generation=world.generation, reason=reason.value, text=text)

    def _let_go(self, now: float, *, save_at: int = 0) -> None:
        """End the drain: the workers go on in this generation. `save_at`: the safe point at which they save."""
        world = self._world()
        world.drain = None
        self._enter(now, Phase.RUNNING)
        self._tell_world(world, DrainTo(world.generation, save_at, save=bool(save_at)))
        self._note("drain_to", generation=world.generation, safe_point=save_at, **({"save": True} if save_at else {}))

    def _stop(self, now: float, reason: StopReason, text: str) -> None:
        """Start to end the running generation."""
        world = self._world()
        if self.phase is Phase.STOPPING:
            return
        world.stop_reason, world.stop_text, world.stop_began_s = reason, text, now
        announced = self._announced = self._announcement(world, reason)
        self._enter(now, Phase.STOPPING)
        hung = world.hung.rank if world.hung is not None and reason is StopReason.HUNG else None
        for member in [self.members[name] for name in world.order if name in self.members]:
            place = announced.places[member.name] if announced is not None else None
            self._tell(member, Stop(world.generation, reason, text, place, hung))
        self._note("stopping", generation=world.generation, reason=reason.value, text=text)

    def _exclude(self, excluded: Iterable[Waiting]) -> None:
        """Report the hosts that are excluded for a time."""
        for waiting in excluded:
            for member in self.members.values():
                self._tell(member, waiting)
        self._membership.changed()

    def _enter(self, now: float, phase: Phase) -> None:
        assert (self.phase, phase) in TRANSITIONS, f"no transition {self.phase} -> {phase}"
        if self.phase is Phase.RUNNING:
            self._monitor.rest()
        self.phase = phase
        self._phase_since_s = now
        self._extensions.runs(self.generation if phase in (Phase.RUNNING, Phase.DRAINING) else 0)

    def _gather(self, now: float, reason: str, *, not_before_s: float) -> None:
        self._enter(now, Phase.GATHERING)
        self._regrouping.reset()
        gathering = self.gathering
        gathering.began_s, gathering.not_before_s, gathering.regroup = now, not_before_s, True
        gathering.pause = BACK_OFF
        self._waiting_said = Pauses.begin(now, self.limits.say_interval_s)
        self._why = reason
        self._count_candidates(now)
        self._note("regrouping", reason=reason, not_before_s=round(not_before_s - now, 3))

    def _finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._enter(self._now, Phase.OVER)
        for member in self.members.values():
            self._tell(member, Finish(outcome if member.first_started_s is not None else self._end_of(member.node)))
        self._note("over", kind=outcome.kind.value, exit_code=outcome.exit_code)
        self._out.append(Conclude(outcome))

    # ---------------------------------------------------------------- messages

    def _end_of(self, node: NodeSpec) -> Outcome:
        """How the job ended for a node that took no part in it."""
        assert self.outcome is not None
        return ended_without(self.outcome, self.job.run_id, self._versions.other_line(node))

    def _greet_after_end(self, link: int, join: Join, outcome: Outcome) -> Command:
        """Answer an agent that joins after the end. Another command line means another job: that agent has to retry
        until the endpoint is free."""
        if join.last_generation:
            return Tell(link, Finish(outcome))
        if self._versions.other_line(join.node):
            self._membership.close_link(link)
            return DropLink(link, "the job at this endpoint is over, and is another one")
        return Tell(link, Finish(self._end_of(join.node)))

    def _compare(self, member: Member) -> None:
        """Report software that differs from the first node's to both nodes, once."""
        for difference in self._versions.compare(member.node):
            self._note("nodes_differ", member=member.name, what=difference.what, text=difference.text)
            first = [each for each in self.members.values() if each.node is self._versions.first]
            for each in (*first, member):
                self._tell(each, Notice(difference.text))

    def _standby_text(self) -> str:
        size = len(self._world().order)
        stands_by = size >= self.job.max_nodes or self.job.grow is Grow.NEVER
        fate = "this node waits as a spare" if stands_by else "this node joins the next generation"
        return f"generation {self.generation} runs on {size} of at most {self.job.max_nodes} nodes; {fate}"

    def _abandon(self, members: list[Member]) -> None:
        for member in members:
            self._tell(member, Abandon(member.busy_generation))

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


class JobSeen:
    """The job as its extensions see it: the state of the machine, read only."""

    def __init__(self, machine: CoordinatorActs) -> None:
        self._machine = machine

    @property
    def run_id(self) -> str:
        return self._machine.job.run_id

    @property
    def phase(self) -> str:
        return self._machine.phase.value

    @property
    def generation(self) -> int:
        return self._machine.generation

    @property
    def world_size(self) -> int:
        return self._machine.world.size if self._machine.world is not None else 0

    def members(self) -> list[MemberSeen]:
        return [
            MemberSeen(each.name, each.node.host, each.node.hosts_coordinator)
            for each in self._machine.members.values()
        ]

    def nodes(self) -> list[NodeSeen]:
        world, found, rank_base = self._machine.world, [], 0
        for name in world.order if world is not None else ():
            assert world is not None
            member, local_ranks = self._machine.members.get(name), world.places[name]
            if member is not None and member.busy_generation:
                found.append(NodeSeen(name, member.node.host, rank_base, local_ranks))
            rank_base += len(local_ranks)
        return found

    def view(self, now: float) -> JobView:
        return self._machine.view(now)
