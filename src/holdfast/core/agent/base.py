"""What an agent's machine remembers, and the small steps that its decisions are made of."""

from __future__ import annotations

from math import inf

from msgspec import structs

from holdfast.core.agent.commands import (
    Command,
    Exit,
    HangUp,
    HoldWorkers,
    KillTree,
    LookAtWorkers,
    ReleaseWorkers,
    Send,
    SignalWorkers,
)
from holdfast.core.agent.events import Signalled
from holdfast.core.agent.state import Lease, Link, Seeking, Term, Work
from holdfast.core.errors import EXIT_REQUEUE, EXIT_SIGNAL_BASE
from holdfast.core.machines import Note
from holdfast.core.outcome import Outcome, OutcomeKind
from holdfast.core.policy import Limits, NodeSpec
from holdfast.core.progress import RankProgress, Stage
from holdfast.core.protocol import FromAgent, Leave, Looked, Progress, Running

WORK_TRANSITIONS: dict[tuple[Work, Work], str] = {
    (Work.IDLE, Work.PREPARING): "Assign",
    (Work.PREPARING, Work.PREPARING): "Assign of a newer generation: somebody died between the phases",
    (Work.PREPARED, Work.PREPARING): "the same",
    (Work.PREPARING, Work.PREPARED): "NodePrepared",
    (Work.PREPARED, Work.RUNNING): "Start",
    (Work.PREPARING, Work.IDLE): "the link was lost, or the node is leaving; nothing was started",
    (Work.PREPARED, Work.IDLE): "the same",
    (Work.RUNNING, Work.DRAINING): "Drain, or a signal to the agent: the workers are held at their next safe point",
    (Work.RUNNING, Work.STOPPING): "Stop, or a signal to the agent",
    (Work.RUNNING, Work.KILLING): "fenced, Abandon, all ranks done (what they left is swept), or the job is over",
    (Work.DRAINING, Work.RUNNING): "the link was lost before a safe point was agreed: the workers are let go",
    (Work.DRAINING, Work.STOPPING): "Stop, no worker asks for safe points, or patience is at its end",
    (Work.DRAINING, Work.KILLING): "all leaders are gone, fenced, or the job is over",
    (Work.STOPPING, Work.KILLING): "all leaders are gone, or the grace is over",
    (Work.KILLING, Work.RUNNING): "all ranks were done and are swept; the others are still at work",
    (Work.KILLING, Work.IDLE): "TreeGone",
}


