"""An agent's machine with hands that do what its shell and the coordinator do, and a way into every state."""

from __future__ import annotations

import signal
from collections.abc import Callable

from msgspec import structs

from holdfast.agent import commands as do
from holdfast.agent import events as ev
from holdfast.agent.agent_machine import AgentMachine
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


class Desk:
    """An agent's machine, and hands that do what its shell and the coordinator do."""

    def __init__(self) -> None:
        self.now = 0.0
        self.machine = AgentMachine(NodeSpec(member="a#1", host="a", nproc=NPROC), LIMITS, self.now)
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


def down() -> Desk:
    return Desk()


def dialing() -> Desk:
    desk = down()
    desk.give(Tick())
    return desk


def joining() -> Desk:
    desk = dialing()
    desk.give(ev.Dialed())
    return desk


def idle() -> Desk:
    desk = joining()
    desk.hear(msg.Joined(LIMITS.lease_s, LIMITS.fence_s, LIMITS.ping_interval_s))
    return desk


def preparing() -> Desk:
    desk = idle()
    desk.hear(assign(1))
    return desk


def prepared() -> Desk:
    desk = preparing()
    desk.give(ev.NodePrepared(1, 40_000))
    return desk


def running() -> Desk:
    desk = prepared()
    desk.hear(msg.Start(1, "10.0.0.1", 40_000))
    return desk


def survivor(generation: int, *local_ranks: int) -> msg.Assign:
    """The place of this node when only these local ranks of it take part."""
    ranks = local_ranks or tuple(range(NPROC))
    place = structs.replace(assign(generation), world_size=len(ranks), role_world_size=len(ranks))
    return structs.replace(place, local_ranks=local_ranks or None)


def able() -> Desk:
    """Both workers are able to go on after a loss."""
    desk = running()
    desk.give(ev.WorkersAble(1, (0, 1)))
    return desk


def regrouping() -> Desk:
    """Local rank 1 was killed, and local rank 0 leaves the generation to go on alone."""
    desk = able()
    desk.give(ev.WorkerEnded(1, 1, killed(), evidence_follows=True))
    desk.hear(msg.Regroup(survivor(2, 0), text="rank 1 was lost; 1 rank goes on"))
    return desk


def shrunk() -> Desk:
    """Local rank 0 has gone on alone, and a replacement for local rank 1 is being started."""
    desk = regrouping()
    desk.give(ev.NodePrepared(2, 40_002))
    desk.hear(msg.Start(2, "10.0.0.1", 40_002))
    desk.give(ev.WorkersAble(2, (0,)))
    desk.hear(msg.Replace(2, (1,)))
    return desk


def replaced() -> Desk:
    """The replacement is ready."""
    desk = shrunk()
    desk.give(ev.ReplacementsReady(2, (1,)))
    return desk


def bare() -> Desk:
    """A node that has joined a running generation: it has no worker in it, and starts some."""
    desk = idle()
    desk.hear(structs.replace(assign(1), local_ranks=(), world_size=4))
    desk.give(ev.NodePrepared(1, None))
    desk.hear(msg.Start(1, "10.0.0.1", 40_000))
    desk.hear(msg.Replace(1, (0, 1)))
    return desk


def holding() -> Desk:
    desk = running()
    desk.hear(msg.Drain(1, "z is leaving"))
    return desk


def held() -> Desk:
    desk = holding()
    desk.give(ev.WorkersHeld(1, 6))
    return desk


def draining() -> Desk:
    desk = held()
    desk.hear(msg.DrainTo(1, 9))
    return desk


def stopping() -> Desk:
    desk = running()
    desk.hear(msg.Stop(1, msg.StopReason.WORKER_FAILED, "rank 7 failed on z"))
    return desk


def killing() -> Desk:
    desk = stopping()
    desk.all_end(failure(after_stop=True))
    return desk


def sweeping() -> Desk:
    desk = running()
    desk.all_end()
    return desk


def cleaned() -> Desk:
    desk = sweeping()
    desk.give(ev.TreeGone(1))
    return desk


def cut_off_running() -> Desk:
    desk = running()
    desk.give(ev.LinkLost("reset"))
    return desk


def leaving() -> Desk:
    desk = running()
    desk.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))
    desk.give(ev.WorkersHeld(1, 0))
    return desk


def leaving_drained() -> Desk:
    desk = running()
    desk.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))
    desk.give(ev.WorkersHeld(1, 6))
    return desk


def ended() -> Desk:
    desk = idle()
    desk.hear(msg.Finish(SUCCESS))
    return desk


STATES: list[Callable[[], Desk]] = [
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
    able,
    regrouping,
    shrunk,
    replaced,
    bare,
]
