"""The coordinator: one mutator, `handle(now, event) -> commands`; no clock, no socket, no randomness.

                 ┌────────────────────────── back-off over, enough members ──────────────┐
                 ▼                                                                       │
    GATHERING ──► PREPARING ──► RUNNING ──► STOPPING ──► GATHERING …            (until OVER)
       ▲             │                         ▲
       └─ a death ───┘   failure, loss, leave, arrival

A shell owes it: every LinkOpened before anything heard on that link, LinkClosed once unless the machine dropped the
link itself, and a Tick when `next_deadline()` has passed.
"""

from __future__ import annotations

from msgspec import structs

from holdfast.core.coordinator.admission import Admission, Admit, Deny
from holdfast.core.coordinator.budget import Budget
from holdfast.core.coordinator.commands import Command, Conclude, DropLink, Note, Tell
from holdfast.core.coordinator.ending import Again, Judge, after_stop
from holdfast.core.coordinator.events import Event, Heard, LinkClosed, LinkOpened, Tick
from holdfast.core.coordinator.formation import (
    Candidate,
    FormNow,
    Gathering,
    NoQuorum,
    WaitUntil,
    assignments,
    decide,
    seat,
)
from holdfast.core.coordinator.liveness import Liveness
from holdfast.core.coordinator.state import Member, Pending, Phase, World, is_loopback, master_address, names
from holdfast.core.errors import JoinTimeoutError, NodesError
from holdfast.core.outcome import Outcome, OutcomeKind, Verdict
from holdfast.core.policy import JobSpec, Limits
from holdfast.core.protocol import (
    Finish,
    FromAgent,
    FromCoordinator,
    Join,
    Joined,
    Leave,
    Ping,
    Pong,
    Prepared,
    Refuse,
    Start,
    Stop,
    Stopped,
    StopReason,
    StoreLost,
    Waiting,
    WorkerDone,
    WorkersFailed,
)

TRANSITIONS: dict[tuple[Phase, Phase], str] = {
    (Phase.GATHERING, Phase.PREPARING): "the formation rule says so; Assign is sent to every member of the world",
    (Phase.GATHERING, Phase.OVER): "too few nodes before the join deadline",
    (Phase.PREPARING, Phase.RUNNING): "every member is prepared and the store has a port; Start is sent",
    (Phase.PREPARING, Phase.GATHERING): "a member of the new world was lost or left; nothing was started yet",
    (Phase.RUNNING, Phase.STOPPING): "a worker failed, a member was lost, left or arrived; Stop is sent",
    (Phase.RUNNING, Phase.OVER): "every rank is done",
    (Phase.STOPPING, Phase.GATHERING): "no worker of the generation is alive; another generation follows",
    (
        Phase.STOPPING,
        Phase.OVER,
    ): "no worker of the generation is alive; the budget is spent or a requeue was asked for",
}


