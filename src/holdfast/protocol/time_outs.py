"""The ladder of time-outs: of two that may end the same wait, the one that knows more must end first. PURE.

    fence < lease < hang < process group, NCCL's watchdog

Each is the answer to a fault that the one before it does not see. A ladder that is inverted gives wrong answers: if a
hang were ended before the lease is over, a lost node would be taken for a hang, and the restart would be charged.

NCCL's watchdog is compared with the hang alone. It ends a process whose watchdog thread makes no progress in a call
into CUDA or NCCL, and does not count while collectives only wait. So it may be shorter than the process group's
time-out, as torch's own defaults are. It is `ProcessGroupNCCL::HeartbeatMonitor` of c10d; the class of nccl2, which is
the backend `nccl` from torch 2.15 on, has no such member.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from math import inf, isfinite

from msgspec import Struct

from holdfast.protocol.policy import Limits

NCCL_GROUP_S = 600.0
"""torch's default time-out of NCCL process groups (kProcessGroupNCCLDefaultTimeout)."""
GLOO_GROUP_S = 1800.0
"""torch's default time-out of all other process groups (default_pg_timeout)."""
WATCHDOG_S = 480.0
"""torch's default of TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC."""
NO = frozenset({"0", "n", "no", "f", "false", "N", "NO", "F", "FALSE"})
"""Values that torch reads as false."""


class Rung(Enum):
    """A wait that has a time-out, by what it waits for."""

    FENCE = "fence"
    LEASE = "lease"
    HANG = "hang"
    GROUP = "process group"
    WATCHDOG = "NCCL watchdog"


class TimeOut(Struct, frozen=True):
    """One of the ladder."""

    wait: Rung
    after_s: float
    """The time after which it ends something (s); inf: never."""
    source: str
    """The options or variables that say so, or whose default it is."""

    @property
    def words(self) -> str:
        """Its name and its time."""
        return f"{self.wait.value} {f'{self.after_s:g} s' if isfinite(self.after_s) else 'never'}"


class Inversion(Struct, frozen=True):
    """Two time-outs in the wrong order."""

    first: TimeOut
    """The one that has to end first, and does not."""
    then: TimeOut
    text: str
    """What follows, and what to change."""


def ladder(
    limits: Limits, environ: Mapping[str, str], *, gpus: bool, nodes: int, nccl2: bool = False
) -> tuple[TimeOut, ...]:
    """The time-outs of a job. `gpus`: its groups use NCCL, by the older backend or by nccl2. `nodes`: their largest
    number; one node has no lease."""
    # The stacks must not move for hang_timeout_s after the first look, which comes after hang_report_s.
    hang_s = limits.hang_report_s + limits.hang_timeout_s if limits.hang_timeout_s else inf
    found = []
    if nodes > 1:
        found += [
            TimeOut(Rung.FENCE, limits.fence_s, "--rdzv-conf lease"),
            TimeOut(Rung.LEASE, limits.lease_s, "--rdzv-conf lease"),
        ]
    found += [TimeOut(Rung.HANG, hang_s, "--hang-timeout"), _group(environ, gpus=gpus)]
    return (*found, _watchdog(environ)) if gpus and not nccl2 else tuple(found)


def _group(environ: Mapping[str, str], *, gpus: bool) -> TimeOut:
    if not gpus:
        return TimeOut(Rung.GROUP, GLOO_GROUP_S, "torch's default; the script may set another")
    handling = environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if handling == "0" and environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") in NO:
        return TimeOut(Rung.GROUP, inf, "TORCH_NCCL_ASYNC_ERROR_HANDLING=0")
    return TimeOut(Rung.GROUP, NCCL_GROUP_S, "torch's default for NCCL; the script may set another")


def _watchdog(environ: Mapping[str, str]) -> TimeOut:
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    if environ.get("TORCH_NCCL_ENABLE_MONITORING", "1") in NO:
        return TimeOut(Rung.WATCHDOG, inf, "TORCH_NCCL_ENABLE_MONITORING")
    text = environ.get(name, "").strip()
    # torch itself ends a process with another text, when it makes the group.
    return TimeOut(Rung.WATCHDOG, float(text) if text.isdecimal() else WATCHDOG_S, name)


def inversions(rungs: tuple[TimeOut, ...]) -> Iterator[Inversion]:
    """The pairs in the wrong order."""
    by = {each.wait: each for each in rungs}
    hang, group, lease = by[Rung.HANG], by[Rung.GROUP], by.get(Rung.LEASE)
    if lease is not None and hang.after_s <= lease.after_s:
        text = "a lost node would be taken for a hang, and its restart charged; give a longer --hang-timeout"
        yield Inversion(lease, hang, text)
    elif lease is not None and group.after_s <= lease.after_s:
        text = "ranks may end with an error of the process group before their lost peer is known; give a shorter lease"
        yield Inversion(lease, group, text)
    if isfinite(hang.after_s):
        for later in (group, by.get(Rung.WATCHDOG)):
            if later is not None and later.after_s <= hang.after_s:
                text = "torch may end the ranks before the hang is ended and explained; give a shorter --hang-timeout"
                yield Inversion(hang, later, text)


def sentence(each: Inversion) -> str:
    """One line for users."""
    return f"time-outs: {each.then.words} ({each.then.source}) is not after {each.first.words}: {each.text}"