class AgentBase:
    """Everything but the decisions."""

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
        self._led_by = ""
        """The node that had the coordinator of that generation, with its ranks, in words."""
        self._unlinked_s = now
        """When the link to the last coordinator broke; inf: it fell silent, and that one may have lived on."""
        self._leaving: Signalled | None = None
        self._leave_by_s = inf
        """When a leaving agent stops waiting for its workers to drain."""
        self._drained = False
        """The newest generation left at a safe point, and none has begun since."""
        self._pending_exit: Outcome | None = None
        self._lease = Lease(limits.fence_s, limits.ping_interval_s, confirmed_s=now, ping_at_s=now)
        self._unvouched_fence_at_s = inf
        """When the workers die unless a coordinator that knows their generation says otherwise."""
        self._seeking = Seeking.begin(limits, now)
        self._prepared_s = now
        self._out: list[Command] = []

    def check_invariants(self) -> None:
        assert (self.term is None) == (self.work is Work.IDLE)
        if self.work is Work.RUNNING and self.term is not None:
            assert not self.term.all_done or self.term.swept
        assert not (self._joined and self.link is not Link.UP)

    @property
    def identity(self) -> str:
        """The identity of the latest join; the next one gets another."""
        return self._node.member if self._joins == 0 else f"{self._node.member}.{self._joins}"

    # ---------------------------------------------------------------- fences

    def _stop_deadline_s(self, term: Term) -> float:
        """The grace, but never beyond the fence: a saving worker of a node that is cut off must not meet its successors."""
        return min(term.kill_at_s, self._workers_fence_at_s())

    def _fence_at_s(self) -> float:
        return inf if self._local and self.link is Link.UP else self._lease.fence_at_s

    def _workers_fence_at_s(self) -> float:
        return self._fence_at_s() if self._term().vouched else self._unvouched_fence_at_s

    @property
    def fence_at_s(self) -> float | None:
        """When the workers die unless something is heard before; None: never, or there are none."""
        if self.work not in (Work.RUNNING, Work.DRAINING, Work.STOPPING):
            return None
        at_s = self._workers_fence_at_s()
        return None if at_s == inf else at_s

    def _awaits_answer(self) -> bool:
        """Joined or about to be: an answer to something we sent is outstanding at every moment."""
        return self.link is Link.UP and self._join_sent_s is not None

    # ---------------------------------------------------------------- small steps

    def _stop(self, now: float, signum: int) -> None:
        """Begin the ladder: the signal to the leaders now, SIGKILL to everything after the grace."""
        term = self._term()
        if self.work is Work.DRAINING and term.safe_point is None:
            self._out.append(ReleaseWorkers(term.generation, 0))
        self._enter(Work.STOPPING)
        term.stopped = True  # a worker that ends with 0 because of it has not done its work
        term.kill_at_s = now + self.limits.stop_grace_s
        self._out.append(SignalWorkers(signum))

    def _kill(self) -> None:
        self._enter(Work.KILLING)
        self._out.append(KillTree(self._term().generation))

    def _hold(self) -> None:
        self._enter(Work.DRAINING)
        self._out.append(HoldWorkers(self._term().generation))

    def _let_go(self) -> None:
        """The drain is off."""
        term = self._term()
        term.asked, term.reached = False, None
        self._enter(Work.RUNNING)
        self._out.append(ReleaseWorkers(term.generation, 0))

    def _leave(self, reason: str, *, drain: bool = False) -> None:
        if self._joined:
            self._send(Leave(reason, drain))

    def _end(self, outcome: Outcome) -> None:
        """This node's part ends with this outcome, as soon as nothing of it is alive."""
        if self._pending_exit is not None:
            return
        self._pending_exit = outcome
        if self._at_work():
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

    def _at_work(self) -> bool:
        return self.work in (Work.RUNNING, Work.DRAINING)

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

    def _report(self, message: FromAgent) -> None:
        """A fault that ends the generation. Without a coordinator that knows it there is nothing left to wait for."""
        if self._term().vouched:
            self._send(message)
        elif self._at_work():
            self._kill()

    def _on_progress(self, generation: int, ranks: tuple[RankProgress, ...]) -> None:
        term = self.term
        if self._at_work() and self._joined and term is not None and term.generation == generation and term.vouched:
            told = (structs.replace(rank, stage=Stage.DONE) if rank.local_rank in term.done else rank for rank in ranks)
            self._send(Progress(generation, tuple(told)))

    def _on_look(self, generation: int, number: int, *, store: bool) -> None:
        term = self.term
        if self._at_work() and term is not None and term.generation == generation and not term.all_ended:
            self._out.append(LookAtWorkers(generation, number, store))
        else:
            self._send(Looked(generation, number))

    def _send(self, message: FromAgent) -> None:
        if self.link is Link.UP:
            self._out.append(Send(message))

    def _note(self, event: str, **fields: object) -> None:
        self._out.append(Note(event, fields))

    def _running(self) -> Running | None:
        term = self.term
        if term is None:
            return None
        place = term.assign
        return Running(
            term.generation, place.group_rank, place.group_world_size, place.restart_count, tuple(sorted(term.done))
        )

    @staticmethod
    def _farewell(event: Signalled, *, drained: bool) -> Outcome:
        """How this node's part ends after a signal: please requeue if it was a preemption or everything is saved."""
        if drained or event.preempt:
            how = "its workers stopped at a safe point" if drained else "its workers were stopped"
            text = f"preempted by {event.name}: {how}"
            return Outcome(kind=OutcomeKind.PREEMPTED, exit_code=EXIT_REQUEUE, message=text)
        exit_code = EXIT_SIGNAL_BASE + event.signum
        return Outcome(kind=OutcomeKind.SIGNALLED, exit_code=exit_code, message=f"ended by {event.name}")
