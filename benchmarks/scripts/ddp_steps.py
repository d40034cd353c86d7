"""DDP on gloo, without end. Every rank stamps every step (CLOCK_MONOTONIC, the same on all pretend hosts) into one file."""

import time

MAIN_S = time.monotonic()  # before anything else is imported

import json
import os
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TORCH_S = time.monotonic()
PAUSE_S = 0.02
"""A step takes its time. All nodes share the cores of one machine, and what is measured is not how fast they train."""

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
about = {"host": socket.gethostname(), "rank": rank, "world": world}
about |= {"main": MAIN_S, "torch": TORCH_S, "built": time.monotonic()}
trail = os.open(f"{os.environ['BENCH_OUT']}/steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
step = 0
while True:
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    step += 1
    os.write(trail, json.dumps({**about, "step": step, "now": time.monotonic()}).encode() + b"\n")
    time.sleep(PAUSE_S)
