"""A second job at the endpoint of a first one is refused, or goes on to find it free; it never ends as a part of the first."""

from __future__ import annotations

import pytest

from holdfast.coordinator.coordinator_machine import CoordinatorMachine
from holdfast.coordinator.coordinator_state import DropLink, Event, Heard, LinkClosed, LinkOpened, Tell
from holdfast.protocol import messages as msg
from holdfast.protocol.machines import Tick
from holdfast.protocol.outcome import OutcomeKind
from holdfast.protocol.policy import JobSpec, NodeSpec
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
