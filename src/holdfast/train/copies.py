"""Copies of the states in memory on other nodes: the node that each node sends to, the time, and the node from which a
rank fetches.

All ranks copy the same state, or none does: rank 0 decides it in each save. While a copy is on its way anywhere, the
next ones are skipped. So there is always one state that every rank has twice: in its own slot, which is not staged
into, and on its node's partner. When a node is lost, the others and a newcomer go on from that state, or from a newer
one that is complete.

Nodes form a ring, and a partner is in another failure domain if no domain has more than half of the nodes. Savers offer
all addresses of their node, and a process that sends or fetches takes the fastest (snapshots/copy_connection.py).
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.linux import VIRTUAL, addresses, boot_id, own_address
from holdfast.memory_folder import FETCHED
from holdfast.protocol.errors import CopyError, SnapshotMemoryError
from holdfast.text import is_loopback
from holdfast.train.agreement import Peers, node_key
from holdfast.train.snapshots.copy_connection import Address, CopyPaths
from holdfast.train.snapshots.copy_service import State, fetch, skipped
from holdfast.train.snapshots.saver_client import SaverClient, Tier
from holdfast.train.snapshots.saver_connection import key_of_life
from holdfast.train.snapshots.slots import Slot, Slots

ADDRESS_VARIABLE = "HOLDFAST_COPY_ADDR"
"""Variable with a node's address at which its saver is reached, instead of the fastest."""
ADDRESSES_MAX = 8
"""Limit of the addresses that a node offers."""
DOMAIN_VARIABLE = "HOLDFAST_FAILURE_DOMAIN"
"""Variable with a name for what fails together with a node, such as its rack or its power supply."""


def own_addresses() -> str:
    """This node's addresses, separated by blanks. The first is the one from which the node of rank 0 is reached."""
    if fixed := os.environ.get(ADDRESS_VARIABLE, ""):
        return fixed
    master = os.environ.get("MASTER_ADDR", "")
    first = own_address(master) or "127.0.0.1"
    if is_loopback(master):
        return first
    found = [address for name, address in addresses().items() if not name.startswith(VIRTUAL)]
    usable = [each for each in (first, *found) if not is_loopback(each) and not each.startswith("169.254.")]
    return " ".join(list(dict.fromkeys(usable))[:ADDRESSES_MAX]) or first


def failure_domain(environ: Mapping[str, str]) -> str:
    """The failure domain of this node: the one that was set, or Slurm's switches above it, or this machine, which may
    have other nodes."""
    if given := environ.get(DOMAIN_VARIABLE):
        return given
    names = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")  # switch.switch.node; a node's name may have dots itself
    *switches, _ = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", names.count("."))
    return ".".join(switches) or boot_id()


def partners(domains: Sequence[str]) -> list[int]:
    """Each node's partner. It is another node, in another domain if possible, and each node is the partner of one."""
    # Sorted by domain: a node that is as far away as the largest domain has members is in another domain.
    order = sorted(range(len(domains)), key=lambda node: domains[node])
    largest = max(Counter(domains).values(), default=0)
    shift = largest if largest < len(domains) else 1
    return [node for _, node in sorted((of, order[(at + shift) % len(order)]) for at, of in enumerate(order))]


class CopyReport(NamedTuple):
    """One rank's report about its copies, for rank 0, in each save."""

    node: str
    """A key of the node (`Copies.node`)."""
    domain: str
    """The node's failure domain."""
    host: str
    """The node's addresses, separated by blanks."""
    port: int
    """The port of the node's saver; 0: it takes no copies."""
    busy: bool
    """Whether a copy is on its way to another node."""
    error: str
    """The reason why the last copy did not arrive; empty: it has."""

    @property
    def address(self) -> Address:
        """The address of the node's saver."""
        return self.host, self.port


def to_partners(reports: Sequence[CopyReport]) -> dict[str, Address]:
    """The address of the saver of each node's partner, by node, in the order of ranks."""
    reports_by_node = {each.node: each for each in reversed(reports)}
    nodes = sorted(reports_by_node, key=[each.node for each in reports].index)
    ring = partners([reports_by_node[node].domain for node in nodes])
    return {node: reports_by_node[nodes[to]].address for node, to in zip(nodes, ring, strict=True)}


