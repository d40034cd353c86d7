"""What a node tells of its software when it joins: read from files, nothing imported, absent things left out."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.protocol.options import CommandKind, WorkerCommand
from holdfast.supervisor.worker_command import node_versions
from holdfast.version import __version__

TORCH = "from typing import Optional\n__all__ = []\n__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\ngit_version = 'x'\n"
NCCL = '#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 3\n#define NCCL_SUFFIX ""\n'


def command(target: Path | str, kind: CommandKind = CommandKind.SCRIPT, python: str = "") -> WorkerCommand:
    return WorkerCommand(kind=kind, target=str(target), python=python)


def job_folder(folder: Path) -> str:
    (folder / "torch").mkdir()
    (folder / "torch" / "version.py").write_text(TORCH)
    (folder / "nvidia" / "nccl" / "include").mkdir(parents=True)
    (folder / "nvidia" / "nccl" / "include" / "nccl.h").write_text(NCCL)
    return str(folder)


def test_all_there_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    found = node_versions(command(script), ["/nowhere", job_folder(tmp_path)])
    assert found.pop("script")
    assert found.pop("arguments")
    assert found == {
        "holdfast": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": "2.13.0+cu128",
        "cuda": "12.8",
        "nccl": "2.27.3",
    }


def test_another_byte_is_another_script(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("lr = 0.1\n")
    other.write_text("lr = 0.2\n")
    hashes = {node_versions(command(each), [])["script"] for each in (one, other, one)}
    assert len(hashes) == 2


def test_another_argument_is_another_line(tmp_path: Path) -> None:
    lines = [
        WorkerCommand(kind=CommandKind.SCRIPT, target="train.py", args=args) for args in ((), ("a b",), ("a", "b"))
    ]
    lines += [
        command("train", CommandKind.MODULE),
        command("train", CommandKind.PROGRAM),
        command("test", CommandKind.MODULE),
    ]
    assert len({node_versions(line, [])["arguments"] for line in lines}) == len(lines)


def test_what_is_not_there_is_left_out(tmp_path: Path) -> None:
    found = node_versions(command(tmp_path / "gone.py"), [str(tmp_path)])
    assert set(found) == {"holdfast", "python", "arguments"}


def test_another_interpreter_is_not_guessed_at(tmp_path: Path) -> None:
    assert "torch" not in node_versions(command("train.py", python="/usr/bin/other"), [job_folder(tmp_path)])


def test_nothing_is_imported() -> None:
    before = set(sys.modules)
    node_versions(command(__file__))
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] in ("torch", "importlib")}
