"""Simulated jobs whose workers survive losses: what must happen does happen, and each rule that is broken is missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest
from msgspec import structs

from holdfast.agent.agent import Agent
from holdfast.coordinator.coordinator_commands import Command, Tell
from holdfast.coordinator.regrouping import Plan, Regrouping
from holdfast.coordinator.world import Draining, Phase, World
from holdfast.protocol.messages import Assign, Regroup
from holdfast.protocol.policy import Limits, NodeSpec
from holdfast.protocol.train_contract import Survive
from tests.simulation.test_checkers import SEEDS, first_broken_promise, with_broken_coordinator
from tests.support.simulator.cluster import SimCluster, SimOptions
from tests.support.simulator.drawn import DrawnAgent
from tests.support.simulator.faults import FaultOptions
from tests.support.simulator.sweep import MULTIPLES, report, run_seeds

SURVIVING = SimOptions(
    min_nodes=1,
    max_nodes=4,
    max_restarts=20,
    work_s=30.0,
    asks=True,
    survives=True,
    faults=FaultOptions(worker_kills=6, agent_kills=1, link_resets=1, partitions=2, regroup_faults=True),
)

LEAVING = replace(
    SURVIVING, faults=FaultOptions(signals=6, near_leaves=True), limits=Limits(join_s=120.0, stop_grace_s=5.0)
)
"""Nodes leave on purpose, and something else happens at the same time."""


def stories(options: SimOptions, seeds: int = SEEDS) -> str:
    told: list[str] = []
    for seed in range(seeds):
        cluster = SimCluster(seed, 4, options, story_lines_max=None)
        cluster.run()
        told += cluster.story
    return "\n".join(told)


def test_everything_happens_that_may_happen() -> None:
    """Nothing of it would break a promise if no worker ever survived a loss."""
    told = stories(SURVIVING)
    for words in (
        *("coordinator: regrouped", "coordinator: replaced", "coordinator: replacement_failed", "ranks go on"),
        *("rank 1 joined", "was lost (killed by SIGKILL)", "losses in a row while regrouping", "its memory grew"),
        *("not every worker was ready within 5 s", "exited", "'safe_point': 3"),
    ):
        assert words in told, words


def test_ranks_are_lost_while_others_are_on_their_way_into_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it would break a promise if all were started again then."""
    without, generations = Regrouping.without, list[int]()

    def noted(self: Regrouping, now: float, world: World, phase: Phase, what: str) -> Plan | str:
        on_the_way = self.rejoining and phase is Phase.RUNNING
        plan = without(self, now, world, phase, what)
        if on_the_way and isinstance(plan, Plan):
            generations.append(world.generation)
        return plan

    monkeypatch.setattr(Regrouping, "without", noted)
    stories(SURVIVING)
    assert len(generations) > SEEDS // 4


def test_the_others_go_on_when_nodes_leave() -> None:
    told = stories(LEAVING, seeds=SEEDS + 10)
    for words in (
        *("n1 leaves; ", " leave; ", " is leaving (SIGTERM); ", " has left; ", "1 rank goes on"),
        "is leaving, it has the coordinator, and no other node can take over",
    ):
        assert words in told, words


def test_every_promise_holds_where_some_ranks_do_not_fit() -> None:
    tally = run_seeds(0, SEEDS, MULTIPLES)
    assert not tally.failures, report(tally)


def test_ranks_that_do_not_fit_are_spares_until_they_fit_again() -> None:
    """Nothing of it would break a promise if all ranks fitted always."""
    limits = Limits(join_s=120.0, stop_grace_s=5.0, hang_report_s=10.0, hang_timeout_s=20.0)
    faults = replace(SURVIVING.faults, hangs=2)
    told = stories(
        replace(SURVIVING, multiple=2, nproc_max=2, steps=True, limits=limits, faults=faults), seeds=SEEDS // 2
    )
    for words in ("are spares of generation", "the model does not fit", "coordinator: replaced", "coordinator: hang {"):
        assert words in told, words


def test_survivors_wait_if_they_are_to() -> None:
    told = stories(replace(SURVIVING, survive=Survive.WAIT))
    assert "wait for the replacement" in told
    assert "the nodes that are left have no place for the lost ranks" in told


def test_without_survive_no_generation_is_formed_of_running_workers() -> None:
    for options in (replace(SURVIVING, survive=Survive.OFF), replace(SURVIVING, survives=False)):
        assert "regroup_begun" not in stories(options)


# --- each rule broken on purpose --------------------------------------------------------------------------------------


def surviving(seed: int, options: SimOptions = SURVIVING) -> SimCluster:
    return SimCluster(seed, 4, options)


def test_survivors_that_do_not_wait_for_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "all_prepared", property(lambda world: world.store_port is not None))
    assert "still runs generation" in first_broken_promise(surviving)


def test_survivors_that_do_not_wait_for_a_node_that_leaves_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_those_that_leave(world: World) -> bool:
        return world.store_port is not None and world.prepared >= world.places.keys() - world.leaving_workers.keys()

    monkeypatch.setattr(World, "all_prepared", property(without_those_that_leave))
    assert "still runs generation" in first_broken_promise(lambda seed: surviving(seed, LEAVING))


def test_a_safe_point_that_a_worker_has_passed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_early(self: Regrouping, world: World, drain: Draining) -> Plan | None:
        return self._with_ready(world, drain.newest) if drain.regroups and world.all_can_go_on else None

    monkeypatch.setattr(Regrouping, "at_safe_point", too_early)
    assert "which it may have passed" in first_broken_promise(surviving)


def test_a_regroup_without_a_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrawnAgent, "_comes", lambda *_, **__: None)  # the workers stay where they are
    assert not first_broken_promise(surviving)
    monkeypatch.setattr(Regrouping, "due_s", lambda _self, _world: inf)
    monkeypatch.setattr(Regrouping, "due_at_s", lambda *_: inf)
    assert "still running" in first_broken_promise(surviving)


def test_survivors_beside_a_node_that_still_works_are_found() -> None:
    limits = Limits(join_s=120.0, stop_grace_s=5.0, lease_s=3.0, fence_s=20.0)
    story = first_broken_promise(lambda seed: surviving(seed, replace(SURVIVING, limits=limits)))
    assert "still runs generation" in story


class FearlessAgent(Agent):
    """Goes on without a word from the coordinator."""

    def _fence_at_s(self) -> float:
        return inf


class FearlessCluster(SimCluster):
    def agent_machine(self, node: NodeSpec) -> Agent:
        return FearlessAgent(node, self.limits, self.clock.now)


def test_an_agent_without_a_fence_is_found() -> None:
    assert "still runs generation" in first_broken_promise(lambda seed: FearlessCluster(seed, 4, SURVIVING))


def ranks_from_zero(assign: Assign) -> Assign:
    return structs.replace(assign, rank_base=0)


def free_of_charge(assign: Assign) -> Assign:
    return structs.replace(assign, restart_count=0)


def every_local_rank(assign: Assign) -> Assign:
    return structs.replace(assign, local_ranks=None)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (ranks_from_zero, "a rank exists twice"),
        (free_of_charge, "restarts are used after"),
        (every_local_rank, "a rank lies outside the world"),
    ],
)
def test_a_broken_place_is_found(change: Callable[[Assign], Assign], found: str) -> None:
    def broken(command: Command) -> Command:
        if isinstance(command, Tell) and isinstance(command.message, Regroup):
            message = command.message
            return Tell(command.link, structs.replace(message, assign=change(message.assign)))
        return command

    cluster = with_broken_coordinator(broken)
    assert found in first_broken_promise(lambda seed: cluster(seed, 4, SURVIVING))
