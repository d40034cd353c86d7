"""The coordinator: one mutator, `handle(now, event) -> commands`; no clock, no socket, no randomness.

                 ┌────────────────────────── back-off over, enough members ──────────────┐
                 ▼                                                                       │
    GATHERING ──► PREPARING ──► RUNNING ──► DRAINING ──► STOPPING ──► GATHERING … (until OVER)
       ▲             │           ▲ │ └── failure, loss ─────▲
       └─ a death ───┘           │ ▼    leave or arrival: through DRAINING if the workers ask for safe points
                               REGROUPING
                          a loss that the other workers survive; replacements, through DRAINING

The shell must deliver: LinkOpened before any message of that link, LinkClosed once unless the machine dropped the link
itself, and a Tick when `next_deadline()` has passed.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from holdfast.coordinator.admission import Admit, Deny
from holdfast.coordinator.authority import Handled, Inherited, NodeEnded, Spares
from holdfast.coordinator.coordinator_acts import CoordinatorActs
from holdfast.coordinator.coordinator_state import (
    Command,
    Draining,
    DropLink,
    Event,
    Heard,
    LinkClosed,
    LinkOpened,
    Member,
    PendingLink,
    Phase,
    StepDown,
    Tell,
    World,
    names,
)
from holdfast.coordinator.ending import Restart
from holdfast.coordinator.formation import (
    FormNow,
    NoQuorum,
    WaitUntil,
    decide,
)
from holdfast.coordinator.incident import how
from holdfast.coordinator.regrouping import Plan
from holdfast.protocol.errors import NodesError, ProtocolError
from holdfast.protocol.extension import (
    Announce,
    EndGeneration,
    EndJob,
    Exclude,
    MemberLost,
    Readmit,
    SafePointAgreed,
    SafePointRefused,
    SaveAtSafePoint,
    SendAway,
    ToCore,
)
from holdfast.protocol.messages import (
    Able,
    Answer,
    Ask,
    CannotRegroup,
    DrainTo,
    Extended,
    FromAgent,
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
    ReplacementFailed,
    ReplacementReady,
    Stopped,
    StopReason,
    StoreLost,
    Waiting,
    WorkerDone,
    WorkersFailed,
)
from holdfast.protocol.outcome import Outcome, OutcomeKind
from holdfast.protocol.policy import Grow
from holdfast.protocol.train_contract import Survive
from holdfast.text import spans

NO_SAVES = (
    "not every rank asks at a safe point whether to save: "
    "`snaps.step()` of ht.Snapshots does, and holdfast.worker.should_save()"
)

EXTENSION_ROUNDS_MAX = 8
"""At one event. What extensions order to one another's orders is carried out later, one event at a time."""
FREQUENT = frozenset({Ping, Progress, Prepared, Stopped, Extended})


def is_frequent(event: Event) -> bool:
    """A large job has thousands of these per second, and nearly always no transition follows."""
    return type(event.message) in FREQUENT if isinstance(event, Heard) else isinstance(event, LinkOpened)


