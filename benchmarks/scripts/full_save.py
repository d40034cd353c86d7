"""Two ranks whose disk for snapshots becomes full before the last save.

    full_save.py DISK [every]     DISK: a small file system; the snapshot folder is DISK/snapshots

Each rank notes when its last step is over. `every`: saves to the disk at each so many steps.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import stamp
import torch
import torch.distributed as dist
from torch import nn

import holdfast.train as ht

WIDTH, STEPS, FULL_FROM = 300, 12, 8
disk = Path(sys.argv[1])

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
snaps = ht.Snapshots(disk / "snapshots", every=f"{sys.argv[2] if len(sys.argv) > 2 else 4} steps")
state = snaps.track(model=model, optimizer=optimizer)
snaps.resume()
for _ in state.epochs(1):
    for step in range(1, STEPS + 1):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
        snaps.step()
        if step == STEPS:
            stamp.stamp("last", time.monotonic_ns())
        if step == FULL_FROM:
            snaps.save(wait=True)
            if dist.get_rank() == 0:
                with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
            dist.barrier()
snaps.close()
