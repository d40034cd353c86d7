"""What a script does around its loop neither loses a batch nor has one trained twice."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast.train as ht
from holdfast.protocol.errors import TrackingError

pytestmark = pytest.mark.usefixtures("own_staging")


class Job:
    def __init__(self, folder: Path) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = ht.DataLoader(torch.arange(12.0).reshape(12, 1), 2)
        self.snaps = ht.Snapshots(folder, every=None)
        self.state = self.snaps.track(model=self.model, optimizer=self.optimizer, loader=self.loader)
        self.resumed = self.snaps.resume()

    def optimize(self, rows: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(rows).mean().backward()
        self.optimizer.step()

    def train(self, batches: int) -> list[float]:
        seen: list[float] = []
        for _ in self.state.epochs(1):
            for rows in islice(self.loader, batches):
                seen += rows.flatten().tolist()
                self.optimize(rows)
                self.snaps.step()
        return seen


def test_what_is_read_between_a_resume_and_the_training_does_not_count(tmp_path: Path) -> None:
    first = Job(tmp_path)
    assert first.train(2) == [0.0, 1.0, 2.0, 3.0]
    first.state.epoch = 0  # it has broken off
    first.snaps.save(wait=True)
    first.snaps.close()
    job = Job(tmp_path)
    assert job.resumed is not None
    assert [rows.flatten().tolist() for rows in islice(job.loader, 3)] == [[4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]
    assert job.train(4) == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    job.snaps.close()


def test_save_before_a_step_is_counted_is_refused(tmp_path: Path) -> None:
    """The weights have the batch, and the loader has not."""
    job = Job(tmp_path)
    job.train(1)
    for rows in job.loader:
        job.optimize(rows)
        with pytest.raises(TrackingError, match=r"save\(\) after snaps\.step\(\)"):
            job.snaps.save()
        job.snaps.step()
        job.snaps.save(wait=True)
        break
    job.snaps.close()
