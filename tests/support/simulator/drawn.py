"""Pretend workers of which a seed draws what they do: how long they take, how they end, when they make no steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from msgspec import structs

from holdfast.agent import commands as do
from holdfast.agent import events as ev
from holdfast.agent.local_generation import Work
from holdfast.extensions.hangs.messages import Look, Looked
from holdfast.protocol.messages import Answer, Assign, Extended
from holdfast.protocol.outcome import Failure
from holdfast.protocol.policy import NodeSpec
from holdfast.protocol.rank_progress import Frame, RankProgress, RankSample, Stage
from tests.support.simulator.asking import Asking
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
OVER_S = 0.5
"""Workers end within so long of each other, and spares after all others."""
STEP_S = 0.5
"""From one safe point of a pretend worker to the next."""


class DrawnAgent(SimAgent):
    """An agent whose workers do what the cluster's Random says."""

    def __init__(self, cluster: SimCluster, node: NodeSpec) -> None:
        super().__init__(cluster, node)
        self.cluster = cluster
        self.incarnation = cluster.events + 1
        self._raised: set[int] = set()
        """Of the workers, the ones whose program has raised an exception."""
        self._unread: dict[int, Failure] = {}
        """What failed workers have left, by local rank."""
        self._can_go_on: set[int] = set()
        self._waiting: set[int] = set()
        """Workers that wait for their place in the next generation."""
        self._came: set[int] = set()
        """Those of them that have come from the safe point."""
        self._ended_before: set[int] = set()
        """Workers that have ended before the safe point."""
        self.replacements: dict[int, int] = {}
        """Workers that take no part yet: the number of each process, by local rank."""
        self._ready: set[int] = set()
        self._spares: set[int] = set()
        """Workers that make no steps in this generation: there are more than its model fits on."""
        self._process: dict[int, int] = {}
        """The number of each worker's process, by local rank."""
        self._pids = 0
        self._ends_s: dict[int, float] = {}
        """When the work of each worker is done, by local rank."""
        self.generation = 0
        self._world = (0, 0)
        """(Coordinator that assigned it, generation)."""
        self._started_s = 0.0
        self._held_s: float | None = None
        self._suspend_at_s: float | None = None
        """When the supervisor suspends the workers; it does so while the agent stands still, too."""
        self.suspended = False
        self._deferred: list[Callable[[], None]] = []
        """What the workers do when they run again."""
        self._asking = Asking(self)

    # ---------------------------------------------------------------- questions of users

    def ask(self, *, harmless: bool) -> None:
        if self._end is not None and self.alive:
            self._asking.ask(self._end, harmless=harmless)

    def report_load(self) -> None:
        if self._end is not None and self.alive:
            self._asking.report_load(self._end)

    def answered(self, answer: Answer) -> None:
        if self._end is not None:
            self._asking.answered(self._end, answer)

    def extended(self, message: Extended) -> None:
        if self._end is not None:
            self._asking.extended(self._end, message)

    def _do(self, command: do.Command) -> None:
        super()._do(command)
        if self._end is None:
            self._asking.link_lost()

    def _link_lost(self, reason: str) -> None:
        self._asking.link_lost()
        super()._link_lost(reason)

    # ---------------------------------------------------------------- suspension

    def _handled(self) -> None:
        super()._handled()
        if self.machine.suspend_at_s != self._suspend_at_s:
            self._suspend_at_s = self.machine.suspend_at_s
            if self._suspend_at_s is not None and self._suspend_at_s > self.cluster.clock.now:
                self.cluster.agenda.at(self._suspend_at_s, self._look_at_suspension)
            self._look_at_suspension()

    def _look_at_suspension(self) -> None:
        due = self._suspend_at_s is not None and self.cluster.clock.now >= self._suspend_at_s
        if due and self.workers and not self.suspended:
            self.cluster.log(self.host, "its workers are suspended")
            self.suspended = True
            self.cluster.checker.suspended.add(self.host)
        elif not due and self.suspended:
            self.cluster.log(self.host, "its workers run again")
            cut_off = self.cluster.cut_off(self.coordinator_number)
            self.cluster.checker.let_run(self._world[0], self.host, cut_off=cut_off)
            self._let_run()

    def _let_run(self) -> None:
        self.suspended = False
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            action()

    def _when_running(self, action: Callable[[], None]) -> None:
        """What a worker does by itself."""
        if self.suspended:
            self._deferred.append(action)
        else:
            action()

    # ---------------------------------------------------------------- work

    def prepare(self, assign: Assign) -> None:
        self.cluster.checker.assigned(self.coordinator_number, self.host, len(self.taking_part(assign)), assign)
        self.cluster.agenda.after(self.cluster.random.uniform(0.0, 0.02), lambda: self.prepared(assign))

    def do_with_workers(self, command: do.Command) -> None:
        match command:
            case do.StartWorkers(assign):
                self._start_workers(assign)
            case do.RegroupWorkers(assign, safe_point):
                self._regroup(assign, safe_point)
            case do.ContinueWorkers(assign):
                self._continue_workers(assign)
            case do.StartReplacements(generation, local_ranks):
                self._start_replacements(generation, local_ranks)
            case do.SignalWorkers(signum):
                for local_rank in sorted(self.workers - self._raised):
                    self._worker_ends_soon(local_rank, -signum, self.cluster.random.choice([0.002, 0.05, 2.0, 60.0]))
            case do.HoldWorkers(generation):
                self._hold(generation)
            case do.ReleaseWorkers(generation, safe_point, save):
                self._release(generation, safe_point, save=save)
            case do.KillTree(generation):
                self.cluster.agenda.after(0.01, lambda: self._kill_tree(generation))

    def _start_workers(self, assign: Assign) -> None:
        cluster = self.cluster
        cut_off = cluster.cut_off(self.coordinator_number)
        cluster.checker.started(self.coordinator_number, self.host, assign, cut_off=cut_off)
        assert not self.replacements, f"{self.host} starts workers beside replacements {self.replacements}"
        self.generation = assign.generation
        self._world = (self.coordinator_number, assign.generation)
        self._started_s, self._held_s = cluster.clock.now, None
        self.workers, self._raised = self.taking_part(assign), set()
        self._unread.clear()
        self._begin_work(assign)

    def _begin_work(self, assign: Assign) -> None:
        """The workers that take part make steps from now on."""
        cluster = self.cluster
        self._can_go_on, self._waiting = set(), set()
        used = assign.world_size - assign.world_size % cluster.options.multiple
        ranks = {local_rank: assign.rank_base + assign.place(local_rank) for local_rank in self.workers}
        self._spares = {local_rank for local_rank, rank in ranks.items() if rank >= used}
        if self._spares:
            cluster.log(self.host, f"workers {sorted(self._spares)} are spares of generation {assign.generation}")
        if not used:
            self._refuse_soon(assign.generation, "the model does not fit")
        for local_rank in sorted(self.workers):
            self._pids += 1
            cluster.checker.has_rank(
                (self.coordinator_number, assign.generation, assign.rank_base + assign.place(local_rank)),
                (self.host, self.incarnation, self._process.setdefault(local_rank, self._pids)),
            )
            over_s = OVER_S if local_rank in self._spares else 0.0
            jitter_s = cluster.random.uniform(0.0, OVER_S)
            self._ends_s[local_rank] = cluster.clock.now + cluster.options.work_s + jitter_s + over_s
            self._worker_ends_soon(local_rank, 0, self._ends_s[local_rank] - cluster.clock.now)
            if cluster.options.survives:
                delay_s = cluster.random.choice([0.001, 0.05, 0.05, 0.5])
                can_go_on = partial(self._says_can_go_on, assign.generation, local_rank)
                cluster.agenda.after(delay_s, partial(self._when_running, can_go_on))
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
            if exit_code == -SIGKILL:
                self.worker_ends(generation, local_rank, exit_code)
            else:
                self._when_running(lambda: self.worker_ends(generation, local_rank, exit_code))

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
        trains = sorted(self.workers - self._spares)
        if trains and self.steps >= WARM_STEPS and self._stall is None and self.cluster.options.steps:
            now, victim = self.cluster.clock.now, self.cluster.random.choice(trains)
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
        ranks = tuple(
            RankProgress(rank, Stage.SPARE) if rank in self._spares else RankProgress(rank, stage, steps, age_s)
            for rank in range(self.nproc)
        )
        self.handle(ev.WorkersProgress(self.generation, ranks))
        self.cluster.agenda.after(PROGRESS_S, lambda: self._tell_progress(world))

    def look(self, look: Look) -> None:
        delay_s = self.cluster.random.choice([0.01, 0.01, 0.01, 0.5, 0.5, 1.5, 1.5, 7.0])
        self.cluster.agenda.after(delay_s, lambda: self._looked(look))

    def _looked(self, look: Look) -> None:
        stall, now = self._stall, self.cluster.clock.now
        still = stall is not None and stall.since_s <= now < stall.until_s and stall.culprit is not None
        samples = []
        for local_rank in sorted(self.workers):
            function = "sleep" if stall is not None and stall.culprit == (self.host, local_rank) else WAITING
            frame = Frame("train.py", 1 if still else self.cluster.events, function)
            samples.append(RankSample(local_rank, 1, "S", 0.0, (frame,)))
        self.handle(Looked(look.generation, look.number, tuple(samples)))

    # Pretend workers that ask for safe points reach one every STEP_S; each is a little out of step with the others.

    def _reached(self, local_rank: int, at_s: float) -> int:
        """The newest safe point this worker has reached by then, if nobody holds it. A spare asks for none before all
        are to come to one."""
        if not self.cluster.asks or local_rank in self._spares:
            return 0
        return max(0, int((at_s - self._started_s - 0.1 * local_rank) / STEP_S))

    def _hold(self, generation: int) -> None:
        self._held_s = self.cluster.clock.now
        reached = max((self._reached(rank, self._held_s) for rank in self.workers), default=0)
        held_s = self._held_s

        def answer() -> None:
            if self._held_s == held_s:  # they have not been released meanwhile
                self.handle(ev.WorkersHeld(generation, reached, saves=True))

        self.cluster.agenda.after(0.02, answer)

    def _release(self, generation: int, safe_point: int, *, save: bool) -> None:
        if generation != self.generation or self._held_s is None:
            return
        cluster, held_s, self._held_s = self.cluster, self._held_s, None
        if safe_point == 0:
            return
        if save:  # they go on
            reached = max((self._reached(local_rank, held_s) for local_rank in self.workers), default=0)
            cluster.checker.saves(reached, safe_point)
            return
        for local_rank in sorted(self.workers):
            reached = self._reached(local_rank, held_s)
            cluster.checker.told(self.coordinator_number, generation, reached, safe_point)
            delay_s = self._way_s(local_rank, safe_point - reached) + cluster.random.uniform(0.0, 0.5)
            drained = partial(self._drained, generation, local_rank, safe_point)
            cluster.agenda.after(delay_s, partial(self._when_running, drained))

    def _way_s(self, local_rank: int, safe_points: int) -> float:
        """How long it takes to the safe point. A spare has no steps to do."""
        return 0.0 if local_rank in self._spares else safe_points * STEP_S

    def _drained(self, generation: int, local_rank: int, safe_point: int) -> None:
        if generation == self.generation and local_rank in self.workers and not self.hangs:
            self.cluster.log(self.host, f"worker {local_rank} leaves at safe point {safe_point}")
            self.worker_ends(generation, local_rank, 0, drained=True)

    # Pretend workers that run in `ht.survive`: they go on in another generation, or not.

    def _says_can_go_on(self, generation: int, local_rank: int) -> None:
        if self.alive and generation == self.generation and local_rank in self.workers - self._raised:
            self._can_go_on.add(local_rank)
            self.handle(ev.WorkersCanGoOn(generation, tuple(sorted(self._can_go_on))))

    def _regroup(self, assign: Assign, safe_point: int) -> None:
        """The workers leave their generation, and wait: at once, or at the safe point unless their work ends before."""
        cluster, now = self.cluster, self.cluster.clock.now
        cluster.checker.assigned(self.coordinator_number, self.host, len(self.taking_part(assign)), assign)
        held_s, self._held_s = self._held_s, None
        before, self.generation, self.assign = self.generation, assign.generation, assign
        self._came, self._ended_before = set(), set()
        for local_rank in sorted(self.taking_part(assign)):
            if local_rank in self._ready and local_rank in self.replacements:
                self._process[local_rank] = self.replacements.pop(local_rank)
                self._ready.discard(local_rank)
                self.workers.add(local_rank)
                self._waiting.add(local_rank)
        for local_rank in sorted(self.workers - self._waiting):
            delay_s = cluster.random.choice([0.001, 0.01, 0.05, 0.3])
            if safe_point:
                reached = self._reached(local_rank, held_s if held_s is not None else now)
                cluster.checker.told(self.coordinator_number, before, reached, safe_point)
                delay_s += self._way_s(local_rank, safe_point - reached)
            self._comes(assign, local_rank, delay_s, at_once=not safe_point)
        self._look_at_waiting(assign)

    def _comes(self, assign: Assign, local_rank: int, delay_s: float, *, at_once: bool) -> None:
        cluster, generation = self.cluster, assign.generation
        left_s = max(self._ends_s.get(local_rank, inf) - cluster.clock.now, 0.01)  # its time may be over in a stall
        fate = cluster.random.random() if cluster.options.faults.regroup_faults else 1.0
        if not at_once and left_s < delay_s:
            self._worker_ends_soon(local_rank, 0, left_s)
        elif fate < 0.05:  # it cannot be released, or dies on the way
            self._worker_ends_soon(
                local_rank, -SIGKILL, cluster.random.choice([0.01, cluster.options.limits.release_s])
            )
        elif fate < 0.07:
            cluster.agenda.after(delay_s, lambda: self.handle(ev.RegroupRefused(generation, "its memory grew")))
        elif fate < 0.08 and at_once:
            pass  # it stays where it is, and nobody kills it
        elif fate < 0.10:
            raises = partial(self._worker_raises, self.generation, local_rank)
            cluster.agenda.after(delay_s, partial(self._when_running, raises))
        else:
            waits = partial(self._waits, assign, local_rank)
            cluster.agenda.after(delay_s, partial(self._when_running, waits))

    def _waits(self, assign: Assign, local_rank: int) -> None:
        if self.alive and local_rank in self.workers and self.assign is not None:
            self._waiting.add(local_rank)
            self._came.add(local_rank)
            self._look_for_ended(self.assign)
            self._look_at_waiting(self.assign)

    def _look_for_ended(self, assign: Assign) -> None:
        """A worker waits at the safe point for one that has ended before it."""
        if self._came and self._ended_before:
            self._ended_before = set()
            self._refuse_soon(assign.generation, "a rank has ended before the safe point")

    def _refuse_soon(self, generation: int, why: str) -> None:
        self.cluster.agenda.after(0.001, lambda: self.handle(ev.RegroupRefused(generation, why)))

    def _look_at_waiting(self, assign: Assign) -> None:
        """All workers that take part have come, or will end there because the node leaves: it is prepared."""
        generation, port = assign.generation, 40_000 + assign.generation if assign.hosts_store else None
        if self._waiting >= self.taking_part(assign) | self.workers and self.machine.work is Work.REGROUPING:
            if not self.taking_part(assign):
                self.cluster.checker.ended(self.host)
            elif self.workers:
                self.cluster.checker.gathered(self.host, generation)
            self.cluster.agenda.after(0.001, lambda: self.handle(ev.NodePrepared(generation, port)))

    def _continue_workers(self, assign: Assign) -> None:
        cluster = self.cluster
        cut_off = cluster.cut_off(self.coordinator_number)
        if self.workers:
            cluster.checker.continued(self.coordinator_number, self.host, assign, cut_off=cut_off)
        cluster.regroups += 1
        self._world = (self.coordinator_number, assign.generation)
        self._started_s, self._held_s = cluster.clock.now, None
        self._begin_work(assign)

    def _start_replacements(self, generation: int, local_ranks: tuple[int, ...]) -> None:
        cluster = self.cluster
        for local_rank in local_ranks:
            assert local_rank not in self.workers | self.replacements.keys(), f"{self.host} has a worker {local_rank}"
            self._pids += 1
            process = self.replacements[local_rank] = self._pids
            fails = cluster.options.faults.regroup_faults and cluster.random.random() < 0.2
            delay_s = cluster.random.choice([0.05, 1.0, 5.0])
            self.cluster.log(self.host, f"starts a replacement for {local_rank}")
            if fails:
                exit_code = cluster.random.choice([0, 1, -SIGKILL])
                cluster.agenda.after(delay_s, partial(self._replacement_ends, local_rank, process, exit_code))
            else:
                ready = partial(self._replacement_ready, generation, local_rank, process)
                cluster.agenda.after(delay_s, partial(self._when_running, ready))

    def _replacement_ready(self, generation: int, local_rank: int, process: int) -> None:
        if self.alive and self.replacements.get(local_rank) == process:
            self._ready.add(local_rank)
            self.handle(ev.ReplacementsReady(generation, tuple(sorted(self._ready))))

    def _replacement_ends(self, local_rank: int, process: int, exit_code: int) -> None:
        if self.replacements.get(local_rank) != process:
            return
        del self.replacements[local_rank]
        self._ready.discard(local_rank)
        if not self.alive:
            return
        if exit_code == 0:
            self.handle(ev.WorkerEnded(self.generation, local_rank, None))
            return
        failure = Failure(rank=0, local_rank=local_rank, host=self.host, pid=1000 + process, exit_code=exit_code)
        self.handle(ev.WorkerEnded(self.generation, local_rank, failure, evidence_follows=True))
        self.handle(ev.FailureRead(self.generation, local_rank, failure))

    def worker_ends(self, generation: int, local_rank: int, exit_code: int, *, drained: bool = False) -> None:
        """One pretend worker ends, if it is still there."""
        if generation != self.generation or local_rank not in self.workers:
            return
        failure = self.failure(local_rank, exit_code) if exit_code else None
        self.workers.discard(local_rank)
        self._waiting.discard(local_rank)
        self._process.pop(local_rank, None)
        if not self.workers:
            self.cluster.checker.ended(self.host)
            self._let_run()
        if not self.alive:
            return
        if failure is None or local_rank in self._raised:
            self.handle(ev.WorkerEnded(generation, local_rank, failure, drained))
        else:
            self._begin_reading(generation, failure)
            self.handle(ev.WorkerEnded(generation, local_rank, failure, evidence_follows=True))
        if self.assign is not None:
            if exit_code == 0 and self.machine.work is Work.REGROUPING and local_rank in self.taking_part(self.assign):
                self._ended_before.add(local_rank)
                self._look_for_ended(self.assign)
            self._look_at_waiting(self.assign)

    def failure(self, local_rank: int, exit_code: int) -> Failure:
        return structs.replace(super().failure(local_rank, exit_code), pid=self._process.get(local_rank, 0))

    def _begin_reading(self, generation: int, bare: Failure) -> None:
        """What the worker has left is read within moments, and before its tree is reported gone."""
        self._unread[bare.local_rank] = structs.replace(bare, message="read")
        delay_s = self.cluster.random.uniform(0.0, 0.05)
        self.cluster.agenda.after(delay_s, lambda: self._read(generation, bare.local_rank))

    def _read(self, generation: int, local_rank: int) -> None:
        if self.alive and local_rank in self._unread:
            self.handle(ev.FailureRead(generation, local_rank, self._unread.pop(local_rank)))

    def _worker_raises(self, generation: int, local_rank: int) -> None:
        """Reported first; the process is there for as long as its exit functions take."""
        if local_rank in self._raised or local_rank not in self.workers:
            return
        self._raised.add(local_rank)
        self._worker_ends_soon(local_rank, 1, EXIT_FUNCTIONS_S)
        if self.alive:
            failure = self.failure(local_rank, 1)
            self._begin_reading(generation, failure)
            self.handle(ev.WorkerRaised(generation, local_rank, failure, evidence_follows=True))

    def _kill_tree(self, generation: int) -> None:
        self._kill()
        for local_rank in sorted(self._unread):
            self._read(generation, local_rank)
        for local_rank in sorted(self.replacements):
            self._replacement_ends(local_rank, self.replacements[local_rank], -SIGKILL)
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
            self._when_running(lambda: self._worker_raises(generation, victim))
        else:
            self.worker_ends(generation, victim, exit_code)
        quiet = cluster.options.survives and exit_code < 0  # the others wait for news instead of failing
        for agent in cluster.agents.values():
            if agent.generation == generation and not quiet and cluster.random.random() < 0.5:
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

        def gone() -> None:
            self._kill()
            self.replacements.clear()

        if silent:
            gone()
        else:
            self.cluster.link_lost(self.host)
            self.cluster.agenda.after(0.01, gone)

    def _kill(self) -> None:
        self._deferred.clear()
        self.suspended = False
        for local_rank in sorted(self.workers):
            self.worker_ends(self.generation, local_rank, -SIGKILL)
