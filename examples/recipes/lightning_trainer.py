"""lightning.Trainer, made safe by one line.

    pip install 'holdfast[lightning]'
    holdfast run --standalone --nproc-per-node 2 --max-restarts 3 examples/recipes/lightning_trainer.py

What is restored, and what is not: docs/trainers.md.
"""

from __future__ import annotations

import argparse
import os
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.train.integrations.lightning import SnapshotsCallback

warnings.filterwarnings("ignore", module="lightning")


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))

    def on_train_start(self) -> None:
        if self.global_rank == 0 and self.global_step:
            print(f"going on after step {self.global_step}", flush=True)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        if self.global_rank == 0 and (self.global_step + 1) % 8 == 0:
            print(f"step {self.global_step + 1} loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", default="runs/lightning")
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(512, 16)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh()), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp",
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SnapshotsCallback(options.folder, every="5min", memory_every=1)],
    )
    trainer.fit(Regression(), data)


if __name__ == "__main__":
    main()
