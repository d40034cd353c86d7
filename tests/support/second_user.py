"""A second user on this machine, for tests of what one user can do to another. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.limits import until

OTHER_UID = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")

# Imports come first: Python's own folder may be closed to the other user.
_BECOME = "import ctypes, os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
_EXCHANGE = """
libc = ctypes.CDLL(None, use_errno=True)
one, other = map(os.fsencode, sys.argv[1:3])
print("ready", flush=True)
while True:
    libc.renameat2(-100, one, -100, other, 2)  # AT_FDCWD, RENAME_EXCHANGE
"""


@contextlib.contextmanager
def everybodys_folder() -> Iterator[Path]:
    """A folder such as /tmp, which all users reach and may write to. (pytest's own is closed to others.)"""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def as_other(program: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run Python as the other user."""
    line = [sys.executable, "-I", "-c", _BECOME + program, *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, cwd="/")


@contextlib.contextmanager
def exchanging(one: Path, other: Path) -> Iterator[None]:
    """The other user exchanges these two names as fast as possible while the block lasts."""
    line = [sys.executable, "-I", "-c", _BECOME + _EXCHANGE, str(one), str(other)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        until(other.is_dir, "the first exchange")
        try:
            yield
        finally:
            process.kill()
