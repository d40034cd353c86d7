"""One look at all workers of a world, under way: who has answered, what they said. Bookkeeping."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.core.outcome import Failure
from holdfast.core.stacks import RankSample

PARTING_LOOK_S = 2.0
"""So long a generation is kept after a wait in vain, for the stacks of those that did not come and the words of those that wait too."""
SEARCHED_CHARACTERS = 4096
IN_VAIN = re.compile(
    r"Timed out waiting \d+ms for|wait timeout after \d+ms|DistStoreError: Socket Timeout|Watchdog caught collective operation timeout"
    r"|timed out in monitoredBarrier|failed to pass monitoredBarrier"
)
"""What torch says when a collective or its store has waited for longer than the group's time-out."""
LAST_WORDS_S = 2.0
"""So long a generation is kept after a lost connection, for a word of the rank that closed it: Python needs a second or
two to end, and `finally: destroy_process_group()` comes before the traceback."""
CLOSED = re.compile(
    r"^[\w.]*(?:ConnectionResetError|ConnectionAbortedError|BrokenPipeError|EOFError)\b|ncclRemoteError|remote process exited"
    r"|received errors while waiting for send/recv from rank|gloo/transport/[\s\S]*(?:[Cc]onnection (?:closed|reset) by|[Bb]roken pipe)"
)
"""What torch and Python say when the other side has closed the connection."""


def waited_in_vain(failures: Iterable[Failure]) -> bool:
    """Whether all of these say so. Those that did not come are then still alive, and will be stopped."""
    return all(
        IN_VAIN.search(f"{each.message[:SEARCHED_CHARACTERS]}\n{each.stderr_tail[-SEARCHED_CHARACTERS:]}")
        and not each.after_stop
        for each in failures
    )


def lost_a_peer(failures: Iterable[Failure]) -> bool:
    """Whether all of these say so. Whoever closed the connection may only be cleaning up, and say then why."""
    return all(
        CLOSED.search(each.message[:SEARCHED_CHARACTERS]) and not each.after_stop and each.exit_code > 0
        for each in failures
    )


@dataclass(slots=True)
class Round:
    number: int
    asked_s: float
    awaited: set[str]
    """Members that have not answered."""
    samples: dict[int, RankSample] = field(default_factory=dict)
    """By rank."""
    reach: list[str] = field(default_factory=list)
    """What nodes that cannot reach the store have said."""
