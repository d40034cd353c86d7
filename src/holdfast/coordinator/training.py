"""Keeps the progress of the training: the throughput of the newest world that was started, and what is counted over all
of them. PURE.

It is no extension: how long a regroup waits for running workers follows from the longest step, and a successor
continues the training time. Extensions read it (`Job.throughput`), so each report is counted once.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.coordinator.world import Member, World
from holdfast.protocol.messages import Progress
from holdfast.protocol.policy import Limits
from holdfast.protocol.rank_progress import Stage
from holdfast.protocol.throughput import Throughput, of_world


class Training:
    """Counts the steps of one generation after the other."""

    def __init__(self, limits: Limits, members: Mapping[str, Member]) -> None:
        """`members`: the coordinator's live table of members by name."""
        self._limits = limits
        self._members = members
        self._world: World | None = None
        """The newest world that was started."""
        self._throughput: Throughput | None = None
        """Throughput of that world. Made when it is first needed: a start of 100,000 ranks has no time for it."""
        self._trained_s = 0.0
        """Training time of the generations that ended."""
        self._longest_step_s = 0.0
        """The longest step of these."""

    def begin(self, world: World) -> None:
        """The workers of this world were started, or go on in it."""
        self._trained_s, self._longest_step_s = self.training_s, self.longest_step_s
        self._world, self._throughput = world, None

    def take_over(self, training_s: float) -> None:
        """Continue after another coordinator."""
        self._trained_s = training_s

    def progress(self, now: float, member: str, message: Progress) -> bool:
        """An agent reports how far its workers are. True if a rank made a step or reached a new stage."""
        throughput = self.throughput
        assert throughput is not None
        throughput.follow_job(now, member, message)
        return throughput.heard(member, message.ranks, now)

    def rank_done(self, now: float, member: str, local_rank: int) -> None:
        """A worker has ended with 0."""
        pace = self._throughput.of(member, local_rank) if self._throughput is not None else None
        if self._throughput is not None and pace is not None:
            self._throughput.enter(pace, Stage.DONE, now)

    @property
    def throughput(self) -> Throughput | None:
        """Throughput of the newest world that was started; None: none was."""
        world = self._world
        if self._throughput is None and world is not None:
            assert world.started_s is not None
            hosts = {name: self._members[name].node.host for name in world.order if name in self._members}
            nodes = of_world(world.order, world.places, hosts)
            self._throughput = Throughput(nodes, world.started_s, self._limits.slow_report_s)
            # A generation that a successor continues has ranks that ended before (scenario `resumed`): they are not
            # slow.
            for name, done in world.done.items():
                for local_rank in done:
                    self.rank_done(world.started_s, name, local_rank)
        return self._throughput

    @property
    def training_s(self) -> float:
        """Total time in which a generation was making steps."""
        return self._trained_s + (self._throughput.training_s if self._throughput is not None else 0.0)

    @property
    def longest_step_s(self) -> float:
        """The longest step of any rank so far, without the first ones of a generation; 0: unknown."""
        return max(self._longest_step_s, self._throughput.longest_step_s if self._throughput is not None else 0.0)
