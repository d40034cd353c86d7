"""An agent's machine with hands that do what its shell and the coordinator do, and a way into every state."""

from __future__ import annotations

import signal

from holdfast.agent.agent_machine import AgentMachine
from holdfast.agent.commands import (
    Command,
    Send,
)
from holdfast.agent.events import (
    Dialed,
    Event,
    LinkLost,
    NodePrepared,
    Received,
    Signalled,
    TreeGone,
    WorkerEnded,
    WorkersHeld,
)
from holdfast.protocol.messages import (
    REVISION,
    Assign,
    Drain,
    DrainTo,
    Finish,
    FromAgent,
    FromCoordinator,
    Joined,
    Ping,
    Pong,
    Start,
    Stop,
    StopReason,
)
from holdfast.protocol.outcome import Failure, Outcome, OutcomeKind
from holdfast.protocol.policy import Limits, NodeSpec, Tick

LIMITS = Limits(join_s=60.0, stop_grace_s=5.0)
NPROC = 2
SUCCESS = Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0)


def assign(generation: int) -> Assign:
    return Assign(
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


def failure(*, after_stop: bool = False) -> Failure:
    return Failure(rank=0, local_rank=0, host="a", pid=1, exit_code=1, after_stop=after_stop)


class Desk:
    """An agent's machine, and hands that do what its shell and the coordinator do."""

    def __init__(self) -> None:
        self.now = 0.0
        self.machine = AgentMachine(NodeSpec(member="a#1", host="a", nproc=NPROC), LIMITS, self.now)
        self.done: list[Command] = []
        """What the latest event brought about."""

    def give(self, event: Event) -> list[Command]:
        self.done = self.machine.handle(self.now, event)
        self.machine.check_invariants()
        return self.done

    def hear(self, message: FromCoordinator) -> list[Command]:
        return self.give(Received(message))

    def sent(self) -> list[FromAgent]:
        return [command.message for command in self.done if isinstance(command, Send)]

    def has(self, kind: type[Command]) -> bool:
        return any(isinstance(command, kind) for command in self.done)

    def wait(self, seconds: float, *, answered: bool = True) -> list[Command]:
        """Time passes, Ticks come when they are due, pings are answered or not; all that was done meanwhile."""
        until, everything = self.now + seconds, list[Command]()
        while (due := self.machine.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            everything += self.give(Tick())
            for message in self.sent():
                if answered and isinstance(message, Ping):
                    everything += self.hear(Pong(message.number))
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
    desk.give(Dialed())
    return desk


def idle() -> Desk:
    desk = joining()
    desk.hear(Joined(LIMITS.lease_s, LIMITS.fence_s, LIMITS.ping_interval_s, REVISION))
    return desk


def preparing() -> Desk:
    desk = idle()
    desk.hear(assign(1))
    return desk


def prepared() -> Desk:
    desk = preparing()
    desk.give(NodePrepared(1, 40_000))
    return desk


def running() -> Desk:
    desk = prepared()
    desk.hear(Start(1, "10.0.0.1", 40_000))
    return desk


def holding() -> Desk:
    desk = running()
    desk.hear(Drain(1, "z is leaving"))
    return desk


def held() -> Desk:
    desk = holding()
    desk.give(WorkersHeld(1, 6))
    return desk


def draining() -> Desk:
    desk = held()
    desk.hear(DrainTo(1, 9))
    return desk


def stopping() -> Desk:
    desk = running()
    desk.hear(Stop(1, StopReason.WORKER_FAILED, "rank 7 failed on z"))
    return desk


def killing() -> Desk:
    desk = stopping()
    for local_rank in range(NPROC):
        desk.give(WorkerEnded(1, local_rank, failure(after_stop=True)))
    return desk


def sweeping() -> Desk:
    desk = running()
    for local_rank in range(NPROC):
        desk.give(WorkerEnded(1, local_rank, None))
    return desk


def cleaned() -> Desk:
    desk = sweeping()
    desk.give(TreeGone(1))
    return desk


def cut_off_running() -> Desk:
    desk = running()
    desk.give(LinkLost("reset"))
    return desk


def leaving() -> Desk:
    desk = running()
    desk.give(Signalled(signal.SIGTERM, "SIGTERM"))
    desk.give(WorkersHeld(1, 0))
    return desk


def leaving_drained() -> Desk:
    desk = running()
    desk.give(Signalled(signal.SIGTERM, "SIGTERM"))
    desk.give(WorkersHeld(1, 6))
    return desk


def ended() -> Desk:
    desk = idle()
    desk.hear(Finish(SUCCESS))
    return desk
