"""torchdata's StatefulDataLoader, tracked."""

import torch
import trail
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast.train as ht
from holdfast.train.integrations.torchdata import ResumableLoader

with ht.process_group() as pg, ht.Snapshots(trail.CASE["folder"], every=None, memory_every=1) as snaps:
    net = trail.Net()
    model = ht.ddp(net, pg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler = DistributedSampler(range(trail.SAMPLES), pg.world, pg.rank)
    loader = ResumableLoader(StatefulDataLoader(range(trail.SAMPLES), batch_size=2 * trail.BATCH, sampler=sampler))
    state = snaps.track(model=model, optimizer=optimizer, loader=loader)
    snaps.resume(optional=trail.CASE["optional"])
    for _ in state.epochs(trail.EPOCHS):
        for numbers in loader:
            loss = model(trail.VALUES[numbers]).square().mean()
            trail.note(state.step + 1, numbers, loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trail.fault(state.step + 1)
            snaps.step()
    snaps.save()
