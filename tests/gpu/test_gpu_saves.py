"""Saves from a GPU overlap with the next step, and each committed state is that of one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("this machine has no GPU that torch can use", allow_module_level=True)

from torch import nn  # noqa: E402 - it imports torch

import holdfast.train as ht  # noqa: E402
from holdfast.train.device_streams import DeviceStreams  # noqa: E402
from holdfast.train.overlapping import HostMemory, StateCopy  # noqa: E402

LONG_CYCLES = 2_000_000_000
"""About a second."""
FLOATS = 64 << 20
"""256 MB: a copy to the host takes several milliseconds."""


class Adds(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """An optimizer whose step adds 1."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                torch._foreach_add_(group["params"], 1)


def begun(parameter: Any, buffer: Any) -> tuple[StateCopy, list[Any]]:
    streams = DeviceStreams()
    places = [torch.empty(each.shape) for each in (parameter, buffer)]
    copy = StateCopy(streams, watched=[parameter], compared=True)
    copy.begin(places, [parameter, buffer], HostMemory(streams))
    return copy, places


def test_the_copy_has_the_values_of_the_save_and_no_later_ones() -> None:
    """The step's kernels are still waiting when the save begins, and the next step is launched at once."""
    parameter, buffer = nn.Parameter(torch.zeros(FLOATS, device="cuda")), torch.zeros(1 << 20, device="cuda")
    optimizer = Adds([parameter], {})
    for number in range(1, 4):
        torch.cuda._sleep(LONG_CYCLES // 10)
        optimizer.step()
        buffer += 1
        copy, places = begun(parameter, buffer)
        buffer += 1  # the next forward pass
        optimizer.step()
        assert copy.finish().value == "there"
        assert [float(each.min()) for each in places] == [float(each.max()) for each in places]
        assert [float(each[0]) for each in places] == [2 * number - 1] * 2
        assert float(parameter[0]) == 2 * number


def test_the_program_does_not_wait_for_the_copy() -> None:
    parameter, buffer, done = (
        nn.Parameter(torch.zeros(FLOATS, device="cuda")),
        torch.zeros(8, device="cuda"),
        torch.cuda.Event(),
    )
    begun(parameter, buffer)[0].finish()  # takes the host's memory
    torch.cuda._sleep(LONG_CYCLES)
    copy, _ = begun(parameter, buffer)
    done.record()
    assert not done.query(), "the device was waited for"
    assert copy.advance().value == "under way"
    assert copy.finish().value == "there"


def test_a_write_outside_of_the_optimizer_is_noticed() -> None:
    parameter, buffer = nn.Parameter(torch.zeros(FLOATS, device="cuda")), torch.zeros(8, device="cuda")
    for write in (lambda: parameter.detach().add_(1), lambda: parameter.data.add_(1)):
        copy, _ = begun(parameter, buffer)
        write()
        Adds([parameter], {}).step()
        assert copy.finish().value == "torn"


def test_states_in_memory_are_those_of_their_steps_while_training_runs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 64)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    digests = {}
    with ht.Snapshots(
        tmp_path, every="4 steps", memory_every=2, options=ht.SnapshotOptions(overlap=True), keep=None
    ) as snaps:
        state = snaps.track(model=model, optimizer=optimizer)
        snaps.resume()
        for _ in range(13):
            model(torch.randn(256, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            digests[state.step + 1] = {name: each.clone() for name, each in model.state_dict().items()}
            snaps.step()
    again = ht.Snapshots(tmp_path, every=None)
    with again:
        state = again.track(model=model, optimizer=optimizer)
        resumed = again.resume()
        assert resumed is not None
        assert resumed.step >= 12
        for name, each in model.state_dict().items():
            assert torch.equal(each, digests[resumed.step][name]), name


def test_a_copy_that_is_given_up_does_not_wait_for_the_device() -> None:
    parameter, buffer = nn.Parameter(torch.zeros(FLOATS, device="cuda")), torch.zeros(8, device="cuda")
    begun(parameter, buffer)[0].finish()
    torch.cuda._sleep(LONG_CYCLES)
    copy, _ = begun(parameter, buffer)
    copy.give_up()
    assert not torch.cuda.current_stream().query(), "the device was waited for"
    torch.cuda.synchronize()
