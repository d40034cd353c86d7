"""Hosts with sshd. Without root, sshd or namespaces these tests are skipped and say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.ssh.yard import Yard, make_yard, why_not

MakeYard = Callable[[int], Yard]


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[MakeYard]:
    """`yard(4)`: four hosts, and a desk."""
    if why := why_not():
        pytest.skip(why)
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(make_yard(count, tmp_path))
