"""What the last save found is used again only while it holds: whatever changes, a tracker says what a new one would say."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn

from holdfast.train.state import Collected, Tracker

EDITS = 60


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Training:
    """A model and an optimizer to which anything may happen."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [{"params": [each]} for each in self.model.parameters()], lr=0.1
        )
        self.tracker = self.track()

    def track(self) -> Tracker:
        tracker = Tracker()
        tracker.add({"model": self.model, "optimizer": self.optimizer})
        return tracker

    @property
    def parameter(self) -> nn.Parameter:
        return random.choice([each for group in self.optimizer.param_groups for each in group["params"]])

    @property
    def held(self) -> dict[str, object]:
        return self.optimizer.state[self.parameter]

    def step(self) -> None:
        self.model(torch.ones(2, 2)).sum().backward()
        for parameter, held in list(self.optimizer.state.items()):
            if "step" not in held:
                del self.optimizer.state[parameter]
        self.optimizer.step()

    def set_rate(self) -> None:
        random.choice(self.optimizer.param_groups)["lr"] = random.random()

    def set_rate_as_tensor(self) -> None:
        random.choice(self.optimizer.param_groups)["lr"] = torch.tensor(random.random())

    def forget(self) -> None:
        self.optimizer.state.pop(self.parameter, None)

    def hold_more(self) -> None:
        self.held[random.choice("ab")] = random.choice([1, 2.5, None, "text", torch.ones(2)])

    def hold_a_list(self) -> None:
        self.held["list"] = [0]

    def change_the_list(self) -> None:
        for held in self.optimizer.state.values():
            held.get("list", []).append(torch.ones(1))

    def hold_less(self) -> None:
        self.held.pop(random.choice(["a", "b", "list"]), None)

    def replace_a_moment(self) -> None:
        parameter = self.parameter
        self.optimizer.state[parameter]["exp_avg"] = torch.zeros(parameter.shape)

    def change_places(self) -> None:
        one, other = random.choices(self.optimizer.param_groups, k=2)
        one["params"], other["params"] = other["params"], one["params"]

    def move_between_groups(self) -> None:
        groups = self.optimizer.param_groups
        number = random.randrange(1, len(groups))
        if groups[number]["params"]:
            groups[number - 1]["params"].append(groups[number]["params"].pop(0))

    def add_a_buffer(self) -> None:
        self.model.register_buffer(random.choice("xyz"), torch.ones(1))

    def replace_a_buffer(self) -> None:
        self.model[1].running_mean = torch.ones(3)

    def tie(self) -> None:
        self.model[1].running_var = self.model[1].running_mean


def content(collected: Collected) -> tuple[list[tuple[str, int]], list[str], bytes]:
    return (
        [(name, id(tensor)) for name, tensor in collected.shared.items()],
        [f"{name} {tensor.tolist()}" for name, tensor in collected.own.items()],
        collected.text,
    )


def test_whatever_happens_between_two_saves() -> None:
    random.seed(7)
    training = Training()
    edits: list[Callable[[], None]] = [
        getattr(training, name) for name in vars(Training) if name[0] != "_" and callable(vars(Training)[name])
    ]
    edits.remove(training.track)
    assert len(edits) == 14
    for _ in range(EDITS):
        edit = random.choice(edits)
        edit()
        for _ in range(2):
            assert content(training.tracker.collect(0, 1)) == content(training.track().collect(0, 1)), edit


def test_nothing_is_taken_apart_twice_without_a_change() -> None:
    training = Training()
    training.step()
    one, other = training.tracker.collect(0, 1), training.tracker.collect(0, 1)
    training.set_rate()
    training.step()  # its tensors are changed in place
    later = training.tracker.collect(0, 1)
    assert one.shared is other.shared is later.shared
    assert one.text == other.text != later.text
