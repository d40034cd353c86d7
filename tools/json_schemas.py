"""Make docs/schemas: a JSON schema of what each command prints with --json, and one of holdfast.toml.

Knows JSON_FORMS of the commands' modules: the forms of a command's document, and of each form the types whose fields
it has. msgspec makes the schemas of the types. Knows nothing of how documents are made; tests hold real outputs against the schemas.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from holdfast.cli import COMMANDS, JSON_SCHEMA, OF_EXTENSIONS, SHARED
from holdfast.cli.config_command import DRAFT, schema
from holdfast.extensions.load.messages import NodeLoad
from holdfast.protocol.rank_progress import JobView, NodeView

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schemas"
ELSEWHERE = {
    "run": ("holdfast.cli.plan",),
    "launch": ("holdfast.cli.plan",),
    "doctor": ("holdfast.doctor.findings",),
    "submit": ("holdfast.cli.submit", "holdfast.cli.submit_k8s"),
}
"""Modules with the forms of commands whose own module does not have them, or not all."""
FIGURES: dict[type, dict[str, type]] = {JobView: {}, NodeView: {"load": NodeLoad}}
"""Figures of extensions, which stand among those of the view (its field `more`)."""
EMBEDDED = "more"

Form = tuple[type, ...]


class AboutError(msgspec.Struct):
    """The reason why there is no other document. It is also on stderr, in words."""

    code: str
    message: str
    exit_code: int


class Error(msgspec.Struct):
    """What a command prints instead of its document if it fails."""

    error: AboutError


def forms_of(command: str) -> tuple[Form, ...]:
    """The forms of a command's document."""
    if command in OF_EXTENSIONS:
        modules = [OF_EXTENSIONS[command].file("command")]
    else:
        own = f"holdfast.cli.{SHARED.get(command, (command,))[0]}"
        modules = [import_module(name) for name in ELSEWHERE.get(command, (own,))]
    return tuple(form for module in modules for form in module.JSON_FORMS[command])


def document(command: str, *, closed: bool = False) -> dict[str, Any]:
    """The schema of a command's document. `closed`: fields that it does not name are refused, as in our tests."""
    forms = [*forms_of(command), (Error,)]
    known: dict[type, Any] = {}
    parts = [[as_object(part, known) for part in form] for form in forms]
    flat = [part for form in parts for part in form]
    refs, defs = msgspec.json.schema_components(flat, ref_template="#/$defs/{name}")
    schemas = dict(zip(map(id, flat), (inlined(ref, defs) for ref in refs), strict=True))
    listed = [together([schemas[id(part)] for part in form]) for form in parts]
    used = reachable(listed, defs)
    if closed:
        for each in (*listed, *used.values()):
            if each.get("type") == "object" and "properties" in each:
                each["additionalProperties"] = False
    return {
        "$schema": DRAFT,
        "title": f"holdfast {command} --json",
        "description": COMMANDS[command],
        "anyOf": listed,
        "$defs": dict(sorted(used.items())),
    }


def as_object(kind: Any, known: dict[type, Any]) -> Any:
    """The type as it is printed: structs are objects with all their fields, also those that are arrays in messages."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind not in known:
            texts, hints = field_texts(kind), get_type_hints(kind, include_extras=True)
            fields = [
                (name, described(as_object(hint, known), texts.get(name, "")))
                for name, hint in hints.items()
                if name != EMBEDDED
            ]
            fields += [
                (name, as_object(hint, known) | None, msgspec.UNSET) for name, hint in FIGURES.get(kind, {}).items()
            ]
            known[kind] = msgspec.defstruct(kind.__name__, fields, namespace={"__doc__": doc_of(kind)}, kw_only=True)
        return known[kind]
    if is_typeddict(kind):
        return typed_dict(kind, known)
    if get_origin(kind) is Annotated:
        return Annotated[(as_object(kind.__origin__, known), *kind.__metadata__)]
    parts = tuple(part if part is ... else as_object(part, known) for part in get_args(kind))
    if not parts:
        return kind
    return Union[parts] if isinstance(kind, UnionType) or get_origin(kind) is Union else get_origin(kind)[parts]  # noqa: UP007


def typed_dict(kind: Any, known: dict[type, Any]) -> Any:
    """A TypedDict as a struct: fields that may be missing have a default there."""
    if kind not in known:
        fields: list[Any] = []
        texts = field_texts(kind)
        for name, hint in get_type_hints(kind, include_extras=True).items():
            # __required_keys__ does not see NotRequired where annotations are texts.
            default = (msgspec.UNSET,) if get_origin(hint) is NotRequired else ()
            value = as_object(get_args(hint)[0] if default else hint, known)
            fields.append((attribute(name), described(value, texts.get(name, "")), *default))
        rename = {attribute(name): name for name in get_type_hints(kind)}
        known[kind] = msgspec.defstruct(
            kind.__name__, fields, namespace={"__doc__": doc_of(kind)}, kw_only=True, rename=rename
        )
    return known[kind]


def doc_of(kind: type) -> str:
    """The docstring as one line: Python 3.13 indents it in another way."""
    return " ".join((kind.__doc__ or "").split())


def field_texts(kind: type) -> dict[str, str]:
    """The text below each field of a class, which Python itself does not keep."""
    try:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    body = found.body if isinstance(found, ast.ClassDef) else []
    return {
        field.target.id: " ".join(str(text.value.value).split()).replace("None:", "null:")
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def described(kind: Any, text: str) -> Any:
    return Annotated[kind, msgspec.Meta(description=text)] if text else kind


def attribute(name: str) -> str:
    return f"{name}_" if name in ("from", "copy") else name


def inlined(ref: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = defs[ref["$ref"].rpartition("/")[2]]
    return found


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One object with the fields of all parts, and the version."""
    properties: dict[str, Any] = {"schema": {"const": JSON_SCHEMA, "description": "version of these schemas"}}
    required = ["schema"]
    for part in parts:
        properties |= part["properties"]
        required += part.get("required", [])
    text = " ".join(dict.fromkeys(part["description"] for part in parts if not part["description"].startswith("Part ")))
    return {"type": "object", "description": text, "properties": properties, "required": required}


def reachable(schemas: list[dict[str, Any]], defs: dict[str, Any]) -> dict[str, Any]:
    """The definitions that these schemas refer to, directly or not."""
    found: dict[str, Any] = {}
    open_ = json.dumps(schemas)
    while True:
        new = {name: each for name, each in defs.items() if name not in found and f'"#/$defs/{name}"' in open_}
        if not new:
            return found
        found |= new
        open_ = json.dumps(new)


def text_of(make: Callable[[], dict[str, Any]]) -> str:
    return json.dumps(make(), indent=1, ensure_ascii=False) + "\n"


PAGES: dict[Path, Callable[[], str]] = {
    **{FOLDER / f"{command}.json": partial(text_of, partial(document, command)) for command in COMMANDS},
    FOLDER / "holdfast.toml.json": partial(text_of, schema),
}
