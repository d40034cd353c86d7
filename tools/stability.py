"""The labels of the public Python names, and what a program may rely on in those that are stable.

    python -m tools.stability    # record the stable names as they are now

Labels are the table of docs/stability.md, names those of docs/api.md. tests/tidy compares the calls of stable names with those that are
recorded: a new argument needs a default, and nothing else may change. To record is to decide otherwise, which docs/stability.md allows for
a removal that was announced, and, before the first release, for anything.
"""

from __future__ import annotations

import ast
import copy
import json
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import takewhile

from tools import reference_python as reference

PAGE = reference.PATH.with_name("stability.md")
RECORD = reference.ROOT / "tests" / "tidy" / "stable_names.json"
LABELS = frozenset({"stable", "provisional"})

Call = list[str] | None
"""The arguments of a function or method; None for an attribute."""
Calls = Mapping[str, Call]


def labels() -> dict[str, str]:
    """The label of each name in the page's table."""
    rows = re.findall(r"^\| (.+) \| (\w+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: label for names, label in rows for name in re.findall(r"`(holdfast[\w.]+)`", names)}


def public_names() -> set[str]:
    return set(re.findall(r"^### (holdfast[\w.]+)$", reference.PATH.read_text(encoding="utf-8"), re.MULTILINE))


def stable_calls() -> dict[str, Call]:
    """How each stable name, and each public member of a stable class, is called."""
    return {name: call for stable, label in labels().items() if label == "stable" for name, call in calls(stable)}


def calls(name: str) -> Iterator[tuple[str, Call]]:
    module, _, own = name.rpartition(".")
    node = reference.find(module, own)
    if node is None:
        raise LookupError(f"docs/stability.md names {name}, which is neither a class nor a function")
    if isinstance(node, ast.FunctionDef):
        yield name, arguments(node)
        return
    methods = {each.name: each for each in reference.functions(node)}
    fields = [each for each, _ in reference.fields(node)]
    if own in reference.MADE_FOR_YOU:
        yield name, None
    elif "__init__" in methods:
        yield name, arguments(methods["__init__"])
    else:
        yield name, [plain(each) for each in fields] if reference.marked(node, "dataclass") else None
    yield from ((f"{name}.{ast.unparse(each.target)}", None) for each in fields)
    for each in methods.values():
        if not each.name.startswith("_") and ast.get_docstring(each):
            yield f"{name}.{each.name}", None if reference.marked(each, "property") else arguments(each)


def plain(field: ast.AnnAssign) -> str:
    return ast.unparse(field.target) + (f"={ast.unparse(field.value)}" if field.value else "")


def arguments(node: ast.FunctionDef) -> list[str]:
    """Without types: those may become wider."""
    bare = copy.deepcopy(node.args)
    for each in ast.walk(bare):
        if isinstance(each, ast.arg):
            each.annotation = None
    return [each for each in reference.split(ast.unparse(bare)) if each not in ("self", "cls")]


def broken(before: Calls, now: Calls) -> Iterator[str]:
    """What a program that was written for the first cannot do with the second."""
    for name, call in before.items():
        if name not in now:
            yield f"{name} is gone"
        elif (call is None) != (now[name] is None):
            yield f"{name} is {'an attribute' if call is None else 'called'} no longer"
        elif call != (new := now[name]):
            yield from (f"{name}: {reason}" for reason in changed(call or [], new or []))


def changed(before: list[str], now: list[str]) -> Iterator[str]:
    by_place = list(takewhile(lambda each: not each.startswith("*"), before))
    for place, each in enumerate(by_place):
        if not kept(each, now[place : place + 1]):
            yield f"argument {place + 1} was {each}"
    for each in before[len(by_place) :]:
        if each != "*" and not kept(each, now):
            yield f"argument {each} is gone, or has another default"
    names = {each.partition("=")[0] for each in before}
    for each in now:
        if each not in names and "=" not in each and not each.startswith("*") and each != "/":
            yield f"argument {each} is new and has no default"


def kept(argument: str, among: list[str]) -> bool:
    """Whether it is there as it was; one without a default may have got one."""
    return any(each == argument or ("=" not in argument and each.startswith(f"{argument}=")) for each in among)


def recorded() -> dict[str, Call]:
    found: dict[str, Call] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def main() -> int:
    RECORD.write_text(json.dumps(stable_calls(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"written: {RECORD.relative_to(reference.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
