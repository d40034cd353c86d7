"""Saves of a state on the device: what they cost the steps, how fast they reach the disk, and whether a resume is equal.

The first life measures and kills itself; the second one resumes from memory, and compares. Figures go into figures.json.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import time
from typing import Any

import torch
from stamping import DEVICE, ON_GPU, OUT, stamp, synchronize
from torch import nn
from torch.distributed import checkpoint as dcp

import holdfast.train as ht
from holdfast.train.replicas import total

WIDTH, LAYERS, BATCH = (4096, 20, 16384) if ON_GPU else (256, 4, 256)
"""On a GPU 1.3 GB of parameters, and 4 GB with the moments of Adam."""
EVERY, SAVES, DURABLE = 5, 8, 2

torch.set_float32_matmul_precision("high")
model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), fused=ON_GPU)
inputs = torch.randn(BATCH, WIDTH, device=DEVICE)
snaps = ht.Snapshots(
    f"{OUT}/snapshots", every=None, memory_every=EVERY, options=ht.SnapshotOptions(overlap=True), keep=ht.Keep(last=2)
)
state = snaps.track(model=model, optimizer=optimizer)


def tensors() -> list[torch.Tensor]:
    moments = [each for held in optimizer.state.values() for each in held.values() if isinstance(each, torch.Tensor)]
    return [*model.parameters(), *moments]


def step() -> float:
    """One step, until the device has done it."""
    began = time.perf_counter()
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    synchronize()
    return time.perf_counter() - began


def timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def memory_saves(found: dict[str, float], size: float) -> None:
    """What a save costs: the call, and what the next step takes longer, since the copy may overlap with it."""
    steps, calls = [], []
    while state.step < EVERY * (SAVES + 1):
        steps.append(step())
        calls.append(timed(snaps.step))
    saved = [number for number in range(EVERY - 1, len(steps) - 1) if number % EVERY == EVERY - 1]
    usual = statistics.median(each for number, each in enumerate(steps) if number - 1 not in saved and number > EVERY)
    longer = [calls[number] + steps[number + 1] - usual for number in saved]
    found["step"] = usual * 1e3
    found["memory save: call, median"] = statistics.median(calls[number] for number in saved) * 1e3 / size
    found["memory save: with what the next step takes longer, median"] = statistics.median(longer) * 1e3 / size
    found["memory save: the same, worst"] = max(longer[1:]) * 1e3 / size


def durable_saves(found: dict[str, float], size: float) -> None:
    stalls, seconds = [], []
    for _ in range(DURABLE):
        step()
        began = time.perf_counter()
        stalls.append(timed(snaps.save))
        snaps._wait(snaps._saving)
        seconds.append(time.perf_counter() - began)
        snaps.step()
    found["save to the disk: call, median"] = statistics.median(stalls) * 1e3 / size
    found["save to the disk: until it is there, median"] = statistics.median(seconds) * 1e3 / size


def others(found: dict[str, float], size: float) -> None:
    """torch's own, beside it."""
    folder = f"{OUT}/torch"
    os.makedirs(folder)
    of_model = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found["torch.save: call"] = timed(lambda: torch.save(of_model, f"{folder}/state")) * 1e3 / size
    torch.distributed.init_process_group("cpu:gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    done: list[Any] = []
    for _ in range(2):
        took = timed(lambda: done.append(dcp.async_save(of_model, checkpoint_id=f"{folder}/dcp")))
        done.pop().result()
        shutil.rmtree(f"{folder}/dcp")
    found["dcp.async_save: second call"] = took * 1e3 / size
    shutil.rmtree(folder)


def write(found: dict[str, float]) -> None:
    with open(f"{OUT}/figures.json", "w") as file:
        json.dump(found, file)


def after_resume(resumed: ht.Resumed) -> None:
    with open(f"{OUT}/digest") as file:
        at, digest = json.load(file)
    same = (resumed.step, total(tensors())) == (at, digest)
    stamp("equal.0", float(same))
    print(f"resumed from {resumed.source}, step {resumed.step} of {at}, equal: {same}", flush=True)
    snaps.close()
    with open(f"{OUT}/figures.json") as file:
        found = json.load(file)
    try:
        others(found, found["state"])
    finally:
        write(found)


def main() -> None:
    resumed = snaps.resume()
    if resumed is not None:
        return after_resume(resumed)
    step()
    size = sum(each.nbytes for each in tensors()) / 1e9
    snaps.step()
    found = {"state": size}
    memory_saves(found, size)
    write(found)
    durable_saves(found, size)
    write(found)
    while state.step % EVERY != EVERY - 1:
        step()
        snaps.step()
    step()
    with open(f"{OUT}/digest", "w") as file:
        json.dump([state.step + 1, total(tensors())], file)
    snaps.step()  # saved in memory
    step()
    snaps._saving.settle()  # a copy that overlaps with that step
    snaps.step()
    return os.kill(os.getpid(), signal.SIGKILL)


main()
