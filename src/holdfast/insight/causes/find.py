"""From one failure to its cause: the first rule that fits, in words for the last screen.

Pure. Who is to blame was decided before (blame.py); here only what it was.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from functools import cache

from holdfast.core.errors import EXIT_FAILURE
from holdfast.core.outcome import Failure
from holdfast.insight.causes.blame import complaint, is_complaint
from holdfast.insight.causes.hints import HINTS
from holdfast.insight.causes.rules import RULES, Rule
from holdfast.insight.causes.words import Words, listen, unwrapped

SAID_CHARACTERS_MAX = 160
LINE_CHARACTERS_MAX = 300
TEXT_CHARACTERS_MAX = 16_384
ASIDE = r"^\[?[WID]\d{4} |\w*Warning: |^warnings\.warn\("
"""Lines of stderr that give no reason for an end: glog's below an error, and Python's warnings."""
"""So much of a text is searched: all that travels."""
NOT_EXECUTABLE, NOT_FOUND = 126, 127


@dataclass(frozen=True, slots=True)
class Cause:
    code: str
    line: str
    """One line, without who."""
    advice: str
    """One line; empty when there is nothing useful to say."""
    per_node: bool = False


def cause_of(failure: Failure) -> Cause:
    """What happened to this worker."""
    if not failure.started and failure.exit_code != EXIT_FAILURE:
        said = _first_line(failure.message)
        return Cause("HF202", f"could not be started: {said}", "check the program's path and its x bit", per_node=True)
    if failure.out_of_memory:
        advice = "its cgroup or machine ran out of memory: fewer data-loader workers, a smaller batch, or more memory"
        return Cause("HF203", "was killed by the kernel's out-of-memory killer (SIGKILL)", advice)
    words = listen(failure)
    kind = complaint(failure, words)
    for text, type_ in _texts(words):
        for rule in RULES:
            if kind in rule.only and _fits(rule, failure, words, text, type_):
                return _filled(rule, failure, text)
    return _plain(failure, words)


def _texts(words: Words) -> list[tuple[str, str]]:
    """What to search, with the class of the exception it is: its last words, then what they began with."""
    last = unwrapped(words.text)
    texts = [(last, words.type)]
    if last != words.text:
        texts = [(last, last.partition(":")[0]), (words.text, words.type)]
    if words.chained:
        root = (unwrapped(words.root), words.root_type)
        # What goes wrong with the peers while it cleans up is a consequence of its own fault.
        texts.insert(0 if is_complaint(last) else len(texts), root)
    return [(text[-TEXT_CHARACTERS_MAX:], type_) for text, type_ in texts]


def _fits(rule: Rule, failure: Failure, words: Words, text: str, type_: str) -> bool:
    if rule.stderr and not _search(rule.stderr, words.stderr + failure.traceback):
        return False
    if rule.frames and not any(_search(rule.frames, file) for file in words.frames[-8:]):
        return False
    if type_ in rule.types:
        return True
    if not text:
        # A signal that nobody explains: it ended so, or the end of its stderr says why.
        return failure.exit_code in rule.ends or bool(rule.says and _search(rule.says, _own_stderr(failure, words)))
    return bool(rule.says and _search(rule.says, text))


def _own_stderr(failure: Failure, words: Words) -> str:
    """Where it has no words of its own its stderr speaks for it; not for a SIGKILL, which no program foresees."""
    return "" if failure.exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL) else words.stderr


def _filled(rule: Rule, failure: Failure, text: str) -> Cause:
    said = _first_line(text) or _telling_line(rule, failure)
    line = rule.line.format(said=said, signal=signal_name(failure.exit_code)).rstrip(": ")
    found = [f"{failure.host}: {failure.facts[name]}" for name in rule.facts if failure.facts.get(name)]
    advice = "; ".join([rule.advice, *found])
    return Cause(rule.code, _cut(line, LINE_CHARACTERS_MAX), advice, rule.per_node)


def _telling_line(rule: Rule, failure: Failure) -> str:
    """The line of its stderr that made the rule fit; a usage is only the preface to its error."""
    fitting = [line for line in failure.stderr_tail.splitlines() if rule.says and _search(rule.says, line)]
    telling = next((line for line in fitting if not line.startswith("usage: ")), fitting[0] if fitting else "")
    return _cut(telling.strip(), SAID_CHARACTERS_MAX)


def _plain(failure: Failure, words: Words) -> Cause:
    """Nothing that the table knows."""
    text = words.text
    if text and not failure.message and failure.exit_code < 0:
        name = signal_name(failure.exit_code)
        return Cause("HF223", f"crashed in native code by {name}: {_first_line(text)}", NATIVE_ADVICE, per_node=True)
    if text:
        inner = unwrapped(text)
        hint = next((hint for says, hint in HINTS if _search(says, inner)), "")
        return Cause(
            "HF201",
            f"raised {'in a process of its own ' if inner != text else ''}{_first_line(inner).rstrip(': ')}",
            hint,
        )
    if failure.exit_code in (NOT_FOUND, NOT_EXECUTABLE):
        what = "found no such command" if failure.exit_code == NOT_FOUND else "may not execute its command"
        line = f"ended with exit code {failure.exit_code}: a shell {what}: {_last_said(words.stderr)}"
        return Cause(
            "HF205", line.rstrip(": "), "check the command in the script, and PATH on that node", per_node=True
        )
    if failure.exit_code < 0 or _is_signal(failure.exit_code - 128):
        return Cause("HF204", f"was ended by {signal_name(failure.exit_code)}", _signal_advice(failure.exit_code))
    said = _last_said(words.stderr)
    advice = "" if said else "it wrote no reason to stderr: look for sys.exit() or os._exit() in the script"
    line = f"ended with exit code {failure.exit_code}{': ' if said else ''}{said}"
    return Cause("HF205", line, advice)


def _last_said(stderr: str) -> str:
    """The text of `sys.exit(text)`, or whatever else it wrote last; not the warnings that libraries give at an end."""
    lines = [line.rstrip().rpartition("\r")[2].strip() for line in stderr.splitlines()]
    said = next((line for line in reversed(lines) if line and not _search(ASIDE, line)), "")
    return _cut(said, SAID_CHARACTERS_MAX)


def signal_name(exit_code: int) -> str:
    """`SIGSEGV (invalid memory access in native code)` of -11 and of a shell's 139."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    name = signal.Signals(number).name if _is_signal(number) else f"signal {number}"
    meaning = MEANINGS.get(name, "")
    return f"{name} ({meaning})" if meaning else name


