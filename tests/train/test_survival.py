"""ht.survive: ranks are lost at every place of a training; the others go on in their processes, and nothing is lost.

The test stands for the agent (tests/support/fake_agent.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from torch.distributed import TCPStore

from holdfast.protocol.errors import ProcessGroupError
from holdfast.train.agreement import Peers
from holdfast.train.snapshots.slots import committed_slots
from holdfast.train.survival import Agreement, RankReport
from tests.support.fake_agent import FakeAgent
from tests.warm import Warm
from tests.warm_jobs import WarmJobs

SCRIPTS = Path(__file__).parent / "scripts"
SURVIVOR = SCRIPTS / "survivor.py"
SCRIPT_OF_HABITS = SCRIPTS / "habits.py"
UNDER_TORCHRUN = SCRIPTS / "under_torchrun.py"
WORLD = (0, 1, 2)
Ends = list[dict[str, Any]]
Losses = list[tuple[int, str, int]]
"""Local rank, place, and steps so far."""

pytestmark = [pytest.mark.xdist_group("torch survivors"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def jobs(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmJobs]:
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a process's first one opens what stays open
    modules = ("holdfast.train.survival", "holdfast.train.snapshots_api", "holdfast.train.guards")
    with WarmJobs(warm, tmp_path_factory.mktemp("jobs"), *modules) as made:
        yield made


def started(
    jobs: WarmJobs,
    folder: Path,
    script: Path = SURVIVOR,
    *,
    world: Collection[int] = WORLD,
    per_node: int | None = None,
    **case: Any,
) -> FakeAgent:
    folder.mkdir(exist_ok=True)
    agent = FakeAgent(jobs, folder, script, folder, json.dumps({"apart": True} | case), per_node=per_node)
    agent.start(world)
    return agent


def finished(agent: FakeAgent, folder: Path, local_ranks: Collection[int] = WORLD) -> Ends:
    """What each rank wrote at its end."""
    assert agent.ended(local_ranks) == [0] * len(local_ranks), agent.logs()
    found = [json.loads((folder / f"end.{each}").read_text()) for each in local_ranks]
    assert len({str(each["parameters"]) for each in found}) == 1, "all ranks have the same"
    return found


def undisturbed(
    jobs: WarmJobs, folder: Path, script: Path = SURVIVOR, *, world: Collection[int] = WORLD, **case: Any
) -> Ends:
    with started(jobs, folder, script, world=world, **case) as agent:
        return finished(agent, folder, world)


def replaced(agent: FakeAgent, *lost: int, world: Collection[int] = WORLD) -> None:
    """These ranks have ended: as with `--survive wait`, the others wait for the replacements."""
    agent.ended(lost)
    left = [each for each in world if each not in lost]
    agent.await_said(left, "can_go_on", generation=agent.generation if agent.generation > 1 else 0)
    sent(agent, *lost, world=world)
    agent.await_said(world, "can_go_on", generation=agent.generation)


def sent(agent: FakeAgent, *lost: int, world: Collection[int] = WORLD) -> None:
    """These ranks have ended, perhaps before all were able to go on: the others wait, and all are sent on
    with the replacements."""
    agent.ended(lost)
    coming = agent.generation + 1
    left = [each for each in world if each not in lost]
    agent.release(left)
    agent.await_said(left, "waits", generation=coming)
    ready(agent, *lost, world=world)
    agent.release(lost)
    agent.await_said(lost, "waits", generation=coming)
    agent.go(world)


def shrunk(agent: FakeAgent, *left: int) -> None:
    """These go on without the others."""
    coming = agent.generation + 1
    agent.release(left)
    agent.await_said(left, "waits", generation=coming)
    agent.go(left)
    agent.await_said(left, "can_go_on", generation=coming)


def grown(agent: FakeAgent, waits: Path, *lost: int) -> None:
    """Replacements join between two steps; one of the others does none before this file is there."""
    ready(agent, *lost)
    coming = agent.generation + 1
    agent.release(WORLD)
    waits.touch()
    agent.await_said(WORLD, "waits", generation=coming)
    agent.go(WORLD)
    agent.await_said(WORLD, "can_go_on", generation=coming)


def ready(agent: FakeAgent, *lost: int, world: Collection[int] = WORLD) -> None:
    agent.forget("ready")
    for each in lost:
        agent.replace(each, len(world))
    agent.await_said(lost, "ready")


def lost_steps(agent: FakeAgent) -> dict[int, int]:
    """How many steps the ranks of each generation had to do again."""
    return {said["generation"]: said["steps_lost"] for _, said in agent.heard if said["is"] == "went_on"}


class Used(NamedTuple):
    """What a process has. A thread that ends, or a file that is open for a moment, may be among it: of several
    measurements the least counts."""

    descriptors: int
    threads: int
    pages: int
    """In memory."""

    @classmethod
    def by(cls, pid: int) -> Used:
        place = Path(f"/proc/{pid}")
        pages = int((place / "statm").read_text().split()[1])
        return cls(len(os.listdir(place / "fd")), len(os.listdir(place / "task")), pages)


def same(ends: Ends, others: Ends, but: str = "") -> None:
    """Each rank ended as that one of another job did, but for the worlds it has seen."""
    for own, other in zip(ends, others, strict=True):
        assert [name for name in own if own[name] != other[name] and name not in ("worlds", but)] == []


class Replaced(NamedTuple):
    """A job in which each lost rank was replaced, and that has ended."""

    agent: FakeAgent
    ends: Ends


def with_replacements(
    jobs: WarmJobs,
    folder: Path,
    script: Path,
    losses: Sequence[Sequence[Any]],
    *,
    world: Collection[int] = WORLD,
    others: Sequence[Sequence[Any]] = (),
    **case: Any,
) -> Replaced:
    """One rank after the other is lost and replaced, and no rank refuses to go on. `others`: faults that cost no rank."""
    with started(jobs, folder, script, world=world, **case, faults=[*losses, *others]) as agent:
        for rank, *_ in losses:
            replaced(agent, rank, world=world)
        ends = finished(agent, folder, world)
    assert agent.said("refuse") == set()
    return Replaced(agent, ends)


def is_exact_with_replacements(jobs: WarmJobs, folder: Path, script: Path, losses: Losses, **case: Any) -> Ends:
    """Each rank ends as in an undisturbed job, whose ends are returned."""
    reference = undisturbed(jobs, folder / "reference", script, **case)
    same(with_replacements(jobs, folder / "lost", script, losses, **case).ends, reference)
    return reference


def end_of_the_last(jobs: WarmJobs, folder: Path, script: Path, losses: Losses, **case: Any) -> dict[str, Any]:
    """Rank 0's end in a job in which all others are lost, one after the other. In each step all have equal weights."""
    left = list(range(len(losses) + 1))
    with started(jobs, folder, script, world=left, **case, faults=losses) as agent:
        for rank, _, _ in losses:
            agent.ended([rank])
            left.remove(rank)
            shrunk(agent, *left)
        (end,) = finished(agent, folder, left)
    assert agent.said("refuse") == set()
    assert end["worlds"] == list(range(len(losses) + 1, 0, -1))
    weights: dict[str, set[str]] = {}
    for path in folder.glob("steps.*"):
        for step_and_world, digest in (line.rsplit(maxsplit=1) for line in path.read_text().splitlines()):
            weights.setdefault(step_and_world, set()).add(digest)
    assert len(weights) >= end["step"]
    assert [step for step, digests in weights.items() if len(digests) > 1] == []
    return end


