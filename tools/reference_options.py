"""Make docs/options.md: every option of every command, with default and variable, from the tables that the commands read.

Knows `cli/option_table.py` (run, launch), the doctor's own table, argparse's parsers of the other commands, and the keys of
`--rdzv-conf`. What is said of a key stands here: a key without a word, or a word without a key, is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

from holdfast.cli import COMMANDS, doctor, function_of
from holdfast.cli.completion import parser_of
from holdfast.cli.option_table import FLAG, LAUNCH_OPTIONS, OPTIONS, Option
from holdfast.rendezvous.backends import BACKENDS, BY_VALUE
from holdfast.rendezvous.third_party import load_backend

PATH = Path(__file__).resolve().parent.parent / "docs" / "options.md"
TABLES = {"run", "launch", "doctor"}
"""Commands whose options stand in a table of ours; the others have argparse's parser, or a help text alone."""
WAYS = {"submit": ("--slurm", "--k8s")}
"""Commands that are several: what their first word may be."""

HEAD = """# Commands and options

This page is made by `make fmt` from the tables that the commands read.

| command | |
|---|---|
"""

RUN = """
## `holdfast run`

```
holdfast run [options] script.py [arguments of the script]
```
The options are torchrun's and, in **bold**, ours. Each is accepted with dashes and with underscores, as `--name value` and
`--name=value`, and abbreviated as long as that is unambiguous; what abbreviates one of torchrun's never means one of ours. Words after the
script belong to the script.

What counts, in this order: the command line, the variable, the [configuration files](configuration.md) of the project and of the user (their keys are the options' names without the dashes), what a Slurm step says, the default. Flags are turned on by a variable that says
`1`, `true` or `yes`, and off by `0`, `false` or `no`.
`holdfast run --plan …` prints what follows from all of it, and starts nothing.
"""

CONF = """
### Keys of `--rdzv-conf`

`--rdzv-conf key=value,key=value`: all but `is_host` have to be the same on every node. Times are in seconds. A key that has no effect with the backend is
named in one line. Other backends ([your own](internals/rendezvous-backends.md)) have those of c10d but `is_host`, `store_type` and `succession`, and `lease_ttl`.

| key | backends | default | what it does |
|---|---|---|---|
"""

TORCHRUNS_LEASE = "torchrun's: the lease is the product of the two, if `lease` is not given"
CONF_KEYS = {
    "join_timeout": ("600", "limit of the wait until enough nodes have joined; `timeout` is accepted too"),
    "timeout": ("900", "the same; `join_timeout` is accepted too"),
    "settle": ("2", "time without a newcomer after which the job starts with fewer nodes than the maximum"),
    "last_call_timeout": ("30", "limit of that wait"),
    "lease": (
        "6",
        "silence after which a node counts as lost. Its workers are killed before, after two thirds of this",
    ),
    "heartbeat_timeout": ("", "time without an answer after which an agent kills its workers; two thirds of the lease"),
    "keep_alive_interval": ("5", TORCHRUNS_LEASE),
    "keep_alive_max_attempt": ("3", TORCHRUNS_LEASE),
    "hang_report": ("12", "time without a step after which [stacks are sampled](hangs.md#what-is-watched)"),
    "hang_report_max": ("300", "limit of that time where steps are long"),
    "token_file": ("", "a file with the [job token](commands.md#token), instead of `HOLDFAST_TOKEN`"),
    "is_host": ("", "whether the coordinator runs on this node; by default it does where the endpoint's address is"),
    "succession": (
        "on",
        "whether the others [elect another coordinator](elastic.md#the-coordinators-node-is-lost): on or off",
    ),
    "store_type": ("tcp", "nothing else is supported"),
    "endpoints": ("", "more servers of the same etcd, `host:port;host:port`, tried in turn after `--rdzv-endpoint`"),
    "etcd_prefix": ("/holdfast", "the keys in etcd are `<prefix>/<run id>/coordinator` and `/memory`"),
    "lease_ttl": ("5", "time until a lost coordinator is replaced, 2 to 60"),
    "protocol": ("http", "`https` for TLS"),
    "cert": ("", "PEM file of the client's certificate"),
    "key": ("", "PEM file of its key"),
    "cacert": ("", "PEM file of the CA; without it the public ones are trusted"),
    "ssl_cert": ("", "as `cert`"),
    "ssl_cert_key": ("", "as `key`"),
    "ca_cert": ("", "as `cacert`"),
    "user": ("", "etcd's user"),
    "password_file": ("", "a file with that user's password"),
    "password": ("", "the password itself: every user of the machine can see it in the command line"),
}
"""Default and meaning of each key."""

LAUNCH = """
## `holdfast launch`

For scripts that want a `--local-rank` argument, as `torch.distributed.launch` gives it. All options of `holdfast run`, and:

"""

