"""Probes between two nodes, and whole joint checks over loopback: nodes that come, leave, lie and fall silent."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from msgspec import structs

from holdfast.doctor import joint_server, probe
from holdfast.doctor.findings import (
    DoctorFinding,
    JointCheck,
    Level,
    ListEntry,
    LocalFacts,
    NodePath,
    NodeReport,
    Reached,
    Summary,
    TorchFacts,
    TorchState,
)
from holdfast.doctor.joint import JointOptions, JointResult, check_together
from holdfast.doctor.joint_server import BACKEND, Channel, Ready, Roster, SharedMessages, decode_from_server
from holdfast.doctor.probe import Peer
from holdfast.doctor.together import witnesses
from holdfast.protocol.charter import Charter, CharterPosition, Renew, Seat
from holdfast.protocol.codec import encode
from holdfast.protocol.errors import CoordinatorUnreachableError
from holdfast.protocol.options import Endpoint
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec
from holdfast.protocol.session import ClientHandshake, Session
from holdfast.rendezvous.bind import claim
from holdfast.runtime.connection import dial_agent, dial_endpoint, fresh_nonce
from holdfast.runtime.listener import Listener
from holdfast.runtime.witness_service import Witness
from tests.support.limits import limit_s

KEY = b"k" * 16
FACTS = LocalFacts(
    host="h", python="3.11.7", holdfast="0.1.0", torch=TorchFacts(state=TorchState.OK, version="2.13.0", gloo=True)
)
SMALL = DoctorFinding(code="HF510", level=Level.WARN, what="/dev/shm", why="small")


@asynccontextmanager
async def listening(me: int = 1, key: bytes = KEY) -> AsyncIterator[Peer]:
    listener = probe.ProbeServer()
    await listener.open(["127.0.0.1"])
    listener.introduce(me, key)
    try:
        yield Peer("b", "b", "127.0.0.1", listener.port)
    finally:
        await listener.close()


async def test_a_probe_measures_round_trip_bandwidth_and_clock() -> None:
    async with listening() as peer:
        slow_clock = await probe.probe(peer, 1, KEY, transfer_s=0.05, clock=lambda: time.time() - 100)
        assert slow_clock.reached is Reached.YES
        assert slow_clock.latency_s is not None
        assert slow_clock.latency_s > 0
        assert slow_clock.clock_offset_s == pytest.approx(100, abs=1)
        assert slow_clock.bytes_s is not None
        assert slow_clock.bytes_s > 0
        plain = await probe.probe(peer, 1, KEY, transfer_s=0.0)
        assert plain.bytes_s is None


async def test_whoever_does_not_know_the_key_gets_no_answer() -> None:
    async with listening(key=b"x" * 16) as peer:
        link = await probe.probe(peer, 1, KEY, transfer_s=0.0)
        assert link.reached is Reached.STRANGER
        reader, writer = await asyncio.open_connection(peer.address, peer.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.transport.abort()


async def test_another_node_at_the_address_is_a_stranger() -> None:
    async with listening(me=7) as peer:
        link = await probe.probe(peer, 1, KEY, transfer_s=0.0)
        assert link.reached is Reached.STRANGER
        assert "node 7" in link.error


async def test_nobody_there_is_refused_and_no_address_is_unreachable(free_port) -> None:
    link = await probe.probe(Peer("b", "b", "127.0.0.1", free_port()), 1, KEY, transfer_s=0.0)
    assert (link.reached, link.error) == (Reached.REFUSED, "connection refused")
    link = await probe.probe(Peer("b", "b", "not an address", 1), 1, KEY, transfer_s=0.0)
    assert link.reached is Reached.UNREACHABLE
    assert link.error == "this node does not know the name not an address"


async def test_a_peer_is_reached_by_its_name() -> None:
    """Its --local-addr may be one."""
    async with listening() as peer:
        link = await probe.probe(structs.replace(peer, address="localhost"), 1, KEY, transfer_s=0.0)
        assert (link.reached, link.address) == (Reached.YES, f"localhost:{peer.port}")


async def test_all_nodes_of_a_check_are_reached_by_their_names(free_port) -> None:
    what = asked(free_port(), local_addr="localhost")
    for each in await asyncio.gather(*(check(what) for _ in range(2))):
        assert each.check is not None
        links = [link for report in each.check.reports if report is not None for link in report.links]
        assert [link.reached for link in links] == [Reached.YES, Reached.YES]


async def test_many_nodes_that_do_not_answer_cost_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes seconds, and so does a name that no server resolves."""
    never = asyncio.Event()

    async def hangs(*_: object, **__: object) -> NodePath:
        await never.wait()
        raise AssertionError("it was ended before")

    monkeypatch.setattr(probe, "probe", hangs)
    monkeypatch.setattr(probe, "addresses_of", hangs)
    peers = [Peer(f"n{index}", f"n{index}", f"10.0.0.{index}", 4000) for index in range(200)]
    paths = await probe.probe_all(3, KEY, peers, 0.2)
    assert [path.to for path in paths] == [index for index in range(200) if index != 3]
    assert {path.reached for path in paths} == {Reached.SILENT}
    assert paths[0].address == "10.0.0.0:4000"
    assert paths[0].error.startswith("not tried within 0.2 s")
    assert paths[0].name_error == "not looked up within 0.2 s"


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_a_local_address_of_ipv6_is_listened_at(free_port) -> None:
    what = asked(free_port(), local_addr="::1")
    for each in await asyncio.gather(*(check(what) for _ in range(2))):
        assert each.check is not None
        links = [link for report in each.check.reports if report is not None for link in report.links]
        assert [(link.reached, link.address.rpartition(":")[0]) for link in links] == [(Reached.YES, "[::1]")] * 2


