"""ht.DistributedSampler under torch's own loader."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader

from holdfast.core.errors import DataError, DataStateError
from holdfast.train.data.sampler import DistributedSampler


def sampler(length=40, world=1, rank=0, **options):
    return DistributedSampler(range(length), world, rank, **options)


def ranks_of(length, world, state=None, **options):
    ranks = [sampler(length, world, rank, **options) for rank in range(world)]
    for each in ranks:
        if state:
            each.load_state_dict(state)
    return ranks


@settings(deadline=None, derandomize=True, max_examples=250)
@given(
    st.integers(0, 60) | st.integers(0, 5000),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_any_world_goes_on_where_another_was(length, lives, drop_last, shuffle):
    """Lives are (world, batch size, batches); the last one trains to the end. Drawing runs ahead of training."""
    trained, state = Counter(), None
    for index, (world, batch_size, batches) in enumerate(lives):
        ranks = ranks_of(length, world, state, drop_last=drop_last, shuffle=shuffle, seed=3)
        drawn = [list(each) for each in ranks]
        assert {len(each) for each in drawn} == {len(ranks[0])}
        rounds = [[own[at : at + batch_size] for own in drawn] for at in range(0, len(drawn[0]), batch_size)]
        for parts in rounds if index == len(lives) - 1 else rounds[:batches]:
            trained.update(chain.from_iterable(parts))
            for each in ranks:
                each.note_trained(batch_size)
        for each in ranks:
            each.note_trained(0)
        assert all(each.state_dict() == ranks[0].state_dict() for each in ranks)
        state = ranks[0].state_dict()
    most = max(world for world, _, _ in lives)
    assert set(trained) <= set(range(length))
    lost, repeated = length - len(trained), trained.total() - len(trained)
    assert lost < most if drop_last else lost == 0
    assert repeated == 0 if drop_last else repeated < most


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
        data.note_trained(len(batch))
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
            data.note_trained(len(batch))
            batches += 1
        assert batches == 3


def test_a_sampler_that_nobody_told_refuses_a_state_in_the_middle():
    data = sampler()
    assert data.state_dict()["cursor"] == 0
    next(iter(data))
    with pytest.raises(DataStateError, match="note_trained"):
        data.state_dict()
    data.set_epoch(1)
    assert data.state_dict()["epoch"] == 1


@pytest.mark.parametrize("keys", [{"batch"}, set()], ids=["without the batch size", "with it"])
@pytest.mark.parametrize(("length", "batch_size", "batches"), [(40, 8, 5), (40, 12, 3)])
def test_a_job_that_died_after_its_last_batch_can_end(length, batch_size, batches, keys):
    """Nothing is left to train, or less than a batch, which torch's loader draws and drops: nobody reports anything."""
    data = sampler(length)
    for batch in islice(TorchLoader(range(length), batch_size=batch_size, sampler=data, drop_last=True), batches):
        data.note_trained(len(batch))
    state = {key: value for key, value in data.state_dict().items() if key not in keys}
    again = sampler(length)
    again.load_state_dict(state)
    loader = TorchLoader(range(length), batch_size=batch_size, sampler=again, drop_last=True)
    again.set_epoch(0)
    assert list(loader) == []
    assert again.state_dict()["cursor"] == batches * batch_size
    assert len(list(loader)) == batches
    assert again.epoch == 1


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
        sampler().note_trained(-1)
