"""Trains a character model that survives crashes, restarts and resizes, with all of holdfast.train.

    holdfast run --standalone --nproc-per-node 2 --max-restarts 3 examples/train_charmodel/train.py
    holdfast run --standalone --nproc-per-node 4 examples/train_charmodel/train.py --shard
    python examples/train_charmodel/train.py

The second line goes on where the first one stopped, with other ranks and FSDP2 instead of DDP. torchrun works as well.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from model import CharacterModel, write
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import Dataset

import holdfast.train as ht
from holdfast.train.group import ProcessGroup

TEXT = Path(__file__).with_name("tom_sawyer.txt")
SEED = 20
TEST_PART = 0.1


class Passages(Dataset):
    """Passages of `context` characters and, for each character, the one that follows it."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context - 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Another beginning in each epoch. ht.DataLoader seeds torch from the passage's number and the epoch, so this is
        # the same number on whichever rank and worker reads it, also after a restart.
        start = index * self.context + int(torch.randint(self.context, ()))
        passage = self.text[start : start + self.context + 1]
        return passage[:-1], passage[1:]


def build_model(options: argparse.Namespace, characters: int, pg: ProcessGroup) -> nn.Module:
    torch.manual_seed(SEED)
    model = CharacterModel(characters, options.context, options.layers, options.heads, options.width)
    if not options.shard:
        return ht.ddp(model, pg)
    model = model.to(pg.device)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def rate(step: int, steps: int) -> float:
    """The learning rate as a part of its largest: up for 5 % of the steps, then down along a cosine to a tenth."""
    warm = max(1, steps // 20)
    return (step + 1) / warm if step < warm else 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps))


def loss_of(model: nn.Module, text: torch.Tensor, following: torch.Tensor, pg: ProcessGroup) -> torch.Tensor:
    scores = model(text.to(pg.device))
    return F.cross_entropy(scores.flatten(0, 1), following.to(pg.device).flatten())


@torch.no_grad()
def test_loss(model: nn.Module, text: torch.Tensor, context: int, pg: ProcessGroup) -> float:
    """Of up to 64 passages that were never trained, each rank's share of them."""
    passages = text[: (len(text) - 1) // context * context + 1].unfold(0, context + 1, context)[:64]
    # All ranks take equally many: FSDP2 gathers its weights from all in every pass.
    mine = passages[pg.rank :: pg.world][: max(1, len(passages) // pg.world)]
    loss = loss_of(model, mine[:, :-1], mine[:, 1:], pg)
    dist.all_reduce(loss)
    return loss.item() / pg.world


def train(options: argparse.Namespace, pg: ProcessGroup, snaps: ht.Snapshots) -> None:
    book = TEXT.read_text()
    characters = sorted(set(book))
    text = torch.tensor([characters.index(each) for each in book])
    split = int(len(text) * (1 - TEST_PART))
    model = build_model(options, len(characters), pg)
    # The batch of an optimizer step is 64 passages on any number of ranks; none takes more than 16 of them at once.
    data = Passages(text[:split], options.context)
    loader = ht.DataLoader(
        data, options.batch_size, shuffle=True, seed=SEED, global_batch_size=options.global_batch_size
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    steps = options.epochs * len(loader) // loader.micro_batches
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))

    state = snaps.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    resumed = snaps.resume()

    def say(words: str) -> None:
        if pg.rank == 0:
            print(words, flush=True)

    if resumed is not None:
        say(f"going on after step {scheduler.last_epoch}, from {resumed.source}, saved by {resumed.world_then} ranks")
    for epoch in state.epochs(options.epochs):
        for passage, following in loader:
            with ht.accumulate(model, loader) as micro:
                micro.backward(loss_of(model, passage, following, pg))
            if micro.last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if scheduler.last_epoch % options.log_every == 0:
                    say(f"step {scheduler.last_epoch} of {steps} loss {micro.loss.item():.4f}")
            snaps.step(loss=micro.loss)
        say(f"epoch {epoch + 1} test loss {test_loss(model, text[split:], options.context, pg):.4f}")
    # On all ranks with the same seed: with FSDP2 each holds a part of the weights only.
    start, generator = text[:1].to(pg.device), torch.Generator().manual_seed(SEED)
    written = write(model, start, options.write, options.context, generator)
    say("".join(characters[each] for each in written.tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--global-batch-size", type=int, default=64, help="passages per optimizer step, all ranks together"
    )
    parser.add_argument("--batch-size", type=int, default=16, help="the most that a rank takes at once")
    parser.add_argument("--rate", type=float, default=2e-3, help="the largest learning rate")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64, help="characters")
    parser.add_argument("--write", type=int, default=300, help="characters to write at the end")
    parser.add_argument("--log-every", type=int, default=10, help="optimizer steps")
    parser.add_argument("--folder", type=Path, default=Path("runs/tom_sawyer"), help="of the snapshots")
    options = parser.parse_args()

    keep = ht.Keep(last=2, best=("loss", "min"))
    with ht.process_group() as pg, ht.Snapshots(options.folder, every="1min", memory_every=20, keep=keep) as snaps:
        train(options, pg, snaps)


if __name__ == "__main__":
    main()
