"""`holdfast explain [CODE ...]`: what a code means, what was seen to say so, and what to do. Works offline.

Knows what is printed; what codes mean knows insight/explain.py.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence

from holdfast.cli.printing import Parser, print_json, print_table
from holdfast.core.errors import UsageError
from holdfast.insight.explain import Explanation, everything, nearest, normal

WIDTH = 100


def main(argv: Sequence[str]) -> int:
    """Runs `holdfast explain` with these arguments; returns the exit status. Raises HoldfastError."""
    chosen = parser().parse_args(argv)
    known = everything()
    wanted = [find(code, known) for code in chosen.codes] or list(known.values())
    if chosen.json:
        print_json([as_json(each) for each in wanted])
    elif chosen.codes:
        print("\n\n".join(text(each) for each in wanted))
    else:
        print_table([(each.code, each.name) for each in wanted])
        print("\nholdfast explain CODE says more.")
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="holdfast explain", description="Say what a code means and what to do about it.", allow_abbrev=False
    )
    made.add_argument("codes", nargs="*", metavar="CODE", help="such as HF211; all codes are listed when none is given")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def find(code: str, known: dict[str, Explanation]) -> Explanation:
    """Raises UsageError that names the nearest."""
    found = known.get(normal(code))
    if found is None:
        near = ", ".join(f"{each} ({known[each].name})" for each in nearest(code))
        raise UsageError(f"no code {code!r}; " + (f"did you mean {near}?" if near else "`holdfast explain` lists all"))
    return found


def text(each: Explanation) -> str:
    rows = [("cause", each.cause), ("evidence", each.evidence), ("fix", each.fix)]
    if each.exit_code is not None:
        rows.append(("exit code", str(each.exit_code)))
    lines = [f"{each.code}: {each.name}"]
    for name, said in rows:
        wrapped = textwrap.wrap(said, WIDTH - 14, break_long_words=False, break_on_hyphens=False)
        lines += [f"  {name if number == 0 else '':<12}{line}" for number, line in enumerate(wrapped)]
    return "\n".join(lines)


def as_json(each: Explanation) -> dict[str, object]:
    return {
        "code": each.code,
        "name": each.name,
        "cause": each.cause,
        "evidence": each.evidence,
        "fix": each.fix,
        "exit_code": each.exit_code,
    }
