"""Every code that holdfast prints, and what is to be said about it: errors, verdicts, hangs, the doctor's findings.

Pure and offline. Brings together core/errors.py, causes/texts.py and the doctor's table.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from msgspec import Struct

from holdfast.core import errors
from holdfast.core.errors import Fault, HoldfastError
from holdfast.insight.causes.texts import TEXTS
from holdfast.insight.doctor.codes import CODES as DOCTORS

NEAREST_MAX = 3

WHOSE = {
    Fault.CALLER: "the command line, the configuration or the machine it names",
    Fault.WORKER: "a training process",
    Fault.PEER: "another node, or the way to it",
    Fault.STORAGE: "the storage",
    Fault.OURS: "holdfast itself",
}
EVIDENCE = {
    Fault.CALLER: "What was given or found is named in the message; nothing was started.",
    Fault.WORKER: "How the worker ended; see its verdict.",
    Fault.PEER: "What this node heard from the others, and when, is in the message and in events.jsonl.",
    Fault.STORAGE: "The file or folder is named in the message.",
    Fault.OURS: "A rule that holdfast checks on itself does not hold; the last events are in the traceback and in events.jsonl.",
}
FIX = {
    Fault.CALLER: "Change what the message names; `holdfast run --plan …` shows how a command line is understood, `holdfast doctor` what this machine offers.",
    Fault.WORKER: "See the verdict's own code.",
    Fault.PEER: "`holdfast doctor`, run on all nodes with the same endpoint, tests every pair of them.",
    Fault.STORAGE: "Space, rights and mount of that folder; `holdfast snaps verify` checks what is there.",
    Fault.OURS: "Please report it, with events.jsonl and the output of `holdfast env`.",
}


class Explanation(Struct, frozen=True, kw_only=True):
    code: str
    name: str
    """A few words."""
    cause: str
    evidence: str
    """What holdfast saw to say so."""
    fix: str
    exit_code: int | None = None
    """Of the command that prints it; None: the worker's own, or none at all."""


def everything() -> dict[str, Explanation]:
    """All codes in order."""
    found = {error.code: _of_error(error) for error in all_errors()}
    for code, text in TEXTS.items():
        found[code] = Explanation(code=code, name=text.name, cause=text.cause, evidence=text.evidence, fix=text.fix)
    for code, (cause, evidence, fix) in DOCTORS.items():
        name = cause.partition(". ")[0].partition(": ")[0].rstrip(".")
        found[code] = Explanation(code=code, name=name, cause=cause, evidence=evidence, fix=fix)
    return dict(sorted(found.items()))


def nearest(code: str) -> list[str]:
    """Codes that may be meant: the same number with another hundred, a digit exchanged, words of a name."""
    known = everything()
    word = code.strip().lower()
    named = [each.code for each in known.values() if len(word) > 3 and word in f"{each.name} {each.cause}".lower()]
    digits = re.sub(r"\D", "", code)
    guess = f"HF{digits}" if digits else code.upper()
    close = difflib.get_close_matches(guess, known, n=NEAREST_MAX, cutoff=0.5)
    return list(dict.fromkeys([*named, *close]))[:NEAREST_MAX]


def normal(code: str) -> str:
    """`HF211` of `hf211`, `211` and `HF211:`."""
    digits = re.fullmatch(r"(?:hf)?(\d{3}):?", code.strip().lower())
    return f"HF{digits[1]}" if digits else code


def all_errors(root: type[HoldfastError] = HoldfastError) -> Iterator[type[HoldfastError]]:
    """All classes of core/errors.py, the root first. Subclasses made elsewhere keep their parent's code."""
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from all_errors(child)


def _of_error(error: type[HoldfastError]) -> Explanation:
    text = " ".join((error.__doc__ or "").split())
    worker = error.fault is Fault.WORKER
    return Explanation(
        code=error.code,
        name=text.partition(". ")[0].rstrip("."),
        cause=f"{text} At fault: {WHOSE[error.fault]}.",
        evidence=EVIDENCE[error.fault],
        fix=FIX[error.fault],
        exit_code=None if worker else error.exit_code,
    )
