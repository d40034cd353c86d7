"""`holdfast stacks`: shows where all ranks are now, equal stacks once. diagnosis/screen.py makes the lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import msgspec

from holdfast.cli.printing import Parser, Whole, named, print_json
from holdfast.diagnosis.screen import group, stack_lines
from holdfast.extensions.stacks.messages import STACKS_S
from holdfast.protocol.errors import UsageError
from holdfast.protocol.rank_progress import StacksView
from holdfast.protocol.ranks_text import ranks_of
from holdfast.runs.finding import running_job
from holdfast.runtime.running import ask_any


class RanksTogether(TypedDict):
    """Ranks that are at one place."""

    ranks: list[int]
    place: str
    """The place in words."""


class Groups(TypedDict):
    """Part of the answer."""

    groups: list[RanksTogether]
    """Those that wait for no other rank come first."""


JSON_FORMS = {"stacks": ((Whole, StacksView, Groups),)}


def main_stacks(argv: Sequence[str]) -> int:
    """Run `holdfast stacks` with these arguments. Returns the exit status. Raises HoldfastError."""
    chosen = stacks_parser().parse_args(argv)
    wanted = ranks_of(chosen.rank)
    _, reply = ask_any(running_job(chosen.run), "stacks", within_s=STACKS_S)
    view = reply.read(StacksView)
    if wanted:
        missing = wanted - {rank.rank for rank in view.ranks}
        if missing:
            raise UsageError(f"no rank {min(missing)} answered; there are {view.world_size} ranks")
        view = msgspec.structs.replace(view, ranks=tuple(rank for rank in view.ranks if rank.rank in wanted))
    if chosen.json:
        groups = [RanksTogether(ranks=[rank.rank for rank in each.ranks], place=each.place) for each in group(view)]
        print_json({"whole": reply.whole, **named(view), **Groups(groups=groups)})
        return 0
    print("\n".join(stack_lines(view, full=chosen.full)))
    if not reply.whole:
        print("\nthe coordinator does not answer: only this node's ranks are shown")
    return 0


def stacks_parser() -> Parser:
    made = Parser(prog="holdfast stacks", description="Show where the ranks of a running job are now.")
    made.add_run()
    made.add_argument("--rank", action="append", metavar="N", help="only these ranks: 3, 0-7 or 1,5; may be repeated")
    made.add_argument("--full", action="store_true", help="show all frames, also those of libraries")
    made.add_json()
    return made
