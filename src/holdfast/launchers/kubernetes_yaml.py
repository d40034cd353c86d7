"""YAML with comments, by ruamel.yaml, as kubectl reads it. PURE.

The same data gives the same text. Knows nothing about Kubernetes' objects.

kubectl reads YAML 1.1, where `no` is false and `1:30` is 90. ruamel.yaml writes 1.2, or a directive that kubectl does
not expect. So a text is in double quotes unless it is a plain word in both versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from holdfast.protocol.errors import MissingPackageError

INDENT = 2
LINE_CHARACTERS_MAX = 2**30
"""Line width for ruamel.yaml, so large that no command is wrapped."""
PLAIN = re.compile(r"(--)?[A-Za-z_/][A-Za-z0-9_./@=+,-]*(:[A-Za-z0-9_./@=+,-]+)*")
"""Words that no YAML reader interprets as a number, a date or syntax."""
WORDS_WITH_A_MEANING = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})


@dataclass(frozen=True)
class Commented:
    """A value with a comment above it."""

    value: object
    note: str


def documents(values: Sequence[object], head: str = "") -> str:
    """Several documents in one text, under a comment. Raises MissingPackageError."""
    try:
        from ruamel.yaml import YAML
    except ImportError:
        raise MissingPackageError("holdfast submit --k8s needs ruamel.yaml: pip install 'holdfast[k8s]'") from None
    emitter = YAML()
    emitter.indent(mapping=INDENT, sequence=2 * INDENT, offset=INDENT)
    emitter.width = LINE_CHARACTERS_MAX
    texts = []
    for value in values:
        text = StringIO()
        emitter.dump(emittable(value), text)
        texts.append(text.getvalue())
    return "".join(f"{f'# {line}'.rstrip()}\n" for line in comment(head)) + "---\n".join(texts)


def plain(value: object) -> Any:
    """The value without its comments, for JSON."""
    match value:
        case Commented():
            return plain(value.value)
        case Mapping():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    return value


def emittable(value: object, column: int = 0) -> Any:
    """Convert the value for ruamel.yaml, with its comments at `column`. Raises TypeError for a type that YAML lacks."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString

    match value:
        case Commented():
            return emittable(value.value, column)
        case None | bool() | int():
            return value
        case str():
            is_plain = PLAIN.fullmatch(value) and value.lower() not in WORDS_WITH_A_MEANING
            return value if is_plain else DoubleQuotedScalarString(value)
        case Mapping():
            made: Any = CommentedMap()
            for key, item in value.items():
                made[emittable(key)] = emittable(item, column + INDENT)
        case Sequence():
            made = CommentedSeq(emittable(item, column + INDENT) for item in value)
        case _:
            raise TypeError(f"{type(value).__name__} is not for YAML")
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        if isinstance(item, Commented):
            made.yaml_set_comment_before_after_key(key, before="\n".join(comment(item.note)), indent=column)
    return made


def comment(note: str) -> Iterator[str]:
    """The lines of a comment. A character that is not printable would end the comment, or the document."""
    for line in note.splitlines():
        yield "".join(letter if letter.isprintable() else "?" for letter in line)
