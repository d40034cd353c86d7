"""Saves of a state on a GPU that overlap with the next step, on a double of the GPU whose work runs as late, and in as
odd an order, as streams and events allow (device_double.py).

After k steps of the programs here a parameter is its first value + 1 + 2 + … + k, its moment is k, and a buffer, which
the forward pass writes, is k: so the values of a committed state say of which step they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast.train as ht
from holdfast.protocol.errors import SnapshotError
from holdfast.train import overlapping
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.in_process import InProcessStaging
from tests.support.limits import until
from tests.train.device_double import DeviceDouble, Order, at_random, copies_first, program_first

ORDERS: dict[str, Callable[[], Order]] = {
    "the program runs ahead": lambda: program_first,
    "copies run ahead": lambda: copies_first,
    **{f"random {seed}": lambda seed=seed: at_random(seed) for seed in range(4)},  # type: ignore[misc]
}

OVERLAP = ht.SnapshotOptions(overlap=True)


class Recorded(InProcessStaging):
    """Memory of this process that keeps what was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, dict[str, torch.Tensor]] = {}
        """The tensors of each committed state, by its step."""
        self.events: list[str] = []

    def commit(self, request: SaveRequest) -> None:
        assert self._memory is not None
        data = bytes(memoryview(self._memory)[: self._size_bytes])
        self.kept[request.step] = dict(tensors_in(data))
        self.events.append(f"commit {request.step}")

    def persist(self, request: SaveRequest) -> None:
        self.events.append(f"persist {request.step}")
        super().persist(request)


