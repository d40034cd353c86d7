"""Who listens on a local port, for messages about a port in use. Reads /proc; decides nothing."""

from __future__ import annotations

import os

_LISTEN = "0A"
COMMAND_CHARS_MAX = 80


def who_holds(port: int) -> str | None:
    """`pid 4711 (alice): python train.py` for the process that listens on this TCP port of this machine.

    None when nobody does, or when it is another user's and we may not look. Never raises.
    """
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    targets = {f"socket:[{inode}]" for inode in inodes}
    for pid in filter(str.isdigit, _list("/proc")):
        if any(_target(f"/proc/{pid}/fd/{fd}") in targets for fd in _list(f"/proc/{pid}/fd")):
            return _describe(pid)
    return None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _read(table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes - {"0"}


def _describe(pid: str) -> str:
    command = " ".join(_read(f"/proc/{pid}/cmdline").split("\0")).strip() or _read(f"/proc/{pid}/comm").strip()
    shown = "".join(character if character.isprintable() else " " for character in command)
    if len(shown) > COMMAND_CHARS_MAX:
        shown = shown[:COMMAND_CHARS_MAX] + "…"
    return f"pid {pid} ({_user(pid)}): {shown}"


def _user(pid: str) -> str:
    import pwd  # only an error message pays for it

    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "user unknown"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:  # gone meanwhile, or not ours to see
        return []


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
