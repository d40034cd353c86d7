"""`holdfast explain`: every code that can be printed is explained, offline; unknown ones name the nearest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from holdfast.cli import main, run_command
from holdfast.diagnosis.causes.find import advice, rules
from holdfast.diagnosis.reference import everything, headings, nearest, normal, search, verdict_texts

SOURCE = Path(__file__).resolve().parent.parent.parent / "src" / "holdfast"


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["explain", *arguments])
    told = capsys.readouterr()
    return status, told.out, told.err


@pytest.mark.parametrize("spelt", ["HF211", "hf211", "211", "HF211:"])
def test_a_code_is_found_however_it_is_spelt(spelt: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = explain(capsys, spelt)
    assert status == 0
    assert out.startswith("HF211: a module is missing\n")
    assert [word for word in ("  cause ", "  evidence ", "  fix ") if word not in out] == []
    assert max(map(len, out.splitlines())) <= 100


def test_several_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = explain(capsys, "HF306", "HF109")
    assert re.findall(r"^HF\d+", out, re.MULTILINE) == ["HF306", "HF109"]
    assert "exit code   2" in out


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = explain(capsys)
    assert status == 0
    listed = re.findall(r"^  (HF\d{3})  \S", out, re.MULTILINE)
    assert listed == sorted(everything())
    assert [f"{start}xx  {heading}" for start, heading in headings().items()] == re.findall(r"^HF.*", out, re.MULTILINE)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = explain(capsys, "--json", "HF216")
    (told,) = json.loads(out)
    assert (told["code"], told["name"]) == ("HF216", verdict_texts()["HF216"].name)
    assert "shm-size" in told["fix"]
    assert len(json.loads(explain(capsys, "--json")[1])) == len(everything())


def test_an_unknown_code_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = explain(capsys, "HF298")
    assert status == 2
    assert out == ""
    assert re.fullmatch(r"holdfast: HF101: no code 'HF298'; did you mean HF2\d\d \(.*\n", err)


def test_a_word_finds_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "HF208" in nearest("nccl")
    status, _, err = explain(capsys, "xyzzy")
    assert (status, len(err.splitlines())) == (2, 1)


def test_a_bad_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("explain", ["--jsn"]) == 2
    assert "holdfast: HF101:" in capsys.readouterr().err


def test_every_code_in_the_source_is_explained() -> None:
    files = [file for file in SOURCE.rglob("*.py") if "testing" not in file.parts]
    codes = {code for file in files for code in re.findall(r"\bHF\d{3}\b", file.read_text())}
    assert codes - set(everything()) == set()


def test_every_rule_and_advice_has_a_text() -> None:
    assert {rule.code for rule in rules()} | set(advice()) <= set(verdict_texts())


def test_texts_are_complete_and_differ() -> None:
    for code, each in everything().items():
        assert normal(code) == code
        assert all((each.name, each.cause, each.evidence, each.fix)), code
        assert "\n" not in each.name + each.cause + each.evidence + each.fix
    names = [text.name for text in verdict_texts().values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["exit code 137"], "HF203"),
        (["exit", "code", "137"], "HF203"),
        (["exit code 143"], "HF235"),
        (["signal 9"], "HF203"),
        (["out of memory"], "HF203"),
    ],
)
def test_words_are_searched_for(capsys: pytest.CaptureFixture[str], words: list[str], first: str) -> None:
    assert run_command("explain", words) == 0
    assert first in capsys.readouterr().out.splitlines()[0] or first in [each.code for each in search(" ".join(words))]
