"""Holds memory of the device, and keeps it busy, until it is killed."""

from __future__ import annotations

import os
import time

import torch
from stamping import DEVICE, ON_GPU, RANK, stamp, synchronize

held = torch.ones((2 << 30) // 4 if ON_GPU else 1 << 20, device=DEVICE)
work = torch.randn(4096 if ON_GPU else 64, 4096 if ON_GPU else 64, device=DEVICE)
torch.mm(work, work)
synchronize()
stamp(f"pid.{RANK}", os.getpid())
while True:
    for _ in range(20):
        torch.mm(work, work)
    synchronize()
    time.sleep(0.001)
