"""A server that goes away in the middle of a call is asked again later; it is no reason to end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.protocol.errors import EtcdUnreachableError
from holdfast.protocol.options import Endpoint, EtcdOptions
from holdfast.rendezvous.etcd import open_api


@contextmanager
def closing(answer: bytes) -> Iterator[Endpoint]:
    """Says this much to everybody, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if not connection.recv(65536):  # an empty one ends it
                        return
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        place = listener.getsockname()
        try:
            yield Endpoint(host=place[0], port=place[1])
        finally:
            socket.create_connection(place).close()
            thread.join()


def test_a_full_etcd_is_waited_for() -> None:
    said = b'{"error":"etcdserver: mvcc: database space exceeded","code":8,"message":"etcdserver: mvcc: database space exceeded"}'
    head = f"HTTP/1.1 429 Too Many\r\nContent-Type: application/json\r\nContent-Length: {len(said)}\r\n\r\n".encode()
    with closing(head + said) as endpoint:
        options = EtcdOptions(api="v3", endpoints=(endpoint,))
        with pytest.raises(EtcdUnreachableError, match="space exceeded"):
            open_api(options, "job").leader()


@pytest.mark.parametrize("api", ["v2", "v3"])
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"], ids=["none", "half"])
def test_it_is_passing(api, answer: bytes) -> None:
    with closing(answer) as endpoint:
        options = EtcdOptions(api=api, endpoints=(endpoint,))
        with pytest.raises(EtcdUnreachableError, match="no etcd answers at"):
            open_api(options, "job").leader()
