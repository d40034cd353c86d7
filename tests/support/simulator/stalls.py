"""Pretend workers that make no steps, and what an examination of them finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.extension_list import EXTENSIONS, Extension
from holdfast.extensions.hangs.coordinator import AtCoordinator
from holdfast.protocol.extension import Job
from holdfast.protocol.rank_progress import Examine, Finding, HangKind, RankStory

WAITING = "all_reduce"
"""The function in which pretend workers wait for their peers."""


def simple_examine(stories: Sequence[RankStory]) -> Finding:
    """By the innermost function of each rank. Enough for simulations."""
    newest = {story.rank: story.samples[-1].frames for story in stories if story.samples}
    signature = repr(sorted(newest.items()))
    where = {rank: frames[0].function for rank, frames in newest.items()}
    others = tuple(rank for rank, function in where.items() if function != WAITING)
    if any(len({sample.frames for sample in story.samples}) > 1 for story in stories):
        return Finding(kind=HangKind.MOVING, code="", text="somebody moves", signature=signature)
    if len(others) == len(where):
        return Finding(kind=HangKind.PAUSED, code="", text="nobody waits for anybody", signature=signature)
    if not others:
        return Finding(kind=HangKind.STUCK, code="HF241", text=f"all wait in {WAITING}", signature=signature)
    text = f"rank {others[0]} is in {where[others[0]]}; {len(where) - len(others)} others wait in {WAITING}"
    return Finding(kind=HangKind.HUNG, code="HF240", text=text, culprits=others, signature=signature)


class _ExaminedHangs(Extension):
    """The extension for hangs, with another examination."""

    def __init__(self, examine: Examine) -> None:
        super().__init__("hangs", follows=True)
        self._examine = examine

    def coordinator(self, job: Job) -> AtCoordinator:
        return AtCoordinator(job, self._examine)


def examined_by(examine: Examine) -> tuple[Extension, ...]:
    """All extensions, with this examination of hangs."""
    return tuple(_ExaminedHangs(examine) if each.name == "hangs" else each for each in EXTENSIONS)


SIMULATED = examined_by(simple_examine)


@dataclass(frozen=True)
class Stall:
    """A time without a step in one generation."""

    since_s: float
    until_s: float
    """inf: it hangs."""
    culprit: tuple[str, int] | None
    """Host and local rank for which the others wait; None: all work, at something else."""
