"""Finds the rank to blame when all ranks agreed to end: one rank caught an error, the ranks exchanged that by a
collective or the store, and then all raised or left.

The ranks end in any order and often with the same words. The rank to blame is the one that the words name, or the one
whose evidence has something that no other has: another root of its chain of exceptions, or a traceback or an error that
it wrote to stderr before. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct, structs

from holdfast.diagnosis.causes.blame import Blame, blame, relays
from holdfast.diagnosis.causes.exception_text import ExceptionText, unwrapped
from holdfast.protocol.outcome import Failure, is_own_code

COMPARED_MAX = 64
"""Number of failures that are compared."""
NAMES_RANKS = re.compile(
    r"\b(?:global[ _])?ranks?(?:\(s\))?\W{0,4}(?:dict_keys\()?\W{0,3}(\d+(?:(?:,| and|, and)?\s*\d+)*)", re.IGNORECASE
)
SAYS_FAILED = re.compile(
    r"fail|error|exception|rais|abort|crash|died|dead|broke|\bnan\b|\binf\b|not finite|non-?finite|bad|invalid"
    r"|unhealthy|missing|caught|problem|corrupt|overflow|diverge|stopp",
    re.IGNORECASE,
)
ERROR_LINE = re.compile(
    r"\b\w*(?:Error|Exception)\b|\berror\b|\bfail(?:ed|ure)?\b|\bfatal\b|\bcritical\b", re.IGNORECASE
)
OF_HOLDFAST = re.compile(r"holdfast\.protocol\.errors\.\w+: (?:rank (\d+): )?")
"""An exception that holdfast.train raises on purpose, and the rank on which it began, if that is another one."""
PYTHON_WARNING = re.compile(r"^\S+:\d+: \w*Warning: (?:.*\n){1,12}?  \S.*\n", re.MULTILINE)
"""A warning of Python's on stderr, up to the source line below it: the program went on after it."""
EQUAL_CHARACTERS_MAX = 200


class Agreed(Struct, frozen=True):
    """The rank to blame, and what shows its cause."""

    culprit: Failure
    """The failure of that rank, one of the evidence."""
    seen: Failure
    """The culprit's failure with only the part of its text that is the cause, or the failure that reports it."""
    reported: str = ""
    """The other rank's words about the culprit, if the culprit's own text does not show its cause."""


def agreed(failures: Sequence[Failure], first: Failure) -> Agreed | None:
    """The rank to blame if `first`, which would be blamed otherwise, ended because the ranks had agreed to.

    None: they had not, or it is unknown which rank is to blame.
    """
    failures = failures[:COMPARED_MAX]
    parsed = ExceptionText(first)
    ours = OF_HOLDFAST.match(parsed.qualified)
    if ours is not None:  # holdfast.train raises on all ranks what went wrong on one, and names it
        its = next((each for each in failures if ours[1] and each.rank == int(ours[1]) and each is not first), None)
        return None if its is None or not OF_HOLDFAST.match(ExceptionText(its).qualified) else Agreed(its, its)

    named = _named(failures, first, parsed)
    if named is first:
        return None
    if named is not None:
        named_text = ExceptionText(named)
        if named_text.text and named_text.text != parsed.text and not relays(named, named_text):
            return Agreed(named, named)  # its own exception says more than what it wrote before, such as a warning
        own = _only_here(named, [each for each in failures if each is not named])
        if own is not None:
            return Agreed(named, own)
        return Agreed(named, first, _first_line(unwrapped(parsed.text) or parsed.last_line))

    alike = [each for each in failures if _end(each) == _end(first)]
    if not relays(first, parsed) and (len(alike) < 2 or not _on_purpose(first, parsed)):
        return None
    # A root of the exception that no other rank has counts more than what a rank wrote before.
    for each in failures:
        if blame(each) in (Blame.OWN, Blame.OWN_LATE) and ExceptionText(each).text and _unlike(each, failures):
            return Agreed(each, each)
    for each in failures:
        own = _only_here(each, [other for other in failures if other is not each])
        if own is not None:
            return Agreed(each, own)
    return None


def _named(failures: Sequence[Failure], first: Failure, parsed: ExceptionText) -> Failure | None:
    """The failure of the rank that the text of `first` names as failed: `loading failed on ranks [2]`; None: none.

    Ranks that all raise the same text name one of them. A single rank must speak of another one in its own words.
    """
    text = _first_line(parsed.text or parsed.last_line)
    if not SAYS_FAILED.search(text) or not _on_purpose(first, parsed):
        return None
    ranks = [int(number) for found in NAMES_RANKS.finditer(text) for number in re.findall(r"\d+", found[1])]
    if not ranks or len(set(ranks)) >= max(2, len(failures)):
        return None
    return next((each for each in failures if each.rank == ranks[0]), None)


def _on_purpose(failure: Failure, parsed: ExceptionText) -> bool:
    """Whether the script ended itself: by `raise` in its own code, or by an exit code."""
    if parsed.text:
        return bool(parsed.raised) or parsed.type == "CheckpointException"
    return is_own_code(failure.exit_code)


def _end(failure: Failure) -> tuple[int, str]:
    """A key that is equal for ranks that ended alike, except for numbers."""
    text = ExceptionText(failure).text
    return (0 if text else failure.exit_code), re.sub(r"\d+", "0", text[:EQUAL_CHARACTERS_MAX])


def _unlike(failure: Failure, failures: Sequence[Failure]) -> bool:
    """Whether no other rank's exception has this root, or this text."""
    root = _without_numbers(ExceptionText(failure).root)
    others = [ExceptionText(each) for each in failures if each is not failure]
    return all(root not in (_without_numbers(other.root), _without_numbers(other.text)) for other in others)


def _only_here(failure: Failure, others: Sequence[Failure]) -> Failure | None:
    """The failure with only what it wrote to stderr before its end, if no other rank did: a traceback, or an error."""
    parsed = ExceptionText(failure)
    theirs = "\n".join(_without_numbers(other.stderr_tail) for other in others)
    if parsed.caught_traceback:
        found = _with_traceback(failure, parsed.caught_traceback)
        root = ExceptionText(found).root
        if root and _without_numbers(_first_line(root)) not in theirs:
            return found
    before = PYTHON_WARNING.sub("", parsed.stderr_before)
    said = [
        line for line in before.splitlines() if ERROR_LINE.search(line) and _without_numbers(line.strip()) not in theirs
    ]
    if not said or not parsed.text:  # without an exception, its last words are its cause already
        return failure if said else None
    return structs.replace(failure, message="", error_type="", traceback="", stderr_tail=said[-1], exit_code=1)


def _with_traceback(failure: Failure, trace: str) -> Failure:
    return structs.replace(failure, message="", error_type="", traceback=trace, stderr_tail="", exit_code=1)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", text[-4096:])


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