def on_one_node(reports: Sequence[CopyReport], has: Sequence[Sequence[int]]) -> list[tuple[int, int, str, int]]:
    """The ranks' states that only one node has: the rank, the process that sends its state, and host and port to which
    it is sent. `has`: for each process the ranks whose states are on its node."""
    found, to = [], to_partners(reports)
    for owner in sorted(set().union(*has)):
        senders = [rank for rank, owners in enumerate(has) if owner in owners]
        node = reports[senders[0]].node
        if len(to) > 1 and to[node][1] and all(reports[rank].node == node for rank in senders):
            found.append((owner, senders[owner % len(senders)], *to[node]))
    return found


@dataclass
class CopyPlan:
    """Rank 0's decisions."""

    _target: State | None = None
    """The state that was sent last; None: none was, or it was skipped."""
    _kept: State | None = None
    """The newest state that arrived everywhere."""
    _known_targets: list[list[Any]] = field(default_factory=list)
    """The addresses to which the ranks send, as they know them: only a change is sent to them."""
    _complaint: str = ""
    """The problem that was warned of last; empty: copies have succeeded since."""

    def decide(self, reports: Sequence[CopyReport], state: State, *, staged: bool) -> dict[str, Any]:
        """What all ranks do with this state; `Copies.follow` reads it. `staged`: all have it in memory."""
        partner = to_partners(reports)
        if len(partner) < 2:
            self._complain("this job has one node, and no other that could keep copies")
            return {}
        if any(each.busy for each in reports):
            return {"skip": True}

        errors = [f"rank {rank}: {each.error}" for rank, each in enumerate(reports) if each.error]
        if errors:
            more = f" ({len(errors) - 1} more ranks have similar errors)" if len(errors) > 1 else ""
            self._complain(f"the copy of a state to another node failed: {errors[0]}{more}")
        elif self._target is not None:
            self._kept, self._complaint = self._target, ""

        self._target = state if staged else None
        if not staged:  # the ranks stop protecting all states but the kept one, which makes room for the next save
            return {"skip": True, "keep": self._kept}
        targets = [list(partner[each.node]) for each in reports]
        decision = {"keep": self._kept, "to": [] if targets == self._known_targets else targets}
        self._known_targets = targets
        return decision

    def _complain(self, text: str) -> None:
        """Warn of a problem, once until copies succeed again."""
        if not self._complaint:
            warnings.warn(f"holdfast: {text}\nTraining goes on.", RuntimeWarning, stacklevel=7)
        self._complaint = text


