"""`holdfast completion bash|zsh|fish|tcsh`: prints a completion script, made from the tables of options.

Knows the options of each command and the format of each shell. shtab is no substitute: it completes our options among
the script's own arguments, does not complete `--option=value`, and needs argparse parsers, which `run` and `launch`
lack.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from holdfast.cli import COMMANDS, function_of
from holdfast.cli.option_table import FLAG, OPTIONS, TABLES, Option
from holdfast.protocol.errors import UsageError
from holdfast.rendezvous.backends import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SHELLS = ("bash", "zsh", "fish", "tcsh")
SCRIPT, FILE, NOTHING = "script", "file", "nothing"
"""What follows the options: a script with its own arguments, files, or nothing."""
FILE_METAVARS = frozenset({"FILE", "DIR", "PROGRAM", "PATH", "FOLDER"})
KNOWN_VALUES = {
    "--nproc-per-node": ("auto", "gpu", "cpu", "xpu"),
    "--rdzv-backend": tuple(BACKENDS),
    "--event-log-handler": ("null", "console"),
    "--preload": ("auto", "none"),
}
"""Common values of options that take other values as well."""
USAGE = """\
usage: holdfast completion bash|zsh|fish|tcsh [--json]

Prints a script that completes holdfast's commands, options and values:

  bash  source <(holdfast completion bash)        in ~/.bashrc
  zsh   source <(holdfast completion zsh)         in ~/.zshrc, after compinit
  fish  holdfast completion fish | source         in ~/.config/fish/config.fish
  tcsh  holdfast completion tcsh > ~/.holdfast.tcsh; source ~/.holdfast.tcsh"""


class Script(TypedDict):
    """A completion script."""

    shell: str
    script: str


JSON_FORMS = {"completion": ((Script,),)}


class KnownOption(NamedTuple):
    """An option, as the shells must know it."""

    names: tuple[str, ...]
    help: str
    takes_value: bool = False
    values: tuple[str, ...] = ()
    is_file: bool = False


class Command(NamedTuple):
    """A command with its options, and what may follow them."""

    name: str
    help: str
    options: tuple[KnownOption, ...]
    beside: str = FILE
    """SCRIPT, FILE or NOTHING."""
    values: tuple[str, ...] = ()
    """Known values that may follow the options, such as sub-commands."""


def main(argv: Sequence[str]) -> int:
    """Run `holdfast completion` with these arguments. Returns the exit status. Raises UsageError."""
    if list(argv) in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    shells = [word for word in argv if word != "--json"]
    if len(shells) != 1 or shells[0] not in SHELLS:
        given = f", not {' '.join(shells)}" if shells else ""
        raise UsageError(f"holdfast completion: give one shell of {', '.join(SHELLS)}{given}")
    scripts = {"bash": bash, "zsh": zsh, "fish": fish, "tcsh": tcsh}
    script = scripts[shells[0]](commands())
    if len(argv) > len(shells):
        from holdfast.cli.printing import print_json

        print_json(Script(shell=shells[0], script=script))
    else:
        sys.stdout.write(script)
    return 0


def commands() -> list[Command]:
    """All commands, from their own tables and parsers."""
    from holdfast.cli import config_command, doctor, submit, submit_k8s
    from holdfast.diagnosis.reference import explanations

    sbatch = [KnownOption(("--" + name,), "as for sbatch", takes_value=True) for name in sorted(submit.VALUES)]
    sbatch += [KnownOption(("--" + name,), "as for sbatch") for name in sorted(submit.FLAGS)]
    sbatch.append(KnownOption(("--no-follow",), "submit, and do not follow the log"))
    sbatch.append(KnownOption(("--json",), "print JSON"))
    sbatch.append(KnownOption((submit.CHAIN,), "so many jobs, one after the other", takes_value=True))
    submitting = [
        KnownOption(("--slurm",), "to Slurm"),
        KnownOption(("--k8s",), "to Kubernetes"),
        *options_of(submit_k8s.TABLE),
        *sbatch,
    ]
    tables = {**{name: options_of(table) for name, table in TABLES.items()}, "doctor": options_of(doctor.TABLE)}
    tables["config"] = options_of(OPTIONS)
    tables["submit"] = once(submitting)
    found = []
    for name, text in COMMANDS.items():
        parser = parser_of(name)
        if name in tables:
            found.append(Command(name, text, tables[name], SCRIPT, config_command.WAYS if name == "config" else ()))
        elif parser is None:  # this command itself
            found.append(Command(name, text, (KnownOption(("--json",), "print JSON"),), NOTHING, SHELLS))
        elif name == "explain":
            found.append(Command(name, text, options_of_parser(parser), NOTHING, tuple(sorted(explanations()))))
        else:
            found.append(Command(name, text, options_of_parser(parser), FILE, tuple(sub_parsers(parser))))
    return found


def parser_of(name: str) -> argparse.ArgumentParser | None:
    """The argparse parser of a command; None: it has none."""
    make = function_of(name, "parser")
    return None if make is None else make()


def options_of(table: Iterable[Option]) -> tuple[KnownOption, ...]:
    return tuple(
        KnownOption(
            (option.name, *([option.short] if option.short else [])),
            option.help,
            takes_value=option.kind != FLAG,
            values=option.choices or KNOWN_VALUES.get(option.name, ()),
            is_file=option.metavar in FILE_METAVARS,
        )
        for option in table
    )


def options_of_parser(parser: argparse.ArgumentParser) -> tuple[KnownOption, ...]:
    """The options of an argparse parser, sub-commands included."""
    found = []
    for action in parser._actions:
        if action.option_strings:
            metavar = action.metavar if isinstance(action.metavar, str) else ""
            choices = tuple(map(str, action.choices or ()))
            long_first = tuple(sorted(action.option_strings, key=lambda name: not name.startswith("--")))
            takes_value = action.nargs not in (0, "?")
            found.append(KnownOption(long_first, action.help or "", takes_value, choices, metavar in FILE_METAVARS))
    for each in sub_parsers(parser).values():
        found += options_of_parser(each)
    return once(found)


def sub_parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: each
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, each in action.choices.items()
    }


def once(found: Iterable[KnownOption]) -> tuple[KnownOption, ...]:
    """The options without duplicates: the first of each name."""
    kept: dict[str, KnownOption] = {}
    for option in found:
        kept.setdefault(option.names[0], option)
    return tuple(kept.values())


# --- bash -------------------------------------------------------------------------------------------------------------

BASH = r"""# Completion of holdfast's lines for bash, made by: holdfast completion bash