LOOP = [
    (1, "forward", 2),
    (2, "backward", 4),
    (1, "optimizer", 7),
    (1, "loader", 9),
    (2, "group", 12),
    (2, "backward", 18),
    (1, "forward", 22),
]
SAVES = [(1, "loader's process", 20), (1, "save", 4), (2, "save", 11)]
"""The first while one of its processes fetches ahead; then when only the memory is due, and in snaps.save()."""
LATE = [[0, "gradients", 7, "compute"], [2, "boundary", 7, "be late"]]
"""Rank 1 is lost. Rank 0 is interrupted before its optimizer's step; rank 2 completes the step, and keeps its state at
the time at which it would be interrupted."""
MICRO_BATCHES = [(1, "optimizer", 7), (2, "forward", 14), (1, "backward", 23)]
FIRST = [[rank, "gradients", 0, "compute"] for rank in (0, 2)]
"""These have done the backward pass of the first step, and are interrupted before its end: it is done again."""
JOBS = {
    "the loop": ({"group": 12}, LOOP, LATE),
    "micro-batches": ({"batch": 2}, MICRO_BATCHES, [[0, "gradients", 7, "compute"]]),
    "the first step": ({}, [(1, "gradients", 0)], FIRST),
    "saves and loaders": ({"processes": 2, "disk": 12}, SAVES, []),
}


