"""Reads the text of a failed worker: its last exception, the root of that, where the root was raised, and stderr.

Pure. Reads Python's tracebacks from the error file or from stderr, where torch puts `[rank3]: ` before each line.
Tolerates incomplete texts; judges nothing.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from functools import cached_property
from typing import NamedTuple

from holdfast.protocol.outcome import Failure, is_own_code
from holdfast.protocol.rank_progress import TORCH
from holdfast.text import shortened

CHAINED = re.compile(
    r"^(?:During handling of the above exception, another exception occurred:"
    r"|The above exception was the direct cause of the following exception:)\s*$",
    re.MULTILINE,
)
HEAD = "Traceback (most recent call last):"
DIRECT = "The above exception was the direct cause"
GROUP = "Exception Group Traceback (most recent call last):"
FIRST_OF_GROUP = re.compile(r"^[ \t]*\+-\+-+ 1 -+[ \t]*$", re.MULTILINE)
IN_GROUP = re.compile(r"^[ \t]*\| ?", re.MULTILINE)
THREAD = re.compile(r"^Exception in thread (.+):\n(?=Traceback )", re.MULTILINE)
HANDLED = re.compile(
    r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(?:\S.*\n?)?"
    r"(?:\n(?:During handling of the|The) above exception[^\n]*:\n\n?)?",
    re.MULTILINE,
)
"""A traceback on stderr, with the first line of its exception, and what joins it to the next one of a chain."""
ASIDE = re.compile(
    r"^\[?[WID]\d{4} |Warning: |^\s*warnings\.warn\(|^wandb: (?!ERROR)|\b(?:INFO|DEBUG|WARNING)\b"
    r"|resource_tracker|^holdfast: process \d+ raised|^terminate called (?:without|recursively)"
    r"|^(?:make|srun|slurmstepd)\S*: "
)
"""Lines of stderr that are not a cause: glog lines below an error, Python's warnings, other lines of logs, what a
shell or the end of the interpreter adds."""
NO_REASON = re.compile(r"^holdfast: (?!HF\d)|^frame #\d+: |^Exception raised from ")
"""Lines that holdfast's library writes while training goes on, and those of torch's C++ traces, which also follow a
mere warning. After a traceback a line of holdfast shows that the program went on, so ASIDE does not have them. With a
code of an error it is the reason of an end (HF253)."""
WARNING = re.compile(r"^\S+:\d+: \w*Warning: (?:holdfast: .*\n(?:\S.*\n){0,2}|.*\n)  \S.*\n?", re.MULTILINE)
"""A warning of Python's with the source line below it. One of holdfast may have several lines."""
PROGRESS = re.compile(r"\d%\s*\||\d%\||\bit/s\b|\bs/it\b")
"""A line of a progress bar."""
CONTINUES = re.compile(
    r"^(?:CUDA kernel errors|For debugging|Compile with|Device-side|Exception raised from|frame #\d|C\+\+ |Last error"
    r"|nccl\w+:|Search for|You can|Please|See |This |If |\(|-- |[\^~]|\d)"
)
"""Lines below the first line of an exception that belong to its message. Any other line was written later."""
FATAL = re.compile(r"^Fatal Python error: .*$", re.MULTILINE)
DUMP = re.compile(
    r"^(?:Timeout \(\d[\d:.]*\)!\n)?(?:Fatal Python error: .*\n\s*)?"
    r"(?:(?:Current thread|Thread) 0x\w+ .*\n(?:  .*\n?|\n)*)+"
    r"(?:Extension modules: .*\n?)?",
    re.MULTILINE,
)
"""Stacks that faulthandler has written."""
DUMPED_TIMEOUT = re.compile(r"^Timeout \(\d[\d:.]*\)!$", re.MULTILINE)
SAID_LINES_MAX = 8
"""Number of last lines that may explain why a program ended with an exit code of its own."""
RANK_PREFIX = re.compile(r"^(?:\[[^\]\n]{0,40}rank ?\d+[^\]\n]{0,40}\]:? ?|\[?default\d+\]?: ?)", re.MULTILINE)
EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(?:\.<locals>\.[\w.]+)*)(?::[ \n]|:?$)")
FRAME = re.compile(r'^[ \t]+File "([^"\n]+)", line \d+(?:, in (.+)| in (.+))?', re.MULTILINE)
CAUGHT_FRAME = re.compile(r'^[ \t]+File "[^"\n]+", line \d+, in .*\n?', re.MULTILINE)
"""A frame of a traceback. Those of a crash dump have no comma behind the number."""
LIBRARY = re.compile(rf"site-packages|dist-packages|/lib/python3|<frozen |{TORCH}")
FRAMES_MAX = 12
NATIVE_END = re.compile(r"terminate called after throwing an instance of '([^']*)'\s*(?:what\(\):\s*(.*))?", re.DOTALL)
IN_WORKER = re.compile(
    r"Caught (\w+) in (?:DataLoader worker process|replica|pin memory thread)"
    r"|-- Process \d+ terminated with the following error:"
    r"|^[\w.]*CheckpointException(?:: CheckpointException)? ranks:.*"
)
NOT_ERRORS = frozenset({"Traceback", "SystemExit", "KeyboardInterrupt", "GeneratorExit"})
PLACED = re.compile(r'^[ \t]+File "([^"\n]+)", line (\d+)(?:,? in .+)?(?:\n(?![ \t]+File )[ \t]+(\S.*))?', re.MULTILINE)
OURS = re.compile(r"/holdfast/\w+/|/runpy\.py")
INTERRUPTED = re.compile(r"^KeyboardInterrupt\b", re.MULTILINE)
INTERRUPTS = re.compile(r"(?:^|[:;] *)raise\b.*\bKeyboardInterrupt\b")
"""A line that raises KeyboardInterrupt. Of a SIGINT, the innermost line is the one that was interrupted."""
SOURCE_CHARACTERS_MAX = 80
RAISE = re.compile(r"(?:^|[:;] *)raise\b")


