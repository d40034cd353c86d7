"""This process's rank and world: the process group's, else the launcher's, else 0 of 1."""

from __future__ import annotations

import os

from torch import distributed

from holdfast.core.errors import DataError


def place(rank: int | None, world: int | None) -> tuple[int, int]:
    """(rank, world); what is given explicitly wins: with tensor parallelism, the rank among the data-parallel groups.

    Raises DataError when only one of them is given, or they do not go together.
    """
    if (rank is None) != (world is None):
        raise DataError("rank= and world= are given together or not at all.")
    if rank is None or world is None:
        rank, world = _found()
    if not 0 <= rank < world:
        raise DataError(f"There is no rank {rank} in a world of {world}.")
    return rank, world


def _found() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if not rank or not world:
        return 0, 1
    try:
        return int(rank), int(world)
    except ValueError:
        raise DataError(f"RANK={rank!r} and WORLD_SIZE={world!r} are not numbers.") from None
