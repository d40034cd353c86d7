"""The soak's disk: it can be full, and it can stand still; it goes on by itself, also when nobody is left to say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from soak import disk
from tests.network.hosts import why_not
from tests.support.limits import limit_s

ROOT = Path(__file__).resolve().parent.parent.parent

PROGRAM = """
import os, sys, time
from pathlib import Path
from soak.disk import mounted

with mounted(Path(sys.argv[1]), 16) as disk:
    note = disk.path / "note"
    note.write_text("before")
    disk.fill()
    try:
        note.write_bytes(bytes(100_000))
        print("not full")
    except OSError:
        print("full")
    disk.empty()
    note.write_bytes(bytes(100_000))
    stall_s = 0.25 * float(os.environ["TEST_SLOWNESS"])
    began = time.monotonic()
    disk.stall(stall_s)
    print("stalled" if disk.stalled else "goes on")
    assert note.read_bytes() == bytes(100_000), "reading goes on"
    note.write_text("after")
    print("waited" if time.monotonic() - began > 0.8 * stall_s else "did not wait")
    disk.stall(600.0)
    if "killed" in sys.argv:
        os.kill(os.getpid(), 9)
    disk.thaw()
    note.write_text("thawed")
    print("thawed")
"""


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    if why := why_not() or disk.why_not():
        pytest.skip(why)
    line = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", PROGRAM, str(folder), *more]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=limit_s(30))


def test_full_and_stalled(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.stdout.split("\n") == ["full", "stalled", "waited", "thawed", ""], done.stderr


def test_nothing_stays_of_a_stalled_disk_whose_owner_was_killed(tmp_path: Path) -> None:
    """Its thawer and its mounts go as well: the leak guard and the loop devices tell."""
    done = run(tmp_path, "killed")
    assert done.returncode == -9
    loops = subprocess.run(["losetup", "--all"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in loops
