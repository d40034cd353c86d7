"""What is read from /proc and /sys, of this process, a zombie, and a tree of the test's own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.linux import boot_id, group_folders, process_stat
from tests.support.limits import until

COMM = Path("/proc/self/comm")


@pytest.fixture
def misleading_name() -> Iterator[str]:
    """Of this process: one that looks like the end of the name and the fields after it."""
    before = COMM.read_text()
    COMM.write_text("a) Z 1 (b")
    yield "a) Z 1 (b"
    COMM.write_text(before)


def test_a_process_whose_name_misleads(misleading_name: str) -> None:
    stat = process_stat(os.getpid())
    assert stat is not None
    assert (stat.name, stat.parent, stat.session) == (misleading_name, os.getppid(), os.getsid(0))
    assert stat.state in "RS"
    assert not stat.has_ended
    assert stat.started == process_stat("self").started  # type: ignore[union-attr]


def test_a_zombie_has_ended_and_nobody_is_nobody() -> None:
    child = subprocess.Popen(["true"])
    stat = until(lambda: (found := process_stat(child.pid)) and found.has_ended and found, "the child to end")
    assert stat.state == "Z"
    child.wait()
    assert process_stat(child.pid) is None


def test_the_boot_has_one_name() -> None:
    assert len(boot_id()) == len("01234567-89ab-cdef-0123-456789abcdef")


def test_groups_are_followed_to_the_top(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/job/one\n0::/slice\n")
    mount = f"{tmp_path}/sys/fs/cgroup"
    expected = [f"{mount}/memory/job/one", f"{mount}/memory/job", f"{mount}/memory"]
    expected += [f"{mount}/slice", mount, f"{mount}/unified/slice", f"{mount}/unified"]
    assert list(group_folders(tmp_path)) == expected
    (tmp_path / "proc/self/cgroup").write_text("0::/../sibling\n")
    assert list(group_folders(tmp_path)) == [mount, f"{mount}/unified"]
