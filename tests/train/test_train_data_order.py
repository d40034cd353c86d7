"""Which sample comes when: the order of an epoch, the arithmetic of the global batch, the order over shards."""

from __future__ import annotations

import json
import math
import weakref
from itertools import chain, islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol.errors import DataError, DataStateError
from holdfast.train.data import ARRAY_LENGTH_MAX, ROUNDS, Feistel, GlobalBatch, Shuffled, order_of, philox
from holdfast.train.data.datasets import ShardedDataset, ShardOrder
from holdfast.train.data.loader import DataLoader

WORD = (1 << 64) - 1


def philox_block(key, counter):
    """Philox4x64-10 as published (Salmon et al., 2011)."""
    k0, k1 = key
    c = list(counter)
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c[0], 1 << 64)
        high1, low1 = divmod(0xCA5A826395121157 * c[2], 1 << 64)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return c


def words(seed, epoch, count):
    """numpy counts up before it makes a block: the first is that of counter 1."""
    blocks = [philox_block((seed & WORD, epoch), (number, 0, 0, 0)) for number in range(1, count // 4 + 2)]
    return [word for block in blocks for word in block][:count]


def mixed(number):
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & WORD
    return number ^ (number >> 31)


def plain_feistel(length, seed, epoch, number):
    rows = math.isqrt(length - 1) + 1
    columns = -(-length // rows)
    while True:
        left, right = divmod(number, columns)
        for index, key in enumerate(words(seed, epoch, ROUNDS)):
            if index % 2:
                right = (right + mixed(left ^ key)) % columns
            else:
                left = (left + mixed(right ^ key)) % rows
        number = left * columns + right
        if number < length:
            return number


def test_philox_is_the_published_one():
    """The known answer of the authors' own test for Philox4x64-10, key and counter zero."""
    assert philox_block((0, 0), (0, 0, 0, 0)) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]
    assert philox(123, 45).random_raw(9).tolist() == words(123, 45, 9)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 3), (-1, 2), (2**64 + 5, 10**9)])
@pytest.mark.parametrize("length", [1, 2, 1000])
def test_the_shuffled_order_is_as_specified(length, seed, epoch):
    keys = [(word >> 24, number) for number, word in enumerate(words(seed, epoch, length))]
    assert order_of(length, seed, epoch, shuffle=True).take(np.arange(length)).tolist() == [n for _, n in sorted(keys)]


