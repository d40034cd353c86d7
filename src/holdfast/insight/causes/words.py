"""What a dead worker said: its last exception, the one at the root of it, where that was raised, and its stderr.

Pure. Reads tracebacks as Python prints them, from the error file or out of stderr (torch puts `[rank3]: ` before each
line there). Tolerates whatever is torn or cut; judges nothing.
"""

from __future__ import annotations

import re
from functools import cached_property

from holdfast.core.outcome import Failure

CHAINED = re.compile(
    r"^(?:During handling of the above exception, another exception occurred:"
    r"|The above exception was the direct cause of the following exception:)\s*$",
    re.MULTILINE,
)
RANK_PREFIX = re.compile(r"^(?:\[[^\]\n]{0,40}rank ?\d+[^\]\n]{0,40}\]:? ?|\[?default\d+\]?: ?)", re.MULTILINE)
EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?::[ \n]|:?$)")
FRAME = re.compile(r'^\s+File "([^"\n]+)", line \d+(?:, in (.+)| in (.+))?', re.MULTILINE)
LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|<frozen |/torch/")
FRAMES_MAX = 12
NATIVE_END = re.compile(r"terminate called after throwing an instance of '([^']*)'\s*(?:what\(\):\s*(.*))?", re.DOTALL)
IN_WORKER = re.compile(
    r"Caught (\w+) in (?:DataLoader worker process|replica|pin memory thread)"
    r"|-- Process \d+ terminated with the following error:"
)
NOT_ERRORS = frozenset({"Traceback", "SystemExit", "KeyboardInterrupt", "GeneratorExit"})


class Words:
    """What one failure says of itself. Empty strings where it says nothing. Read as far as it is asked: a job that loses
    a node has thousands of failures, and all are looked at before anything else goes on."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure

    @cached_property
    def text(self) -> str:
        """`Type: text` of its last exception, all lines: its error file counts most, then the last traceback on its
        stderr, then a native end."""
        if self._failure.message:
            return self._failure.message
        text = _exception(CHAINED.split(self._traceback)[-1])
        return native_words(self.stderr) if not text and self._failure.exit_code < 0 else text

    @cached_property
    def type(self) -> str:
        """Class of that exception, without the module."""
        said = self._failure.error_type if self._failure.message else class_of(self.text)
        return said.rpartition(".")[2]

    @cached_property
    def root(self) -> str:
        """The same of the exception it began with: another one only where Python chained them."""
        if self._failure.message and self._first is self._traceback:
            return self.text
        return _exception(self._first) or self.text

    @property
    def root_type(self) -> str:
        return class_of(self.root) or self.type

    @property
    def chained(self) -> bool:
        return bool(self.root) and self.root.strip() != self.text.strip()

    @cached_property
    def stderr(self) -> str:
        """The end of its stderr, without torch's prefixes."""
        return RANK_PREFIX.sub("", self._failure.stderr_tail)

    @cached_property
    def frames(self) -> tuple[str, ...]:
        """Files and functions of the root's traceback (`/data/train.py in step`), innermost last."""
        found = FRAME.findall(self._first)[-FRAMES_MAX:]
        return tuple(f"{file} in {one or other}" for file, one, other in found)

    @cached_property
    def raised(self) -> str:
        """The user's own line that raised the root (`raise …`, `assert …`); empty when a library did."""
        return _raised_by_user(self._first)

    @property
    def in_users_code(self) -> bool:
        """The root was raised in a file that is no library's."""
        return bool(self.frames) and not LIBRARY.search(self.frames[-1])

    @cached_property
    def _traceback(self) -> str:
        failure = self._failure
        if failure.traceback or failure.message or failure.exit_code <= 0:
            return failure.traceback
        return _last_traceback(self.stderr)

    @cached_property
    def _first(self) -> str:
        """The traceback of the root."""
        chained = CHAINED.search(self._traceback)
        return self._traceback[: chained.start()] if chained else self._traceback


def listen(failure: Failure) -> Words:
    """All words of a failure."""
    return Words(failure)


def class_of(text: str) -> str:
    """`DistNetworkError` of `torch.distributed.DistNetworkError: text`; empty when it begins with no class."""
    found = EXCEPTION.match(text)
    return found[1].rpartition(".")[2] if found else ""


def unwrapped(text: str) -> str:
    """The exception inside, where a data loader, or whoever spawned it, passes on what a process raised."""
    wrapped = IN_WORKER.search(text)
    if wrapped is None:
        return text
    return _exception(text[max(wrapped.end(), text.find("Original Traceback")) :]) or text


def native_words(stderr: str) -> str:
    """`c10::Error: what` of an uncaught C++ exception; empty where there was none."""
    found = None
    for found in NATIVE_END.finditer(stderr):  # noqa: B007 - the last one
        pass
    if found is None:
        return ""
    what = (found[2] or "").partition("\nException raised from")[0].partition("\nframe #0")[0]
    return f"{found[1].rpartition(':')[2]}: {what.strip()}"


def _last_traceback(stderr: str) -> str:
    """With all it is chained to; what Python ignored at its end does not count."""
    stderr = stderr.partition("\nException ignored ")[0]
    blocks = CHAINED.split(stderr)
    start = blocks[-1].rfind("Traceback (most recent call last):")
    if start < 0:
        return stderr if FRAME.search(blocks[-1]) else ""  # its head was longer ago than the tail goes
    if len(blocks) > 1 and blocks[-1].count("Traceback (most recent call last):") == 1:
        return stderr[stderr.find("Traceback (most recent call last):") :]
    return blocks[-1][start:]


def _exception(block: str) -> str:
    """The exception's own lines in one traceback: from the first that is not indented after its last frame.

    What follows an exception on stderr looks like more of its message and is harmless.
    """
    last_frame = None
    for last_frame in FRAME.finditer(block):  # noqa: B007 - the last one
        pass
    lines = block[last_frame.end() if last_frame else 0 :].splitlines()
    for number, line in enumerate(lines):
        if line[:1].isspace() or not line:
            continue
        found = EXCEPTION.match(line)
        if found and found[1] not in NOT_ERRORS:
            return "\n".join(lines[number:]).strip()
    return ""


def _raised_by_user(block: str) -> str:
    frames = list(FRAME.finditer(block))
    if not frames or LIBRARY.search(frames[-1][1]):
        return ""
    rest = block[frames[-1].end() :].splitlines()
    line = rest[1].strip() if len(rest) > 1 else ""
    return line if re.search(r"(?:^|[:;] *)(?:raise|assert)\b", line) else ""
