"""Run a piece of Python in a mount namespace of its own, with a small ext4 disk at $PWD/disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from soak.disk import why_not
from tests.support.limits import limit_s

HEAD = """
import os, subprocess, sys
from pathlib import Path
from holdfast.protocol.errors import *
from holdfast.snapshots import changes, folder, lease
from holdfast.snapshots.changes import SaveRequest
from holdfast.snapshots.layout import rank_file
from soak.disk import mounted
from tests.snapshots.saves import content, is_whole, newest, save

with mounted(Path.cwd(), 16) as disk:
    path = disk.path / "runs"
"""


def reason() -> str:
    """Why this machine cannot do it; empty when it can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "needs root and unshare for a mount namespace of its own"
    if why_not():
        return why_not()
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return f"no mount namespace here: {tried.stderr.strip()}" if tried.returncode else ""


def run_with_disk(folder: Path, body: str) -> str:
    """What the body prints. It finds `disk` and `path`, a snapshot folder on it."""
    if why := reason():
        print(f"skipped: {why}")
        pytest.skip(why)
    script = HEAD + textwrap.indent(textwrap.dedent(body), "    ")
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s(60), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
