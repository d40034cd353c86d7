"""The state of one node's agent, its fences, and the small steps of which its answers consist. `agent_machine.py`
decides when."""

from __future__ import annotations

from math import inf

from msgspec import structs

from holdfast.agent.agent_state import WORK_TRANSITIONS, Lease, Link, LocalGeneration, Seeking, Work
from holdfast.agent.commands import (
    Command,
    Exit,
    HangUp,
    HoldWorkers,
    KillTree,
    ReleaseWorkers,
    Send,
    SignalWorkers,
)
from holdfast.agent.events import Signalled, WorkersProgress
from holdfast.protocol.messages import FromAgent, Leave
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.policy import Limits, NodeSpec, Note


class AgentActs:
    """State of the agent, and the small steps of its link and its work."""

    def __init__(self, node: NodeSpec, limits: Limits, now: float) -> None:
        """`node.member` is this agent's identity. Each later join appends a counter, so that none is used twice."""
        self.limits = limits
        self.link = Link.DOWN
        self.work = Work.IDLE
        self.current: LocalGeneration | None = None
        self.outcome: Outcome | None = None
        self._node = node
        self._joins, self._joined = 0, False
        self._local = False
        """The coordinator runs in this process: both sleep at the same time, and no network is between them."""
        self._listens, self._known_term = 0, 0  # as in Join
        self._join_sent_s: float | None = None
        """When Join was sent on the present link; None: not yet."""
        self._last_generation = 0
        self._led_by = ""
        """The node that hosted the coordinator of that generation, with its ranks, in words."""
        self._unlinked_s = now
        """When the link to the last coordinator broke; inf: it became silent, so that coordinator may live on."""
        self.leaving: Signalled | None = None
        self._leave_by_s = inf
        """When a leaving agent stops waiting for its workers to drain."""
        self._drained = False
        """The newest generation left at a safe point, and no other one has begun since."""
        self._pending_exit: Outcome | None = None
        self._lease = Lease(limits.fence_s, limits.ping_interval_s, confirmed_s=now, ping_at_s=now)
        self._unconfirmed_fence_at_s = inf
        """When the workers are killed unless a coordinator that knows their generation sends Resume before."""
        self._suspended_s: float | None = None
        """Since when the workers are suspended, because the coordinator does not answer; None: they are not."""
        self._stood_s, self._counted_s = 0.0, now
        """For how long they were suspended lately although answers came, when the newest one came."""
        self._too_slow = False
        """Answers take too long here: no worker is suspended."""
        self._seeking = Seeking.begin(limits, now)
        self._prepared_s = now
        self._progress: tuple[WorkersProgress, float] | None = None
        """The newest report of the workers' progress and its time, until it is sent."""
        self._report_wait_s = 0.0
        self._out: list[Command] = []

    @property
    def identity(self) -> str:
        """The identity of the latest join; the next join uses another one."""
        return self._node.member if self._joins == 0 else f"{self._node.member}.{self._joins}"

    # ---------------------------------------------------------------- fences

    def _stop_deadline_s(self, current: LocalGeneration) -> float:
        """The end of the grace, but not after the fence: a worker that still saves on a node that is cut off must not
        run beside the workers of the next generation."""
        return min(current.kill_at_s, self._workers_fence_at_s())

    def _fence_at_s(self) -> float:
        return inf if self._local and self.link is Link.UP else self._lease.fence_at_s

    def _unanswered_since_s(self) -> float:
        """Since when no coordinator has confirmed the workers' generation."""
        at_s = self._fence_at_s() if self._current().confirmed else self._unconfirmed_fence_at_s
        return at_s - self._lease.fence_s

    def _workers_fence_at_s(self) -> float:
        """Workers that are suspended before cannot run beside others: a successor may let them continue until later."""
        suspended = self.work in (Work.RUNNING, Work.DRAINING) and self._suspends
        return self._unanswered_since_s() + (self._lease.lease_s if suspended else self._lease.fence_s)

    @property
    def _suspends(self) -> bool:
        return self._current().suspends and self._lease.suspend_s > 0

    @property
    def fence_at_s(self) -> float | None:
        """When the workers are killed unless an answer arrives before; None: never, or there are none."""
        if not (self._at_work() or self.work is Work.STOPPING):
            return None
        at_s = self._workers_fence_at_s()
        return None if at_s == inf else at_s

    @property
    def suspend_at_s(self) -> float | None:
        """When the supervisor suspends the workers unless an answer arrives before; None: it does not. From some time
        after it on the others may go on without them. Workers that are being stopped are no exception: a coordinator
        that has a successor by now may have stopped them."""
        if self.work is Work.KILLING:
            return self._suspended_s  # none of them runs again before it is killed
        if self.fence_at_s is None or not self._suspends:
            return None
        return self._unanswered_since_s() + self._lease.suspend_s

    def _awaits_answer(self) -> bool:
        """Whether an answer to a Join or Ping is outstanding. It hangs up only when its workers are gone."""
        return self.link is Link.UP and self._join_sent_s is not None and self.work is not Work.KILLING

    # ---------------------------------------------------------------- small steps

    def _stop(self, now: float, signum: int) -> None:
        """Start to stop the workers: the signal to the leaders now, SIGKILL to all processes after the grace."""
        current = self._current()
        if self.work is Work.DRAINING and current.safe_point is None:
            self._out.append(ReleaseWorkers(current.generation, 0))
        self._enter(Work.STOPPING)
        current.stopped = True  # a worker that ends with 0 because of it has not done its work
        current.kill_at_s = now + self.limits.stop_grace_s
        self._out.append(SignalWorkers(signum))

    def _kill(self) -> None:
        self._enter(Work.KILLING)
        self._out.append(KillTree(self._current().generation))

    def _hold(self) -> None:
        self._enter(Work.DRAINING)
        self._hold_again()

    def _hold_again(self) -> None:
        self._out.append(HoldWorkers(self._current().generation))

    def _let_go(self, save_at: int = 0) -> None:
        """End the drain: the workers go on, and save at this safe point; 0: they do not."""
        current = self._current()
        current.asked, current.reached = False, None
        self._enter(Work.RUNNING)
        self._out.append(ReleaseWorkers(current.generation, save_at, save=bool(save_at)))

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

    def _exit(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if self.link is Link.UP:
            self.link = Link.DOWN
            self._joined = False
            self._out.append(HangUp("this node has finished"))
        self._out.append(Exit(outcome))

    def _is_preparing(self, generation: int) -> bool:
        return self.work is Work.PREPARING and self._current().generation == generation

    def _at_work(self) -> bool:
        return self.work in (Work.RUNNING, Work.DRAINING, Work.REGROUPING)

    def _going(self) -> bool:
        return self._pending_exit is not None

    def _named_node(self) -> NodeSpec:
        return structs.replace(self._node, member=self.identity)

    def _idle(self) -> None:
        self._enter(Work.IDLE)
        self.current = None

    def _enter(self, work: Work) -> None:
        assert (self.work, work) in WORK_TRANSITIONS, f"no transition {self.work} -> {work}"
        self.work = work

    def _current(self) -> LocalGeneration:
        assert self.current is not None
        return self.current

    def _report(self, message: FromAgent) -> None:
        """Report a fault that ends the generation. If no coordinator knows the generation, kill the workers."""
        if self._current().confirmed:
            self._send(message)
        elif self._at_work():
            self._kill()

    def _send(self, message: FromAgent) -> None:
        if self.link is Link.UP:
            self._out.append(Send(message))

    def _note(self, event: str, **fields: object) -> None:
        self._out.append(Note(event, fields))
