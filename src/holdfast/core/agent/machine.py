"""One node's agent: one mutator, `handle(now, event) -> commands`; no clock, no socket, no randomness.

    link   DOWN ──► DIALING ──► UP ──► DOWN …         retried until the join deadline
    work   IDLE ──► PREPARING ──► PREPARED ──► RUNNING ──► STOPPING ──► KILLING ──► IDLE …

The agent does what the coordinator says, with two exceptions that need nobody's leave: a signal to the agent ends its
own part, and an agent that has not been answered for `fence_s` kills its workers, because by then the others may be
about to go on without it.
"""

from __future__ import annotations

import signal
from math import inf

from msgspec import structs

from holdfast.core.agent.commands import (
    Command,
    Dial,
    Exit,
    HangUp,
    KillTree,
    Note,
    Prepare,
    Say,
    Send,
    SignalWorkers,
    StartWorkers,
)
from holdfast.core.agent.events import (
    Dialed,
    DialFailed,
    Event,
    LinkLost,
    NodePrepared,
    PassSignal,
    PrepareFailed,
    Received,
    Signalled,
    StoreDied,
    Tick,
    TreeGone,
    WorkerEnded,
)
from holdfast.core.agent.state import Link, Term, Work
from holdfast.core.errors import EXIT_SIGNAL_BASE, CoordinatorLostError, CoordinatorUnreachableError
from holdfast.core.outcome import Failure, Outcome, OutcomeKind
from holdfast.core.policy import Limits, NodeSpec
from holdfast.core.protocol import (
    Assign,
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
    StoreLost,
    Waiting,
    WorkerDone,
    WorkersFailed,
)

WORK_TRANSITIONS: dict[tuple[Work, Work], str] = {
    (Work.IDLE, Work.PREPARING): "Assign",
    (Work.PREPARING, Work.PREPARING): "Assign of a newer generation: somebody died between the phases",
    (Work.PREPARED, Work.PREPARING): "the same",
    (Work.PREPARING, Work.PREPARED): "NodePrepared",
    (Work.PREPARED, Work.RUNNING): "Start",
    (Work.PREPARING, Work.IDLE): "the link was lost, or the node is leaving; nothing was started",
    (Work.PREPARED, Work.IDLE): "the same",
    (Work.RUNNING, Work.STOPPING): "Stop, or a signal to the agent",
    (Work.RUNNING, Work.KILLING): "fenced, a new link, all ranks done (what they left is swept), or the job is over",
    (Work.STOPPING, Work.KILLING): "all leaders are gone, or the grace is over",
    (Work.KILLING, Work.RUNNING): "all ranks were done and are swept; the others are still at work",
    (Work.KILLING, Work.IDLE): "TreeGone",
}


