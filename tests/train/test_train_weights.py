"""Weights of another run: `ht.load_weights`, what `resume(only=…)` says, and types that are not those of the snapshot."""

from __future__ import annotations

import copy
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast.train as ht
from holdfast.protocol.errors import NoSnapshotError, SnapshotDamagedError, StateMismatchError, TrackingError
from holdfast.train import export
from holdfast.train.snapshots.layout import FINITE, MANIFEST, Manifest
from tests.train.conftest import damage

pytestmark = [pytest.mark.xdist_group("torch lives"), pytest.mark.usefixtures("own_staging")]


class Extra(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self, said: str) -> None:
        super().__init__()
        self.said = said

    def get_extra_state(self) -> dict[str, str]:
        return {"said": self.said}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.said = state["said"]


def net(seed: int, said: str = "", width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), Extra(said), nn.Linear(width, 2))


def saved(folder: Path, **models: nn.Module) -> None:
    """A run of three epochs."""
    with ht.Snapshots(folder, every="1 steps", memory_every=None) as snaps:
        state = snaps.track(**models)
        snaps.resume()
        for _ in state.epochs(3):
            snaps.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        if isinstance(a, torch.Tensor)
    )


def test_a_new_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    of_before = net(1, "before")
    saved(tmp_path / "a", model=of_before)
    model = net(2, "new")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert ht.load_weights(model, tmp_path / "a") == 3
    assert same(model, of_before)
    assert model[2].said == "before"
    with ht.Snapshots(tmp_path / "b", every=None) as snaps:
        state = snaps.track(model=model, optimizer=optimizer)
        assert snaps.resume() is None
        assert (state.step, len(list(state.epochs(3)))) == (0, 3)


def test_one_snapshot_of_a_folder_can_be_named(tmp_path: Path) -> None:
    model = net(1)
    with ht.Snapshots(tmp_path, every=None, keep=None) as snaps:
        snaps.track(model=model)
        snaps.step()
        snaps.save(wait=True)
        first = copy.deepcopy(model)
        nn.init.zeros_(model[0].weight)
        snaps.step()
        snaps.save(wait=True)
    other = net(2)
    assert ht.load_weights(other, tmp_path / "step_000000001.0001") == 1
    assert same(other, first)


