"""lightning.Trainer, with one line of holdfast."""

import warnings

import lightning
import torch
import trail
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from holdfast.train.integrations.lightning import SnapshotsCallback

warnings.filterwarnings("ignore", module="lightning")


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = trail.Net()

    def training_step(self, numbers: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.net.loss(numbers)
        averaged = sum(each.double().sum().item() for each in averages._average_model.module.parameters())
        trail.note(self.global_step + 1, numbers, loss, averaged=averaged)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        trail.fault(self.global_step + 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


averages = EMAWeightAveraging(device="cpu")
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=trail.WORLD,
    strategy="ddp",
    max_epochs=trail.EPOCHS,
    accumulate_grad_batches=trail.MICRO,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[averages, SnapshotsCallback(trail.CASE["folder"], every=None, memory_every=1)],
)
trainer.fit(Module(), DataLoader(range(trail.SAMPLES), batch_size=trail.BATCH, shuffle=True))