class Coordinator(CoordinatorActs):
    """Decides membership, generations, ranks and the end of one job."""

    # ---------------------------------------------------------------- surface

    def handle(self, now: float, event: Event) -> list[Command]:
        """Decide what follows, if this coordinator may decide; the authority releases the orders."""
        authority = self._authority
        if self.stepped_down:
            return []
        if not authority.decides(now):
            order = authority.resign()
            return [] if order is None else self._step_down(order)
        if isinstance(event, Heard) and isinstance(event.message, Ping):
            pong = self.pong(now, event.link, event.message)
            if pong is not None:
                return [Tell(event.link, pong)]
        self._now = now
        if authority.is_quiet(now) and is_frequent(event):
            commands = self._decide(now, event)
            if self._due_s > -inf:  # nothing has changed, and nothing is due
                return commands
            return authority.release(now, commands)
        match authority.hears(now, event):
            case StepDown() as order:
                return self._step_down(order)
            case Handled(answers):
                return list(answers)
            case Inherited(charter, term):
                number, generation = charter.position.number, charter.generation
                self._note("recalled", number=number, term=term, generation=generation)
                self._inherit(now, charter)
                self._abandon(self.previous.heard_of(generation))
            case NodeEnded():
                self._abandon(self.previous.end())
            case Spares(parts):
                self.previous.spare(parts)
            case None:
                pass
        return authority.release(now, self._decide(now, event))

    def _step_down(self, order: StepDown) -> list[Command]:
        self.stepped_down = True
        self._note("steps_down", reason=order.reason, term=self._authority.term)
        out, self._out = self._out, []
        return [*out, order]

    def pong(self, now: float, link: int, ping: Ping) -> Pong | None:
        """The answer to a member's ping if nothing else follows from it, as nearly always: a shell may ask for it
        instead of feeding the event. None: the ping must be handled."""
        quiet = self._is_quiet(now) and self._authority.is_quiet(now) and not self.stepped_down
        member = self._membership.by_link(link) if quiet else None
        if member is None:
            return None
        self._now = member.last_heard_s = now
        return Pong(ping.number, self._authority.age_s(now))

    def _is_quiet(self, now: float) -> bool:
        """Whether nothing is due, and no claim waits for a sign of life."""
        return now < self._due_s and not self._admission.claims

    def _decide(self, now: float, event: Event) -> list[Command]:
        before, quiet = self.phase, self._is_quiet(now)
        match event:
            case LinkOpened(link, address, reached_at, local):
                too_many = self._membership.open_link(link, PendingLink(address, reached_at, local, now))
                self._close_unjoined(too_many, f"too many links from {address} have not joined")
            case LinkClosed(link, reason):
                self._on_link_closed(now, link, reason)
            case Heard(link, message):
                self._on_message(now, link, message)
            case _:  # a Tick, or an event of the authority
                pass
        frequent = quiet and self.phase is before and is_frequent(event)
        if not (frequent and self._nothing_follows(now, event)):
            self._due_s = -inf
            self._advance(now)
            self._advance_extensions(now)
        out, self._out = self._out, []
        return out

    def _nothing_follows(self, now: float, event: Event) -> bool:
        """Whether no transition can follow from this frequent event, which came while all was quiet and has left the
        phase as it was."""
        if isinstance(event, Heard) and isinstance(event.message, Ping | Progress):
            if self.phase is Phase.RUNNING:
                self._due_s = min(self._due_s, self._monitor.due_s())
            return True
        if isinstance(event, Heard) and isinstance(event.message, Extended):
            due_s = self._extensions.due_s()
            self._due_s = min(self._due_s, due_s)
            return due_s > now
        if not self._membership.knows_candidates(now):
            return False
        if isinstance(event, LinkOpened):
            self._due_s = min(self._due_s, now + self.limits.unjoined_s)
            return not (event.local or self._out) and self._waits_as_before(now)
        match self.phase:
            case Phase.PREPARING:
                return not self._world().all_prepared
            case Phase.STOPPING:
                return self._membership.anybody_busy
            case _:
                return False

    def _waits_as_before(self, now: float) -> bool:
        """Whether it waits for members, for the same reason as at the last event, and not for a time or a stop."""
        gathering = self.gathering
        if self.phase is not Phase.GATHERING or self._membership.anybody_busy or now < gathering.not_before_s:
            return False
        return decide(self.job, self.limits, gathering, now).reason == self._reason

    def next_deadline(self) -> float | None:
        """When the next Tick is due; None: never, the job is over or goes on elsewhere."""
        if self.stepped_down:
            return None
        due_s = self._authority.due_s(self._now)
        if self.phase is not Phase.OVER:
            if self._due_s == -inf:
                self._due_s = self._find_deadline()
            due_s = min(due_s, self._due_s)
        return due_s if due_s < inf else None

    def _find_deadline(self) -> float:
        look_s = self._liveness.next_look_s(self._short_lease_s())
        deadlines = [look_s, self._membership.unjoined_due_s(self._admission.claims)]
        deadlines.append(max(self._now, self._extensions.due_s()))
        if self.phase is Phase.RUNNING:
            deadlines.append(self._monitor.due_s())
            deadlines.append(self._regrouping.next_change_s(self._now, self._world()))
        if self.phase is Phase.GATHERING:
            deadlines.append(self._waiting_said.at_s)
            decision = decide(self.job, self.limits, self.gathering, self._now)
            if isinstance(decision, WaitUntil):
                deadlines.append(decision.deadline_s)
            deadlines.append(self._membership.next_change_s(self._now))
        elif self.phase is Phase.PREPARING:
            deadlines.append(self._phase_since_s + self.limits.prepare_s)
        elif self.phase is Phase.REGROUPING:
            deadlines.append(self._regrouping.due_at_s(self._now, self._world(), self._phase_since_s))
        elif self.phase is Phase.STOPPING:
            deadlines.append(self._stop_deadline_s())
        elif self.phase is Phase.DRAINING:
            deadlines.append(self._phase_since_s + self._drain_limit_s())
        elif self._gather_until_s is not None:
            deadlines.append(self._gather_until_s)
        elif self._has_room():
            deadlines.append(self._membership.next_change_s(self._now))
        return min(deadlines)

    def check_invariants(self) -> None:
        """Raises when the state contradicts itself. Cheap enough to run after every event in tests."""
        self._authority.check_invariants()
        assert self.budget.used <= self.job.max_restarts, "the restart budget is overdrawn"
        assert (self.outcome is not None) == (self.phase is Phase.OVER)
        self._membership.check_invariants()
        self._incidents.newest.check_invariants()
        newest = max(self.generation, self.previous.generation)
        assert all(member.busy_generation <= newest for member in self._membership.busy())
        if self.phase not in (Phase.GATHERING, Phase.OVER):
            world = self.world
            assert world is not None
            assert world.generation == self.generation
            assert len(set(world.order)) == len(world.order) <= self.job.max_nodes
        if self.phase is Phase.REGROUPING:
            unfinished = [name for name in self._world().order if not self._world().finished(name)]
            here = [self.members[name] for name in unfinished if name in self.members]
            assert all(member.busy_generation == self.generation for member in here), "a member was not regrouped"
        if self.phase is Phase.PREPARING:
            fresh = [m for m in self._membership.busy() if m.name in self._world().places]
            assert not fresh, "a world is prepared where workers may live"

    # ---------------------------------------------------------------- links and messages

    def _on_link_closed(self, now: float, link: int, reason: str) -> None:
        self._membership.close_link(link)
        self._admission.withdraw(link)
        self._extensions.link_closed(link)
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
            if link in self._membership.pending:
                self._on_stranger(now, link, message)
            return
        member.last_heard_s = now
        if isinstance(message, Progress) and message.ping:
            self._tell(member, Pong(message.ping, self._authority.age_s(now)))
        match message:
            case Ping(number):
                self._tell(member, Pong(number, self._authority.age_s(now)))
            case Prepared():
                self._on_prepared(now, member, message)
            case Held(generation, reached, saves):
                if self.phase is Phase.DRAINING and self._is_current(member, generation):
                    self._draining().heard(member.name, reached, saves=saves)
            case Stopped(generation):
                self._on_stopped(now, member, generation)
            case StoreLost(generation):
                if self._is_current(member, generation):
                    self._on_store_lost(now, f"the store host on {member.node.host} died")
            case Leave(reason, drain):
                self._on_leave(now, member, reason, drain=drain)
            case Ask():
                self._extensions.asked(now, link, message)
            case Extended():
                self._on_extended(now, member, message)
            case Join():
                self._drop(member, "a member cannot join twice")
                self._lose(now, member, "a member cannot join twice")
            case _ if self._in_world(member):
                self._on_workers(now, member, message)

    def _on_stranger(self, now: float, link: int, message: FromAgent) -> None:
        """An agent that has not joined may join. Only a member may read the job's state, or change it."""
        match message:
            case Join():
                self._on_join(now, link, message)
            case Ask(number):
                self._out.append(Tell(link, Answer(number)))

    def _on_workers(self, now: float, member: Member, message: FromAgent) -> None:
        """A node of the world reports about its workers."""
        match message:
            case WorkerDone(generation, local_rank, left):
                crossed = self.phase is Phase.REGROUPING and generation in self._regrouping.past
                if (crossed or generation == self.generation) and self._at_work():
                    self._world().mark_done(member.name, local_rank, left)
                    self._monitor.rank_done(now, member, local_rank)
                    self._forgo_answer(member)
            case Progress(generation):
                if generation == self.generation and self.phase in (Phase.RUNNING, Phase.DRAINING):
                    self._world().stepped |= any(each.steps for each in message.ranks)
                    self._follow(now, self._monitor.progress(now, member, message))
            case Looked(generation):
                if generation == self.generation:
                    self._monitor.looked(member, message)
            case WorkersFailed(generation, failures):
                known = generation == self.generation or generation in self._regrouping.past
                if failures and known and self.phase is not Phase.PREPARING:
                    self._on_failures(now, member, message)
            case Able() | ReplacementReady() | ReplacementFailed() | CannotRegroup():
                if self._at_work():
                    self._follow(now, self._regrouping.heard(now, self._world(), member, message))

    def _on_join(self, now: float, link: int, join: Join) -> None:
        if self.outcome is not None:
            self._authority.came_too_late(join.node.agent, link)
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
                member.port = join.port
                self.gathering.last_arrival_s = now
                joined = self._joined(now)
                member.suspend_s = joined.suspend_s if join.suspends else 0.0
                self._tell(member, joined)
                self._note("joined", member=member.name, address=member.address, nproc=member.node.nproc)
                self._compare(member)
                self._authority.joined(member, join)
                self._observe_previous(now, member, join)
                wait_s = self.host_backoff.until_s(member.node.host, now) - now
                if wait_s > 0:
                    why = "is excluded" if self.host_backoff.excludes(member.node.host, now) else "failed too often"
                    self._tell(member, Waiting(f"{member.node.host} {why}: it has to wait {wait_s:.0f} s"))
                elif self.phase is not Phase.GATHERING:
                    self._tell(member, Waiting(self._standby_text()))
            case Deny(link, join, problem):
                self._membership.close_link(link)
                self._note("refused", member=join.node.member, reason=problem)
                self._out.append(Tell(link, Refuse(NodesError.code, problem)))
                self._out.append(DropLink(link, problem))
            case None:
                pass

    def _joined(self, now: float) -> Joined:
        limits, agents = self.limits, max(len(self.members), self.job.min_nodes)
        return Joined(
            limits.lease_s,
            limits.fence_s,
            limits.ping_interval_of(agents),
            term=self._authority.term,
            age_s=self._authority.age_s(now),
            suspend_s=limits.suspend_of(self.job.max_nodes) if self.job.survive is not Survive.OFF else 0.0,
        )

    def _observe_previous(self, now: float, member: Member, join: Join) -> None:
        """A joining agent may still run a generation of an earlier coordinator; adopt it if all its nodes rejoin."""
        self.previous.came(member.node.agent)
        if join.running is not None:
            self._membership.set_busy(member, join.running.generation)
        if join.last_generation > self.newest_generation:
            self._wait_for_fence(self._authority.reported(now, join))
            if join.led_by:
                self._why = f"lost {join.led_by}, which had the coordinator"
        if self.world is None and not self.job.fixed_ranks:
            self._abandon(self.previous.observe(member, join))
        else:  # with fixed ranks the workers reached their store through the coordinator that is gone
            self.previous.generation = max(self.previous.generation, join.last_generation)
            if join.running is not None:
                self._abandon([member])

    def _on_prepared(self, now: float, member: Member, message: Prepared) -> None:
        generation = message.generation
        if self._announced is not None and generation == self._announced.world.generation:
            self._announced.world.on_prepared(member.name, message.store_port, message.states)
        elif generation == self.generation and self.phase in (Phase.PREPARING, Phase.REGROUPING):
            self._world().on_prepared(member.name, message.store_port, message.states)
        elif generation == self.generation and self._at_work() and member.name in self._regrouping.arriving:
            self._regrouping.arrived(self._world(), member)
            self._start_member(now, member, self._world())

    def _on_stopped(self, now: float, member: Member, generation: int) -> None:
        if member.busy_generation > generation:
            return
        self._membership.set_busy(member, 0)
        self._abandon(self.previous.lost(member))
        self._forgo_answer(member)
        current = self._at_work() and self._is_current(member, generation)
        if current and member.name in self._world().parting:
            self._parted(now, member, f"{member.node.host} has left")
            return
        if current and not self._world().drain_agreed and not self._world().finished(member.name):
            self._stop(now, StopReason.FENCED, f"{member.node.host} had to stop its workers")
        self._forget(member)

    def _needs(self, member: Member) -> bool:
        """Whether the others cannot leave their generation without the workers of this member, which leaves."""
        return not self._regrouping.cut and member.name not in self._world().prepared

    def _parted(self, now: float, member: Member, text: str) -> None:
        """A node that leaves has no worker any more. If the others still need them for their last step, they cannot do
        it: they go on from the one before."""
        needed = self._needs(member) and bool(self._world().parting[member.name])
        self._forget(member)
        if needed:
            self._gone_early(now, member, text)

    def _forget(self, member: Member) -> None:
        """This node is gone or has no processes any more. If it had no rank, it is not in the generation any more."""
        self._regrouping.forget(self._now, member.name)
        if self._at_work() and self._in_world(member) and not self._world().places[member.name]:
            self._world().drop(member.name)
            self._membership.changed()

    def _on_failures(self, now: float, member: Member, message: WorkersFailed) -> None:
        world, failures = self._world(), message.failures
        past = self._regrouping.past.get(message.generation)
        if past is not None and not message.evidence_follows and past.incident.awaits(failures):
            for failure in failures:
                past.incident.read(failure)
            if self._at_work():
                self._follow(now, self._regrouping.evidence(past.incident, world))
            return
        new = self._incidents.failed(failures, evidence_follows=message.evidence_follows)
        text = f"rank {failures[0].rank} failed on {member.node.host}"
        if new:
            self._note("workers_failed", member=member.name, ranks=[f.rank for f in failures])
            world.lose(member.name, [failure.local_rank for failure in failures])
            if member.name in world.parting and not self._needs(member):
                return
            ranks = spans(failure.rank for failure in failures)
            refused = self._survive(now, f"rank {ranks} on {member.node.host} was lost ({how(failures[0])})")
            if refused is None:
                return
            text += refused
        if self.phase is Phase.RUNNING:
            orders = self._monitor.failed(now, failures, text, evidence_follows=message.evidence_follows)
            self._follow(now, orders)
            return
        self._stop(now, self._draining().reason if world.drain_agreed else StopReason.WORKER_FAILED, text)

    def _on_store_lost(self, now: float, text: str) -> None:
        """Workers that can go on after a loss can go on with another store."""
        refused = self._survive(now, text) if self._at_work() else ""
        if refused is not None:
            self._member_gone(now, StopReason.STORE_LOST, text + refused)

    def _survive(self, now: float, what: str) -> str | None:
        """Let the other workers go on without the ranks that were lost. If they cannot: the reason, for the text of the
        stop; empty if nobody expects it."""
        plan = self._regrouping.without(now, self._world(), self.phase, what)
        if isinstance(plan, Plan):
            self._regroup(now, plan)
            return None
        if plan:
            self._note("regroup_refused", generation=self.generation, reason=plan)
        return plan and f"; the others cannot go on: {plan}"

    def _follow(self, now: float, orders: Iterable[Command | EndGeneration | Plan]) -> None:
        """Carry out what a part returned."""
        for order in orders:
            if isinstance(order, EndGeneration):
                self._stop(now, order.reason, order.text)
            elif isinstance(order, Plan):
                self._regroup(now, order)
            else:
                self._out.append(order)

    def _on_leave(self, now: float, member: Member, reason: str, *, drain: bool) -> None:
        self._authority.leaves()
        if not member.leaving:
            member.leaving = reason or "asked to"
            self._membership.changed()
            self._note("leaving", member=member.name, reason=reason, drain=drain)
        if not self._in_world(member) or self._world().finished(member.name):
            self._forget(member)
            return
        text = f"{member.node.host} is leaving ({reason})"
        if self.phase is Phase.REGROUPING and self._regrouping.waits(self._world()):
            self._member_gone(now, StopReason.MEMBER_LEFT, text)
        elif not drain:
            self._gone_early(now, member, text)
        elif self.phase is Phase.RUNNING:
            self._drain_for(now, member)

    def _gone_early(self, now: float, member: Member, text: str) -> None:
        """The workers of a node that leaves end now, and not where all can do without them. A coordinator that is there
        ends before the others could have gone on."""
        if not self._at_work() or self._quit is not None or member.node.hosts_coordinator:
            self._member_gone(now, StopReason.MEMBER_LEFT, text)
        elif member.name not in self._world().parting or self._needs(member):
            refused = self._survive(now, text)
            if refused is not None:
                self._member_gone(now, StopReason.MEMBER_LEFT, text + refused)

    # ---------------------------------------------------------------- extensions

    def _on_extended(self, now: float, member: Member, message: Extended) -> None:
        try:
            self._extensions.heard(now, member, message)
        except ProtocolError as error:
            self._drop(member, str(error))
            self._lose(now, member, str(error))

    def _advance_extensions(self, now: float) -> None:
        """Let the extensions follow what has happened, and carry out what they order."""
        for _ in range(EXTENSION_ROUNDS_MAX):
            self._extensions.advance(now)
            orders = self._extensions.taken()
            for order in orders:
                if isinstance(order, ToCore):
                    self._on_order(now, order)
                else:
                    self._out.append(order)
            if not orders:
                return
            self._advance(now)  # what they have ordered may allow a transition

    def _on_order(self, now: float, order: ToCore) -> None:
        match order:
            case Announce(text):
                if self.world is not None:
                    self._tell_world(self.world, Notice(text))
            case EndGeneration(reason, text):
                if self._at_work():
                    self._stop(now, reason, text)
            case SaveAtSafePoint(by):
                if self.phase is Phase.RUNNING:
                    self._drain(now, StopReason.MEMBER_LEFT, by, saves=True)
                else:
                    text = f"no generation runs: the job is {self.phase.value}"
                    self._extensions.save_ends(SafePointRefused(text))
            case EndJob(drain, by):
                self._on_quit(Quit(drain, by))
            case SendAway(host, by):
                for member in self.members.values():
                    if member.node.host == host:
                        self._tell(member, Quit(drain=True, by=by))
            case Exclude(host, for_s, text):
                self.host_backoff.exclude(host, now + for_s)
                self._exclude([Waiting(text)])
            case Readmit(host):
                self.host_backoff.readmit(host)
                self._membership.changed()

    def _on_quit(self, quit_: Quit) -> None:
        """Every agent ends, as if the scheduler had sent each node a signal. The outcome follows from their reports."""
        self._quit = quit_
        self._note("quit", drain=quit_.drain, by=quit_.by)
        for member in self.members.values():
            self._tell(member, quit_)

    def _advance_saving(self, now: float, world: World, drain: Draining) -> None:
        leaving = next((m for m in self.members.values() if m.leaving and self._in_world(m)), None)
        if leaving is not None:
            self._let_go(now)
            text = f"{leaving.node.host} is leaving: the workers save for that, if they can"
            self._extensions.save_ends(SafePointRefused(text))
            self._drain_for(now, leaving)
        elif drain.awaited and now < self._phase_since_s + self.limits.drain_s:
            pass
        elif drain.newest and drain.all_save and not drain.awaited:
            self._let_go(now, save_at=drain.newest + 1)
            self._extensions.save_ends(SafePointAgreed(drain.newest + 1))
            self._tell_world(world, Notice(f"all ranks save at their next safe point ({drain.text})"))
        else:
            self._let_go(now)
            self._extensions.save_ends(SafePointRefused(NO_SAVES))

    def _lose(self, now: float, member: Member, reason: str) -> None:
        """Remove a member whose link was closed, whose lease expired, or that was dropped."""
        self._authority.lost(now, member)
        in_world, was_busy = self._in_world(member), member.busy_generation != 0
        self._membership.remove(member)
        self._extensions.happens(MemberLost(member.name))
        self._abandon(self.previous.lost(member))
        if member.leaving and not (self.phase in (Phase.DRAINING, Phase.REGROUPING) and in_world and was_busy):
            self._note("left", member=member.name)
            return
        self._note("lost", member=member.name, reason=reason, silent_s=round(now - member.last_heard_s, 3))
        self.host_backoff.lost(member.node.host, lived_s=now - member.began_s)
        if not in_world or (self._at_work() and self._world().finished(member.name)):
            self._forgo_answer(member)
            self._forget(member)
            return
        world, text = self._world(), f"{member.node.host} was lost: {reason}"
        if member.name in world.parting:
            self._parted(now, member, text)
            return
        self._incidents.lost(member.node.host, reason, world.ranks_of(member.name))
        self._member_gone(now, StopReason.MEMBER_LOST, text)

    def _member_gone(self, now: float, reason: StopReason, text: str) -> None:
        if self.phase is Phase.PREPARING:
            self._gather(now, text, not_before_s=now)
        elif self._at_work() and reason is StopReason.MEMBER_LOST:
            self._lost.append(text)
        elif self._at_work():
            self._stop(now, reason, text)

    def _on_lost(self, now: float) -> None:
        """Nodes were lost by this event: go on without all of them, or stop."""
        lost, self._lost = self._lost, []
        if not self._at_work():
            return
        why = self._survive(now, " and ".join(lost))
        if why is not None:
            self._stop(now, StopReason.MEMBER_LOST, lost[0] + why)

    # ---------------------------------------------------------------- what follows from the state

    def _advance(self, now: float) -> None:
        """Take every transition that the state allows, until none is left."""
        if self.phase is Phase.OVER:
            return
        if now >= self._liveness.next_look_s(self._short_lease_s()):
            self._lose_silent(now)
        late = self._membership.late_links(now, self._admission.claims)
        self._close_unjoined(late, f"it did not join within {self.limits.unjoined_s:g} s")
        if self._lost:
            self._on_lost(now)
        if self._at_work() and (past := self._regrouping.to_judge()) is not None:
            notice, excluded = self._endings.survived(now, past.world, past.incident)
            self._tell_world(self._world(), notice)
            self._exclude(excluded)
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
                case Phase.REGROUPING:
                    self._advance_regrouping(now)
                case Phase.STOPPING:
                    self._advance_stopping(now)

    def _short_lease_s(self) -> float:
        """Of the workers' nodes, while their workers are known to be suspended without answers; inf: they are not."""
        world = self.world
        if world is None or self.phase not in (Phase.RUNNING, Phase.DRAINING, Phase.REGROUPING):
            return inf
        return world.short_lease_s or inf

    def _lose_silent(self, now: float) -> None:
        """Lose the members whose lease has expired. Before that, lose those whose workers must be suspended, if the
        others go on without all of them, and a majority confirms this coordinator."""
        short_s, lease_s = self._short_lease_s(), self.limits.lease_s
        silent = self._liveness.silent(self.members.values(), now, short_s)
        if not silent and short_s < inf and self._authority.age_s(now) < short_s / 2:
            world = self._world()
            nodes = [self.members[n] for n in world.order if n in self.members and n not in world.parting]
            silent, lease_s = self._liveness.early(nodes, now, short_s), short_s
            # A node without a rank, whose replacements are starting, makes nobody wait but in a regroup.
            waits = self.phase is Phase.REGROUPING or any(world.places[member.name] for member in silent)
            if not waits or not self._regrouping.spares(world, self.phase, [member.name for member in silent]):
                silent = []
        for member in silent:
            self._drop(member, f"silent for more than {lease_s:g} s")
            self._lose(now, member, f"silent for more than {lease_s:g} s")

    def _is_over(self) -> bool:
        return self.phase is Phase.OVER

    def _advance_gathering(self, now: float) -> None:
        self.previous.spare(self._authority.gathers(now, self.gathering))
        if (uid := self._authority.continued_uid) is not None:
            self.job_uid = uid
        if self.world is None and self.previous.whole:
            self._resume(now)
            if self._lost:
                self._on_lost(now)
            return
        if self._membership.anybody_busy:  # still ending a previous leader's generation: the wait for it is bounded
            patience_s = self._stop_patience_s()
            since_s = self._phase_since_s
            self._drop_busy(now, [m for m in self._membership.busy() if now >= max(since_s, m.joined_s) + patience_s])
            self._count_candidates(now)
        decision = decide(self.job, self.limits, self.gathering, now)
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
                before = f"; previous generation ended: {self._why}" if self._why else ""
                text = f"{reason}; here: {self._who_is_here()}{before}"
                self._finish(self._endings.no_quorum(reason, text, self.generation, self._incidents.newest.verdict))
            case WaitUntil():
                if self._waiting_said.due(now):
                    left = f"; giving up in {decision.deadline_s - now:.0f} s" if decision.gives_up else ""
                    if decision.at_most:
                        left = f"; {decision.deadline_s - now:.0f} s at most"
                    text = f"waiting: {decision.reason} ({self._who_is_here()}){left}"
                    for member in self.members.values():
                        self._tell(member, Waiting(text))

    def _advance_preparing(self, now: float) -> None:
        world = self._world()
        if world.all_prepared:
            self._start(now, world)
        elif now >= self._phase_since_s + self.limits.prepare_s:
            for name in [name for name in world.order if name not in world.prepared]:
                if self.phase is Phase.PREPARING or name in self.members:
                    member = self.members[name]
                    text = f"not prepared within {self.limits.prepare_s:g} s"
                    self._drop(member, text)
                    self._lose(now, member, text)

    def _advance_regrouping(self, now: float) -> None:
        world, part = self._world(), self._regrouping
        if part.all_done(world):
            self._finish(Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0))
        elif part.may_start(world):
            self._start(now, world)
        else:
            self._follow(now, part.advance(now, world, self._phase_since_s))

    def _advance_running(self, now: float) -> None:
        world = self._world()
        if world.done_count == world.size:
            self._finish(Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0))
            return
        if late := self._regrouping.overdue(now, world):
            self._follow(now, late)
            return
        self._follow(now, self._regrouping.replace(now, world))
        if self._regrouping.grows(now, world):
            self._drain(now, StopReason.MEMBER_JOINED, "the new workers are ready", regroups=True)
        elif not self._has_room() or not self._newcomers():
            self._gather_until_s = None
        elif self._gather_until_s is None:
            self._gather_until_s = now + self.limits.gather_s
        elif now >= self._gather_until_s:
            self._take_in(now, world)

    def _take_in(self, now: float, world: World) -> None:
        """Let the newcomers join: beside the running workers, if all of these are able to go on with them later."""
        newcomers = self._newcomers()
        text = f"node{'' if len(newcomers) == 1 else 's'} {names(newcomers)} joined"
        if self._regrouping.settling or self._regrouping.may_admit_later(world):
            self._gather_until_s = now + self.limits.gather_s
        elif self._regrouping.admits(world):
            self._admit(newcomers)
        elif self.job.grow is Grow.DRAIN:
            self._drain(now, StopReason.MEMBER_JOINED, text)
        else:
            self._stop(now, StopReason.MEMBER_JOINED, text)

    def _forgo_answer(self, member: Member) -> None:
        """Stop waiting for the drain answer of a member whose workers are gone."""
        world = self.world
        if world is None or world.drain is None or member.name not in world.places:
            return
        if member.busy_generation == 0 or world.finished(member.name):
            world.drain.heard(member.name, 0)

    def _advance_draining(self, now: float) -> None:
        world = self._world()
        drain = self._draining()
        if world.done_count == world.size:
            self._finish(Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0))
        elif drain.saves:
            self._advance_saving(now, world, drain)
        elif now >= self._phase_since_s + (limit_s := self._drain_limit_s()):
            self._stop(now, drain.reason, f"{drain.text}; the workers did not stop within {limit_s:g} s")
        elif drain.safe_point is not None:
            if not any(self._in_world(m) and not world.finished(m.name) for m in self._membership.busy()):
                self._stop(now, drain.reason, drain.text)
        elif not drain.awaited and (plan := self._regrouping.at_safe_point(world, drain)) is not None:
            self._regroup(now, plan)
        elif not drain.awaited and drain.regroups and not self._regrouping.leaving(world):
            self._let_go(now)
        elif not drain.awaited and drain.newest == 0:
            self._stop(now, drain.reason, drain.text)
        elif not drain.awaited:
            # A worker that has reached the newest safe point may have passed it already.
            drain.safe_point = drain.newest + 1
            self._tell_world(world, DrainTo(world.generation, drain.safe_point))
            self._note("drain_to", generation=world.generation, safe_point=drain.safe_point)

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
        match self._endings.stopped(now, world, self._incidents.newest):
            case Restart(backoff_s, notice, excluded):
                if notice is not None:
                    self._tell_world(world, notice)
                self._exclude(excluded)
                self._gather(now, world.stop_text, not_before_s=now + backoff_s)
            case Outcome() as outcome:
                self._finish(outcome)
