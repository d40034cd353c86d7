"""What ranks say to each other over a store, also one in which the dead have left what they said."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Subset

import holdfast.train as ht
from holdfast.protocol.errors import (
    DataError,
    HoldfastError,
    SaverLostError,
    SnapshotBusyError,
    SnapshotError,
    SnapshotFolderError,
    SnapshotIncompleteError,
    SnapshotWriteError,
    StateMismatchError,
)
from holdfast.train import tracked
from holdfast.train.agreement import FailedSaves, Peers, RankFailure, Timekeeper
from holdfast.train.guards import GuardWarning
from holdfast.train.quarantine import Patience
from holdfast.train.resuming import Resumer
from holdfast.train.save import SaveRules, Saving
from holdfast.train.snapshots import changes
from holdfast.train.snapshots.in_process import InProcessStaging
from holdfast.train.snapshots.lease import owner
from holdfast.train.state import Tracker
from holdfast.train.taken_folder import TakenFolder, take_folder
from holdfast.train.tracked import Choice, Compared
from tests.support.limits import limit_s

WORLD = 3


def together(store: Any, talk: Callable[[Peers], Any], patience_s: float = 120.0) -> list[Any]:
    """Every rank in a thread of its own."""
    with ThreadPoolExecutor(WORLD) as pool:
        said = [pool.submit(lambda rank: talk(Peers.meeting(store, rank, WORLD, patience_s)), r) for r in range(WORLD)]
        return [each.result() for each in said]


def greet(word: str, peers: Peers) -> list[Any]:
    return peers.all_gather(f"{word} {peers.rank}")


def test_everybody_hears_everybody() -> None:
    def talk(peers: Peers) -> list[Any]:
        return [peers.all_gather(peers.rank), peers.broadcast(peers.rank), peers.scatter([7, 8, 9]), peers.gather("x")]

    everyone = [[0, 1, 2], 0]
    store = dist.HashStore()
    for _ in range(2):  # another life: torchrun keeps the store
        assert together(store, talk) == [[*everyone, 7, ["x"] * 3], [*everyone, 8, []], [*everyone, 9, []]]


def test_what_the_dead_have_said_is_nobody_s_answer() -> None:
    """They died while they met, and in the middle of their talk."""
    store = dist.HashStore()
    for rank in range(1, WORLD):
        store.set(f"hello/{rank}", "dead")
        store.set(f"1/{rank}", '"dead"')
    store.set("dead", "prefix")
    for turn in range(1, 5):
        store.set(f"{turn}!", '"dead"')
        store.set(f"prefix/{turn}!", '"dead"')
    together(store, lambda peers: peers.rank or peers.broadcast("left unread"))
    for word in ("one", "two"):
        assert together(store, partial(greet, word)) == [[f"{word} {rank}" for rank in range(WORLD)]] * WORLD


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set("hello/1", "dead")
    with pytest.raises(SnapshotIncompleteError, match=r"rank 1 sent nothing for 0\.2 s"):
        Peers.meeting(store, 0, 2, 0.2)


def test_everybody_is_told_who_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that hangs is named on the others, too, though these have waited for rank 0 alone."""
    monkeypatch.setattr("holdfast.train.agreement.RANK_0_FIRST_S", limit_s(1))

    def talk(peers: Peers) -> Any:
        if peers.rank == 2:
            return "hangs"
        with pytest.raises(SnapshotIncompleteError, match="rank 2 sent nothing") as told:
            peers.all_gather("x")
        return str(told.value)

    assert together(dist.HashStore(), talk, limit_s(1))[2] == "hangs"
    monkeypatch.setattr("holdfast.train.agreement.RANK_0_FIRST_S", 0.2)
    with pytest.raises(SnapshotIncompleteError, match="rank 0 sent nothing"):
        Peers.meeting(dist.HashStore(), 1, 2, 0.2)


