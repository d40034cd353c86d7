"""The table of causes, rules.toml: how each cause is recognised, and its text on the last screen; hints for exceptions
without a code of their own; advice for verdicts on several failures. Also texts.toml, which explains each code.

Pure data, read on first use.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.diagnosis.causes.blame import Blame
from holdfast.diagnosis.tables import read_table

_TIMED_OUT = frozenset({Blame.WAITED, Blame.WAITED_LATE, Blame.LOOSE})
KINDS = {
    "": frozenset(Blame),
    "own": frozenset({Blame.OWN, Blame.OWN_LATE}),
    "timed_out": _TIMED_OUT,
    "complaint": _TIMED_OUT | {Blame.CUT, Blame.STOPPED},
}
"""Values of `only` in a rule."""


class Rule(Struct, frozen=True, kw_only=True):
    code: str
    line: str
    """Text of the verdict after `rank 3 on b`. {said}: first line of the failure's text; or named groups of `says`."""
    advice: str
    says: str = ""
    """Pattern for the failure's text, in any case; for its stderr if it has no text."""
    stderr: str = ""
    """Pattern for its stderr, even if it has a text."""
    types: frozenset[str] = frozenset()
    """Or: classes of its exception."""
    ends: frozenset[int] = frozenset()
    """Or: signals that ended it, as exit codes, including 128+N of a shell in between."""
    room: str = ""
    """Name of a fact. The rule does not match if that shows plenty of room."""
    known: str = ""
    """Name of a fact. The rule matches only if that is known."""
    only: frozenset[Blame] = KINDS[""]
    """Kinds of failures to which the rule applies."""
    frames: str = ""
    """Pattern that must also match a file of the traceback's last frames."""
    peers: bool = False
    """The text or frames must belong to communication with peers, since locks and databases can time out, too."""
    facts: tuple[str, ...] = ()
    """Names of facts from its agent to include in the advice."""
    per_node: bool = False
    """The cause depends on the machine, so the text names nodes with and without it."""


class Text(Struct, frozen=True, forbid_unknown_fields=True):
    """Explanation of a code."""

    name: str
    """Name in a few words, for a table."""
    cause: str
    evidence: str
    fix: str


@cache
def _file() -> dict[str, Any]:
    return read_table(__file__, "rules.toml")


@cache
def rules() -> tuple[Rule, ...]:
    """All rules; the first that matches decides."""
    parts: dict[str, str] = {}
    for name, text in _file()["parts"].items():
        parts[name] = _whole(text, parts)
    return tuple(_rule(row, parts) for row in _file()["rule"])


@cache
def hints() -> tuple[tuple[str, str], ...]:
    """For exceptions without a code of their own: pattern of the text, and advice."""
    return tuple((_whole(row["says"], {}), row["advice"]) for row in _file()["hint"])


def advice() -> Mapping[str, str]:
    """Advice for verdicts on several failures, by code: one line for the last screen."""
    found: dict[str, str] = _file()["advice"]
    return found


@cache
def explanations() -> dict[str, Any]:
    """texts.toml as it is."""
    return read_table(__file__, "texts.toml")


@cache
def texts() -> dict[str, Text]:
    """Explanation of each code of a verdict."""
    return msgspec.convert(explanations()["verdicts"], dict[str, Text])


def _rule(row: Mapping[str, Any], parts: Mapping[str, str]) -> Rule:
    """One rule, with complete patterns, signals as exit codes and kinds of failures as a set.

    It is made field by field because two threads may need the rules at the same moment, and msgspec.convert crashes
    when two threads use a type for the first time.
    """
    values = dict(row)
    for name in ("advice", "says", "stderr", "frames"):
        if name in row:
            values[name] = _whole(row[name], parts)
    numbers = {signal.Signals[name] for name in row.get("ends", ())}
    values["ends"] = frozenset({-number for number in numbers} | {128 + number for number in numbers})
    values["only"] = KINDS[row.get("only", "")]
    values["types"] = frozenset(row.get("types", ()))
    values["facts"] = tuple(row.get("facts", ()))
    return Rule(**values)


def _whole(text: str | list[str], parts: Mapping[str, str]) -> str:
    """The complete text of a pattern, joined from its pieces, with names of parts replaced."""
    return re.sub(r"\{([A-Z_]+)\}", lambda found: parts[found[1]], "".join(text))
