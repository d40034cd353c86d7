"""Reads the configuration files: the project's (the nearest holdfast.toml, or pyproject.toml with [tool.holdfast], from
the working folder upwards) and the user's (~/.config/holdfast/holdfast.toml).

Keys are the long names of options, values are TOML's own types; resolve.py validates values, as for flags. Standard
library only.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli.grammar import CONVERTERS, FROM_FLAG, Setting, bounded
from holdfast.cli.option_table import FLAG, FLOAT, INT, LAUNCH_OPTIONS, LIST, Option
from holdfast.protocol.errors import ConfigFileError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from holdfast.cli.grammar import Configured


FILE_BYTES_MAX = 1 << 20
OWN_FILE, PROJECT_FILE, REPOSITORY = "holdfast.toml", "pyproject.toml", ".git"
TOOL, OURS = "tool", "holdfast"
PATHS = ("DIR", "FILE")
"""Metavars of paths, which are relative to the file's folder."""
LISTED = ",..."
"""End of the metavar of a list."""
TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a table",
}
HARMLESS = ("", "auto", "none", False)
"""Values with which options that decide what runs run nothing of the file's choice."""
PASSWORD_KEYS = ("password",)

LINE_ONLY = frozenset(option.dest for option in LAUNCH_OPTIONS if option.line_only)
OPTIONS_BY_KEY = {option.name[2:]: option for option in LAUNCH_OPTIONS if not option.line_only}
DECIDE_WHAT_RUNS = frozenset(option.dest for option in LAUNCH_OPTIONS if option.decides_what_runs)


class ReadFile(NamedTuple):
    """A configuration file as it was when it was read."""

    path: str
    text: str
    status: os.stat_result
    """Owner, group and mode of the opened file."""


def settings(file: ReadFile) -> dict[str, Setting]:
    """All settings of a file. Raises ConfigFileError."""
    path = file.path
    table = own_table(path, file.text)
    if table is None:
        raise ConfigFileError(f"{path} has no table [{TOOL}.{OURS}]")
    header = f"{TOOL}.{OURS}" if os.path.basename(path) == PROJECT_FILE else ""
    found: dict[str, Setting] = {}
    for key, raw in table.items():
        source = f"{shown(path)}:{line_of(file.text, header, key)}"
        option = find(key, raw, source)
        if option.dest in found:
            raise ConfigFileError(f"{source}: {key} is given twice, with dashes and with underscores")
        try:
            value = value_of(option, raw, os.path.dirname(path))
        except ValueError as error:
            raise ConfigFileError(f"{source}: {key}: {error}") from None
        found[option.dest] = Setting(value, source)
    check_secrets(file, found)
    return found


def read_file(path: str) -> ReadFile:
    """Read a file, and its owner and mode from the same descriptor: another user could exchange it in between. Raises
    ConfigFileError."""
    try:
        with open(path, "rb") as file:
            content, status = file.read(FILE_BYTES_MAX + 1), os.fstat(file.fileno())
    except OSError as error:
        raise ConfigFileError(f"{path}: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigFileError(f"{shown(path)}: larger than {FILE_BYTES_MAX} bytes")
    try:
        return ReadFile(path, content.decode(), status)
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"{shown(path)}: not UTF-8 at byte {error.start}") from None


def own_table(path: str, text: str) -> dict[str, object] | None:
    """The table of options; None for a pyproject.toml without one."""
    import tomllib  # most runs have no file

    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise ConfigFileError(f"{shown(path)} is not TOML: it is nested too deeply") from None
    except ValueError as error:  # tomllib's own, and Python's for a number of thousands of digits
        raise ConfigFileError(f"{shown(path)} is not TOML: {error}") from None
    if os.path.basename(path) != PROJECT_FILE:
        return document
    tools = document.get(TOOL)
    table = tools.get(OURS) if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise ConfigFileError(f"{shown(path)}: {TOOL}.{OURS} must be a table, [{TOOL}.{OURS}]")
    return table


def shown(path: str) -> str:
    """The path for messages: only the name for a file in the working folder."""
    try:
        here = os.getcwd()
    except OSError:  # deleted
        return path
    return os.path.basename(path) if os.path.dirname(os.path.join(here, path)) == here else path


def line_of(text: str, header: str, key: str) -> int:
    """The line of the key, counted from 1, or of its table if the key is not found. (tomllib reports no lines.)"""
    section, began = "", 1
    start = re.compile(rf"""\s*(?:["']?{re.escape(key)}["']?)\s*[=.]""")
    heading = f"{header}.{key}" if header else key
    for number, line in enumerate(text.splitlines(), 1):
        if opened := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            section = re.sub(r"""\s*\.\s*|["']""", lambda found: "." if "." in found[0] else "", opened[1])
            if section == heading:
                return number
            if section == header:
                began = number
        elif section == header and start.match(line):
            return number
    return began


