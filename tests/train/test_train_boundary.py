"""What a step changes before its optimizer does comes back, and what a replacement needs is kept."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast.train as ht
from holdfast.protocol.errors import DataStateError
from holdfast.train.agent_channel import _calls_a_module
from holdfast.train.boundary import Boundary, Buffers, noted_forward
from holdfast.train.state import Tracker
from holdfast.train.survival import _take_over_unsaved, _unsaved_buffers

pytestmark = pytest.mark.xdist_group("torch")


def tracked(
    folder: Path, model: nn.Linear | None = None, **objects: object
) -> tuple[Boundary, ht.TrainState, nn.Linear]:
    """`model`: a new one by default."""
    model = nn.Linear(2, 2) if model is None else model
    snaps = ht.Snapshots(folder, every=None, memory_every=None)
    state = snaps.track(model=model, **objects)
    return Boundary(snaps._tracker, ""), state, model


def test_parameters_need_gradients_again_as_after_the_step(tmp_path: Path) -> None:
    """A GAN is interrupted while its discriminator is frozen: neither this rank nor a replacement may keep that."""
    boundary, state, model = tracked(tmp_path)
    model.bias.requires_grad_(False)
    boundary.mark(state)
    model.requires_grad_(False)
    model.bias.requires_grad_(True)
    boundary.rewind(state)
    assert [each.requires_grad for each in (model.weight, model.bias)] == [True, False]


def test_buffers_come_back_also_when_a_step_puts_others_in_their_place() -> None:
    model = nn.BatchNorm1d(3)
    buffers = Buffers([model])
    model(torch.randn(8, 3))
    buffers.keep()
    kept = {name: each.clone() for name, each in model.named_buffers()}
    model.running_mean = torch.full((3,), 9.0)
    model(torch.randn(8, 3))
    buffers.restore()
    assert all(torch.equal(each, kept[name]) for name, each in model.named_buffers())


@pytest.mark.parametrize("change", ["wider", "narrower", "longer", "none", "appears", "sparse", "in place"])
def test_every_buffer_comes_back_whatever_a_step_makes_of_one(change: str) -> None:
    """As caches and queues that grow: the others, BatchNorm's, come back, too."""
    model = nn.BatchNorm1d(3)
    first: torch.Tensor | None = torch.ones(4)
    if change == "narrower":
        first = torch.ones(4, dtype=torch.float64)
    elif change == "appears":
        first = None
    elif change == "sparse":
        first = torch.ones(4).to_sparse()
    model.register_buffer("cache", first)
    buffers = Buffers([model])
    for _ in range(2):
        buffers.keep()
    mean = model.running_mean.clone()
    later = {
        "wider": torch.full((4,), 2.0, dtype=torch.float64),
        "narrower": torch.full((4,), 2.0),
        "longer": torch.full((9,), 2.0),
        "none": None,
        "appears": torch.full((4,), 2.0),
        "sparse": torch.full((4,), 2.0).to_sparse(),
    }
    if change == "in place":
        model.cache.resize_(100).fill_(2.0)
    else:
        model.cache = later[change]
    model.register_buffer("late", torch.zeros(1))
    model(torch.randn(8, 3))
    interrupted = buffers.copies()

    buffers.restore()
    assert torch.equal(model.running_mean, mean)
    assert not hasattr(model, "late")
    if first is None:
        assert model.cache is None
    else:
        assert (model.cache.dtype, model.cache.shape) == (first.dtype, torch.Size([4]))
        assert torch.equal(model.cache.to_dense(), torch.ones(4, dtype=first.dtype))

    buffers.restore_changed(interrupted)
    assert not torch.equal(model.running_mean, mean)
    assert model.late is not None
    assert (model.cache is None) == (change == "none")
    if change != "none":
        assert model.cache.to_dense().eq(2.0).all()


