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
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from holdfast.rendezvous.third_party import Backend, Place, SharedValue

PATIENCE_S = 1.0
"""Limit for the wait for the other nodes: then the call fails, and holdfast tries again."""


class DirectoryBackend(Backend):
    """The value of job X is the file ENDPOINT/job.X."""

    conf_keys = ("suffix",)

    def open(self, place: Place) -> FileValue:
        folder = Path(place.endpoint)
        if not place.endpoint or not folder.is_dir():
            raise ValueError(f"--rdzv-endpoint must be a directory that all nodes share, not {place.endpoint!r}")
        return FileValue(folder, quote(place.run_id, safe="") + place.conf.get("suffix", ""))


class FileValue(SharedValue):
    def __init__(self, folder: Path, name: str) -> None:
        # Prefixes, not suffixes: the files of one job are never those of another, whatever its id is.
        self._path, self._new = folder / f"job.{name}", folder / f"new.{name}"
        self._lock = folder / ".lock"
        self._own = threading.Lock()

    def read(self) -> bytes | None:
        with self._locked():
            return self._read()

    def swap(self, old: bytes | None, new: bytes) -> bool:
        with self._locked():
            if self._read() != old:
                return False
            if new:
                # A reader must never see half of it, nor a crash leave it.
                self._new.write_bytes(new)
                os.replace(self._new, self._path)
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
        """One caller at a time. The lock goes with its holder, however that ends. The lock's file stays, one for all
        jobs: to delete it would be a race with those who lock it.

        A POSIX lock excludes other processes, on this machine and on others, and no other thread of its own process.
        """
        deadline = time.monotonic() + PATIENCE_S
        if not self._own.acquire(timeout=PATIENCE_S):
            raise BlockingIOError(f"{self._lock} was locked for {PATIENCE_S:g} s")
        try:
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                while True:
                    try:
                        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except OSError:
                        if time.monotonic() > deadline:
                            raise
                        time.sleep(0.01)
                yield
            finally:
                os.close(fd)
        finally:
            self._own.release()
