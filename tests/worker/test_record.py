"""Our `record`, torch's `record`, and the bootstrap: one format, one file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.worker import bootstrap
from holdfast.worker.record import record
from tests.support.limits import limit_s
from tests.warm import Warm

SCRIPT = """
import sys
{decorator}
def main(*args):
    raise ValueError("bad \\u00fc")
main()
"""


def run(warm: Warm, folder: Path, decorator: str, *, plainly: bool = False) -> dict[str, Any]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(decorator=decorator), encoding="utf-8")
    file = folder / "error.json"
    file.unlink(missing_ok=True)
    command = [str(script)] if plainly else [bootstrap.__file__, "script", str(script)]
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)}
    done = warm.run(command, env=env)
    assert done.returncode == 1, done.stderr
    assert done.stderr.endswith("ValueError: bad \u00fc\n"), done.stderr
    return json.loads(file.read_text())


def frames(data: dict[str, Any]) -> list[str]:
    """Names of the functions in the recorded traceback."""
    lines = data["message"]["extraInfo"]["py_callstack"].splitlines()
    return [line.rpartition(" in ")[2] for line in lines if line.startswith("  File ")]


def form(data: Any) -> Any:
    """Keys, their order, and types."""
    return [(key, form(value)) for key, value in data.items()] if isinstance(data, dict) else type(data)


@pytest.mark.xdist_group("torch examples")  # one warm process for all
def test_all_write_what_torch_writes(warm: Warm, tmp_path: Path) -> None:
    torchs = "from torch.distributed.elastic.multiprocessing.errors import record\n@record"
    ours = "from holdfast.worker.record import record\n@record"
    by_torch = run(warm, tmp_path, torchs, plainly=True)
    assert frames(by_torch) == ["wrapper", "main"]
    by_torch_under_bootstrap = run(warm, tmp_path, torchs)
    by_ours = run(warm, tmp_path, ours, plainly=True)
    by_ours_under_bootstrap = run(warm, tmp_path, ours)
    by_bootstrap = run(warm, tmp_path, "")
    # The first that sees the exception writes, and it alone.
    assert frames(by_torch_under_bootstrap) == ["wrapper", "main"]
    assert frames(by_ours) == frames(by_ours_under_bootstrap) == ["recorded", "main"]
    assert frames(by_bootstrap) == ["<module>", "main"]
    for data in (by_torch_under_bootstrap, by_ours, by_ours_under_bootstrap, by_bootstrap):
        assert form(data) == form(by_torch)
        assert data["message"]["message"] == by_torch["message"]["message"] == "ValueError: bad \u00fc"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def test_the_result_and_the_name_are_kept() -> None:
    @record
    def bare(number: int) -> int:
        """Text."""
        return number + 1

    @record()
    def called(number: int) -> int:
        return number + 2

    assert (bare(1), called(1)) == (2, 3)
    assert (bare.__name__, bare.__doc__) == ("bare", "Text.")


@pytest.mark.parametrize("end", [SystemExit(3), SystemExit(None), SystemExit("text"), KeyboardInterrupt()])
def test_other_ends_pass_unrecorded(file: Path, end: BaseException) -> None:
    @record
    def main() -> None:
        raise end

    with pytest.raises(type(end)):
        main()
    assert not file.exists()


def test_exit_0_becomes_a_return(file: Path) -> None:
    @record
    def main() -> None:
        sys.exit(0)

    assert main() is None
    assert not file.exists()


@pytest.mark.parametrize("path", [None, "", "/no/such/folder/error.json"])
def test_the_exception_passes_without_a_file(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if path is not None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)

    @record
    def main() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        main()


def test_a_failure_of_torchs_launcher_is_passed_on(file: Path, tmp_path: Path) -> None:
    class Failure:
        error_file = str(tmp_path / "child.json")
        exitcode = -9

    class ChildFailedError(Exception):
        def get_first_failure(self) -> tuple[int, Failure]:
            return 0, Failure()

    (tmp_path / "child.json").write_text(json.dumps({"message": {"message": "E: x", "extraInfo": {}}}))

    @record
    def main() -> None:
        raise ChildFailedError

    with pytest.raises(ChildFailedError):
        main()
    assert json.loads(file.read_text())["message"] == {"message": "E: x", "extraInfo": {}, "errorCode": -9}


# --- a signal handler of the program raises while the error file is written -------------------------------------------


INTERRUPTED = """
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
    script.write_text(INTERRUPTED)
    line = [sys.executable, bootstrap.__file__, "script", str(script)]
    done = subprocess.run(
        line, env={"TORCHELASTIC_ERROR_FILE": str(error_file)}, capture_output=True, timeout=limit_s(60)
    )
    assert done.returncode == 1
    assert "Told" in json.loads(error_file.read_text())["message"]["message"]


def test_the_next_attempt_writes_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    recorder, attempts, text_of = bootstrap._Recorder(), [], bootstrap._error_file_text

    def interrupted(*arguments) -> str:
        attempts.append(signal.SIGCHLD)
        if len(attempts) == 1:
            raise RuntimeError("DataLoader worker (pid 4711) exited unexpectedly")
        return text_of(*arguments)

    monkeypatch.setattr(bootstrap, "_error_file_text", interrupted)
    recorder.record(ValueError("the batch is empty"))
    assert len(attempts) == 2
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: the batch is empty"
