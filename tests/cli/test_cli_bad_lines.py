"""Bad input: one message with a code, exit 2, no traceback, nothing started."""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path

import pytest

from holdfast.cli import main
from tests.support.tables import tables

TABLES = tables(__file__)

BAD = TABLES["refused_lines"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "nothing_in_it").write_text("\n")
    (tmp_path / "empty").mkdir()


@pytest.mark.parametrize("plan", [True, False], ids=["plan", "run"])
@pytest.mark.parametrize(("line", "environ", "code", "said"), BAD)
def test_bad_input_is_one_message_and_exit_2(
    line: str,
    environ: dict[str, str],
    code: str,
    said: str,
    plan: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["run", *(["--plan"] if plan else []), *shlex.split(line)]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"holdfast: {code}: ")
    assert said in err
    assert err.count("\n") <= 2
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "required: --bind"),
        ("--bind 127.0.0.1", "names no port"),
        ("--bind 192.0.2.1:29500", "cannot listen at 192.0.2.1:29500: 192.0.2.1 is not an address of this machine"),
        ("--bind nowhere.invalid:29500", "nowhere.invalid does not resolve"),
        ("--bind localhost:TAKEN", "is already bound on this machine"),
        ("--bind localhost:0 --lease soon", "lease=soon: not a number of seconds"),
        ("--bind localhost:0 --token-file nothing_in_it", "the file is empty"),
    ],
)
def test_a_witness_that_cannot_begin(line: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["witness", *line.replace("TAKEN", port).split()]) == 2
    err = capfd.readouterr().err
    assert err.startswith("holdfast: HF1")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--log-dir", "/sub", "train.py"]) == 2
    assert "holdfast: HF108: --log-dir /sub: / is not writable" in capfd.readouterr().err
    (tmp_path / "train.py").chmod(0)
    assert main(["run", "train.py"]) == 2
    assert "cannot be read" in capfd.readouterr().err


@pytest.mark.parametrize("argv", [["x.py"], ["--log-dir", "logs", "-m", "x"]])
def test_a_current_folder_that_is_gone(argv: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert main(["run", *argv]) == 2
    assert "deleted" in capfd.readouterr().err
