from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.protocol.errors import EndpointError, PortInUseError
from holdfast.protocol.options import Endpoint
from holdfast.rendezvous import bind as claim_module
from holdfast.rendezvous.bind import Claim, claim, who_holds
from tests.support.limits import limit_s

NOT_OURS = "192.0.2.1"  # TEST-NET-1: on no machine


@contextlib.contextmanager
def claimed(host: str, port: int = 0, *, standalone: bool = False, is_host: bool | None = None) -> Iterator[Claim]:
    found = claim(Endpoint(host=host, port=port), standalone=standalone, is_host=is_host)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def taken() -> Iterator[int]:
    """A port with a listener on all IPv4 addresses."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server.getsockname()[1]


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Every name resolves to these addresses."""
    real = socket.getaddrinfo

    def fake(host: str, port: object, **options: object) -> object:
        return [info for address in addresses for info in real(address, port, **options)]  # type: ignore[call-overload]

    monkeypatch.setattr(claim_module.socket, "getaddrinfo", fake)


def test_a_free_port_on_localhost() -> None:
    with claimed("localhost") as found:
        assert found.is_host
        assert found.addresses[0] == "127.0.0.1"
        assert set(found.addresses) <= {"127.0.0.1", "::1"}
        assert {each.getsockname()[1] for each in found.sockets} == {found.port}
        assert found.port != 0
        with socket.create_connection((found.endpoint.host, found.port), timeout=limit_s(5)):
            pass


def test_descriptors_do_not_reach_other_programs() -> None:
    with claimed("localhost") as found:
        for each in found.sockets:
            assert not os.get_inheritable(each.fileno())
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_of_ours_is_bound_alone(host: str) -> None:
    with claimed(host) as found:
        assert found.addresses == (host,)


def test_the_second_of_two_connects() -> None:
    with claimed("localhost") as first, claimed("localhost", first.port) as second:
        assert not second.is_host
        assert second.endpoint == Endpoint(host="localhost", port=first.port)
        assert "already bound" in second.reason


def test_a_host_that_left_makes_place_at_once() -> None:
    with (
        claimed("127.0.0.1") as first,
        socket.create_connection(("127.0.0.1", first.port), timeout=limit_s(5)) as client,
    ):
        accepted = first.sockets[0]
        accepted.setblocking(True)
        served, _ = accepted.accept()
        first.close()
        served.close()  # the server's side goes into TIME_WAIT
        assert client.recv(1) == b""
    with claimed("127.0.0.1", first.port) as second:
        assert second.is_host


def test_another_machines_address_connects() -> None:
    with claimed(NOT_OURS, 29400) as found:
        assert not found.is_host
        assert "not an address of this machine" in found.reason


def test_a_name_that_does_not_resolve_connects() -> None:
    with claimed("no-such-host.invalid", 29400) as found:
        assert not found.is_host
        assert "does not resolve" in found.reason


def test_port_zero_elsewhere_is_an_error() -> None:
    with pytest.raises(EndpointError, match="not on this machine"):
        claim(Endpoint(host=NOT_OURS, port=0))


def test_port_zero_without_hosting_is_an_error() -> None:
    with pytest.raises(EndpointError, match="is_host"):
        claim(Endpoint(host="localhost", port=0), is_host=False)


def test_hosting_can_be_forbidden() -> None:
    with claimed("localhost", 29400, is_host=False) as found:
        assert not found.is_host


def test_hosting_can_be_forced(free_port: object) -> None:
    assert callable(free_port)
    with claimed(NOT_OURS, free_port(), is_host=True) as found:
        assert found.addresses[0] == "0.0.0.0"
        with socket.create_connection((found.endpoint.host, found.port), timeout=limit_s(5)):
            pass


def test_forced_hosting_names_who_is_in_the_way(taken: int) -> None:
    with pytest.raises(PortInUseError, match=f"pid {os.getpid()} "):
        claim(Endpoint(host="localhost", port=taken), is_host=True)


def test_a_taken_port_connects(taken: int) -> None:
    with claimed("localhost", taken) as found:
        assert not found.is_host


def test_standalone_listens_on_loopback_only() -> None:
    with claimed(NOT_OURS, standalone=True) as found:
        assert set(found.addresses) <= {"127.0.0.1", "::1"}


def test_a_name_of_several_addresses_is_bound_at_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "::1", "127.0.0.2", NOT_OURS)
    with claimed("node7") as found:
        assert found.addresses == ("127.0.0.2", "::1")
        assert {each.getsockname()[1] for each in found.sockets} == {found.port}


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1"])
def test_our_own_name_on_loopback_is_bound_everywhere(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    resolving(monkeypatch, address)
    with claimed("node7") as found:
        assert found.addresses[0] == "0.0.0.0"
        assert found.endpoint.host == "127.0.0.1"


def test_a_second_address_that_is_taken_does_no_harm() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server, contextlib.ExitStack() as stack:
        port = server.getsockname()[1]
        try:
            stack.enter_context(socket.create_server(("127.0.0.1", port))).close()
        except OSError:
            pytest.skip("the port is taken on IPv4 as well")
        with claimed("localhost", port) as found:
            assert found.addresses == ("127.0.0.1",)


def test_the_holder_is_named(taken: int) -> None:
    holder = who_holds(taken)
    assert holder is not None
    assert holder.startswith(f"pid {os.getpid()} (")
    assert "python" in holder or "pytest" in holder


def test_another_process_is_named_too() -> None:
    code = "import socket,sys; s = socket.create_server(('::1', 0), family=socket.AF_INET6); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert who_holds(int(other.stdout.readline())) is not None
        assert other.stdin is not None
        other.stdin.close()


def test_nobody_holds_a_free_port(free_port: object) -> None:
    assert callable(free_port)
    assert who_holds(free_port()) is None
