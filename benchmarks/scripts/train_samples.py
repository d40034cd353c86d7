"""One shuffled epoch on 4, then 3, then 5 ranks, each life going on from what the one before saved; prints what was lost and repeated.

    python train_samples.py holdfast|elastic|skip|torchdata

All ranks are loaders in this process, in lockstep, each with a real loader worker that fetches ahead. What is saved is what
each offers for it: `elastic` the number of samples trained, as ElasticDistributedSampler's start_index; `skip` the number of
batches, skipped on resume, as tutorials and trainers do; `torchdata` each rank's state_dict, loaded by rank modulo the old world.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

LENGTH = 4_800
BATCH_SIZE = 8
LIVES = ((4, 50), (3, 60), (5, LENGTH))
"""Ranks, and the batches of each rank after which the world changes: a third of the epoch each."""
OPTIONS: dict[str, Any] = {"num_workers": 1, "collate_fn": list}
DATASET = range(LENGTH)

Rank = tuple[Iterator[list[int]], Callable[[], Any]]
"""A rank's batches, each without what weighs nothing, and what it saves after a batch."""


def holdfast_rank(rank: int, world: int, saved: list[Any]) -> Rank:
    import holdfast.train as ht

    loader = ht.DataLoader(DATASET, BATCH_SIZE, shuffle=True, seed=0, ranks=(rank, world), **OPTIONS)
    if saved:
        loader.load_state_dict(saved[0])
    return (batch if loader.share.weight else [] for batch in loader), loader.state_dict


def elastic_rank(rank: int, world: int, saved: list[Any]) -> Rank:
    from torch.distributed.elastic.utils.data import ElasticDistributedSampler

    start = saved[0] if saved else 0
    sampler = ElasticDistributedSampler(DATASET, world, rank, start_index=start)
    loader = DataLoader(DATASET, BATCH_SIZE, sampler=sampler, **OPTIONS)
    trained = start

    def batches() -> Iterator[list[int]]:
        nonlocal trained
        for batch in loader:
            trained += len(batch) * world
            yield batch

    return batches(), lambda: trained


def skip_rank(rank: int, world: int, saved: list[Any]) -> Rank:
    loader = DataLoader(DATASET, BATCH_SIZE, sampler=DistributedSampler(DATASET, world, rank), **OPTIONS)
    done = saved[0] if saved else 0

    def batches() -> Iterator[list[int]]:
        nonlocal done
        for batch in islice(loader, done, None):
            done += 1
            yield batch

    return batches(), lambda: done


def torchdata_rank(rank: int, world: int, saved: list[Any]) -> Rank:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(DATASET, world, rank)
    loader = StatefulDataLoader(DATASET, BATCH_SIZE, sampler=sampler, **OPTIONS)
    if saved:
        loader.load_state_dict(saved[rank % len(saved)])
    return iter(loader), loader.state_dict


MAKERS = {"holdfast": holdfast_rank, "elastic": elastic_rank, "skip": skip_rank, "torchdata": torchdata_rank}


def epoch(make: Callable[[int, int, list[Any]], Rank]) -> Counter[int]:
    trained: Counter[int] = Counter()
    saved: list[Any] = []
    for world, batches in LIVES:
        ranks = [make(rank, world, saved) for rank in range(world)]
        for parts in islice(zip(*(batches for batches, _ in ranks), strict=False), batches):
            trained.update(sample for part in parts for sample in part)
            saved = [save() for _, save in ranks]
    return trained


def main() -> None:
    trained = epoch(MAKERS[sys.argv[1]])
    print(
        json.dumps(
            {
                "lost": 100 * (LENGTH - len(trained)) / LENGTH,
                "repeated": 100 * sum(count > 1 for count in trained.values()) / LENGTH,
            }
        )
    )


if __name__ == "__main__":
    main()
