"""Pretend workers of which a seed draws what they do: how long they take, how they end, when they make no steps."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from msgspec import structs

from holdfast.agent import commands as do
from holdfast.agent import events as ev
from holdfast.protocol.messages import Assign
from holdfast.protocol.outcome import Failure
from holdfast.protocol.policy import NodeSpec
from holdfast.protocol.rank_progress import Frame, RankProgress, RankSample, Stage
from tests.support.simulator.nodes import SimAgent
from tests.support.simulator.stalls import WAITING, Stall

if TYPE_CHECKING:
    from tests.support.simulator.cluster import SimCluster

SIGKILL = 9
EXIT_FUNCTIONS_S = 3.0
"""From a worker's exception to the end of its process."""
PROGRESS_S = 1.0
WARM_STEPS = 4
"""A generation may stall from then on."""
STEP_S = 0.5
"""From one safe point of a pretend worker to the next."""


class DrawnAgent(SimAgent):
    """An agent whose workers do what the cluster's Random says."""

    def __init__(self, cluster: SimCluster, node: NodeSpec) -> None:
        super().__init__(cluster, node)
        self.cluster = cluster
        self._raised: set[int] = set()
        """Of the workers, the ones whose program has raised an exception."""
        self._unread: dict[int, Failure] = {}
        """What failed workers have left, by local rank."""
        self.generation = 0
        self._world = (0, 0)
        """(Coordinator that assigned it, generation)."""
        self._started_s = 0.0
        self._held_s: float | None = None

    def prepare(self, assign: Assign) -> None:
        self.cluster.checker.assigned(self.coordinator_number, self.host, self.nproc, assign)
        self.cluster.agenda.after(self.cluster.random.uniform(0.0, 0.02), lambda: self.prepared(assign))

    def do_with_workers(self, command: do.Command) -> None:
        match command:
            case do.StartWorkers(assign):
                self._start_workers(assign)
            case do.SignalWorkers(signum):
                for local_rank in sorted(self.workers - self._raised):
                    self._worker_ends_soon(local_rank, -signum, self.cluster.random.choice([0.002, 0.05, 2.0, 60.0]))
            case do.HoldWorkers(generation):
                self._hold(generation)
            case do.ReleaseWorkers(generation, safe_point):
                self._release(generation, safe_point)
            case do.LookAtWorkers(generation, number):
                delay_s = self.cluster.random.choice([0.01, 0.01, 0.01, 0.5, 0.5, 1.5, 1.5, 7.0])
                self.cluster.agenda.after(delay_s, lambda: self._looked(generation, number))
            case do.KillTree(generation):
                self.cluster.agenda.after(0.01, lambda: self._kill_tree(generation))

    def _start_workers(self, assign: Assign) -> None:
        cluster = self.cluster
        cut_off = cluster.cut_off(self.coordinator_number)
        cluster.checker.started(self.coordinator_number, self.host, assign.generation, cut_off=cut_off)
        self.generation = assign.generation
        self._world = (self.coordinator_number, assign.generation)
        self._started_s, self._held_s = cluster.clock.now, None
        self.workers, self._raised = set(range(self.nproc)), set()
        self._unread.clear()
        for local_rank in sorted(self.workers):
            self._worker_ends_soon(local_rank, 0, cluster.options.work_s + cluster.random.uniform(0.0, 0.5))
        if cluster.options.steps:
            self._tell_progress(self._world)

    def _worker_ends_soon(self, local_rank: int, exit_code: int, delay_s: float) -> None:
        generation = self.generation

        def end() -> None:
            if exit_code == 0 and generation == self.generation and self._stall is not None:
                if self.cluster.clock.now <= self._stall.until_s < inf:
                    self.cluster.agenda.at(self._stall.until_s + delay_s, end)
                if self.cluster.clock.now <= self._stall.until_s:
                    return
            self.worker_ends(generation, local_rank, exit_code)

        self.cluster.agenda.after(delay_s, end)

    # Where the agents tell of it, each pretend worker makes a step every STEP_S, unless its generation stalls.

    @property
    def _stall(self) -> Stall | None:
        return self.cluster.stalls.get(self._world)

    @property
    def hangs(self) -> bool:
        return self._stall is not None and self._stall.until_s == inf

    @property
    def stands_still(self) -> bool:
        return self._stall is not None and self._stall.culprit is not None

    @property
    def still_s(self) -> float:
        """For how long the others have waited for one of the workers."""
        return self.cluster.clock.now - self._stall.since_s if self._stall is not None and self.stands_still else 0.0

    def stall(self, for_s: float, *, still: bool) -> None:
        """From now on there are no steps in this generation, everywhere. `still`: all wait for one of our workers."""
        if self.workers and self.steps >= WARM_STEPS and self._stall is None and self.cluster.options.steps:
            now, victim = self.cluster.clock.now, self.cluster.random.choice(sorted(self.workers))
            self.cluster.log(
                self.host, f"generation {self.generation} stalls for {for_s:g} s" + f" by {victim}" * still
            )
            culprit = (self.host, victim) if still else None
            self.cluster.stalls[self._world] = Stall(now, now + for_s, culprit)

    @property
    def steps(self) -> int:
        return int(self._stepping_s(self.cluster.clock.now) / STEP_S)

    def _stepping_s(self, now: float) -> float:
        stall = self._stall
        lost_s = max(0.0, min(now, stall.until_s) - stall.since_s) if stall is not None else 0.0
        return now - self._started_s - lost_s

    def _tell_progress(self, world: tuple[int, int]) -> None:
        if not self.alive or world != self._world or not self.workers:
            return
        stall, now, steps = self._stall, self.cluster.clock.now, self.steps
        age_s = self._stepping_s(now) - steps * STEP_S
        if stall is not None and now < stall.until_s:
            age_s += now - stall.since_s
        stage = Stage.STEPPING if steps else Stage.READY
        ranks = tuple(RankProgress(rank, stage, steps, age_s) for rank in range(self.nproc))
        self.handle(ev.WorkersProgress(self.generation, ranks))
        self.cluster.agenda.after(PROGRESS_S, lambda: self._tell_progress(world))

    def _looked(self, generation: int, number: int) -> None:
        stall, now = self._stall, self.cluster.clock.now
        still = stall is not None and stall.since_s <= now < stall.until_s and stall.culprit is not None
        samples = []
        for local_rank in sorted(self.workers):
            function = "sleep" if stall is not None and stall.culprit == (self.host, local_rank) else WAITING
            frame = Frame("train.py", 1 if still else self.cluster.events, function)
            samples.append(RankSample(local_rank, 1, "S", 0.0, (frame,)))
        self.handle(ev.WorkersSeen(generation, number, tuple(samples)))

    # Pretend workers that ask for safe points reach one every STEP_S; each is a little out of step with the others.

    def _reached(self, local_rank: int, at_s: float) -> int:
        """The newest safe point this worker has reached by then, if nobody holds it."""
        if not self.cluster.asks:
            return 0
        return max(0, int((at_s - self._started_s - 0.1 * local_rank) / STEP_S))

    def _hold(self, generation: int) -> None:
        self._held_s = self.cluster.clock.now
        reached = max((self._reached(rank, self._held_s) for rank in self.workers), default=0)
        self.cluster.agenda.after(0.02, lambda: self.handle(ev.WorkersHeld(generation, reached)))

    def _release(self, generation: int, safe_point: int) -> None:
        if generation != self.generation or self._held_s is None:
            return
        cluster, held_s, self._held_s = self.cluster, self._held_s, None
        if safe_point == 0:
            return
        for local_rank in sorted(self.workers):
            reached = self._reached(local_rank, held_s)
            cluster.checker.told(self.coordinator_number, generation, reached, safe_point)
            delay_s = (safe_point - reached) * STEP_S + cluster.random.uniform(0.0, 0.5)
            cluster.agenda.after(delay_s, lambda rank=local_rank: self._drained(generation, rank, safe_point))  # type: ignore[misc]

    def _drained(self, generation: int, local_rank: int, safe_point: int) -> None:
        if generation == self.generation and local_rank in self.workers and not self.hangs:
            self.cluster.log(self.host, f"worker {local_rank} leaves at safe point {safe_point}")
            self.worker_ends(generation, local_rank, 0, drained=True)

    def worker_ends(self, generation: int, local_rank: int, exit_code: int, *, drained: bool = False) -> None:
        """One pretend worker ends, if it is still there."""
        if generation != self.generation or local_rank not in self.workers:
            return
        self.workers.discard(local_rank)
        if not self.workers:
            self.cluster.checker.ended(self.host)
        if not self.alive:
            return
        if exit_code == 0 or local_rank in self._raised:
            failure = self.failure(local_rank, exit_code) if exit_code else None
            self.handle(ev.WorkerEnded(generation, local_rank, failure, drained))
            return
        failure = self._begin_reading(generation, local_rank, exit_code)
        self.handle(ev.WorkerEnded(generation, local_rank, failure, evidence_follows=True))

    def _begin_reading(self, generation: int, local_rank: int, exit_code: int) -> Failure:
        """The bare failure. What the worker has left is read within moments, and before its tree is reported gone."""
        bare = self.failure(local_rank, exit_code)
        self._unread[local_rank] = structs.replace(bare, message="read")
        self.cluster.agenda.after(self.cluster.random.uniform(0.0, 0.05), lambda: self._read(generation, local_rank))
        return bare

    def _read(self, generation: int, local_rank: int) -> None:
        if self.alive and generation == self.generation and local_rank in self._unread:
            self.handle(ev.FailureRead(generation, local_rank, self._unread.pop(local_rank)))

    def _worker_raises(self, generation: int, local_rank: int) -> None:
        """Reported first; the process is there for as long as its exit functions take."""
        if local_rank in self._raised:
            return
        self._raised.add(local_rank)
        self._worker_ends_soon(local_rank, 1, EXIT_FUNCTIONS_S)
        if self.alive:
            failure = self._begin_reading(generation, local_rank, 1)
            self.handle(ev.WorkerRaised(generation, local_rank, failure, evidence_follows=True))

    def _kill_tree(self, generation: int) -> None:
        self._kill()
        for local_rank in sorted(self._unread):
            self._read(generation, local_rank)
        self.handle(ev.TreeGone(generation))

    def fail_worker(self, exit_code: int) -> None:
        """One worker fails, and often takes its peers with it, as collectives do."""
        if not self.workers:
            return
        cluster = self.cluster
        generation = self.generation
        victim = cluster.random.choice(sorted(self.workers))
        cluster.log(self.host, f"worker {victim} of generation {generation} fails with {exit_code}")
        if exit_code == 1:
            self._worker_raises(generation, victim)
        else:
            self.worker_ends(generation, victim, exit_code)
        for agent in cluster.agents.values():
            if agent.generation == generation and cluster.random.random() < 0.5:
                for local_rank in sorted(agent.workers):
                    agent._worker_ends_soon(local_rank, 1, cluster.random.uniform(0.001, 0.1))

    def lose_store(self) -> None:
        """The store host dies, if it is here and at work."""
        if self.assign is not None and self.assign.hosts_store and self.workers:
            self.cluster.log(self.host, f"the store host of generation {self.generation} dies")
            self.handle(ev.StoreDied(self.generation))

    def die(self, *, silent: bool) -> None:
        """The supervisor needs a moment to kill the workers (none if the machine lost power)."""
        super().die(silent=silent)
        if silent:
            self._kill()
        else:
            self.cluster.link_lost(self.host)
            self.cluster.agenda.after(0.01, self._kill)

    def _kill(self) -> None:
        for local_rank in sorted(self.workers):
            self.worker_ends(self.generation, local_rank, -SIGKILL)
