"""Training on several machines, which may come and go: the world's size is no longer a constant.

On every machine the same line (node0 is the name of any one of them):

    holdfast run --nnodes 1:4 --nproc-per-node gpu --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id digits \\
        examples/multinode.py --snapshot /shared/digits.pt

What is new against multigpu_torchrun.py: the snapshot lies on a disk that all machines see; the batch of one step is
the same whatever the number of ranks, so that a change of the group changes the speed but not the training; the place
in the data is counted in images, not in steps of a rank.
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
from torch.utils.data import TensorDataset

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
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.train_data, self.test_data = load_data()
        self.model = build_model().to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.005)
        self.images_done = 0
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
        self.images_done = saved["images_done"]
        self.say(f"resuming after {self.images_done} images on {self.world_size} ranks")

    def save_snapshot(self) -> None:
        """One file, complete or not there: written beside, flushed to the disk, then renamed over the old one."""
        if self.rank == 0:
            path: Path = self.options.snapshot
            beside = path.with_name(path.name + ".new")
            with beside.open("wb") as file:
                state = {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "images_done": self.images_done,
                }
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            beside.rename(path)
        dist.barrier()  # nobody goes on, and perhaps dies, in a part whose beginning is not saved yet

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the next global batch; the order depends on the epoch alone, not on who is there."""
        images, labels = self.train_data.tensors
        epoch, place = divmod(self.images_done, self.images_per_epoch)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        mine = order[place : place + self.options.batch_size][self.rank :: self.world_size]
        return images[mine].to(self.device), labels[mine].to(self.device)

    @property
    def images_per_epoch(self) -> int:
        """Whole batches only: each step has the same size."""
        return len(self.train_data) // self.options.batch_size * self.options.batch_size

    def train(self) -> None:
        while self.images_done < self.options.epochs * self.images_per_epoch:
            images, labels = self.batch()
            self.optimizer.zero_grad()
            # DDP takes the mean over the ranks, whose parts may differ in size by one: weigh each part by its size.
            loss = F.cross_entropy(self.ddp(images), labels, reduction="sum") / self.options.batch_size
            (loss * self.world_size).backward()
            self.optimizer.step()
            self.images_done += self.options.batch_size
            if self.images_done % self.images_per_epoch == 0:
                self.say(f"epoch {self.images_done // self.images_per_epoch} loss {loss.item() * self.world_size:.4f}")
                self.save_snapshot()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Every rank tests its part of the images; the counts are added up."""
        mine = slice(self.rank, None, self.world_size)
        images, labels = (tensor[mine].to(self.device) for tensor in self.test_data.tensors)
        right = (self.model(images).argmax(1) == labels).sum()
        dist.all_reduce(right)
        return right.item() / len(self.test_data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all ranks")
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"))
    options = parser.parse_args()

    device = set_up()
    trainer = Trainer(options, device)
    trainer.train()
    trainer.say(f"test accuracy {trainer.accuracy():.4f}")
    dist.barrier()  # nobody takes its end of the connections away while another still uses them
    del trainer  # DDP holds on to the group: it goes first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
