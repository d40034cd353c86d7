"""The rules of style that no linter knows."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from holdfast.diagnosis.reference import all_errors
from tools import error_table

ROOT = Path(__file__).resolve().parent.parent.parent
LINES_PER_FUNCTION_MAX = 70

# Words that mark unfinished work; spelled in parts so that this file does not hold them.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK|st" + r"ub)\b")
# Folders of one person's machine.
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|Users|work)/\w")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".sh", ".txt", ".yml", ""}
PURE = ("protocol", "coordinator", "authority", "agent")
IMPURE_MODULES = {"asyncio", "socket", "subprocess", "threading", "random", "time"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def files() -> tuple[Path, ...]:
    """Every file that git tracks or would track; without git, every file outside hidden folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        found = [ROOT / line for line in listing.stdout.splitlines()]
    else:
        found = [
            path for path in ROOT.rglob("*") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        ]
    return tuple(path for path in found if path.is_file() and path.suffix in TEXT_SUFFIXES)


def python_files(*below: str) -> Iterator[Path]:
    folders = tuple(ROOT / name for name in below)
    for path in files():
        if path.suffix == ".py" and (not below or any(folder in path.parents for folder in folders)):
            yield path


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    made = ast.parse(text(path), filename=str(path))
    gc.freeze()  # it stays: else the garbage collector looks at all of these trees again and again
    return made


def place(path: Path, line: int = 0) -> str:
    return f"{path.relative_to(ROOT)}:{line}" if line else str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(tree(path)):
        if isinstance(node, Function):
            yield node


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], node.lineno


def test_functions_are_short() -> None:
    long = []
    for path in python_files():
        for function in functions(path):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > LINES_PER_FUNCTION_MAX:
                long.append(f"{place(path, function.lineno)} {function.name}: {lines}")
    assert not long


OF_EXTENSIONS = {"About", "AtCoordinator", "OnNode"}
"""The classes of an extension."""


