"""Decides which agents may become members: each identity is used once, each fixed rank has one holder, and a second job
at the same endpoint is refused. Also compares the software and the script of the job's nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from holdfast.coordinator.world import Member, names
from holdfast.protocol.messages import Join
from holdfast.protocol.policy import WORKERS_PER_NODE_MAX, JobSpec, NodeSpec

NODES_DIFFER = "HF307"
SCRIPT = "script"
ARGUMENTS = "arguments"
"""Keys whose values are hashes and not versions. Together they identify what the node's command line runs."""


GENERATION_MAX = 2**48
"""Far above the number of any real generation. An agent that reports a larger one is refused, so that all later numbers
still fit into the messages."""
UNNAMED = "none"
"""The run id of a job without --rdzv-id, as with torchrun."""
LAST_WORDS_S = 1.0
"""Messages of a holder that has ended may still arrive for this long."""


class Admit(Struct, frozen=True):
    """The agent becomes a member now."""

    link: int
    join: Join
    heard_s: float
    """The time at which its Join arrived. Nothing was received from it since."""


class Deny(Struct, frozen=True):
    """The agent cannot become a member; carries the reason."""

    link: int
    join: Join
    problem: str


@dataclass(slots=True, eq=False, repr=False)
class Admission:
    """Decides on the Join of each agent: at once, or as a claim that waits."""

    job: JobSpec
    other_line: Callable[[NodeSpec], str] = lambda _: ""
    """Says how a node's command line differs from the job's, in words; empty: it does not."""
    identities: set[str] = field(default_factory=set)
    """All identities that were ever admitted, also of members that are gone."""
    claims: dict[int, tuple[Join, float]] = field(default_factory=dict)
    """Joins for a place that another member holds, and since when, by link. That member may be dead without being lost
    yet."""

    def consider(
        self, link: int, join: Join, members: Iterable[Member], now: float, *, local: bool = False
    ) -> Admit | Deny | None:
        """None: the join is kept as a claim, and `settle` decides it later. `local`: the agent in this process."""
        problem = self._problem(join.node) or _claims_too_much(join)
        if problem:
            return Deny(link, join, problem)
        stays = (local or join.last_generation > 0) and not self.job.fixed_ranks  # it has had a part in this very job
        if not stays and self._holders(join.node, members):
            self.claims[link] = (join, now)
            return None
        # Never removed: what an agent sent before it was lost must not count for the one that comes back (scenario
        # replaced_ghost).
        self.identities.add(join.node.member)
        return Admit(link, join, now)

    def withdraw(self, link: int) -> None:
        self.claims.pop(link, None)

    def settle(self, members: Iterable[Member]) -> Admit | Deny | None:
        """Decide the next claim. If the holder has sent a message since, the claim is a duplicate; if the holder is
        gone, the claim replaces it."""
        if not self.claims:
            return None
        members = list(members)
        for link, (join, since_s) in self.claims.items():
            holders = self._holders(join.node, members)
            if not holders:
                del self.claims[link]
                self.identities.add(join.node.member)
                return Admit(link, join, since_s)
            if any(holder.node.agent == join.node.agent for holder in holders):
                continue  # its own earlier membership: messages of the old link may still arrive

            # A holder that is leaving frees the place (test_a_holder_that_is_leaving_does_not_deny). What arrives
            # just after the claim may have been sent by one that has died (test_last_words_of_a_holder_do_not_deny).
            if all(holder.last_heard_s > since_s + LAST_WORDS_S and not holder.leaving for holder in holders):
                del self.claims[link]
                return Deny(link, join, self._taken(join.node, holders))
        return None

    def _taken(self, node: NodeSpec, holders: list[Member]) -> str:
        if self.job.fixed_ranks:
            holder = holders[0]
            taken = f"--node-rank {node.node_rank or 0} is taken by {holder.name} ({holder.address})"
            return f"{taken}; {node.member} needs another --node-rank; another job needs another port"
        most = self.job.max_nodes
        which = f"{names(holders)}; --rdzv-id {self.job.run_id}"
        has = f"was started for one node ({which})" if most == 1 else f"has all its {most} nodes ({which})"
        return f"The job {has}. For more, raise --nnodes everywhere; for another job, use another port and --rdzv-id"

    def _problem(self, node: NodeSpec) -> str:
        if node.member in self.identities:
            return f"the identity {node.member} was used before; an agent must come with a new one"
        if not 1 <= node.nproc <= WORKERS_PER_NODE_MAX:
            at_most = f"; a node has at most {WORKERS_PER_NODE_MAX}" if node.nproc > 0 else ""
            return f"{node.member} offers {node.nproc} workers{at_most}"
        if self.job.fixed_ranks and not 0 <= (node.node_rank or 0) < self.job.max_nodes:
            return f"--node-rank {node.node_rank} does not exist in a job of {self.job.max_nodes} nodes"
        return ""

    def _holders(self, node: NodeSpec, members: Iterable[Member]) -> list[Member]:
        """The members that hold the place this node claims: its fixed rank, or the last place of a job without spares.

        A job of one node needs no second one. Two jobs without a run id can be told apart only by their command lines.
        """
        if self.job.fixed_ranks:
            return [m for m in members if (m.node.node_rank or 0) == (node.node_rank or 0)]
        # A second job at this endpoint that has no run id, either, would wait as a spare of this one
        # (test_second_job.py).
        spare = self.job.max_nodes > 1 and not (self.job.run_id == UNNAMED and self.other_line(node))
        if spare:
            return []
        here = [member for member in members if not member.leaving]
        return here if len(here) >= self.job.max_nodes else []


