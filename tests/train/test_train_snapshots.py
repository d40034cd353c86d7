"""Snapshots of one process: what is due, what comes back, what is said when it cannot."""

from __future__ import annotations

import errno
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast.train as ht
from holdfast import worker
from holdfast.protocol.errors import (
    IntervalError,
    NoValidSnapshotError,
    RetentionError,
    ShardingError,
    SnapshotFolderError,
    SnapshotIncompleteError,
    SnapshotMemoryError,
    SnapshotWriteError,
    TrackingError,
)
from holdfast.train import snapshots_api
from holdfast.train.agreement import Interval, Schedule, Timekeeper, crossed
from holdfast.train.pending import WherePending
from holdfast.train.reservation import foreseen_bytes
from holdfast.train.save import Saving
from holdfast.train.snapshots import disk, in_process
from holdfast.train.snapshots import folder as folders
from holdfast.train.snapshots.saver_connection import STALL
from tests.train.conftest import damage

pytestmark = pytest.mark.usefixtures("own_staging")
"""Memory and saver have jobs of their own (test_train_sharding_worlds, …_kill)."""


class Job:
    def __init__(self, folder: Path, *, width: int = 4, resume: bool = True, **options: Any) -> None:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        self.model = nn.Linear(3, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 6])
        self.snaps = ht.Snapshots(folder, **{"every": "3 steps", "memory_every": None, **options})
        self.state = self.snaps.track(model=self.model, optimizer=self.optimizer, schedule=self.schedule)
        self.resumed = self.snaps.resume() if resume else None

    def train(self, steps: int) -> None:
        for _ in range(steps):
            random.random(), np.random.rand()
            self.loss = self.model(torch.randn(5, 3)).square().mean()
            self.loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.snaps.step(loss=self.loss)

    def weights(self) -> list[float]:
        moments = [value for each in self.optimizer.state.values() for value in each.values()]
        return torch.cat([each.flatten().double() for each in (*self.model.parameters(), *moments)]).tolist()


def trained(folder: Path, steps: int) -> None:
    """A job that has come to its end."""
    job = Job(folder)
    job.train(steps)
    job.snaps.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*"))


def test_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    calm = Job(tmp_path / "calm")
    calm.train(8)
    calm.snaps.close()
    drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]
    trained(tmp_path / "broken", 7)
    assert names(tmp_path / "broken") == ["step_000000003.0001", "step_000000006.0001"]
    again = Job(tmp_path / "broken")
    assert (again.resumed.step, again.resumed.source, again.resumed.world_then) == (6, "disk", 1)
    again.train(2)
    assert again.weights() == calm.weights()
    assert again.schedule.state_dict() == calm.schedule.state_dict()
    assert [random.random(), float(np.random.rand()), torch.rand(1).item()] == drawn
    again.snaps.close()


def test_fine_tuning_begins_with_the_weights_and_a_run_id_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_id(given: str, only: list[str]) -> str:
        monkeypatch.setenv("HOLDFAST_RUN_ID", given)
        job = Job(tmp_path, resume=False)
        job.snaps.resume(only=only or None)
        job.train(1)
        job.snaps.save()
        job.snaps.close()
        return job.state.run_id

    assert run_id("pretrained", []) == "pretrained"
    assert run_id("tuned", ["model"]) == "tuned"
    assert run_id("requeued", ["model"]) == "tuned"


def test_a_damaged_snapshot_is_set_aside_and_named(tmp_path: Path) -> None:
    trained(tmp_path, 6)
    damage(tmp_path / "step_000000006.0001" / "rank_00000.safetensors")
    again = Job(tmp_path)
    assert again.resumed.step == 3
    assert len(again.resumed.skipped) == 1
    assert again.resumed.skipped[0].startswith("step_000000006.0001")
    assert (tmp_path / "bad.step_000000006.0001").is_dir()
    again.snaps.close()


