"""ht.DataLoader around torch's: what counts as trained, real workers, resizes in the middle, what it refuses."""

from __future__ import annotations

import json
import warnings
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, IterableDataset, Subset

import holdfast.train as ht
from holdfast.protocol.errors import DataError, DataStateError, TrackingError
from holdfast.train.data.datasets import part_of
from holdfast.train.data.loader import DataLoader
from holdfast.train.state import Tracker


class Numbers(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def loader(length=40, batch_size=4, shuffle=True, **options):
    return DataLoader(Numbers(length), batch_size, shuffle, collate_fn=list, **options)


def samples(batches):
    return list(chain.from_iterable(batches))


def order(epoch=0):
    one = loader(batch_size=40)
    one.set_epoch(epoch)
    return next(iter(one))


# --- what counts as trained -------------------------------------------------------------------------------------------


def test_a_plain_loop_goes_over_one_epoch_after_the_other():
    data = loader()
    first, second = [samples(data) for _ in range(2)]
    assert first == order(epoch=0)
    assert second == order(epoch=1) != first
    assert data.state_dict() == {"seed": 0, "epoch": 2, "cursor": 0, "length": 40, "order": "shuffled-1"}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_taken_in_the_body_counts_its_batch_once(workers):
    data = loader(num_workers=workers)
    cursors = []
    for _ in data:
        cursors.append(data.state_dict()["cursor"])
        assert data.state_dict()["cursor"] == cursors[-1]
    assert cursors == list(range(4, 41, 4))


def test_a_batch_of_which_it_is_said_counts_once_and_one_in_hand_does_not():
    data = loader()
    before, after = [], []
    for _ in data:
        before.append(data.cursor)
        data.trained()
        data.trained()
        after.append(data.state_dict()["cursor"])
    assert before == list(range(0, 40, 4))
    assert after == list(range(4, 41, 4))


def test_a_told_loader_does_not_count_the_batch_in_the_body_before_it_is_trained():
    data = loader()
    batches = iter(data)
    next(batches)
    data.trained()
    held = next(batches)
    assert data.state_dict()["cursor"] == 4
    again = loader()
    again.load_state_dict(data.state_dict())
    assert next(iter(again)) == held


def test_looking_at_a_batch_costs_none():
    data = loader()
    seen = next(iter(data))
    assert next(iter(data)) == seen
    assert samples(data) == order()


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_loop_that_reads_ahead_is_noticed(ahead):
    """As what copies the next batch to a GPU while the last one is trained."""
    made = loader(batch_size=2)

    def train():
        batches = iter(made)
        read = list(islice(batches, ahead))
        for batch in batches:
            read = [*read[1:], batch]
            made.trained()

    with pytest.warns(ht.GuardWarning, match=f"took {ahead + 1} batches before its first step, and 1 before each"):
        train()


@pytest.mark.parametrize("taken", [[1, 1, 1, 1], [2, 2, 2, 2], [3, 1, 2, 1], [1, 2, 2, 2]])
def test_steps_of_several_batches_do_not_look_like_reading_ahead(taken):
    made = loader(batch_size=2)
    batches = iter(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in taken:
            assert len(list(islice(batches, count))) == count
            made.trained()


class Graded(torch.utils.data.Dataset):
    """It becomes harder with the epoch."""

    def __init__(self):
        self.epoch = self.calls = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.calls += 1
        return index * 10**self.epoch


def test_a_dataset_that_changes_behind_persistent_worker_processes_is_noticed():
    dataset = Graded()
    made = DataLoader(Subset(dataset, range(4)), 2, num_workers=1, persistent_workers=True)
    assert torch.cat(list(made)).tolist() == [0, 1, 2, 3]
    dataset.epoch = 1
    with pytest.warns(ht.GuardWarning, match=r"'epoch' of the dataset has changed") as told:
        read = [*made, *made]
    assert torch.cat(read).tolist() == [0, 1, 2, 3] * 2
    assert len(told) == 1


@pytest.mark.parametrize(("persistent", "epochs"), [(True, 0), (False, 1)])
def test_a_dataset_that_workers_have_as_it_is_is_not(persistent, epochs):
    dataset = Graded()
    made = DataLoader(dataset, 2, num_workers=1, persistent_workers=persistent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert torch.cat(list(made)).tolist() == [index * 10**dataset.epoch for index in range(4)]
            dataset.epoch += epochs


class Lazy(Graded):
    """It finds out some attributes when it is first asked for them."""

    def __init__(self):
        super().__init__()
        self.fill, self._mean, self._is_open = float("nan"), None, False


def test_attributes_that_a_dataset_finds_out_later_are_no_change():
    dataset = Lazy()
    made = DataLoader(dataset, 2, num_workers=1, persistent_workers=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(made)
        dataset._mean, dataset._is_open = 1.5, True
        list(made)


def test_a_loop_left_by_break_goes_on_where_it_was():
    data = loader()
    trained = []
    for batch in data:
        trained += batch
        data.trained()
        if len(trained) == 12:
            break
    assert data.remaining == 7
    assert trained + samples(data) == order()


def test_a_validation_loop_left_by_break_leaves_nothing_for_the_next_one():
    for options in ({}, {"resumable": False}):
        data = loader(shuffle=False, **options)
        list(islice(data, 3))
        assert samples(data) == list(range(40))
        list(islice(data, 3))
        if options:
            assert data.state_dict()["cursor"] == 0
            data.trained()
        assert samples(data) == list(range(40))


def test_a_loop_that_is_always_left_does_not_see_the_same_batches_for_ever():
    data = loader()
    one, other = ([*chain.from_iterable(islice(data, 3))] for _ in range(2))
    assert one == order()[:12]
    assert other == order(epoch=1)[:12]


@pytest.mark.parametrize("keep", ["track", "state_dict", "load_state_dict"])
def test_a_loader_whose_position_is_kept_goes_on(keep):
    data = loader()
    match keep:
        case "track":
            Tracker().add({"loader": data})
        case "state_dict":
            data.state_dict()
        case "load_state_dict":
            data.load_state_dict(loader().state_dict())
    first = samples(islice(data, 3))
    assert first + samples(data) == order()[:8] + order()[8:12] + order()[8:]


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_a_sampler_is_refused_with_advice(name):
    with pytest.raises(DataError, match=rf"^{name}= cannot be given.*\n.*shuffle="):
        loader(**{name: range(4)})


def test_micro_batches_count_when_their_step_is_complete():
    data = loader(global_batch_size=10, batch_size=4)
    assert (data.micro_batches, data.batch_size, data.global_batch_size, len(data)) == (3, 4, 10, 12)
    cursors = [data.state_dict()["cursor"] for _ in data]
    assert cursors == [0, 0, 10, 10, 10, 20, 20, 20, 30, 30, 30, 40]


@pytest.mark.parametrize(
    "options", [{"batch_size": 3}, {"batch_size": 3, "tail": "drop"}, {"batch_size": 4, "global_batch_size": 10}]
)
def test_the_number_of_a_batch_goes_on_after_a_resume_in_another_world(options):
    data = loader(ranks=(0, 2), **options)
    assert [data.batch_number for _ in data] == list(range(len(data)))
    data.set_epoch(0)
    cursors = [data.state_dict()["cursor"] for _ in data]
    for cursor in {*cursors}:
        again = loader(**options)
        again.load_state_dict({**data.state_dict(), "epoch": 0, "cursor": cursor})
        again.set_epoch(0)
        numbers = [again.batch_number for _ in again]
        assert numbers == list(range(len(again)))[len(again) - len(numbers) :]


# --- epochs -----------------------------------------------------------------------------------------------------------


def test_set_epoch_begins_an_epoch_from_its_start():
    data = loader()
    list(islice(data, 3))
    data.set_epoch(5)
    assert samples(data) == order(epoch=5)
    data.set_epoch(5)
    assert samples(data) == order(epoch=5)


def test_an_iterator_that_lives_longer_than_an_epoch_of_the_training_goes_on():
    """Also where a job resumes: the position is always that of the pass that is under way."""
    one = loader()
    batches = iter(one)
    seen = samples(islice(batches, 3))
    one.set_epoch(1)
    seen += samples(islice(batches, 3))
    state = one.state_dict()
    assert (state["epoch"], seen) == (0, order()[:24])
    other = loader()
    other.load_state_dict(state)
    assert samples(other) == order()[24:]


def test_an_epoch_that_was_asked_for_during_a_pass_is_that_of_the_next_one():
    one = loader()
    left = iter(one)
    next(left)
    one.set_epoch(2)
    assert samples(one) == order(epoch=2)


def test_set_epoch_keeps_a_state_that_was_just_loaded():
    data = loader()
    state = {"seed": 0, "epoch": 3, "cursor": 16, "length": 40, "order": "shuffled-1"}
    data.load_state_dict(state)
    data.set_epoch(3)
    next(iter(data))
    data.set_epoch(3)
    assert samples(data) == order(epoch=3)[16:]
    data.load_state_dict(state)
    data.set_epoch(4)
    assert samples(data) == order(epoch=4)


def test_an_epoch_that_was_finished_before_the_snapshot_is_not_trained_again():
    data = loader()
    data.load_state_dict({"seed": 0, "epoch": 3, "cursor": 0, "length": 40, "order": "shuffled-1"})
    seen = []
    for epoch in (2, 3):
        data.set_epoch(epoch)
        seen.append(samples(data))
    assert seen == [[], order(epoch=3)]


def test_a_state_taken_at_the_last_batch_leaves_an_empty_pass_for_what_follows_the_loop():
    data = loader()
    *_, state = [data.state_dict() for _ in data]
    again = loader()
    again.load_state_dict(state)
    assert [list(again), again.epoch, samples(again)] == [[], 1, order(epoch=1)]


# --- resizes with torch's own workers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_four_ranks_then_three_then_five_with_workers_that_fetch_ahead(persistent):
    trained, state = [], None
    for world, batches in ((4, 3), (3, 4), (5, 99)):
        workers = {4: 1, 3: 0, 5: 1}[world]
        ahead = {"num_workers": 1, "prefetch_factor": 5, "persistent_workers": persistent} if workers else {}
        ranks = [loader(100, ranks=(rank, world), **ahead) for rank in range(world)]
        for each in ranks:
            if state:
                each.load_state_dict(state)
        for parts in islice(zip(*ranks, strict=True), batches):
            trained += [sample for each, part in zip(ranks, parts, strict=True) for sample in part if each.share.weight]
            states = [each.state_dict() for each in ranks]
            assert states == [states[0]] * world
        state = json.loads(json.dumps(states[0]))
    assert sorted(trained) == list(range(100))


def test_persistent_workers_serve_several_epochs_and_a_state_loaded_between():
    data = loader(num_workers=2, persistent_workers=True)
    assert [samples(data) for _ in range(2)] == [order(epoch=0), order(epoch=1)]
    data.load_state_dict({"seed": 0, "epoch": 1, "cursor": 20, "length": 40, "order": "shuffled-1"})
    assert samples(data) == order(epoch=1)[20:]


def test_persistent_workers_forget_what_they_fetched_for_a_pass_that_was_left():
    data = loader(num_workers=1, prefetch_factor=6, persistent_workers=True)
    seen = next(iter(data))
    assert next(iter(data)) == seen
    assert samples(data) == order()


def test_a_failing_dataset_costs_no_sample():
    class Fails(Numbers):
        broken = True

        def __getitem__(self, index):
            if self.broken and index == order()[9]:
                raise OSError("disk")
            return index

    dataset = Fails(40)
    data = DataLoader(dataset, 4, True, collate_fn=list, resumable=True)
    trained = []
    with pytest.raises(OSError, match="disk"):
        trained.extend(chain.from_iterable(data))
    assert trained == order()[:8]
    assert data.cursor == 8
    dataset.broken = False
    assert trained + samples(data) == order()


def test_a_pass_that_was_overtaken_says_so():
    data = loader()
    first = iter(data)
    next(first)
    next(iter(data))
    with pytest.raises(DataError, match="Another pass"):
        next(first)


def test_the_trainers_random_numbers_do_not_depend_on_loading():
    def drawn(**options):
        torch.manual_seed(3)
        sums = [torch.rand(()).item() for _ in loader(**options)]
        return sums, torch.rand(()).item()

    torch.manual_seed(3)
    expected = [torch.rand(()).item() for _ in range(11)]
    assert drawn() == drawn(num_workers=1) == (expected[:10], expected[10])


# --- what it refuses --------------------------------------------------------------------------------------------------

STATE = {"seed": 0, "epoch": 1, "cursor": 8, "length": 40, "order": "shuffled-1"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 41}, "had 41 samples, this one has 40"),
        ({"seed": 7}, "seed is 7, the loader's 0"),
        ({"order": "sequential"}, "order is 'sequential'"),
        ({"cursor": 41}, "41 of 40"),
        ({"cursor": -1}, "cursor is -1"),
        ({"epoch": "1"}, "epoch is '1'"),
        ({"epoch": True}, "epoch is True"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change, words):
    data = loader()
    with pytest.raises(DataStateError, match=words):
        data.load_state_dict({**STATE, **change})
    assert samples(data) == order()


def part_of_40(indices, batch_size=4):
    return DataLoader(Subset(Numbers(80), indices), batch_size, True, collate_fn=list)


def test_a_subset_of_other_samples_is_refused():
    """As `random_split` gives after a restart, if its random numbers begin with another seed."""
    kept = part_of_40(range(40)).state_dict()
    with pytest.raises(DataStateError, match="had other samples"):
        part_of_40([*range(39), 79]).load_state_dict(kept)
    part_of_40(torch.arange(40)).load_state_dict(kept)
    loader().load_state_dict(kept)  # the same samples may be a dataset of their own now
    part_of_40(range(40)).load_state_dict(loader().state_dict())  # and in snapshots without that entry


def test_the_part_of_a_dataset_is_known_through_its_wrappers_if_its_indices_are_numbers():
    inner = [Subset(Numbers(80), each) for each in (range(40), range(1, 41))]
    outer = [part_of(Subset(each, range(8))) for each in inner]
    joined = [part_of(ConcatDataset([Numbers(3), each])) for each in inner]
    assert len({*outer, *joined, *map(part_of, inner)}) == 6
    assert part_of(Numbers(3)) == part_of(ConcatDataset([Numbers(3)])) == part_of(Subset(Numbers(3), ["a"])) == ""
    assert part_of(Subset(Numbers(1), range(1_000_000))) != part_of(Subset(Numbers(1), range(1, 1_000_001)))


@pytest.mark.usefixtures("own_staging")
def test_ranks_that_would_divide_different_data_do_not_begin(tmp_path, monkeypatch):
    """See also test_train_agreement.py."""

    def differ(self, peers):
        raise DataError("the ranks divide different data")

    monkeypatch.setattr(Tracker, "check_data", differ)
    for begin in (ht.Snapshots.resume, ht.Snapshots.step):
        snaps = ht.Snapshots(tmp_path, every=None, memory_every=None)
        snaps.track(loader=loader())
        with pytest.raises(DataError, match="different data"):
            begin(snaps)


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ValueError, match="cursor, epoch, length, order, seed missing"):
        loader().load_state_dict({"model": 1})


def test_a_dataset_that_can_only_be_read_from_its_start_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(5)

    with pytest.raises(DataError, match="ShardedDataset"):
        DataLoader(Stream())


@pytest.mark.parametrize(
    "options",
    [
        {"global_batch_size": 8, "micro_batches": 2},
        {"drop_last": True, "tail": "pad"},
        {"tail": "round"},
        {"batch_size": 0},
        {"micro_batches": 0},
        {"ranks": 1},
        {"ranks": (1,)},
        {"ranks": (2, 2)},
        {"ranks": ("0", "2")},
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options):
    with pytest.raises(DataError):
        loader(**options)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("bath_size", " Did you mean batch_size="),
        ("persistant_workers", " Did you mean persistent_workers="),
        ("microbatches", " Did you mean micro_batches="),
        ("in_order", ""),
        ("wholly_unknown", ""),
    ],
)
def test_an_unknown_argument_is_refused(name, advice):
    with pytest.raises(DataError, match=rf"^DataLoader has no argument {name}=\.{advice}"):
        loader(**{name: 1})


def test_a_sampler_of_none_is_as_if_it_was_not_given():
    assert len(list(loader(sampler=None, batch_sampler=None))) == 10


def test_drop_last_is_a_tail():
    assert len(list(loader(7, 4, drop_last=True))) == 1
    assert len(list(loader(7, 4, drop_last=False))) == 2


def test_a_batch_counts_as_a_whole():
    data = loader()
    batches = iter(data)
    next(batches)
    with pytest.raises(DataError, match="the batch has 4 samples"):
        data.trained(3)
    data.trained(4)
    assert data.cursor == 4
    next(batches)
    data.trained()
    data.trained()
    assert data.cursor == 8


def test_the_seed_is_the_generators_when_none_is_given():
    assert loader(generator=torch.Generator().manual_seed(5)).state_dict()["seed"] == 5


# --- rank and world ---------------------------------------------------------------------------------------------------


def test_rank_and_world_are_the_launchers(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    data = loader()
    assert (data._rank, data._world) == (2, 3)
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(DataError, match="two"):
        loader()


def test_without_a_launcher_the_world_is_one(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert (loader()._rank, loader()._world) == (0, 1)


def test_the_process_group_comes_first(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert (loader()._rank, loader()._world) == (0, 1)
    finally:
        torch.distributed.destroy_process_group()


# --- empty and tiny ---------------------------------------------------------------------------------------------------


def test_no_samples_is_no_batch():
    assert list(loader(0)) == []


@pytest.mark.parametrize("length", [1, 2, 5])
def test_more_ranks_than_samples(length):
    ranks = [loader(length, batch_size=1, ranks=(rank, 4)) for rank in range(4)]
    trained = [
        sample
        for parts in zip(*ranks, strict=True)
        for each, part in zip(ranks, parts, strict=True)
        for sample in part
        if each.share.weight
    ]
    assert sorted(trained) == list(range(length))


# --- what a script does around its loop neither loses a batch nor has one trained twice -------------------------------


class Job:
    def __init__(self, folder: Path) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = ht.DataLoader(torch.arange(12.0).reshape(12, 1), 2)
        self.snaps = ht.Snapshots(folder, every=None)
        self.state = self.snaps.track(model=self.model, optimizer=self.optimizer, loader=self.loader)
        self.resumed = self.snaps.resume()

    def optimize(self, rows: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(rows).mean().backward()
        self.optimizer.step()

    def train(self, batches: int) -> list[float]:
        seen: list[float] = []
        for _ in self.state.epochs(1):
            for rows in islice(self.loader, batches):
                seen += rows.flatten().tolist()
                self.optimize(rows)
                self.snaps.step()
        return seen


@pytest.mark.usefixtures("own_staging")
def test_what_is_read_between_a_resume_and_the_training_does_not_count(tmp_path: Path) -> None:
    first = Job(tmp_path)
    assert first.train(2) == [0.0, 1.0, 2.0, 3.0]
    first.state.epoch = 0  # it has broken off
    first.snaps.save(wait=True)
    first.snaps.close()
    job = Job(tmp_path)
    assert job.resumed is not None
    assert [rows.flatten().tolist() for rows in islice(job.loader, 3)] == [[4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]
    assert job.train(4) == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    job.snaps.close()


@pytest.mark.usefixtures("own_staging")
def test_save_before_a_step_is_counted_is_refused(tmp_path: Path) -> None:
    """The weights have the batch, and the loader has not."""
    job = Job(tmp_path)
    job.train(1)
    for rows in job.loader:
        job.optimize(rows)
        with pytest.raises(TrackingError, match=r"save\(\) after snaps\.step\(\)"):
            job.snaps.save()
        job.snaps.step()
        job.snaps.save(wait=True)
        break
    job.snaps.close()
