"""`holdfast run` and `holdfast launch`: parse the line, fork the supervisor, resolve the options, start the agent.

The far side of `holdfast run --hosts` and a caller of `holdfast.launch` start their agents by the same functions. The
order matters. The supervisor is forked before any heavy import, so that it stays small, and after the line is
parsed, so that a typing error forks nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from typing import TYPE_CHECKING

from holdfast.cli import EXIT_INTERRUPTED, config, grammar, print_version, say, say_interrupted
from holdfast.cli.option_table import HOSTS, OPTIONS, TABLES, render
from holdfast.extension_list import EXTENSIONS
from holdfast.protocol.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from holdfast.cli.grammar import Parsed
    from holdfast.protocol.errors import HoldfastError
    from holdfast.protocol.options import RunOptions
    from holdfast.protocol.outcome import Outcome
    from holdfast.runtime.agent_service import Finished
    from holdfast.runtime.ahead import Ahead
    from holdfast.runtime.node_extension import Registered
    from holdfast.supervisor.supervisor import SupervisorHandle


TEXT_CHARACTERS_MAX = 12_000
"""Length of the text in a report to the far side, which reads it from a pipe in one piece."""
WARNING = (
    "FutureWarning: `launch` is deprecated, as torch.distributed.launch is; "
    "use `holdfast run` and read LOCAL_RANK from the environment"
)


def main(argv: Sequence[str]) -> int:
    """Run `holdfast run` with these arguments. Returns the exit status. Raises HoldfastError."""
    return main_of("run", argv)


def main_launch(argv: Sequence[str]) -> int:
    """Run `holdfast launch` with these arguments, as torch.distributed.launch: for scripts that want a --local-rank
    argument. Returns the exit status. Raises HoldfastError."""
    return main_of("launch", argv)


def main_of(command: str, argv: Sequence[str]) -> int:
    """Parse a line of run or launch, and carry it out."""
    parsed = grammar.parse(argv, os.environ, TABLES[command], configure=config.configure)
    if any(getattr(parsed.values, dest) for dest in grammar.ABOUT_US):
        return print_about(parsed, command)
    if command == "launch":
        say(WARNING)
    return execute(parsed, command, argv)


def main_remote(argv: Sequence[str]) -> int:
    """Run the agent on the far side of `holdfast run --hosts`; not for users. It reports its end to the launcher, which
    shows this once for all hosts.

    The arguments are `FD run|launch [options] script ...`; FD takes the report. Returns the exit status. Raises
    HoldfastError.
    """
    import json

    report_fd = int(argv[0])
    parsed = grammar.parse(argv[2:], {}, TABLES[argv[1]])  # the launcher has read all variables

    def show(finished: Finished) -> str:
        from holdfast.diagnosis.screen import render

        text = render(finished.outcome, finished.folder)[-TEXT_CHARACTERS_MAX:]
        report = json.dumps({"kind": finished.outcome.kind.value, "text": text})
        os.write(report_fd, report.encode())
        return ""

    os.set_inheritable(report_fd, False)
    return start(parsed, show=show, say_notices=False)


def main_for_caller(argv: Sequence[str]) -> int:
    """Run the agent's process of `holdfast.launch`, with the call's descriptors, and report to the caller. An error
    before the start is reported, and printed if it is our fault.

    The arguments are `CALLER_PID REPORT_FD CALL_FD RESULT_FD,… [options] -- script`. One AgentReport in JSON goes to
    REPORT_FD, whose end of file shows the caller that this process has ended. Returns the exit status.
    """
    from holdfast.protocol.errors import HoldfastError

    caller, report_fd, call_fd = map(int, argv[:3])
    live_and_die_with(caller)
    os.set_inheritable(report_fd, False)
    try:
        return run_call(argv[4:], call_fd, tuple(map(int, argv[3].split(","))), report_fd)
    except HoldfastError as error:
        report(report_fd, error=error)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the caller must get every error
        from holdfast.runtime.driver import as_error

        fault = as_error(error)
        report(report_fd, error=fault)
        sys.excepthook(type(error), error, error.__traceback__)
        return fault.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def live_and_die_with(caller: int) -> None:
    """End with the thread that launched this process, and reset the handling of signals: the caller sends some, and may
    have ignored or blocked them when it made this process."""
    import signal

    from holdfast.protocol.exit_codes import EXIT_SIGNAL_BASE
    from holdfast.supervisor.processes import PR_SET_PDEATHSIG, prctl

    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != caller:
        sys.exit(EXIT_SIGNAL_BASE + signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def run_call(argv: Sequence[str], call_fd: int, result_fds: tuple[int, ...], report_fd: int) -> int:
    from holdfast.supervisor.supervisor import fork_supervisor

    parsed = grammar.parse(argv, os.environ, OPTIONS)
    supervisor = fork_supervisor()
    try:
        from msgspec import structs

        from holdfast.inherited import forget_secrets
        from holdfast.protocol.options import CallFds

        calls = CallFds(call=call_fd, results=result_fds)
        options = structs.replace(resolve(parsed, os.environ), call_fds=calls)
        forget_secrets()
        for notice in options.notices:
            say(notice)

        def report_end(end: Finished) -> str:
            """Report to the caller, whose exception shows the end; the console shows nothing."""
            report(report_fd, end.outcome, end.folder)
            return ""

        return run_agent(supervisor, options, report_end)
    finally:
        supervisor.sock.close()  # the supervisor ends with its end of file


def report(fd: int, outcome: Outcome | None = None, folder: str = "", error: HoldfastError | None = None) -> None:
    from msgspec import json

    code, message = (error.code, str(error)) if error else ("", "")
    with os.fdopen(os.dup(fd), "wb") as pipe:
        pipe.write(json.encode({"outcome": outcome, "folder": folder, "code": code, "message": message}))


def print_about(parsed: Parsed, command: str) -> int:
    """Print the text of --help, --version or --print-completion."""
    if parsed.values.help:
        print(render(command))
        return 0
    if parsed.values.version:
        return print_version()
    from holdfast.cli.completion import main as print_completion

    return print_completion([parsed.values.print_completion])


def execute(parsed: Parsed, command: str, argv: Sequence[str]) -> int:
    """Plan or run the parsed command line `argv` of `command`. Raises HoldfastError."""
    if any(option.group == HOSTS and parsed.given(option.dest) for option in OPTIONS):
        from holdfast.cli import hosts

        if hosts.are_named(parsed):
            if parsed.values.json:
                raise UsageError("--json shows the plan of one node: leave the hosts out")
            return hosts.execute(parsed, command)

    step = None
    if parsed.values.slurm or "SLURM_STEP_ID" in os.environ:
        from holdfast.cli import under_slurm

        parsed, step = under_slurm.complete(parsed, os.environ)
        if parsed.values.slurm and step is None:
            return under_slurm.start_agents(parsed, command, argv)

    if parsed.values.plan:
        return show_plan(parsed)
    if parsed.values.json:
        raise UsageError("--json is for --plan: holdfast run --plan --json …")
    return start(parsed, command, begin=None if step is None else lambda: under_slurm.guard(step, os.environ))


def start(
    parsed: Parsed,
    command: str = "",
    *,
    begin: Callable[[], None] | None = None,
    show: Callable[[Finished], str] | None = None,
    say_notices: bool = True,
    extensions: Sequence[Registered] = EXTENSIONS,
) -> int:
    """Run this node's agent until the job has ended. Raises HoldfastError.

    `command` is the command that a user typed, empty if a program made the line; `begin` is called before the start;
    `show` makes the last screen; `extensions`: see holdfast.extension_list.
    """
    from holdfast.inherited import forget_secrets
    from holdfast.supervisor.supervisor import fork_supervisor

    # The fork is first, while this process has few modules and no threads: the supervisor stays small.
    be_interruptible()
    supervisor = fork_supervisor()
    be_killable()
    try:
        with quick_imports(without="typing_extensions"):  # msgspec asks for it, and takes typing as well
            import msgspec  # noqa: F401
        with quick_imports():  # of a rendezvous backend, too, which a third party may have written
            options = resolve(parsed, os.environ, command)
        forget_secrets()
        for notice in options.notices if say_notices else ():
            say(notice)
        return run_agent(supervisor, options, show or last_screen, begin, extensions)
    finally:
        hand_on_interrupts()
        supervisor.sock.close()  # the supervisor ends with its end of file


def run_agent(
    supervisor: SupervisorHandle,
    options: RunOptions,
    show: Callable[[Finished], str],
    begin: Callable[[], None] | None = None,
    extensions: Sequence[Registered] = EXTENSIONS,
) -> int:
    """Run this node's agent above its supervisor until the job has ended."""
    from holdfast.inherited import provide_descriptors, provide_processes
    from holdfast.supervisor import worker_command

    provide_descriptors(options.nproc)
    provide_processes(options.nproc)
    worker_command.begin(supervisor, options)  # before our own heavy modules: both import at the same time
    # asyncio asks for ssl, and this process uses no TLS in asyncio: etcd has clients of its own, in threads. What the
    # backend of a third party uses is not known.
    with quick_imports(without="ssl" if options.shared_value is None else ""):
        ahead = fork_those_ahead(extensions, options)  # of modules that the children need too, none is there yet
        from holdfast.diagnosis.causes import judge
        from holdfast.runtime.agent_service import run_job

    if begin is not None:
        begin()
    hand_on_interrupts()
    return run_job(options, supervisor, judge=judge, render=show, extensions=extensions, load=load_end, ahead=ahead)


