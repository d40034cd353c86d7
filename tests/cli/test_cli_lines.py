"""The line that the other nodes of a job have to be started with."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import pytest

from holdfast.cli.grammar import parse
from holdfast.cli.options import OPTIONS
from holdfast.cli.run import resolve

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def others(line: str, **environ: str) -> str:
    return resolve(parse(shlex.split(line), environ, OPTIONS), environ, "run").line_of_others


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        (
            "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:29400 train.py --lr '3 4'",
            {},
            "holdfast run --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a:29400 train.py --lr '3 4'",
        ),
        (
            "--rdzv-backend c10d train.py",
            {"PET_NNODES": "2:4", "PET_RDZV_ENDPOINT": "localhost:29400"},
            f"holdfast run --nnodes=2:4 --rdzv-backend=c10d --rdzv-endpoint={HERE}:29400 train.py",
        ),
        (
            "--nnodes 2 --node-rank 0 --local-addr 10.0.0.1 --master-addr a train.py",
            {},
            "holdfast run --nnodes=2 --master-addr=a --node-rank=1 train.py",
        ),
        (
            "--nnodes 2 --node-rank 1 --master-addr a train.py",
            {},
            "holdfast run --nnodes=2 --master-addr=a --node-rank=0 train.py",
        ),
        ("--nnodes 3 train.py", {}, f"holdfast run --nnodes=3 --node-rank=RANK --master-addr={HERE} train.py"),
    ],
)
def test_it_can_be_pasted(line: str, environ: dict[str, str], expected: str) -> None:
    assert others(line, **environ) == expected
    parse(shlex.split(expected.replace("RANK", "1"))[2:], {}, OPTIONS)


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        ("train.py", {}),
        ("--standalone --nnodes 1:2 train.py", {}),
        ("--nnodes 2 train.py", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),
    ],
)
def test_nobody_has_to_type_it(line: str, environ: dict[str, str]) -> None:
    assert others(line, **environ) == ""
