"""What ranks say to each other over a store, also one in which the dead have left what they said."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.core.errors import SnapshotIncompleteError
from holdfast.train.agreement import Peers
from tests.support.limits import limit_s

WORLD = 3


def together(store: Any, talk: Callable[[Peers], Any], patience_s: float = 120.0) -> list[Any]:
    """Every rank in a thread of its own."""
    with ThreadPoolExecutor(WORLD) as pool:
        said = [pool.submit(lambda rank: talk(Peers.meeting(store, rank, WORLD, patience_s)), r) for r in range(WORLD)]
        return [each.result() for each in said]


def greet(word: str, peers: Peers) -> list[Any]:
    return peers.share(f"{word} {peers.rank}")


def test_everybody_hears_everybody() -> None:
    def talk(peers: Peers) -> list[Any]:
        return [peers.share(peers.rank), peers.tell(peers.rank), peers.tell_each([7, 8, 9]), peers.gather("x")]

    everyone = [[0, 1, 2], 0]
    store = dist.HashStore()
    for _ in range(2):  # another life: torchrun keeps the store
        assert together(store, talk) == [[*everyone, 7, ["x"] * 3], [*everyone, 8, []], [*everyone, 9, []]]


def test_what_the_dead_have_said_is_nobody_s_answer() -> None:
    """They died while they met, and in the middle of their talk."""
    store = dist.HashStore()
    for rank in range(1, WORLD):
        store.set(f"hello/{rank}", "dead")
        store.set(f"1/{rank}", '"dead"')
    store.set("dead", "prefix")
    for turn in range(1, 5):
        store.set(f"{turn}!", '"dead"')
        store.set(f"prefix/{turn}!", '"dead"')
    together(store, lambda peers: peers.rank or peers.tell("left unread"))
    for word in ("one", "two"):
        assert together(store, partial(greet, word)) == [[f"{word} {rank}" for rank in range(WORLD)]] * WORLD


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set("hello/1", "dead")
    with pytest.raises(SnapshotIncompleteError, match=r"rank 1 said nothing for 0\.2 s"):
        Peers.meeting(store, 0, 2, 0.2)


@pytest.mark.usefixtures("little_patience")
def test_everybody_is_told_who_is_silent() -> None:
    """A rank that hangs is named on the others, too, though these have waited for rank 0 alone."""

    def talk(peers: Peers) -> Any:
        if peers.rank == 2:
            return "hangs"
        with pytest.raises(SnapshotIncompleteError, match="rank 2 said nothing") as told:
            peers.share("x")
        return str(told.value)

    assert together(dist.HashStore(), talk, limit_s(0.1))[2] == "hangs"
    with pytest.raises(SnapshotIncompleteError, match="rank 0 said nothing"):
        Peers.meeting(dist.HashStore(), 1, 2, 0.2)


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.train.agreement.RANK_0_FIRST_S", limit_s(0.2))
