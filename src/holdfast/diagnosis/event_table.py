"""The table of events (events.toml), read on first use, and a check of records against it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeGuard

import msgspec
from msgspec import Struct

from holdfast.text import read_table


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


class Field(Struct, frozen=True, array_like=True):
    name: str
    kind: ValueKind
    words: str
    """Meaning of the value, with its unit."""
    optional: bool = False
    """The field may be missing."""
    null: bool = False
    """The value may be null."""


class EventKind(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    when: str
    fields: tuple[Field, ...] = ()


class EventGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """The events that one part of holdfast writes."""

    title: str
    event: tuple[EventKind, ...]


class EventTable(Struct, frozen=True):
    always: tuple[Field, ...]
    """The fields of every record."""
    group: tuple[EventGroup, ...]


@cache
def table() -> EventTable:
    """The whole table."""
    found = read_table(__file__, "events.toml")
    for group in found["group"]:
        for event in group["event"]:
            fields = event.get("fields", ())
            event["fields"] = [found["shared"][field] if isinstance(field, str) else field for field in fields]
    return msgspec.convert(found, EventTable)


@cache
def events() -> dict[str, EventKind]:
    """All events by name."""
    return {kind.name: kind for group in table().group for kind in group.event}


def problems(record: Mapping[str, Any]) -> Iterator[str]:
    """How a record of events.jsonl differs from the table, in words; nothing if it does not."""
    kind = events().get(record.get("event", ""))
    if kind is None:
        yield f"unknown event {record.get('event')!r}"
        return
    fields = {field.name: field for field in (*table().always, *kind.fields)}
    for name, value in record.items():
        field = fields.get(name)
        if field is None:
            yield f"{kind.name}: unknown field {name!r}"
        elif not (fits(value, field.kind) or (field.null and value is None)):
            yield f"{kind.name}: {name} is no {field.kind.value}: {value!r}"
    for name, field in fields.items():
        if name not in record and not field.optional:
            yield f"{kind.name}: no {name}"


def is_readable(record: object) -> TypeGuard[dict[str, Any]]:
    """Whether all known fields have the types of the table, so that a reader must only expect missing fields. The
    record may have more fields and may be an event of another version."""
    if not isinstance(record, dict) or not isinstance(record.get("event"), str) or "time" not in record:
        return False
    kind = events().get(record["event"])
    return all(
        field.name not in record or fits(record[field.name], field.kind) or (field.null and record[field.name] is None)
        for field in (*table().always, *(kind.fields if kind is not None else ()))
    )


def fits(value: object, kind: ValueKind) -> bool:
    """Whether the value has this type. JSON's true is not a number."""
    match kind:
        case ValueKind.TEXT:
            return isinstance(value, str)
        case ValueKind.WHOLE:
            return isinstance(value, int) and not isinstance(value, bool)
        case ValueKind.NUMBER:
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ValueKind.FLAG:
            return isinstance(value, bool)
        case ValueKind.ITEMS:
            return isinstance(value, list)
        case ValueKind.TABLE:
            return isinstance(value, dict)
    part = {ValueKind.TEXTS: ValueKind.TEXT, ValueKind.WHOLES: ValueKind.WHOLE, ValueKind.NUMBERS: ValueKind.NUMBER}[
        kind
    ]
    return isinstance(value, list) and all(fits(each, part) for each in value)
