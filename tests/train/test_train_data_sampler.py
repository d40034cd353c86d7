"""ht.DistributedSampler under torch's own loader."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, islice
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader

from holdfast.protocol.errors import DataError, DataStateError
from holdfast.train.data.sampler import DistributedSampler


def sampler(length=40, world=1, rank=0, **options):
    return DistributedSampler(range(length), world, rank, **options)


def ranks_of(length, world, state=None, **options):
    ranks = [sampler(length, world, rank, **options) for rank in range(world)]
    for each in ranks:
        if state:
            each.load_state_dict(state)
    return ranks


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


# --- random jobs: epochs, resizes, crashes, drawing far ahead ---------------------------------------------------------


STEPS_MAX = 60
SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@dataclass
class Job:
    """One dataset, trained for some epochs by lives of (world, batch size, steps, how many snapshots a crash goes back)."""

    length: int
    epochs: int
    options: dict[str, Any]
    snapshot_every: int
    lives: list[tuple[int, int, int, int | None]]
    history: list[tuple[int, list[int]]] = field(default_factory=list)
    """(epoch, samples) of each step that survives."""

    def run(self) -> Job:
        snapshots: list[tuple[Any, int]] = [(None, 0)]
        for number, (world, batch_size, steps, crash_back) in enumerate(self.lives):
            state, kept = snapshots[-1]
            del self.history[kept:]
            last = number == len(self.lives) - 1
            if self._live(world, batch_size, None if last else steps, state, snapshots):
                break
            if crash_back is None:
                continue
            del snapshots[max(1, len(snapshots) - crash_back) :]
        return self

    def _live(self, world: int, batch_size: int, limit: int | None, state: Any, snapshots: list[Any]) -> bool:
        """Whether the last epoch was trained to its end."""
        ranks = [DistributedSampler(range(self.length), world, rank, **self.options) for rank in range(world)]
        for each in ranks:
            if state is not None:
                each.load_state_dict(state)
        done = 0
        for epoch in range(ranks[0].epoch, self.epochs):
            assert {each.epoch for each in ranks} == {epoch}
            drawn = [list(each) for each in ranks]  # all of it before the first batch is trained
            assert len({len(each) for each in drawn}) == 1
            for at in range(0, len(drawn[0]), batch_size):
                self.history.append((epoch, sorted(s for own in drawn for s in own[at : at + batch_size])))
                for each in ranks:
                    each.note_trained(batch_size)
                done += 1
                if done % self.snapshot_every == 0 or done == limit:
                    states = [each.state_dict() for each in ranks]
                    assert all(each == states[0] for each in states)
                    snapshots.append((states[0], len(self.history)))
                if done == limit:
                    return False
            for each in ranks:
                each.set_epoch(epoch + 1)
        return True


def job_of(length: int, lives: int, seed: int, *, constant: bool) -> Job:
    draw = Random(seed)
    size = draw.choice([12, 24, 60, 2520]) if constant else 0
    size *= 1 + length // STEPS_MAX // size if size else 1

    def life() -> tuple[int, int, int, int | None]:
        world = draw.choice([w for w in range(1, 10) if size % w == 0])
        least = length // STEPS_MAX // world + 1
        batch_size = size // world if constant else draw.randint(least, least + draw.choice([0, 3, 60]))
        return world, batch_size, draw.randint(1, draw.choice([3, STEPS_MAX])), draw.choice([None, 0, 1, 2])

    options = {"shuffle": draw.random() < 0.7, "seed": draw.randint(0, 2**40), "drop_last": draw.random() < 0.4}
    return Job(length, draw.randint(1, 2), options, draw.randint(1, 9), [life() for _ in range(lives)])


def jobs(*, constant: bool) -> st.SearchStrategy[Job]:
    return st.builds(
        job_of,
        st.integers(0, 60) | st.integers(0, 5000),
        st.integers(1, 5),
        st.integers(0, 2**32),
        constant=st.just(constant),
    )


def check(job: Job) -> None:
    most = max(world for world, *_ in job.lives)
    for epoch in range(job.epochs):
        trained = Counter(sample for at, samples in job.history if at == epoch for sample in samples)
        assert set(trained) <= set(range(job.length))
        lost, repeated = job.length - len(trained), trained.total() - len(trained)
        if job.options["drop_last"]:
            assert lost < most
            assert repeated == 0
        else:
            assert lost == 0
            assert repeated < most


@settings(SETTINGS, max_examples=200)
@given(jobs(constant=False))
def test_every_sample_of_the_surviving_history_once(job: Job) -> None:
    check(job.run())


@settings(SETTINGS, max_examples=100)
@given(jobs(constant=True))
def test_the_order_is_that_of_a_job_that_was_never_stopped(job: Job) -> None:
    """But for the last step of an epoch, which is padded or cut as the world has it."""
    check(job.run())
    world, batch_size = job.lives[0][:2]
    whole = Job(job.length, job.epochs, job.options, job.snapshot_every, [(1, world * batch_size, 1, None)]).run()
    size = world * batch_size
    for epoch in range(job.epochs):
        one, other = ([samples for at, samples in each.history if at == epoch] for each in (job, whole))
        full = job.length // size
        assert one[:full] == other[:full]
        assert len(one) <= full + 1
