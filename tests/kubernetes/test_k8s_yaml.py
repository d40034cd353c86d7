"""What is written by ruamel.yaml (YAML 1.2) is read by PyYAML (1.1, as kubectl does)."""

from __future__ import annotations

import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cli import main
from holdfast.schedulers.kubernetes import Noted, documents

MEANINGFUL = (
    "yes No ON off true null ~ y n 1 1_0 0x1F 1e3 1:30 .inf -1 - -- --- ... 2001-01-01 = << * & ! % @ ` a:b a: #x"
)
AWKWARD = ["", " a", "a ", "a #b", "a: b", "\x7f", "\x85", "\u2028", "\ufeff", "\U0001f600", '"', "\\", "a\nb\t\r\0"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from([*MEANINGFUL.split(), *AWKWARD])
SCALARS = st.none() | st.booleans() | st.integers() | TEXTS
QUIETLY = settings(deadline=None, max_examples=60)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=10
)


@QUIETLY
@given(VALUES)
def test_what_is_written_is_read(value: object) -> None:
    assert list(yaml.safe_load_all(documents([value]))) == [value]


@QUIETLY
@given(st.lists(st.dictionaries(TEXTS, SCALARS, min_size=1, max_size=3), min_size=2, max_size=3), TEXTS)
def test_several_documents_under_a_comment(values: list[object], head: str) -> None:
    assert list(yaml.safe_load_all(documents(values, head.replace("\x00", "")))) == values


def test_comments_stand_above_what_they_are_about() -> None:
    text = documents(
        [{"a": Noted(1, "one\ntwo"), "b": [Noted({"c": 1, "d": Noted([2], "in it")}, "item"), Noted("x", "y")]}]
    )
    assert (
        text
        == """\
# one
# two
a: 1
b:
  # item
  - c: 1
    # in it
    d:
      - 2
  # y
  - x
"""
    )


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError):
        documents([{"a": 1.5}])


def test_without_the_library_its_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    assert main(["submit", "--k8s", "--nodes", "2", "--image", "i", "train.py"]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.splitlines()[-1] == (
        "holdfast: HF117: holdfast submit --k8s needs ruamel.yaml: pip install 'holdfast[k8s]'"
    )
