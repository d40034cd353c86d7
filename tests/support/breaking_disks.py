"""Disks that stop taking data in the middle of a job: file systems in images, mounted by loop devices. Needs root.

A tmpfs can be full (tests/processes/conftest.py), but it has no quota here, and a file system on which a file is open for
writing cannot be remounted read-only: only the kernel does that, after an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

EXT4_IOC_SHUTDOWN = 0x8004587D
BTRFS_BYTES_MIN = 128 << 20
EXT4_BYTES = 64 << 20
QUOTA_BYTES = 64 << 10
FIRST_SUBVOLUME = "0/256"


@dataclass(frozen=True)
class BreakingDisk:
    path: Path
    fails: Callable[[], None]
    """From now on every write fails with `reason`."""
    recovers: Callable[[], None]
    reason: str


@contextlib.contextmanager
def over_quota(folder: Path) -> Iterator[BreakingDisk]:
    """A subvolume of btrfs. Its quota holds for root, too."""
    with _mounted(folder, ["mkfs.btrfs", "-q"], BTRFS_BYTES_MIN) as top:
        _run("btrfs", "quota", "enable", top)
        place = top / "subvolume"
        _run("btrfs", "subvolume", "create", place)

        def limit(limit: str) -> Callable[[], None]:
            # By its number, and at the top: what is over its quota cannot even take a new limit.
            return lambda: _run("btrfs", "qgroup", "limit", limit, FIRST_SUBVOLUME, top)

        # The quota counts what has reached the disk. Below one block nothing fits, whatever was deleted.
        yield BreakingDisk(place, limit(str(QUOTA_BYTES)), limit("none"), "Disk quota exceeded")


@contextlib.contextmanager
def read_only_after_an_error(folder: Path) -> Iterator[BreakingDisk]:
    """As the kernel makes it after an error (errors=remount-ro): files stay open, and cannot be written."""
    with _mounted(folder, ["mkfs.ext4", "-q"], EXT4_BYTES) as place:
        yield BreakingDisk(place, lambda: _run("mount", "-o", "remount,abort", place), _never, "Read-only file system")


@contextlib.contextmanager
def dead(folder: Path) -> Iterator[BreakingDisk]:
    """The device is gone: each read and write is an I/O error."""
    with _mounted(folder, ["mkfs.ext4", "-q"], EXT4_BYTES) as place:

        def fails() -> None:
            fd = os.open(place, os.O_RDONLY)
            try:
                fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", 2))  # 2: nothing is flushed before
            finally:
                os.close(fd)

        yield BreakingDisk(place, fails, _never, "Input/output error")


FAULTS: dict[str, Callable[[Path], AbstractContextManager[BreakingDisk]]] = {
    "over quota": over_quota,
    "read-only": read_only_after_an_error,
    "dead": dead,
}


@contextlib.contextmanager
def _mounted(folder: Path, make: list[str], size_bytes: int) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which(make[0]) is None:
        pytest.skip(f"needs root and {make[0]}")
    image, place = folder / "disk.image", folder / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _run(*make, image)
    if subprocess.run(["mount", "-o", "loop", image, place], capture_output=True).returncode:
        pytest.skip("no image can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def _run(*line: str | Path) -> None:
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _never() -> None:
    raise NotImplementedError("this disk stays as it is")
