"""The agent's process of `holdfast.launch`: runs the agent with the call's descriptors and reports to its caller.

    python -P -c "…" CALLER_PID REPORT_FD CALL_FD RESULT_FD,… [command line of holdfast run]

Heavy modules are imported after the supervisor is forked, as in cli/run.py. One AgentReport in JSON goes to REPORT_FD;
its end of file shows the caller that this process has ended.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from holdfast.cli import grammar, say
from holdfast.cli.option_table import OPTIONS
from holdfast.protocol.errors import EXIT_SIGNAL_BASE, HoldfastError
from holdfast.supervisor import processes
from holdfast.supervisor.supervisor import fork_supervisor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.protocol.outcome import Outcome
    from holdfast.runtime.agent_service import Finished


def main(argv: Sequence[str]) -> int:
    """Run the job; returns its exit status. An error before the start is reported, and printed if it is our fault."""
    caller, report_fd, call_fd, result_fds = argv[0], int(argv[1]), int(argv[2]), argv[3]
    live_and_die_with(int(caller))
    os.set_inheritable(report_fd, False)
    try:
        return run(argv[4:], call_fd, tuple(int(fd) for fd in result_fds.split(",")), report_fd)
    except HoldfastError as error:
        report(report_fd, None, "", error)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the caller must get every error
        from holdfast.runtime.driver import as_error

        fault = as_error(error)
        report(report_fd, None, "", fault)
        sys.excepthook(type(error), error, error.__traceback__)
        return fault.exit_code
    except KeyboardInterrupt:
        return EXIT_SIGNAL_BASE + signal.SIGINT


def live_and_die_with(caller: int) -> None:
    """Die with the thread that launched this process, and reset the handling of signals, which the caller sends."""
    processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != caller:
        sys.exit(EXIT_SIGNAL_BASE + signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def run(argv: Sequence[str], call_fd: int, result_fds: tuple[int, ...], report_fd: int) -> int:
    parsed = grammar.parse(argv, os.environ, OPTIONS)
    supervisor = fork_supervisor()
    try:
        from msgspec import structs

        from holdfast.cli.resolve import resolve
        from holdfast.cli.run import run_agent
        from holdfast.protocol.options import CallFds
        from holdfast.runtime.inherited import forget_secrets

        options = structs.replace(
            resolve(parsed, os.environ).options, call_fds=CallFds(call=call_fd, results=result_fds)
        )
        forget_secrets()
        for notice in options.notices:
            say(notice)

        def tell(end: Finished) -> str:
            """Report to the caller, whose exception shows the end; the console shows nothing."""
            report(report_fd, end.outcome, end.folder, None)
            return ""

        return run_agent(supervisor, options, tell)
    finally:
        supervisor.sock.close()  # the supervisor ends with its end of file


def report(fd: int, outcome: Outcome | None, folder: str, error: HoldfastError | None) -> None:
    from msgspec import json

    from holdfast.launching.agent_session import AgentReport

    answer = AgentReport(
        outcome=outcome, folder=folder, code=error.code if error else "", message=str(error) if error else ""
    )
    with os.fdopen(os.dup(fd), "wb") as pipe:
        pipe.write(json.encode(answer))