# What a command takes: its options, those of them with a value, whether a script or words of a list follow them.
_holdfast_command() {
    options='--help' valued='' script='' beside='' nothing=''
    case $1 in
%COMMANDS%
    esac
}

# What an option's value may be.
_holdfast_values() {
    values='' files=''
    case "$1 $2" in
%VALUES%
    esac
}

_holdfast() {
    local options valued script beside nothing values files word each last='' expects='' given='' i
    local -a line=()
    COMPREPLY=()
    # bash cuts words at "=", ":" and "@" (ranges, endpoints, hosts): they are put together again.
    for ((i = 1; i <= COMP_CWORD; i++)); do
        each=${COMP_WORDS[i]}
        if ((${#line[@]})) && [[ $each == +([=:@]) || $last == +([=:@]) ]]; then
            line[${#line[@]}-1]+=$each
        else
            line+=("$each")
        fi
        last=$each
    done
    word=${line[${#line[@]}-1]}
    if ((${#line[@]} == 1)); then
        COMPREPLY=($(compgen -W '%NAMES% --help --version' -- "$word"))
        return
    fi
    _holdfast_command "${line[0]}"
    for ((i = 1; i < ${#line[@]} - 1; i++)); do
        each=${line[i]}
        if [[ -n $expects ]]; then
            expects=''
        elif [[ $each == -- ]]; then
            given=$script
        elif [[ $each == -* ]]; then
            each=${each//_/-}
            [[ $each == *=* || " $valued " != *" $each "* ]] || expects=$each
        else
            given=$script
        fi
        # All that follows a script is the script's own.
        [[ -z $given ]] || return 0
    done
    if [[ $word == --*=* ]]; then
        each=${word%%=*}
        expects=${each//_/-}
        word=${word#*=}
        [[ $COMP_WORDBREAKS == *"="* ]] && each='' || each+='='
    else
        each=''
    fi
    if [[ -n $expects ]]; then
        _holdfast_values "${line[0]}" "$expects"
        COMPREPLY=($(compgen -P "$each" -W "$values" -- "$word"))
        [[ -n $files ]] || compopt +o default 2>/dev/null
    elif [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
        compopt +o default 2>/dev/null
    elif [[ -n $beside$nothing ]]; then
        COMPREPLY=($(compgen -W "$beside" -- "$word"))
        [[ -z $nothing ]] || compopt +o default 2>/dev/null
    fi
    return 0
}

# Where nothing is known, and for scripts, files are completed.
complete -o default -F _holdfast holdfast
"""


def bash(commands: Sequence[Command]) -> str:
    known, values = [], []
    for command in commands:
        options = shlex.quote(
            " ".join(name for option in command.options for name in option.names if name.startswith("--"))
        )
        valued = shlex.quote(
            " ".join(name for option in command.options if option.takes_value for name in option.names)
        )
        more = f" beside={shlex.quote(' '.join(command.values))}" if command.values else ""
        more += " script=yes" if command.beside == SCRIPT else " nothing=yes" if command.beside == NOTHING else ""
        known.append(f"    {command.name}) options={options} valued={valued}{more} ;;")
        for option in command.options:
            label = "|".join(f'"{command.name} {name}"' for name in option.names)
            if option.values:
                values.append(f"    {label}) values={shlex.quote(' '.join(option.values))} ;;")
            elif option.is_file:
                values.append(f"    {label}) files=yes ;;")
    parts = {
        "%COMMANDS%": "\n".join(known),
        "%VALUES%": "\n".join(values),
        "%NAMES%": " ".join(command.name for command in commands),
    }
    return filled(BASH, parts)


# --- zsh --------------------------------------------------------------------------------------------------------------

ZSH = r"""#compdef holdfast
# Completion of holdfast's lines for zsh, made by: holdfast completion zsh

_holdfast() {
    local line state
    local -a commands
    _arguments -C '1: :->command' '*:: :->rest' && return
    case $state in
    command)
        commands=(
%NAMES%
        )
        _describe command commands
        ;;
    rest)
        case $words[1] in
%COMMANDS%
        *) _files ;;
        esac
        ;;
    esac
}

if [[ $funcstack[1] == _holdfast ]]; then
    _holdfast "$@"
else
    compdef _holdfast holdfast
fi
"""


def zsh(commands: Sequence[Command]) -> str:
    names = "\n".join(f"            {shlex.quote(f'{each.name}:{each.help}')}" for each in commands)
    known = "\n".join(line for command in commands for line in zsh_command(command))
    return filled(ZSH, {"%NAMES%": names, "%COMMANDS%": known})


def zsh_command(command: Command) -> Iterator[str]:
    yield f"        {command.name})"
    yield "            _arguments -S -A '-*' \\"
    for option in command.options:
        for name in option.names:
            yield f"                {shlex.quote(zsh_option(name, option))} \\"
    if command.values:
        several = " ".join(command.values)
        yield f"                {shlex.quote(f'*:word:({several})')}"
    elif command.beside == SCRIPT:
        yield "                '1:script:_files' '*:argument:_files'"
    else:
        yield "                '*:file:_files'"
    yield "            ;;"


def zsh_option(name: str, option: KnownOption) -> str:
    about = option.help
    for letter in "\\[]:":
        about = about.replace(letter, "\\" + letter)
    if not option.takes_value:
        return f"*{name}[{about}]"
    several = " ".join(option.values)
    action = f"({several})" if several else "_files" if option.is_file else ""
    return f"*{name}{'=' if name.startswith('--') else '+'}[{about}]:value:{action or ' '}"


# --- fish -------------------------------------------------------------------------------------------------------------

FISH = r"""# Completion of holdfast's lines for fish, made by: holdfast completion fish

# Whether the line is of this command ($argv[1]) and its script is still to come ($argv[2..] are options with a value).
function __holdfast_in
    set -l line (commandline -opc)
    test (count $line) -ge 2; and test "$line[2]" = $argv[1]; or return 1
    set -l expects no
    for word in $line[3..]
        if test $expects = yes
            set expects no
            continue
        end
        switch $word
            case --
                return 1
            case '-*'
                contains -- (string replace -a _ - -- $word) $argv[2..]; and set expects yes
            case '*'
                return 1
        end
    end
    return 0
end

function __holdfast_is
    set -l line (commandline -opc)
    test (count $line) -ge 2; and test "$line[2]" = $argv[1]
end

complete -c holdfast -e
complete -c holdfast -n 'test (count (commandline -opc)) -eq 1' -f
complete -c holdfast -n 'test (count (commandline -opc)) -eq 1' -l help -d 'how it is used'
complete -c holdfast -n 'test (count (commandline -opc)) -eq 1' -l version -d 'the version'
"""


def fish(commands: Sequence[Command]) -> str:
    return FISH + "".join(f"{line}\n" for command in commands for line in fish_command(command))


def fish_command(command: Command) -> Iterator[str]:
    yield ""
    alone = "test (count (commandline -opc)) -eq 1"
    yield f"complete -c holdfast -n '{alone}' -a {command.name} -d {fish_text(command.help)}"
    where = f"__holdfast_is {command.name}"
    if command.beside == SCRIPT:
        variable = f"__holdfast_valued_{command.name}"
        valued = " ".join(name for option in command.options if option.takes_value for name in option.names)
        yield f"set -g {variable} {valued}".rstrip()
        where = f"__holdfast_in {command.name} ${variable}"
    elif command.beside == NOTHING:
        yield f"complete -c holdfast -n '{where}' -f"
    if command.values:
        yield f"complete -c holdfast -n '{where}' -a {fish_text(' '.join(command.values))}"
    for option in command.options:
        names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
        value = ""
        if option.values:
            value = f" -x -a {fish_text(' '.join(option.values))}"
        elif option.takes_value:
            value = " -r -F" if option.is_file else " -x"
        yield f"complete -c holdfast -n '{where}' {names}{value} -d {fish_text(option.help)}"


def fish_text(text: str) -> str:
    """Quote a text for fish, which knows two escapes in single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def filled(text: str, parts: dict[str, str]) -> str:
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


# --- tcsh -------------------------------------------------------------------------------------------------------------


def tcsh(commands: Sequence[Command]) -> str:
    """The script for tcsh: one `complete` line.

    tcsh knows the word before and the beginning of a word, but no sub-commands, so it completes the options of all
    commands.
    """
    known = [option for command in commands for option in command.options]
    options = sorted({name for option in known for name in option.names if name.startswith("--")} | {"--help"})
    values = {name: " ".join(option.values) for option in known for name in option.names if option.values}
    files = {name for option in known for name in option.names if option.is_file} - values.keys()
    rules = [f"'p/1/({' '.join(command.name for command in commands)} --help --version)/'"]
    rules += [f"'n/{name}/({listed})/'" for name, listed in sorted(values.items())]
    rules += [f"'n/{name}/f/'" for name in sorted(files)]
    rules += [f"'n/{command.name}/({' '.join(command.values)})/'" for command in commands if command.values]
    rules += [f"'C/--*/({' '.join(options)})/'", "'p/*/f/'"]
    lines = " \\\n  ".join(rules)
    head = "# Completion of holdfast's lines for tcsh, made by: holdfast completion tcsh\n"
    return f"{head}complete holdfast \\\n  {lines}\n"
