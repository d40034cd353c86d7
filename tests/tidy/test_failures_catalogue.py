"""The catalogue of failures is well-formed, and what is told of a case is judged by its truth."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.harness import SCRIPTS
from benchmarks.rows.verdicts import Told
from benchmarks.scripts.failing import CASES, Case
from holdfast.diagnosis.reference import verdict_texts

CASE = Case("name", None, frozenset({1}), frozenset({"HF201"}), says="bad row", files={"train.py": ""})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_is_well_formed(case: Case) -> None:
    assert case.codes <= set(verdict_texts())
    assert case.culprits <= set(range(case.ranks * case.nodes))
    assert (case.body is None) == bool({"train.py", "train.sh"} & set(case.files))


def test_the_script_has_every_case_and_needs_no_torch_to_know_them() -> None:
    ask = "import sys; from failing import CASES; print(*CASES, 'torch' in sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", ask], cwd=SCRIPTS, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*CASES, "False"]


@pytest.mark.parametrize(
    ("verdict", "culprit", "cause"),
    [
        ({"code": "HF201", "cause": "it raised bad row", "culprit": {"rank": 1}}, True, True),
        ({"code": "HF201", "cause": "it raised KeyError", "culprit": {"rank": 0}}, False, False),
        ({"code": "HF205", "cause": "bad row", "culprit": None}, False, False),
        ({}, False, False),
    ],
)
def test_a_verdict_is_judged_by_the_truth(verdict: dict[str, object], culprit: bool, cause: bool) -> None:
    told = Told(CASE, verdict, 0.1)
    assert (told.culprit_right, told.cause_right) == (culprit, cause)


def test_where_nobody_is_to_blame_naming_somebody_is_wrong() -> None:
    nobody = replace(CASE, culprits=frozenset())
    assert Told(nobody, {"code": "HF306", "culprit": None}, 0.1).culprit_right
    assert not Told(nobody, {"code": "HF306", "culprit": {"rank": 0}}, 0.1).culprit_right
    assert not Told(nobody, {}, 0.1).culprit_right
