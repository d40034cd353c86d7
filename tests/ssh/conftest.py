"""Hosts with sshd. Without root, sshd or namespaces these tests are skipped and say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.ssh.ssh_hosts import SshHosts, make_yard, why_not

MakeYard = Callable[[int], SshHosts]


@pytest.fixture
def ssh_hosts(tmp_path: Path) -> Iterator[MakeYard]:
    """`ssh_hosts(4)`: four hosts, and a login_host."""
    if why := why_not():
        pytest.skip(why)
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(make_yard(count, tmp_path))
