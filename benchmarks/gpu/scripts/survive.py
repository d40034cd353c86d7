"""DDP in `ht.survive`, with gloo on tensors of one GPU for all ranks: each step of each rank leaves a line in steps.jsonl.

It ends when the file `stop` is there and the world is whole.
"""

from __future__ import annotations

import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn

import holdfast.train as ht
from stamping import DEVICE, ON_GPU, OUT, stamp

RANKS = int(os.environ["GPU_RANKS"])
WORK = 4096 if ON_GPU else 128
"""Size of the matrices whose products keep the device busy while a rank is killed."""

trail = os.open(f"{OUT}/steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
torch.set_num_threads(1)
with (
    ht.process_group(device=DEVICE, backend="gloo") as pg,
    ht.Snapshots(f"{OUT}/snapshots", every="1h", memory_every=10) as snaps,
):
    model = ht.ddp(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), pg)
    optimizer = torch.optim.Adam(model.parameters())
    state = snaps.track(model=model, optimizer=optimizer)
    snaps.resume()
    work = torch.randn(WORK, WORK, device=pg.device)

    @ht.survive(snaps)
    def train() -> None:
        while True:
            stop = torch.tensor(float(os.path.exists(f"{OUT}/stop")), device=pg.device)
            dist.all_reduce(stop)
            if stop.item() and pg.world == RANKS:
                return
            for _ in range(4):
                torch.mm(work, work)
            model(torch.ones(32, 64, device=pg.device) / pg.world).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            snaps.step()
            line = {"rank": pg.rank, "world": pg.world, "pid": os.getpid(), "step": state.step, "now": time.monotonic()}
            os.write(trail, json.dumps(line).encode() + b"\n")
            time.sleep(0.02)

    train()
    sums = torch.stack([each.detach().double().sum() for each in model.parameters()]).sum().cpu()
    stamp(f"sums.{pg.rank}", float(sums))
