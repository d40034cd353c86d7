"""Collectives whose sizes differ on one rank: the verdict names that rank, and not the one whose check found it."""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.diagnosis.causes import judge
from holdfast.diagnosis.screen import render
from holdfast.protocol.outcome import Evidence, Failure, Outcome, OutcomeKind, Verdict, job_exit_code
from tests.corpus.telling import C10D, GLOO_CLOSED, fails, named

ABORTED = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. {} vs {}. Received data size
Fatal Python error: Aborted

Thread 0x00007fbb212b0b80 (most recent call first):
  File "{}", line 3252 in {}
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/data/job/train.py", line 15 in <module>
"""


def notices(rank: int, call: str, sizes: tuple[int, int] = (3336, 2668)) -> Failure:
    return fails(rank, code=-6, stderr=ABORTED.format(*sizes, C10D, call))


def calls(rank: int, call: str, **tensors: str) -> Failure:
    return structs.replace(fails(rank, GLOO_CLOSED, frames=(C10D,)), collective=call, tensors=tensors)


def verdict_on(*failures: Failure) -> Verdict:
    evidence = Evidence(generation=1, restarts=0, failures=failures, lost_nodes=(), gave_up="", hosts=("a",))
    return judge(evidence)


@pytest.mark.parametrize(
    ("failures", "culprit"),
    [
        ((notices(0, "all_reduce"), calls(1, "all_reduce(float32[5])"), calls(2, "all_reduce(float32[4])")), 1),
        ((notices(0, "all_reduce"), calls(1, "all_reduce(float32[5])"), calls(2, "all_reduce(float32[5])")), 0),
        ((notices(0, "all_reduce"), calls(1, "all_reduce(float64[5])"), calls(2, "all_reduce(float32[5])")), 1),
        ((notices(0, "all_reduce"), calls(1, "all_reduce(bfloat16[9])"), calls(2, "all_reduce(float32[5])")), 2),
        ((notices(0, "all_reduce"), calls(1, "all_reduce(bool[8])"), calls(2, "all_reduce(int32[3])")), 2),
        ((notices(0, "gather"), calls(1, "gather(float32[4])"), calls(2, "gather(float32[2, 3])")), 2),
        (
            (notices(0, "all_reduce"), *(calls(rank, f"all_reduce(float32[{4 + (rank == 2)}])") for rank in (1, 2, 3))),
            2,
        ),
        ((notices(0, "broadcast"), notices(2, "broadcast"), calls(1, "all_reduce(float32[2])")), 1),
        ((notices(1, "broadcast"), calls(0, "all_reduce(float32[2])"), calls(2, "all_reduce(float32[2])")), 1),
        (
            (
                notices(0, "gather"),
                calls(1, "barrier()", t="float32[8]", x="int64[2]"),
                calls(2, "barrier()", t="float32[4]"),
            ),
            1,
        ),
    ],
)
def test_the_rank_with_other_sizes(failures: tuple[Failure, ...], culprit: int) -> None:
    for order in (failures, failures[::-1]):
        verdict = verdict_on(*order)
        assert (verdict.code, named(verdict)) == ("HF225", culprit), verdict.cause


@pytest.mark.parametrize(
    "failures",
    [
        (notices(0, "all_reduce"),),
        (notices(0, "all_reduce"), calls(1, "all_reduce(float32[5])")),
        (notices(0, "all_reduce"), notices(2, "all_reduce"), calls(1, "all_reduce(float32[7])")),
        (notices(0, "gather"), calls(1, "barrier()", t="float32[8]"), calls(2, "barrier()", t="float32[8]")),
        (notices(0, "gather"), calls(1, "barrier()", t="a[8]", x="a[1]"), calls(2, "barrier()", t="a[4]", x="a[9]")),
    ],
)
def test_where_it_is_unknown_which_rank_is_wrong_none_is_blamed(failures: tuple[Failure, ...]) -> None:
    verdict = verdict_on(*failures)
    assert (verdict.code, verdict.culprit, verdict.noticed_by) == ("HF225", None, failures[0])
    outcome = Outcome(kind=OutcomeKind.FAILED, exit_code=job_exit_code(verdict), code=verdict.code, verdict=verdict)
    screen = render(outcome, "/tmp/run")
    assert "\n  noticed by   rank 0 " in screen
    assert "\n  first " not in screen
    assert outcome.exit_code == 134


def test_of_ranks_that_time_out_the_one_with_other_sizes_is_named() -> None:
    late = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete"
    waits = [structs.replace(fails(r, late), collective=f"all_reduce(float32[{9 if r == 1 else 4}])") for r in range(3)]
    assert named(verdict_on(*waits)) == 1


@pytest.mark.parametrize(
    ("texts", "culprit"),
    [
        (((0, 2, 1, 4), (2, 2, 1, 4), (1, 4, 0, 2)), 1),
        (((1, 2, 0, 4), (2, 2, 0, 4)), None),
    ],
)
def test_the_rank_with_another_number_of_parameters(texts: tuple[tuple[int, ...], ...], culprit: int | None) -> None:
    says = "RuntimeError: DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has inconsistent {} params."
    verdict = verdict_on(*(fails(text[0], says.format(*text)) for text in texts))
    assert verdict.code == "HF227"
    assert named(verdict) == (texts[0][0] if culprit is None else culprit)
