"""A sample's augmentation follows from (seed, epoch, index), whoever reads it."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from holdfast.train.data.loader import BatchKey, DataLoader, Seeded, sample_seed


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
            dataset, batch_size, True, seed=seed, num_workers=workers, collate_fn=list, rank=rank, world=world
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
