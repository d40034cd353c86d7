"""Which configuration file counts: holdfast.toml, or pyproject.toml with [tool.holdfast], found from the working folder up.

Costs a few looks at folders where there is none. What is in the file reads config_file.py, imported when there is one.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from holdfast.cli.grammar import FROM_FLAG
from holdfast.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.cli.grammar import Configured

FILE_BYTES_MAX = 1 << 20
OWN_FILE, PROJECT_FILE, REPOSITORY = "holdfast.toml", "pyproject.toml", ".git"


def configure(given: Mapping[str, object], sources: Mapping[str, str]) -> Configured:
    """What the file that counts for these values of --config and --no-config says. Raises UsageError, ConfigFileError."""
    path, no_file = str(given["config"]), given["no_config"]
    if path and no_file:
        by_flag = [sources[dest] == FROM_FLAG for dest in ("config", "no_config")]
        if by_flag[0] == by_flag[1]:
            raise UsageError(f"--config {path} and --no-config exclude each other")
        no_file = by_flag[1]  # the line counts before a variable
    if no_file:
        return {}
    if path:
        from holdfast.cli.config_file import read

        return read(path)
    return nearest()


def nearest() -> Configured:
    """Of the first file from the working folder up to the repository's root that is about us."""
    for path in candidates():
        if os.path.basename(path) == OWN_FILE or mentions_us(path):
            from holdfast.cli.config_file import is_about_us, read

            if is_about_us(path):
                return read(path)
    return {}


def candidates() -> Iterator[str]:
    """Files that may be about us, the nearest first, and in one folder our own one first."""
    try:
        folder = os.getcwd()
    except OSError:  # deleted
        return
    while True:
        for name in (OWN_FILE, PROJECT_FILE):
            if os.path.isfile(path := os.path.join(folder, name)) and not is_planted(path, folder):
                yield path
        above = os.path.dirname(folder)
        if above == folder or os.path.lexists(os.path.join(folder, REPOSITORY)) or is_everybodys(above):
            return
        folder = above


def is_everybodys(folder: str) -> bool:
    """Whether anybody may put a file there, as in /tmp: a file there is no wish of whoever works below it."""
    try:
        return bool(os.stat(folder).st_mode & stat.S_IWOTH)
    except OSError:
        return True


def is_planted(path: str, folder: str) -> bool:
    """Whether another user put it where anybody may put files."""
    try:
        return is_everybodys(folder) and os.stat(path).st_uid not in (0, os.geteuid())
    except OSError:
        return True


def mentions_us(path: str) -> bool:
    """Whether a pyproject.toml can have our table: most have not, and need not be understood."""
    try:
        with open(path, "rb") as file:
            text = file.read(FILE_BYTES_MAX)
    except OSError:
        return False
    bare = text.translate(None, b" \t\"'")
    return b"tool.holdfast" in bare or (b"[tool]" in bare and b"holdfast" in bare)
