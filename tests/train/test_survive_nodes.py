"""ht.survive with replicas on several nodes: a rank or a node is lost at each point of the agreement on a step, and no
step is lost.

The test stands for the agents (tests/support/fake_agent.py). HSDP: shards within a node, replicas between nodes.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.train import step_links
from holdfast.train.agreement import Peers
from holdfast.train.step_links import NoAgreement, await_news, meet
from tests.support.fake_agent import FakeAgent
from tests.support.limits import limit_s, until
from tests.train.test_survival import (
    Ends,
    finished,
    jobs,  # noqa: F401
    lost_steps,
    replaced,
    shrunk,
    started,
    undisturbed,
)
from tests.train.test_survive_sharded import SCRIPT, calls_of, same_training
from tests.warm_jobs import WarmJobs

pytestmark = [
    pytest.mark.xdist_group("torch survivors"),
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("meshes_made_again"),
]

FOUR = [0, 1, 2, 3]
HSDP: dict[str, Any] = {"world": FOUR, "kind": "hsdp", "memory": 100, "exact": True, "nothing of its own": True}
LOSSES = [
    # local rank, where, complete steps, so many have come there; the step from which all go on
    (1, "announced", 2, 4, 3),
    (2, "announced", 4, 4, 4),
    (0, "about to tell", 6, 1, 6),
    (0, "told", 9, 1, 10),
    (3, "decided", 12, 1, 13),
]
"""A rank that has its gradients, and speaks for no node; one that has them, and speaks for its node; rank 0, which has
decided, and has told nobody; rank 0, which has told the other node, but not its own; one that knows of the decision."""


@pytest.fixture(scope="module")
def undisturbed_job(jobs: WarmJobs, tmp_path_factory: pytest.TempPathFactory) -> Ends:  # noqa: F811
    return undisturbed(jobs, tmp_path_factory.mktemp("reference"), SCRIPT, **HSDP)


@pytest.fixture
def reference(undisturbed_job: Ends) -> Ends:
    """Of a job without a loss. Comparisons change it."""
    return copy.deepcopy(undisturbed_job)


def test_no_step_is_lost_with_a_rank(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reference: Ends,
) -> None:
    """Two nodes of two ranks. All go on from the step that is done, or from the one before if nobody knows of it."""
    monkeypatch.setenv("HOLDFAST_SURVIVE", "wait")
    faults = [each[:4] for each in LOSSES]
    with started(jobs, tmp_path / "lost", SCRIPT, **HSDP, copies=1, per_node=2, faults=faults) as agent:
        for rank, *_ in LOSSES:
            replaced(agent, rank, world=FOUR)
        ends = finished(agent, tmp_path / "lost", FOUR)
    assert agent.said("refuse") == set()
    assert set(lost_steps(agent).values()) == {0}
    assert [step for *_, step, source, _ in ends[1]["calls"]] == [3, 4, 6, 10, 13]
    assert {source for *_, source, _ in ends[1]["calls"]} == {"memory"}
    same_training(ends, reference)


def test_no_step_is_lost_with_a_node(jobs: WarmJobs, tmp_path: Path, reference: Ends) -> None:  # noqa: F811
    """It decides, and has told the other one. 2 × 2 ranks, then 1 × 2. No node has a copy of another one's memory."""
    with started(jobs, tmp_path / "lost", SCRIPT, **HSDP, per_node=2, faults=[[0, "told", 5, 1]]) as agent:
        agent.ended([0])
        agent.kill(1)
        agent.ended([1])
        agent.lose(0)
        shrunk(agent, 2, 3)
        ends = finished(agent, tmp_path / "lost", [2, 3])
    go_on(agent, ends, reference, [(4, 0), (2, 6)])


def test_no_step_is_lost_with_the_node_that_decides_when_it_has_told_one_of_two(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    reference: Ends,
) -> None:
    """DDP, a rank on each node. Rank 2 has an open step, and rank 1 knows of the decision. Then rank 1 decides, and is
    lost when rank 2 has announced the step, and nobody knows."""
    case = {**HSDP, "world": [0, 1, 2], "kind": "ddp"}
    faults = [[0, "told", 4, 1], [1, "about to tell", 8, 1]]
    with started(jobs, tmp_path / "lost", SCRIPT, **case, per_node=1, faults=faults) as agent:
        for left in ([1, 2], [2]):
            agent.ended([left[0] - 1])
            agent.lose(left[0] - 1)
            shrunk(agent, *left)
        ends = finished(agent, tmp_path / "lost", [2])
    go_on(agent, ends, reference, [(3, 0), (2, 5), (1, 8)])


def test_with_replacements_of_a_node_all_go_on_from_the_copies(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reference: Ends,
) -> None:
    """The random numbers of its ranks are lost with it. The step that is done would be known, but not exactly."""
    monkeypatch.setenv("HOLDFAST_SURVIVE", "wait")
    case = {**HSDP, "memory": 3, "copies": 1}
    with started(jobs, tmp_path / "lost", SCRIPT, **case, per_node=2, faults=[[2, "decided", 5, 1]]) as agent:
        agent.ended([2])
        agent.kill(3)
        agent.ended([3])
        agent.lose(1)
        replaced(agent, 2, 3, world=FOUR)
        ends = finished(agent, tmp_path / "lost", FOUR)
    assert {each["calls"][-1][3] for each in ends} <= {0, 3}, "that of step 3 may not be on the other node yet"
    same_training(ends, reference)


def go_on(agent: FakeAgent, ends: Ends, reference: Ends, calls: list[tuple[int, int]]) -> None:
    """The ranks that are left have trained the same, and each call of the function has begun at this step."""
    assert set(lost_steps(agent).values()) == {0}
    for own in ends:
        assert [(world, began) for *_, world, began, _, _ in calls_of(own)] == calls
        assert own["weights"] == pytest.approx(reference[0]["weights"], rel=1e-7)


# --- the links ----------------------------------------------------------------------------------------------------------


def met(key: Callable[[int], bytes], places: str = "aabbc") -> list[Any]:
    """The links of each rank, or why there are none. `places`: the node of each rank."""
    store = dist.HashStore()

    def one(rank: int) -> Any:
        return meet(Peers(rank, len(places), store), places, key(rank), lambda: False)

    with ThreadPoolExecutor(len(places)) as ranks:
        return [each.result(limit_s(30)) for each in [ranks.submit(one, rank) for rank in range(len(places))]]


def test_one_rank_of_each_node_is_connected_with_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    links = met(lambda _: b"key")
    assert [len(each) for each in links] == [2, 0, 1, 0, 1]
    (second,), (third,) = links[2], links[4]
    second.say(5)
    third.end()
    until(lambda: links[0][0].newest == 5 and links[0][1].ended, "both are heard")
    links[0][1].say(7)
    assert await_news([third], limit_s(30))
    assert (third.newest, third.ended, second.newest) == (7, False, 0)
    for each in links[0]:
        each.close()
    until(lambda: not second.newest and second.lost and not await_news([second], 0), "the loss of the link is seen")
    second.say(8)  # it raises nothing
    for each in (second, third):
        each.close()


def test_without_the_key_of_this_job_there_are_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(step_links, "MEET_S", 0.5)
    before = threading.active_count()
    assert met(lambda rank: b"key" if rank < 4 else b"another") == [NoAgreement.CONNECTION] * 5
    until(lambda: threading.active_count() == before, "their threads have ended")


def test_without_a_store_of_the_agent_there_are_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert met(lambda _: b"key", "ab") == [NoAgreement.STORE] * 2
