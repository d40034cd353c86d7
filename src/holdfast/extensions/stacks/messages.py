"""The messages between the halves of `stacks`, and its answer, a StacksView that fits into a frame."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from holdfast.protocol.policy import WORKERS_PER_NODE_MAX, Count
from holdfast.protocol.rank_progress import Frame, RankSample, RankStack, StacksView

ANSWER_BYTES_MAX = 3 * 1024 * 1024
"""Limit of the answer (bytes). It leaves room in a frame."""
STACKS_S = 12.0
"""Time for which a command waits for the answer (s): all nodes are asked first."""
FRAMES_CUTS = (16, 4, 1)
"""Numbers of frames to which stacks are cut, one after the other, until the answer fits."""


class About(Struct, frozen=True, forbid_unknown_fields=True):
    """The subject of the question. It is empty, because all ranks are sampled."""


class TakeSamples(Struct, frozen=True, array_like=True):
    """Sample all workers. Ends in Samples."""

    number: Count


class Samples(Struct, frozen=True, array_like=True):
    number: Count
    samples: Annotated[tuple[RankSample, ...], Meta(max_length=WORKERS_PER_NODE_MAX)] = ()


def view_of(
    run_id: str, generation: int, world_size: int, seen: list[tuple[str, int, RankSample]], silent: tuple[str, ...] = ()
) -> StacksView:
    """The view of these samples, in which equal stacks are stored once. `seen`: host, rank and sample of each
    worker."""
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


def body_of(view: StacksView) -> bytes:
    """Encode a view. If it does not fit into a frame, other threads are left out, then outer frames, and then the last
    ranks."""
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