async def test_the_test_of_gpus_has_its_time_before_the_report() -> None:
    assert asked(1, timeout_s=1.0).report_s == joint_server.REPORT_S_MIN
    assert asked(1, timeout_s=90.0, gpu_test_s=120.0).report_s == 210


async def test_a_transfer_over_its_limit_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TRANSFER_BYTES_MAX", 1000)
    async with listening() as peer:
        reader, writer = await asyncio.open_connection(peer.address, peer.port)
        writer.write(probe.MAGIC + KEY)
        assert struct.unpack("!I", await reader.readexactly(4)) == (1,)
        writer.write(b"B" + bytes(5000))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.transport.abort()


# --- joint checks -----------------------------------------------------------------------------------------------------


def asked(port: int, nodes: tuple[int, int] = (2, 2), **changes: object) -> JointOptions:
    made = JointOptions(
        endpoint=Endpoint(host="127.0.0.1", port=port),
        others=(),
        run_id="check",
        nodes=nodes,
        token=None,
        is_host=None,
        local_addr=None,
        timeout_s=limit_s(2.5),
        reduce=False,
        python="/nowhere/python",
    )
    return made._replace(**changes)  # type: ignore[arg-type]


async def check(what: JointOptions, came: asyncio.Semaphore | None = None) -> JointResult:
    """`came` is released for each node that the server of this check lets in."""

    async def known() -> LocalFacts:
        return FACTS

    def say(text: str) -> None:
        if came is not None and " joined: " in text:
            came.release()

    return await check_together(what, asyncio.create_task(known()), lambda _: (SMALL,), say)


@pytest.mark.parametrize("token", [None, b"secret"])
async def test_all_nodes_of_a_check_learn_the_same(token: bytes | None, free_port) -> None:
    what = asked(free_port(), (3, 3), token=token)
    got = await asyncio.gather(*(check(what) for _ in range(3)))
    assert sorted(each.me for each in got) == [0, 1, 2]
    assert all(each.trouble is None for each in got)
    assert all(each.check == got[0].check for each in got)
    told = got[0].check
    assert told is not None
    assert len(told.came) == len(set(told.came)) == 3
    for report in told.reports:
        assert report is not None
        assert {link.reached for link in report.links} == {Reached.YES}
        assert all(link.bytes_s for link in report.links)
        assert report.findings == (SMALL,)
    assert told.no_reduce == "not requested"


async def test_who_is_missing_is_known_after_the_time_out(free_port) -> None:
    got = await check(asked(free_port(), timeout_s=limit_s(1)))
    assert got.check is not None
    assert len(got.check.came) == 1
    assert got.check.wanted == (2, 2)


async def test_another_id_or_token_is_refused_by_name(free_port) -> None:
    port = free_port()
    right = asked(port, timeout_s=limit_s(20.0), token=b"one")
    came = asyncio.Semaphore(0)
    host = asyncio.create_task(check(right, came))
    await came.acquire()
    other_id, other_token = await asyncio.gather(
        check(right._replace(run_id="other")), check(right._replace(token=b"two"))
    )
    host.cancel()
    await asyncio.gather(host, return_exceptions=True)
    for got, word in ((other_id, "other"), (other_token, "token")):
        assert got.trouble is not None
        assert (got.trouble.code, got.trouble.level) == ("HF552", Level.FATAL)
        assert word in got.trouble.why


