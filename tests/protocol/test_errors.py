"""The tree of errors: one code each, an exit code each, and whose fault it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.protocol import errors
from holdfast.protocol.errors import CallerError, HoldfastError, InternalError, PeerError, SnapshotError, WorkerError
from holdfast.protocol.outcome import Failure, Verdict, job_exit_code, shell_status


def tree(root: type[HoldfastError] = HoldfastError) -> Iterator[type[HoldfastError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


def test_codes_are_unique() -> None:
    codes = [error.code for error in tree()]
    assert len(codes) > 15
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize(
    ("root", "series", "exit_code"),
    [
        (CallerError, "HF1", 2),
        (WorkerError, "HF2", 1),
        (PeerError, "HF3", 1),
        (SnapshotError, "HF4", 1),
        (InternalError, "HF9", 70),
    ],
)
def test_each_branch_has_its_series_and_exit_code(root: type[HoldfastError], series: str, exit_code: int) -> None:
    for error in tree(root):
        assert error.code.startswith(series), error
        assert error.exit_code == exit_code, error
        assert error.fault is root.fault, error


def test_errors_read_as_their_message() -> None:
    assert str(errors.ScriptError("train.py: no such file")) == "train.py: no such file"


@pytest.mark.parametrize(("seen", "status"), [(0, 0), (3, 3), (255, 255), (-9, 137), (-15, 143)])
def test_a_shell_would_show_the_same_status(seen: int, status: int) -> None:
    assert shell_status(seen) == status


def test_the_jobs_exit_code_is_the_culprits() -> None:
    culprit = Failure(rank=0, local_rank=0, host="a", pid=1, exit_code=-11)
    assert job_exit_code(Verdict(code="HF200", cause="", culprit=culprit)) == 139
    assert job_exit_code(Verdict(code="HF300", cause="a node was lost")) == 1


def test_one_error_on_two_ranks_is_the_same_error() -> None:
    one = Failure(rank=0, local_rank=0, host="a", pid=1, exit_code=1, error_type="ValueError", message="ValueError: x")
    other = Failure(
        rank=5, local_rank=1, host="b", pid=9, exit_code=1, error_type="ValueError", message="ValueError: x"
    )
    third = Failure(rank=0, local_rank=0, host="a", pid=1, exit_code=1, error_type="KeyError", message="KeyError: x")
    assert one.signature == other.signature != third.signature