def fork_those_ahead(extensions: Sequence[Registered], options: RunOptions) -> dict[str, Ahead]:
    """Fork a child for each extension that has something to find out while this process imports its modules."""
    works = {each.name: work for each in extensions if (work := each.ahead(options)) is not None}
    if not works:
        return {}
    from holdfast.runtime.ahead import fork_ahead

    return {name: child for name, work in works.items() if (child := fork_ahead(work)) is not None}


@contextlib.contextmanager
def quick_imports(*, without: str = "") -> Iterator[None]:
    """Import modules in less time: each of these two is a twentieth of the time until the script begins.

    There is no garbage collection: modules make little garbage. And a module that others would import if it is there,
    and can do without, is not there (`without`; empty: all are), unless it was imported before.
    """
    enabled, hides = gc.isenabled(), without and without not in sys.modules
    gc.disable()
    if hides:
        # An import of it raises ImportError then.
        sys.modules[without] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hides:
            del sys.modules[without]
        if enabled:
            gc.enable()


def load_end() -> None:
    """Load the table of causes and the modules of the last screen."""
    import holdfast.diagnosis.screen  # noqa: F401
    from holdfast.diagnosis.causes import load

    load()


def last_screen(end: Finished) -> str:
    from holdfast.diagnosis.screen import render
    from holdfast.run_folder import default_log_dir

    return render(end.outcome, end.folder, home=os.environ.get("HOME", ""), runs=default_log_dir())