def test_what_a_program_s_schedule_has_seen_comes_back(tmp_path: Path) -> None:
    class Seeing(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.seen: list[int] = []
            super().__init__(optimizer)

        def get_lr(self) -> list[float]:
            self.seen.append(self.last_epoch)
            return [1.0 / len(self.seen)] * len(self.optimizer.param_groups)

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    boundary, state, _ = tracked(tmp_path, model, optimizer=optimizer, schedule=(schedule := Seeing(optimizer)))
    boundary.mark(state)
    for _ in range(2):
        optimizer.step()
        schedule.step()
        assert schedule.seen == [0, 1]
        boundary.rewind(state)
        assert schedule.seen == [0]


def test_the_schedule_and_the_numbers_of_a_step_that_was_interrupted_come_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1)),
    ]
    boundary, state, _ = tracked(tmp_path, model, optimizer=optimizer, first=schedules[0], second=schedules[1])
    optimizer.step()
    for each in schedules:
        each.step()
    state.step, state.epoch = 7, 2
    boundary.mark(state)
    state.step, state.epoch = 8, 3
    expected = [each.state_dict() for each in schedules], optimizer.param_groups[0]["lr"], torch.get_rng_state()
    for each in schedules:
        each.step()
    torch.rand(1)
    boundary.rewind(state)
    assert (state.step, state.epoch) == (7, 2)
    assert [each.state_dict() for each in schedules] == expected[0]
    assert optimizer.param_groups[0]["lr"] == expected[1]
    assert torch.equal(torch.get_rng_state(), expected[2])


def test_a_parameter_group_that_the_step_has_added_goes_again(tmp_path: Path) -> None:
    """The program adds it once more."""
    model = nn.Linear(2, 2)
    optimizer, other = torch.optim.SGD([model.weight], lr=1.0), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    boundary, state, _ = tracked(tmp_path, model, optimizer=optimizer, other=other)
    boundary.mark(state)
    optimizer.add_param_group({"params": [model.bias], "lr": 0.5})
    other.param_groups[0]["lr"] = 0.1
    boundary.rewind(state)
    assert [group["lr"] for each in (optimizer, other) for group in each.param_groups] == [1.0, 2.0]
    optimizer.add_param_group({"params": [model.bias], "lr": 0.5})
    boundary.mark(state)
    boundary.rewind(state)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5]


def test_the_options_come_back_also_when_a_state_was_loaded(tmp_path: Path) -> None:
    """torch puts other dictionaries in the place of an optimizer's groups then."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    boundary, state, _ = tracked(tmp_path, model, optimizer=optimizer, schedule=schedule)
    optimizer.load_state_dict(optimizer.state_dict())
    boundary.mark(state)
    optimizer.param_groups[0]["lr"] = 7.0
    boundary.rewind(state)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert schedule.optimizer is optimizer


@pytest.mark.parametrize("replaced", [False, True], ids=["", "of a program that has replaced it"])
def test_a_forward_pass_is_noted_and_that_of_a_copy_is_not(replaced: bool) -> None:
    model, rows = nn.Linear(2, 2), torch.randn(3, 2)
    if replaced:
        model.forward = lambda _, plain=model.forward: plain(rows)  # type: ignore[method-assign]
    noted = []
    with noted_forward(model, lambda: noted.append(1)):
        expected = model(rows)
        copies = [copy.deepcopy(model)] if replaced else [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert noted == [1]
        for each in copies:
            with torch.no_grad():
                each.weight.zero_()
                each.bias.zero_()
            assert torch.equal(each(rows), torch.zeros(3, 2)) or replaced
        assert torch.equal(model(rows), expected)
        assert noted == [1, 1]
    assert torch.equal(model(rows), expected)
    assert noted == [1, 1]
    assert ("forward" in model.__dict__) == replaced


def test_the_position_and_the_epoch_are_those_of_the_last_step(tmp_path: Path) -> None:
    """Batches of an optimizer step that is not complete come again, and so does the end of an epoch."""
    loader = ht.DataLoader(range(6), 2)
    boundary, state, _ = tracked(tmp_path, loader=loader)
    batches = iter(loader)
    next(batches)
    loader.trained()
    boundary.mark(state)
    expected = boundary.positions()
    assert expected["loader"]["cursor"] == 2
    assert len(list(batches)) == 2
    state.epoch = 1
    boundary.rewind(state)
    assert (state.epoch, boundary.positions()) == (0, expected)


class Stream:
    """Data of a script's own that follow the world: the three methods, and no more."""

    def __init__(self) -> None:
        self.place, self.read = (0, 1), [0]

    def regroup(self, rank: int, world: int) -> None:
        self.place = rank, world

    def state_dict(self) -> dict[str, list[int]]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.read = state["read"]


