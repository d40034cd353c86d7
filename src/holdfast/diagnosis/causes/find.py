"""Finds the cause of one failure: the first rule of rules.toml that matches, as a text for the last screen.

Exceptions without a code of their own may have a hint. Pure; the table is read on first use. blame.py has decided
before which failure is the culprit.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from msgspec import Struct, structs

from holdfast.diagnosis.causes.blame import CONTROL_FLOW, Blame, complaint, is_complaint, of_peers, types_of
from holdfast.diagnosis.causes.exception_text import (
    INTERRUPTS,
    ChainedException,
    ExceptionText,
    class_of,
    unwrapped,
)
from holdfast.protocol import errors
from holdfast.protocol.errors import HoldfastError
from holdfast.protocol.exit_codes import EXIT_FAILURE
from holdfast.protocol.outcome import Failure
from holdfast.text import read_table, shortened

_TIMED_OUT = frozenset({Blame.WAITED, Blame.WAITED_LATE, Blame.LOOSE})
KINDS = {
    "": frozenset(Blame),
    "own": frozenset({Blame.OWN, Blame.OWN_LATE}),
    "timed_out": _TIMED_OUT,
    "complaint": _TIMED_OUT | {Blame.CUT, Blame.STOPPED},
}
"""Values of `only` in a rule."""


class Rule(Struct, frozen=True, kw_only=True):
    """A rule of rules.toml. It matches by `says`, `types` or `ends`, if all its other conditions hold."""

    code: str
    line: str
    """Text of the verdict after `rank 3 on b`; {said} is the first line of the failure's text, {signal} the signal."""
    advice: str
    says: str = ""
    """Pattern for the failure's text, in any case; for its stderr if it has no text."""
    types: frozenset[str] = frozenset()
    """Classes of the exception, any of which matches instead of `says`."""
    ends: frozenset[int] = frozenset()
    """Signals, any of which matches instead of `says`, as exit codes, including 128+N of a shell in between."""
    stderr: str = ""
    """Pattern that stderr must also match, even if the failure has a text."""
    room: str = ""
    """Name of a fact. The rule does not match if the fact shows plenty of room."""
    known: str = ""
    """Name of a fact. The rule matches only if the fact is known."""
    only: frozenset[Blame] = KINDS[""]
    """Kinds of failures to which the rule applies."""
    frames: str = ""
    """Pattern that must also match a file of the traceback's last frames."""
    peers: bool = False
    """Whether text or frames must belong to communication with peers, since locks and databases can time out, too."""
    facts: tuple[str, ...] = ()
    """Names of facts from the failed worker's agent that the advice includes."""
    per_node: bool = False
    """Whether the cause depends on the machine, so that the text names nodes with and without it."""


@cache
def _file() -> dict[str, Any]:
    return read_table(__file__, "rules.toml")


@cache
def rules() -> tuple[Rule, ...]:
    """All rules; the first that matches decides."""
    parts: dict[str, str] = {}
    for name, text in _file()["parts"].items():
        parts[name] = _expanded(text, parts)
    return tuple(_rule(row, parts) for row in _file()["rule"])


@cache
def hints() -> tuple[tuple[str, str], ...]:
    """Patterns of texts, and the advice for each, for exceptions without a code of their own."""
    return tuple((_expanded(row["says"], {}), row["advice"]) for row in _file()["hint"])


def advice() -> Mapping[str, str]:
    """Advice for verdicts on several failures, by code: one line for the last screen."""
    found: dict[str, str] = _file()["advice"]
    return found


def _rule(row: Mapping[str, Any], parts: Mapping[str, str]) -> Rule:
    """One rule, with complete patterns, signals as exit codes and kinds of failures as a set.

    It is made field by field because two threads may need the rules at the same moment, and msgspec.convert crashes
    when two threads use a type for the first time.
    """
    values = dict(row)
    for name in ("advice", "says", "stderr", "frames"):
        if name in row:
            values[name] = _expanded(row[name], parts)
    numbers = {signal.Signals[name] for name in row.get("ends", ())}
    values["ends"] = frozenset({-number for number in numbers} | {128 + number for number in numbers})
    values["only"] = KINDS[row.get("only", "")]
    values["types"] = frozenset(row.get("types", ()))
    values["facts"] = tuple(row.get("facts", ()))
    return Rule(**values)


