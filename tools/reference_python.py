"""Make docs/api.md: the names that programs import from holdfast, with signatures and docstrings, read from the source.

Reads syntax trees and imports nothing of holdfast: torch is not needed for it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PATH = ROOT / "docs" / "api.md"
WIDTH = 110

HEAD = """# Python names

This page is made by `make fmt` from the docstrings. What is not here is not public: it may change in any version.

`holdfast.worker` needs the standard library alone, `holdfast.train` torch, `holdfast.launch` cloudpickle. Importing a package costs nothing: names
load what they need on first use.
"""

MODULES = (
    (
        "holdfast.worker",
        "What a training program can say to its launcher. Without holdfast, or under torchrun, all of it does nothing.",
    ),
    ("holdfast.train", "What a training script needs to survive; [train.md](train.md) shows it at work."),
    ("holdfast", "A function instead of a script; [python.md](python.md) shows it at work."),
)

CALLED_BY_TORCH = ("SnapshotReader", "SnapshotWriter")
"""Their methods are torch's to call."""
MADE_FOR_YOU = ("MicroBatch", "ProcessGroup", "Resumed", "Share", "TrainState", "WorkerFailedError")
"""Programs are given these, and do not make them."""

TYPES = (
    ("holdfast.train.accumulation", "MicroBatch"),
    ("holdfast.train.data", "Share"),
    ("holdfast.train.group", "ProcessGroup"),
    ("holdfast.train.resuming", "Resumed"),
    ("holdfast.train.state", "TrainState"),
)
"""Of objects that `holdfast.train` gives to a program, by their modules."""

Definition = ast.FunctionDef | ast.ClassDef
ARGUMENT = re.compile(r"(\w+(?:, \w+)*): (.*)")
COLUMNS = re.compile(r"(\w+(?:, \w+)*) {2,}(\S.*)")


def render() -> str:
    """The whole page."""
    return HEAD + "".join(module_text(name, said) for name, said in MODULES) + types_text()


def types_text() -> str:
    parts = ["\n## Types\n\nOf objects that a script gets from `holdfast.train` and does not make; for annotations.\n"]
    for module, name in TYPES:
        found = find(module, name)
        if found is None:
            raise LookupError(f"{module} has no {name}")
        parts.append(definition_text(f"{module}.{name}", found))
    return "".join(parts)


def module_text(module: str, said: str) -> str:
    parts = [f"\n## {module}\n\n{said}\n"]
    for name in sorted(public(module), key=str.lower):
        found = find(module, name)
        if found is not None:
            parts.append(definition_text(f"{module}.{name}", found))
    return "".join(parts)


# --- finding ----------------------------------------------------------------------------------------------------------


@cache
def tree(module: str) -> ast.Module:
    path = SOURCE / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def public(module: str) -> list[str]:
    """The module's `__all__`."""
    for node in tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return [name for name in names if not name.startswith("__")]
    raise LookupError(f"{module} has no __all__")


