"""Data-parallel training that outlives crashes and resizes, whoever launched it.

    holdfast run --standalone --nproc-per-node 2 --max-restarts 3 examples/train_tutorials/multigpu_torchrun.py
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_tutorials/multigpu_torchrun.py
    python examples/train_tutorials/multigpu_torchrun.py

The plain script is ../multigpu_torchrun.py. Kill a worker, or start it again with another number of processes: it goes
on with the next image of the epoch, and every optimizer step has 64 images as before.
"""

from __future__ import annotations

import argparse
import os

import torch
from digits import accuracy, build_model, load_data
from torch.nn import functional as F

import holdfast.train as ht


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--global-batch-size", type=int, default=64, help="images per step of all ranks together")
    parser.add_argument("--folder", default="runs/digits", help="of the snapshots")
    parser.add_argument("--log-every", type=int, default=23, help="steps")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the network is too small to share among threads
    train_data, test_data = load_data()
    with ht.process_group() as pg, ht.Snapshots(options.folder, every="10s", memory_every=5) as snaps:
        print(f"rank {pg.rank} of {pg.world} is pid {os.getpid()}", flush=True)
        model = ht.ddp(build_model(), pg)
        loader = ht.DataLoader(train_data, shuffle=True, seed=20, global_batch_size=options.global_batch_size)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        state = snaps.track(model=model, optimizer=optimizer, loader=loader)
        resumed = snaps.resume()
        if resumed is not None and pg.rank == 0:
            print(f"resuming after step {resumed.step}, from {resumed.source}", flush=True)
        for _ in state.epochs(options.epochs):
            for images, labels in loader:
                with ht.accumulate(model, loader) as micro:
                    micro.backward(F.cross_entropy(model(images.to(pg.device)), labels.to(pg.device)))
                if micro.last:
                    optimizer.step()
                    optimizer.zero_grad()
                snaps.step(loss=micro.loss)
                if pg.rank == 0 and state.step % options.log_every == 0:
                    print(f"step {state.step} loss {micro.loss.item():.4f}", flush=True)
        if pg.rank == 0:
            print(f"test accuracy {accuracy(model.module, test_data, pg.device):.4f}", flush=True)


if __name__ == "__main__":
    main()
