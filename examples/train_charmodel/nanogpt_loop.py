"""The same model in a loop as nanoGPT's, with its `get_batch` and without a data loader, made safe by the lines that end in `# safe`.

    holdfast run --standalone --nproc-per-node 2 --max-restarts 3 examples/train_charmodel/nanogpt_loop.py

They replace `torch.save` of ckpt.pt and `--init_from=resume`. Batches are drawn at random: a step that is repeated after a restart draws the same
ones, because random numbers belong to the snapshot. train.py beside this file has a loader, which also stays exact on another number of ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from model import CharacterModel
from torch.nn import functional as F

import holdfast.train as ht  # safe

TEXT = Path(__file__).with_name("tom_sawyer.txt")
BLOCK_SIZE, BATCH_SIZE = 32, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-iters", type=int, default=200)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--out-dir", default="runs/nanogpt")
    options = parser.parse_args()

    book = TEXT.read_text()
    characters = sorted(set(book))
    data = torch.tensor([characters.index(each) for each in book])

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(data) - BLOCK_SIZE - 1, (BATCH_SIZE,)).tolist()
        x = torch.stack([data[start : start + BLOCK_SIZE] for start in starts])
        y = torch.stack([data[start + 1 : start + 1 + BLOCK_SIZE] for start in starts])
        return x.to(pg.device), y.to(pg.device)

    with ht.process_group() as pg, ht.Snapshots(options.out_dir, every="1min", memory_every=1) as snaps:  # safe
        torch.manual_seed(1337)
        model = ht.ddp(CharacterModel(len(characters), BLOCK_SIZE, 2, 2, 32), pg)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(1337 + pg.rank)  # each rank draws its own batches
        state = snaps.track(model=model, optimizer=optimizer)  # safe
        if snaps.resume() and pg.rank == 0:  # safe
            print(f"going on after step {state.step}", flush=True)
        while state.step < options.max_iters:
            x, y = get_batch()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if pg.rank == 0 and (state.step + 1) % options.log_interval == 0:
                print(f"step {state.step + 1} loss {loss.item():.6f}", flush=True)
            snaps.step()  # safe: counts, saves if due, and leaves after a save if the launcher asks: so it comes last


if __name__ == "__main__":
    main()
