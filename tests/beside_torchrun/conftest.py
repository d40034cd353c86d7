"""The two launchers, side by side. torchrun is replayed, or imported once per test process (see agent_server.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beside_torchrun.beside import Launchers
from tests.beside_torchrun.installed import alone_at_the_default_port
from tests.beside_torchrun.recording import TORCH, Book, Mode
from tests.processes.agent_server import AgentServer

MODULES = ("torch.distributed.run", "torch.distributed.launch")


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
def live_torchrun(own_home: Path) -> Iterator[AgentServer]:
    """The process that runs torchrun."""
    pytest.importorskip("torch")
    made = AgentServer(modules=MODULES)
    yield made
    made.close()


@pytest.fixture(scope="session")
def torchrun_server(request: pytest.FixtureRequest, torchrun_mode: Mode) -> AgentServer | None:
    """The same where the mode asks for it; a recording needs none."""
    return None if torchrun_mode is Mode.REPLAY else request.getfixturevalue("live_torchrun")


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
    torchrun_server: AgentServer | None,
    agent_server: AgentServer,
    tmp_path: Path,
    own_home: Path,
) -> Iterator[Launchers]:
    with alone_at_the_default_port(torchrun_mode, own_home.parent.parent):
        yield Launchers(torchrun_mode, torchrun_book, request.node.name, tmp_path, torchrun_server, agent_server)


@pytest.fixture
def live_launchers(
    request: pytest.FixtureRequest,
    live_torchrun: AgentServer,
    agent_server: AgentServer,
    tmp_path: Path,
    own_home: Path,
) -> Iterator[Launchers]:
    """torchrun runs, whatever the mode, and has to do what is recorded of the installed version."""
    torch = pytest.importorskip("torch")
    book = Book.read(torch.__version__.partition("+")[0], request.path.stem)
    with alone_at_the_default_port(Mode.LIVE, own_home.parent.parent):
        yield Launchers(Mode.LIVE, book, request.node.name, tmp_path, live_torchrun, agent_server)
