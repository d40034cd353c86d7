"""Your loop with torch.distributed.checkpoint, made safe: the ten lines that end in `# safe`.

    holdfast run --standalone --nproc-per-node 2 --max-restarts 3 examples/recipes/dcp_loop.py

Without them a save that is interrupted is what the next start loads, or fails to load; a preempted job loses what it did since its last save;
and each start begins with step 0. With them a checkpoint is complete or not there, every byte is checked when it is read, a start goes on from
the newest complete one, and a job that is asked to leave saves first and ends with 75.

`ht.Snapshots` does more (memory, other nodes, data loaders, random numbers), for a few lines more: see docs/train.md.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

import holdfast.train as ht  # safe
from holdfast import HoldfastError  # safe
from holdfast.worker import should_stop  # safe


class Training(Stateful):
    """What torch's tutorial calls AppState."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, object]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Made from the number of the step, so that a step that is repeated is the same step."""
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * 1000 + rank))
    return inputs, inputs.sum(1, keepdim=True).tanh()


def train(options: argparse.Namespace, rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"training": Training(model, optimizer), "step": 0}

    try:  # safe
        dcp.load(state, storage_reader=ht.SnapshotReader(options.folder))  # safe
    except HoldfastError as error:  # safe
        if error.code != "HF415":  # safe: HF415 is "there is none yet"; all else, damage above all, is an error
            raise  # safe
    if rank == 0 and state["step"]:
        print(f"going on after step {state['step']}", flush=True)

    for step in range(state["step"] + 1, options.steps + 1):
        inputs, targets = batch(step, rank)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step
        if rank == 0 and step % 10 == 0:  # before the save: a start that goes on after it does not show this line again
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        leave = should_stop()  # safe: the same answer on all ranks
        if leave or step % options.save_every == 0 or step == options.steps:
            dcp.save(state, storage_writer=ht.SnapshotWriter(options.folder, step=step))
        if leave:
            sys.exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--folder", default="runs/dcp")
    options = parser.parse_args()
    with ht.process_group() as pg:  # safe: torch's own may hang when it is left, after DDP with gloo
        train(options, pg.rank)


if __name__ == "__main__":
    main()
