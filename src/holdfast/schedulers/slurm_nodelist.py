"""Slurm's short form of a list of hosts, `node[01-03,7],login`, written out. PURE.

Ours and not `scontrol show hostnames`: an agent's start should not depend on a program and a configuration that a
container may lack. The tests hold the two against each other.
"""

from __future__ import annotations

import re

from holdfast.core.errors import EnvironmentValueError

HOSTS_MAX = 65_536
"""Slurm's own limit."""

_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(text: str) -> tuple[str, ...]:
    """All hosts, in order.

    Raises EnvironmentValueError when this is no list of hosts.

    >>> expand("login,node[01-03,7]")
    ('login', 'node01', 'node02', 'node03', 'node7')
    """
    hosts: list[str] = []
    for item in split(text):
        hosts.extend(expand_item(item, text))
        check_number(len(hosts), text)
    if not hosts:
        raise malformed(text, "it is empty")
    return tuple(hosts)


def split(text: str) -> list[str]:
    """At the commas outside of brackets. Raises EnvironmentValueError."""
    items = [""]
    depth = 0
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise malformed(text, "brackets do not match")
        if character == "," and not depth:
            items.append("")
        else:
            items[-1] += character
    if depth:
        raise malformed(text, "brackets do not match")
    return [item for item in items if item]


def expand_item(item: str, text: str) -> list[str]:
    """One item; several groups of numbers multiply, the last one counts fastest."""
    hosts = [""]
    at = 0
    for group in _GROUP.finditer(item):
        literal = item[at : group.start()]
        numbers = expand_group(group[1], text)
        check_number(len(hosts) * len(numbers), text)
        hosts = [host + literal + number for host in hosts for number in numbers]
        at = group.end()
    return [host + item[at:] for host in hosts]


def expand_group(group: str, text: str) -> list[str]:
    """`01-03,7` with the zeros that the first number of a range has."""
    numbers: list[str] = []
    for part in group.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise malformed(text, f"{part!r} is neither a number nor a range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise malformed(text, f"the range {part} ends before it begins")
        check_number(int(last) - int(first) + 1, text)
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        check_number(len(numbers), text)
    return numbers


def check_number(number: int, text: str) -> None:
    if number > HOSTS_MAX:
        raise malformed(text, f"it names more than {HOSTS_MAX} hosts")


def malformed(text: str, why: str) -> EnvironmentValueError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return EnvironmentValueError(f"{shown!r} is no list of Slurm's hosts: {why}")
