"""Losses of a small network on several numbers of ranks, as JSON: loss_curves.py resized|tail"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import holdfast.train as ht
from holdfast.train.group import ProcessGroup


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def build(kind: str, pg: ProcessGroup) -> nn.Module:
    torch.manual_seed(1)
    net = Net()
    if kind == "ddp":
        return ht.ddp(net, pg)
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


def data(length: int) -> torch.utils.data.TensorDataset:
    inputs = torch.randn(length, 6, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True))


def on_ranks(world: int, work: Callable[[], None]) -> None:
    codes = run_ranks(world, work)
    assert codes == [0] * world, codes


# --- a constant global batch in one world after the other -------------------------------------------------------------


STEPS = 16
"""Five make an epoch; the last of them holds 5 samples of 24, too few for four ranks with two micro-batches."""


def train(kind: str, folder: Path, first: int, last: int) -> None:
    """Optimizer steps first … last-1, from folder/state.pt on when `first` is not 0; rank 0 appends their losses."""
    options = StateDictOptions(full_state_dict=True)
    losses: list[float] = []
    with ht.process_group() as pg:
        model = build(kind, pg)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = ht.DataLoader(data(101), 4, shuffle=True, seed=3, global_batch_size=24)
        if first:
            state = torch.load(folder / "state.pt", weights_only=True)
            saved = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(model, optimizer, **saved, options=options)
            loader.load_state_dict(state["loader"])
        while len(losses) < last - first:
            for x, y in loader:
                with ht.accumulate(model, loader) as micro:
                    micro.backward(nn.functional.mse_loss(model(x), y))
                if micro.last:
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(micro.loss.item())
                    loader.trained()
                    if len(losses) == last - first:
                        break
        weights, moments = get_state_dict(model, optimizer, options=options)
        if pg.rank == 0:
            torch.save({"model": weights, "optimizer": moments, "loader": loader.state_dict()}, folder / "state.pt")
            with (folder / "losses.txt").open("a") as file:
                file.writelines(f"{loss!r}\n" for loss in losses)


def curve(kind: str, *worlds: int) -> list[float]:
    """All losses, in worlds of these sizes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stops = [STEPS * part // len(worlds) for part in range(len(worlds) + 1)]
        for world, first, last in zip(worlds, stops, stops[1:], strict=False):
            on_ranks(world, functools.partial(train, kind, folder, first, last))
        return [float(line) for line in (folder / "losses.txt").read_text().splitlines()]


def resized() -> dict[str, list[float]]:
    return {"undisturbed": curve("ddp", 1), "ddp": curve("ddp", 2, 3, 4, 1), "fsdp": curve("fsdp", 4, 2, 3)}


# --- optimizer steps of three batches, and epochs that three does not divide --------------------------------------


LENGTH, EVERY, STEP = 77, 3, 24
"""Four steps an epoch: 24, 24, 24, and 5 samples in one batch, which four ranks share unevenly."""


def note(told: list[Any], loss: torch.Tensor, model: nn.Module, count: int) -> None:
    """Mean loss of a step, sum of the weights after it, and how many micro-batches it had."""
    weights = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    told.append([loss.item(), sum(each.detach().double().sum().item() for each in weights), count])


def by_hand(out: Path) -> None:
    """One batch of all samples of a step."""
    told: list[Any] = []
    with ht.process_group() as pg:
        model = build("ddp", pg)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for x, y in ht.DataLoader(data(LENGTH), STEP, shuffle=True, seed=3):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            note(told, loss, model, 1)
    out.write_text(json.dumps(told))


def accumulated(kind: str, out: Path) -> None:
    told: list[Any] = []
    with ht.process_group() as pg:
        model = build(kind, pg)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        loader = ht.DataLoader(data(LENGTH), STEP // EVERY // pg.world, shuffle=True, seed=3)
        count = 0
        for x, y in loader:
            with ht.accumulate(model, micro_batches=EVERY) as micro:
                micro.backward(nn.functional.mse_loss(model(x), y))
            count += 1
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
                note(told, micro.loss, model, count)
                count = 0
        assert micro.last
        if pg.rank == 0:
            out.write_text(json.dumps(told))


def tail() -> dict[str, Any]:
    cases: dict[str, tuple[int, Callable[[Path], None]]] = {"by hand": (1, by_hand)}
    for kind, world in (("ddp", 1), ("ddp", 4), ("fsdp", 2)):
        cases[f"{kind} {world}"] = world, functools.partial(accumulated, kind)
    told = {}
    with tempfile.TemporaryDirectory() as name:
        for case, (world, work) in cases.items():
            out = Path(name) / case
            on_ranks(world, functools.partial(work, out))
            told[case] = json.loads(out.read_text())
    return told


if __name__ == "__main__":
    print(json.dumps({"resized": resized, "tail": tail}[sys.argv[1]]()))
