"""Nodes that do not belong together: a second job at the endpoint of a first one, and other software or another script."""

from __future__ import annotations

import pytest

from holdfast.coordinator.admission import Versions
from holdfast.coordinator.coordinator_state import LinkClosed, LinkOpened
from holdfast.protocol import messages as msg
from holdfast.protocol.outcome import OutcomeKind
from holdfast.protocol.policy import NodeSpec
from tests.coordinator.coordinator_harness import LIMITS, CoordinatorHarness

PATIENCE_S = 1.5
"""After so long a member that pings is known to be no ghost."""
LINE, OTHER = {"script": "a", "arguments": "1"}, {"script": "a", "arguments": "2"}


def at_work(nodes: int, run_id: str = "none") -> CoordinatorHarness:
    harness = CoordinatorHarness(nodes, nodes, run_id=run_id)
    harness.join(*range(1, nodes + 1), versions=LINE)
    harness.prepare(*range(1, nodes + 1))
    return harness


def succeed(job: CoordinatorHarness) -> None:
    for link in job.links:
        job.say(link, msg.WorkerDone(1, 0))


@pytest.mark.parametrize(("nodes", "run_id", "line"), [(1, "none", LINE), (1, "mine", OTHER), (2, "none", OTHER)])
def test_it_is_refused(nodes: int, run_id: str, line: dict[str, str]) -> None:
    job = at_work(nodes, run_id)
    job.join(9, versions=line)
    assert not job.told_to(9), "the one that is there may be a ghost"
    job.wait(PATIENCE_S)
    refused = job.last(9)
    assert isinstance(refused, msg.Refuse)
    assert "n1" in refused.text
    assert "--rdzv-id" in refused.text
    assert 9 in job.dropped
    assert len(job.machine.members) == nodes


def test_a_ghost_is_replaced() -> None:
    """A node that restarts comes before its old connection is seen to be broken."""
    job = at_work(1)
    job.join(9, versions=LINE)
    job.give(LinkClosed(1, "reset"))
    job.wait(LIMITS.settle_s)
    assert isinstance(job.last(9), msg.Assign)


def test_who_had_a_part_in_the_job_is_never_refused() -> None:
    """A coordinator that was restarted may meet somebody else first."""
    job = at_work(1)
    job.join(9, last_generation=3)
    job.give(LinkOpened(8, "127.0.0.1", "127.0.0.1", local=True))
    job.say(8, msg.Join(NodeSpec(member="n8#1", host="n8", nproc=1)))
    job.wait(PATIENCE_S)
    assert job.links == {1, 8, 9}


@pytest.mark.parametrize(("run_id", "line"), [("none", LINE), ("mine", OTHER)])
def test_a_job_of_several_nodes_has_spares(run_id: str, line: dict[str, str]) -> None:
    job = at_work(2, run_id)
    job.join(9, versions=line)
    job.wait(PATIENCE_S)
    assert any(isinstance(message, msg.Waiting) for message in job.told_to(9))
    assert len(job.machine.members) == 3


@pytest.mark.parametrize(
    ("line", "kind", "code", "text"),
    [
        (LINE, OutcomeKind.SUCCEEDED, 0, "before this node could join"),
        (OTHER, OutcomeKind.REFUSED, 2, "arguments: different"),
    ],
)
def test_a_spare_that_was_never_used_says_so(line: dict[str, str], kind: OutcomeKind, code: int, text: str) -> None:
    job = at_work(2, "mine")
    job.join(9, versions=line)
    succeed(job)
    finish = job.last(9)
    assert isinstance(finish, msg.Finish)
    assert (finish.outcome.kind, finish.outcome.exit_code) == (kind, code)
    assert text in finish.outcome.message
    mine = job.last(1)
    assert isinstance(mine, msg.Finish)
    assert mine.outcome.message == ""


def test_another_job_that_comes_at_the_end_finds_the_endpoint_free() -> None:
    job = at_work(1)
    succeed(job)
    job.join(9, versions=OTHER)
    assert 9 in job.dropped
    assert not job.told_to(9)


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
    harness = CoordinatorHarness()
    harness.join(1, versions={"torch": "2.13.0"})
    harness.join(2, versions={"torch": "2.12.1"})
    assert [link for link, message in harness.told if isinstance(message, msg.Notice)] == [1, 2]
    assert harness.noted("nodes_differ")
    assert harness.machine.generation == 1
