"""Parses a command line by torchrun's grammar: options, the script, then the script's own arguments.

Knows spellings, prefixes and the source of each value; knows nothing of the meaning of values. Standard library only.

torchrun's grammar is argparse's, and tests compare this module with the installed torchrun's parser. It does not use
argparse, which judges every word before it knows where the script is (`torchrun train.py --log 3` fails because `--log`
could be an option of torchrun) and accepts prefixes silently. Importing argparse also takes as long as the rest of
`holdfast run --help`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from holdfast.cli.option_table import FLAG, FLOAT, INT, LIST, OPTIONS, Option, flag_of
from holdfast.protocol.errors import ConfigFileError, EnvironmentValueError, HoldfastError, UsageError

Number = TypeVar("Number", int, float)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    T = TypeVar("T")

FROM_FLAG, FROM_DEFAULT, FROM_STEP = "flag", "default", "the Slurm step"
"""Sources of values. Others are the name of a variable, or the line of a configuration file: `holdfast.toml:3`."""
ABOUT_US = ("help", "version", "print_completion")
"""Options about the command itself. All others are ignored if one of them is given."""
VARIABLE_PREFIXES = ("PET_", "HOLDFAST_")

OTHER_VARIABLES = frozenset(
    f"HOLDFAST_{name}"
    for name in ("TOKEN", "RUN_ID", "RUNTIME_DIR", "SLURM_CHECK_S", "GUARDS", "BOARD", "SAVER", "STORE_FULL_TORCH")
)
"""Variables that are read and belong to no option."""

TRUE_WORDS = frozenset({"true", "yes"})
FALSE_WORDS = frozenset({"false", "no"})

WORKERS, NODES = "--nproc-per-node", "--nnodes"
ALWAYS = "--use-env"
"""An option of torch.distributed.launch only."""
OTHER_LAUNCHERS = {
    **dict.fromkeys(("gpus", "num-gpus", "gpus-per-node", "num-processes", "num-procs", "np", "n"), WORKERS),
    **dict.fromkeys(("num-machines", "num-nodes", "nodes"), NODES),
    "machine-rank": "--node-rank",
    "main-process-ip": "--master-addr",
    "main-process-port": "--master-port",
}
"""Option names of other launchers (accelerate, deepspeed, mpirun, Lightning), with ours of the same meaning."""


class CommandLine(NamedTuple):
    """A command line, cut at the script, with values as text."""

    values: dict[str, str | bool]
    """Values by dest; True for a flag. The last value counts."""
    script: str | None
    args: list[str]
    """The script's own arguments."""
    prefixes: list[tuple[str, str]]
    """The abbreviations as typed, and the options that they mean."""


class Setting(NamedTuple):
    """One value of a configuration file."""

    value: object
    """The value, converted to the option's kind."""
    source: str
    """File and line: `holdfast.toml:3`."""


Configured: TypeAlias = "Mapping[str, Setting]"
"""The settings of a configuration file by dest."""


