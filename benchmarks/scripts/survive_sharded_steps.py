"""A sharded model on gloo whose training function makes it in `ht.survive`: each step of each rank leaves a line in
steps.jsonl, as in survive_steps.py.

    holdfast run … survive_sharded_steps.py [SECONDS [KIND]]        torchrun … survive_sharded_steps.py [SECONDS [KIND]]

SECONDS: how long the script takes to start, beside the import of torch. KIND: `fsdp`; `hsdp`: 2 shards; `compiled`:
fsdp, and the blocks are compiled; `copied`: fsdp, and other nodes have copies of the states in memory.
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
from torch.distributed.fsdp import fully_shard

import holdfast.train as ht

TORCH_S = time.monotonic()
PAUSE_S = 0.005
"""A step takes its time: all ranks share the cores of one machine."""
SAMPLES = 1 << 20
WIDTH, BLOCKS = 256, 4


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.full((WIDTH,), index / SAMPLES)


def block():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


torch.set_num_threads(1)
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0)
kind = sys.argv[2] if len(sys.argv) > 2 else "fsdp"
out = os.environ["BENCH_OUT"]
trail = os.open(f"{out}/steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
copies = 1 if kind == "copied" else 0
with ht.process_group() as pg, ht.Snapshots(f"{out}/snapshots", every="1h", memory_every=20, copies=copies) as snaps:
    data = Numbers()
    about = {"host": socket.gethostname(), "pid": os.getpid(), "local": pg.local_rank}
    about |= {"main": MAIN_S, "torch": TORCH_S}
    calls = itertools.count(1)

    @ht.survive(snaps, ranks=ht.multiple_of(2) if kind == "hsdp" else None)
    def train():
        here = {**about, "rank": pg.rank, "world": pg.world, "call": next(calls), "called": time.monotonic()}
        mesh = pg.mesh(replicate=-1, shard=2) if kind == "hsdp" else pg.mesh(shard=-1)
        model = nn.Sequential(*(block() for _ in range(BLOCKS)))
        for each in model:
            fully_shard(each, mesh=mesh)
            if kind == "compiled":
                each.compile()
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters())
        loader = ht.DataLoader(data, batch_size=6, global_batch_size=24, shuffle=True, seed=0)
        state = snaps.track(model=model, optimizer=optimizer, loader=loader)
        snaps.resume()
        here["built"] = time.monotonic()
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
