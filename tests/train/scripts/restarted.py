"""DDP with small buckets on four ranks, all killed and started again: restarted.py FOLDER

Prints for each of several trainings the digest of its weights, and in how many buckets its last life had the gradients
of its first step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import holdfast.train as ht
from holdfast.train import state as states

RANKS, WIDTH = 4, 32
KILLED_AFTER, LAST = 3, 6


class Net(nn.Module):
    """The gradients are made in another order than that of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(each): nn.Linear(WIDTH, WIDTH) for each in (3, 0, 4, 1, 2)})

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number in range(len(self.layers)):
            rows = torch.tanh(self.layers[str(number)](rows))
        return rows.square().mean()


def life(folder: Path, last: int) -> None:
    """Train until `last`, and be killed."""
    buckets: list[list[int]] = []

    def summed(bucket: Any) -> Any:
        buckets[-1].append(bucket.buffer().numel())
        return allreduce_hook(None, bucket)

    with ht.process_group() as pg, ht.Snapshots(folder / "snapshots", every=None, memory_every=None) as snaps:
        torch.manual_seed(1)
        model = ht.ddp(Net(), pg, bucket_cap_mb=0.005)
        model.register_comm_hook(None, lambda _, bucket: summed(bucket))  # DDP compares annotations
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        state = snaps.track(model=model, optimizer=optimizer)
        snaps.resume()
        while state.step < last:
            buckets.append([])
            rows = torch.arange(16.0 * WIDTH).reshape(16, WIDTH) * (state.step + 0.1 + pg.rank)
            model(torch.sin(rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
            snaps.step()
        snaps.save(wait=True)
        if pg.rank == 0:
            weights = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters()))
            (folder / "found").write_text(json.dumps([weights.hexdigest(), len(buckets[0])]))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def found(folder: Path, *lasts: int) -> list[Any]:
    """Of lives that trained until these steps."""
    folder.mkdir()
    for last in lasts:
        codes = run_ranks(RANKS, lambda last=last: life(folder, last))  # type: ignore[misc]
        assert codes == [-signal.SIGKILL] * RANKS, codes
    return list(json.loads((folder / "found").read_text()))


def saved_before_orders_were() -> None:
    dumps = states.codec.dumps

    def older(tree: Any) -> bytes:
        if isinstance(tree, dict):
            tree.pop("orders", None)
        return dumps(tree)

    states.codec.dumps = older


if __name__ == "__main__":
    place = Path(sys.argv[1])
    told = {"whole": found(place / "whole", LAST), "again": found(place / "again", KILLED_AFTER, LAST)}
    saved_before_orders_were()
    told["older"] = found(place / "older", KILLED_AFTER, LAST)
    print(json.dumps(told))
