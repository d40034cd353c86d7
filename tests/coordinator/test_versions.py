"""Nodes with other software or another script: said once for each difference, to both sides, and nothing is stopped."""

from __future__ import annotations

from holdfast.coordinator.admission import Versions
from holdfast.coordinator.coordinator_machine import CoordinatorMachine
from holdfast.coordinator.coordinator_state import Heard, LinkOpened, Tell
from holdfast.protocol.machines import Note
from holdfast.protocol.messages import Join, Notice
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec
from tests.support.simulator.nodes import simple_judge


def node(name: str, **versions: str) -> NodeSpec:
    return NodeSpec(member=f"{name}#1", host=name, nproc=1, versions=versions)


def texts(versions: Versions, *nodes: NodeSpec) -> list[str]:
    return [difference.text for each in nodes for difference in versions.compare(each)]


def test_equal_nodes_have_nothing_to_say() -> None:
    assert texts(Versions(), node("a", torch="2.13.0", script="12"), node("b", torch="2.13.0", script="12")) == []


def test_both_sides_are_named_and_a_difference_is_said_once() -> None:
    found = texts(Versions(), node("a", torch="2.13.0"), node("b", torch="2.12.1"), node("c", torch="2.12.1"))
    assert found == ["HF307: torch differs: 2.13.0 on a, 2.12.1 on b"]


def test_another_other_version_is_another_difference() -> None:
    versions = Versions()
    assert len(texts(versions, node("a", python="3.11.7"), node("b", python="3.12.1"), node("c", python="3.13.0"))) == 2


def test_what_one_node_lacks_is_said() -> None:
    found = texts(Versions(), node("a", python="3.11.7", torch="2.13.0"), node("b", python="3.11.7"))
    assert found == ["HF307: torch differs: 2.13.0 on a, not found on b"]


def test_a_script_is_no_version() -> None:
    found = texts(Versions(), node("a", script="77aa"), node("b", script="12cd"))
    assert found == ["HF307: the script is not the same file on a and on b"]
    assert "77aa" not in found[0]


def test_a_node_that_could_not_look_is_neither_compared_nor_a_measure() -> None:
    assert texts(Versions(), node("z"), node("a", torch="2.13.0"), node("b", torch="2.13.0")) == []


def test_the_coordinator_tells_both_and_goes_on() -> None:
    machine = CoordinatorMachine(
        JobSpec(run_id="j", min_nodes=2, max_nodes=2, backend="c10d"), Limits(), simple_judge, 0.0
    )
    commands = []
    for link, each in enumerate((node("a", torch="2.13.0"), node("b", torch="2.12.1")), start=1):
        machine.handle(0.0, LinkOpened(link, f"10.0.0.{link}", "10.0.0.1", local=False))
        commands += machine.handle(0.0, Heard(link, Join(each)))
    told = [command.link for command in commands if isinstance(command, Tell) and isinstance(command.message, Notice)]
    assert told == [1, 2]
    assert [command for command in commands if isinstance(command, Note) and command.event == "nodes_differ"]
    assert machine.generation == 1
