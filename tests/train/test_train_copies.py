"""Copies of states on other nodes: who sends to whom, and when; and what a lost node costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.errors import IntervalError
from holdfast.train import copies
from holdfast.train.copies import Copies, CopyPlan, CopyReport, failure_domain, on_one_node, own_addresses, partners
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.saver_client import SaverClient
from holdfast.train.snapshots_api import Snapshots
from tests.train.snapshots.saves import Bench
from tests.warm import Warm

COPIED_NODES = Path(__file__).parent / "scripts" / "copied_nodes.py"
LOSSES = 6


@pytest.mark.usefixtures("fsdp_on_cpus")
def test_lost_nodes_are_made_good_from_memory(warm: Warm, tmp_path: Path) -> None:
    """FSDP2: nothing is on the disk, and each loss takes half of everything with it, at any moment.
    Losses come faster than the survivor's rescues would give up, and every second one before the first step. At last
    both nodes are lost, and the disk decides."""
    found = warm.found(COPIED_NODES, tmp_path / "runs", str(LOSSES), "7", timeout=180)
    assert found["faults"] == []
    assert found["resumed"] == {"nothing": 1, "memory": LOSSES, "disk": 1}
    assert len(found["cost"]) == LOSSES + 1


def test_options_are_checked(tmp_path: Path) -> None:
    for number in (2, -1):
        with pytest.raises(IntervalError, match="copies="):
            Snapshots(tmp_path, copies=number)


@given(st.lists(st.sampled_from(["", "r1", "r2", "r3"]), min_size=2, max_size=12))
def test_partners(domains: list[str]) -> None:
    found = partners(domains)
    assert sorted(found) == list(range(len(domains)))  # each node is the partner of one
    assert all(node != partner for node, partner in enumerate(found))
    if max(map(domains.count, domains)) * 2 <= len(domains):
        assert all(domains[node] != domains[partner] for node, partner in enumerate(found))


def test_the_failure_domain_is_set_or_comes_from_slurm_or_is_the_machine() -> None:
    slurm = {"SLURM_TOPOLOGY_ADDR": "core.leaf[0-3].node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert failure_domain(slurm) == "core.leaf[0-3]"
    assert failure_domain({**slurm, "HOLDFAST_FAILURE_DOMAIN": "rack 4"}) == "rack 4"
    flat = {"SLURM_TOPOLOGY_ADDR": "node7.example.org", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    machine = failure_domain(flat)  # no topology is configured
    assert machine == failure_domain({}) != ""


def test_other_nodes_have_other_partners() -> None:
    def targets(nodes: str, domains: str) -> list[int]:
        reports = [CopyReport(each, its, "h", ord(each), False, "") for each, its in zip(nodes, domains, strict=True)]
        return [to[1] for to in plan.decide(reports, (1, 7, 1), staged=True)["to"]]

    plan = CopyPlan()
    assert targets("abcd", "1122") == [ord(each) for each in "cdab"]
    assert targets("abcd", "1122") == []  # as before
    assert targets("abxd", "1122") == [ord(each) for each in "xdab"]  # c was lost, x takes its place
    assert targets("abd", "112") == [ord(each) for each in "dab"]
    plan = CopyPlan()  # a new life
    assert targets("badc", "1212") == [ord(each) for each in "abcd"]


def test_what_a_node_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "docker0": "172.17.0.1", "ib0": "10.9.0.1", "usb0": "169.254.3.1"}
    monkeypatch.setattr(copies, "addresses", lambda: both)
    monkeypatch.setattr(copies, "own_address", {"head": "10.9.0.1", "me": "127.0.0.1", "localhost": "127.0.0.1"}.get)
    found = []
    for master in ("head", "me", "localhost", "nobody"):
        monkeypatch.setenv("MASTER_ADDR", master)
        found.append(own_addresses())
    # /etc/hosts of Debian has the own name at a loopback address, which no other node reaches
    assert found == ["10.9.0.1 10.0.0.1", "10.0.0.1 10.9.0.1", "127.0.0.1", "10.0.0.1 10.9.0.1"]
    monkeypatch.setenv("HOLDFAST_COPY_ADDR", "10.5.0.1")
    assert own_addresses() == "10.5.0.1"


def said(*errors: str, busy: tuple[bool, ...] = (False, False)) -> list[CopyReport]:
    errors = errors or ("", "")
    return [CopyReport(f"n{rank}", "", "127.0.0.1", 10 + rank, busy[rank], errors[rank]) for rank in range(2)]


def test_what_one_node_alone_has_is_sent_to_its_partner() -> None:
    two = said()
    assert on_one_node(two, [[0, 1], [1]]) == [(0, 0, "127.0.0.1", 11)]
    assert on_one_node(two, [[0, 1], [0, 1]]) == on_one_node(two, [[], []]) == []
    assert on_one_node([two[0], two[0]], [[0, 1], [0, 1]]) == []  # there is no other node
    assert on_one_node([two[0], two[1]._replace(port=0)], [[0, 1], []]) == []  # it has no memory for copies
    four = [two[rank // 2] for rank in range(4)]
    assert on_one_node(four, [[0, 1, 2], [0, 1, 2], [2, 3], [2, 3]]) == [
        (0, 0, "127.0.0.1", 11),
        (1, 1, "127.0.0.1", 11),  # the processes of a node share the work
        (3, 3, "127.0.0.1", 10),
    ]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SaverClient]:
    bench = Bench(tmp_path)
    yield bench.client
    bench.close()


def test_a_prefetched_state_that_is_not_the_agreed_one_makes_room_for_it(client: SaverClient) -> None:
    def own_slots() -> bool:
        return Copies(client, 0, "/runs")._own_slots((10, 7, 10)) is not None

    assert own_slots()
    memory = client.stage(20, 10)
    assert memory is not None
    client.commit(SaveRequest("/runs", 20, 7, 0, 2, {"save": 20}))
    assert not own_slots(), "it is the worker's own"
    client.prefetched = {"step": 20, "state": [20, 7, 20]}
    assert own_slots()
    assert client.slots.committed() == []


def test_only_what_was_resumed_from_is_reported_as_fetched(
    client: SaverClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(client, "tell_agent", told.append)
    part = Copies(client, 0, "/runs")
    for state in ((10, 7, 10), (20, 7, 20)):
        client.prefetched = {"step": 20, "state": [20, 7, 20]}
        part.keep(state)
        part.keep(state)
    assert told == [{"is": "fetched", "step": 20, "ahead": True}]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_state_is_kept_when_all_ranks_have_sent_it() -> None:
    plan = CopyPlan()
    one, two, three, four = [(step, 7, step) for step in (1, 2, 3, 4)]
    assert plan.decide(said(), one, staged=True) == {"keep": None, "to": [["127.0.0.1", 11], ["127.0.0.1", 10]]}
    assert plan.decide(said(busy=(False, True)), two, staged=True) == {"skip": True}
    assert plan.decide(said(), two, staged=False) == {"skip": True, "keep": one}  # which makes room for the next
    assert plan.decide(said(), three, staged=True) == {"keep": one, "to": []}
    with pytest.warns(RuntimeWarning, match="rank 1: it is gone"):
        assert plan.decide(said("", "it is gone"), four, staged=True) == {"keep": one, "to": []}
    assert plan.decide(said("", "it is gone"), one, staged=True)["keep"] == one  # and it is said once
    assert plan.decide(said(), two, staged=True)["keep"] == one
    with pytest.warns(RuntimeWarning, match="one node"):
        assert CopyPlan().decide(said()[:1] * 2, one, staged=True) == {}
