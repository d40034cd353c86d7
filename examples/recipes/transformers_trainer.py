"""transformers.Trainer, made safe by one line.

    pip install 'holdfast[transformers]'
    holdfast run --standalone --nproc-per-node 2 --max-restarts 3 examples/recipes/transformers_trainer.py

A small GPT-2 with new weights learns to count; nothing is downloaded. What is restored, and what is not: docs/trainers.md.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from holdfast.train.integrations.transformers import HoldfastCallback

LENGTH, NUMBERS = 16, 32


class Counting(Dataset):
    """Rows of LENGTH numbers that follow one another."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(LENGTH) + index) % NUMBERS
        return {"input_ids": row, "labels": row}


class Printed(TrainerCallback):
    """The losses, in the form of the other examples."""

    def on_train_begin(self, args, state, control, **_) -> None:
        if state.is_world_process_zero and state.global_step:
            print(f"going on after step {state.global_step}", flush=True)

    def on_log(self, args, state, control, logs=None, **_) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", default="runs/transformers")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=NUMBERS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        options.folder + ".trainer",
        num_train_epochs=options.epochs,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=Counting(),
        callbacks=[HoldfastCallback(options.folder, every="5min", memory_every=1), Printed()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
