"""`--rdzv-conf` of the etcd backends, and what may lie under their keys."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdfast.protocol.errors import EtcdError, EtcdUnreachableError, RendezvousConfigError
from holdfast.protocol.options import Endpoint
from holdfast.rendezvous.conf import parse_conf
from holdfast.rendezvous.elections import Leader, Memory, read_record
from holdfast.rendezvous.etcd import leader_key, read_etcd_conf
from holdfast.rendezvous.etcd_servers import Servers
from tests.support.tables import tables

TABLES = tables(__file__)

HERE = Endpoint(host="e1", port=2379)


def options(text: str, backend: str = "etcd"):
    return read_etcd_conf(backend, parse_conf(text), HERE)


def test_defaults() -> None:
    made = options("")
    assert (made.api, made.endpoints, made.prefix, made.lease_ttl_s, made.tls) == ("v3", (HERE,), "/holdfast", 5, False)
    assert options("", "etcd-v2").api == "v2"


def test_more_endpoints_each_once() -> None:
    made = options("endpoints=e1:2379;e2;[::1]:9")
    assert made.endpoints == (HERE, Endpoint(host="e2", port=2379), Endpoint(host="::1", port=9))


def test_job_names_cannot_leave_their_folder() -> None:
    assert leader_key(options("etcd_prefix=a/b/"), "../x y") == "/a/b/..%2Fx%20y/coordinator"


def test_password_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("secret\n")
    made = options(f"user=me,password_file={tmp_path / 'p'}")
    assert (made.user, made.password) == ("me", "secret")


@pytest.mark.parametrize("backend", TABLES["etcd_refused"])
@pytest.mark.parametrize(
    "text",
    [
        "lease_ttl=1",
        "lease_ttl=61",
        "lease_ttl=5.5",
        "password=x",
        "password_file=/no/such/file,user=me",
        "endpoints=a b",
        "protocol=ftp",
    ],
)
def test_refused(backend: str, text: str) -> None:
    with pytest.raises(Exception, match=r"rdzv-conf|endpoint"):
        options(text, backend)


def test_tls_files_need_https(tmp_path: Path) -> None:
    (tmp_path / "c").touch()
    with pytest.raises(RendezvousConfigError, match="protocol=https"):
        options(f"cacert={tmp_path / 'c'}")
    made = options(f"ca_cert={tmp_path / 'c'},protocol=https", "etcd-v2")
    assert made.tls
    assert made.ca_file == str(tmp_path / "c")


def test_records_come_back() -> None:
    leader = Leader(run_id="j", address="10.0.0.1", port=7, identity="x")
    assert read_record(Leader, "k", msgspec.json.encode(leader), "j", EtcdError) == leader
    memory = Memory(run_id="j", generation=3, workers_may_live_s=1.5)
    assert read_record(Memory, "k", msgspec.json.encode(memory), "j", EtcdError) == memory


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"\x80\x04pickle", "did not write"),
        (b"", "did not write"),
        (b"[]", "did not write"),
        (b'{"run_id":"j","address":"a","port":"7","identity":"x"}', "did not write"),
        (b'{"run_id":"k","address":"a","port":7,"identity":"x"}', "of the job 'k', not of 'j'"),
        (b" " * 5000, "5000 bytes"),
    ],
)
def test_what_is_not_ours_is_refused(value: bytes, said: str) -> None:
    with pytest.raises(EtcdError, match=said):
        read_record(Leader, "the etcd key /holdfast/j/coordinator", value, "j", EtcdError)


def test_servers_take_turns_and_the_one_that_answers_is_kept() -> None:
    asked: list[str] = []

    def question(endpoint: Endpoint) -> str:
        asked.append(endpoint.host)
        if endpoint.host != "c":
            raise EtcdUnreachableError("away")
        return "yes"

    servers = Servers(tuple(Endpoint(host=host, port=1) for host in "abc"))
    assert servers.ask(question) == "yes"
    assert servers.ask(question) == "yes"
    assert asked == ["a", "b", "c", "c"]


def test_nobody_answers() -> None:
    def question(endpoint: Endpoint) -> str:
        raise EtcdUnreachableError(f"{endpoint.host} is away")

    servers = Servers(tuple(Endpoint(host=host, port=1) for host in "ab"))
    with pytest.raises(EtcdUnreachableError, match="a:1: a is away; b:1: b is away"):
        servers.ask(question)
