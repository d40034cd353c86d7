"""Explanations of every code that holdfast prints: errors, verdicts, hangs, the doctor's findings.

Pure and offline. Brings together protocol/errors.py, causes/texts.toml and the doctor's table.
"""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterator

from msgspec import Struct

from holdfast.diagnosis.causes.find import explanations, texts
from holdfast.doctor.findings import code_texts
from holdfast.protocol import errors
from holdfast.protocol.errors import Fault, HoldfastError

NEAREST_MAX = 3
FOUND_MAX = 8
EMPTY_WORDS = frozenset(
    [
        "a",
        "an",
        "and",
        "as",
        "at",
        "by",
        "error",
        "exit",
        "exited",
        "code",
        "status",
        "failed",
        "for",
        "from",
        "in",
        "is",
        "it",
        "job",
        "of",
        "on",
        "or",
        "rank",
        "the",
        "to",
        "was",
        "with",
    ]
)
"""Words that a search ignores."""


class Explanation(Struct, frozen=True, kw_only=True):
    code: str
    name: str
    """A few words."""
    cause: str
    evidence: str
    """The observation behind the code."""
    fix: str
    exit_code: int | None = None
    """Exit code of the command that prints it; None: the worker's own, or none at all."""


def everything() -> dict[str, Explanation]:
    """All codes in order."""
    found = {error.code: _of_error(error) for error in all_errors()}
    for code, text in texts().items():
        found[code] = Explanation(code=code, name=text.name, cause=text.cause, evidence=text.evidence, fix=text.fix)
    for code, (cause, evidence, fix) in code_texts().items():
        name = cause.partition(". ")[0].partition(": ")[0].rstrip(".")
        found[code] = Explanation(code=code, name=name, cause=cause, evidence=evidence, fix=fix)
    return dict(sorted(found.items()))


def headings() -> dict[str, str]:
    """Headings of groups of codes, by their first characters."""
    found: dict[str, str] = explanations()["headings"]
    return found


def nearest(code: str) -> list[str]:
    """Similar codes: the same number in another series, a different digit, words of a name."""
    known = everything()
    word = code.strip().lower()
    named = [each.code for each in known.values() if len(word) > 3 and word in f"{each.name} {each.cause}".lower()]
    digits = re.sub(r"\D", "", code)
    guess = f"HF{digits}" if digits else code.upper()
    close = difflib.get_close_matches(guess, known, n=NEAREST_MAX, cutoff=0.5)
    return list(dict.fromkeys([*named, *close]))[:NEAREST_MAX]


def search(text: str) -> list[Explanation]:
    """Explanations with all these words, best match first. An exit code also means its signal: 137 is SIGKILL."""
    words = {word for word in re.findall(r"[a-z0-9_]+", text.lower()) if word not in EMPTY_WORDS}
    number = re.search(r"(?:exit code|exit status|code|status|signal)\W*(-?\d+)|^\W*(-?\d+)\W*$", text.lower())
    exit_code = None
    if number is not None:
        exit_code = int(number[1] or number[2])
        words -= {str(abs(exit_code)), "signal"}
        words |= {name.lower() for name in [_signal_of(exit_code, text)] if name}
    found = []
    for each in everything().values():
        heads, rest = each.name.lower(), f"{each.cause} {each.evidence} {each.fix}".lower()
        points = sum(3 * (word in heads) + (word in rest) for word in words)
        whole = all(word in heads or word in rest for word in words)
        if exit_code is not None and each.exit_code == exit_code:
            points += 5
        if points and (whole or (exit_code is not None and each.exit_code == exit_code)):
            found.append((-points, each.code, each))
    return [each for _, _, each in sorted(found, key=lambda found: found[:2])][:FOUND_MAX]


def _signal_of(number: int, text: str) -> str:
    """`SIGKILL` for 137, -9 and `signal 9`."""
    number = number - 128 if number > 128 else -number if number < 0 else number if "signal" in text.lower() else 0
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def normal(code: str) -> str:
    """`HF211` for `hf211`, `211` and `HF211:`."""
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
    said = explanations()["faults"][error.fault.value]
    worker = error.fault is Fault.WORKER
    return Explanation(
        code=error.code,
        name=text.partition(". ")[0].rstrip("."),
        cause=f"{text} At fault: {said['whose']}.",
        evidence=said["evidence"],
        fix=said["fix"],
        exit_code=None if worker else error.exit_code,
    )