@pytest.mark.parametrize("length", [ARRAY_LENGTH_MAX + 1, 2**40 + 17])
def test_a_long_order_is_as_specified_and_needs_no_memory(length):
    order = order_of(length, 5, 6, shuffle=True)
    assert isinstance(order, Feistel)
    for start in (0, length // 2, length - 20):
        stretch = np.arange(start, start + 20)
        assert order.take(stretch).tolist() == [plain_feistel(length, 5, 6, number) for number in stretch.tolist()]


def test_the_newest_order_is_kept_and_no_other():
    """Survivors begin their loop over the same epoch again."""
    order = order_of(100, 1, 2, shuffle=True)
    assert order_of(100, 1, 2, shuffle=True) is order
    gone = weakref.ref(order)
    del order
    for other in ((100, 1, 3), (100, 2, 2), (101, 1, 2)):
        assert order_of(*other, shuffle=True).length == other[0]
    assert gone() is None


def test_golden_orders():
    """Snapshots out there rely on these. Never change them: give another specification another name."""
    assert order_of(10, 0, 0, shuffle=True).take(np.arange(10)).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert order_of(10**9, 0, 1, shuffle=True).take(np.arange(4)).tolist() == [
        643448148,
        690087848,
        218872394,
        229832636,
    ]


@settings(max_examples=200)
@given(st.integers(0, 3000), st.integers(0, 2**64), st.integers(0, 2**40), st.sampled_from([Shuffled, Feistel]))
def test_every_sample_is_in_the_order_once(length, seed, epoch, kind):
    assert sorted(kind(length, seed, epoch).take(np.arange(length)).tolist()) == list(range(length))


@pytest.mark.parametrize("kind", [Shuffled, Feistel])
def test_orders_of_epochs_and_seeds_have_nothing_in_common(kind):
    """Fixed points against another order are about one, whatever the length; sums of shifted products show no drift."""
    length = 20_000
    orders = [kind(length, seed, epoch).take(np.arange(length)).astype(float) for seed in (0, 1) for epoch in (0, 1)]
    orders.append(np.arange(length, dtype=float))
    for index, one in enumerate(orders):
        for other in orders[:index]:
            assert (one == other).sum() < 12
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(length)
    for order in orders[:-1]:
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 5 / math.sqrt(length)


@pytest.mark.parametrize("kind", [Shuffled, Feistel])
def test_every_sample_comes_to_every_place(kind):
    """Chi-square over 2,000 epochs of 12 samples: 144 places, 121 degrees of freedom, 99.99 % below 189."""
    epochs, length = 2000, 12
    seen = np.zeros((length, length))
    for epoch in range(epochs):
        seen[np.arange(length), kind(length, 99, epoch).take(np.arange(length))] += 1
    expected = epochs / length
    assert ((seen - expected) ** 2 / expected).sum() < 189


def test_not_shuffled_is_the_datasets_own_order():
    assert order_of(5, 1, 1, shuffle=False).take(np.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_an_epoch_below_zero_is_refused():
    with pytest.raises(DataError, match="-1"):
        order_of(5, 1, -1, shuffle=True)


# --- the arithmetic of the global batch -------------------------------------------------------------------------------


PLANS = st.one_of(
    st.builds(GlobalBatch.following, st.integers(1, 9), st.integers(1, 40), st.integers(1, 5)),
    st.builds(GlobalBatch.kept, st.integers(1, 300), st.integers(1, 9), st.none() | st.integers(1, 40)),
)


def steps_of(plan, cursor, length):
    """All ranks' shares, by optimizer step."""
    ranks = [list(plan.deal(rank, cursor, length)) for rank in range(plan.world)]
    assert {len(shares) for shares in ranks} == {plan.batches(cursor, length)}
    every = plan.micro_batches
    return [
        [share for shares in ranks for share in shares[index : index + every]]
        for index in range(0, plan.batches(cursor, length), every)
    ]


@settings(max_examples=250)
@given(PLANS, st.integers(0, 2000), st.floats(0, 1))
def test_an_even_tail_deals_every_position_once_and_weighs_it_rightly(plan, length, trained):
    cursor = int(trained * length)
    dealt = []
    for step in steps_of(plan, cursor, length):
        own = [share for share in step if share.weight]
        dealt += [position for share in own for position in range(share.start, share.stop)]
        samples = sum(share.stop - share.start for share in own)
        assert samples == step[0].step_stop - step[0].step_start <= plan.size
        assert max(share.stop - share.start for share in step) <= plan.batch_size
        # Mean over ranks of the sum over micro-batches of scale * mean loss: each sample has to count 1 / samples.
        for share in own:
            assert share.scale / plan.world / (share.stop - share.start) == pytest.approx(1 / samples, rel=1e-12)
        for share in step:
            assert share.step_start <= share.start < share.stop <= share.step_stop
        assert [share.micro for share in step] == list(range(plan.micro_batches)) * plan.world
        assert {share.cursor for share in step if share.last} == {step[0].step_stop}
        assert {share.cursor for share in step if not share.last} <= {step[0].step_start}
    assert sorted(dealt) == list(range(cursor, length))


@settings(max_examples=150)
@given(PLANS, st.integers(0, 2000), st.sampled_from(["drop", "pad"]))
def test_what_drop_and_pad_cost_is_as_stated(plan, length, tail):
    plan = GlobalBatch(plan.size, plan.world, plan.micro_batches, tail)
    steps = steps_of(plan, 0, length)
    positions = [p for step in steps for share in step if share.weight for p in range(share.start, share.stop)]
    assert sorted(positions) == list(range(len(positions)))
    if tail == "drop":
        assert length - len(positions) == length % plan.size
    else:
        assert 0 <= len(positions) - length < plan.parts
        if steps and length % plan.size:
            assert {share.weight for share in steps[-1]} == {1.0}


@settings(max_examples=150)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3000))
def test_a_kept_global_batch_makes_the_same_steps_on_any_world(size, batch_size, one, other, length):
    def made(world):
        plan = GlobalBatch.kept(size, world, batch_size)
        assert plan.batch_size <= batch_size
        return [(step[0].step_start, step[0].step_stop) for step in steps_of(plan, 0, length)]

    assert made(one) == made(other)


def test_the_numbers_of_an_example():
    plan = GlobalBatch.kept(32, world=3, batch_size_max=8)
    assert (plan.micro_batches, plan.batch_size) == (2, 6)
    shares = list(plan.deal(0, 0, 40))
    assert [(share.start, share.stop, share.last) for share in shares] == [
        (0, 6, False),
        (6, 12, True),
        (32, 34, False),
        (34, 36, True),
    ]
    assert shares[0].weight == pytest.approx(6 / (32 / 6))


