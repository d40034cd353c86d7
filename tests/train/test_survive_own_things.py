"""ht.survive: objects of the program that holdfast knows nothing of but `state_dict()`, and programs with mistakes.

What the loss of a rank must not change: a schedule of one's own, early stopping, what each rank counts for itself, the
position in a stream.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.test_survival import (
    Losses,
    end_of_the_last,
    finished,
    is_exact_with_replacements,
    jobs,  # noqa: F401
    ready,
    shrunk,
    started,
    undisturbed,
)
from tests.warm_jobs import WarmJobs

SCRIPT = Path(__file__).parent / "scripts" / "own_things.py"

pytestmark = [pytest.mark.xdist_group("torch survivors"), pytest.mark.timeout(240)]

LOADER_LOSSES = {
    "in a step": [(1, "forward", 3), (2, "backward", 5), (2, "between steps", 13)],
    "at an epoch's end": [(1, "end of an epoch", 8), (2, "epoch is over", 16), (1, "begin", 17)],
}


@pytest.mark.parametrize("stream", [False, True], ids=["loader", "stream"])
@pytest.mark.parametrize("losses", LOADER_LOSSES.values(), ids=LOADER_LOSSES)
def test_with_replacements_nothing_changes(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    losses: Losses,
    stream: bool,
) -> None:
    monkeypatch.setenv("HOLDFAST_SURVIVE", "wait")
    reference = is_exact_with_replacements(jobs, tmp_path, SCRIPT, losses, stream=stream)
    assert [(each["halvings"], each["epochs"]) for each in reference] == [(3, 3)] * 3
    lines = [path.read_text().count("the others keep their processes and wait") for path in tmp_path.glob("*/0.log")]
    assert lines == [1, 1]


SHRINKS: Losses = [
    (1, "forward", 2),
    (2, "backward", 4),
    (3, "optimizer", 6),
    (4, "end of an epoch", 8),
    (5, "between steps", 11),
]


def test_fewer_ranks_train_the_same(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    """As one rank alone, but for the order of sums: a step has the same samples, and each epoch's end comes once."""
    case = {"exact": True, "global": 60, "samples": 480}
    (reference,) = undisturbed(jobs, tmp_path / "reference", SCRIPT, world=[0], **case)
    end = end_of_the_last(jobs, tmp_path / "lost", SCRIPT, SHRINKS, **case)
    for name in ("step", "rate", "halvings", "epochs"):
        assert end[name] == reference[name]
    assert end["weights"] == pytest.approx(reference["weights"], rel=1e-9)


def test_fewer_ranks_count_each_epoch_once(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    """Python's numbers are equal on all ranks, and stay so."""
    losses = [(1, "end of an epoch", 8), (2, "forward", 11)]
    with started(jobs, tmp_path / "lost", SCRIPT, equal=True, faults=losses) as agent:
        agent.ended([1])
        shrunk(agent, 0, 2)
        agent.ended([2])
        shrunk(agent, 0)
        (end,) = finished(agent, tmp_path / "lost", [0])
    assert (end["halvings"], end["epochs"], end["rate"], end["worlds"]) == (3, 3, 1e-2 / 8, [3, 2, 1])


def test_numbers_that_were_equal_on_all_ranks_stay_equal(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    """Also if the ranks' digests of the first step were not read yet, and if the steps have several micro-batches."""
    late, early = (1, "forward", 8), (1, "forward", 1)
    accumulated = {"micro": True, "global": 12}
    for number, (equal, fault, more) in enumerate([(True, late, accumulated), (True, early, {}), (False, late, {})]):
        folder = tmp_path / str(number)
        with started(jobs, folder, SCRIPT, equal=equal, faults=[fault], **more) as agent:
            agent.ended([1])
            shrunk(agent, 0, 2)
            ends = finished(agent, folder, [0, 2])
        assert (ends[0]["drawn"] == ends[1]["drawn"]) == equal


def test_a_stream_cannot_follow_fewer_ranks(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    with started(jobs, tmp_path / "plain", SCRIPT, stream=True) as agent:
        finished(agent, tmp_path / "plain")
        assert agent.heard == []
        assert (
            "ht.survive: a plain call, because a tracked object hands out data and cannot follow another number of ranks "
            "(loader: Stream; --survive wait can carry it" in agent.logs()
        )


def test_a_count_of_a_step_that_only_others_completed_is_known_to_nobody(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The rank is lost between its optimizer's step and its own count of it: all are started again."""
    with started(jobs, tmp_path / "lost", SCRIPT, faults=[(1, "optimizer", 9)]) as agent:
        agent.ended([1])
        agent.await_said([0, 2], "can_go_on", generation=0)
        agent.release([0, 2])
        agent.await_said([0, 2], "waits", generation=2)
        ready(agent, 1)
        agent.release([1])
        agent.await_said([1], "waits", generation=2)
        agent.go([0, 1, 2])
        agent.await_said([1], "refuse")
        (why,) = {message["why"] for rank, message in agent.heard if message["is"] == "refuse" and rank == 1}
        assert "seen has a state of its own on each rank, and nobody has that of this rank" in why