def _expanded(text: str | list[str], parts: Mapping[str, str]) -> str:
    """The complete text of a pattern, joined from its pieces, with names of parts replaced."""
    return re.sub(r"\{([A-Z_]+)\}", lambda found: parts[found[1]], "".join(text))


SAID_CHARACTERS_MAX = 160
LINE_CHARACTERS_MAX = 300
TEXT_CHARACTERS_MAX = 16_384
"""Length of the end of a text that is searched: as much as agents send."""
ATTEMPTS = types_of(
    "KeyError AttributeError IndexError StopIteration Empty ImportError ModuleNotFoundError FileNotFoundError"
)
"""Exceptions that scripts catch as control flow. An error in the handler is the cause, if the table knows it."""
WAITS = types_of("Empty Full TimeoutError BrokenBarrierError CancelledError")
"""Exceptions of a main thread whose wait for another thread fails."""
ROOM_BYTES_MIN = 2**30
ROOM = re.compile(r"has ([\d.]+) (GiB|MiB) free of ([\d.]+) (GiB|MiB)")
COUNTED = re.compile(r"\b\d+ (?:\w+ )?errors? (?:for|in|while|found|detected)\b")
"""First line of a list of errors: the next lines name a field and its error."""
UNITS = {"MiB": 2**20, "GiB": 2**30}
WITH_CODE = re.compile(r"^holdfast: HF\d+: ")
"""What a verdict of the same code does not repeat."""
NOT_EXECUTABLE, NOT_FOUND = 126, 127
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
ABORTED = (-signal.SIGABRT, 128 + signal.SIGABRT)


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of one failure, as a verdict shows it."""

    code: str
    line: str
    """The cause in one line, without the rank."""
    advice: str
    """Advice in one line; empty: there is no useful one."""
    per_node: bool = False
    """Whether the cause depends on the machine."""


def cause_of(failure: Failure) -> Cause:
    """The cause of this worker's failure."""
    if not failure.started and failure.exit_code != EXIT_FAILURE:
        said = _first_line(failure.message)
        return Cause("HF202", f"could not be started: {said}", "check the program's path and its x bit", per_node=True)
    if failure.out_of_memory:
        advice = "its cgroup or machine ran out of memory: fewer data-loader workers, a smaller batch, or more memory"
        return Cause("HF203", "was killed by the kernel's out-of-memory killer (SIGKILL)", advice)
    parsed = ExceptionText(failure)

    # A main thread whose wait for another thread fails is not the cause if that thread had died.
    name, died = parsed.thread
    if died and (parsed.type in WAITS or not parsed.text):
        cause = cause_of(
            structs.replace(failure, message="", error_type="", traceback=died, stderr_tail="", exit_code=1)
        )
        return replace(cause, line=f"lost its thread {name!r}, which {cause.line}")

    # Before the rules, which take each KeyboardInterrupt for a signal from outside.
    if parsed.interrupt and INTERRUPTS.search(parsed.interrupting_line):
        advice = "nobody sent a signal, unless that line is in the handler of one"
        return Cause("HF201", "raised KeyboardInterrupt", advice)
    if parsed.interrupt and not parsed.interrupting_line:
        return Cause("HF235", "was ended by a SIGINT, or by a KeyboardInterrupt that the program raised", "")

    kind = complaint(failure, parsed)
    for text, type_ in _texts(parsed):
        for rule in rules():
            if kind in rule.only and _matches(rule, failure, parsed, text, type_):
                return _cause_by_rule(rule, failure, parsed, text)
    return _cause_without_rule(failure, parsed)


def _texts(parsed: ExceptionText) -> list[tuple[str, str]]:
    """The texts to search, in this order, each with the class of its exception."""
    texts: list[tuple[str, str]] = []
    for link in _likely_causes(parsed.links):
        inner = unwrapped(link.text)
        if inner != link.text:
            texts.append((inner, class_of(inner)))
        texts.append((link.text, link.type or parsed.type))
    return [(text[-TEXT_CHARACTERS_MAX:], type_) for text, type_ in texts]


