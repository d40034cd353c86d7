"""Says when torch ranks have done their first work. WARM_WORK: reduce (one all-reduce) | ddp (three steps) | idle.

WARM_CRASH_S: rank 1 of the first attempt dies so long after that, while the others wait in a collective.
"""

import os
import time

import torch
import torch.distributed as dist

OUT, WORK = os.environ["BENCH_OUT"], os.environ["WARM_WORK"]
CRASH_S = float(os.environ.get("WARM_CRASH_S", "-1"))
ATTEMPT = os.environ["TORCHELASTIC_RESTART_COUNT"]


def stamp(name: str, number: int) -> None:
    beside = f"{OUT}/.{name}.{dist.get_rank()}"
    with open(beside, "w") as file:
        file.write(str(number))
    os.rename(beside, f"{OUT}/{name}.{dist.get_rank()}")


def train() -> None:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()


torch.set_num_threads(1)
dist.init_process_group("gloo")
if WORK == "ddp":
    train()
else:
    dist.all_reduce(torch.ones(1))
now_ns = time.monotonic_ns()
if CRASH_S >= 0 and ATTEMPT == "0":
    time.sleep(CRASH_S)
    if dist.get_rank() == 1:
        stamp("crash", time.monotonic_ns())
        os._exit(1)
    dist.all_reduce(torch.ones(1))
stamp("pid", os.getpid())
stamp("done", now_ns)
if WORK == "idle":
    time.sleep(120)
dist.barrier()
dist.destroy_process_group()
