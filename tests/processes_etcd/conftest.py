"""Real etcd servers on loopback, alone or three together, and real agents that meet by them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes.agent_server import AgentServer
from tests.processes.conftest import JobFolder
from tests.support.limits import limit_s, until

READY_S = 30.0
LOOK_EVERY_S = 0.05
ETCD_MODULES = (
    "holdfast.runtime.leadership",
    "holdfast.rendezvous.etcd_stores",
    "etcd3gw",
)


class Etcd:
    """One or three servers; `kill(i)` ends one, `leader()` is its index. `tls`: how to ask servers that speak TLS."""

    def __init__(
        self, folder: Path, ports: list[tuple[int, int]], *more: str, tls: ssl.SSLContext | None = None
    ) -> None:
        self.folder = folder
        self.tls = tls
        self.scheme = "http" if tls is None else "https"
        self.ports = [client for client, _ in ports]
        cluster = ",".join(f"n{i}=http://127.0.0.1:{peer}" for i, (_, peer) in enumerate(ports))
        self.servers = [
            self._start(i, client, peer, "--initial-cluster", cluster, *more) for i, (client, peer) in enumerate(ports)
        ]
        until(
            lambda: all(self._healthy(port) for port in self.ports) or time.sleep(LOOK_EVERY_S),
            lambda: (folder / "n0.log").read_text()[-2000:],
            READY_S,
        )

    def _start(self, i: int, client: int, peer: int, *more: str) -> subprocess.Popen[bytes]:
        here, there = f"{self.scheme}://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        command = [
            *("etcd", "--name", f"n{i}", "--data-dir", str(self.folder / f"n{i}"), "--logger", "zap"),
            *("--listen-client-urls", here, "--advertise-client-urls", here),
            *("--listen-peer-urls", there, "--initial-advertise-peer-urls", there),
            *("--unsafe-no-fsync", *more),
        ]
        with (self.folder / f"n{i}.log").open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _healthy(self, port: int) -> bool:
        try:
            return b'"true"' in self._http(port, "/health")
        except (OSError, urllib.error.URLError):
            return False

    def _http(self, port: int, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"{self.scheme}://127.0.0.1:{port}{path}", data=body)
        direct = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.tls))
        with urllib.request.build_opener(*direct).open(request, timeout=limit_s(2)) as answer:
            return answer.read()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    @property
    def endpoints(self) -> str:
        return ";".join(f"127.0.0.1:{port}" for port in self.ports)

    def leader(self) -> int:
        for i, port in enumerate(self.ports):
            status: Any = json.loads(self._http(port, "/v3/maintenance/status", b"{}"))
            if status.get("leader") == status["header"]["member_id"]:
                return i
        raise AssertionError("no leader")

    def ctl(self, *args: str, api: str = "3") -> str:
        return subprocess.run(
            ["etcdctl", "--endpoints", f"http://{self.endpoint}", *args],
            env={**os.environ, "ETCDCTL_API": api},
            capture_output=True,
            text=True,
            timeout=limit_s(10),
            check=True,
        ).stdout

    def kill(self, i: int) -> None:
        self.servers[i].kill()
        self.servers[i].wait(limit_s(10))

    def close(self) -> None:
        for server in self.servers:
            server.send_signal(signal.SIGCONT)
            server.kill()
            server.wait(limit_s(10))


def serving(
    factory: pytest.TempPathFactory,
    free_port: Callable[[], int],
    count: int,
    *more: str,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Etcd]:
    if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
        pytest.skip("NOT TESTED: etcd-server and etcd-client are not installed (sh tools/debian.sh installs them)")
    made = Etcd(factory.mktemp("etcd"), [(free_port(), free_port()) for _ in range(count)], *more, tls=tls)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def etcd(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[Etcd]:
    """One server with both APIs."""
    more = ("--enable-v2=true", "--heartbeat-interval", "50", "--election-timeout", "500")
    yield from serving(tmp_path_factory, free_port, 1, *more)


@pytest.fixture
def etcd_without_v2(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[Etcd]:
    yield from serving(tmp_path_factory, free_port, 1)


@pytest.fixture
def etcd_cluster(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[Etcd]:
    """Three servers at etcd's own intervals."""
    yield from serving(tmp_path_factory, free_port, 3)


@pytest.fixture(scope="session")
def etcd_agent_server() -> Iterator[AgentServer]:
    made = AgentServer(*ETCD_MODULES)
    yield made
    made.close()


@pytest.fixture
def job_folder(tmp_path: Path, etcd_agent_server: AgentServer) -> Iterator[JobFolder]:
    made = JobFolder(tmp_path, etcd_agent_server)
    yield made
    made.close()
