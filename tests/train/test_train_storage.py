"""torch.distributed.checkpoint over our files, exports for other programs, and what retention leaves."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load

import holdfast.train as ht
from holdfast.protocol.errors import NoSnapshotError, ShardingError, SnapshotDamagedError, StateTypeError
from holdfast.train import export, storage
from holdfast.train.snapshots import folder
from holdfast.train.state import Tracker
from tests.train.conftest import damage
from tests.warm import Warm

SCRIPT = Path(__file__).parent / "scripts" / "storage_ranks.py"
pytestmark = [pytest.mark.xdist_group("torch"), pytest.mark.timeout(120)]


@pytest.mark.usefixtures("fsdp_on_cpus")
def test_saved_by_torch_on_two_ranks_loaded_on_any(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, "dcp", tmp_path)
    reference = found["saved"][0]["state"]
    assert [each["committed"] for each in found["saved"]] == ["step_000000003.0001", None]
    for name, results in found["loaded"].items():
        assert [each["state"] for each in results] == [reference] * len(results), name
        assert all(each["extra"] for each in results)
    (snapshot,) = folder.survey(tmp_path).committed
    folder.verify(snapshot)
    assert snapshot.manifest.metrics == {"loss": 0.5}
    files = sorted(path.name for path in snapshot.path.iterdir())
    assert files == ["MANIFEST.json", *(f"rank_0000{n}.{kind}" for n in (0, 1) for kind in ("json", "safetensors"))]


@pytest.mark.usefixtures("fsdp_on_cpus")
def test_torch_loads_what_snapshots_saved(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, "tracked", tmp_path)
    for name, results in found["loaded"].items():
        for each in results:
            assert each == {"state": found["saved"][0]["state"], "step": 3, "has_id": True}, name


def test_a_rank_that_fails_commits_nothing(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, "failing", tmp_path)
    assert all("cannot write" in each["said"] and "No space left" in each["said"] for each in found["found"])
    assert found["left"] == []
    assert found["again"][0]["committed"] == "step_000000003.0001"


def test_fsdp1_is_refused_and_can_be_saved_so(warm: Warm, tmp_path: Path) -> None:
    for each in warm.found(SCRIPT, "fsdp1", tmp_path):
        assert "FSDP1" in each["said"]
        assert "SnapshotWriter" in each["said"]
        assert each["changed"]
        assert each["same"]


# --- in this process --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: that there is no process group
        yield


def save(path: Path, state: dict[str, Any], step: int = 1) -> Path:
    writer = ht.SnapshotWriter(path, step=step)
    dcp.save(state, storage_writer=writer)
    assert writer.committed is not None
    return writer.committed


def test_what_needs_pickle_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException) as error:
        save(tmp_path, {"model": {"weight": torch.ones(2)}, "odd": [object()]})
    (inner, _) = next(iter(error.value.failures.values()))
    assert isinstance(inner, StateTypeError)
    assert list(tmp_path.iterdir()) == []


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    state = {"holdfast.text": torch.ones(2)}
    with pytest.raises(dcp.CheckpointException) as error:
        save(tmp_path, state)
    (inner, _) = next(iter(error.value.failures.values()))
    assert isinstance(inner, ShardingError)


def test_no_pickle_is_in_the_files(tmp_path: Path) -> None:
    path = save(tmp_path, {"model": {"weight": torch.ones(2)}, "more": {"lr": 0.1, "names": ["a", ("b",)]}})
    assert sorted(each.suffix for each in path.iterdir()) == [".json", ".json", ".safetensors"]
    assert b"torch" not in (path / "rank_00000.safetensors").read_bytes()


def test_the_newest_of_a_folder_or_of_a_step(tmp_path: Path) -> None:
    for step, value in ((1, 1.0), (2, 2.0), (2, 3.0)):
        save(tmp_path, {"weight": torch.full((3,), value)}, step)
    found = {}
    for name, snapshots in {
        "newest": ht.SnapshotReader(tmp_path),
        "of step 1": ht.SnapshotReader(tmp_path, step=1),
        "this one": ht.SnapshotReader(tmp_path / "step_000000002.0001"),
    }.items():
        into = {"weight": torch.zeros(3)}
        dcp.load(into, storage_reader=snapshots)
        found[name] = into["weight"].tolist()
    assert found == {"newest": [3.0] * 3, "of step 1": [1.0] * 3, "this one": [2.0] * 3}
    for wrong in ({"path": tmp_path, "step": 9}, {"path": tmp_path / "nowhere"}):
        with pytest.raises(NoSnapshotError, match="no snapshot"):
            ht.SnapshotReader(**wrong)


def test_the_id_of_the_training_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a second life the launcher gives another id: the reader has the first one, and the writer passes it on."""
    state = {"weight": torch.ones(3)}
    monkeypatch.setenv("HOLDFAST_RUN_ID", "first")
    save(tmp_path / "a", state)
    monkeypatch.setenv("HOLDFAST_RUN_ID", "second")
    reader = ht.SnapshotReader(tmp_path / "a")
    assert reader.run_id == ""
    dcp.load(state, storage_reader=reader)
    assert reader.run_id == "first"
    dcp.save(state, storage_writer=ht.SnapshotWriter(tmp_path / "a", step=2, run_id=reader.run_id))
    monkeypatch.delenv("HOLDFAST_RUN_ID")
    save(tmp_path / "none", state)
    found = {}
    for name in ("a", "none"):
        reader = ht.SnapshotReader(tmp_path / name)
        dcp.load(state, storage_reader=reader)
        found[name] = reader.run_id
    assert found == {"a": "first", "none": ""}