class AgentMachine:
    """Joins, starts and stops this node's workers, reports, and ends."""

    def __init__(self, node: NodeSpec, limits: Limits, now: float) -> None:
        """`node.member` is this agent's identity; each further join appends a counter to it, so that none is used twice."""
        self.limits = limits
        self.link = Link.DOWN
        self.work = Work.IDLE
        self.term: Term | None = None
        self.outcome: Outcome | None = None
        self._node = node
        self._joins = 0
        self._joined = False
        self._local = False
        """The coordinator lives in this process: it sleeps when we sleep, and nothing can come between."""
        self._join_sent_s: float | None = None
        """When Join went out on the present link; None: not yet."""
        self._last_generation = 0
        self._unlinked_s = now
        self._leaving: Signalled | None = None
        self._pending_exit: Outcome | None = None
        self._lease = (limits.fence_s, limits.ping_interval_s)
        self._seeking_since_s = now
        self._dial_at_s = now
        self._dial_pause_s = limits.connect_retry_s
        self._dial_error: DialFailed | None = None
        self._say_at_s = now + limits.say_interval_s
        self._ping_number = 0
        self._ping_at_s = now
        self._pings: dict[int, float] = {}
        self._prepared_s = now
        self._confirmed_s = now
        """When the newest message that the coordinator provably got had been sent: its lease on us began no earlier."""
        self._out: list[Command] = []

    # ---------------------------------------------------------------- surface

    def handle(self, now: float, event: Event) -> list[Command]:
        if self.outcome is None:
            self._dispatch(now, event)
            self._advance(now)
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> float | None:
        """When a Tick is owed; None once Exit was emitted."""
        if self.outcome is not None:
            return None
        deadlines: list[float] = []
        if self.link is Link.DOWN and self._pending_exit is None:
            deadlines.append(min(self._dial_at_s, self._seeking_deadline_s()))
        if self.link is not Link.UP and self._pending_exit is None:
            deadlines.append(self._say_at_s)
        if self.link is Link.UP and self._joined:
            deadlines.append(self._ping_at_s)
        if self.work is Work.RUNNING or self._awaits_answer():
            deadlines.append(self._fence_at_s())
        if self.work is Work.STOPPING and self.term is not None:
            deadlines.append(self._stop_deadline_s(self.term))
        return min((deadline for deadline in deadlines if deadline < inf), default=None)

    def check_invariants(self) -> None:
        assert (self.term is None) == (self.work is Work.IDLE)
        if self.work is Work.RUNNING and self.term is not None:
            assert not self.term.all_done or self.term.swept
        assert not (self._joined and self.link is not Link.UP)

    @property
    def identity(self) -> str:
        """The identity of the latest join; the next one gets another."""
        return self._node.member if self._joins == 0 else f"{self._node.member}.{self._joins}"

    # ---------------------------------------------------------------- events

    def _dispatch(self, now: float, event: Event) -> None:
        match event:
            case Dialed(local):
                self.link, self._join_sent_s, self._local = Link.UP, None, local
                self._dial_error, self._dial_pause_s = None, self.limits.connect_retry_s
            case DialFailed():
                self._on_dial_failed(now, event)
            case LinkLost(reason):
                self._on_link_lost(now, reason)
            case Received(message):
                self._on_message(now, message)
            case NodePrepared(generation, store_port):
                if self._is_preparing(generation):
                    self._enter(Work.PREPARED)
                    self._prepared_s = now
                    self._send(Prepared(generation, store_port))
            case PrepareFailed(generation, code, exit_code, reason):
                if self._is_preparing(generation):
                    self._leave(f"cannot take part: {reason}")
                    self._end(Outcome(kind=OutcomeKind.REFUSED, exit_code=exit_code, code=code, message=reason))
            case WorkerEnded(generation, local_rank, failure):
                self._on_worker_ended(generation, local_rank, failure)
            case TreeGone(generation):
                self._on_tree_gone(generation)
            case StoreDied(generation):
                if self.work is Work.RUNNING and self._term().generation == generation:
                    self._send(StoreLost(generation))
            case Signalled():
                self._on_signal(now, event)
            case PassSignal(signum):
                if self.work in (Work.RUNNING, Work.STOPPING):
                    self._out.append(SignalWorkers(signum, to_end=False))
            case Tick():
                pass

    def _on_dial_failed(self, now: float, event: DialFailed) -> None:
        self.link = Link.DOWN
        self._dial_error = event
        self._dial_at_s = now + self._dial_pause_s
        self._dial_pause_s = min(2 * self._dial_pause_s, self.limits.connect_retry_max_s)
        if event.final:
            self._end(
                Outcome(kind=OutcomeKind.REFUSED, exit_code=event.exit_code, code=event.code, message=event.reason)
            )

    def _on_link_lost(self, now: float, reason: str) -> None:
        self.link = Link.DOWN
        if self._join_sent_s is not None:
            self._joins += 1
        if self._joined:
            self._unlinked_s = now
        self._joined, self._join_sent_s = False, None
        self._seeking_since_s = now
        self._dial_at_s = now
        self._dial_pause_s = self.limits.connect_retry_s
        self._say_at_s = now + self.limits.say_interval_s
        self._note("link_lost", reason=reason)
        if self._pending_exit is None and self._leaving is None:
            self._out.append(Say(f"lost the coordinator ({reason}); trying to reach it again"))
        if self.work in (Work.PREPARING, Work.PREPARED):
            self._idle()

    def _on_message(self, now: float, message: FromCoordinator) -> None:
        match message:
            case Joined(_, fence_s, ping_interval_s):
                self._joined = True
                self._lease = (fence_s, ping_interval_s)
                self._confirmed_s = self._join_sent_s if self._join_sent_s is not None else now
                self._pings.clear()
                self._ping_at_s = now + ping_interval_s
            case Pong(number):
                sent_s = self._pings.pop(number, None)
                if sent_s is not None:
                    self._confirmed_s = max(self._confirmed_s, sent_s)
            case Waiting(text):
                self._out.append(Say(text))
            case Assign():
                self._on_assign(message)
            case Start():
                self._on_start(message)
            case Stop(generation, _, text):
                self._on_stop(now, generation, text)
            case Finish(outcome):
                self._end(outcome)
            case Refuse(code, text):
                self._end(Outcome(kind=OutcomeKind.REFUSED, exit_code=2, code=code, message=text))

    def _on_stop(self, now: float, generation: int, text: str) -> None:
        term = self.term
        if term is None or term.generation != generation:
            return
        if self.work is Work.RUNNING:
            if text:
                self._out.append(Say(text))
            self._stop(now, signal.SIGTERM)
        elif self.work is Work.KILLING:
            # The sweep after the last rank was done is under way: what would have been a pause becomes the end.
            term.stopped = True

    def _on_assign(self, assign: Assign) -> None:
        if self.work not in (Work.IDLE, Work.PREPARING, Work.PREPARED) or self._going():
            return
        self._enter(Work.PREPARING)
        self.term = Term(assign, self._node.nproc)
        self._last_generation = assign.generation
        self._out.append(Prepare(assign))

    def _on_start(self, start: Start) -> None:
        if self.work is Work.PREPARED and self._term().generation == start.generation:
            self._confirmed_s = max(self._confirmed_s, self._prepared_s)
            self._enter(Work.RUNNING)
            self._out.append(StartWorkers(self._term().assign, start))

    def _on_worker_ended(self, generation: int, local_rank: int, failure: Failure | None) -> None:
        term = self.term
        if term is None or term.generation != generation:
            return
        term.ended.add(local_rank)
        if failure is None:
            term.done.add(local_rank)
            if self.work is Work.RUNNING:
                self._send(WorkerDone(generation, local_rank))
        elif failure.error_type or not failure.after_stop:
            # Also when the order to stop has come meanwhile: whoever died before it may be the culprit.
            self._send(WorkersFailed(generation, (failure,)))

    def _on_tree_gone(self, generation: int) -> None:
        term = self.term
        if self.work is not Work.KILLING or term is None or term.generation != generation:
            return
        if term.all_done and not (term.swept or term.stopped or self._going()) and self.link is Link.UP:
            # The others may still be at work: this node stays in the world until the coordinator says more.
            term.swept = True
            self._enter(Work.RUNNING)
            return
        self._idle()
        self._send(Stopped(generation))

    def _on_signal(self, now: float, event: Signalled) -> None:
        if self._leaving is not None:
            if self.work in (Work.RUNNING, Work.STOPPING):
                self._kill()
            return
        self._leaving = event
        self._leave(event.name)
        if self.work is Work.RUNNING:
            self._stop(now, event.signum)
        outcome = Outcome(
            kind=OutcomeKind.SIGNALLED, exit_code=EXIT_SIGNAL_BASE + event.signum, message=f"ended by {event.name}"
        )
        self._end(outcome)

    # ---------------------------------------------------------------- what follows from the state

    def _advance(self, now: float) -> None:
        self._advance_work(now)
        if self._awaits_answer() and now >= self._fence_at_s():
            self._out.append(HangUp("no answer"))
            self._on_link_lost(now, f"no answer for {self._lease[0]:g} s")
        if self._joined and now >= self._ping_at_s:
            self._ping(now)
        if self._pending_exit is not None:
            self._advance_exit(self._pending_exit)
        elif self.link is Link.DOWN:
            self._advance_seeking(now)
        elif self.link is Link.DIALING:
            self._say_progress(now)
        elif not self._joined:
            self._advance_joining(now)

    def _advance_exit(self, outcome: Outcome) -> None:
        if self.work in (Work.PREPARING, Work.PREPARED):
            self._idle()
        if self.work is Work.IDLE:
            self._exit(outcome)

    def _advance_work(self, now: float) -> None:
        if self.work is Work.RUNNING:
            term = self._term()
            if term.all_done and not term.swept:
                self._kill()
            elif now >= self._fence_at_s():
                text = f"no word from the coordinator for {now - self._confirmed_s:.1f} s: stopping this node's workers"
                self._out.append(Say(text))
                self._note("fenced", silent_s=round(now - self._confirmed_s, 3))
                self._kill()
        elif self.work is Work.STOPPING:
            term = self._term()
            if term.all_ended or now >= self._stop_deadline_s(term):
                self._kill()

    def _stop_deadline_s(self, term: Term) -> float:
        """The grace, but never beyond the fence: a saving worker of a node that is cut off must not meet its successors."""
        return min(term.kill_at_s, self._fence_at_s())

    def _fence_at_s(self) -> float:
        return inf if self._local and self.link is Link.UP else self._confirmed_s + self._lease[0]

    def _awaits_answer(self) -> bool:
        """Joined or about to be: an answer to something we sent is outstanding at every moment."""
        return self.link is Link.UP and self._join_sent_s is not None

    def _advance_seeking(self, now: float) -> None:
        if now >= self._seeking_deadline_s():
            self._give_up_seeking()
        elif now >= self._dial_at_s:
            self.link = Link.DIALING
            self._out.append(Dial(self._named_node()))
        else:
            self._say_progress(now)

    def _seeking_deadline_s(self) -> float:
        return self._seeking_since_s + self.limits.join_s

    def _say_progress(self, now: float) -> None:
        if now >= self._say_at_s:
            self._say_at_s = now + self.limits.say_interval_s
            left_s = max(0.0, self._seeking_deadline_s() - now)
            why = self._dial_error.reason if self._dial_error is not None else "no answer yet"
            self._out.append(Say(f"waiting for the coordinator: {why} (giving up in {left_s:.0f} s)"))

    def _give_up_seeking(self) -> None:
        code, exit_code = CoordinatorUnreachableError.code, CoordinatorUnreachableError.exit_code
        text = f"nobody answered within {self.limits.join_s:g} s"
        if self._last_generation:
            code = CoordinatorLostError.code
            text = f"the coordinator did not come back within {self.limits.join_s:g} s"
        elif self._dial_error is not None:
            code, exit_code = self._dial_error.code, self._dial_error.exit_code
            text = f"{self._dial_error.reason} (tried for {self.limits.join_s:g} s)"
        self._end(Outcome(kind=OutcomeKind.NO_QUORUM, exit_code=exit_code, code=code, message=text))
        if self._pending_exit is not None:
            self._advance_exit(self._pending_exit)

    def _advance_joining(self, now: float) -> None:
        """The link stands but the coordinator does not know us: join, but only with empty hands."""
        if self.work in (Work.RUNNING, Work.STOPPING):
            self._kill()
        elif self.work is Work.IDLE and self._join_sent_s is None:
            self._join_sent_s = now
            self._confirmed_s = now
            unlinked_s = now - self._unlinked_s if self._last_generation else 0.0
            self._out.append(Send(Join(self._named_node(), self._last_generation, unlinked_s)))

    def _ping(self, now: float) -> None:
        self._ping_number += 1
        self._pings[self._ping_number] = now
        while len(self._pings) > 64:
            self._pings.pop(next(iter(self._pings)))
        self._ping_at_s = now + self._lease[1]
        self._send(Ping(self._ping_number))

    # ---------------------------------------------------------------- small steps

    def _stop(self, now: float, signum: int) -> None:
        """Begin the ladder: the signal to the leaders now, SIGKILL to everything after the grace."""
        self._enter(Work.STOPPING)
        self._term().stopped = True  # a worker that ends with 0 because of it has not done its work
        self._term().kill_at_s = now + self.limits.stop_grace_s
        self._out.append(SignalWorkers(signum))

    def _kill(self) -> None:
        self._enter(Work.KILLING)
        self._out.append(KillTree(self._term().generation))

    def _leave(self, reason: str) -> None:
        if self._joined:
            self._send(Leave(reason))

    def _end(self, outcome: Outcome) -> None:
        """This node's part ends with this outcome, as soon as nothing of it is alive."""
        if self._pending_exit is not None:
            return
        self._pending_exit = outcome
        if self.work is Work.RUNNING:
            self._kill()

    def _exit(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if self.link is Link.UP:
            self.link = Link.DOWN
            self._joined = False
            self._out.append(HangUp("this node's part is over"))
        self._out.append(Exit(outcome))

    def _is_preparing(self, generation: int) -> bool:
        return self.work is Work.PREPARING and self._term().generation == generation

    def _going(self) -> bool:
        return self._pending_exit is not None

    def _named_node(self) -> NodeSpec:
        return structs.replace(self._node, member=self.identity)

    def _idle(self) -> None:
        self._enter(Work.IDLE)
        self.term = None

    def _enter(self, work: Work) -> None:
        assert (self.work, work) in WORK_TRANSITIONS, f"no transition {self.work} -> {work}"
        self.work = work

    def _term(self) -> Term:
        assert self.term is not None
        return self.term

    def _send(self, message: FromAgent) -> None:
        if self.link is Link.UP:
            self._out.append(Send(message))

    def _note(self, event: str, **fields: object) -> None:
        self._out.append(Note(event, fields))
