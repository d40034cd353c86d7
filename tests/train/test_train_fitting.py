"""What is tracked and what was saved: compared on both sides, and what may be left out on purpose."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast.train as ht
from holdfast.protocol.errors import DataStateError, StateMismatchError, TrackingError
from holdfast.train.resuming import Resumed

pytestmark = pytest.mark.usefixtures("own_staging")


class Net(nn.Module):
    def __init__(self, *more: str, width: int = 2) -> None:
        super().__init__()
        self.body = nn.Linear(3, width)
        for name in more:
            if name.startswith("buffer"):
                self.register_buffer(name, torch.zeros(2))
            else:
                self.add_module(name, nn.Linear(2, 2))


def everything(*more: str, **others: Any) -> dict[str, Any]:
    """A model of which the body alone is trained, its optimizer, and others."""
    model = Net(*more)
    return {"model": model, "optimizer": torch.optim.AdamW(model.body.parameters(), lr=0.1), **others}


def train(objects: dict[str, Any], snaps: ht.Snapshots, steps: int = 1) -> None:
    for _ in range(steps):
        objects["model"].body(torch.ones(1, 3)).sum().backward()
        objects["optimizer"].step()
        snaps.step()
    snaps.save(wait=True)
    snaps.close()


def save(folder: Path, objects: dict[str, Any]) -> None:
    snaps = ht.Snapshots(folder, every=None, memory_every=None)
    snaps.track(**objects)
    train(objects, snaps)


def resume(folder: Path, objects: dict[str, Any], **choice: Any) -> tuple[ht.Snapshots, Resumed]:
    snaps = ht.Snapshots(folder, every=None, memory_every=None)
    snaps.track(**objects)
    resumed = snaps.resume(**choice)
    assert resumed is not None
    return snaps, resumed


def refused(folder: Path, objects: dict[str, Any], match: str, **choice: Any) -> None:
    with pytest.raises(StateMismatchError, match=match):
        resume(folder, objects, **choice)


@pytest.mark.parametrize(
    ("then", "now", "match"),
    [
        (("frozen",), (), r"and not tracked now: model\.frozen\.bias, model\.frozen\.weight"),
        (("buffer",), (), r"and not tracked now: model\.buffer"),
        ((), ("frozen",), r"tracked now, and not in the snapshot: model\.frozen\.bias"),
        (("one",), ("other",), r"(?s)tracked now, and not in .*model\.other.*and not tracked now: model\.one"),
    ],
)
def test_what_is_on_one_side_only_is_named(
    tmp_path: Path, then: tuple[str, ...], now: tuple[str, ...], match: str
) -> None:
    save(tmp_path, everything(*then))
    objects = everything(*now)
    before = objects["model"].body.weight.clone()
    refused(tmp_path, objects, match)
    assert torch.equal(objects["model"].body.weight, before)
    with pytest.warns(RuntimeWarning, match=r"model\."):
        snaps, resumed = resume(tmp_path, objects, strict=False)
    assert resumed.notes
    assert not torch.equal(objects["model"].body.weight, before)
    train(objects, snaps)
    again = everything(*now)
    resume(tmp_path, again)[0].close()  # what was saved since is whole
    assert torch.equal(again["model"].body.weight, objects["model"].body.weight)


def test_an_object_that_only_the_snapshot_has_is_named(tmp_path: Path) -> None:
    save(tmp_path, everything(loader=ht.DataLoader(range(8))))
    refused(tmp_path, everything(), "and not tracked now: loader")
    refused(tmp_path, everything(ema=Net(), loader=ht.DataLoader(range(8))), "not in the snapshot: ema\n")


def test_what_came_later_is_left_out_once(tmp_path: Path) -> None:
    """An average of the weights, and a loader whose data have grown."""
    save(tmp_path, everything(loader=ht.DataLoader(range(8), seed=1)))
    for first in (True, False):
        objects = everything(ema=Net(), loader=ht.DataLoader(range(16), seed=1))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            snaps, resumed = resume(tmp_path, objects, optional=["ema", "loader"])
        assert len(said) == len(resumed.notes) == (2 if first else 0)
        if first:
            assert resumed.notes[0].startswith("ema is not restored: the snapshot lacks ema")
            assert resumed.notes[1].startswith("loader is not restored: The snapshot's dataset had 8 samples")
            ema = objects["ema"].body.weight
        else:
            assert torch.equal(objects["ema"].body.weight, ema)
        next(iter(objects["loader"]))
        train(objects, snaps)


def test_a_folder_whose_loader_was_left_out_takes_one_again(tmp_path: Path) -> None:
    """The advice of HF125, when the data have changed, must lead back."""
    save(tmp_path, everything(loader=ht.DataLoader(range(8))))
    objects = everything(loader=ht.DataLoader(range(9)))
    with pytest.raises(DataStateError, match=r"resume\(optional=\['loader'\]\)"):
        resume(tmp_path, objects)
    with pytest.warns(RuntimeWarning, match="loader"):
        snaps, _ = resume(tmp_path, everything(), strict=False)
    train({**objects, **everything()}, snaps, 0)
    with pytest.warns(RuntimeWarning, match="loader is not restored"):
        snaps, resumed = resume(tmp_path, objects, optional="loader")
    assert resumed.step == 1
    train(objects, snaps)
    resume(tmp_path, everything(loader=ht.DataLoader(range(9))))[0].close()


def test_a_part_alone_and_then_all_of_it(tmp_path: Path) -> None:
    """The weights for a fine-tuning; a restart of that goes on with its optimizer, too."""
    save(tmp_path, everything())
    objects = everything()
    snaps, resumed = resume(tmp_path, objects, only=["model"])
    assert (resumed.step, resumed.notes) == (1, ())
    assert not objects["optimizer"].state
    train(objects, snaps)
    again = everything()
    snaps, resumed = resume(tmp_path, again, only=["model"])
    assert resumed.step == 2
    moments = again["optimizer"].state[again["model"].body.weight]
    assert torch.equal(moments["exp_avg"], objects["optimizer"].state[objects["model"].body.weight]["exp_avg"])
    snaps.close()
    with pytest.raises(TrackingError, match="nothing is tracked as modle"):
        resume(tmp_path, everything(), only=["modle"])


def test_an_optimizer_of_another_class_is_refused(tmp_path: Path) -> None:
    save(tmp_path, everything())
    objects = everything()
    objects["optimizer"] = torch.optim.SGD(objects["model"].body.parameters(), lr=0.5, momentum=0.9)
    refused(tmp_path, objects, "optimizer is a SGD now, and a AdamW in the snapshot")
    refused(tmp_path, objects, "a SGD now", strict=False)  # its first step would fail
    with pytest.warns(RuntimeWarning, match="optimizer is not restored"):
        snaps, _ = resume(tmp_path, objects, optional=["optimizer"])
    assert objects["optimizer"].param_groups[0]["lr"] == 0.5
    train(objects, snaps)


def test_a_snapshot_that_names_no_class_is_judged_by_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older ones are."""
    monkeypatch.setattr("holdfast.train.state.Tracker._kinds", lambda _: {})
    save(tmp_path, everything())
    resume(tmp_path, everything())[0].close()
    objects = everything()
    objects["optimizer"] = torch.optim.SGD(objects["model"].body.parameters(), lr=0.5)
    refused(tmp_path, objects, "another optimizer in the snapshot: that has the options .*betas.*, not .*momentum")


