"""A small disk of its own, that can be filled and can stall, as a broken or distant one does.

An ext4 image on a memory file system, mounted through a loop device. It stalls by the kernel's FIFREEZE: whoever writes,
creates, renames or syncs waits in the kernel, deaf even to SIGKILL, until it is thawed. The thaw is the business of a
process of its own, which thaws when its time is over or when we are gone: no stall outlives the soak.

To be used in a mount namespace of one's own (see __main__): the mounts go with it. Needs root.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

FIFREEZE, FITHAW = 0xC0045877, 0xC0045878
TOOLS = ("mount", "umount", "losetup", "mkfs.ext4")
CHUNKS = (bytes(1 << 20), bytes(1 << 16), bytes(1 << 12))


def why_not() -> str:
    """Why this machine can have no such disk; empty when it can."""
    missing = [
        tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None
    ]
    if missing:
        return f"the soak's disk needs {', '.join(missing)} (Debian: mount, e2fsprogs)"
    return "" if os.path.exists("/dev/loop-control") else "the soak's disk needs loop devices"


class Disk:
    """Mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stalls: list[subprocess.Popen[bytes]] = []

    @property
    def stalled(self) -> bool:
        return any(each.poll() is None for each in self._stalls)

    def fill(self) -> None:
        """No block is left, as far as this can be said of a disk that others write to and clean."""
        filler = self.path / "filler"
        filler.mkdir(exist_ok=True)
        file = os.open(filler / "bytes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            for chunk in CHUNKS:
                with contextlib.suppress(OSError):
                    while True:
                        os.write(file, chunk)
                os.fsync(file)  # what was only promised is given or taken back
        finally:
            os.close(file)
        # A file is refused a block a little before the last one is gone; a folder takes that too.
        with contextlib.suppress(OSError):
            for number in itertools.count(len(os.listdir(filler))):
                (filler / str(number)).mkdir()

    def empty(self) -> None:
        """What `fill` took is free again."""
        shutil.rmtree(self.path / "filler", ignore_errors=True)

    def stall(self, seconds: float) -> None:
        """Freeze it; it thaws by itself. Returns when it stands still."""
        thawer = subprocess.Popen(
            [sys.executable, __file__, str(self.path), str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._stalls.append(thawer)
        assert thawer.stdout is not None
        said = thawer.stdout.readline()
        if said != b"frozen\n":
            raise RuntimeError(f"the disk did not freeze: {said!r}")

    def thaw(self) -> None:
        """End all stalls."""
        for each in self._stalls:
            with each:
                if each.stdin is not None:
                    each.stdin.close()
        self._stalls.clear()


@contextlib.contextmanager
def mounted(folder: Path, mebibytes: int) -> Iterator[Disk]:
    """Make the disk at `folder`/disk and mount it."""
    store, path = folder / "image", folder / "disk"
    for each in (store, path):
        each.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={mebibytes + 64}m", "tmpfs", str(store))
    image = store / "ext4"
    with image.open("wb") as file:
        file.truncate(mebibytes << 20)
    _run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image))
    _run("mount", "-o", "loop", str(image), str(path))
    disk = Disk(path)
    try:
        yield disk
    finally:
        disk.thaw()
        # Lazily: it is in use on a host that is still going down. The loop device goes with the last user.
        _run("umount", "--lazy", str(path))
        _run("umount", "--lazy", str(store))


def _run(*command: str) -> None:
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _freeze(path: str, seconds: float) -> None:
    """Freeze the file system of `path`, and thaw it when `seconds` are over or stdin ends."""
    folder = os.open(path, os.O_RDONLY)
    fcntl.ioctl(folder, FIFREEZE, 0)
    end = time.monotonic() + seconds
    try:
        sys.stdout.write("frozen\n")
        sys.stdout.flush()
        select.select([sys.stdin], [], [], max(0.0, end - time.monotonic()))
    finally:
        fcntl.ioctl(folder, FITHAW, 0)


if __name__ == "__main__":
    _freeze(sys.argv[1], float(sys.argv[2]))
