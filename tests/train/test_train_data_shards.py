"""Data that is read in sequence: the order over shards, and how little is read."""

from __future__ import annotations

import json
from itertools import chain, islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol.errors import DataError, DataStateError
from holdfast.train.data.loader import DataLoader
from holdfast.train.data.position import GlobalBatch
from holdfast.train.data.shards import ShardedDataset, ShardOrder


class Files(ShardedDataset):
    """Samples are (shard, place); tells what was read and decoded."""

    def __init__(self, sizes, real=None):
        self.shard_sizes = sizes
        self.real = real or sizes
        self.opened, self.read_over, self.decoded = [], 0, 0

    def read(self, shard, start):
        self.opened.append((shard, start))
        for place in range(start, self.real[shard]):
            self.read_over += 1
            yield shard, place

    def decode(self, sample):
        self.decoded += 1
        return sample


def everything(sizes):
    return [(shard, place) for shard, size in enumerate(sizes) for place in range(size)]


def loader(dataset, batch_size=4, **options):
    return DataLoader(dataset, batch_size, collate_fn=list, **options)


SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(SIZES, st.integers(0, 99), st.booleans())
def test_the_order_goes_round_the_shards_and_forward_in_each(sizes, epoch, shuffle):
    order = ShardOrder(np.array(sizes), 1, epoch, shuffle=shuffle)
    samples = order.take(np.arange(sum(sizes)))
    assert sorted(samples.tolist()) == list(range(sum(sizes)))
    firsts = np.cumsum([0, *sizes])
    shards = np.searchsorted(firsts, samples, side="right") - 1
    places = samples - firsts[shards]
    assert (np.diff(places) >= 0).all()  # round after round


@settings(deadline=None, derandomize=True, max_examples=100)
@given(SIZES, st.integers(1, 6), st.integers(1, 40))
def test_a_step_is_cut_into_stretches_of_neighbouring_shards(sizes, world, batch_size):
    order = ShardOrder(np.array(sizes), 1, 0, shuffle=True)
    plan = GlobalBatch.following(world, batch_size)
    for step in zip(*(plan.deal(rank, 0, sum(sizes)) for rank in range(world)), strict=True):
        parts = [order.share(share) for share in step if share.weight]
        assert list(chain(*parts)) == sorted(order.take(np.arange(step[0].step_start, step[0].step_stop)).tolist())


def test_all_samples_come_once_with_workers_and_a_resize_in_the_middle():
    sizes = [30, 7, 0, 55, 12, 19]
    trained, state = [], None
    for world, batches in ((2, 3), (3, 99)):
        ranks = [loader(Files(sizes), shuffle=True, rank=r, world=world, num_workers=world - 2) for r in range(world)]
        for each in ranks:
            if state:
                each.load_state_dict(state)
        for parts in islice(zip(*ranks, strict=True), batches):
            trained += [s for each, part in zip(ranks, parts, strict=True) for s in part if each.share.weight]
            state = json.loads(json.dumps(ranks[0].state_dict()))
    assert sorted(trained) == everything(sizes)


def test_every_shard_is_opened_once_and_only_own_samples_are_decoded():
    dataset = Files([100] * 8)
    assert len(list(chain.from_iterable(loader(dataset, 16, rank=0, world=2)))) == 400
    assert sorted(dataset.opened) == [(shard, 0) for shard in range(4)]
    assert dataset.read_over == dataset.decoded == 400


def test_a_resumed_rank_opens_its_shards_where_they_are():
    dataset = Files([100] * 8)
    data = loader(dataset, 16, rank=0, world=2)
    data.load_state_dict({**data.state_dict(), "cursor": 320})
    next(iter(data))
    assert sorted(dataset.opened) == [(shard, 40) for shard in range(4)]


def test_more_shards_than_may_be_open_are_closed_and_opened_again(monkeypatch):
    monkeypatch.setattr("holdfast.train.data.shards.SHARDS_OPEN_MAX", 3)
    dataset = Files([4] * 8)
    assert sorted(chain.from_iterable(loader(dataset))) == everything([4] * 8)
    starts = [start for shard, start in dataset.opened if shard == 0]
    assert all(one < other for one, other in pairwise(starts))


def test_a_second_epoch_reads_from_the_start():
    data = loader(Files([5, 3]), shuffle=True)
    for _ in range(2):
        assert sorted(chain.from_iterable(data)) == everything([5, 3])


def test_padding_goes_on_at_the_epochs_start():
    ranks = [loader(Files([5, 2]), 2, tail="pad", rank=rank, world=2) for rank in range(2)]
    trained = list(chain.from_iterable(chain.from_iterable(ranks)))
    assert len(trained) == 8
    assert sorted(set(trained)) == everything([5, 2])


def test_by_itself_it_is_an_ordinary_iterable_dataset():
    dataset = Files([2, 3])
    assert list(dataset) == everything([2, 3])
    assert len(dataset) == 5


def test_a_shard_that_ends_too_early_is_named():
    with pytest.raises(DataError, match="Shard 1 ended after 2 samples; shard_sizes says 5"):
        list(loader(Files([5, 5], real=[5, 2])))


def test_other_shards_of_the_same_total_are_refused():
    state = loader(Files([5, 5])).state_dict()
    with pytest.raises(DataStateError, match="shards"):
        loader(Files([4, 6])).load_state_dict(state)


@pytest.mark.parametrize("sizes", [[], [3, -1]])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(DataError, match="shard_sizes"):
        loader(Files(sizes, real=[1]))