async def test_another_service_at_the_endpoint_is_named() -> None:
    served = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-OpenSSH\r\n")
            await writer.drain()
            await reader.read()
            writer.close()
            served.set()

        ssh = await asyncio.start_server(serve, sock=server)
        try:
            got = await check(asked(port))
        finally:
            await served.wait()
            ssh.close()
    assert got.trouble is not None
    assert (got.trouble.code, got.trouble.level) == ("HF553", Level.RETRY)
    assert "SSH" in got.trouble.why
    assert f"pid {os.getpid()}" in got.trouble.why


async def test_nobody_at_the_endpoint_is_waited_for_and_given_up(free_port) -> None:
    got = await check(asked(free_port(), is_host=False, timeout_s=limit_s(1)))
    assert got.trouble is not None
    assert (got.trouble.code, got.trouble.level) == ("HF551", Level.RETRY)
    assert "connection refused" in got.trouble.why


async def test_a_name_that_does_not_resolve_is_said(free_port) -> None:
    endpoint = Endpoint(host="no-such-host.invalid", port=free_port())
    got = await check(asked(1, timeout_s=limit_s(1))._replace(endpoint=endpoint))
    assert got.trouble is not None
    assert got.trouble.code == "HF551"
    assert "does not resolve" in got.trouble.why


@asynccontextmanager
async def job_and_witness() -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    """An agent of a running job, and a witness that knows it as the coordinator's."""
    job = JobSpec(run_id="check", min_nodes=1, max_nodes=2, backend="c10d")
    agent, there = (claim(Endpoint(host="127.0.0.1", port=0)) for _ in range(2))
    listener = Listener(agent.sockets, job, None, lambda *_: None, lambda _: None)
    witness = Witness(there, None, Limits(), "w", lambda _: None)
    await listener.start()
    await witness.start()
    told = await dial_agent(there.endpoint, job, NodeSpec(member="a#1", host="a", nproc=1))
    acknowledged = asyncio.Event()
    told.start(lambda _: acknowledged.set(), lambda _: None)
    seat = Seat("a#1", "a", "127.0.0.1", agent.port)
    told.send(Renew(2, 1, Charter(CharterPosition(2, 1), (seat,))))
    await acknowledged.wait()
    try:
        yield agent.endpoint, there.endpoint
    finally:
        told.abort()
        witness.close()
        listener.close()


@pytest.mark.parametrize("by_witness", [False, True])
async def test_a_job_whose_first_host_is_gone_is_found_by_the_list(free_port, *, by_witness: bool) -> None:
    async with job_and_witness() as (agent, witness):
        what = asked(free_port(), is_host=False, timeout_s=3600.0)
        got = await check(what._replace(others=(witness,) if by_witness else (agent,)))
    assert got.trouble is not None
    assert (got.trouble.code, got.trouble.level) == ("HF553", Level.RETRY)
    assert f"a job runs at {agent}" in got.trouble.why


async def test_where_the_first_host_is_gone_and_no_job_runs_the_list_has_to_change(free_port) -> None:
    nobody = Endpoint(host="127.0.0.1", port=free_port())
    got = await check(asked(free_port(), is_host=False, timeout_s=limit_s(1), others=(nobody,)))
    assert got.trouble is not None
    assert got.trouble.code == "HF551"
    assert "name another one first" in got.trouble.fix


async def test_each_entry_of_the_list_is_a_node_or_a_witness(free_port) -> None:
    place = claim(Endpoint(host="127.0.0.1", port=0))
    witness = Witness(place, b"secret", Limits(), "w", lambda _: None)
    await witness.start()
    elsewhere = Endpoint(host="127.0.0.250", port=free_port())
    own = Endpoint(host="127.0.0.1", port=free_port())
    try:
        what = asked(free_port(), token=b"secret", others=(place.endpoint, own, elsewhere))
        both = await asyncio.gather(check(what), check(what))
    finally:
        witness.close()
    for got in both:
        assert got.check is not None
        found = [(finding.level, finding.why) for finding in witnesses(got.check)]
        assert [level for level, _ in found] == [Level.PASS]


