"""ht.DistributedSampler under torch's own loader, and the seeds of samples."""

from __future__ import annotations

import contextlib
import pickle
import random
import warnings
from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Subset

from holdfast.protocol.errors import DataError, DataStateError
from holdfast.train.continued_pass import ContinuedPasses
from holdfast.train.data.datasets import BatchKey, Seeded, sample_seed
from holdfast.train.data.loader import DataLoader
from holdfast.train.data.sampler import DistributedSampler
from holdfast.train.state import Tracker


def sampler(length=40, world=1, rank=0, **options):
    return DistributedSampler(range(length), world, rank, **options)


def test_it_is_torchs_kind_so_that_trainers_leave_it_alone():
    assert isinstance(sampler(), torch.utils.data.DistributedSampler)


def test_epochs_follow_by_themselves_and_by_set_epoch():
    data = sampler()
    first, second = list(data), list(data)
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    data.set_epoch(0)
    assert list(data) == first
    data.epoch = 1
    assert list(data) == second


def test_looking_at_an_index_costs_none():
    data = sampler()
    seen = next(iter(data))
    assert next(iter(data)) == seen
    assert len(list(data)) == 40


@pytest.mark.parametrize("workers", [0, 1])
def test_under_torchs_loader_with_workers_that_fetch_ahead(workers):
    data = sampler()
    options = {"num_workers": workers, "prefetch_factor": 10} if workers else {}
    loader = TorchLoader(range(40), batch_size=4, sampler=data, collate_fn=list, **options)
    trained = []
    for batch in islice(loader, 3):
        trained += batch
        data.trained(len(batch))
    assert data.state_dict()["cursor"] == 12
    again = sampler()
    again.load_state_dict(data.state_dict())
    again.set_epoch(0)
    assert len(again) == 28
    trained += chain.from_iterable(TorchLoader(range(40), batch_size=4, sampler=again, collate_fn=list))
    assert sorted(trained) == list(range(40))


def test_a_loader_that_drops_its_last_batch_goes_on_to_the_next_epoch():
    data = sampler()
    loader = TorchLoader(range(40), batch_size=12, sampler=data, drop_last=True)
    for epoch in range(3):
        batches = 0
        for batch in loader:
            assert data.epoch == epoch
            data.trained(len(batch))
            batches += 1
        assert batches == 3


def test_a_sampler_that_nobody_told_refuses_a_state_in_the_middle():
    data = sampler()
    assert data.state_dict()["cursor"] == 0
    next(iter(data))
    with pytest.raises(DataStateError, match=r"sampler\.trained\(batch_size\)"):
        data.state_dict()
    data.set_epoch(1)
    assert data.state_dict()["epoch"] == 1


@pytest.mark.parametrize("keys", [{"batch"}, set()], ids=["without the batch size", "with it"])
@pytest.mark.parametrize(("length", "batch_size", "batches"), [(40, 8, 5), (40, 12, 3)])
def test_a_job_that_died_after_its_last_batch_can_end(length, batch_size, batches, keys):
    """Nothing is left to train, or less than a batch, which torch's loader draws and drops: nobody reports anything."""
    data = sampler(length)
    for batch in islice(TorchLoader(range(length), batch_size=batch_size, sampler=data, drop_last=True), batches):
        data.trained(len(batch))
    state = {key: value for key, value in data.state_dict().items() if key not in keys}
    again = sampler(length)
    again.load_state_dict(state)
    loader = TorchLoader(range(length), batch_size=batch_size, sampler=again, drop_last=True)
    again.set_epoch(0)
    assert list(loader) == []
    assert again.state_dict()["cursor"] == batches * batch_size
    assert len(list(loader)) == batches
    assert again.epoch == 1


