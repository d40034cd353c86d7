"""Each mistake that guards know, and beside it the correct code; prints `rank case: mistakes that were warned about`."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import holdfast.train as ht
from holdfast.train.group import ProcessGroup
from holdfast.train.guards import guarded, same_loss

STEPS = 12
CASES: dict[str, Callable[[Any], None]] = {}


def case(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CASES[function.__name__] = function
    return function


def train(
    model: nn.Module, *, micro_batches: int = 1, after_step: Callable[[int], None] = lambda step: None, passes: int = 1
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for _ in range(micro_batches):
            sum(model(torch.randn(4, 3)).square().mean() for _ in range(passes)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(step)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


# --- set_epoch --------------------------------------------------------------------------------------------------------


@case
def epoch_forgotten(pg: ProcessGroup) -> None:
    loader = DataLoader(list(range(8)), sampler=DistributedSampler(range(8)))
    for _ in range(2):
        list(loader)


@case
def epoch_set(pg: ProcessGroup) -> None:
    sampler = DistributedSampler(range(8))
    next(iter(DataLoader(list(range(8)), sampler=sampler)))  # a look at the data
    for epoch in range(3):
        sampler.set_epoch(epoch)
        list(DataLoader(list(range(8)), sampler=sampler))
    evaluation = DistributedSampler(range(8), shuffle=False)
    for _ in range(3):
        list(evaluation)
    own = ht.DistributedSampler(range(8))
    for _ in range(3):
        list(own)


# --- saving on one rank -----------------------------------------------------------------------------------------------


def save_after_step(pg: ProcessGroup, *, ranks: range, barrier: bool, target: Any = None) -> Callable[[int], None]:
    folder = Path(tempfile.mkdtemp(dir=os.getcwd()))

    def save(step: int) -> None:
        if step == 5:
            if pg.rank in ranks:
                torch.save({"step": step}, folder / f"{pg.rank}.pt" if target is None else target)
            if barrier:
                dist.barrier()

    return save


@case
def saved_alone(pg: ProcessGroup) -> None:
    train(ht.ddp(net(), pg), after_step=save_after_step(pg, ranks=range(1), barrier=False))


@case
def saved_alone_fsdp(pg: ProcessGroup) -> None:
    model = fully_shard(net())
    ht.Snapshots(tempfile.mkdtemp(dir=os.getcwd()), every=None).track(model=model)
    train(model, after_step=save_after_step(pg, ranks=range(1), barrier=False))


@case
def saved_with_barrier(pg: ProcessGroup) -> None:
    train(ht.ddp(net(), pg), after_step=save_after_step(pg, ranks=range(1), barrier=True))


@case
def saved_by_all(pg: ProcessGroup) -> None:
    train(ht.ddp(net(), pg), after_step=save_after_step(pg, ranks=range(pg.world), barrier=False))


@case
def saved_to_memory(pg: ProcessGroup) -> None:
    train(ht.ddp(net(), pg), after_step=save_after_step(pg, ranks=range(1), barrier=False, target=io.BytesIO()))


# --- no_sync ----------------------------------------------------------------------------------------------------------


@case
def accumulated_with_sync(pg: ProcessGroup) -> None:
    train(ht.ddp(net(), pg), micro_batches=2)


@case
def accumulated_with_sync_fsdp(pg: ProcessGroup) -> None:
    model = fully_shard(net())
    ht.Snapshots(tempfile.mkdtemp(dir=os.getcwd()), every=None).track(model=model)
    train(model, micro_batches=2)


@case
def accumulated_well(pg: ProcessGroup) -> None:
    for model in (ht.ddp(net(), pg), fully_shard(net())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2 * STEPS):
            with ht.accumulate(model, micro_batches=2) as micro:
                micro.backward(model(torch.randn(4, 3)).square().mean())
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                model(torch.randn(4, 3))  # an evaluation in between


@case
def no_sync_by_hand(pg: ProcessGroup) -> None:
    model = ht.ddp(net(), pg)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        with model.no_sync():
            model(torch.randn(4, 3)).square().mean().backward()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def a_closure_that_clears(pg: ProcessGroup) -> None:
    model = ht.ddp(net(), pg)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
    batch = torch.randn(4, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


@case
def two_passes_one_backward(pg: ProcessGroup) -> None:
    train(ht.ddp(net(), pg), passes=2)


# --- find_unused_parameters -------------------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """Skips its second layer on rank 1 in step 3."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers, self.rank, self.passes = net(), rank, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        x = self.layers[0](x)
        return x if self.rank == 1 and self.passes == 3 else self.layers[1](x)


@case
def nothing_unused(pg: ProcessGroup) -> None:
    train(ht.ddp(net(), pg, find_unused_parameters=True))


@case
def something_unused(pg: ProcessGroup) -> None:
    train(ht.ddp(Sometimes(pg.rank), pg, find_unused_parameters=True))


# --- a loss for all ---------------------------------------------------------------------------------------------------


@case
def loss_not_reduced(pg: ProcessGroup) -> None:
    for _ in range(3):
        same_loss(torch.tensor(1.0 + pg.rank))
        dist.barrier()


@case
def loss_reduced(pg: ProcessGroup) -> None:
    model = DistributedDataParallel(net())
    for step in range(5):
        with ht.accumulate(model) as micro:
            micro.backward(model(torch.randn(4, 3)).square().mean())
        same_loss(micro.loss if step else torch.tensor(float("nan")))
        dist.barrier()


def best_by(pg: ProcessGroup, *, of_micro: bool) -> None:
    """A snapshot folder that keeps the best loss: this rank's own, or everybody's."""
    folder = [tempfile.mkdtemp(dir=os.getcwd())]
    dist.broadcast_object_list(folder)
    model = ht.ddp(net(), pg)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    keep = ht.Keep(best=("loss", "min"))
    with ht.Snapshots(folder[0], every=None, memory_every=None, keep=keep) as snaps:
        snaps.track(model=model, optimizer=optimizer)
        snaps.resume()
        for _ in range(3):
            with ht.accumulate(model) as micro:
                micro.backward(loss := model(torch.randn(4, 3)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            snaps.step(loss=micro.loss if of_micro else loss)


@case
def best_of_own_loss(pg: ProcessGroup) -> None:
    best_by(pg, of_micro=False)


@case
def best_of_common_loss(pg: ProcessGroup) -> None:
    best_by(pg, of_micro=True)


def weights_after_training(pg: ProcessGroup) -> list[float]:
    torch.manual_seed(5)
    model = ht.ddp(net(), pg, find_unused_parameters=True)
    train(model, micro_batches=2, after_step=save_after_step(pg, ranks=range(1), barrier=False))
    return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


def main() -> None:
    torch.set_num_threads(1)
    with ht.process_group(guards=False) as pg:
        unguarded = weights_after_training(pg)
        with warnings.catch_warnings(record=True), guarded():
            sys.stdout.write(f"{pg.rank} same weights: {weights_after_training(pg) == unguarded}\n")
        for name, run in CASES.items():
            torch.manual_seed(pg.rank)
            with warnings.catch_warnings(record=True) as caught, guarded():
                warnings.simplefilter("always")
                run(pg)
            told = [str(each.message).partition("guard '")[2].partition("'")[0] for each in caught
                    if issubclass(each.category, ht.GuardWarning)]  # fmt: skip
            sys.stdout.write(f"{pg.rank} {name}: {' '.join(told)}".strip() + "\n")
            sys.stdout.flush()
            dist.barrier()


if __name__ == "__main__":
    sys.exit(run_ranks(2, main) != [0, 0])
