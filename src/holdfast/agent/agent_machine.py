"""One node's agent: one mutator, `handle(now, event) -> commands`; no clock, no socket, no randomness.

    link   DOWN ──► DIALING ──► UP ──► DOWN …         retried until the join deadline
    work   IDLE ──► PREPARING ──► PREPARED ──► RUNNING ──► DRAINING ──► STOPPING ──► KILLING ──► IDLE …
                                                 ▲ │           │
                                             REGROUPING ◄──────┘     the workers form another generation

The agent follows the coordinator, with two exceptions. A signal to the agent ends its own part in the job. An agent
without any answer for `fence_s` kills its workers, because the others may continue without it from then on. A new
coordinator may let these workers continue if it sends Resume before that.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from math import inf

from msgspec import structs

from holdfast.agent.agent_acts import AgentActs
from holdfast.agent.agent_state import Link, LocalGeneration, Seeking, Work, farewell
from holdfast.agent.commands import (
    Command,
    ContinueWorkers,
    Dial,
    HangUp,
    LookAtWorkers,
    Prepare,
    RegroupWorkers,
    ReleaseWorkers,
    Say,
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
    WorkersAble,
    WorkersFenced,
    WorkersHeld,
    WorkersProgress,
    WorkersSeen,
)
from holdfast.protocol.messages import (
    Abandon,
    Able,
    Assign,
    CannotRegroup,
    Drain,
    DrainTo,
    Finish,
    FromCoordinator,
    Held,
    Join,
    Joined,
    Look,
    Looked,
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
from holdfast.protocol.policy import Tick
from holdfast.protocol.rank_progress import Stage

KEYBOARD_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
"""A user wants the end now. Every other signal that ends this node's part is a notice, with time to drain."""

WAIT_FOR_PING = 0.25
"""A report waits for the next ping this part of its interval at most: one message instead of two."""
SUSPENDED_S_MAX = 5.0
"""If answers come, and workers are suspended for longer all the same, this agent suspends none any more."""
SUSPENDED_SHARE = 0.1
"""So much of the time they may be suspended without end."""
FAREWELL_S = 1.0
"""A leaving node whose ranks are all done waits this long for the end of the job, which may follow at once."""


