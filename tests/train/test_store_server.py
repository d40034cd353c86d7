"""The store of a generation, for the versions of torch."""

from __future__ import annotations

import socket

from holdfast.train.store_server import open_store


class StoreOfTorch26:
    """It can be given a socket only without libuv, which is its default. The real one is tried by `make test-torch`."""

    def __init__(self, host: str, port: int, *, master_listen_fd: int, use_libuv: bool = True, **_: bool) -> None:
        if use_libuv:
            raise NotImplementedError("TCPStoreLibUvBackend does not support master_listen_fd")
        self.given = host, port, master_listen_fd


def test_a_store_that_can_be_given_no_socket_is_opened_without_libuv() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        store = open_store(StoreOfTorch26, listening.fileno())
        assert store.given == ("127.0.0.1", listening.getsockname()[1], listening.fileno())
