"""Decides how long the stop after a failure waits until it is known what failed first. Pure.

A stop ends all workers: also the one that is to blame and has not reported yet, and those whose places would show what
the failed ones have waited for. So the others are not stopped at once if a failure may be a consequence.

| what the failed workers report                         | the stop waits for at most | and until                     |
|--------------------------------------------------------|----------------------------|-------------------------------|
| a cause of its own                                     | does not wait              |                               |
| an exit status that may be one; the evidence follows   | EVIDENCE_S                 | the evidence has come         |
| the script ended it on purpose                         | AGREED_S (complaints.py)   | all ranks have reported       |
| another rank closed the connection, or is said to fail | REASON_S (complaints.py)   | all ranks have reported       |
| its wait for others timed out                          | PLACES_S                   | the same, and it is known     |
|                                                        |                            | where the missing ranks are   |

The extensions find out where the missing ranks are: `observe` returns what they have found so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from holdfast.coordinator.incident import Incidents
from holdfast.coordinator.world import World
from holdfast.protocol.extension import EndGeneration, Observed, StopDelayed
from holdfast.protocol.messages import StopReason
from holdfast.protocol.outcome import Failure

PLACES_S = 2.0
"""Limit of the stop's wait after the time-out of a collective (s), until it is known where the missing ranks are and
the other waiting ranks have reported."""
EVIDENCE_S = 2.0
"""The stop waits at most this long for a failed worker's evidence, if that decides whether it waits longer."""


class StopDelay:
    """The delay of one stop after the other. It is over when the phase RUNNING is left (`clear`)."""

    def __init__(self, incidents: Incidents, observe: Callable[[float], Observed]) -> None:
        self._incidents = incidents
        self._observe = observe
        self._end: EndGeneration | None = None
        """The end of the generation, which is ordered once the cause is known. None: none waits for that."""
        self._until_s = inf
        """The time at which `_end` is ordered at the latest; inf if and only if there is none."""
        self._seeks_places = False
        """The stop waits to know where the missing ranks are."""
        self._unread: EndGeneration | None = None
        """The end that is ordered unless the evidence of a failed worker requires something else."""
        self._unread_until_s = inf
        """The same for `_unread`."""

    @property
    def waits(self) -> bool:
        """Whether a stop waits now."""
        return self._end is not None or self._unread is not None

    def clear(self) -> None:
        """Nothing is to be stopped any more: the generation drains, is stopped or is over."""
        self._end = self._unread = None
        self._until_s = self._unread_until_s = inf
        self._seeks_places = False

    def failed(
        self, now: float, world: World, failures: Sequence[Failure], text: str, *, evidence_follows: bool
    ) -> EndGeneration | StopDelayed | None:
        """Workers of this world have failed. End the generation now, or wait from now on. None: the stop waits already,
        and goes on to do so."""
        # Not at the start of the launcher, which would wait until the patterns are compiled.
        from holdfast.coordinator.complaints import awaited_s, may_be_consequence, timed_out

        end = EndGeneration(StopReason.WORKER_FAILED, text)
        if evidence_follows:
            # Nobody else can have failed first, or the status itself is the cause
            # (test_an_exit_status_that_needs_no_words_stops_the_others_at_once).
            if world.size == 1 or not all(map(may_be_consequence, failures)):
                return end
            self._unread, self._unread_until_s = self._unread or end, min(self._unread_until_s, now + EVIDENCE_S)
            return StopDelayed(world.generation, self._unread_until_s)

        # The evidence: it says whether others may explain this failure.
        self._unread, self._unread_until_s = None, inf
        in_vain = timed_out(failures)
        new = {failure.rank for failure in failures}
        incident = self._incidents.newest
        known = [each for each in incident.failures if (each.rank, each.pid) not in incident.unread]
        read = [each for each in known if each.rank not in new]
        wait_s = awaited_s(failures, read)

        if not in_vain and (world.done_count or not wait_s or world.size == 1):
            return end
        # A stop that waits already goes on to wait. Only a time-out changes what for: now the missing ranks are sought
        # (test_a_wait_in_vain_after_a_lost_connection_is_looked_at).
        if self._end is not None and (self._seeks_places or not in_vain):
            return None
        if self._observe(now).hang is not None:
            return end  # the culprit is known

        self._end, self._until_s = end, now + (PLACES_S if in_vain else wait_s)
        self._seeks_places = in_vain
        return StopDelayed(world.generation, self._until_s, seeks_places=in_vain)

    def told(self, now: float) -> EndGeneration | None:
        """The extensions know of StopDelayed. If none of them waits for places of the missing ranks, the stop need not
        wait either."""
        if self._end is not None and self._seeks_places and self._observe(now).complete:
            return self._end
        return None

    def due_s(self) -> float:
        """The time at which `advance` must run next; inf: no stop waits."""
        return self._until_s if self._end is not None else self._unread_until_s

    def advance(self, now: float, world: World) -> EndGeneration | None:
        """The end of the generation, once the stop need not wait any longer."""
        if self._end is None:
            return self._unread if now >= self._unread_until_s else None
        failures = self._incidents.newest.failures
        # A rank that has ended with 0 may be the one that closed the connection, and reports nothing more
        # (test_whoever_closed_a_connection_may_end_with_0). Nor is anybody left if all have failed
        # (test_where_all_have_lost_their_peers_nobody_is_waited_for).
        may_report = not world.done_count and len(failures) < world.size
        if now < self._until_s and (may_report or (self._seeks_places and not self._observe(now).complete)):
            return None
        if self._seeks_places:
            # One whose own wait timed out meanwhile is no missing rank
            # (test_a_survivor_that_waits_in_vain_too_may_say_so).
            reported = {failure.rank for failure in failures}
            world.survivors = tuple(each for each in self._observe(now).places if each.rank not in reported)
        return self._end