DOCTOR = """
## `holdfast doctor`

Takes the whole line of a run; see [doctor.md](doctor.md). Of its options these matter: {used}. And:

"""


def render() -> str:
    """The whole page."""
    commands = "\n".join(f"| [`holdfast {name}`](#holdfast-{name}) | {text} |" for name, text in COMMANDS.items())
    launch = [option for option in LAUNCH_OPTIONS if option not in OPTIONS]
    parts = [HEAD + commands + "\n", RUN, *map(group, dict.fromkeys(option.group for option in OPTIONS))]
    parts += [CONF + conf_table(), LAUNCH + table(launch)]
    for name in COMMANDS:
        if name == "doctor":
            parts.append(DOCTOR.format(used=", ".join(f"`{each}`" for each in doctor.USED)) + table(doctor.OWN))
        elif name not in TABLES:
            parts.append(command(name))
    return "".join(parts)


# --- tables of ours ---------------------------------------------------------------------------------------------------


def conf_table() -> str:
    """The keys of `--rdzv-conf`. Raises LookupError for a key that is unknown here or in the source."""
    keys_of = {name: set(row.keys) for name, row in BACKENDS.items()}
    for name, row in BACKENDS.items():
        if row.shared_value:
            keys_of[name] |= set(load_backend(name).conf_keys)
    keys = set(BY_VALUE.keys).union(*keys_of.values())
    backends = {key: [name for name in BACKENDS if key in keys_of[name]] for key in keys}
    if differ := backends.keys() ^ CONF_KEYS.keys():
        raise LookupError(f"the keys of --rdzv-conf and the table of this page differ in {sorted(differ)}")
    rows = (
        f"| `{key}` | {', '.join(backends[key])} | {f'`{value}`' if value else ''} | {said} |"
        for key, (value, said) in CONF_KEYS.items()
    )
    return "\n".join(rows) + "\n"


def group(name: str) -> str:
    options = [option for option in OPTIONS if option.group == name]
    return f"\n### {name[0].upper()}{name[1:]}\n\n" + table(options)


def table(options: Sequence[Option]) -> str:
    rows = (
        f"| {spelling(option)} | {default(option)} | {', '.join(f'`{each}`' for each in option.variables)} | "
        f"{words(option.help)} |"
        for option in options
    )
    return "\n".join(["| option | default | variables | what it does |", "|---|---|---|---|", *rows]) + "\n"


def spelling(option: Option) -> str:
    names = ", ".join(f"`{name}`" for name in (option.short, option.name) if name)
    names = f"**{names}**" if option.ours else names
    return f"{names} `{code(option.metavar)}`" if option.metavar else names


def default(option: Option) -> str:
    if option.kind == FLAG or option.default in (None, "", ()):
        return ""
    values = option.default if isinstance(option.default, tuple) else (option.default,)
    return f"`{','.join(map(str, values))}`"


# --- argparse's parsers -----------------------------------------------------------------------------------------------


def command(name: str) -> str:
    parser = parser_of(name)
    text = f"\n## `holdfast {name}`\n\n"
    if parser is not None:
        return text + parser_text(parser)
    text += f"```\n{help_text(name)}\n```\n"
    for way in WAYS.get(name, ()):
        text += f"\n### `holdfast {name} {way}`\n\n```\n{help_text(name, way)}\n```\n"
    return text


def help_text(name: str, *words: str) -> str:
    """What `holdfast NAME WORDS --help` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), patch.dict(os.environ, COLUMNS="100"), contextlib.suppress(SystemExit):
        function_of(name, "main")([*words, "--help"])
    return printed.getvalue().strip()


def parser_text(parser: argparse.ArgumentParser, below: bool = False) -> str:
    """Description, usage and a table; each sub-command's in turn."""
    rows = list(actions(parser))
    text = "" if below else f"{parser.description}\n\n"
    with patch.dict(os.environ, COLUMNS="100"):
        text += f"```\n{parser.format_usage().removeprefix('usage: ').strip()}\n```\n"
    if rows:
        text += "\n" + "\n".join(["| option | what it does |", "|---|---|", *rows]) + "\n"
    for title, child, said in children(parser):
        text += f"\n### `{parser.prog} {title}`\n\n{said[0].upper()}{said[1:]}.\n\n" + parser_text(child, below=True)
    return text


def actions(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:  # argparse has no public way to list them
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings)
        value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else None)
        if value is None and action.nargs != 0:
            value = action.dest.upper()
        cells = f"{names} `{code(str(value))}`" if value else names
        yield f"| {cells.strip()} | {words(action.help or '')} |"


def children(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {choice.dest: choice.help or "" for choice in action._choices_actions}
            yield from ((name, child, said.get(name, "")) for name, child in action.choices.items())


def words(text: str) -> str:
    """For the cell of a table: nothing in it is taken for a column or a tag."""
    return code(text).replace("<", "&lt;")


def code(text: str) -> str:
    return text.replace("|", "\\|")