def test_a_schedule_of_another_class_is_refused(tmp_path: Path) -> None:
    """torch's would take what it finds, and go on with a mixture."""
    objects = everything()
    objects["schedule"] = torch.optim.lr_scheduler.StepLR(objects["optimizer"], 3)
    save(tmp_path, objects)
    objects = everything()
    objects["schedule"] = torch.optim.lr_scheduler.CosineAnnealingLR(objects["optimizer"], 3)
    refused(tmp_path, objects, "schedule is a CosineAnnealingLR now, and a StepLR in the snapshot")


def test_a_group_that_was_added_midway_is_the_cause(tmp_path: Path) -> None:
    objects = everything("head")
    objects["optimizer"].add_param_group({"params": objects["model"].head.parameters(), "lr": 0.01})
    save(tmp_path, objects)
    refused(tmp_path, everything("head"), r"2; a group was added .*call add_param_group\(\) before resume")
    other = everything("head")
    other["optimizer"].param_groups[0]["params"].pop()
    refused(tmp_path, other, r"other parameter groups .*: 1, then 2; gone: body\.bias, head\.bias, head\.weight")


def test_another_shape_is_left_out_where_that_is_allowed(tmp_path: Path) -> None:
    save(tmp_path, everything(ema=Net()))
    objects = everything(ema=Net(width=5))
    refused(tmp_path, objects, r"ema\.body\.weight has the shape \[5, 3\], and \[2, 3\] in the snapshot")
    with pytest.warns(RuntimeWarning, match="ema is not restored: ema.body.* has the shape"):
        resume(tmp_path, objects, optional=["ema"])[0].close()


