"""One process, one device, and it survives: killed at any time and started again, it goes on in the middle of the epoch.

    python examples/train_tutorials/single_gpu.py

The plain script is ../single_gpu.py. Loader and snapshots need no process group and no launcher.
"""

from __future__ import annotations

import argparse

import torch
from digits import accuracy, build_model, load_data
from torch.nn import functional as F

import holdfast.train as ht


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--folder", default="runs/digits_single", help="of the snapshots")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the network is too small to share among threads
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_data, test_data = load_data()
    model = build_model().to(device)
    loader = ht.DataLoader(train_data, options.batch_size, shuffle=True, seed=20)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    with ht.Snapshots(options.folder, every="10s", memory_every=10) as snaps:
        state = snaps.track(model=model, optimizer=optimizer, loader=loader)
        snaps.resume()
        loss = torch.tensor(torch.nan)  # a resume may begin behind the last batch of an epoch
        for epoch in state.epochs(options.epochs):
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                snaps.step(loss=loss.detach())
            print(f"epoch {epoch + 1} loss {loss.item():.4f}", flush=True)
    print(f"test accuracy {accuracy(model, test_data, device):.4f}", flush=True)


if __name__ == "__main__":
    main()
