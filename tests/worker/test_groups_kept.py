"""A gloo group of a script that knows nothing of holdfast is not destructed: torch's destructor may hang for ever."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.core import board as layout
from holdfast.runtime.workers.board import Board
from holdfast.runtime.workers.preload import BOOTSTRAP
from tests.support.limits import limit_s

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

PROGRAM = """
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
    pytest.importorskip("torch")
    script = tmp_path / "program.py"
    script.write_text(REAL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert run(script, env) == (0, "True True\n")


def run(script: Path, environ: Mapping[str, str]) -> tuple[int, str]:
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
    script.write_text(textwrap.dedent(PROGRAM).format(backend=backend, end=end))
    env: dict[str, str] = {}
    if preloaded:  # as in a worker that is forked from where torch has been imported
        (tmp_path / "sitecustomize.py").write_text("import torch.distributed\n")
        env["PYTHONPATH"] = str(tmp_path)
    assert run(script, env) == (0, said)
