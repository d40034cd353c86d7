"""Saves and loads of one 473 MB training state, timed in copies: the time that one warm copy of it takes in memory.

    train_state.py holdfast|torch FOLDER                  prints numbers as JSON
    train_state.py holdfast_killed|torch_killed FOLDER    saves, says so, and is killed by itself within 100 ms

A model of 39.4 million parameters and AdamW's two moments of them, all float32, 588 tensors.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

WIDTH, LAYERS, WORDS = 512, 12, 2936
SAVES, DURABLE = 20, 6
KILL_WITHIN_S = 0.1


class Block(nn.Module):
    """What a transformer's block has, without its arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *[Block() for _ in range(LAYERS)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Copies:
    """One copy of the state's bytes from warm memory to warm memory, by torch: taken in turn with what is measured."""

    def __init__(self, model: nn.Module) -> None:
        count = 3 * sum(each.numel() for each in model.parameters())
        self._source, self._target = torch.ones(count), torch.ones(count)
        self._took_s: list[float] = []
        self.take(4)

    def take(self, count: int = 1) -> None:
        self._took_s += [timed(lambda: self._target.copy_(self._source)) for _ in range(count)]

    @property
    def s(self) -> float:
        """Seconds, the median."""
        return statistics.median(self._took_s)


def fsync(path: Path) -> None:
    for each in [path] if path.is_file() else [*path.rglob("*"), path]:
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def child(mode: str, folder: Path, **extra: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, mode, str(folder)], env={**os.environ, **extra}, capture_output=True, text=True
    )
    line = done.stdout.strip().rpartition("\n")[2]
    if not line:
        raise RuntimeError(f"{mode}: {done.stderr[-500:]}")
    found: dict[str, float] = json.loads(line)
    return found


# --- holdfast ---------------------------------------------------------------------------------------------------------


def snapshots(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    import holdfast.train as ht

    snaps = ht.Snapshots(folder, every=None, memory_every=1, keep=ht.Keep(last=2))
    snaps.track(model=model, optimizer=optimizer)
    return snaps


def holdfast(folder: Path) -> dict[str, float]:
    """Both lives have one parent, as under torchrun, so the second finds the first one's memory."""
    extra = {"TORCHELASTIC_RUN_ID": f"bench{os.getpid()}", "LOCAL_RANK": "0"}
    found = child("holdfast_saves", folder, **extra)
    return {**found, **child("holdfast_resume", folder, **extra)}


def holdfast_saves(folder: Path) -> None:
    """Asynchronous saves to the disk, some durable ones, then a sudden end."""
    model, optimizer = build()
    snaps = snapshots(folder, model, optimizer)
    snaps.resume()
    first = timed(lambda: train(model, optimizer))
    first_save = timed(snaps.step)
    later = min(timed(lambda: train(model, optimizer)) for _ in range(3))
    copies = Copies(model)
    in_memory, stalls, durable = [], [], []
    for _ in range(SAVES):
        train(model, optimizer)
        copies.take()
        in_memory.append(timed(snaps.step))
    for _ in range(DURABLE):
        train(model, optimizer)
        copies.take()
        stalls.append(timed(snaps.save))
        durable.append(stalls[-1] + timed(snaps._saving.wait))
        snaps._pruner.finish()  # minutes pass between two of them
    train(model, optimizer)
    snaps.step()
    mark, copy = model[0].weight.double().sum().item(), copies.s
    print(
        json.dumps(
            {
                "copy": copy * 1e3,
                "first save": first_save / copy,
                "memory save, mean": statistics.mean(in_memory) / copy,
                "memory save, worst": max(in_memory) / copy,
                "stall, mean": statistics.mean(stalls) / copy,
                "stall, worst": max(stalls) / copy,
                "durable": statistics.mean(durable) / copy,
                "first step of a fresh start": (first - later) / copy,
                "mark": mark,
            }
        ),
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGKILL)


def holdfast_resume(folder: Path) -> None:
    model, optimizer = build()
    copies = Copies(model)
    snaps = snapshots(folder, model, optimizer)
    found: list[Any] = []
    took = timed(lambda: found.append(snaps.resume()))
    resumed = found[0]
    assert resumed is not None
    assert (resumed.source, resumed.step) == ("memory", 1 + SAVES + 1), resumed
    copies.take(4)
    mark, copy = model[0].weight.double().sum().item(), copies.s
    first = timed(lambda: train(model, optimizer))
    later = min(timed(lambda: train(model, optimizer)) for _ in range(3))
    print(json.dumps({"resume": took / copy, "first step after it": (first - later) / copy, "mark resumed": mark}))
    snaps.close()


def holdfast_killed(folder: Path) -> None:
    model, optimizer = build()
    snaps = snapshots(folder, model, optimizer)
    snaps.resume()
    train(model, optimizer)
    snaps.step()
    snaps.save()
    end_soon()


# --- torch's own ------------------------------------------------------------------------------------------------------


def join() -> None:
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def torch_own(folder: Path) -> dict[str, float]:
    found = child("torch_saves", folder)
    return {**found, **child("torch_load", folder)}


def torch_saves(folder: Path) -> None:
    join()
    model, optimizer = build()
    train(model, optimizer)
    copies = Copies(model)
    stalls, plain, synced, saved = [], [], [], []
    for number in range(DURABLE + 1):
        train(model, optimizer)
        copies.take()
        place, began = folder / f"async{number}", time.perf_counter()
        done = dcp.async_save(state_of(model, optimizer), checkpoint_id=place)
        stalls.append(time.perf_counter() - began)
        done.result()
        shutil.rmtree(place)
    for number in range(3):
        copies.take()
        file, place = folder / f"file{number}", folder / f"dcp{number}"
        began = time.perf_counter()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        plain.append(time.perf_counter() - began)
        fsync(file)
        synced.append(time.perf_counter() - began)
        saved.append(timed(lambda: (dcp.save(state_of(model, optimizer), checkpoint_id=place), fsync(place))))  # noqa: B023
        shutil.rmtree(place)
        if number < 2:
            file.unlink()
    file.rename(folder / "last.pt")
    copy = copies.s
    print(
        json.dumps(
            {
                "copy": copy * 1e3,
                "stall, mean": statistics.mean(stalls) / copy,
                "stall, worst": max(stalls) / copy,
                "stall of torch.save": statistics.mean(plain) / copy,
                "durable": statistics.mean(saved) / copy,
                "durable by torch.save": statistics.mean(synced) / copy,
            }
        )
    )


def torch_load(folder: Path) -> None:
    model, optimizer = build()
    copies = Copies(model)

    def load() -> None:
        state = torch.load(folder / "last.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    took = timed(load)
    copies.take(4)
    print(json.dumps({"resume": took / copies.s}))


def torch_killed(folder: Path) -> None:
    join()
    model, optimizer = build()
    train(model, optimizer)
    dcp.async_save(state_of(model, optimizer), checkpoint_id=folder / "async")
    end_soon()


def end_soon() -> None:
    print("{}", flush=True)
    time.sleep(random.uniform(0, KILL_WITHIN_S))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    mode, place = sys.argv[1], Path(sys.argv[2])
    if mode in ("holdfast", "torch"):
        print(json.dumps((holdfast if mode == "holdfast" else torch_own)(place)))
    else:
        globals()[mode](place)
