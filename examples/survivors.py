"""Ranks that keep their processes when another rank is killed.

    holdfast run --standalone --nproc-per-node 3 --max-restarts 3 examples/survivors.py

Each rank prints its process. Kill one of them (`kill -9 PID`): the others go on at once with fewer ranks, from the step
that they have reached. A replacement is started meanwhile, and joins them between two steps.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast.train as ht

EPOCHS = 100


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(960, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(dim=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-seconds", type=float, default=0.05, help="a pause in each step")
    parser.add_argument("--folder", type=Path, default=Path("runs/survivors"), help="of the snapshots")
    options = parser.parse_args()

    with ht.process_group() as pg, ht.Snapshots(options.folder, every="2min", memory_every=20) as snaps:
        # All of this is made once in each process, and kept when other ranks are lost.
        torch.manual_seed(0)
        model = ht.ddp(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), pg)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = ht.DataLoader(dataset(), batch_size=16, global_batch_size=48, shuffle=True, seed=0)
        state = snaps.track(model=model, optimizer=optimizer, loader=loader)
        snaps.resume()  # a replacement waits here until the others have reached the end of a step

        @ht.survive(snaps)
        def train() -> None:
            print(f"rank {pg.rank} of {pg.world} goes on after step {state.step}, pid {os.getpid()}", flush=True)
            for _epoch in state.epochs(EPOCHS):
                for inputs, labels in loader:
                    if state.step >= options.steps:
                        return
                    with ht.accumulate(model, loader) as micro:
                        scores = model(inputs.to(pg.device))
                        micro.backward(F.cross_entropy(scores, labels.to(pg.device)))
                    if micro.last:
                        optimizer.step()
                        optimizer.zero_grad()
                    time.sleep(options.step_seconds)
                    snaps.step(loss=micro.loss)

        train()
        print(f"rank {pg.rank} of {pg.world} ends after step {state.step}", flush=True)


if __name__ == "__main__":
    main()
