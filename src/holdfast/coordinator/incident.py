"""A loss: which workers failed, which nodes were lost, what is known of it, what it was charged, its verdict. PURE.

It outlives a generation. Workers in `ht.survive` leave the generation that was hit and form the next one while the
evidence is still read; if they cannot go on after all, the same loss is the reason for the restart. So it belongs to no
`World`: the coordinator has the newest one, and `Regrouping` those of past generations.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.protocol.outcome import Failure, Verdict


@dataclass(slots=True, eq=False, repr=False)
class Incident:
    """One loss, or several that came before the first of them had its verdict."""

    failures: list[Failure] = field(default_factory=list)
    """The failures in the order in which they were reported. The bare report of a failure is replaced by its evidence,
    in place."""
    unread: set[tuple[int, int]] = field(default_factory=set)
    """(Rank, process) of each of these failures whose evidence was not reported yet. Always a part of `failures`."""
    lost_nodes: list[str] = field(default_factory=list)
    """Each with the reason, in words."""
    lost_hosts: list[str] = field(default_factory=list)
    """The host of each of `lost_nodes`."""
    lost_ranks: list[int] = field(default_factory=list)
    """The ranks that these nodes had."""
    charged: bool = False
    """The restart budget was charged for it, although the others went on. Then a restart for it costs nothing more."""
    charged_before: bool = False
    """It costs nothing: an incident before it was charged, and one restart would have been enough for both. Only if
    `charged`."""
    verdict: Verdict | None = None
    """Given once: when the evidence is complete and the others go on, or when the generation has ended."""

    @property
    def empty(self) -> bool:
        return not (self.failures or self.lost_nodes)

    def read(self, failure: Failure) -> bool:
        """Take the evidence of a failure that was reported without it. False: this is not one."""
        key = failure.rank, failure.pid
        if key not in self.unread:
            return False
        self.unread.discard(key)
        place = next(n for n, each in enumerate(self.failures) if (each.rank, each.pid) == key)
        self.failures[place] = failure
        return True

    def awaits(self, failures: Iterable[Failure]) -> bool:
        """Whether these are the evidence of failures that were reported before."""
        return all((failure.rank, failure.pid) in self.unread for failure in failures)

    @property
    def own_fault(self) -> str:
        """What a worker did that its peers, or its replacement, may do as well; empty: all were killed."""
        own = next((failure for failure in self.failures if not killed(failure)), None)
        if own is None:
            return ""
        return f"rank {own.rank} ran out of memory" if own.out_of_memory else f"rank {own.rank} exited"

    def joined_by(self, failures: Iterable[Failure], *, charged: bool) -> Incident:
        """The same incident with these failures too, and without a verdict. It shares nothing with the present one:
        when two worlds shared what is unread and not the failures, evidence ended the coordinator (seed 8347)."""
        return Incident(
            [*self.failures, *failures],
            set(self.unread),
            list(self.lost_nodes),
            list(self.lost_hosts),
            list(self.lost_ranks),
            charged,
        )

    def check_invariants(self) -> None:
        assert self.unread <= {(each.rank, each.pid) for each in self.failures}
        assert len(self.lost_nodes) == len(self.lost_hosts)
        assert self.charged or not self.charged_before


@dataclass(slots=True, eq=False, repr=False)
class Incidents:
    """The newest incident of the job. Each part of the coordinator that asks for it has this object, and keeps none."""

    newest: Incident = field(default_factory=Incident)

    def over(self) -> None:
        """What was lost before does not matter any more: a generation was gathered, or all ranks are able to go on."""
        self.newest = Incident()

    def failed(self, failures: Sequence[Failure], *, evidence_follows: bool) -> bool:
        """Workers of the newest generation failed. True if any of these failures is new, and not the evidence of one
        that was reported before."""
        new = False
        for failure in failures:
            if not evidence_follows and self.newest.read(failure):
                continue
            new = True
            incident = self._open()
            incident.failures.append(failure)
            if evidence_follows:
                incident.unread.add((failure.rank, failure.pid))
        return new

    def lost(self, host: str, reason: str, ranks: Iterable[int]) -> None:
        """A node of the newest generation was lost, with these ranks."""
        incident = self._open()
        incident.lost_nodes.append(f"{host} ({reason})")
        incident.lost_hosts.append(host)
        incident.lost_ranks += ranks

    def carried_on(self) -> None:
        """The next generation is formed before all ranks were able to go on from this incident. A loss in it belongs to
        this one, also if that has had a verdict: a restart would be for both (seed 67 of the simulator)."""
        if self.newest.verdict is not None:
            self.newest = self.newest.joined_by((), charged=self.newest.charged)

    def replacements_failed(self, failures: Iterable[Failure]) -> None:
        """Survivors were waiting for replacements, and no more of these may be started. The restart that follows is
        charged, whatever the loss itself has cost."""
        self.newest = self.newest.joined_by(failures, charged=False)

    def reopen(self, incident: Incident) -> None:
        """Evidence shows that the others cannot go on after this one. Nodes that were lost since then are lost by the
        same restart."""
        # Else its lists would be added to themselves.
        if incident is not self.newest:
            incident.lost_nodes += self.newest.lost_nodes
            incident.lost_hosts += self.newest.lost_hosts
            incident.lost_ranks += self.newest.lost_ranks
        self.newest = incident

    def _open(self) -> Incident:
        """The incident to which a new loss belongs. One that has its verdict is closed: the loss is another one."""
        before = self.newest
        if before.verdict is not None:
            self.newest = Incident(charged=before.charged, charged_before=before.charged)
        return self.newest


def killed(failure: Failure) -> bool:
    """Whether this worker ended by a signal, and by nothing that its peers or its replacement would do as well."""
    return failure.exit_code < 0 and failure.started and not failure.error_type and not failure.out_of_memory


def how(failure: Failure) -> str:
    """
    >>> how(Failure(rank=3, local_rank=3, host="a", pid=1, exit_code=-9))
    'killed by SIGKILL'
    """
    if failure.exit_code >= 0:
        return f"exit code {failure.exit_code}"
    try:
        return f"killed by {signal.Signals(-failure.exit_code).name}"
    # Real-time signals have a number and no name.
    except ValueError:
        return f"killed by signal {-failure.exit_code}"
