"""How many files a process of ours may have open: the soft limit is raised to what the system allows, and a node that
needs more than that is refused before anything is started.

Workers keep the limit that the command was started with: the supervisor gives it back to whatever it starts.
"""

from __future__ import annotations

import os
import resource

from holdfast.protocol.errors import PlatformError

DESCRIPTORS_WANTED = 65_536
"""A coordinator has a link to each of thousands of agents."""
DESCRIPTORS_OWN = 64
"""An agent or a supervisor without workers, with room for commands that ask it something."""
DESCRIPTORS_PER_WORKER = 4
"""Two log files, which are open either for the worker or to be shown, the memory for its stacks, and one to spare."""
DESCRIPTORS_PER_TERMINAL_WORKER = 8
"""Where our console is a terminal each of the two has a pseudo-terminal besides."""


def soft_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit(wanted: int = DESCRIPTORS_WANTED) -> None:
    """Raise the soft limit as far as the hard one lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))


def restore_limit(soft: int) -> None:
    """Give the soft limit back to a process that runs somebody else's program."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def needed(nproc: int, *, terminal: bool) -> int:
    """By the agent, and by the supervisor, of a node with so many workers. `terminal`: our console is one."""
    return DESCRIPTORS_OWN + (DESCRIPTORS_PER_TERMINAL_WORKER if terminal else DESCRIPTORS_PER_WORKER) * nproc


def provide(nproc: int) -> None:
    """Make room for so many workers. Raises PlatformError where the hard limit is too low."""
    need = needed(nproc, terminal=os.isatty(1) or os.isatty(2))
    raise_limit(max(DESCRIPTORS_WANTED, need))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < need:
        raise PlatformError(
            f"{nproc} worker{'s' if nproc != 1 else ''} need {need} open files and the hard limit here is {hard} "
            "(`ulimit -Hn`); raise it, or start fewer workers per node"
        )
