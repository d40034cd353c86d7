from __future__ import annotations

import pytest

from holdfast.protocol.errors import EndpointError, RendezvousConfigError
from holdfast.rendezvous.backends import BACKENDS, check_backend, default_port
from holdfast.rendezvous.conf import parse_endpoint

GOOD = [
    ("", "localhost", 29400),
    ("  \t", "localhost", 29400),
    ("node1", "node1", 29400),
    ("LOCALHOST:7", "localhost", 7),
    (" node1:1234 ", "node1", 1234),
    ("dummy-1.com:0", "dummy-1.com", 0),
    ("dummy.com:65535", "dummy.com", 65535),
    ("a_b:00080", "a_b", 80),
    ("123.123.123.123:123", "123.123.123.123", 123),
    ("[2001:db8::1]", "2001:db8::1", 29400),
    ("[2001:db8::1]:80", "2001:db8::1", 80),
    ("2001:db8::1:80", "2001:db8::1", 80),
    ("[::1]:0", "::1", 0),
    ("[::]:1", "::", 1),
    ("[::ffff:10.0.0.1]:7", "::ffff:10.0.0.1", 7),
    ("1:2:3:4:5:6:7:8:99", "1:2:3:4:5:6:7:8", 99),
    ("[node1]:5", "node1", 5),
]
BAD = [
    ("node1:65536", "port '65536'"),
    ("node1:99999", "port '99999'"),
    ("node1:000080", "port '000080'"),
    ("node1:", "port ''"),
    ("node1:-1", "port '-1'"),
    ("node1:٣", "port"),
    ("node1:http", "port 'http'"),
    (":29400", "no host"),
    ("[]:29400", "no host"),
    ("[]", "no host"),
    ("no de:1", "neither a name nor an address"),
    ("http://node1:29400", "is a URL; write node1:29400, without http://"),
    ("node1,node2:29400", "neither a name nor an address"),
    ("[fe80::1%eth0]:1", "neither a name nor an address"),
    ("::1", "brackets"),
    ("fe80::1", "brackets"),
    ("a:b:80", "brackets"),
]


@pytest.mark.parametrize(("text", "host", "port"), GOOD)
def test_endpoints(text: str, host: str, port: int) -> None:
    endpoint = parse_endpoint(text, 29400)
    assert (endpoint.host, endpoint.port) == (host, port)


@pytest.mark.parametrize(("text", "words"), BAD)
def test_malformed_endpoints_are_told_in_one_line(text: str, words: str) -> None:
    with pytest.raises(EndpointError, match=words) as caught:
        parse_endpoint(text, 29400)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "node1", "[::1]"])
def test_static_must_name_a_port(text: str) -> None:
    with pytest.raises(EndpointError, match="names no port; write host:port"):
        parse_endpoint(text, None)


@pytest.mark.parametrize(("name", "port"), [("c10d", 29400), ("static", None), ("etcd", 2379), ("etcd-v2", 2379)])
def test_default_ports(name: str, port: int | None) -> None:
    assert default_port(name) == port


@pytest.mark.parametrize("name", BACKENDS)
def test_known_backends(name: str) -> None:
    check_backend(name)
    assert name in BACKENDS


@pytest.mark.parametrize(
    ("name", "words"), [("c10", "did you mean c10d"), ("C10D!", "known are"), ("zookeeper", "known are")]
)
def test_unknown_backends(name: str, words: str) -> None:
    with pytest.raises(RendezvousConfigError, match=words):
        check_backend(name)
