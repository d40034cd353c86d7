"""One node's agent: one mutator, `handle(now, event) -> commands`; no clock, no socket, no randomness.

    link   DOWN ──► DIALING ──► UP ──► DOWN …         retried until the join deadline
    work   IDLE ──► PREPARING ──► PREPARED ──► RUNNING ──► DRAINING ──► STOPPING ──► KILLING ──► IDLE …
                                                 ▲ │           │
                                             REGROUPING ◄──────┘     the workers form another generation

The agent follows the coordinator, with two exceptions. A signal to the agent ends its own part in the job. An agent
without any answer for `fence_s` kills its workers, because the others may continue without it from then on. A new
coordinator may let these workers continue if it sends Resume before that.

This file has the state and the decisions, in the order: the table of work, the state, the surface, how one event is
decided, the link, the fences, then the phases of the work in the order of the diagram, and the end.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf

from msgspec import structs

from holdfast.agent.commands import (
    Command,
    ContinueWorkers,
    Dial,
    Exit,
    HangUp,
    HoldWorkers,
    KillTree,
    Prepare,
    RegroupWorkers,
    ReleaseWorkers,
    Say,
    Send,
    SignalWorkers,
    StartReplacements,
    StartWorkers,
)
from holdfast.agent.events import (
    Dialed,
    DialFailed,
    Event,
    FailureRead,
    LinkLost,
    NodePrepared,
    PassSignal,
    PrepareFailed,
    Received,
    RegroupRefused,
    ReplacementsReady,
    Signalled,
    StoreDied,
    TreeGone,
    WorkerEnded,
    WorkerRaised,
    WorkersCanGoOn,
    WorkersFenced,
    WorkersHeld,
    WorkersProgress,
)
from holdfast.agent.lease import Lease
from holdfast.agent.local_generation import LocalGeneration, Work
from holdfast.agent.seeking import Seeking
from holdfast.protocol.exit_codes import EXIT_REQUEUE, EXIT_SIGNAL_BASE
from holdfast.protocol.messages import (
    Abandon,
    Assign,
    CanGoOn,
    CannotRegroup,
    Drain,
    DrainTo,
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
    Replace,
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
from holdfast.protocol.policy import Limits, NodeSpec, Note, Tick
from holdfast.protocol.rank_progress import Stage

KEYBOARD_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
"""A user wants the end now. Every other signal that ends this node's part is a notice, with time to drain."""
WAIT_FOR_PING = 0.25
"""A report waits for the next ping this part of its interval at most: one message instead of two."""
SUSPENDED_S_MAX = 5.0
"""If answers come, and workers are suspended for longer all the same, this agent suspends none any more."""
SUSPENDED_SHARE = 0.1
"""This part of the time they may be suspended without end."""
FAREWELL_S = 1.0
"""A leaving node whose ranks are all done waits this long for the end of the job, which may follow at once."""


# -------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class WorkRow:
    """What the agent does in one phase of its work."""

    to: Mapping[Work, str]
    """The phases that may follow, and when. No other change of the work is possible (`Agent._enter`)."""
    advance: Callable[[Agent, float], None] = lambda _agent, _now: None
    """Called once with the time after every event. Nothing: only an order, a signal or the shell's event ends it."""
    due_s: Callable[[Agent], float] = lambda _agent: inf
    """The time at which this phase has something to do without an event; inf: never."""


WORK: Mapping[Work, WorkRow] = {
    Work.IDLE: WorkRow({Work.PREPARING: "Assign, or the last Stop announced the next generation"}),
    Work.PREPARING: WorkRow(
        {
            Work.PREPARING: "Assign of a newer generation: a member was lost before the generation started",
            Work.PREPARED: "NodePrepared",
            Work.IDLE: "the link was lost, or the node is leaving; nothing was started",
        }
    ),
    Work.PREPARED: WorkRow(
        {
            Work.PREPARING: "Assign of a newer generation: a member was lost before the generation started",
            Work.RUNNING: "Start",
            Work.IDLE: "the link was lost, or the node is leaving; nothing was started",
        }
    ),
    Work.RUNNING: WorkRow(
        {
            Work.DRAINING: "Drain, or a signal to the agent: the workers are held at their next safe point",
            Work.REGROUPING: "Regroup: the workers form another generation with or without others",
            Work.STOPPING: "Stop, or a signal to the agent",
            Work.KILLING: "fenced, Abandon, all ranks done (what they left is cleaned), or the job is over",
        },
        lambda agent, now: agent._advance_running(now),
        lambda agent: agent._workers_fence_at_s(),
    ),
    Work.DRAINING: WorkRow(
        {
            Work.RUNNING: "the drain is over, or the link was lost before it was agreed: the workers are let go",
            Work.REGROUPING: "Regroup: the workers form another generation with or without others",
            Work.STOPPING: "Stop, no worker asks for safe points, or patience is at its end",
            Work.KILLING: "all leaders are gone, fenced, or the job is over",
        },
        lambda agent, now: agent._advance_draining(now),
        lambda agent: agent._workers_fence_at_s(),
    ),
    Work.REGROUPING: WorkRow(
        {
            Work.REGROUPING: "Regroup of a newer generation",
            Work.RUNNING: "Start",
            Work.STOPPING: "Stop, or a signal to the agent",
            Work.KILLING: "the link was lost, fenced, Abandon, all ranks done, or the job is over",
        },
        lambda agent, now: agent._advance_running(now),
        lambda agent: agent._workers_fence_at_s(),
    ),
    Work.STOPPING: WorkRow(
        {Work.KILLING: "all leaders are gone, or the grace is over"},
        lambda agent, now: agent._advance_stopping(now),
        lambda agent: agent._stop_deadline_s(),
    ),
    Work.KILLING: WorkRow(
        {
            Work.RUNNING: "all ranks were done and are cleaned; the others are still at work",
            Work.IDLE: "TreeGone",
        }
    ),
}


