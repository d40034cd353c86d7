"""When to save: every so many steps, or so much time, decided so that all ranks decide alike.

What counts steps is decided by every rank for itself. Time is rank 0's alone: at a few steps that all ranks know ahead
(`look_at`) the others ask for its word. From one look to the next half of the time passes that is left until the next
save, so a period of two minutes takes about ten looks, however fast or slow the steps are. Pure: time comes in.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.errors import IntervalError
from holdfast.text import seconds_of

LOOK_STEPS_MAX = 1_000_000


@dataclass(frozen=True)
class Steps:
    """So many calls of `Snapshots.step()`."""

    count: int

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise IntervalError(f"steps({self.count!r}): at least 1")


def steps(count: int) -> Steps:
    """`every=steps(500)`: by the number of steps, not by time."""
    return Steps(count)


def seconds(text: str | float) -> float:
    """'90s', '2min', '1.5h', '1d' or a number of seconds. IntervalError."""
    value = seconds_of(text)
    if value is None:
        raise IntervalError(f"every={text!r}: write a time such as '90s', '2min' or '6h', or steps(500)")
    return value


def crossed(step: int, last: int, every: int | None) -> bool:
    """Whether a multiple of `every` lies in (last, step]: a save that had to wait is not forgotten."""
    return bool(every) and step // every != last // every if every else False


class Schedule:
    """One rank's knowledge of what is due. `step` and `last` count calls of Snapshots.step()."""

    def __init__(self, every: Steps | float | None, memory_every: int | None) -> None:
        """`every`: steps, seconds, or None for never; `memory_every`: steps, or None without a memory tier."""
        self._every_steps = every.count if isinstance(every, Steps) else None
        self._timed = every is not None and not isinstance(every, Steps)
        self._memory_every = memory_every
        self.look_at = 1
        """The next step at which rank 0 is asked."""
        self.durable_step = 0
        self.saved_step = 0

    def start(self, step: int) -> None:
        """Training begins, or goes on, after this step."""
        self.durable_step = self.saved_step = step
        self.look_at = step + 1

    def durable_due(self, step: int) -> bool:
        """A save to the disk is due by the number of steps."""
        return crossed(step, self.durable_step, self._every_steps)

    def memory_due(self, step: int) -> bool:
        return crossed(step, self.saved_step, self._memory_every)

    def look_due(self, step: int) -> bool:
        """Rank 0 has to be asked whether it is time."""
        return self._timed and step >= self.look_at

    def saved(self, step: int, durable: bool) -> None:
        self.saved_step = step
        if durable:
            self.durable_step = step


class Timekeeper:
    """Rank 0's watch over `every=` seconds."""

    def __init__(self, every_s: float | None) -> None:
        self._every_s = every_s
        self._saved_s = self._looked_s = 0.0
        self._looked_step = 0

    def start(self, step: int, now_s: float) -> None:
        self._saved_s = self._looked_s = now_s
        self._looked_step = step

    def due(self, now_s: float) -> bool:
        return self._every_s is not None and now_s - self._saved_s >= self._every_s

    def saved(self, now_s: float) -> None:
        self._saved_s = now_s

    def next_look(self, step: int, now_s: float) -> int:
        """The step at which about half of what is left will have passed."""
        if self._every_s is None:
            return step + LOOK_STEPS_MAX
        took = max(step - self._looked_step, 1)
        pace_s = max((now_s - self._looked_s) / took, 1e-6)
        self._looked_step, self._looked_s = step, now_s
        left_s = max(self._saved_s + self._every_s - now_s, 0.0)
        ahead = int(left_s / 2 / pace_s)
        return step + min(max(ahead, 1), LOOK_STEPS_MAX)