def test_an_entry_that_is_nobodys_is_reported_with_the_nodes_that_miss_it() -> None:
    reports = tuple(
        NodeReport(
            summary=Summary(host=host, python="", torch="", cuda="", nccl="", holdfast=""),
            entries=(
                ListEntry(address="b:1", own=host == "b", error="" if host == "b" else "connection refused"),
                ListEntry(address="w:2", error="" if host == "b" else "no answer within 3 s"),
            ),
        )
        for host in ("a", "b")
    )
    (finding,) = witnesses(JointCheck(wanted=(2, 2), came=("a", "b"), reports=reports))
    assert (finding.code, finding.level) == ("HF555", Level.WARN)
    assert finding.why == "none at w:2 for a, and no node of this check: no answer within 3 s"


async def stranger(port: int) -> tuple[Roster, Callable[[], None]]:
    """A node that comes, and from there on does what the test wants."""
    job = JobSpec(run_id="check", min_nodes=2, max_nodes=2, backend=BACKEND)
    endpoint = Endpoint(host="127.0.0.1", port=port)
    handshake = ClientHandshake(job, NodeSpec(member="x#1", host="x", nproc=1), None, fresh_nonce())
    while True:
        try:
            connection = await dial_endpoint(endpoint, lambda: Session(handshake, decode_from_server))
            break
        except CoordinatorUnreachableError:  # the server is not open yet
            await asyncio.sleep(0.01)
    connection.send(Ready("x", 1))
    return await Channel(connection).next(Roster), connection.abort


async def test_a_node_that_falls_silent_costs_nothing_but_its_own_report(free_port) -> None:
    port = free_port()

    checking = asyncio.create_task(check(asked(port, reduce=True)))
    _, leave = await stranger(port)
    leave()
    got = await checking
    assert got.trouble is None
    assert got.check is not None
    assert got.check.came[1] == "x"
    assert got.check.reports[1] is None
    assert got.check.no_reduce == "a node sent no report"
    honest = got.check.reports[0]
    assert honest is not None
    assert honest.links[0].reached is Reached.REFUSED


async def test_a_node_too_many_is_told_so(free_port) -> None:
    what = asked(free_port(), timeout_s=limit_s(1.5))
    got = await asyncio.gather(*(check(what) for _ in range(3)))
    troubles = [each.trouble for each in got if each.trouble is not None]
    assert len(troubles) == 1
    assert troubles[0].code in ("HF552", "HF551")  # the server may have closed by then


async def test_a_server_that_goes_away_ends_the_check(free_port) -> None:
    port = free_port()

    came = asyncio.Semaphore(0)
    host = asyncio.create_task(check(asked(port, (3, 3), timeout_s=limit_s(20.0)), came))
    await came.acquire()
    other = asyncio.create_task(check(asked(port, (3, 3), timeout_s=limit_s(20.0))))
    await came.acquire()
    host.cancel()
    await asyncio.gather(host, return_exceptions=True)
    got = await other
    assert got.trouble is not None
    assert (got.trouble.code, got.trouble.level) == ("HF554", Level.RETRY)


async def test_an_all_reduce_whose_process_cannot_start_is_a_result(free_port) -> None:
    what = asked(free_port(), reduce=True)
    one, _ = await asyncio.gather(check(what), check(what))
    assert one.check is not None
    assert one.check.reduced is not None
    assert [each.error for each in one.check.reduced if each is not None] == ["No such file or directory"] * 2


def test_no_node_can_say_so_much_that_the_others_are_not_heard() -> None:
    chatty = NodeReport(
        summary=Summary(host="x" * 100000),
        links=(NodePath(to=0, reached=Reached.SILENT, error="e" * 100000, names=("n" * 100000,)),),
        findings=(DoctorFinding(code="HF510", level=Level.WARN, what="w", why="y" * 100000),),
    )
    cut = joint_server.clipped(chatty)
    assert len(encode(SharedMessages((cut,)))) < 6 * joint_server.TEXT_CHARS_MAX
    assert cut.links[0].reached is Reached.SILENT
    assert cut.findings[0].why == "y" * joint_server.TEXT_CHARS_MAX


async def test_of_very_many_nodes_only_the_worst_links_are_told(free_port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_server, "LINKS_SHARED_MAX", 3)
    what = asked(free_port(), (3, 3))
    got = await asyncio.gather(*(check(what) for _ in range(3)))
    assert got[0].check is not None
    assert [len(report.links) for report in got[0].check.reports if report is not None] == [1, 1, 1]
