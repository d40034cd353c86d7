"""What a script must not do again when it goes on within an epoch: `state.epochs`, `enumerate(loader)`."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast.train as ht

pytestmark = [pytest.mark.xdist_group("torch lives"), pytest.mark.usefixtures("own_staging")]

EPOCHS, BATCHES = 3, 5


class Script:
    """A training of 5 batches per epoch, that may be left and started again."""

    def __init__(self, folder: Path, *, sampler: bool = False, loops: str = "epochs", count: int = EPOCHS) -> None:
        """`loops`: over epochs, or until a number of steps. `count`: the number of epochs."""
        self.count, self.epochs_count = 0, count
        self.folder = folder
        self.sampler = sampler
        self.loops = loops
        self.resumed: Callable[[Script], object] = lambda _: None
        """Code after the resume."""
        self.start: Callable[[Script, int], object] = lambda *_: None
        """Code before the loop over the loader, of this epoch."""
        self.body: Callable[[Script, int, int], object] = lambda *_: None
        """Code in that loop, of this epoch and number in `enumerate`, before the optimizer's step."""
        self.end: Callable[[Script, int], object] = lambda *_: None
        """Code after that loop, of this epoch."""
        self.steps_optimizer: Callable[[Script, int], object] = lambda *_: True

    def run(self, stops: int = 0) -> list[float]:
        """Train until this step. Returns the rates of all steps of this life."""
        rates = []
        model = self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rows = torch.ones(4 * BATCHES, 2)
        if self.sampler:
            data = ht.DistributedSampler(rows, batch_size=4)
            self.loader = torch.utils.data.DataLoader(rows, 4, sampler=data)
        else:
            data = self.loader = ht.DataLoader(rows, 4)
        with ht.Snapshots(self.folder, every=None, memory_every=None) as snaps:
            self.state = snaps.track(model=model, optimizer=self.optimizer, data=data)
            snaps.resume()
            self.resumed(self)
            for epoch in self.epochs():
                self.start(self, epoch)
                for number, batch in enumerate(self.loader):
                    self.body(self, epoch, number)
                    model(batch).sum().backward()
                    rates.append(self.optimizer.param_groups[0]["lr"])
                    if self.steps_optimizer(self, number):
                        self.optimizer.step()
                        self.optimizer.zero_grad()
                    snaps.step()
                    if self.state.step == stops:
                        snaps.save(wait=True)
                        return rates
                self.end(self, epoch)
        return rates

    def epochs(self) -> Iterator[int]:
        if self.loops == "epochs":
            yield from self.state.epochs(self.epochs_count)
        while self.state.step < self.epochs_count * BATCHES:
            yield self.state.step // BATCHES

    def set_rate(self, rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = rate


def decay(script: Script, epoch: int) -> None:
    if epoch:
        script.set_rate(script.optimizer.param_groups[0]["lr"] * 0.1)


@pytest.mark.parametrize("sampler", [False, True], ids=["loader", "sampler"])
def test_a_rate_that_an_epochs_start_changes_again_is_told(tmp_path: Path, sampler: bool) -> None:
    script = Script(tmp_path, sampler=sampler)
    script.start = decay
    script.run(7)
    with pytest.warns(RuntimeWarning, match=r"epoch 1 goes on .* 'lr' of an optimizer from 0\.1 to 0\.01") as told:
        script.run()
    assert len(told) == 1
    assert told[0].filename == __file__


def by_epoch(script: Script, epoch: int) -> None:
    script.set_rate(0.1**epoch)


def by_step(script: Script, epoch: int, number: int) -> None:
    script.set_rate(1 / (script.state.step + 2))


@pytest.mark.parametrize("stops", [5, 7])
@pytest.mark.parametrize(
    ("start", "body"),
    [
        (by_epoch, None),
        (None, by_step),
        (by_epoch, by_step),
        (lambda script, epoch: decay(script, epoch) if script.loader.cursor == 0 else None, None),
    ],
    ids=["by the epoch", "in each step", "both", "guarded"],
)
def test_rates_that_come_out_the_same_are_not_told_of(tmp_path: Path, stops: int, start, body) -> None:  # type: ignore[no-untyped-def]
    script, undisturbed = Script(tmp_path / "a"), Script(tmp_path / "b")
    for each in (script, undisturbed):
        each.start, each.body = start or each.start, body or each.body
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert script.run(stops) + script.run() == undisturbed.run()


@pytest.mark.parametrize("power", [1, 0.5])
def test_a_rate_that_follows_the_number_of_ranks_is_not_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, power: float
) -> None:
    world = 1
    monkeypatch.setattr("holdfast.train.state.rank_and_world", lambda _: (0, world))
    script = Script(tmp_path)
    script.start = lambda each, epoch: each.set_rate(world**power * 0.1**epoch)
    script.run(7)
    world = 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.run(9)
    script.start = decay
    world = 2
    with pytest.warns(RuntimeWarning, match=r"'lr' of an optimizer from"):
        script.run()