def _claims_too_much(join: Join) -> str:
    """What is wrong with the generation that this agent reports as its newest or as running; empty: nothing."""
    name, newest, running = join.node.member, join.last_generation, join.running
    if not 0 <= newest <= GENERATION_MAX:
        return f"{name} says that it took part in generation {newest}, which cannot be"
    if running is None:
        return ""
    # A world may be made of such reports, and a rank is kept for each worker: one report that does not fit would end
    # the job for all (test_numbers_that_cannot_be_are_refused).
    possible = (
        1 <= running.generation <= newest
        and 0 <= running.group_rank < running.group_world_size
        and running.restart_count >= 0
        and all(0 <= local_rank < join.node.nproc for local_rank in (*running.done, *(running.local_ranks or ())))
        and running.local_ranks != ()
    )
    return "" if possible else f"{name} says that it has workers of generation {running.generation}, which cannot be"


class Difference(Struct, frozen=True):
    what: str
    text: str
    """A line for the console that names both nodes."""


class Versions:
    """Compares each node's software and script with those of the first node that joined. Reports each difference once,
    however many nodes share it. A difference does not stop the job, because it may be intended."""

    def __init__(self) -> None:
        self.first: NodeSpec | None = None
        self._said: set[tuple[str, str]] = set()

    def compare(self, node: NodeSpec) -> list[Difference]:
        """Differences of this node that were not reported yet."""
        if not node.versions:
            return []  # the node could not read them
        if self.first is None:
            self.first = node
            return []
        mine = self.first.versions
        found = []
        for what in sorted(mine.keys() | node.versions.keys()):
            theirs = node.versions.get(what, "")
            if theirs != mine.get(what, "") and (what, theirs) not in self._said:
                self._said.add((what, theirs))
                found.append(Difference(what, self._text(what, mine, node)))
        return found

    def other_line(self, node: NodeSpec) -> str:
        """Say how this node's command line differs from the job's, in words; empty: no known difference."""
        if self.first is None or not node.versions:
            return ""
        mine, theirs = self.first.versions, node.versions
        return " and ".join(what for what in (SCRIPT, ARGUMENTS) if mine.get(what, "") != theirs.get(what, ""))

    def _text(self, what: str, mine: Mapping[str, str], node: NodeSpec) -> str:
        assert self.first is not None
        here, there = self.first.host, node.host
        # Two agents on one machine.
        if here == there:
            here, there = self.first.member, node.member
        if what == SCRIPT:
            return f"{NODES_DIFFER}: the script is not the same file on {here} and on {there}"
        if what == ARGUMENTS:
            return f"{NODES_DIFFER}: the script's arguments are not the same on {here} and on {there}"
        had, has = mine.get(what) or "not found", node.versions.get(what) or "not found"
        return f"{NODES_DIFFER}: {what} differs: {had} on {here}, {has} on {there}"
