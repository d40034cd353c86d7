"""The soak's training script: plain torch, DDP and gloo.

    holdfast run … soak/train.py SITE        torchrun … soak/train.py SITE

What it writes down, and the loop of steps, are in training.py.
"""

from __future__ import annotations

import io

import training  # first: the ledger begins before the slow part

import torch  # isort: skip
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class GlooGroup:
    """All ranks, by torch."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def from_first(self, words: list[str]) -> list[str]:
        dist.broadcast_object_list(words)
        return words

    def summed(self, numbers: list[int]) -> list[int]:
        sums = torch.tensor(numbers)
        dist.all_reduce(sums)
        return [int(each) for each in sums.tolist()]


class Perceptron:
    """Two layers, and SGD with momentum."""

    def __init__(self) -> None:
        torch.manual_seed(training.SEED)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.inputs = torch.randn(training.SAMPLES, 32)
        self.labels = torch.randint(0, 10, (training.SAMPLES,))
        self.shared: torch.nn.Module = self.model

    def load(self, payload: bytes) -> None:
        state = torch.load(io.BytesIO(payload), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def dump(self) -> bytes:
        buffer = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)
        return buffer.getvalue()

    def begin(self) -> None:
        self.shared = DistributedDataParallel(self.model)

    def train(self, samples: list[int], batch: int, world: int) -> None:
        loss = F.cross_entropy(self.shared(self.inputs[samples]), self.labels[samples], reduction="sum") * world / batch
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    training.run(GlooGroup(), Perceptron())
