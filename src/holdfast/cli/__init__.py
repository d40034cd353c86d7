"""The command `holdfast`: finds the sub-command, and converts errors into one message and an exit code.

Knows the names of the sub-commands. Imports only sys and os until one of them is chosen, so that the plain command and
its help respond at once.
"""

from __future__ import annotations

import os
import sys

from holdfast.extension_list import COMMANDS as OF_EXTENSIONS

TYPE_CHECKING = False  # importing typing would take time in which Ctrl-C shows a traceback
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from holdfast.protocol.errors import HoldfastError


EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_NOT_WRITTEN = 1
JSON_SCHEMA = 1
"""The version of everything that `--json` prints: `schema` in each document. docs/schemas has the schemas. A field that
is removed, or changes its meaning, makes it larger; a new field does not."""

COMMANDS = {
    "run": "start this node's part of a training job; takes torchrun's command line unchanged",
    "launch": "the same for scripts that need a --local-rank argument (torch.distributed.launch)",
    "submit": "submit a job to Slurm (--slurm) or Kubernetes (--k8s), or show what would be submitted",
    **{name: extension.commands[name] for name, extension in OF_EXTENSIONS.items()},
    "logs": "show what workers wrote; --rank, --follow, --grep",
    "doctor": "check this node, and with the line of a run on several nodes also every pair of them",
    "explain": "explain a code (HF211) and what to do about it; works offline",
    "report": "show how a run used its time: starts, training, lost work; also as a page with pictures",
    "token": "print a new random job token, for HOLDFAST_TOKEN or a token_file",
    "env": "describe this machine and its software, to paste into an issue",
    "config": "show the options that a run would get, and where each value comes from; a schema for editors",
    "completion": "print a completion script for bash, zsh, fish or tcsh",
    "shim": "write a torchrun command that calls holdfast run, for tools that call torchrun by its name",
    "witness": "vote for jobs whose coordinator is lost: two nodes and a witness survive the loss of one",
    "snaps": "list, verify, prune or export the snapshots of a training job; no job needed",
}
"""Sub-commands and what they do. Each is `main(argv) -> int` of the module of its name, unless SHARED or an extension
has it."""

OTHER_WORDS = {
    "plan": "run --plan",
    "start": "run",
    **dict.fromkeys(("ps", "list", "ls", "jobs", "top"), "status"),
    **dict.fromkeys(("snapshots", "checkpoints"), "snaps"),
}
"""What people type for a command whose name is not similar."""
TAKE_A_SCRIPT = ("run", "launch", "submit", "doctor", "config")
"""Commands whose line may end with a script and its arguments."""
SHARED = {
    "launch": ("run", "main_launch"),
    "remote": ("run", "main_remote"),
    "config": ("config_command", "main_config"),
    "env": ("doctor", "main_env"),
    "explain": ("report", "main_explain"),
    "token": ("shim", "main_token"),
}
"""Sub-commands with their module and function. `remote` is for ssh, not for users."""


