"""Ranks that agree to end: one caught an error, and all raise or leave. The verdict names that one and its error."""

from __future__ import annotations

from itertools import permutations

import pytest
from msgspec import structs

from holdfast.diagnosis.causes import judge
from holdfast.diagnosis.screen import render
from holdfast.protocol.outcome import Evidence, Failure, Outcome, OutcomeKind, Verdict
from tests.corpus.telling import BECAUSE, HEAD, cut, fails, named

FRAME = '  File "/data/job/train.py", line 9, in step\n    x = load(17)\n'
BAD = f"{HEAD}{FRAME}ValueError: bad sample 17\n"


def raised(rank: int, says: str, *, root: str = "", before: str = "", code: int = 1) -> Failure:
    """A rank that raises in its own code; `root`: from this traceback; `before`: what it wrote to stderr before."""
    failure = fails(rank, says, line="raise RuntimeError(text)", code=code)
    traceback = f"{root}{BECAUSE}{failure.traceback}" if root else failure.traceback
    return structs.replace(failure, traceback=traceback, stderr_tail=before + traceback)


def left(rank: int, *, stderr: str = "", code: int = 1) -> Failure:
    return structs.replace(fails(rank, code=code), stderr_tail=stderr)


def verdicts(*failures: Failure) -> list[Verdict]:
    """One for each order of arrival."""
    common = Evidence(generation=1, restarts=0, failures=(), lost_nodes=(), gave_up="", hosts=("a",))
    return [judge(structs.replace(common, failures=order)) for order in permutations(failures)]


def check(*failures: Failure, culprit: int, cause: str) -> None:
    for verdict in verdicts(*failures):
        assert named(verdict) == culprit, verdict.cause
        assert cause in verdict.cause


ALIKE = ("RuntimeError: stop", "RuntimeError: training failed on some rank", "SyncError: epoch 3")


@pytest.mark.parametrize("says", ALIKE)
def test_the_rank_whose_chain_has_another_root(says: str) -> None:
    check(
        raised(0, says), raised(1, says, root=BAD), raised(2, says), culprit=1, cause="raised ValueError: bad sample 17"
    )


@pytest.mark.parametrize("says", ["RuntimeError: another rank failed", "RuntimeError: not all ranks succeeded"])
def test_the_rank_that_raises_its_own_error_while_the_others_report_it(says: str) -> None:
    check(raised(0, says), raised(1, "ValueError: bad sample 17"), raised(2, says), culprit=1, cause="bad sample 17")


@pytest.mark.parametrize("says", ALIKE)
def test_the_rank_that_wrote_its_traceback_before(says: str) -> None:
    culprit = raised(2, says, before=f"ERROR:root:step failed\n{BAD}")
    check(raised(0, says), raised(1, says), culprit, culprit=2, cause="raised ValueError: bad sample 17")


def test_the_rank_that_wrote_a_line_about_its_error_before() -> None:
    culprit = raised(0, "RuntimeError: stop", before="2026-01-01 ERROR bad tokenizer: 0 entries\n")
    others = [raised(rank, "RuntimeError: stop", before="step 3\n") for rank in (1, 2)]
    check(culprit, *others, culprit=0, cause="bad tokenizer: 0 entries")


@pytest.mark.parametrize("code", [1, 3])
def test_the_rank_that_wrote_a_traceback_when_all_left_without_words(code: int) -> None:
    check(left(0, code=code), left(1, stderr=BAD, code=code), left(2, code=code), culprit=1, cause="ValueError: bad")
    culprit = left(1, stderr=f"{BAD}saving before the end\n", code=code)
    check(left(0, code=code), culprit, left(2, code=code), culprit=1, cause="ValueError: bad sample 17")


def test_the_whole_words_of_the_rank_that_says_why_all_leave_are_read() -> None:
    """One rank of holdfast.train says that the job makes no progress, and all leave with 93."""
    words = "holdfast: HF253: no progress: 3 restarts did not come past step 65\nthe last failure: ValueError: bug\n"
    for verdict in verdicts(left(0, stderr=words, code=93), left(1, code=93)):
        assert (verdict.code, named(verdict)) == ("HF253", 0)
        assert "ended the job: no progress: 3 restarts did not" in verdict.cause


@pytest.mark.parametrize(
    "says",
    ["loading failed on ranks [2]", "loss is NaN on rank(s) 2", "rank 2 failed: KeyError('x')", "errors: rank 2: bad"],
)
def test_the_rank_that_the_text_names(says: str) -> None:
    failures = [raised(rank, f"RuntimeError: {says}") for rank in range(3)]
    check(*failures, culprit=2, cause=says)


