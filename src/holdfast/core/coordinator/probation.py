"""Hosts that did harm and must wait before they may take part again. Knows host names and times, no members."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.core.policy import Limits


@dataclass(slots=True)
class _Record:
    strikes: int = 0
    """Quick losses in a row."""
    blames: int = 0
    exclusions: int = 0
    stay_s: float = 0.0
    """How long an agent of this host must have been here before the others are regrouped for it."""
    excluded_until_s: float = 0.0


@dataclass(slots=True)
class Probation:
    """A host whose agents join and die in a loop must stay a while first; one that is blamed too often is shut out."""

    limits: Limits
    exclude_after: int
    _records: dict[str, _Record] = field(default_factory=dict)

    def lost(self, host: str, *, lived_s: float) -> None:
        """A member on this host was lost, so long after its first workers were started (or else after it joined)."""
        record = self._records.setdefault(host, _Record())
        if lived_s >= self.limits.healthy_s:
            record.strikes, record.stay_s = 0, 0.0
        if lived_s >= self.limits.flap_s:
            return
        record.strikes += 1
        if record.strikes > 1:
            record.stay_s = min(self.limits.flap_first_s * 2.0 ** (record.strikes - 2), self.limits.flap_max_s)

    def blamed(self, host: str, now: float) -> float:
        """A generation ended because of this host. Returns for how many seconds it is excluded from now on; 0: not."""
        if not self.exclude_after:
            return 0.0
        record = self._records.setdefault(host, _Record())
        record.blames += 1
        if record.blames < self.exclude_after:
            return 0.0
        record.blames = 0
        pause_s = min(self.limits.exclude_first_s * 2.0**record.exclusions, self.limits.exclude_max_s)
        record.exclusions += 1
        record.excluded_until_s = now + pause_s
        return pause_s

    def until_s(self, host: str, joined_s: float) -> float:
        """From when on an agent of this host that joined at `joined_s` may take part."""
        record = self._records.get(host)
        if record is None:
            return joined_s
        return max(joined_s + record.stay_s, record.excluded_until_s)
