"""transformers.Trainer, with one line of holdfast."""

import torch
import trail
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from holdfast.train.integrations.transformers import HoldfastCallback


class Numbers(Dataset):
    def __len__(self) -> int:
        return trail.SAMPLES

    def __getitem__(self, number: int) -> dict[str, int]:
        return {"numbers": number}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = trail.Net()

    def forward(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.net.loss(numbers)
        if self.training:
            trail.note(trainer.state.global_step + 1, numbers, loss)
        return {"loss": loss}


class Logged(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_) -> None:
        if "loss" in logs:
            trail.note(state.global_step, torch.tensor([]), torch.tensor(logs["loss"]), logged=state.epoch)

    def on_step_end(self, args, state, control, **_) -> None:
        trail.fault(state.global_step)


arguments = TrainingArguments(
    trail.CASE["folder"] + ".trainer",
    per_device_train_batch_size=trail.BATCH,
    gradient_accumulation_steps=trail.MICRO,
    num_train_epochs=trail.EPOCHS,
    learning_rate=0.05,
    logging_steps=3,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(
    Model(),
    arguments,
    train_dataset=Numbers(),
    callbacks=[Logged(), HoldfastCallback(trail.CASE["folder"], every=None, memory_every=1)],
)
trainer.train()
