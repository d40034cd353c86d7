"""Copies bytes from one open file to another, on any file system.

Knows descriptors. The supervisor imports it: standard library only, nothing heavy.
"""

from __future__ import annotations

import errno
import os

NO_SENDFILE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of sendfile where the file system or the kernel lacks it. shutil goes on without it at the same ones."""


def move_bytes(source: int, target: int, bytes_max: int) -> int:
    """Copy the next bytes of a file to another one; the offsets of both go on. Returns how many. Raises OSError."""
    try:
        return os.sendfile(target, source, None, bytes_max)
    except OSError as error:
        if error.errno not in NO_SENDFILE:
            raise
    begin = os.lseek(source, 0, os.SEEK_CUR)
    written = os.write(target, os.pread(source, bytes_max, begin))
    os.lseek(source, begin + written, os.SEEK_SET)
    return written
