"""The soak's schedule: the same for a seed, all kinds, nothing that makes no sense together, all over in time."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean

import pytest

from soak.schedule import KINDS, schedule


@pytest.mark.parametrize("seed", range(5))
def test_twenty_minutes_hold_every_kind(seed: int) -> None:
    faults = schedule(seed, 1200.0)
    assert {fault.kind for fault in faults} == {kind.name for kind in KINDS}
    gaps = [after.at_s - before.at_s for before, after in pairwise(faults)]
    assert 10 < mean(gaps) < 22
    assert max(fault.over_s for fault in faults) <= 1200.0


def test_a_seed_is_a_schedule() -> None:
    assert schedule(7, 600.0) == schedule(7, 600.0)
    assert schedule(7, 600.0) != schedule(8, 600.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_node_has_one_fault_at_a_time(seed: int) -> None:
    free_s = dict.fromkeys(range(1, 5), 0.0)
    for fault in schedule(seed, 1200.0, mean_gap_s=3.0):
        if fault.node:
            assert fault.at_s >= free_s[fault.node]
            free_s[fault.node] = fault.over_s


@pytest.mark.parametrize("seed", range(20))
def test_the_network_has_one_fault_at_a_time(seed: int) -> None:
    free_s = 0.0
    for fault in schedule(seed, 1200.0, mean_gap_s=3.0):
        if fault.kind in {"link down", "partition 2|2", "delay and loss", "node crashed"}:
            assert fault.at_s >= free_s
            free_s = fault.over_s


def test_a_partition_leaves_the_coordinator_with_one_other() -> None:
    halves = [fault.others for fault in schedule(1, 3600.0) if fault.kind == "partition 2|2"]
    assert halves
    assert all(len(half) == 2 and half[0] == 1 for half in halves)
    assert len(set(halves)) > 1
