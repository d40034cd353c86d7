"""Training jobs in one process: all ranks in lockstep, resizes, crashes back to an older snapshot, batches fetched ahead."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.train.data.loader import DataLoader
from holdfast.train.data.position import GlobalBatch, Tail

Snapshot = tuple[dict[str, Any] | None, int]
"""The loaders' state, and how many optimizer steps had been made."""


class FetchAhead:
    """In place of torch's loader: draws `depth` batches before the first is handed out, as loader workers do."""

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
    every: int
    lives: tuple[Life, ...]


@dataclass
class History:
    """The optimizer steps that survive."""

    steps: list[tuple[int, list[int]]] = field(default_factory=list)
    """(epoch, samples that weigh something, sorted)."""

    def epoch(self, epoch: int) -> Counter[int]:
        return Counter(sample for at, samples in self.steps if at == epoch for sample in samples)


def plan(job: Job, life: Life) -> GlobalBatch:
    """How a life's optimizer steps are cut."""
    if job.global_batch_size:
        return GlobalBatch.kept(job.global_batch_size, life.world, life.batch_size, job.tail)
    return GlobalBatch.following(life.world, life.batch_size, job.every, job.tail)


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
    ranks = [_loader(job, life, rank) for rank in range(life.world)]
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


def _snapshot(ranks: list[DataLoader], history: History, snapshots: list[Snapshot]) -> None:
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
        every=None if kept else job.every,
        collate_fn=list,
        seed_samples=False,
        rank=rank,
        world=life.world,
    )
    loader._torch = FetchAhead(loader, life.ahead)
    return loader