class Parsed(NamedTuple):
    """The values of a command line, and where each came from."""

    values: SimpleNamespace
    sources: dict[str, str]
    """The source of each value, by dest: `flag`, `default`, `the Slurm step`, the name of a variable, or file and line
    of a configuration file."""
    notices: tuple[str, ...]
    """Lines about what the user may not have meant."""
    cpus: int | None = None
    """CPUs of this node that a scheduler has allocated; None: those on which this process may run."""
    requeues: int = 0
    """Number of times that a scheduler has restarted this job."""
    switches: tuple[str, ...] = ()
    """The switches above this node, as a scheduler names them."""

    def given(self, dest: str) -> bool:
        """Whether a flag, a variable or a file gave the value."""
        return self.sources[dest] != FROM_DEFAULT

    def by_variable(self, dest: str) -> bool:
        return self.sources[dest].startswith(VARIABLE_PREFIXES) and not self.by_file(dest)

    def by_file(self, dest: str) -> bool:
        return ":" in self.sources[dest]

    def as_written(self, dest: str) -> str:
        """The value as it was written, but for passwords: `--nnodes two`, `PET_NNODES=two` or
        `holdfast.toml:3: nnodes = "two"`."""
        value = getattr(self.values, dest)
        if isinstance(value, str):
            from holdfast.text import without_passwords  # `--help` has no time for it

            value = without_passwords(value)
        if self.by_variable(dest):
            return f"{self.sources[dest]}={value}"
        if self.by_file(dest):
            shown = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else value
            return f"{self.sources[dest]}: {dest.replace('_', '-')} = {shown}"
        name = flag_of(dest)
        if isinstance(value, bool):
            return name
        return f"{name} {value}" if value != "" else f"{name} ''"

    def error(self, dest: str, kind: type[HoldfastError], problem: str) -> HoldfastError:
        """An error about one value: `kind` for a flag, EnvironmentValueError for a variable, ConfigFileError for a
        file."""
        if self.by_variable(dest):
            kind = EnvironmentValueError
        elif self.by_file(dest):
            kind = ConfigFileError
        return kind(f"{self.as_written(dest)}: {problem}")

    def converted(self, dest: str, convert: Callable[[Any], T], kind: type[HoldfastError] = UsageError) -> T:
        """The value that `convert` makes of the option's. Its ValueError becomes an error about the option."""
        try:
            return convert(getattr(self.values, dest))
        except ValueError as error:
            raise self.error(dest, kind, str(error)) from None

    def fields(self, of: str = "") -> dict[str, Any]:
        """The values that a struct gets as they are: RunOptions, or (`job`, `limits`) a part of it."""
        named = {option.goes_to: getattr(self.values, option.dest) for option in OPTIONS if option.goes_to}
        return {name.rpartition(".")[2]: value for name, value in named.items() if name.rpartition(".")[0] == of}


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str],
    table: Sequence[Option],
    *,
    needs_script: bool = True,
    configure: Callable[[Mapping[str, object], Mapping[str, str]], Configured] | None = None,
) -> Parsed:
    """Parse a line. A flag has precedence over a variable, this over `configure`, this over the default.

    `configure` gets all values so far and their sources, and returns the settings of a configuration file. An option
    about the command itself (ABOUT_US) needs no script and makes all others irrelevant. Raises UsageError for the line,
    EnvironmentValueError for a variable, and the errors of `configure`.
    """
    line = read_line(argv, table)
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    asks_about_us = any(line.values.get(dest) for dest in ABOUT_US)
    check_spaces(line)
    if line.script is None and needs_script and not asks_about_us:
        raise UsageError(f"no training script given; {script_hint(line)}")

    for option in table:
        if option.dest in line.values:
            value = line.values[option.dest]
            values[option.dest] = value if isinstance(value, bool) else convert(option, value, option.name)
            sources[option.dest] = FROM_FLAG
        elif (variable := next((name for name in option.variables if name in environ), "")) and not asks_about_us:
            values[option.dest] = convert(option, environ[variable], variable)
            sources[option.dest] = variable
        else:
            values[option.dest] = list[str]() if option.kind == LIST else option.default
            sources[option.dest] = FROM_DEFAULT
    if configure is not None and not asks_about_us:
        for dest, setting in configure(values, sources).items():
            if sources.get(dest) == FROM_DEFAULT:
                values[dest], sources[dest] = setting.value, setting.source

    namespace = SimpleNamespace(**values, training_script=line.script, training_script_args=line.args)
    notices = [f"{typed} taken as {full}" for typed, full in line.prefixes]
    if not asks_about_us:
        notices += unread_variables(environ, table) + late_options(line, spellings_of(table))
    return Parsed(namespace, sources, tuple(notices))


def spellings_of(table: Sequence[Option]) -> dict[str, Option]:
    return {spelling: option for option in table for spelling in option.spellings}


def check_spaces(line: CommandLine) -> None:
    """Raise UsageError for a word of spaces, or a script that begins with a space: a backslash was not the last
    character of its line."""
    # The shell makes a word of one space from `\ ` at the end of a line. argparse takes it as the script.
    bare = [
        word for word in (line.script, *line.values.values()) if isinstance(word, str) and word and not word.strip()
    ]
    if bare or (line.script or "").startswith(" "):
        raise UsageError(
            "a word on this line consists of spaces: a backslash continues a line only as its last character; "
            "remove what follows it, also a comment (`\\ # ...`)"
        )


