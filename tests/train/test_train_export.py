"""A snapshot as other programs read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load

import holdfast.train as ht
from holdfast.snapshots import saver_client
from holdfast.train import export


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("holdfast.train.snapshots.open_tier", lambda **_: saver_client.PrivateTier())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with ht.Snapshots(tmp_path / "runs", every=None, memory_every=None) as snaps:
        snaps.track(model=model, optimizer=optimizer, schedule=schedule)
        for _ in range(3):
            model(torch.randn(5, 3)).sum().backward()
            optimizer.step()
            snaps.step()
            snaps.save(wait=True)
    return tmp_path / "runs", model, optimizer, schedule


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_torch(saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model, optimizer, schedule = saved
    assert export.main([str(folder), "--to", str(tmp_path / "out.pt")]) == 0
    assert "step_000000003.0001" in capsys.readouterr().out
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    assert same(state["model"], model.state_dict())
    assert state["step"] == 3
    assert state["schedule"] == schedule.state_dict()
    told = state["optimizer"]
    assert told["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for name, parameter in model.named_parameters():
        assert torch.equal(told["state"][name]["momentum_buffer"], optimizer.state[parameter]["momentum_buffer"])


def test_safetensors_has_the_model(saved, tmp_path: Path) -> None:
    folder, model, _, _ = saved
    assert export.main([str(folder), "--step", "3", "--to", str(tmp_path / "out"), "--format", "safetensors"]) == 0
    assert same(load_file(tmp_path / "out"), dict(model.state_dict()))


def test_dcp(saved, tmp_path: Path) -> None:
    folder, model, _, _ = saved
    assert export.main([str(folder), "--to", str(tmp_path / "out"), "--format", "dcp"]) == 0
    into = {"model": {key: torch.zeros_like(each) for key, each in model.state_dict().items()}}
    dcp_load(into, storage_reader=FileSystemReader(tmp_path / "out"), no_dist=True)
    assert same(into["model"], dict(model.state_dict()))


def test_what_cannot_be_done_is_said(saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, _, _ = saved
    assert export.main([str(folder), "--step", "4", "--to", str(tmp_path / "out")]) == 1
    assert "no valid snapshot of step 4" in capsys.readouterr().err
    (tmp_path / "there").touch()
    assert export.main([str(folder), "--to", str(tmp_path / "there")]) == 1
    assert "exists already" in capsys.readouterr().err
    file = max(folder.glob("step_*/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert export.main([str(folder), "--to", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert "not what was saved" in told
    assert "The one before it: --step 2" in told
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors"])
def test_where_nothing_can_be_written(saved, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    for to, said in (
        (tmp_path / "nowhere" / "out", "there is no folder"),
        (Path("/proc/out"), "/proc/out was not written"),
    ):
        assert export.main([str(saved[0]), "--to", str(to), "--format", kind]) == 1
        told = capsys.readouterr().err
        assert said in told, told
        assert len(told.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