class Link(Enum):
    DOWN = "down"
    """There is no connection; the next attempt is due at a known time."""
    DIALING = "dialing"
    UP = "up"


class Agent:
    """Joins the job, starts and stops this node's workers, reports."""

    limits: Limits
    _node: NodeSpec
    """This node; never changed."""

    # the work
    work: Work
    """Changed by `_enter` only, along WORK."""
    current: LocalGeneration | None
    """This node's part in the present generation. None if and only if the work is IDLE."""
    _last_generation: int
    """The newest generation in which this node had a place. It only grows. 0: none."""
    _led_by: str
    """The node that hosted the coordinator of that generation, with its ranks, in words."""
    _prepared_s: float
    """The time at which Prepared was sent last. The Start that answers it confirms that the coordinator had this agent
    then."""
    _drained: bool
    """The newest generation left at a safe point, and no other one has begun since."""
    _progress: tuple[WorkersProgress, float] | None
    """The newest report of the workers' progress and its time, until it is sent."""
    _report_wait_s: float
    """A report is sent at once unless a ping is due within this time."""

    # the link
    link: Link
    """What the shell has reported, and what was ordered since (Dial, HangUp)."""
    _joined: bool
    """The coordinator has answered the Join. Only while the link is UP."""
    _join_sent_s: float | None
    """The time at which Join was sent on the present link; None: it was not."""
    _joins: int
    """Joins on links that were lost. It only grows: each join has another identity."""
    _local: bool
    """The coordinator runs in this process: both sleep at the same time, and no network is between them."""
    _listens: int
    """The port at which this agent listens, as in Join. The shell reports it with Dialed."""
    _known_term: int
    """The newest term that this node knows, as in Join; the shell reports it with Dialed."""
    _unlinked_s: float
    """The time at which the link to the last coordinator broke; inf: it became silent, so that coordinator may live
    on."""
    _seeking: Seeking
    """The search for the coordinator. Begins again whenever the link was lost."""

    # the fences
    _lease: Lease
    """What the coordinator has confirmed. Kept when the link is lost: the fence of the workers counts from it."""
    _unconfirmed_fence_at_s: float
    """The time at which the workers are killed unless a coordinator that knows their generation sends Resume before.
    Means something while `current` is not confirmed."""
    _suspended_s: float | None
    """The time at which the workers were suspended, because the coordinator does not answer; None: they run."""
    _suspended_lately_s: float
    """The time for which they were suspended although answers came, less the share of all time that is allowed (s)."""
    _counted_s: float
    """The time until which that was counted: when the newest answer came."""
    _too_slow: bool
    """Answers take too long here: no worker is suspended. Never taken back."""

    # the end
    leaving: Signalled | None
    """The signal for which this node leaves, which is never taken back; None: it stays."""
    _leave_by_s: float
    """The time at which a leaving agent stops waiting for its workers to drain."""
    _pending_exit: Outcome | None
    """The outcome, as soon as it is certain: nothing but the end of this node's processes is awaited any more."""
    outcome: Outcome | None
    """Set with the command Exit. Every later event is ignored."""
    _out: list[Command]
    """The commands of this event. Empty between two events."""

    def __init__(self, node: NodeSpec, limits: Limits, now: float) -> None:
        """`node.member` is this agent's identity. Each later join appends a counter, so that none is used twice."""
        self.limits = limits
        self._node = node
        self.work = Work.IDLE
        self.current = None
        self._last_generation = 0
        self._led_by = ""
        self._prepared_s = now
        self._drained = False
        self._progress = None
        self._report_wait_s = 0.0
        self.link = Link.DOWN
        self._joined = False
        self._join_sent_s = None
        self._joins = 0
        self._local = False
        self._listens, self._known_term = 0, 0
        self._unlinked_s = now
        self._seeking = Seeking.begin(limits, now)
        self._lease = Lease(limits.fence_s, limits.ping_interval_s, confirmed_s=now, ping_at_s=now)
        self._unconfirmed_fence_at_s = inf
        self._suspended_s = None
        self._suspended_lately_s, self._counted_s = 0.0, now
        self._too_slow = False
        self.leaving = None
        self._leave_by_s = inf
        self._pending_exit = None
        self.outcome = None
        self._out = []

    # ---------------------------------------------------------------- surface

    def handle(self, now: float, event: Event) -> list[Command]:
        if self.outcome is None:
            self._dispatch(now, event)
            self._advance(now)
            self._look_at_suspension(now)
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> float | None:
        """The time at which the next Tick is due; None once Exit was emitted."""
        if self.outcome is not None:
            return None
        deadlines = [WORK[self.work].due_s(self)]
        if self._pending_exit is None and self.leaving is None:
            if self.link is Link.DOWN:
                deadlines.append(min(self._seeking.dial_at_s, self._seeking.deadline_s))
            if self.link is not Link.UP:
                deadlines.append(self._seeking.notices.at_s)
        if self.link is Link.UP and self._joined:
            deadlines.append(self._lease.ping_at_s)
        if self._awaits_answer():
            deadlines.append(self._fence_at_s())
        if self.suspend_at_s is not None and self._suspended_s is None:
            deadlines.append(self.suspend_at_s)
        if self.leaving is not None and self._pending_exit is None:
            deadlines.append(self._leave_by_s)
        first = min(deadlines)
        return None if first == inf else first

    def check_invariants(self) -> None:
        assert (self.current is None) == (self.work is Work.IDLE)
        if self.work is Work.RUNNING and self.current is not None:
            assert not self.current.all_done or self.current.cleaned
        assert not (self._joined and self.link is not Link.UP)

    @property
    def identity(self) -> str:
        """The identity of the latest join; the next join uses another one."""
        return self._node.member if self._joins == 0 else f"{self._node.member}.{self._joins}"

    @property
    def fence_at_s(self) -> float | None:
        """The time at which the workers are killed unless an answer arrives; None: never, or there are none."""
        if not (self._at_work() or self.work is Work.STOPPING):
            return None
        at_s = self._workers_fence_at_s()
        return None if at_s == inf else at_s

    @property
    def suspend_at_s(self) -> float | None:
        """The time at which the supervisor suspends the workers unless an answer arrives; None: never. From some time
        after it on the others may go on without them. Workers that are being stopped are no exception: a coordinator
        that has a successor by now may have stopped them."""
        if self.work is Work.KILLING:
            return self._suspended_s  # none of them runs again before it is killed
        if self.fence_at_s is None or not self._suspends:
            return None
        return self._unanswered_since_s() + self._lease.suspend_s

    # ---------------------------------------------------------------- how one event is decided

    def _dispatch(self, now: float, event: Event) -> None:
        match event:
            case Dialed(local, port, term):
                self.link, self._join_sent_s, self._local = Link.UP, None, local
                self._listens, self._known_term = port, term
                self._seeking.connected()
            case DialFailed():
                self._on_dial_failed(now, event)
            case LinkLost(reason):
                self._on_link_lost(now, reason)
            case Received(message):
                self._on_message(now, message)
            case NodePrepared():
                self._on_prepared(now, event)
            case PrepareFailed(generation, code, exit_code, reason):
                # A node that cannot take part reports that and leaves: the others form without it (scenario
                # `cannot_prepare`).
                if self._is_preparing(generation):
                    self._leave(f"cannot take part: {reason}")
                    self._end(Outcome(kind=OutcomeKind.REFUSED, exit_code=exit_code, code=code, message=reason))
            case WorkerEnded() | WorkerRaised() | FailureRead():
                self._on_worker(event)
            case WorkersHeld() | WorkersProgress():
                self._on_report(now, event)
            case WorkersCanGoOn() | ReplacementsReady() | RegroupRefused():
                self._on_regrouping(now, event)
            case WorkersFenced():
                # Their ends follow, and must not be reported as failures
                # (test_workers_killed_by_the_supervisor_at_the_fence_are_no_failures).
                if self._at_work() or self.work is Work.STOPPING:
                    self._note("fenced_by_supervisor")
                    self._kill()
            case TreeGone(generation):
                self._on_tree_gone(now, generation)
            case StoreDied(generation):
                if self._at_work() and self._current().generation == generation:
                    self._report(StoreLost(generation))
            case Signalled():
                self._on_signal(now, event)
            case PassSignal(signum):
                if self._at_work() or self.work is Work.STOPPING:
                    self._out.append(SignalWorkers(signum, to_end=False))
            case Tick():
                pass

    def _on_message(self, now: float, message: FromCoordinator) -> None:
        match message:
            case Joined(lease_s, fence_s, ping_interval_s):
                self._joined = True
                # What was long on its way renews the lease only as of the time at which it was sent
                # (test_the_fence_counts_from_what_was_sent_not_from_what_came_back).
                asked_s = self._join_sent_s if self._join_sent_s is not None else now
                granted = lease_s, fence_s, ping_interval_s, 0.0 if self._too_slow else message.suspend_s
                self._lease.granted(*granted, confirmed_s=asked_s - message.age_s, now=now)
                if self.current is not None and self.current.suspends:
                    self._lease.hurry(now)
            case Pong(number, age_s):
                self._lease.answered(number, age_s)
                self._count_suspension(now)
            case Waiting(text):
                self._out.append(Say(text))
            case Notice(text, victims):
                self._out.append(Say(text, victims))
            case Assign():
                self._on_assign(message)
            case Start() if now < self._fence_at_s():  # else this process has slept: the others are without it now
                self._on_start(message)
            case Regroup(assign, safe_point, text):
                self._on_regroup(now, assign, safe_point, text)
            case Replace(generation, local_ranks):
                self._on_replace(generation, local_ranks)
            case Drain(generation, text, number):
                self._on_drain(generation, text, number)
            case DrainTo(generation, safe_point, save):
                self._on_drain_to(generation, safe_point, save=save)
            case Resume(generation):
                self._on_resume(now, generation)
            case Abandon(generation):
                if self._at_work() and self._current().generation == generation:
                    self._kill()
            case Stop():
                self._on_stop(now, message)
            case Finish(outcome):
                self._end(outcome)
            case Quit(drain, by):
                self._on_quit(now, drain=drain, by=by)
            case Refuse(code, text):
                self._end(Outcome(kind=OutcomeKind.REFUSED, exit_code=2, code=code, message=text))

    def _on_report(self, now: float, event: WorkersHeld | WorkersProgress) -> None:
        """Report how far the workers are."""
        match event:
            case WorkersHeld(generation, reached, saves):
                self._on_held(now, generation, reached, saves=saves)
            case WorkersProgress():
                self._on_progress(now, event)

    def _advance(self, now: float) -> None:
        if self.leaving is not None and self._pending_exit is None and now >= self._leave_by_s:
            self._go(now)
        WORK[self.work].advance(self, now)
        if self._awaits_answer() and now >= self._fence_at_s():
            # This node may be cut off, or the coordinator: another one may answer (scenario `silent_node`).
            self._out.append(HangUp("no answer"))
            self._on_link_lost(now, f"no answer for {self._lease.fence_s:g} s", silent=True)
        if self._joined and now >= self._lease.ping_at_s and not self._send_progress(now):
            self._send(Ping(self._lease.ping(now)))
        if self._pending_exit is not None:
            self._advance_exit(self._pending_exit)
        elif self.leaving is not None:
            return
        elif self.link is Link.DOWN:
            self._advance_seeking(now)
        elif self.link is Link.DIALING:
            self._say_progress(now)
        elif not self._joined:
            self._advance_joining(now)

    def _enter(self, work: Work) -> None:
        """The only change of the work."""
        if work not in WORK[self.work].to:
            raise AssertionError(f"no transition {self.work} -> {work}")
        self.work = work

    # ---------------------------------------------------------------- the link

    def _advance_seeking(self, now: float) -> None:
        if now >= self._seeking.deadline_s:
            self._end(self._seeking.gave_up(knew_one=self._last_generation > 0, led_by=self._led_by))
            if self._pending_exit is not None:
                self._advance_exit(self._pending_exit)
        elif now >= self._seeking.dial_at_s:
            self.link = Link.DIALING
            self._out.append(Dial(self._named_node()))
        else:
            self._say_progress(now)

    def _say_progress(self, now: float) -> None:
        if text := self._seeking.progress(now):
            self._out.append(Say(text))

    def _on_dial_failed(self, now: float, event: DialFailed) -> None:
        self.link = Link.DOWN
        self._seeking.failed(now, event)
        if event.final:
            self._end(
                Outcome(kind=OutcomeKind.REFUSED, exit_code=event.exit_code, code=event.code, message=event.reason)
            )

    def _advance_joining(self, now: float) -> None:
        """The link is up but this agent has not joined: join without workers, or with workers that the coordinator may
        let continue. Workers that drain reach their safe point (or their fence) first."""
        # A generation of which a worker failed cannot be continued (scenario `not_resumed`).
        broken = self.work is Work.RUNNING and bool(
            self._current().raised or self._current().ended != self._current().done
        )
        if self.work is Work.STOPPING or broken or (self.work is Work.RUNNING and not self._current().active):
            self._kill()
        elif self.work in (Work.IDLE, Work.RUNNING) and self._join_sent_s is None:
            self._join_sent_s = now
            self._lease.confirmed_s = now
            unlinked_s = max(0.0, now - self._unlinked_s) if self._last_generation else 0.0
            running = self.current.running() if self.current is not None else None
            suspends = not self._too_slow
            about = self._last_generation, unlinked_s, running, self._led_by, suspends, self._listens, self._known_term
            self._send(Join(self._named_node(), *about))

    def _named_node(self) -> NodeSpec:
        return structs.replace(self._node, member=self.identity)

    def _awaits_answer(self) -> bool:
        """Whether an answer to a Join or Ping is outstanding. It hangs up only when its workers are gone: with one-way
        loss the coordinator hears the end of the link at once, and would let the others go on beside workers that are
        still being killed (succession seed 64)."""
        return self.link is Link.UP and self._join_sent_s is not None and self.work is not Work.KILLING

    def _on_link_lost(self, now: float, reason: str, *, silent: bool = False) -> None:
        self.link = Link.DOWN
        # The coordinator may have seen that identity, and each is used once
        # (test_it_joins_with_an_identity_never_used_before).
        if self._join_sent_s is not None:
            self._joins += 1
        if self._joined:
            self._unlinked_s = inf if silent else now
        self._joined, self._join_sent_s = False, None
        self._seeking = Seeking.begin(self.limits, now)
        self._note("link_lost", reason=reason)
        if self._pending_exit is None and self.leaving is None:
            where = f" on {self._led_by}" if self._led_by else ""
            self._out.append(Say(f"lost the coordinator{where}: {reason}; trying to reach it again"))
        # Nothing was started, so nothing has to end (scenario `coordinator_lost_while_stopping`).
        if self.work in (Work.PREPARING, Work.PREPARED):
            self._idle()
        # They have left the generation that another coordinator could continue (scenario `survive_link_lost`).
        elif self.work is Work.REGROUPING:
            self._kill()
        elif self.current is not None and self.current.confirmed:
            self.current.confirmed = False
            self._unconfirmed_fence_at_s = self._lease.fence_at_s
        held = self.work is Work.DRAINING and self._current().safe_point is None
        # Nobody is left who could agree on a safe point (scenario `drain_link_lost`).
        if self.leaving is not None and (held or self.work is Work.IDLE):
            self._go(now)
        elif held:
            self._let_go()

    # ---------------------------------------------------------------- fences and suspension

    def _fence_at_s(self) -> float:
        return inf if self._local and self.link is Link.UP else self._lease.fence_at_s

    def _unanswered_since_s(self) -> float:
        """The latest time at which a coordinator had confirmed the workers' generation."""
        at_s = self._fence_at_s() if self._current().confirmed else self._unconfirmed_fence_at_s
        return at_s - self._lease.fence_s

    def _workers_fence_at_s(self) -> float:
        """Workers that are suspended before cannot run beside others: a successor may let them continue until later."""
        suspended = self.work in (Work.RUNNING, Work.DRAINING) and self._suspends
        return self._unanswered_since_s() + (self._lease.lease_s if suspended else self._lease.fence_s)

    @property
    def _suspends(self) -> bool:
        return self._current().suspends and self._lease.suspend_s > 0

    def _look_at_suspension(self, now: float) -> None:
        """Report what the supervisor does at `suspend_at_s`."""
        at_s, before_s = self.suspend_at_s, self._suspended_s
        self._suspended_s = at_s if at_s is not None and now >= at_s else None
        if self._suspended_s is not None and before_s is None:
            silent_s = now - self._unanswered_since_s()
            self._note("workers_suspended", silent_s=round(silent_s, 3))
            text = "until it answers this node's workers are suspended"
            self._out.append(Say(f"no answer from the coordinator for {silent_s:.1f} s: {text}"))
        elif at_s is not None and self._suspended_s is None and before_s is not None:
            self._note("workers_continued")
            self._out.append(Say("the coordinator answers again: the workers continue"))

    def _count_suspension(self, now: float) -> None:
        """Answers that take too long would suspend the workers again and again, or for ever: join again as an agent
        that suspends none. As long as the coordinator has this link it relies on it, so the workers start again."""
        passed_s, self._counted_s = now - self._counted_s, now
        suspended_s = 0.0 if self._suspended_s is None else min(passed_s, now - self._suspended_s)
        self._suspended_lately_s = max(0.0, self._suspended_lately_s + suspended_s - SUSPENDED_SHARE * passed_s)
        if self._suspended_lately_s <= SUSPENDED_S_MAX or self._too_slow:
            return
        self._too_slow = True
        self._note("suspends_no_more", suspended_s=round(self._suspended_lately_s, 3))
        text = (
            "the coordinator's answers take too long: this node's workers start again, and are not suspended any more"
        )
        self._out.append(Say(text))
        if self._at_work():
            self._kill()
        self._out.append(HangUp("its answers take too long"))
        self._on_link_lost(now, "its answers take too long")

    # ---------------------------------------------------------------- IDLE, PREPARING, PREPARED

    def _idle(self) -> None:
        self._enter(Work.IDLE)
        self.current = None

    def _on_assign(self, assign: Assign) -> None:
        if self.work not in (Work.IDLE, Work.PREPARING, Work.PREPARED) or self._going():
            return
        self._enter(Work.PREPARING)
        self.current = LocalGeneration(assign, self._node.nproc)
        self._last_generation, self._led_by = assign.generation, assign.led_by
        self._out.append(Prepare(assign))

    def _is_preparing(self, generation: int) -> bool:
        return self.work is Work.PREPARING and self._current().generation == generation

    def _on_prepared(self, now: float, event: NodePrepared) -> None:
        if self.current is None or self.current.generation != event.generation:
            return
        if self.work is Work.PREPARING:
            self._enter(Work.PREPARED)
        if self.work in (Work.PREPARED, Work.REGROUPING):
            self._prepared_s = now
            self.current.leaving_workers_wait = bool(self.current.leaving_workers)
            self._send(Prepared(event.generation, event.store_port))

    # ---------------------------------------------------------------- RUNNING

    def _on_start(self, start: Start) -> None:
        if self.work in (Work.PREPARED, Work.REGROUPING) and self._current().generation == start.generation:
            begin = StartWorkers if self.work is Work.PREPARED else ContinueWorkers
            self._lease.confirm(self._prepared_s - start.age_s)
            self._report_wait_s = WAIT_FOR_PING * start.progress_interval_s
            self._drained = False
            self._enter(Work.RUNNING)
            self._out.append(begin(self._current().assign, start))
            if self.leaving is not None:  # since before the workers regrouped
                self._hold()

    def _on_resume(self, now: float, generation: int) -> None:
        """A new coordinator continues this generation: all its nodes have joined."""
        current = self.current
        if (
            current is None
            or current.generation != generation
            or current.confirmed
            or now >= self._workers_fence_at_s()
        ):
            return
        current.confirmed = True
        self._note("resumed", generation=generation)
        # The new coordinator has not heard of ranks that ended since this agent joined (scenario `resumed`).
        for local_rank in sorted(current.done):
            self._send(WorkerDone(generation, local_rank))
        # Else the next loss would not be survived (scenario `survive_coordinator_ends`).
        if current.can_go_on:
            self._send_can_go_on(current)

    def _advance_running(self, now: float) -> None:
        """Act on the state of workers that run, or that regroup."""
        current = self._current()
        # What finished ranks have left behind is killed at once (scenario `one_node`).
        if current.all_done and not current.cleaned:
            self._kill()
        # From now on the others may continue without this node (scenario `silent_node`).
        elif now >= self._workers_fence_at_s():
            silent_s = now - self._unanswered_since_s()
            self._out.append(Say(f"no answer from the coordinator for {silent_s:.1f} s: stopping this node's workers"))
            self._note("fenced", silent_s=round(silent_s, 3))
            self._kill()

    def _on_worker(self, event: WorkerEnded | WorkerRaised | FailureRead) -> None:
        current = self.current
        if current is None:
            return
        # A replacement takes no part yet: its end is no failure of the generation (scenario `survive_wait`).
        if current.replacements.concerns(event):
            failure = current.replacements.heard(event, self._node.host)
            if failure is not None and self._at_work() and current.confirmed:
                self._send(ReplacementFailed(current.generation, (failure,)))
            return
        # The others went on before the evidence was read (test_agent_regrouping.py).
        if isinstance(event, FailureRead) and event.generation < current.generation:
            self._on_failure(current, event.failure, bare=False, generation=event.generation)
            return
        if current.generation != event.generation:
            return
        match event:
            case WorkerRaised(_, local_rank, failure, evidence_follows):
                # The generation ends now. Like every stop it waits for what this process does before it ends.
                if local_rank not in current.ended | current.raised:
                    current.raised.add(local_rank)
                    self._on_failure(current, failure, bare=evidence_follows)
            case FailureRead(failure=failure):
                self._on_failure(current, failure, bare=False)
            case WorkerEnded():
                self._on_worker_ended(current, event)

    def _on_worker_ended(self, current: LocalGeneration, event: WorkerEnded) -> None:
        current.ended.add(event.local_rank)
        if event.local_rank in current.raised:
            return  # reported already
        if event.failure is not None:
            self._on_failure(current, event.failure, bare=event.evidence_follows)
        elif event.drained:
            current.drained.add(event.local_rank)
        else:
            current.done.add(event.local_rank)
            # An agent that was stopped for longer than a fence kills first and reads the exit statuses later: without
            # this report the other nodes waited for done ranks without end (seed 4000).
            fenced = self.work is Work.KILLING and not current.stopped
            if current.confirmed and (self._at_work() or fenced):  # it has done its work, perhaps before it was killed
                self._send(WorkerDone(event.generation, event.local_rank, event.left))

    def _on_failure(self, current: LocalGeneration, failure: Failure, *, bare: bool, generation: int = 0) -> None:
        """Report a failure. A worker that failed before the order to stop arrived may be the culprit. One that failed
        after it may be the culprit only if it raised an exception, if a stop cannot cause its exit status, or if it
        caused the hang for which all are stopped."""
        spared = failure.after_stop and not failure.error_type and failure.stop_may_cause
        if spared and (bare or failure.rank != current.hung):
            return
        if bare:
            self._report(WorkersFailed(current.generation, (failure,), evidence_follows=True))
        else:
            self._report(WorkersFailed(generation or current.generation, (failure,)))

    def _report(self, message: FromAgent) -> None:
        """Report a fault that ends the generation. If no coordinator knows the generation, kill the workers."""
        if self._current().confirmed:
            self._send(message)
        # Else a new coordinator could continue a generation of which this rank is lost
        # (test_a_failure_that_nobody_can_be_told_ends_the_generation_here).
        elif self._at_work():
            self._kill()

    def _on_progress(self, now: float, event: WorkersProgress) -> None:
        self._progress = event, now
        if now + self._report_wait_s < self._lease.ping_at_s:
            self._send_progress(now)

    def _send_progress(self, now: float) -> bool:
        """Send what the workers have reported, if they still work. Returns whether that takes the place of a ping."""
        if self._progress is None:
            return False
        (event, then_s), self._progress = self._progress, None
        current = self.current
        if not (self._at_work() and self._joined and current is not None and current.confirmed):
            return False
        if current.generation != event.generation:
            return False
        # The board does not record ends (test_the_board_knows_no_ends_but_the_agent_does).
        done, age_s = dict.fromkeys(current.done, Stage.DONE), now - then_s
        ranks = tuple(
            structs.replace(each, stage=done.get(each.local_rank, each.stage), age_s=each.age_s + age_s)
            for each in event.ranks
        )
        ping = self._lease.ping(now)
        self._send(Progress(event.generation, ranks, event.job_step, event.job_steps, ping))
        return bool(ping)

    # ---------------------------------------------------------------- DRAINING

    def _hold(self) -> None:
        self._enter(Work.DRAINING)
        self._hold_again()

    def _hold_again(self) -> None:
        self._out.append(HoldWorkers(self._current().generation))

    def _on_drain(self, generation: int, text: str, number: int) -> None:
        current = self.current
        if current is None or current.generation != generation:
            return
        current.asked, current.drain_text, current.drain = True, text, number
        if self.work is Work.RUNNING and not current.all_done:
            self._hold()
        elif self.work is Work.DRAINING and current.reached is not None:
            self._send(Held(generation, current.reached, drain=number))

    def _on_held(self, now: float, generation: int, reached: int, *, saves: bool) -> None:
        current = self.current
        if (
            self.work is not Work.DRAINING
            or current is None
            or current.generation != generation
            or current.reached is not None
        ):
            return
        # They have just gone on from a regroup, and have not come to a safe point yet (scenario `survive_leave_twice`).
        if reached == 0 and current.asks:
            self._hold_again()
            return
        current.reached = reached
        # No worker asks for safe points: to wait for one would cost the notice its time
        # (test_a_notice_stops_at_once_where_they_ask_for_none).
        if self.leaving is not None and reached == 0:
            self._go(now)
            return
        if self.leaving is not None:
            self._leave(self.leaving.name, drain=True)
        if current.asked:
            self._send(Held(generation, reached, saves, current.drain))

    def _on_drain_to(self, generation: int, safe_point: int, *, save: bool) -> None:
        current = self.current
        if self.work is not Work.DRAINING or current is None or current.generation != generation:
            return
        if safe_point and not save:
            current.safe_point = safe_point
            self._out.append(Say(f"{current.drain_text}: the workers stop at their next safe point"))
            self._out.append(ReleaseWorkers(generation, safe_point))
        # The others go on without the replacements (scenario `survive_let_go`).
        elif self.leaving is None:  # else they are held for this node's own sake, too
            self._let_go(safe_point)

    def _let_go(self, save_at: int = 0) -> None:
        """End the drain: the workers go on, and save at this safe point; 0: they do not."""
        current = self._current()
        current.asked, current.reached = False, None
        self._enter(Work.RUNNING)
        self._out.append(ReleaseWorkers(current.generation, save_at, save=bool(save_at)))

    def _advance_draining(self, now: float) -> None:
        current = self._current()
        if current.active and current.all_ended:
            self._kill()
        else:
            self._advance_running(now)

    # ---------------------------------------------------------------- REGROUPING

    def _on_regroup(self, now: float, assign: Assign, safe_point: int, text: str) -> None:
        """The workers form another generation; those of a node that leaves only wait for it. A node that cannot take
        part reports that its workers are gone."""
        self._last_generation, self._led_by = assign.generation, assign.led_by
        current = self.current
        if current is None:
            # Its workers ended before the order arrived (test_agent_regrouping.py).
            self._send(Stopped(assign.generation))
        elif self.work in (Work.STOPPING, Work.KILLING):
            # Its workers are ending already: this node leaves at once (scenario `survive_leave_at_once`).
            current.stopped = True
        elif self._at_work() and assign.generation > current.generation:
            if text:
                self._out.append(Say(text))
            self._enter(Work.REGROUPING)
            self.current = current.regrouped(assign, safe_point)
            self._out.append(RegroupWorkers(assign, safe_point))
            if self.current.suspends:
                self._lease.hurry(now)

    def _on_replace(self, generation: int, local_ranks: Collection[int]) -> None:
        """Start workers for these local ranks, except where one lives already: a new coordinator does not know it."""
        current = self.current
        if current is None or not self._at_work() or generation != current.generation or not current.confirmed:
            return
        replacements = current.replacements
        fresh = tuple(sorted(set(local_ranks) - current.active - replacements.living))
        if fresh:
            replacements.living.update(fresh)
            self._out.append(StartReplacements(generation, fresh))
        if replacements.ready.intersection(local_ranks):
            self._send(ReplacementReady(generation, tuple(sorted(replacements.ready))))

    def _on_regrouping(self, now: float, event: WorkersCanGoOn | ReplacementsReady | RegroupRefused) -> None:
        """Pass on what workers report about their way into another generation."""
        current = self.current
        if current is None or not self._at_work():
            return
        match event:
            case WorkersCanGoOn(generation, local_ranks) if generation == current.generation:
                current.can_go_on = local_ranks
                if current.active and current.active.issubset(local_ranks) and not current.suspends:
                    current.suspends = True
                    self._lease.hurry(now)
                self._send_can_go_on(current)
            case ReplacementsReady(generation, local_ranks):
                ready = current.replacements.ready = current.replacements.living.intersection(local_ranks)
                if ready and current.confirmed:
                    self._send(ReplacementReady(generation, tuple(sorted(ready))))
            case RegroupRefused(generation, text) if generation == current.generation:
                self._report(CannotRegroup(generation, text))

    def _send_can_go_on(self, current: LocalGeneration) -> None:
        if current.confirmed:
            self._send(CanGoOn(current.generation, current.can_go_on))

    # ---------------------------------------------------------------- STOPPING

    def _on_stop(self, now: float, stop: Stop) -> None:
        current = self.current
        if current is None and stop.generation == self._last_generation:
            if self.leaving is not None:
                # All nodes have left at the safe point: this node and the coordinator on it are not needed any more.
                self._end(outcome_of_signal(self.leaving, drained=self._drained))
            elif stop.following is not None:  # its workers ended before the order arrived
                self._on_assign(stop.following)
            return
        if current is None or stop.generation not in (current.generation, self._last_generation):
            return
        if self._at_work():
            if stop.text:
                self._out.append(Say(stop.text))
            self._stop(now, signal.SIGTERM)
            current.hung = stop.hung
            # Workers that hang do not answer SIGTERM (scenario `hang_restarted`).
            if stop.reason is StopReason.HUNG:
                current.kill_at_s = min(current.kill_at_s, now + self.limits.hang_grace_s)
        elif self.work is Work.KILLING:
            # The processes of the finished ranks are being swept: the node ends after that instead of going idle.
            current.stopped = True
        current.following = stop.following

    def _stop(self, now: float, signum: int) -> None:
        """Start to stop the workers: the signal to the leaders now, SIGKILL to all processes after the grace."""
        current = self._current()
        if self.work is Work.DRAINING and current.safe_point is None:
            # One that is held waits in should_stop(), whatever its own handler of SIGTERM has noted.
            self._out.append(ReleaseWorkers(current.generation, 0))
        self._enter(Work.STOPPING)
        current.stopped = True  # a worker that ends with 0 because of it has not done its work
        current.kill_at_s = now + self.limits.stop_grace_s
        self._out.append(SignalWorkers(signum))

    def _advance_stopping(self, now: float) -> None:
        # Workers that ignore SIGTERM are killed when the grace is over (scenario `grace`).
        if self._current().all_ended or now >= self._stop_deadline_s():
            self._kill()

    def _stop_deadline_s(self) -> float:
        """The end of the grace, but not after the fence: a worker that still saves on a node that is cut off must not
        run beside the workers of the next generation."""
        return min(self._current().kill_at_s, self._workers_fence_at_s())

    # ---------------------------------------------------------------- KILLING

    def _kill(self) -> None:
        self._enter(Work.KILLING)
        self._out.append(KillTree(self._current().generation))

    def _on_tree_gone(self, now: float, generation: int) -> None:
        current = self.current
        if self.work is not Work.KILLING or current is None or current.generation != generation:
            return
        # Ranks end at different times, and a node whose ranks are done is no lost node (scenario `early_exits`).
        if current.all_done and not (current.cleaned or current.stopped or self._going()):
            # Other nodes may still run workers: this node stays in the world until the coordinator decides.
            current.cleaned = True
            self._leave_by_s = min(self._leave_by_s, now + FAREWELL_S)
            self._enter(Work.RUNNING)
            return
        self._drained = current.left_at_safe_point
        self._idle()
        if now < self._fence_at_s():  # else it hangs up, which says more
            self._send(Stopped(max(generation, self._last_generation)))
        # The next generation was announced with the stop (scenario `worker_fails`).
        if current.following is not None and current.confirmed and self.leaving is None:
            self._on_assign(current.following)
        if self.leaving is not None and (current.leaving_workers_wait or not (self._drained and self.link is Link.UP)):
            self._end(outcome_of_signal(self.leaving, drained=self._drained))

    # ---------------------------------------------------------------- this node's part ends

    def _on_signal(self, now: float, event: Signalled) -> None:
        # The second signal: nobody waits for a save any more (scenario `second_signal`).
        if self.leaving is not None:
            if self._at_work() or self.work is Work.STOPPING:
                self._kill()
            self._end(outcome_of_signal(self.leaving, drained=False))
            return
        self.leaving = event
        self._leave_by_s = now + self.limits.drain_s
        current = self.current
        linked = self.link is Link.UP and current is not None and current.confirmed
        # Ctrl-C waits for no safe point (scenario `survive_leave_at_once`).
        if current is None or not linked or event.signum in KEYBOARD_SIGNALS:
            self._go(now)
        # The usual notice: the workers save at a common safe point (scenario `drain_leave`).
        elif self.work is Work.RUNNING and not current.all_done:
            self._hold()
        # They are held already, or will be when they have gone on (scenarios `survive_leave_twice`, `survive_leaves`).
        elif (self.work is Work.DRAINING and current.reached) or (self.work is Work.REGROUPING and current.active):
            self._leave(event.name, drain=True)
        elif self.work is not Work.DRAINING or current.reached is not None:  # else they are held already
            self._go(now)
        self._say_leaving(now, event)

    def _say_leaving(self, now: float, event: Signalled) -> None:
        """Show at once that the agent ends: workers may need time to stop, and a user waits at the prompt."""
        if not event.kills:
            return
        if self.work is Work.STOPPING:
            what, limit_s = "stopping the workers", max(0.0, self._current().kill_at_s - now)
        elif self._at_work():
            what, limit_s = "the workers save if they can, and stop", self.limits.drain_s + self.limits.stop_grace_s
        else:
            return
        self._out.append(Say(f"{event.name}: {what}, up to {limit_s:.0f} s; {event.kills} kills them at once"))

    def _on_quit(self, now: float, *, drain: bool, by: str) -> None:
        if drain:
            # Else `holdfast stop`, asked twice, would be a second signal, which kills
            # (test_stop_said_twice_is_no_kill).
            if self.leaving is None:
                self._on_signal(now, Signalled(signal.SIGTERM, by, kills="`holdfast kill`"))
            return
        event = self.leaving = Signalled(signal.SIGKILL, by)
        self._leave(by)
        if self._at_work() or self.work is Work.STOPPING:
            self._kill()
        self._end(outcome_of_signal(event, drained=False))

    def _go(self, now: float) -> None:
        """A leaving agent waits for nothing any more: stop the workers that are left, and end."""
        assert self.leaving is not None
        self._leave(self.leaving.name)
        if self._at_work():
            self._stop(now, signal.SIGTERM if self.leaving.preempt else self.leaving.signum)
        current = self.current
        drained = self._drained or (current is not None and current.left_at_safe_point)
        self._end(outcome_of_signal(self.leaving, drained=drained))

    def _leave(self, reason: str, *, drain: bool = False) -> None:
        if self._joined:
            self._send(Leave(reason, drain))

    def _end(self, outcome: Outcome) -> None:
        """End this node's part with this outcome as soon as none of its processes is alive."""
        if self._pending_exit is not None:
            return
        self._pending_exit = outcome
        if self._at_work():
            self._kill()

    def _going(self) -> bool:
        return self._pending_exit is not None

    def _advance_exit(self, outcome: Outcome) -> None:
        # Nothing was started (scenario `cannot_prepare`).
        if self.work in (Work.PREPARING, Work.PREPARED):
            self._idle()
        if self.work is Work.IDLE:
            self._exit(outcome)

    def _exit(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if self.link is Link.UP:
            self.link = Link.DOWN
            self._joined = False
            self._out.append(HangUp("this node has finished"))
        self._out.append(Exit(outcome))

    # ---------------------------------------------------------------- small steps

    def _at_work(self) -> bool:
        return self.work in (Work.RUNNING, Work.DRAINING, Work.REGROUPING)

    def _current(self) -> LocalGeneration:
        assert self.current is not None
        return self.current

    def _send(self, message: FromAgent) -> None:
        if self.link is Link.UP:
            self._out.append(Send(message))

    def _note(self, event: str, **fields: object) -> None:
        self._out.append(Note(event, fields))


def outcome_of_signal(event: Signalled, *, drained: bool) -> Outcome:
    """The outcome of this node after a signal: requeue if it was a preemption or if everything is saved."""
    if drained or event.preempt:
        how = "its workers stopped at a safe point" if drained else "its workers were stopped"
        text = f"preempted by {event.name}: {how}"
        return Outcome(kind=OutcomeKind.PREEMPTED, exit_code=EXIT_REQUEUE, message=text)
    exit_code = EXIT_SIGNAL_BASE + event.signum
    return Outcome(kind=OutcomeKind.SIGNALLED, exit_code=exit_code, message=f"ended by {event.name}")
