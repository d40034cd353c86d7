"""What the halves of `saver` say to each other: which states in memory a node gives to others, and where one finds its
own."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from holdfast.protocol.policy import WORKERS_PER_NODE_MAX, Count, Port, Rank


class HeldStates(Struct, frozen=True, array_like=True):
    """States in memory that a node's saver gives to other nodes (train/snapshots/copy_service.py)."""

    host: str
    """The node's addresses, separated by blanks."""
    port: Port
    word: str
    """The word of the life of the job that left them: the saver's key comes from it."""
    folder: str
    """The folder of the snapshots."""
    world: Rank
    """Number of ranks of the job in that life."""
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=2 * WORKERS_PER_NODE_MAX)]
    """Ranks whose states it has: its own, and those of which it has copies."""


class Holds(Struct, frozen=True, array_like=True):
    """A node that has prepared a generation says which states its saver gives. One that gives none says nothing."""

    generation: Count
    states: HeldStates


class StateSources(Struct, frozen=True, array_like=True):
    """A node that has no states of its own gets this before its workers start, and fetches these meanwhile."""

    generation: Count
    states: Annotated[tuple[HeldStates, ...], Meta(max_length=WORKERS_PER_NODE_MAX)] = ()
