"""The checkers can fail: each promise is broken on purpose and must be missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from msgspec import structs

from holdfast.agent.agent import Agent
from holdfast.agent.commands import Command as AgentCommand
from holdfast.agent.events import Event, Received
from holdfast.authority.sole import Sole
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.coordinator_commands import Command, Tell
from holdfast.coordinator.coordinator_events import Event as CoordinatorEvent
from holdfast.protocol.messages import Assign, Finish
from holdfast.protocol.policy import Limits, NodeSpec
from tests.support.simulator.checkers import BrokenPromiseError, WorldChecker
from tests.support.simulator.clock import Agenda, ManualClock
from tests.support.simulator.cluster import SimCluster, SimOptions
from tests.support.simulator.faults import FaultOptions
from tests.support.simulator.network import FakeEnd, FakeNetwork
from tests.support.simulator.nodes import simple_judge

QUIET = SimOptions(min_nodes=3, max_nodes=3, work_s=5.0)
FAULTY = SimOptions(
    min_nodes=1,
    max_nodes=4,
    max_restarts=10,
    work_s=30.0,
    faults=FaultOptions(worker_failures=3, agent_kills=1, link_resets=2, partitions=3),
)
SEEDS = 40


def assign(rank_base: int, *, world_size: int = 4, generation: int = 1) -> Assign:
    return Assign(
        generation=generation,
        restart_count=0,
        group_rank=0,
        group_world_size=2,
        rank_base=rank_base,
        world_size=world_size,
        role_rank_base=0,
        role_world_size=world_size,
        hosts_store=False,
    )


# --- the checker alone ------------------------------------------------------------------------------------------------


def two_nodes() -> WorldChecker:
    checker = WorldChecker()
    checker.assigned(1, "a", 2, assign(0))
    checker.assigned(1, "b", 2, assign(2))
    return checker


def test_a_hang_that_is_none_is_found() -> None:
    checker = WorldChecker()
    checker.found_hung(1, hangs=True)
    checker.ended_as_hung(1, 20.0, 20.0)
    with pytest.raises(BrokenPromiseError, match="all is well"):
        checker.found_hung(1, hangs=False)
    with pytest.raises(BrokenPromiseError, match="ended as hung after 19"):
        checker.ended_as_hung(1, 19.0, 20.0)


def test_a_sound_history_passes() -> None:
    checker = two_nodes()
    for host in "ab":
        checker.started(1, host, assign(0), cut_off=set())
    for host in "ab":
        checker.ended(host)
    assert checker.alive == {}


def rank_twice(checker: WorldChecker) -> None:
    checker.assigned(2, "a", 2, assign(0))
    checker.assigned(2, "b", 2, assign(1))


def rank_outside(checker: WorldChecker) -> None:
    checker.assigned(2, "a", 2, assign(3))


def two_sizes(checker: WorldChecker) -> None:
    checker.assigned(2, "a", 2, assign(0))
    checker.assigned(2, "b", 2, assign(2, world_size=5))


def host_twice(checker: WorldChecker) -> None:
    checker.assigned(1, "a", 2, assign(0))


def start_before_all_ranks_are_given(checker: WorldChecker) -> None:
    checker.assigned(2, "a", 2, assign(0))
    checker.started(2, "a", assign(0), cut_off=set())


def start_beside_an_older_generation(checker: WorldChecker) -> None:
    checker.started(1, "a", assign(0), cut_off=set())
    checker.assigned(1, "b", 4, assign(0, generation=2))
    checker.started(1, "b", assign(0, generation=2), cut_off=set())


def start_twice(checker: WorldChecker) -> None:
    checker.started(1, "a", assign(0), cut_off=set())
    checker.started(1, "a", assign(0), cut_off=set())


@pytest.mark.parametrize(
    "broken",
    [
        rank_twice,
        rank_outside,
        two_sizes,
        host_twice,
        start_before_all_ranks_are_given,
        start_beside_an_older_generation,
        start_twice,
    ],
)
def test_a_broken_history_does_not(broken: Callable[[WorldChecker], None]) -> None:
    with pytest.raises(BrokenPromiseError):
        broken(two_nodes())


def test_a_host_that_was_just_cut_off_may_still_be_dying() -> None:
    checker = two_nodes()
    checker.started(1, "a", assign(0), cut_off=set())
    checker.assigned(1, "b", 4, assign(0, generation=2))
    checker.started(1, "b", assign(0, generation=2), cut_off={"a"})
    assert checker.alive == {"a": 1, "b": 2}


# --- a whole cluster with something broken in it ----------------------------------------------------------------------


def first_broken_promise(make: Callable[[int], SimCluster]) -> str:
    for seed in range(SEEDS):
        try:
            make(seed).run()
        except BrokenPromiseError as error:
            return str(error)
    return ""


def test_unbroken_nothing_is_found() -> None:
    assert not first_broken_promise(lambda seed: SimCluster(seed, 4, FAULTY))
    assert not first_broken_promise(lambda seed: SimCluster(seed, 3, QUIET))


def test_a_fence_longer_than_the_lease_is_found() -> None:
    """The others go on without a node that is cut off while its workers still live."""
    limits = Limits(join_s=120.0, stop_grace_s=5.0, lease_s=3.0, fence_s=20.0)
    broken = replace(FAULTY, limits=limits)
    assert "still runs generation" in first_broken_promise(lambda seed: SimCluster(seed, 4, broken))


def with_broken_coordinator(broken: Callable[[Command], Command]) -> type[SimCluster]:
    """Clusters whose coordinator's commands are changed by `broken`."""

    class BrokenCoordinator(Coordinator):
        def handle(self, now: float, event: CoordinatorEvent) -> list[Command]:
            return [broken(command) for command in super().handle(now, event)]

    class Cluster(SimCluster):
        def coordinator_machine(self) -> Coordinator:
            limits, now = self.options.limits, self.clock.now
            return BrokenCoordinator(self.job, limits, simple_judge, now, Sole(limits, now))

    return Cluster


