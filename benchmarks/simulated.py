"""A whole job's control plane without network and processes: `python -m benchmarks.simulated 10000` prints its costs as JSON.

The product's own machines, one coordinator and N agents, in virtual time; every message goes through the product's codec.
First the job is played: the agents join within a second, one more comes, one is lost, one has a worker that fails.
What the coordinator was given is kept, and then given to a fresh one alone, under the clock: its machine is pure, so it
decides the same again, and nothing else is in the figures.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from holdfast.coordinator import coordinator_commands as cdo
from holdfast.protocol.policy import Note, Tick
from holdfast.agent import commands as do
from holdfast.agent import events as ev
from holdfast.agent.agent import Agent
from holdfast.agent.local_generation import Work
from holdfast.coordinator.coordinator_events import Event, Heard, LinkClosed, LinkOpened
from holdfast.authority.sole import Sole
from holdfast.coordinator.coordinator import Coordinator
from holdfast.extension_list import EXTENSIONS
from holdfast.coordinator.world import Phase
from holdfast.protocol.outcome import Evidence, Failure, Verdict
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec
from holdfast.protocol.messages import Assign, FromAgent, FromCoordinator
from tests.support.simulator.clock import Agenda, ManualClock
from holdfast.protocol.codec import decode_from_agent, decode_from_coordinator, encode

DELAY_S_MAX = 0.005
"""The slowest message."""
NODE_S_MAX = 0.02
"""The slowest preparation and the slowest end of a worker."""
BOOT_S = 1.0
"""Within which the agents come."""
VIRTUAL_S_MAX = 120.0
HEARTBEATS = ("Ping", "Pong")
CHAPTERS = ("formation", "join", "loss", "regroup")


@dataclass(frozen=True)
class Given:
    """One thing the coordinator was given: a message as bytes, or another event."""

    chapter: str
    now: float
    link: int
    data: bytes
    event: Event | None = None


@dataclass
class Chapter:
    """What one change of the job cost, on the wire."""

    up: Counter[str] = field(default_factory=Counter)
    """Messages from agents, by name."""
    down: Counter[str] = field(default_factory=Counter)
    up_bytes: int = 0
    down_bytes: int = 0
    nodes: int = 0
    """Size of the world it ended with."""
    seconds: float = 0.0
    """Virtual."""


def judge(evidence: Evidence) -> Verdict:
    return Verdict(code="HF200", cause="pretended", culprit=evidence.failures[0] if evidence.failures else None)


def coordinator(count: int) -> Coordinator:
    job = JobSpec(run_id="simulated", min_nodes=count // 2, max_nodes=count + 1, backend="c10d", max_restarts=1)
    return Coordinator(job, Limits(), judge, 0.0, Sole(Limits(), 0.0), extensions=EXTENSIONS)


class Node:
    """An agent's machine, and a worker that does nothing."""

    def __init__(self, play: Play, number: int) -> None:
        self.play = play
        self.link = number
        self.host = f"node{number}"
        spec = NodeSpec(member=f"{self.host}#{number:08x}", host=self.host, nproc=1, hosts_coordinator=number == 1)
        self.machine = Agent(spec, Limits(), play.clock.now)
        self.alive = True
        self._generation = 0
        self._assign: Assign | None = None
        self._armed_s: float | None = None

    def give(self, event: ev.Event) -> None:
        if not self.alive:
            return
        for command in self.machine.handle(self.play.clock.now, event):
            self._do(command)
        deadline = self.machine.next_deadline()
        if deadline is not None and (self._armed_s is None or deadline < self._armed_s):
            self._armed_s = deadline
            self.play.agenda.at(deadline, lambda: self._tick(deadline))

    def fail(self) -> None:
        """Its worker ends with 1."""
        assert self._assign is not None
        failure = Failure(rank=self._assign.rank_base, local_rank=0, host=self.host, pid=1, exit_code=1)
        self.give(ev.WorkerEnded(self._generation, 0, failure))

    def _tick(self, deadline: float) -> None:
        if self._armed_s == deadline:
            self._armed_s = None
            self.give(Tick())

    def _do(self, command: do.Command) -> None:
        play, generation = self.play, self._generation
        match command:
            case do.Dial():
                play.opened(self)
            case do.Send(message):
                play.up(self.link, message)
            case do.Prepare(assign):
                self._assign = assign
                port = 29400 if assign.hosts_store else None
                play.soon(lambda: self.give(ev.NodePrepared(assign.generation, port)))
            case do.StartWorkers(assign):
                self._generation = assign.generation
            case do.SignalWorkers(signum):
                assert self._assign is not None
                failure = Failure(
                    rank=self._assign.rank_base, local_rank=0, host=self.host, pid=1, exit_code=-signum, after_stop=True
                )
                play.soon(lambda: self.give(ev.WorkerEnded(generation, 0, failure)))
            case do.KillTree(stopped):
                play.soon(lambda: self.give(ev.TreeGone(stopped)))
            case do.Say() | Note():
                pass
            case do.HoldWorkers(held):
                # It asks for no safe point, as most scripts.
                play.soon(lambda: self.give(ev.WorkersHeld(held, 0)))
            case do.ReleaseWorkers():
                pass
            case _:
                raise AssertionError(f"an agent is not to do this here: {command}")


