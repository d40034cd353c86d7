"""The server for whoever watches: bounded, in a thread of its own, answering while the agent's loop stands still."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from holdfast.core.errors import PortInUseError
from holdfast.core.options import Endpoint
from holdfast.runtime.observing import server as module
from holdfast.runtime.observing.server import HttpResponse, Server, bind
from tests.support.limits import limit_s

BIG = 50_000_000
"""Bytes; no buffer on the way has room for them."""


@pytest.fixture
def served() -> Iterator[Callable[[module.Pages], int]]:
    made: list[Server] = []

    def serve(pages: module.Pages) -> int:
        sock = bind(Endpoint(host="127.0.0.1", port=0), "--x")
        server = Server([(sock, pages)])
        server.start()
        made.append(server)
        port: int = sock.getsockname()[1]
        return port

    yield serve
    for server in made:
        server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-observing"]


def talk(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), limit_s(5)) as sock:
        sock.sendall(request)
        answer = b""
        while more := sock.recv(65536):
            answer += more
        return answer


def ok() -> HttpResponse:
    return HttpResponse(200, "text/plain", b"fine")


def test_get_and_head(served: Callable[[module.Pages], int]) -> None:
    port = served({"/a": ok})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/a?x=1", timeout=limit_s(5)) as answer:
        assert (answer.status, answer.read(), answer.headers["Content-Type"]) == (200, b"fine", "text/plain")
    head = talk(port, b"HEAD /a HTTP/1.1\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 4\r\n" in head
    assert head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /b HTTP/1.1\r\n\r\n", 404),
        (b"GET /a/../a HTTP/1.1\r\n\r\n", 404),
        (b"POST /a HTTP/1.1\r\n\r\n", 405),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /a FTP/1.1\r\n\r\n", 400),
        (b"\xff\x00\xfe\r\n\r\n", 400),
        (b"GET /" + b"a" * 3 * module.REQUEST_BYTES_MAX, 400),
    ],
)
def test_bad_requests(served: Callable[[module.Pages], int], request_: bytes, status: int) -> None:
    assert f" {status} ".encode() in talk(served({"/a": ok}), request_).partition(b"\r\n")[0]


def test_who_says_nothing_is_hung_up_on_and_keeps_nobody_waiting(
    served: Callable[[module.Pages], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_S_MAX", limit_s(0.1))
    port = served({"/a": ok})
    with socket.create_connection(("127.0.0.1", port), limit_s(5)) as silent:
        silent.sendall(b"GET /a")
        assert talk(port, b"GET /a HTTP/1.1\r\n\r\n").endswith(b"fine")
        assert silent.recv(1) == b""


def test_too_many_are_turned_away(served: Callable[[module.Pages], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 2)
    port = served({"/a": ok})
    silent = [socket.create_connection(("127.0.0.1", port), limit_s(5)) for _ in range(3)]
    assert silent[2].recv(1) == b""
    for sock in silent[:2]:
        sock.close()
    deadline = time.monotonic() + limit_s(5)
    answer = b""
    while not answer and time.monotonic() < deadline:
        try:
            answer = talk(port, b"GET /a HTTP/1.1\r\n\r\n")
        except ConnectionResetError:
            answer = b""
    assert answer.endswith(b"fine")
    silent[2].close()


def test_a_reader_that_stalls_is_cut_off(
    served: Callable[[module.Pages], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_S_MAX", limit_s(0.1))
    port = served({"/big": lambda: HttpResponse(200, "text/plain", b"x" * BIG), "/a": ok})
    with socket.create_connection(("127.0.0.1", port), limit_s(5)) as stalled:
        stalled.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert stalled.recv(1) == b"H"
        assert talk(port, b"GET /a HTTP/1.1\r\n\r\n").endswith(b"fine")
        time.sleep(3 * module.REQUEST_S_MAX)  # longer than anybody waits
        got = 1
        with contextlib.suppress(ConnectionResetError):
            while more := stalled.recv(1_000_000):
                got += len(more)
        assert got < BIG


def test_a_port_that_is_taken() -> None:
    first = bind(Endpoint(host="127.0.0.1", port=0), "--x")
    with pytest.raises(PortInUseError, match=r"--metrics: cannot listen on 127.0.0.1:\d+: Address already in use"):
        bind(Endpoint(host="127.0.0.1", port=first.getsockname()[1]), "--metrics")
    first.close()
    with pytest.raises(PortInUseError, match=r"cannot listen on no\.such\.host\.invalid"):
        bind(Endpoint(host="no.such.host.invalid", port=0), "--metrics")


def test_a_page_that_fails_is_told_to_who_asked(served: Callable[[module.Pages], int]) -> None:
    def broken() -> module.HttpResponse:
        raise KeyError("x")

    port = served({"/": broken})
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        text = client.makefile("rb").read()
    assert text.startswith(b"HTTP/1.1 500 ")
    assert text.endswith(b"KeyError: 'x'\n")
