"""Tied weights on forked ranks: DDP and FSDP2. Prints what was found as JSON. tied_ranks.py FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from snapshot_ranks import ranks, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast.train as ht
from holdfast.snapshots import folder as folders
from holdfast.snapshots.folder import RankFile


class Language(nn.Module):
    """Three rows: on four ranks one has nothing of the tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(3, 5), nn.Linear(5, 5), nn.Linear(5, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


def build(kind: str, seed: int) -> tuple[nn.Module, Language, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    plain = Language()
    model: nn.Module = plain
    if kind == "ddp" and dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(plain)
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(plain.body, mesh=mesh)
        fully_shard(plain, mesh=mesh)
    return model, plain, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.tensor([0, 1, 2])).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(kind: str, place: Path) -> Any:
    model, _, optimizer = build(kind, 0)
    with ht.Snapshots(place, every=None, memory_every=None) as snaps:
        snaps.track(model=model, optimizer=optimizer)
        snaps.resume()
        for _ in range(2):
            step(model, optimizer)
            snaps.step()
        snaps.save(wait=True)
        return whole(model, optimizer)


def load(kind: str, place: Path) -> Any:
    model, plain, optimizer = build(kind, 1)
    with ht.Snapshots(place, every=None, memory_every=None) as snaps:
        snaps.track(model=model, optimizer=optimizer)
        snaps.resume()
        found = whole(model, optimizer)
        step(model, optimizer)
        return {"state": found, "tied": plain.head.weight is plain.embed.weight}


def once(place: Path) -> bool:
    (snapshot,) = folders.survey(place).committed
    keys = set()
    for rank in range(snapshot.manifest.world):
        with RankFile(snapshot, rank) as file:
            keys |= {each.name.partition("@")[0] for each in file.image.entries}
    return "model.embed.weight" in keys and "model.head.weight" not in keys


if __name__ == "__main__":
    told = {}
    for kind, world, other, other_world in (("ddp", 2, "fsdp", 4), ("fsdp", 4, "ddp", 1)):
        place = Path(sys.argv[1]) / kind
        saved = ranks(world, lambda: save(kind, place), kind)  # noqa: B023
        loaded = [
            ranks(world, lambda: load(kind, place), kind),  # noqa: B023 - from memory
            ranks(other_world, lambda: load(other, place), f"{kind}-{other}"),  # noqa: B023
        ]
        told[kind] = {"saved": saved, "once": once(place), "loaded": loaded}
    print(json.dumps(told))
