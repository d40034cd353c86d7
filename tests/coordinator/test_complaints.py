"""What the evidence of a failure says about other ranks, and how long the stop waits for their reports."""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.coordinator.complaints import AGREED_S, REASON_S, Complaint, awaited_s, complaint_of
from holdfast.protocol.exit_codes import REQUESTS
from holdfast.protocol.outcome import Failure
from tests.corpus.telling import BECAUSE, GLOO_CLOSED, fails

AGREES = (
    "another rank failed",
    "some rank failed",
    "training failed on at least one rank",
    "a peer reported an error, aborting",
    "an error occurred on another process",
    "aborting: not all ranks succeeded",
    "one or more workers crashed",
    "peer failure detected, exiting",
    "Stopping because a peer hit an error",
    "remote worker died",
)
OWN = (
    "labels out of range",
    "the worker count must be positive",
    "loss is nan",
    "unknown rank of matrix",
    "could not bind the peer address",
    "node features have the wrong size",
    "all samples failed to load",
)


@pytest.mark.parametrize("text", AGREES)
def test_a_report_about_another_rank(text: str) -> None:
    raised = fails(0, f"RuntimeError: {text}", line="raise RuntimeError(text)")
    assert complaint_of(raised) is Complaint.RELAYED
    assert complaint_of(fails(0, stderr=f"{text}\n")) is Complaint.RELAYED


@pytest.mark.parametrize("text", OWN)
def test_no_report_about_another_rank(text: str) -> None:
    assert complaint_of(fails(0, f"RuntimeError: {text}", line="check(x)")) is Complaint.NONE
    assert complaint_of(fails(0, f"RuntimeError: {text}", line="raise RuntimeError(text)")) is Complaint.ON_PURPOSE


def test_the_root_of_a_chain_counts() -> None:
    """A script that wraps what a collective raises in an exception of its own."""
    wrapped = fails(0, "TrainerError: the step failed", line="raise TrainerError(text)")
    chain = f"Traceback (most recent call last):\n{GLOO_CLOSED}\n{BECAUSE}{wrapped.traceback}"
    assert complaint_of(structs.replace(wrapped, traceback=chain)) is Complaint.CLOSED


@pytest.mark.parametrize("code", [-9, -11, *REQUESTS, 139])
def test_a_status_that_is_a_cause(code: int) -> None:
    assert complaint_of(fails(0, code=code)) is Complaint.NONE


@pytest.mark.parametrize("failure", [fails(0, "ValueError: x", line="raise ValueError(text)"), fails(0)])
def test_ranks_without_a_process_group_have_not_agreed_to_end(failure: Failure) -> None:
    failure = structs.replace(failure, stderr_file="stderr.log")
    assert complaint_of(failure) is Complaint.ON_PURPOSE
    assert complaint_of(structs.replace(failure, in_group=False)) is Complaint.NONE


def test_how_long_the_stop_waits() -> None:
    raised = fails(0, "ValueError: x", line="raise ValueError(text)")
    relayed = fails(1, "RuntimeError: another rank failed", line="raise RuntimeError(text)")
    cut, own = fails(2, GLOO_CLOSED), fails(3, "KeyError: 'x'", line="x['x']")

    def waits(new: Failure, *earlier: Failure) -> float:
        return awaited_s([new], earlier)

    assert [waits(cut), waits(relayed), waits(raised), waits(own)] == [REASON_S, REASON_S, AGREED_S, 0.0]
    assert waits(raised, fails(1, "ValueError: x", line="raise ValueError(text)")) == AGREED_S
    assert [waits(cut, raised), waits(raised, cut), waits(raised, relayed), waits(own, cut)] == [0.0] * 4
    assert waits(cut, relayed) == REASON_S
