"""Optimizer steps of `every=3` batches, epochs that three does not divide: losses and weights of one process and of several.

Prints JSON: by name, [mean loss of each step], sums of the weights after it, and how many micro-batches each had.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from curve import build
from forked import run_ranks
from torch import nn

import holdfast.train as ht

LENGTH, EVERY, STEP = 77, 3, 24
"""Four steps an epoch: 24, 24, 24, and 5 samples in one batch, which four ranks share unevenly."""


def data() -> torch.utils.data.TensorDataset:
    inputs = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True))


def note(told: list[Any], loss: torch.Tensor, model: nn.Module, count: int) -> None:
    weights = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    told.append([loss.item(), sum(each.detach().double().sum().item() for each in weights), count])


def reference() -> list[Any]:
    """By hand: one batch of all samples of a step."""
    told: list[Any] = []
    with ht.process_group() as pg:
        model = build("ddp", pg)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for x, y in ht.DataLoader(data(), STEP, shuffle=True, seed=3):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            note(told, loss, model, 1)
    return told


def train(kind: str, out: Path) -> None:
    told: list[Any] = []
    with ht.process_group() as pg:
        model = build(kind, pg)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        loader = ht.DataLoader(data(), STEP // EVERY // pg.world, shuffle=True, seed=3)
        count = 0
        for x, y in loader:
            with ht.accumulate(model, every=EVERY) as micro:
                micro.backward(nn.functional.mse_loss(model(x), y))
            count += 1
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
                note(told, micro.loss, model, count)
                count = 0
        assert not ht.mid_accumulation(model)
        if pg.rank == 0:
            out.write_text(json.dumps(told))


def on_ranks(world: int, kind: str) -> Any:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "told"
        codes = run_ranks(world, functools.partial(train, kind, out))
        assert codes == [0] * world, codes
        return json.loads(out.read_text())


def by_hand() -> Any:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "told"
        assert run_ranks(1, lambda: out.write_text(json.dumps(reference()))) == [0]
        return json.loads(out.read_text())


if __name__ == "__main__":
    cases = {f"{kind} {world}": (world, kind) for kind, world in (("ddp", 1), ("ddp", 4), ("fsdp", 2))}
    told = {name: on_ranks(*case) for name, case in cases.items()}
    sys.stdout.write(json.dumps({"by hand": by_hand(), **told}) + "\n")
