"""Findings about several nodes: missing nodes, every pair, versions, clocks, the all-reduce. PURE."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from itertools import chain
from math import inf
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from holdfast.doctor.findings import (
    DoctorFinding,
    JointCheck,
    NodePath,
    NodeReport,
    Reached,
    Reduced,
    Summary,
    fatal,
    passed,
    rate,
    retry,
    span,
    warn,
)
from holdfast.doctor.majority import NODES_MIN, differences
from holdfast.doctor.slow_pairs import judge
from holdfast.text import is_loopback, listed

PAIRS_NAMED_MAX = 16
LATENCY_S_MAX = 0.02
LATENCY_ODD_FACTOR, LATENCY_ODD_S_MIN = 10.0, 0.002
"""A round trip is reported if it takes this many times the median of these nodes, and at least this long."""
BANDWIDTH_BYTES_S_MIN = 100e6 / 8
BANDWIDTH_ODD_FACTOR = 0.2
"""A link is reported if it is slower than this share of the median of these nodes."""
CLOCK_OFFSET_S_MAX = 1.0
SOURCE_PLACE = re.compile(r" with \[/\S+:\d+\]|\$\d+$")
"""Positions in gloo's sources in its messages, which do not help to repair a network."""


class Way(NamedTuple):
    """A network path with both nodes."""

    start: int
    """Index of the node that measured it."""
    link: NodePath
    """The measured path, with the index of the other node."""


def examine_together(check: JointCheck, me: int) -> tuple[DoctorFinding, ...]:
    """All findings of a check, except those of node `me` about itself, which are shown anyway."""
    found = [finding for each in TOGETHER for finding in each(check)]
    return (*found, *local_ones(check, me))


def local_ones(check: JointCheck, me: int) -> Iterator[DoctorFinding]:
    """Findings of the other nodes about themselves; equal findings of several nodes become one."""
    hosts: dict[DoctorFinding, list[str]] = {}
    for index, report in enumerate(check.reports):
        if report is not None and index != me:
            for finding in report.findings:
                hosts.setdefault(replace(finding, node=""), []).append(check.came[index])
    for finding, found_on in hosts.items():
        yield replace(finding, node=listed(found_on, 4))


def who_came(check: JointCheck) -> Iterator[DoctorFinding]:
    what, (least, most), number = "nodes", check.wanted, len(check.came)
    wanted = str(most) if least == most else f"{least} to {most}"
    shown = f"{number} of {wanted} joined: {listed(check.came, 16)}"
    if number < least:
        fix = "start doctor with the same line on the others, and see doctor's output there"
        yield retry("HF550", what, shown, fix)
    else:
        yield passed("HF550", what, shown)


def silent_nodes(check: JointCheck) -> Iterator[DoctorFinding]:
    silent = [check.came[index] for index, report in enumerate(check.reports) if report is None]
    if silent:
        why = f"{listed(silent)} joined, but sent no report"
        yield retry("HF554", "nodes", why, "see doctor's output there; --timeout gives more time")


def witnesses(check: JointCheck) -> Iterator[DoctorFinding]:
    """Check that each entry of the endpoint list is a node of this check, or a witness that all nodes reach."""
    what = "witness"
    reports = [(name, report) for name, report in zip(check.came, check.reports, strict=True) if report is not None]
    for same in zip(*(report.entries for _, report in reports), strict=False):
        if any(entry.own for entry in same):
            continue  # a node of this check has that address: no witness is needed there
        address = same[0].address
        missing = {name: entry.error for (name, _), entry in zip(reports, same, strict=True) if entry.error}
        if not missing:
            yield passed("HF555", what, f"one answers at {address}")
            continue
        fix = f"start it there (holdfast witness --bind {address}), with the job's token, or let the port through"
        names_missing, error = listed(list(missing), 4), next(iter(missing.values()))
        why = f"none at {address} for {names_missing}, and no node of this check: {error}"
        yield warn("HF555", what, why, fix)


def pairs(check: JointCheck) -> Iterator[DoctorFinding]:
    """Show each pair with a failed direction, with the results of both directions: they tell where the fault is."""
    what = "pairs"
    by_ends = {(way.start, way.link.to): way.link for way in ways(check)}
    bad = sorted({tuple(sorted(ends)) for ends, link in by_ends.items() if link.reached is not Reached.YES})
    for one, other in bad[:PAIRS_NAMED_MAX]:
        there, back = by_ends.get((one, other)), by_ends.get((other, one))
        ends = (check.came[one], check.came[other])
        both = [
            direction(ends, there, check.reports[one]),
            direction(ends[::-1], back, check.reports[other]),
        ]
        yield fatal("HF560", what, "; ".join(both), advice(ends, there, back))
    if len(bad) > PAIRS_NAMED_MAX:
        often = most_often(check, [(one, other) for one, other in bad])
        why = f"and {len(bad) - PAIRS_NAMED_MAX} more pairs; most often with {often}"
        yield fatal("HF560", what, why, "open all TCP ports between the nodes")
    if by_ends and not bad:
        tried = sum(max(report.tried, len(report.links)) for report in check.reports if report is not None)
        why = f"all {tried} connections between {len(check.came)} nodes work, each pair both ways"
        yield passed("HF560", what, why)