def function_of(command: str, what: str) -> Callable[..., Any] | None:
    """The function `main` or `parser` of a sub-command; None: it has none. Imports its module."""
    from importlib import import_module

    if command in OF_EXTENSIONS:
        module = OF_EXTENSIONS[command].file("command")
    else:
        module = import_module(f"holdfast.cli.{SHARED.get(command, (command,))[0]}")
    several = {"main": f"main_{command}", "parser": f"{command}_parser"}
    return getattr(module, several[what] if command in OF_EXTENSIONS or command in SHARED else what, None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, `sys.argv[1:]` when none is given. Returns the exit status."""
    try:
        return run_line(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        say_interrupted()
        return EXIT_INTERRUPTED


def entry() -> NoReturn:
    """The console script: run main(), then exit."""
    status = main()
    # After a Ctrl-C in an import that defines a dataclass or a named tuple, `python -m holdfast` would end by SIGINT
    # instead of with our exit code, although the exception was handled.
    if status == EXIT_INTERRUPTED or sys.argv[1:2] in (["run"], ["launch"]):
        leave(status)
    sys.exit(status)


def leave(status: int) -> NoReturn:
    """End this process without the interpreter's shutdown, which takes time: a job ends with its agent's process."""
    # Buffers are written first, as the shutdown would do.
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        sys.exit(status)  # the interpreter reports it
    os._exit(status)


def say_interrupted() -> None:
    """Print a message about Ctrl-C, unless the console blocks."""
    import select

    room = select.poll()
    room.register(2, select.POLLOUT)
    if any(events == select.POLLOUT for _, events in room.poll(0)):
        os.write(2, f"holdfast: ended by Ctrl-C; exit code {EXIT_INTERRUPTED}\n".encode())


def run_line(arguments: list[str]) -> int:
    if not sys.platform.startswith("linux"):
        return complain("HF112", f"holdfast runs on Linux; this is {sys.platform}")
    if not arguments:
        print(usage())
        return EXIT_USAGE
    command, rest = arguments[0], arguments[1:]
    if command in ("-h", "--help", "help"):
        print(usage())
        return 0
    if command in ("-V", "--version"):
        return run_command("env", ["--short"]) if rest == ["--verbose"] else print_version()
    if command not in COMMANDS:
        return complain("HF101", unknown(command))
    return run_command(command, rest)


def is_in_a_thread() -> bool:
    threading = sys.modules.get("threading")
    return threading is not None and threading.current_thread() is not threading.main_thread()


def run_command(command: str, rest: list[str]) -> int:
    """Run one sub-command; a HoldfastError becomes its message and its exit code."""
    # Signals and forks need the main thread: a caller of main() in another thread gets a process for it.
    if command in ("run", "launch") and is_in_a_thread():
        import subprocess

        return subprocess.call([sys.executable, "-m", "holdfast", command, *rest])

    from holdfast.protocol.errors import Fault, HoldfastError

    if hasattr(sys.stdout, "reconfigure"):  # logs and file names may contain characters that the terminal cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        run = function_of(command, "main")
        assert run is not None
        status: int = run(rest)
        if sys.stdout is not None:  # None if it is closed: `holdfast report >&-`
            sys.stdout.flush()
    except HoldfastError as error:
        if error.fault is Fault.OURS:
            show_traceback(error)
        complain(error.code, str(error))
        if wants_json(command, rest):
            print_error(error)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - every error ends with a code
        from errno import EDQUOT, EFBIG, ENOSPC

        if isinstance(error, BrokenPipeError) and nobody_reads():  # `holdfast report | head`
            drop_output()
            return EXIT_BROKEN_PIPE
        if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EFBIG) and error.filename is None:
            drop_output()
            say(f"the output cannot be written: {error.strerror}")
            return EXIT_NOT_WRITTEN
        from holdfast.runtime.driver import as_error

        fault = as_error(error)
        if fault.fault is Fault.OURS:
            show_traceback(error)
        complain(fault.code, str(fault))
        return fault.exit_code
    return status


def wants_json(command: str, rest: list[str]) -> bool:
    """Whether the output is for a program. What follows the script belongs to the script."""
    if command not in TAKE_A_SCRIPT:
        return "--json" in rest
    before = rest[: rest.index("--")] if "--" in rest else rest
    return "--json" in before and ("--plan" in before or command not in ("run", "launch"))


def print_error(error: HoldfastError) -> None:
    """Print the error as one line of JSON on stdout, where the output would have been."""
    import json

    about = {"code": error.code, "message": str(error), "exit_code": error.exit_code}
    print(json.dumps({"schema": JSON_SCHEMA, "error": about}), flush=True)


def nobody_reads() -> bool:
    """Whether the reader of stdout is gone, as with `| head`. Any other broken pipe is an error."""
    from select import POLLERR, poll

    if sys.stdout is None:
        return False
    poller = poll()
    poller.register(sys.stdout.fileno(), 0)
    return any(mask & POLLERR for _, mask in poller.poll(0))


def drop_output() -> None:
    """Discard the rest of the buffer, so that no second error follows it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Print a line of ours on stderr. One that nobody reads, or that a full disk does not take, is lost: a notice is no
    reason to end a job before it starts."""
    if sys.stderr is None:  # it was closed
        return
    from contextlib import suppress  # `--help` has no time for it

    with suppress(OSError, ValueError):
        print(f"holdfast: {text}", file=sys.stderr, flush=True)


def complain(code: str, text: str) -> int:
    """Print an error. Returns the exit code of a line that is wrong."""
    say(f"{code}: {text}")
    return EXIT_USAGE


def show_traceback(error: Exception) -> None:
    """Show a fault of ours with all details."""
    import traceback

    traceback.print_exception(error)


def print_version() -> int:
    from holdfast.version import __version__

    print(f"holdfast {__version__}")
    return 0


def usage() -> str:
    """The text of `holdfast --help`."""
    from holdfast.cli.option_table import wrapped

    texts = {name: f"\n{'':14}".join(wrapped(text, 66)) for name, text in COMMANDS.items()}
    commands = "\n".join(f"  {name:12}{text}" for name, text in texts.items())
    return (
        "usage: holdfast COMMAND ...\n\n"
        "Launches distributed training and keeps it running.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n  --help     this text\n"
        "  --version  the version; with --verbose also commit, Python, torch and kernel\n\n"
        "`holdfast COMMAND --help` explains a command.\n`torchrun ARGS` becomes `holdfast run ARGS`."
    )


def unknown(command: str) -> str:
    """The message about a first argument that is no command."""
    import difflib

    if command.startswith("-") or command.endswith(".py"):
        return f"{command!r} is not a command; for torchrun's command line write: holdfast run {command} ..."
    nearest = difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.6)
    meant = OTHER_WORDS.get(command) or next(iter(nearest), "")
    hint = f"did you mean {meant}?" if meant else f"the commands are {', '.join(COMMANDS)}"
    return f"{command!r} is not a command; {hint}"
