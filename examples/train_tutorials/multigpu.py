"""Several processes of one machine, started by the script itself.

    python examples/train_tutorials/multigpu.py --nproc 2

The plain script is ../multigpu.py. Here `holdfast.launch` starts the processes and brings back what they return.
"""

from __future__ import annotations

import argparse

import torch
from digits import accuracy, build_model, load_data
from torch.nn import functional as F

import holdfast
import holdfast.train as ht


def worker(epochs: int, batch_size: int) -> float:
    """One process's part; returns the accuracy of the trained network."""
    torch.set_num_threads(1)  # the network is too small to share among threads
    train_data, test_data = load_data()
    with ht.process_group() as pg:
        model = ht.ddp(build_model(), pg)
        # Shuffled anew in each epoch, alike on all ranks; the last, smaller batch is dealt evenly.
        loader = ht.DataLoader(train_data, batch_size, shuffle=True, seed=20)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        for epoch in range(epochs):
            for images, labels in loader:
                optimizer.zero_grad()
                with ht.accumulate(model, loader) as micro:
                    micro.backward(F.cross_entropy(model(images.to(pg.device)), labels.to(pg.device)))
                optimizer.step()
            if pg.rank == 0:
                print(f"epoch {epoch + 1} loss {micro.loss.item():.4f}", flush=True)  # the mean over all ranks
        return accuracy(model.module, test_data, pg.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    options = parser.parse_args()
    results = holdfast.launch(worker, options.epochs, options.batch_size, nproc=options.nproc)
    print(f"test accuracy {results[0]:.4f}", flush=True)


if __name__ == "__main__":
    main()
