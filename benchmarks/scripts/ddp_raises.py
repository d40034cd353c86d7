"""DDP on gloo, four ranks; rank 1 raises in the middle of a step, while the others wait for its gradients, and says when.

BENCH_EXIT_S: seconds that an exit function of that rank takes. It raises once there is a file `go`.
"""

import atexit
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RAISE_AT = 20
OUT, EXIT_S = os.environ["BENCH_OUT"], float(os.environ.get("BENCH_EXIT_S", "0"))


def stamp(name: str, number: int) -> None:
    beside = f"{OUT}/.{name}.{rank}"
    with open(beside, "w") as file:
        file.write(str(number))
    os.rename(beside, f"{OUT}/{name}.{rank}")


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if rank == 1 and EXIT_S:
    atexit.register(time.sleep, EXIT_S)
for step in range(10 * RAISE_AT):
    if step == RAISE_AT // 2:
        stamp("pid", os.getpid())
    optimizer.zero_grad()
    loss = model(torch.randn(32, 64)).square().mean()
    if step == RAISE_AT and rank == 1:
        while not os.path.exists(f"{OUT}/go"):
            time.sleep(0.005)
        stamp("raised", time.monotonic_ns())
        raise RuntimeError("raised in the middle of a step, on purpose")
    loss.backward()
    optimizer.step()