def test_a_rank_without_a_sample_keeps_step_with_weight_zero():
    plan = GlobalBatch.following(world=4, batch_size=8)
    last = [list(plan.deal(rank, 32, 34))[-1] for rank in range(4)]
    assert [(share.start, share.stop, share.weight) for share in last] == [
        (32, 33, 2.0),
        (33, 34, 2.0),
        (32, 33, 0.0),
        (32, 33, 0.0),
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: GlobalBatch.following(2, 0),
        lambda: GlobalBatch.following(2, 4, micro_batches=0),
        lambda: GlobalBatch.following(2, True),
        lambda: GlobalBatch.kept(0, 2),
        lambda: GlobalBatch.kept(2.5, 2),
        lambda: GlobalBatch.kept(8, 2, -1),
        lambda: GlobalBatch(8, 2, 1, "round"),
    ],
)
def test_impossible_numbers_are_refused(make):
    with pytest.raises(DataError):
        make()


# --- data that is read in sequence: the order over shards, and how little is read -------------------------------------


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


def read_by(dataset, batch_size=4, **options):
    return DataLoader(dataset, batch_size, collate_fn=list, **options)


SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@settings(max_examples=100)
@given(SIZES, st.integers(0, 99), st.booleans())
def test_the_order_goes_round_the_shards_and_forward_in_each(sizes, epoch, shuffle):
    order = ShardOrder(np.array(sizes), 1, epoch, shuffle=shuffle)
    samples = order.take(np.arange(sum(sizes)))
    assert sorted(samples.tolist()) == list(range(sum(sizes)))
    firsts = np.cumsum([0, *sizes])
    shards = np.searchsorted(firsts, samples, side="right") - 1
    places = samples - firsts[shards]
    assert (np.diff(places) >= 0).all()  # round after round


@settings(max_examples=100)
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
        ranks = [read_by(Files(sizes), shuffle=True, ranks=(r, world), num_workers=world - 2) for r in range(world)]
        for each in ranks:
            if state:
                each.load_state_dict(state)
        for parts in islice(zip(*ranks, strict=True), batches):
            trained += [s for each, part in zip(ranks, parts, strict=True) for s in part if each.share.weight]
            state = json.loads(json.dumps(ranks[0].state_dict()))
    assert sorted(trained) == everything(sizes)


def test_every_shard_is_opened_once_and_only_own_samples_are_decoded():
    dataset = Files([100] * 8)
    assert len(list(chain.from_iterable(read_by(dataset, 16, ranks=(0, 2))))) == 400
    assert sorted(dataset.opened) == [(shard, 0) for shard in range(4)]
    assert dataset.read_over == dataset.decoded == 400


def test_a_resumed_rank_opens_its_shards_where_they_are():
    dataset = Files([100] * 8)
    data = read_by(dataset, 16, ranks=(0, 2))
    data.load_state_dict({**data.state_dict(), "cursor": 320})
    next(iter(data))
    assert sorted(dataset.opened) == [(shard, 40) for shard in range(4)]


def test_more_shards_than_may_be_open_are_closed_and_opened_again(monkeypatch):
    monkeypatch.setattr("holdfast.train.data.datasets.SHARDS_OPEN_MAX", 3)
    dataset = Files([4] * 8)
    assert sorted(chain.from_iterable(read_by(dataset))) == everything([4] * 8)
    starts = [start for shard, start in dataset.opened if shard == 0]
    assert all(one < other for one, other in pairwise(starts))


def test_a_second_epoch_reads_from_the_start():
    data = read_by(Files([5, 3]), shuffle=True)
    for _ in range(2):
        assert sorted(chain.from_iterable(data)) == everything([5, 3])


def test_padding_goes_on_at_the_epochs_start():
    ranks = [read_by(Files([5, 2]), 2, tail="pad", ranks=(rank, 2)) for rank in range(2)]
    trained = list(chain.from_iterable(chain.from_iterable(ranks)))
    assert len(trained) == 8
    assert sorted(set(trained)) == everything([5, 2])


def test_by_itself_it_is_an_ordinary_iterable_dataset():
    dataset = Files([2, 3])
    assert list(dataset) == everything([2, 3])
    assert len(dataset) == 5


def test_a_shard_that_ends_too_early_is_named():
    with pytest.raises(DataError, match="Shard 1 ended after 2 samples; shard_sizes says 5"):
        list(read_by(Files([5, 5], real=[5, 2])))


def test_other_shards_of_the_same_total_are_refused():
    state = read_by(Files([5, 5])).state_dict()
    with pytest.raises(DataStateError, match="shards"):
        read_by(Files([4, 6])).load_state_dict(state)


@pytest.mark.parametrize("sizes", [[], [3, -1]])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(DataError, match="shard_sizes"):
        read_by(Files(sizes, real=[1]))