class AgentMachine(AgentActs):
    """Joins the job, starts and stops this node's workers, reports. `WORK_TRANSITIONS` lists every change of work."""

    def check_invariants(self) -> None:
        assert (self.current is None) == (self.work is Work.IDLE)
        if self.work is Work.RUNNING and self.current is not None:
            assert not self.current.all_done or self.current.cleaned
        assert not (self._joined and self.link is not Link.UP)

    # ---------------------------------------------------------------- surface

    def handle(self, now: float, event: Event) -> list[Command]:
        if self.outcome is None:
            self._dispatch(now, event)
            self._advance(now)
            self._look_at_suspension(now)
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> float | None:
        """When the next Tick is due; None once Exit was emitted."""
        if self.outcome is not None:
            return None
        deadlines: list[float] = []
        if self._pending_exit is None and self.leaving is None:
            if self.link is Link.DOWN:
                deadlines.append(min(self._seeking.dial_at_s, self._seeking.deadline_s))
            if self.link is not Link.UP:
                deadlines.append(self._seeking.notices.at_s)
        if self.link is Link.UP and self._joined:
            deadlines.append(self._lease.ping_at_s)
        if self._awaits_answer():
            deadlines.append(self._fence_at_s())
        if self._at_work():
            deadlines.append(self._workers_fence_at_s())
        if self.suspend_at_s is not None and self._suspended_s is None:
            deadlines.append(self.suspend_at_s)
        if self.leaving is not None and self._pending_exit is None:
            deadlines.append(self._leave_by_s)
        if self.work is Work.STOPPING and self.current is not None:
            deadlines.append(self._stop_deadline_s(self.current))
        first = min(deadlines, default=inf)
        return None if first == inf else first

    # ---------------------------------------------------------------- events

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
                if self._is_preparing(generation):
                    self._leave(f"cannot take part: {reason}")
                    self._end(Outcome(kind=OutcomeKind.REFUSED, exit_code=exit_code, code=code, message=reason))
            case WorkerEnded() | WorkerRaised() | FailureRead():
                self._on_worker(event)
            case WorkersHeld() | WorkersProgress() | WorkersSeen():
                self._on_report(now, event)
            case WorkersAble() | ReplacementsReady() | RegroupRefused():
                self._on_regrouping(now, event)
            case WorkersFenced():
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

    def _on_prepared(self, now: float, event: NodePrepared) -> None:
        if self.current is None or self.current.generation != event.generation:
            return
        if self.work is Work.PREPARING:
            self._enter(Work.PREPARED)
        if self.work in (Work.PREPARED, Work.REGROUPING):
            self._prepared_s = now
            self.current.parted = bool(self.current.parting)
            self._send(Prepared(event.generation, event.store_port, event.states))

    def _on_report(self, now: float, event: WorkersHeld | WorkersProgress | WorkersSeen) -> None:
        """Pass on the progress and the samples of the workers."""
        match event:
            case WorkersHeld(generation, reached, saves):
                self._on_held(now, generation, reached, saves=saves)
            case WorkersProgress():
                self._on_progress(now, event)
            case WorkersSeen(generation, number, samples, reach):
                self._send(Looked(generation, number, samples, reach))

    def _on_dial_failed(self, now: float, event: DialFailed) -> None:
        self.link = Link.DOWN
        self._seeking.failed(now, event)
        if event.final:
            self._end(
                Outcome(kind=OutcomeKind.REFUSED, exit_code=event.exit_code, code=event.code, message=event.reason)
            )

    def _on_link_lost(self, now: float, reason: str, *, silent: bool = False) -> None:
        self.link = Link.DOWN
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
        if self.work in (Work.PREPARING, Work.PREPARED):
            self._idle()
        elif self.work is Work.REGROUPING:  # they have left the generation that another coordinator could continue
            self._kill()
        elif self.current is not None and self.current.confirmed:
            self.current.confirmed = False
            self._unconfirmed_fence_at_s = self._lease.fence_at_s
        held = self.work is Work.DRAINING and self._current().safe_point is None
        if self.leaving is not None and (held or self.work is Work.IDLE):
            self._go(now)
        elif held:
            self._let_go()

    def _on_message(self, now: float, message: FromCoordinator) -> None:
        match message:
            case Joined(lease_s, fence_s, ping_interval_s):
                self._joined = True
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
            case Look(generation, number, store):
                self._on_look(generation, number, store=store)
            case Assign():
                self._on_assign(message)
            case Start() if now < self._fence_at_s():  # else this process has slept: the others are without it now
                self._on_start(message)
            case Regroup(assign, safe_point, text):
                self._on_regroup(now, assign, safe_point, text)
            case Replace(generation, local_ranks):
                self._on_replace(generation, local_ranks)
            case Drain(generation, text):
                self._on_drain(generation, text)
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

    def _on_stop(self, now: float, stop: Stop) -> None:
        current = self.current
        if current is None and stop.generation == self._last_generation:
            if self.leaving is not None:
                # All nodes have left at the safe point: this node and the coordinator on it are not needed any more.
                self._end(farewell(self.leaving, drained=self._drained))
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
            if stop.reason is StopReason.HUNG:
                current.kill_at_s = min(current.kill_at_s, now + self.limits.hang_grace_s)
        elif self.work is Work.KILLING:
            # The processes of the finished ranks are being swept: the node ends after that instead of going idle.
            current.stopped = True
        current.following = stop.following

    def _on_assign(self, assign: Assign) -> None:
        if self.work not in (Work.IDLE, Work.PREPARING, Work.PREPARED) or self._going():
            return
        self._enter(Work.PREPARING)
        self.current = LocalGeneration(assign, self._node.nproc)
        self._last_generation, self._led_by = assign.generation, assign.led_by
        self._out.append(Prepare(assign))

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

    def _on_regroup(self, now: float, assign: Assign, safe_point: int, text: str) -> None:
        """The workers form another generation; those of a node that leaves only come to the gate. A node that cannot
        take part reports that its workers are gone."""
        self._last_generation, self._led_by = assign.generation, assign.led_by
        current = self.current
        if current is None:
            self._send(Stopped(assign.generation))
        elif self.work in (Work.STOPPING, Work.KILLING):
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

    def _on_regrouping(self, now: float, event: WorkersAble | ReplacementsReady | RegroupRefused) -> None:
        """Pass on what workers report about their way into another generation."""
        current = self.current
        if current is None or not self._at_work():
            return
        match event:
            case WorkersAble(generation, local_ranks) if generation == current.generation:
                current.able = local_ranks
                if current.active and current.active.issubset(local_ranks) and not current.suspends:
                    current.suspends = True
                    self._lease.hurry(now)
                self._send_able(current)
            case ReplacementsReady(generation, local_ranks):
                ready = current.replacements.ready = current.replacements.living.intersection(local_ranks)
                if ready and current.confirmed:
                    self._send(ReplacementReady(generation, tuple(sorted(ready))))
            case RegroupRefused(generation, text) if generation == current.generation:
                self._report(CannotRegroup(generation, text))

    def _send_able(self, current: LocalGeneration) -> None:
        if current.confirmed:
            self._send(Able(current.generation, current.able))

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
        for local_rank in sorted(current.done):  # some may have ended since we joined
            self._send(WorkerDone(generation, local_rank))
        if current.able:
            self._send_able(current)

    def _on_drain(self, generation: int, text: str) -> None:
        current = self.current
        if current is None or current.generation != generation:
            return
        current.asked, current.drain_text = True, text
        if self.work is Work.RUNNING and not current.all_done:
            self._hold()
        elif self.work is Work.DRAINING and current.reached is not None:
            self._send(Held(generation, current.reached))

    def _on_drain_to(self, generation: int, safe_point: int, *, save: bool) -> None:
        current = self.current
        if self.work is not Work.DRAINING or current is None or current.generation != generation:
            return
        if safe_point and not save:
            current.safe_point = safe_point
            self._out.append(Say(f"{current.drain_text}: the workers stop at their next safe point"))
            self._out.append(ReleaseWorkers(generation, safe_point))
        elif self.leaving is None:  # else they are held for this node's own sake, too
            self._let_go(safe_point)

    def _on_held(self, now: float, generation: int, reached: int, *, saves: bool) -> None:
        current = self.current
        if (
            self.work is not Work.DRAINING
            or current is None
            or current.generation != generation
            or current.reached is not None
        ):
            return
        if reached == 0 and current.asks:  # they have just gone on, and stay held at the first one
            self._hold_again()
            return
        current.reached = reached
        if self.leaving is not None and reached == 0:
            self._go(now)
            return
        if self.leaving is not None:
            self._leave(self.leaving.name, drain=True)
        if current.asked:
            self._send(Held(generation, reached, saves))

    def _on_worker(self, event: WorkerEnded | WorkerRaised | FailureRead) -> None:
        current = self.current
        if current is None:
            return
        if current.replacements.concerns(event):
            failure = current.replacements.heard(event, self._node.host)
            if failure is not None and self._at_work() and current.confirmed:
                self._send(ReplacementFailed(current.generation, (failure,)))
            return
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

    def _on_tree_gone(self, now: float, generation: int) -> None:
        current = self.current
        if self.work is not Work.KILLING or current is None or current.generation != generation:
            return
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
        if current.following is not None and current.confirmed and self.leaving is None:
            self._on_assign(current.following)
        if self.leaving is not None and (current.parted or not (self._drained and self.link is Link.UP)):
            self._end(farewell(self.leaving, drained=self._drained))

    def _on_signal(self, now: float, event: Signalled) -> None:
        if self.leaving is not None:
            if self._at_work() or self.work is Work.STOPPING:
                self._kill()
            self._end(farewell(self.leaving, drained=False))
            return
        self.leaving = event
        self._leave_by_s = now + self.limits.drain_s
        current = self.current
        linked = self.link is Link.UP and current is not None and current.confirmed
        if current is None or not linked or event.signum in KEYBOARD_SIGNALS:
            self._go(now)
        elif self.work is Work.RUNNING and not current.all_done:
            self._hold()
        elif (self.work is Work.DRAINING and current.reached) or (self.work is Work.REGROUPING and current.active):
            self._leave(event.name, drain=True)  # those that regroup are held when they have gone on
        elif self.work is not Work.DRAINING or current.reached is not None:  # else they are held already
            self._go(now)
        self._say_leaving(now, event)

    def _on_quit(self, now: float, *, drain: bool, by: str) -> None:
        if drain:
            if self.leaving is None:
                self._on_signal(now, Signalled(signal.SIGTERM, by, kills="`holdfast kill`"))
            return
        event = self.leaving = Signalled(signal.SIGKILL, by)
        self._leave(by)
        if self._at_work() or self.work is Work.STOPPING:
            self._kill()
        self._end(farewell(event, drained=False))

    def _go(self, now: float) -> None:
        """A leaving agent waits for nothing any more: stop the workers that are left, and end."""
        assert self.leaving is not None
        self._leave(self.leaving.name)
        if self._at_work():
            self._stop(now, signal.SIGTERM if self.leaving.preempt else self.leaving.signum)
        current = self.current
        drained = self._drained or (current is not None and current.left_at_safe_point)
        self._end(farewell(self.leaving, drained=drained))

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

    # ---------------------------------------------------------------- what follows from the state

    def _advance(self, now: float) -> None:
        if self.leaving is not None and self._pending_exit is None and now >= self._leave_by_s:
            self._go(now)
        self._advance_work(now)
        if self._awaits_answer() and now >= self._fence_at_s():
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

    def _advance_exit(self, outcome: Outcome) -> None:
        if self.work in (Work.PREPARING, Work.PREPARED):
            self._idle()
        if self.work is Work.IDLE:
            self._exit(outcome)

    def _advance_work(self, now: float) -> None:
        current = self.current
        if current is None:
            return
        if self._at_work():
            drained = self.work is Work.DRAINING and bool(current.active) and current.all_ended
            ended = drained or (current.all_done and not current.cleaned)
            if ended:
                self._kill()
            elif now >= self._workers_fence_at_s():
                silent_s = now - self._unanswered_since_s()
                text = f"no answer from the coordinator for {silent_s:.1f} s: stopping this node's workers"
                self._out.append(Say(text))
                self._note("fenced", silent_s=round(silent_s, 3))
                self._kill()
        elif self.work is Work.STOPPING and (current.all_ended or now >= self._stop_deadline_s(current)):
            self._kill()

    def _count_suspension(self, now: float) -> None:
        """Answers that take too long would suspend the workers again and again, or for ever: join again as an agent
        that suspends none. As long as the coordinator has this link it relies on it, so the workers start again."""
        passed_s, self._counted_s = now - self._counted_s, now
        stood_s = 0.0 if self._suspended_s is None else min(passed_s, now - self._suspended_s)
        self._stood_s = max(0.0, self._stood_s + stood_s - SUSPENDED_SHARE * passed_s)
        if self._stood_s <= SUSPENDED_S_MAX or self._too_slow:
            return
        self._too_slow = True
        self._note("suspends_no_more", suspended_s=round(self._stood_s, 3))
        text = (
            "the coordinator's answers take too long: this node's workers start again, and are not suspended any more"
        )
        self._out.append(Say(text))
        if self._at_work():
            self._kill()
        self._out.append(HangUp("its answers take too long"))
        self._on_link_lost(now, "its answers take too long")

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

    def _advance_joining(self, now: float) -> None:
        """The link is up but this agent has not joined: join without workers, or with workers that the coordinator may
        let continue. Workers that drain reach their safe point (or their fence) first."""
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
        done, age_s = dict.fromkeys(current.done, Stage.DONE), now - then_s
        ranks = tuple(
            structs.replace(each, stage=done.get(each.local_rank, each.stage), age_s=each.age_s + age_s)
            for each in event.ranks
        )
        ping = self._lease.ping(now)
        self._send(Progress(event.generation, ranks, event.job_step, event.job_steps, ping))
        return bool(ping)

    def _on_look(self, generation: int, number: int, *, store: bool) -> None:
        current = self.current
        if self._at_work() and current is not None and current.generation == generation and not current.all_ended:
            self._out.append(LookAtWorkers(generation, number, store))
        else:
            self._send(Looked(generation, number))