@pytest.mark.parametrize(("case", "losses", "late"), JOBS.values(), ids=JOBS)
def test_with_replacements_every_bit_is_that_of_an_undisturbed_job(
    jobs: WarmJobs, tmp_path: Path, case: dict[str, Any], losses: list[tuple[int, str, int]], late: list[list[Any]]
) -> None:
    """Dropout, batch normalization, Adam and a scheduler; the others complete the step of the rank that was lost after
    its optimizer's step."""
    reference = undisturbed(jobs, tmp_path / "reference", **case)
    assert [each["counts"] for each in reference] == [[-2.0]] * 3
    faults = [[*each, "kill"] for each in losses]
    agent, ends = with_replacements(jobs, tmp_path / "lost", SURVIVOR, faults, others=late, **case)
    assert lost_steps(agent) == dict.fromkeys(range(2, len(losses) + 2), 0)
    same(ends, reference)
    assert {each["a traceback"] for each in ends} == {1}, "it names the rank once, however often the world has changed"


def test_a_second_training_function_survives_losses_as_the_first_does(jobs: WarmJobs, tmp_path: Path) -> None:
    """The second one begins at step 8, with half the rate. Each replacement comes from the beginning of the script through
    the first."""
    case = {"steps": 4, "more": 3}
    losses = [(1, "forward", 3), (2, "forward", 10), (1, "optimizer", 13), (2, "gradients", 17)]
    reference = undisturbed(jobs, tmp_path / "reference", **case)
    assert [each["counts"] for each in reference] == [[-5.0]] * 3
    faults = [[*each, "kill"] for each in losses]
    agent, ends = with_replacements(jobs, tmp_path / "lost", SURVIVOR, faults, **case)
    assert lost_steps(agent) == dict.fromkeys(range(2, len(losses) + 2), 0)
    same(ends, reference)


def test_a_replacement_does_not_train_in_a_function_that_the_others_have_left(jobs: WarmJobs, tmp_path: Path) -> None:
    """Its gradients would become a part of theirs."""
    case = {"steps": 4, "more": 1, "drawn": False, "always": True, "faults": [[1, "forward", 10, "kill"]]}
    with started(jobs, tmp_path, **case) as agent:
        replaced(agent, 1)
        assert agent.ended([1]) == [1]
        logs = agent.logs()
    assert (
        "the other ranks are in training function 2 of these Snapshots, and this replacement trains in number 1" in logs
    )


@pytest.mark.parametrize(("other", "survived"), [("before", []), ("after", [0, 1, 2])])
def test_with_other_snapshots_a_training_function_is_a_plain_call(
    jobs: WarmJobs, tmp_path: Path, other: str, survived: list[int]
) -> None:
    """A replacement would join in the resume() of the first ones, wherever the others are."""
    with started(jobs, tmp_path, steps=2, epochs=1, other=other) as agent:
        finished(agent, tmp_path)
        can_go_on = [rank for rank, said in agent.heard if said["is"] == "can_go_on"]
        logs = agent.logs()
    assert sorted(can_go_on) == survived
    assert logs.count("ht.survive: a plain call, because replacements join in the resume() of other Snapshots") == 1


@dataclass
class Told:
    """All that the ranks of a world say to each other."""

    reports: list[dict[str, Any]]

    @property
    def world(self) -> int:
        return len(self.reports)

    def all_gather(self, _own: object) -> list[dict[str, Any]]:
        return self.reports


