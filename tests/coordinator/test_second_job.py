"""Nodes that do not belong together: a second job at the endpoint of a first one, and other software or another script."""

from __future__ import annotations

import pytest

from holdfast.coordinator.admission import Versions
from holdfast.coordinator.coordinator_machine import CoordinatorMachine
from holdfast.coordinator.coordinator_state import DropLink, Event, Heard, LinkClosed, LinkOpened, Tell
from holdfast.protocol import messages as msg
from holdfast.protocol.machines import Note, Tick
from holdfast.protocol.messages import Join, Notice
from holdfast.protocol.outcome import OutcomeKind
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec
from tests.coordinator.coordinator_desk import LIMITS
from tests.support.simulator.nodes import simple_judge

LINE, OTHER = {"script": "a", "arguments": "1"}, {"script": "a", "arguments": "2"}


class Job:
    """A job of so many nodes, all of them at work; links are numbered from 1."""

    def __init__(self, nodes: int, run_id: str = "none") -> None:
        self.now, self.nodes = 0.0, nodes
        job = JobSpec(run_id=run_id, min_nodes=nodes, max_nodes=nodes, backend="c10d")
        self.machine = CoordinatorMachine(job, LIMITS, simple_judge, self.now)
        self.told: dict[int, list[msg.FromCoordinator]] = {}
        self.dropped: list[int] = []
        for link in range(1, nodes + 1):
            self.join(link, LINE)
        for link in range(1, nodes + 1):
            self.give(Heard(link, msg.Prepared(1, 40_000 if link == 1 else None)))

    def give(self, event: Event) -> None:
        for command in self.machine.handle(self.now, event):
            if isinstance(command, Tell):
                self.told.setdefault(command.link, []).append(command.message)
            elif isinstance(command, DropLink):
                self.dropped.append(command.link)
        self.machine.check_invariants()

    def join(self, link: int, versions: dict[str, str], name: str = "") -> None:
        self.give(LinkOpened(link, f"10.0.0.{link}", "10.0.0.9"))
        node = NodeSpec(member=name or f"n{link}#1", host=f"n{link}", nproc=1, versions=versions)
        self.give(Heard(link, msg.Join(node)))

    def time_passes(self) -> None:
        self.now += 1.5
        for member in list(self.machine.members.values()):
            self.give(Heard(member.link, msg.Ping(1)))
        self.give(Tick())

    def succeed(self) -> None:
        for link in range(1, self.nodes + 1):
            self.give(Heard(link, msg.WorkerDone(1, 0)))

    def last(self, link: int) -> msg.FromCoordinator:
        return self.told[link][-1]


@pytest.mark.parametrize(("nodes", "run_id", "line"), [(1, "none", LINE), (1, "mine", OTHER), (2, "none", OTHER)])
def test_it_is_refused(nodes: int, run_id: str, line: dict[str, str]) -> None:
    job = Job(nodes, run_id)
    job.join(9, line)
    assert 9 not in job.told, "the one that is there may be a ghost"
    job.time_passes()
    refused = job.last(9)
    assert isinstance(refused, msg.Refuse)
    assert "n1" in refused.text
    assert "--rdzv-id" in refused.text
    assert 9 in job.dropped
    assert len(job.machine.members) == nodes


def test_a_ghost_is_replaced() -> None:
    """A node that restarts comes before its old connection is seen to be broken."""
    job = Job(1)
    job.join(9, LINE)
    job.give(LinkClosed(1, "reset"))
    job.now += LIMITS.settle_s
    job.give(Tick())
    assert isinstance(job.last(9), msg.Assign)


def test_who_had_a_part_in_the_job_is_never_refused() -> None:
    """A coordinator that was restarted may meet somebody else first."""
    job = Job(1)
    job.give(LinkOpened(9, "10.0.0.9", "10.0.0.9"))
    job.give(Heard(9, msg.Join(NodeSpec(member="n9#1", host="n9", nproc=1), last_generation=3)))
    job.give(LinkOpened(8, "127.0.0.1", "127.0.0.1", local=True))
    job.give(Heard(8, msg.Join(NodeSpec(member="n8#1", host="n8", nproc=1))))
    job.time_passes()
    assert {member.link for member in job.machine.members.values()} == {1, 8, 9}


@pytest.mark.parametrize(("run_id", "line"), [("none", LINE), ("mine", OTHER)])
def test_a_job_of_several_nodes_has_spares(run_id: str, line: dict[str, str]) -> None:
    job = Job(2, run_id)
    job.join(9, line)
    job.time_passes()
    assert any(isinstance(message, msg.Waiting) for message in job.told[9])
    assert len(job.machine.members) == 3


@pytest.mark.parametrize(
    ("line", "kind", "code", "text"),
    [
        (LINE, OutcomeKind.SUCCEEDED, 0, "never needed"),
        (OTHER, OutcomeKind.REFUSED, 2, "arguments: different"),
    ],
)
def test_a_spare_that_was_never_used_says_so(line: dict[str, str], kind: OutcomeKind, code: int, text: str) -> None:
    job = Job(2, "mine")
    job.join(9, line)
    job.succeed()
    finish = job.last(9)
    assert isinstance(finish, msg.Finish)
    assert (finish.outcome.kind, finish.outcome.exit_code) == (kind, code)
    assert text in finish.outcome.message
    mine = job.last(1)
    assert isinstance(mine, msg.Finish)
    assert mine.outcome.message == ""


def test_another_job_that_comes_at_the_end_finds_the_endpoint_free() -> None:
    job = Job(1)
    job.succeed()
    job.join(9, OTHER)
    assert 9 in job.dropped
    assert 9 not in job.told


# --- nodes with other software or another script: said once for each difference, to both sides; nothing is stopped ------


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
