"""DDP on gloo whose training function runs in `ht.survive`: each step of each rank leaves a line in steps.jsonl.

    holdfast run … survive_steps.py [SECONDS]        torchrun … survive_steps.py [SECONDS]

SECONDS: how long the script takes to start, beside the import of torch.
"""

import time

MAIN_S = time.monotonic()  # before anything else is imported

import itertools
import json
import os
import socket
import sys

import torch
from torch import nn

import holdfast.train as ht

TORCH_S = time.monotonic()
PAUSE_S = 0.005
"""A step takes its time: all ranks share the cores of one machine."""
SAMPLES = 1 << 20


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.full((64,), index / SAMPLES)


torch.set_num_threads(1)
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0)
out = os.environ["BENCH_OUT"]
trail = os.open(f"{out}/steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
with ht.process_group() as pg, ht.Snapshots(f"{out}/snapshots", every="1h", memory_every=20) as snaps:
    model = ht.ddp(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), pg)
    optimizer = torch.optim.Adam(model.parameters())
    loader = ht.DataLoader(Numbers(), global_batch_size=24, shuffle=True, seed=0)
    state = snaps.track(model=model, optimizer=optimizer, loader=loader)
    snaps.resume()
    about = {"host": socket.gethostname(), "pid": os.getpid(), "local": pg.local_rank}
    about |= {"main": MAIN_S, "torch": TORCH_S, "built": time.monotonic()}
    calls = itertools.count(1)

    @ht.survive(snaps)
    def train():
        here = {**about, "rank": pg.rank, "world": pg.world, "call": next(calls)}
        for _ in state.epochs(1000):
            for inputs in loader:
                with ht.accumulate(model, loader) as micro:
                    micro.backward(model(inputs).square().mean())
                if micro.last:
                    optimizer.step()
                    optimizer.zero_grad()
                snaps.step()
                line = {**here, "step": state.step, "now": time.monotonic()}
                os.write(trail, json.dumps(line).encode() + b"\n")
                time.sleep(PAUSE_S)

    train()
