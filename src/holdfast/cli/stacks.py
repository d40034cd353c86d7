"""`holdfast stacks [RUN]`: where all ranks of a running job are now, equal stacks told once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.cli.finding import running_job
from holdfast.cli.printing import Parser, print_json, ranks_of
from holdfast.core.errors import UsageError
from holdfast.core.protocol import Question
from holdfast.core.stacks import StacksView
from holdfast.insight.stacks import group, stack_lines
from holdfast.runtime.running import ask_any


def main(argv: Sequence[str]) -> int:
    """Runs `holdfast stacks` with these arguments; returns the exit status. Raises HoldfastError."""
    chosen = parser().parse_args(argv)
    wanted = ranks_of(chosen.rank)
    _, reply = ask_any(running_job(chosen.run), Question.STACKS)
    view = reply.read(StacksView)
    if wanted:
        missing = wanted - {rank.rank for rank in view.ranks}
        if missing:
            raise UsageError(f"no rank {min(missing)} answered; there are {view.world_size} ranks")
        view = msgspec.structs.replace(view, ranks=tuple(rank for rank in view.ranks if rank.rank in wanted))
    if chosen.json:
        groups = [{"ranks": [rank.rank for rank in each.ranks], "place": each.place} for each in group(view)]
        print_json({"whole": reply.whole, **msgspec.to_builtins(view), "groups": groups})
        return 0
    print("\n".join(stack_lines(view, full=chosen.full)))
    if not reply.whole:
        print("\nthe coordinator does not answer: this node's ranks alone")
    return 0


def parser() -> Parser:
    made = Parser(prog="holdfast stacks", description="Show where a running job's ranks are, now.", allow_abbrev=False)
    made.add_argument("run", nargs="?", metavar="RUN", help="run id, its beginning, or run folder; the only one")
    made.add_argument("--rank", action="append", metavar="N", help="only these ranks: 3, 0-7, 1,5; may be repeated")
    made.add_argument("--full", action="store_true", help="all frames, also those of libraries")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made
