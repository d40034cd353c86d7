"""Reference for users: the explanation of every code that holdfast prints (errors, verdicts, hangs, the doctor's
findings), and the table of events with a check of records against it.

Pure and offline. The texts are in codes.toml and events.toml, which are read on first use, and in protocol/errors.py.
"""

from __future__ import annotations

import difflib
import json
import re
import signal
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.protocol import errors
from holdfast.protocol.errors import Fault, HoldfastError
from holdfast.text import read_table

NEAREST_MAX = 3
FOUND_MAX = 8
IGNORED_WORD = re.compile(
    r"a|an|and|as|at|by|error|exit|exited|code|status|failed|for|from|in|is|it|job|of|on|or|rank|the|to|was|with"
)
"""Words that a search ignores."""


class Explanation(Struct, frozen=True, kw_only=True):
    """What `holdfast explain` says about one code."""

    code: str
    name: str
    """The code's name, a few words."""
    cause: str
    evidence: str
    """The observation behind the code."""
    fix: str
    wrong: str = ""
    """An example of what causes it; empty: none is given."""
    right: str = ""
    """The example without the mistake."""
    exit_code: int | None = None
    """Exit code of the command that prints the code; None: the worker's own, or none at all."""


def explanations() -> dict[str, Explanation]:
    """All codes in order."""
    found = {error.code: _of_error(error) for error in all_errors()}
    return dict(sorted((found | verdict_texts() | finding_texts()).items()))


@cache
def _table() -> dict[str, Any]:
    return read_table(__file__, "codes.toml")


def headings() -> dict[str, str]:
    """Headings of groups of codes, by their first characters."""
    return dict(_table()["headings"])


def verdict_texts() -> dict[str, Explanation]:
    """The codes of verdicts."""
    return {code: Explanation(code=code, **texts) for code, texts in _table()["verdicts"].items()}


def finding_texts() -> dict[str, Explanation]:
    """The codes of the doctor's findings. The beginning of the cause serves as name."""
    return {
        code: Explanation(code=code, name=re.split(r"[.:] |\.$", texts["cause"])[0], **texts)
        for code, texts in _table()["doctor"].items()
    }


def nearest_codes(code: str) -> list[str]:
    """Codes that may be meant: a number in another series, another digit, a word of a name."""
    known = explanations()
    word = code.strip().lower()
    named = [each.code for each in known.values() if len(word) > 3 and word in f"{each.name} {each.cause}".lower()]
    digits = re.sub(r"\D", "", code)
    guess = f"HF{digits}" if digits else code.upper()
    close = difflib.get_close_matches(guess, known, n=NEAREST_MAX, cutoff=0.5)
    return list(dict.fromkeys([*named, *close]))[:NEAREST_MAX]


def search(text: str) -> list[Explanation]:
    """Explanations with all these words, best match first. An exit code also means its signal: 137 is SIGKILL."""
    words = {word for word in re.findall(r"[a-z0-9_]+", text.lower()) if not IGNORED_WORD.fullmatch(word)}
    number = re.search(r"(?:exit code|exit status|code|status|signal)\W*(-?\d+)|^\W*(-?\d+)\W*$", text.lower())
    exit_code = None
    if number is not None:
        exit_code = int(number[1] or number[2])
        words -= {str(abs(exit_code)), "signal"}
        words |= {name.lower() for name in [_signal_of(exit_code, text)] if name}

    # At the beginning of a word: `hang` means `hangs`, and not `changed`.
    begins = [re.compile(rf"\b{word}") for word in words]
    found = []
    for each in explanations().values():
        heads, rest = each.name.lower(), f"{each.cause} {each.evidence} {each.fix}".lower()
        matches = [4 if word.search(heads) else int(bool(word.search(rest))) for word in begins]
        points, whole = sum(matches), all(matches)
        if exit_code is not None and each.exit_code == exit_code:
            points += 5
        if points and (whole or (exit_code is not None and each.exit_code == exit_code)):
            found.append((-points, len(each.name), each.code, each))  # a short name is about little else
    return [each for *_, each in sorted(found, key=lambda found: found[:3])][:FOUND_MAX]


def _signal_of(number: int, text: str) -> str:
    """The signal that a number means: `SIGKILL` for 137, -9 and `signal 9`; empty: none."""
    number = number - 128 if number > 128 else -number if number < 0 else number if "signal" in text.lower() else 0
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def normal_code(code: str) -> str:
    """The code as it is printed: `HF211` for `hf211`, `211` and `HF211:`."""
    digits = re.fullmatch(r"(?:hf)?(\d{3}):?", code.strip().lower())
    return f"HF{digits[1]}" if digits else code


def all_errors(root: type[HoldfastError] = HoldfastError) -> Iterator[type[HoldfastError]]:
    """All classes of protocol/errors.py, the root first. Subclasses in other modules have their parent's code."""
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from all_errors(child)


