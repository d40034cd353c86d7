"""Ranks that run out of memory: each case prints its weights, micro-batches, warnings. short_memory.py CASE FOLDER

A module raises torch's own error where the memory of a GPU would be short: on rank 1, with more than ROOM samples.
"""

import hashlib
import json
import sys
import warnings

import torch
from torch import nn

import holdfast.train as ht

case, folder = sys.argv[1:]
ROOM = {"forward": 2, "backward": 2, "single": 2, "none": 8, "small": 8, "never": 0, "resumed": 2, "torch": 8}[case]
LENGTH, GLOBAL = 48, 16
seen, taken = [], []


class Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory (pretended)")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.spare = nn.Linear(2, 2)  # never used

    def forward(self, rows):
        full = len(rows) > ROOM and pg.rank == pg.world - 1
        if full and case != "backward":
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        hidden = self.norm(self.first(rows))
        return self.last(Full.apply(hidden) if full else hidden)


torch.manual_seed(0)
rows = torch.randn(LENGTH, 3)
data = torch.utils.data.TensorDataset(rows, torch.arange(LENGTH))
warnings.simplefilter("always")
with ht.process_group() as pg, warnings.catch_warnings(record=True) as said:
    torch.manual_seed(1)
    model = Net() if pg.world == 1 else ht.ddp(Net(), pg, find_unused_parameters=case == "torch")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = ht.DataLoader(
        data,
        batch_size=2 if case == "small" else 8,
        global_batch_size=GLOBAL,
        shuffle=True,
        seed=3,
        num_workers=1 if case == "forward" else 0,
        shrink_on_oom=case != "torch",
    )
    snaps = ht.Snapshots(folder, every=None, memory_every=None)
    state = snaps.track(model=model, optimizer=optimizer, loader=loader)
    snaps.resume()
    for _ in state.epochs(2):
        for batch, _ in loader:
            with ht.accumulate(model, loader) as micro:
                micro.backward(model(batch).square().mean())
            taken.append(len(batch))
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
                seen.append(round(micro.loss.item(), 5))
            snaps.step(loss=micro.loss)
            if case == "resumed" and micro.last and len(seen) == 4:
                snaps.save(wait=True)
    snaps.close()
    tensors = [each.detach() for each in (*model.parameters(), *model.buffers())]
    print(
        json.dumps(
            {
                "rank": pg.rank,
                "whole": hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest(),
                "weights": [each.double().sum().item() for each in tensors],
                "losses": seen,
                "taken": taken,
                "size": loader.batch_size,
                "said": [str(each.message) for each in said if "memory" in str(each.message)],
            }
        ),
        flush=True,
    )
