"""What `ht.survive` costs in a training step of a sharded model: steps in its function, and then of the same model after it.

Processor time of the main thread, in microseconds: the median step of each part. The speed of a machine drifts by more
than this costs, so the parts are short, and the median of many jobs counts. Run it on several ranks. KIND is fsdp, or hsdp:
there the state of each step is kept for the case that a rank is lost, which is the dearest of the sharded models.
"""

import json
import os
import statistics
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast.train as ht

STEPS, WARM_UP = 60, 20
PAUSE_S = 0.005
WIDTH = 256

torch.set_num_threads(1)
inputs = torch.randn(6, WIDTH)
with ht.process_group() as pg, ht.Snapshots(f"{os.environ['BENCH_OUT']}/snapshots", every="1h") as snaps:

    def steps(model, optimizer, scheduler):
        """The processor time of the median step, and the wall time (µs)."""
        processor, wall = [], []
        for number in range(WARM_UP + STEPS):
            began_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
            model(inputs).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            snaps.step()
            if number >= WARM_UP:
                processor.append((time.thread_time_ns() - began_ns) / 1000)
                wall.append((time.perf_counter_ns() - wall_ns) / 1000)
            time.sleep(PAUSE_S)
        return statistics.median(processor), statistics.median(wall) + PAUSE_S * 1e6

    @ht.survive(snaps)
    def train():
        mesh = pg.mesh(replicate=-1, shard=2) if os.environ["KIND"] == "hsdp" else pg.mesh(shard=-1)
        torch.manual_seed(0)  # the replicas have to be equal
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout()) for _ in range(4)))
        for each in model:
            fully_shard(each, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        snaps.track(model=model, optimizer=optimizer, scheduler=scheduler)
        snaps.resume()
        return steps(model, optimizer, scheduler), (model, optimizer, scheduler)

    (within, _), made = train()
    without, wall = steps(*made)
    if pg.rank == 0:
        with open(f"{os.environ['BENCH_OUT']}/survive_sharded_cost.json", "w") as file:
            json.dump({"added": within - without, "without": without, "wall": wall}, file)
