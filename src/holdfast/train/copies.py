"""Copies of the states in memory on other nodes: which node sends to which, when, and from where a rank fetches.

All ranks copy the same state, or none does: rank 0 decides it in each save. While a copy is on its way anywhere, the
next ones are skipped. So there is always one state that every rank has twice: in its own slot, which it holds, and on
its node's partner. When a node is lost, the others and a newcomer go on from it, or from a newer one that is complete.

Nodes form a ring, and a partner is in another failure domain if no domain has more than half of the nodes. Savers offer
all addresses of their node, and who sends or fetches takes the fastest (snapshots/copy_connection.py).
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
"""Of a node: the address at which its saver is reached, instead of the fastest."""
ADDRESSES_MAX = 8
DOMAIN_VARIABLE = "HOLDFAST_FAILURE_DOMAIN"
"""Of a node: what fails together with it, such as its rack or its power supply."""


def own_addresses() -> str:
    """This node's addresses, separated by blanks: that on the way to the node of rank 0 first."""
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
    """Of this node: as it was set; else Slurm's switches above it, else this machine, which may have other nodes."""
    if given := environ.get(DOMAIN_VARIABLE):
        return given
    names = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")  # switch.switch.node; a node's name may have dots itself
    *switches, _ = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", names.count("."))
    return ".".join(switches) or boot_id()


def partners(domains: Sequence[str]) -> list[int]:
    """For each node its partner: another node, and each is the partner of one; in another domain where possible."""
    order = sorted(range(len(domains)), key=lambda node: domains[node])
    largest = max(Counter(domains).values(), default=0)
    shift = largest if largest < len(domains) else 1
    return [node for _, node in sorted((of, order[(at + shift) % len(order)]) for at, of in enumerate(order))]


class CopyReport(NamedTuple):
    """What one rank says of its copies in each save."""

    node: str
    domain: str
    host: str
    """Its addresses, separated by blanks."""
    port: int
    """0: its saver takes no copies."""
    busy: bool
    error: str
    """Why the last copy did not arrive."""

    @property
    def address(self) -> Address:
        return self.host, self.port


def to_partners(said: Sequence[CopyReport]) -> dict[str, Address]:
    """By node, in the order of ranks: where its partner's saver listens."""
    nodes = {each.node: each for each in reversed(said)}
    places = sorted(nodes, key=[each.node for each in said].index)
    ring = partners([nodes[place].domain for place in places])
    return {place: nodes[places[to]].address for place, to in zip(places, ring, strict=True)}


def lonely(said: Sequence[CopyReport], has: Sequence[Sequence[int]]) -> list[tuple[int, int, str, int]]:
    """The ranks' states that only one node has: the rank, which process sends it, and to what address. `has`: those on
    the node of each process."""
    found, to = [], to_partners(said)
    for owner in sorted(set().union(*has)):
        able = [rank for rank, owners in enumerate(has) if owner in owners]
        node = said[able[0]].node
        if len(to) > 1 and to[node][1] and all(said[rank].node == node for rank in able):
            found.append((owner, able[owner % len(able)], *to[node]))
    return found


@dataclass
class CopyPlan:
    """Rank 0's decisions."""

    _target: State | None = None
    """The state that was sent last."""
    _kept: State | None = None
    """The newest that arrived everywhere."""
    _told: list[list[Any]] = field(default_factory=list)
    _complaint: str = ""

    def decide(self, said: Sequence[CopyReport], state: State, *, staged: bool) -> dict[str, Any]:
        """What all ranks do with this state. `staged`: all have it in memory."""
        partner = to_partners(said)
        if len(partner) < 2:
            self._complain("this job has one node, and no other that could keep copies")
            return {}
        if any(each.busy for each in said):
            return {"skip": True}
        errors = [f"rank {rank}: {each.error}" for rank, each in enumerate(said) if each.error]
        if errors:
            more = f" ({len(errors) - 1} more ranks have similar errors)" if len(errors) > 1 else ""
            self._complain(f"the copy of a state to another node failed: {errors[0]}{more}")
        elif self._target is not None:
            self._kept, self._complaint = self._target, ""
        self._target = state if staged else None
        if not staged:  # what is kept now makes room
            return {"skip": True, "keep": self._kept}
        to = [list(partner[each.node]) for each in said]
        word = {"keep": self._kept, "to": [] if to == self._told else to}
        self._told = to
        return word

    def _complain(self, text: str) -> None:
        """Once, until copies succeed again."""
        if not self._complaint:
            warnings.warn(f"holdfast: {text}\nTraining goes on.", RuntimeWarning, stacklevel=7)
        self._complaint = text


