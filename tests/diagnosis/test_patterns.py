"""The patterns that read what workers have written. A worker may write anything, and `re` lets no other thread run: a
pattern that takes quadratic time on some text freezes the agent, and a healthy node is lost."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator

import pytest

from holdfast import diagnosis
from holdfast.supervisor.log_fold import LineCutter
from holdfast.traceback_text import shortened

READERS = (
    "holdfast.coordinator.complaints",
    "holdfast.dashboard.log_text",
    "holdfast.protocol.rank_progress",
    "holdfast.supervisor.log_fold",
    "holdfast.text",
    "holdfast.traceback_text",
    *(module.name for module in pkgutil.walk_packages(diagnosis.__path__, f"{diagnosis.__name__}.")),
)
ON_SHORT_TEXTS = re.compile(r"\.places\._SOURCE_|\.sizes\.CALL$")
"""Patterns for one line of source, which is cut at 80 characters, or that match a whole text from its beginning."""
RUN = 1 << 19
"""A pattern that tries each beginning in turn needs minutes for this many equal characters, and another one 10 ms."""
RUNS = ("\n", "\r", " ", "1", "_", "\n ")


def patterns() -> Iterator[tuple[str, re.Pattern[str] | re.Pattern[bytes]]]:
    for module in READERS:
        for name, value in vars(importlib.import_module(module)).items():
            if isinstance(value, re.Pattern) and not ON_SHORT_TEXTS.search(f"{module}.{name}"):
                yield f"{module}.{name}", value


@pytest.mark.timeout(80)
@pytest.mark.parametrize("run", RUNS, ids=ascii)
def test_long_runs_are_read_in_one_pass(run: str) -> None:
    text = run * (RUN // len(run))
    raw = text.encode()
    read = 0
    for _name, pattern in patterns():
        found = pattern.finditer(raw) if isinstance(pattern.pattern, bytes) else pattern.finditer(text)  # type: ignore[arg-type]
        read += sum(1 for _ in found) >= 0
    assert read > 50, "the patterns were found"


@pytest.mark.timeout(80)
def test_many_carriage_returns_are_one_line() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"\r" * RUN + b"done\r\r\n") == b"done\n"
    assert cutter.feed(b"bar 1\rbar 2" + b"\r" * RUN) == b""
    assert cutter.feed(b"\n") == b"bar 2\n"


@pytest.mark.timeout(80)
def test_a_message_of_empty_lines_is_shortened() -> None:
    text = f"Traceback (most recent call last):\nValueError: {chr(10) * RUN}end"
    short = shortened(text, bytes_max=4096)
    assert short.startswith("Traceback (most recent call last):\nValueError:")
    assert short.endswith("end")
