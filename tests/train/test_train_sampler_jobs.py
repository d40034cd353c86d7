"""Random jobs that keep torch's loader and take ht.DistributedSampler alone: epochs, resizes, crashes, drawing far ahead."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.train.data.sampler import DistributedSampler

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
