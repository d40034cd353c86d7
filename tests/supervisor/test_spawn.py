"""The command lines of workers."""

from __future__ import annotations

import py_compile
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.protocol.options import CommandKind, Endpoint, LogOptions, RunOptions, WorkerCommand
from holdfast.protocol.policy import JobSpec, Limits
from holdfast.supervisor.worker_command import BOOTSTRAP, bootstrap_for, is_bytecode_of, worker_argv


def argv(kind: CommandKind, target: str, *args: str, virtual: bool = False, **command: Any) -> list[str]:
    options = RunOptions(
        job=JobSpec(run_id="x", min_nodes=1, max_nodes=1, backend="c10d"),
        limits=Limits(),
        nproc=4,
        command=WorkerCommand(kind=kind, target=target, args=args, **command),
        logs=LogOptions(log_dir=None),
        endpoint=Endpoint(host="localhost", port=0),
        virtual_local_rank=virtual,
    )
    return worker_argv(options, 3)


def test_each_kind() -> None:
    python = {"python": "/opt/my python"}
    assert argv(CommandKind.SCRIPT, "t.py", "-u", **python) == [
        "/opt/my python",
        "-u",
        BOOTSTRAP,
        "script",
        "t.py",
        "-u",
    ]
    assert argv(CommandKind.MODULE, "a.b", "x") == [
        sys.executable,
        "-u",
        bootstrap_for(sys.executable),
        "module",
        "a.b",
        "x",
    ]
    assert argv(CommandKind.RUN_PATH, "t.py") == [sys.executable, bootstrap_for(sys.executable), "run_path", "t.py"]
    assert argv(CommandKind.PROGRAM, "prog", "x") == ["prog", "x"]


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("${local_rank}", "3"),
        ("out-$local_rank.txt", "out-3.txt"),
        ("$$", "$"),
        ("${rank} $ {", "${rank} $ {"),
        ("*.py; rm", "*.py; rm"),
    ],
)
def test_macros(given: str, seen: str) -> None:
    assert argv(CommandKind.PROGRAM, "prog", given)[1:] == [seen]
    assert argv(CommandKind.SCRIPT, given)[-1] == seen
    assert argv(CommandKind.PROGRAM, given) == [given]


def test_macros_name_the_real_local_rank_even_when_it_is_virtual() -> None:
    assert argv(CommandKind.PROGRAM, "prog", "$local_rank", virtual=True) == ["prog", "3"]


def test_legacy_local_rank_argument() -> None:
    line = argv(CommandKind.SCRIPT, "t.py", "a", local_rank_argument=True)
    assert line[-3:] == ["t.py", "--local-rank=3", "a"]


def test_bytecode_that_was_made_from_an_older_source_is_not_run(tmp_path: Path) -> None:
    source, cached = tmp_path / "program.py", tmp_path / "program.pyc"
    assert not is_bytecode_of(str(cached), str(source))
    source.write_text("1\n")
    py_compile.compile(str(source), str(cached), doraise=True)
    assert is_bytecode_of(str(cached), str(source))

    source.write_text("10\n")
    assert not is_bytecode_of(str(cached), str(source))
    cached.write_bytes(cached.read_bytes()[:10])
    assert not is_bytecode_of(str(cached), str(source))