@pytest.mark.parametrize("name", ["bad.step_000000006.0001", "attempt.step_000000003.0001", "gone.step_000000003.0001"])
def test_debris_alone_is_no_fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("holdfast.train.resuming.UNCHANGED_S", 0.05)
    (tmp_path / name).mkdir()
    for _ in range(2):
        with pytest.raises(NoValidSnapshotError, match=name):
            Job(tmp_path)
    job = Job(tmp_path, options=ht.SnapshotOptions(fresh_ok=True))
    assert job.resumed is None
    assert (tmp_path / name).exists() == name.startswith("bad")
    job.snaps.close()


def test_a_state_reaches_the_disk_at_a_safe_point_though_an_earlier_save_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part of a lost rank never came; that is known only while the ranks wait for the save of this state."""
    job = Job(tmp_path, every=None)
    job.train(2)
    waits: list[str] = []
    wait = Saving.wait

    def failing(saving: Saving) -> None:
        waits.append("wait")
        if len(waits) == 1:
            raise SnapshotIncompleteError("step 1 was not saved")
        wait(saving)

    monkeypatch.setattr(Saving, "wait", failing)
    job.snaps._at_safe_point = WherePending.NONE
    job.snaps._save_at_safe_point(leaves=True, nodes=1)
    assert len(waits) == 2
    assert any(name.startswith("step_000000002") for name in names(tmp_path))
    job.snaps.close()


def test_debris_goes_when_there_is_something_to_go_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.train.resuming.UNCHANGED_S", 0.05)
    trained(tmp_path, 3)
    for name in ("attempt.step_000000002.0001", "attempt.step_000000006.0001", "gone.step_000000001.0001"):
        (tmp_path / name).mkdir()
    job = Job(tmp_path)
    assert job.resumed is not None
    assert [path.name for path in tmp_path.glob("*.step_*")] == []
    job.snaps.close()


def test_a_save_that_stands_still_while_its_writer_lives_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.train.resuming.UNCHANGED_S", 0.05)
    trained(tmp_path, 4)
    path = tmp_path / "step_000000003.0001"
    path.rename(attempt := tmp_path / "attempt.step_000000003.0001")
    (tmp_path / "bad.step_000000001.0001").mkdir()
    looks = []

    def look(folder: Path) -> bool:
        seen = folders.is_being_written(folder)
        if folder == attempt:
            looks.append(seen)
            if len(looks) == 3:
                attempt.rename(path)
        return seen

    monkeypatch.setattr(
        "holdfast.train.resuming.folders", SimpleNamespace(**{**vars(folders), "is_being_written": look})
    )
    with folders.being_written(attempt):
        job = Job(tmp_path)
    assert (job.resumed.step, looks) == (3, [True] * 3)
    job.snaps.close()


def test_another_model_is_said_and_not_loaded(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    with pytest.raises(ShardingError, match=r"model\.weight has the shape \[5, 3\], and \[4, 3\]"):
        Job(tmp_path, width=5)
    assert names(tmp_path) == ["step_000000003.0001"]


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_a_warning_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_all", full)
        job.train(5)
        job.snaps._current_tier._join()
    with pytest.warns(RuntimeWarning, match="No space left.*\n1 of 5 failed saves in a row"):
        job.train(1)
    job.snaps.close()
    assert names(tmp_path) == ["step_000000006.0001"]


def test_too_many_failed_saves_in_a_row_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, options=ht.SnapshotOptions(failed_saves_max=2))
    monkeypatch.setattr(disk, "write_all", full)
    job.train(5)
    job.snaps._current_tier._join()
    with pytest.warns(RuntimeWarning, match="1 of 2"):
        job.train(3)
    job.snaps._current_tier._join()
    with pytest.raises(SnapshotWriteError, match="No space left"), job.snaps:
        job.train(1)
    assert names(tmp_path) == []


def test_the_end_says_what_is_not_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    monkeypatch.setattr(disk, "write_all", full)
    job.snaps.save()
    with pytest.raises(SnapshotWriteError):
        job.snaps.close()
    job = Job(tmp_path, memory_every=1, options=ht.SnapshotOptions(fresh_ok=True))
    job.train(3)
    job.snaps._current_tier._join()
    with pytest.warns(RuntimeWarning, match="No space left"):
        job.train(1)
    with pytest.raises(SnapshotWriteError, match="the newest state is not on the disk"):
        job.snaps.close()


def test_a_folder_that_vanishes_is_not_made_again(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    job = Job(runs)
    job.train(3)
    job.snaps._current_tier._join()
    runs.rename(tmp_path / "aside")
    with pytest.warns(RuntimeWarning, match="runs has vanished"):
        job.train(3)
    with pytest.raises(SnapshotFolderError, match="runs has vanished"):
        job.snaps.save()
    assert not runs.exists()
    (tmp_path / "aside").rename(runs)
    job.train(3)
    job.snaps.close()
    assert names(runs) == ["step_000000003.0001", "step_000000009.0001"]


def test_metrics_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    job = Job(tmp_path, resume=False, keep=ht.Keep(best=("huge", "min")))
    job.optimizer.step()
    job.snaps.step(huge=10**400, text="x", pair=torch.ones(2), loss=1, complex=1j)
    job.snaps.save(wait=True)
    job.snaps.close()
    found = folders.survey(tmp_path).newest_valid
    assert found.manifest.metadata["metrics"] == {"loss": 1.0}


def test_nothing_is_saved_while_gradients_are_pending(tmp_path: Path) -> None:
    job = Job(tmp_path, every="2 steps")
    for step in range(6):
        job.model(torch.randn(5, 3)).sum().backward()
        if step % 3 == 2:
            job.optimizer.step()
        job.snaps.step()
    job.snaps.close()
    assert names(tmp_path) == ["step_000000003.0001", "step_000000006.0001"]


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.SGD,
        lambda of: torch.optim.SGD(of, momentum=0.9),
        lambda of: torch.optim.RAdam([{"params": each, "lr": 0.1} for each in of]),
    ],
)
def test_the_memory_of_a_state_is_foreseen(make: Any, tmp_path: Path) -> None:
    """Before the first step, which makes the optimizer's state; some parameters are frozen, and one is shared."""
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 300), nn.Linear(300, 300))
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    optimizer = make(model.parameters())
    foreseen = foreseen_bytes([model], [optimizer], 1)
    assert foreseen_bytes([model], [optimizer], 2) == pytest.approx(foreseen / 2, rel=0.001)
    snaps = ht.Snapshots(tmp_path, every=None)
    snaps.track(model=model, optimizer=optimizer)
    snaps.resume()
    model(torch.randn(5, 300)).sum().backward()
    optimizer.step()
    snaps.step()
    snaps.close()
    assert snaps._saving is not None
    assert snaps._saving._layout is not None
    assert foreseen == pytest.approx(snaps._saving._layout.size_bytes, rel=1 / 32), "the spare room of a mapping"
    assert foreseen_bytes([model], [optimizer], 1) == pytest.approx(foreseen, rel=0.001)


