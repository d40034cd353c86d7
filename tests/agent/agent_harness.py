"""An agent's machine with hands that do what its shell and the coordinator do, and a way into every state."""

from __future__ import annotations

import signal
from collections.abc import Callable

from msgspec import structs

from holdfast.agent import commands as do
from holdfast.agent import events as ev
from holdfast.agent.agent import Agent
from holdfast.protocol import messages as msg
from holdfast.protocol.outcome import Failure, Outcome, OutcomeKind
from holdfast.protocol.policy import Limits, NodeSpec, Tick

LIMITS = Limits(join_s=60.0, stop_grace_s=5.0)
NPROC = 2
SUCCESS = Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0)


def assign(generation: int) -> msg.Assign:
    return msg.Assign(
        generation=generation,
        restart_count=0,
        group_rank=0,
        group_world_size=1,
        rank_base=0,
        world_size=NPROC,
        role_rank_base=0,
        role_world_size=NPROC,
        hosts_store=True,
    )


def killed(local_rank: int = 1) -> Failure:
    return Failure(rank=local_rank, local_rank=local_rank, host="a", pid=7, exit_code=-9)


def failure(*, after_stop: bool = False) -> Failure:
    return Failure(rank=0, local_rank=0, host="a", pid=1, exit_code=1, after_stop=after_stop)


class AgentHarness:
    """An agent's machine, and hands that do what its shell and the coordinator do."""

    def __init__(self) -> None:
        self.now = 0.0
        self.machine = Agent(NodeSpec(member="a#1", host="a", nproc=NPROC), LIMITS, self.now)
        self.done: list[do.Command] = []
        """What the latest event brought about."""

    def give(self, event: ev.Event) -> list[do.Command]:
        self.done = self.machine.handle(self.now, event)
        self.machine.check_invariants()
        return self.done

    def hear(self, message: msg.FromCoordinator) -> list[do.Command]:
        return self.give(ev.Received(message))

    def all_end(self, failure: Failure | None = None, *, drained: bool = False) -> None:
        """All workers, one after the other."""
        for local_rank in range(NPROC):
            self.give(ev.WorkerEnded(1, local_rank, failure, drained))

    def sent(self) -> list[msg.FromAgent]:
        return [command.message for command in self.done if isinstance(command, do.Send)]

    def has(self, kind: type[do.Command]) -> bool:
        return any(isinstance(command, kind) for command in self.done)

    def wait(self, seconds: float, *, answered: bool = True) -> list[do.Command]:
        """Time passes, Ticks come when they are due, pings are answered or not; all that was done meanwhile."""
        until, everything = self.now + seconds, list[do.Command]()
        while (due := self.machine.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            everything += self.give(Tick())
            for message in self.sent():
                match message:
                    case msg.Ping(number) | msg.Progress(ping=number) if answered and number:
                        everything += self.hear(msg.Pong(number))
        self.now = until
        self.done = everything
        return everything


def down() -> AgentHarness:
    return AgentHarness()


def dialing() -> AgentHarness:
    harness = down()
    harness.give(Tick())
    return harness


def joining() -> AgentHarness:
    harness = dialing()
    harness.give(ev.Dialed())
    return harness


def idle() -> AgentHarness:
    harness = joining()
    harness.hear(msg.Joined(LIMITS.lease_s, LIMITS.fence_s, LIMITS.ping_interval_s))
    return harness


def preparing() -> AgentHarness:
    harness = idle()
    harness.hear(assign(1))
    return harness


def prepared() -> AgentHarness:
    harness = preparing()
    harness.give(ev.NodePrepared(1, 40_000))
    return harness


def running() -> AgentHarness:
    harness = prepared()
    harness.hear(msg.Start(1, "10.0.0.1", 40_000))
    return harness


def survivor(generation: int, *local_ranks: int) -> msg.Assign:
    """The place of this node when only these local ranks of it take part."""
    ranks = local_ranks or tuple(range(NPROC))
    place = structs.replace(assign(generation), world_size=len(ranks), role_world_size=len(ranks))
    return structs.replace(place, local_ranks=local_ranks or None)


def all_can_go_on() -> AgentHarness:
    """Both workers are able to go on after a loss."""
    harness = running()
    harness.give(ev.WorkersCanGoOn(1, (0, 1)))
    return harness


def regrouping() -> AgentHarness:
    """Local rank 1 was killed, and local rank 0 leaves the generation to go on alone."""
    harness = all_can_go_on()
    harness.give(ev.WorkerEnded(1, 1, killed(), evidence_follows=True))
    harness.hear(msg.Regroup(survivor(2, 0), text="rank 1 was lost; 1 rank goes on"))
    return harness


def shrunk() -> AgentHarness:
    """Local rank 0 has gone on alone, and a replacement for local rank 1 is being started."""
    harness = regrouping()
    harness.give(ev.NodePrepared(2, 40_002))
    harness.hear(msg.Start(2, "10.0.0.1", 40_002))
    harness.give(ev.WorkersCanGoOn(2, (0,)))
    harness.hear(msg.Replace(2, (1,)))
    return harness


def replaced() -> AgentHarness:
    """The replacement is ready."""
    harness = shrunk()
    harness.give(ev.ReplacementsReady(2, (1,)))
    return harness


def bare() -> AgentHarness:
    """A node that has joined a running generation: it has no worker in it, and starts some."""
    harness = idle()
    harness.hear(structs.replace(assign(1), local_ranks=(), world_size=4))
    harness.give(ev.NodePrepared(1, None))
    harness.hear(msg.Start(1, "10.0.0.1", 40_000))
    harness.hear(msg.Replace(1, (0, 1)))
    return harness


def holding() -> AgentHarness:
    harness = running()
    harness.hear(msg.Drain(1, "z is leaving"))
    return harness


def held() -> AgentHarness:
    harness = holding()
    harness.give(ev.WorkersHeld(1, 6))
    return harness


def draining() -> AgentHarness:
    harness = held()
    harness.hear(msg.DrainTo(1, 9))
    return harness


def stopping() -> AgentHarness:
    harness = running()
    harness.hear(msg.Stop(1, msg.StopReason.WORKER_FAILED, "rank 7 failed on z"))
    return harness


def killing() -> AgentHarness:
    harness = stopping()
    harness.all_end(failure(after_stop=True))
    return harness


def sweeping() -> AgentHarness:
    harness = running()
    harness.all_end()
    return harness


def cleaned() -> AgentHarness:
    harness = sweeping()
    harness.give(ev.TreeGone(1))
    return harness


def cut_off_running() -> AgentHarness:
    harness = running()
    harness.give(ev.LinkLost("reset"))
    return harness


def leaving() -> AgentHarness:
    harness = running()
    harness.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))
    harness.give(ev.WorkersHeld(1, 0))
    return harness


def leaving_drained() -> AgentHarness:
    harness = running()
    harness.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))
    harness.give(ev.WorkersHeld(1, 6))
    return harness


def ended() -> AgentHarness:
    harness = idle()
    harness.hear(msg.Finish(SUCCESS))
    return harness


STATES: list[Callable[[], AgentHarness]] = [
    down,
    dialing,
    joining,
    idle,
    preparing,
    prepared,
    running,
    stopping,
    killing,
    sweeping,
    cleaned,
    cut_off_running,
    holding,
    held,
    draining,
    leaving,
    leaving_drained,
    ended,
    all_can_go_on,
    regrouping,
    shrunk,
    replaced,
    bare,
]
