"""Training jobs in one process: all ranks in lockstep, resizes, crashes back to an older snapshot, batches fetched ahead."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.train.data import GlobalBatch, Share, Tail
from holdfast.train.data.datasets import ShardedDataset
from holdfast.train.data.loader import DataLoader
from holdfast.train.data.sampler import DistributedSampler

Snapshot = tuple[dict[str, Any] | None, int]
"""The loaders' state, and how many optimizer steps had been made."""


class FetchAhead:
    """In place of torch's loader: draws `depth` batches before the first is handed out, as loader workers do."""

    persistent_workers = False

    def __init__(self, loader: DataLoader, depth: int) -> None:
        self._batches, self._source, self._depth = loader._batches, loader._torch.dataset, depth

    def __iter__(self) -> Iterator[list[int]]:
        ahead: deque[list[int]] = deque()
        for key in self._batches:
            ahead.append(self._source.__getitems__(key))
            if len(ahead) > self._depth:
                yield ahead.popleft()
        yield from ahead


@dataclass(frozen=True)
class Life:
    """One generation of the job."""

    world: int
    batch_size: int
    batches: int
    """After so many batches per rank it ends."""
    crash_back: int | None
    """None: it leaves a snapshot and goes. Else it dies, and the snapshot that many before the newest is the newest valid one."""
    snapshot_every: int
    ahead: int
    how: str
    """Where snapshots are taken: "plain" in the body's end; "told" after trained(); "top" at its start, before training."""


@dataclass(frozen=True)
class Job:
    dataset: Any
    length: int
    epochs: int
    seed: int
    shuffle: bool
    tail: Tail
    global_batch_size: int | None
    micro_batches: int
    lives: tuple[Life, ...]
    by_sampler: bool = False
    """Read by torch's loader with our sampler, whose steps all weigh the same."""


@dataclass
class History:
    """The optimizer steps that survive."""

    steps: list[tuple[int, list[int]]] = field(default_factory=list)
    """(epoch, samples that weigh something, sorted)."""

    def epoch(self, epoch: int) -> Counter[int]:
        return Counter(sample for at, samples in self.steps if at == epoch for sample in samples)


def plan(job: Job, life: Life) -> GlobalBatch:
    """How a life's optimizer steps are cut. The sampler itself deals single samples."""
    if job.by_sampler:
        return GlobalBatch.following(life.world, 1, 1, job.tail)
    if job.global_batch_size:
        return GlobalBatch.kept(job.global_batch_size, life.world, life.batch_size, job.tail)
    return GlobalBatch.following(life.world, life.batch_size, job.micro_batches, job.tail)


def run(job: Job) -> History:
    """All lives one after the other, the last one to the end."""
    history = History()
    snapshots: list[Snapshot] = [(None, 0)]
    for index, life in enumerate(job.lives):
        state, steps = snapshots[-1]
        del history.steps[steps:]
        done = _live(job, life, state, history, snapshots, to_the_end=index == len(job.lives) - 1)
        if done:
            break
        if life.crash_back is not None:
            del snapshots[max(1, len(snapshots) - life.crash_back) :]
    return history


def _live(job: Job, life: Life, state: Any, history: History, snapshots: list[Snapshot], *, to_the_end: bool) -> bool:
    """Whether the job came to its end."""
    ranks = [(_sampler if job.by_sampler else _loader)(job, life, rank) for rank in range(life.world)]
    if state is not None:
        for loader in ranks:
            loader.load_state_dict(state)
    batches = 0
    for epoch in range(ranks[0].epoch, job.epochs):
        step: list[int] = []
        assert all(loader.epoch == epoch for loader in ranks)
        for parts in zip(*ranks, strict=True):  # strict: no rank gets fewer batches than another
            ends = not to_the_end and batches >= life.batches
            if life.how == "top" and batches and (ends or batches % life.snapshot_every == 0):
                _snapshot(ranks, history, snapshots)
                if ends:
                    return False
            for loader, samples in zip(ranks, parts, strict=True):
                assert 1 <= len(samples) <= loader.batch_size
                step += samples if loader.share.weight else []
            if ranks[0].share.last:
                history.steps.append((epoch, sorted(step)))
                step = []
            batches += 1
            if life.how != "plain":
                for loader in ranks:
                    loader.trained()
            if life.how != "top":
                ends = not to_the_end and batches >= life.batches
                if batches % life.snapshot_every == 0 or (ends and life.crash_back is None):
                    _snapshot(ranks, history, snapshots)
                if ends:
                    return False
        assert not step
        if (epoch + life.ahead) % 2:
            _snapshot(ranks, history, snapshots)
    return True


def _snapshot(ranks: list[Any], history: History, snapshots: list[Snapshot]) -> None:
    states = [loader.state_dict() for loader in ranks]
    assert all(state == states[0] for state in states)
    snapshots.append((states[0], len(history.steps)))


def _loader(job: Job, life: Life, rank: int) -> DataLoader:
    kept = job.global_batch_size
    loader = DataLoader(
        job.dataset,
        batch_size=life.batch_size,
        shuffle=job.shuffle,
        seed=job.seed,
        tail=job.tail,
        global_batch_size=kept,
        micro_batches=None if kept else job.micro_batches,
        collate_fn=list,
        seed_samples=False,
        ranks=(rank, life.world),
    )
    loader._torch = FetchAhead(loader, life.ahead)
    return loader


