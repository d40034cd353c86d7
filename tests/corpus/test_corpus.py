"""The corpus of faults: who is to blame and what it is called, over all cases; the screen that is shown of each."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from holdfast.diagnosis.causes import judge
from holdfast.diagnosis.causes.find import cause_of
from holdfast.diagnosis.reference import verdict_texts
from holdfast.diagnosis.screen import render
from holdfast.protocol.outcome import Evidence, Outcome, OutcomeKind, Verdict, job_exit_code
from tests.corpus.messages import messages, right_share, wrong
from tests.corpus.telling import Case, cases, fails, named

RECORDED = Path(__file__).resolve().parent / "recorded"
SHARE_MIN = 0.95
OUR_LINES_MAX, SCREEN_LINES_MAX = 15, 60
CASES_MIN, HARD_MIN = 45, 8


def recorded() -> list[Case]:
    found = []
    for file in sorted(RECORDED.glob("*.json")):
        data = json.loads(file.read_text())
        evidence = msgspec.convert(data["evidence"], Evidence)
        found.append(Case(f"recorded {file.stem}", tuple(data["culprits"]), data["code"], evidence))
    return found


ALL = [*cases(), *recorded()]


def is_right(case: Case, verdict: Verdict) -> bool:
    rank = named(verdict)
    return rank in case.culprits if case.culprits else rank is None


def shares(case_and_verdict: list[tuple[Case, Verdict]]) -> dict[str, float]:
    """Precision: of those named, how many are right. Recall: of those that are there, how many were named."""
    told = [(case, verdict) for case, verdict in case_and_verdict if verdict.culprit is not None]
    there = [(case, verdict) for case, verdict in case_and_verdict if case.culprits]
    codes = [case.code for case, _ in case_and_verdict]
    plain = {"HF200", "HF201", "HF204", "HF205"}  # what is said when no cause was recognised
    coded = [(case, verdict) for case, verdict in case_and_verdict if verdict.code not in plain]
    caused = [(case, verdict) for case, verdict in case_and_verdict if case.code not in plain]
    assert codes
    return {
        "culprit precision": sum(is_right(*pair) for pair in told) / len(told),
        "culprit recall": sum(is_right(*pair) for pair in there) / len(there),
        "code precision": sum(case.code == verdict.code for case, verdict in coded) / len(coded),
        "code recall": sum(case.code == verdict.code for case, verdict in caused) / len(caused),
    }


def test_precision_and_recall(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [(case, judge(case.evidence)) for case in ALL]
    assert len(pairs) >= CASES_MIN
    assert sum(case.hard for case, _ in pairs) >= HARD_MIN
    wrong = [
        f"{case.name}: {named(verdict)} {verdict.code} instead of {case.culprits} {case.code}: {verdict.cause}"
        for case, verdict in pairs
        if not is_right(case, verdict) or verdict.code != case.code
    ]
    found = shares(pairs)
    with capsys.disabled():
        print(f"\n{len(pairs)} faults: " + ", ".join(f"{name} {share:.3f}" for name, share in found.items()))
        print("\n".join(wrong), end="\n" if wrong else "")
    assert min(found.values()) >= SHARE_MIN, found


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_each(case: Case) -> None:
    verdict = judge(case.evidence)
    assert is_right(case, verdict), f"{named(verdict)}: {verdict.cause}"
    assert verdict.code == case.code, verdict.cause
    assert verdict.code in verdict_texts()
    assert "\n" not in verdict.cause + verdict.advice


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_the_last_screen_is_short(case: Case) -> None:
    verdict = judge(case.evidence)
    outcome = Outcome(kind=OutcomeKind.FAILED, exit_code=job_exit_code(verdict), code=verdict.code, verdict=verdict)
    lines = render(outcome, "/tmp/holdfast/run").splitlines()
    ours = next((number for number, line in enumerate(lines) if line.startswith(TRACEBACKS)), len(lines))
    assert ours <= OUR_LINES_MAX, "\n".join(lines)
    assert len(lines) <= SCREEN_LINES_MAX
    assert max(map(len, lines[:ours])) < 400
    assert max(map(len, lines)) <= 1000
    assert lines[0].startswith(f"holdfast: {case.code}: job FAILED")
    if len(lines) > 24:
        assert lines.pop() == lines[0]
    if verdict.culprit is not None and verdict.culprit.traceback:
        assert lines[-1].strip()[:900] == verdict.culprit.traceback.rstrip().splitlines()[-1].strip()[:900]


TRACEBACKS = ("Traceback (most recent call last):", "Fatal Python error:")


def test_the_exception_inside_of_a_spawned_process_is_told() -> None:
    inner = (
        'Traceback (most recent call last):\n  File "/opt/x/spawn.py", line 90, in _wrap\n    fn(i, *args)\n  File "train.py", line 3, in f\n    1/0\n'
        "ZeroDivisionError: division by zero"
    )
    told = fails(
        1,
        f"torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 1 terminated with the following error:\n{inner}",
    )
    assert cause_of(told).line == "raised in a child process ZeroDivisionError: division by zero"


def test_a_breakpoint_without_a_terminal() -> None:
    found = cause_of(fails(2, "bdb.BdbQuit: "))
    assert (found.line, found.advice.partition(":")[0]) == (
        "raised bdb.BdbQuit",
        "a breakpoint needs a terminal",
    )


# --- library messages: rules are written against one half of the collection and judged by the other -------------------


HALVES = {"learned": 0.98, "held_out": 0.95}


@pytest.mark.parametrize("half", HALVES)
def test_the_share_of_right_causes(half: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = messages(half)
    share = right_share(found)
    with capsys.disabled():
        print(f"\n{half}: {len(found)} messages, right cause {share:.3f}", *wrong(found), sep="\n")
    assert share >= HALVES[half]


def test_no_message_is_in_both_halves_and_each_has_a_cause_that_exists() -> None:
    halves = [messages(half) for half in HALVES]
    first, second = ({(each.failure.message, each.failure.stderr_tail) for each in half} for half in halves)
    assert not first & second
    assert {each.code for half in halves for each in half} <= set(verdict_texts())
