"""Three steps of a compiled model."""

from __future__ import annotations

import torch
from stamping import DEVICE, ON_GPU, RANK, stamp, synchronize
from torch import nn

BLOCKS = 4 if ON_GPU else 1
layers = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256)) for _ in range(BLOCKS)]
model = nn.Sequential(*layers).to(DEVICE)
optimizer = torch.optim.Adam(model.parameters())
step = torch.compile(lambda inputs: model(inputs).square().mean())
for _ in range(3):
    optimizer.zero_grad()
    step(torch.randn(64, 256, device=DEVICE)).backward()
    optimizer.step()
synchronize()
stamp(f"third.{RANK}")
