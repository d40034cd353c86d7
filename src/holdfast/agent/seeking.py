"""An agent's search for the coordinator: when it dials again, what it shows meanwhile, and when it gives up."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.agent.events import DialFailed
from holdfast.protocol.errors import CoordinatorLostError, CoordinatorUnreachableError
from holdfast.protocol.outcome import Outcome, OutcomeKind, Verdict
from holdfast.protocol.policy import Limits, Pauses


@dataclass(slots=True, eq=False, repr=False)
class Seeking:
    """One search, from the loss of a link (or the agent's begin) until the next link."""

    limits: Limits
    since_s: float
    """The time at which it began. It ends in vain `join_s` later."""
    dial_at_s: float
    """The time of the next attempt."""
    notices: Pauses
    """Knows when users get the next line about it."""
    pause_s: float
    """The pause after the next attempt that fails. It doubles with each, up to a limit."""
    error: DialFailed | None = None
    """The reason why the last attempt failed."""

    @classmethod
    def begin(cls, limits: Limits, now: float) -> Seeking:
        return cls(limits, now, now, Pauses.begin(now, limits.say_interval_s), limits.connect_retry_s)

    @property
    def deadline_s(self) -> float:
        return self.since_s + self.limits.join_s

    def failed(self, now: float, error: DialFailed) -> None:
        self.error = error
        self.dial_at_s = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, self.limits.connect_retry_max_s)

    def connected(self) -> None:
        # It answers now: an error of an earlier attempt explains nothing any more.
        self.error, self.pause_s = None, self.limits.connect_retry_s

    def progress(self, now: float) -> str:
        """What to show on the console now; empty: nothing yet."""
        if not self.notices.due(now):
            return ""
        why = self.error.reason if self.error is not None else "no answer yet"
        left_s = max(0.0, self.deadline_s - now)
        return f"waiting for the coordinator: {why} (giving up in {left_s:.0f} s)"

    def gave_up(self, *, knew_one: bool, led_by: str = "") -> Outcome:
        """The outcome after the join deadline. `knew_one`: this agent had a coordinator before. `led_by`: its node and
        ranks, in words."""
        code, exit_code = CoordinatorUnreachableError.code, CoordinatorUnreachableError.exit_code
        text = f"nobody answered within {self.limits.join_s:g} s"
        if knew_one:
            code = CoordinatorLostError.code
            text = f"the coordinator did not come back within {self.limits.join_s:g} s"
            if led_by:
                text = f"lost {led_by}, which had the coordinator: it did not come back within {self.limits.join_s:g} s"
                verdict = Verdict(code=code, cause=text, lost_nodes=(led_by,))
                return Outcome(
                    kind=OutcomeKind.NO_QUORUM, exit_code=exit_code, code=code, message=text, verdict=verdict
                )
        # Nobody was ever reached: why the last attempt failed says most.
        elif self.error is not None:
            code, exit_code = self.error.code, self.error.exit_code
            text = f"{self.error.reason} (tried for {self.limits.join_s:g} s)"
        return Outcome(kind=OutcomeKind.NO_QUORUM, exit_code=exit_code, code=code, message=text)
