"""The error file is written although a signal handler of the program raises meanwhile, as torch's for loader workers does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from holdfast.worker import bootstrap
from tests.support.limits import limit_s

SCRIPT = """
import os, signal
def handler(signum, frame):
    raise RuntimeError("DataLoader worker (pid 4711) exited unexpectedly")
signal.signal(signal.SIGCHLD, handler)
class Told(ConnectionResetError):
    times = 0
    def __str__(self):
        Told.times += 1
        if Told.times == 2:
            os.kill(os.getpid(), signal.SIGCHLD)
            for _ in range(1000): pass
        return "the pipe is gone"
raise Told()
"""


def test_a_handler_that_raises_while_it_is_written(tmp_path: Path) -> None:
    script, error_file = tmp_path / "train.py", tmp_path / "error.json"
    script.write_text(SCRIPT)
    line = [sys.executable, bootstrap.__file__, "script", str(script)]
    done = subprocess.run(
        line, env={"TORCHELASTIC_ERROR_FILE": str(error_file)}, capture_output=True, timeout=limit_s(60)
    )
    assert done.returncode == 1
    assert "Told" in json.loads(error_file.read_text())["message"]["message"]


def test_the_next_attempt_writes_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    recorder, attempts, write = bootstrap._Recorder(), [], bootstrap.write_error_file

    def interrupted(*arguments) -> None:
        attempts.append(signal.SIGCHLD)
        if len(attempts) == 1:
            raise RuntimeError("DataLoader worker (pid 4711) exited unexpectedly")
        write(*arguments)

    monkeypatch.setattr(bootstrap, "write_error_file", interrupted)
    recorder.record(ValueError("the batch is empty"))
    assert len(attempts) == 2
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: the batch is empty"
