"""Plain data to YAML with comments, the same text for the same data.

Written here, because no YAML library keeps comments of its caller's, and the subset that manifests need is small: block
mappings and lists, plain words, everything else in double quotes. The tests hold it against PyYAML. Knows no Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

INDENT = "  "

PLAIN = re.compile(r"(--)?[A-Za-z_/][A-Za-z0-9_./@=+,-]*(:[A-Za-z0-9_./@=+,-]+)*")
"""Words that no YAML reader takes for a number, a date, or syntax."""
WORDS_WITH_A_MEANING = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})
SHORT_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}

Value = str | int | bool | None | Mapping[str, object] | Sequence[object]


@dataclass(frozen=True)
class Noted:
    """A value with a comment above it."""

    value: object
    note: str


def documents(values: Sequence[object], head: str = "") -> str:
    """Several documents in one text, under a comment."""
    texts = ["".join(f"{line}\n" for line in block(value, "")) for value in values]
    return "".join(f"{line}\n" for line in comment(head, "")) + "---\n".join(texts)


def block(value: object, pad: str) -> Iterator[str]:
    """The lines of any value."""
    value, note = bare(value)
    yield from comment(note, pad)
    if not is_block(value):
        yield pad + scalar(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            inner, note = bare(item)
            yield from comment(note, pad)
            yield from entry(f"{pad}{scalar(key)}:", inner, pad)
    elif isinstance(value, Sequence):
        for item in value:
            inner, note = bare(item)
            yield from comment(note, pad)
            if is_block(inner):
                first, *rest = block(inner, pad + INDENT)
                yield f"{pad}- {first.removeprefix(pad + INDENT)}"
                yield from rest
            else:
                yield f"{pad}- {scalar(inner)}"


def entry(key: str, value: object, pad: str) -> Iterator[str]:
    if is_block(value):
        yield key
        yield from block(value, pad + INDENT)
    else:
        yield f"{key} {scalar(value)}"


def is_block(value: object) -> bool:
    return isinstance(value, Mapping | Sequence) and not isinstance(value, str) and bool(value)


def bare(value: object) -> tuple[object, str]:
    return (value.value, value.note) if isinstance(value, Noted) else (value, "")


def comment(note: str, pad: str) -> Iterator[str]:
    for line in note.splitlines():
        yield f"{pad}# {''.join(letter if letter.isprintable() else '?' for letter in line)}".rstrip()


def scalar(value: object) -> str:
    """One value on one line.

    >>> scalar("a/b:1"), scalar("no"), scalar("4"), scalar(4), scalar({}), scalar("a: b")
    ('a/b:1', '"no"', '"4"', '4', '{}', '"a: b"')
    """
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str():
            plain = PLAIN.fullmatch(value) and value.lower() not in WORDS_WITH_A_MEANING
            return value if plain else quoted(value)
        case Mapping() if not value:
            return "{}"
        case Sequence() if not value:
            return "[]"
    raise TypeError(f"{type(value).__name__} is not for YAML")


def quoted(text: str) -> str:
    return f'"{"".join(map(escaped, text))}"'


def escaped(letter: str) -> str:
    if letter in SHORT_ESCAPES:
        return SHORT_ESCAPES[letter]
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
