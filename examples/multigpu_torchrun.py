"""Data-parallel training that outlives a crash: the launcher starts it again, a snapshot tells where it was.

    holdfast run --standalone --nproc-per-node 2 --max-restarts 3 examples/multigpu_torchrun.py

What is new against multigpu.py: the launcher starts the processes and gives each its rank in the environment, and
the state of the training is saved after each epoch, so that a restart repeats one epoch at most.
Kill a worker while it runs (kill -9 and the pid that it prints) and see it go on; examples/demo.py does just that.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 20
TEST_IMAGES = 360


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Images of shape [n, 1, 8, 8] in 0..1 with their digits: 1,437 to train on, 360 to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    # One fixed shuffle, the same wherever it runs: the test images must never be trained on.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def set_up() -> torch.device:
    """Join the group that the launcher describes in the environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
    torch.set_num_threads(1)  # the network is too small to share among threads
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return device


class Trainer:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.rank = dist.get_rank()
        self.train_data, self.test_data = load_data()
        self.sampler = DistributedSampler(self.train_data, seed=SEED)
        self.loader = DataLoader(self.train_data, options.batch_size, sampler=self.sampler)
        self.model = build_model().to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.005)
        self.epochs_done = 0
        self.step = 0
        self.load_snapshot()
        # After loading: DDP sends rank 0's weights to all when it is made.
        self.ddp = DistributedDataParallel(self.model)

    def load_snapshot(self) -> None:
        """Every rank reads the same file: the optimizer's state must be the same everywhere too."""
        if not self.options.snapshot.exists():
            return
        saved = torch.load(self.options.snapshot, map_location=self.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.epochs_done, self.step = saved["epochs_done"], saved["step"]
        self.say(f"resuming after epoch {self.epochs_done} step {self.step}")

    def save_snapshot(self) -> None:
        """One file, complete or not there: written beside, flushed to the disk, then renamed over the old one."""
        if self.rank == 0:
            path: Path = self.options.snapshot
            beside = path.with_name(path.name + ".new")
            with beside.open("wb") as file:
                state = {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "epochs_done": self.epochs_done,
                    "step": self.step,
                }
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            beside.rename(path)
        dist.barrier()  # nobody goes on, and perhaps dies, in an epoch whose beginning is not saved yet

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def train(self) -> None:
        while self.epochs_done < self.options.epochs:
            self.sampler.set_epoch(self.epochs_done)  # the shuffle depends on the epoch alone: a restart sees the same
            for images, labels in self.loader:
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.ddp(images.to(self.device)), labels.to(self.device))
                loss.backward()
                self.optimizer.step()
                self.step += 1
                if self.step % self.options.log_every == 0:
                    self.say(f"step {self.step} loss {loss.item():.4f}")
            self.epochs_done += 1
            self.save_snapshot()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Every rank tests its part of the images; the counts are added up."""
        mine = slice(self.rank, None, dist.get_world_size())
        images, labels = (tensor[mine].to(self.device) for tensor in self.test_data.tensors)
        right = (self.model(images).argmax(1) == labels).sum()
        dist.all_reduce(right)
        return right.item() / len(self.test_data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"))
    parser.add_argument("--log-every", type=int, default=23, help="steps")
    options = parser.parse_args()

    device = set_up()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} is pid {os.getpid()}", flush=True)
    trainer = Trainer(options, device)
    trainer.train()
    trainer.say(f"test accuracy {trainer.accuracy():.4f}")
    dist.barrier()  # nobody takes its end of the connections away while another still uses them
    del trainer  # DDP holds on to the group: it goes first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