class ChainedException(NamedTuple):
    """One exception of a chain."""

    text: str
    in_library: bool
    explains: bool
    """Whether it was raised `from` the previous one, or by a `raise` in its handler; else it is an error of the handler
    itself."""

    @property
    def type(self) -> str:
        """The exception's class, without the module."""
        return class_of(self.text)


class ExceptionText:
    """The text of one failure, in parts. A part that is missing is an empty string.

    Parts are parsed when they are used: a job that loses a node has thousands of failures, and all are read before it
    continues.
    """

    def __init__(self, failure: Failure) -> None:
        self._failure = failure

    @cached_property
    def text(self) -> str:
        """The last exception as `Type: text`, all lines: from the error file, else from the last traceback on stderr,
        else a native error."""
        if self._message:
            return self._message
        text = _exception(CHAINED.split(self._traceback)[-1])
        return native_message(self.stderr) if not text and self._failure.exit_code < 0 else text

    @cached_property
    def qualified(self) -> str:
        """The same from its traceback, where the class has its module. An error file has the class alone."""
        return _exception(CHAINED.split(self._traceback)[-1]) or self.text

    @cached_property
    def type(self) -> str:
        """The class of that exception, without the module."""
        name = self._failure.error_type if self._message else class_of(self.text)
        return name.rpartition(".")[2]

    @cached_property
    def root(self) -> str:
        """The root exception as `Type: text`. It differs from `text` only if Python chained exceptions."""
        if self._message and self._first is self._traceback:
            return self.text
        return _exception(self._first) or self.text

    @property
    def root_type(self) -> str:
        return class_of(self.root) or self.type

    @property
    def chained(self) -> bool:
        return bool(self.root) and self.root.strip() != self.text.strip()

    @cached_property
    def links(self) -> tuple[ChainedException, ...]:
        """The chain of exceptions, the root first."""
        blocks = CHAINED.split(self._traceback)
        joints = [found[0].startswith(DIRECT) for found in CHAINED.finditer(self._traceback)]
        links = [
            ChainedException(text, _in_library(block), direct or bool(RAISE.search(_innermost_line(block))))
            for block, direct in zip(blocks, [True, *joints], strict=True)
            if (text := _exception(block))
        ]
        if not links or links[-1].text != self.text:
            links = [
                *links[:-1],
                ChainedException(
                    self.text, _in_library(blocks[-1]), not joints or links[-1:] == [] or links[-1].explains
                ),
            ]
        return tuple(links)

    @cached_property
    def thread(self) -> tuple[str, str]:
        """The last thread that an exception ended before the program's end: its name and traceback; empty: none."""
        found = _last(THREAD, self.stderr)
        block = HANDLED.match(self.stderr, found.end()) if found else None
        return (found[1], block[0]) if found and block else ("", "")

    @cached_property
    def stderr_before(self) -> str:
        """The part of stderr before the traceback of the last exception, with its chain."""
        first = self.text.partition("\n")[0][:SOURCE_CHARACTERS_MAX]
        end = self.stderr.rfind(first) if first else len(self.stderr)
        if first and end < 0:
            return self.stderr
        start = self.stderr.rfind(HEAD, 0, end) if first else end
        before = self.stderr[: max(0, start)]
        while (joint := _last(CHAINED, before)) is not None and not before[joint.end() :].strip():
            before = before[: max(0, before.rfind(HEAD, 0, joint.start()))]
        return before

    @cached_property
    def caught_traceback(self) -> str:
        """The last traceback before that, with its chain: the program caught this exception; empty: none."""
        return _last_traceback(self.stderr_before)

    @cached_property
    def line_before_fatal(self) -> str:
        """The line before Python's report of a fatal signal, or the last line: what native code wrote before it
        aborted, such as a failed assertion; empty: nothing."""
        fatal = _last(FATAL, self.stderr)
        lines = (self.stderr[: fatal.start()] if fatal else self.stderr).splitlines()
        line = next((each.strip() for each in reversed(lines) if each.strip() and _may_explain(each)), "")
        return "" if PROGRESS.search(line) else line

    @cached_property
    def filtered_stderr(self) -> str:
        """The lines of stderr that may explain an end without an exception: no tracebacks, stacks, warnings and
        logs."""
        lines = [line for line in _without_traces(self.stderr).splitlines() if not ASIDE.search(line)]
        if is_own_code(self._failure.exit_code):
            lines = lines[-SAID_LINES_MAX:]
        # After the cut: otherwise older lines of the program would take their places, and look like its last words.
        return "\n".join(line for line in lines if not NO_REASON.search(line))

    @cached_property
    def last_line(self) -> str:
        """The text of `sys.exit(text)`, or the last line of stderr, else of stdout. A progress bar counts only if there
        is nothing else."""
        timeout = _last(DUMPED_TIMEOUT, self.stderr)
        if timeout is not None and DUMP.search(self.stderr, timeout.start()):
            return f"{timeout[0]}, by faulthandler.dump_traceback_later"
        bar = ""
        for text in (_without_traces(self.stderr), self._failure.stdout_tail):
            for line in (each.rstrip().rpartition("\r")[2].strip() for each in reversed(text.splitlines())):
                if not line or not _may_explain(line):
                    continue
                if not PROGRESS.search(line):
                    return line
                bar = bar or line
        return bar

    @cached_property
    def stderr(self) -> str:
        """The end of stderr without torch's prefixes."""
        return RANK_PREFIX.sub("", self._failure.stderr_tail)

    @cached_property
    def frames(self) -> tuple[str, ...]:
        """Files and functions of the root's traceback (`/data/train.py in step`), innermost last."""
        found = FRAME.findall(self._first)[-FRAMES_MAX:]
        return tuple(f"{file} in {one or other}" for file, one, other in found)

    @cached_property
    def raised(self) -> str:
        """The user's own line that raised the root (`raise …`, `assert …`); empty: a library raised it."""
        return _raised_by_user(self._first)

    @cached_property
    def interrupt(self) -> str:
        """The traceback of the KeyboardInterrupt that ended the program; empty: none did. Python then kills itself by
        SIGINT, as if that had come from outside."""
        if self._failure.exit_code not in (-signal.SIGINT, 128 + signal.SIGINT):
            return ""
        block = CHAINED.split(_last_traceback(self.stderr))[-1]
        frame = _last(FRAME, block)
        return block if frame is not None and INTERRUPTED.search(block, frame.end()) else ""

    @property
    def interrupting_line(self) -> str:
        """The innermost line of that traceback; empty: it is unknown."""
        line = _innermost_line(self.interrupt)
        return "" if INTERRUPTED.match(line) else line  # a file without source, such as `<string>`

    @cached_property
    def place(self) -> str:
        """The line of the script in which the root was raised, or which crashed: "train.py:18 `assert x.shape[0] ==
        5`"."""
        first = self._first or self.interrupt
        crash = self._failure.exit_code < 0 and not first
        own = _in_script(CAUGHT_FRAME.sub("", self.stderr) if crash else first)
        if not own and self._inner:  # an exception of a group may never have been raised by itself
            own = _in_script(IN_GROUP.sub("", self._failure.traceback or self.stderr))
        if not own:
            return ""
        file, line, source = own[0 if crash else -1]  # a crash dump has the innermost frame first
        place = f"{file.rpartition('/')[2]}:{line}"
        code = shortened(source.strip(), SOURCE_CHARACTERS_MAX)
        return place if crash or not code or code.startswith("raise") else f"{place} `{code}`"

    @property
    def in_users_code(self) -> bool:
        """Whether the root was raised outside of libraries."""
        return bool(self.frames) and is_of_script(self.frames[-1])

    @cached_property
    def _inner(self) -> str:
        """The traceback of the first exception in a group, which explains more than the group's own text."""
        failure = self._failure
        return _first_of_group(failure.traceback or final_traceback(self.stderr, failure.exit_code))

    @property
    def _message(self) -> str:
        return "" if self._inner else self._failure.message

    @cached_property
    def _traceback(self) -> str:
        failure = self._failure
        if self._inner:
            return self._inner
        if failure.traceback or failure.message:
            return failure.traceback
        return final_traceback(self.stderr, failure.exit_code)

    @cached_property
    def _first(self) -> str:
        """The traceback of the root."""
        chained = CHAINED.search(self._traceback)
        return self._traceback[: chained.start()] if chained else self._traceback


