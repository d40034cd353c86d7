"""The two launchers, side by side. torchrun is imported once per test process (see fork_server.py)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beside_torchrun.beside import Launchers

SERVER = Path(__file__).parent / "fork_server.py"


@pytest.fixture(scope="session")
def torchrun_server(own_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("torch")
    address = tmp_path_factory.mktemp("server") / "socket"
    with subprocess.Popen([sys.executable, SERVER, address], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield str(address)
        server.kill()


@pytest.fixture
def launchers(torchrun_server: str, tmp_path: Path) -> Launchers:
    return Launchers(torchrun_server, tmp_path)
