"""A rendezvous backend in a file: nodes that share a directory need no address to meet at, and no server.

    holdfast run --rdzv-backend=directory --rdzv-endpoint=/shared/rdzv --rdzv-id=job7 --nnodes=2:4 train.py

It shows what a backend for Redis, Consul, a database … has to do. To install it, name it in a package's pyproject.toml:

    [project.entry-points."holdfast.rendezvous"]
    directory = "shared_directory:DirectoryBackend"

The file system must have POSIX locks that work between its machines (NFSv4, Lustre with flock, CephFS, GPFS …).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from holdfast.rendezvous.third_party import Backend, Place, SharedValue


class DirectoryBackend(Backend):
    """The value of job X is the file ENDPOINT/X."""

    conf_keys = ("suffix",)

    def open(self, place: Place) -> FileValue:
        folder = Path(place.endpoint)
        if not place.endpoint or not folder.is_dir():
            raise ValueError(f"--rdzv-endpoint must be a directory that all nodes share, not {place.endpoint!r}")
        return FileValue(folder / (quote(place.run_id, safe="") + place.conf.get("suffix", "")))


class FileValue(SharedValue):
    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> bytes | None:
        with self._locked():
            return self._read()

    def swap(self, old: bytes | None, new: bytes) -> bool:
        with self._locked():
            if self._read() != old:
                return False
            if new:
                fresh = self._path.with_name(
                    self._path.name + ".new"
                )  # a reader must never see half of it, nor a crash leave it
                fresh.write_bytes(new)
                os.replace(fresh, self._path)
            else:
                self._path.unlink(missing_ok=True)
            return True

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes() or None
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One node at a time. The lock goes with its holder, however that ends; the lock file of a directory stays."""
        fd = os.open(self._path.parent / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
