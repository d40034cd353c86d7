"""What several nodes found, made up and judged: pairs, names, latency, bandwidth, clocks, versions, the all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.doctor import DoctorFinding, JointCheck, Level, NodePath, NodeReport, Reached, Reduced, Summary
from holdfast.insight.doctor.together import examine_together, release

HOSTS = ("a", "b", "c")
SUMMARY = Summary(
    host="", python="3.11.7", torch="2.13.0", nccl="2.27", holdfast="0.1.0", interface="eth0", has_torch=True
)


def link(to: int, **changes: Any) -> NodePath:
    made = NodePath(
        to=to,
        reached=Reached.YES,
        address=f"10.0.0.{to}:4{to}000",
        names=(f"10.0.0.{to}",),
        latency_s=0.0002,
        clock_offset_s=0.001,
        bytes_s=1e9,
    )
    return replace(made, **changes)


def report(
    me: int, *changed: NodePath, number: int = 3, findings: tuple[DoctorFinding, ...] = (), **summary: Any
) -> NodeReport:
    links = {to: link(to) for to in range(number) if to != me} | {each.to: each for each in changed}
    return NodeReport(
        summary=replace(SUMMARY, host=HOSTS[me] if me < 3 else str(me), **summary),
        links=tuple(links.values()),
        findings=findings,
    )


def check(*reports: NodeReport | None, **changes: Any) -> JointCheck:
    return replace(
        JointCheck(wanted=(3, 3), came=HOSTS, reports=reports or (report(0), report(1), report(2))), **changes
    )


def found(told: JointCheck, me: int = 0) -> list[tuple[str, Level, str]]:
    findings = examine_together(told, me)
    return [(each.code, each.level, each.why) for each in findings if each.level is not Level.PASS]


def test_three_nodes_on_which_all_is_well() -> None:
    findings = examine_together(check(reduced=(Reduced(ok=True, seconds=0.1),) * 3), 0)
    assert {each.level for each in findings} == {Level.PASS}
    assert {each.code for each in findings} == {"HF550", "HF560", "HF561", "HF563", "HF564", "HF565", "HF566", "HF570"}


def test_a_node_that_did_not_come_is_missing_and_one_above_the_minimum_is_not() -> None:
    told = check(report(0, number=2), report(1, number=2), came=("a", "b"))
    assert found(told) == [("HF550", Level.RETRY, "2 of 3 came: a, b")]
    assert found(replace(told, wanted=(1, 3))) == []


def test_a_pair_that_fails_is_named_in_both_directions() -> None:
    told = check(report(0), report(1, link(2, reached=Reached.SILENT)), report(2))
    ((code, level, why),) = found(told)
    assert (code, level) == ("HF560", Level.FATAL)
    assert why == "b → c (10.0.0.2:42000): timed out; c → b works"
    (fix,) = [each.fix for each in examine_together(told, 0) if each.level is Level.FATAL]
    assert fix.startswith("a firewall or security group on c?")


def test_a_pair_that_fails_both_ways_and_one_that_nobody_could_try() -> None:
    cut = check(
        report(0),
        report(1, link(2, reached=Reached.SILENT)),
        report(2, link(1, reached=Reached.REFUSED, error="connection refused")),
    )
    ((_, _, why),) = found(cut)
    assert why == "b → c (10.0.0.2:42000): timed out; c → b (10.0.0.1:41000): refused"
    told = check(report(0), report(1, link(2, reached=Reached.UNREACHABLE, error="no route to host")), None)
    texts = {code: why for code, _, why in found(told)}
    assert texts["HF560"] == "b → c (10.0.0.2:42000): no route (no route to host); c → b: not tried"
    assert texts["HF554"] == "c came, and fell silent before the end"


def test_a_stranger_at_the_address_is_no_firewall() -> None:
    told = check(report(0, link(1, reached=Reached.STRANGER, error="another")), report(1), report(2))
    (fix,) = [each.fix for each in examine_together(told, 0) if each.code == "HF560"]
    assert "NAT" in fix


def test_very_many_pairs_are_counted() -> None:
    number = 12
    names = tuple(f"n{index}" for index in range(number))
    reports = [
        report(
            me, *(link(to, reached=Reached.SILENT) for to in range(number) if 5 in (me, to) and to != me), number=number
        )
        for me in range(number)
    ]
    other = [
        report(me, *(link(to, reached=Reached.SILENT) for to in range(number) if to != me), number=number)
        for me in range(number)
    ]
    told = check(*reports, came=names, wanted=(number, number))
    assert len([code for code, _, _ in found(told) if code == "HF560"]) == 11
    lines = [why for code, _, why in found(replace(told, reports=tuple(other))) if code == "HF560"]
    assert len(lines) == 17
    assert lines[-1].startswith("and 50 more pairs; most often with n")


def test_a_name_that_does_not_resolve_or_means_another_is_named() -> None:
    told = check(report(0), report(1, link(2, names=(), name_error="unknown")), report(2, link(0, names=("10.9.9.9",))))
    assert found(told) == [
        ("HF561", Level.WARN, "a is 10.9.9.9 on c, but is reached at 10.0.0.0"),
        ("HF561", Level.WARN, "c does not resolve on b"),
    ]


def test_names_do_not_matter_on_loopback() -> None:
    here = [replace(each, address="127.0.0.1:4000", names=("192.0.2.1",)) for each in (link(1), link(2))]
    assert found(check(report(0, *here), report(1), report(2))) == []


@pytest.mark.parametrize(("seconds", "is_slow"), [(0.03, True), (0.0021, True), (0.0019, False)])
def test_a_slow_or_odd_round_trip_is_named(seconds: float, is_slow: bool) -> None:
    got = found(check(report(0, link(1, latency_s=seconds)), report(1), report(2)))
    assert bool(got) is is_slow
    if is_slow:
        assert got[0][0] == "HF563"
        assert "a → b" in got[0][2]


@pytest.mark.parametrize(("bytes_s", "is_slow"), [(1e7, True), (1.9e8, True), (2.1e8, False), (None, False)])
def test_a_slow_or_odd_connection_is_named(bytes_s: float | None, is_slow: bool) -> None:
    got = found(check(report(0), report(1), report(2, link(1, bytes_s=bytes_s))))
    assert bool(got) is is_slow
    if is_slow:
        assert got[0][0] == "HF564"
        assert "c → b" in got[0][2]


def test_a_clock_that_differs_is_named_once() -> None:
    told = check(report(0, link(2, clock_offset_s=-3.5)), report(1, link(2, clock_offset_s=-3.5)), report(2))
    assert found(told) == [("HF565", Level.WARN, "c is 3.5 s behind a")]


@pytest.mark.parametrize(
    ("changes", "code", "level", "text"),
    [
        ({"torch": "2.9.1"}, "HF567", Level.FATAL, "torch 2.13.0 on a, c; torch 2.9.1 on b"),
        ({"torch": "2.13.1+cu126"}, "HF567", Level.WARN, "torch 2.13.1+cu126 on b"),
        ({"torch": ""}, "HF567", Level.FATAL, "torch none on b"),
        ({"nccl": "2.21"}, "HF567", Level.FATAL, "NCCL 2.21 on b"),
        ({"python": "3.12.1"}, "HF566", Level.WARN, "Python 3.12.1 on b"),
        ({"holdfast": "0.2.0"}, "HF566", Level.WARN, "holdfast 0.2.0 on b"),
    ],
)
def test_different_versions_are_named(changes: dict[str, str], code: str, level: Level, text: str) -> None:
    ((got, of_level, why),) = found(check(report(0), report(1, **changes), report(2)))
    assert (got, of_level) == (code, level)
    assert text in why


def test_a_release_is_its_first_two_numbers() -> None:
    assert release("2.13.0+cu126") == release("2.13.1") != release("2.9.1")


def test_an_all_reduce_that_fails_proposes_the_interfaces_that_work() -> None:
    bad = Reduced(
        ok=False,
        error="RuntimeError: Gloo connectFullMesh failed with [/a/pair.cc:152] timed out, remote=[127.0.1.1]:1$0",
    )
    told = check(reduced=(Reduced(ok=True), bad, Reduced(ok=False, silent=True)))
    ((code, level, why),) = found(told)
    assert (code, level) == ("HF570", Level.FATAL)
    assert "b: RuntimeError: Gloo connectFullMesh failed timed out, remote=[127.0.1.1]:1, c: did not end in time" in why
    (fix,) = [each.fix for each in examine_together(told, 0) if each.code == "HF570"]
    assert fix == "set GLOO_SOCKET_IFNAME to the interface that works: a eth0, b eth0, c eth0"


def test_what_others_found_at_home_is_shown_once_and_without_our_own() -> None:
    small = DoctorFinding(code="HF510", level=Level.WARN, what="/dev/shm", why="has only 64 MiB", fix="more")
    told = check(*(report(me, findings=(small,)) for me in range(3)))
    (finding,) = [each for each in examine_together(told, 1) if each.code == "HF510"]
    assert finding.node == "a, c"
