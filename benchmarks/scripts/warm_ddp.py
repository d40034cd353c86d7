"""Three steps of DDP."""

import torch
import warm_work
from torch import nn
from torch.nn.parallel import DistributedDataParallel

warm_work.begin()
model = DistributedDataParallel(nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
warm_work.finish()
