"""Lightning: its TorchElasticEnvironment is chosen because TORCHELASTIC_RUN_ID is there."""

import os
import warnings

import lightning
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
torch.set_num_threads(1)


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    max_steps=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Line(), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2))
elastic = isinstance(trainer.strategy.cluster_environment, TorchElasticEnvironment)
print(
    f"client rank={trainer.global_rank} world={trainer.world_size} steps={trainer.global_step} elastic={elastic}",
    flush=True,
)
trainer.strategy.barrier()
