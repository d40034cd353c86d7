"""What a command on a node may ask about the whole job, how a user writes it, and the answers as JSON."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

import msgspec
from msgspec import Struct

from holdfast.protocol.errors import UsageError
from holdfast.protocol.rank_progress import Frame, JobView, Operation, RankSample, RankStack, StacksView

RANKS_MAX = 1_000_000
"""Of one range that a user writes."""
PROFILED_RANKS_MAX = 64
PROFILED_STEPS_MAX = 1000
ANSWER_BYTES_MAX = 3 * 1024 * 1024
"""Leaves room in a frame."""
FRAMES_CUTS = (16, 4, 1)
PROFILED_S_MAX = 300.0
"""Seconds that a command may name."""
PROFILE_S_MAX = 600.0
"""A profile that has not ended by then is given up."""


class Question(Enum):
    """The questions about the whole job that a command on a node may ask."""

    STATUS = "status"
    STACKS = "stacks"
    PROFILE = "profile"
    """Profiles of some ranks, over some steps or seconds."""
    SAVE = "save"
    """All ranks save at their next safe point, and go on."""
    STOP = "stop"
    """Ends the job: the workers drain, and every agent ends."""
    KILL = "kill"
    """Ends the job at once: nothing is saved."""
    DRAIN = "drain"
    """The agents of one host leave, after their workers have saved."""
    EXCLUDE = "exclude"
    """The same, and the host takes no part for a time."""
    READMIT = "readmit"
    """An excluded host may take part again."""


OF_A_HOST = (Question.DRAIN, Question.EXCLUDE, Question.READMIT)


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
    refused: str = ""
    """Why no profile was taken."""


def stacks_view(
    run_id: str, generation: int, world_size: int, seen: list[tuple[str, int, RankSample]], silent: tuple[str, ...] = ()
) -> StacksView:
    """`seen`: host, rank and sample of each worker."""
    numbers: dict[tuple[Frame, ...], int] = {}
    ranks = []
    for host, rank, sample in sorted(seen, key=lambda each: each[1]):
        stack = numbers.setdefault(sample.frames, len(numbers)) if sample.frames else -1
        ranks.append(
            RankStack(
                rank=rank,
                host=host,
                local_rank=sample.local_rank,
                pid=sample.pid,
                state=sample.state,
                cpu_s=sample.cpu_s,
                stack=stack,
                note=sample.note,
                file=sample.file,
                source=sample.source,
                threads=sample.threads,
            )
        )
    return StacksView(
        run_id=run_id,
        generation=generation,
        world_size=world_size,
        ranks=tuple(ranks),
        stacks=tuple(numbers),
        silent=silent,
    )


def status_body(view: JobView) -> bytes:
    """Encode a view; without its ranks when the job is so large that they do not fit into a frame."""
    body = msgspec.json.encode(view)
    if len(body) > ANSWER_BYTES_MAX:
        nodes = tuple(msgspec.structs.replace(node, ranks=()) for node in view.nodes)
        body = msgspec.json.encode(msgspec.structs.replace(view, nodes=nodes))
    return body


def stacks_body(view: StacksView) -> bytes:
    """Encode a view; where it does not fit into a frame, other threads are omitted, then outer frames, and then the
    last ranks."""
    body = msgspec.json.encode(view)
    if len(body) > ANSWER_BYTES_MAX:
        ranks = tuple(msgspec.structs.replace(rank, threads=()) for rank in view.ranks)
        view = msgspec.structs.replace(view, ranks=ranks)
        body = msgspec.json.encode(view)
    for frames in FRAMES_CUTS:
        if len(body) <= ANSWER_BYTES_MAX:
            return body
        view = msgspec.structs.replace(view, stacks=tuple(stack[:frames] for stack in view.stacks))
        body = msgspec.json.encode(view)
    while len(body) > ANSWER_BYTES_MAX and view.ranks:
        ranks = view.ranks[: len(view.ranks) // 2]
        used = 1 + max((rank.stack for rank in ranks), default=-1)  # they are numbered in the order of the ranks
        view = msgspec.structs.replace(view, ranks=ranks, stacks=view.stacks[:used])
        body = msgspec.json.encode(view)
    return body


def ranks_of(texts: Sequence[str] | None, option: str = "--rank") -> set[int]:
    """The ranks of `--rank 3 --rank 0-7,12`; empty: all. Raises UsageError.

    >>> sorted(ranks_of(["3", "0-1,8"]))
    [0, 1, 3, 8]
    """
    found: set[int] = set()
    for text in texts or ():
        for part in text.split(","):
            first, dash, last = part.partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) - int(first) >= RANKS_MAX:
                raise UsageError(f"{option} {text}: write ranks like 3, 0-7 or 1,5")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def profile_request(ranks: Collection[int], steps: int, seconds: float | None) -> dict[str, object]:
    """The fields of the question. Raises UsageError."""
    if len(ranks) > PROFILED_RANKS_MAX:
        raise UsageError(f"{len(ranks)} ranks: at most {PROFILED_RANKS_MAX} are profiled at a time")
    if seconds is not None and not 0 < seconds <= PROFILED_S_MAX:
        raise UsageError(f"{seconds:g} seconds: must be more than 0, and {PROFILED_S_MAX:g} at most")
    if seconds is None and not 1 <= steps <= PROFILED_STEPS_MAX:
        raise UsageError(f"{steps} steps: must be 1 to {PROFILED_STEPS_MAX}")
    return {"ranks": sorted(ranks), "steps": 0 if seconds is not None else steps, "for_s": seconds or 0.0}