@pytest.mark.parametrize("when", ["reserving", "stage"])  # the latter: the saver had the slot when room was taken
def test_no_room_in_memory_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def small(self: Any, *_: Any, **__: Any) -> None:
        raise SnapshotMemoryError("/dev/shm has no room")

    def reserving(self: Any, *_: Any) -> Iterator[int]:
        small(self)
        yield 1

    class Small(in_process.InProcessStaging):
        pass

    setattr(Small, when, reserving if when == "reserving" else small)
    monkeypatch.setattr(snapshots_api, "open_tier", lambda **_: Small())
    job = Job(tmp_path)
    job.train(1)
    monkeypatch.undo()
    with pytest.warns(RuntimeWarning, match="no snapshots in memory") as said:
        job.train(5)
    assert len(said) == 1
    job.snaps.close()
    assert len(names(tmp_path)) == 2


def test_the_end_waits_only_for_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saver that is stopped answers nobody; whoever has nothing with it does not ask."""

    class Stopped(in_process.InProcessStaging):
        def wait(self) -> None:
            pytest.fail("nothing is being written")

    monkeypatch.setattr(snapshots_api, "open_tier", lambda **_: Stopped())
    job = Job(tmp_path, resume=False)
    job.train(2)
    job.snaps.close()


def test_asked_to_stop_it_saves_and_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, every=None)
    job.train(2)
    monkeypatch.setattr("holdfast.worker.should_stop", lambda: True)
    with pytest.raises(SystemExit) as end, job.snaps:
        job.train(1)
    assert end.value.code == 0
    assert names(tmp_path) == ["step_000000003.0001"]


def test_calls_in_an_impossible_order(tmp_path: Path) -> None:
    snaps = ht.Snapshots(tmp_path / "late")
    with pytest.raises(TrackingError, match="nothing is tracked"):
        snaps.resume()
    snaps.track(model=nn.Linear(1, 1))
    assert snaps.resume() is None
    snaps.close()
    with pytest.raises(TrackingError, match="no state_dict"):
        ht.Snapshots(tmp_path).track(model=3)
    with pytest.raises(TrackingError, match="takes names"):
        ht.Snapshots(tmp_path).track(nn.Linear(1, 1))
    with pytest.raises(TrackingError, match=r"ht\.DataLoader"):
        ht.Snapshots(tmp_path).track(loader=torch.utils.data.DataLoader(range(3)))
    job = Job(tmp_path)
    job.train(3)
    with pytest.raises(TrackingError, match=r"before resume\(\)"):
        job.snaps.track(more=nn.Linear(1, 1))
    with pytest.raises(TrackingError, match="once"):
        job.snaps.resume()
    job.snaps.close()
    with pytest.raises(TrackingError, match="closed"):
        job.snaps.save()
    with pytest.raises(TrackingError, match="closed"):
        job.snaps.resume()
    for fresh_ok in (False, True):  # its steps would be older than those that are there, and retention's
        with pytest.raises(TrackingError, match="call resume"):
            Job(tmp_path, resume=False, options=ht.SnapshotOptions(fresh_ok=fresh_ok)).train(1)


def test_who_never_calls_step_is_told(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.model(torch.randn(5, 3)).sum().backward()
    job.optimizer.step()
    with pytest.warns(RuntimeWarning, match=r"snaps\.step\(\) was never called"):
        job.snaps.close()


def test_the_end_of_all_epochs_is_saved(tmp_path: Path) -> None:
    for options, expected in (({}, ["step_000000003.0001", "step_000000004.0001"]), ({"every": None}, [])):
        folder = tmp_path / str(len(options))
        job = Job(folder, **options)
        for _ in job.state.epochs(2):
            job.train(2)
        job.snaps.close()
        assert names(folder) == expected
    again = Job(tmp_path / "0")
    assert list(again.state.epochs(2)) == []
    again.snaps.close()
    assert names(tmp_path / "0") == ["step_000000003.0001", "step_000000004.0001"]


def epoch_ends(folder: Path, *, save: bool, stop_in: int = 9) -> tuple[list[int], float]:
    """Three epochs of two batches; at the end of each something that must happen once. Returns where it did, and its sum."""
    weights, ends = nn.Linear(3, 1), []
    optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = ht.DataLoader(torch.arange(4), batch_size=2)
    snaps = ht.Snapshots(folder, every="2 steps" if not save else None, memory_every=None)
    state = snaps.track(model=weights, optimizer=optimizer, decay=decay, loader=loader)
    snaps.resume()
    for epoch in state.epochs(3, save=save):
        for _ in loader:
            optimizer.step()
            snaps.step()
        if epoch == stop_in:
            snaps.close()
            break
        decay.step()
        ends.append(epoch)
    else:
        snaps.close()
    return ends, float(optimizer.param_groups[0]["lr"])


def test_how_many_steps_there_will_be_is_reported_and_how_long_a_save_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[int, int | None]] = []
    monkeypatch.setattr(worker, "at_step", lambda step, of=None: said.append((step, of)))
    epoch_ends(tmp_path, save=False, stop_in=1)
    assert [each for each in said if each[1] is not None] == [(0, 6), (2, 6)]
    said.clear()
    epoch_ends(tmp_path, save=False)
    assert (4, 6) in said, "after a resume, too"
    records = [json.loads(path.read_text()) for path in tmp_path.glob("step_*/rank_00000.json")]
    assert min(each["note"][STALL] for each in records) > 0


def test_what_stands_at_an_epoch_s_end_happens_once_in_what_is_saved(tmp_path: Path) -> None:
    """Saved after the epoch's last batch: the rest of the body runs again, on a state in which it has not run."""
    assert epoch_ends(tmp_path, save=False, stop_in=1) == ([0], 0.5)
    assert epoch_ends(tmp_path, save=False) == ([1, 2], 0.125)
    assert epoch_ends(tmp_path, save=False) == ([], 0.125)  # the end was saved, though its step was before


