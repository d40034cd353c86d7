"""Random jobs: every sample of the surviving history exactly once, and in the order of a job that was never stopped."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.train.data.shards import ShardedDataset
from tests.train.data_jobs import Job, Life, plan, run

STEPS_MAX = 60
"""Per epoch and life: a bound on the time of one example."""


class Numbers(ShardedDataset):
    """Its samples are their own numbers."""

    def __init__(self, shard_sizes):
        self.shard_sizes = shard_sizes

    def read(self, shard, start):
        first = sum(self.shard_sizes[:shard])
        yield from range(first + start, first + self.shard_sizes[shard])


def job_of(length, lives, seed, kept=None, shards=False, tails=("even", "even", "drop", "pad")):
    """Drawn by one Random: hypothesis draws and shrinks what makes a job large, and leaves the rest to the seed."""
    draw = Random(seed)
    dataset = range(length)
    if shards:
        length = min(length, 1000)
        cuts = sorted(draw.randint(0, length) for _ in range(draw.randint(0, 11)))
        dataset = Numbers([stop - start for start, stop in pairwise([0, *cuts, length])])
    kept = draw.random() < 0.5 if kept is None else kept
    global_batch_size = draw.randint(1 + length // STEPS_MAX, 20 + length) if kept else None

    def life():
        world = draw.randint(1, 9)
        smallest = (global_batch_size // world // 4 if kept else length // STEPS_MAX // world) + 1
        return Life(
            world=world,
            batch_size=draw.randint(smallest, smallest + draw.choice([0, 3, 60])),
            batches=draw.randint(1, draw.choice([3, STEPS_MAX])),
            crash_back=draw.choice([None, 0, 1, 2, 3]),
            snapshot_every=draw.randint(1, 9),
            ahead=draw.randint(0, 12),
            how=draw.choice(["plain", "told", "top"]),
        )

    return Job(
        dataset=dataset,
        length=length,
        epochs=draw.randint(1, 2),
        seed=draw.randint(-(2**70), 2**70),
        shuffle=draw.random() < 0.7,
        tail=draw.choice(tails),
        global_batch_size=global_batch_size,
        every=draw.randint(1, 3),
        lives=tuple(life() for _ in range(lives)),
    )


def jobs(**options):
    return st.builds(
        partial(job_of, **options), st.integers(0, 60) | st.integers(0, 5000), st.integers(1, 5), st.integers(0, 2**32)
    )


def check(job):
    history = run(job)
    plans = [plan(job, life) for life in job.lives]
    for epoch in range(job.epochs):
        trained = Counter(sample for at, samples in history.steps if at == epoch for sample in samples)
        assert set(trained) <= set(range(job.length))
        lost, repeated = job.length - len(trained), trained.total() - len(trained)
        if job.tail != "drop":
            assert lost == 0
        if job.tail != "pad":
            assert repeated == 0
        assert lost < max(each.size for each in plans)
        assert repeated < max(each.parts for each in plans)
    return history


SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@settings(SETTINGS, max_examples=400)
@given(jobs())
def test_every_sample_of_the_surviving_history_once(job):
    check(job)


@settings(SETTINGS, max_examples=150)
@given(jobs(kept=True, tails=("even", "drop")))
def test_the_order_is_that_of_a_job_that_was_never_stopped(job):
    never_stopped = replace(job.lives[0], world=1, batch_size=job.global_batch_size, crash_back=None)
    whole = run(replace(job, lives=(never_stopped,)))
    assert check(job).steps == whole.steps


@settings(SETTINGS, max_examples=80)
@given(jobs(kept=True, shards=True, tails=("even", "drop")))
def test_the_order_of_shards_is_that_of_a_job_that_was_never_stopped(job):
    never_stopped = replace(job.lives[0], world=1, batch_size=job.global_batch_size, crash_back=None)
    whole = run(replace(job, lives=(never_stopped,)))
    assert check(job).steps == whole.steps


@settings(SETTINGS, max_examples=150)
@given(jobs(shards=True))
def test_shards_are_continued_by_any_world(job):
    check(job)


@pytest.mark.parametrize("how", ["plain", "told", "top"])
def test_a_job_that_counts_one_batch_too_many_is_caught(how, monkeypatch):
    """The checker itself: a position that counts what was fetched loses samples, and is seen to."""
    from holdfast.train.data.position import Position

    settle = Position.settle
    monkeypatch.setattr(Position, "settle", lambda self: (settle(self), setattr(self, "cursor", self.cursor + 1))[0])
    life = Life(world=2, batch_size=4, batches=5, crash_back=0, snapshot_every=2, ahead=3, how=how)
    job = Job(range(200), 200, 1, 0, True, "even", None, 1, (life, life))
    with pytest.raises(AssertionError):
        check(job)