def test_ranks_in_different_training_functions_do_not_go_on_together() -> None:
    """One was lost when some had left the first function, and others had not."""
    first = RankReport(8, 1, True, [0, 3], 2, {}, [], [], "", [], [], [], {}, None, [])
    second = replace(first, function=2)
    newcomer = replace(first, step=-1, clean=False, function=0)
    agreed = Agreement.reach(cast("Peers", Told([asdict(first), asdict(newcomer), asdict(first)])), first)
    assert (agreed.chosen.function, agreed.behind) == (1, (1,))
    with pytest.raises(ProcessGroupError, match="some ranks had begun training function 2"):
        Agreement.reach(cast("Peers", Told([asdict(first), asdict(second)])), first)
    with pytest.raises(ProcessGroupError, match="every rank that had the state of a completed step is lost"):
        Agreement.reach(cast("Peers", Told([asdict(newcomer), asdict(newcomer)])), newcomer)


def test_numbers_that_some_rank_has_replaced_are_replaced_on_all() -> None:
    """One has come into a world of another size, and got new random numbers there, and another one has not: then all are
    back in a world like the one before."""

    def keeps(*reports: RankReport) -> bool:
        return Agreement.reach(cast("Peers", Told([asdict(each) for each in reports])), reports[0]).same_numbers

    first = RankReport(8, 1, True, [0, 2], 2, {}, [], [], "", [], [], [], {}, None, [])
    second, fresh = replace(first, before=[1, 2]), replace(first, seeded=True)
    assert keeps(first, second)
    assert not keeps(fresh, second)
    assert not keeps(replace(first, before=[0, 3]), second)
    assert keeps(fresh, replace(second, step=9)), "a step was done with them"
    assert keeps(first, replace(second, before=[0, 1], step=-1, clean=False)), "a replacement had none"


def test_replicas_are_compared_in_each_world_and_a_loss_is_no_difference(jobs: WarmJobs, tmp_path: Path) -> None:
    """Compared after each step. The first rank is lost while the others wait for its digests."""
    reference = undisturbed(jobs, tmp_path / "reference", checked=1)
    losses = [(1, "check", 3), (2, "backward", 8), (1, "optimizer", 12), (0, "gradients", 17)]
    faults = [[*each, "kill"] for each in losses]
    agent, ends = with_replacements(jobs, tmp_path / "lost", SURVIVOR, faults, checked=1)
    assert "are not compared" not in agent.logs()
    assert agent.logs().count("model.passes had come to") == 1, "by rank 1's replacement: 8 steps were known by then"
    same(ends, reference, but="buffers")


def test_replicas_are_compared_among_fewer_ranks(jobs: WarmJobs, tmp_path: Path) -> None:
    faults = [[1, "forward", 3, "kill"], [0, "begin", 5, "wait"], [2, "gradients", 9, "flip"]]
    with started(jobs, tmp_path, checked=1, faults=faults) as agent:
        agent.ended([1])
        shrunk(agent, 0, 2)
        grown(agent, tmp_path / "go on after 5", 1)
        assert agent.ended(WORLD) == [1, 1, 1]
        logs = str(agent.logs())
    assert "ReplicasDifferError: the replicas of Net differ after step 9: rank 2 differs from ranks 0 and 1" in logs
    assert "in model.first.weight" in logs


def test_rank_0_and_then_two_ranks_at_once(jobs: WarmJobs, tmp_path: Path) -> None:
    """What rank 0's own batch did to the averages of batch normalization was in its memory alone: there the job goes on with
    those of rank 1."""
    reference = undisturbed(jobs, tmp_path / "reference")
    places = [(0, "backward", 5), (0, "optimizer", 9), (1, "forward", 20), (2, "backward", 20)]
    with started(jobs, tmp_path / "lost", faults=[[*each, "kill"] for each in places]) as agent:
        for lost in [(0,), (0,), (1, 2)]:
            replaced(agent, *lost)
        ends = finished(agent, tmp_path / "lost")
    same(ends, reference, but="buffers")


ON_THE_WAY = {
    "the replacement, while the group is made": (1, "join"),
    "the replacement, when it gets the state": (1, "received"),
    "the replacement, when it has the state": (1, "agreed"),
    "another rank, while the group is made": (2, "join"),
    "another rank, when all have the state": (2, "agreed"),
    "rank 0, when all have the state": (0, "agreed"),
}


