"""A few optimizer steps of a small network with a constant global batch; rank 0 appends their losses to a file.

curve.py ddp|fsdp FOLDER FIRST LAST     steps FIRST … LAST-1; goes on from FOLDER/state.pt when FIRST is not 0
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path

import torch
from forked import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import holdfast.train as ht


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def build(kind: str, pg: ht.ProcessGroup) -> nn.Module:
    torch.manual_seed(1)
    net = Net()
    if kind == "ddp":
        return ht.ddp(net, pg)
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


STEPS = 16
"""Five make an epoch; the last of them holds 5 samples of 24, too few for four ranks with two micro-batches."""


def train(kind: str, folder: Path, first: int, last: int) -> None:
    """Optimizer steps first … last-1, from folder/state.pt on when `first` is not 0; rank 0 appends their losses."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(101, 6, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    options = StateDictOptions(full_state_dict=True)
    losses: list[float] = []
    with ht.process_group() as pg:
        model = build(kind, pg)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = ht.DataLoader(data, 4, shuffle=True, seed=3, global_batch_size=24)
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


def curve(kind: str, worlds: list[int]) -> list[float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stops = [STEPS * part // len(worlds) for part in range(len(worlds) + 1)]
        for world, first, last in zip(worlds, stops, stops[1:], strict=False):
            codes = run_ranks(world, functools.partial(train, kind, folder, first, last))
            assert codes == [0] * world, codes
        return [float(line) for line in (folder / "losses.txt").read_text().splitlines()]


if __name__ == "__main__":
    curves = {
        "undisturbed": curve("ddp", [1]),
        "ddp": curve("ddp", [2, 3, 4, 1]),
        "fsdp": curve("fsdp", [4, 2, 3]),
    }
    sys.stdout.write(json.dumps(curves) + "\n")