def final_traceback(stderr: str, exit_code: int) -> str:
    """The traceback on stderr that explains an end without an error file; empty: none does.

    It must be the last thing on stderr. The program may have caught the exception, written the traceback and left, with
    any exit code; but if it wrote something else after it, it went on. A signal needs no exception.
    """
    if not is_own_code(exit_code):
        return ""
    stderr = RANK_PREFIX.sub("", stderr)
    block = _last_traceback(stderr)
    if not block:
        return ""
    text = _exception(CHAINED.split(block)[-1])
    first, *rest = text.splitlines() or [""]
    if GROUP in block or not text or first.endswith((":", "?", "(")):
        return block
    later = [line for line in rest if line.strip() and not (line[0].isspace() or line[0] in "|+" or ASIDE.search(line))]
    return block if all(map(CONTINUES.match, later[:1])) else ""


def _may_explain(line: str) -> bool:
    """Whether this line of stderr or stdout may be the reason of an end without an exception."""
    return not (ASIDE.search(line) or NO_REASON.search(line))


def _without_traces(stderr: str) -> str:
    """The text without tracebacks, stacks and warnings: their source lines look like words of the program."""
    return WARNING.sub("", HANDLED.sub("", DUMP.sub("", stderr)))


def class_of(text: str) -> str:
    """The class at the beginning of a text: `DistNetworkError` for `torch.distributed.DistNetworkError: text`; empty:
    there is none."""
    found = EXCEPTION.match(text)
    return found[1].rpartition(".")[2] if found else ""