@pytest.mark.parametrize(("rank", "where"), ON_THE_WAY.values(), ids=ON_THE_WAY)
def test_a_rank_that_is_lost_while_a_replacement_joins_costs_no_other_process_and_no_bit(
    jobs: WarmJobs, tmp_path: Path, rank: int, where: str, torch_lacks: dict[str, str]
) -> None:
    if where == "join" and torch_lacks["half a group"]:
        pytest.skip(torch_lacks["half a group"])
    reference = undisturbed(jobs, tmp_path / "reference")
    faults = [[1, "backward", 5, "kill"], [rank, where, 2, "kill"]]
    with started(jobs, tmp_path / "lost", faults=faults) as agent:
        sent(agent, 1)
        sent(agent, rank)
        agent.await_said(WORLD, "can_go_on", generation=3)
        ends = finished(agent, tmp_path / "lost")
    assert agent.said("refuse") == set()
    assert lost_steps(agent) == {3: 0}
    same(ends, reference, but="buffers" if rank == 0 else "")  # those of rank 0's own batch are lost with it


@pytest.mark.parametrize("where", ["join", "agreed"])
def test_fewer_ranks_go_on_when_another_one_is_lost_on_their_way(
    jobs: WarmJobs, tmp_path: Path, where: str, torch_lacks: dict[str, str]
) -> None:
    """Rank 0 comes back from a world of two in which it may have new random numbers already."""
    if where == "join" and torch_lacks["half a group"]:
        pytest.skip(torch_lacks["half a group"])
    (reference,) = {str(each["weights"]) for each in undisturbed(jobs, tmp_path / "reference", drawn=False)}
    faults = [[1, "forward", 3, "kill"], [2, where, 2, "kill"], [0, "begin", 5, "wait"]]
    folder = tmp_path / "lost"
    with started(jobs, folder, drawn=False, faults=faults) as agent:
        agent.ended([1])
        agent.release([0, 2])
        agent.await_said([0, 2], "waits", generation=2)
        agent.go([0, 2])
        agent.ended([2])
        shrunk(agent, 0)
        grown(agent, folder / "go on after 5", 1, 2)
        ends = finished(agent, folder)
    assert agent.said("refuse") == set()
    assert set(lost_steps(agent).values()) == {0}
    assert [each["worlds"] for each in ends] == [[3, 1, 3], [3], [3]]
    assert ends[0]["counts"] == [-2.0], "each sample was trained once in each epoch"
    assert ends[0]["weights"] == pytest.approx(json.loads(reference), rel=1e-3)


def test_fewer_ranks_do_the_same_steps_until_replacements_join(jobs: WarmJobs, tmp_path: Path) -> None:
    faults = [
        [1, "forward", 3, "kill"],
        [0, "begin", 5, "wait"],
        [0, "backward", 7, "kill"],
        [1, "begin", 9, "wait"],
        [1, "optimizer", 11, "kill"],
        [2, "forward", 13, "kill"],
        [0, "begin", 14, "wait"],
        [1, "begin", 16, "kill"],
        [2, "begin", 16, "compute"],
        [0, "begin", 18, "wait"],
        [2, "backward", 20, "stop"],
        [0, "begin", 22, "wait"],
        [1, "begin", 24, "kill"],
        [2, "forward", 24, "hold the lock"],
    ]
    (reference,) = {str(each["weights"]) for each in undisturbed(jobs, tmp_path / "reference", drawn=False)}
    folder = tmp_path / "lost"
    with started(jobs, folder, drawn=False, faults=faults) as agent:
        agent.ended([1])
        shrunk(agent, 0, 2)
        grown(agent, folder / "go on after 5", 1)

        agent.ended([0])
        shrunk(agent, 1, 2)
        grown(agent, folder / "go on after 9", 0)

        agent.ended([1])
        shrunk(agent, 0, 2)
        agent.ended([2])
        shrunk(agent, 0)
        grown(agent, folder / "go on after 14", 1, 2)

        agent.ended([1])
        shrunk(agent, 0, 2)  # rank 2 computes, and is interrupted
        grown(agent, folder / "go on after 18", 1)

        agent.until((folder / "fault.10").exists, "rank 2 is stopped")
        agent.release([0, 1])
        agent.await_said([0, 1], "waits", generation=agent.generation + 1)
        agent.kill(2)
        shrunk(agent, 0, 1)
        grown(agent, folder / "go on after 22", 2)

        agent.ended([1])
        agent.release([0, 2])
        agent.await_said([0], "waits", generation=agent.generation + 1)
        agent.kill(2)
        agent.ended([2])
        assert agent.said("waits", generation=agent.generation + 1) == {0}, "no thread of rank 2 could run"
        shrunk(agent, 0)
        ends = finished(agent, folder, [0])
        assert set(lost_steps(agent).values()) == {0}
    assert ends[0]["counts"] == [-2.0], "each sample was trained once in each epoch"
    assert ends[0]["worlds"] == [3, 2, 1, 3, 2, 3, 2, 3, 1], "of the process that replaced the first"
    assert ends[0]["weights"] == pytest.approx(json.loads(reference), rel=1e-3)