def find(key: str, raw: object, source: str) -> Option:
    """The option of this key. Raises ConfigFileError."""
    name = key.replace("_", "-")
    if name in OPTIONS_BY_KEY:
        return OPTIONS_BY_KEY[name]
    if isinstance(raw, dict):
        if raw and all(isinstance(inner, dict) for inner in raw.values()):
            key = f"{key}.{next(iter(raw))}"
        whole = f"only {PROJECT_FILE} has one, [{TOOL}.{OURS}]"
        raise ConfigFileError(
            f"{source}: options need no table [{key}]: remove this heading, keep the lines below ({whole})"
        )
    if name.replace("-", "_") in LINE_ONLY:
        raise ConfigFileError(f"{source}: {key} belongs on the command line, not in a file")
    import difflib

    matches = difflib.get_close_matches(name, OPTIONS_BY_KEY, n=1, cutoff=0.6)
    hint = f"did you mean {matches[0]}?" if matches else "keys are the long names in holdfast run --help"
    raise ConfigFileError(f"{source}: {key} is not an option; {hint}")


def value_of(option: Option, raw: object, folder: str) -> object:
    """The value that the option's flag would give. Raises ValueError with the problem."""
    kind = type(raw)
    if option.kind == FLAG and kind is bool:
        return raw
    if option.kind == INT and isinstance(raw, int) and kind is not bool:
        return bounded(raw)
    if option.kind == FLOAT and isinstance(raw, int | float) and kind is not bool:
        return float(bounded(raw))
    if option.kind not in (FLAG, INT, FLOAT):
        text = text_of(option, raw, folder)
        if "\0" in text:  # no command line can contain it
            raise ValueError("must not contain NUL")
        return CONVERTERS[option.kind](chosen(option, text))
    wanted = {FLAG: bool, INT: int, FLOAT: float}[option.kind]
    raise ValueError(f"must be {TYPE_NAMES[wanted]}, and is {described(raw)}")


def text_of(option: Option, raw: object, folder: str) -> str:
    """The value as text, as on the command line."""
    is_list = option.kind == LIST or option.metavar.endswith(LISTED)
    if isinstance(raw, str):
        return os.path.join(folder, os.path.expanduser(raw)) if option.metavar in PATHS and raw else raw
    if type(raw) is int and (option.number_too or is_list):
        return str(raw)
    if isinstance(raw, list) and is_list and all(isinstance(item, str) or type(item) is int for item in raw):
        comma = ",," if option.kind == LIST else ","
        return ",".join(str(item).replace(",", comma) for item in raw)
    if isinstance(raw, dict) and option.dest == "rdzv_conf":
        return ",".join(f"{key}={conf_value(key, value)}" for key, value in raw.items())
    wanted = "a text or a number" if option.number_too else "a text or a list of texts" if is_list else "a text"
    raise ValueError(f"must be {wanted}, and is {described(raw)}")


def conf_value(key: str, raw: object) -> str:
    match raw:
        case bool():
            return str(raw).lower()
        case int() | float():
            return str(raw)
        case str() if "," not in raw:
            return raw
        case str():
            raise ValueError(f"{key} must not contain a comma, which separates settings")
    raise ValueError(f"{key} must be a text, a number, true or false, and is {described(raw)}")


def described(raw: object) -> str:
    name = TYPE_NAMES.get(type(raw), "a date or time")
    return f"{name}, {str(raw).lower() if isinstance(raw, bool) else repr(raw)}" if len(repr(raw)) < 40 else name


def chosen(option: Option, text: str) -> str:
    if option.choices and text not in option.choices:
        raise ValueError(f"{text!r} must be one of {', '.join(option.choices)}")
    return text


def check_secrets(file: ReadFile, found: dict[str, Setting]) -> None:
    """Raise ConfigFileError for a password in a file that others may read."""
    from holdfast.text import PASSWORD_IN_URL  # `--help` has no time for it

    conf, endpoint = (str(found[dest].value) if dest in found else "" for dest in ("rdzv_conf", "rdzv_endpoint"))
    keys = {item.partition("=")[0].strip() for item in conf.split(",")}
    in_url = "rdzv_endpoint" if PASSWORD_IN_URL.search(endpoint) else ""
    holds = "rdzv_conf" if keys.intersection(PASSWORD_KEYS) else in_url
    if holds and file.status.st_mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ConfigFileError(
            f"{found[holds].source}: the file contains a password, and others can read it; "
            f"chmod 600 {file.path}, or use password_file = FILE"
        )


def check_owner(file: ReadFile, found: dict[str, Setting]) -> None:
    """Raise ConfigFileError for a file that was found, not named, that decides what runs, and that another user can
    change: to be in a folder means no consent to what is in it (as with git's safe.directory)."""
    runs = next((dest for dest in found if dest in DECIDE_WHAT_RUNS and found[dest].value not in HARMLESS), None)
    who = other_writer(file.status) if runs is not None else ""
    if runs is not None and who:
        raise ConfigFileError(
            f"{found[runs].source}: {runs.replace('_', '-')} decides what runs, and {who} can change this file; "
            f"--config {shown(file.path)} uses it, --no-config does not"
        )