def unwrapped(text: str) -> str:
    """The inner exception if a data loader or a spawn function passes on the error of a child process, else the
    text."""
    wrapped = IN_WORKER.search(text)
    if wrapped is None:
        return text
    return _exception(text[max(wrapped.end(), text.find("Original Traceback")) :]) or text


def native_message(stderr: str) -> str:
    """An uncaught C++ exception as `c10::Error: what`; empty: there was none, or it has no text."""
    found = _last(NATIVE_END, stderr)
    if found is None or not found[2]:
        return ""
    what = found[2].partition("\nException raised from")[0].partition("\nframe #0")[0]
    return f"{found[1].rpartition(':')[2]}: {what.strip()}"


def is_of_script(file: str) -> bool:
    """Whether the file belongs to the user's code: not to a library, and not to what runs the script."""
    return not (LIBRARY.search(file) or OURS.search(file))


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match; None: there is none."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _in_script(text: str) -> list[tuple[str, str, str]]:
    """The frames of the user's code: file, line, source."""
    return [each for each in PLACED.findall(text) if is_of_script(each[0])]


def _first_of_group(traceback: str) -> str:
    """The first exception of a group as if printed alone; empty: there is no group."""
    start = traceback.rfind(f"+ {GROUP}")
    found = FIRST_OF_GROUP.search(traceback, start) if start >= 0 else None
    while found is not None:
        rest = traceback[found.end() + 1 :]
        inside = []
        for line in rest.splitlines():
            if not IN_GROUP.match(line):
                break
            inside.append(IN_GROUP.sub("", line, count=1))
        if GROUP not in "\n".join(inside):
            return "\n".join(inside)
        found = FIRST_OF_GROUP.search(traceback, found.end())
    return ""


