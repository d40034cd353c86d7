"""Who may become a member: identities used once, fixed ranks held by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from holdfast.core.bounds import WORKERS_PER_NODE_MAX
from holdfast.core.coordinator.state import Member
from holdfast.core.policy import JobSpec, NodeSpec
from holdfast.core.protocol import Join

GENERATION_MAX = 2**48
"""No job comes near: what an agent says of its newest generation is refused above it, and every later one still fits
into the messages."""
LAST_WORDS_S = 1.0
"""So long after its end a holder may still be heard: what it sent was on its way."""


class Admit(Struct, frozen=True):
    """This agent becomes a member now."""

    link: int
    join: Join
    heard_s: float
    """When it asked: it has not been heard since."""


class Deny(Struct, frozen=True):
    """It never will, and why."""

    link: int
    join: Join
    problem: str


@dataclass(slots=True)
class Admission:
    job: JobSpec
    identities: set[str] = field(default_factory=set)
    claims: dict[int, tuple[Join, float]] = field(default_factory=dict)
    """Joins for a fixed rank that somebody holds, and since when: the holder may be a ghost."""

    def consider(self, link: int, join: Join, members: Iterable[Member], now: float) -> Admit | Deny | None:
        """None: held as a claim; `settle` will say."""
        problem = self._problem(join.node) or _claims_too_much(join)
        if problem:
            return Deny(link, join, problem)
        if self._holder(join.node, members) is not None:
            self.claims[link] = (join, now)
            return None
        self.identities.add(join.node.member)
        return Admit(link, join, now)

    def withdraw(self, link: int) -> None:
        self.claims.pop(link, None)

    def settle(self, members: Iterable[Member]) -> Admit | Deny | None:
        """The next claim that can be decided: a holder that has spoken since makes it a duplicate, one that is gone
        makes it a replacement."""
        if not self.claims:
            return None
        members = list(members)
        for link, (join, since_s) in self.claims.items():
            holder = self._holder(join.node, members)
            if holder is None:
                del self.claims[link]
                self.identities.add(join.node.member)
                return Admit(link, join, since_s)
            if holder.node.agent == join.node.agent:
                continue  # its own ghost: last words of the old link may still come in
            if holder.last_heard_s > since_s + LAST_WORDS_S and not holder.leaving:
                del self.claims[link]
                taken = f"--node-rank {join.node.node_rank or 0} is taken by {holder.name} ({holder.address})"
                return Deny(link, join, f"{taken}; {join.node.member} came second. Two jobs need two ports")
        return None

    def _problem(self, node: NodeSpec) -> str:
        if node.member in self.identities:
            return f"the identity {node.member} was used before; an agent must come with a new one"
        if not 1 <= node.nproc <= WORKERS_PER_NODE_MAX:
            at_most = f"; a node has at most {WORKERS_PER_NODE_MAX}" if node.nproc > 0 else ""
            return f"{node.member} offers {node.nproc} workers{at_most}"
        if self.job.fixed_ranks and not 0 <= (node.node_rank or 0) < self.job.max_nodes:
            return f"--node-rank {node.node_rank} does not exist in a job of {self.job.max_nodes} nodes"
        return ""

    def _holder(self, node: NodeSpec, members: Iterable[Member]) -> Member | None:
        """The member that has the fixed rank this node claims."""
        if not self.job.fixed_ranks:
            return None
        return next((m for m in members if (m.node.node_rank or 0) == (node.node_rank or 0)), None)


def _claims_too_much(join: Join) -> str:
    """What is wrong with the generation that this agent says it took part in, or still has at work; empty: nothing."""
    name, newest, running = join.node.member, join.last_generation, join.running
    if not 0 <= newest <= GENERATION_MAX:
        return f"{name} says that it took part in generation {newest}, which cannot be"
    if running is None:
        return ""
    possible = (
        1 <= running.generation <= newest
        and 0 <= running.group_rank < running.group_world_size
        and running.restart_count >= 0
        and all(0 <= local_rank < join.node.nproc for local_rank in running.done)
    )
    return "" if possible else f"{name} says that it has workers of generation {running.generation}, which cannot be"
