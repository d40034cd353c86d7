"""A loss or a state that is not finite: noticed in every life, marked, passed over, and never all that is kept."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast.train as ht
from holdfast.protocol.errors import IntervalError, NotFiniteError
from holdfast.train.accumulation import NO_LOSS
from holdfast.train.loss_watch import BAD_STEPS_MAX, SKIPPED_STEPS_MAX, LossWatch, _Reading, is_watched
from holdfast.train.snapshots import folder as folders
from holdfast.train.snapshots.changes import Keep
from holdfast.train.snapshots.in_process import InProcessStaging
from tests.support.limits import until
from tests.train.conftest import SCRIPTS, damage
from tests.warm import Warm

pytestmark = pytest.mark.xdist_group("torch lives")
SCRIPT = SCRIPTS / "replica_ranks.py"
NAN, INF = float("nan"), float("inf")


def watched(metrics: Iterable[dict[str, Any]], *, stepped: bool = True) -> int:
    """The step in which the watch ends the job; 0: it does not."""
    watch = LossWatch()
    for step, each in enumerate(metrics, 1):
        try:
            watch.step(step, each, stepped=stepped)
        except NotFiniteError:
            return step
    return 0


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([NAN] * 5, 3),
        ([1.0] + [NAN] * 5, 4),
        ([1.0, INF, -INF, NAN], 4),
        ([NAN, NAN, 1.0, INF, INF, 2.0], 0),
        ([1.0, 1.0, NAN], 0),
        ([torch.tensor(NAN)] * 3, 3),
        ([torch.tensor([NAN])] * 3, 3),
        ([torch.tensor([NAN, 1.0])] * 3, 0),
        (["nan"] * 2 + [None] * 9, 0),
        ([10**400] * 5, 0),
        ([torch.tensor(INF, dtype=torch.bfloat16, requires_grad=True)] * 3, 3),
    ],
)
def test_three_losses_in_a_row_end_the_job(losses: list[Any], ends: int) -> None:
    assert watched({"loss": each} for each in losses) == ends


def test_a_loss_that_was_not_trained_with_does_not_count() -> None:
    """The program calls `loss.backward()`, and reports `micro.loss`: its training is sound."""
    model = nn.Linear(3, 2)

    def losses() -> Iterable[dict[str, Any]]:
        for _ in range(5):
            with ht.accumulate(model, 1) as micro:
                model(torch.ones(3)).sum().backward()
            yield {"loss": micro.loss}

    with pytest.warns(ht.GuardWarning, match=r"write micro\.backward\(loss\) in place of loss\.backward") as told:
        assert watched(losses()) == 0
    assert len(told) == 1
    assert watched([{"loss": float(NO_LOSS)}] * 3) == 3, "a number of its own cannot be told from a loss"


@pytest.mark.parametrize("name", ["loss", "train_loss", "Loss/train", "loss_d", "nll_loss", "validity_loss"])
def test_losses_of_training_are_watched(name: str) -> None:
    assert is_watched(name)
    assert watched([{name: NAN, "accuracy": 1.0}] * 3) == BAD_STEPS_MAX


@pytest.mark.parametrize(
    "name", ["val_loss", "loss/val", "best_loss", "Loss/Test", "eval-loss", "min loss", "accuracy", "ppl"]
)
def test_other_metrics_are_not(name: str) -> None:
    assert not is_watched(name)
    assert watched([{name: INF}] * 20) == 0


def test_one_loss_of_several_that_is_finite_is_enough() -> None:
    assert watched([{"loss": 1.0, "aux_loss": NAN}] * 20) == 0
    assert watched([{"loss": NAN, "aux_loss": INF}] * 20) == BAD_STEPS_MAX


def test_steps_that_a_scaler_skips_may_be_many() -> None:
    assert watched([{"loss": INF}] * (SKIPPED_STEPS_MAX - 1), stepped=False) == 0
    assert watched([{"loss": INF}] * 2 * SKIPPED_STEPS_MAX, stepped=False) == SKIPPED_STEPS_MAX


# --- whole lives ------------------------------------------------------------------------------------------------------


class Run:
    """A model whose weights can be poisoned."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.model.register_buffer("mask", torch.tensor([0.0, -INF]))  # not what training changes
        self.model.frozen = nn.Parameter(torch.tensor([INF]), requires_grad=False)
        self.optimizer = torch.optim.AdamW([self.model.weight, self.model.bias], lr=0.1)
        self.snaps = ht.Snapshots(folder, **{"every": None, "memory_every": None, **options})
        self.snaps.track(model=self.model, optimizer=self.optimizer)
        self.resumed = self.snaps.resume()

    def steps(self, count: int, *, poison: bool = False, told: bool = True) -> None:
        for _ in range(count):
            loss = self.model(torch.ones(1, 3)).square().sum() * (NAN if poison else 1.0)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.snaps.step(**({"loss": loss} if told else {}))

    def await_written(self) -> None:
        def is_written() -> bool:
            assert self.snaps._saving is not None
            self.snaps._saving.gather_errors()
            return not self.snaps._saving.busy

        until(is_written, "the saver has written")