class Rank:
    """One rank's saves, without a process of its own."""

    def __init__(self, folder: Path, peers: Peers) -> None:
        self.tracker = Tracker()
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight), nn.init.zeros_(model.bias)  # equal on all ranks
        self.tracker.add({"model": model})
        clock = Timekeeper(None)
        taken = TakenFolder(folder, None, 0, 1, "", "", "")
        self.saving = Saving(self.tracker, peers, InProcessStaging(), clock, taken, SaveRules(2))

    def save(self, *, demanded: bool = False) -> str:
        """What came of it, once it is written."""
        self.tracker.state.step += 1
        try:
            self.saving.save(durable=True, metrics={}, demanded=demanded)
        except SnapshotError as error:
            return f"step {self.tracker.state.step}: {type(error).__name__}"
        self.saving.tier._join()
        return "saved"


def three_saves(folder: Path, peers: Peers) -> list[str]:
    rank = Rank(folder, peers)
    return [rank.save() for _ in range(3)]


def test_what_fails_on_one_rank_alone_is_raised_on_all_at_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank = changes.write_rank

    def full_on_one(request: changes.SaveRequest, data: Any) -> Any:
        if request.rank == 1:
            changes.refuse(request, "No space left")
            raise SnapshotWriteError("No space left")
        return write_rank(request, data)

    saves = partial(three_saves, tmp_path)
    monkeypatch.setattr(changes, "write_rank", full_on_one)
    with pytest.warns(RuntimeWarning, match="rank 1: No space left\n1 of 2") as said:
        assert together(dist.HashStore(), saves) == [["saved", "saved", "step 3: SnapshotWriteError"]] * WORLD
    assert len(said) == 1
    monkeypatch.undo()
    assert together(dist.HashStore(), saves) == [["saved"] * 3] * WORLD


def test_a_state_that_one_rank_cannot_store_is_said_by_all(tmp_path: Path) -> None:
    """Also when the first plan is made, in which the ranks wait for each other."""

    class Own:
        def __init__(self, state: Any) -> None:
            self.state = state

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    def talk(peers: Peers) -> str:
        rank = Rank(tmp_path, peers)
        rank.tracker.add({"own": Own({"f": len if peers.rank == 1 else 0})})
        with pytest.raises(HoldfastError, match=r"own\['f'\]: a builtins") as told:
            rank.saving.plan()
        return str(told.value).splitlines()[0][:14]

    assert together(dist.HashStore(), talk) == ["rank 1 failed:", "own['f']: a bu", "rank 1 failed:"]


def test_every_rank_is_told_what_was_skipped(tmp_path: Path) -> None:
    def resume(peers: Peers) -> Any:
        rank = Rank(tmp_path, peers)
        resumed = Resumer(tmp_path, rank.tracker, peers, InProcessStaging(), False, Patience(20, 3)).run()
        assert resumed is not None
        return resumed

    together(dist.HashStore(), partial(three_saves, tmp_path))
    paths = [tmp_path / f"step_00000000{step}.0001" for step in (1, 2, 3)]
    (paths[2] / "MANIFEST.json").write_text("{")
    (paths[1] / "rank_00001.safetensors").write_bytes(b"short")
    one, *others = together(dist.HashStore(), resume)
    assert (one.step, [each.split(":")[0] for each in one.skipped]) == (1, [paths[1].name, paths[2].name])
    assert others == [one, one]


def test_what_another_rank_of_a_pipeline_has_is_not_left_over() -> None:
    """Each rank has its stage; what none has is, and what one lacks."""
    saved = {f"model.{stage}" for stage in "abcd"}

    def talk(peers: Peers) -> str:
        held = {f"model.{'abc'[peers.rank]}"}
        mine = Compared(frozenset(["model"]), held, {}, sorted(saved - held))
        if peers.rank == 1:
            mine.missing = {"model": ["model.new"]}
        with pytest.raises(StateMismatchError) as told:
            tracked.together(peers, mine, Choice())
        fit = tracked.together(peers, mine, Choice.of(strict=False, only=None, optional=()))
        assert fit.missing == {"model.new"}
        return str(told.value)

    said = together(dist.HashStore(), talk)
    assert len(set(said)) == 1
    assert said[0].startswith(
        "tracked now, and not in the snapshot: model.new\nin the snapshot, and not tracked now: model.d\n"
    )


