"""A job that can be preempted, grown and shrunk at any moment and does no step twice.

holdfast run --standalone --nproc-per-node 2 examples/draining.py
kill -TERM <pid of holdfast>      # all ranks stop at the same step, the snapshot is saved, exit code 75
holdfast run --standalone --nproc-per-node 2 examples/draining.py      # goes on where it stopped
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.worker import should_stop


def save(path: Path, step: int, model: torch.nn.Module) -> None:
    """Whole or not at all: a reader never sees half a snapshot."""
    temporary = path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict()}, temporary)
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--snapshot", type=Path, default=Path("draining.pt"))
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    start = 0
    if arguments.snapshot.exists():
        snapshot = torch.load(arguments.snapshot, weights_only=True)
        model.load_state_dict(snapshot["model"])
        start = snapshot["step"]
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} begins at step {start}")

    for step in range(start, arguments.steps):
        loss = ddp(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
        if should_stop():  # on every rank, once per step
            if dist.get_rank() == 0:
                save(arguments.snapshot, step + 1, model)
            print(f"rank {dist.get_rank()} leaves after step {step}")
            dist.barrier()  # nobody leaves before the snapshot is there
            dist.destroy_process_group()
            sys.exit(0)

    if dist.get_rank() == 0:
        print(f"done after step {arguments.steps}")
        arguments.snapshot.unlink(missing_ok=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
