"""The coordinator: one mutator, `handle(now, event) -> commands`; no clock, no socket, no randomness.

                 ┌────────────────────────── back-off over, enough members ──────────────┐
                 ▼                                                                       │
    GATHERING ──► PREPARING ──► RUNNING ──► DRAINING ──► STOPPING ──► GATHERING … (until OVER)
       ▲             │             └── failure, loss ──────▲
       └─ a death ───┘                leave or arrival: through DRAINING if the workers ask for safe points

The shell must deliver: LinkOpened before any message of that link, LinkClosed once unless the machine dropped the link
itself, and a Tick when `next_deadline()` has passed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

from holdfast.coordinator.admission import Admission, Admit, Deny, Versions
from holdfast.coordinator.coordinator_state import (
    Command,
    Conclude,
    Draining,
    DropLink,
    Event,
    Formation,
    Heard,
    LinkClosed,
    LinkOpened,
    Member,
    Pending,
    Phase,
    QuitAsked,
    Tell,
    World,
    is_local,
    master_address,
    names,
)
from holdfast.coordinator.ending import Budget, Endings, Judge, Restart, ended_without
from holdfast.coordinator.formation import (
    Candidate,
    FormNow,
    Gathering,
    NoQuorum,
    WaitUntil,
    assignments,
    decide,
    seat,
)
from holdfast.coordinator.membership import HostBackoff, Liveness, Membership, PreviousLeader
from holdfast.coordinator.monitor import EndGeneration, Monitor, cannot_tell, node_views
from holdfast.protocol.errors import EXIT_REQUEUE, NodesError
from holdfast.protocol.machines import Note, Pauses, Tick
from holdfast.protocol.messages import (
    REVISION,
    Abandon,
    Drain,
    DrainTo,
    Finish,
    FromAgent,
    FromCoordinator,
    Held,
    Join,
    Joined,
    Leave,
    Looked,
    Notice,
    Ping,
    Pong,
    Prepared,
    Progress,
    Quit,
    Refuse,
    Resume,
    Start,
    Stop,
    Stopped,
    StopReason,
    StoreLost,
    Waiting,
    WorkerDone,
    WorkersFailed,
)
from holdfast.protocol.outcome import Failure, Outcome, OutcomeKind
from holdfast.protocol.policy import Grow, JobSpec, Limits, NodeSpec
from holdfast.protocol.rank_progress import Examine, JobView

TRANSITIONS: dict[tuple[Phase, Phase], str] = {
    (Phase.GATHERING, Phase.PREPARING): (
        "the formation rule says so; Assign is sent to every member that does not know its place from Stop"
    ),
    (Phase.GATHERING, Phase.OVER): "too few nodes before the join deadline",
    (
        Phase.GATHERING,
        Phase.RUNNING,
    ): "a previous leader's generation is whole: every node of it came with living workers",
    (Phase.PREPARING, Phase.RUNNING): "every member is prepared and the store has a port; Start is sent",
    (Phase.PREPARING, Phase.GATHERING): "a member of the new world was lost or left; nothing was started yet",
    (Phase.RUNNING, Phase.DRAINING): "a member arrived, or wants to leave and its workers ask for safe points",
    (Phase.RUNNING, Phase.STOPPING): "a worker failed, a member was lost, left or arrived, or all stand still",
    (Phase.RUNNING, Phase.OVER): "every rank is done",
    (Phase.DRAINING, Phase.STOPPING): (
        "all have left at the safe point; or no worker asks for one, one failed, a member was lost, "
        "or it takes too long"
    ),
    (Phase.DRAINING, Phase.OVER): "every rank is done",
    (Phase.STOPPING, Phase.GATHERING): "no worker of the generation is alive; another generation follows",
    (Phase.STOPPING, Phase.OVER): "no worker of the generation is alive; the budget is spent, or please requeue",
}


class CoordinatorMachine:
    """Decides membership, generations, ranks and the end of one job. `TRANSITIONS` lists every change of phase."""

    def __init__(
        self,
        job: JobSpec,
        limits: Limits,
        judge: Judge,
        now: float,
        *,
        fixed_master: tuple[str, int] | None = None,
        examine: Examine = cannot_tell,
    ) -> None:
        """`fixed_master`: the address and port that every generation announces (static rendezvous); None: rank 0's own.
        `judge` makes a verdict of failures, `examine` a finding of stacks."""
        self.job = job
        self.limits = limits
        self._fixed_master = fixed_master
        self.phase = Phase.GATHERING
        self.host_backoff = HostBackoff(limits, job.exclude_after)
        self._membership = Membership(self.host_backoff, limits)
        self._monitor = Monitor(limits, self._membership.members, examine)
        self.world: World | None = None
        self.generation = 0
        self._announced: Formation | None = None
        """The next generation, announced with the stop of the present one; None: there was no announcement."""
        self._previous_leader = PreviousLeader()
        self.outcome: Outcome | None = None
        self.budget = Budget(job.max_restarts, limits)
        self._endings = Endings(job, self.budget, self.host_backoff, judge, self._note)
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
        """A user asked for the end of the job: an agent that joins now is refused, and ends."""
        self._reason = ""
        self._why = ""
        """Why the last generation ended."""
        self._out: list[Command] = []

    # ---------------------------------------------------------------- surface

    def handle(self, now: float, event: Event) -> list[Command]:
        self._now = now
        match event:
            case LinkOpened(link, address, reached_at, local):
                too_many = self._membership.open_link(link, Pending(address, reached_at, local, now))
                self._close_unjoined(too_many, f"too many links from {address} have not joined")
            case LinkClosed(link, reason):
                self._on_link_closed(now, link, reason)
            case Heard(link, message):
                self._on_message(now, link, message)
            case QuitAsked(drain, by):
                self._on_quit(Quit(drain, by))
            case Tick():
                pass
        self._advance(now)
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> float | None:
        """When the next Tick is due; None once the job is over."""
        if self.phase is Phase.OVER:
            return None
        deadlines = [self._liveness.next_look_s(), self._membership.unjoined_due_s(self._admission.claims)]
        if self.phase is Phase.RUNNING:
            deadlines.append(self._monitor.due_s())
        if self.phase is Phase.GATHERING:
            deadlines.append(self._waiting_said.at_s)
            decision = decide(self.job, self.limits, self._gathering, self._now)
            if isinstance(decision, WaitUntil):
                deadlines.append(decision.deadline_s)
            deadlines.append(self._membership.next_change_s(self._now))
        elif self.phase is Phase.PREPARING:
            deadlines.append(self._phase_since_s + self.limits.prepare_s)
        elif self.phase is Phase.STOPPING:
            deadlines.append(self._stop_deadline_s())
        elif self.phase is Phase.DRAINING:
            deadlines.append(self._phase_since_s + self.limits.drain_s)
        elif self._gather_until_s is not None:
            deadlines.append(self._gather_until_s)
        elif self._has_room():
            deadlines.append(self._membership.next_change_s(self._now))
        return min(deadlines)

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
    def knows_previous_leader(self) -> bool:
        """Whether an agent has reported a generation that another coordinator formed."""
        return self._previous_leader.generation > 0

    def view(self, now: float) -> JobView:
        """The state of the job for users. The cost grows with the number of ranks."""
        hang, throughput = self._monitor.hang(now), self._monitor.throughput
        return JobView(
            run_id=self.job.run_id,
            phase=self.phase.value,
            generation=self.generation,
            restarts=self.budget.used,
            restarts_max=self.job.max_restarts,
            world_size=self.world.size if self.world is not None else 0,
            since_s=now - self._phase_since_s,
            job_s=now - self._born_s,
            training_s=self._monitor.training_s,
            why=self.world.stop_text if self.world is not None and self.phase is Phase.STOPPING else self._why,
            nodes=node_views(self.members.values(), self.world, self.phase, throughput, self._membership, now, hang),
            notices=self._monitor.notices(hang),
        )

    def check_invariants(self) -> None:
        """Raises when the state contradicts itself. Cheap enough to run after every event in tests."""
        assert self.budget.used <= self.job.max_restarts, "the restart budget is overdrawn"
        assert (self.outcome is not None) == (self.phase is Phase.OVER)
        self._membership.check_invariants()
        newest = max(self.generation, self._previous_leader.generation)
        assert all(member.busy_generation <= newest for member in self._membership.busy())
        if self.phase not in (Phase.GATHERING, Phase.OVER):
            world = self.world
            assert world is not None
            assert world.generation == self.generation
            assert len(set(world.order)) == len(world.order) <= self.job.max_nodes
        if self.phase is Phase.PREPARING:
            fresh = [m for m in self._membership.busy() if m.name in self._world().nproc]
            assert not fresh, "a world is prepared where workers may live"

    # ---------------------------------------------------------------- links and messages

    def _on_link_closed(self, now: float, link: int, reason: str) -> None:
        self._membership.close_link(link)
        self._admission.withdraw(link)
        member = self._membership.by_link(link)
        if member is not None:
            self._lose(now, member, reason)

    def _close_unjoined(self, links: Iterable[int], reason: str) -> None:
        for link in links:
            self._membership.close_link(link)
            self._admission.withdraw(link)
            self._out.append(DropLink(link, reason))

    def _on_message(self, now: float, link: int, message: FromAgent) -> None:
        member = self._membership.by_link(link)
        if member is None:
            if isinstance(message, Join) and link in self._membership.pending:
                self._on_join(now, link, message)
            return
        member.last_heard_s = now
        match message:
            case Ping(number):
                self._tell(member, Pong(number))
            case Prepared(generation, store_port):
                self._on_prepared(member, generation, store_port)
            case WorkerDone(generation, local_rank, left):
                if self._is_current(member, generation) and self._at_work():
                    self._world().mark_done(member.name, local_rank, left)
                    self._monitor.rank_done(now, member, local_rank)
                    self._forgo_answer(member)
            case Progress(generation):
                if self._is_current(member, generation) and self._at_work():
                    self._follow(now, self._monitor.progress(now, member, message))
            case Looked(generation):
                if self._is_current(member, generation):
                    self._monitor.looked(member, message)
            case WorkersFailed(generation, failures, evidence_follows):
                if failures and self._is_current(member, generation) and self.phase is not Phase.PREPARING:
                    self._on_failures(now, member, failures, evidence_follows=evidence_follows)
            case Held(generation, reached):
                if self.phase is Phase.DRAINING and self._is_current(member, generation):
                    self._draining().heard(member.name, reached)
            case Stopped(generation):
                self._on_stopped(now, member, generation)
            case StoreLost(generation):
                if self._is_current(member, generation):
                    self._member_gone(now, StopReason.STORE_LOST, f"the store host on {member.node.host} died")
            case Leave(reason, drain):
                self._on_leave(now, member, reason, drain=drain)
            case Join():
                self._drop(member, "a member cannot join twice")
                self._lose(now, member, "a member cannot join twice")

    def _on_join(self, now: float, link: int, join: Join) -> None:
        if self.outcome is not None:
            self._out.append(self._greet_after_end(link, join, self.outcome))
            return
        if self._quit is not None:
            self._out.append(Tell(link, self._quit))
            return
        local = self._membership.pending[link].local
        self._welcome(now, self._admission.consider(link, join, self.members.values(), now, local=local))

    def _welcome(self, now: float, decision: Admit | Deny | None) -> None:
        match decision:
            case Admit(link, join):
                member = self._membership.add(link, join.node, now=now, heard_s=decision.heard_s)
                member.revision = join.revision
                self._gathering.last_arrival_s = now
                limits = self.limits
                self._tell(member, Joined(limits.lease_s, limits.fence_s, limits.ping_interval_s, REVISION))
                self._note("joined", member=member.name, address=member.address, nproc=member.node.nproc)
                self._compare(member)
                self._observe_previous_leader(now, member, join)
                wait_s = self.host_backoff.until_s(member.node.host, now) - now
                if wait_s > 0:
                    self._tell(member, Waiting(f"{member.node.host} failed too often: it has to wait {wait_s:.0f} s"))
                elif self.phase is not Phase.GATHERING:
                    self._tell(member, Waiting(self._standby_text()))
            case Deny(link, join, problem):
                self._membership.close_link(link)
                self._note("refused", member=join.node.member, reason=problem)
                self._out.append(Tell(link, Refuse(NodesError.code, problem)))
                self._out.append(DropLink(link, problem))
            case None:
                pass

    def _observe_previous_leader(self, now: float, member: Member, join: Join) -> None:
        """A joining agent may still run a generation of an earlier coordinator; adopt it if all its nodes rejoin."""
        if join.running is not None:
            self._membership.set_busy(member, join.running.generation)
        if join.last_generation > self.newest_generation:
            self._wait_for_fence_previous_leader(min(self._born_s, now - join.unlinked_s), join.last_generation)
            if join.led_by:
                self._why = f"lost {join.led_by}, which had the coordinator"
        if self.world is None and not self.job.fixed_ranks:
            self._abandon(self._previous_leader.observe(member, join))
        else:  # with fixed ranks the workers reached their store through the coordinator that is gone
            self._previous_leader.generation = max(self._previous_leader.generation, join.last_generation)
            if join.running is not None:
                self._abandon([member])

    def _wait_for_fence_previous_leader(self, died_s: float, generation: int) -> None:  # noqa: ARG002
        """Other agents of that generation may still run its workers. They kill them one fence after that coordinator
        died, which was before this one started and before the reporting agent lost its link."""
        gone_s = died_s + self.limits.fence_s + self.limits.kill_s
        self._gathering.not_before_s = max(self._gathering.not_before_s, gone_s)

    def _resume(self, now: float) -> None:
        """Every node of the previous leader's generation has joined with living workers: continue that generation."""
        world = self.world = self._previous_leader.world(now)
        self.generation = world.generation
        self.budget.used = min(self._previous_leader.restart_count, self.job.max_restarts)
        self._enter(now, Phase.RUNNING)
        for name in world.order:
            self.members[name].first_started_s = now
            self._tell(self.members[name], Resume(world.generation))
        self._monitor.begin(world)
        self._previous_leader.parts.clear()
        self._note("resumed", generation=world.generation, order=list(world.order))

    def _on_prepared(self, member: Member, generation: int, store_port: int | None) -> None:
        if self._announced is not None and generation == self._announced.world.generation:
            self._announced.world.on_prepared(member.name, store_port)
        elif self.phase is Phase.PREPARING and self._is_current(member, generation):
            self._world().on_prepared(member.name, store_port)

    def _on_stopped(self, now: float, member: Member, generation: int) -> None:
        if member.busy_generation > generation:
            return
        self._membership.set_busy(member, 0)
        self._abandon(self._previous_leader.lost(member))
        self._forgo_answer(member)
        current = self._at_work() and self._is_current(member, generation)
        if current and not self._world().drain_agreed and not self._world().finished(member.name):
            self._stop(now, StopReason.FENCED, f"{member.node.host} had to stop its workers")

    def _on_failures(
        self, now: float, member: Member, failures: tuple[Failure, ...], *, evidence_follows: bool
    ) -> None:
        world = self._world()
        if world.failed(failures, evidence_follows=evidence_follows):
            self._note("workers_failed", member=member.name, ranks=[f.rank for f in failures])
        text = f"rank {failures[0].rank} failed on {member.node.host}"
        if self.phase is Phase.RUNNING:
            self._follow(now, self._monitor.failed(now, failures, text, evidence_follows=evidence_follows))
            return
        self._stop(now, self._draining().reason if world.drain_agreed else StopReason.WORKER_FAILED, text)

    def _follow(self, now: float, orders: Iterable[Command | EndGeneration]) -> None:
        """Carry out what the monitor returned."""
        for order in orders:
            if isinstance(order, EndGeneration):
                self._stop(now, order.reason, order.text)
            else:
                self._out.append(order)

    def _on_leave(self, now: float, member: Member, reason: str, *, drain: bool) -> None:
        if not member.leaving:
            member.leaving = reason or "asked to"
            self._membership.changed()
            self._note("leaving", member=member.name, reason=reason, drain=drain)
        if not self._in_world(member) or self._world().finished(member.name):
            return
        text = f"{member.node.host} is leaving ({reason})"
        if not drain:
            self._member_gone(now, StopReason.MEMBER_LEFT, text)
        elif self.phase is Phase.RUNNING:
            self._drain(now, StopReason.MEMBER_LEFT, text)

    def _on_quit(self, quit_: Quit) -> None:
        """Every agent ends, as if the scheduler had sent each node a signal. The outcome follows from their reports."""
        self._quit = quit_
        self._note("quit", drain=quit_.drain, by=quit_.by)
        for member in self.members.values():
            self._tell(member, quit_)

    def _lose(self, now: float, member: Member, reason: str) -> None:
        """Remove a member whose link was closed, whose lease expired, or that was dropped."""
        in_world, was_busy = self._in_world(member), member.busy_generation != 0
        self._membership.remove(member)
        self._abandon(self._previous_leader.lost(member))
        if member.leaving and not (self.phase is Phase.DRAINING and in_world and was_busy):
            self._note("left", member=member.name)
            return
        self._note("lost", member=member.name, reason=reason, silent_s=round(now - member.last_heard_s, 3))
        self.host_backoff.lost(member.node.host, lived_s=now - member.began_s)
        if not in_world:
            return
        world = self._world()
        if self._at_work() and world.finished(member.name):
            self._forgo_answer(member)
            return
        world.lost(member.name, member.node.host, reason)
        self._member_gone(now, StopReason.MEMBER_LOST, f"{member.node.host} was lost: {reason}")

    def _member_gone(self, now: float, reason: StopReason, text: str) -> None:
        if self.phase is Phase.PREPARING:
            self._gather(now, text, not_before_s=now)
        elif self._at_work():
            self._stop(now, reason, text)

    # ---------------------------------------------------------------- what follows from the state

    def _advance(self, now: float) -> None:
        """Take every transition that the state allows, until none is left."""
        if self.phase is Phase.OVER:
            return
        if now >= self._liveness.next_look_s():
            for member in self._liveness.silent(list(self.members.values()), now):
                self._drop(member, f"silent for more than {self.limits.lease_s:g} s")
                self._lose(now, member, f"silent for more than {self.limits.lease_s:g} s")
        late = self._membership.late_links(now, self._admission.claims)
        self._close_unjoined(late, f"it did not join within {self.limits.unjoined_s:g} s")
        while (decision := self._admission.settle(self.members.values())) is not None:
            self._welcome(now, decision)
        self._count_candidates(now)
        if self.phase is Phase.RUNNING:
            self._follow(now, self._monitor.advance(now))
        before = None
        while before is not self.phase and not self._is_over():
            before = self.phase
            match self.phase:
                case Phase.GATHERING:
                    self._advance_gathering(now)
                case Phase.PREPARING:
                    self._advance_preparing(now)
                case Phase.RUNNING:
                    self._advance_running(now)
                case Phase.DRAINING:
                    self._advance_draining(now)
                case Phase.STOPPING:
                    self._advance_stopping(now)

    def _is_over(self) -> bool:
        return self.phase is Phase.OVER

    def _advance_gathering(self, now: float) -> None:
        if self.world is None and self._previous_leader.whole:
            self._resume(now)
            return
        if self._membership.anybody_busy:  # still ending a previous leader's generation: the wait for it is bounded
            patience_s = self._stop_patience_s()
            since_s = self._phase_since_s
            self._drop_busy(now, [m for m in self._membership.busy() if now >= max(since_s, m.joined_s) + patience_s])
            self._count_candidates(now)
        decision = decide(self.job, self.limits, self._gathering, now)
        if isinstance(decision, FormNow) and self._membership.anybody_busy:
            hosts = names(self._membership.busy())
            decision = WaitUntil(inf, f"workers of an earlier generation are still alive on {hosts}")
        if decision.reason != self._reason:
            self._reason = decision.reason
            self._note("gathering", reason=decision.reason)
        match decision:
            case FormNow():
                self._form(now)
            case NoQuorum(reason):
                before = f"; the generation before ended: {self._why}" if self._why else ""
                text = f"{reason}; here: {self._who_is_here()}{before}"
                self._finish(self._endings.no_quorum(reason, text, self.generation))
            case WaitUntil():
                if self._waiting_said.due(now):
                    left = f"; giving up in {decision.deadline_s - now:.0f} s" if decision.gives_up else ""
                    text = f"waiting: {decision.reason} ({self._who_is_here()}){left}"
                    for member in self.members.values():
                        self._tell(member, Waiting(text))

    def _form(self, now: float) -> None:
        announced, self._announced = self._announced, None
        formation = self._next_formation(self.generation, self.budget.used)
        if announced is not None and announced.places == formation.places:
            formation = announced
        elif announced is not None:  # some nodes prepare the announced one: the number must differ
            formation, announced = self._next_formation(announced.world.generation, self.budget.used), None
        world = self.world = formation.world
        self.generation = world.generation
        self._enter(now, Phase.PREPARING)
        for name, assign in formation.places.items():
            if announced is None or not self.members[name].revision:
                self._tell(self.members[name], assign)
        self._note("assigned", generation=self.generation, world_size=world.size, order=list(world.order))

    def _next_formation(self, after: int, restart_count: int) -> Formation:
        """The formation of the present candidates, with a number that is larger than `after`."""
        previous = self.world.order if self.world is not None else ()
        seats = seat([Candidate(m.node, m.arrival) for m in self._candidates()], previous, self.job)
        generation = max(after, self._previous_leader.generation) + 1
        local = all(is_local(self.members[node.member].address) for node in seats)
        places = assignments(seats, generation=generation, restart_count=restart_count, local_world=local)
        nproc = {node.member: node.nproc for node in seats}
        return Formation(World(generation=generation, order=tuple(places), nproc=nproc), places)

    def _announcement(self, world: World, reason: StopReason) -> Formation | None:
        """The generation that follows this stop, where a restart of the same nodes is likely. None: wait for the end of
        the stop, because what is prepared in vain costs a node some work."""
        failed = reason in (StopReason.WORKER_FAILED, StopReason.HUNG) and not (world.drain or world.lost_nodes)
        requeue = any(failure.exit_code == EXIT_REQUEUE for failure in world.failures)
        if not failed or requeue or self._quit or self.job.exclude_after or not self.budget.allows_restart:
            return None
        formation = self._next_formation(self.generation, self.budget.used + 1)
        return formation if formation.world.order == world.order else None

    def _advance_preparing(self, now: float) -> None:
        world = self._world()
        if world.store_port is not None and len(world.prepared) == len(world.order):
            world.started_s = now
            address, port = self._fixed_master or (
                master_address([self.members[n] for n in world.order]),
                world.store_port,
            )
            self._gather_until_s = None
            self._enter(now, Phase.RUNNING)
            self._monitor.begin(world)
            for name in world.order:
                member = self.members[name]
                self._membership.set_busy(member, world.generation)
                member.first_started_s = member.first_started_s or now
                self._tell(member, Start(world.generation, address, port))
            self._note("started", generation=world.generation, master=f"{address}:{port}")
        elif now >= self._phase_since_s + self.limits.prepare_s:
            for name in [name for name in world.order if name not in world.prepared]:
                if self.phase is Phase.PREPARING or name in self.members:
                    member = self.members[name]
                    text = f"not prepared within {self.limits.prepare_s:g} s"
                    self._drop(member, text)
                    self._lose(now, member, text)

    def _advance_running(self, now: float) -> None:
        world = self._world()
        if world.done_count == world.size:
            self._finish(Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0))
            return
        if not self._has_room() or not self._newcomers():
            self._gather_until_s = None
        elif self._gather_until_s is None:
            self._gather_until_s = now + self.limits.gather_s
        elif now >= self._gather_until_s:
            text = f"regrouping to take in {names(self._newcomers())}"
            if self.job.grow is Grow.DRAIN:
                self._drain(now, StopReason.MEMBER_JOINED, text)
            else:
                self._stop(now, StopReason.MEMBER_JOINED, text)

    def _drain(self, now: float, reason: StopReason, text: str) -> None:
        """Ask all agents how far their workers are. The safe point to stop at follows from the answers."""
        world = self._world()
        world.drain = Draining(
            reason, text, awaited={name for name in world.order if name in self.members and not world.finished(name)}
        )
        self._enter(now, Phase.DRAINING)
        self._tell_world(world, Drain(world.generation, text))
        self._note("draining", generation=world.generation, reason=reason.value, text=text)

    def _forgo_answer(self, member: Member) -> None:
        """Stop waiting for the drain answer of a member whose workers are gone."""
        world = self.world
        if world is None or world.drain is None or member.name not in world.nproc:
            return
        if member.busy_generation == 0 or world.finished(member.name):
            world.drain.heard(member.name, 0)

    def _advance_draining(self, now: float) -> None:
        world = self._world()
        drain = self._draining()
        if world.done_count == world.size:
            self._finish(Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0))
        elif now >= self._phase_since_s + self.limits.drain_s:
            self._stop(now, drain.reason, f"{drain.text}; the workers did not stop within {self.limits.drain_s:g} s")
        elif drain.safe_point is not None:
            if not any(self._in_world(m) and not world.finished(m.name) for m in self._membership.busy()):
                self._stop(now, drain.reason, drain.text)
        elif not drain.awaited and drain.newest == 0:
            self._stop(now, drain.reason, drain.text)
        elif not drain.awaited:
            # A worker that has reached the newest safe point may have passed it already.
            drain.safe_point = drain.newest + 1
            self._tell_world(world, DrainTo(world.generation, drain.safe_point))
            self._note("drain_to", generation=world.generation, safe_point=drain.safe_point)

    def _stop(self, now: float, reason: StopReason, text: str) -> None:
        """Start to end the running generation."""
        world = self._world()
        if self.phase is Phase.STOPPING:
            return
        world.stop_reason, world.stop_text, world.stop_began_s = reason, text, now
        announced = self._announced = self._announcement(world, reason)
        self._enter(now, Phase.STOPPING)
        for member in [self.members[name] for name in world.order if name in self.members]:
            place = announced.places[member.name] if announced is not None and member.revision else None
            self._tell(member, Stop(world.generation, reason, text, place))
        self._note("stopping", generation=world.generation, reason=reason.value, text=text)

    def _stop_deadline_s(self) -> float:
        return self._phase_since_s + self._stop_patience_s()

    def _drop_busy(self, now: float, late: list[Member]) -> None:
        for member in late:
            self._drop(member, "did not stop its workers in time")
            self._lose(now, member, "did not stop its workers in time")

    def _advance_stopping(self, now: float) -> None:
        if now >= self._stop_deadline_s():
            self._drop_busy(now, list(self._membership.busy()))
        if self._membership.anybody_busy:
            return
        world = self._world()
        match self._endings.stopped(now, world):
            case Restart(backoff_s, notice, excluded):
                if notice is not None:
                    self._tell_world(world, notice)
                for waiting in excluded:
                    for member in self.members.values():
                        self._tell(member, waiting)
                self._membership.changed()  # hosts may have to wait
                self._gather(now, world.stop_text, not_before_s=now + backoff_s)
            case Outcome() as outcome:
                self._finish(outcome)

    # ---------------------------------------------------------------- who and what

    def _candidates(self) -> Collection[Member]:
        return self._membership.candidates(self._now)

    def _count_candidates(self, now: float) -> None:
        self._gathering.count(len(self._candidates()), self.job.min_nodes, now)

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
            and member.name in self.world.nproc
        )

    def _has_room(self) -> bool:
        """Whether the running world would accept one more node."""
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
        """Candidates that are not in the running world."""
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

    # ---------------------------------------------------------------- notices

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
        fate = "this one stands by as a spare" if stands_by else "this one will be taken in"
        return f"generation {self.generation} is at work on {size} of at most {self.job.max_nodes} nodes; {fate}"

    def _abandon(self, members: list[Member]) -> None:
        for member in members:
            self._tell(member, Abandon(member.busy_generation))

    # ---------------------------------------------------------------- phases and the end

    def _finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._enter(self._now, Phase.OVER)
        for member in self.members.values():
            self._tell(member, Finish(outcome if member.first_started_s is not None else self._end_of(member.node)))
        self._note("over", kind=outcome.kind.value, exit_code=outcome.exit_code)
        self._out.append(Conclude(outcome))

    def _greet_after_end(self, link: int, join: Join, outcome: Outcome) -> Command:
        """Answer an agent that joins after the end. Another command line means another job: that agent has to retry
        until the endpoint is free."""
        if join.last_generation:
            return Tell(link, Finish(outcome))
        if self._versions.other_line(join.node):
            self._membership.close_link(link)
            return DropLink(link, "the job at this endpoint is over, and is another one")
        return Tell(link, Finish(self._end_of(join.node)))

    def _end_of(self, node: NodeSpec) -> Outcome:
        """How the job ended for a node that took no part in it."""
        assert self.outcome is not None
        return ended_without(self.outcome, self.job.run_id, self._versions.other_line(node))

    def _enter(self, now: float, phase: Phase) -> None:
        assert (self.phase, phase) in TRANSITIONS, f"no transition {self.phase} -> {phase}"
        if self.phase is Phase.RUNNING:
            self._monitor.rest()
        self.phase = phase
        self._phase_since_s = now

    def _gather(self, now: float, reason: str, *, not_before_s: float) -> None:
        self._enter(now, Phase.GATHERING)
        gathering = self._gathering
        gathering.began_s, gathering.not_before_s, gathering.regroup = now, not_before_s, True
        self._waiting_said = Pauses.begin(now, self.limits.say_interval_s)
        self._why = reason
        self._count_candidates(now)
        self._note("regrouping", reason=reason, not_before_s=round(not_before_s - now, 3))
