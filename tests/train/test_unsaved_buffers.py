"""Buffers with persistent=False that training changes are named; tables, masks and caches are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.train.unsaved_buffers import UnsavedBuffers


class Cached(nn.Module):
    def __init__(self, **buffers: Any) -> None:
        super().__init__()
        for name, each in buffers.items():
            self.register_buffer(name, each, persistent=name == "saved")


def scaled(module: Any) -> None:
    module.scale.mul_(1.1)


def replaced(module: Any) -> None:
    module.scale = module.scale + 1


def filled(module: Any) -> None:
    module.cache = torch.ones(2) if module.cache is None else module.cache


def grown(module: Any) -> None:
    module.cache = torch.ones(1 if module.cache is None else len(module.cache) + 1)


def counted(module: Any) -> None:
    module.saved.add_(1)


@pytest.mark.parametrize(
    ("step", "changed"),
    [
        (scaled, ["model.0.scale [2]"]),
        (replaced, ["model.0.scale [2]"]),
        (filled, []),
        (grown, []),
        (counted, []),
    ],
)
def test_what_changes_from_step_to_step_is_named(step: Callable[[Any], None], changed: list[str]) -> None:
    module = Cached(scale=torch.ones(2), cache=None, saved=torch.zeros(1))
    unsaved = UnsavedBuffers([("model", nn.Sequential(module))])
    assert unsaved.any
    step(module)
    assert unsaved.at_step() is None
    step(module)
    assert unsaved.at_step() == changed


def test_a_model_whose_states_have_all_its_buffers_is_not_read() -> None:
    assert not UnsavedBuffers([("model", nn.BatchNorm1d(3))]).any
