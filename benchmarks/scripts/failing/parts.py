"""What a case is, and what the ranks do that do not fail."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

PATIENCE_S = 40.0
"""The ranks that nothing is wrong with wait so long for the others."""


@dataclass(frozen=True)
class Case:
    name: str
    body: Callable[[], object] | None
    """What goes wrong. None: `files` has a script of its own."""
    culprits: frozenset[int]
    """Ranks of which any may be named; empty: none may."""
    codes: frozenset[str]
    """Causes that an expert accepts."""
    says: str = ""
    """Words that the cause or the advice must have, so that the reader knows what happened."""
    alone: bool = True
    """Only the first culprit runs the body, and the others wait for it."""
    torch: bool = False
    """The ranks meet in a group of gloo first, and the others wait in a collective."""
    ranks: int = 2
    """Per node."""
    nodes: int = 1
    arguments: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Written into the folder that the job runs in. `train.py` among them takes the place of the script."""
    world: str = ""
    """A command in front of the launcher's, by its name in the row: `small-shm`, `small-memory`."""

    @property
    def uses_torch(self) -> bool:
        """Worth a preload of torch."""
        return self.torch or (self.body is not None and self.body.__module__.rpartition(".")[2].startswith("torch_"))


CASES: dict[str, Case] = {}
Body = Callable[[], object]


def _add(case: Case) -> None:
    assert case.name not in CASES, case.name
    CASES[case.name] = case


def one(culprit: int, codes: str, **more: object) -> Callable[[Body], Body]:
    """The body happens to this rank alone."""

    def add(body: Body) -> Body:
        name = body.__name__.replace("_", "-")
        _add(Case(name, body, frozenset({culprit}), frozenset(codes.split()), **more))  # type: ignore[arg-type]
        return body

    return add


def every(culprits: str, codes: str, **more: object) -> Callable[[Body], Body]:
    """All ranks run the body; any of these may be named."""

    def add(body: Body) -> Body:
        name = body.__name__.replace("_", "-")
        blamed = frozenset(map(int, culprits.split()))
        _add(Case(name, body, blamed, frozenset(codes.split()), alone=False, **more))  # type: ignore[arg-type]
        return body

    return add


def script(name: str, culprits: str, codes: str, **more: object) -> None:
    """A script of the case's own."""
    _add(Case(name, None, frozenset(map(int, culprits.split())), frozenset(codes.split()), **more))  # type: ignore[arg-type]


def play(case: Case) -> None:
    assert case.body is not None
    if case.torch:
        group()
        for _ in range(3):
            meet()
    if not case.alone or rank() in case.culprits:
        case.body()
    elif case.torch:
        keep_meeting()
    else:
        time.sleep(PATIENCE_S)


def rank() -> int:
    return int(os.environ["RANK"])


def group(seconds: float = 60.0) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))


def meet() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(2))


def keep_meeting() -> None:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        meet()
        time.sleep(0.01)
