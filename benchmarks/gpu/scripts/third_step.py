"""Three steps of DDP, and then the first attempt kills itself: the restart makes three steps, too."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from stamping import ON_GPU, stamp, synchronize
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARM_S = 3.0
"""The launcher has prepared itself for a restart after this time."""
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
if ON_GPU:
    torch.cuda.set_device(0)
    free, whole = torch.cuda.mem_get_info()
    stamp(f"used.{life}", whole - free)
dist.init_process_group("nccl" if ON_GPU else "gloo", device_id=torch.device("cuda", 0) if ON_GPU else None)
device = "cuda" if ON_GPU else "cpu"
model = DistributedDataParallel(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(device))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(64, 1024, device=device)).square().mean().backward()
    optimizer.step()
synchronize()
stamp(f"third.{life}")
if life == "0":
    time.sleep(WARM_S)
    stamp("killed.0")
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(0)  # torch's destructor of a group that DDP has used may hang, under any launcher