def test_gradients_that_a_resumed_epoch_leaves_are_told_of(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.steps_optimizer = lambda each, number: (number + 1) % 2 == 0 or number + 1 == len(each.loader)
    script.run(2)
    with pytest.warns(RuntimeWarning, match=r"epoch 0 went on .* loader\.batch_number") as told:
        script.run()
    assert len(told) == 1


@pytest.mark.parametrize("stops", [5, 7], ids=["none is left", "within the epoch"])
def test_a_mean_over_the_rest_of_an_epoch_is_told_of(tmp_path: Path, stops: int) -> None:
    script = Script(tmp_path)
    script.end = lambda each, _: len(each.loader)
    script.run(stops)
    with pytest.warns(RuntimeWarning, match=r"code after its loop has asked for len\(loader\)") as told:
        script.run()
    assert len(told) == 1


def test_a_length_that_is_asked_for_elsewhere_is_not_told_of(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.start = lambda each, _: len(each.loader)
    script.body = lambda each, *_: len(each.loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.run(7)
        script.run(9)
        script.end = lambda each, epoch: epoch == 2 and len(each.loader)  # that epoch is a whole one
        script.run()


@pytest.mark.parametrize("sampler", [False, True], ids=["loader", "sampler"])
def test_code_before_a_loop_that_runs_again_leaves_random_numbers_alone(tmp_path: Path, *, sampler: bool) -> None:
    drawn: dict[int, tuple[float, float, float]] = {}

    def draw(script: Script, *_: int) -> None:
        numbers = torch.rand(()).item(), random.random(), float(np.random.random())
        assert drawn.setdefault(script.state.step, numbers) == numbers

    def seed(_: Script, epoch: int) -> None:
        torch.manual_seed(epoch)
        np.random.seed(epoch)
        random.random()

    script, undisturbed = Script(tmp_path / "a", sampler=sampler), Script(tmp_path / "b", sampler=sampler)
    for each in (undisturbed, script):
        each.body, each.start = draw, seed
    state = random.getstate()
    undisturbed.run()
    random.setstate(state)
    script.run(7)
    script.run()
    assert len(drawn) == EPOCHS * BATCHES


@pytest.mark.parametrize("stops", [1, 2, -2, 3, 4])
def test_code_between_two_loops_of_an_epoch_may_draw_and_change_weights(tmp_path: Path, stops: int) -> None:
    """If the state is from the end of the first loop, that code has not run yet. -2: it is saved after that loop."""

    def life(folder: Path, steps: int) -> dict[int, float]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, second = ht.DataLoader(torch.ones(8, 2), 4), ht.DataLoader(torch.ones(8, 2), 4)
        drawn = {}
        with ht.Snapshots(folder, every=None) as snaps:
            state = snaps.track(model=model, optimizer=optimizer, first=first, second=second)
            if snaps.resume() is None:
                torch.manual_seed(7)
            for _ in state.epochs(2):
                for loader in (first, second):
                    for batch in loader:
                        model(batch).sum().backward()
                        drawn[state.step] = torch.rand(()).item()
                        optimizer.step()
                        optimizer.zero_grad()
                        snaps.step()
                        if state.step == steps:
                            snaps.save(wait=True)
                            return drawn
                    if loader is first and state.step == -steps:
                        snaps.save(wait=True)
                        return drawn
                    if loader is first and second.cursor == 0:
                        torch.rand(3)
                        with torch.no_grad():
                            model.weight.add_(1)
        return drawn

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        undisturbed = life(tmp_path / "a", 0)
        assert life(tmp_path / "b", stops) | life(tmp_path / "b", 0) == undisturbed


def counts_steps(script: Script, *_: int) -> None:
    script.count += 1


@pytest.mark.parametrize("loops", ["epochs", "steps"])
@pytest.mark.parametrize("stops", [7, 10])
def test_a_count_of_steps_that_begins_again_is_told_of(tmp_path: Path, stops: int, loops: str) -> None:
    script, script_again = Script(tmp_path, loops=loops, count=6), Script(tmp_path, loops=loops, count=6)
    script.body = script_again.body = counts_steps
    script.run(stops)
    with pytest.warns(RuntimeWarning, match=r"'self\.count' counts the steps since the resume") as told:
        script_again.run()
    assert len(told) == 1
    assert told[0].filename == __file__


def counts_all(script: Script, *_: int) -> None:
    script.count = script.state.step + 1


def counts_in_the_epoch(script: Script, _epoch: int, number: int) -> None:
    script.count = number + 1


@pytest.mark.parametrize("body", [counts_all, counts_in_the_epoch])
@pytest.mark.parametrize("stops", [1, 4, 5, 7, 9])
def test_a_count_that_goes_on_or_is_that_of_the_batch_is_not_told_of(tmp_path: Path, body: Any, stops: int) -> None:
    script, script_again = Script(tmp_path, count=6), Script(tmp_path, count=6)
    script.body = script_again.body = body
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.run(stops)
        script_again.run()


def test_a_constant_that_is_near_the_count_is_not_told_of(tmp_path: Path) -> None:
    """One step in which they are equal is among those that are looked at."""
    script, script_again = Script(tmp_path, count=6), Script(tmp_path, count=6)
    script.run(7)
    script_again.resumed = lambda script: vars(script).update({f"constant_{each}": each for each in range(5, 25)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script_again.run()


# --- weights that a resume has restored -------------------------------------------------------------------------------


def load_checkpoint(script: Script, *_: int) -> None:
    with torch.no_grad():
        script.model.weight.fill_(3.0)


@pytest.mark.parametrize("sampler", [False, True], ids=["loader", "sampler"])
@pytest.mark.parametrize("place", ["resumed", "start"])
@pytest.mark.parametrize("loops", ["epochs", "steps"])
def test_weights_that_code_after_the_resume_sets_again_are_told_of(
    tmp_path: Path, place: str, loops: str, *, sampler: bool
) -> None:
    script = Script(tmp_path, sampler=sampler, loops=loops)
    script.run(7)
    setattr(script, place, load_checkpoint)
    with pytest.warns(RuntimeWarning, match=r"code after resume\(\) has changed the weights of model ") as told:
        script.run()
    assert len(told) == 1
    assert told[0].filename == __file__


def test_weights_that_are_set_after_a_resume_at_an_epochs_end_are_told_of(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.run(5)
    script.resumed = load_checkpoint
    with pytest.warns(RuntimeWarning, match=r"code after resume\(\) has changed the weights of model ") as told:
        script.run()
    assert len(told) == 1


@pytest.mark.parametrize("stops", [5, 7])
def test_weights_that_belong_to_an_epochs_end_are_not_told_of(tmp_path: Path, stops: int) -> None:
    """A resume from a state before that code runs it, and the start of the next epoch may change weights, too."""
    script = Script(tmp_path)
    script.end = load_checkpoint
    script.start = lambda each, epoch: load_checkpoint(each) if epoch == 2 else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.run(stops)
        script.run()


def test_the_number_of_a_batch_goes_on_after_a_resume(tmp_path: Path) -> None:
    numbers: list[int] = []
    script = Script(tmp_path)

    def is_due(each: Script, _: int) -> bool:
        assert isinstance(each.loader, ht.DataLoader)
        numbers.append(each.loader.batch_number)
        return numbers[-1] % 2 == 1 or numbers[-1] + 1 == len(each.loader)

    script.steps_optimizer = is_due
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.run(2)
        script.run(9)
        script.run()
    assert numbers == [*range(BATCHES)] * 3


def test_a_chained_schedule_is_tracked_and_its_second_step_told_of(tmp_path: Path) -> None:
    """torch's ChainedScheduler has no count of its own."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parts = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), torch.optim.lr_scheduler.ConstantLR(optimizer)]
    schedule = torch.optim.lr_scheduler.ChainedScheduler(parts)
    loader = ht.DataLoader(torch.ones(4, 2), 4)
    with ht.Snapshots(tmp_path, every=None, memory_every=None) as snaps:
        for _ in snaps.track(model=model, optimizer=optimizer, schedule=schedule, loader=loader).epochs(1):
            for batch in loader:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                snaps.step()
            snaps.save()
            schedule.step()
            with pytest.warns(RuntimeWarning, match=r"after schedule has stepped"):
                snaps.save(wait=True)


def test_the_length_of_torchs_loader_is_that_of_the_pass(tmp_path: Path) -> None:
    lengths: list[int] = []
    script = Script(tmp_path, sampler=True)
    script.body = lambda each, epoch, number: lengths.append(len(each.loader))
    script.run(2)
    assert len(script.loader) == 5
    script.run(12)
    assert lengths == [5] * 2 + [3] * 3 + [5] * 7


class Range(Script):
    """The same with another loop over the epochs."""

    epochs: Callable[[Range], Iterable[int]]
    keeps_resumed = False
    others: dict[str, Any] = {}

    def run(self, stops: int = 0) -> list[float]:
        rates: list[float] = []
        model = self.model = nn.Linear(2, 1)
        optimizer = self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rows = torch.ones(4 * BATCHES, 2)
        data: Any = ht.DistributedSampler(rows, batch_size=4) if self.sampler else ht.DataLoader(rows, 4)
        self.loader = torch.utils.data.DataLoader(rows, 4, sampler=data) if self.sampler else data
        self.data = data
        with ht.Snapshots(self.folder, every=None, memory_every=None) as snaps:
            self.state = snaps.track(model=model, optimizer=optimizer, data=data, **self.others)
            if self.keeps_resumed:
                self.resumed = snaps.resume()
            else:
                snaps.resume()
            for epoch in self.epochs(self):
                self.start(self, epoch)
                for _ in self.loader:
                    optimizer.step()
                    rates.append(optimizer.param_groups[0]["lr"])
                    snaps.step()
                    if len(rates) == stops:
                        snaps.save(wait=True)
                        return rates
        return rates


@pytest.mark.parametrize("sampler", [False, True], ids=["loader", "sampler"])
@pytest.mark.parametrize("epochs", [lambda _: range(3), lambda script: range(script.state.epoch, 3)])
def test_a_loop_that_begins_to_count_its_epochs_again_is_told(
    tmp_path: Path, epochs: Callable[[Range], Iterable[int]], sampler: bool
) -> None:
    script = Range(tmp_path, sampler=sampler)
    script.epochs = epochs
    script.run(7)
    with pytest.warns(RuntimeWarning, match=r"goes on in epoch 1 .* `for epoch in range\(n\)` trains n more") as told:
        assert len(script.run()) == 3 * BATCHES - 2
    assert len(told) == 1
    assert told[0].filename == __file__


class Progress:
    """An object of the script's own, which counts the epochs."""

    epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


ASKS: dict[str, Callable[[Range], Iterable[int]]] = {
    "epochs": lambda script: script.state.epochs(3),
    "state.step": lambda script: takewhile(lambda _: script.state.step < 15, count()),
    "loader.epoch": lambda script: range(script.data.epoch, 3),
    "first epoch": lambda script: range(3),
    "an object of its own": lambda script: range(script.others["own"].epoch, 3),
    "set_epoch": lambda script: range(3),
    "what resume() returns": lambda script: range(script.resumed is not None, 3),
}


@pytest.mark.parametrize("how", ASKS)
def test_a_loop_that_knows_where_it_goes_on_is_not_told(tmp_path: Path, how: str) -> None:
    script = Range(tmp_path)
    script.epochs, script.keeps_resumed = ASKS[how], how.startswith("what")
    if how == "set_epoch":
        script.start = lambda script, epoch: script.loader.set_epoch(epoch)
    if how.startswith("an object"):
        script.others = {"own": Progress()}
    before = 3 if how == "first epoch" else 7
    script.run(before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(script.run()) == 3 * BATCHES - before


class Phases(Range):
    """One epoch, half the rate, two more epochs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.changes: Callable[[Phases], bool] = lambda _: True
        self.change: Callable[[], object] = self.halve

    def halve(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def begin_again(self) -> None:
        self.model.reset_parameters()

    def phases(self) -> Iterable[int]:
        yield from self.state.epochs(1)
        if self.changes(self):
            self.change()
        yield from self.state.epochs(EPOCHS)


@pytest.mark.parametrize("before", [7, 13])
def test_a_rate_that_is_changed_again_between_two_loops_is_told(tmp_path: Path, before: int) -> None:
    script = Phases(tmp_path)
    script.epochs = Phases.phases
    script.run(before)
    with pytest.warns(RuntimeWarning, match=r"code before its loop has changed 'lr' of .* from 0\.5 to 0\.25") as told:
        assert set(script.run()) == {0.25}
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.parametrize("before", [7, 10])
def test_weights_that_are_made_again_between_two_loops_are_told(tmp_path: Path, before: int) -> None:
    script = Phases(tmp_path)
    script.epochs, script.change = Phases.phases, script.begin_again
    script.run(before)
    with pytest.warns(RuntimeWarning, match="code between two loops over epochs has changed the weights") as told:
        script.run()
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.parametrize("before", [3, 5, 7, 13])
def test_a_rate_that_is_changed_once_between_two_loops_is_not_told(tmp_path: Path, before: int) -> None:
    script = Phases(tmp_path)
    script.epochs = Phases.phases
    script.changes = lambda script: script.state.epoch == 1 and script.loader.cursor == 0
    first = script.run(before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first + script.run() == [1.0] * BATCHES + [0.5] * 2 * BATCHES