def direction(ends: tuple[str, str], link: NodePath | None, report: NodeReport | None) -> str:
    """`report`: that of the node at the first end."""
    arrow = f"{ends[0]} → {ends[1]}"
    if link is None:
        return f"{arrow}: {'not tried' if report is None or not report.is_part else 'not shown'}"
    if link.reached is Reached.YES:
        return f"{arrow} works"
    words = {
        Reached.REFUSED: "refused",
        Reached.SILENT: "timed out",
        Reached.UNREACHABLE: "no route",
        Reached.STRANGER: "another program answered",
        Reached.BROKEN: "the connection failed",
    }
    detail = f" ({link.error})" if link.error and link.reached not in (Reached.REFUSED, Reached.SILENT) else ""
    return f"{arrow} ({link.address}): {words[link.reached]}{detail}"


def advice(ends: tuple[str, str], there: NodePath | None, back: NodePath | None) -> str:
    """The probable cause of a pair that does not work. One failed direction blames the node that is not reached."""
    failed = [(end, link) for end, link in zip(ends[::-1], (there, back), strict=True) if is_bad(link)]
    if any(link is not None and link.reached is Reached.STRANGER for _, link in failed):
        where = next(end for end, link in failed if link is not None and link.reached is Reached.STRANGER)
        return f"another machine answers at that address: NAT, or an address given twice; see --local-addr on {where}"
    where = f"on {failed[0][0]}" if len(failed) == 1 else f"on {ends[0]}, on {ends[1]} or between them"
    return f"a firewall or security group {where}? Ranks need all TCP ports between the nodes, not only the endpoint's"


def is_bad(link: NodePath | None) -> bool:
    return link is not None and link.reached is not Reached.YES


def most_often(check: JointCheck, bad: list[tuple[int, int]]) -> str:
    """The node that is in most of these pairs."""
    ends = [end for pair in bad for end in pair]
    return check.came[max(set(ends), key=ends.count)]


def names(check: JointCheck) -> Iterator[DoctorFinding]:
    """Compare how the nodes resolve each host's name."""
    what, odd = "names", False
    for index, host in enumerate(check.came):
        coming = [way for way in ways(check) if way.link.to == index and not on_loopback(way.link)]
        unknown = [check.came[way.start] for way in coming if way.link.name_error]
        elsewhere = {
            way.link.names: (check.came[way.start], bare_address(way.link))
            for way in coming
            if leads_elsewhere(way.link)
        }
        fix = f"add {host} with its address to /etc/hosts or DNS, or use addresses everywhere"
        if unknown:
            odd = True
            yield warn("HF561", what, f"{host} does not resolve on {listed(unknown)}", fix)
        for found, (where, reached) in elsewhere.items():
            odd = True
            yield warn("HF561", what, f"{host} is {listed(found)} on {where}, but is reached at {reached}", fix)
    if not odd and any(not on_loopback(way.link) for way in ways(check)):
        yield passed("HF561", what, "every host name resolves to the right address on every other node")


def leads_elsewhere(link: NodePath) -> bool:
    """Whether the other node's name is another address here than the one that was tried. One that --local-addr names
    is no address."""
    tried = bare_address(link)
    try:
        ip_address(tried.partition("%")[0])
    except ValueError:
        return False
    return bool(link.names) and tried not in link.names


def latency(check: JointCheck) -> Iterator[DoctorFinding]:
    what = "latency"
    measured = [(way, way.link.latency_s) for way in ways(check) if way.link.latency_s is not None]
    if not measured:
        return
    # All-reduces go at the pace of the slowest link, so that one that is far from the usual counts even if it is fast
    # enough for other purposes.
    usual = typical(check, [seconds for _, seconds in measured], lambda report: report.latency_s)
    bound = min(LATENCY_S_MAX, max(LATENCY_ODD_S_MIN, LATENCY_ODD_FACTOR * usual))
    slow = sorted((pair for pair in measured if pair[1] > bound), key=lambda pair: -pair[1])
    if slow:
        shown = listed([f"{arrow(check, way)} {span(seconds)}" for way, seconds in slow], 4)
        yield warn("HF563", what, f"{shown} (median of all: {span(usual)})", "place the nodes closer to each other")
    else:
        worst = max(measured, key=lambda pair: pair[1])
        why = f"round trips of {span(usual)}, at most {span(worst[1])} ({arrow(check, worst[0])})"
        yield passed("HF563", what, why)


