"""How a program that has loaded torch ends: the interpreter's last phase is left out, what comes before it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.worker import bootstrap
from tests.support.limits import limit_s

# A stand-in named torch: what counts for the bootstrap is that the module is loaded.
TORCH = ""
PROGRAM = """
import atexit, sys, threading, time
import torch

class Loud:
    def __del__(self):
        print("finalised", flush=True)

loud = Loud()
atexit.register(lambda: print("atexit"))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
sys.stdout.write("no newline")
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit(300)", 44, ""),
        ("sys.exit('why')", 1, "why\n"),
        ("sys.exit(['odd'])", 1, "['odd']\n"),
        ("sys.stdout.close(); sys.stdout = None; sys.exit(5)", 5, None),
    ],
)
def test_threads_exit_functions_and_buffers_are_honoured(tmp_path: Path, end: str, code: int, said: str | None) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end=end))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    done = subprocess.run(
        [sys.executable, bootstrap.__file__, "script", str(program)],
        capture_output=True,
        text=True,
        timeout=limit_s(60),
        env=environment,
    )
    assert done.returncode == code
    if said is None:
        return
    assert done.stderr == said
    assert done.stdout == "no newlinethread\natexit\n", "in the interpreter's order, and without its last phase"


def test_a_program_without_torch_ends_as_ever(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end="").replace("import torch", ""))
    done = subprocess.run(
        [sys.executable, bootstrap.__file__, "script", str(program)],
        capture_output=True,
        text=True,
        timeout=limit_s(60),
    )
    assert done.returncode == 0
    assert done.stdout == "no newlinethread\natexit\nfinalised\n"


def run(program: Path, source: str, *, line: str = bootstrap.__file__) -> subprocess.CompletedProcess[str]:
    program.write_text(source)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    environment["TORCHELASTIC_ERROR_FILE"] = str(program.parent / "error.json")
    return subprocess.run(
        [sys.executable, line, "script", str(program)],
        capture_output=True,
        text=True,
        timeout=limit_s(60),
        env=environment,
    )


def test_after_an_exception_the_last_phase_is_left_out_too(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    done = run(tmp_path / "program.py", PROGRAM.format(end="raise ValueError('no such batch')"))
    assert done.returncode == 1
    assert done.stdout == "no newlinethread\natexit\n"
    first, *_, last = done.stderr.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "ValueError: no such batch")
    assert "bootstrap" not in done.stderr
    assert "no such batch" in (tmp_path / "error.json").read_text()


def test_a_hook_of_the_program_that_fails_is_told_by_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    end = "def hook(*_): raise KeyError('hook')\nsys.excepthook = hook\nraise ValueError('no such batch')"
    done = run(tmp_path / "program.py", PROGRAM.format(end=end))
    assert done.returncode == 1
    assert "Error in sys.excepthook:" in done.stderr
    assert "ValueError: no such batch" in done.stderr


def test_a_module_of_the_program_in_the_way_changes_no_exception(tmp_path: Path) -> None:
    (tmp_path / "threading.py").write_text("")
    done = run(tmp_path / "program.py", "import threading\nraise ValueError('no such batch')")
    assert done.returncode == 1
    assert "ValueError: no such batch" in done.stderr.splitlines()
    assert "Error in sys.excepthook" not in done.stderr


NEVER = """
import atexit, sys, threading, time{torch}
def for_ever():
    while True:
        time.sleep(0.05)
{how}
raise ValueError("no such batch")
"""


@pytest.mark.parametrize("torch", ["", ", torch"], ids=["plain", "torch"])
@pytest.mark.parametrize("how", ["atexit.register(for_ever)", "threading.Thread(target=for_ever).start()"])
def test_what_never_ends_after_an_exception_is_told_and_ended(tmp_path: Path, how: str, torch: str) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    source = Path(bootstrap.__file__).read_text()
    hasty = source.replace("UNENDED_S = 5.0", "UNENDED_S = 0.5").replace("LEAVE_S = 15.0", "LEAVE_S = 1.0")
    assert hasty.count(" = 0.5") == hasty.count("LEAVE_S = 1.0") == 1
    (tmp_path / "hasty.py").write_text(hasty)
    done = run(tmp_path / "program.py", NEVER.format(how=how, torch=torch), line=str(tmp_path / "hasty.py"))
    assert done.returncode == 1
    assert "ValueError: no such batch" in done.stderr
    assert "raised an exception 0.5 s ago and has not ended: it is in " in done.stderr
    assert ("for_ever at program.py:" in done.stderr) == ("atexit.register" in how)
    assert "no such batch" in (tmp_path / "error.json").read_text()