def ranks_from_zero(command: Command) -> Command:
    if isinstance(command, Tell) and isinstance(command.message, Assign):
        return Tell(command.link, structs.replace(command.message, rank_base=0))
    return command


def test_a_rank_given_twice_is_found() -> None:
    cluster = with_broken_coordinator(ranks_from_zero)
    story = first_broken_promise(lambda seed: cluster(seed, 3, QUIET))
    assert "a rank exists twice in generation 1" in story
    assert "seed 0 at" in story, "it says how to see it again"
    assert "assigned" in story, "and how it came to this"


class DeafAgent(Agent):
    """Does not hear that the job is over, and never gives up."""

    def handle(self, now: float, event: Event) -> list[AgentCommand]:
        self._seeking_since_s = now
        if isinstance(event, Received) and isinstance(event.message, Finish):
            return []
        return super().handle(now, event)


class HastyAgent(Agent):
    """Asks for a Tick that it has just been given."""

    def next_deadline(self) -> float | None:
        due = super().next_deadline()
        return None if due is None else 1.5


class FearlessAgent(Agent):
    """Goes on without a word from the coordinator."""

    def _fence_at_s(self) -> float:
        return float("inf")


def cluster_of(kind: type[Agent], seed: int, nodes: int, options: SimOptions) -> SimCluster:
    class Cluster(SimCluster):
        def agent_machine(self, node: NodeSpec) -> Agent:
            return kind(node, self.limits, self.clock.now)

    return Cluster(seed, nodes, options)


@pytest.mark.parametrize(
    ("kind", "options", "found"),
    [
        pytest.param(DeafAgent, QUIET, "still running", id="an agent that never ends"),
        pytest.param(HastyAgent, QUIET, "time stands still", id="a deadline that is always over"),
        pytest.param(FearlessAgent, FAULTY, "still runs generation", id="an agent without a fence"),
    ],
)
def test_a_broken_agent_is_found(kind: type[Agent], options: SimOptions, found: str) -> None:
    assert found in first_broken_promise(lambda seed: cluster_of(kind, seed, 3, options))


def test_the_story_is_as_long_as_asked_for() -> None:
    def lines(most: int | None) -> int:
        cluster = SimCluster(0, 3, QUIET, story_lines_max=most)
        cluster.run()
        return len(cluster.story)

    assert lines(0) == 0
    assert lines(5) == 5
    assert lines(None) > 5


# --- the pretend clock and network behave as the real ones would ------------------------------------------------------


def test_time_never_goes_back() -> None:
    clock = ManualClock(5.0)
    clock.advance_to(7.0)
    with pytest.raises(AssertionError):
        clock.advance_to(6.0)


def test_equal_times_keep_the_order_of_planning() -> None:
    agenda, done = Agenda(ManualClock()), list[str]()
    agenda.at(2.0, lambda: done.append("later"))
    agenda.at(1.0, lambda: done.append("first"))
    agenda.at(1.0, lambda: done.append("second"))
    assert agenda.next_time() == 1.0
    while agenda.step():
        pass
    assert done == ["first", "second", "later"]
    assert agenda.clock.now == 2.0


class World:
    """Two hosts with a link, and what each end has seen."""

    def __init__(self) -> None:
        self.agenda = Agenda(ManualClock())
        self.network = FakeNetwork(self.agenda, Random(1))
        self.link = self.network.connect("a", "b")
        self.seen: dict[str, list[object]] = {"a": [], "b": []}
        for end in (self.link.a, self.link.b):
            self._watch(end)

    def _watch(self, end: FakeEnd) -> None:
        end.on_message = self.seen[end.host].append
        end.on_closed = lambda reason: self.seen[end.host].append(f"closed: {reason}")

    def settle(self) -> None:
        while self.agenda.step():
            pass


def test_messages_arrive_in_order_and_the_close_comes_last() -> None:
    world = World()
    for number in range(50):
        world.link.a.send(number)
    world.link.a.close()
    world.link.a.send("too late")
    world.settle()
    assert world.seen == {"a": [], "b": [*range(50), "closed: closed by the other side"]}


def test_a_partition_holds_back_and_a_healed_one_delivers_in_order() -> None:
    world = World()
    world.network.partition({"a"}, {"b"})
    world.link.a.send(1)
    world.settle()
    assert world.seen["b"] == []
    world.network.heal()
    world.link.a.send(2)
    world.settle()
    assert world.seen["b"] == [1, 2]


def test_a_host_without_power_is_noticed_only_when_somebody_speaks() -> None:
    world = World()
    world.link.b.vanish()
    world.settle()
    assert world.seen["a"] == []
    world.link.a.send("anybody there?")
    world.settle()
    assert world.seen["a"] == ["closed: connection reset"]


def test_a_reset_is_seen_by_both() -> None:
    world = World()
    world.network.reset("b", "a")
    world.settle()
    assert world.seen == {"a": ["closed: connection reset"], "b": ["closed: connection reset"]}