class SampledLoader:
    """A sampler whose indices are all drawn before the first batch is trained, with what `_live` uses of a loader."""

    share = Share(start=0, stop=0, step_start=0, step_stop=0, micro=0, micro_batches=1, weight=1.0)

    def __init__(self, sampler: DistributedSampler, batch_size: int) -> None:
        self.sampler, self.batch_size = sampler, batch_size
        self.state_dict, self.load_state_dict = sampler.state_dict, sampler.load_state_dict
        self.trained = partial(sampler.trained, batch_size)

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    def __iter__(self) -> Iterator[list[int]]:
        epoch, drawn = self.epoch, list(self.sampler)
        for at in range(0, len(drawn), self.batch_size):
            yield drawn[at : at + self.batch_size]
        self.sampler.set_epoch(epoch + 1)


def _sampler(job: Job, life: Life, rank: int) -> SampledLoader:
    options = {"shuffle": job.shuffle, "seed": job.seed, "drop_last": job.tail == "drop"}
    return SampledLoader(DistributedSampler(job.dataset, life.world, rank, **options), life.batch_size)


# --- every sample once, in the order of a job that was never stopped --------------------------------------------------


STEPS_MAX = 60
"""Per epoch and life: a bound on the time of one example."""


class Numbers(ShardedDataset):
    """Its samples are their own numbers."""

    def __init__(self, shard_sizes):
        self.shard_sizes = shard_sizes

    def read(self, shard, start):
        first = sum(self.shard_sizes[:shard])
        yield from range(first + start, first + self.shard_sizes[shard])


def job_of(length, lives, seed, kept=None, tails=("even", "even", "drop", "pad")):
    """Drawn by one Random: hypothesis draws and shrinks what makes a job large, and leaves the rest to the seed."""
    draw = Random(seed)
    dataset = range(length)
    if draw.random() < 0.35:
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
        micro_batches=draw.randint(1, 3),
        lives=tuple(life() for _ in range(lives)),
    )


def jobs(make=job_of, **options):
    return st.builds(
        partial(make, **options), st.integers(0, 60) | st.integers(0, 5000), st.integers(1, 5), st.integers(0, 2**32)
    )


def sampled_job_of(length, lives, seed, constant):
    """`constant`: all lives make steps of one size."""
    draw = Random(seed)
    size = draw.choice([12, 24, 60, 2520]) if constant else 0
    size *= 1 + length // STEPS_MAX // size if size else 1

    def life():
        world = draw.choice([w for w in range(1, 10) if size % w == 0])
        least = length // STEPS_MAX // world + 1
        return Life(
            world=world,
            batch_size=size // world if constant else draw.randint(least, least + draw.choice([0, 3, 60])),
            batches=draw.randint(1, draw.choice([3, STEPS_MAX])),
            crash_back=draw.choice([None, 0, 1, 2]),
            snapshot_every=draw.randint(1, 9),
            ahead=1,
            how="told",
        )

    return Job(
        dataset=range(length),
        length=length,
        epochs=draw.randint(1, 2),
        seed=draw.randint(0, 2**40),
        shuffle=draw.random() < 0.7,
        tail=draw.choice(["drop", "pad", "pad"]),
        global_batch_size=None,
        micro_batches=1,
        lives=tuple(life() for _ in range(lives)),
        by_sampler=True,
    )


def check(job):
    history = run(job)
    plans = [plan(job, life) for life in job.lives]
    for epoch in range(job.epochs):
        trained = history.epoch(epoch)
        assert set(trained) <= set(range(job.length))
        lost, repeated = job.length - len(trained), trained.total() - len(trained)
        if job.tail != "drop":
            assert lost == 0
        if job.tail != "pad":
            assert repeated == 0
        assert lost < max(each.size for each in plans)
        assert repeated < max(each.parts for each in plans)
    return history


SETTINGS = settings(suppress_health_check=list(HealthCheck))


@settings(SETTINGS, max_examples=500)
@given(jobs())
def test_every_sample_of_the_surviving_history_once(job):
    check(job)


@settings(SETTINGS, max_examples=220)
@given(jobs(kept=True, tails=("even", "drop")))
def test_the_order_is_that_of_a_job_that_was_never_stopped(job):
    never_stopped = replace(job.lives[0], world=1, batch_size=job.global_batch_size, crash_back=None)
    whole = run(replace(job, lives=(never_stopped,)))
    assert check(job).steps == whole.steps


@settings(SETTINGS, max_examples=200)
@given(jobs(sampled_job_of, constant=False))
def test_a_sampler_gives_every_sample_of_the_surviving_history_once(job):
    check(job)


@settings(SETTINGS, max_examples=100)
@given(jobs(sampled_job_of, constant=True))
def test_a_sampler_s_order_is_that_of_a_job_that_was_never_stopped(job):
    """But for the last step of an epoch, which is padded or cut as the world has it."""
    history, first = check(job), job.lives[0]
    size = first.world * first.batch_size
    whole = run(replace(job, lives=(replace(first, world=1, batch_size=size, crash_back=None),)))
    for epoch in range(job.epochs):
        one, other = ([samples for at, samples in each.steps if at == epoch] for each in (history, whole))
        full = job.length // size
        assert one[:full] == other[:full]
        assert len(one) <= full + 1


@pytest.mark.parametrize("how", ["plain", "told", "top"])
def test_a_job_that_counts_one_batch_too_many_is_caught(how, monkeypatch):
    """The checker itself: a position that counts what was fetched loses samples, and is seen to."""
    from holdfast.train.data import Position

    count_pending = Position.count_pending
    monkeypatch.setattr(
        Position, "count_pending", lambda self: (count_pending(self), setattr(self, "cursor", self.cursor + 1))[0]
    )
    life = Life(world=2, batch_size=4, batches=5, crash_back=0, snapshot_every=2, ahead=3, how=how)
    job = Job(range(200), 200, 1, 0, True, "even", None, 1, (life, life))
    with pytest.raises(AssertionError):
        check(job)
