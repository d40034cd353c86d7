"""`holdfast completion bash|zsh|fish|tcsh`: a script that completes this command's lines, made from the tables of options.

Knows what each command takes; what a shell wants to hear is completion_shells.py's.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli import COMMANDS
from holdfast.cli.options import FLAG, LAUNCH_OPTIONS, OPTIONS, Option
from holdfast.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SHELLS = ("bash", "zsh", "fish", "tcsh")
SCRIPT, FILE, NOTHING = "script", "file", "nothing"
"""What stands beside the options: a script and then its own words, files, or nothing."""
FILE_METAVARS = frozenset({"FILE", "DIR", "PROGRAM", "PATH", "FOLDER"})
KNOWN_VALUES = {
    "--nproc-per-node": ("auto", "gpu", "cpu", "xpu"),
    "--rdzv-backend": ("c10d", "static", "etcd", "etcd-v2"),
    "--event-log-handler": ("null", "console"),
    "--preload": ("auto", "none"),
}
"""Of options that take other values as well."""
USAGE = """\
usage: holdfast completion bash|zsh|fish|tcsh

Prints a script that completes holdfast's commands, options and values:

  bash  source <(holdfast completion bash)        in ~/.bashrc
  zsh   source <(holdfast completion zsh)         in ~/.zshrc, after compinit
  fish  holdfast completion fish | source         in ~/.config/fish/config.fish
  tcsh  holdfast completion tcsh > ~/.holdfast.tcsh; source ~/.holdfast.tcsh"""


class Word(NamedTuple):
    """One option."""

    names: tuple[str, ...]
    help: str
    takes_value: bool = False
    values: tuple[str, ...] = ()
    is_file: bool = False


class Command(NamedTuple):
    name: str
    help: str
    words: tuple[Word, ...]
    beside: str = FILE
    values: tuple[str, ...] = ()
    """What may stand beside the options, where that is known."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises UsageError."""
    if list(argv) in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise UsageError(f"holdfast completion: for which shell? write one of {', '.join(SHELLS)}")
    from holdfast.cli import completion_shells

    sys.stdout.write(getattr(completion_shells, argv[0])(commands()))
    return 0


def commands() -> list[Command]:
    """All of them, as their own tables and parsers say."""
    from holdfast.cli import (
        doctor,
        env,
        explain,
        kill,
        logs,
        report,
        snaps,
        stacks,
        status,
        stop,
        submit_k8s_line,
        token,
    )
    from holdfast.insight.explain import everything
    from holdfast.schedulers import slurm_options

    sbatch = [Word(("--" + name,), "as for sbatch", takes_value=True) for name in sorted(slurm_options.VALUES)]
    sbatch += [Word(("--" + name,), "as for sbatch") for name in sorted(slurm_options.FLAGS)]
    sbatch.append(Word(("--no-follow",), "submit, and do not follow the log"))
    submit = [Word(("--slurm",), "to Slurm"), Word(("--k8s",), "to Kubernetes"), *words(submit_k8s_line.TABLE), *sbatch]
    found = [
        Command("run", "", words(OPTIONS), SCRIPT),
        Command("launch", "", words(LAUNCH_OPTIONS), SCRIPT),
        Command("submit", "", once(submit), SCRIPT),
        Command("doctor", "", words(doctor.TABLE), SCRIPT),
        Command("completion", "", (), NOTHING, SHELLS),
        Command("explain", "", words_of_parser(explain.parser()), NOTHING, tuple(sorted(everything()))),
        Command("snaps", "", words_of_parser(snaps.parser()), FILE, tuple(sub_parsers(snaps.parser()))),
    ]
    others = {
        "status": status,
        "stacks": stacks,
        "logs": logs,
        "stop": stop,
        "kill": kill,
        "env": env,
        "report": report,
        "token": token,
    }
    found += [Command(name, "", words_of_parser(module.parser())) for name, module in others.items()]
    by_name = {command.name: command for command in found}
    return [
        by_name.get(name, Command(name, "", (Word(("--help",), "print how it is used"),)))._replace(help=text)
        for name, text in COMMANDS.items()
    ]


def words(table: Iterable[Option]) -> tuple[Word, ...]:
    return tuple(
        Word(
            (option.name, *([option.short] if option.short else [])),
            option.help,
            takes_value=option.kind != FLAG,
            values=option.choices or KNOWN_VALUES.get(option.name, ()),
            is_file=option.metavar in FILE_METAVARS,
        )
        for option in table
    )


def words_of_parser(parser: argparse.ArgumentParser) -> tuple[Word, ...]:
    """Of one made by argparse, sub-commands included."""
    found = []
    for action in parser._actions:
        if action.option_strings:
            metavar = action.metavar if isinstance(action.metavar, str) else ""
            choices = tuple(map(str, action.choices or ()))
            long_first = tuple(sorted(action.option_strings, key=lambda name: not name.startswith("--")))
            takes_value = action.nargs not in (0, "?")
            found.append(Word(long_first, action.help or "", takes_value, choices, metavar in FILE_METAVARS))
    for each in sub_parsers(parser).values():
        found += words_of_parser(each)
    return once(found)


def sub_parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: each
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, each in action.choices.items()
    }


def once(found: Iterable[Word]) -> tuple[Word, ...]:
    """The first of those that share a name."""
    kept: dict[str, Word] = {}
    for word in found:
        kept.setdefault(word.names[0], word)
    return tuple(kept.values())
