"""Make docs/survive.md: what `ht.survive` keeps when a rank is lost, and which test shows it; from survive.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tools.named_tests import exists, short

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "survive.md"
DATA = ROOT / "tools" / "survive.toml"

HEAD = """# What ht.survive keeps

This page is made by `make fmt` from `tools/survive.toml`. How `ht.survive` is used: [train.md](train.md#survivors).

| word | what a loss does |
|---|---|
| exact | With replacements (`--survive wait`) every rank ends with the bits of an undisturbed job. With fewer ranks all have equal weights, bit for bit; if a step keeps its samples (`global_batch_size=`), those of an undisturbed job, but for the order of sums. |
| restart | A loss at that place restarts all ranks from the last snapshot. |
| plain call | Every loss does. A line at the start says so, and why. |
| refused | The job ends before its first step is complete, with the code. |

Each row is tested with ranks that are killed in forward, backward, between the optimizer's step and `snaps.step()`, between steps and at an epoch's
end. A sharded model that is made in the function is carried [in another way](train.md#sharded-models), also where these tables say "plain call".
"""

FOOT = """
A DDP module is bound to its process group. In a new world it gets another reducer, with the parameters and options that it was built with. Frozen
parameters stay in it, and the ranks agree on which of them need a gradient, so code that freezes layers only once is carried, too.

torch itself cannot do `no_sync()` in the first step of a static graph. Where a name of torch that is not public (`train/torch_private.py`) is
missing, `train()` is a plain call that names it.
"""


class Row(NamedTuple):
    """One thing that a training program may use."""

    group: str
    name: str
    loss: str
    """What a loss does to it."""
    tests: tuple[str, ...]


@cache
def rows() -> tuple[Row, ...]:
    """All rows, those of one group beside each other."""
    given = tomllib.loads(DATA.read_text(encoding="utf-8"))["row"]
    return tuple(Row(**{**each, "tests": tuple(f"train/{test}" for test in each["tests"])}) for each in given)


def render() -> str:
    """The whole page."""
    return HEAD + "".join(section(group, list(each)) for group, each in groupby(rows(), lambda row: row.group)) + FOOT


def section(group: str, members: list[Row]) -> str:
    """A heading and a table. A group of tests is written once, in the first row that it belongs to."""
    lines, before = [], ()
    for row in members:
        tests, before = ("as above" if row.tests == before else "<br>".join(map(short, row.tests))), row.tests
        lines.append(f"| {row.name} | {row.loss} | {tests} |")
    table = "\n".join(lines)
    return f"\n## {group}\n\n| | a loss | shown by |\n|---|---|---|\n{table}\n"


def missing() -> list[str]:
    """Tests that are named and not there."""
    return sorted({test for row in rows() for test in row.tests if not exists(test)})