def test_saved_at_each_epoch_s_end(tmp_path: Path) -> None:
    assert epoch_ends(tmp_path, save=True, stop_in=2) == ([0, 1], 0.25)
    assert names(tmp_path) == ["step_000000002.0001", "step_000000004.0001"]
    assert epoch_ends(tmp_path, save=True) == ([2], 0.125)
    assert names(tmp_path)[-1] == "step_000000006.0001"
    assert epoch_ends(tmp_path, save=True) == ([], 0.125)
    assert names(tmp_path)[-1] == "step_000000006.0001"


@pytest.mark.parametrize(
    "options",
    [
        {"memory_every": 0},
        {"memory_every": "2min"},
        {"memory_every": True},
        {"keep": 3},
        {"copies": 2},
        {"options": {}},
    ],
)
def test_options_that_mean_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises((IntervalError, RetentionError), match=next(iter(options))):
        ht.Snapshots(tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


# --- when it is due ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"failed_saves_max": 0},
        {"suspect_within_steps": -1},
        {"restarts_without_progress": 1.5},
        {"copies_bytes_per_s": 0},
    ],
)
def test_operating_options_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(IntervalError, match=next(iter(options))):
        ht.SnapshotOptions(**options)


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("90s", Interval(seconds=90)),
        ("2min", Interval(seconds=120)),
        (" 1.5 h ", Interval(seconds=5400)),
        ("1d", Interval(seconds=86400)),
        ("500 steps", Interval(steps=500)),
        ("1step", Interval(steps=1)),
        (None, Interval()),
    ],
)
def test_intervals(text: str | None, interval: Interval) -> None:
    assert Interval.of(text) == interval