def test_the_whole_chain_of_the_rank_that_the_text_names_is_its_own_error() -> None:
    """As where rank 0 cannot write, and the others report it."""
    full = f"{HEAD}{FRAME}OSError: [Errno 28] No space left on device: '/data/snapshots'\n"
    says = "cannot write /data/snapshots: No space left on device"
    chained = f"{full}{BECAUSE}{HEAD}{FRAME}RuntimeError: a save failed\n"
    warning = "RuntimeWarning: 4 of 10000 failed saves in a row; training goes on\n"
    for root, before in ((full, ""), (chained, ""), (full, warning), ("", warning)):
        culprit = raised(0, f"WriteError: {says}", root=root, before=before)
        for verdict in verdicts(culprit, raised(1, f"SnapshotError: rank 0: {says}")):
            assert (verdict.code, named(verdict)) == ("HF214", 0), verdict.cause


def test_the_rank_that_a_checkpoint_names() -> None:
    says = f"CheckpointException: CheckpointException ranks:dict_keys([1])\n{HEAD.strip()} (RANK 1)\n{FRAME}ValueError: no plan"
    check(*(raised(rank, says) for rank in range(3)), culprit=1, cause="ValueError: no plan")


def test_equal_errors_of_a_library_are_no_agreement() -> None:
    """Each rank of a node lacks the file; the third has another problem, which was reported later."""
    missing = [
        fails(rank, "FileNotFoundError: [Errno 2] No such file or directory: 'x'", line="open(x)") for rank in (0, 1)
    ]
    found = verdicts(*missing, fails(2, "KeyError: 'y'", line="x['y']"))
    assert named(found[0]) == 0


def test_a_rank_that_reports_another_one_is_blamed_if_no_other_reports() -> None:
    alone = raised(0, "RuntimeError: another rank failed")
    check(alone, cut(1, late=True), culprit=0, cause="another rank failed")


def test_the_error_is_on_the_last_screen() -> None:
    says = "RuntimeError: stop"
    verdict = verdicts(raised(0, says), raised(1, says, before=BAD))[0]
    outcome = Outcome(kind=OutcomeKind.FAILED, exit_code=1, code=verdict.code, verdict=verdict)
    assert render(outcome, "/tmp/run").splitlines()[-1] == "ValueError: bad sample 17"


# --- ends during the stop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "culprit"), [(17, 1), (-8, 1), (-4, 1), (-15, 0), (-9, 0), (1, 0), (143, 0), (-6, 0)])
def test_an_exit_status_that_a_stop_cannot_cause_is_the_ranks_own(code: int, culprit: int) -> None:
    late = structs.replace(fails(1, code=code), after_stop=True)
    verdict = verdicts(cut(0), late)[0]
    assert named(verdict) == culprit


def test_what_holdfast_raises_on_all_ranks_names_the_rank_on_which_it_began() -> None:
    """Whatever the ranks have written before, and whichever of them is heard first. An error file has the class alone,
    and a traceback has it with its module."""
    kind = "holdfast.protocol.errors.SnapshotWriteError"
    says = "cannot write /data/snapshots: No space left on device"
    warning = "RuntimeWarning: holdfast: rank 0: 4 of 10000 failed saves in a row; training goes on\n"
    for before in ("", warning):
        failures = raised(0, f"{kind}: {says}", before=before), raised(1, f"{kind}: rank 0: {says}", before=warning)
        recorded = [structs.replace(each, message=each.message.rpartition("errors.")[2]) for each in failures]
        for verdict in verdicts(*failures) + verdicts(*recorded):
            assert (verdict.code, named(verdict)) == ("HF214", 0), verdict.cause


def test_what_holdfast_raises_alike_on_all_ranks_is_the_cause_whatever_one_of_them_has_warned_of() -> None:
    kind = "holdfast.protocol.errors.SnapshotWriteError"
    says = "cannot write /data/snapshots: Disk quota exceeded"
    warning = "/data/job/train.py:23: RuntimeWarning: holdfast: cannot write\n1 of 10 failed saves in a row.\n  snaps.step()\n"
    alike = [raised(0, f"{kind}: {says}", before=warning), raised(1, f"{kind}: {says}")]
    alike = [structs.replace(each, message=f"SnapshotWriteError: {says}") for each in alike]
    assert {verdict.code for verdict in verdicts(*alike)} == {"HF214"}


def test_a_warning_of_one_rank_is_not_why_all_ranks_raise() -> None:
    warning = (
        "/data/job/train.py:23: UserWarning: the cache is cold\n3 downloads failed and are tried again\n  load()\n"
    )
    alike = [raised(0, "ValueError: lr must be positive", before=warning), raised(1, "ValueError: lr must be positive")]
    for verdict in verdicts(*alike):
        assert "raised ValueError: lr must be positive" in verdict.cause