def script_hint(line: CommandLine) -> str:
    """The reason why there is no script: an option that took it as its value, if there is one; else the usage."""
    for dest, value in line.values.items():
        if isinstance(value, str) and value.endswith(".py"):
            return f"{value} was taken for the value of {flag_of(dest)}"
    return "usage: holdfast run [options] script.py [its arguments]"


def unread_variables(environ: Mapping[str, str], table: Sequence[Option]) -> list[str]:
    """A line for each unknown PET_ or HOLDFAST_ variable that is similar to a known one."""
    known = {name for option in table for name in option.variables} | OTHER_VARIABLES
    unread = [name for name in sorted(environ) if name.startswith(VARIABLE_PREFIXES) and name not in known]
    if not unread:
        return []
    import difflib  # late: only typing errors need it

    by_stem = {stem(name): name for name in sorted(known, reverse=True)}  # HOLDFAST_ before PET_
    meant = {name: difflib.get_close_matches(stem(name), by_stem, n=1, cutoff=0.8) for name in unread}
    return [f"{name} is not read; did you mean {by_stem[near[0]]}?" for name, near in meant.items() if near]


def stem(variable: str) -> str:
    """The variable without its prefix: only this part is compared.

    >>> stem("HOLDFAST_HANG_TIMEOUT")
    'HANG_TIMEOUT'
    """
    return variable.partition("_")[2]


def late_options(line: CommandLine, spellings: Mapping[str, Option]) -> list[str]:
    """A hint for launcher options after the script, which belong to the script."""
    # A script's own `-t` is nothing strange, whatever ours means.
    named = (word.partition("=")[0].strip() for word in line.args if word.startswith("--"))
    late = [name for name in named if name in spellings and spellings[name].launchers_only]
    if not late:
        return []
    return [f"{late[0]} comes after {line.script}, so the script gets it; give it before the script"]


def read_line(argv: Sequence[str], table: Sequence[Option]) -> CommandLine:
    """Read options and values up to the script. Raises UsageError for an option that is unknown, ambiguous or lacks its
    value."""
    spellings = spellings_of(table)
    line = CommandLine({}, None, [], [])
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            # As with argparse: all words that follow are positional, so a second `--` is the script's own.
            return line._replace(script=words[0] if words else None, args=words[1:])
        if is_value(word, spellings):
            return line._replace(script=word, args=words[1:] if words[:1] == ["--"] else words)
        for option, text in read_word(word, spellings, line.prefixes):
            if option.kind == FLAG:
                line.values[option.dest] = True
            elif text is not None:
                store_value(line, option, text)
            elif words and words[0] != "--" and is_value(words[0], spellings):
                store_value(line, option, words.pop(0))
            else:
                hint = f"; if {words[0]} is the value, write {option.name}={words[0]}" if words else ""
                raise UsageError(f"{option.name} needs a value{hint}")
        if "help" in line.values:  # as with argparse: an error behind --help does not matter
            return line
    return line


def store_value(line: CommandLine, option: Option, text: str) -> None:
    """Store an option's value. The last one counts; those of an option that may be repeated are joined."""
    before = line.values.get(option.dest) if option.many else None
    line.values[option.dest] = f"{before}{option.joiner}{text}" if before else text


def is_value(word: str, spellings: Mapping[str, Option]) -> bool:
    """Whether argparse takes this word as a value or the script: no dash, a negative number, or a space in it."""
    if not word.startswith("-") or word == "-":
        return True
    if word.partition("=")[0] in spellings or word[:2] in spellings:
        return False
    is_number = word[1:].replace(".", "", 1).isdigit() and not word.endswith(".")
    return is_number or (" " in word and not find(word.partition("=")[0], spellings))


def read_word(
    word: str, spellings: Mapping[str, Option], prefixes: list[tuple[str, str]]
) -> list[tuple[Option, str | None]]:
    """The options in one word (several in `-mr3`), each with the value in the same word, if any."""
    name, equals, text = word.partition("=")
    if name not in spellings and not word.startswith("--"):
        return read_cluster(word, spellings)
    matches = find(name, spellings)
    if not matches:
        raise UsageError(f"{name} is not an option{nearest(name, spellings)}")
    if len(matches) > 1:
        raise UsageError(f"{name} is ambiguous: it could be {' or '.join(matches)}")
    if matches[0] != name:
        prefixes.append((name, matches[0]))
    option = spellings[matches[0]]
    if equals and option.kind == FLAG:
        raise UsageError(f"{option.name} takes no value, got {text!r}")
    return [(option, text if equals else None)]


