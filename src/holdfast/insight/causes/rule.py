"""The shape of one rule: by which words or which end a cause is recognised, and what the last screen says of it. Pure data."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from holdfast.insight.causes.blame import Blame

TIMED_OUT = frozenset({Blame.WAITED, Blame.WAITED_LATE, Blame.LOOSE})
COMPLAINT = TIMED_OUT | {Blame.CUT, Blame.STOPPED}
OWN = frozenset({Blame.OWN, Blame.OWN_LATE})
ANY: frozenset[Blame] = frozenset(Blame)


@dataclass(frozen=True, slots=True)
class Rule:
    code: str
    line: str
    """What the verdict says, after `rank 3 on b`. {said}: first line of its words; named groups of `says`."""
    advice: str
    says: str = ""
    """Searched in its words, any case; in its stderr where it has none."""
    stderr: str = ""
    """Searched in its stderr, whatever it says itself."""
    types: frozenset[str] = frozenset()
    """Or: its exception is one of these."""
    ends: frozenset[int] = frozenset()
    """Or: it ended so."""
    room: str = ""
    """Does not fit where this fact says that there is plenty of room."""
    known: str = ""
    """Fits only where this fact was found out."""
    only: frozenset[Blame] = ANY
    frames: str = ""
    """Has to be found too among the files of its traceback's last frames; `says` or `types` alone do not fit then."""
    peers: bool = False
    """Its words or frames have to be those of what training peers talk through: a lock and a database time out too."""
    facts: tuple[str, ...] = ()
    """What its agent may have found out that belongs into the advice."""
    per_node: bool = False
    """It depends on the machine: worth saying which nodes reported it and which did not."""


def ends_by(*signals: signal.Signals) -> frozenset[int]:
    """Exit codes: by this signal, also where a shell between us passes it on as 128+N."""
    return frozenset(-signum for signum in signals) | frozenset(128 + signum for signum in signals)
