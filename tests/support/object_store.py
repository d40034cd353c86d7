"""A real S3 server (moto's) in its own process, and a proxy before it that fails on request."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from holdfast.train.snapshots.remote import location_of
from tests.support.limits import limit_s, until
from tests.support.ports import free_port

BUCKET = "bucket"
SECRET = "not-to-be-written-anywhere"
Fault = Callable[[str, str], str]
"""Method and path of a request → "" (pass on), "slow down" (503), "cut" (no answer, nothing done), "cut after" (done,
no answer), "slow"."""
SLOW_S = 0.1
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class ObjectStore:
    """The server; `environ` is what a job needs to reach it."""

    def __init__(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
        until(self._up, "moto's server answers")
        self.request("PUT", f"/{BUCKET}")

    def _up(self) -> bool:
        with contextlib.suppress(OSError):
            return self.request("GET", "/moto-api/data.json") == 200
        return False

    def request(self, method: str, path: str) -> int:
        """Its status."""
        link = http.client.HTTPConnection("127.0.0.1", self.port)
        with contextlib.closing(link):
            link.request(
                method, path, headers={"Authorization": "AWS4-HMAC-SHA256 Credential=a/b/us-east-1/s3/aws4_request"}
            )
            return link.getresponse().status

    def environ(self, port: int = 0) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running_store() -> Iterator[ObjectStore]:
    """The server, while fsspec's thread runs in this process: both outlive one test, so this is of a module."""
    store = ObjectStore()
    try:
        with variables(store.environ()):
            location_of(f"s3://{BUCKET}/none").sizes()
            forget_connections()
        yield store
    finally:
        store.close()


GOOGLE = """
import sys, time
from gcp_storage_emulator.server import create_server
create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket="bucket").start()
time.sleep(3600)
"""


@contextlib.contextmanager
def emulator(protocol: str) -> Iterator[dict[str, str]]:
    """Google's or Azure's store, where its driver and its emulator are installed; otherwise the test is skipped. Yields
    the variables for it."""
    port = free_port()
    at = f"http://127.0.0.1:{port}"
    if protocol == "gs":
        pytest.importorskip("gcsfs", reason="pip install 'holdfast[remote]' gcp-storage-emulator")
        pytest.importorskip("gcp_storage_emulator", reason="pip install gcp-storage-emulator")
        command = [sys.executable, "-c", GOOGLE, str(port)]
        given = {"STORAGE_EMULATOR_HOST": at, "FSSPEC_GS_TOKEN": "anon"}
    else:
        blob = pytest.importorskip("azure.storage.blob", reason="pip install 'holdfast[remote]'")
        if not (found := shutil.which("azurite-blob")):
            pytest.skip("npm install azurite, and azurite-blob on the PATH")
        command = [found, "--inMemoryPersistence", "--blobPort", str(port), "--silent", "--skipApiVersionCheck"]
        account = f"AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};BlobEndpoint={at}/devstoreaccount1;"
        given = {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{account}"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: _listens(port), "the emulator listens")
        if protocol == "az":
            blob.BlobServiceClient.from_connection_string(*given.values()).create_container(BUCKET)
        yield given
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Known to everybody: https://learn.microsoft.com/azure/storage/common/storage-use-azurite"""


class FaultyProxy:
    """Passes requests on, or fails as `fault` says. `seen`: methods and paths."""

    def __init__(self, store: ObjectStore, fault: Fault = lambda method, path: "") -> None:
        self.fault = fault
        self.seen: list[tuple[str, str]] = []
        self._open: set[socket.socket] = set()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                proxy._open.add(self.connection)

            def finish(self) -> None:
                proxy._open.discard(self.connection)
                with contextlib.suppress(OSError):
                    super().finish()

            def _serve(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                if len(body := self.rfile.read(size)) < size:
                    return self._cut()  # the client has gone
                proxy.seen.append((self.command, self.path))
                fault = proxy.fault(self.command, self.path)
                if fault == "cut":
                    return self._cut()
                if fault == "slow down":
                    return self._answer(503, {}, SLOW_DOWN)
                if fault == "slow":
                    time.sleep(SLOW_S)
                link = http.client.HTTPConnection("127.0.0.1", store.port, timeout=limit_s(10))
                with contextlib.closing(link):
                    del self.headers["Expect"]  # answered here
                    link.request(self.command, self.path, body, dict(self.headers.items()))
                    got = link.getresponse()
                    answer = got.read()
                    headers = {name: value for name, value in got.getheaders() if name.lower() not in HOP}
                    if self.command == "HEAD":
                        headers["Content-Length"] = got.headers.get("Content-Length", "0")
                if fault == "cut after":
                    return self._cut()
                return self._answer(got.status, headers, answer)

            def _cut(self) -> None:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)

            def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if "Content-Length" not in headers:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815 - http.server's names

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # `server_close` joins them
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()


HOP = ("content-length", "connection", "transfer-encoding", "date", "server")
"""Headers of one connection."""


@contextlib.contextmanager
def variables(given: dict[str, str]) -> Iterator[None]:
    """These variables in this process's environment."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def forget_connections() -> None:
    """Close this process's connections to object stores; the next use makes new ones."""
    import fsspec
    from s3fs import S3FileSystem

    for each in list(S3FileSystem._cache.values()):
        if each._s3 is not None:
            fsspec.asyn.sync(each.loop, each._s3.close)
    S3FileSystem.clear_instance_cache()


SAVES = """
import json, os, signal, sys
import s3fs  # once for all children; not used before they are forked
from holdfast.train.snapshots import remote
from holdfast.train.snapshots.remote import RemotePath
from tests.train.snapshots import saves
remote.PART_BYTES = 5 << 20
def save(url, step, phase, items):
    parts = 0
    def at(reached):
        if reached == phase:
            os.kill(os.getpid(), signal.SIGKILL)
    ask = RemotePath._ask
    def counted(self, request):
        nonlocal parts
        answer = ask(self, request)
        if isinstance(answer, dict) and "ETag" in answer and "PartNumber" not in answer:
            parts += 1
            at(f"part {parts}")
        return answer
    RemotePath._ask = counted
    saves.save(url, step, items=items, at=at)
for line in sys.stdin:
    url, step, phase, items, after_s = json.loads(line)
    pid = os.fork()
    if pid == 0:
        if after_s:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, after_s)
        try:
            save(url, step, phase, items)
        finally:
            sys.stdout.flush()
            os._exit(0)
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])), flush=True)
"""


class Saves:
    """Saves, each in a process of its own that kills itself in a phase, or after some seconds."""

    def __init__(self, environ: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", SAVES], stdin=pipe, stdout=pipe, text=True, env={**os.environ, **environ}
        )

    def run(self, url: str, step: int, phase: str = "", *, items: int = 300_000, after_s: float = 0.0) -> int:
        """The exit status: -9 when it was killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([url, step, phase, items, after_s]) + "\n")
        self._process.stdin.flush()
        status: int = json.loads(self._process.stdout.readline())
        return status

    def close(self) -> None:
        self._process.communicate()
