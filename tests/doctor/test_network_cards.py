"""Network cards by the counters of /sys: which of them count, and what has happened to them between two readings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.doctor.device_events import of_link, of_packets
from holdfast.doctor.machine_state import NetworkCard
from holdfast.doctor.network_cards import network_cards

ROUTES = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"


class Sysfs:
    """A double of /sys/class/net and of the routes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.own: dict[str, int] = {}

    def card(self, name: str, *, hardware: bool = False, master: str = "", **files: str) -> None:
        folder = self.root / "sys/class/net" / name
        (folder / "statistics").mkdir(parents=True)
        self.own[name] = len(self.own) + 1
        counters = {"rx_packets": "900", "tx_packets": "100", "rx_errors": "2", "tx_errors": "1"}
        counters |= {"rx_dropped": "7", "tx_dropped": "0", "rx_missed_errors": "5"}
        known = {"ifindex": str(self.own[name]), "type": "1", "operstate": "up", "carrier_changes": "3"} | files
        for file, text in (known | {f"statistics/{each}": text for each, text in counters.items()}).items():
            (folder / file).write_text(f"{text}\n")
        if hardware:
            (folder / "device").mkdir()
        if master:
            (folder / "master").symlink_to(f"../{master}")

    def routes(self, *lines: str, v6: str = "") -> None:
        folder = self.root / "proc/net"
        folder.mkdir(parents=True)
        (folder / "route").write_text(ROUTES + "".join(f"{line}\n" for line in lines))
        (folder / "ipv6_route").write_text(v6)

    def cards(self) -> dict[str, NetworkCard]:
        return {card.name: card for card in network_cards(self.root, self.own)}


def through(name: str, mask: str = "00FFFFFF") -> str:
    return f"{name} 0000000A 00000000 0001 0 0 0 {mask} 0 0 0"


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def test_the_counters_of_a_card_are_read(sysfs: Sysfs) -> None:
    sysfs.card("eno1", hardware=True, carrier_down_count="1")
    sysfs.routes(through("eno1"))
    assert sysfs.cards() == {
        "eno1": NetworkCard(
            name="eno1",
            routed=True,
            up=True,
            carrier_losses=1,
            carrier_changes=3,
            packets=1000,
            errors=3,
            drops=12,
        )
    }


def test_hardware_and_what_a_route_leads_through_are_watched_and_bridges_and_containers_ends_are_not(
    sysfs: Sysfs,
) -> None:
    sysfs.card("lo", type="772")
    sysfs.card("eth0")
    sysfs.card("eno1", hardware=True, master="bond0")
    sysfs.card("eno2", hardware=True)
    sysfs.card("bond0")
    sysfs.card("veth3f", master="docker0")
    sysfs.card("docker0", bridge="")
    sysfs.card("cali7")
    sysfs.card("wg0", type="65534")
    sysfs.routes(*map(through, ("lo", "eth0", "bond0", "docker0", "wg0")), through("cali7", "FFFFFFFF"))
    assert {name: card.routed for name, card in sysfs.cards().items()} == {
        "eth0": True,
        "eno1": True,
        "eno2": False,
        "bond0": True,
    }


def test_a_route_of_ipv6_counts_and_a_link_local_one_does_not(sysfs: Sysfs) -> None:
    sysfs.card("eth0")
    sysfs.card("eth1")
    zeros = "0" * 32
    lines = [("fd00" + "0" * 28, "40", "eth0"), ("fe80" + "0" * 28, "40", "eth1"), ("fd01" + "0" * 28, "80", "eth1")]
    sysfs.routes(v6="".join(f"{to} {size} {zeros} 00 {zeros} 0 0 0 1 {name}\n" for to, size, name in lines))
    assert list(sysfs.cards()) == ["eth0"]


def test_interfaces_of_another_network_are_not_read(sysfs: Sysfs) -> None:
    """In a container without a /sys of its own."""
    sysfs.card("eth0", hardware=True)
    sysfs.own = {"eth0": 77, "eth1": 2}
    assert sysfs.cards() == {}


OLD = NetworkCard(
    name="eth0", routed=True, up=True, carrier_losses=4, carrier_changes=9, packets=10**6, errors=50, drops=90
)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ({}, {"carrier_losses": 6, "up": False}, "the link lost its carrier 2 times on eth0 of node b"),
        ({"carrier_losses": None}, {"carrier_changes": 10}, "the link lost its carrier 1 time on eth0 of node b"),
        ({"carrier_losses": None}, {"carrier_changes": 12}, "the link lost its carrier 2 times on eth0 of node b"),
        ({"carrier_losses": None, "up": False}, {"carrier_changes": 10}, ""),  # it came back
        ({"carrier_losses": None, "up": False}, {"carrier_changes": 12}, "the link lost its carrier 1 time"),
        ({}, {"carrier_changes": 10}, ""),
        ({}, {"carrier_losses": 0}, ""),  # the card was made again
        ({"carrier_losses": None, "carrier_changes": None}, {"carrier_changes": 12}, ""),
    ],
)
def test_losses_of_a_carrier_are_counted(before: dict[str, Any], after: dict[str, Any], text: str) -> None:
    old = replace(OLD, **before)
    event = of_link(old, replace(old, **after))
    assert (event is None) == (text == "")
    assert event is None or (event.on("b").startswith(text) and event.severe)


def test_a_carrier_of_a_card_without_a_route_is_not_severe() -> None:
    event = of_link(replace(OLD, routed=False), replace(OLD, routed=False, carrier_losses=5))
    assert event is not None
    assert not event.severe


@pytest.mark.parametrize(
    ("grown", "text", "severe"),
    [
        ({"packets": 99_980, "errors": 20}, "", None),  # less than one of a thousand
        ({"packets": 1_000, "errors": 19}, "", None),
        ({"packets": 9_950, "errors": 50}, "50 of 10000 packets were damaged in 30 s", False),
        ({"packets": 9_500, "errors": 500, "drops": 900}, "500 of 10000 packets were damaged in 30 s", True),
        ({"packets": 9_000, "drops": 1_000}, "1000 of 10000 packets were dropped in 30 s", False),
        ({"errors": -50}, "", None),
    ],
)
def test_damaged_and_dropped_packets_are_an_event_by_their_share(
    grown: dict[str, int], text: str, severe: bool | None
) -> None:
    values = {name: getattr(OLD, name) + value for name, value in grown.items()}
    event = of_packets(OLD, replace(OLD, **values), 30.2)
    assert (event.text if event else "", event.severe if event else None) == (text, severe)
