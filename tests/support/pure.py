"""A pytest plugin for `make fast`: a test that starts a process, opens a connection, sleeps or imports torch fails.

Loaded with `-p tests.support.pure`. It uses Python's audit events, so it sees what libraries do, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

FORBIDDEN = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "socket.bind",
    "socket.connect",
    "subprocess.Popen",
    "time.sleep",
}
FORBIDDEN_IMPORTS = {"torch"}

_violations: list[str] | None = None
"""What the running test did; None between tests."""


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _violations is None:
        return
    if event in FORBIDDEN:
        _violations.append(f"{event} {arguments}")
        raise PermissionError(f"a pure test must not use {event}: see tests/support/pure.py")
    if event == "import" and str(arguments[0]) in FORBIDDEN_IMPORTS:
        _violations.append(f"import {arguments[0]}")


sys.addaudithook(_audit)


@pytest.fixture(autouse=True)
def stays_pure() -> Iterator[None]:
    """Fail a test that reached outside of its process, also when it caught the error."""
    global _violations  # noqa: PLW0603 - an audit hook cannot be removed and has no other way to know
    _violations = seen = []
    yield
    _violations = None
    if seen:
        pytest.fail("not pure: " + "; ".join(seen), pytrace=False)
