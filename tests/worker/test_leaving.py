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
