"""A rank of a job with copies=1 that never saves to the disk before its end: copied_job.py FOLDER ddp|fsdp2|hsdp STEPS
[BANDWIDTH]

Each rank appends JSON lines to FOLDER/RANK: where it goes on from, and each step with a fingerprint of its state.
While FOLDER/hold is there, no rank goes on to the last ten steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from node_kills import fingerprint, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast.train as ht

folder, kind, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
with ht.process_group() as group:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 3))
    if kind == "ddp":
        model = ht.ddp(model, group)
    else:
        hybrid = {"mesh_shape": (2, group.world // 2), "mesh_dim_names": ("replicas", "shards")}
        mesh = init_device_mesh("cpu", **hybrid) if kind == "hsdp" else init_device_mesh("cpu", (group.world,))
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    torch.manual_seed(group.rank)
    options = ht.SnapshotOptions(copies_bytes_per_s=float(sys.argv[4]) if sys.argv[4:] else None)
    with ht.Snapshots(folder / "runs", every=None, memory_every=4, copies=1, options=options) as snaps:
        snaps.track(model=model, optimizer=optimizer)
        resumed = snaps.resume()
        with (folder / str(group.rank)).open("a") as out:
            source = resumed.source if resumed else ""
            print(json.dumps([snaps.state.step, source, fingerprint(model, optimizer)]), file=out, flush=True)
            while snaps.state.step < steps:
                while snaps.state.step == steps - 10 and (folder / "hold").exists():
                    time.sleep(0.02)
                train(model, optimizer)
                snaps.step()
                print(json.dumps([snaps.state.step, "", fingerprint(model, optimizer)]), file=out, flush=True)
                time.sleep(0.02 * float(os.environ.get("TEST_SLOWNESS", "1")))
