"""ht.survive: optimizers, loaders and tricks of usual training scripts, with a rank lost at each place of a step.

docs/survive.md says what is exact, what is refused, and where a loss restarts all ranks; here are its rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.test_survival import (
    Losses,
    end_of_the_last,
    finished,
    is_exact_with_replacements,
    jobs,  # noqa: F401
    started,
    undisturbed,
)
from tests.warm_jobs import WarmJobs

SCRIPT = Path(__file__).parent / "scripts" / "recipes.py"

pytestmark = [pytest.mark.xdist_group("torch survivors"), pytest.mark.timeout(240)]

EVERYWHERE: Losses = [
    (1, "forward", 2),
    (2, "first pass", 4),
    (1, "optimizer", 6),
    (2, "end of an epoch", 8),
    (1, "between steps", 11),
]
BY_HAND: Losses = [
    (1, "forward", 3),
    (2, "optimizer", 5),
    (1, "end of an epoch", 8),
    (2, "first pass", 11),
    (1, "between steps", 13),
]
NOT_AFTER_A_MOVE = [each for each in EVERYWHERE if each[1] != "optimizer"]
"""SAM's weights are moved from the end of its first pass to `snaps.step()`."""
EXACT: dict[str, tuple[dict[str, Any], Losses]] = {
    "two optimizers, a schedule, and an option that the program sets": ({"recipe": "Varied"}, EVERYWHERE),
    "a scaler that skips a step": ({"recipe": "Scaled"}, EVERYWHERE),
    "gradients that are added up by hand": ({"recipe": "ByHand"}, BY_HAND),
    "an average of the weights": ({"recipe": "Averaged"}, EVERYWHERE),
    "a momentum encoder, changed after the step": ({"recipe": "MomentumAfter"}, EVERYWHERE),
    "SAM, in its first pass": ({"recipe": "Sam"}, NOT_AFTER_A_MOVE),
    "parameters whose memory moves": ({"recipe": "Flattening"}, EVERYWHERE),
}
WAITING: dict[str, tuple[dict[str, Any], Losses]] = {
    **EXACT,
    "a sampler of ours with torch's loader": ({"loader": "sampler"}, EVERYWHERE),
    "torchdata's loader": ({"loader": "stateful"}, EVERYWHERE),
}


@pytest.mark.parametrize(("case", "losses"), WAITING.values(), ids=WAITING)
def test_with_replacements_every_bit_is_that_of_an_undisturbed_job(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: dict[str, Any],
    losses: Losses,
) -> None:
    monkeypatch.setenv("HOLDFAST_SURVIVE", "wait")
    reference = is_exact_with_replacements(jobs, tmp_path, SCRIPT, losses, **case)
    assert [each["step"] for each in reference] == [16] * 3


@pytest.mark.parametrize(("case", "losses"), EXACT.values(), ids=EXACT)
def test_fewer_ranks_train_the_same(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    case: dict[str, Any],
    losses: Losses,
) -> None:
    """As one rank alone, but for the order of sums: a step has the same samples. All ranks are equal, bit for bit."""
    of_each_rank = [(rank, where, step) for rank, (_, where, step) in enumerate(losses, 1)]
    size = {"exact": True, "global": 60, "samples": 60 * 8}
    (reference,) = undisturbed(jobs, tmp_path / "reference", SCRIPT, world=[0], **case, **size)
    end = end_of_the_last(jobs, tmp_path / "lost", SCRIPT, of_each_rank, **case, **size)
    assert end["step"] == reference["step"]
    assert end["weights"] == pytest.approx(reference["weights"], rel=1e-9)


def test_fewer_ranks_are_equal_with_a_sampler_of_ours(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    """torch's loader has batches of one size, so fewer ranks have smaller steps: the epoch of 96 samples has 7 steps of 5,
    4 and 3 ranks, and 11 of 2."""
    losses = [(1, "forward", 2), (2, "first pass", 4), (3, "optimizer", 6), (4, "end of an epoch", 18)]
    end = end_of_the_last(jobs, tmp_path / "lost", SCRIPT, losses, loader="sampler", samples=96)
    assert end["step"] == 18 + 96 // 2


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
        agent.await_said([0, 2], "can_go_on", generation=0)
        agent.release([0, 2])
        agent.await_said([0, 2], "waits", generation=2)
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
        named = "train() uses center: training changes the state of such a module, and it is not tracked"
        assert agent.logs().count(named) == (recipe == "Adversarial"), "rank 0 says it once"
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
