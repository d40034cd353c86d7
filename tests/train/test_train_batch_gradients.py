"""The weights make every world's gradient that of one process: loss curves over resizes are equal within float noise."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from holdfast.train.data.loader import DataLoader

LENGTH = 107
FEATURES = 5


class Points(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(LENGTH, FEATURES, generator=generator, dtype=torch.float64)
        self.y = torch.randn(LENGTH, generator=generator, dtype=torch.float64)

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Trainer:
    """Momentum on one weight vector; ranks take turns, and their gradients are averaged as DDP does."""

    def __init__(self, **options):
        self.weight = torch.zeros(FEATURES, dtype=torch.float64, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1, momentum=0.9)
        self.losses, self.options, self.state = [], options, None

    def train(self, world, epochs, batches=None):
        ranks = [DataLoader(Points(), shuffle=True, rank=rank, world=world, **self.options) for rank in range(world)]
        if self.state:
            for each in ranks:
                each.load_state_dict(self.state)
        for _ in range(ranks[0].epoch, epochs):
            for parts in islice(zip(*ranks, strict=True), batches):
                self._micro(ranks, parts)
            self.state = ranks[0].state_dict()
        return self

    def _micro(self, ranks, parts):
        if ranks[0].share.micro == 0:
            self.optimizer.zero_grad()
            self.losses.append(0.0)
        for each, (x, y) in zip(ranks, parts, strict=True):
            loss = torch.nn.functional.mse_loss(x @ self.weight, y) * each.share.scale / len(ranks)
            loss.backward()
            self.losses[-1] += loss.item()
        if ranks[0].share.last:
            self.optimizer.step()


@pytest.mark.parametrize("world", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("batch_size", [None, 1, 4])
def test_a_kept_global_batch_learns_the_same_on_any_world(world, batch_size):
    alone = Trainer(global_batch_size=24).train(1, epochs=2)
    many = Trainer(global_batch_size=24, batch_size=batch_size).train(world, epochs=2)
    assert len(alone.losses) == 2 * -(-LENGTH // 24)
    assert many.losses == pytest.approx(alone.losses, rel=1e-9)


def test_the_loss_curve_over_resizes_is_that_of_an_undisturbed_run():
    alone = Trainer(global_batch_size=24).train(1, epochs=2)
    resized = Trainer(global_batch_size=24, batch_size=4)
    resized.train(4, epochs=1, batches=4).train(3, epochs=1).train(5, epochs=2)
    assert resized.losses == pytest.approx(alone.losses, rel=1e-9)


def test_without_weights_it_would_not_be():
    """That the comparison above can fail: ranks' means, averaged, are not the mean over the samples."""
    options = {"global_batch_size": 24, "batch_size": 4}
    alone, many = Trainer(**options).train(1, epochs=1), Trainer(**options)
    many._micro = lambda ranks, parts: Trainer._micro(many, [Unweighted(each) for each in ranks], parts)
    assert many.train(5, epochs=1).losses != pytest.approx(alone.losses, rel=1e-3)


class Unweighted:
    def __init__(self, loader):
        self.share = self
        self.micro, self.last, self.scale = loader.share.micro, loader.share.last, 1 / loader.every
