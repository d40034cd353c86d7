"""When followed files change. Knows the kernel's inotify; must not know what is in the files."""

from __future__ import annotations

import os
from pathlib import Path


class ChangeWatch:
    """One inotify descriptor for all files. It tells that something changed, not what: asking each file is cheap."""

    def __init__(self) -> None:
        import ctypes  # lazily: only an agent that shows logs needs it

        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.reliable = self.fd >= 0
        """False: some file cannot be watched and has to be polled."""
        self._users: dict[int, int] = {}

    def add(self, path: Path) -> int:
        """Watch a file; the handle for `remove`. A file may be watched several times."""
        in_modify = 0x2
        handle: int = self._libc.inotify_add_watch(self.fd, os.fsencode(path), in_modify)
        if handle < 0:
            self.reliable = False
        self._users[handle] = self._users.get(handle, 0) + 1
        return handle

    def remove(self, handle: int) -> None:
        self._users[handle] -= 1
        if not self._users[handle]:
            del self._users[handle]
            if handle >= 0:
                self._libc.inotify_rm_watch(self.fd, handle)

    def drain(self) -> None:
        """Forget the news that came so far; to be called before the files are asked."""
        try:
            while self.fd >= 0:
                os.read(self.fd, 65_536)
        except BlockingIOError:
            pass

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