class Copies:
    """One rank's part."""

    def __init__(self, tier: Tier, bytes_s: float, folder: str) -> None:
        """`bytes_s`: what its node may send in a second; 0: all it can. `folder`: of the snapshots."""
        self._client = tier if isinstance(tier, SaverClient) else None
        self.node = f"{node_key()}:{tier.place}"
        self._host, self._domain = own_addresses(), failure_domain(os.environ)
        self._paths = CopyPaths()
        self._bytes_s, self._folder = bytes_s, folder
        self._plan = CopyPlan()
        self._to: list[list[Any]] = []
        self._key = b""

    def begin(self, word: str, rank: int, world: int) -> None:
        """A new life of the job, or another world. `word`: rank 0's, a random one."""
        self._plan, self._to = CopyPlan(), []
        if self._client is not None:
            self._client.slots.hold()
            self._key = key_of_life(Path(self._client.place), word)
            self._client.serve(word, self._host, self._bytes_s, self._folder, (rank, world))

    def keep(self, state: State) -> None:
        """The job goes on from this state in memory: what there is of it stays until a newer one arrived everywhere."""
        self._plan = CopyPlan(_kept=state)
        if self._client is not None:
            self._client.slots.hold(state)
            fetched, self._client.prefetched = self._client.prefetched, {}
            if fetched.pop("state", None) == list(state):
                self._client.tell_agent({"is": "fetched", **fetched, "ahead": True})

    def end(self) -> None:
        """There is no memory for slots any more."""
        self._client = None

    def report(self) -> CopyReport:
        """For rank 0."""
        client, domain = self._client, self._domain
        if client is None:
            return CopyReport(self.node, domain, "", 0, False, "it has no memory for snapshots")
        client.await_served()
        return CopyReport(self.node, domain, self._host, client.port, client.copying, client.copy_error)

    def decide(self, said: Sequence[Sequence[Any]], state: State, *, staged: bool) -> dict[str, Any]:
        """Rank 0: for all ranks' `follow`. `said`: their reports."""
        return self._plan.decide([CopyReport(*each) for each in said], state, staged=staged)

    def follow(self, word: Mapping[str, Any], rank: int, step: int) -> None:
        """Send the committed state of this step, if rank 0 says so. Never waits."""
        if self._client is None or not word:
            return
        kept = word.get("keep")
        keep: State | None = None if kept is None else (kept[0], kept[1], kept[2])
        if word.get("skip"):
            if keep is not None:
                self._client.keep(keep)
            if rank == 0:
                self._client.tell_agent(skipped(step))
            return
        self._to = word["to"] or self._to
        host, port = self._to[rank]
        self._client.copy((host, port), keep)

    # --- resuming -----------------------------------------------------------------------------------------------------

    def bring(self, path: str, state: State, owners: Sequence[int], where: Mapping[int, Address], *, own: bool) -> str:
        """Fetch these ranks' states from other nodes. `own`: this rank's, which a newcomer takes for its own slot.
        Returns why one could not be fetched; empty: all are here."""
        if self._client is None:
            return "there is no memory for it"
        slots = self._own_slots(state) if own else None
        for owner in owners:
            began_s = time.monotonic()
            try:
                way = fetch(Path(self._client.place), where[owner], self._key, path, state, owner, slots, self._paths)
            except (CopyError, SnapshotMemoryError, OSError) as error:
                return f"rank {owner}'s state was not fetched: {error}"
            about = {"step": state[0], "rank": owner, "of": way}
            self._client.tell_agent({"is": "fetched", **about, "took_s": round(time.monotonic() - began_s, 3)})
        return ""

    def _own_slots(self, state: State) -> Slots | None:
        """Where this rank's state is fetched to; None: its slots hold states of its own."""
        assert self._client is not None
        slots = self._client.slots
        there = [slot.request.identity for slot in slots.committed() if slot.request is not None]
        if self._client.prefetched and state not in there:
            slots.forget(above_step=-1)  # what was fetched before is not what the ranks agreed on
            there = []
        return None if there else slots

    def send_again(self, path: str, state: State, peers: Peers) -> None:
        """The job goes on from this state, of which a lost node has taken copies along: send what only one node has.
        All ranks call it. Never waits for a copy."""
        here: dict[int, Slot] = {}
        for slot in () if self._client is None else self._client.held(path):
            assert slot.request is not None
            assert slot.path is not None
            if slot.request.identity == state and slot.path.parent.name != FETCHED:  # that goes with the first plan
                here.setdefault(slot.rank, slot)
        said = peers.gather([self.report(), list(here)])
        word = peers.tell(lonely([CopyReport(*each) for each, _ in said], [has for _, has in said]) if said else None)
        for owner, sender, host, port in word:
            if sender == peers.rank and self._client is not None:
                self._client.copy((host, port), state, here[owner])


class Sources(NamedTuple):
    """Where a state in memory can be had."""

    world: int
    """Ranks of the job that left it."""
    where: dict[int, Address]
    """By the rank that left it: the saver of a node that has it."""

    @property
    def is_complete(self) -> bool:
        return len(self.where) == self.world

    def missing(self, here: Sequence[int], peers: Peers, node: str, *, lacks: bool, everything: bool) -> list[int]:
        """The ranks' states that this process fetches for its node, where others take their share. All ranks call it.

        `here`: those that the node has. `everything`: not only those of the node's own ranks."""
        said = peers.share([node, lacks])
        if not lacks:
            return []
        beside = [rank for rank, (place, its) in enumerate(said) if place == node and its]
        if everything:
            return [owner for owner in sorted(self.where) if owner not in here][beside.index(peers.rank) :: len(beside)]
        return [owner for owner in (peers.rank,) if owner in self.where and owner not in here]
