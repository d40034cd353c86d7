"""A few optimizer steps of a small network with a constant global batch; rank 0 appends their losses to a file.

curve.py ddp|fsdp FOLDER FIRST LAST     steps FIRST … LAST-1; goes on from FOLDER/state.pt when FIRST is not 0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
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


def main() -> None:
    kind, folder, first, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(101, 6, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs.square().sum(1))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    with ht.process_group() as pg:
        model = build(kind, pg)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = ht.DataLoader(data, 4, shuffle=True, seed=3, global_batch_size=24)
        if first:
            state = torch.load(folder / "state.pt", weights_only=True)
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
            )
            loader.load_state_dict(state["loader"])
        losses: list[float] = []
        while len(losses) < last - first:
            for x, y in loader:
                with ht.accumulate(model, loader) as micro:
                    micro.backward(nn.functional.mse_loss(model(x), y.unsqueeze(1)))
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
                file.writelines(f"{json.dumps(loss)}\n" for loss in losses)


if __name__ == "__main__":
    main()