def _last_traceback(stderr: str) -> str:
    """The last traceback with its chain. Exceptions that Python ignored at its exit do not count."""
    stderr = stderr.partition("\nException ignored ")[0]
    blocks = CHAINED.split(stderr)
    start = blocks[-1].rfind(HEAD)
    if start < 0:
        return stderr if FRAME.search(blocks[-1]) else ""  # the head of the traceback was cut off
    if len(blocks) > 1 and blocks[-1].count(HEAD) == 1:
        return stderr[stderr.find(HEAD) :]
    return blocks[-1][start:]


def _exception(block: str) -> str:
    """The exception's own lines in one traceback: from the first line that is not indented after the last frame.

    Lines that follow an exception on stderr look like a part of its message. They do no harm.
    """
    last_frame = _last(FRAME, block)
    lines = block[last_frame.end() if last_frame else 0 :].splitlines()
    for number, line in enumerate(lines):
        if line[:1].isspace() or not line:
            continue
        found = EXCEPTION.match(line)
        if found and found[1] not in NOT_ERRORS:
            return "\n".join(lines[number:]).strip()
    return ""


def _innermost_line(block: str) -> str:
    """The source line below the last frame."""
    frame = _last(FRAME, block)
    rest = block[frame.end() :].splitlines() if frame else []
    return rest[1].strip() if len(rest) > 1 else ""


def _in_library(block: str) -> bool:
    frame = _last(FRAME, block)
    return frame is not None and not is_of_script(frame[1])


def _raised_by_user(block: str) -> str:
    line = "" if _in_library(block) else _innermost_line(block)
    return line if re.search(r"(?:^|[:;] *)(?:raise|assert)\b", line) else ""
