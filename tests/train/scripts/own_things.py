"""A training whose objects holdfast knows nothing of but `state_dict()`, in which ranks are lost: own_things.py FOLDER CASE

A schedule of its own halves the learning rate at each epoch's end, early stopping counts epochs, a counter adds up what
this rank has seen, and, with "stream", the data come from an iterator that has a position on each rank. CASE is as lost_ranks.py
has it, with `stream`; `equal`: all ranks draw the same numbers from Python's generator; `micro`: an optimizer step has
the gradients of several micro-batches, each with its call of snaps.step().
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lost_ranks import BATCH, CASE, FOLDER, Stopping, World, digest, end, loader_options, reach, row, step_is_done
from torch import nn

import holdfast.train as ht

SAMPLES, EPOCHS = CASE.get("samples", 48), 3


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return row(index), index


class Stream:
    """Batches of this rank, of its own order; its position is this rank's own."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.epoch = self.batch = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = list(range(self.rank, SAMPLES, self.world))
        random.Random(self.epoch * 100 + self.rank).shuffle(order)
        count = len(order) // BATCH
        while self.batch < count:
            some = order[self.batch * BATCH : (self.batch + 1) * BATCH]
            self.batch += 1
            yield torch.stack([row(each) for each in some]), torch.tensor(some)
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == self.rank, "another rank's position"
        self.epoch, self.batch = state["epoch"], state["batch"]


class Halving:
    """Changes the optimizer's options itself, and has torch's classes nowhere above it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.epochs = optimizer, 0

    def step(self) -> None:
        self.epochs += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


class Seen:
    """What this rank has seen, and a large average of the weights, which is equal on all ranks."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.average = torch.zeros(10_000)

    def add(self, weights: torch.Tensor, index: torch.Tensor) -> None:
        self.indices += index.tolist()
        self.average.lerp_(weights.detach().sum().expand(10_000), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"indices": self.indices, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.indices = list(state["indices"])
        self.average.copy_(state["average"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.body[2].weight.register_hook(self.in_backward)
        self.steps = 0

    def in_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        reach("backward", self.steps)
        return gradient

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        within = self.body[0](rows)
        reach("forward", self.steps)
        return self.body[1:](within).square().mean()


def main() -> None:
    snaps = ht.Snapshots(FOLDER / "runs", every=None, memory_every=5)
    with ht.process_group() as pg, snaps:
        torch.manual_seed(1)
        net = Net()
        model = ht.ddp(net, pg)
        random.seed(7 if CASE.get("equal") else pg.rank)
        torch.manual_seed(pg.rank)
        adam = torch.optim.Adam(net.parameters(), lr=1e-2)
        halving, seen, stopping = Halving(adam), Seen(), Stopping()
        loader: Any = Stream(pg.rank, pg.world) if CASE.get("stream") else ht.DataLoader(Rows(), **loader_options())
        state = snaps.track(model=model, optimizer=adam, loader=loader, halving=halving, seen=seen, stopping=stopping)
        snaps.resume()

        @ht.survive(snaps)
        def train() -> None:
            worlds.append(pg.world)
            World.size = pg.world
            for _ in state.epochs(EPOCHS):
                for rows, index in loader:
                    net.steps = state.step
                    reach("begin", state.step)
                    inputs = rows if CASE.get("exact") else rows * (1.0 + 0.01 * random.random())
                    if CASE.get("micro"):
                        with ht.accumulate(model, loader) as micro:
                            micro.backward(model(inputs))
                    else:
                        model(inputs).backward()
                    if not CASE.get("micro") or micro.last:
                        adam.step()
                        adam.zero_grad()
                        reach("optimizer", state.step)
                        seen.add(net.body[0].weight, index)
                    snaps.step()
                    step_is_done(state.step, net.parameters())
                    reach("between steps", state.step)
                reach("end of an epoch", state.step)
                halving.step()
                loss = net.body[0].weight.detach().sum()
                dist.all_reduce(loss)
                stopping.losses.append(round(loss.item() / pg.world, 4))
                dist.barrier()
                reach("epoch is over", state.step)

        worlds: list[int] = []
        train()
        moments = [value for each in adam.state.values() for value in each.values()]
        end(
            step=state.step,
            worlds=worlds,
            rate=adam.param_groups[0]["lr"],
            halvings=halving.epochs,
            epochs=len(stopping.losses),
            losses=stopping.losses,
            seen=seen.indices,
            average=digest([seen.average]),
            parameters=digest([*net.parameters(), *moments]),
            weights=[each.double().sum().item() for each in net.parameters()],
            drawn=random.random(),
        )


main()
