"""`holdfast explain [CODE ...]`: the meaning of a code, the evidence for it, and what to do. Works offline.

Knows the output; diagnosis/reference.py knows the meaning of codes.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence

from msgspec.structs import asdict

from holdfast.cli.printing import Parser, print_json, print_table
from holdfast.diagnosis.reference import Explanation, everything, headings, nearest, normal, search
from holdfast.protocol.errors import UsageError

WIDTH = 100


def main(argv: Sequence[str]) -> int:
    """Run `holdfast explain` with these arguments; returns the exit status. Raises HoldfastError."""
    chosen = parser().parse_args(argv)
    known = everything()
    if len(chosen.codes) > 1 and normal(chosen.codes[0]) not in known:
        chosen.codes = [" ".join(chosen.codes)]  # words without quotes
    if len(chosen.codes) == 1 and normal(chosen.codes[0]) not in known and (found := search(chosen.codes[0])):
        return show_found(found, as_json=chosen.json)
    wanted = [find(code, known) for code in chosen.codes] or list(known.values())
    if chosen.json:
        print_json([asdict(each) for each in wanted])
    elif chosen.codes:
        print("\n\n".join(text(each) for each in wanted))
    else:
        for start, heading in headings().items():
            print(f"{start}xx  {heading}")
            print_table([(f"  {each.code}", each.name) for each in wanted if each.code.startswith(start)])
            print()
        print("holdfast explain CODE explains a code; holdfast explain WORDS searches: holdfast explain exit code 137")
    return 0


def show_found(found: list[Explanation], *, as_json: bool) -> int:
    """Print the results of a search: a single one in full."""
    if as_json:
        print_json([asdict(each) for each in found])
    elif len(found) == 1:
        print(text(found[0]))
    else:
        print_table([(each.code, each.name) for each in found])
        print(f"\nholdfast explain {found[0].code} explains the first.")
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="holdfast explain", description="Explain what a code means and what to do about it.")
    made.add_argument(
        "codes",
        nargs="*",
        metavar="CODE",
        help="a code such as HF211, or words to search for; without it all codes are listed",
    )
    made.add_json()
    return made


def find(code: str, known: dict[str, Explanation]) -> Explanation:
    """The explanation of a code. Raises UsageError that names the nearest code."""
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
