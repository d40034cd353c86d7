"""Raises the soft limit of open files to the hard limit, and refuses a node that needs more before any start.

Workers keep the limit that the command was started with: the supervisor restores it for its children.
"""

from __future__ import annotations

import os
import resource

from holdfast.protocol.errors import PlatformError

DESCRIPTORS_WANTED = 65_536
"""A coordinator has a link to each of thousands of agents."""
DESCRIPTORS_OWN = 64
"""For an agent or a supervisor without workers, with room for commands that ask it a question."""
DESCRIPTORS_PER_WORKER = 4
"""Two log files, open either for the worker or for display, the memory for its stacks, and one spare."""
DESCRIPTORS_PER_TERMINAL_WORKER = 8
"""Where our console is a terminal, each of the two files also has a pseudo-terminal."""


def soft_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit(wanted: int = DESCRIPTORS_WANTED) -> None:
    """Raise the soft limit as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))


def restore_limit(soft: int) -> None:
    """Restore the soft limit in a process that runs another program."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def needed(nproc: int, *, terminal: bool) -> int:
    """Descriptors that the agent, and the supervisor, need for this many workers. `terminal`: our console is a
    terminal."""
    return DESCRIPTORS_OWN + (DESCRIPTORS_PER_TERMINAL_WORKER if terminal else DESCRIPTORS_PER_WORKER) * nproc


def provide(nproc: int) -> None:
    """Make room for this many workers. Raises PlatformError where the hard limit is too low."""
    need = needed(nproc, terminal=os.isatty(1) or os.isatty(2))
    raise_limit(max(DESCRIPTORS_WANTED, need))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < need:
        raise PlatformError(
            f"{nproc} worker{'s' if nproc != 1 else ''} need {need} open files and the hard limit here is {hard} "
            "(`ulimit -Hn`); raise it, or start fewer workers per node"
        )