class CoordinatorMachine:
    """Decides membership, generations, ranks and the end of one job."""

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
        self.members: dict[str, Member] = {}
        self.world: World | None = None
        self.generation = 0
        self._generation_floor = 0
        """The newest generation any agent told us of: an earlier coordinator's, perhaps."""
        self.outcome: Outcome | None = None
        self.budget = Budget(job.max_restarts, limits)
        self._liveness = Liveness(limits, now)
        self._pending: dict[int, Pending] = {}
        self._admission = Admission(job)
        self._by_link: dict[int, str] = {}
        self._arrivals = 0
        self._born_s = now
        self._handled_s = now
        self._gathering = Gathering(
            present=0, began_s=now, last_arrival_s=now, quorum_s=None, not_before_s=now, regroup=False
        )
        self._gather_until_s: float | None = None
        self._phase_since_s = now
        self._say_at_s = now + limits.say_interval_s
        self._reason = ""
        self._out: list[Command] = []

    # ---------------------------------------------------------------- surface

    def handle(self, now: float, event: Event) -> list[Command]:
        match event:
            case LinkOpened(link, address, reached_at, local):
                self._pending[link] = Pending(address, reached_at, local)
            case LinkClosed(link, reason):
                self._on_link_closed(now, link, reason)
            case Heard(link, message):
                self._on_message(now, link, message)
            case Tick():
                pass
        self._handled_s = now
        self._advance(now)
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> float | None:
        """When a Tick is owed; None once the job is over."""
        if self.phase is Phase.OVER:
            return None
        deadlines = [self._liveness.next_look_s()]
        if self.phase is Phase.GATHERING:
            deadlines.append(self._say_at_s)
            decision = decide(self.job, self.limits, self._gathering, self._handled_s)
            if isinstance(decision, WaitUntil):
                deadlines.append(decision.deadline_s)
        elif self.phase is Phase.PREPARING:
            deadlines.append(self._phase_since_s + self.limits.prepare_s)
        elif self.phase is Phase.STOPPING:
            deadlines.append(self._stop_deadline_s())
        elif self._gather_until_s is not None:
            deadlines.append(self._gather_until_s)
        return min(deadlines)

    @property
    def knows_predecessor(self) -> bool:
        """Some agent has told of a generation that another coordinator formed."""
        return self._generation_floor > 0

    def check_invariants(self) -> None:
        """Cheap enough to run after every event in tests and simulations."""
        assert self.budget.used <= self.job.max_restarts, "the restart budget is overdrawn"
        assert (self.outcome is not None) == (self.phase is Phase.OVER)
        assert len(self._by_link) == len(self.members)
        for name, member in self.members.items():
            assert self._by_link[member.link] == name
            assert member.busy_generation <= self.generation
        if self.phase in (Phase.PREPARING, Phase.RUNNING, Phase.STOPPING):
            world = self.world
            assert world is not None
            assert world.generation == self.generation
            assert len(set(world.order)) == len(world.order) <= self.job.max_nodes
        if self.phase in (Phase.GATHERING, Phase.PREPARING):
            assert all(m.busy_generation == 0 for m in self.members.values()), "forming while workers may live"

    # ---------------------------------------------------------------- links and messages

    def _on_link_closed(self, now: float, link: int, reason: str) -> None:
        self._pending.pop(link, None)
        self._admission.withdraw(link)
        name = self._by_link.get(link)
        if name is not None:
            self._lose(now, self.members[name], reason)

    def _on_message(self, now: float, link: int, message: FromAgent) -> None:
        name = self._by_link.get(link)
        if name is None:
            if isinstance(message, Join) and link in self._pending:
                self._on_join(now, link, message)
            return
        member = self.members[name]
        member.last_heard_s = now
        match message:
            case Ping(number):
                self._tell(member, Pong(number))
            case Prepared(generation, store_port):
                self._on_prepared(member, generation, store_port)
            case WorkerDone(generation, local_rank):
                known = 0 <= local_rank < member.node.nproc
                if known and self._is_current(member, generation) and self.phase is Phase.RUNNING:
                    self._world().done.setdefault(name, set()).add(local_rank)
            case WorkersFailed(generation, failures):
                at_work = self.phase in (Phase.RUNNING, Phase.STOPPING)
                if failures and at_work and self._is_current(member, generation):
                    self._world().failures.extend(failures)
                    self._note("workers_failed", member=name, ranks=[f.rank for f in failures])
                    self._stop(now, StopReason.WORKER_FAILED, f"rank {failures[0].rank} failed on {member.node.host}")
            case Stopped(generation):
                if member.busy_generation <= generation:
                    member.busy_generation = 0
            case StoreLost(generation):
                if self._is_current(member, generation):
                    self._member_gone(now, StopReason.STORE_LOST, f"the store host on {member.node.host} died")
            case Leave(reason):
                self._on_leave(now, member, reason)
            case Join():
                self._drop(member, "a member cannot join twice")
                self._lose(now, member, "a member cannot join twice")

    def _on_join(self, now: float, link: int, join: Join) -> None:
        if self.outcome is not None:
            self._out.append(Tell(link, Finish(self.outcome)))
            return
        self._welcome(now, self._admission.consider(link, join, self.members.values(), now))

    def _welcome(self, now: float, decision: Admit | Deny | None) -> None:
        match decision:
            case Admit(link, join):
                pending = self._pending.pop(link)
                node = structs.replace(join.node, hosts_coordinator=pending.local)
                self._arrivals += 1
                member = Member(node, link, pending.address, pending.reached_at, self._arrivals, decision.heard_s)
                self.members[node.member] = member
                self._by_link[link] = node.member
                self._heed_predecessor(now, join)
                self._gathering.last_arrival_s = now
                limits = self.limits
                self._tell(member, Joined(limits.lease_s, limits.fence_s, limits.ping_interval_s))
                self._note("joined", member=node.member, address=pending.address, nproc=node.nproc)
                if self.phase is not Phase.GATHERING:
                    self._tell(member, Waiting(self._standby_text()))
            case Deny(link, join, problem):
                self._pending.pop(link)
                self._note("refused", member=join.node.member, reason=problem)
                self._out.append(Tell(link, Refuse(NodesError.code, problem)))
                self._out.append(DropLink(link, problem))
            case None:
                pass

    def _standby_text(self) -> str:
        size = len(self._world().order)
        full = size >= self.job.max_nodes
        fate = "this one stands by as a spare" if full else "this one will be taken in"
        return f"generation {self.generation} is at work on {size} of at most {self.job.max_nodes} nodes; {fate}"

    def _heed_predecessor(self, now: float, join: Join) -> None:
        """An agent comes from a world we never formed: an earlier coordinator's. Others of that world may not have
        noticed yet; they will have killed their workers a fence after it died, which was before we were born and
        before this agent lost it."""
        if join.last_generation > max(self.generation, self._generation_floor):
            self._generation_floor = join.last_generation
        if join.last_generation > self.generation:
            died_s = min(self._born_s, now - join.unlinked_s)
            gone_s = died_s + self.limits.fence_s + self.limits.kill_s
            self._gathering.not_before_s = max(self._gathering.not_before_s, gone_s)

    def _on_prepared(self, member: Member, generation: int, store_port: int | None) -> None:
        if self.phase is not Phase.PREPARING or not self._is_current(member, generation):
            return
        world = self._world()
        world.prepared.add(member.name)
        if store_port is not None and member.name == world.order[0]:
            world.store_port = store_port

    def _on_leave(self, now: float, member: Member, reason: str) -> None:
        if member.leaving:
            return
        member.leaving = reason or "asked to"
        self._note("leaving", member=member.name, reason=reason)
        if self._in_world(member) and not self._world().finished(member.name):
            self._member_gone(now, StopReason.MEMBER_LEFT, f"{member.node.host} is leaving ({reason})")

    def _lose(self, now: float, member: Member, reason: str) -> None:
        """The member is gone: link closed, lease run out, or dropped."""
        in_world = self._in_world(member)
        del self.members[member.name]
        del self._by_link[member.link]
        if member.leaving:
            self._note("left", member=member.name)
            return
        self._note("lost", member=member.name, reason=reason)
        if not in_world:
            return
        world = self._world()
        if self.phase is Phase.RUNNING and world.finished(member.name):
            return
        world.lost_nodes.append(f"{member.node.host} ({reason})")
        self._member_gone(now, StopReason.MEMBER_LOST, f"{member.node.host} was lost: {reason}")

    def _member_gone(self, now: float, reason: StopReason, text: str) -> None:
        if self.phase is Phase.PREPARING:
            self._gather(now, text, not_before_s=now)
        elif self.phase is Phase.RUNNING:
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
        while (decision := self._admission.settle(self.members.values())) is not None:
            self._welcome(now, decision)
        self._gathering.count(len(self._candidates()), self.job.min_nodes, now)
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
                case Phase.STOPPING:
                    self._advance_stopping(now)

    def _is_over(self) -> bool:
        return self.phase is Phase.OVER

    def _advance_gathering(self, now: float) -> None:
        decision = decide(self.job, self.limits, self._gathering, now)
        if decision.reason != self._reason:
            self._reason = decision.reason
            self._note("gathering", reason=decision.reason)
        match decision:
            case FormNow():
                self._form(now)
            case NoQuorum(reason):
                self._no_quorum(reason)
            case WaitUntil():
                if now >= self._say_at_s:
                    self._say_at_s = now + self.limits.say_interval_s
                    text = f"waiting: {decision.reason} ({names(self._candidates())})"
                    for member in self.members.values():
                        self._tell(member, Waiting(text))

    def _form(self, now: float) -> None:
        previous = self.world.order if self.world is not None else ()
        seats = seat([Candidate(m.node, m.arrival) for m in self._candidates()], previous, self.job)
        self.generation = max(self.generation, self._generation_floor) + 1
        self.world = World(
            generation=self.generation,
            order=tuple(node.member for node in seats),
            nproc={node.member: node.nproc for node in seats},
        )
        self._enter(now, Phase.PREPARING)
        local = all(is_loopback(self.members[name].address) for name in self.world.order)
        places = assignments(seats, generation=self.generation, restart_count=self.budget.used, local_world=local)
        for name, assign in places.items():
            self._tell(self.members[name], assign)
        self._note("assigned", generation=self.generation, world_size=self.world.size, order=list(self.world.order))

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
            for name in world.order:
                member = self.members[name]
                member.busy_generation = world.generation
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
        room = len(world.order) < self.job.max_nodes and not world.done
        if not (room and any(not self._in_world(m) for m in self._candidates())):
            self._gather_until_s = None
        elif self._gather_until_s is None:
            self._gather_until_s = now + self.limits.gather_s
        elif now >= self._gather_until_s:
            hosts = ", ".join(m.node.host for m in self._candidates() if not self._in_world(m))
            self._stop(now, StopReason.MEMBER_JOINED, f"regrouping to take in {hosts}")

    def _stop(self, now: float, reason: StopReason, text: str) -> None:
        """Begin to end the running generation; a later, graver reason while stopping replaces a lighter one."""
        world = self._world()
        if self.phase is Phase.STOPPING:
            return
        world.stop_reason, world.stop_text, world.stop_began_s = reason, text, now
        self._enter(now, Phase.STOPPING)
        for name in world.order:
            if name in self.members:
                self._tell(self.members[name], Stop(world.generation, reason, text))
        self._note("stopping", generation=world.generation, reason=reason.value, text=text)

    def _stop_deadline_s(self) -> float:
        return self._phase_since_s + self.limits.stop_grace_s + self.limits.stop_slack_s

    def _advance_stopping(self, now: float) -> None:
        busy = [m for m in self.members.values() if m.busy_generation]
        if busy and now >= self._stop_deadline_s():
            for member in busy:
                self._drop(member, "did not stop its workers in time")
                self._lose(now, member, "did not stop its workers in time")
            busy = []
        if busy:
            return
        world = self._world()
        match after_stop(world, self.budget, self._judge):
            case Again(backoff_s, verdict):
                self._note("verdict", generation=world.generation, cause=verdict.cause, code=verdict.code)
                self._gather(now, world.stop_text, not_before_s=now + backoff_s)
            case Outcome() as outcome:
                self._finish(outcome)

    # ---------------------------------------------------------------- small steps

    def _gather(self, now: float, reason: str, *, not_before_s: float) -> None:
        self._enter(now, Phase.GATHERING)
        gathering = self._gathering
        gathering.began_s, gathering.not_before_s, gathering.regroup = now, not_before_s, True
        self._say_at_s = now + self.limits.say_interval_s
        gathering.count(len(self._candidates()), self.job.min_nodes, now)
        self._note("regrouping", reason=reason, not_before_s=round(not_before_s - now, 3))

    def _no_quorum(self, reason: str) -> None:
        hosts = names(self._candidates()) or "nobody"
        text = f"{reason}; here: {hosts}"
        verdict = Verdict(code=JoinTimeoutError.code, cause=text, generation=self.generation, restarts=self.budget.used)
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
        self._enter(self._handled_s, Phase.OVER)
        for member in self.members.values():
            self._tell(member, Finish(outcome))
        self._note("over", kind=outcome.kind.value, exit_code=outcome.exit_code)
        self._out.append(Conclude(outcome))

    def _enter(self, now: float, phase: Phase) -> None:
        assert (self.phase, phase) in TRANSITIONS, f"no transition {self.phase} -> {phase}"
        self.phase = phase
        self._phase_since_s = now

    def _candidates(self) -> list[Member]:
        return [m for m in self.members.values() if not m.leaving]

    def _world(self) -> World:
        assert self.world is not None
        return self.world

    def _in_world(self, member: Member) -> bool:
        active = self.phase in (Phase.PREPARING, Phase.RUNNING, Phase.STOPPING)
        return active and self.world is not None and member.name in self.world.nproc

    def _is_current(self, member: Member, generation: int) -> bool:
        return generation == self.generation and self._in_world(member)

    def _tell(self, member: Member, message: FromCoordinator) -> None:
        self._out.append(Tell(member.link, message))

    def _drop(self, member: Member, reason: str) -> None:
        self._out.append(DropLink(member.link, reason))

    def _note(self, event: str, **fields: object) -> None:
        self._out.append(Note(event, fields))
