"""A world in which nothing is drawn and nothing takes time but what a test advances: messages arrive at once, in order.

Workers end when told to. A slow or broken world is what `SimCluster` is for.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from random import Random

from msgspec import structs

from holdfast.agent import commands as do
from holdfast.agent import events as ev
from holdfast.coordinator import coordinator_events as cevents
from holdfast.extensions.hangs.messages import Look, Looked
from holdfast.protocol.messages import Ask, Assign
from holdfast.protocol.outcome import Failure
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec, Tick
from holdfast.protocol.rank_progress import Frame, RankProgress, RankSample, Stage
from tests.support.simulator.clock import Agenda, ManualClock
from tests.support.simulator.network import FakeNetwork
from tests.support.simulator.nodes import SimAgent, World
from tests.support.simulator.stalls import WAITING

LOOK_AGAIN_S = 1.0
"""From an answer to the agent that no worker is at a safe point until the next one."""
Trace = Callable[[str, object], None]
"""Called with (host or "coordinator", command, message or phase) for all that is said and done."""


class ScriptedAgent(SimAgent):
    """An agent whose workers do what the test says."""

    def __init__(self, world: World, node: NodeSpec, *, holds_prepare: bool, stubborn: bool) -> None:
        super().__init__(world, node)
        self.holds_prepare = holds_prepare
        """Phase one takes until the test calls `prepared`."""
        self.stubborn = stubborn
        """Its workers ignore signals other than SIGKILL."""
        self.reached = 0
        """The newest safe point its workers have reached; 0: they ask for none."""
        self.safe_point = 0
        """Where they were told to stop; 0: nowhere."""
        self._held = 0
        """The generation whose workers are held."""
        self.places: dict[int, str] = {}
        """The function in which a worker is, by local rank; else where all wait for their peers."""
        self.replacements: set[int] = set()
        """Workers that were started for lost ones, and take no part yet."""
        self.reach: tuple[str, ...] = ()
        """What is wrong with the way to the store."""

    @property
    def generation(self) -> int:
        assert self.assign is not None
        return self.assign.generation

    def prepare(self, assign: Assign) -> None:
        if not self.holds_prepare:
            self._soon(lambda: self.prepared(assign))

    def do_with_workers(self, command: do.Command) -> None:
        match command:
            case do.StartWorkers(assign):
                self.assign, self.workers, self.safe_point = assign, self.taking_part(assign), 0
            case do.RegroupWorkers(assign):
                self._regroup(assign)
            case do.StartReplacements(_, local_ranks):
                self.replacements.update(local_ranks)
            case do.HoldWorkers(generation):
                pause_s, self._held = LOOK_AGAIN_S if self._held == generation else 0.0, generation
                self.world.agenda.after(pause_s, lambda: self.handle(ev.WorkersHeld(generation, self.reached)))
            case do.ReleaseWorkers(_, safe_point):
                self.safe_point, self._held = safe_point, 0
            case do.SignalWorkers(signum):
                if not self.stubborn:
                    self._soon(lambda: self.all_workers_end(-signum))
            case do.KillTree(generation):
                self._soon(lambda: self._kill_tree(generation))

    def look(self, look: Look) -> None:
        looked = Looked(look.generation, look.number, self._samples(), self.reach if look.store else ())
        self._soon(lambda: self.handle(looked))

    def _soon(self, action: Callable[[], None]) -> None:
        self.world.agenda.after(0.0, action)

    def worker_ends(self, local_rank: int, exit_code: int, error_type: str = "", *, drained: bool = False) -> None:
        assert local_rank in self.workers, f"{self.host} has no worker {local_rank}"
        self.workers.discard(local_rank)
        if not exit_code:
            self.handle(ev.WorkerEnded(self.generation, local_rank, None, drained))
            return
        bare = self.failure(local_rank, exit_code)
        read = ev.FailureRead(self.generation, local_rank, structs.replace(bare, error_type=error_type))
        self._soon(lambda: self.handle(read))
        self.handle(ev.WorkerEnded(self.generation, local_rank, bare, evidence_follows=True))

    def all_workers_end(self, exit_code: int, *, drained: bool = False) -> None:
        for local_rank in sorted(self.workers):
            self.worker_ends(local_rank, exit_code, drained=drained)

    def _regroup(self, assign: Assign) -> None:
        self.assign, self.reached = assign, 0
        self.workers |= self.replacements & self.taking_part(assign)
        self.replacements -= self.workers
        if not self.holds_prepare and self.workers >= self.taking_part(assign):
            self._soon(lambda: self.prepared(assign))

    def _kill_tree(self, generation: int) -> None:
        self.replacements.clear()
        if self.workers:  # what they left is read first
            self.all_workers_end(-signal.SIGKILL)
            self._soon(lambda: self.handle(ev.TreeGone(generation)))
        else:
            self.handle(ev.TreeGone(generation))

    def _samples(self) -> tuple[RankSample, ...]:
        frames = {rank: Frame("train.py", 7, self.places.get(rank, WAITING)) for rank in sorted(self.workers)}
        return tuple(RankSample(rank, 1000 + rank, "S", 0.0, (frame,)) for rank, frame in frames.items())

    def progress(self, stage: Stage, steps: int = 0) -> None:
        """All workers are so far."""
        ranks = tuple(RankProgress(rank, stage, steps) for rank in range(self.nproc))
        self.handle(ev.WorkersProgress(self.generation, ranks))

    def can_go_on(self) -> None:
        """All workers that take part are able to go on in another generation."""
        self.handle(ev.WorkersCanGoOn(self.generation, tuple(sorted(self.workers))))

    def ready(self) -> None:
        """The replacements wait for their place."""
        assert self.replacements, f"{self.host} starts no replacement"
        self.handle(ev.ReplacementsReady(self.generation, tuple(sorted(self.replacements))))

    def replacement_ends(self, local_rank: int, exit_code: int) -> None:
        self.replacements.remove(local_rank)
        failure = Failure(rank=0, local_rank=local_rank, host=self.host, pid=2000 + local_rank, exit_code=exit_code)
        self.handle(ev.WorkerEnded(self.generation, local_rank, failure))

    def refuses(self, text: str) -> None:
        """A worker cannot go on in another generation."""
        self.handle(ev.RegroupRefused(self.generation, text))

    def prepare_fails(self, reason: str) -> None:
        self.handle(ev.PrepareFailed(self.generation, "HF108", 2, reason))

    def drained(self) -> None:
        """All workers leave at the safe point they were told."""
        assert self.safe_point, f"the workers of {self.host} were not told to stop anywhere"
        self.all_workers_end(0, drained=True)


class ScriptedWorld(World):
    """Call `settle` after each thing that a test does: what follows from it at once is done then."""

    def __init__(self, job: JobSpec, limits: Limits, trace: Trace) -> None:
        network = FakeNetwork(Agenda(ManualClock()), Random(0), delay_s_min=0.0, delay_s_max=0.0)
        super().__init__(job, limits, network)
        self.agents: dict[str, ScriptedAgent] = {}
        self._trace = trace
        self._booted: list[str] = []

    def trace(self, who: str, what: object) -> None:
        self._trace(who, what)

    def boot(
        self,
        host: str,
        *,
        nproc: int = 1,
        node_rank: int | None = None,
        role: str = "default",
        holds_prepare: bool = False,
        stubborn: bool = False,
    ) -> None:
        """Start an agent on a host that has none."""
        assert host not in self.agents, f"{host} has an agent"
        if host not in self.hosts:
            self.hosts.append(host)
        self._booted.append(host)
        member = f"{host}#{self._booted.count(host)}"
        node = NodeSpec(member=member, host=host, nproc=nproc, role=role, node_rank=node_rank)
        self.agents[host] = ScriptedAgent(self, node, holds_prepare=holds_prepare, stubborn=stubborn)
        self.agents[host].handle(Tick())

    def settle(self) -> None:
        while not self.agenda.settled():
            self.step()

    def advance(self, seconds: float) -> None:
        """Let time pass; every machine gets its Ticks when it asked for them."""
        until = self.clock.now + seconds
        while (due := self.agenda.next_time()) is not None and due <= until:
            self.step()
        self.clock.advance_to(until)

    def quit(self, *, drain: bool) -> None:
        """A command on some node wants the whole job to end."""
        assert self.coordinator is not None
        self.ask("stop" if drain else "kill")

    def ask(self, question: str, about: bytes = b"{}") -> None:
        """A command on some node has a question."""
        assert self.coordinator is not None
        member = next(iter(self.coordinator.machine.members.values()))
        ask = Ask(1, question, f"holdfast {question}", about)
        self.coordinator.handle(cevents.Heard(member.link, ask))