@pytest.mark.parametrize(
    "text", ["", "2 weeks", "-1s", "min", "steps", "0 steps", "1.5 steps", "-5 steps", "0s", b"5min", [5], Interval(5)]
)
def test_what_is_no_interval(text: Any) -> None:
    with pytest.raises(IntervalError, match=r'write a number and s, min, h, d or steps: "5min", "6h", "500 steps"$'):
        Interval.of(text)


@pytest.mark.parametrize("number", [300, 0.5, "300", " 300 "])
def test_a_number_without_a_unit_is_neither_seconds_nor_steps(tmp_path: Path, number: Any) -> None:
    line = rf'^every={re.escape(repr(number))} has no unit: write every="[\d.]+ s" or every="[\d.]+ steps"$'
    with pytest.raises(IntervalError, match=line):
        ht.Snapshots(tmp_path / "a", every=number)
    assert not (tmp_path / "a").exists()


def test_a_multiple_that_was_passed_is_not_forgotten() -> None:
    assert crossed(10, 9, 10)
    assert crossed(13, 9, 10)
    assert not crossed(13, 10, 10)
    schedule = Schedule(Interval(steps=10), 4)
    schedule.start(7)
    assert [step for step in range(8, 13) if schedule.durable_due(step)] == [10, 11, 12]
    schedule.saved(12, durable=True)
    assert not schedule.durable_due(13)


@pytest.mark.parametrize("pace_s", [0.001, 0.1, 3.0, 500.0])
def test_rank_0_is_asked_seldom_and_is_not_late(pace_s: float) -> None:
    clock = Timekeeper(120.0)
    clock.start(0, 0.0)
    step, asked, ask_at = 0, 0, 1
    while True:
        step += 1
        now_s = step * pace_s
        if step >= ask_at:
            asked += 1
            if clock.due(now_s):
                break
            ask_at = clock.next_ask(step, now_s)
    assert now_s <= 120.0 + 2 * pace_s
    assert asked <= 20