def test_a_rank_that_cannot_hand_over_its_part_lets_the_others_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for it for ten minutes."""
    persist = InProcessStaging.persist

    def lost(self: InProcessStaging, request: changes.SaveRequest) -> None:
        if request.rank == 2:
            raise SaverLostError("the saver cannot be reached")
        persist(self, request)

    monkeypatch.setattr(InProcessStaging, "persist", lost)
    with pytest.warns(RuntimeWarning, match="rank 2: the saver cannot be reached"):
        said = together(dist.HashStore(), partial(three_saves, tmp_path))
    assert said == [["saved", "saved", "step 3: SaverLostError"]] * WORLD


def test_a_save_that_one_rank_makes_alone_is_told_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`if rank == 0: snaps.save()`: the others go on, and wait for rank 0 in their next collective."""
    monkeypatch.setattr("holdfast.train.agreement.GUARD_S", 0.2)
    told = threading.Event()
    warn = warnings.warn

    def noted(message: Any, *rest: Any, **more: Any) -> None:
        told.set()
        warn(message, *rest, **more)

    def talk(peers: Peers) -> str:
        rank = Rank(tmp_path, peers)
        if peers.rank:
            assert told.wait(limit_s(20))  # rank 0 has told it while it waits
        return rank.save(demanded=True)

    monkeypatch.setattr(warnings, "warn", noted)
    with pytest.warns(
        GuardWarning, match=r"rank 0 has waited 0\.2 s in snaps\.save\(\) for rank 1, 2.*\n.*if rank == 0"
    ):
        assert together(dist.HashStore(), talk) == ["saved"] * WORLD


