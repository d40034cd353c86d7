"""How a program that has loaded torch ends: the interpreter's last phase is left out, what comes before it is not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.protocol import board_layout as layout
from holdfast.supervisor.board import Board
from holdfast.supervisor.worker_command import BOOTSTRAP
from holdfast.worker import bootstrap
from tests.support.limits import limit_s

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
    done = run(tmp_path, PROGRAM.format(end=end))
    assert done.returncode == code
    if said is None:
        return
    assert done.stderr == said
    assert done.stdout == "no newlinethread\natexit\n", "in the interpreter's order, and without its last phase"


def test_a_program_without_torch_ends_as_ever(tmp_path: Path) -> None:
    done = run(tmp_path, PROGRAM.format(end="").replace("import torch", ""))
    assert done.returncode == 0
    assert done.stdout == "no newlinethread\natexit\nfinalised\n"


def run(folder: Path, source: str, *, line: str = bootstrap.__file__) -> subprocess.CompletedProcess[str]:
    """A program under the bootstrap; `torch` is an empty module: what counts for the bootstrap is that it is loaded."""
    (folder / "torch.py").touch()
    program = folder / "program.py"
    program.write_text(source)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    environment["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
    return subprocess.run(
        [sys.executable, line, "script", str(program)],
        capture_output=True,
        text=True,
        timeout=limit_s(60),
        env=environment,
    )


def test_after_an_exception_the_last_phase_is_left_out_too(tmp_path: Path) -> None:
    done = run(tmp_path, PROGRAM.format(end="raise ValueError('no such batch')"))
    assert done.returncode == 1
    assert done.stdout == "no newlinethread\natexit\n"
    first, *_, last = done.stderr.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "ValueError: no such batch")
    assert "bootstrap" not in done.stderr
    assert "no such batch" in (tmp_path / "error.json").read_text()


def test_a_hook_of_the_program_that_fails_is_told_by_the_interpreter(tmp_path: Path) -> None:
    end = "def hook(*_): raise KeyError('hook')\nsys.excepthook = hook\nraise ValueError('no such batch')"
    done = run(tmp_path, PROGRAM.format(end=end))
    assert done.returncode == 1
    assert "Error in sys.excepthook:" in done.stderr
    assert "ValueError: no such batch" in done.stderr


def test_a_module_of_the_program_in_the_way_changes_no_exception(tmp_path: Path) -> None:
    (tmp_path / "threading.py").write_text("")
    done = run(tmp_path, "import threading\nraise ValueError('no such batch')")
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
    source = Path(bootstrap.__file__).read_text()
    hasty = source.replace("END_REPORT_S = 5.0", "END_REPORT_S = 0.5").replace("END_S_MAX = 15.0", "END_S_MAX = 1.0")
    assert hasty.count(" = 0.5") == hasty.count("END_S_MAX = 1.0") == 1
    (tmp_path / "hasty.py").write_text(hasty)
    done = run(tmp_path, NEVER.format(how=how, torch=torch), line=str(tmp_path / "hasty.py"))
    assert done.returncode == 1
    assert "ValueError: no such batch" in done.stderr
    assert "raised an exception 0.5 s ago and has not ended: it is in " in done.stderr
    assert ("for_ever at program.py:" in done.stderr) == ("atexit.register" in how)
    assert "no such batch" in (tmp_path / "error.json").read_text()


# --- a gloo group of the program is not destructed: torch's destructor may hang for ever ------------------------------


# torch's names, and a group whose end can be seen.
C10D = """
import os

class ProcessGroup:
    def __del__(self):
        os.write(1, b"destructed ")

class World:
    default_pg = None
    pg_map = {}

_world = World()

def _update_default_pg(pg):
    _world.default_pg = pg

def new_group(backend="gloo"):
    group = ProcessGroup()
    _world.pg_map[group] = (backend, None)
    return group

def init_process_group(backend="gloo"):
    _update_default_pg(new_group(backend))

def destroy_process_group():
    _update_default_pg(None)
    _world.pg_map.clear()
"""

GLOO_PROGRAM = """
import os
import torch.distributed as dist

class Reducer:
    def __init__(self, group):
        self.group = group

def main():
    dist.init_process_group({backend!r})
    reducer = Reducer(dist._world.default_pg)
    other = dist.new_group({backend!r})
    {end}

main()
os.write(1, b"end")
"""


REAL = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
before = len(os.listdir("/proc/self/task"))
dist.destroy_process_group()
print(before > 1, len(os.listdir("/proc/self/task")) == before)
"""


@pytest.mark.xdist_group("torch jobs")
def test_torchs_own_gloo_group_keeps_its_threads(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(REAL)
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    assert run_gloo(script, env) == (0, "True True\n")


def run_gloo(script: Path, environ: Mapping[str, str]) -> tuple[int, str]:
    board = Board(1)
    try:
        env = {"PATH": "/usr/bin:/bin", layout.BOARD_VARIABLE: board.address(0), **environ}
        line = [sys.executable, BOOTSTRAP, "script", str(script)]
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=limit_s(100))
    finally:
        board.close()
    return done.returncode, done.stdout


@pytest.mark.parametrize("preloaded", [False, True], ids=["imported", "preloaded"])
@pytest.mark.parametrize(
    ("backend", "end", "said"),
    [
        ("gloo", "dist.destroy_process_group()", "end"),
        ("cpu:gloo,cuda:nccl", "dist.destroy_process_group()", "end"),
        ("nccl", "dist.destroy_process_group()", "destructed destructed end"),
        ("gloo", "dist._world.pg_map.clear(); dist._world.default_pg = None", "destructed end"),
    ],
)
def test_only_groups_without_threads_are_destructed(
    tmp_path: Path, backend: str, end: str, said: str, preloaded: bool
) -> None:
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (package / "__init__.py").write_text("from .distributed_c10d import *\nfrom .distributed_c10d import _world\n")
    (package / "distributed_c10d.py").write_text(C10D)
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(GLOO_PROGRAM).format(backend=backend, end=end))
    env: dict[str, str] = {}
    if preloaded:  # as in a worker that is forked from where torch has been imported
        (tmp_path / "sitecustomize.py").write_text("import torch.distributed\n")
        env["PYTHONPATH"] = str(tmp_path)
    assert run_gloo(script, env) == (0, said)