class Copies:
    """One rank's part in the copies."""

    def __init__(self, tier: Tier, bytes_s: float, folder: str) -> None:
        """`bytes_s`: bytes per second that its node may send; 0: no limit. `folder`: the snapshot folder."""
        self._client = tier if isinstance(tier, SaverClient) else None
        self.node = f"{node_key()}:{tier.place}"
        """A key of the node: equal for ranks with the same shared-memory folder."""
        self._host, self._domain = own_addresses(), failure_domain(os.environ)
        self._paths = CopyPaths()
        self._bytes_s, self._folder = bytes_s, folder
        self._plan = CopyPlan()
        """Used on rank 0 only."""
        self._targets: list[list[Any]] = []
        """Host and port to which each rank sends."""
        self._key = b""
        """The key of this life of the job."""

    def begin(self, word: str, rank: int, world: int) -> None:
        """Begin a new life of the job, or go on in another world. `word`: a random word that rank 0 has drawn."""
        self._plan, self._targets = CopyPlan(), []
        if self._client is not None:
            self._client.slots.hold()
            self._key = key_of_life(Path(self._client.place), word)
            self._client.serve(word, self._host, self._bytes_s, self._folder, (rank, world))

    def keep(self, state: State) -> None:
        """Protect this state, from which the job goes on, until a newer one has arrived everywhere."""
        self._plan = CopyPlan(_kept=state)
        if self._client is not None:
            self._client.slots.hold(state)
            fetched, self._client.prefetched = self._client.prefetched, {}
            if fetched.pop("state", None) == list(state):
                self._client.tell_agent({"is": "fetched", **fetched, "ahead": True})

    def end(self) -> None:
        """Make no copies any more: there is no memory for slots."""
        self._client = None

    def report(self) -> CopyReport:
        """This rank's report for rank 0."""
        client, domain = self._client, self._domain
        if client is None:
            return CopyReport(self.node, domain, "", 0, False, "it has no memory for snapshots")
        client.await_served()
        return CopyReport(self.node, domain, self._host, client.port, client.copying, client.copy_error)

    def decide(self, reports: Sequence[Sequence[Any]], state: State, *, staged: bool) -> dict[str, Any]:
        """Rank 0's decision, for `follow` on all ranks. `reports`: those of all ranks, in order of rank."""
        return self._plan.decide([CopyReport(*each) for each in reports], state, staged=staged)

    def follow(self, decision: Mapping[str, Any], rank: int, step: int) -> None:
        """Send the committed state of this step, if rank 0 has decided so. It never waits."""
        if self._client is None or not decision:
            return
        kept = decision.get("keep")
        keep: State | None = None if kept is None else (kept[0], kept[1], kept[2])
        if decision.get("skip"):
            if keep is not None:
                self._client.keep(keep)
            if rank == 0:
                self._client.tell_agent(skipped(step))
            return
        self._targets = decision["to"] or self._targets
        host, port = self._targets[rank]
        self._client.copy((host, port), keep)

    # --- resuming -----------------------------------------------------------------------------------------------------

    def bring(self, path: str, state: State, owners: Sequence[int], where: Mapping[int, Address], *, own: bool) -> str:
        """Fetch these ranks' states from other nodes. Returns why one could not be fetched; empty: all were.

        `own`: it is this rank's own state, which a newcomer fetches into its own slot if that is free."""
        if self._client is None:
            return "there is no memory for it"
        slots = self._own_slots(state) if own else None
        for owner in owners:
            began_s = time.monotonic()
            try:
                host = fetch(Path(self._client.place), where[owner], self._key, path, state, owner, slots, self._paths)
            except (CopyError, SnapshotMemoryError, OSError) as error:
                return f"rank {owner}'s state was not fetched: {error}"
            about = {"step": state[0], "rank": owner, "of": host}
            self._client.tell_agent({"is": "fetched", **about, "took_s": round(time.monotonic() - began_s, 3)})
        return ""

    def _own_slots(self, state: State) -> Slots | None:
        """The slots into which this rank's state is fetched; None: they have states of its own."""
        assert self._client is not None
        slots = self._client.slots
        states = [slot.request.identity for slot in slots.committed() if slot.request is not None]
        if self._client.prefetched and state not in states:
            slots.forget(above_step=-1)  # the prefetched state is not the one on which the ranks agreed
            states = []
        return None if states else slots

    def send_again(self, path: str, state: State, peers: Peers) -> None:
        """Send the states of this identity that only one node has: a lost node had the other copies. All ranks call
        this, when the job goes on from this state. It never waits for a copy."""
        here: dict[int, Slot] = {}
        for slot in () if self._client is None else self._client.held(path):
            assert slot.request is not None
            assert slot.path is not None
            # Fetched states do not count: they are removed when training has its own memory.
            if slot.request.identity == state and slot.path.parent.name != FETCHED:
                here.setdefault(slot.rank, slot)
        reports = peers.gather([self.report(), list(here)])
        orders = None
        if reports:  # on rank 0
            orders = on_one_node([CopyReport(*each) for each, _ in reports], [has for _, has in reports])
        for owner, sender, host, port in peers.broadcast(orders):
            if sender == peers.rank and self._client is not None:
                self._client.copy((host, port), state, here[owner])


class Sources(NamedTuple):
    """The savers from which a state in memory can be fetched."""

    world: int
    """The number of ranks of the job that left the state."""
    where: dict[int, Address]
    """The address of a saver that has a rank's state, by the rank that left it."""

    @property
    def is_complete(self) -> bool:
        """Whether every rank's state can be fetched."""
        return len(self.where) == self.world

    def missing(self, here: Sequence[int], peers: Peers, node: str, *, lacks: bool, everything: bool) -> list[int]:
        """The ranks whose states this process fetches for its node; the other processes of the node fetch the rest. All
        ranks call this.

        `here`: the ranks whose states the node has. `node`: its key. `lacks`: this process needs states that the node
        does not have. `everything`: not only the states of the node's own ranks."""
        answers = peers.all_gather([node, lacks])
        if not lacks:
            return []
        sharing = [rank for rank, (other, other_lacks) in enumerate(answers) if other == node and other_lacks]
        if everything:
            owners = [owner for owner in sorted(self.where) if owner not in here]
            return owners[sharing.index(peers.rank) :: len(sharing)]
        return [owner for owner in (peers.rank,) if owner in self.where and owner not in here]
