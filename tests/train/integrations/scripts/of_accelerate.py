"""accelerate, and holdfast's snapshots of what it has prepared."""

import torch
import trail
from accelerate import Accelerator
from torch.utils.data import DataLoader

from holdfast.train.integrations.accelerate import snapshots

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=trail.MICRO)
net = trail.Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.net.loss(numbers)


loader = DataLoader(range(trail.SAMPLES), batch_size=trail.BATCH, shuffle=True)
check = DataLoader(range(8), batch_size=trail.BATCH)
model, optimizer, scheduler, loader, check = accelerator.prepare(Model(), optimizer, scheduler, loader, check)
snaps = snapshots(accelerator, trail.CASE["folder"], every=None, memory_every=1)
snaps.resume()
step = snaps.state.epoch * 6 + -(-(snaps.state.step - 11 * snaps.state.epoch) // trail.MICRO)
for _ in snaps.state.epochs(trail.EPOCHS):
    for numbers in loader:
        with accelerator.accumulate(model):
            loss = model(numbers)
            trail.note(step + 1, numbers, loss)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            trail.fault(step)
            if step == 3:
                with torch.no_grad():
                    sum(model(each) for each in check)
        snaps.step()
snaps.save()
