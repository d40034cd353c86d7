"""ht.survive for models that are made in the function: FSDP2, HSDP, tensor parallel. The others keep their processes, and
train again from the newest state in memory.

The test stands for the agent (tests/support/fake_agent.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.train.quarantine import PREVIOUS_END
from tests.support.fake_agent import FakeAgent
from tests.support.limits import until
from tests.train.test_survival import (
    WORLD,
    Ends,
    Losses,
    Used,
    finished,
    jobs,  # noqa: F401
    leave_nothing,
    lost_steps,
    ready,
    replaced,
    sent,
    shrunk,
    started,
    undisturbed,
    with_replacements,
)
from tests.warm_jobs import WarmJobs

SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"

pytestmark = [
    pytest.mark.xdist_group("torch survivors"),
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("meshes_made_again"),
]


def calls_of(end: dict[str, Any]) -> list[list[Any]]:
    """For each call of the function: the process, the identity of what was made before it, the world, the step, the source
    of the state, and how many models of earlier calls exist."""
    calls: list[list[Any]] = end.pop("calls")
    return calls


def is_kept(calls: list[list[Any]]) -> None:
    """All calls were made in one process, what was made before the function is the same, and what it made is gone."""
    assert {(pid, made, left) for pid, made, *_, left in calls} == {(calls[0][0], calls[0][1], 0)}


LOSSES: Losses = [
    (1, "forward", 4),
    (2, "backward", 7),
    (0, "optimizer", 8),
    (1, "between steps", 10),
    (2, "save", 11),
]


def test_with_replacements_every_bit_is_that_of_an_undisturbed_job(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_SURVIVE", "wait")
    reference = undisturbed(jobs, tmp_path / "reference", SCRIPT, drawn=True)
    same_training(with_replacements(jobs, tmp_path / "lost", SCRIPT, LOSSES, drawn=True).ends, reference)


@pytest.mark.parametrize("lost", [1, 2], ids=["the replacement", "another rank"])
def test_a_rank_that_is_lost_while_a_replacement_joins_costs_no_other_process_and_no_bit(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: int,
) -> None:
    """The others wait for it where the process group is made."""
    monkeypatch.setenv("HOLDFAST_SURVIVE", "wait")
    reference = undisturbed(jobs, tmp_path / "reference", SCRIPT, drawn=True)
    faults = [(1, "backward", 7), (lost, "join", 2)]
    with started(jobs, tmp_path / "lost", SCRIPT, drawn=True, faults=faults) as agent:
        sent(agent, 1)
        sent(agent, lost)
        agent.await_said(WORLD, "can_go_on", generation=3)
        ends = finished(agent, tmp_path / "lost")
    assert agent.said("refuse") == set()
    same_training(ends, reference)


def same_training(ends: Ends, others: Ends) -> None:
    """Each rank ended as that one of another job did, and left nothing of its calls behind."""
    for own, other in zip(ends, others, strict=True):
        is_kept(calls_of(own))
        calls_of(other)
        assert own == other


KINDS = {
    "FSDP2": {},
    "DDP": {"kind": "ddp"},
    "tensor parallel": {"kind": "tensor"},
    "FSDP2, the loader made before": {"before": "loader"},
}
SHRINKS: Losses = [(1, "forward", 4), (3, "backward", 8), (0, "between steps", 11)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_fewer_ranks_train_the_same(jobs: WarmJobs, tmp_path: Path, kind: dict[str, str]) -> None:  # noqa: F811
    """As one rank alone, but for the order of sums. The state of each lost rank is read from its slot."""
    case: dict[str, Any] = {"exact": True, **kind}
    (reference,) = undisturbed(jobs, tmp_path / "reference", SCRIPT, world=[0], **case)
    left = [0, 1, 2, 3]
    with started(jobs, tmp_path / "lost", SCRIPT, world=left, **case, faults=SHRINKS) as agent:
        for rank, _, _ in SHRINKS:
            agent.ended([rank])
            left.remove(rank)
            shrunk(agent, *left)
        (end,) = finished(agent, tmp_path / "lost", left)
    calls = calls_of(end)
    is_kept(calls)
    assert [(world, step, source) for *_, world, step, source, _ in calls] == [
        (4, 0, ""),
        (3, 3, "memory"),
        (2, 6, "memory"),
        (1, 9, "memory"),
    ]
    assert (end["step"], end["rates"]) == (reference["step"], reference["rates"])
    assert end["weights"] == pytest.approx(reference["weights"], rel=1e-7)
    assert end["losses"] == pytest.approx(reference["losses"], rel=1e-7)


EARLY = {
    "while the model is made": [(1, "build", 0)],
    "in resume(), which saves at once": [(1, "save", 0)],
    "after resume()": [(2, "resumed", 0)],
    "in the first steps": [(0, "gradients", 1), (1, "forward", 2)],
    "while the model is made again": [(1, "forward", 2), (2, "build again", 0)],
}


@pytest.mark.parametrize("losses", EARLY.values(), ids=EARLY)
def test_a_loss_before_the_first_state_in_memory_begins_alike(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    losses: Losses,
) -> None:
    """The same weights are drawn again, and what was made before the function has its first state."""
    case = {"steps": 4, "epochs": 1, "drawn": True}
    reference = undisturbed(jobs, tmp_path / "reference", SCRIPT, **case)
    same_training(with_replacements(jobs, tmp_path / "lost", SCRIPT, losses, **case).ends, reference)


def replace_without_memory(agent: FakeAgent) -> None:
    """A replacement of rank 1 comes, and all go on. Nothing of the lost rank is left in memory."""
    for path in agent.memory.path.glob("1.[0-2]"):
        path.unlink()
    ready(agent, 1)
    agent.release([1])
    agent.await_said([1], "waits", generation=2)
    agent.go([0, 1, 2])


def others_wait(agent: FakeAgent) -> None:
    """Rank 1 has ended."""
    agent.ended([1])
    agent.release([0, 2])
    agent.await_said([0, 2], "waits", generation=2)


def test_from_the_disk_if_the_memory_of_a_lost_rank_is_lost_too(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    case = {"disk": 2, "memory": 100, "steps": 6, "epochs": 1}
    reference = undisturbed(jobs, tmp_path / "reference", SCRIPT, **case)
    with started(jobs, tmp_path / "lost", SCRIPT, **case, faults=[(1, "forward", 5)]) as agent:
        others_wait(agent)
        until(lambda: [*(tmp_path / "lost/runs").glob("step_000000004.*")], "the newest save is complete")
        replace_without_memory(agent)
        ends = finished(agent, tmp_path / "lost")
    for each in ends:
        assert each["calls"][-1][3:5] == [4, "disk"]
    same_training(ends, reference)


@pytest.mark.parametrize("before", ["", "loader"])
def test_without_any_state_an_object_from_before_the_function_begins_anew_too(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    before: str,
) -> None:
    """Of the lost rank nothing is left in memory, and nothing is on the disk. `before`: what is made before, besides
    an early stop."""
    case = {"memory": 2, "steps": 6, "epochs": 1, **({"before": before} if before else {})}
    reference = undisturbed(jobs, tmp_path / "reference", SCRIPT, **case)
    with started(jobs, tmp_path / "lost", SCRIPT, **case, faults=[(1, "forward", 5)]) as agent:
        others_wait(agent)
        replace_without_memory(agent)
        ends = finished(agent, tmp_path / "lost")
    for each in ends:
        assert each["calls"][-1][3:5] == [0, ""]
    same_training(ends, reference)


def test_without_any_state_data_of_another_library_from_before_the_function_restart_all(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would go on where they are, and the samples of the steps that are given up would never be trained."""
    monkeypatch.setenv("HOLDFAST_SURVIVE", "wait")
    case = {"memory": 2, "steps": 6, "epochs": 1, "before": "stream", "plain": True}
    with started(jobs, tmp_path / "lost", SCRIPT, **case, faults=[(1, "forward", 5)]) as agent:
        others_wait(agent)
        replace_without_memory(agent)
        agent.await_said([0, 2], "refuse")
        (why,) = {message["why"] for _, message in agent.heard if message["is"] == "refuse"}
        assert "loader (Stream) was made before the training function" in why


