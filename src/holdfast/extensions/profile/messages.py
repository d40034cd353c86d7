"""The messages between the halves of `profile`, the subject of the question, and its answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from msgspec import Meta, Struct

from holdfast.protocol.errors import UsageError
from holdfast.protocol.policy import WORKERS_PER_NODE_MAX, Count, LocalRank, Rank, Seconds

RANKS_MAX = 64
STEPS_MAX = 1000
SECONDS_MAX = 300.0
"""Limits of the numbers that a user may name."""
TAKEN_S_MAX = 600.0
"""Limit for a profile to end (s); then it is given up."""
COLLECTED_S_MAX = TAKEN_S_MAX + 40.0
"""Time for which the coordinator waits for the nodes (s)."""
ASKED_S_MAX = TAKEN_S_MAX + 60.0
"""Time for which a command waits for the answer (s)."""

NAME = "%Y%m%d-%H%M%S"
"""Name of the folder with a profile's files, for time.strftime; the coordinator adds a number."""
Name = Annotated[str, Meta(pattern="^[0-9A-Za-z-]{1,64}$")]


class About(Struct, frozen=True, forbid_unknown_fields=True):
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=RANKS_MAX)] = ()
    steps: Annotated[int, Meta(ge=0, le=STEPS_MAX)] = 0
    """Number of steps to profile; 0: for_s counts."""
    for_s: Annotated[float, Meta(ge=0, le=SECONDS_MAX)] = 0.0
    name: Name = "profile"
    """Name of the folder, as in NAME. The asker gives it, because the coordinator has no wall clock."""


def profile_request(ranks: Collection[int], steps: int, seconds: float | None, name: str) -> dict[str, object]:
    """The subject of the question, in the form of `About`. `seconds` None: the steps count. Raises UsageError."""
    if len(ranks) > RANKS_MAX:
        raise UsageError(f"{len(ranks)} ranks: at most {RANKS_MAX} are profiled at a time")
    if seconds is not None and not 0 < seconds <= SECONDS_MAX:
        raise UsageError(f"{seconds:g} seconds: must be more than 0, and {SECONDS_MAX:g} at most")
    if seconds is None and not 1 <= steps <= STEPS_MAX:
        raise UsageError(f"{steps} steps: must be 1 to {STEPS_MAX}")
    return {"ranks": sorted(ranks), "steps": 0 if seconds is not None else steps, "for_s": seconds or 0.0, "name": name}


class TakeProfiles(Struct, frozen=True, array_like=True):
    """Take profiles of these workers. Ends in Profiles."""

    number: Count
    generation: Count
    name: Name
    """Name of the folder with the files, below the run folder's `profiles`."""
    local_ranks: Annotated[tuple[LocalRank, ...], Meta(max_length=WORKERS_PER_NODE_MAX)]
    steps: Count
    """Number of steps to profile; 0: for_s counts."""
    for_s: Seconds


class Operation(Struct, frozen=True, array_like=True):
    """All calls of one operation during a profile."""

    name: str
    calls: Count
    self_s: Seconds
    """Time without the operations that it calls; on the device if one was used, else on the CPU."""
    total_s: Seconds


class RankProfile(Struct, frozen=True, array_like=True):
    """The result of a profile of one worker."""

    local_rank: LocalRank
    files: tuple[str, ...] = ()
    """Paths of the profile's files, on its node."""
    operations: tuple[Operation, ...] = ()
    """The most expensive operations, by self_s."""
    why: str = ""
    """The reason why there is no profile by torch; empty: there is one."""
    note: str = ""
    """The reason why there is no flame graph although py-spy is installed."""


class Profiles(Struct, frozen=True, array_like=True):
    number: Count
    ranks: Annotated[tuple[RankProfile, ...], Meta(max_length=WORKERS_PER_NODE_MAX)] = ()


class ProfiledRank(Struct, frozen=True):
    """The profile of one rank of the job, as RankProfile."""

    rank: int
    host: str
    files: tuple[str, ...]
    operations: tuple[Operation, ...]
    why: str
    note: str


class ProfileView(Struct, frozen=True, kw_only=True):
    """The profiles that a command asked for."""

    name: str = ""
    ranks: tuple[ProfiledRank, ...] = ()
    silent: tuple[str, ...] = ()
    """Hosts that did not answer in time."""
