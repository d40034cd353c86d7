"""Small agreements among the ranks of a job, over the process group's store.

Every call is made by the main thread of every rank, in the same order, and rank 0 is the one that hears all and tells
all. No collective of the process group is used, so that nothing here depends on a device or a backend, and nothing that
comes over the network is unpickled. A process without a group is a world of one.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from holdfast.core.errors import SnapshotIncompleteError
from holdfast.linux import boot_id
from holdfast.train.guards import GuardWarning, enabled

PATIENCE_S = 600.0
"""So long the ranks wait for each other: the slowest one may be reading a data set."""

RANK_0_FIRST_S = 5.0
"""So much longer the others wait for rank 0, which may have been waiting for one of them, and then says for whom."""
SILENT = "silent"
"""Key under which it does."""
GUARD_S = 5.0
"""A rank that has waited so long in a named call warns which ranks are missing; other ranks than 0 wait twice as long."""
MEETING_GUARD_S = 30.0
"""As GUARD_S, when the ranks meet: before that one of them may have had a data set to prepare."""
LOOK_AGAIN_S = 0.005
"""While ranks meet."""

_numbers = itertools.count()
"""One for each object: all ranks make theirs in the same order, as they do process groups."""


class Peers:
    """The ranks of this job, and what they say to each other."""

    def __init__(self, rank: int, world: int, store: Any = None, patience_s: float = PATIENCE_S) -> None:
        """`store`: torch's, with a prefix of its own; None only in a world of one."""
        self.rank, self.world = rank, world
        self._store = store
        self._patience_s = patience_s
        self._turn = 0
        self._told: list[str] = []
        self._call, self._guard_s = "", GUARD_S

    @property
    def store(self) -> Any:
        """torch's, with a prefix that nobody before these ranks has used."""
        return self._store

    @classmethod
    def of_this_process(cls, patience_s: float = PATIENCE_S) -> Peers:
        """Those of the default process group; a world of one when there is none."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(0, 1, None, patience_s)
        store = dist.PrefixStore(f"holdfast.snapshots/{next(_numbers)}", dist.distributed_c10d._get_default_store())
        return cls.meeting(store, dist.get_rank(), dist.get_world_size(), patience_s)

    @classmethod
    def meeting(cls, store: Any, rank: int, world: int, patience_s: float = PATIENCE_S) -> Peers:
        """Ranks that meet in this store, under a prefix that no earlier life of the job has used.

        torchrun keeps one store over its restarts; what the dead have said in it would be taken for answers. So each rank
        greets with a word of its own and waits for an answer to that word: the prefix, which is rank 0's word.
        """
        word = os.urandom(8).hex()
        peers = cls(rank, world, store, patience_s)
        with peers.calling("ht.Snapshots (its resume(), or its first step())", MEETING_GUARD_S):
            if rank:
                store.set(f"hello/{rank}", word)
                word = peers._take([word])[0].decode()
                store.set(f"{word}/{rank}", "here")
            else:
                peers._greet(word)
        peers._store = dist.PrefixStore(word, store)
        return peers

    def _greet(self, word: str) -> None:
        """Rank 0: answer every hello, also one that replaces a dead process's, until all are here."""
        hellos = [f"hello/{rank}" for rank in range(1, self.world)]
        here = [f"{word}/{rank}" for rank in range(1, self.world)]
        answered: set[str] = set()
        begun_s = time.monotonic()
        warn_s, deadline_s = begun_s + self._guard_s, begun_s + self._patience_s
        while not self._store.check(here):
            said = {each.decode() for each in self._take(hellos)}
            for each in said - answered:
                self._store.set(each, word)
            answered |= said
            if time.monotonic() > deadline_s:
                raise self._silence(here)
            if time.monotonic() > warn_s:
                self._warn(here, self._guard_s)
                warn_s = deadline_s
            time.sleep(LOOK_AGAIN_S)  # a store tells that there is a value, not that there is another one
        for each in (*hellos, *here, *answered):
            self._store.delete_key(each)

    def gather(self, value: Any) -> list[Any]:
        """What every rank said, by rank: at rank 0; elsewhere an empty list, at once."""
        if self._store is None:
            return [value]
        self._turn += 1
        key = f"{self._turn}/"
        if self.rank:
            self._store.set(f"{key}{self.rank}", json.dumps(value))
            return []
        keys = [f"{key}{rank}" for rank in range(1, self.world)]
        texts = self._take(keys)
        for each in (*keys, *self._told):
            self._store.delete_key(each)  # whoever has spoken now has read what it was told before
        self._told.clear()
        return [value, *map(json.loads, texts)]

    def tell(self, value: Any = None) -> Any:
        """What rank 0 says, at every rank; the others' `value` is ignored."""
        if self._store is None:
            return value
        self._turn += 1
        key = f"{self._turn}!"
        if self.rank:
            return json.loads(self._take([key])[0])
        self._store.set(key, json.dumps(value))
        self._told.append(key)
        return value

    def tell_each(self, values: list[Any]) -> Any:
        """What rank 0 says to each rank: the element at its place."""
        if self._store is None:
            return values[0]
        self._turn += 1
        if self.rank:
            key = f"{self._turn}!{self.rank}"
            return json.loads(self._take([key])[0])
        for rank in range(1, self.world):
            self._store.set(f"{self._turn}!{rank}", json.dumps(values[rank]))
            self._told.append(f"{self._turn}!{rank}")
        return values[0]

    def share(self, value: Any) -> list[Any]:
        """What every rank said, by rank, at every rank."""
        said: list[Any] = self.tell(self.gather(value))
        return said

    @contextlib.contextmanager
    def calling(self, call: str, guard_s: float | None = None) -> Iterator[None]:
        """What is said meanwhile belongs to this call of the script: a rank that waits in it for long warns."""
        self._call, self._guard_s = call, GUARD_S if guard_s is None else guard_s
        try:
            yield
        finally:
            self._call = ""

    def _take(self, keys: list[str]) -> list[bytes]:
        patience_s = self._patience_s + (RANK_0_FIRST_S if self.rank else 0.0)
        guard_s = 2 * self._guard_s if self.rank else self._guard_s
        if self._call and guard_s < patience_s and not self._is_there(keys, guard_s):
            self._warn(keys, guard_s)
            patience_s -= guard_s
        if not self._is_there(keys, patience_s):
            raise self._silence(keys)
        texts: list[bytes] = self._store.multi_get(keys)
        return texts

    def _warn(self, keys: list[str], waited_s: float) -> None:
        if enabled():
            warnings.warn(
                f"holdfast: rank {self.rank} has waited {waited_s:g} s in {self._call} for rank {self._missing(keys)}, and waits on.\n"
                "Every rank has to make this call: take it out of `if rank == 0:`, the ranks do it together.",
                GuardWarning,
                stacklevel=3,
            )

    def _is_there(self, keys: list[str], patience_s: float) -> bool:
        try:
            self._store.wait(keys, datetime.timedelta(seconds=patience_s))
        except dist.DistStoreError:
            return False
        return True

    def _missing(self, keys: list[str]) -> str:
        missing = [key.rpartition("/")[2] for key in keys if not self._store.check([key])]
        return ", ".join(missing[:8]) + (" …" if len(missing) > 8 else "") if self.rank == 0 else "0"

    def _silence(self, keys: list[str]) -> SnapshotIncompleteError:
        who = self._missing(keys)
        if self.rank == 0:
            self._store.set(SILENT, who)
        elif self._store.check([SILENT]):
            who = self._store.get(SILENT).decode()
        return SnapshotIncompleteError(
            f"rank {who} said nothing for {self._patience_s:g} s\n"
            "every rank has to call resume(), step() and save() equally often"
        )


def node_key() -> str:
    """Equal for processes that see the same /dev/shm."""
    boot = boot_id()
    try:
        place = os.stat("/dev/shm")
    except OSError:
        return f"{boot}:{os.getpid()}"
    return f"{boot}:{place.st_dev}:{place.st_ino}"
