"""DDP on gloo; in the first attempt rank 1 fails in the middle of a step, while rank 0 waits for its gradients."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 10
CRASH_AT = 5

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(STEPS):
    optimizer.zero_grad()
    loss = model(torch.randn(32, 64)).square().mean()
    if step == CRASH_AT and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("crash in the middle of a step, on purpose")
    loss.backward()
    optimizer.step()

with open(f"{os.environ['BENCH_OUT']}/done.{rank}", "w") as file:
    file.write(str(STEPS))
dist.barrier()
del model
dist.destroy_process_group()
