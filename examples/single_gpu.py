"""Train a small network on handwritten digits: one process, one device. The other examples start from here.

    python examples/single_gpu.py

The data are scikit-learn's digits (1,797 images of 8 x 8 pixels), which ship with the library: nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

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


def train(model: nn.Module, loader: DataLoader, epochs: int, device: torch.device) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for epoch in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1} loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    images, labels = data.tensors
    return (model(images.to(device)).argmax(1) == labels.to(device)).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()

    torch.set_num_threads(1)  # the network is too small to share among threads
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_data, test_data = load_data()
    model = build_model().to(device)
    shuffle = torch.Generator().manual_seed(SEED)
    train(model, DataLoader(train_data, options.batch_size, shuffle=True, generator=shuffle), options.epochs, device)
    print(f"test accuracy {accuracy(model, test_data, device):.4f}", flush=True)


if __name__ == "__main__":
    main()
