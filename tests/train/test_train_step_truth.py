"""A step is what `snaps.step()` says, and what is not tracked is noticed: of one process."""

from __future__ import annotations

import itertools
import random
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

import holdfast.train as ht
from holdfast.protocol.errors import ProcessGroupError, TrackingError
from holdfast.train.boundary import Boundary
from holdfast.train.carrying import PlainCall, PlainCallReason, UntrackedModules, check_function, why_plain
from holdfast.train.group import GroupConnection, ProcessGroup
from holdfast.train.guards import GuardWarning
from holdfast.train.kept import SMALL_BYTES, KeptState
from holdfast.train.own_objects import FirstStates, OwnObjects, is_data
from holdfast.train.pending import CALLS_MAX, PendingGradients, WherePending
from holdfast.train.random_numbers import equal_parts, random_state, seed_random
from holdfast.train.reading import Saved, parts_of_slot
from holdfast.train.save import POSTPONED_MAX, image
from holdfast.train.state import Tracker
from holdfast.train.tracked import Choice
from holdfast.train.unnoticed_writes import ValueProbe
from holdfast.train.untracked import UntrackedGenerators
from tests.warm import Warm

PENDING_RANKS = Path(__file__).parent / "scripts" / "pending_ranks.py"
pytestmark = [pytest.mark.usefixtures("own_staging"), pytest.mark.xdist_group("torch")]


class Training:
    """Saves to the disk whenever a step is complete."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder = folder
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.snaps = ht.Snapshots(folder, every="1 step", memory_every=None, keep=None)
        self.state = self.snaps.track(model=self.model, optimizer=self.optimizer, **more)
        self.snaps.resume()

    def backward(self) -> None:
        self.model(torch.randn(4, 3)).square().mean().backward()

    def saved(self) -> list[int]:
        self.snaps._saving.wait()  # type: ignore[union-attr]
        return sorted(int(path.name.split("_")[1].split(".")[0]) for path in self.folder.glob("step_*"))


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path / "runs")
    yield made
    made.snaps.close()


def test_a_step_that_no_hook_has_seen_is_saved(training: Training) -> None:
    """As SAM steps, or a captured graph: the weights change, no tracked optimizer's step() is called."""
    for _ in range(3):
        training.backward()
        with torch.no_grad():
            for each in training.model.parameters():
                each.sub_(each.grad, alpha=0.1)
        training.model.zero_grad()
        training.snaps.step()
    assert training.saved() == [1, 2, 3]


def test_gradients_without_an_optimizer_step_are_reported_and_then_the_caller_is_believed(training: Training) -> None:
    """A captured graph keeps its gradients in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(CALLS_MAX - 1):
            training.backward()
            training.snaps.step()
    assert training.saved() == []
    with pytest.warns(RuntimeWarning, match=f"called {CALLS_MAX} times, gradients are there, and no tracked optimizer"):
        training.snaps.step()
    training.snaps.step()
    assert training.saved() == [CALLS_MAX, CALLS_MAX + 1]


def test_gradients_that_are_added_up_by_hand_hold_up_the_save(training: Training) -> None:
    for number in range(1, 9):
        training.backward()
        if number % 4 == 0:
            training.optimizer.step()
            training.optimizer.zero_grad()
        training.snaps.step()
    assert training.saved() == [4, 8]


def test_a_save_that_is_asked_for_between_micro_batches_complains(training: Training) -> None:
    """Gradients are in no snapshot: these samples would be in no step after a resume."""
    training.backward()
    training.snaps.step()
    with pytest.warns(RuntimeWarning, match="gradients of an optimizer step are pending"):
        training.snaps.save()
    training.snaps._pending._newest = WherePending.EVERYWHERE  # as with micro-batches that ranks exchange
    with pytest.raises(TrackingError, match="gradients of an optimizer step are pending"):
        training.snaps.save()
    training.optimizer.step()
    training.snaps.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.snaps.save()  # the gradients are still there: zero_grad() may come before the next pass


def test_an_epoch_that_ends_between_micro_batches_is_saved_with_a_warning(training: Training) -> None:
    def train() -> None:
        for _ in training.state.epochs(1, save=True):
            training.backward()
            training.snaps.step()

    with pytest.warns(RuntimeWarning, match="gradients of an optimizer step are pending"):
        train()


def test_many_batches_that_are_added_up_by_hand_are_known_after_the_first_step(training: Training) -> None:
    count = CALLS_MAX + 6

    def optimizer_step() -> None:
        for _ in range(count - 1):
            training.backward()
            training.snaps.step()
        training.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.snaps.step()

    with pytest.warns(RuntimeWarning, match=f"called {CALLS_MAX} times"):
        optimizer_step()
    before = training.saved()
    optimizer_step()
    optimizer_step()
    assert training.saved() == [*before, 2 * count, 3 * count]


def test_all_ranks_count_again_in_another_world() -> None:
    """They were interrupted after different batches of a step that is given up."""
    model = nn.Linear(3, 2)
    pending = PendingGradients()
    pending.watch(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(3)).sum().backward()
    for _ in range(CALLS_MAX - 2):
        assert pending.at_step() is WherePending.HERE
    pending.begin_again()
    for _ in range(CALLS_MAX - 1):
        assert pending.at_step() is WherePending.HERE


@pytest.mark.usefixtures("fsdp_on_cpus")
def test_gradients_that_fsdp_keeps_beside_its_parameters_are_pending(warm: Warm, tmp_path: Path) -> None:
    """Three batches make an optimizer step, added up by hand: `.grad` is None until the third."""
    assert warm.found(PENDING_RANKS.with_name("replica_ranks.py"), "accumulated", str(tmp_path)) == [[3, 6], [3, 6]]


@pytest.fixture(scope="module")
def pending_ranks(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was said, and saved, in jobs whose ranks complete their steps at different calls."""
    found: dict[str, Any] = warm.found(PENDING_RANKS, tmp_path_factory.mktemp("pending"))
    return found


