"""Nodes that fail their check: parked, replaced by a spare, and let in again."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.diagnosis.causes import judge
from holdfast.doctor.device_events import DeviceEvent
from holdfast.extensions.health.device_watch import DeviceWatch
from holdfast.extensions.health.event_limit import EVENTS_MAX
from holdfast.extensions.health.found import FailedCheck, Preflight
from holdfast.extensions.health.freed_memory import leftover, wait_until_free
from holdfast.extensions.health.messages import Checked, DeviceNoted, DeviceSeen, Differs, Recovered, Unfit
from holdfast.extensions.health.node import OnNode
from holdfast.protocol import messages as msg
from holdfast.protocol.outcome import OutcomeKind
from tests.coordinator.coordinator_harness import LIMITS, CoordinatorHarness, preparing, running, stopping
from tests.support.limits import limit_s

REASON = "--health-command ended with 3: GPU 2 is lost"


def order(harness: CoordinatorHarness) -> set[int]:
    """The links of the nodes of the newest generation."""
    world = harness.machine.world
    assert world is not None
    return {harness.machine.members[name].link for name in world.order}


def fails(harness: CoordinatorHarness, link: int) -> None:
    harness.extend(link, "health", Unfit(harness.machine.generation, REASON))


def states(harness: CoordinatorHarness) -> list[str]:
    return sorted(node.state for node in harness.machine.view(harness.now).nodes)


def test_a_spare_takes_the_place_of_a_node_that_fails() -> None:
    harness = preparing()
    harness.join(3)
    assert order(harness) == {1, 2}
    before = harness.machine.generation
    fails(harness, 2)
    assert order(harness) == {1, 3}
    assert harness.machine.generation == before + 1
    harness.prepare(1, 3)
    assert harness.machine.phase.value == "running"
    assert harness.machine.budget.used == 0


def test_the_reason_is_shown_and_in_the_journal() -> None:
    harness = preparing()
    harness.join(3)
    fails(harness, 2)
    view = harness.machine.view(harness.now)
    host = harness.machine.members["n2#1"].node.host if "n2#1" in harness.machine.members else ""
    assert [notice for notice in view.notices if f"is parked: {REASON}" in notice and host in notice]
    assert "parked" in states(harness)
    (noted,) = harness.noted("parked")
    assert noted["reason"] == REASON


def test_without_a_spare_the_job_waits_and_goes_on_when_the_node_is_fit() -> None:
    harness = preparing()
    fails(harness, 2)
    assert harness.machine.phase.value == "gathering"
    harness.wait(LIMITS.join_s / 2)
    harness.extend(2, "health", Recovered())
    assert order(harness) == {1, 2}
    assert harness.machine.phase.value == "preparing"
    assert not any("is parked" in notice for notice in harness.machine.view(harness.now).notices)


def test_without_a_spare_and_a_recovery_the_job_ends_with_the_reason() -> None:
    harness = preparing()
    fails(harness, 2)
    harness.wait(LIMITS.join_s + 1)
    outcome = harness.machine.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.code, outcome.exit_code) == (OutcomeKind.NO_QUORUM, "HF310", 1)
    assert REASON in outcome.message


def test_fewer_nodes_go_on_without_it_if_that_is_enough() -> None:
    harness = preparing(least=1)
    fails(harness, 2)
    assert order(harness) == {1}


def test_a_node_that_fails_during_a_stop_is_not_in_the_next_generation() -> None:
    harness = stopping(least=1, max_restarts=3)
    fails(harness, 2)
    harness.both_say(msg.Stopped(harness.machine.generation))
    harness.wait(1.0)
    assert order(harness) == {1}


def test_a_parked_node_that_is_lost_is_not_shown_any_more() -> None:
    harness = preparing()
    harness.join(3)
    fails(harness, 2)
    harness.say(2, msg.Leave("asked", drain=False))
    harness.machine.check_invariants()
    assert order(harness) == {1, 3}


# --- nodes that differ from most others --------------------------------------------------------------------------------

WHOLE = {"gpus": "8", "gpu": "NVIDIA H100 80GB HBM3", "driver": "570.86.15", "power_w": "700"}


def four(*, spares: int) -> CoordinatorHarness:
    """Four nodes that are being prepared, and more nodes that wait."""
    harness = CoordinatorHarness(4, 4)
    for link in range(1, 5 + spares):
        harness.join(link)
    assert order(harness) == {1, 2, 3, 4}
    return harness


def checked(harness: CoordinatorHarness, link: int, **changed: str) -> None:
    harness.extend(link, "health", Checked(harness.machine.generation, 4, WHOLE | changed))


def test_a_spare_takes_the_place_of_a_node_that_has_less_than_the_others() -> None:
    harness = four(spares=1)
    checked(harness, 2, gpus="7")
    for link in (1, 3):
        checked(harness, link)
    assert order(harness) == {1, 2, 3, 4}, "a majority of the first is not one of all"
    checked(harness, 4)
    assert order(harness) == {1, 3, 4, 5}
    harness.ordered(2, Differs)
    (parked,) = harness.noted("parked")
    assert parked["reason"] == "it has 7 GPUs, 3 of 4 nodes have 8 GPUs"


def test_without_a_spare_the_difference_is_reported_and_the_job_starts() -> None:
    harness = four(spares=0)
    for link in (1, 2, 3):
        checked(harness, link)
    checked(harness, 4, power_w="500")
    assert order(harness) == {1, 2, 3, 4}
    assert harness.noted("parked") == []
    (differs,) = harness.noted("node_differs")
    assert differs["slows"] is True
    assert any("has a power limit of 500 W" in notice for notice in harness.machine.view(harness.now).notices)
    harness.prepare(1, 2, 3, 4)
    assert harness.machine.phase.value == "running"


def test_another_driver_parks_no_node() -> None:
    harness = four(spares=1)
    for link in (1, 2, 3):
        checked(harness, link)
    checked(harness, 4, driver="550.54.15")
    assert order(harness) == {1, 2, 3, 4}
    (differs,) = harness.noted("node_differs")
    assert (differs["slows"], differs["trait"]) == (False, "driver")


def test_a_node_that_differs_is_not_compared_with_the_few_that_have_reported() -> None:
    harness = four(spares=3)
    for link in (1, 2, 3):
        checked(harness, link)
    checked(harness, 4, gpus="7")
    for link in (2, 3):
        harness.say(link, msg.Leave("asked", drain=False))
    assert order(harness) == {1, 5, 6, 7}
    harness.extend(4, "health", Checked(0, 0, WHOLE | {"gpus": "7"}))
    assert "parked" in states(harness), "one other node is no majority"
    for link in (1, 5, 6, 7):
        checked(harness, link)
    harness.extend(4, "health", Checked(0, 0, WHOLE))
    assert "parked" not in states(harness)


def test_a_node_that_an_earlier_coordinator_has_parked_parks_nobody() -> None:
    harness = four(spares=1)
    checked(harness, 1)
    harness.extend(2, "health", Checked(0, 0, WHOLE | {"gpus": "7"}))
    assert harness.noted("parked") == harness.noted("node_differs") == []


def test_a_node_that_was_parked_because_it_differs_comes_back_when_it_does_not() -> None:
    harness = four(spares=1)
    for link in (1, 2, 3):
        checked(harness, link)
    checked(harness, 4, gpus="7")
    assert order(harness) == {1, 2, 3, 5}
    checked(harness, 5)
    harness.extend(4, "health", Checked(0, 0, WHOLE | {"gpus": "7"}))
    assert "parked" in states(harness)
    harness.extend(4, "health", Checked(0, 0, WHOLE))
    assert "parked" not in states(harness)
    assert not any("GPUs" in notice for notice in harness.machine.view(harness.now).notices)


def test_a_difference_is_reported_once_in_all_generations() -> None:
    harness = four(spares=0)
    for _ in range(2):
        for link in (1, 2, 3):
            checked(harness, link)
        checked(harness, 4, gpus="7")
    assert len(harness.noted("node_differs")) == 1


# --- events of devices -------------------------------------------------------------------------------------------------

XID = DeviceSeen(1, "GPU 3", "XID 79 (the GPU has fallen off the bus)", severe=True, age_s=0.5)


def cause(harness: CoordinatorHarness) -> str:
    """The cause in the verdict of the job, which is over."""
    outcome = harness.machine.outcome
    assert outcome is not None
    assert outcome.verdict is not None
    return outcome.verdict.cause


def test_the_verdict_names_the_device_that_failed_before_the_worker() -> None:
    harness = running(judge=judge)
    harness.extend(2, "health", XID)
    harness.wait(1.0)
    harness.fail(1)
    harness.both_say(msg.Stopped(harness.machine.generation))
    assert cause(harness).endswith("; XID 79 (the GPU has fallen off the bus) on GPU 3 of node n2 1.5 s before")


def test_an_event_that_comes_after_the_failure_is_named_as_well() -> None:
    harness = running(judge=judge)
    harness.fail(1)
    harness.wait(1.0)
    harness.extend(2, "health", XID)
    harness.both_say(msg.Stopped(harness.machine.generation))
    assert "on GPU 3 of node n2 0.5 s after" in cause(harness)


def test_an_event_of_long_ago_is_not_in_the_verdict() -> None:
    harness = running(judge=judge)
    harness.extend(2, "health", msgspec.structs.replace(XID, age_s=200.0))
    harness.fail(1)
    harness.both_say(msg.Stopped(harness.machine.generation))
    assert "XID" not in cause(harness)


def test_a_severe_event_is_shown_until_the_next_generation_and_another_one_only_written_down() -> None:
    harness = running(max_restarts=1)
    harness.extend(2, "health", XID)
    harness.extend(2, "health", DeviceSeen(2, "GPU 1", "12 NVLink errors", severe=False, age_s=0.0))
    assert [each["severe"] for each in harness.noted("device")] == [True, False]
    shown = [notice for notice in harness.machine.view(harness.now).notices if "GPU" in notice]
    assert shown == ["XID 79 (the GPU has fallen off the bus) on GPU 3 of node n2"]


def test_an_event_that_is_sent_again_is_confirmed_and_told_once_with_its_earliest_time() -> None:
    """The first message was held by the network, so the event was earlier than it says."""
    harness = running(judge=judge)
    harness.wait(9.0)
    for age_s in (0.0, 4.5, 4.0):
        harness.extend(2, "health", msgspec.structs.replace(XID, age_s=age_s))
        assert harness.ordered(2, DeviceNoted) == DeviceNoted(1)
    assert len(harness.noted("device")) == 1
    harness.fail(1)
    harness.both_say(msg.Stopped(harness.machine.generation))
    assert cause(harness).endswith("; XID 79 (the GPU has fallen off the bus) on GPU 3 of node n2 4.5 s before")


async def test_a_device_that_fails_during_a_check_is_checked_again() -> None:
    class Checking(OnNode):
        """Its GPU fails behind the look of the first check."""

        checks = 0

        async def _look(self) -> Preflight:
            self.checks += 1
            if self.checks == 1:
                self._device(DeviceEvent("GPU 0", "XID 79", severe=True), time.monotonic())
            return Preflight((), {}, {}, 0.1)

    options = SimpleNamespace(preflight="quick", health_command="", watch_devices=True)
    node: Any = SimpleNamespace(options=options, host="a", write=lambda *_, **__: None, ahead={})
    half = Checking(node, lambda _: None)
    assign: Any = SimpleNamespace(generation=1, group_world_size=1)
    for _ in range(3):
        assert await half.unfit(assign) == ""
    assert half.checks == 2


async def test_a_check_that_began_with_the_agent_is_written_down_with_its_own_duration() -> None:
    """It has ended when the generation is prepared: the wait for it is no duration of the check."""

    class Checked(OnNode):
        async def _look(self) -> Preflight:
            return Preflight((), {}, {}, 0.25)

    written: list[tuple[str, dict[str, Any]]] = []
    options = SimpleNamespace(
        preflight="quick", health_command="", watch_devices=True, job=SimpleNamespace(max_nodes=1)
    )
    write = lambda name, **fields: written.append((name, fields))  # noqa: E731
    node: Any = SimpleNamespace(options=options, host="a", write=write, ahead={})
    half = Checked(node, lambda _: None)
    assert half._begun is not None
    await half._begun
    assign: Any = SimpleNamespace(generation=1, group_world_size=1)
    assert await half.unfit(assign) == ""
    assert written == [("preflight", {"generation": 1, "seconds": 0.25, "findings": [], "fit": True})]


@pytest.mark.parametrize("ended", [True, False])
async def test_the_result_of_a_child_is_taken_and_without_one_the_agent_checks_itself(ended: bool) -> None:
    problem = FailedCheck("HF521 memory: 1 MiB is free", stops=True)

    class Child:
        async def result(self) -> bytes:
            return msgspec.msgpack.encode(Preflight((problem,), {}, {0: 7}, 0.25)) if ended else b""

    class Checking(OnNode):
        async def _look(self) -> Preflight:
            return Preflight((), {}, {}, 0.5)

    written: dict[str, dict[str, Any]] = {}
    options = SimpleNamespace(
        preflight="quick", health_command="", watch_devices=True, job=SimpleNamespace(max_nodes=1)
    )
    node: Any = SimpleNamespace(
        options=options,
        host="a",
        write=lambda name, **fields: written.update({name: fields}),
        start=lambda _, work: work.close(),
        ahead={"health": Child()},
    )
    assign: Any = SimpleNamespace(generation=1, group_world_size=1)
    reason = await Checking(node, lambda _: None).unfit(assign)
    assert reason == (f"--preflight {problem.text}" if ended else "")
    assert (written["preflight"]["seconds"], written["preflight"]["fit"]) == ((0.25, False) if ended else (0.5, True))


def test_many_small_events_do_not_hide_a_severe_one() -> None:
    reported: list[DeviceEvent] = []
    watch = DeviceWatch(lambda event, _: reported.append(event), lambda _: None)
    small = [DeviceEvent("GPU 1", f"{count} NVLink errors", severe=False) for count in range(2 * EVENTS_MAX)]
    severe = DeviceEvent("GPU 0", "XID 79", severe=True)
    for event in (*small, severe, severe):
        watch._came(event)
    assert reported == [*small[:EVENTS_MAX], severe]


# --- memory of workers that have ended ---------------------------------------------------------------------------------

MIB = 2**20


@pytest.mark.parametrize(
    ("before", "now", "left"),
    [
        ({0: 500 * MIB}, {0: 500 * MIB}, {}),
        ({0: 500 * MIB}, {0: 600 * MIB}, {}),  # a desktop, a monitor
        ({0: 500 * MIB, 1: 0}, {0: 500 * MIB, 1: 30000 * MIB}, {1: 30000 * MIB}),
        ({0: 40000 * MIB}, {0: 40001 * MIB}, {}),  # another job's
        ({}, {0: 30000 * MIB}, {}),
        ({0: 0}, {}, {}),
    ],
)
def test_memory_beyond_what_was_in_use_before_is_left(
    before: dict[int, int], now: dict[int, int], left: dict[int, int]
) -> None:
    assert leftover(before, now) == left


async def test_the_next_generation_waits_until_the_memory_is_free() -> None:
    looks = [{0: 9000 * MIB}, {0: 4000 * MIB}, {0: 10 * MIB}]
    freed = await wait_until_free({0: 0}, limit_s(30), lambda: looks.pop(0))
    assert (freed.left, looks) == ({}, [])


async def test_memory_that_is_never_freed_and_a_driver_that_hangs_cost_a_bounded_time() -> None:
    freed = await wait_until_free({0: 0}, limit_s(1), lambda: {0: 9000 * MIB})  # the driver has to answer once by then
    assert freed.left == {0: 9000 * MIB}
    may = threading.Event()

    def hangs() -> dict[int, int]:
        may.wait(limit_s(30))
        return {}

    assert (await wait_until_free({0: 0}, 0.2, hangs)).left == {}
    may.set()