def _likely_causes(links: Sequence[ChainedException]) -> list[ChainedException]:
    """The exceptions of a chain that may name the cause, the most likely first.

    The root comes first, then exceptions that were raised to explain it. Errors of peers and accidental errors during
    the clean-up (`finally:`) are consequences. Later exceptions come first only if the root is control flow (`except
    KeyError:`).
    """
    last, start = links[-1], 0
    if not is_complaint(last.text) or all(link.in_library for link in links[:-1]):
        while (
            start < len(links) - 1
            and _is_attempt(links[start])
            and not _is_explained_by(links[start], links[start + 1])
        ):
            start += 1
    root, after = links[start], links[start + 1 :]
    if is_complaint(last.text) and not is_complaint(root.text):
        after = ()
    explained = [link for number, link in enumerate(after) if all(each.explains for each in after[: number + 1])]
    return [root, *explained, *reversed(links[:start])]


def _is_explained_by(link: ChainedException, later: ChainedException) -> bool:
    """Whether the script caught its own exception only to raise another one: then it did not try another way."""
    return later.explains and not link.in_library and not later.in_library


def _is_attempt(link: ChainedException) -> bool:
    return link.type in ATTEMPTS or (link.type in CONTROL_FLOW and link.in_library)


def _matches(rule: Rule, failure: Failure, parsed: ExceptionText, text: str, type_: str) -> bool:
    if rule.stderr and not _search(rule.stderr, parsed.stderr + failure.traceback):
        return False
    if rule.frames and not any(_search(rule.frames, file) for file in parsed.frames[-8:]):
        return False
    if rule.peers and not of_peers(parsed, text or parsed.filtered_stderr):
        return False
    if rule.known and not failure.facts.get(rule.known):
        return False
    if rule.room and _has_room(failure.facts.get(rule.room, "")):
        return False
    if type_ in rule.types:
        return True
    if not text:
        # A signal without an explanation: the end of stderr may say more.
        return failure.exit_code in rule.ends or bool(rule.says and _search(rule.says, _own_stderr(failure, parsed)))
    return bool(rule.says and _search(rule.says, text))


def _has_room(fact: str) -> bool:
    """Whether a fact such as `/dev/shm has 15.6 GiB free of 15.7 GiB` shows room enough: half, and ROOM_BYTES_MIN."""
    found = ROOM.search(fact)
    if found is None:
        return False
    free, size = float(found[1]) * UNITS[found[2]], float(found[3]) * UNITS[found[4]]
    return free >= max(ROOM_BYTES_MIN, size / 2)


def _own_stderr(failure: Failure, parsed: ExceptionText) -> str:
    """The stderr of a failure without an exception; empty for SIGKILL, which no program can explain before it comes."""
    return "" if failure.exit_code in KILLED else parsed.filtered_stderr


def _cause_by_rule(rule: Rule, failure: Failure, parsed: ExceptionText, text: str) -> Cause:
    said = _first_line(text) or _matched_line(rule, parsed)
    if not said and failure.exit_code in ABORTED:
        said = shortened(parsed.line_before_fatal, SAID_CHARACTERS_MAX)
    line = rule.line.format(said=said, signal=signal_name(failure.exit_code)).rstrip(": ")
    found = [f"{failure.host}: {failure.facts[name]}" for name in rule.facts if failure.facts.get(name)]
    advice = "; ".join([rule.advice, *found])
    return Cause(rule.code, shortened(line, LINE_CHARACTERS_MAX), advice, rule.per_node)


def _matched_line(rule: Rule, parsed: ExceptionText) -> str:
    """The line of stderr that the rule matched; for a usage text, the error after it."""
    fitting = [line for line in parsed.filtered_stderr.splitlines() if rule.says and _search(rule.says, line)]
    line = next((line for line in fitting if not line.lower().startswith("usage: ")), fitting[0] if fitting else "")
    return shortened(WITH_CODE.sub("", line.strip()), SAID_CHARACTERS_MAX)


