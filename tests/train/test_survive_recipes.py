"""ht.survive: optimizers, loaders and tricks of usual training scripts, with a rank lost at each place of a step.

The table of docs/train.md ("What ht.survive keeps") says what is exact, what is refused, and where a loss restarts all
ranks; here are its rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.test_survival import finished, jobs, ready, replaced, shrunk, started, undisturbed  # noqa: F401
from tests.warm_jobs import WarmJobs

SCRIPT = Path(__file__).parent / "scripts" / "recipes.py"
Losses = list[tuple[int, str, int]]

pytestmark = [pytest.mark.xdist_group("torch survivors"), pytest.mark.timeout(240)]

EVERYWHERE: Losses = [
    (1, "forward", 2),
    (2, "first pass", 4),
    (1, "optimizer", 6),
    (2, "end of an epoch", 8),
    (1, "between steps", 11),
]
EXACT: dict[str, tuple[dict[str, str], Losses]] = {
    "an average of the weights": ({"recipe": "Averaged"}, EVERYWHERE),
    "SAM, in its first pass": ({"recipe": "Sam"}, [*EVERYWHERE[:2], *EVERYWHERE[3:]]),
    "parameters whose memory moves": ({"recipe": "Flattening"}, EVERYWHERE),
    "a sampler of ours with torch's loader": ({"loader": "sampler"}, EVERYWHERE),
    "torchdata's loader": ({"loader": "stateful"}, EVERYWHERE),
}


@pytest.mark.parametrize(("case", "losses"), EXACT.values(), ids=EXACT)
def test_with_replacements_every_bit_is_that_of_an_undisturbed_job(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: dict[str, str],
    losses: Losses,
) -> None:
    monkeypatch.setenv("HOLDFAST_SURVIVE", "wait")
    reference = undisturbed(jobs, tmp_path / "reference", SCRIPT, **case)
    with started(jobs, tmp_path / "lost", SCRIPT, **case, faults=losses) as agent:
        for rank, _, _ in losses:
            replaced(agent, rank)
        ends = finished(agent, tmp_path / "lost")
        assert agent.said("refuse") == set()
    for own, other in zip(ends, reference, strict=True):
        assert {**own, "worlds": 0} == {**other, "worlds": 0}


@pytest.mark.parametrize("recipe", ["Averaged", "Sam"])
def test_fewer_ranks_end_with_equal_weights(jobs: WarmJobs, tmp_path: Path, recipe: str) -> None:  # noqa: F811
    losses = [(1, "first pass", 4), (2, "forward", 9)]
    with started(jobs, tmp_path / "lost", SCRIPT, recipe=recipe, faults=losses) as agent:
        agent.ended([1])
        shrunk(agent, 0, 2)
        agent.ended([2])
        shrunk(agent, 0)
        (end,) = finished(agent, tmp_path / "lost", [0])
    assert end["worlds"] == [3, 2, 1]


RESTARTS: dict[str, tuple[str, tuple[int, str, int]]] = {
    "SAM, in its second pass": ("Sam", (1, "second pass", 4)),
    "LBFGS, in its step": ("Closure", (1, "first pass", 4)),
    "a momentum encoder": ("Momentum", (1, "first pass", 4)),
}


@pytest.mark.parametrize(("recipe", "loss"), RESTARTS.values(), ids=RESTARTS)
def test_no_rank_has_a_complete_state_and_all_restart(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    recipe: str,
    loss: tuple[int, str, int],
) -> None:
    with started(jobs, tmp_path / "lost", SCRIPT, recipe=recipe, faults=[loss]) as agent:
        agent.ended([1])
        agent.await_said([0, 2], "able", generation=0)
        agent.release([0, 2])
        agent.await_said([0, 2], "gate", generation=2)
        agent.go([0, 2])
        agent.await_said([0, 2], "refuse")
        (why,) = {message["why"] for _, message in agent.heard if message["is"] == "refuse"}
        assert "no state is complete" in why


WITHDRAWN = ["Adversarial", "StepsWithoutHooks"]


@pytest.mark.parametrize("recipe", WITHDRAWN)
def test_writes_that_nobody_can_notice_make_it_a_plain_call(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    recipe: str,
) -> None:
    with started(jobs, tmp_path / "runs", SCRIPT, recipe=recipe) as agent:
        agent.await_said([0, 1, 2], "unable")
        ends = finished(agent, tmp_path / "runs")
        assert agent.logs().count("the program changes parameters through .data, or in a CUDA graph") == 1
    assert [each["step"] for each in ends] == [16] * 3


def test_a_rank_that_finds_such_writes_alone_says_so(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    with started(jobs, tmp_path / "runs", SCRIPT, recipe="AdversarialOnOne") as agent:
        agent.await_said([1], "unable")
        finished(agent, tmp_path / "runs")
        assert agent.logs().count("which cannot be noticed when a step is interrupted, as rank 1 has found") == 1


def test_an_inner_optimizer_has_to_be_tracked(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    with started(jobs, tmp_path / "runs", SCRIPT, recipe="SamAlone") as agent:
        assert agent.ended([0, 1, 2]) == [1, 1, 1]
        assert "an optimizer of the class SGD steps a tracked model, and is not tracked" in agent.logs()
