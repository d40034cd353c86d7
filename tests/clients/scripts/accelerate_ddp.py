"""Hugging Face accelerate, which reads torchrun's environment by itself."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images = torch.arange(64.0).reshape(16, 4) / 64
loader = DataLoader(TensorDataset(images), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
seen = 0
for (batch,) in loader:
    optimizer.zero_grad()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    seen += len(batch)
total = int(accelerator.reduce(torch.tensor(seen), reduction="sum"))
weight = accelerator.unwrap_model(model).weight.detach()
agree = bool(torch.allclose(accelerator.reduce(weight, reduction="mean"), weight))
kind = accelerator.distributed_type.value
print(
    f"client rank={accelerator.process_index} world={accelerator.num_processes} {kind} total={total} agree={agree}",
    flush=True,
)
accelerator.wait_for_everyone()
del model, optimizer, loader
accelerator.end_training()
