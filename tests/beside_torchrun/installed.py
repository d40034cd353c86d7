"""What the installed torchrun lacks of the one whose contract holdfast keeps: torch 2.6 is older than some options.

A line with an option that it does not have is not compared, and the test says so. All else is.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from holdfast.cli.grammar import parse
from holdfast.cli.option_table import OPTIONS
from holdfast.protocol.errors import CallerError
from tests.beside_torchrun.recording import Mode

TORCHRUNS = frozenset(option.dest for option in OPTIONS if not option.ours)
"""Options of torchrun, by the names of their values. Not every torchrun with which we compare has all of them."""
MASTER_PORT = "29500"
"""The port of static jobs that name none, with a torchrun that has a default: two of them cannot run at once."""

READ_FOR = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "shutdown_timeout"}
"""The option that a variable of another name stands for."""


@functools.cache
def actions() -> Mapping[str, object]:
    """The default of each option that the installed torchrun has, by the name of its value."""
    found = importlib.import_module("torch.distributed.run").get_args_parser()._actions
    return {action.dest: action.default for action in found if action.option_strings}


def lacking() -> frozenset[str]:
    """The options, by the names of their values, that torchrun has and the installed one has not."""
    return TORCHRUNS - actions().keys()


def skip_what_it_lacks(mode: Mode, argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Skip a test whose line or variables name an option that the installed torchrun does not have."""
    if mode is Mode.REPLAY:
        return
    try:
        parsed = parse(argv, environ, OPTIONS)
        given = {option.dest for option in OPTIONS if parsed.given(option.dest)}
    except CallerError:  # no line of torchrun's: what looks like an option counts
        spelled = {word.partition("=")[0] for word in argv}
        given = {option.dest for option in OPTIONS if spelled.intersection(option.spellings)}
    given |= {dest for name, dest in READ_FOR.items() if name in environ}
    if both := sorted(lacking() & given):
        torch = importlib.import_module("torch")
        names = ", ".join("--" + name.replace("_", "-") for name in both)
        pytest.skip(f"torchrun of torch {torch.__version__} has no {names}")


def takes_the_default_port(mode: Mode) -> bool:
    """Whether a static job of the installed torchrun that names no port listens at MASTER_PORT."""
    return mode is not Mode.REPLAY and str(actions().get("master_port")) == MASTER_PORT


@contextlib.contextmanager
def alone_at_the_default_port(mode: Mode, folder: Path) -> Iterator[None]:
    """Run no other test's torchrun meanwhile where all of them take the same port. `folder`: of all test processes."""
    if not takes_the_default_port(mode):
        yield
        return
    lock = os.open(folder / "torchrun.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
