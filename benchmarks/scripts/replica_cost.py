"""What a check of the replicas costs: the time of a step with a check, beside those around it without one.

Rank 0's wall time: the ranks wait for each other in a check. The machine's speed changes within seconds, so each check
is compared with the steps beside it; the median over all of them.
"""

import json
import os
import statistics
import time

import torch
from torch import nn

import holdfast.train as ht

WIDTH, LAYERS, BATCH = 512, 6, 256
BEFORE, CHECKS = 4, 20
EVERY = 500

torch.set_num_threads(1)
with ht.process_group() as pg:
    torch.manual_seed(0)
    net = nn.Sequential(*(each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    model = ht.ddp(net, pg)
    optimizer = torch.optim.AdamW(model.parameters())
    ht.check_replicas(model, optimizer, every=BEFORE)
    inputs = torch.randn(BATCH, WIDTH)
    taken = []
    for _ in range(BEFORE * (CHECKS + 1) + 1):
        began_s = time.perf_counter()
        model(inputs).square().mean().backward()
        optimizer.step()  # the check of the step before is at its beginning
        optimizer.zero_grad()
        taken.append(time.perf_counter() - began_s)
    added, steps = [], []
    for at in range(BEFORE, len(taken) - 1, BEFORE):
        without = statistics.median((taken[at - 1], taken[at - 2], taken[at + 1]))
        added.append(taken[at] - without)
        steps.append(without)
    if pg.rank == 0:
        check_s, step_s = statistics.median(added), statistics.median(steps)
        found = {"check": check_s * 1000, "step": step_s * 1000, "share": check_s / (EVERY * step_s) * 100}
        with open(f"{os.environ['BENCH_OUT']}/replica_cost.json", "w") as file:
            json.dump(found, file)
