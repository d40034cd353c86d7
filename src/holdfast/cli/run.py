"""`holdfast run` and `holdfast launch`: read the line, fork the supervisor, resolve, hand over to the runtime.

The order matters: the supervisor is forked before any heavy import, so that it stays small, and only after the line has
been parsed, so that a typing error forks nothing.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from holdfast.cli import config, grammar
from holdfast.cli.option_table import HOSTS, LAUNCH_OPTIONS, OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.cli.grammar import Parsed
    from holdfast.cli.option_table import Option
    from holdfast.protocol.options import RunOptions
    from holdfast.protocol.rank_progress import Finding, RankStory
    from holdfast.runtime.agent_service import Finished


TEXT_CHARACTERS_MAX = 12_000
"""The launcher's side reads the report in one piece, from a pipe."""
WARNING = (
    "FutureWarning: `launch` is deprecated, as torch.distributed.launch is; "
    "use `holdfast run` and read LOCAL_RANK from the environment"
)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises HoldfastError."""
    parsed = grammar.parse(argv, os.environ, OPTIONS, configure=config.configure)
    if any(getattr(parsed.values, dest) for dest in grammar.ABOUT_US):
        return tell_about(parsed, "run", OPTIONS)
    return execute(parsed, "run", argv)


def main_launch(argv: Sequence[str]) -> int:
    """`holdfast launch`: torch.distributed.launch, for scripts that want a --local-rank argument. Returns the exit
    status. Raises HoldfastError."""
    parsed = grammar.parse(argv, os.environ, LAUNCH_OPTIONS, configure=config.configure)
    if any(getattr(parsed.values, dest) for dest in grammar.ABOUT_US):
        return tell_about(parsed, "launch", LAUNCH_OPTIONS)
    print(f"holdfast: {WARNING}", file=sys.stderr)
    return execute(parsed, "launch", argv)


def main_remote(argv: Sequence[str]) -> int:
    """What the far side of `holdfast run --hosts` runs, not for typing: the agent as it is anywhere, but how it ended
    is reported to the launcher, which shows it once for all hosts.

    `FD run|launch [options] script ...`: FD takes the report. Returns the exit status. Raises HoldfastError."""
    import json

    tells, table = int(argv[0]), LAUNCH_OPTIONS if argv[1] == "launch" else OPTIONS
    parsed = grammar.parse(argv[2:], {}, table)  # the launcher has read all variables

    def show(finished: Finished) -> str:
        from holdfast.diagnosis.screen import render

        text = render(finished.outcome, finished.folder)[-TEXT_CHARACTERS_MAX:]
        report = json.dumps({"kind": finished.outcome.kind.value, "text": text})
        os.write(tells, report.encode())
        return ""

    os.set_inheritable(tells, False)
    return start(parsed, show=show, say_notices=False)


def tell_about(parsed: Parsed, command: str, table: Sequence[Option]) -> int:
    """Answers --help, --version and --print-completion."""
    from holdfast.cli import print_version

    if parsed.values.help:
        from holdfast.cli.option_table import render

        print(render(command, table))
        return 0
    if parsed.values.version:
        return print_version()
    from holdfast.cli.completion import main as print_completion

    return print_completion([parsed.values.print_completion])


def execute(parsed: Parsed, command: str, argv: Sequence[str]) -> int:
    """Plans or runs a well-formed command line, `argv` of `command`. Raises HoldfastError."""
    if any(option.group == HOSTS and parsed.given(option.dest) for option in OPTIONS):
        from holdfast.cli import hosts

        if hosts.are_named(parsed):
            return hosts.execute(parsed, command)
    step = None
    if parsed.values.slurm or "SLURM_STEP_ID" in os.environ:
        from holdfast.cli import under_slurm

        parsed, step = under_slurm.take_in(parsed, os.environ)
        if parsed.values.slurm and step is None:
            return under_slurm.start_agents(parsed, command, argv)
    if parsed.values.plan:
        return show_plan(parsed)
    return start(parsed, command, begin=None if step is None else lambda: under_slurm.guard(step, os.environ))


def start(
    parsed: Parsed,
    command: str = "",
    *,
    begin: Callable[[], None] | None = None,
    show: Callable[[Finished], str] | None = None,
    say_notices: bool = True,
) -> int:
    """This node's agent, until the job has ended; `command`: of which a person typed the line. Raises HoldfastError.

    `begin` is called before it begins; `show` says what the console shows at the end.
    """
    from holdfast.runtime.secret_variables import forget_secrets
    from holdfast.supervisor.supervisor import fork_supervisor

    be_interruptible()
    supervisor = fork_supervisor()
    be_killable()
    try:
        options = resolve(parsed, os.environ, command)
        forget_secrets()
        for notice in options.notices if say_notices else ():
            print(f"holdfast: {notice}", file=sys.stderr)
        from holdfast.runtime import descriptors
        from holdfast.supervisor import preload

        descriptors.provide(options.nproc)
        preload.begin(supervisor, options)  # before our own heavy modules: it imports while we do
        from holdfast.diagnosis.causes import judge
        from holdfast.runtime.agent_service import run_job

        if begin is not None:
            begin()
        hand_on_interrupts()
        return run_job(options, supervisor, judge=judge, examine=examine, render=show or last_screen, load=load_end)
    finally:
        hand_on_interrupts()
        supervisor.sock.close()  # the supervisor ends with its end of file


def load_end() -> None:
    """Reads the table of causes, compiles its patterns, and imports what the last screen needs."""
    import holdfast.diagnosis.screen  # noqa: F401
    from holdfast.diagnosis.causes import load

    load()


def last_screen(end: Finished) -> str:
    from holdfast.diagnosis.screen import render
    from holdfast.supervisor.log_layout import default_log_dir

    return render(end.outcome, end.folder, home=os.environ.get("HOME", ""), runs=default_log_dir())


def be_interruptible() -> None:
    """Until the agent has its own handler, Ctrl-C ends us with one line: an exception out of the middle of an import
    shows a traceback of ours, and may be lost. The supervisor sees the end of its socket, and ends with us."""
    from signal import SIGINT, default_int_handler, getsignal, signal
    from threading import current_thread, main_thread

    if getsignal(SIGINT) is default_int_handler and current_thread() is main_thread():
        signal(SIGINT, leave_at_once)


def leave_at_once(*_: object) -> None:
    from holdfast.cli import EXIT_INTERRUPTED, say_interrupted

    say_interrupted()
    os._exit(EXIT_INTERRUPTED)


def hand_on_interrupts() -> None:
    """From here Ctrl-C is asyncio's and the agent's."""
    from signal import SIGINT, default_int_handler, getsignal, signal

    if getsignal(SIGINT) is leave_at_once:
        signal(SIGINT, default_int_handler)


def be_killable() -> None:
    """A container's first process ignores what it has no handler for: until the agent has its own, SIGTERM would be
    lost."""
    from signal import SIG_DFL, SIGTERM, getsignal, signal

    if os.getpid() == 1 and getsignal(SIGTERM) is SIG_DFL:
        signal(SIGTERM, lambda number, _: os._exit(128 + number))


def examine(stories: Sequence[RankStory]) -> Finding:
    """What the stacks of all ranks mean: loaded only when a job seems to hang."""
    from holdfast.diagnosis.hangs import examine as examine_all

    return examine_all(stories)


def resolve(parsed: Parsed, environ: Mapping[str, str], command: str = "") -> RunOptions:
    """What this command line asks for, all defaults and variables considered. Raises CallerError."""
    from msgspec import structs

    from holdfast.cli.option_table import LAUNCH_OPTIONS
    from holdfast.cli.resolve import line_of_others
    from holdfast.cli.resolve import resolve as resolve_all

    options = resolve_all(parsed, environ).options
    if not command:
        return options
    table = LAUNCH_OPTIONS if command == "launch" else OPTIONS
    return structs.replace(options, line_of_others=line_of_others(parsed, command, table, options, environ))


def show_plan(parsed: Parsed) -> int:
    from holdfast.cli.plan import render
    from holdfast.cli.resolve import resolve as resolve_all

    text = render(parsed, resolve_all(parsed, os.environ), os.environ)
    print(text.encode(errors="surrogateescape").decode(errors="replace"))  # file names need not be UTF-8
    return 0