@pytest.mark.filterwarnings("ignore:.*not finite after step")
@pytest.mark.parametrize("known", [True, False])
def test_weights_that_are_not_finite_are_passed_over_unless_they_are_named(tmp_path: Path, known: bool) -> None:
    """`known`: whether the manifests say which are finite. The mask of each snapshot is infinite on purpose."""
    model, folder = net(1), tmp_path / "runs"
    model.register_buffer("mask", torch.tensor([-math.inf]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ht.Snapshots(folder, every=None, memory_every=None, keep=None) as snaps:
        snaps.track(model=model, optimizer=optimizer)
        snaps.step()
        snaps.save(wait=True)
        good = copy.deepcopy(model)
        nn.init.constant_(model[0].weight, math.nan)
        snaps.step()
        snaps.save(wait=True)
    for path in () if known else folder.glob("step_*"):
        forget_finite(path)
    text = ("it" if known else "model.0.weight") + " has values that are not finite"
    poisoned, out = "step_000000002.0001", tmp_path / "out"

    other = net(2)
    other.register_buffer("mask", torch.zeros(1))
    with pytest.warns(RuntimeWarning, match=f"passed over: {poisoned}: {text}") as told:
        assert ht.load_weights(other, folder) == 1
    assert len(told) == 1
    assert same(other, good)
    with pytest.warns(RuntimeWarning, match=f"passed over: {poisoned}: {text}"):
        assert export.main([str(folder), "--to", str(out)]) == 0
    assert torch.load(out, weights_only=True)["step"] == 1
    with pytest.warns(RuntimeWarning, match=f"passed over: {poisoned}: {text}"):
        assert ht.SnapshotReader(folder).snapshot.step == 1

    with pytest.warns(RuntimeWarning, match=f"used nevertheless: {poisoned}: {text}"):
        assert ht.load_weights(other, folder / poisoned) == 2
    with pytest.warns(RuntimeWarning, match=f"used nevertheless: {poisoned}: {text}"):
        assert export.main([str(folder), "--step", "2", "--to", f"{out}.2"]) == 0
    shutil.rmtree(folder / "step_000000001.0001")
    with pytest.warns(RuntimeWarning, match=f"used nevertheless: {poisoned}: {text}"):
        assert ht.load_weights(other, folder) == 2


def forget_finite(path: Path) -> None:
    """Let the manifest say nothing of finite values."""
    manifest = Manifest.load((path / MANIFEST).read_text())
    metadata = {name: value for name, value in manifest.metadata.items() if name != FINITE}
    (path / MANIFEST).write_text(replace(manifest, metadata=metadata).dump())


def test_of_several_models_the_one_that_fits_is_taken(tmp_path: Path) -> None:
    large = net(1, width=8)
    saved(tmp_path, small=net(3), large=large)
    model = net(2, width=8)
    ht.load_weights(model, tmp_path)
    assert same(model, large)


def test_of_models_that_fit_equally_one_has_to_be_named(tmp_path: Path) -> None:
    teacher, student = net(1), net(3)
    saved(tmp_path, teacher=teacher, student=student, small=net(4, width=3))
    model = net(2)
    before = copy.deepcopy(model)
    with pytest.raises(StateMismatchError, match=r"models student, teacher in .* fit equally: .*name='student'"):
        ht.load_weights(model, tmp_path)
    assert same(model, before)
    for name, expected in (("student", student), ("teacher", teacher)):
        ht.load_weights(model, tmp_path, name=name)
        assert same(model, expected)
    with pytest.raises(StateMismatchError, match="does not fit 'small'"):
        ht.load_weights(model, tmp_path, name="small")
    with pytest.raises(StateMismatchError, match=r"has no model 'tutor'; it has small, student, teacher"):
        ht.load_weights(model, tmp_path, name="tutor")


def test_a_model_that_does_not_fit_is_named_and_left_alone(tmp_path: Path) -> None:
    saved(tmp_path, model=net(1))
    model = nn.Sequential(*net(2)[:3], nn.Linear(4, 2, bias=False), nn.Linear(2, 2))
    before = copy.deepcopy(model)
    with pytest.raises(
        StateMismatchError, match=r"not in the snapshot.*model\.4\.weight[^$]*not in the model: model\.3\.bias"
    ):
        ht.load_weights(model, tmp_path)
    assert same(model, before)
    with pytest.warns(RuntimeWarning, match=r"model\.4\.weight"):
        ht.load_weights(model, tmp_path, strict=False)
    assert not same(model, before)
    with pytest.raises(StateMismatchError, match=r"has the shape \[9, 3\], and \[4, 3\] in the snapshot"):
        ht.load_weights(net(2, width=9), tmp_path, strict=False)


def test_what_is_no_snapshot_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoSnapshotError, match="holds no snapshot"):
        ht.load_weights(net(1), tmp_path / "nothing")
    saved(tmp_path, model=net(1))
    damage(max(tmp_path.glob("step_*/rank_00000.safetensors")))
    with pytest.raises(SnapshotDamagedError):
        ht.load_weights(net(1), tmp_path)


# --- types ------------------------------------------------------------------------------------------------------------

SAID = r"model\.0\.weight is bfloat16, and float32 in the snapshot, and \d more tensors of this model"


def resumed(folder: Path, **options: Any) -> nn.Module:
    model = net(2).to(torch.bfloat16)
    with ht.Snapshots(folder, every=None, memory_every=None) as snaps:
        snaps.track(model=model)
        snaps.resume(**options)
    return model


def test_another_type_is_an_error_unless_it_is_asked_for(tmp_path: Path) -> None:
    of_before = net(1)
    saved(tmp_path, model=of_before)
    with pytest.raises(StateMismatchError, match=SAID):
        resumed(tmp_path)
    with pytest.raises(StateMismatchError, match=SAID):
        ht.load_weights(net(2).to(torch.bfloat16), tmp_path)
    with pytest.warns(RuntimeWarning, match=SAID):
        assert same(resumed(tmp_path, strict=False), of_before.to(torch.bfloat16))
    with pytest.warns(RuntimeWarning, match=SAID):
        ht.load_weights(model := net(2).to(torch.bfloat16), tmp_path, strict=False)
    assert same(model, of_before)


# --- fine-tuning ------------------------------------------------------------------------------------------------------


def test_resume_only_says_when_nothing_is_left_to_train(tmp_path: Path) -> None:
    saved(tmp_path, model=net(1))
    for only in (["model"], None):
        with ht.Snapshots(tmp_path, every=None, memory_every=None) as snaps:
            state = snaps.track(model=net(2), **({"other": net(3)} if only else {}))
            snaps.resume(only=only)
            if only:
                with pytest.warns(
                    RuntimeWarning, match=r"epoch 3 of 3 as well.*nothing is left to train.*load_weights"
                ):
                    assert list(state.epochs(3)) == []
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    assert list(state.epochs(3)) == []


# --- optimizers that cannot be saved ----------------------------------------------------------------------------------


class Consolidating(torch.optim.SGD):
    """Gives its state away only after a call that nobody makes."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("call consolidate_state_dict() first")


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """In place of torch's, which needs a process group."""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Consolidating, r"track\(optimizer=…\): its state_dict\(\) fails: RuntimeError: call consolidate_state_dict"),
        (ZeroRedundancyOptimizer, r"ZeroRedundancyOptimizer is not supported[^$]*fully_shard"),
    ],
)
def test_an_optimizer_that_cannot_be_saved_is_refused_at_once(
    tmp_path: Path, kind: type[torch.optim.Optimizer], text: str
) -> None:
    model = net(1)
    with ht.Snapshots(tmp_path, every=None) as snaps, pytest.raises(TrackingError, match=text):
        snaps.track(model=model, optimizer=kind(model.parameters(), lr=0.1))  # type: ignore[call-arg]


def test_a_metric_of_which_nothing_is_saved_is_refused_at_once(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.MeanMetric()
    with ht.Snapshots(tmp_path, every=None) as snaps:
        with pytest.raises(TrackingError, match=r"MeanMetric is empty[^$]*mean\.persistent\(True\)"):
            snaps.track(mean=metric)
        metric.persistent(True)
        snaps.track(mean=metric, loss=nn.MSELoss())


def test_a_metric_without_a_state_is_taken_and_one_within_another_is_named(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Stateless(torchmetrics.Metric):  # type: ignore[misc, name-defined]
        def update(self) -> None: ...

        def compute(self) -> None: ...

    inner = torchmetrics.MeanMetric()
    wrapper = torchmetrics.MinMaxMetric(inner)
    wrapper.persistent(True)
    with ht.Snapshots(tmp_path / "runs", every=None, memory_every=None) as snaps:
        snaps.track(stateless=Stateless())
        with pytest.raises(TrackingError, match="and that of each metric in it"):
            snaps.track(wrapper=wrapper)
        inner.persistent(True)
        snaps.track(wrapper=wrapper)
