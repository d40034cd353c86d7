"""The agreement of ranks on one node on each step: who enters the optimizer, whoever is lost, and whenever."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.train import step_agreement
from holdfast.train.step_agreement import StepAgreement, StepEntry
from tests.support.limits import limit_s, until

WORLD = 3


class World:
    """Ranks with a file in common, each in a thread."""

    def __init__(self, folder: Path, world: int = WORLD) -> None:
        folder.chmod(0o700)
        self.lost = threading.Event()
        self._threads = ThreadPoolExecutor(world)
        self.ranks = [StepAgreement(str(folder / "steps"), rank, world) for rank in range(world)]

    def enters(self, rank: int, step: int, is_cut: Callable[[], bool] | None = None) -> Future[StepEntry]:
        return self._threads.submit(self.ranks[rank].enters, step, is_cut or self.lost.is_set)

    def announced(self, rank: int, step: int) -> None:
        until(lambda: self.ranks[0]._words[step_agreement.FIRST_RANK + rank] == step, f"rank {rank} announces it")

    def close(self) -> None:
        for each in self.ranks:
            each.end(lost=True)
        self._threads.shutdown()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    # The ranks are threads here, which the locks of processes do not keep apart.
    monkeypatch.setattr(step_agreement, "lock_file", fcntl.flock)
    with contextlib.closing(World(tmp_path)) as made:
        yield made


def results(*entering: Future[StepEntry]) -> list[StepEntry]:
    return [each.result(limit_s(30)) for each in entering]


def test_all_enter_when_all_have_come(world: World) -> None:
    for step in (1, 2, 7):
        assert results(*(world.enters(rank, step) for rank in range(WORLD))) == [StepEntry.DONE] * WORLD


def test_none_enters_if_a_rank_is_lost_before_it_has_come(world: World) -> None:
    early = world.enters(0, 1)
    world.announced(0, 1)
    world.lost.set()
    assert results(early) == [StepEntry.LEFT]
    # Rank 1 has not heard of the loss yet; rank 2 comes after it.
    later = world.enters(1, 1), world.enters(2, 1)
    assert results(*later) == [StepEntry.LEFT] * 2


def test_all_enter_if_a_rank_is_lost_that_had_come(world: World) -> None:
    """The file outlives it."""
    words = world.ranks[0]._words
    words[step_agreement.FIRST_RANK + 2] = 1  # it was killed in its wait
    assert results(world.enters(0, 1), world.enters(1, 1)) == [StepEntry.DONE] * 2


def test_a_decision_counts_for_one_that_learns_of_the_loss_first(world: World) -> None:
    """The last rank decides while another one is about to leave."""

    def the_others_come() -> bool:
        for rank in (1, 2):
            world.enters(rank, 1, lambda: False)
            world.announced(rank, 1)
        return True

    assert results(world.enters(0, 1, the_others_come)) == [StepEntry.DONE]


def test_a_rank_that_never_comes_ends_the_agreement(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program whose ranks step at different calls: it must not hang."""
    monkeypatch.setattr(step_agreement, "SILENCE_S", 0.05)
    assert results(world.enters(0, 1), world.enters(1, 1)) == [StepEntry.UNKNOWN] * 2
    assert results(world.enters(2, 1)) == [StepEntry.UNKNOWN]


def test_a_rank_whose_training_is_over_holds_nobody_up(world: World) -> None:
    world.ranks.pop().end(lost=False)
    assert results(world.enters(0, 1), world.enters(1, 1)) == [StepEntry.UNKNOWN] * 2


def test_a_rank_killed_with_the_lock_holds_nobody_up(world: World) -> None:
    pid = os.fork()
    if pid == 0:
        own = StepAgreement(world.ranks[0]._path, 2, WORLD)
        with own._locked():
            own._words[step_agreement.FIRST_RANK + 2] = 1
            signal.pause()
    world.announced(2, 1)
    waiting = world.enters(0, 1), world.enters(1, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert results(*waiting) == [StepEntry.DONE] * 2


def test_a_lock_does_not_outlive_its_rank_in_a_process_that_the_rank_has_forked(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    own = StepAgreement(str(tmp_path / "steps"), 0, 2)
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        with StepAgreement(str(tmp_path / "steps"), 1, 2)._locked():
            if child := os.fork():
                os.write(told, str(child).encode())
            signal.pause()
    child = int(os.read(heard, 32))
    try:
        with pytest.raises(BlockingIOError):
            step_agreement.lock_file(own._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        step_agreement.lock_file(own._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
    own.end(lost=True)
    os.close(heard)
    os.close(told)