def tracked(length=40, **options):
    data, tracker = sampler(length, **options), Tracker()
    tracker.add({"sampler": data})
    return data, tracker


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("length", "drop_last"), [(40, False), (42, False), (42, True)])
def test_each_step_counts_a_batch_of_a_sampler_that_knows_its_size(length, drop_last, workers):
    data, tracker = tracked(length, batch_size=4)
    options = {"num_workers": workers, "prefetch_factor": 20} if workers else {}
    loader = TorchLoader(range(length), batch_size=4, sampler=data, drop_last=drop_last, collate_fn=list, **options)
    for epoch in range(2):
        trained = []
        for batch in loader:
            trained += batch
            tracker.note_trained()
            assert (data.epoch, data.state_dict()["cursor"]) == (epoch, len(trained))
        assert len(set(trained)) == (length // 4 * 4 if drop_last else length)


def test_a_job_with_such_a_sampler_goes_on_in_another_world():
    ranks = [tracked(world=2, rank=rank, batch_size=4) for rank in range(2)]
    trained = []
    for data, tracker in ranks:
        for batch in islice(TorchLoader(range(40), batch_size=4, sampler=data, collate_fn=list), 3):
            trained += batch
            tracker.note_trained()
    assert ranks[0][0].state_dict() == ranks[1][0].state_dict()
    again, tracker = tracked(batch_size=8)
    tracker.others["sampler"].load_state_dict(ranks[0][0].state_dict())
    again.set_epoch(0)
    for batch in TorchLoader(range(40), batch_size=8, sampler=again, collate_fn=list):
        trained += batch
        tracker.note_trained()
    assert sorted(trained) == list(range(40))


def test_before_the_first_step_nothing_is_trained():
    data, tracker = tracked(batch_size=4)
    next(iter(data))
    assert tracker.positions()["sampler"]["cursor"] == 0


def test_a_step_counts_no_batch_of_a_sampler_that_is_not_read():
    data, tracker = tracked(batch_size=4)
    tracker.note_trained()
    assert data.state_dict()["cursor"] == 0


def test_a_batch_is_not_counted_twice():
    data, tracker = tracked(batch_size=4)
    indices = iter(data)
    next(indices)
    data.trained()  # the script counts from its first batch on
    tracker.note_trained()
    assert data.state_dict()["cursor"] == 4
    other, tracker = tracked(batch_size=4)
    indices = iter(other)
    next(indices)
    tracker.note_trained()
    with pytest.raises(DataError, match="counted this batch already"):
        other.trained(4)


@contextlib.contextmanager
def training_and_validation(workers=0, **options):
    """A training over 40 samples and an evaluation over 10, both with tracked samplers, as `Snapshots.track` sees them;
    and the evaluation itself, which gives the samples that it has seen."""
    samplers = {"train": sampler(batch_size=4), "valid": sampler(10, batch_size=4, **options)}
    more = {"num_workers": workers, "prefetch_factor": 10} if workers else {}
    tracker = Tracker()
    tracker.add(samplers)
    passes = ContinuedPasses(tracker.others.values)
    train = TorchLoader(range(40), 4, sampler=samplers["train"], collate_fn=list)
    valid = TorchLoader(range(10), 4, sampler=samplers["valid"], collate_fn=list, **more)
    try:
        yield tracker, train, lambda: list(chain.from_iterable(valid))
    finally:
        passes.stop()


@pytest.mark.parametrize("workers", [0, 1])
def test_every_evaluation_over_a_tracked_sampler_is_a_whole_one(workers):
    with training_and_validation(workers) as (tracker, train, evaluate):
        seen, trained = [], 0
        for step, _ in enumerate(chain(train, train), 1):
            if step % 5 == 0:
                seen.append(evaluate())  # before the step is counted
            tracker.note_trained()
            trained += 4
            assert tracker.positions()["train"]["cursor"] == (trained - 1) % 40 + 1
            if step % 3 == 0:
                seen.append(evaluate())
    assert len(seen) == 10
    assert all(sorted(each) == list(range(10)) for each in seen)
    assert len(set(map(tuple, seen))) > 1  # shuffled anew


@pytest.mark.parametrize("steps", [2, 5, 9])
def test_evaluations_go_on_after_a_resume_as_if_there_was_none(steps):
    def job(tracker, train, evaluate, stops):
        for name in ("train", "valid"):
            tracker.others[name].set_epoch(0)
        for batch in islice(train, stops):
            tracker.note_trained()
            yield batch, evaluate() if tracker.others["train"].state_dict()["cursor"] % 8 == 0 else None

    with training_and_validation() as (tracker, train, evaluate):
        whole = list(job(tracker, train, evaluate, 10))
    with training_and_validation() as (tracker, train, evaluate):
        first = list(job(tracker, train, evaluate, steps))
        state = tracker.positions()
    with training_and_validation() as (tracker, train, evaluate):
        tracker.set_positions(state)
        assert first + list(job(tracker, train, evaluate, 10)) == whole


def test_an_evaluation_that_is_left_early_counts_nothing():
    with training_and_validation(shuffle=False) as (tracker, train, evaluate):
        for step, _ in enumerate(train):
            tracker.note_trained()
            if step == 1:
                valid = iter(TorchLoader(range(10), 4, sampler=tracker.others["valid"], collate_fn=list))
                assert next(valid) == [0, 1, 2, 3]
                del valid
        assert evaluate() == list(range(10))


def one_pass(batch_size, loaders, every=1, length=48):
    """A pass in which `snaps.step()` counts a batch of each `every` batches."""
    data, tracker = tracked(length, batch_size=batch_size)
    passes = ContinuedPasses(tracker.others.values)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(passes.stop)
        for number, _ in enumerate(TorchLoader(range(length), loaders, sampler=data, collate_fn=list), 1):
            if number % every == 0 or number * loaders >= length:
                tracker.note_trained()
    return data.state_dict()["cursor"]


@pytest.mark.parametrize(("batch_size", "loaders"), [(4, 8), (8, 4), (6, 4)])
def test_a_loader_with_another_batch_size_is_refused_at_its_first_step(batch_size, loaders):
    with pytest.raises(DataError, match=f"loader has batch_size={loaders}, and its sampler batch_size={batch_size}"):
        one_pass(batch_size, loaders)


@pytest.mark.parametrize("length", [48, 50, 3])
def test_a_step_that_takes_several_batches_of_the_loader_is_right_if_the_sampler_knows(length):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one_pass(8, 4, every=2, length=length) == length


def test_steps_that_take_more_than_they_count_are_warned_of():
    with pytest.warns(RuntimeWarning, match=r"counts one batch of the tracked sampler, and the loop takes more"):
        one_pass(4, 4, every=2)


def test_without_its_batch_size_a_sampler_wants_a_number():
    data, tracker = tracked()
    next(iter(data))
    tracker.note_trained()
    with pytest.raises(DataStateError, match="batch_size="):
        data.state_dict()
    with pytest.raises(DataError, match=r"trained\(batch_size\)"):
        data.trained()


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": True}, {"rank": None}, {"num_replicas": None}])
def test_sampler_arguments_that_mean_nothing(options):
    with pytest.raises(DataError):
        DistributedSampler(range(4), **{"num_replicas": 2, "rank": 1, **options})


def test_an_empty_epoch_draws_nothing():
    data = sampler(0)
    assert list(data) == []
    assert data.state_dict()["cursor"] == 0


def test_a_long_order_is_drawn_without_being_made():
    length = 10**12
    data = DistributedSampler(range(length), 3, 1)
    assert len(set(islice(data, 10_000))) == 10_000


@pytest.mark.parametrize("options", [{"tail": "even"}, {"tail": "pad", "drop_last": True}])
def test_a_tail_that_needs_weights_is_refused(options):
    with pytest.raises(DataError, match="weights"):
        sampler(**options)


def test_a_negative_size_is_refused():
    with pytest.raises(DataError, match="-1"):
        sampler().trained(-1)


# --- A sample's augmentation follows from (seed, epoch, index), whoever reads it --------------------------------------


class Augmented(torch.utils.data.Dataset):
    """Draws as datasets do, from all three generators."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), torch.rand(()).item()


class ReadsBatches(Augmented):
    def __getitems__(self, indices):
        return [(index, random.random()) for index in indices]


def seen(dataset, world=1, batch_size=4, workers=0, seed=0, epoch=0):
    found = {}
    for rank in range(world):
        data = DataLoader(
            dataset, batch_size, True, seed=seed, num_workers=workers, collate_fn=list, ranks=(rank, world)
        )
        data.set_epoch(epoch)
        found |= {sample[0]: sample[1:] for batch in data for sample in batch}
    return found


@pytest.mark.parametrize("dataset", [Augmented(), Subset(Augmented(), range(24))])
def test_an_augmentation_does_not_depend_on_world_batch_or_workers(dataset):
    one = seen(dataset)
    assert len({values for sample in one.values() for values in sample}) == 24 * 3
    assert one == seen(dataset, world=3, batch_size=5) == seen(dataset, workers=2)


def test_it_differs_from_epoch_to_epoch_and_from_seed_to_seed():
    one = seen(Augmented())
    for other in (seen(Augmented(), epoch=1), seen(Augmented(), seed=1)):
        assert all(one[index] != other[index] for index in one)


def test_reading_in_the_training_process_leaves_its_generators_alone():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    list(DataLoader(Augmented(), 4))
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


class Flip:
    """A transform with a generator of its own."""

    def __init__(self, generator):
        self.generator = generator

    def __call__(self, _value):
        return torch.rand((), generator=self.generator).item()


class DrawsByItself(Augmented):
    """It draws from its own generators, also from those of its transforms."""

    def __init__(self):
        self.rows = [object() for _ in range(1000)]
        self.random, self.numpy, self.older = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
        self.itself = self
        self.transforms = {"flip": [Flip(torch.Generator()), Flip(torch.Generator())]}

    def __getitem__(self, index):
        numbers = self.random.random(), self.numpy.random(), self.older.rand(), random.random()
        return (index, *numbers, *(flip(index) for flip in self.transforms["flip"]))


def test_a_datasets_own_generators_are_seeded_too():
    one = seen(DrawsByItself())
    assert len({value for sample in one.values() for value in sample}) == 24 * 6
    assert one == seen(DrawsByItself(), world=3, batch_size=5) == seen(DrawsByItself(), workers=2)
    assert all(one[index] != other for index, other in seen(DrawsByItself(), epoch=1).items())


class NotOpen:
    """As a proxy of an object that is made when it is first used."""

    @property
    def __class__(self):
        raise RuntimeError("it was used")

    def __getattribute__(self, name):
        raise RuntimeError("it was used")


class Foreign(list):
    def __len__(self):
        raise RuntimeError("it was read")

    __iter__ = __len__


class DrawsAsItLikes(Augmented):
    """It has objects that nobody else may use, and a generator of numpy that cannot be seeded in its own way."""

    def __init__(self):
        self.older = np.random.RandomState(np.random.PCG64(1))
        self.system, self.proxy, self.items = random.SystemRandom(), NotOpen(), Foreign([1])

    def __getitem__(self, index):
        return index, self.older.rand()


def test_foreign_objects_of_a_dataset_are_left_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert seen(DrawsAsItLikes()) == seen(DrawsAsItLikes(), world=3, batch_size=5)


class Large(DrawsByItself):
    """It has so many objects that a search takes long, and makes its generator in the first epoch."""

    searches = 0

    def __init__(self):
        self.groups = [{each: Counted() for each in range(10)} for _ in range(30)]

    def __getitem__(self, index):
        self.random = vars(self).get("random", random.Random())
        return index, self.random.random()


class Counted:
    """It counts how often its attributes are asked for."""

    @property
    def __dict__(self):
        Large.searches += 1
        return {}


def test_a_search_over_many_objects_is_made_seldom():
    dataset = Large()
    data = DataLoader(dataset, 1, collate_fn=list)
    before = Large.searches
    list(data)
    assert Large.searches - before == 300 * len([1, 2, 4, 8, 16])
    assert seen(dataset, epoch=3) == seen(dataset, epoch=3, batch_size=5), "a generator that was made meanwhile"


def test_reading_in_the_training_process_leaves_the_datasets_own_generators_alone():
    """The training may draw from them, too."""

    def drawn(dataset):
        return dataset.random.random(), dataset.numpy.random(), dataset.older.rand(), dataset.transforms["flip"][0](0)

    dataset = DrawsByItself()
    list(DataLoader(dataset, 4, collate_fn=list))
    assert drawn(dataset) == drawn(DrawsByItself())


def test_without_seeding_the_dataset_draws_from_the_trainers_generators():
    random.seed(1)
    first = random.random()
    random.seed(1)
    data = DataLoader(Augmented(), 4, seed_samples=False, collate_fn=list)
    assert next(iter(data))[0][1] == first


def test_a_dataset_that_reads_whole_batches_is_read_so():
    assert all(len(values) == 1 for values in seen(ReadsBatches()).values())
    assert seen(ReadsBatches()) == seen(ReadsBatches(), workers=1)


def test_the_wrapper_is_transparent_for_worker_init_functions():
    wrapped = Seeded(Augmented(), 0, enabled=True)
    wrapped.file = "open"
    assert wrapped._dataset.file == wrapped.file == "open"
    assert len(wrapped) == 24
    copied = pickle.loads(pickle.dumps(wrapped))
    key = BatchKey(1, [2, 3])
    assert copied.__getitems__(key) == wrapped.__getitems__(key)
    with pytest.raises(AttributeError):
        wrapped.nothing  # noqa: B018


def test_sample_seeds_are_64_bits_and_all_different():
    seeds = {sample_seed(seed, epoch, index) for seed in (-1, 0, 1) for epoch in range(3) for index in range(500)}
    assert len(seeds) == 3 * 3 * 500
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sample_seed(0, 0, 0) == 2558736989570252433  # for ever: augmentations of jobs out there