def test_data_of_ones_own_follow_the_world(tmp_path: Path) -> None:
    stream = Stream()
    boundary, state, _ = tracked(tmp_path, stream=stream)
    stream.read.append(3)
    boundary.mark(state)
    stream.read.append(4)  # of a step that is interrupted
    tracker = boundary._tracker
    tracker.regroup(1, 3)
    tracker.set_positions(boundary.positions())
    assert (stream.place, stream.read) == ((1, 3), [0, 3])


def test_a_sampler_that_cannot_tell_what_was_trained_is_asked_again_later(tmp_path: Path) -> None:
    sampler = ht.DistributedSampler(range(6), 1, 0)
    boundary, state, _ = tracked(tmp_path, sampler=sampler)
    next(iter(sampler))
    boundary.mark(state)
    with pytest.raises(DataStateError, match="trained"):
        boundary.positions()


def test_a_scaler_goes_back_and_forgets_a_step_that_was_begun(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    boundary, state, model = tracked(tmp_path, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def begin(loss: float) -> None:
        scaler.scale(model(torch.ones(2)).sum() * loss).backward()
        scaler.unscale_(optimizer)

    boundary.mark(state)
    begin(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    boundary.rewind(state)
    assert scaler._scale is None, "it had made no step"
    optimizer.zero_grad()
    begin(1.0)
    boundary.mark(state)
    assert scaler.get_scale() == 8.0
    boundary.rewind(state)
    scaler.unscale_(optimizer)


def test_a_rank_that_goes_on_from_its_own_last_step_keeps_its_own_buffers(tmp_path: Path) -> None:
    """Also when it has taken all else from another rank."""
    norm = nn.BatchNorm1d(2)
    boundary, state, _ = tracked(tmp_path, norm=norm)
    norm(torch.randn(4, 2))
    own = norm.running_mean
    assert own is not None
    boundary.mark(state)
    expected = own.clone()
    boundary.rewind(state)
    own.fill_(9.0)
    boundary.complete(state.step)
    assert torch.equal(own, expected)


@pytest.mark.parametrize(
    "change",
    [lambda model: model.weight.mul_(0.5), lambda model: setattr(model.weight, "data", model.weight.data * 0.5)],
    ids=["in place", "another tensor"],
)
def test_parameters_that_changed_before_the_optimizer_s_step_are_noticed(
    tmp_path: Path, change: Callable[[nn.Linear], object]
) -> None:
    boundary, state, model = tracked(tmp_path)  # without an optimizer
    boundary.mark(state)
    model(torch.ones(2)).sum().backward()
    assert boundary.untouched()
    with torch.no_grad():
        change(model)
    assert not boundary.untouched()


def test_a_parameter_in_the_place_of_another_is_noticed_and_watched_then(tmp_path: Path) -> None:
    """As the codebook of a VQ-VAE, which many forward passes make anew."""
    boundary, state, model = tracked(tmp_path)
    boundary.mark(state)
    model.weight = nn.Parameter(model.weight.detach() * 0.5, requires_grad=False)
    assert not boundary.untouched()
    boundary.mark(state)
    assert boundary.untouched()
    with torch.no_grad():
        model.weight.mul_(0.5)
    assert not boundary.untouched()


class Annealed(nn.Linear):
    """It counts its forward passes, and has more to keep than it copies in each step."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: dict[str, list[int]] = {"calls": []}
        self.large = torch.zeros(1 << 14)

    def get_extra_state(self) -> dict[str, object]:
        return {"seen": self.seen, "large": self.large}

    def set_extra_state(self, state: dict[str, dict[str, list[int]]]) -> None:
        self.seen = state["seen"]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen["calls"].append(len(rows))
        return super().forward(rows)


def test_the_extra_state_of_a_module_comes_back(tmp_path: Path) -> None:
    model = Annealed()
    boundary, state, _ = tracked(tmp_path, model)
    model(torch.ones(3, 2))
    boundary.mark(state)
    for _ in range(2):
        model(torch.ones(4, 2))
        assert boundary.untouched()
        boundary.rewind(state)
        assert model.seen == {"calls": [3]}
    model.large.add_(1)
    assert not boundary.untouched(), "a large tensor is not copied"


def test_a_module_that_is_added_is_noticed_and_kept_then(tmp_path: Path) -> None:
    boundary, state, model = tracked(tmp_path)
    boundary.mark(state)
    model.added = nn.BatchNorm1d(2)
    assert not boundary.untouched()
    boundary.mark(state)
    model.added(torch.randn(4, 2))
    assert boundary.untouched(), "only buffers have changed"
    boundary.rewind(state)
    assert model.added.running_mean is not None
    assert not model.added.running_mean.any()


def test_a_scaler_that_is_switched_off_has_nothing_to_keep(tmp_path: Path) -> None:
    boundary, state, _ = tracked(tmp_path, scaler=torch.amp.GradScaler("cpu", enabled=False))
    state.step = 3
    boundary.mark(state)
    state.step = 4
    boundary.rewind(state)
    assert state.step == 3


def test_of_a_step_that_others_completed_the_buffers_of_the_forward_pass_are_ones_own(tmp_path: Path) -> None:
    """Averages are counted after the optimizer's step: that count is the others'."""
    model, norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
    averages = torch.optim.swa_utils.AveragedModel(model)
    boundary, state, _ = tracked(tmp_path, norm=norm, averages=averages)
    boundary.mark(state)
    norm(torch.randn(4, 2))
    own = norm.running_mean
    assert own is not None
    expected = own.clone()
    boundary.rewind(state)
    own.fill_(9.0)
    averages.n_averaged.fill_(1)
    boundary.complete(state.step + 1)
    assert torch.equal(own, expected)
    assert averages.n_averaged == 1


def test_parameters_and_buffers_that_were_made_for_inference(tmp_path: Path) -> None:
    with torch.inference_mode():
        teacher = nn.BatchNorm1d(2)
    boundary, state, _ = tracked(tmp_path, teacher=teacher)
    boundary.mark(state)
    assert boundary.untouched()
    boundary.rewind(state)


def test_torch_calls_modules_as_an_interruption_assumes() -> None:
    """`train/agent_channel.py` interrupts the main thread inside such a call, and nowhere else."""
    seen = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(_calls_a_module(sys._getframe()))
            return x

    nn.Sequential(Looks())(torch.zeros(1))
    torch.compile(Looks(), backend="eager", disable=True)(torch.zeros(1))
    assert seen == [True, True]
    assert not _calls_a_module(sys._getframe())


def test_a_rank_that_is_behind_gets_the_buffers_that_no_state_dict_has(tmp_path: Path) -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)
            self.inner.register_buffer("seen", torch.zeros(2), persistent=False)
            self.register_buffer("cache", None, persistent=False)
            self.register_buffer("grown", torch.zeros(1), persistent=False)
            self.register_buffer("sparse", torch.zeros(2).to_sparse(), persistent=False)

    def tracker(name: str) -> Tracker:
        snaps = ht.Snapshots(tmp_path / name, every=None, memory_every=None)
        snaps.track(model=Caching())
        return snaps._tracker

    source, behind = tracker("source"), tracker("behind")
    (ours,), (theirs,) = source.models, behind.models
    before = theirs.inner.seen
    ours.inner.seen += 3
    ours.cache = torch.ones(4)
    ours.grown = torch.full((5,), 2.0)
    ours.sparse = torch.ones(2).to_sparse()
    _take_over_unsaved(behind, _unsaved_buffers(source))
    assert theirs.inner.seen is before
    assert theirs.inner.seen.tolist() == [3.0, 3.0]
    assert (theirs.cache.tolist(), theirs.grown.tolist()) == ([1.0] * 4, [2.0] * 5)
    assert theirs.sparse.to_dense().tolist() == [1.0, 1.0]


def test_numbers_that_a_loss_or_an_optimizer_draws_are_there_for_a_replacement(tmp_path: Path) -> None:
    """Where the rank is lost before its step is complete, and the others complete theirs with its gradients."""
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)

    def boundary() -> Boundary:
        snaps = ht.Snapshots(tmp_path / "runs", every=None, memory_every=None)
        snaps.track(model=nn.Linear(1, 1))
        made = Boundary(snaps._tracker, str(memory))
        made.mark(snaps.state)
        return made

    lost = boundary()
    lost.forward_done()
    torch.rand(3)
    lost.note_drawn()
    expected = torch.rand(3)
    torch.manual_seed(1)
    replacement = Boundary(lost._tracker, str(memory))
    assert replacement.restore_random(1, survived=False)
    assert torch.equal(torch.rand(3), expected)
