"""Hosts that appear and disappear while a job runs, as a program of the user's says."""

from __future__ import annotations

import time

from tests.ssh.conftest import MakeYard
from tests.ssh.yard import Yard


def say(yard: Yard, *hosts: str) -> str:
    """What the program prints from here on; its name."""
    program = yard.folder / "discover"
    fresh = yard.folder / "discover.new"
    fresh.write_text("#!/bin/sh\n" + "".join(f"echo {host}\n" for host in hosts))
    fresh.chmod(0o755)
    fresh.rename(program)
    return str(program)


def test_hosts_come_and_go(yard: MakeYard) -> None:
    three = yard(3)
    program = say(three, "node1:1", "node2:1")
    launcher = three.run("--host-discovery", program, "--nnodes", "1:3")
    three.fleet.trains([1, 2])
    since_s = time.monotonic()
    say(three, "node1:1", "node2:1", "node3:1")
    three.fleet.trains([1, 2, 3], since_s)
    since_s = time.monotonic()
    say(three, "node1:1", "node3:1")
    three.fleet.trains([1, 3], since_s)
    launcher.says("node2 is no longer among the hosts")
    three.empty(numbers=range(2, 3))
    three.fleet.check()
    three.fleet.finish_all([launcher])
    three.empty()


def test_a_program_that_fails_changes_nothing_and_one_bad_host_keeps_nobody_waiting(yard: MakeYard) -> None:
    one = yard(1)
    program = say(one, "node1:1", "nowhere:1")
    launcher = one.run("--host-discovery", program, "--nnodes", "1:3")
    one.fleet.trains([1])
    assert "host nowhere: its name does not resolve" in launcher.text
    say(one)
    launcher.says("names no host any more; the hosts stay as they are")
    one.fleet.finish_all([launcher])
    assert launcher.text.count("does not resolve") == 1, launcher.text


def test_the_job_waits_for_enough_hosts(yard: MakeYard) -> None:
    two = yard(2)
    launcher = two.run("--host-discovery", say(two, "node1:1"), "--nnodes", "2:2")
    launcher.says("1 of at least 2 hosts are here; waiting for more")
    say(two, "node1:1", "node2:1")
    two.fleet.trains([1, 2])
    two.fleet.finish_all([launcher])


def test_a_program_that_never_worked_is_an_error(yard: MakeYard) -> None:
    one = yard(1)
    text = one.refused("--host-discovery", say(one, "a b c"), "--nnodes", "1:2")
    assert "HF140" in text
    assert "'b' is not understood" in text