def test_nobody_waits_for_the_part_of_a_rank_that_was_lost_in_a_save_to_the_disk(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
) -> None:
    """It has told the others that its part is in memory, and hands it over to nobody. The save fails, and a later one
    brings the state to the disk."""
    case = {"disk": 4, "memory": 100, "steps": 7, "epochs": 1, "counted": True}
    with started(jobs, tmp_path / "lost", SCRIPT, **case, faults=[(1, "hand over", 3)]) as agent:
        replaced(agent, 1)
        ends = finished(agent, tmp_path / "lost")
        assert "training changes model.blocks.0.passes [1], a buffer with persistent=False" in agent.logs()
        assert "step 4 was not saved: rank 1 was lost before its part was written" in agent.logs()
    assert [each["calls"][-1][3:5] for each in ends] == [[4, "memory"]] * len(WORLD)
    assert [*(tmp_path / "lost/runs").glob("step_000000007.*")]


def test_a_failure_before_the_job_is_judged_once(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would make the state suspect from which the ranks have gone on after a loss."""
    monkeypatch.setenv(PREVIOUS_END, "failed 5 ValueError: the loss is nan")
    losses = [(1, "forward", 4), (2, "forward", 7)]
    agent, (end, *_) = with_replacements(jobs, tmp_path / "lost", SCRIPT, losses)
    assert "suspect" not in agent.logs()
    assert "persistent=False" not in agent.logs(), "the buffers that no state has do not change"
    assert [step for _, _, _, step, *_ in end["calls"]] == [0, 3, 6]


MADE_BEFORE = {
    "a sharded model": ("model", "older_model, which is sharded,"),
    "a device mesh": ("mesh", "mesh, a DeviceMesh,"),
    "a sharded model that has its state": ("resumed", "model, which is sharded,"),
    "a plain model that is sharded in the function": ("plain", "model, which it tracks,"),
    "a loader for some ranks": ("ranks", "loader, which has ranks of its own,"),
}


@pytest.mark.parametrize(("before", "what"), MADE_BEFORE.values(), ids=MADE_BEFORE)
def test_what_ends_with_the_ranks_is_refused_if_it_was_made_before(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    before: str,
    what: str,
) -> None:
    with started(jobs, tmp_path / "made", SCRIPT, world=[0, 1], before=before) as agent:
        assert agent.ended([0, 1]) == [1, 1]
        assert agent.said("waits") == set()
        lines = [line for line in agent.logs().splitlines() if "MadeBeforeError" in line and "ht.survive: " in line]
    assert len(lines) == 2
    assert all(
        f"MadeBeforeError: ht.survive: {what} was made before train(), and ends with" in line for line in lines
    ), lines


def test_a_loader_made_before_follows_a_loss_that_comes_before_it_is_tracked(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
) -> None:
    case = {"exact": True, "before": "loader", "steps": 3, "epochs": 1}
    (reference,) = undisturbed(jobs, tmp_path / "reference", SCRIPT, world=[0], **case)
    with started(jobs, tmp_path / "lost", SCRIPT, **case, faults=[(0, "build", 0)]) as agent:
        agent.ended([0])
        shrunk(agent, 1, 2)
        ends = finished(agent, tmp_path / "lost", [1, 2])
    for each in ends:
        assert each["losses"] == pytest.approx(reference["losses"], rel=1e-7)


def test_the_function_makes_the_model_once(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    with started(jobs, tmp_path / "again", SCRIPT, world=[0], steps=2, epochs=1, again=True) as agent:
        assert agent.ended([0]) == [1]
        assert "TrackingError: ht.survive: train() makes what it tracks, and was called already" in agent.logs()


def test_without_an_agent_a_sharded_model_made_before_is_a_plain_call(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    done = jobs.run(SCRIPT, tmp_path, json.dumps({"before": "resumed"}))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ht.survive: a plain call, because no agent of holdfast started this process" in done.stderr


def test_fifty_regroups_leave_nothing_behind(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "lost").mkdir()
    used: list[list[Used]] = []
    with started(jobs, tmp_path / "lost", SCRIPT, world=[0, 1], epochs=10**6) as agent:
        agent.await_said([0, 1], "can_go_on", generation=0)
        for _ in range(50):
            shrunk(agent, 0, 1)
            agent.await_said([0, 1], "went_on", generation=agent.generation)
            used.append([Used.by(agent.workers[each].pid) for each in (0, 1)])
    leave_nothing(used)


HSDP = {
    "each shard has a living replica": ((1, 2), True, 7),
    "both replicas of a shard are lost": ((1, 3), True, 6),
    "an object of the program's own may differ": ((1, 2), False, 6),
}


@pytest.mark.parametrize(("lost", "nothing", "step"), HSDP.values(), ids=HSDP)
def test_hsdp_goes_on_with_the_replicas_that_fit(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    lost: tuple[int, int],
    nothing: bool,
    step: int,
) -> None:
    """2 × 2 ranks, then 1 × 2. Without a replica the state of the step before is in memory, whatever the mesh is."""
    case = {"exact": True, "kind": "hsdp", "world": [0, 1, 2, 3], "nothing of its own": nothing}
    reference = undisturbed(jobs, tmp_path / "reference", SCRIPT, **case)
    with started(jobs, tmp_path / "lost", SCRIPT, **case, faults=[(rank, "backward", 7) for rank in lost]) as agent:
        agent.ended(lost)
        left = [each for each in range(4) if each not in lost]
        shrunk(agent, *left)
        ends = finished(agent, tmp_path / "lost", left)
    for own, other in zip(ends, reference, strict=False):
        calls = calls_of(own)
        is_kept(calls)
        assert [(world, began) for *_, world, began, _, _ in calls] == [(4, 0), (2, step)]
        assert own["weights"] == pytest.approx(other["weights"], rel=1e-7)


FOUR = [0, 1, 2, 3]
SPARE = {"exact": True, "kind": "hsdp", "world": FOUR, "multiple": 2, "nothing of its own": True}


def test_ranks_that_do_not_fit_wait_as_spares_until_they_do(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    """A second loss comes when the spare and the replacement have no state in their own memory yet: no step is lost."""
    reference = undisturbed(jobs, tmp_path / "reference", SCRIPT, **SPARE)
    faults = [(1, "backward", 5), (0, "begin", 9, "wait"), (0, "backward", 11)]
    with started(jobs, tmp_path / "lost", SCRIPT, **SPARE, faults=faults) as agent:
        agent.ended([1])
        shrunk(agent, 0, 2, 3)
        agent.until((tmp_path / "lost/fault.1").exists, "two ranks train")
        assert agent.logs().count("rank 2 waits as a spare: ranks= lets 2 train") == 1
        ready(agent, 1, world=FOUR)
        agent.release(FOUR)
        (tmp_path / "lost/go on after 9").touch()
        agent.await_said(FOUR, "waits", generation=3)
        agent.go(FOUR)
        agent.ended([0])
        shrunk(agent, 1, 2, 3)
        ends = finished(agent, tmp_path / "lost", [1, 2])
    calls = [calls_of(each) for each in ends]
    found = [[(world, step) for _, _, world, step, *_ in each] for each in calls]
    assert found == [[(4, 9), (2, 11)], [(4, 0), (2, 5), (4, 9), (2, 11)]]
    for each in calls:
        is_kept(each)
    for own, other in zip(ends, reference[1:], strict=False):
        assert own["weights"] == pytest.approx(other["weights"], rel=1e-7)


def test_a_spare_ends_with_the_others(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    with started(jobs, tmp_path / "lost", SCRIPT, **SPARE, faults=[(1, "forward", 5)]) as agent:
        agent.ended([1])
        shrunk(agent, 0, 2, 3)
        finished(agent, tmp_path / "lost", [0, 2])
        assert agent.ended([3]) == [0]
    assert not (tmp_path / "lost/end.3").exists()


def test_ranks_that_do_not_fit_at_the_start_wait_as_spares(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    reference = undisturbed(jobs, tmp_path / "reference", SCRIPT, **SPARE)
    with started(jobs, tmp_path / "three", SCRIPT, **{**SPARE, "world": [0, 1, 2]}) as agent:
        ends = finished(agent, tmp_path / "three", [0, 1])
        assert agent.ended([2]) == [0]
        assert agent.logs().count("rank 2 waits as a spare: ranks= lets 2 train") == 1
    for each in ends:
        assert [world for _, _, world, *_ in calls_of(each)] == [2]
        assert each["weights"] == pytest.approx(reference[0]["weights"], rel=1e-7)


def test_too_few_ranks_for_a_model_wait_for_a_replacement(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    case = {"world": [0, 1], "multiple": 2}
    reference = undisturbed(jobs, tmp_path / "reference", SCRIPT, **case)
    with started(jobs, tmp_path / "lost", SCRIPT, **case, faults=[(1, "forward", 4)]) as agent:
        agent.ended([1])
        shrunk(agent, 0)
        agent.until(lambda: "rank 0 waits as a spare: ranks= lets 0 train" in agent.logs(), "rank 0 waits")
        ready(agent, 1, world=[0, 1])
        agent.release([0, 1])
        agent.await_said([0, 1], "waits", generation=3)
        agent.go([0, 1])
        ends = finished(agent, tmp_path / "lost", [0, 1])
    same_training(ends, reference)


def test_too_few_ranks_for_a_model_do_not_wait_for_ever(jobs: WarmJobs, tmp_path: Path) -> None:  # noqa: F811
    with started(jobs, tmp_path / "one", SCRIPT, world=[0], multiple=2, **{"too few wait": 0.0}) as agent:
        assert agent.ended([0]) == [1]
        assert "are too few, so none trains, and no others came within 0 s" in agent.logs()


REPLICAS = {
    "HSDP": (
        "hsdp",
        [(1, "forward", 5), (0, "backward", 8), (1, "save", 11), (3, "optimizer", 13), (2, "between steps", 15)],
    ),
    "DDP": ("ddp", [(0, "backward", 5), (1, "forward", 7), (0, "optimizer", 10), (2, "between steps", 14)]),
}


@pytest.mark.parametrize(("kind", "losses"), REPLICAS.values(), ids=REPLICAS)
def test_no_step_is_lost_where_each_part_has_a_living_replica(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    losses: Losses,
) -> None:
    """Dropout, too: the random numbers of the lost rank are known. One is lost when it copies the state of step 12."""
    monkeypatch.setenv("HOLDFAST_SURVIVE", "wait")
    world = [0, 1, 2, 3] if kind == "hsdp" else [0, 1, 2]
    case = {"world": world, "kind": kind, "drawn": True, "memory": 12, "nothing of its own": True}
    reference = undisturbed(jobs, tmp_path / "reference", SCRIPT, **case)
    agent, ends = with_replacements(jobs, tmp_path / "lost", SCRIPT, losses, **case)
    assert lost_steps(agent) == dict.fromkeys(range(2, len(losses) + 2), 0)
    same_training(ends, reference)


def test_a_memory_slot_that_was_added_for_a_loss_in_a_save_is_removed_again(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank is killed when it has copied the state of step 6: for the others, that of step 3 is the newest that is
    whole, so that of step 5, which they leave alone, needs a slot of its own."""
    monkeypatch.setenv("HOLDFAST_SURVIVE", "wait")
    case = {"world": FOUR, "kind": "hsdp", "nothing of its own": True, "slots": True}
    agent, ends = with_replacements(jobs, tmp_path / "lost", SCRIPT, [(1, "save", 5)], **case)
    assert lost_steps(agent) == {2: 0}
    for local_rank, end in zip(FOUR, ends, strict=True):
        usual, added = [[f"{local_rank}.{number}" for number in range(count)] for count in (2, 3)]
        assert end["slots"][-1] == usual
        assert (added in end["slots"]) is (local_rank != 1), "those that were there have needed it"


def test_no_step_is_lost_if_one_replica_has_its_gradients_and_others_do_not(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0 and 2 have the first shards, 1 and 3 the second. Rank 0 is killed before its optimizer, when 2 has all
    its gradients, and 1 waits for those of 3: rank 2 must not step."""
    monkeypatch.setenv("HOLDFAST_SURVIVE", "wait")
    case = {"world": [0, 1, 2, 3], "kind": "hsdp", "plain": True, "memory": 100, "nothing of its own": True}
    reference = undisturbed(jobs, tmp_path / "reference", SCRIPT, **case)
    losses = [[0, "gradients", 5, 2]]
    agent, ends = with_replacements(jobs, tmp_path / "lost", SCRIPT, losses, **case, late=[3, 5])
    assert lost_steps(agent) == {2: 0}
    same_training(ends, reference)


OTHERS = {
    "tensor parallel, compiled": {"kind": "tensor", "compiled": True},
    "FSDP2, compiled": {"compiled": True},
    "pipeline": {"kind": "pipeline", "world": [0, 1]},
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_models_with_replacements(
    jobs: WarmJobs,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: dict[str, Any],
) -> None:
    """A process that goes on has compiled as many graphs as one that was not disturbed."""
    monkeypatch.setenv("HOLDFAST_SURVIVE", "wait")
    world = case.get("world", WORLD)
    losses: Losses = [(1, "backward", 5), (0, "forward", 8)]
    if case.get("kind") == "pipeline":  # its ranks are not all in a pass at the same time
        losses = [(1, "gradients", 5), (0, "between steps", 8)]
    reference = undisturbed(jobs, tmp_path / "reference", SCRIPT, **{"world": world, **case})
    ends = with_replacements(jobs, tmp_path / "lost", SCRIPT, losses, **{"world": world, **case}).ends
    same_training(ends, reference)