def test_damage_is_found_when_it_is_read(tmp_path: Path, torch_lacks: dict[str, str]) -> None:
    path = save(tmp_path, {"weight": torch.ones(3)}) / "rank_00000.safetensors"
    damage(path)
    reason = "AssertionError" if torch_lacks["reasons"] else "not what was saved"
    with pytest.raises((dcp.CheckpointException, AssertionError), match=reason):
        dcp.load({"weight": torch.zeros(3)}, storage_reader=ht.SnapshotReader(tmp_path))
    path.unlink()
    with pytest.raises(SnapshotDamagedError, match="missing"):
        ht.SnapshotReader(tmp_path)


@pytest.mark.usefixtures("own_staging")
def test_a_snapshot_of_torchs_save_is_exported_and_not_resumed(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "list": [torch.ones(1), {"lr": 0.5}], "n": 7}
    save(tmp_path / "runs", state)
    assert export.main([str(tmp_path / "runs"), "--to", str(tmp_path / "out.pt")]) == 0
    again = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(again["model"]["weight"], state["model"]["weight"])
    assert (again["list"][0].tolist(), again["list"][1], again["n"]) == ([1.0], {"lr": 0.5}, 7)
    snaps = ht.Snapshots(tmp_path / "runs")
    snaps.track(model=torch.nn.Linear(3, 2))
    with pytest.raises(ShardingError, match="SnapshotReader"):
        snaps.resume()


# --- exported for other programs --------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, own_staging: None):
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
    dcp_load(into, storage_reader=FileSystemReader(tmp_path / "out"))
    assert same(into["model"], dict(model.state_dict()))


def assembled_of(*ranks: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The state of an export, and the names of its models, if each rank tracks these objects."""
    texts, tensors = [], {}
    for rank, objects in enumerate(ranks):
        tracker = Tracker()
        tracker.add(objects)
        collected = tracker.collect(rank, len(ranks))
        texts.insert(0, json.loads(collected.text))  # in no order
        tensors |= collected.shared | collected.own
    saved: Any = SimpleNamespace(texts=texts, pieces=dict.fromkeys(tensors), fresh=tensors.__getitem__)
    return storage.assembled(saved, tensors.__getitem__, saved.fresh), list(storage.models_of(saved))


def stage(number: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ModuleDict({f"layer{number}": nn.Linear(2, 2)})
    decayed, rest = model[f"layer{number}"].weight, model[f"layer{number}"].bias
    optimizer = torch.optim.SGD([{"params": [decayed], "weight_decay": 0.1}, {"params": [rest]}], lr=lr, momentum=0.9)
    sum(each.sum() for each in model.parameters()).backward()
    optimizer.step()
    return model, optimizer


def test_an_export_has_the_stages_of_all_ranks_that_have_names_of_their_own() -> None:
    (first, opt0), (second, opt1) = stage(0, 0.1), stage(1, 0.2)
    state, models = assembled_of({"stage0": first, "opt0": opt0}, {"stage1": second, "opt1": opt1})
    assert models == ["stage0", "stage1"]
    assert same(state["stage0"], first.state_dict())
    assert same(state["stage1"], second.state_dict())
    assert [group["params"] for group in state["opt1"]["param_groups"]] == [["layer1.weight"], ["layer1.bias"]]
    assert state["opt1"]["state"].keys() == {"layer1.weight", "layer1.bias"}


def test_an_export_has_the_stages_of_all_ranks_under_one_name() -> None:
    (first, opt0), (second, opt1) = stage(0, 0.1), stage(1, 0.1)
    state, models = assembled_of({"model": first, "opt": opt0}, {"model": second, "opt": opt1})
    assert models == ["model"]
    assert state["model"].keys() == state["opt"]["state"].keys() == first.state_dict().keys() | second.state_dict()
    groups = state["opt"]["param_groups"]
    assert [group["params"] for group in groups] == [["layer0.weight", "layer1.weight"], ["layer0.bias", "layer1.bias"]]
    assert [group["weight_decay"] for group in groups] == [0.1, 0]


def test_exported_stages_with_other_options_keep_them() -> None:
    (first, opt0), (second, opt1) = stage(0, 0.1), stage(1, 0.2)
    state, _ = assembled_of(
        *[{"model": model, "opt": opt} for model, opt in ((first, opt0), (second, opt1), (second, opt1))]
    )
    of = {fqn: group["lr"] for group in state["opt"]["param_groups"] for fqn in group["params"]}
    assert of == {"layer0.weight": 0.1, "layer0.bias": 0.1, "layer1.weight": 0.2, "layer1.bias": 0.2}
    assert len(state["opt"]["param_groups"]) == 4


def test_what_cannot_be_done_is_said(saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, _, _ = saved
    assert export.main([str(folder), "--step", "4", "--to", str(tmp_path / "out")]) == 1
    assert "no valid snapshot of step 4" in capsys.readouterr().err
    (tmp_path / "there").touch()
    assert export.main([str(folder), "--to", str(tmp_path / "there")]) == 1
    assert "exists already" in capsys.readouterr().err
    damage(max(folder.glob("step_*/*.safetensors")))
    assert export.main([str(folder), "--to", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert "not what was saved" in told
    assert "The one before it: --step 2" in told
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors"])
def test_a_link_in_the_place_of_an_unfinished_export_is_not_written_through(saved, tmp_path: Path, kind: str) -> None:
    """In a folder such as /tmp, another user knows the names that a process with this id makes."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / f"out.{os.getpid()}.part").symlink_to(tmp_path / "precious")
    assert export.main([str(saved[0]), "--to", str(tmp_path / "out"), "--format", kind]) == 0
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "out").is_symlink()


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


