"""A program that the agent runs beside the workers, such as a command of --notify or py-spy: all its processes end with
the agent, however the agent ends.

A parent-death signal is not enough. It ends the program but nothing that the program has started, and it comes when the
thread ends that started the program, not the agent. So a small process between the two is the subreaper of the program.
It kills everything below itself when the agent is gone, or when it gets SIGTERM. It passes SIGINT on. When no process
is left, it ends with the exit code or signal of the program.

Standard library only. Knows processes; knows nothing of what they do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from holdfast.supervisor import processes

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))
PROGRAM = f"import sys; sys.path.insert(0, {ROOT!r}); from holdfast.supervisor.attached import main; main()"
KILL_LIMIT_S = 10.0


def attached(argv: Sequence[str]) -> list[str]:
    """The command line that runs this one below a process of its own. To end it, send SIGTERM.

    Raises FileNotFoundError if there is no such program.
    """
    import shutil  # at the start of a launcher no such program is started, and it costs 2 ms

    if shutil.which(argv[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    return [sys.executable, "-I", "-S", "-c", PROGRAM, str(os.getpid()), *argv]


def main() -> NoReturn:
    """Run the process between the agent and the program. Arguments: the agent's pid, and the command."""
    agent, *argv = sys.argv[1:]
    try:
        agent_end = os.pidfd_open(int(agent))
    except ProcessLookupError:
        sys.exit(1)
    # The agent may have ended before the pidfd was opened, and another process may have its number by now.
    if os.getppid() != int(agent):
        sys.exit(1)
    processes.become_subreaper()

    # Signals only wake the loop below: a handler that kills would run in the middle of anything.
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
    # They are the program's. If we held them too, the agent would not see end-of-file when the program closes its own.
    for fd in (0, 1):
        os.close(fd)

    poller = select.poll()
    poller.register(agent_end, select.POLLIN)
    poller.register(wake, select.POLLIN)
    status: int | None = None
    while True:
        ready = [fd for fd, _ in poller.poll()]
        if wake in ready:
            os.read(wake, 4096)
        came = take(signals)
        if agent_end in ready or signal.SIGTERM in came:
            processes.kill_descendants(os.getpid(), limit_s=KILL_LIMIT_S)
            sys.exit(128 + signal.SIGTERM)
        # Once it is reaped, its number may be another process's
        # (test_an_interruption_after_the_end_of_the_program_changes_nothing).
        if signal.SIGINT in came and status is None:
            with contextlib.suppress(PermissionError):  # it is another user's by now: `sudo …`
                os.kill(child, signal.SIGINT)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == child else status
        except ChildProcessError:
            _end_like(os.waitstatus_to_exitcode(status or 0))


def take(signals: list[int]) -> list[int]:
    """The signals that have come, which are removed from the list.

    A handler may add one at any moment. That one stays for the next call: if the list were emptied behind a look, a
    SIGTERM could be lost in between, and the program would never be ended.
    """
    return [signals.pop(0) for _ in range(len(signals))]


def _end_like(code: int) -> NoReturn:
    """End with this exit code; -N: by signal N."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL needs no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