def test_a_name_means_one_class() -> None:
    """Who reads a class's name in one package finds no other class of that name elsewhere. Extensions have the same
    classes in the same files: `holdfast.extension_list` says which."""
    found: dict[str, list[str]] = {}
    for path in python_files("src"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and not (node.name in OF_EXTENSIONS and "extensions" in path.parts):
                found.setdefault(node.name, []).append(place(path, node.lineno))
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_data_files_are_shipped() -> None:
    """Every table that a module reads is named in pyproject.toml: an installation has only what is named there."""
    package = ROOT / "src/holdfast"
    patterns = tomllib.loads(text(ROOT / "pyproject.toml"))["tool"]["setuptools"]["package-data"]["holdfast"]
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    assert {path for path in files() if package in path.parents and path.suffix == ".toml"} <= shipped


def test_modules_say_what_they_know() -> None:
    silent = [
        place(path)
        for path in python_files("src", "benchmarks", "examples", "tools")
        if not ast.get_docstring(tree(path))
    ]
    assert not silent


def test_nothing_is_left_unfinished() -> None:
    marks = [
        f"{place(path, number)}: {line.strip()[:100]}"
        for path in files()
        if path.suffix in {".py", ".sh", ".toml"}
        for number, line in enumerate(text(path).splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not marks


def test_no_path_of_somebodys_machine() -> None:
    paths = [
        f"{place(path, number)}: {line.strip()[:100]}"
        for path in files()
        for number, line in enumerate(text(path).splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not paths


def test_pure_packages_have_no_clock_socket_or_process() -> None:
    """As import-linter's contract, but by name of the call too: `import datetime` would pass that one."""
    impure = []
    for path in python_files(*(f"src/holdfast/{name}" for name in PURE)):
        impure += [f"{place(path, line)} imports {name}" for name, line in imports(path) if name in IMPURE_MODULES]
        impure += [
            f"{place(path, node.lineno)} calls {ast.unparse(node.func)}"
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call)
            and re.search(r"\b(time|monotonic|now|today|urandom)$", ast.unparse(node.func))
            and re.match(r"(time|datetime|os)\b", ast.unparse(node.func))
        ]
    assert not impure


# --- tests that can fail ----------------------------------------------------------------------------------------------


def asserts(node: ast.AST) -> bool:
    """Whether something below `node` can fail: assert, pytest.raises/fail/warns, torch's assert_close, or a raise."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert | ast.Raise):
            return True
        if isinstance(inner, ast.Call):
            name = ast.unparse(inner.func)
            if name.rpartition(".")[2] in {"raises", "fail", "warns", "assert_close"}:
                return True
    return False


def asserting_helpers(paths: Iterable[Path], known: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names of functions and classes in these files that assert, directly or through one another."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    bodies = [node for path in paths for node in ast.walk(tree(path)) if isinstance(node, kinds)]
    found = known | {node.name for node in bodies if asserts(node)}
    while fresh := {node.name for node in bodies if node.name not in found and called_names(node) & found}:
        found |= fresh
    return found


def called_names(node: ast.AST) -> set[str]:
    return {ast.unparse(inner.func).rpartition(".")[2] for inner in ast.walk(node) if isinstance(inner, ast.Call)}


def test_every_test_can_fail() -> None:
    idle = []
    tests = [path for path in python_files("tests") if path.name.startswith("test_")]
    shared = asserting_helpers(path for path in python_files("tests") if path not in tests)
    for path in tests:
        helpers = asserting_helpers([path], shared)
        idle += [
            f"{place(path, function.lineno)} {function.name}"
            for function in functions(path)
            if function.name.startswith("test_") and not asserts(function) and not called_names(function) & helpers
        ]
    assert not idle


WAITS = {"communicate", "result", "settimeout", "timeout", "wait", "wait_for"}
"""Methods and functions that wait, of the standard library."""
STARTS = {"call", "check_call", "check_output", "run"}
"""Functions of subprocess that wait."""


def fixed_limits(module: ast.Module) -> Iterator[int]:
    """Lines on which a wait ends after a number of seconds that is written there."""
    for call in ast.walk(module):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        owner = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
        if call.func.attr not in WAITS and not (owner == "subprocess" and call.func.attr in STARTS):
            continue
        if owner in ("mark", "jobs", "job_folder", "harness", "hall") or (
            isinstance(call.func.value, ast.Attribute) and call.func.value.attr == "mark"
        ):
            continue  # scaled when tests are collected, and by the fixtures; the last two wait in virtual time
        given = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
        given += call.args[:1] if call.func.attr not in ("communicate", "wait_for") else call.args[1:2]
        if any(
            isinstance(each, ast.Constant) and isinstance(each.value, int | float) and each.value >= 1 for each in given
        ):
            yield call.lineno


def test_limits_grow_with_the_slowness_of_the_machine() -> None:
    """What a test waits for has `limit_s(seconds)` of tests/support/limits.py: no test fails because a machine is slow."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files("tests")
        if "scripts" not in path.parts and set(PURE).isdisjoint(path.parts)
        for line in fixed_limits(tree(path))
    ]
    assert found == []


def test_what_the_makefile_tests_is_there() -> None:
    named = re.findall(r"\btests/[\w/.]+", text(ROOT / "Makefile"))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_test_file_names_are_unique() -> None:
    seen: dict[str, Path] = {}
    twice = []
    for path in python_files("tests"):
        if path.name.startswith("test_"):
            if path.name in seen:
                twice.append(f"{place(path)} and {place(seen[path.name])}")
            seen[path.name] = path
    assert not twice


def test_a_name_means_one_module() -> None:
    """Packages that lie at one level have no two modules of one name: `machine.py` says nothing, `hang_detector.py` does.
    Each extension has the same files: there the name of the folder says what it is about."""
    found: dict[tuple[int, str], list[str]] = {}
    for path in python_files("src"):
        if path.name != "__init__.py" and "extensions" not in path.parts:
            found.setdefault((len(path.parts), path.name), []).append(place(path))
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_each_machine_is_one_class() -> None:
    """What follows from an event is in one place: the coordinator and the agent have no base and no subclass. Who may
    decide is an argument of the coordinator (`coordinator/authority.py`)."""
    machines = {"Coordinator", "Agent"}
    classes = [
        (place(path, node.lineno), node.name, set(map(ast.unparse, node.bases)))
        for path in python_files("src")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for _, name, _ in classes} >= machines
    assert not [where for where, name, bases in classes if bases & machines or (name in machines and bases)]


def test_the_scenarios_and_tests_that_comments_name_are_there() -> None:
    """A branch that a case made necessary names the case: who changes the branch reads that first."""
    scenarios = {path.stem for path in (ROOT / "tests" / "scenarios").glob("*.txt")}
    tests = {path.name for path in python_files("tests")}
    named, missing = 0, []
    for path in python_files("src"):
        comments = re.sub(r"\n *#", "", text(path))
        listed = re.findall(r"\bscenarios? ((?:`\w+`(?:, )?)+)", comments)
        found = {name for each in listed for name in re.findall(r"\w+", each)}
        named += len(found)
        missing += [f"{place(path)}: {name}" for name in found - scenarios]
        missing += [f"{place(path)}: {name}" for name in set(re.findall(r"\btest_\w+\.py\b", comments)) - tests]
    assert named > 30
    assert not missing


RETIRED = re.compile(
    r"(?<!time)keeper|lifeline|nurser|newborn|(?<![a-z])crew|oversight|insight|predecessor|(?<![a-z])tenure|probation|looker"
    r"|(?<![a-z])shelf|(?<![a-z])ticket|inquiry|inquest|vouched|(?<![a-z])heed|outwait",
    re.IGNORECASE,
)


def test_no_word_of_our_own_stands_for_a_word_of_the_field() -> None:
    """What is one idea has one name, and it is the field's: supervisor, fork server, worker group, leader lease."""
    found = []
    for path in [
        *python_files("src"),
        *(each for each in files() if ROOT / "docs" in each.parents and each.suffix == ".md"),
    ]:
        for number, line in enumerate(text(path).splitlines(), 1):
            if RETIRED.search(line):
                found.append(f"{place(path, number)}: {line.strip()[:80]}")
    assert not found


# --- sentences --------------------------------------------------------------------------------------------------------

WITHOUT_SUBJECT = re.compile(
    r"(?:After|Already|Also|Always|Among|As|At|Before|Behind|Beside|Between|Beyond|By|For|From|Had|Has|Have|How|In|Into|Is"
    r"|May|Must|Never|Not|Nor|Of|On|Or|Per|Since|So|Still|Than|To|Under|Until|Was|When|Where|Which|While|Who|Whom|Whose"
    r"|Why|With|Within|Without)\b"
)
"""First words after which no subject follows. Words that often begin a whole sentence (If, Because, Only) are not here."""


def docstrings(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of all docstrings, those of attributes and constants too."""
    for node in ast.walk(module):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", []), list) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, statement.value.value


def test_docstrings_are_sentences() -> None:
    found = [
        f"{place(path, line)}: {text.splitlines()[0][:80]}"
        for path in python_files("src/holdfast")
        for line, text in docstrings(tree(path))
        if WITHOUT_SUBJECT.match(text)
    ]
    assert found == [], (
        "write a sentence with a subject and a verb, or a noun that says what the thing is, with its unit: "
        "not `Of a hash.` but `Number of a hash's characters that are shown.`; not `Why it is closed.` but `The reason "
        "why it is closed; empty while it is open.`; not `When it ended.` but `The time of its end (epoch s).`"
    )


def test_the_rule_about_sentences_finds_what_it_is_for() -> None:
    faults = (
        "Of a hash.",
        "By index; None: no report.",
        "Why it is closed.",
        "For each problem the reason.",
        "In words.",
    )
    assert all(map(WITHOUT_SUBJECT.match, faults))
    good = (
        "Whether it is open.",
        "If it is lost, others go on.",
        "Only our file is overwritten.",
        "`8` or `500m`.",
        "",
    )
    assert not any(map(WITHOUT_SUBJECT.match, good))


# --- errors -----------------------------------------------------------------------------------------------------------


def test_error_codes_are_unique() -> None:
    codes = [error.code for error in all_errors()]
    assert sorted(codes) == sorted(set(codes))


@pytest.mark.parametrize("error", list(all_errors()), ids=lambda error: error.__name__)
def test_error_codes_match_whose_fault_it_is(error: type[error_table.errors.HoldfastError]) -> None:
    fault = error_table.errors.Fault
    series = {
        fault.CALLER: "HF1",
        fault.WORKER: "HF2",
        fault.PEER: "HF3",
        fault.STORAGE: "HF4",
        fault.OURS: "HF9",
    }
    assert re.fullmatch(series[error.fault] + r"\d\d", error.code)
    assert error.__doc__


def test_error_page_is_up_to_date() -> None:
    assert error_table.PATH.read_text(encoding="utf-8") == error_table.render(), "run `make fmt`"


def test_every_code_in_the_source_is_on_the_page() -> None:
    page = error_table.PATH.read_text(encoding="utf-8")
    codes = {code for path in python_files("src") for code in re.findall(r"\bHF\d{3}\b", text(path))}
    assert codes
    assert not {code for code in codes if f"| {code} |" not in page}