@pytest.mark.parametrize("call", ["", "ht.process_group()"], ids=["resume", "process_group"])
def test_ranks_that_do_not_come_to_meet_are_told_soon(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr("holdfast.train.agreement.MEETING_GUARD_S", 0.2)
    named = {"call": call} if call else {}
    where = re.escape(call or "ht.Snapshots (its resume(), or its first step())")
    with (
        pytest.warns(GuardWarning, match=rf"rank 0 has waited 0\.2 s in {where} for rank 1, 2"),
        pytest.raises(SnapshotIncompleteError),
    ):
        Peers.meeting(dist.HashStore(), 0, WORLD, 0.5, **named)


def test_saves_of_different_steps_are_not_mixed(tmp_path: Path) -> None:
    def talk(peers: Peers) -> str:
        rank = Rank(tmp_path, peers)
        rank.tracker.state.step = 5 * (peers.rank == 0)
        return rank.save()

    assert [each[-13:] for each in together(dist.HashStore(), talk)] == ["SnapshotError"] * WORLD
    assert list(tmp_path.iterdir()) == []


# --- failed saves are counted once each and end the job only when there are too many in a row -------------------------


NOTHING: list[list[str]] = []
FULL = [[SnapshotWriteError.code, "No space left"]]
NOT_COME = [[SnapshotIncompleteError.code, "rank 1: No space left"]]


def fail(saves: FailedSaves) -> RankFailure | None:
    saves.handed_over()
    return saves.reported([NOTHING, FULL], busy=True)


def test_so_many_in_a_row_are_fatal() -> None:
    saves = FailedSaves(3)
    said = [fail(saves) for _ in range(3)]
    assert [each is not None and each.fatal for each in said] == [False, False, True]
    assert said[0].text == "rank 1: No space left\n1 of 3 failed saves in a row (failed_saves_max=); training goes on."


def test_a_save_that_succeeds_ends_the_row() -> None:
    saves = FailedSaves(2)
    for _ in range(3):
        assert fail(saves) is not None
        saves.handed_over()
        assert saves.reported([NOTHING, NOTHING], busy=True) is None  # it may still fail
        assert saves.reported([NOTHING, NOTHING], busy=False) is None
    saves.handed_over()
    saves.reported([FULL, NOTHING], busy=False)
    last = fail(saves)
    assert last.fatal


def test_a_failure_that_rank_0_notices_later_counts_once() -> None:
    saves = FailedSaves(2)
    assert fail(saves) is not None
    assert saves.reported([NOT_COME, NOTHING], busy=False) is None
    saves.handed_over()
    both = saves.reported([NOT_COME, FULL], busy=False)
    assert both.code == SnapshotWriteError.code  # the cause, not what follows of it
    assert both.fatal


def test_ranks_that_never_came_are_a_failure_of_their_own() -> None:
    saves = FailedSaves(1)
    saves.handed_over()
    told = saves.reported([NOT_COME, NOTHING], busy=False)
    assert told.fatal


def test_trouble_between_saves_is_a_warning_and_another_job_is_the_end() -> None:
    saves = FailedSaves(1)
    between = saves.reported([FULL, NOTHING], busy=False)
    assert not between.fatal
    busy = FailedSaves(9).reported([[*FULL, [SnapshotBusyError.code, "taken over"]], NOTHING], busy=False)
    assert busy == RankFailure(SnapshotBusyError.code, "taken over", fatal=True)


def test_a_save_that_cannot_begin_counts() -> None:
    saves = FailedSaves(2)
    assert not saves.not_begun(SnapshotFolderError("vanished")).fatal
    assert saves.not_begun(SnapshotFolderError("vanished")).fatal
    assert FailedSaves(9).not_begun(SnapshotBusyError("taken over")).fatal
    demanded = FailedSaves(9).not_begun(SnapshotFolderError("vanished"), demanded=True)
    assert demanded == RankFailure(SnapshotFolderError.code, "vanished", fatal=True), (
        "it does not say that training goes on"
    )


# --- one cause for all ranks, and one folder ---------------------------------------------------------------------------


NO_SPACE = "cannot write step 4: No space left on device"


class Refused(InProcessStaging):
    """A tier whose last save fails."""

    def __init__(self, error: SnapshotError | None) -> None:
        super().__init__()
        self._error = error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


def saving(peers: Peers, tier: InProcessStaging) -> Saving:
    taken = TakenFolder(Path("unused"), None, 0, 0, "", "", "")
    return Saving(Tracker(), peers, tier, Timekeeper(None), taken, SaveRules(5))


def ended(work: Callable[[], object]) -> tuple[str, str]:
    """The code and the text of the error with which it ends."""
    try:
        work()
    except SnapshotError as error:
        return error.code, str(error)
    return "", ""


@pytest.mark.parametrize("culprit", range(WORLD))
def test_all_ranks_raise_the_cause_and_not_what_follows_from_it(culprit: int) -> None:
    def talk(peers: Peers) -> tuple[str, str]:
        mine = (
            SnapshotWriteError(NO_SPACE)
            if peers.rank == culprit
            else SnapshotIncompleteError("rank 0 gave up this save")
        )
        return ended(saving(peers, Refused(mine)).wait)

    code = SnapshotWriteError.code
    expected = [(code, NO_SPACE if rank == culprit else f"rank {culprit}: {NO_SPACE}") for rank in range(WORLD)]
    assert together(dist.HashStore(), talk) == expected


def test_a_save_that_is_incomplete_and_nothing_else_is_said_as_it_is() -> None:
    def talk(peers: Peers) -> tuple[str, str]:
        return ended(saving(peers, Refused(SnapshotIncompleteError("late") if peers.rank == 1 else None)).wait)

    code = SnapshotIncompleteError.code
    assert together(dist.HashStore(), talk) == [(code, "rank 1: late"), (code, "late"), (code, "rank 1: late")]


def ours(length: int = 40, shuffle: bool = True, **options: Any) -> ht.DataLoader:
    return ht.DataLoader(range(length), 4, shuffle, **options)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lambda rank: ours(length=40 + rank), "ranks 1 and 0 have datasets of 41 and 40 samples"),
        (lambda rank: ours(seed=rank), "ranks 1 and 0 have seed=1 and seed=0"),
        (lambda rank: ours(shuffle=rank < 2), "ranks 2 and 0 have the orders sequential and shuffled-1"),
        (lambda rank: ht.DataLoader(Subset(range(9), [rank, 8])), "ranks 1 and 0 have Subsets of other samples"),
        (lambda rank: ht.DistributedSampler(range(9), seed=rank), "ranks 1 and 0 have seed=1 and seed=0"),
        (lambda rank: ours(seed=rank, ranks=(0, 1)), None),
        (lambda rank: ours(num_workers=rank), None),
        (lambda rank: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], 0.1), 1 + rank), None),
    ],
)
def test_ranks_that_divide_different_data_are_all_refused(data: Callable[[int], Any], words: str | None) -> None:
    def talk(peers: Peers) -> str | None:
        try:
            Tracker(others={"data": data(peers.rank)}).check_data(peers)
        except DataError as error:
            return str(error).partition(" among them, and ")[2].partition(":")[0]
        return None

    assert together(dist.HashStore(), talk) == [words] * WORLD