def committed(folder: Path) -> dict[int, bool | None]:
    return {each.step: each.manifest.finite for each in folders.survey(folder).committed}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.train.snapshots_api.open_tier", lambda **_: InProcessStaging())


@pytest.mark.usefixtures("plain")
@pytest.mark.filterwarnings("ignore:.*not finite after step")
@pytest.mark.parametrize("every", [None, "1 steps", "2 steps"])
@pytest.mark.parametrize("memory_every", [None, 1, 2])
def test_a_first_life_is_watched_whatever_the_intervals(tmp_path: Path, every: Any, memory_every: int | None) -> None:
    run = Run(tmp_path, every=every, memory_every=memory_every)
    run.steps(30)
    with pytest.raises(NotFiniteError, match="not finite in steps 31 to 33"):
        run.steps(9, poison=True)
    run.snaps._abandon()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("where", ["weight", "moment"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_the_last_finite_snapshot_stays_and_is_preferred(tmp_path: Path, where: str, value: float) -> None:
    run = Run(tmp_path, keep=Keep(last=1))
    run.steps(2)
    run.snaps.save(wait=True)
    assert committed(tmp_path) == {2: True}
    weight = run.model.weight.detach()
    good = weight.clone()
    (weight if where == "weight" else run.optimizer.state[run.model.weight]["exp_avg"])[1, 1] = value
    for _ in range(3):
        run.snaps.state.step += 1
        with pytest.warns(RuntimeWarning, match=r"model\.weight|optimizer\.state\.weight\.exp_avg"):
            run.snaps.save(wait=True)
        run.snaps._check_background(run.snaps._saving)  # type: ignore[arg-type]
    run.snaps.close()
    assert committed(tmp_path) == {2: True, 5: False}

    with pytest.warns(RuntimeWarning, match="passed over: step_000000005.0001: it has values that are not finite"):
        again = Run(tmp_path, keep=Keep(last=1))
    assert again.resumed is not None
    assert (again.resumed.step, len(again.resumed.skipped)) == (2, 1)
    assert torch.equal(again.model.weight, good)
    again.steps(1)
    again.snaps.save(wait=True)
    again.snaps.close()
    assert committed(tmp_path)[3] is True  # older than the one that was passed over, and preferred
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = Run(tmp_path)
    assert last.resumed is not None
    assert last.resumed.step == 3
    last.snaps.close()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("where", ["weight", "moment"])
def test_with_stop_a_value_that_is_not_finite_ends_the_job_and_is_not_saved(tmp_path: Path, where: str) -> None:
    run = Run(tmp_path, options=ht.SnapshotOptions(nonfinite="stop"))
    run.steps(2)
    run.snaps.save(wait=True)
    run.steps(1)
    poisoned = run.model.weight.detach() if where == "weight" else run.optimizer.state[run.model.weight]["exp_avg"]
    poisoned[1, 1] = NAN
    name = "model.weight" if where == "weight" else "optimizer.state.weight.exp_avg"
    with pytest.raises(NotFiniteError, match=f"{name} of rank 0 has values that are not finite after step 3"):
        run.snaps.save(wait=True)
    run.snaps._abandon()
    assert committed(tmp_path) == {2: True}


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("how", ["step", "close"])
def test_with_stop_the_next_save_and_the_end_raise(tmp_path: Path, how: str) -> None:
    """The script does not wait for the save in which the value is found."""
    run = Run(tmp_path, every="2 steps", memory_every=1, options=ht.SnapshotOptions(nonfinite="stop"))
    run.steps(3, told=False)
    run.await_written()
    run.steps(1, poison=True, told=False)
    said = r"(model\.weight|optimizer\.state\.weight\.exp_avg) of rank 0 has values that are not finite after step 4\n"
    if how == "step":
        run.await_written()
    with pytest.raises(NotFiniteError, match=said):
        run.steps(1, told=False) if how == "step" else run.snaps.close()
    run.snaps._abandon()
    assert committed(tmp_path) == {2: True}


@pytest.mark.usefixtures("plain")
def test_a_search_includes_what_training_has_begun_to_change(tmp_path: Path) -> None:
    """A layer that is frozen at first, as in a gradual unfreezing."""
    run = Run(tmp_path)
    run.model.frozen.requires_grad_(True)
    run.steps(1)
    with pytest.warns(RuntimeWarning, match=r"model\.frozen of rank 0 has values that are not finite after step 1"):
        run.snaps.save(wait=True)
    run.snaps.close()


def test_an_unknown_reaction_is_refused() -> None:
    with pytest.raises(IntervalError, match="nonfinite='ignore'"):
        ht.SnapshotOptions(nonfinite="ignore")  # type: ignore[arg-type]


@pytest.mark.usefixtures("fsdp_on_cpus")
@pytest.mark.parametrize("action", ["report", "stop", "stop at the end"])
def test_the_first_rank_is_named_with_tensor_and_step(warm: Warm, tmp_path: Path, action: str) -> None:
    """A shard of rank 1, in memory after each step, and on the disk after every second one. The savers find it while they
    write step 4; after step 5 all ranks know."""
    found = warm.found(SCRIPT, "poisoned", str(tmp_path), action)
    text = "model.first.weight of rank 1 has values that are not finite after step 4"
    said = found["said"]
    if action.startswith("stop"):
        assert [each.startswith(f"HF412 {text}") for each in said] == [True, action == "stop", action == "stop"]
        assert [4, False] not in found["finite"]
    else:
        assert text in said[0]
        assert said[1:] == ["", ""]
        assert [4, False] in found["finite"]
    # Step 4 has taken the slot of step 3 if step 2 was still being written, and step 5 takes it otherwise.
    assert found["resumed"] in ([2, 2, 2], [3, 3, 3]), "the newest state whose values are finite"
    assert found["resumed"] == [2, 2, 2] or action == "stop at the end"


@pytest.mark.usefixtures("plain")
def test_if_there_is_no_finite_snapshot_the_newest_is_used(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.model.weight.detach()[0, 0] = NAN
    with pytest.warns(RuntimeWarning, match="not finite after step 0"):
        run.snaps.save(wait=True)
    run.snaps.close()
    again = Run(tmp_path)
    assert again.resumed is not None
    assert again.resumed.step == 0
    again.snaps.close()


@pytest.mark.usefixtures("plain")
def test_if_the_finite_one_is_damaged_another_is_better_than_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.steps(1)
    run.snaps.save(wait=True)
    run.model.weight.detach()[0, 0] = NAN
    run.snaps.state.step += 1
    with pytest.warns(RuntimeWarning, match="not finite after step 2"):
        run.snaps.save(wait=True)
    run.snaps.close()
    damage(tmp_path / "step_000000001.0001" / "rank_00000.safetensors")
    with pytest.warns(RuntimeWarning, match="passed over"):
        again = Run(tmp_path)
    assert again.resumed is not None
    assert again.resumed.step == 2
    again.snaps.close()


@pytest.mark.usefixtures("plain")
def test_a_scaler_that_looks_for_its_scale_ends_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, every="1 steps")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    bad = 0
    for _ in range(120):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run.model(torch.ones(1, 3)).square().sum() * 2.0**60
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        bad += not bool(torch.isfinite(scaled))
        run.snaps.step(loss=scaled)
    assert bad > BAD_STEPS_MAX
    run.snaps.close()


class Arrives:
    """In place of a device's event."""

    def __init__(self) -> None:
        self.here = self.awaited = False

    def query(self) -> bool:
        return self.here

    def synchronize(self) -> None:
        self.awaited = self.awaited or not self.here


def test_a_loss_on_a_device_is_read_when_it_has_arrived_and_in_the_order_of_the_steps() -> None:
    watch, events = LossWatch(), [Arrives() for _ in range(3)]
    watch._unread.extend(_Reading(step, True, torch.tensor(False), each) for step, each in enumerate(events, 1))  # type: ignore[arg-type]
    watch.step(4, {"loss": 1.0}, stepped=True)  # is not judged before those
    events[0].here = events[1].here = True
    watch.step(5, {"loss": 1.0}, stepped=True)
    assert not any(each.awaited for each in events)
    events[2].here = True
    with pytest.raises(NotFiniteError, match="in steps 1 to 3"):
        watch.step(6, {"loss": 1.0}, stepped=True)


def test_a_save_waits_for_the_losses() -> None:
    watch = LossWatch()
    watch._unread.extend(_Reading(step, True, torch.tensor(False), Arrives()) for step in range(3))  # type: ignore[arg-type]
    with pytest.raises(NotFiniteError):
        watch.read_all()
