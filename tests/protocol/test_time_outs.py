"""The order of the time-outs: which orders are named, and which are right."""

from __future__ import annotations

from math import inf

import pytest

from holdfast.protocol.policy import Limits
from holdfast.protocol.time_outs import Inversion, Rung, inversions, ladder

HANG, WATCHDOG = "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"


def found(
    limits: Limits, environ: dict[str, str] | None = None, *, gpus: bool = True, nodes: int = 2
) -> list[Inversion]:
    return list(inversions(ladder(limits, environ or {}, gpus=gpus, nodes=nodes)))


@pytest.mark.parametrize("gpus", [True, False])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_defaults_are_in_order(nodes: int, *, gpus: bool) -> None:
    assert found(Limits(), gpus=gpus, nodes=nodes) == []


def test_the_ladder_has_its_order() -> None:
    rungs = ladder(Limits(), {}, gpus=True, nodes=2)
    assert [each.wait for each in rungs] == [Rung.FENCE, Rung.LEASE, Rung.HANG, Rung.GROUP, Rung.WATCHDOG]
    assert [each.after_s for each in rungs] == [4.0, 6.0, 312.0, 600.0, 480.0]


def test_one_node_has_no_lease_and_the_cpu_no_watchdog() -> None:
    assert [each.wait for each in ladder(Limits(), {}, gpus=False, nodes=1)] == [Rung.HANG, Rung.GROUP]


def test_nccl2_has_no_watchdog_that_ends_a_process() -> None:
    rungs = ladder(Limits(), {WATCHDOG: "120"}, gpus=True, nodes=1, nccl2=True)
    assert [each.wait for each in rungs] == [Rung.HANG, Rung.GROUP]
    assert list(inversions(rungs)) == []


def test_a_hang_that_is_ended_before_the_lease_is_over_is_named() -> None:
    limits = Limits(lease_s=312.0, fence_s=208.0)
    (only,) = found(limits)
    assert (only.first.wait, only.then.wait) == (Rung.LEASE, Rung.HANG)
    assert found(limits, nodes=1) == []


@pytest.mark.parametrize(
    ("limits", "environ", "gpus", "first", "then"),
    [
        (Limits(hang_timeout_s=600.0), {}, True, Rung.HANG, Rung.GROUP),
        (Limits(hang_timeout_s=1800.0), {}, False, Rung.HANG, Rung.GROUP),
        (Limits(), {WATCHDOG: "120"}, True, Rung.HANG, Rung.WATCHDOG),
        (Limits(lease_s=700.0, fence_s=400.0, hang_timeout_s=0.0), {}, True, Rung.LEASE, Rung.GROUP),
    ],
)
def test_what_depends_on_the_script_is_named(
    limits: Limits, environ: dict[str, str], first: Rung, then: Rung, *, gpus: bool
) -> None:
    named = found(limits, environ, gpus=gpus)
    assert (first, then) in [(each.first.wait, each.then.wait) for each in named]


@pytest.mark.parametrize("environ", [{HANG: "0", WATCHDOG: "120"}, {WATCHDOG: "600"}])
def test_a_watchdog_that_is_off_or_late_is_not_named(environ: dict[str, str]) -> None:
    assert found(Limits(), environ) == []


def test_a_group_whose_errors_are_not_handled_never_ends() -> None:
    off = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    by = {each.wait: each.after_s for each in ladder(Limits(), off, gpus=True, nodes=1)}
    assert by[Rung.GROUP] == inf
    by = {
        each.wait: each.after_s
        for each in ladder(Limits(), off | {"TORCH_NCCL_BLOCKING_WAIT": "1"}, gpus=True, nodes=1)
    }
    assert by[Rung.GROUP] == 600.0


def test_hangs_that_are_never_ended_are_in_order_with_all_others() -> None:
    assert found(Limits(hang_timeout_s=0.0), {WATCHDOG: "1"}) == []