def test_at_the_end_a_rank_learns_the_cause_from_whoever_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all ranks need to close: rank 2 is gone."""
    monkeypatch.setattr("holdfast.train.save.CAUSE_S", limit_s(20))

    def talk(peers: Peers) -> str:
        mine = saving(peers, InProcessStaging())
        if peers.rank == 0:
            return str(mine.cause_of(SnapshotWriteError(NO_SPACE)))
        return str(mine.cause_of(SnapshotIncompleteError("gave up"))) if peers.rank == 1 else "gone"

    assert together(dist.HashStore(), talk) == ["None", f"rank 0: {NO_SPACE}", "gone"]


def test_at_the_end_nobody_may_know_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.train.save.CAUSE_S", 0.05)
    cause = lambda peers: saving(peers, InProcessStaging()).cause_of(SnapshotIncompleteError("gave up"))  # noqa: E731
    assert together(dist.HashStore(), cause) == [None] * WORLD
    assert cause(Peers(0, 1)) is None


def test_at_the_end_the_cause_may_have_been_reported_before() -> None:
    """The save before has failed for it, and was reported to all ranks; the last one is only incomplete on each."""

    def talk(peers: Peers) -> tuple[str, str]:
        mine = saving(peers, InProcessStaging())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            mine._take_failure({"code": SnapshotWriteError.code, "text": NO_SPACE, "fatal": False})
        cause = mine.cause_of(SnapshotIncompleteError("gave up"))
        return (cause.code, str(cause)) if cause is not None else ("", "")

    assert together(dist.HashStore(), talk) == [(SnapshotWriteError.code, NO_SPACE)] * WORLD


@pytest.mark.parametrize("blind", [1, 2])
def test_a_snapshot_folder_that_is_not_shared_is_noticed_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: int
) -> None:
    monkeypatch.setattr("holdfast.train.snapshots.lease.SEEN_S", 0.1)

    def talk(peers: Peers) -> tuple[str, str]:
        own = tmp_path / ("local" if peers.rank == blind else "shared")
        own.mkdir(exist_ok=True)
        return ended(lambda: take_folder(own, peers, None))

    for code, text in together(dist.HashStore(), talk):
        assert code == SnapshotFolderError.code
        assert f"what rank 0 writes there, rank {blind} on " in text
    assert owner(tmp_path / "shared") is None, "it is given back"


def test_a_shared_folder_is_seen_by_all(tmp_path: Path) -> None:
    def talk(peers: Peers) -> int:
        taken = take_folder(tmp_path, peers, None)
        if taken.lease is not None:
            taken.lease.release()
        return taken.number

    assert together(dist.HashStore(), talk) == [1] * WORLD