def _is_signal(number: int) -> bool:
    return number in signal.valid_signals() and number < signal.SIGRTMIN and number > 0


NATIVE_ADVICE = (
    "an uncaught exception of compiled code: its stack is on stderr; suspects are extensions built for another version"
)

MEANINGS = {
    "SIGKILL": "killed from outside: kill -9, a scheduler, or an out-of-memory killer we could not see",
    "SIGSEGV": "invalid memory access in native code",
    "SIGBUS": "bad memory mapping, often a full /dev/shm",
    "SIGABRT": "native code gave up",
    "SIGFPE": "arithmetic error in native code",
    "SIGILL": "an instruction this processor does not have",
    "SIGTERM": "somebody asked it to end",
    "SIGINT": "interrupted",
    "SIGHUP": "its terminal went away",
}


def _signal_advice(exit_code: int) -> str:
    if exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "dmesg and the scheduler's log say who sent it"
    return ""


def _first_line(text: str) -> str:
    """The line that says most: the first, and with it the next where the first only announces it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    said = lines[0]
    if len(lines) > 1 and said.endswith((":", "?")) or (len(said) < 20 and len(lines) > 1):  # noqa: RUF021 - both are cheap
        said = f"{said} {lines[1]}"
    return _cut(said, SAID_CHARACTERS_MAX)


def _cut(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"


@cache
def _pattern(says: str) -> re.Pattern[str]:
    return re.compile(says, re.IGNORECASE | re.MULTILINE)


def _search(says: str, text: str) -> re.Match[str] | None:
    return _pattern(says).search(text)
