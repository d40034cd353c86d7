"""What a node tells of its software when it joins: read from files, nothing imported, absent things left out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.protocol.options import CommandKind, WorkerCommand
from holdfast.supervisor.worker_command import backends_text, nccl_is_nccl2, node_versions
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


NCCL_BY_A_SWITCH = 'if os.environ.get("TORCH_DIST_USE_NCCL2") == "0":'
"""As in distributed_c10d.py of torch 2.15."""


@pytest.mark.parametrize(
    ("cuda", "source", "environ", "text"),
    [
        ("None", NCCL_BY_A_SWITCH, {}, "gloo (torch is built without GPUs)"),
        ("'12.6'", "", {"TORCH_DIST_USE_NCCL2": "0"}, "gloo on CPUs, nccl on GPUs"),
        (
            "'13.0'",
            NCCL_BY_A_SWITCH,
            {},
            "gloo on CPUs, nccl on GPUs, which is nccl2 (TORCH_DIST_USE_NCCL2=0 for nccl-legacy)",
        ),
        (
            "'13.0'",
            NCCL_BY_A_SWITCH,
            {"TORCH_DIST_USE_NCCL2": "0"},
            "gloo on CPUs, nccl on GPUs, which is nccl-legacy by TORCH_DIST_USE_NCCL2=0",
        ),
    ],
)
def test_which_backend_nccl_is(tmp_path: Path, cuda: str, source: str, environ: dict[str, str], text: str) -> None:
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    version = f"__version__ = '2.15.0'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    (tmp_path / "torch" / "version.py").write_text(version)
    (tmp_path / "torch" / "distributed" / "distributed_c10d.py").write_text(source)
    assert backends_text(["/nowhere", str(tmp_path)], environ) == text
    if cuda != "None":
        assert nccl_is_nccl2(["/nowhere", str(tmp_path)], environ) == ("which is nccl2" in text)


def test_without_torch_no_backend_is_named() -> None:
    assert backends_text(["/nowhere"], {}) == ""
    assert not nccl_is_nccl2(["/nowhere"], {})
