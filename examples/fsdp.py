"""Ranks with a sharded model (FSDP2) that keep their processes when another rank is killed.

    holdfast run --standalone --nproc-per-node 3 --max-restarts 3 examples/fsdp.py

Each rank prints its process. Kill one of them (`kill -9 PID`): the others leave `train`, form a new group, and call it
again in the same processes. The model is sharded for the ranks that are left, and takes its state from memory, also the
part of the rank that was killed. A replacement is started meanwhile, and joins them between two steps.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
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
    parser.add_argument("--folder", type=Path, default=Path("runs/fsdp"), help="of the snapshots")
    options = parser.parse_args()

    with ht.process_group() as pg, ht.Snapshots(options.folder, every="2min", memory_every=5) as snaps:
        data = dataset()  # made once in each process, and kept when other ranks are lost
        torch.manual_seed(0)

        @ht.survive(snaps)
        def train() -> int:
            # All of this is made again, for the ranks that are there.
            model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(pg.device)
            fully_shard(model, mesh=pg.mesh(shard=-1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            loader = ht.DataLoader(data, batch_size=16, global_batch_size=48, shuffle=True, seed=0)
            state = snaps.track(model=model, optimizer=optimizer, loader=loader)
            snaps.resume()  # from memory
            print(f"rank {pg.rank} of {pg.world} goes on after step {state.step}, pid {os.getpid()}", flush=True)
            for _epoch in state.epochs(EPOCHS):
                for inputs, labels in loader:
                    if state.step >= options.steps:
                        return state.step
                    with ht.accumulate(model, loader) as micro:
                        scores = model(inputs.to(pg.device))
                        micro.backward(F.cross_entropy(scores, labels.to(pg.device)))
                    if micro.last:
                        optimizer.step()
                        optimizer.zero_grad()
                    time.sleep(options.step_seconds)
                    snaps.step(loss=micro.loss)
            return state.step

        print(f"rank {pg.rank} of {pg.world} ends after step {train()}", flush=True)


if __name__ == "__main__":
    main()