def _cause_without_rule(failure: Failure, parsed: ExceptionText) -> Cause:
    """The cause of a failure that the table does not know."""
    text = parsed.text
    if text and not failure.message and failure.exit_code < 0:
        name = signal_name(failure.exit_code)
        return Cause("HF223", f"crashed in native code by {name}: {_first_line(text)}", NATIVE_ADVICE, per_node=True)
    if failure.message and not (failure.error_type or failure.traceback or failure.stderr_tail):
        # A sentence instead of an exception: a torchrun under this coordinator reports its workers like this.
        return Cause("HF205", f"failed: {shortened(_first_line(text), SAID_CHARACTERS_MAX)}", "")
    if text:
        return _raised(parsed)
    if failure.exit_code in (NOT_FOUND, NOT_EXECUTABLE):
        what = "found no such command" if failure.exit_code == NOT_FOUND else "may not execute its command"
        said = shortened(parsed.last_line, SAID_CHARACTERS_MAX)
        line = f"ended with exit code {failure.exit_code}: a shell {what}: {said}"
        return Cause(
            "HF205", line.rstrip(": "), "check the command in the script, and PATH on that node", per_node=True
        )
    if failure.exit_code < 0 or _is_signal(failure.exit_code - 128):
        return Cause("HF204", f"was ended by {signal_name(failure.exit_code)}", _signal_advice(failure.exit_code))
    said = shortened(parsed.last_line, SAID_CHARACTERS_MAX)
    advice = (
        "" if said else "no reason of it was kept: look at its output, and for sys.exit() or os._exit() in the script"
    )
    line = f"ended with exit code {failure.exit_code}{': ' if said else ''}{said}"
    return Cause("HF205", line, advice)


def _raised(parsed: ExceptionText) -> Cause:
    """The cause for an exception that the table does not know. For a chain, it names the root and the end."""
    chain = _likely_causes(parsed.links)
    text = chain[0].text
    inner = unwrapped(text)
    of_a_child = inner != text and chain[0].type != "CheckpointException"
    line = f"raised {'in a child process ' if of_a_child else ''}{_first_line(inner).rstrip(': ')}"
    last = parsed.links[-1]
    if last.text != text:
        joint = ", and because of it" if last.explains else ", and while that was handled"
        line = f"{line}{joint} {_first_line(last.text).rstrip(': ')}"
    hint = next((hint for says, hint in hints() if _search(says, inner)), "")
    return Cause("HF201", shortened(line, LINE_CHARACTERS_MAX), hint or _explained(parsed.qualified))


def _explained(text: str) -> str:
    """The advice for an error of holdfast's own, by its class with its module; empty: it is none."""
    module, _, name = text.partition(":")[0].rpartition(".")
    kind = vars(errors).get(name) if module == errors.__name__ else None
    return f"`holdfast explain {kind.code}`" if isinstance(kind, type) and issubclass(kind, HoldfastError) else ""


def signal_name(exit_code: int) -> str:
    """The signal with its meaning: `SIGSEGV (invalid memory access in native code)` for -11 and a shell's 139."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    name = signal.Signals(number).name if _is_signal(number) else f"signal {number}"
    meaning = MEANINGS.get(name, "")
    return f"{name} ({meaning})" if meaning else name


def _is_signal(number: int) -> bool:
    return number in signal.valid_signals() and number < signal.SIGRTMIN


NATIVE_ADVICE = (
    "an uncaught exception of compiled code: its stack is on stderr; suspects are extensions built for another version"
)

MEANINGS = {
    "SIGKILL": "killed from outside: kill -9, a scheduler, or an out-of-memory killer that holdfast cannot see",
    "SIGSEGV": "invalid memory access in native code",
    "SIGBUS": "bad memory mapping, often a full /dev/shm",
    "SIGABRT": "native code gave up",
    "SIGFPE": "arithmetic error in native code",
    "SIGILL": "an instruction this processor does not have",
    "SIGTERM": "asked to end",
    "SIGINT": "interrupted",
    "SIGHUP": "its terminal was closed",
}


def _signal_advice(exit_code: int) -> str:
    return "dmesg and the scheduler's log say who sent it" if exit_code in KILLED else ""


def _first_line(text: str) -> str:
    """The most informative line: the first one, with the next one if the first only announces a list."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    said = lines[0]
    if len(lines) > 1 and (said.endswith((":", "?")) or len(said) < 20 or COUNTED.search(said)):
        said = f"{said} {' '.join(lines[1:3] if COUNTED.search(said) else lines[1:2])}"
    return shortened(said, SAID_CHARACTERS_MAX)


@cache
def _pattern(says: str) -> re.Pattern[str]:
    return re.compile(says, re.IGNORECASE | re.MULTILINE)


def _search(says: str, text: str) -> re.Match[str] | None:
    return _pattern(says).search(text)
