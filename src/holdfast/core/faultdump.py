"""The text that Python's faulthandler writes for all threads, and what can be had of it. Pure: text in, frames out.

    Thread 0x00007f41168b56c0 (most recent call first):
      File "/srv/train.py", line 42 in step
      …
    Current thread 0x00007f4117435b80 (most recent call first):
      …

Threads stand newest first, so the main thread is last; of more than 100 the rest is left out (`...`), and it may be
among them. "Current" is the one in which the signal's handler ran, and the kernel prefers the main thread for that.
Of a thread's frames the innermost 100 are written. Python 3.13 adds the thread's name behind its number.

Of one thread alone the head is `Stack (most recent call first):`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast.core.stacks import FRAMES_MAX, Frame

DUMP_BYTES_MAX = 1_000_000
"""Of one worker's: 100 threads of 100 frames are less."""

_THREAD = re.compile(r"^(?:(?:Current thread|Thread) 0x[0-9a-f]+.*|Stack) \(most recent call first\):$")
_FRAME = re.compile(r'^ {2}File (?:"(.*)"|(\?\?\?)), line (\d{1,9}|\?\?\?) in (.*)$')
_OWN = "/holdfast/worker/"
"""What the bootstrap puts below a program, and around torch's functions, is none of the program's."""
_MACHINERY = re.compile(
    r"""^<(?!stdin>|string>)                # <frozen runpy>
      | /lib(64)?/python\d[\d.]*/(?!(site|dist)-packages/)
      | /torch/
      | /holdfast/(train|worker|launching)/""",
    re.VERBOSE,
)
_INSTALLED = re.compile(r"/(site|dist)-packages/")


def main_thread(text: str) -> tuple[Frame, ...]:
    """The main thread's frames, innermost first, at most FRAMES_MAX; empty when it has none, or the text is none."""
    threads: list[tuple[bool, list[Frame]]] = []
    cut = False
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append((line.startswith("Current"), []))
        elif threads and (frame := _frame(line)) is not None:
            threads[-1][1].append(frame)
        elif line == "...":  # of frames that are left out it is indented
            cut = True
    if not threads:
        return ()
    frames = threads[-1][1]
    if cut:
        frames = next((each for current, each in threads if current), [])
    return tuple(frame for frame in frames if _OWN not in frame.file)[:FRAMES_MAX]


def _frame(line: str) -> Frame | None:
    match = _FRAME.match(line)
    if match is None:
        return None
    file, unknown, number, function = match.groups()
    return Frame(file or unknown or "", int(number) if number.isdigit() else 0, function)


def is_library(file: str) -> bool:
    """Whether it is Python's, torch's, ours, or an installed package's, and not the program's own."""
    return _MACHINERY.search(file) is not None or _INSTALLED.search(file) is not None


def program_frame(frames: Sequence[Frame]) -> int | None:
    """The index of the innermost frame that is the program's own; None when there is none.

    Of a program that is itself an installed package: the innermost that is neither Python's nor torch's.
    """
    own = [index for index, frame in enumerate(frames) if not is_library(frame.file)]
    own = own or [index for index, frame in enumerate(frames) if not _MACHINERY.search(frame.file)]
    return own[0] if own else None