def test_a_state_dict_that_cannot_be_called_is_said_by_track(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return {}

    class Needs:
        def state_dict(self, what: str) -> dict[str, Any]:
            return {what: 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    snaps = ht.Snapshots(tmp_path)
    for each in (Own(1, 1), nn.Sequential(Own(1, 1))):
        with pytest.raises(TrackingError, match=r"track\(own=…\): its state_dict\(\) fails: .*unexpected keyword"):
            snaps.track(own=each)
    with pytest.raises(TrackingError, match=r"track\(needs=…\): .* without arguments: missing .* 'what'"):
        snaps.track(needs=Needs())
    snaps.track(model=nn.Linear(1, 1))


def odd_buffers() -> dict[str, torch.Tensor]:
    numbers = torch.arange(4, dtype=torch.float32) + 1
    with torch.inference_mode():
        inferred = numbers * 2
    return {
        "conjugated": torch.complex(numbers, numbers).conj(),
        "negated": torch.complex(numbers, numbers).conj().imag,
        "complex32": torch.complex(numbers, numbers).to(torch.complex32).conj(),
        "expanded": numbers.view(4, 1).expand(2, 4, 3),
        "one": torch.tensor(3.0).expand(5),
        "windows": torch.tensor([1.0, 1.0, 1.0, 1.0]).as_strided((2, 3), (1, 1)),
        "inferred": inferred,
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", ["conjugated", "negated", "complex32", "expanded", "one", "windows", "inferred"])
def test_buffers_that_are_views_come_back(tmp_path: Path, name: str) -> None:
    def model() -> nn.Module:
        made = nn.Linear(1, 1)
        made.register_buffer(name, odd_buffers()[name])
        return made

    save(tmp_path, {**everything(), "odd": model()})
    again = model()
    again.get_buffer(name).untyped_storage().fill_(0)
    resume(tmp_path, {**everything(), "odd": again})[0].close()
    assert again.get_buffer(name).tolist() == odd_buffers()[name].tolist()


def test_an_expanded_buffer_does_not_take_other_values(tmp_path: Path) -> None:
    made, again = nn.Linear(1, 1), nn.Linear(1, 1)
    made.register_buffer("odd", torch.arange(3.0))
    again.register_buffer("odd", torch.zeros(1).expand(3))
    save(tmp_path, {**everything(), "odd": made})
    refused(tmp_path, {**everything(), "odd": again}, "share memory")


class Counting(torch.optim.SGD):
    """Its state has entries that belong to no parameter, as KFAC's belong to modules."""

    def step(self, closure: Any = None) -> Any:
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1  # type: ignore[index]
        return super().step(closure)


def test_an_optimizer_s_state_of_no_parameter_comes_back(tmp_path: Path) -> None:
    def life() -> tuple[Counting, ht.Snapshots]:
        model = nn.Linear(2, 1)
        optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
        snaps = ht.Snapshots(tmp_path, every=None, memory_every=None)
        snaps.track(model=model, optimizer=optimizer)
        snaps.resume()
        model(torch.ones(1, 2)).sum().backward()
        return optimizer, snaps

    for steps in (1, 2, 3):
        optimizer, snaps = life()
        optimizer.step()
        assert optimizer.state["all"] == {"steps": steps}  # type: ignore[index]
        snaps.step()
        snaps.save(wait=True)
        snaps.close()


@pytest.mark.parametrize("kinds", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_an_optimizer_s_state_follows_a_model_of_another_type(
    tmp_path: Path, kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    """Without that its next step fails, or goes on with what bfloat16 has left of the momentum."""
    for number, kind in enumerate(kinds):
        model = nn.Linear(2, 1).to(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            snaps = ht.Snapshots(tmp_path, every=None, memory_every=None)
            snaps.track(model=model, optimizer=optimizer)
            snaps.resume(strict=not number)
        model(torch.ones(1, 2, dtype=kind)).sum().backward()
        optimizer.step()
        assert all(each["exp_avg"].dtype is kind for each in optimizer.state.values())
        snaps.step()
        snaps.save(wait=True)
        snaps.close()
