"""What `ht.survive` costs in a training step: the same loop in it and outside of it, in turn, in one process.

Each step pauses for 5 ms, so that what survive does meets cold caches as it does beside other work. Processor time of the
main thread, in microseconds. The machine's speed changes within seconds, so what counts is the difference between
neighbouring blocks of steps; the median over all pairs of them.

In a new call the values of the parameters are compared in the steps 1, 2, 4, 8 and 16, and the ranks in the first few. A
long training has hardly any of these steps, so each block begins with EARLY steps that are not measured.
"""

import json
import os
import statistics
import time

import torch
from torch import nn

import holdfast.train as ht

EARLY, STEPS, BLOCKS = 16, 15, 60
PAUSE_S = 0.005

torch.set_num_threads(1)
with ht.process_group() as pg, ht.Snapshots(f"{os.environ['BENCH_OUT']}/snapshots", every="1h") as snaps:
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))
    model = ht.ddp(net, pg)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    state = snaps.track(model=model, optimizer=optimizer, scheduler=scheduler)
    snaps.resume()
    inputs = torch.randn(32, 64)
    times = {"with": [], "without": []}

    def block(kind):
        taken = []
        for number in range(EARLY + STEPS):
            began_ns = time.thread_time_ns()
            model(inputs).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            snaps.step()
            if number >= EARLY:
                taken.append((time.thread_time_ns() - began_ns) / 1000)
            time.sleep(PAUSE_S)
        times[kind].append(statistics.median(taken))

    for _ in range(BLOCKS):
        block("without")
        ht.survive(snaps)(block)("with")
    with open(f"{os.environ['BENCH_OUT']}/survive_cost.json", "w") as file:
        added = [one - other for one, other in zip(times["with"], times["without"], strict=True)]
        json.dump({"added": statistics.median(added), "without": statistics.median(times["without"])}, file)
