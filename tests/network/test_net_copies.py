"""Copies of states between pretend hosts: over the fastest of two networks, and when links, memory and processes fail."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.memory_folder import COPIES
from holdfast.train.snapshots.slots import committed_slots
from tests.network.hosts import Host, PretendHosts, Program, why_not
from tests.support.limits import limit_s, until

SCRIPT = Path(__file__).with_name("copying_host.py")
SLOW, FAST, NOBODY = "10.77.0.1", "10.78.0.1", "10.79.0.1"
FOLDER = Path("/dev/shm/copies")
LIMIT_S = 30.0


class Pair:
    """node2 sends to node1. They share a slow network, that of their names, and a fast one."""

    def __init__(self, hosts: PretendHosts, folder: Path) -> None:
        self.hosts, self._folder = hosts, folder
        self.memory = hosts[1].shared_memory
        hosts.second_network()
        hosts.slow("30mbit")
        self.receiver, said = self._start(hosts[1], "receive", f"{SLOW},{FAST}")
        self.port = until(lambda: said.read_text().strip(), "it listens", LIMIT_S)

    def _start(self, host: Host, what: str, *more: str) -> tuple[Program, Path]:
        path = self._folder / what
        with path.open("wb") as out:
            return host.start([sys.executable, SCRIPT, what, FOLDER, *more], stdout=out), path

    def send(self, *key: str) -> Callable[[], list[dict[str, Any]]]:
        """The events so far."""
        self.sender, said = self._start(self.hosts[2], "send", f"{SLOW},{FAST},{NOBODY}", self.port, *key)
        return lambda: [json.loads(line) for line in said.read_text().splitlines(True) if line.endswith("\n")]

    def kept(self) -> list[int]:
        """The steps that node1 keeps, while nothing is sent to it; all whole."""
        found = committed_slots(self.memory / FOLDER.name / COPIES, 0)
        assert all(set(bytes(each.data)) == {each.step % 251} for each in found)
        return sorted(each.step for each in found)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    if why := why_not():
        pytest.skip(why)
    with PretendHosts(2, tmp_path / "hosts") as hosts:
        yield Pair(hosts, tmp_path)


def arrived(events: Callable[[], list[dict[str, Any]]], to: str = "", after: int = 0) -> dict[str, Any]:
    """The first copy that arrived after so many events, at this address."""

    def found() -> list[dict[str, Any]]:
        return [each for each in events()[after:] if not each["why"] and each["to"] == (to or each["to"])]

    return until(found, lambda: f"a copy arrives: {events()[-3:]}", LIMIT_S)[0]


def failed(events: Callable[[], list[dict[str, Any]]]) -> str:
    """Why the first copy that did not arrive, did not."""
    return str(until(lambda: [each["why"] for each in events() if each["why"]], "a copy fails", LIMIT_S)[0])


def test_the_fastest_address_is_taken_and_another_one_when_its_link_goes_down(pair: Pair) -> None:
    events = pair.send()
    step = arrived(events, FAST, after=1)["step"]
    assert {each["to"] for each in events()} == {FAST}
    pair.hosts[1].run(["ip", "link", "set", "eth1", "down"])
    assert "it does not answer" in failed(events) or "No route" in failed(events)
    assert arrived(events, SLOW)["step"] > step
    pair.hosts[1].run(["ip", "link", "set", "eth1", "up"])
    pair.hosts.unplug(1)
    assert arrived(events, FAST, after=len(events()))["size_bytes"] > 0
    pair.hosts.plug(1)


def test_a_newcomer_fetches_over_the_fastest_address(pair: Pair) -> None:
    arrived(pair.send())
    pair.sender.end()
    offered = pair.hosts[1].run([sys.executable, SCRIPT, "addresses", FOLDER, pair.hosts[2].name])
    assert offered.split() == [SLOW, FAST]
    step = str(pair.kept()[0])
    fetching = [sys.executable, SCRIPT, "fetch", "/dev/shm/new", f"{SLOW},{NOBODY},{FAST}", pair.port, step]
    assert pair.hosts[2].run(fetching).split() == [FAST]


def test_a_receiver_that_is_killed_in_the_middle_leaves_whole_copies_only(pair: Pair) -> None:
    pair.hosts.slow("10mbit", "eth1")  # a copy takes seconds
    events = pair.send()
    arrived(events)
    until(lambda: len(os.listdir(pair.memory / FOLDER.name / COPIES)) > 1, "the next one is on its way", LIMIT_S)
    pair.receiver.signal(signal.SIGKILL)
    pair.receiver.wait(limit_s(LIMIT_S))
    why = failed(events)
    assert "\n" not in why
    assert pair.kept() == [1]


def test_full_memory_costs_copies_until_there_is_room(pair: Pair) -> None:
    fill = "dd if=/dev/zero of=/dev/shm/fill bs=1M count=1100 2>/dev/null; true"
    pair.hosts[1].run(["sh", "-c", fill], LIMIT_S)
    events = pair.send()
    assert "refused" in failed(events)
    assert pair.kept() == []
    (pair.memory / "fill").unlink()
    arrived(events)
    assert pair.receiver.running


def test_with_another_key_nothing_arrives(pair: Pair) -> None:
    events = pair.send("o" * 32)
    assert "does not know the key" in failed(events)
    assert pair.kept() == []
    assert pair.receiver.running
