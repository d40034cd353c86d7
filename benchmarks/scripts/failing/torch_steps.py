"""Training steps that fail on a rank while the others are in a collective."""

from __future__ import annotations

import sys
import time
from typing import Any

from .parts import every, group, one, rank


def ddp(**options: Any) -> Any:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)), **options)


@one(1, "HF201", says="mat1 and mat2", torch=True, ranks=3)
def shapes_do_not_fit() -> None:
    import torch

    torch.nn.Linear(4, 4)(torch.ones(2, 5))


@every("2", "HF201", says="index out of range", ranks=3)
def index_beyond_a_table() -> None:
    import torch

    group()
    model = ddp()
    table = torch.nn.Embedding(10, 8)
    for step in range(1000):
        number = 10 if rank() == 2 and step == 5 else 3
        model(table(torch.tensor([number]))).sum().backward()


@one(1, "HF201", says="inplace", torch=True)
def changed_in_place() -> None:
    import torch

    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.add_(1)
    y.sum().backward()


@one(0, "HF201", says="dtype", torch=True)
def types_do_not_fit() -> None:
    import torch

    torch.nn.Linear(4, 4).double()(torch.ones(2, 4))


@every("0 1", "HF226")
def branch_without_gradient() -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x)

    group()
    model = DistributedDataParallel(Two())
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()


@every("0 1", "HF227")
def vocabulary_differs() -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    group()
    DistributedDataParallel(torch.nn.Embedding(100 + rank(), 4))


@one(1, "HF228", torch=True)
def anomaly_of_autograd() -> None:
    import torch

    with torch.autograd.detect_anomaly():
        x = torch.zeros(1, requires_grad=True)
        (x.sqrt() * 0).sum().backward()


@every("1", "HF229", ranks=3)
def fewer_batches_on_one_rank() -> None:
    import torch

    group()
    model = ddp()
    for _ in range(30 - 5 * (rank() == 1)):
        model(torch.ones(1, 8)).sum().backward()
    if rank() != 1:
        time.sleep(20)


@every("0", "HF229")
def leaves_for_lack_of_data() -> None:
    from .parts import keep_meeting

    group()
    if rank() == 0:
        print("nothing to do here")
        sys.exit(0)
    keep_meeting()


@every("1", "HF201", says="step failed on the poisoned batch", ranks=3)
def culprit_cleans_up_slowly() -> None:
    import torch
    import torch.distributed as dist

    group()
    model = ddp()
    try:
        for step in range(1000):
            if rank() == 1 and step == 4:
                raise RuntimeError("step failed on the poisoned batch")
            model(torch.ones(1, 8)).sum().backward()
    finally:
        dist.destroy_process_group()
        time.sleep(0.5)


@every("1", "HF204", ranks=3)
def victims_wrap_the_complaint() -> None:
    import os
    import signal

    import torch

    group()
    model = ddp()
    for step in range(1000):
        if rank() == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(torch.ones(1, 8)).sum().backward()
        except RuntimeError as error:
            raise ValueError(f"training step {step} failed") from error


@one(1, "HF201", says="child 0 has no shard", torch=True)
def spawned_process_raises() -> None:
    import torch.multiprocessing as mp

    mp.spawn(_fail, nprocs=1)


def _fail(number: int) -> None:
    raise ValueError(f"child {number} has no shard")
