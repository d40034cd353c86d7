"""`holdfast doctor` as a command: the line of a run, bad lines, JSON, exit codes, and that nothing heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import main

FAKE_TORCH = """
__version__ = "9.9.0"
class distributed:
    is_available = staticmethod(lambda: True)
    is_gloo_available = staticmethod(lambda: True)
class version:
    cuda = None
"""


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return package / "__init__.py"


def told(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object]]:
    code = main(["doctor", "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["--nnodes", "two"], "HF103", "--nnodes two"),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:b:c"], "HF105", "a:b:c"),
        (["--timeout", "0"], "HF101", "--timeout 0.0"),
        (["--timeout", "soon"], "HF101", "not a number"),
        (["--all-reduce", "maybe"], "HF101", "auto, off"),
        (["--nproc-per-node", "0"], "HF104", "at least 1"),
        (["--no-such-option"], "HF101", "--no-such-option is not an option"),
        (["--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "a"], "HF106", "to a port of one of them"),
        (["--nnodes", "2", "--rdzv-backend", "c10", "--rdzv-endpoint", "a"], "HF106", "did you mean"),
    ],
)
def test_a_bad_line_is_one_message_and_exit_code_2(
    argv: list[str], code: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"holdfast: {code}: ")
    assert text in err


def test_help_names_its_own_options_and_those_of_a_run_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    out = capsys.readouterr().out
    for name in ("--timeout", "--all-reduce", "--json", "--nnodes", "--rdzv-endpoint", "--rdzv-id", "--master-addr"):
        assert f"  {name} " in out
    assert "--tee" not in out


def test_the_line_of_a_run_is_taken_as_it_is_and_its_script_is_not_started(
    fake_torch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    line = ["--standalone", "--nproc-per-node", "2", "--tee", "3", "--max-restarts=3", str(script), "--epochs", "3"]
    code, document = told(line, capsys)
    assert code == document["exit_code"]
    assert code in (0, 10, 20)
    assert document["facts"]["nproc"] == 2  # type: ignore[index]
    assert document["facts"]["torch"]["version"] == "9.9.0"  # type: ignore[index]
    assert not (tmp_path / "ran").exists()


def test_a_torch_that_crashes_is_fatal_and_the_doctor_lives(
    fake_torch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_torch.write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert main(["doctor"]) == 30
    out = capsys.readouterr().out
    assert "FATAL torch                HF501 cannot be imported: its process ended with -11" in out
    assert out.splitlines()[-1].startswith("fatal: ")


def test_a_port_that_is_held_is_a_reason_to_try_again(
    fake_torch: Path, free_port, capsys: pytest.CaptureFixture[str]
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as held:
        endpoint = f"127.0.0.1:{held.getsockname()[1]}"
        code, document = told(["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint], capsys)
    assert code == 20
    findings = document["findings"]
    assert isinstance(findings, list)
    (found,) = [each for each in findings if each["code"] == "HF538"]
    assert found["level"] == "retry"


def test_a_log_folder_that_cannot_be_written_is_fatal(
    fake_torch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    code, document = told(["--log-dir", str(tmp_path / "file" / "runs")], capsys)
    assert code == 30
    assert "Not a directory" in json.dumps(document["findings"])


def test_the_doctor_imports_no_torch() -> None:
    code = "import sys; from holdfast.cli import main; main(['doctor', '--json']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
