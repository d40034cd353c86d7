"""Makes texts of a peer safe for a console: no escape sequences, and no line breaks except where they belong. PURE.

The decoders call `clean` once for every message, so that no other module has to. Host names and reasons may contain any
bytes, and holdfast shows them to users.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

NAME_CHARS_MAX = 255
LINE_CHARS_MAX = 4096

NAMES = frozenset({"member", "host", "role"})
SEVERAL_LINES = frozenset({"text", "message", "traceback", "stderr_tail", "cause", "advice", "facts"})
"""Fields that may have several lines."""

_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])|\x9b[0-?]*[ -/]*[@-~]"
)
"""Escape sequences (colours, titles, cursor movements), matched as a whole so that no rest of them is shown."""

T = TypeVar("T")


def clean(value: T, field: str = "") -> T:
    """The same value with every text in it cleaned. Cheap if nothing has to be changed, which is nearly always.

    >>> clean(("fine", "\\x1b[2Jholdfast: done\\n"))
    ('fine', 'holdfast: done')
    """
    return _clean(value, field)  # type: ignore[no-any-return]


def _clean(value: Any, field: str) -> Any:
    if isinstance(value, str):
        return _text(value, field)
    if isinstance(value, Struct):
        old = {name: getattr(value, name) for name in value.__struct_fields__}
        new = {name: cleaned for name, item in old.items() if (cleaned := _clean(item, name)) is not item}
        return replace(value, **new) if new else value
    if isinstance(value, (tuple, list)):
        items = [_clean(item, field) for item in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        return {_clean(key, ""): _clean(item, field) for key, item in value.items()}
    return value


def _text(text: str, field: str) -> str:
    if field in SEVERAL_LINES:
        return text if text.isprintable() else "\n".join(map(_printable, text.split("\n")))
    chars_max = NAME_CHARS_MAX if field in NAMES else LINE_CHARS_MAX
    return text if text.isprintable() and len(text) <= chars_max else one_line(text, chars_max)


def one_line(text: str, chars_max: int = LINE_CHARS_MAX) -> str:
    return _printable(text).strip()[:chars_max]


def _printable(text: str) -> str:
    plain = _ESCAPE.sub("", text)
    return "".join(character if character.isprintable() else " " for character in plain)
