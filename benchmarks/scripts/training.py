"""What the scripts of jobs that hang, or only work for long, have in common: three DDP ranks on gloo, and a loop of steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 40
STEP_S = 0.05
WIDTH = 10


class Job:
    """One rank. `odd`: whether it is the one that does something else."""

    def __init__(self, odd_rank: int) -> None:
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.odd_rank = odd_rank
        self.odd = self.rank == odd_rank
        self.folder = Path(os.environ["BENCH_OUT"])

    def mark(self, name: str = "begun") -> None:
        """Its time is that of the moment."""
        (self.folder / name).touch()


def batches(count: int = 2 * STEPS) -> Iterator[torch.Tensor]:
    for _ in range(count):
        time.sleep(STEP_S)
        yield torch.randn(4, WIDTH)


def train(job: Job, data: Iterable[torch.Tensor], trouble: Callable[[Job], object] | None = None) -> None:
    """`trouble`: what the odd rank does in the middle."""
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(data):
        if trouble is not None and job.odd and step == STEPS:
            job.mark()
            trouble(job)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def begin() -> None:
    dist.init_process_group("gloo")