def _of_error(error: type[HoldfastError]) -> Explanation:
    text = " ".join((error.__doc__ or "").split())
    about = _table()["faults"][error.fault.value] | _table()["errors"].get(error.code, {})
    worker = error.fault is Fault.WORKER
    return Explanation(
        code=error.code,
        name=text.partition(". ")[0].rstrip("."),
        cause=f"{text} At fault: {about['whose']}.",
        evidence=about["evidence"],
        fix=about["fix"],
        wrong=about.get("wrong", ""),
        right=about.get("right", ""),
        exit_code=None if worker else error.exit_code,
    )


# --- events -----------------------------------------------------------------------------------------------------------


class ValueKind(Enum):
    """Type of a value in JSON, as docs/events.md names it."""

    TEXT = "text"
    WHOLE = "whole number"
    NUMBER = "number"
    FLAG = "true or false"
    TEXTS = "list of texts"
    WHOLES = "list of whole numbers"
    NUMBERS = "list of numbers"
    ITEMS = "list"
    TABLE = "object"


TYPES: dict[ValueKind, type | UnionType] = {
    ValueKind.TEXT: str,
    ValueKind.WHOLE: int,
    ValueKind.NUMBER: int | float,
    ValueKind.FLAG: bool,
    ValueKind.ITEMS: list,
    ValueKind.TABLE: dict,
}
ELEMENT_KINDS = {
    ValueKind.TEXTS: ValueKind.TEXT,
    ValueKind.WHOLES: ValueKind.WHOLE,
    ValueKind.NUMBERS: ValueKind.NUMBER,
}
"""The type of the values in each kind of list."""


class Field(Struct, frozen=True, array_like=True):
    """A field of an event."""

    name: str
    kind: ValueKind
    words: str
    """Meaning of the value, with its unit."""
    optional: bool = False
    """Whether the field may be missing."""
    null: bool = False
    """Whether the value may be null."""

    def accepts(self, value: object) -> bool:
        """Whether the field may have this value."""
        return fits(value, self.kind) or (self.null and value is None)


class EventKind(Struct, frozen=True, forbid_unknown_fields=True):
    """An event of the table, and when it is written."""

    name: str
    when: str
    fields: tuple[Field, ...] = ()


class EventGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """The events that one part of holdfast writes."""

    title: str
    event: tuple[EventKind, ...]


class EventTable(Struct, frozen=True):
    """The content of events.toml."""

    always: tuple[Field, ...]
    """The fields of every record."""
    group: tuple[EventGroup, ...]


@cache
def event_table() -> EventTable:
    """The whole table."""
    found = read_table(__file__, "events.toml")
    for writer in found["titles"]:
        for event in found[writer].values():
            fields = event.get("fields", ())
            event["fields"] = [found["shared"][field] if isinstance(field, str) else field for field in fields]
    groups = [
        {"title": title, "event": [{"name": name, **event} for name, event in found[writer].items()]}
        for writer, title in found["titles"].items()
    ]
    return msgspec.convert({"always": found["always"], "group": groups}, EventTable)


@cache
def events() -> dict[str, EventKind]:
    """All events by name."""
    return {kind.name: kind for group in event_table().group for kind in group.event}


def problems(record: Mapping[str, Any]) -> Iterator[str]:
    """The differences between a record of events.jsonl and the table, in words."""
    kind = events().get(record.get("event", ""))
    if kind is None:
        yield f"unknown event {record.get('event')!r}"
        return
    fields = {field.name: field for field in (*event_table().always, *kind.fields)}
    for name, value in record.items():
        field = fields.get(name)
        if field is None:
            yield f"{kind.name}: unknown field {name!r}"
        elif not field.accepts(value):
            yield f"{kind.name}: {name} is no {field.kind.value}: {value!r}"
    for name, field in fields.items():
        if name not in record and not field.optional:
            yield f"{kind.name}: no {name}"


def read_event(line: bytes) -> dict[str, Any] | None:
    """The event in a line of events.jsonl; None: the line is torn or of another version.

    All its known fields have the types of the table, so that a reader must only expect missing fields. It may have more
    fields, and its name may be unknown.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("event"), str) or "time" not in record:
        return None
    kind = events().get(record["event"])
    fields = (*event_table().always, *(kind.fields if kind is not None else ()))
    return record if all(each.name not in record or each.accepts(record[each.name]) for each in fields) else None


def fits(value: object, kind: ValueKind) -> bool:
    """Whether the value has this type. JSON's true is not a number."""
    if kind in ELEMENT_KINDS:
        return isinstance(value, list) and all(fits(each, ELEMENT_KINDS[kind]) for each in value)
    return isinstance(value, TYPES[kind]) and isinstance(value, bool) == (kind is ValueKind.FLAG)
