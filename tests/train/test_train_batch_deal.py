"""The arithmetic of the global batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol.errors import DataError
from holdfast.train.data.position import GlobalBatch

PLANS = st.one_of(
    st.builds(GlobalBatch.following, st.integers(1, 9), st.integers(1, 40), st.integers(1, 5)),
    st.builds(GlobalBatch.kept, st.integers(1, 300), st.integers(1, 9), st.none() | st.integers(1, 40)),
)


def steps_of(plan, cursor, length):
    """All ranks' shares, by optimizer step."""
    ranks = [list(plan.deal(rank, cursor, length)) for rank in range(plan.world)]
    assert {len(shares) for shares in ranks} == {plan.batches(cursor, length)}
    every = plan.every
    return [
        [share for shares in ranks for share in shares[index : index + every]]
        for index in range(0, plan.batches(cursor, length), every)
    ]


@settings(deadline=None, derandomize=True, max_examples=250)
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
        assert [share.micro for share in step] == list(range(plan.every)) * plan.world
        assert {share.cursor for share in step if share.last} == {step[0].step_stop}
        assert {share.cursor for share in step if not share.last} <= {step[0].step_start}
    assert sorted(dealt) == list(range(cursor, length))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(PLANS, st.integers(0, 2000), st.sampled_from(["drop", "pad"]))
def test_what_drop_and_pad_cost_is_as_stated(plan, length, tail):
    plan = GlobalBatch(plan.size, plan.world, plan.every, tail)
    steps = steps_of(plan, 0, length)
    positions = [p for step in steps for share in step if share.weight for p in range(share.start, share.stop)]
    assert sorted(positions) == list(range(len(positions)))
    if tail == "drop":
        assert length - len(positions) == length % plan.size
    else:
        assert 0 <= len(positions) - length < plan.parts
        if steps and length % plan.size:
            assert {share.weight for share in steps[-1]} == {1.0}


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3000))
def test_a_kept_global_batch_makes_the_same_steps_on_any_world(size, batch_size, one, other, length):
    def made(world):
        plan = GlobalBatch.kept(size, world, batch_size)
        assert plan.batch_size <= batch_size
        return [(step[0].step_start, step[0].step_stop) for step in steps_of(plan, 0, length)]

    assert made(one) == made(other)


def test_the_numbers_of_an_example():
    plan = GlobalBatch.kept(32, world=3, batch_size_max=8)
    assert (plan.every, plan.batch_size) == (2, 6)
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
        lambda: GlobalBatch.following(2, 4, every=0),
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