def be_interruptible() -> None:
    """End at once at Ctrl-C, with one line, until the agent has its own handler.

    An exception during an import would show a traceback, and may be lost. The supervisor notices the end of its socket
    and ends, too.
    """
    from signal import SIGINT, default_int_handler, getsignal, signal
    from threading import current_thread, main_thread

    if getsignal(SIGINT) is default_int_handler and current_thread() is main_thread():
        signal(SIGINT, leave_at_once)


def leave_at_once(*_: object) -> None:
    say_interrupted()
    os._exit(EXIT_INTERRUPTED)


def hand_on_interrupts() -> None:
    """Leave Ctrl-C to asyncio and the agent from now on."""
    from signal import SIGINT, default_int_handler, getsignal, signal

    if getsignal(SIGINT) is leave_at_once:
        signal(SIGINT, default_int_handler)


def be_killable() -> None:
    """Handle SIGTERM until the agent does: the first process of a container ignores signals without a handler."""
    from signal import SIG_DFL, SIGTERM, getsignal, signal

    if os.getpid() == 1 and getsignal(SIGTERM) is SIG_DFL:
        signal(SIGTERM, lambda number, _: os._exit(128 + number))


def resolve(parsed: Parsed, environ: Mapping[str, str], command: str = "") -> RunOptions:
    """The options of this command line, with defaults and variables. Raises CallerError."""
    from msgspec import structs

    from holdfast.cli.resolve import how_others_join
    from holdfast.cli.resolve import resolve as resolve_all

    options = resolve_all(parsed, environ).options
    if not command:
        return options
    return structs.replace(options, how_others_join=how_others_join(parsed, command, options, environ))


def show_plan(parsed: Parsed) -> int:
    from holdfast.cli.plan import document, render
    from holdfast.cli.resolve import resolve as resolve_all

    resolution = resolve_all(parsed, os.environ)
    if parsed.values.json:
        from holdfast.cli.printing import print_json

        print_json(document(parsed, resolution, os.environ))
        return 0
    text = render(parsed, resolution, os.environ)
    print(text.encode(errors="surrogateescape").decode(errors="replace"))  # file names need not be UTF-8
    return 0
