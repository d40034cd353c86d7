"""A training as many people write it, in which ranks are lost: habits.py FOLDER CASE

Gradients of three batches make a step, and `snaps.step()` is called for each of them. It is evaluated between steps and at
an epoch's end, with an untracked loader and without `finally`; the learning rate follows the number of batches; a
schedule is stepped once an epoch; random numbers of Python and numpy are drawn in the loop; a scaler skips a step.
CASE is a JSON object; faults: [[local rank, where, batches so far]], each a kill that happens once. At the end each rank
writes FOLDER/end.LOCAL_RANK, a JSON object.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dying import die
from torch import nn

import holdfast.train as ht

FOLDER = Path(sys.argv[1])
LOCAL_RANK = int(os.environ["LOCAL_RANK"])
FAULTS = json.loads(sys.argv[2]).get("faults", [])
SAMPLES, BATCH, EVERY, EPOCHS, SKIPPED = 72, 2, 3, 3, 15
VALIDATED = 30


def reach(where: str, batches: int) -> None:
    for index, fault in enumerate(FAULTS):
        if fault == [LOCAL_RANK, where, batches] and not (mark := FOLDER / f"fault.{index}").exists():
            mark.touch()
            die()


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.sin(torch.arange(8.0) * (index + 1)), index


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)
        self.counts = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(rows)).square().mean() + self.counts[index].mean()


def digest(*tensors: torch.Tensor) -> str:
    held = hashlib.sha256()
    for each in tensors:
        held.update(each.detach().numpy().tobytes())
    return held.hexdigest()[:16]


def came_to(net: Net, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    moments = [value for each in optimizers for held in each.state.values() for value in held.values()]
    return {
        "counts": sorted({round(each, 3) for each in net.counts.tolist()}),
        "parameters": digest(*net.parameters(), *[each for each in moments if isinstance(each, torch.Tensor)]),
        "buffers": digest(*net.buffers()),
        "random": [random.random(), float(np.random.randn()), torch.rand(1).item()],
    }


def main() -> None:
    snaps = ht.Snapshots(FOLDER / "runs", every=None, memory_every=5)
    with ht.process_group() as pg, snaps:
        torch.manual_seed(1)
        net = Net()
        model = ht.ddp(net, pg)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(pg.rank)
        adam = torch.optim.Adam(net.body.parameters(), lr=1e-2)
        head = torch.optim.Adam(net.head.parameters(), lr=1e-2)
        counted = torch.optim.SGD([net.counts], lr=pg.world * BATCH * EVERY)
        loader = ht.DataLoader(Rows(SAMPLES), BATCH, True, seed=7)
        validation = ht.DataLoader(Rows(VALIDATED), 4)
        total = EPOCHS * len(loader)
        by_step = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1.0 - step / total)
        by_epoch = torch.optim.lr_scheduler.StepLR(head, 1, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        optimizers = {"adam": adam, "head": head, "counted": counted}
        schedules = {"by_step": by_step, "by_epoch": by_epoch}
        state = snaps.track(model=model, loader=loader, scaler=scaler, **optimizers, **schedules)
        snaps.resume()
        random.random()  # what a replacement draws here its rank has drawn before
        np.random.rand()
        torch.rand(1)

        def validate() -> None:
            model.eval()
            seen = torch.zeros(1)
            with torch.no_grad():
                for number, (rows, index) in enumerate(validation):
                    net(rows, index)
                    seen += len(index)
                    reach(f"validation {number}", state.step)
            dist.all_reduce(seen)
            assert seen.item() == VALIDATED, seen
            model.train()

        @ht.survive(snaps)
        def train() -> None:
            for _ in state.epochs(EPOCHS):
                for rows, index in loader:
                    reach("begin", state.step)
                    noise = random.random() + random.gauss(0.0, 1.0) + np.random.rand() + np.random.randn()
                    with ht.accumulate(model, micro_batches=EVERY) as micro:
                        loss = model(rows * (1.0 + noise / 100.0), index)
                        micro.backward(loss * (float("inf") if state.step == SKIPPED else 1.0), scaler=scaler)
                    if micro.last:
                        reach("gradients", state.step)
                        for each in optimizers.values():
                            scaler.step(each)
                            each.zero_grad()
                        reach("optimizer", state.step)
                        scaler.update()
                        reach("update", state.step)
                        by_step.step()
                    snaps.step()
                    if state.step % 9 == 0:
                        validate()
                reach("end of an epoch", state.step)
                validate()
                by_epoch.step()
                reach("epoch is over", state.step)

        train()
        rates = [by_step.get_last_lr(), by_epoch.get_last_lr(), scaler.get_scale()]
        end = {"step": state.step, "rates": rates, **came_to(net, list(optimizers.values()))}
        (FOLDER / f"end.{LOCAL_RANK}").write_text(json.dumps(end))


torch.set_num_threads(1)
main()
