"""`python -m tools.measured COMMAND …`: run a command, then print its processor time, that of all its descendants included.

Descendants that lose their parent (daemons, and what a killed agent leaves for a moment) fall to this process, which
waits for them: so none is missing from the sum, as it would be from the shell's `time`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run `command`; return its exit code (128 + n when signal n ended it)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began = time.monotonic()
    child = subprocess.Popen(command)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: child.send_signal(number) if number != signal.SIGINT else None)
    code = 0
    orphans = 0
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.wait()
            if pid == child.pid:
                code = os.waitstatus_to_exitcode(status)
                child.returncode = code
                break
            orphans += 1
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"processor time {usage.ru_utime + usage.ru_stime:.1f} s ({usage.ru_utime:.1f} user, {usage.ru_stime:.1f} system),"
        f" wall time {time.monotonic() - began:.1f} s, {orphans} orphans reaped",
        flush=True,
    )
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
