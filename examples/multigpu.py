"""The same training on several processes of one machine, started by the script itself.

    python examples/multigpu.py --nproc 2

What is new against single_gpu.py: a process group, DistributedDataParallel, a sampler that gives each rank its part.
What is still missing: when one process dies, everything is lost. multigpu_torchrun.py mends that.
"""

from __future__ import annotations

import argparse
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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


def device_of(rank: int, world_size: int) -> torch.device:
    """A GPU of its own for every rank where there are enough; else the CPU for all."""
    return torch.device("cuda", rank) if torch.cuda.device_count() >= world_size else torch.device("cpu")


def train(
    model: DistributedDataParallel, data: TensorDataset, epochs: int, batch_size: int, device: torch.device
) -> None:
    sampler = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # another shuffle in each epoch, the same one on every rank
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()  # DDP averages the gradients of all ranks in here
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1} loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Every rank tests its part of the images; the counts are added up."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    images, labels = (tensor[mine].to(device) for tensor in data.tensors)
    right = (model(images).argmax(1) == labels).sum()
    dist.all_reduce(right)
    return right.item() / len(data)


def worker(rank: int, world_size: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # the network is too small to share among threads
    device = device_of(rank, world_size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    train_data, test_data = load_data()
    model = DistributedDataParallel(build_model().to(device))
    train(model, train_data, options.epochs, options.batch_size, device)
    result = accuracy(model.module, test_data, device)
    if rank == 0:
        print(f"test accuracy {result:.4f}", flush=True)
    dist.barrier()  # nobody takes its end of the connections away while another still uses them
    del model  # DDP holds on to the group: it goes first
    dist.destroy_process_group()


def free_port() -> int:
    # Between this look and the use of the port somebody else may take it: a launcher has no such gap.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    options = parser.parse_args()
    mp.spawn(worker, args=(options.nproc, free_port(), options), nprocs=options.nproc)


if __name__ == "__main__":
    main()