# --- retention while a job trains: the saver reads back what stays, damage is found before anything older goes --------


JOB = """
import os, signal, sys, time
from pathlib import Path
import torch
import holdfast.train as ht
from holdfast.train.snapshots import folder as folders

KINDS = "safetensors", "checked"

folder, what = Path(sys.argv[1]), sys.argv[2]
model = torch.nn.Linear(3, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
real, here = folders.verify, []

def verify(snapshot, *given):
    here.append(snapshot.step)
    real(snapshot, *given)

folders.verify = verify

def saver():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        line = path.read_bytes()
        if b"holdfast.train.snapshots.saver" in line and line.split(b"\\0")[-2] == str(os.getpid()).encode():
            return int(path.parent.name)
    raise SystemExit("there is no saver")

with ht.Snapshots(folder, every=None, memory_every=None, keep=ht.Keep(last=2)) as snaps:
    snaps.track(model=model, optimizer=optimizer)
    snaps.resume()
    for step in range(1, 5):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        snaps.step()
        snaps.save(wait=True)
        if step == 3 and what == "damage":
            file, checked = (next(folder.glob("step_000000003.*")) / f"rank_00000.{kind}" for kind in KINDS)
            while not checked.exists():
                time.sleep(0.01)
            file.write_bytes(bytes(file.stat().st_size))
            checked.write_text("what its writer would have found")
        if step == 4 and what == "kill":
            os.kill(saver(), signal.SIGKILL)
        snaps._pruner.finish()
        print("after", step, *sorted(path.name for path in folder.glob("step_*")))
print("read here", here)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


@pytest.mark.parametrize(
    ("what", "left", "read_here"),
    [
        ("nothing", ["step_000000003.0001", "step_000000004.0001"], []),
        ("damage", ["step_000000002.0001", "step_000000004.0001"], []),
        ("kill", ["step_000000003.0001", "step_000000004.0001"], [4]),
    ],
)
def test_what_stays(warm: Warm, job: Path, tmp_path: Path, what: str, left: list[str], read_here: list[int]) -> None:
    done = warm.run([job, str(tmp_path / "snaps"), what], timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"after 4 {' '.join(left)}" in done.stdout, done.stdout
    assert f"read here {read_here}" in done.stdout, "the saver reads, unless there is none"
    assert sorted(path.name for path in (tmp_path / "snaps").glob("step_*")) == left
    if what == "nothing":
        assert len(list((tmp_path / "snaps").glob("step_*/rank_00000.checked"))) == 2, "their writer has read them"
    assert ("step_000000003.0001 was set aside" in done.stderr) == (what == "damage")
    assert len(list((tmp_path / "snaps").glob("bad.*"))) == (what == "damage")


@pytest.mark.usefixtures("own_staging")
def test_a_model_with_an_extra_state_is_exported_without_it_and_an_object_of_tensors_is_no_model(
    tmp_path: Path,
) -> None:
    class Versioned(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 1}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    class Averages:
        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"mean": torch.ones(1)}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            pass

    with ht.Snapshots(tmp_path / "runs", every=None, memory_every=None) as snaps:
        snaps.track(first=Versioned(2, 2), second=nn.Linear(2, 2), averages=Averages())
        snaps.step()
        snaps.save(wait=True)
    line = [str(tmp_path / "runs"), "--to", str(tmp_path / "out"), "--format", "safetensors"]
    with pytest.warns(UserWarning, match=r"left out, since they are no tensors: first\._extra_state"):
        assert export.main(line) == 0
    assert sorted(load_file(tmp_path / "out")) == ["first.bias", "first.weight", "second.bias", "second.weight"]
