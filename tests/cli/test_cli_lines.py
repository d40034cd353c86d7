"""The line that the other nodes of a job have to be started with."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import pytest

from holdfast.cli.grammar import parse
from holdfast.cli.option_table import OPTIONS
from holdfast.cli.run import resolve
from tests.support.tables import tables

TABLES = tables(__file__)

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def others(line: str, **environ: str) -> str:
    return resolve(parse(shlex.split(line), environ, OPTIONS), environ, "run").line_of_others


@pytest.mark.parametrize(("line", "environ", "expected"), TABLES["pasted"])
def test_it_can_be_pasted(line: str, environ: dict[str, str], expected: str) -> None:
    assert others(line, **environ) == expected
    parse(shlex.split(expected.replace("RANK", "1"))[2:], {}, OPTIONS)


@pytest.mark.parametrize(("line", "environ"), TABLES["typed"])
def test_nobody_has_to_type_it(line: str, environ: dict[str, str]) -> None:
    assert others(line, **environ) == ""