def test_ranks_that_leave_by_themselves_with_an_operation_under_way(jobs: WarmJobs, tmp_path: Path) -> None:
    """gloo's destructor waits for the operation, and each of the two for the other's end of it."""
    faults = [[1, "forward", 3, "kill"], *([rank, "forward", 3, "leave an operation"] for rank in (0, 2))]
    with started(jobs, tmp_path / "lost", faults=faults) as agent:
        agent.until(lambda: (tmp_path / "lost/fault.1").exists() and (tmp_path / "lost/fault.2").exists(), "both leave")
        shrunk(agent, 0, 2)
        finished(agent, tmp_path / "lost", (0, 2))


def test_the_loss_of_all_ranks_is_unknown_when_one_is_lost(jobs: WarmJobs, tmp_path: Path) -> None:
    """It has exchanged its gradients and not its loss, for which the others wait between optimizer and snaps.step()."""
    faults = [[1, "backward done", 3, "kill"], [0, "optimizer", 3, "pass"], [2, "optimizer", 3, "pass"]]
    with started(jobs, tmp_path / "lost", faults=faults) as agent:
        agent.ended([1])
        shrunk(agent, 0, 2)
        finished(agent, tmp_path / "lost", (0, 2))
    assert agent.said("refuse") == set()
    assert set(lost_steps(agent).values()) == {0}


def test_another_world_has_copies_before_its_first_step(jobs: WarmJobs, tmp_path: Path) -> None:
    """The next loss may take all that could survive: the state of this step is in memory, and on another node."""
    with started(jobs, tmp_path / "lost", copies=1, faults=[[1, "backward", 7, "kill"]]) as agent:
        replaced(agent, 1)
        finished(agent, tmp_path / "lost")
    for each in WORLD:
        step, error, held = json.loads((tmp_path / "lost" / f"copies.{each}").read_text())
        assert (step, error) == (7, "")
        assert {(rank, step) for rank in WORLD} <= {tuple(one) for one in held}


def test_no_rank_has_the_state_of_a_completed_step(jobs: WarmJobs, tmp_path: Path) -> None:
    """All have stepped, and none has come to snaps.step()."""
    faults = [[1, "optimizer", 5, "kill"], [0, "optimizer", 5, "pass"], [2, "optimizer", 5, "pass"]]
    with started(jobs, tmp_path / "lost", meet=5, faults=faults) as agent:
        agent.ended([1])
        agent.release([0, 2])
        agent.await_said([0, 2], "waits", generation=2)
        agent.go([0, 2])
        agent.await_said([0, 2], "refuse")
        (why,) = {message["why"] for _, message in agent.heard if message["is"] == "refuse"}
        assert "every rank was between its optimizer's step and snaps.step()" in why
        assert agent.said("can_go_on", generation=2) == set()