def tensors_in(data: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a snapshot file, which is one of safetensors."""
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:begin]).items():
        if name not in ("__metadata__", "holdfast.text") and entry["dtype"] == "F32":
            at, end = entry["data_offsets"]
            yield name, torch.frombuffer(bytearray(data[begin + at : begin + end]), dtype=torch.float32)


class Stepping(torch.optim.Optimizer):
    """An optimizer whose steps are kernels of the double."""

    def __init__(self, parameters: Any, device: DeviceDouble) -> None:
        super().__init__(parameters, {})
        self._device = device

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter)
                kernel(self._device, state["moment"], lambda m=state["moment"]: m.data.add_(1))
                kernel(self._device, parameter, lambda p=parameter, m=state["moment"]: p.data.add_(m))


def kernel(device: DeviceDouble, changed: torch.Tensor, work: Callable[[], Any]) -> None:
    """Launch a kernel that changes this tensor. torch counts the change at the launch."""
    torch.autograd.graph.increment_version(changed)
    device.launch(work)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(7, 5))
        self.register_buffer("mean", torch.zeros(40))


class Job:
    def __init__(self, folder: Path, device: DeviceDouble, tier: Recorded, **options: Any) -> None:
        self.device, self.tier = device, tier
        self.model = Net()
        self.optimizer = Stepping(self.model.parameters(), device)
        self.snaps = ht.Snapshots(
            folder, **{"every": None, "memory_every": 1, "keep": None, "options": OVERLAP, **options}
        )
        self.snaps._streams_of_device = lambda: device
        self.state = self.snaps.track(model=self.model, optimizer=self.optimizer)
        self.snaps.resume()

    def train(self, steps: int, *, forward: Callable[[], object] = lambda: None) -> None:
        for _ in range(steps):
            kernel(self.device, self.model.mean, lambda: self.model.mean.data.add_(1))
            forward()
            self.optimizer.step()
            self.snaps.step()


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()
    monkeypatch.setattr("holdfast.train.snapshots_api.open_tier", lambda **_: made)
    return made


def wrong(tier: Recorded) -> list[int]:
    """The steps whose committed states are not those of the step."""
    expected = {"model.mean": lambda k: k, "optimizer": lambda k: k, "model": lambda k: k * (k + 1) / 2}
    return [
        step
        for step, tensors in tier.kept.items()
        if not all(
            bool((tensor == next(value(step) for name, value in expected.items() if key.startswith(name))).all())
            for key, tensor in tensors.items()
        )
    ]


def settled(job: Job, work: Callable[[], object]) -> None:
    """Do this work, and wait for the copy that was under way."""
    work()
    assert job.snaps._saving is not None
    job.snaps._saving.settle()


@contextmanager
def job_on(folder: Path, order: Order, tier: Recorded, **options: Any) -> Iterator[Job]:
    """A job on a double that takes this order; closed at the block's end."""
    job = Job(folder, DeviceDouble(order), tier, **options)
    with job.snaps:
        yield job


@pytest.mark.parametrize("order", ORDERS)
def test_each_committed_state_is_that_of_one_step_whatever_order_the_device_takes(
    order: str, tmp_path: Path, tier: Recorded
) -> None:
    with job_on(tmp_path, ORDERS[order](), tier) as job:
        job.train(12)
    assert sorted(tier.kept) == list(range(1, 13))
    assert all(len(tensors) == 5 for tensors in tier.kept.values())
    assert not wrong(tier)


def test_without_waits_the_double_shows_states_of_two_steps(tmp_path: Path, tier: Recorded) -> None:
    job = Job(tmp_path, DeviceDouble(program_first, ignores_waits=True), tier, memory_every=2)
    with job.snaps:
        job.train(12)
    assert wrong(tier)


def test_a_large_tensor_may_be_in_several_pieces_of_the_hosts_memory(
    tmp_path: Path, tier: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlapping, "BLOCK_BYTES", 1024)
    with job_on(tmp_path, at_random(1), tier) as job:
        job.train(5)
        assert len(job.device.taken) > 2
    assert sorted(tier.kept) == [1, 2, 3, 4, 5]
    assert not wrong(tier)


def test_the_memory_for_copies_is_taken_once(tmp_path: Path, tier: Recorded) -> None:
    with job_on(tmp_path, at_random(2), tier) as job:
        job.train(1)
        first = list(job.device.taken)
        job.train(8)
        assert job.device.taken == first


def test_a_state_is_committed_when_the_device_has_copied_it_and_not_before(tmp_path: Path, tier: Recorded) -> None:
    with job_on(tmp_path, program_first, tier, memory_every=4) as job:
        job.device.held = True
        job.train(7)
        saving = job.snaps._saving
        assert saving is not None
        assert not tier.kept
        job.device.held = False
        until(lambda: saving.advance() or 4 in tier.kept, "step 4 is committed")
    assert not wrong(tier)


def test_save_returns_when_the_state_is_handed_over(tmp_path: Path, tier: Recorded) -> None:
    with job_on(tmp_path, at_random(3), tier, memory_every=None) as job:
        job.train(3)
        job.snaps.save()
        assert tier.events == ["commit 3", "persist 3"]
    assert not wrong(tier)


def test_a_save_to_the_disk_that_is_due_is_handed_over_behind_its_copy(tmp_path: Path, tier: Recorded) -> None:
    with job_on(tmp_path, at_random(4), tier, every="3 steps", memory_every=None) as job:
        job.train(7)
    assert tier.events == ["commit 3", "persist 3", "commit 6", "persist 6"]
    assert not wrong(tier)
    assert [path.name for path in sorted(tmp_path.glob("step_*"))] == ["step_000000003.0001", "step_000000006.0001"]


def test_an_error_of_the_copy_is_reported_and_the_older_state_stays(tmp_path: Path, tier: Recorded) -> None:
    job = Job(tmp_path, DeviceDouble(at_random(5)), tier, memory_every=2)
    settled(job, lambda: job.train(3))
    job.device.held = True
    job.train(1)
    job.device.broken = "CUDA error: an illegal memory access was encountered"
    job.device.held = False
    job.train(1)
    with pytest.raises(SnapshotError, match=r"step 4 was not saved: the copy from the GPU failed: CUDA error"):
        job.snaps.close()
    assert sorted(tier.kept) == [2]
    assert not wrong(tier)


@pytest.mark.parametrize("broken", ["", "CUDA error: device-side assert triggered"])
@pytest.mark.parametrize("compared", [True, False], ids=["values are compared", "values are not compared"])
def test_an_exception_in_the_program_waits_for_no_device(
    compared: bool, broken: str, tmp_path: Path, tier: Recorded
) -> None:
    job = Job(tmp_path, DeviceDouble(program_first), tier, memory_every=2)
    before = 1 if compared else 5  # values are compared in the saves of steps 2 and 4
    settled(job, lambda: job.train(before))
    job.device.held = True

    def train() -> None:
        with job.snaps:
            job.train(1)
            job.device.broken = broken
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert sorted(tier.kept) == ([] if compared else [2, 4])
    assert not wrong(tier)


def test_without_memory_of_the_host_training_waits_for_the_copy(tmp_path: Path, tier: Recorded) -> None:
    device = DeviceDouble(at_random(6))
    device.memory_max = 0
    job = Job(tmp_path, device, tier)
    with pytest.warns(RuntimeWarning, match="saves wait for the GPU: the host has no memory"):
        job.train(1)
    device.run()
    job.train(2)
    job.snaps.close()
    assert sorted(tier.kept) == [1, 2, 3]


@pytest.mark.parametrize("counted", [True, False], ids=["torch counts it", "through .data"])
def test_a_parameter_that_the_program_changes_itself_ends_the_overlap(
    counted: bool, tmp_path: Path, tier: Recorded
) -> None:
    def forward() -> None:
        second = job.model.second
        if counted:
            kernel(job.device, second, lambda: second.data.mul_(1))
        else:
            job.device.launch(lambda: second.data.add_(1))

    job = Job(tmp_path, DeviceDouble(at_random(7)), tier, memory_every=2)
    job.train(2)
    dropped = r"(?s)the copy of step 2 was dropped.*outside of an optimizer's step"
    with pytest.warns(RuntimeWarning, match=dropped):
        settled(job, lambda: job.train(1, forward=forward))
    assert not tier.kept
    taken = list(job.device.taken)
    job.train(1)
    job.snaps.close()
    assert sorted(tier.kept) == [4], "saves go on, and wait"
    assert job.device.taken == taken


def test_a_step_without_hooks_ends_the_overlap(tmp_path: Path, tier: Recorded) -> None:
    """As a graph that is replayed: no hook of an optimizer runs, and torch counts no change."""
    job = Job(tmp_path, DeviceDouble(at_random(8)), tier, memory_every=2)
    job.train(2)
    job.device.launch(lambda: job.model.first.data.add_(1))
    with pytest.warns(RuntimeWarning, match="the copy of step 2 was dropped"):
        settled(job, job.snaps.step)
    assert not tier.kept
    job.snaps.close()


def test_the_option_overlap_false_takes_no_memory_for_copies(tmp_path: Path, tier: Recorded) -> None:
    device = DeviceDouble(at_random(9))
    job = Job(tmp_path, device, tier, options=ht.SnapshotOptions())
    with job.snaps:
        kernel(device, job.model.mean, lambda: job.model.mean.data.add_(1))
        job.optimizer.step()
        device.run()
        job.snaps.step()
    assert not device.taken
    assert not wrong(tier)
    assert sorted(tier.kept) == [1]