def find(module: str, name: str) -> Definition | None:
    """The class or function behind a name, through imports, those for type checkers too; None for what is neither."""
    for node in ast.walk(tree(module)):
        if isinstance(node, Definition) and node.name == name and not marked(node, "overload"):
            return node
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("holdfast"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(node.module, alias.name)
    return None


def marked(node: Definition, decorator: str) -> bool:
    return any(ast.unparse(each).partition("(")[0].rpartition(".")[2] == decorator for each in node.decorator_list)


# --- telling ----------------------------------------------------------------------------------------------------------


def definition_text(title: str, node: Definition) -> str:
    text = f"\n### {title}\n\n```python\n{signature(node)}\n```\n\n{doc_text(node)}"
    if isinstance(node, ast.ClassDef):
        rows = [f"| `{shown}` | {' '.join(said.split())} |" for shown, said in members(node)]
        if rows and node.name not in CALLED_BY_TORCH:
            text += "\n" + "\n".join(["| | |", "|---|---|", *rows]) + "\n"
    return text


def signature(node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        return class_signature(node)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if marked(node, "contextmanager"):
        yields = re.fullmatch(r" -> Iterator\[(.*)\]", returns)
        inner = yields[1] if yields else "None"
        return wrapped(f"with {node.name}", parameters(node), "" if inner == "None" else f" as {inner}")
    return wrapped(node.name, parameters(node), returns)


def class_signature(node: ast.ClassDef) -> str:
    bases = [ast.unparse(base) for base in node.bases if ast.unparse(base).endswith(("Error", "Warning"))]
    init = next((each for each in functions(node) if each.name == "__init__"), None)
    if init is not None and node.name not in MADE_FOR_YOU:
        return wrapped(f"class {node.name}", parameters(init))
    if marked(node, "dataclass") and node.name not in MADE_FOR_YOU:
        return wrapped(f"class {node.name}", [ast.unparse(each) for each, _ in fields(node)])
    return f"class {node.name}({', '.join(bases)})" if bases else f"class {node.name}"


def parameters(node: ast.FunctionDef) -> list[str]:
    """Each one as it is written; `self` and `cls` are left out."""
    every = [each for each in split(ast.unparse(node.args)) if each not in ("self", "cls")]
    return [re.sub(r"^(\w+: [^=]+)=(.+)$", r"\1 = \2", each) for each in every]


def split(text: str) -> list[str]:
    """At the commas outside of brackets and quotes."""
    parts, depth, quote, begin = [], 0, "", 0
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and not depth:
            parts.append(text[begin:index].strip())
            begin = index + 1
    return [*parts, text[begin:].strip()] if text else []


def wrapped(name: str, arguments: list[str], end: str = "") -> str:
    line = f"{name}({', '.join(arguments)}){end}"
    return line if len(line) <= WIDTH else f"{name}(\n    " + ",\n    ".join(arguments) + f",\n){end}"


def functions(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    yield from (each for each in node.body if isinstance(each, ast.FunctionDef))


def fields(node: ast.ClassDef) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Public annotated names, and the docstrings below them."""
    for each, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_"):
            said = after.value if isinstance(after, ast.Expr) else None
            yield each, said.value if isinstance(said, ast.Constant) and isinstance(said.value, str) else ""


def members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Fields, then public methods and properties that have a docstring."""
    for field, said in fields(node):
        yield f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}".replace("|", "\\|"), said
    for each in functions(node):
        said = ast.get_docstring(each)
        if each.name.startswith("_") or not said:
            continue
        arguments = "" if marked(each, "property") else f"({', '.join(parameters(each))})"
        yield f"{each.name}{arguments}".replace("|", "\\|"), said.split("\n\n")[0].replace("|", "\\|")


def doc_text(node: Definition) -> str:
    """A docstring as Markdown: paragraphs, code that is indented, and the arguments as a table."""
    said = ast.get_docstring(node)
    if not said:
        raise LookupError(f"{node.name} is public and has no docstring")
    blocks = "\n".join(block_text(block) for block in re.split(r"\n\n+", cleandoc(said)))
    return blocks.replace("\n```\n\n```python\n", "\n\n")


def block_text(block: str) -> str:
    lines = block.splitlines()
    if all(line.startswith("    ") for line in lines):
        return "```python\n" + "\n".join(line[4:] for line in lines) + "\n```\n"
    heads = [line for line in lines if not line.startswith(" ")]
    for pattern in (COLUMNS, ARGUMENT):
        if len(heads) > 1 and all(pattern.fullmatch(line) for line in heads):
            return arguments_table(lines, pattern)
    return block + "\n"


def arguments_table(lines: list[str], pattern: re.Pattern[str]) -> str:
    rows: list[list[str]] = []
    for line in lines:
        found = pattern.fullmatch(line)
        if found and not line.startswith(" "):
            rows.append([found[1], found[2].strip()])
        else:
            rows[-1][1] += " " + line.strip()
    shown = (f"| `{name}` | {said.replace('|', chr(92) + '|')} |" for name, said in rows)
    return "\n".join(["| argument | |", "|---|---|", *shown]) + "\n"
