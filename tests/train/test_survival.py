"""ht.survive: ranks are lost at every place of a training; the others go on in their processes, and nothing is lost.

The test stands for the agent (tests/support/fake_agent.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.support.fake_agent import FakeAgent
from tests.warm import Warm
from tests.warm_jobs import WarmJobs

SCRIPTS = Path(__file__).parent / "scripts"
SURVIVOR = SCRIPTS / "survivor.py"
WORLD = (0, 1, 2)
Ends = list[dict[str, Any]]

pytestmark = [pytest.mark.xdist_group("torch survivors"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def jobs(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmJobs]:
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a process's first one opens what stays open
    modules = ("holdfast.train.survival", "holdfast.train.snapshots", "holdfast.train.guards")
    with WarmJobs(warm, tmp_path_factory.mktemp("jobs"), *modules) as made:
        yield made


def started(jobs: WarmJobs, folder: Path, **case: Any) -> FakeAgent:
    folder.mkdir(exist_ok=True)
    agent = FakeAgent(jobs, folder, SURVIVOR, folder, json.dumps(case))
    agent.start(WORLD)
    return agent


def finished(agent: FakeAgent, folder: Path, local_ranks: Collection[int] = WORLD) -> Ends:
    """What each rank wrote at its end."""
    assert agent.ended(local_ranks) == [0] * len(local_ranks), agent.logs()
    return [json.loads((folder / f"end.{each}").read_text()) for each in local_ranks]


def undisturbed(jobs: WarmJobs, folder: Path, **case: Any) -> Ends:
    with started(jobs, folder, **case) as agent:
        return finished(agent, folder)


def replaced(agent: FakeAgent, *lost: int) -> None:
    """These ranks have ended: as with `--survive wait`, the others wait at the gate for the replacements."""
    agent.ended(lost)
    coming = agent.generation + 1
    left = [each for each in WORLD if each not in lost]
    agent.release(left)
    agent.await_said(left, "gate", generation=coming)
    ready(agent, *lost)
    agent.release(lost)
    agent.await_said(lost, "gate", generation=coming)
    agent.go(WORLD)
    agent.await_said(WORLD, "able", generation=coming)


def ready(agent: FakeAgent, *lost: int) -> None:
    agent.forget("ready")
    for each in lost:
        agent.replace(each, len(WORLD))
    agent.await_said(lost, "ready")


def lost_steps(agent: FakeAgent) -> dict[int, int]:
    """How many steps the ranks of each generation had to do again."""
    return {said["generation"]: said["steps_lost"] for _, said in agent.heard if said["is"] == "went_on"}


def same(ends: Ends, others: Ends) -> None:
    """Each rank ended as this one of another job did, bit for bit."""
    for own, other in zip(ends, others, strict=True):
        assert {**own, "worlds": 0} == {**other, "worlds": 0}


def test_what_a_rank_was_doing_when_it_was_lost_makes_no_difference(jobs: WarmJobs, tmp_path: Path) -> None:
    lost: list[tuple[int, str, int]] = [
        (1, "forward", 2),
        (2, "backward", 4),
        (0, "optimizer", 7),
        (1, "loader", 9),
        (2, "group", 12),
        (0, "backward", 18),
        (1, "forward", 22),
        (2, "backward", 22),
    ]
    case = {"group": 12}
    (tmp_path / "lost").mkdir()
    reference = undisturbed(jobs, tmp_path / "reference", **case)
    with started(jobs, tmp_path / "lost", **case, faults=[[*each, "kill"] for each in lost]) as agent:
        for rank, _, _ in lost[:-2]:
            replaced(agent, rank)
        replaced(agent, 1, 2)
        ends = finished(agent, tmp_path / "lost")
        assert lost_steps(agent) == dict.fromkeys(range(2, 9), 0)
    assert reference[0]["counts"] == [-2.0]
    same(ends, reference)
