"""The restart budget: one for the job. Decides whether a failed generation is followed by another, and when."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from holdfast.core.policy import Limits

UNBOUNDED = 2**31 - 1
"""`max_restarts` of a job whose restarts somebody else counts."""


class Retry(Struct, frozen=True):
    backoff_s: float


class GiveUp(Struct, frozen=True):
    reason: str


@dataclass(slots=True)
class Budget:
    """Worker failures cost one each, whatever the number of ranks that fell; membership changes cost nothing."""

    max_restarts: int
    limits: Limits
    used: int = 0
    streak: int = 0
    """Quick failures in a row, paid or not: they grow the back-off."""
    last_signature: str = ""
    identical: int = 0

    @property
    def newest(self) -> str:
        """Which restart this is, in words."""
        return f"restart {self.used}" + (f" of {self.max_restarts}" if self.max_restarts < UNBOUNDED else "")

    def charge(self, signature: str, lived_s: float) -> Retry | GiveUp:
        """A generation failed by itself after running for `lived_s`."""
        if self.used >= self.max_restarts:
            return GiveUp(_spent(self.max_restarts))
        pause = self._count(signature, lived_s)
        if isinstance(pause, Retry):
            self.used += 1
        return pause

    def pause(self, signature: str, lived_s: float) -> Retry | GiveUp:
        """A generation ended by no fault of the training code: free, but the back-off grows all the same."""
        return self._count(signature, lived_s)

    def _count(self, signature: str, lived_s: float) -> Retry | GiveUp:
        if lived_s >= self.limits.healthy_s:
            self.streak, self.identical = 0, 0
        self.streak += 1
        self.identical = self.identical + 1 if signature == self.last_signature else 1
        self.last_signature = signature
        if self.identical >= self.limits.identical_failures_max:
            return GiveUp(f"the same error {self.identical} times in a row, each within {self.limits.healthy_s:g} s")
        if self.streak == 1:
            return Retry(0.0)
        return Retry(min(self.limits.backoff_first_s * 2 ** (self.streak - 2), self.limits.backoff_max_s))


def _spent(max_restarts: int) -> str:
    return (
        "no restarts were allowed (--max-restarts 0)" if max_restarts == 0 else f"all {max_restarts} restarts are used"
    )
