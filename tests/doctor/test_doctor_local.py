"""One node's checks on facts that are made up: what is well passes, and each trouble has its code, level and fix."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.diagnosis.reference import finding_texts
from holdfast.doctor.findings import (
    DoctorFinding,
    Interface,
    JointCheck,
    Level,
    LocalFacts,
    NodePath,
    NodeReport,
    Reached,
    Reduced,
    Summary,
    TorchFacts,
    TorchState,
    as_json,
    exit_code,
    lines_of,
    render,
    worst,
)
from holdfast.doctor.local import chosen, examine, proposed, slow_import, time_outs
from holdfast.doctor.together import examine_together, part_of, release
from holdfast.protocol.policy import Limits
from holdfast.protocol.time_outs import ladder
from tests.support.tables import tables

TABLES = tables(__file__)

GIB = 2**30
ETH0 = Interface(name="eth0", addresses=("10.0.0.7",))
LO = Interface(name="lo", addresses=("127.0.0.1", "::1"))
DOCKER0 = Interface(name="docker0", addresses=("172.17.0.1",))
TORCH = TorchFacts(
    state=TorchState.OK, version="2.13.0", cuda="12.6", nccl="2.27.3", distributed=True, gloo=True, gpus=1, seconds=2.0
)
WELL = msgspec.convert(TABLES["well"], LocalFacts)


def found(**changes: Any) -> dict[str, tuple[Level, str]]:
    """Codes of what is not well, with level and text."""
    findings = examine(msgspec.convert({**TABLES["well"], **msgspec.to_builtins(changes)}, LocalFacts))
    return {each.code: (each.level, each.why) for each in findings if each.level is not Level.PASS}


def torch(**changes: Any) -> dict[str, Any]:
    return {"torch": replace(TORCH, **changes)}


def test_a_node_on_which_all_is_well_passes_every_check() -> None:
    findings = examine(WELL)
    assert [each for each in findings if each.level is not Level.PASS] == []
    assert len(findings) > 20
    assert worst(findings).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "code", "level", "text"), [*TABLES["troubles"], ({"limits": {"core": None}}, "HF514", "warn", "core")]
)
def test_each_trouble_is_found_and_nothing_else(changes: dict[str, Any], code: str, level: str, text: str) -> None:
    got = found(**changes)
    assert list(got) == [code]
    assert got[code][0] is Level(level)
    assert text in got[code][1]


@pytest.mark.parametrize(
    "changes",
    [
        *TABLES["no_troubles"],
        {"limits": {"core": None}, "core_pattern": "|/usr/lib/systemd/systemd-coredump %P"},
        {"limits": {"core": None}, "core_pattern": "|"},
        {"clock_synchronised": None},
    ],
)
def test_what_only_looks_like_trouble_passes(changes: dict[str, Any]) -> None:
    assert found(**changes) == {}


def test_the_interface_of_the_default_route_is_proposed_else_the_fastest_that_is_no_bridge() -> None:
    slow = Interface(name="eno1", addresses=("192.168.0.7",), speed_mbit_s=1000)
    fast = Interface(name="ens5", addresses=("10.1.0.7",), speed_mbit_s=100000)
    down = Interface(name="ens9", up=False, addresses=("10.9.0.7",), speed_mbit_s=200000)
    facts = replace(WELL, interfaces=(LO, DOCKER0, slow, fast, down))
    assert proposed(replace(facts, default_interface="eno1")) == "eno1"
    assert proposed(replace(facts, default_interface="")) == "ens5"
    assert proposed(replace(facts, default_interface="docker0")) == "ens5"
    assert proposed(replace(facts, interfaces=(LO, DOCKER0))) == "docker0"
    assert proposed(replace(facts, interfaces=(LO,))) == ""


def test_a_slower_way_to_the_endpoint_than_there_could_be_is_reported() -> None:
    slow = Interface(name="eno1", addresses=("192.168.0.7",), speed_mbit_s=1000)
    fast = Interface(name="ib0", addresses=("10.1.0.7",), speed_mbit_s=100000)
    bridge = Interface(name="docker0", addresses=("172.17.0.1",), speed_mbit_s=200000)
    unknown = Interface(name="eth7", addresses=("10.7.0.7",))
    facts = replace(WELL, interfaces=(LO, bridge, slow, fast, unknown))

    def said(towards: str) -> list[tuple[Level, str]]:
        found = examine(replace(facts, endpoint_from=towards))
        return [(each.level, each.why) for each in found if each.code == "HF533"]

    assert said("192.168.0.7") == [(Level.WARN, "eno1 has 1000 Mbit/s, ib0 100000")]
    assert said("10.1.0.7") == [(Level.PASS, "ib0 has 100000 Mbit/s")]
    assert said("10.7.0.7") == said("127.0.0.1") == said("") == []


@pytest.mark.parametrize(
    ("text", "nccl", "names"),
    [
        ("eth", True, ["eth0"]),
        ("=eth", True, []),
        ("=eth0,lo", True, ["lo", "eth0"]),
        ("^docker,lo", True, ["eth0"]),
        ("^=eth0", True, ["lo", "docker0"]),
        ("eth", False, []),
        ("eth0", False, ["eth0"]),
    ],
)
def test_interfaces_are_chosen_by_the_rules_of_nccl_and_gloo(text: str, nccl: bool, names: list[str]) -> None:
    assert [each.name for each in chosen(text, (LO, DOCKER0, ETH0), nccl=nccl)] == names


def test_every_code_that_is_given_is_explained() -> None:
    import re
    from pathlib import Path

    import holdfast

    folder = Path(holdfast.__file__).parent
    given = {code for path in folder.glob("doctor/*.py") for code in re.findall(r"HF5\d\d", path.read_text())}
    assert given == set(finding_texts())
    for explained in finding_texts().values():
        assert all(text.endswith(".") for text in (explained.cause, explained.evidence, explained.fix))


@pytest.mark.parametrize(
    ("limits", "level"),
    [
        (Limits(), Level.PASS),
        (Limits(hang_timeout_s=900.0), Level.WARN),
        (Limits(lease_s=400.0, fence_s=260.0, hang_timeout_s=300.0), Level.WARN),
    ],
)
def test_time_outs_in_a_wrong_order_are_found(limits: Limits, level: Level) -> None:
    finding = time_outs(ladder(limits, {}, gpus=True, nodes=2))
    assert (finding.code, finding.level) == ("HF540", level)


def test_the_table_shows_problems_with_their_fix_and_passes_in_one_line() -> None:
    findings = examine(replace(WELL, overcommit=2, endpoint_holder="pid 1"))
    text = render(findings)
    assert "WARN  overcommit" in text
    assert "→ sysctl vm.overcommit_memory=0" in text
    assert text.splitlines()[-1].startswith("retry: 1 to retry, 1 to note; holdfast explain HF538")
    assert text.splitlines()[-1].endswith("(exit code 20)")
    assert "HF500" not in text
    assert render(examine(WELL)).splitlines()[-1].startswith("all well: ")


def test_words_of_other_nodes_cannot_upset_a_terminal() -> None:
    finding = replace(examine(WELL)[0], node="evil\x1b[2J", why="a\nb\x07", fix="\r")
    assert all(line.isprintable() for line in lines_of(finding))


def test_json_has_every_finding_and_the_worst_level() -> None:
    told = as_json(examine(replace(WELL, python="3.8.1")))
    assert (told["level"], told["exit_code"]) == ("fatal", 30)
    assert told["findings"][0]["fix"] == "install Python 3.11 or newer"


def test_a_warning_is_no_failure_unless_it_is_to_be() -> None:
    small = DoctorFinding(code="HF510", level=Level.WARN, what="/dev/shm", why="small")
    late = DoctorFinding(code="HF530", level=Level.RETRY, what="clock", why="off")
    assert [exit_code([small], strict=strict) for strict in (False, True)] == [0, 10]
    assert [exit_code([small, late], strict=strict) for strict in (False, True)] == [20, 20]
    assert render([small]).endswith("(exit code 0)")
    assert render([small], strict=True).endswith("(exit code 10)")


@pytest.mark.parametrize(
    ("cpu_s", "load", "says"),
    [(1.0, 0.2, "local disk"), (38.0, 0.9, "processor is slow"), (4.0, 8.0, "which other programs run here")],
)
def test_a_slow_import_is_the_disks_fault_only_where_nothing_computes(cpu_s: float, load: float, says: str) -> None:
    found = TorchFacts(
        state=TorchState.OK, version="2", seconds=40.0, cpu_s=cpu_s, load=load, distributed=True, gloo=True
    )
    assert says in slow_import(found, "slow")[1]


# --- what several nodes found: pairs, names, latency, bandwidth, clocks, versions, the all-reduce ---------------------


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


def found_together(told: JointCheck, me: int = 0) -> list[tuple[str, Level, str]]:
    findings = examine_together(told, me)
    return [(each.code, each.level, each.why) for each in findings if each.level is not Level.PASS]


def test_three_nodes_on_which_all_is_well() -> None:
    findings = examine_together(check(reduced=(Reduced(ok=True, seconds=0.1),) * 3), 0)
    assert {each.level for each in findings} == {Level.PASS}
    assert {each.code for each in findings} == {"HF550", "HF560", "HF561", "HF563", "HF564", "HF565", "HF566", "HF570"}


def test_a_node_that_did_not_come_is_missing_and_one_above_the_minimum_is_not() -> None:
    told = check(report(0, number=2), report(1, number=2), came=("a", "b"))
    assert found_together(told) == [("HF550", Level.RETRY, "2 of 3 joined: a, b")]
    assert found_together(replace(told, wanted=(1, 3))) == []


def test_a_pair_that_fails_is_named_in_both_directions() -> None:
    told = check(report(0), report(1, link(2, reached=Reached.SILENT)), report(2))
    ((code, level, why),) = found_together(told)
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
    ((_, _, why),) = found_together(cut)
    assert why == "b → c (10.0.0.2:42000): timed out; c → b (10.0.0.1:41000): refused"
    told = check(report(0), report(1, link(2, reached=Reached.UNREACHABLE, error="no route to host")), None)
    texts = {code: why for code, _, why in found_together(told)}
    assert texts["HF560"] == "b → c (10.0.0.2:42000): no route (no route to host); c → b: not tried"
    assert texts["HF554"] == "c joined, but sent no report"


def test_a_stranger_at_the_address_is_no_firewall() -> None:
    told = check(report(0, link(1, reached=Reached.STRANGER, error="another")), report(1), report(2))
    (fix,) = [each.fix for each in examine_together(told, 0) if each.code == "HF560"]
    assert "NAT" in fix
    silent = report(1, link(2, reached=Reached.SILENT))
    both = check(report(0), silent, report(2, link(1, reached=Reached.STRANGER, error="another")))
    (fix,) = [each.fix for each in examine_together(both, 0) if each.code == "HF560"]
    assert fix.endswith("see --local-addr on b"), "the stranger is at its address"


def test_of_very_many_nodes_the_worst_links_are_sent_by_every_measure() -> None:
    number, slow = 200, 7
    names = tuple(f"n{index}" for index in range(number))
    whole = [
        report(
            me,
            *(link(to, bytes_s=1e5) for to in (slow,) if me != slow),
            *(link(to, latency_s=0.05) for to in (3,) if me == 20),
            *(link(to, reached=Reached.SILENT) for to in (121,) if me == 120),
            *(link(to, name_error="unknown") for to in (5,) if me == 9),
            *(link(to, clock_offset_s=60.0) for to in (150,) if me < 100),
            number=number,
        )
        for me in range(number)
    ]
    parts = tuple(part_of(each, 41) for each in whole)
    assert {len(each.links) for each in parts} == {41}
    all_of_them = check(*whole, came=names, wanted=(number, number))
    told = replace(all_of_them, reports=parts)
    from_all, from_parts = found_together(all_of_them), found_together(told)  # each examines 40,000 links
    assert [code for code, _, _ in from_parts] == [code for code, _, _ in from_all]
    texts = {code: why for code, _, why in from_parts}
    assert texts["HF560"] == "n120 → n121 (10.0.0.121:4121000): timed out; n121 → n120: not shown"
    assert texts["HF563"] == "n20 → n3 50 ms (median of all: 0.2 ms)"
    assert texts["HF564"].endswith("and 195 more (median of all: 8 Gbit/s)"), (
        "the node is named where all links are known"
    )
    assert f"n{slow} is slow with all others" in {code: why for code, _, why in from_all}["HF564"]
    assert texts["HF561"] == "n5 does not resolve on n9"

    well = tuple(part_of(report(me, number=number), 41) for me in range(number))
    passes = {each.code: each.why for each in examine_together(replace(told, reports=well), 0)}
    assert passes["HF560"] == "all 39800 connections between 200 nodes work, each pair both ways"


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
    assert len([code for code, _, _ in found_together(told) if code == "HF560"]) == 11
    lines = [why for code, _, why in found_together(replace(told, reports=tuple(other))) if code == "HF560"]
    assert len(lines) == 17
    assert lines[-1].startswith("and 50 more pairs; most often with n")


def test_a_name_that_does_not_resolve_or_means_another_is_named() -> None:
    told = check(report(0), report(1, link(2, names=(), name_error="unknown")), report(2, link(0, names=("10.9.9.9",))))
    assert found_together(told) == [
        ("HF561", Level.WARN, "a is 10.9.9.9 on c, but is reached at 10.0.0.0"),
        ("HF561", Level.WARN, "c does not resolve on b"),
    ]


def test_the_address_that_a_name_does_not_lead_to_is_the_one_that_was_tried() -> None:
    told = check(
        report(0),
        report(1),
        report(2, link(0, address="192.168.7.1:40000", names=("10.0.0.1",))),
    )
    assert found_together(told) == [("HF561", Level.WARN, "a is 10.0.0.1 on c, but is reached at 192.168.7.1")]


def test_a_name_as_local_address_is_no_other_address() -> None:
    named = [replace(link(to), address=f"n{to}-ib0.cluster:40000") for to in (1, 2)]
    assert found_together(check(report(0, *named), report(1), report(2))) == []


def test_names_do_not_matter_on_loopback() -> None:
    here = [replace(each, address="127.0.0.1:4000", names=("192.0.2.1",)) for each in (link(1), link(2))]
    assert found_together(check(report(0, *here), report(1), report(2))) == []


@pytest.mark.parametrize(("seconds", "is_slow"), [(0.03, True), (0.0021, True), (0.0019, False)])
def test_a_slow_or_odd_round_trip_is_named(seconds: float, is_slow: bool) -> None:
    got = found_together(check(report(0, link(1, latency_s=seconds)), report(1), report(2)))
    assert bool(got) is is_slow
    if is_slow:
        assert got[0][0] == "HF563"
        assert "a → b" in got[0][2]


@pytest.mark.parametrize(("bytes_s", "is_slow"), [(1e7, True), (1.9e8, True), (2.1e8, False), (None, False)])
def test_a_slow_or_odd_connection_is_named(bytes_s: float | None, is_slow: bool) -> None:
    got = found_together(check(report(0), report(1), report(2, link(1, bytes_s=bytes_s))))
    assert bool(got) is is_slow
    if is_slow:
        assert got[0][0] == "HF564"
        assert "c → b" in got[0][2]


def test_a_node_that_is_slow_with_all_others_is_blamed_and_not_its_links() -> None:
    slow = [link(2, bytes_s=1e7)]
    reports = [report(me, *slow, number=6) for me in range(6) if me != 2]
    reports.insert(2, report(2, *(link(to, bytes_s=1e7) for to in range(6) if to != 2), number=6))
    told = replace(check(*reports), came=("a", "b", "c", "d", "e", "f"), wanted=(6, 6))
    ((code, _, why),) = found_together(told)
    assert code == "HF564"
    assert why.endswith("; c is slow with all others")


def test_a_node_with_fewer_gpus_than_most_is_named() -> None:
    told = check(report(0, traits={"gpus": "8"}), report(1, traits={"gpus": "7"}), report(2, traits={"gpus": "8"}))
    assert found_together(told) == [("HF568", Level.WARN, "has 7 GPUs, 2 of 3 nodes have 8 GPUs")]


def test_a_clock_that_differs_is_named_once() -> None:
    told = check(report(0, link(2, clock_offset_s=-3.5)), report(1, link(2, clock_offset_s=-3.5)), report(2))
    assert found_together(told) == [("HF565", Level.WARN, "c is 3.5 s behind a")]


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
    ((got, of_level, why),) = found_together(check(report(0), report(1, **changes), report(2)))
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
    ((code, level, why),) = found_together(told)
    assert (code, level) == ("HF570", Level.FATAL)
    assert "b: RuntimeError: Gloo connectFullMesh failed timed out, remote=[127.0.1.1]:1, c: did not end in time" in why
    (fix,) = [each.fix for each in examine_together(told, 0) if each.code == "HF570"]
    assert fix == "set GLOO_SOCKET_IFNAME to the interface that works: a eth0, b eth0, c eth0"


def test_what_others_found_at_home_is_shown_once_and_without_our_own() -> None:
    small = DoctorFinding(code="HF510", level=Level.WARN, what="/dev/shm", why="has only 64 MiB", fix="more")
    told = check(*(report(me, findings=(small,)) for me in range(3)))
    (finding,) = [each for each in examine_together(told, 1) if each.code == "HF510"]
    assert finding.node == "a, c"