def read_cluster(word: str, spellings: Mapping[str, Option]) -> list[tuple[Option, str | None]]:
    """The short options in one word: `-r3`, `-mr3`."""
    found: list[tuple[Option, str | None]] = []
    for index, letter in enumerate(word[1:], start=2):
        option = spellings.get("-" + letter)
        if option is None:
            raise UsageError(f"{word} is not an option{nearest(word, spellings)}")
        glued = word[index:].removeprefix("=")
        if option.kind != FLAG:
            return [*found, (option, glued or None)]
        found.append((option, None))
    return found


def find(name: str, spellings: Mapping[str, Option]) -> list[str]:
    """The exact spelling, or all long ones that begin with it: torchrun's older options, else newer ones, else ours.

    So an abbreviation that torchrun accepts never becomes ambiguous through an option that torchrun, or its older
    version, does not have.
    """
    if name in spellings:
        return [name]
    if not name.startswith("--"):
        return []
    alike = [spelling for spelling in spellings if spelling.startswith(name)]
    old = [spelling for spelling in alike if not (spellings[spelling].ours or spellings[spelling].newer)]
    theirs = old or [spelling for spelling in alike if not spellings[spelling].ours]
    # Two spellings of one option of ours are not two options; of torchrun's they are, for argparse.
    return theirs or list({spellings[spelling].dest: spelling for spelling in reversed(alike)}.values())


def nearest(word: str, spellings: Mapping[str, Option]) -> str:
    """The end of a message about an unknown option: `; did you mean --x?`, or a hint to the help."""
    import difflib  # late: only typing errors need it

    plain = "--" + word.strip("-").replace("_", "-").lower()
    if plain == ALWAYS:
        return f" of holdfast run, which always behaves like this: leave it out ({plain} is for `holdfast launch`)"
    if (meant := OTHER_LAUNCHERS.get(plain.removeprefix("--"))) in spellings:
        return f"; did you mean {meant}?"
    # Without the dashes, which all of them have: --lr is not like --slurm. The word may be a misspelt name, or a
    # misspelt beginning of one.
    names = {spelling.lstrip("-"): spelling for spelling in spellings if "_" not in spelling}
    beginnings = {name[: len(plain) - 2]: names[name] for name in reversed(names)}
    matches = [
        known[match]
        for known in (names, beginnings)
        for match in difflib.get_close_matches(plain[2:], known, n=1, cutoff=0.7)
    ]
    return (
        f"; did you mean {matches[0]}?" if matches else "; see holdfast run --help. Options of the script come after it"
    )


def convert(option: Option, text: str, name: str) -> object:
    """Convert a text by the rules of its option; `name` is its flag or variable.

    Raises UsageError or EnvironmentValueError.
    """
    try:
        value = CONVERTERS[option.kind](text)
    except ValueError as error:
        problem = str(error)
    else:
        if not option.choices or value in option.choices:
            return value
        problem = f"must be one of {', '.join(option.choices)}"
    if name == option.name:
        raise UsageError(f"{name} {text or repr(text)}: {problem}")
    raise EnvironmentValueError(f"{name}={text}: {problem}")


def to_flag(text: str) -> bool:
    """Read a flag from a text: a number as in torchrun, or true, false, yes, no. Raises ValueError."""
    word = text.strip().lower()
    if word in TRUE_WORDS or word in FALSE_WORDS:
        return word in TRUE_WORDS
    try:
        return int(word) != 0
    except ValueError:
        raise ValueError("a flag is 1 or 0, true or false, yes or no") from None


def to_int(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError("not a whole number") from None
    return bounded(number)


def bounded(number: Number) -> Number:
    """The number, if messages can carry it: whole ones have 64 bits there. Raises ValueError."""
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise ValueError("too large a number")
    return number


def to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("not a number") from None


def comma_separated(text: str) -> list[str]:
    """Split a text at single commas; a double comma is a comma within an item."""
    return [item.replace("\0", ",") for item in text.replace(",,", "\0").split(",")]


CONVERTERS: dict[str, Callable[[str], object]] = {
    FLAG: to_flag,
    "text": str,
    INT: to_int,
    FLOAT: to_float,
    LIST: comma_separated,
}
