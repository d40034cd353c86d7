"""The two launchers, side by side. torchrun is replayed, or imported once per test process (see fork_server.py)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beside_torchrun.beside import Launchers
from tests.beside_torchrun.recording import TORCH, Book, Mode
from tests.processes.agent_server import AgentServer

SERVER = Path(__file__).parent / "fork_server.py"


@pytest.fixture(scope="session")
def torchrun_mode(pytestconfig: pytest.Config) -> Mode:
    return Mode(pytestconfig.getoption("torchrun"))


@pytest.fixture(scope="session")
def torch_version(torchrun_mode: Mode) -> str:
    """Of the recording: the installed torch's when torchrun runs, ours when it is replayed."""
    if torchrun_mode is Mode.REPLAY:
        return TORCH
    torch = pytest.importorskip("torch")
    return str(torch.__version__.partition("+")[0])


@pytest.fixture(scope="session")
def live_torchrun(own_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the process that runs torchrun."""
    pytest.importorskip("torch")
    address = tmp_path_factory.mktemp("server") / "socket"
    with subprocess.Popen([sys.executable, SERVER, address], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "ready\n"
        yield str(address)
        server.kill()


@pytest.fixture(scope="session")
def torchrun_server(request: pytest.FixtureRequest, torchrun_mode: Mode) -> str:
    """The same where the mode asks for it; a recording needs none."""
    return "" if torchrun_mode is Mode.REPLAY else str(request.getfixturevalue("live_torchrun"))


@pytest.fixture(scope="module")
def torchrun_book(request: pytest.FixtureRequest, torchrun_mode: Mode, torch_version: str) -> Iterator[Book]:
    book = Book.read(torch_version, request.path.stem)
    yield book
    if torchrun_mode is Mode.RECORD:
        book.write(torch_version)


@pytest.fixture
def launchers(
    request: pytest.FixtureRequest,
    torchrun_mode: Mode,
    torchrun_book: Book,
    torchrun_server: str,
    agent_server: AgentServer,
    tmp_path: Path,
) -> Launchers:
    return Launchers(torchrun_mode, torchrun_book, request.node.name, tmp_path, torchrun_server, agent_server)


@pytest.fixture
def live_launchers(
    request: pytest.FixtureRequest, live_torchrun: str, agent_server: AgentServer, tmp_path: Path
) -> Launchers:
    """torchrun runs, whatever the mode, and has to do what is recorded of the installed version."""
    torch = pytest.importorskip("torch")
    book = Book.read(torch.__version__.partition("+")[0], request.path.stem)
    return Launchers(Mode.LIVE, book, request.node.name, tmp_path, live_torchrun, agent_server)