def other_writer(status: os.stat_result) -> str:
    """The users who can change a file, besides this one and root, in words; empty: nobody."""
    own = {0, os.geteuid()}
    sudo = os.environ.get("SUDO_UID", "")
    if os.geteuid() == 0 and sudo.isdecimal():  # under sudo, the files are those of the user who called it
        own.add(int(sudo))
    if status.st_uid not in own:
        return f"its owner, {user_name(status.st_uid) or f'uid {status.st_uid}'},"
    if status.st_mode & stat.S_IWOTH:
        return "every user"
    if status.st_mode & stat.S_IWGRP and not is_private_group(status.st_gid, status.st_uid):
        return f"group {status.st_gid}"
    return ""


def is_private_group(gid: int, uid: int) -> bool:
    """Whether this group is its user's alone: many systems make one for each user, with a umask of 002."""
    import grp  # needed only for a file that its group may write

    name = user_name(uid)
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return gid == uid
    return group.gr_name == name and set(group.gr_mem) <= {name}


def user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def configure(given: Mapping[str, object], sources: Mapping[str, str]) -> Configured:
    """The settings of the files that --config and --no-config select. Raises UsageError, ConfigFileError."""
    return together(files(given, sources), given)


def together(read: Iterable[ReadFile], given: Mapping[str, object]) -> Configured:
    """The settings of these files, of which an earlier one counts more. Raises ConfigFileError."""
    found: dict[str, Setting] = {}
    for file in read:
        in_file = settings(file)
        if file.path != given["config"]:
            check_owner(file, in_file)
        found = {**in_file, **found}
    return found


def files(given: Mapping[str, object], sources: Mapping[str, str]) -> list[ReadFile]:
    """The files that --config and --no-config select: the project's, or the one that is named instead of it, and then
    the user's. Raises UsageError, ConfigFileError."""
    path, no_file = str(given["config"]), given["no_config"]
    if path and no_file:
        by_flag = [sources[dest] == FROM_FLAG for dest in ("config", "no_config")]
        if by_flag[0] == by_flag[1]:
            raise UsageError(f"--config {path} and --no-config exclude each other")
        no_file = by_flag[1]  # the line takes precedence over a variable
    if no_file:
        return []
    project = path or next(filter(is_about_us, candidates()), "")
    user = user_path()
    # The user's file may be the nearest one, or the one that is named.
    same = project and user and os.path.realpath(project) == os.path.realpath(user)
    return [read_file(each) for each in (project, "" if same else user) if each]


def user_path() -> str:
    """The user's file; empty: there is none. XDG_CONFIG_HOME counts only if it is absolute, as its rules say."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        base = os.path.join(home, ".config") if os.path.isabs(home) else ""
    path = os.path.join(base, OURS, OWN_FILE)
    return path if base and os.path.isfile(path) else ""


def candidates() -> Iterator[str]:
    """Files that may have our options, the nearest first, holdfast.toml before pyproject.toml."""
    try:
        folder = os.getcwd()
    except OSError:  # deleted
        return
    while True:
        for name in (OWN_FILE, PROJECT_FILE):
            if os.path.isfile(path := os.path.join(folder, name)) and not is_planted(path, folder):
                yield path
        above = os.path.dirname(folder)
        # A file above the repository, or in a folder such as /tmp, is hardly meant for this project.
        if above == folder or os.path.lexists(os.path.join(folder, REPOSITORY)) or is_world_writable(above):
            return
        folder = above


def is_world_writable(folder: str) -> bool:
    """Whether any user may create files in the folder, as in /tmp. True if that cannot be found out."""
    try:
        return bool(os.stat(folder).st_mode & stat.S_IWOTH)
    except OSError:
        return True


def is_planted(path: str, folder: str) -> bool:
    """Whether another user owns this file, in a folder that any user can write to."""
    try:
        return is_world_writable(folder) and os.stat(path).st_uid not in (0, os.geteuid())
    except OSError:
        return True


def is_about_us(path: str) -> bool:
    """Whether the file is our own, or has our table. Raises ConfigFileError for one that mentions us and is not
    TOML."""
    if os.path.basename(path) == OWN_FILE:
        return True
    try:
        text = read_file(path).text
    except ConfigFileError:  # it cannot be read, so it is not ours
        return False
    # Most files are not parsed: without these texts they cannot have the table.
    bare = re.sub(r"[ \t\"']", "", text)
    if "tool.holdfast" not in bare and not ("[tool]" in bare and "holdfast" in bare):
        return False
    return own_table(path, text) is not None
