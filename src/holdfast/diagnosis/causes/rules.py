"""The table of causes, rules.toml: how a cause is recognised, and what the last screen says of it; hints for exceptions
without a code of their own; advice for verdicts of more than one failure; and texts.toml, which explains each code.

Pure data, read when it is asked for.
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
"""What `only` of a rule may say."""


class Rule(Struct, frozen=True, kw_only=True):
    code: str
    line: str
    """What the verdict says, after `rank 3 on b`. {said}: first line of its words; named groups of `says`."""
    advice: str
    says: str = ""
    """Searched in its words, any case; in its stderr where it has none."""
    stderr: str = ""
    """Searched in its stderr, whatever it says itself."""
    types: frozenset[str] = frozenset()
    """Or: its exception is one of these."""
    ends: frozenset[int] = frozenset()
    """Or: it ended by one of these signals; exit codes, also where a shell between us passes a signal on as 128+N."""
    room: str = ""
    """Does not fit where this fact says that there is plenty of room."""
    known: str = ""
    """Fits only where this fact was found out."""
    only: frozenset[Blame] = KINDS[""]
    """Kinds of failures that it is for."""
    frames: str = ""
    """Has to be found too among the files of its traceback's last frames; `says` or `types` alone do not fit then."""
    peers: bool = False
    """Its words or frames have to be those of what training peers talk through: a lock and a database time out too."""
    facts: tuple[str, ...] = ()
    """What its agent may have found out that belongs into the advice."""
    per_node: bool = False
    """It depends on the machine: worth saying which nodes reported it and which did not."""


class Text(Struct, frozen=True, forbid_unknown_fields=True):
    """What a code means."""

    name: str
    """A few words, for a table."""
    cause: str
    evidence: str
    fix: str


@cache
def _file() -> dict[str, Any]:
    return read_table(__file__, "rules.toml")


@cache
def rules() -> tuple[Rule, ...]:
    """All rules; the first that fits decides."""
    parts: dict[str, str] = {}
    for name, text in _file()["parts"].items():
        parts[name] = _whole(text, parts)
    return tuple(_rule(row, parts) for row in _file()["rule"])


@cache
def hints() -> tuple[tuple[str, str], ...]:
    """For exceptions that have no code of their own: their words, and what to do."""
    return tuple((_whole(row["says"], {}), row["advice"]) for row in _file()["hint"])


def advice() -> Mapping[str, str]:
    """By code, of verdicts that are made of more than one failure: one line for the last screen."""
    found: dict[str, str] = _file()["advice"]
    return found


@cache
def explanations() -> dict[str, Any]:
    """texts.toml as it is."""
    return read_table(__file__, "texts.toml")


@cache
def texts() -> dict[str, Text]:
    """What each code of a verdict means."""
    return msgspec.convert(explanations()["verdicts"], dict[str, Text])


def _rule(row: Mapping[str, Any], parts: Mapping[str, str]) -> Rule:
    """One rule, with its patterns whole, its signals as exit codes and its kinds of failures as a set.

    Made field by field: a verdict and the thread that prepares the end may need the rules at the same moment, and
    msgspec.convert crashes when two threads are the first to use a type.
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
    """A text that may be cut into pieces and hold names of parts."""
    return re.sub(r"\{([A-Z_]+)\}", lambda found: parts[found[1]], "".join(text))