class Play:
    """The job in virtual time. Afterwards: `given`, `chapters`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.clock = ManualClock()
        self.agenda = Agenda(self.clock)
        self.given: list[Given] = []
        self.chapters: dict[str, Chapter] = {}
        self._random = Random(count)
        self._machine = coordinator(count)
        self._nodes: dict[int, Node] = {}
        self._armed_s: float | None = None
        self._chapter = ""

    def run(self) -> None:
        self._begin("formation")
        for number in range(1, self.count + 1):
            self.agenda.at(self._random.uniform(0.0, BOOT_S), lambda number=number: self._boot(number))  # type: ignore[misc]
        self._until_running(self.count)
        self._begin("join")
        self._boot(self.count + 1)
        self._until_running(self.count + 1)
        self._begin("loss")
        lost = self._nodes.pop(self.count // 2)
        lost.alive = False
        self._take(lost.link, b"", LinkClosed(lost.link, "the connection was closed"))
        self._until_running(self.count)
        self._begin("regroup")
        self._nodes[self.count // 3].fail()
        self._until_running(self.count)

    # ---------------------------------------------------------------- the network

    def soon(self, action: object) -> None:
        self.agenda.after(self._random.uniform(0.0, NODE_S_MAX), action)  # type: ignore[arg-type]

    def opened(self, node: Node) -> None:
        address = f"10.{node.link >> 16}.{node.link >> 8 & 255}.{node.link & 255}"

        def open_link() -> None:
            self._take(node.link, b"", LinkOpened(node.link, address, "10.0.0.1", local=node.link == 1))
            node.give(ev.Dialed())

        self.agenda.after(DELAY_S_MAX, open_link)

    def up(self, link: int, message: FromAgent) -> None:
        data = encode(message)
        chapter = self.chapters[self._chapter]
        chapter.up[type(message).__name__] += 1
        chapter.up_bytes += len(data)
        # Always the same delay: one connection keeps its order.
        self.agenda.after(DELAY_S_MAX, lambda: self._take(link, data))

    def _down(self, link: int, message: FromCoordinator) -> None:
        data = encode(message)
        chapter = self.chapters[self._chapter]
        chapter.down[type(message).__name__] += 1
        chapter.down_bytes += len(data)
        if link in self._nodes:
            node = self._nodes[link]
            self.agenda.after(DELAY_S_MAX, lambda: node.give(ev.Received(decode_from_coordinator(data))))

    def _take(self, link: int, data: bytes, event: Event | None = None) -> None:
        """The coordinator is given something."""
        self.given.append(Given(self._chapter, self.clock.now, link, data, event))
        for command in self._machine.handle(self.clock.now, event or Heard(link, decode_from_agent(data))):
            match command:
                case cdo.Tell(to, message):
                    self._down(to, message)
                case cdo.DropLink() | cdo.Conclude():
                    raise AssertionError(f"the coordinator is not to do this here: {command}")
        deadline = self._machine.next_deadline()
        if deadline is not None and (self._armed_s is None or deadline < self._armed_s):
            self._armed_s = deadline
            self.agenda.at(deadline, lambda: self._tick(deadline))

    def _tick(self, deadline: float) -> None:
        if self._armed_s == deadline:
            self._armed_s = None
            self._take(0, b"", Tick())

    # ---------------------------------------------------------------- the story

    def _boot(self, number: int) -> None:
        self._nodes[number] = Node(self, number)
        self._nodes[number].give(Tick())

    def _begin(self, chapter: str) -> None:
        self._chapter = chapter
        self.chapters[chapter] = Chapter(seconds=self.clock.now)

    def _until_running(self, nodes: int) -> None:
        """Until a newer world of so many nodes runs, on the nodes as well."""
        before = self._machine.generation
        end_s = self.clock.now + VIRTUAL_S_MAX
        while not (self._machine.generation > before and self._machine.phase is Phase.RUNNING):
            assert self.agenda.step(), "nothing is left to happen"
            assert self.clock.now < end_s, f"{nodes} nodes do not run within {VIRTUAL_S_MAX:g} virtual seconds"
        settled_s = self.clock.now + DELAY_S_MAX
        while (then := self.agenda.next_time()) is not None and then <= settled_s:
            self.agenda.step()
        assert self._machine.phase is Phase.RUNNING
        world = self._machine.world
        assert world is not None
        assert len(world.order) == nodes == len(self._nodes), f"{len(world.order)} of {nodes} nodes are in the world"
        assert all(node.machine.work is Work.RUNNING for node in self._nodes.values()), "a node does not run"
        self._machine.check_invariants()
        chapter = self.chapters[self._chapter]
        chapter.nodes = nodes
        chapter.seconds = self.clock.now - chapter.seconds


def replay(play: Play, *, codec: bool) -> dict[str, float]:
    """CPU seconds of a fresh coordinator for each chapter. Without `codec` messages are decoded before the clock runs."""
    decoded = (
        {}
        if codec
        else {i: each.event or Heard(each.link, decode_from_agent(each.data)) for i, each in enumerate(play.given)}
    )
    machine = coordinator(play.count)
    spent: dict[str, float] = {}
    gc.collect()
    gc.freeze()
    for name, numbered in _chapters(play.given):
        began_s = time.process_time()
        for index, each in numbered:
            event = (each.event or Heard(each.link, decode_from_agent(each.data))) if codec else decoded[index]
            for command in machine.handle(each.now, event):
                if codec and isinstance(command, cdo.Tell):
                    encode(command.message)
            machine.next_deadline()
        spent[name] = time.process_time() - began_s
    gc.unfreeze()
    return spent


def _chapters(given: list[Given]) -> Iterator[tuple[str, list[tuple[int, Given]]]]:
    numbered = list(enumerate(given))
    for name in CHAPTERS:
        yield name, [each for each in numbered if each[1].chapter == name]


def costs(count: int) -> dict[str, object]:
    play = Play(count)
    play.run()
    bare, whole = replay(play, codec=False), replay(play, codec=True)
    return {
        name: {
            "up per agent": sum(n for kind, n in chapter.up.items() if kind not in HEARTBEATS) / chapter.nodes,
            "down per agent": sum(n for kind, n in chapter.down.items() if kind not in HEARTBEATS) / chapter.nodes,
            "bytes per agent": (chapter.up_bytes + chapter.down_bytes) / chapter.nodes,
            "machine": bare[name],
            "machine and codec": whole[name],
            "virtual": chapter.seconds,
            "messages": dict(chapter.up + chapter.down),
        }
        for name, chapter in play.chapters.items()
    }


if __name__ == "__main__":
    print(json.dumps(costs(int(sys.argv[1])), indent=1))