def bandwidth(check: JointCheck) -> Iterator[DoctorFinding]:
    what = "bandwidth"
    measured = [(way, way.link.bytes_s) for way in ways(check) if way.link.bytes_s is not None]
    if not measured:
        return
    usual = typical(check, [bytes_s for _, bytes_s in measured], lambda report: report.bytes_s)
    bound = max(BANDWIDTH_BYTES_S_MIN, BANDWIDTH_ODD_FACTOR * usual)
    slow = sorted((pair for pair in measured if pair[1] < bound), key=lambda pair: pair[1])
    if slow:
        shown = listed([f"{arrow(check, way)} {rate(bytes_s)}" for way, bytes_s in slow], 4)
        fix = "look for a link at a lower speed (ethtool), a wrong MTU, or others' traffic"
        yield warn("HF564", what, f"{shown} (median of all: {rate(usual)}){blamed(check, measured)}", fix)
    else:
        worst = min(measured, key=lambda pair: pair[1])
        why = f"{rate(usual)} by one connection, at least {rate(worst[1])} ({arrow(check, worst[0])})"
        yield passed("HF564", what, why)


def blamed(check: JointCheck, measured: list[tuple[Way, float]]) -> str:
    """The node that is slow with all others, in words; empty: none is, or only the worst links are known."""
    # Beside the worst links alone, most nodes look slow, or none does.
    if any(report is not None and report.is_part for report in check.reports):
        return ""
    rates: dict[tuple[int, int], float] = {}
    for way, bytes_s in measured:
        pair = min(way.start, way.link.to), max(way.start, way.link.to)
        rates[pair] = min(bytes_s, rates.get(pair, bytes_s))
    nodes = [check.came[each.nodes[0]] for each in judge(rates, BANDWIDTH_ODD_FACTOR) if not each.is_link]
    return f"; {listed(nodes)} {'is' if len(nodes) == 1 else 'are'} slow with all others" if nodes else ""


def typical(check: JointCheck, shown: list[float], of: Callable[[NodeReport], float | None]) -> float:
    """The median of all links: if only the worst of a node are shown, of its own medians."""
    of_parts = [of(report) for report in check.reports if report is not None and report.is_part]
    return median([each for each in of_parts if each is not None] or shown)


def clocks(check: JointCheck) -> Iterator[DoctorFinding]:
    """Compare each clock with the first node that measured it."""
    what = "clocks"
    offsets: dict[int, tuple[int, float]] = {}
    for way in ways(check):
        # Each pair was measured in both directions; one is enough.
        if way.link.clock_offset_s is not None and way.link.to > way.start:
            offsets.setdefault(way.link.to, (way.start, way.link.clock_offset_s))
    if not offsets:
        return
    odd = [
        f"{check.came[index]} is {span(abs(offset))} {'ahead of' if offset > 0 else 'behind'} {check.came[start]}"
        for index, (start, offset) in sorted(offsets.items())
        if abs(offset) > CLOCK_OFFSET_S_MAX
    ]
    if odd:
        yield warn("HF565", what, listed(odd), "start chronyd or systemd-timesyncd on all nodes")
    else:
        worst = max(abs(offset) for _, offset in offsets.values())
        yield passed("HF565", what, f"agree within {span(worst)}")


def versions(check: JointCheck) -> Iterator[DoctorFinding]:
    known = list(summaries(check))
    if len(known) < 2:
        return
    fix = "install the same environment or image on all nodes"
    parts: tuple[tuple[str, str, Callable[[Summary], str]], ...] = (
        ("HF566", "Python", lambda each: each.python),
        ("HF566", "holdfast", lambda each: each.holdfast),
        ("HF567", "torch", lambda each: each.torch),
        ("HF567", "CUDA", lambda each: each.cuda),
        ("HF567", "NCCL", lambda each: each.nccl),
    )
    equal = []
    for code, part, read in parts:
        by_version: dict[str, list[str]] = {}
        for host, summary in known:
            by_version.setdefault(read(summary) or "none", []).append(host)
        if len(by_version) == 1:
            equal += [f"{part} {version}" for version in by_version if version != "none"]
            continue
        shown = "; ".join(f"{part} {version} on {listed(hosts)}" for version, hosts in by_version.items())
        # torch, CUDA and NCCL of another release do not work together; another patch or build usually does.
        serious = code == "HF567" and len({release(version) for version in by_version}) > 1
        yield (fatal if serious else warn)(code, "versions", shown, fix)
    if equal:
        yield passed("HF566", "versions", f"the same on all nodes: {', '.join(equal)}")