def test_ranks_whose_steps_are_not_complete_at_the_same_calls_save_together(pending_ranks: dict[str, Any]) -> None:
    """A scaler skips steps on rank 1 alone, in the calls 1, 2, 6, 7 and 12: what is due then is saved after it."""
    found = pending_ranks
    assert found["4 steps"] == {"said": [[]] * 3, "steps": [4, 8, 13, 16, 20, 24]}
    assert found["0.001s"]["said"] == [[]] * 3
    assert not {1, 2, 6, 7, 12} & set(found["0.001s"]["steps"])
    assert found["stop"] == {"said": ["left with 0"] * 3, "steps": [8]}
    assert found["save"] == {"said": [[]] * 3, "steps": [8]}


def test_ranks_that_never_complete_a_step_at_the_same_call_save_all_the_same(pending_ranks: dict[str, Any]) -> None:
    found = pending_ranks["in turn"]
    (told,), others = found["said"]
    assert found["steps"] == [6 + POSTPONED_MAX]
    assert f"postponed at {POSTPONED_MAX} calls" in told
    assert "(rank 1)" in told
    assert others == []


def test_a_step_that_a_scaler_skips_is_a_step(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(training.model(torch.randn(4, 3)).square().mean() * factor).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        training.snaps.step()
    assert training.saved() == [1, 2, 3]


def test_an_accumulation_that_nobody_finishes_holds_up_one_save(training: Training) -> None:
    other = nn.Linear(3, 2)
    for _ in range(2):
        training.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        if training.state.step == 0:
            with ht.accumulate(other, 4) as micro:
                micro.backward(other(torch.randn(4, 3)).square().mean())
        training.snaps.step()
    assert training.saved() == [2]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Accumulating:
    """A loop in which `if micro.last:` was forgotten."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(nn.Linear(3, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def batch(self, count: int, *, step: bool = True) -> None:
        with ht.accumulate(self.model, count) as micro:
            micro.backward(self.model(torch.randn(4, 3)).square().mean())
        if step:
            self.optimizer.step()


@pytest.mark.usefixtures("alone")
def test_an_optimizer_that_steps_between_micro_batches_is_refused() -> None:
    """With one micro-batch that does no harm."""
    loop, other = Accumulating(), nn.Linear(3, 2)
    another = torch.optim.SGD(other.parameters(), lr=0.1)
    loop.batch(1)
    with pytest.raises(ProcessGroupError, match=r"if micro\.last: optimizer\.step\(\)"):
        loop.batch(2)
    another.step()  # of another model, which has no micro-batches


@pytest.mark.usefixtures("alone")
def test_the_rest_of_an_accumulation_that_was_given_up_is_no_mistake() -> None:
    loop = Accumulating()
    loop.batch(4, step=False)
    loop.optimizer.zero_grad()
    loop.model(torch.randn(4, 3)).square().mean().backward()
    loop.optimizer.step()


# --- what is tracked goes back ----------------------------------------------------------------------------------------


class Counting:
    def __init__(self) -> None:
        self.count, self.large = 0, torch.zeros(SMALL_BYTES)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "large": self.large, "pair": (1, [2.0])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["pair"] == (1, [2.0])
        self.count = state["count"]
        self.large.copy_(state["large"])


def test_an_object_goes_back_to_the_end_of_its_last_step() -> None:
    counting = Counting()
    objects = OwnObjects({"counting": counting}, "")
    counting.count = 5
    objects.mark(3)
    counting.count = 6
    objects.rewind()
    assert (counting.count, objects.intact()) == (5, True)


def test_a_large_tensor_that_has_changed_makes_the_state_unknown() -> None:
    counting = Counting()
    objects = OwnObjects({"counting": counting}, "")
    objects.mark(3)
    counting.large.add_(1.0)
    assert not objects.intact()


class Taking:
    state: dict[str, Any]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_kept_state_shares_nothing_that_its_owner_may_change() -> None:
    live = {"numbers": [1, 2], "small": torch.ones(3)}
    kept = KeptState(live)
    live["numbers"].append(3)  # type: ignore[union-attr]
    live["small"].zero_()  # type: ignore[union-attr]
    for _ in range(2):
        got = Taking()
        kept.give_back(got.load_state_dict)
        assert (got.state["numbers"], got.state["small"].tolist()) == ([1, 2], [1.0] * 3)
        got.state["numbers"].append(9)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["a number", "a tensor"])
def test_a_rate_that_the_program_sets_itself_goes_back(tmp_path: Path, rate: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    snaps = ht.Snapshots(tmp_path, every=None, memory_every=None)
    state = snaps.track(model=model, optimizer=optimizer)
    boundary = Boundary(snaps._tracker, "")
    boundary.mark(state)
    held = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] *= 0.5
    boundary.rewind(state)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert not isinstance(rate, torch.Tensor) or optimizer.param_groups[0]["lr"] is held, "a captured graph reads it"


def add_through_data(parameter: torch.Tensor) -> None:
    parameter.data.add_(0.25)


def replace_data(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data * 1.01


@pytest.mark.parametrize("change", [add_through_data, replace_data])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_values_that_change_without_a_count_are_seen(
    change: Callable[[torch.Tensor], None], dtype: torch.dtype
) -> None:
    parameters = [nn.Parameter(torch.ones(5, 3, dtype=dtype).t()), nn.Parameter(torch.empty(0))]
    probe = ValueProbe()
    looks = []
    for _ in range(8):
        if probe.begin_step():
            probe.look(parameters)
        assert not probe.changed()
        looks.append(probe.looks)
        if looks == [True]:
            change(parameters[0])
            assert probe.changed()
        probe.end_step(passes=1)
    assert looks == [True, True, False, True, False, False, False, True]


def test_steps_with_more_forward_passes_are_looked_at() -> None:
    """Adversarial training that begins later, in every other step."""
    probe, looks = ValueProbe(), []
    for step in range(1, 16):
        looks.append(probe.begin_step())
        if looks[-1]:
            probe.look([torch.ones(2)])
        passes = 2 if step >= 5 and step % 2 else 1
        assert probe.is_new(passes) == (step in (5, 7))
        probe.end_step(passes)
    assert [step for step, looked in enumerate(looks, 1) if looked] == [1, 2, 4, 6, 7, 8]

    probe.begin_world()
    assert not probe.is_new(9)
    assert probe.begin_step(), "in another world a step has another number of micro-batches"


# --- what is not tracked is noticed -----------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


def loop(training: Training, loader: Any) -> None:
    for _ in range(2):
        for rows in loader:
            training.model(rows).square().mean().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.snaps.step()


def test_a_loop_over_a_loader_that_is_not_tracked_is_noticed(training: Training) -> None:
    begin = torch.utils.data.DataLoader.__iter__
    with pytest.warns(RuntimeWarning, match="a torch DataLoader that is not tracked"):
        loop(training, torch.utils.data.DataLoader(Rows(), 4))
    assert torch.utils.data.DataLoader.__iter__ is not begin, "torch's own function is back"


def test_a_loader_that_only_the_loop_holds_is_noticed(training: Training) -> None:
    with pytest.warns(RuntimeWarning, match="a torch DataLoader that is not tracked"):
        loop(training, (rows for rows in torch.utils.data.DataLoader(Rows(), 4)))


@pytest.mark.parametrize("asks", ["should_stop", "should_save", ""])
def test_one_that_is_saved_between_epochs_is_noticed_at_another_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = ht.SnapshotOptions(exit_on_stop=False)
    with ht.Snapshots(tmp_path / "runs", every=None, memory_every=None, options=options) as snaps:
        state = snaps.track(model=model, optimizer=optimizer)
        snaps.resume()

        def epoch() -> None:
            for rows in torch.utils.data.DataLoader(Rows(), 4):
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                snaps.step()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in state.epochs(2, save=True):
                epoch()
        if asks:
            monkeypatch.setattr(f"holdfast.worker.{asks}", lambda: True)
        with pytest.warns(RuntimeWarning, match="a torch DataLoader that is not tracked") as told:
            epoch() if asks else snaps.save()
        assert len(told) == 1
        assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("seeds", "warned"), [(lambda _: None, True), (lambda epoch: epoch, False), (lambda _: 7, False)]
)
def test_an_order_of_its_own_is_noticed_unless_it_is_seeded_in_each_epoch(
    tmp_path: Path, seeds: Callable[[int], int | None], warned: bool
) -> None:
    """The recipe of torch's page on reproducibility has such a generator."""
    model, generator = nn.Linear(3, 2), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        ht.Snapshots(tmp_path / "runs", every=None, memory_every=None) as snaps,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        state = snaps.track(model=model, optimizer=optimizer)
        snaps.resume()
        for epoch in state.epochs(4, save=True):
            if (seed := seeds(epoch)) is not None:
                generator.manual_seed(seed)
            for rows in torch.utils.data.DataLoader(Rows(), 4, shuffle=True, generator=generator):
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                snaps.step()
    found = [each for each in told if "draws its order from a random generator of its own" in str(each.message)]
    assert [each.filename for each in found] == [__file__] * warned


def test_a_pass_that_had_begun_before_track_is_noticed(tmp_path: Path) -> None:
    batches = iter(torch.utils.data.DataLoader(Rows(), 4))
    following = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    next(batches)
    training = Training(tmp_path / "runs")
    with pytest.warns(RuntimeWarning, match="a torch DataLoader that is not tracked"):
        loop(training, batches)
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is following, "torch's own function is back"
    training.snaps.close()


def test_one_over_what_is_tracked_is_not(tmp_path: Path) -> None:
    sampler = ht.DistributedSampler(Rows(), batch_size=4)
    batches = iter(torch.utils.data.DataLoader(Rows(), 4, sampler=sampler))
    validation = iter(torch.utils.data.DataLoader(Rows(), 4))
    training = Training(tmp_path / "runs", sampler=sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(validation)) == 8
        loop(training, batches)
    training.snaps.close()


def test_loops_over_tracked_data_and_evaluations_are_not(tmp_path: Path) -> None:
    sampler = ht.DistributedSampler(Rows(), batch_size=4)
    training = Training(tmp_path / "runs", sampler=sampler)
    validation = torch.utils.data.DataLoader(Rows(), 4)

    def batches() -> Iterator[torch.Tensor]:
        for rows in torch.utils.data.DataLoader(Rows(), 4, sampler=sampler):
            yield rows
            assert len(list(validation)) == 8

    class Whole:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return batches()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop(training, Whole())
    training.snaps.close()


class Positioned:
    """A position that a script keeps for itself, from which it goes on."""

    def __init__(self) -> None:
        self.start = self.epoch = 0

    def numbers(self) -> Iterator[int]:
        self.epoch += 1
        while self.start < 32:
            self.start += 1
            yield self.start - 1
        self.start = 0

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"]


class OwnOrder(Positioned, torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return self.numbers()


class OwnBatches(Positioned, torch.utils.data.Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return map(list, zip(*[self.numbers()] * 4, strict=False))


class OwnStream(Positioned, torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((3,), float(number)) for number in self.numbers())


class CountedOrder(OwnOrder):
    """It counts what is trained, as each `snaps.step()` tells it."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, 32))

    def trained(self) -> None:
        self.start += 4


class OwnEpochs(OwnOrder):
    """It keeps the epoch alone."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}


def loader_over(own: Positioned, workers: int) -> torch.utils.data.DataLoader[torch.Tensor]:
    if isinstance(own, OwnStream):
        return torch.utils.data.DataLoader(own, 4, num_workers=workers)
    if isinstance(own, OwnBatches):
        return torch.utils.data.DataLoader(Rows(), batch_sampler=own, num_workers=workers)
    assert isinstance(own, OwnOrder)
    return torch.utils.data.DataLoader(Rows(), 4, sampler=own, num_workers=workers)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (OwnOrder, "the tracked OwnOrder is drawn ahead"),
        (OwnBatches, "the tracked OwnBatches is drawn ahead"),
        (OwnStream, "the tracked OwnStream is read in copies"),
    ],
)
def test_a_position_that_worker_processes_make_wrong_is_noticed(
    tmp_path: Path, kind: type[Positioned], told: str
) -> None:
    own = kind()
    training = Training(tmp_path / "runs", data=own)
    with pytest.warns(RuntimeWarning, match=told) as warned:
        loop(training, loader_over(own, workers=1))
    assert len(warned) == 1
    training.snaps.close()


@pytest.mark.parametrize(
    ("kind", "workers"),
    [(OwnOrder, 0), (OwnBatches, 0), (OwnStream, 0), (CountedOrder, 1), (OwnEpochs, 1)],
)
def test_a_position_that_is_right_is_not(tmp_path: Path, kind: type[Positioned], workers: int) -> None:
    own = kind()
    training = Training(tmp_path / "runs", data=own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop(training, loader_over(own, workers))
    training.snaps.close()


def packed(loader: Any) -> Iterator[torch.Tensor]:
    """Rows of several batches together, of which some wait for the next one."""
    waiting = torch.empty(0, 3)
    for rows in loader:
        waiting = torch.cat([waiting, rows])
        while len(waiting) >= 3:
            yield waiting[:3]
            waiting = waiting[3:]


def repeated(loader: Any) -> Iterator[torch.Tensor]:
    return itertools.chain.from_iterable([rows, rows] for rows in loader)


@pytest.mark.parametrize("steps_of", [packed, repeated])
def test_several_steps_with_one_batch_are_noticed(tmp_path: Path, steps_of: Any) -> None:
    loader = ht.DataLoader(Rows(), 4)
    training = Training(tmp_path / "runs", loader=loader)
    with pytest.warns(GuardWarning, match="again before the loop took another batch") as told:
        loop(training, steps_of(loader))
    assert len(told) == 1
    training.snaps.close()


def test_one_step_with_each_batch_is_not(tmp_path: Path) -> None:
    """Also if the script counts it first, if a second loader gives a batch only now and then, and after a pass."""
    loader, second = ht.DataLoader(Rows(), 4), ht.DataLoader(Rows(), 4)
    training = Training(tmp_path / "runs", loader=loader, second=second)

    def batches() -> Iterator[torch.Tensor]:
        others = iter(second)
        for number, rows in enumerate(loader):
            loader.trained()
            yield rows if number % 4 else next(others)
        yield rows

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            loop(training, batches())
    training.snaps.close()


def test_epochs_of_one_batch_are_not(tmp_path: Path) -> None:
    """Their batches are equal."""
    loader = ht.DataLoader(Rows(), 32)
    training = Training(tmp_path / "runs", loader=loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            loop(training, loader)
    training.snaps.close()


def steps_that_draw(training: Training, generator: Any, draw: Any, *, steps: int = 6) -> None:
    for _ in range(steps):
        draw(generator)
        training.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.snaps.step()


GENERATORS_AND_DRAWS = [
    (torch.Generator, lambda each: torch.rand((), generator=each)),
    (partial(np.random.default_rng, 1), lambda each: each.random()),
    (partial(np.random.RandomState, 1), lambda each: each.rand()),
    (partial(random.Random, 1), lambda each: each.random()),
]


@pytest.mark.parametrize(("make", "draw"), GENERATORS_AND_DRAWS)
def test_a_generator_of_the_scripts_own_is_noticed(training: Training, make: Any, draw: Any) -> None:
    with pytest.warns(RuntimeWarning, match=r"each step draws from 'generator', a random generator") as told:
        steps_that_draw(training, make(), draw)
    assert len(told) == 1
    assert told[0].filename == __file__


class Noise:
    """It keeps the state of its generator."""

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.getstate()[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.setstate((3, tuple(state["state"]), None))


def test_one_that_is_saved_seeded_in_each_step_or_seldom_drawn_from_is_not(tmp_path: Path) -> None:
    saved = random.Random(1)
    training = Training(tmp_path / "runs", noise=Noise(saved))
    numbers = itertools.count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.snaps._generators = UntrackedGenerators()
        steps_that_draw(training, saved, lambda each: each.random())
        for draw in (
            lambda each: torch.rand((), generator=each.manual_seed(next(numbers))),
            lambda each: next(numbers) % 2 and torch.rand((), generator=each),
        ):
            training.snaps._generators = UntrackedGenerators()
            steps_that_draw(training, torch.Generator(), draw)
    training.snaps.close()


def seed_again(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        getattr(generator, "manual_seed", getattr(generator, "seed", None))(seed)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        *GENERATORS_AND_DRAWS,
        (lambda: np.random.Generator(np.random.MT19937(1)), lambda each: each.random()),
        (lambda: np.random.Generator(np.random.Philox(1)), lambda each: each.random()),
    ],
)
def test_one_that_is_seeded_in_place_in_each_step_is_not(training: Training, make: Any, draw: Any) -> None:
    numbers = itertools.count(5)

    def draws(generator: Any) -> None:
        seed_again(generator, next(numbers))
        draw(generator)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps_that_draw(training, make(), draws)


def test_one_that_draws_many_numbers_in_each_step_is_noticed(training: Training) -> None:
    with pytest.warns(RuntimeWarning, match="each step draws from 'generator'"):
        steps_that_draw(training, random.Random(1), lambda each: [each.random() for _ in range(2000)])


def test_one_without_a_state_is_not(training: Training) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps_that_draw(training, random.SystemRandom(), lambda each: each.random())


class OfTheScript:
    """It has the state of a generator that is none of its attributes."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": of_the_script.getstate()[1], "order": order_of_the_script.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        of_the_script.setstate((3, tuple(state["state"]), None))
        order_of_the_script.set_state(state["order"])


of_the_script, order_of_the_script = random.Random(1), torch.Generator()


def epochs_that_draw(folder: Path, *, seeds: bool) -> None:
    """Three epochs with saves between them."""
    model, generators = nn.Linear(3, 2), [random.Random(1), np.random.default_rng(1), torch.Generator()]
    python, numpys, torchs = generators
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ht.Snapshots(folder, every=None, memory_every=None) as snaps:
        state = snaps.track(model=model, optimizer=optimizer, own=OfTheScript())
        snaps.resume()
        for epoch in state.epochs(3, save=True):
            for each in generators if seeds else ():
                seed_again(each, epoch)
            for rows in torch.utils.data.DataLoader(Rows(), 4, shuffle=True, generator=order_of_the_script):
                python.random(), numpys.random(), torch.rand((), generator=torchs), of_the_script.random()
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                snaps.step()


@pytest.mark.parametrize(("seeds", "names"), [(True, []), (False, ["numpys"])])
def test_between_epochs_one_is_right_that_is_seeded_in_each(tmp_path: Path, seeds: bool, names: list[str]) -> None:
    """And one that a tracked object saves, in its own way, also if the order comes from it."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        epochs_that_draw(tmp_path / "runs", seeds=seeds)
    begins = "holdfast: each step draws from "
    assert [str(each.message).partition(",")[0] for each in told] == [f"{begins}{name!r}" for name in names]


def in_hand_after_a_step(training: Training) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """What is left of a batch that the function has let go of."""
    rows = torch.randn(4, 3)
    training.model(rows).square().mean().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.snaps.step()
    held = weakref.ref(rows)
    del rows
    return held(), {}


def in_hand_with_locals(training: Training) -> tuple[torch.Tensor | None, dict[str, Any]]:
    given = locals()
    rows = torch.randn(4, 3)
    training.model(rows).square().mean().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.snaps.step()
    del rows
    return None, given


@pytest.mark.parametrize("step", [in_hand_after_a_step, in_hand_with_locals])
def test_a_look_at_variables_keeps_and_changes_nothing(training: Training, step: Any) -> None:
    left, given = step(training)
    assert left is None
    assert given.keys() <= {"training"}


@pytest.mark.parametrize("left_after", [1, 3, 5, 9, 11])
def test_evaluations_over_a_tracked_loader_are_whole_after_a_resume(tmp_path: Path, left_after: int) -> None:
    """Several in an epoch of the training: each is a pass of the loader, whose own epochs run ahead."""

    def life(steps: int) -> dict[int, int]:
        """The number of batches of the evaluation at each step."""
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader, validation = ht.DataLoader(Rows(), 4, shuffle=True), ht.DataLoader(Rows(), 8)
        found: dict[int, int] = {}
        with ht.Snapshots(tmp_path / "runs", every="1 step", memory_every=None) as snaps:
            state = snaps.track(model=model, optimizer=optimizer, loader=loader, validation=validation)
            snaps.resume()
            for _ in state.epochs(2):
                for batch in loader:
                    model(torch.randn(4, 3) + batch.sum() * 0).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    snaps.step()
                    if state.step % 2 == 0:
                        found[state.step] = len(list(validation))
                    if state.step == steps:
                        return found
        return found

    first = life(left_after)
    second = life(0)
    assert first | second == dict.fromkeys(range(2, 17, 2), 4)


@pytest.mark.parametrize("saves", ["save()", "epochs(save=True)"])
def test_a_save_after_a_schedule_in_the_body_of_an_epoch_is_noticed(tmp_path: Path, saves: str) -> None:
    """That code runs again after a resume: the schedule would step twice."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8)
    loader = ht.DataLoader(Rows(), 4)
    with ht.Snapshots(tmp_path / "runs", every=None) as snaps, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state = snaps.track(model=model, optimizer=optimizer, schedule=schedule, loader=loader)
        snaps.resume()
        for _ in state.epochs(2, save=saves != "save()"):
            for number, batch in enumerate(loader):
                model(torch.randn(4, 3) + batch.sum() * 0).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                snaps.step()
                if number == 2:
                    snaps.save()  # in the middle of an epoch
            schedule.step()
            if saves == "save()":
                snaps.save()
    found = [str(each.message) for each in told if "has stepped" in str(each.message)]
    assert len(found) == (2 if saves == "save()" else 0), told


class Holder:
    """An object of the script that has a schedule, and its state."""

    def __init__(self, schedule: LRScheduler) -> None:
        self.schedules = [schedule]

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.schedules[0].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedules[0].load_state_dict(state["first"])


def test_a_schedule_that_is_not_tracked_is_noticed(training: Training) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 8)
    training.backward()
    training.optimizer.step()
    schedule.step()
    with pytest.warns(RuntimeWarning, match="a schedule sets the learning rate of the SGD, and is not tracked"):
        training.snaps.step()


@pytest.mark.parametrize("form", ["itself", "in an object", "two in one"])
def test_a_schedule_that_is_tracked_is_not_complained_of(tmp_path: Path, form: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 8)
    if form == "two in one":
        schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer, [schedule, torch.optim.lr_scheduler.StepLR(optimizer, 4)], [2]
        )
    with ht.Snapshots(tmp_path / "runs", every=None) as snaps, warnings.catch_warnings():
        warnings.simplefilter("error")
        snaps.track(model=model, optimizer=optimizer, schedule=Holder(schedule) if form == "in an object" else schedule)
        snaps.resume()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        snaps.step()


def test_an_optimizer_of_a_tracked_model_that_is_not_tracked_is_noticed(training: Training) -> None:
    other = nn.Linear(3, 2)
    inner = torch.optim.SGD(training.model.parameters(), lr=0.1)
    another = torch.optim.SGD(other.parameters(), lr=0.1)

    def step(*optimizers: torch.optim.Optimizer) -> None:
        training.backward()
        for each in optimizers:
            each.step()
        training.model.zero_grad()
        training.snaps.step()

    with pytest.warns(RuntimeWarning, match="class SGD steps a tracked model and is not tracked"):
        step(inner, another)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(inner, training.optimizer)  # said once


def tracker_of(**objects: Any) -> Tracker:
    tracker = Tracker()
    tracker.add(objects)
    return tracker


def test_a_schedule_that_the_function_uses_has_to_be_tracked() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    teacher, validation = nn.Linear(2, 2), ht.DataLoader(Rows(), 4)
    off = torch.amp.GradScaler("cpu", enabled=False)
    gathers = Gathers(model, optimizer)

    def train() -> None:
        def inner() -> None:
            schedule.step()

        inner()
        optimizer.step()
        off.update()
        list(validation)
        teacher(model(torch.ones(2)))
        gathers.state_dict()

    with pytest.raises(
        TrackingError, match=r"train\(\) uses schedule \(a StepLR\), which is not tracked\n.*track\(schedule="
    ):
        check_function(train, tracker_of(model=model, optimizer=optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_function(train, tracker_of(model=model, optimizer=optimizer, schedule=schedule))
    trainer = Trainer(schedule)
    with pytest.raises(TrackingError, match=r"self\.schedule \(a StepLR\).*\n.*track\(schedule="):
        check_function(trainer.fit, tracker_of(model=model))
    check_function(trainer.warm_up, tracker_of(model=model))


class Gathers:
    """As a program has for torch.distributed.checkpoint."""

    def __init__(self, *parts: Any) -> None:
        self.model, self.optimizer = parts

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Trainer:
    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def fit(self) -> None:
        self.schedule.step()

    def warm_up(self) -> None: ...


def test_an_average_of_the_weights_has_to_be_tracked() -> None:
    model = nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(TrackingError, match=r"average \(a AveragedModel\)"):
        check_function(lambda: average.update_parameters(model), tracker_of(model=model))


def test_what_the_function_changes_and_nobody_tracks_is_named() -> None:
    best, counting = 0.0, Counting()

    def train() -> None:
        nonlocal best
        best = max(best, 1.0)
        counting.count += 1
        own = [best]

        def inner() -> None:
            own[0] = 2.0

        inner()

    with pytest.warns(
        GuardWarning, match=r"train\(\) uses or assigns counting, best, with a state that is not tracked"
    ):
        check_function(train, tracker_of(model=nn.Linear(2, 2)))


class Centered(nn.Module):
    """A loss with a running average, as DINO's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.center = self.center * 0.9 + rows.mean(0) + 1.0  # the mean itself may be zero
        return (rows - self.center).square().mean()


class Whole(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


def test_modules_that_training_changes_and_nobody_tracks_are_named() -> None:
    model, teacher, frozen, plain = nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Linear(2, 2), nn.MSELoss()
    within, unused, whole = Centered(), Centered(), Whole(model, Centered())

    class Keeps(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.module = within

    keeps = Keeps()

    def train() -> None:
        rows = model(torch.randn(4, 2))
        whole.parts[1](rows)
        plain(frozen(rows), teacher(rows))
        keeps.module(rows)
        within.train()
        unused.table += 1
        with torch.no_grad():
            teacher.weight.data.mul_(0.5)

    modules = UntrackedModules(train, tracker_of(model=model, keeps=keeps))
    with warnings.catch_warnings():
        warnings.simplefilter("error", GuardWarning)
        modules.warn_of_changes()
        train()
        with pytest.raises(GuardWarning, match=r"train\(\) uses teacher, whole\.parts\.1: training changes"):
            modules.warn_of_changes()
        modules.warn_of_changes()


class Data:
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def state_dict(self) -> dict[str, int]:
        return {"position": 3}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Schedules:
    """Several of them in one object, as torchtitan has."""

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def step(self) -> None: ...


@pytest.mark.parametrize(
    ("each", "data"), [(Data(), True), (Schedules(), False), (UserDict(), False), (Counting(), False)]
)
def test_what_is_data(each: Any, data: bool) -> None:
    assert is_data(each) == data


def test_first_states_ask_no_loader_of_another_library_and_hold_nothing() -> None:
    """torchdata's begins to read when it is asked for its state, and the function has not set the order yet."""

    class Counter:
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    class Loader(Counter):
        def __iter__(self) -> Iterator[int]:
            return iter(())

        def state_dict(self) -> dict[str, int]:
            raise AssertionError("it begins to read")

    kept, made_again, loader = Counter(), Counter(), Loader()
    first = FirstStates({"kept": kept, "made again": made_again, "loader": loader})
    kept.count = loader.count = 5
    gone = weakref.ref(made_again)
    del made_again
    assert gone() is None
    fresh = Counter()
    fresh.count = 7
    first.give_back({"kept": kept, "made again": fresh, "loader": Loader()})
    assert (kept.count, fresh.count) == (0, 7)
    with pytest.raises(TrackingError, match=r"loader \(Loader\) was made before the training function"):
        first.give_back({"kept": kept, "loader": loader})


def test_a_wrapper_of_an_optimizer_that_is_tracked_is_enough(tmp_path: Path) -> None:
    class Noam:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    snaps = ht.Snapshots(tmp_path, every=None, memory_every=None)
    snaps.track(model=model, noam=Noam(optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        snaps.step()
    snaps.close()


class FollowingData(Data):
    def regroup(self, rank: int, world: int) -> None: ...


def test_a_position_of_one_rank_is_not_restored_in_another_world() -> None:
    for data, fits in ((Data(), False), (FollowingData(), True)):
        tracker = tracker_of(model=nn.Linear(2, 2), data=data)
        saved = Saved(parts_of_slot(memoryview(image(tracker).numpy())))
        assert tracker.compare(saved, 0, Choice(), 1).problems == {}
        problems = tracker.compare(saved, 0, Choice(), 3).problems
        assert not problems if fits else "has a position for each of 1 ranks, and there are 3 now" in problems["data"]


def test_why_a_call_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, follows = tracker_of(data=Data()), tracker_of(data=FollowingData())
    made = ProcessGroup(0, 1, 0, torch.device("cpu"), None)
    group = ProcessGroup(0, 1, 0, torch.device("cpu"), None, GroupConnection("gloo", None))

    def why(group: ProcessGroup | None, tracker: Tracker) -> PlainCallReason | None:
        found = why_plain(group, tracker)
        assert found is None or isinstance(found, PlainCall)
        return None if found is None else found.why

    assert (why(None, follows), why(made, follows), why(group, follows)) == (
        PlainCallReason.NO_GROUP,
        PlainCallReason.OWN_GROUP,
        None,
    )
    assert why(group, tracker) is PlainCallReason.DATA
    monkeypatch.setenv("HOLDFAST_SURVIVE", "wait")
    assert why(group, tracker) is None
    monkeypatch.setenv("HOLDFAST_SURVIVE", "off")
    assert why(group, follows) is PlainCallReason.OFF


def test_a_function_that_comes_before_resume_is_refused(tmp_path: Path) -> None:
    snaps = ht.Snapshots(tmp_path, every=None, memory_every=None)
    snaps.track(model=nn.Linear(2, 2))
    with pytest.raises(TrackingError, match=r"call snaps\.resume\(\) before the training function"):
        ht.survive(snaps)(lambda: None)()


# --- random numbers in another world ----------------------------------------------------------------------------------


def test_generators_that_were_equal_on_all_ranks_get_one_seed() -> None:
    before = random_state()
    drawn = []
    for rank in (0, 1):
        seed_random(b"common", rank, 2, {"python"})
        drawn.append((random.random(), torch.rand(1).item()))
    assert drawn[0][0] == drawn[1][0]
    assert drawn[0][1] != drawn[1][1]
    torch.rand(1)
    assert equal_parts([before, before]).keys() == before.keys()
    assert "torch" not in equal_parts([before, random_state()])
    assert not equal_parts([before]), "one rank alone tells nothing"


# --- a pass that begins within an epoch -------------------------------------------------------------------------------


def batches_of(training: Training, loader: Any) -> Iterator[torch.Tensor]:
    """Of two epochs, with a step of the training after each."""
    for _ in training.state.epochs(2):
        for rows in loader:
            yield rows
            training.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.snaps.step()


def drawn_in_steps(folder: Path, make: Callable[[], tuple[Any, Any]], stops: int) -> list[float]:
    """What a program draws in each step, if it ends after so many and goes on from its snapshot."""
    torch.manual_seed(5)
    drawn: list[float] = []
    for end in (stops, 16):
        loader, tracked = make()
        training = Training(folder, data=tracked)
        for _ in batches_of(training, loader):
            if training.state.step == end:
                break
            drawn.append(torch.rand(1).item())
        training.snaps.close()
        torch.manual_seed(6)  # another process
    return drawn


def over_a_sampler() -> tuple[Any, Any]:
    """The loader, and what is tracked of it."""
    sampler = ht.DistributedSampler(Rows(), batch_size=4)
    return torch.utils.data.DataLoader(Rows(), 4, sampler=sampler), sampler


def of_torchdata(**options: Any) -> tuple[Any, Any]:
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(Rows(), 4, **options)
    return loader, loader


LOADERS = {"sampler": over_a_sampler, "torchdata": of_torchdata, "shuffled": partial(of_torchdata, shuffle=True)}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_pass_that_begins_within_an_epoch_draws_no_number(tmp_path: Path, make: Any) -> None:
    """In the middle of an epoch, after its first step, and at its end."""
    whole = drawn_in_steps(tmp_path / "whole", make, 16)
    assert len(whole) == 16
    for stops in (1, 3, 8, 11):
        assert drawn_in_steps(tmp_path / f"resumed {stops}", make, stops) == whole
