"""Three DDP ranks on gloo that train for seconds and evaluate for minutes, without a step.

    evaluations.py SECONDS_OF_ALL SECONDS_OF_ONE_EVALUATION

In turn all ranks evaluate; rank 0 does while the others wait for it; all sleep, as for a disk.
"""

from __future__ import annotations

import itertools
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TRAIN_S = 15.0


def evaluate(model: nn.Module, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < end_s:
            model(torch.randn(64, 256))
            time.sleep(0.02)


def main() -> None:
    whole_s, each_s = float(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo")
    net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)])
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began_s = time.monotonic()
    for kind in itertools.cycle(("all", "one", "sleep")):
        end_s = time.monotonic() + TRAIN_S
        go_on = torch.ones(1)
        while go_on.item():
            model(torch.randn(8, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
            go_on = torch.tensor([float(time.monotonic() < end_s)])
            dist.broadcast(go_on, 0)
        if kind == "sleep":
            time.sleep(each_s)
        elif kind == "all" or dist.get_rank() == 0:
            evaluate(net, each_s)
        dist.barrier()
        over = torch.tensor([float(time.monotonic() - began_s > whole_s)])
        dist.broadcast(over, 0)
        if over.item():
            return


if __name__ == "__main__":
    main()
