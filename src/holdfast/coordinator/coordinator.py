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

This file has the state and the decisions, in the order: the table of phases, the state, the surface, how one event is
decided, links and members, then the phases in the order of the diagram. The parts that the coordinator is made of
(admission, membership, incidents, regrouping, endings, training, extensions) have a file each. They decide within their
part and change no phase: what they return, the coordinator carries out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from holdfast.coordinator.admission import Admission, Admit, Deny, Versions
from holdfast.coordinator.authority import Authority, GoesOnWithout, Handled, Inherited, NodeEnded, PreviousLeader
from holdfast.coordinator.coordinator_commands import Command, Conclude, DropLink, StepDown, Tell
from holdfast.coordinator.coordinator_events import Event, Heard, LinkClosed, LinkOpened
from holdfast.coordinator.ending import Budget, Endings, Judge, Restart, around, ended_without
from holdfast.coordinator.extending import Extensions
from holdfast.coordinator.formation import (
    FENCE,
    Candidate,
    FormNow,
    Gathering,
    NoQuorum,
    WaitUntil,
    all_places,
    assigned,
    decide,
    seat,
)
from holdfast.coordinator.incident import Incidents, how
from holdfast.coordinator.membership import HostBackoff, Liveness, Membership
from holdfast.coordinator.previous_generation import PreviousGeneration
from holdfast.coordinator.regrouping import Plan, Regrouping
from holdfast.coordinator.replacements import Replacements
from holdfast.coordinator.stop_delay import StopDelay
from holdfast.coordinator.training import Training
from holdfast.coordinator.views import job_view
from holdfast.coordinator.world import (
    Draining,
    Formation,
    Member,
    PendingLink,
    Phase,
    World,
    is_local,
    master_address,
    names,
)
from holdfast.protocol.charter import Charter
from holdfast.protocol.errors import NodesError, ProtocolError
from holdfast.protocol.exit_codes import REQUESTS
from holdfast.protocol.extension import (
    Announce,
    CoordinatorHalf,
    EndGeneration,
    EndJob,
    Exclude,
    MemberLost,
    MemberSeen,
    NodeSeen,
    Park,
    Readmit,
    SafePointAgreed,
    SafePointRefused,
    SaveAtSafePoint,
    SendAway,
    StopDelayed,
    ToCore,
    Unpark,
)
from holdfast.protocol.messages import (
    Abandon,
    Answer,
    Ask,
    CanGoOn,
    CannotRegroup,
    Drain,
    DrainTo,
    Extended,
    Finish,
    FromAgent,
    FromCoordinator,
    Held,
    Join,
    Joined,
    Leave,
    Notice,
    Ping,
    Pong,
    Prepared,
    Progress,
    Quit,
    Refuse,
    Regroup,
    ReplacementFailed,
    ReplacementReady,
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
from holdfast.protocol.policy import Grow, JobSpec, Limits, NodeSpec, Note, Pauses
from holdfast.protocol.rank_progress import JobView
from holdfast.protocol.throughput import Throughput
from holdfast.protocol.train_contract import Survive
from holdfast.text import spans

NO_SAVES = (
    "not every rank asks at a safe point whether to save: "
    "`snaps.step()` of ht.Snapshots does, and holdfast.worker.should_save()"
)
EXTENSION_ROUNDS_MAX = 8
"""Number of rounds at one event. What extensions order to one another's orders is carried out later, one event at a
time."""
FREQUENT = frozenset({Ping, Progress, Prepared, Stopped, Extended})
"""The messages that every node sends often, or that all nodes send at one time: see the fast path."""


# -------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """What the coordinator does in one phase."""

    advance: Callable[[Coordinator, float], None]
    """Called with the time after every event, until it leaves the phase as it is: takes what transition is possible."""
    due_s: Callable[[Coordinator], float]
    """The time at which this phase has something to do without an event; inf: never."""
    to: Mapping[Phase, str]
    """The phases that may follow, and when. No other change of the phase is possible (`Coordinator._enter`)."""


PHASES: Mapping[Phase, PhaseRow] = {
    Phase.GATHERING: PhaseRow(
        lambda coordinator, now: coordinator._advance_gathering(now),
        lambda coordinator: coordinator._gathering_due_s(),
        {
            Phase.PREPARING: (
                "the formation rule says so; Assign is sent to every member that does not know its place from Stop"
            ),
            Phase.RUNNING: "a previous leader's generation is whole: every node of it came with living workers",
            Phase.OVER: "too few nodes before the join deadline",
        },
    ),
    Phase.PREPARING: PhaseRow(
        lambda coordinator, now: coordinator._advance_preparing(now),
        lambda coordinator: coordinator._prepare_deadline_s(),
        {
            Phase.RUNNING: "every member is prepared and the store has a port; Start is sent",
            Phase.GATHERING: "a member of the new world was lost or left; nothing was started yet",
        },
    ),
    Phase.RUNNING: PhaseRow(
        lambda coordinator, now: coordinator._advance_running(now),
        lambda coordinator: coordinator._running_due_s(),
        {
            Phase.DRAINING: "a member arrived, or wants to leave and its workers ask for safe points",
            Phase.REGROUPING: "ranks were lost, and the others can go on without them; Regroup is sent",
            Phase.STOPPING: "a worker failed, a member was lost, left or arrived, or all stand still",
            Phase.OVER: "every rank is done",
        },
    ),
    Phase.DRAINING: PhaseRow(
        lambda coordinator, now: coordinator._advance_draining(now),
        lambda coordinator: coordinator._drain_deadline_s(),
        {
            Phase.RUNNING: "a worker ended meanwhile, so no other can join: the workers are let go",
            Phase.REGROUPING: (
                "replacements join, or a node leaves, at a safe point that all can reach; or ranks were lost"
            ),
            Phase.STOPPING: (
                "all have left at the safe point; or no worker asks for one, one failed, a member was lost, "
                "or it takes too long"
            ),
            Phase.OVER: "every rank is done",
        },
    ),
    Phase.REGROUPING: PhaseRow(
        lambda coordinator, now: coordinator._advance_regrouping(now),
        lambda coordinator: coordinator._regrouping_due_s(),
        {
            Phase.REGROUPING: "more ranks were lost; or those for which the others wait are ready",
            Phase.RUNNING: "every member is prepared, and its workers wait; Start is sent",
            Phase.STOPPING: "the workers cannot go on, or do not come in time; a member left",
            Phase.OVER: "every rank is done",
        },
    ),
    Phase.STOPPING: PhaseRow(
        lambda coordinator, now: coordinator._advance_stopping(now),
        lambda coordinator: coordinator._stop_deadline_s(),
        {
            Phase.GATHERING: "no worker of the generation is alive; another generation follows",
            Phase.OVER: "no worker of the generation is alive; the budget is spent, or please requeue",
        },
    ),
    Phase.OVER: PhaseRow(lambda _coordinator, _now: None, lambda _coordinator: inf, {}),
}


class Coordinator:
    """Decides membership, generations, ranks and the end of one job."""

    job: JobSpec
    """What the user wants. Never changed."""
    limits: Limits
    """The limits of the job; never changed."""
    _authority: Authority
    """The object that says whether this coordinator may decide at all. Never replaced."""
    _fixed_master: tuple[str, int] | None
    """The address and port that every generation announces, as in `__init__`. Never changed."""
    stepped_down: bool
    """It has no authority any more, and never will: it ignores every event. Never taken back."""

    # the phase
    phase: Phase
    """Changed by `_enter` only, along PHASES."""
    _phase_since_s: float
    """The time at which the phase was entered; again at a transition from a phase to itself. The wait in every phase is
    limited from here. Not after `_now`."""
    outcome: Outcome | None
    """The end of the job. Set if and only if the phase is OVER, and never changed."""

    # who is here
    host_backoff: HostBackoff
    """The hosts that have to wait. Members may be on such hosts; candidates are not."""
    _membership: Membership
    """Members, links without a Join, and who may have living workers (busy). A link is pending or a member's, never
    both. No member is busy with a generation that is newer than both `generation` and that of `previous`."""
    _versions: Versions
    """The software of the first node, with which the others are compared. Kept when that node has gone."""
    _admission: Admission
    """The claims of agents that wait for a rank which a silent member holds. Each is of a pending link."""
    _liveness: Liveness
    """Knows when to look for silent members next. Time in which this process itself slept does not count."""
    _lost: list[str]
    """Nodes of the world that this event has shown to be lost, in words. Empty between two events: all the losses
    of one event are answered together, so that the others go on once."""

    # the generation
    world: World | None
    """The newest generation, also after its end. Set from the first formation on. In every phase but GATHERING and
    OVER its number is `generation`, and it has as many nodes as the job allows at most."""
    generation: int
    """The newest number of a generation that was formed; it only grows. 0: none was."""
    job_uid: str
    """The identity of the job, as in Start. Empty until the first generation is formed; then it names the same job for
    ever, also for the coordinators that continue it."""
    _announced: Formation | None
    """The next generation, announced with the stop of the present one; None: there was no announcement. Its number
    is larger than `generation`, and some nodes may be preparing it: no other generation gets that number."""
    previous: PreviousGeneration
    """What agents still run of a coordinator before this one. Every generation that is formed here has a larger
    number. Means nothing more once a generation was formed here, but for its number."""

    # what has happened
    _incidents: Incidents
    """What was lost last. No world has a part of it."""
    _why: str
    """The reason why the last generation ended; empty: none has."""
    _quit: Quit | None
    """A user asked for the end of the job: an agent that joins now is refused, and ends. Never taken back."""
    _job_began_s: float
    """Earlier than this coordinator if it is a successor."""

    # parts that decide, each within its file
    budget: Budget
    """The restarts that were charged. `used` never exceeds the job's `max_restarts`."""
    _endings: Endings
    """What follows from a generation that has ended: a restart, or the outcome."""
    _training: Training
    """The progress of the newest generation that was started, and the training time of all of them."""
    _stop_delay: StopDelay
    """The wait for the cause of a failure. No stop waits in any phase but RUNNING."""
    _regrouping: Regrouping
    """The rules by which running workers form the next generation. Reset when all workers are stopped (GATHERING)."""

    # waits
    gathering: Gathering
    """Input of the rule that forms a generation. Means something in GATHERING."""
    _reason: str
    """The reason why no generation was formed at the newest event in GATHERING, as it was noted last."""
    _waiting_said: Pauses
    """Knows when the members that wait get the next text that says for what."""
    _gather_until_s: float | None
    """The time at which the newcomers are taken in, all together; None: there is none. Means something in RUNNING, and
    is None when that begins with a Start."""

    # this event
    _now: float
    """Time of the newest event that was decided. It never goes back."""
    _due_s: float
    """The next deadline, not after the true one; -inf: not computed since the last event."""
    _out: list[Command]
    """The commands of this event. Empty between two events; before the first one it has what follows from the
    coordinator before this one."""
    _extensions: Extensions
    """Everything about a running job that is not the core. Extensions read the state and order; they change nothing."""

    def __init__(
        self,
        job: JobSpec,
        limits: Limits,
        judge: Judge,
        now: float,
        authority: Authority,
        *,
        fixed_master: tuple[str, int] | None = None,
        extensions: Sequence[CoordinatorHalf] = (),
    ) -> None:
        """`fixed_master`: the address and port that every generation announces (static rendezvous); None: rank 0's own.
        `judge` makes a verdict of failures."""
        self.job, self.limits = job, limits
        self._authority, self._fixed_master = authority, fixed_master
        self.stepped_down = False
        self.phase = Phase.GATHERING
        self._phase_since_s = now
        self.outcome = None
        self.host_backoff = HostBackoff(limits, job.exclude_after)
        self._membership = Membership(self.host_backoff, limits)
        self._versions = Versions()
        self._admission = Admission(job, self._versions.other_line)
        self._liveness = Liveness(limits, now)
        self._lost = []
        self.world = None
        self.generation = 0
        self.job_uid = ""
        self._announced = None
        self.previous = PreviousGeneration()
        self._incidents = Incidents()
        self._why = ""
        self._quit = None
        self._job_began_s = now
        self.budget = Budget(job.max_restarts, limits)
        self._endings = Endings(job, self.budget, self.host_backoff, judge, self._note)
        self._training = Training(limits, self._membership.members)
        replacements = Replacements(limits, self.budget, self._membership)
        self._regrouping = Regrouping(job, limits, self.budget, self._membership, replacements, self._incidents)
        self._regrouping.longest_step_s = lambda: self._training.longest_step_s
        self._regrouping.succeeded = authority.succeeds_without
        self.gathering = Gathering.begin(now)
        self._reason = ""
        self._waiting_said = Pauses.begin(now, limits.say_interval_s)
        self._gather_until_s = None
        self._now = now
        self._due_s = -inf
        self._out = []
        self._extensions = Extensions(extensions, JobSeen(self), self._membership.members)
        self._stop_delay = StopDelay(self._incidents, self._extensions.observed)
        self._follow_leader(now, authority.begin(self))

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
        if authority.is_quiet(now) and self._is_frequent(event):
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
                self._note("charter_reported", number=number, term=term, generation=generation)
                self._inherit(now, charter, 0.0)  # nobody knows how old it is
                self._abandon(self.previous.heard_of(generation))
            case NodeEnded():
                self._abandon(self.previous.end())
            case GoesOnWithout(parts):
                self.previous.go_on_without(parts)
            case None:
                pass
        return authority.release(now, self._decide(now, event))

    def next_deadline(self) -> float | None:
        """The time at which the next Tick is due; None: never, the job is over or goes on elsewhere."""
        if self.stepped_down:
            return None
        due_s = self._authority.due_s(self._now)
        if self.phase is not Phase.OVER:
            if self._due_s == -inf:
                self._due_s = self._find_deadline()
            due_s = min(due_s, self._due_s)
        return due_s if due_s < inf else None

    def pong(self, now: float, link: int, ping: Ping) -> Pong | None:
        """The answer to a member's ping if nothing else follows from it, as nearly always: a shell may ask for it
        instead of feeding the event. None: the ping must be handled."""
        quiet = self._is_quiet(now) and self._authority.is_quiet(now) and not self.stepped_down
        member = self._membership.by_link(link) if quiet else None
        if member is None:
            return None
        self._now = member.last_heard_s = now
        return Pong(ping.number, self._authority.age_s(now))

    def check_invariants(self) -> None:
        """Raises when the state contradicts itself. Cheap enough to run after every event in tests."""
        self._authority.check_invariants()
        assert self.budget.used <= self.job.max_restarts, "the restart budget is overdrawn"
        assert (self.outcome is not None) == (self.phase is Phase.OVER)
        assert not self._lost, "a loss was not answered"
        assert self._announced is None or self._announced.world.generation > self.generation
        self._membership.check_invariants()
        self._incidents.newest.check_invariants()
        newest = max(self.generation, self.previous.generation)
        assert all(member.busy_generation <= newest for member in self._membership.busy())
        assert self.world is None or not self.previous.parts, "an earlier generation was replaced and may continue"
        if self.phase not in (Phase.GATHERING, Phase.OVER):
            world = self.world
            assert world is not None
            assert world.generation == self.generation
            assert len(set(world.order)) == len(world.order) <= self.job.max_nodes
        if self.phase is Phase.REGROUPING:
            # A node whose ranks have all ended on their way here is left alone (seed 2917).
            unfinished = [name for name in self._world().order if not self._world().finished(name)]
            here = [self.members[name] for name in unfinished if name in self.members]
            assert all(member.busy_generation == self.generation for member in here), "a member was not regrouped"
        if self.phase is Phase.PREPARING:
            fresh = [m for m in self._membership.busy() if m.name in self._world().places]
            assert not fresh, "a world is prepared where workers may live"

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
        """Time in which the job has trained (s), as in JobView."""
        return self._training.training_s

    @property
    def throughput(self) -> Throughput | None:
        """The progress of all ranks of the newest generation that was started; None: none was."""
        return self._training.throughput

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
            training=self._training,
        )
        return self._extensions.shown_in(view, now)

    # ---------------------------------------------------------------- how one event is decided

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
        frequent = quiet and self.phase is before and self._is_frequent(event)
        if not (frequent and self._nothing_follows(now, event)):
            self._due_s = -inf
            self._advance(now)
            self._advance_extensions(now)
        out, self._out = self._out, []
        return out

    def _advance(self, now: float) -> None:
        """Take every transition that the state allows, until none is left."""
        if self.phase is Phase.OVER:
            return
        self._advance_members(now)
        if self.phase is Phase.RUNNING:
            end = self._stop_delay.advance(now, self._world())
            self._follow(now, [end] if end is not None else ())
        before = None
        while before is not self.phase:
            before = self.phase
            PHASES[before].advance(self, now)

    def _advance_members(self, now: float) -> None:
        """What follows in every phase alike: from silence, from losses, and from agents that wait to join."""
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

    def _enter(self, now: float, phase: Phase) -> None:
        """The only change of the phase."""
        if phase not in PHASES[self.phase].to:
            raise AssertionError(f"no transition {self.phase} -> {phase}")
        if self.phase is Phase.RUNNING:
            self._stop_delay.clear()
        self.phase = phase
        self._phase_since_s = now
        runs = phase in (Phase.RUNNING, Phase.DRAINING)
        self._extensions.runs(self.generation if runs else 0, drains=phase is Phase.DRAINING)

    def _follow(self, now: float, orders: Iterable[Command | EndGeneration | Plan]) -> None:
        """Carry out what a part returned."""
        for order in orders:
            if isinstance(order, EndGeneration):
                self._stop(now, order.reason, order.text, order.culprit)
            elif isinstance(order, Plan):
                self._regroup(now, order)
            else:
                self._out.append(order)

    def _step_down(self, order: StepDown) -> list[Command]:
        self.stepped_down = True
        self._note("steps_down", reason=order.reason, term=self._authority.term)
        out, self._out = self._out, []
        return [*out, order]

    def _find_deadline(self) -> float:
        return min(
            self._liveness.next_look_s(self._short_lease_s()),
            self._membership.unjoined_due_s(self._admission.claims),
            max(self._now, self._extensions.due_s()),
            PHASES[self.phase].due_s(self),
        )

    # ---------------------------------------------------------------- the fast path
    #
    # A job of ten thousand nodes has thousands of pings and reports a second, and from nearly none of them a transition
    # follows. Three places leave out work for them: `pong` (a shell answers a ping without an event), `handle` (the
    # authority does not read the event) and `_decide` (no phase is advanced). It is right because a transition needs
    # one of two causes. The time: nothing follows from that before `_due_s`, the deadline that was found at the last
    # full step. Or a change of the state: `_nothing_follows` has, for each frequent event, the only condition that it
    # can change. A claim of a rank is the exception, since any sign of life of its holder denies it: there is no fast
    # path while there is one.
    #
    # tests/simulation/test_fast_path.py plays seeds with and without it: the histories are equal. One note may come
    # later, with the next full step: that the reason for the wait has lost its last words, when a pause is over.

    @staticmethod
    def _is_frequent(event: Event) -> bool:
        """Whether a large job has many of these, and nearly always no transition follows."""
        return type(event.message) in FREQUENT if isinstance(event, Heard) else isinstance(event, LinkOpened)

    def _is_quiet(self, now: float) -> bool:
        """Whether nothing is due, and no claim waits for a sign of life."""
        return now < self._due_s and not self._admission.claims

    def _nothing_follows(self, now: float, event: Event) -> bool:
        """Whether no transition can follow from this frequent event, which came while all was quiet and has left the
        phase as it was."""
        if isinstance(event, Heard) and isinstance(event.message, Ping):
            return True
        if isinstance(event, Heard) and isinstance(event.message, Progress | Extended):
            due_s = self._extensions.due_s()
            self._due_s = min(self._due_s, due_s)
            # What an extension has heard may be what a stop waits for.
            return due_s > now and not self._stop_delay.waits
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
            case Held(generation, reached, saves, number):
                # The workers have gone on since they answered a drain that was let go (seed 5406 of `questions`).
                drains = self.phase is Phase.DRAINING and number == self._draining().number
                if drains and self._is_current(member, generation):
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
                # A worker may end while the order to regroup is on its way (scenario `survive_done`).
                crossed = self.phase is Phase.REGROUPING and generation in self._regrouping.past
                if (crossed or generation == self.generation) and self._at_work():
                    self._world().mark_done(member.name, local_rank, left)
                    self._training.rank_done(now, member.name, local_rank)
                    self._forgo_answer(member)
            case Progress(generation):
                if generation == self.generation and self.phase in (Phase.RUNNING, Phase.DRAINING):
                    self._world().stepped |= any(each.steps for each in message.ranks)
                    if self._training.progress(now, member.name, message):
                        self._extensions.progressed(now, member.name)
            case WorkersFailed(generation, failures):
                # A failure that crossed the order to regroup is a loss, too (test_regrouping.py).
                known = generation == self.generation or generation in self._regrouping.past
                if failures and known and self.phase is not Phase.PREPARING:
                    self._on_failures(now, member, message)
            case CanGoOn() | ReplacementReady() | ReplacementFailed() | CannotRegroup():
                if self._at_work():
                    self._follow(now, self._regrouping.heard(now, self._world(), member, message))

    # ---------------------------------------------------------------- members come

    def _on_join(self, now: float, link: int, join: Join) -> None:
        if self.outcome is not None:
            self._authority.came_too_late(join.node.agent, link)
            self._out.append(self._greet_after_end(link, join, self.outcome))
            return
        # An agent that comes after `holdfast stop` would start the job again (scenario `stop_saves`).
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
                # A host that comes and is lost in a loop waits (scenario `flapping`), and so does one that was blamed
                # too often (test_coordinator_rules.py).
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

    def _greet_after_end(self, link: int, join: Join, outcome: Outcome) -> Command:
        """Answer an agent that joins after the end. Another command line means another job: that agent has to retry
        until the endpoint is free."""
        if join.last_generation:
            return Tell(link, Finish(outcome))
        if self._versions.other_line(join.node):
            self._membership.close_link(link)
            return DropLink(link, "the job at this endpoint is over, and is another one")
        return Tell(link, Finish(self._end_of(join.node)))

    # ---------------------------------------------------------------- members leave or are lost

    def _on_leave(self, now: float, member: Member, reason: str, *, drain: bool) -> None:
        self._authority.leaves()
        if not member.leaving:
            member.leaving = reason or "asked to"
            self._membership.changed()
            self._note("leaving", member=member.name, reason=reason, drain=drain)
        # Nobody needs a node that has no place, or whose ranks are done (scenario `stop_saves`).
        if not self._in_world(member) or self._world().finished(member.name):
            self._forget(member)
            return
        text = f"{member.node.host} is leaving ({reason})"
        # With --survive wait the others would wait for replacements that this node will not start (test_regrouping.py).
        if self.phase is Phase.REGROUPING and self._regrouping.waits(self._world()):
            self._member_gone(now, StopReason.MEMBER_LEFT, text)
        # By Ctrl-C, or because no worker asks for safe points (scenarios `survive_leave_at_once`, `leave`).
        elif not drain:
            self._gone_early(now, member, text)
        elif self.phase is Phase.RUNNING:
            self._drain_for(now, member)

    def _gone_early(self, now: float, member: Member, text: str) -> None:
        """The workers of a node that leaves end now, and not where all can do without them. A coordinator that is there
        ends before the others could have gone on."""
        if not self._at_work() or self._quit is not None or member.node.hosts_coordinator:
            self._member_gone(now, StopReason.MEMBER_LEFT, text)
        elif member.name not in self._world().leaving_workers or self._needs(member):
            refused = self._survive(now, text)
            if refused is not None:
                self._member_gone(now, StopReason.MEMBER_LEFT, text + refused)

    def _lose_silent(self, now: float) -> None:
        """Lose the members whose lease has expired. Before that, lose those whose workers must be suspended, if the
        others go on without all of them, and a majority confirms this coordinator."""
        short_s, lease_s = self._short_lease_s(), self.limits.lease_s
        silent = self._liveness.silent(self.members.values(), now, short_s)
        if not silent and short_s < inf and self._authority.age_s(now) < short_s / 2:
            world = self._world()
            nodes = [self.members[n] for n in world.order if n in self.members and n not in world.leaving_workers]
            silent, lease_s = self._liveness.early(nodes, now, short_s), short_s
            # Both in test_early_loss.py: nodes that fall silent together are lost together, and the others are not
            # stopped for a node that they need. A node without a rank, whose replacements are starting, makes nobody
            # wait but in a regroup.
            waits = self.phase is Phase.REGROUPING or any(world.places[member.name] for member in silent)
            lost = [member.name for member in silent]
            if not waits or not self._regrouping.can_go_on_without(world, self.phase, lost):
                silent = []
        for member in silent:
            self._drop(member, f"silent for more than {lease_s:g} s")
            self._lose(now, member, f"silent for more than {lease_s:g} s")

    def _short_lease_s(self) -> float:
        """The short lease of the workers' nodes, while workers are suspended without answers (s); inf: they are not."""
        world = self.world
        if world is None or self.phase not in (Phase.RUNNING, Phase.DRAINING, Phase.REGROUPING):
            return inf
        return world.short_lease_s or inf

    def _lose(self, now: float, member: Member, reason: str) -> None:
        """Remove a member whose link was closed, whose lease expired, or that was dropped."""
        self._authority.lost(now, member)
        in_world, was_busy = self._in_world(member), member.busy_generation != 0
        self._membership.remove(member)
        self._extensions.happens(MemberLost(member.name))
        self._lost_for_previous(member)
        # It has finished its part, so nothing was lost (scenario `leave`). In a drain or a regroup the others still
        # need its workers (scenario `survive_leave_killed`).
        if member.leaving and not (self.phase in (Phase.DRAINING, Phase.REGROUPING) and in_world and was_busy):
            self._note("left", member=member.name)
            return
        self._note("lost", member=member.name, reason=reason, silent_s=round(now - member.last_heard_s, 3))
        self.host_backoff.lost(member.node.host, lived_s=now - member.began_s)
        # A node whose ranks are all done is not missed (scenario `early_exits`).
        if not in_world or (self._at_work() and self._world().finished(member.name)):
            self._forgo_answer(member)
            self._forget(member)
            return
        world, text = self._world(), f"{member.node.host} was lost: {reason}"
        # It was leaving, and the others wait for its last step (scenario `survive_leave_killed`).
        if member.name in world.leaving_workers:
            self._leaving_workers_gone(now, member, text)
            return
        self._incidents.lost(member.node.host, reason, world.ranks_of(member.name))
        self._member_gone(now, StopReason.MEMBER_LOST, text)

    def _member_gone(self, now: float, reason: StopReason, text: str) -> None:
        if self.phase is Phase.PREPARING:
            # No worker was started, so nothing has to end (scenarios `death_before_prepared`, `death_before_start`).
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

    def _drop_busy(self, now: float, late: list[Member]) -> None:
        for member in late:
            self._drop(member, "did not stop its workers in time")
            self._lose(now, member, "did not stop its workers in time")

    def _forget(self, member: Member) -> None:
        """This node is gone or has no processes any more. If it had no rank, it is not in the generation any more."""
        self._regrouping.forget(self._now, member.name)
        # Its last worker was lost before, or it leaves and the others do not need it any more (scenario
        # `survive_leave_at_once`).
        if self._at_work() and self._in_world(member) and not self._world().places[member.name]:
            self._world().drop(member.name)
            self._membership.changed()

    def _exclude(self, excluded: Iterable[Waiting]) -> None:
        """Report the hosts that are excluded for a time."""
        for waiting in excluded:
            for member in self.members.values():
                self._tell(member, waiting)
        self._membership.changed()

    # ---------------------------------------------------------------- the coordinator before this one

    def _follow_leader(self, now: float, before: PreviousLeader | None) -> None:
        """Begin where the coordinator before this one has ended, if there was one."""
        if before is None:
            return
        charter = before.charter
        if charter is not None:
            self._inherit(now, charter, max(0.0, before.job_s - charter.hosts_job_s))
            self._job_began_s = now - before.job_s
            self._training.take_over(before.training_s)
            self.job_uid = charter.job_uid
        if before.generation:
            self.previous.generation = before.generation
            self._wait_for_fence(before.fenced_at_s)
        if charter is not None and charter.led_from is not None:
            self._why = f"lost {charter.led_from.node.host}, which had the coordinator"
        if charter is not None and charter.outcome is not None:
            self._finish(charter.outcome)

    def _inherit(self, now: float, charter: Charter, hosts_age_s: float) -> None:
        """Continue the counts of an earlier coordinator. `hosts_age_s`: the age of what it knew of hosts."""
        budget = self.budget
        budget.used, budget.streak = charter.restarts, charter.streak
        budget.identical, budget.last_signature = charter.identical, charter.signature
        self.host_backoff.take_over(charter.hosts, now, hosts_age_s)

    def _wait_for_fence(self, fenced_at_s: float) -> None:
        """Workers of an earlier coordinator may be alive until then: form nothing before."""
        if fenced_at_s > self.gathering.not_before_s:
            self.gathering.not_before_s, self.gathering.pause = fenced_at_s, FENCE

    def _observe_previous(self, now: float, member: Member, join: Join) -> None:
        """A joining agent may still run a generation of an earlier coordinator; adopt it if all its nodes rejoin."""
        self.previous.came(member.node.agent)
        if join.running is not None:
            self._membership.set_busy(member, join.running.generation)
        # Agents that have not noticed the loss yet may run workers until their fence (scenario `coordinator_restarts`).
        # A spare took part in no generation, and only knows that there was another coordinator (seed 23827).
        knows_another = join.node.comes_again and not self.newest_generation
        if join.last_generation > self.newest_generation or knows_another:
            self._wait_for_fence(self._authority.reported(now, join))
            if join.led_by:
                self._why = f"lost {join.led_by}, which had the coordinator"
        if self.world is None and not self.job.fixed_ranks:
            self._abandon(self.previous.observe(member, join))
        else:  # with fixed ranks the workers reached their store through the coordinator that is gone
            self.previous.generation = max(self.previous.generation, join.last_generation)
            # Also when only a connection broke: what the node still runs belongs to a generation that ends
            # (scenario `reset`).
            if join.running is not None:
                self._abandon([member])

    def _lost_for_previous(self, member: Member) -> None:
        """This member, or what it ran, is gone: without its part, an earlier coordinator's generation cannot go on."""
        if self.world is None:
            self._abandon(self.previous.lost(member))

    def _resume(self, now: float) -> None:
        """Every node of the previous leader's generation has joined with living workers: continue that generation."""
        world = self.world = self.previous.world(now)
        self._incidents.over()
        self.generation = world.generation
        # The restarts that were used stay used (scenario `resumed`).
        known = max(self.budget.used, self.previous.restart_count)
        self.budget.used = min(known, self.job.max_restarts)
        self._enter(now, Phase.RUNNING)
        for name in world.order:
            if name in self.members:  # else it ended with the coordinator
                self.members[name].first_started_s = now
                self._tell(self.members[name], Resume(world.generation))
        self._training.begin(world)
        self._out += self._regrouping.started(now, world)
        self.previous.parts.clear()
        self._note("resumed", generation=world.generation, order=list(world.order))
        # The nodes that did not come must be suspended by now (test_suspended.py).
        for _, lost in sorted(self.previous.missing.items()):
            node = lost.part.node
            self._incidents.lost(node.host, lost.reason, world.ranks_of(node.member))
            self._lost.append(f"{node.host} was lost: {lost.text}")

    # ---------------------------------------------------------------- GATHERING

    def _gather(self, now: float, reason: str, *, not_before_s: float) -> None:
        self._enter(now, Phase.GATHERING)
        self._regrouping.reset()
        gathering = self.gathering
        gathering.began_s, gathering.not_before_s, gathering.regroup = now, not_before_s, True
        gathering.pause = ""
        self._waiting_said = Pauses.begin(now, self.limits.say_interval_s)
        self._why = reason
        self._count_candidates(now)
        self._note("regrouping", reason=reason, not_before_s=round(not_before_s - now, 3))

    def _advance_gathering(self, now: float) -> None:
        lost = self._authority.gathers(now, self.gathering)
        if (uid := self._authority.continued_uid) is not None:
            self.job_uid = uid
        if self.world is None:
            self.previous.go_on_without(lost)
            if self.previous.all_joined:
                self._resume(now)
                if self._lost:
                    self._on_lost(now)
                return
        # A node that comes with workers of a generation that is not continued kills them first (scenario
        # `not_resumed`).
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
                unfit = "; ".join(member.parked for member in self._membership.parked())
                verdict = self._incidents.newest.verdict
                self._finish(self._endings.no_quorum(reason, text, self.generation, verdict, unfit=unfit))
            case WaitUntil():
                if self._waiting_said.due(now):
                    left = f"; giving up in {decision.deadline_s - now:.0f} s" if decision.gives_up else ""
                    if decision.at_most:
                        left = f"; {decision.deadline_s - now:.0f} s at most"
                    text = f"waiting: {decision.reason} ({self._who_is_here()}){left}"
                    for member in self.members.values():
                        self._tell(member, Waiting(text))

    def _gathering_due_s(self) -> float:
        deadlines = [self._waiting_said.at_s, self._membership.next_change_s(self._now)]
        decision = decide(self.job, self.limits, self.gathering, self._now)
        if isinstance(decision, WaitUntil):
            deadlines.append(decision.deadline_s)
        return min(deadlines)

    def _form(self, now: float) -> None:
        announced, self._announced = self._announced, None
        formation = self._next_formation(self.generation, self.budget.used)
        # The usual restart: the nodes have prepared what Stop announced (scenario `worker_fails`).
        if announced is not None and announced.places == formation.places:
            formation = announced
        # A node came or was lost during the stop. Some nodes have prepared what was announced, so this one gets another
        # number (scenarios `joins_while_stopping`, `lost_while_stopping`).
        elif announced is not None:
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
        # A coordinator that ended may have announced a generation that a node has prepared (scenario
        # `coordinator_lost_while_stopping`).
        generation = max(after, self.previous.generation) + 1
        order = tuple(node.member for node in seats)
        world = World(generation=generation, order=order, places=all_places(seats))
        return Formation(world, assigned(world, self.members, restart_count))

    def _candidates(self) -> Collection[Member]:
        return self._membership.candidates(self._now)

    def _count_candidates(self, now: float) -> None:
        self.gathering.count(len(self._candidates()), self.job.min_nodes, now)

    def _who_is_here(self) -> str:
        here = names(self._candidates()) or "nobody"
        waiting = names([member for member, _ in self._membership.waiting(self._now)])
        parked = names(self._membership.parked())
        also = f"; parked: {parked}" if parked else ""
        return f"{here}; on host back-off: {waiting}{also}" if waiting else here + also

    # ---------------------------------------------------------------- PREPARING

    def _on_prepared(self, now: float, member: Member, message: Prepared) -> None:
        generation = message.generation
        if self._announced is not None and generation == self._announced.world.generation:
            self._announced.world.on_prepared(member.name, message.store_port)
        elif generation == self.generation and self.phase in (Phase.PREPARING, Phase.REGROUPING):
            self._world().on_prepared(member.name, message.store_port)
        # It joins beside running workers, and starts its own (scenario `survive_node_lost`).
        elif generation == self.generation and self._at_work() and member.name in self._regrouping.joining:
            self._regrouping.joined(self._world(), member)
            self._membership.set_busy(member, generation)
            self._start_member(now, member, self._world())

    def _advance_preparing(self, now: float) -> None:
        world = self._world()
        if world.all_prepared:
            self._start(now, world)
        # Else one node that hangs in its preparation holds all others (scenario `prepare_timeout`).
        elif now >= self._phase_since_s + self.limits.prepare_s:
            for name in [name for name in world.order if name not in world.prepared]:
                # The loss of the first of them has ended this phase.
                if self.phase is Phase.PREPARING or name in self.members:
                    member = self.members[name]
                    text = f"not prepared within {self.limits.prepare_s:g} s"
                    self._drop(member, text)
                    self._lose(now, member, text)

    def _prepare_deadline_s(self) -> float:
        return self._phase_since_s + self.limits.prepare_s

    def _start(self, now: float, world: World) -> None:
        assert world.store_port is not None
        regrouped = self.phase is Phase.REGROUPING
        leaving_members = [self.members[name] for name in world.leaving_workers]
        # They have done the last step that the others needed (scenario `survive_leave`).
        for member in leaving_members:
            world.drop(member.name)
        members = [self.members[name] for name in world.order]
        world.started_s = now
        world.master = self._fixed_master or (master_address(members), world.store_port)
        self._gather_until_s = None
        # Before the extensions are called: they see the nodes that are busy.
        for member in members:
            self._membership.set_busy(member, world.generation)
        if not regrouped:
            self._out += self._extensions.start_follows(now, world.generation)
        self._enter(now, Phase.RUNNING)
        self._training.begin(world)
        for member in members:
            self._start_member(now, member, world)
        for member in leaving_members:  # the others do not need them any more
            self._tell(member, Stop(world.generation, StopReason.MEMBER_LEFT))
        self._note("started", generation=world.generation, master="{}:{}".format(*world.master))
        self._out += self._regrouping.started(now, world)
        # A node that wanted to leave meanwhile leaves now (scenarios `survive_leaves`, `survive_leave_twice`).
        if regrouped:
            leaving = next((member for member in members if member.leaving), None)
            if leaving is not None:
                self._drain_for(now, leaving)

    def _start_member(self, now: float, member: Member, world: World) -> None:
        """Order the start of this member's workers. It is busy already."""
        member.first_started_s = member.first_started_s or now
        interval_s = self.limits.progress_interval_of(len(world.order))
        before, age_s = self._endings.before, self._authority.age_s(now)
        self._tell(member, Start(world.generation, *world.master, interval_s, before, self.job_uid, age_s))

    # ---------------------------------------------------------------- RUNNING

    def _advance_running(self, now: float) -> None:
        world = self._world()
        if world.done_count == world.size:
            self._finish(Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0))
            return
        # Workers that have a place and do not go on (test_regrouping.py: workers_that_do_not_go_on_are_restarted).
        if late := self._regrouping.overdue(now, world):
            self._follow(now, late)
            return
        self._follow(now, self._regrouping.replace(now, world))
        if self._regrouping.grows(now, world):
            self._drain(now, StopReason.MEMBER_JOINED, "the new workers are ready", regroups=True)
        elif not self._has_room() or not self._newcomers():
            self._gather_until_s = None
        # Others may come right after the first one: all of them cost one stop or drain (scenario `late_arrival`).
        elif self._gather_until_s is None:
            self._gather_until_s = now + self.limits.gather_s
        elif now >= self._gather_until_s:
            self._take_in(now, world)

    def _running_due_s(self) -> float:
        due_s = min(self._stop_delay.due_s(), self._regrouping.next_change_s(self._now, self._world()))
        if self._gather_until_s is not None:
            return min(due_s, self._gather_until_s)
        return min(due_s, self._membership.next_change_s(self._now)) if self._has_room() else due_s

    def _has_room(self) -> bool:
        """Whether the running world would accept one more node."""
        world = self._world()
        size = len(world.order) + len(self._regrouping.joining)
        return self.job.grow is not Grow.NEVER and size < self.job.max_nodes and not world.done

    def _newcomers(self) -> Collection[Member]:
        """Candidates that are not in the running world."""
        outsiders, joining = self._membership.outsiders(self._now, self._world().places), self._regrouping.joining
        return [member for member in outsiders if member.name not in joining] if joining else outsiders

    def _take_in(self, now: float, world: World) -> None:
        """Let the newcomers join: beside the running workers, if all of these are able to go on with them later."""
        newcomers = self._newcomers()
        text = f"node{'' if len(newcomers) == 1 else 's'} {names(newcomers)} joined"
        # Workers that ran in `ht.survive` before, and start now, will be able to go on with the newcomers: a stop would
        # restart them in vain (test_regrouping.py).
        if self._regrouping.rejoining or self._regrouping.may_admit_later(world):
            self._gather_until_s = now + self.limits.gather_s
        # Beside the running workers (scenario `survive_node_lost`).
        elif self._regrouping.admits(world):
            self._admit(newcomers)
        # At a safe point, or at once if no worker asks for one (scenarios `drain_grow`, `late_arrival`).
        elif self.job.grow is Grow.DRAIN:
            self._drain(now, StopReason.MEMBER_JOINED, text)
        else:
            self._stop(now, StopReason.MEMBER_JOINED, text)

    def _admit(self, newcomers: Collection[Member]) -> None:
        """Let these join the running generation without a worker in it, as far as there is room."""
        world = self._world()
        room = self.job.max_nodes - len(world.order) - len(self._regrouping.joining)
        joining = sorted(newcomers, key=lambda member: member.arrival)[:room]
        self._regrouping.joining.update(member.name for member in joining)
        places = assigned(world, self.members, self.budget.used, joining)
        for member in joining:
            self._tell(member, places[member.name])

    def _on_failures(self, now: float, member: Member, message: WorkersFailed) -> None:
        world, failures = self._world(), message.failures
        past = self._regrouping.past.get(message.generation)
        # The evidence of a loss after which the others went on already. It may show that they must not: an exception,
        # or memory that ran out (test_regrouping.py: out_of_memory_is_known_only_from_the_evidence_and_refused_then).
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
            # It leaves, and its last step is done (test_leaving_nodes.py).
            if member.name in world.leaving_workers and not self._needs(member):
                return
            ranks = spans(failure.rank for failure in failures)
            refused = self._survive(now, f"rank {ranks} on {member.node.host} was lost ({how(failures[0])})")
            if refused is None:
                return
            text += refused
        if self.phase is Phase.RUNNING:
            self._delay_stop(now, failures, text, evidence_follows=message.evidence_follows)
            return
        # What a worker ends with after the agreed safe point is free (test_coordinator_rules.py).
        self._stop(now, self._draining().reason if world.drain_agreed else StopReason.WORKER_FAILED, text)

    def _delay_stop(self, now: float, failures: Sequence[Failure], text: str, *, evidence_follows: bool) -> None:
        """Stop the others now, or wait until the cause is known."""
        order = self._stop_delay.failed(now, self._world(), failures, text, evidence_follows=evidence_follows)
        if isinstance(order, StopDelayed):
            self._extensions.happens_now(now, order)
            order = self._stop_delay.told(now)
        self._follow(now, [order] if order is not None else ())

    def _on_store_lost(self, now: float, text: str) -> None:
        """Workers that can go on after a loss can go on with another store."""
        refused = self._survive(now, text) if self._at_work() else ""
        if refused is not None:
            self._member_gone(now, StopReason.STORE_LOST, text + refused)

    # ---------------------------------------------------------------- DRAINING

    def _drain_for(self, now: float, leaving: Member) -> None:
        """Drain because this member leaves. If the whole job is to end, nobody goes on without it."""
        text = f"{leaving.node.host} is leaving ({leaving.leaving})"
        # When the whole job ends, all workers save at one safe point and end there (scenario `stop_saves`).
        regroups = self._quit is None and (self._world().can_go_on_count > 0 or self._regrouping.rejoining)
        self._drain(now, StopReason.MEMBER_LEFT, text, regroups=regroups)

    def _drain(self, now: float, reason: StopReason, text: str, *, regroups: bool = False, saves: bool = False) -> None:
        """Ask all agents how far their workers are. The safe point to stop at follows from the answers."""
        world = self._world()
        # A node whose ranks are done has no worker that could answer (test_coordinator_rules.py).
        world.drain = Draining(
            reason,
            text,
            awaited={name for name in world.order if name in self.members and not world.finished(name)},
            number=world.drains,
            regroups=regroups,
            saves=saves,
        )
        world.drains += 1
        self._enter(now, Phase.DRAINING)
        self._tell_world(world, Drain(world.generation, text, world.drain.number))
        self._note("draining", generation=world.generation, reason=reason.value, text=text)

    def _advance_draining(self, now: float) -> None:
        world = self._world()
        drain = self._draining()
        if world.done_count == world.size:
            self._finish(Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0))
        elif drain.saves:
            self._advance_saving(now, world, drain)
        # A worker that never reaches its safe point (scenario `drain_timeout`).
        elif now >= self._phase_since_s + (limit_s := self._drain_limit_s()):
            self._stop(now, drain.reason, f"{drain.text}; the workers did not stop within {limit_s:g} s")
        elif drain.safe_point is not None:
            # Also the coordinator's node waits here until all have saved (scenario `drain_host_first`).
            if not any(self._in_world(m) and not world.finished(m.name) for m in self._membership.busy()):
                self._stop(now, drain.reason, drain.text)
        # Replacements join, or a node leaves (scenarios `survive_at_safe_point`, `survive_leave`).
        elif not drain.awaited and (plan := self._regrouping.at_safe_point(world, drain)) is not None:
            self._regroup(now, plan)
        # A rank has ended, so the replacements cannot join (scenario `survive_let_go`).
        elif not drain.awaited and drain.regroups and not self._regrouping.leaving(world):
            self._let_go(now)
        # No worker asks for safe points (scenario `late_arrival`).
        elif not drain.awaited and drain.newest == 0:
            self._stop(now, drain.reason, drain.text)
        elif not drain.awaited:
            # A worker that has reached the newest safe point may have passed it already (scenario `drain_leave`).
            drain.safe_point = drain.newest + 1
            self._tell_world(world, DrainTo(world.generation, drain.safe_point))
            self._note("drain_to", generation=world.generation, safe_point=drain.safe_point)

    def _drain_deadline_s(self) -> float:
        return self._phase_since_s + self._drain_limit_s()

    def _drain_limit_s(self) -> float:
        """Time that the drain may take (s). A node that leaves limits it by itself."""
        return self.limits.safe_point_s if self._draining().regroups else self.limits.drain_s

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

    def _let_go(self, now: float, *, save_at: int = 0) -> None:
        """End the drain: the workers go on in this generation. `save_at`: the safe point at which they save."""
        world = self._world()
        world.drain = None
        self._enter(now, Phase.RUNNING)
        self._tell_world(world, DrainTo(world.generation, save_at, save=bool(save_at)))
        self._note("drain_to", generation=world.generation, safe_point=save_at, **({"save": True} if save_at else {}))

    def _forgo_answer(self, member: Member) -> None:
        """Stop waiting for the drain answer of a member whose workers are gone."""
        world = self.world
        if world is None or world.drain is None or member.name not in world.places:
            return
        if member.busy_generation == 0 or world.finished(member.name):
            world.drain.heard(member.name, 0)

    # ---------------------------------------------------------------- REGROUPING

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

    def _regroup(self, now: float, plan: Plan) -> None:
        """Form the next generation of workers that are already running."""
        before = self._world()
        self._observe_end(now, before)
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

    def _advance_regrouping(self, now: float) -> None:
        world, part = self._world(), self._regrouping
        # All may be done before the safe point at which replacements were to join (scenario `survive_done`).
        if part.all_done(world):
            self._finish(Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0))
        elif part.may_start(world):
            self._start(now, world)
        else:
            self._follow(now, part.advance(now, world, self._phase_since_s))

    def _regrouping_due_s(self) -> float:
        return self._regrouping.due_at_s(self._now, self._world(), self._phase_since_s)

    def _needs(self, member: Member) -> bool:
        """Whether the others cannot leave their generation without the workers of this member, which leaves."""
        return not self._regrouping.at_once and member.name not in self._world().prepared

    def _leaving_workers_gone(self, now: float, member: Member, text: str) -> None:
        """A node that leaves has no worker any more. If the others still need them for their last step, they cannot do
        it: they go on from the one before."""
        needed = self._needs(member) and bool(self._world().leaving_workers[member.name])
        self._forget(member)
        # They cannot do that step any more, and go on from the one before (scenario `survive_leave_killed`).
        if needed:
            self._gone_early(now, member, text)

    # ---------------------------------------------------------------- STOPPING

    def _stop(self, now: float, reason: StopReason, text: str, culprit: Failure | None = None) -> None:
        """Start to end the running generation. `culprit`: the worker for which it is ended."""
        world = self._world()
        if self.phase is Phase.STOPPING:
            return
        world.stop_reason, world.stop_text, world.stop_began_s = reason, text, now
        world.hung = culprit
        self._observe_end(now, world)
        announced = self._announced = self._announcement(world, reason)
        self._enter(now, Phase.STOPPING)
        hung = culprit.rank if culprit is not None else None
        for member in [self.members[name] for name in world.order if name in self.members]:
            place = announced.places[member.name] if announced is not None else None
            self._tell(member, Stop(world.generation, reason, text, place, hung))
        self._note("stopping", generation=world.generation, reason=reason.value, text=text)

    def _observe_end(self, now: float, world: World) -> None:
        """Keep what the extensions know of this world for the verdict: its workers stop, or leave it for another."""
        if world.started_s is not None:  # else what they know is still about the one before
            observed = self._extensions.observed(now)
            world.hang, world.devices = observed.hang, around(observed.devices, now)

    def _announcement(self, world: World, reason: StopReason) -> Formation | None:
        """The generation that follows this stop, where a restart of the same nodes is likely. None: wait for the end of
        the stop, because what is prepared in vain costs a node some work."""
        incident = self._incidents.newest
        # The same nodes would not follow after a loss or a drain (scenario `member_lost`).
        failed = reason in (StopReason.WORKER_FAILED, StopReason.HUNG) and not (world.drain or incident.lost_nodes)
        final = any(failure.exit_code in REQUESTS for failure in incident.failures)
        # No restart follows, or none that is certain (scenarios `requeue`, `budget_spent`, `excluded`;
        # test_announced.py).
        if not failed or final or self._quit or self.job.exclude_after or not self.budget.allows_restart:
            return None
        formation = self._next_formation(self.generation, self.budget.used + (not incident.charged))
        return formation if formation.world.order == world.order else None

    def _on_stopped(self, now: float, member: Member, generation: int) -> None:
        # A message about an earlier generation does not stand for a newer one (test_coordinator_rules.py).
        if member.busy_generation > generation:
            return
        self._membership.set_busy(member, 0)
        self._lost_for_previous(member)
        self._forgo_answer(member)
        current = self._at_work() and self._is_current(member, generation)
        # Its workers ended without an order: it leaves at once (scenario `survive_leave_at_once`).
        if current and member.name in self._world().leaving_workers:
            self._leaving_workers_gone(now, member, f"{member.node.host} has left")
            return
        # It fenced itself, and the others go on without knowing it (test_coordinator_rules.py).
        if current and not self._world().drain_agreed and not self._world().finished(member.name):
            self._stop(now, StopReason.FENCED, f"{member.node.host} had to stop its workers")
        self._forget(member)

    def _advance_stopping(self, now: float) -> None:
        # A node that does not report the end of its workers holds up nobody (test_coordinator_rules.py).
        if now >= self._stop_deadline_s():
            self._drop_busy(now, list(self._membership.busy()))
        if self._membership.anybody_busy:
            return
        world = self._world()
        # The driver may report a fault after the worker that has died of it.
        world.devices = around(self._extensions.observed(now).devices, world.stop_began_s)
        match self._endings.stopped(now, world, self._incidents.newest):
            case Restart(backoff_s, notice, excluded):
                if notice is not None:
                    self._tell_world(world, notice)
                self._exclude(excluded)
                self._gather(now, world.stop_text, not_before_s=now + backoff_s)
            case Outcome() as outcome:
                self._finish(outcome)

    def _stop_deadline_s(self) -> float:
        return self._phase_since_s + self._stop_patience_s()

    def _stop_patience_s(self) -> float:
        return self.limits.stop_grace_s + self.limits.stop_slack_s

    # ---------------------------------------------------------------- OVER

    def _finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._enter(self._now, Phase.OVER)
        for member in self.members.values():
            self._tell(member, Finish(outcome if member.first_started_s is not None else self._end_of(member.node)))
        self._note("over", kind=outcome.kind.value, exit_code=outcome.exit_code)
        self._out.append(Conclude(outcome))

    def _end_of(self, node: NodeSpec) -> Outcome:
        """The end of the job for a node that took no part in it."""
        assert self.outcome is not None
        return ended_without(self.outcome, self.job.run_id, self._versions.other_line(node))

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
            case EndGeneration(reason, text, culprit):
                if self._at_work():
                    self._stop(now, reason, text, culprit)
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
            case Park(name, text) if name in self.members:
                self._park(now, self.members[name], text)
            case Unpark(name) if name in self.members:
                self.members[name].parked = ""
                self._membership.changed()

    def _park(self, now: float, member: Member, text: str) -> None:
        """This node is not fit for a generation: form without it."""
        member.parked = text
        self._exclude([Waiting(text)])
        if self.phase is Phase.PREPARING and self._in_world(member):
            self._gather(now, text, not_before_s=now)
        # It was to join beside running workers: they do not wait for it.
        elif self._at_work() and not member.busy_generation:
            self._forget(member)

    def _on_quit(self, quit_: Quit) -> None:
        """Every agent ends, as if the scheduler had sent each node a signal. The outcome follows from their reports."""
        self._quit = quit_
        self._note("quit", drain=quit_.drain, by=quit_.by)
        for member in self.members.values():
            self._tell(member, quit_)

    # ---------------------------------------------------------------- small steps

    def _world(self) -> World:
        assert self.world is not None
        return self.world

    def _draining(self) -> Draining:
        drain = self._world().drain
        assert drain is not None
        return drain

    def _in_world(self, member: Member) -> bool:
        return (
            self.phase not in (Phase.GATHERING, Phase.OVER)
            and self.world is not None
            and member.name in self.world.places
        )

    def _at_work(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.DRAINING, Phase.REGROUPING)

    def _is_current(self, member: Member, generation: int) -> bool:
        return generation == self.generation and self._in_world(member)

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

    def __init__(self, machine: Coordinator) -> None:
        self._machine = machine

    @property
    def run_id(self) -> str:
        return self._machine.job.run_id

    @property
    def limits(self) -> Limits:
        return self._machine.limits

    @property
    def phase(self) -> str:
        return self._machine.phase.value

    @property
    def generation(self) -> int:
        return self._machine.generation

    @property
    def world_size(self) -> int:
        return self._machine.world.size if self._machine.world is not None else 0

    @property
    def throughput(self) -> Throughput | None:
        return self._machine.throughput

    def members(self) -> list[MemberSeen]:
        return [
            MemberSeen(each.name, each.node.host, each.node.hosts_coordinator)
            for each in self._machine.members.values()
        ]

    def keeps_out(self, host: str, now: float) -> bool:
        return self._machine.host_backoff.until_s(host, now) > now

    def address(self, member: str) -> str:
        found = self._machine.members.get(member)
        if found is None:
            return ""
        if found.node.local_addr or not is_local(found.address):
            return master_address([found])
        # It came over loopback.
        return master_address([found, *(each for each in self._machine.members.values() if each is not found)])

    def nodes(self) -> list[NodeSeen]:
        world, found, rank_base = self._machine.world, [], 0
        for name in world.order if world is not None else ():
            assert world is not None
            member, local_ranks = self._machine.members.get(name), world.places[name]
            if member is not None and member.busy_generation:
                done = world.finished(name)
                found.append(NodeSeen(name, member.node.host, rank_base, local_ranks, done))
            rank_base += len(local_ranks)
        return found

    def view(self, now: float) -> JobView:
        return self._machine.view(now)
