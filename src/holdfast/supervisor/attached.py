"""Programs that the agent runs beside the workers, such as a command of --notify, or py-spy: all their processes end
with the agent, however it ends.

A parent-death signal would end the program and nothing that it has started, and already when the thread ends that
started it. So a small process between the two adopts what the program leaves, and kills all of it when the agent is
gone, or when it gets SIGTERM. SIGINT is passed on. It ends when no process is left, as the program has ended.

Standard library only. Knows processes; knows nothing of what they do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from holdfast.supervisor import processes

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))
PROGRAM = f"import sys; sys.path.insert(0, {ROOT!r}); from holdfast.supervisor.attached import main; main()"
KILL_LIMIT_S = 10.0


def attached(argv: Sequence[str]) -> list[str]:
    """The command line that runs this one. To end it, send SIGTERM. Raises FileNotFoundError where there is none."""
    if shutil.which(argv[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    return [sys.executable, "-I", "-S", "-c", PROGRAM, str(os.getpid()), *argv]


def main() -> NoReturn:
    """In the process between. Arguments: the agent's pid, and the command."""
    agent, *argv = sys.argv[1:]
    try:
        agent_end = os.pidfd_open(int(agent))
    except ProcessLookupError:
        sys.exit(1)
    if os.getppid() != int(agent):
        sys.exit(1)
    processes.become_subreaper()
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signals: list[int] = []
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: signals.append(number))
    try:
        child = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT])
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.exit(127)
    for fd in (0, 1):  # the program's: whoever reads or writes there is to see its end
        os.close(fd)
    poller = select.poll()
    poller.register(agent_end, select.POLLIN)
    poller.register(wake, select.POLLIN)
    status = 0
    while True:
        ready = [fd for fd, _ in poller.poll()]
        if wake in ready:
            os.read(wake, 4096)
        if agent_end in ready or signal.SIGTERM in signals:
            processes.kill_descendants(os.getpid(), limit_s=KILL_LIMIT_S)
            sys.exit(128 + signal.SIGTERM)
        while signals:
            if signals.pop() == signal.SIGINT:
                os.kill(child, signal.SIGINT)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == child else status
        except ChildProcessError:
            _end_like(os.waitstatus_to_exitcode(status))


def _end_like(code: int) -> NoReturn:
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL needs no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