def test_an_exception_of_the_program_is_no_loss(jobs: WarmJobs, tmp_path: Path) -> None:
    with started(jobs, tmp_path / "lost", faults=[[1, "forward", 3, "bug"]]) as agent:
        assert agent.ended([1]) == [1]
        assert "ValueError: a bug of the program" in agent.logs()
        assert agent.said("unable") >= {1}
        assert agent.said("waits") == set()


def test_neither_is_one_that_comes_with_a_loss(jobs: WarmJobs, tmp_path: Path) -> None:
    faults = [
        [1, "forward", 3, "kill"],
        [0, "forward", 3, "bug after release"],
        [2, "forward", 3, "memory after release"],
    ]
    with started(jobs, tmp_path / "lost", faults=faults) as agent:
        agent.ended([1])
        agent.until(lambda: len([*(tmp_path / "lost").glob("awaits release.*")]) == 2, "both are in their faults")
        agent.release([0, 2])
        assert agent.ended([0, 2]) == [1, 1]
        assert "ValueError: a bug of the program" in agent.logs()
        assert "OutOfMemoryError: no memory is left" in agent.logs()
        assert agent.said("waits") == set()


def test_without_holdfast_it_is_a_plain_call(jobs: WarmJobs, tmp_path: Path) -> None:
    lines = {"plain": (SURVIVOR,), "torchrun": (UNDER_TORCHRUN, "--standalone", "--nproc-per-node", "2", SURVIVOR)}
    for name, line in lines.items():
        (tmp_path / name).mkdir()
        done = jobs.run(*line, tmp_path / name, "{}")
        assert done.returncode == 0, done.stdout + done.stderr
        ends = [json.loads(path.read_text()) for path in (tmp_path / name).glob("end.*")]
        world = 1 if name == "plain" else 2
        assert [(each["worlds"], each["counts"]) for each in ends] == [([world], [-2.0])] * world


REGROUPS = 100
GROWTH_MAX = 1.05


def test_a_hundred_regroups_leave_nothing_behind(jobs: WarmJobs, tmp_path: Path) -> None:
    (tmp_path / "lost").mkdir()
    used: list[list[Used]] = []
    with FakeAgent(jobs, tmp_path / "lost", SURVIVOR, tmp_path / "lost", json.dumps({"epochs": 10**6})) as agent:
        agent.start([0, 1])
        agent.await_said([0, 1], "can_go_on", generation=0)
        for each in (0, 1):  # their files stay open
            agent.until(lambda each=each: len(committed_slots(agent.memory.path, each)) == 2, "a state in each slot")
        for _ in range(REGROUPS):
            shrunk(agent, 0, 1)
            agent.await_said([0, 1], "went_on", generation=agent.generation)
            used.append([Used.by(agent.workers[each].pid) for each in (0, 1)])
    leave_nothing(used)


def leave_nothing(used: list[list[Used]]) -> None:
    """`used`: what each of two ranks had after each regroup. The first ones still fill what is kept."""
    third = 3 * len(used) // 10
    for number in range(2):
        early, late = (
            Used(*map(min, zip(*(each[number] for each in part), strict=True)))
            for part in (used[third : 2 * third], used[-third:])
        )
        assert late.descriptors <= early.descriptors, used
        assert late.threads <= early.threads, used
        assert late.pages < early.pages * GROWTH_MAX, used


HABITS = {
    "between micro-batches": [(1, "begin", 4), (2, "begin", 20), (1, "begin", 31)],
    "a step that the scaler skips": [(1, "optimizer", 17), (2, "begin", 18)],
    "after the scaler's update": [(1, "update", 5), (2, "gradients", 26)],
    "in an evaluation": [(1, "validation 1", 9), (2, "validation 2", 12), (1, "validation 0", 27)],
    "at an epoch's end": [(1, "end of an epoch", 12), (2, "epoch is over", 24), (1, "begin", 33)],
}


@pytest.mark.parametrize("losses", HABITS.values(), ids=HABITS)
def test_habits_of_many_scripts_lose_nothing_either(
    jobs: WarmJobs, tmp_path: Path, losses: list[tuple[int, str, int]]
) -> None:
    """See scripts/habits.py."""
    is_exact_with_replacements(jobs, tmp_path, SCRIPT_OF_HABITS, losses)
