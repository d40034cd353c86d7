"""A Python number in a module that begins again after a resume is told; one that is set, drawn or read is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import holdfast.train as ht
from holdfast.train.module_numbers import FIRST_STEPS, ModuleNumbers
from holdfast.train.tracked import TrackedModel, TrackedOptimizer

pytestmark = [pytest.mark.xdist_group("torch"), pytest.mark.usefixtures("own_staging")]


class Net(nn.Module):
    """A model of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.number = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(inputs) * self.number
        self.number *= 0.95
        return result


Change = Callable[[Any, int], object]
"""What a step does with the module; it gets the number of steps since the training began."""
STEPS_PER_EPOCH = 20


def decays(module: Any, _step: int) -> None:
    module.number *= 0.95


def counts_micro_batches(module: Any, step: int) -> None:
    """On half as many ranks each step has twice as many."""
    module.number += 1 if step < STEPS_PER_EPOCH else 2


def decays_to_a_limit(module: Any, _step: int) -> None:
    module.number = max(module.number * 0.95, 0.6)


def is_set_from_the_step(module: Any, step: int) -> None:
    module.number = 0.99 ** (step + 1)


def is_the_size_of_the_batch(module: Any, step: int) -> None:
    module.number = 5 if step % STEPS_PER_EPOCH == STEPS_PER_EPOCH - 1 else 32


def is_drawn(module: Any, step: int) -> None:
    module.number = Random(step % STEPS_PER_EPOCH).choice([0, 1, 2])


def counts_up_and_begins_again(module: Any, step: int) -> None:
    module.number = step % (FIRST_STEPS + 2) + 2


def is_a_switch(module: Any, _step: int) -> None:
    module.number = True


def is_removed(module: Any, step: int) -> None:
    if step == FIRST_STEPS + 1:
        del module.number
    elif step < FIRST_STEPS:
        module.number += 1


def life(numbers: ModuleNumbers, module: Any, change: Change, steps: range) -> list[str]:
    texts = []
    for step in steps:
        change(module, step)
        texts += [numbers.step([step // STEPS_PER_EPOCH])]
    return [*filter(None, texts)]


class Steps(torch.optim.SGD):
    """An optimizer of the program's own."""

    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.ones(1))])
        self.number = 1.0


def numbers_of(owner: nn.Module | Steps) -> ModuleNumbers:
    models = [TrackedModel("model", owner)] if isinstance(owner, nn.Module) else []
    optimizers = [] if isinstance(owner, nn.Module) else [TrackedOptimizer("optimizer", owner, models)]
    numbers = ModuleNumbers(models, optimizers)
    numbers.begin()
    return numbers


def told(change: Change, *, until: int, module: Callable[[], Any] = Net) -> list[str]:
    """The texts of a life that goes on after this number of steps."""
    first, second = module(), module()
    saving, going_on = numbers_of(first), numbers_of(second)
    assert life(saving, first, change, range(until)) == []
    going_on.restore(saving.moved())
    return life(going_on, second, change, range(until, until + 3))


@pytest.mark.parametrize("change", [decays, counts_micro_batches, decays_to_a_limit])
@pytest.mark.parametrize("until", [STEPS_PER_EPOCH - 1, STEPS_PER_EPOCH + 5, 2 * STEPS_PER_EPOCH])
def test_a_number_that_begins_again_is_told_once(change: Change, until: int) -> None:
    assert [each.split()[0] for each in told(change, until=until)] == ["model.number"]


def test_a_number_in_an_optimizer_that_begins_again_is_told_once() -> None:
    (text,) = told(decays, until=STEPS_PER_EPOCH + 5, module=Steps)
    assert text.startswith("optimizer.number had come to 0.277")
    assert "keep it in param_groups" in text


@pytest.mark.parametrize(
    "change",
    [
        is_set_from_the_step,
        is_the_size_of_the_batch,
        is_drawn,
        counts_up_and_begins_again,
        is_a_switch,
        is_removed,
    ],
)
@pytest.mark.parametrize("until", [FIRST_STEPS + 1, STEPS_PER_EPOCH - 1, STEPS_PER_EPOCH, 3 * STEPS_PER_EPOCH])
def test_a_number_that_is_right_after_a_resume_is_not_told(change: Change, until: int) -> None:
    assert told(change, until=until) == []


def test_a_number_is_told_in_each_life_also_after_a_short_one() -> None:
    first, second, third = Net(), Net(), Net()
    numbers = [numbers_of(each) for each in (first, second, third)]
    life(numbers[0], first, decays, range(12))
    numbers[1].restore(numbers[0].moved())
    assert len(life(numbers[1], second, decays, range(12, 14))) == 1
    numbers[2].restore(numbers[1].moved())
    assert len(life(numbers[2], third, decays, range(14, 16))) == 1


def test_the_number_of_a_batch_in_its_epoch_is_not_told_at_an_epochs_end() -> None:
    def is_of_the_batch(module: Any, step: int) -> None:
        module.number = step % STEPS_PER_EPOCH + 2

    assert told(is_of_the_batch, until=STEPS_PER_EPOCH) == []
    assert told(is_of_the_batch, until=2 * STEPS_PER_EPOCH) == []


def counted(self: Any, _step: int = 0) -> None:
    self._count += 1


def begun(self: Any) -> None:
    nn.Module.__init__(self)
    self._count = 0


def test_what_a_library_counts_for_itself_is_not_told() -> None:
    """As torchmetrics does: the file of its class is in site-packages."""
    library: Any = type("Metric", (nn.Module,), {"__init__": begun, "__module__": pytest.__name__})
    derived: Any = type("Own", (library,), {"__module__": __name__})
    own: Any = type("Own", (nn.Module,), {"__init__": begun, "__module__": __name__})
    found = [told(counted, until=STEPS_PER_EPOCH - 1, module=kind) for kind in (library, derived, own)]
    assert [len(each) for each in found] == [0, 0, 1]


def test_a_module_that_fsdp2_has_sharded_is_looked_at() -> None:
    sharded = type("FSDPNet", (FSDPModule, Net), {"__module__": FSDPModule.__module__})

    def made() -> Any:
        module = Net()
        module.__class__ = sharded
        return module

    assert len(told(decays, until=STEPS_PER_EPOCH - 1, module=made)) == 1


def lives(folder: Path, *, steps: int, **choice: Any) -> Iterator[dict[str, Any]]:
    """Lives of a training. Gives the entry of the last state of each."""
    while True:
        model = Net()
        with ht.Snapshots(folder, every=None, memory_every=None) as snaps:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            snaps.track(model=model, optimizer=optimizer)
            snaps.resume(**choice)
            for _ in range(steps):
                model(torch.ones(4, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                snaps.step()
            snaps.save()
            yield snaps._tracker.numbers.moved()


def test_a_resume_warns_of_a_number_that_has_begun_again(tmp_path: Path) -> None:
    training = lives(tmp_path, steps=FIRST_STEPS + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert next(training)["values"].keys() == {"model.number"}
    with pytest.warns(RuntimeWarning, match=r"model\.number had come to 0\.630249, and is 0\.95 after"):
        next(training)


def test_another_training_begins_its_numbers_anew(tmp_path: Path) -> None:
    training = lives(tmp_path, steps=FIRST_STEPS + 1)
    next(training)
    training.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(lives(tmp_path, steps=1, only=["model"]))
