"""Orders replacements for workers that were lost, and knows which of them are ready. Bookkeeping for `Regrouping`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from holdfast.coordinator.ending import Budget, GiveUp
from holdfast.coordinator.membership import Membership
from holdfast.coordinator.world import Member, World
from holdfast.protocol.outcome import Failure
from holdfast.protocol.policy import Limits


@dataclass(slots=True, eq=False, repr=False)
class Ordered:
    """A replacement that was ordered and takes no part yet."""

    at_s: float
    """The time of the order."""
    ready: bool = False
    """Its process waits for its place."""


@dataclass(slots=True, eq=False, repr=False)
class Replacements:
    """The replacements of the newest generation: which ones are missing, ordered and ready."""

    limits: Limits
    budget: Budget
    membership: Membership
    missing: dict[str, set[int]] = field(default_factory=dict)
    """Local ranks for which a replacement has to be ordered, by member."""
    ordered: dict[str, dict[int, Ordered]] = field(default_factory=dict)
    """Replacements by member and local rank."""
    not_before_s: float = 0.0
    """The end of the back-off."""
    gave_up: bool = False
    """The budget allows no more of them."""
    _ready_since_s: float = inf
    """The time at which the first one that takes no part yet was ready."""
    _charged_s: float = -inf
    """The time at which one that failed was charged to the budget."""

    def reset(self) -> None:
        self.missing.clear()
        self.ordered.clear()
        self.not_before_s, self.gave_up, self._ready_since_s = 0.0, False, inf

    def formed(self, now: float, world: World) -> None:
        """A generation was formed of running workers and of replacements that were ready."""
        for name in [name for name in self.ordered if name not in world.places]:
            del self.ordered[name]
        for name, local_ranks in world.places.items():
            for local_rank in local_ranks:
                self.ordered.get(name, {}).pop(local_rank, None)
        self._look_for_ready(now)
        self.look_for_missing(world)

    def look_for_missing(self, world: World) -> None:
        """Find the local ranks that take no part and for which no replacement was ordered."""
        self.missing.clear()
        for member in [self.membership.members[name] for name in world.order if name in self.membership.members]:
            # All workers of a node that has just joined are missing here, too.
            local_ranks = set(range(member.node.nproc)).difference(world.places[member.name])
            if local_ranks:
                self.missing[member.name] = local_ranks.difference(self.ordered.get(member.name, ()))

    def order(self, now: float) -> Iterator[tuple[Member, tuple[int, ...]]]:
        """The local ranks for which replacements are ordered now. Not on hosts that are on back-off or leave."""
        if self.gave_up or now < self.not_before_s:
            return
        for name in list(self.missing):
            member = self.membership.members[name]
            # Else it stays in `missing`, and is ordered when the back-off of its host is over
            # (test_a_host_that_is_excluded_gets_its_replacement_later).
            if self.membership.is_candidate(member, now):
                local_ranks = tuple(sorted(self.missing.pop(name)))
                if local_ranks:
                    # With the time of the order, since those of one order are charged once (`failed`).
                    self.ordered.setdefault(name, {}).update({each: Ordered(now) for each in local_ranks})
                    yield member, local_ranks

    def heard_ready(self, now: float, member: str, local_ranks: tuple[int, ...]) -> None:
        for local_rank, each in self.ordered.get(member, {}).items():
            each.ready = each.ready or local_rank in local_ranks
        self._look_for_ready(now)

    def failed(self, now: float, member: str, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        """Some have ended before they took part. They are ordered again after a back-off, if the budget allows it.
        Returns the failures of those that were ordered."""
        ordered = self.ordered.get(member, {})
        failures = tuple(failure for failure in failures if failure.local_rank in ordered)
        for failure in failures:
            self.missing.setdefault(member, set()).add(failure.local_rank)
            if ordered.pop(failure.local_rank).at_s > self._charged_s and not self.gave_up:
                self._charged_s = now  # the others of this order cost nothing
                pause = self.budget.charge(failure.signature, 0.0)
                self.gave_up = isinstance(pause, GiveUp)
                self.not_before_s = inf if isinstance(pause, GiveUp) else now + pause.backoff_s
        self._look_for_ready(now)
        return failures

    def forget(self, now: float, member: str) -> None:
        self.missing.pop(member, None)
        self.ordered.pop(member, None)
        self._look_for_ready(now)

    def ready(self) -> dict[str, tuple[int, ...]]:
        """The local ranks of those that are ready, by member."""
        return {name: tuple(n for n, each in own.items() if each.ready) for name, own in self.ordered.items()}

    def _each(self) -> Iterator[Ordered]:
        return (each for own in self.ordered.values() for each in own.values())

    def _look_for_ready(self, now: float) -> None:
        if not any(each.ready for each in self._each()):
            self._ready_since_s = inf
        elif self._ready_since_s == inf:
            self._ready_since_s = now

    @property
    def join_at_s(self) -> float:
        """The time at which those that are ready join, which gives the others a moment; inf: none is."""
        return self._ready_since_s + (0.0 if all(each.ready for each in self._each()) else self.limits.gather_s)

    def order_at_s(self, now: float) -> float:
        """The time at which `order` has something to order; inf: nothing is missing."""
        if not self.missing or self.gave_up:
            return inf
        return self.not_before_s if now < self.not_before_s else self.membership.next_change_s(now)
