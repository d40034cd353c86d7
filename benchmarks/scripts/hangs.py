"""Three DDP ranks on gloo, of which one stops making steps in the way that is asked for.

hangs.py sleep|spin|stop|gil|loader RANK
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS = 60


class Numbers(Dataset[torch.Tensor]):
    """Its last item never comes: the process that reads it stops there."""

    def __init__(self, broken: bool) -> None:
        self._broken = broken

    def __len__(self) -> int:
        return STEPS + 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._broken and index >= STEPS:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.005)
        return torch.randn(10)


def stuck(kind: str) -> None:
    match kind:
        case "sleep":
            time.sleep(1e6)
        case "spin":
            count = 0
            while True:
                count += 1
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "gil":
            ctypes.PyDLL(None).sleep(10**6)


def main() -> None:
    kind, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    ours = dist.get_rank() == rank
    model = DistributedDataParallel(torch.nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Numbers(ours and kind == "loader"), num_workers=1)
    for step, batch in enumerate(loader):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            (Path(os.environ["BENCH_OUT"]) / "stepped").touch()  # its time is that of the newest step
        if ours and step == STEPS:
            stuck(kind)


if __name__ == "__main__":
    main()