def machines(check: JointCheck) -> Iterator[DoctorFinding]:
    """Compare the GPUs and ports of the nodes."""
    what = "machines"
    traits = {host: summary.traits for host, summary in summaries(check)}
    found = differences(traits)
    for each in found:
        fix = "repair it, or leave it out" if each.slows else "give all nodes the same"
        yield replace(warn("HF568", what, each.text, fix), node=each.node)
    compared = [name for name in ("gpus", "ports", "nic_mbit_s") if any(name in own for own in traits.values())]
    if compared and not found and len(traits) >= NODES_MIN:
        yield passed("HF568", what, "no node has less than most others: GPUs, links, ports, power limits")


def release(version: str) -> tuple[str, ...]:
    """The first two numbers of a version: `2.13.0+cu126` and `2.13.1` are of one release."""
    return tuple(version.partition("+")[0].split(".")[:2])


def all_reduce(check: JointCheck) -> Iterator[DoctorFinding]:
    what = "all-reduce"
    if check.reduced is None:
        if check.no_reduce:
            yield passed("HF570", what, f"not tried: {check.no_reduce}")
        return
    by_node = zip(check.came, check.reduced, strict=True)
    bad = [f"{name}: {explain(each)}" for name, each in by_node if each is None or not each.ok]
    if not bad:
        slowest = max(each.seconds for each in check.reduced if each is not None)
        yield passed("HF570", what, f"gloo, one process per node, right on all {len(check.came)}: {span(slowest)}")
        return
    chosen = [f"{name} {summary.interface}" for name, summary in summaries(check) if summary.interface]
    fix = (
        f"set GLOO_SOCKET_IFNAME to the interface that works: {listed(chosen)}" if chosen else "set GLOO_SOCKET_IFNAME"
    )
    yield fatal("HF570", what, f"gloo failed although the pairs work. {listed(bad, 4)}", fix)


TOGETHER: tuple[Callable[[JointCheck], Iterator[DoctorFinding]], ...] = (
    *(who_came, silent_nodes, witnesses, pairs, names, latency, bandwidth, clocks, versions, machines, all_reduce),
)
"""All checks in the order of output."""


def explain(reduced: Reduced | None) -> str:
    """The reason why the all-reduce failed on one node."""
    if reduced is None:
        return "sent no result"
    return "did not end in time" if reduced.silent else SOURCE_PLACE.sub("", reduced.error)


def ways(check: JointCheck) -> Iterator[Way]:
    """All links that were tried."""
    for index, report in enumerate(check.reports):
        links = report.links if report is not None else ()
        yield from (Way(index, link) for link in links if 0 <= link.to < len(check.came))


def summaries(check: JointCheck) -> Iterator[tuple[str, Summary]]:
    """The summaries of the nodes that reported, with their names."""
    for name, report in zip(check.came, check.reports, strict=True):
        if report is not None:
            yield name, report.summary


def part_of(report: NodeReport, links_max: int) -> NodeReport:
    """The report with this number of links at most: those that a finding is about first, then the slowest by round
    trip and by bandwidth in turn. It says how many there were, and what is usual among them."""
    if len(report.links) <= links_max:
        return report
    latencies = [link.latency_s for link in report.links if link.latency_s is not None]
    rates = [link.bytes_s for link in report.links if link.bytes_s is not None]
    far = sorted(report.links, key=lambda link: -(link.latency_s or 0.0))
    slow = sorted(report.links, key=lambda link: inf if link.bytes_s is None else link.bytes_s)
    worst = chain(filter(is_bad, report.links), filter(is_odd, report.links), *zip(far, slow, strict=True))
    chosen = list({link.to: link for link in worst}.values())[:links_max]
    return replace(
        report,
        links=tuple(sorted(chosen, key=lambda link: link.to)),
        tried=len(report.links),
        latency_s=median(latencies) if latencies else None,
        bytes_s=median(rates) if rates else None,
    )


def is_odd(link: NodePath) -> bool:
    """Whether its name or its clock is reported, though the connection works."""
    offset_s = link.clock_offset_s or 0.0
    return bool(link.name_error) or leads_elsewhere(link) or abs(offset_s) > CLOCK_OFFSET_S_MAX


def arrow(check: JointCheck, way: Way) -> str:
    return f"{check.came[way.start]} → {check.came[way.link.to]}"


def bare_address(link: NodePath) -> str:
    """The address without its port."""
    return link.address.rpartition(":")[0].strip("[]")


def on_loopback(link: NodePath) -> bool:
    return is_loopback(bare_address(link))
