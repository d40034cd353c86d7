"""The second soak: a node that is busy is not a node that is lost.

Two pretend hosts train for an hour while, in turn, their workers log 50 MB/s each, all cores are busy with others' work,
and the disk under their logs stands still for longer than the lease; then all of it at once. No member may be counted as
lost, no agent may think that it was cut off, and the first generation must live to the end.

The log files would fill any disk: their old part is given back to it as a hole, which neither writer nor reader notices.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from soak.disk import Disk, mounted
from tests.network.hosts import PretendHosts, Program

NODES = (1, 2)
DISK_MIB = 2048
RATE_MB_S = 50
PHASE_S = 60.0
STALL_S, BREATH_S = 10.0, 5.0
"""The disk stands still, for longer than a lease, and goes on."""
SPINNERS = ("nice", "-n", "0"), ("nice", "-n", "10")
"""On each host one of each for every core."""
KEPT_MIB = 64
"""Of a log file; more is given back to the disk."""
START_S_MAX, END_S_MAX = 60.0, 90.0
SCRIPT = Path(__file__).resolve().parent / "chatty.py"
OVER = ("coordinator.over", "ended")
BAD = ("coordinator.lost", "agent.fenced", "agent.link_lost")


class Phase(NamedTuple):
    name: str
    logs: bool
    cores: bool
    disk: bool


PHASES = (
    Phase("50 MB/s of logs", logs=True, cores=False, disk=False),
    Phase("all cores busy", logs=False, cores=True, disk=False),
    Phase("the disk stalls", logs=False, cores=False, disk=True),
    Phase("all at once", logs=True, cores=True, disk=True),
)


@dataclass
class Spell:
    """One phase, as it was."""

    name: str
    seconds: float
    megabytes: float
    """Logged by all workers together."""


def patience(minutes: float, site: Path) -> int:
    """The exit status: 0 when nobody was taken for lost."""
    site.mkdir(parents=True)
    (site / "rate").write_text("0")
    with mounted(site, DISK_MIB) as disk:
        with PretendHosts(len(NODES), site / "hosts") as hosts:
            agents = {number: _start(hosts, site, number) for number in NODES}
            spells, problems = _endure(hosts, site, disk, agents, minutes * 60)
        found = _events(site)
    for name in dict.fromkeys(spell.name for spell in spells):
        same = [spell for spell in spells if spell.name == name]
        seconds = sum(spell.seconds for spell in same)
        print(f"{name}: {seconds / 60:.1f} min, {sum(spell.megabytes for spell in same) / seconds:.0f} MB/s logged")
    print("journals:", ", ".join(f"{name} {count}" for name, count in sorted(found.items())))
    problems += [f"{name}: {found[name]} times" for name in BAD if found[name]]
    if found["coordinator.started"] != 1:
        problems.append(f"{found['coordinator.started']} generations were started")
    for problem in problems:
        print(f"VIOLATION {problem}")
    print(
        f"patience: {sum(spell.seconds for spell in spells) / 60:.1f} minutes, {found['coordinator.lost']} false losses"
    )
    return 1 if problems else 0


def _start(hosts: PretendHosts, site: Path, number: int) -> Program:
    meeting = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1")
    logs = ("--log-dir", site / "disk" / f"node{number}")
    # No option for the streams: the agent follows the file and shows every line, which is its hardest case.
    return hosts[number].start([sys.executable, "-m", "holdfast.run", *meeting, *logs, SCRIPT, site], cwd=site)


def _endure(
    hosts: PretendHosts, site: Path, disk: Disk, agents: dict[int, Program], seconds: float
) -> tuple[list[Spell], list[str]]:
    """Phase after phase; what was wrong as the rig saw it."""
    start_s = time.monotonic()
    while _written(site) is None:
        if time.monotonic() > start_s + START_S_MAX:
            return [], [f"the workers did not start within {START_S_MAX:g} s"]
        time.sleep(0.1)
    spells: list[Spell] = []
    end_s = time.monotonic() + seconds
    while (now := time.monotonic()) < end_s:
        phase = PHASES[len(spells) % len(PHASES)]
        before = _written(site) or 0
        _spend(hosts, site, disk, phase, min(PHASE_S, end_s - now, max(seconds / len(PHASES), 1.0)))
        megabytes = ((_written(site) or 0) - before) / 1e6
        spells.append(Spell(phase.name, time.monotonic() - now, megabytes))
        dead = [number for number, agent in agents.items() if not agent.running]
        if dead:
            return spells, [f"the agents of the nodes {dead} have ended during: {phase.name}"]
    (site / "rate").write_text("0")
    (site / "finish").touch()
    problems = []
    for number, agent in agents.items():
        try:
            code = agent.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            problems.append(f"the agent of node{number} did not end within {END_S_MAX:g} s")
        else:
            problems += [f"the agent of node{number} ended with {code}"] if code else []
    return spells, problems


def _spend(hosts: PretendHosts, site: Path, disk: Disk, phase: Phase, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    (site / "rate").write_text(str(RATE_MB_S if phase.logs else 0))
    spinners = list(_spinners(hosts)) if phase.cores else []
    try:
        next_stall_s = time.monotonic() if phase.disk else end_s
        while (now := time.monotonic()) < end_s:
            if now >= next_stall_s:
                disk.stall(min(STALL_S, end_s - now))
                next_stall_s = now + STALL_S + BREATH_S
            if not disk.stalled:
                _give_back(disk)
            time.sleep(1.0)
    finally:
        disk.thaw()
        for spinner in spinners:
            spinner.end()


def _spinners(hosts: PretendHosts) -> Iterator[Program]:
    for host in hosts:
        for niceness in SPINNERS:
            for _ in range(len(os.sched_getaffinity(0))):
                yield host.start([*niceness, sys.executable, "-c", "while True: pass"])


def _give_back(disk: Disk) -> None:
    for path in disk.path.glob("node*/*/attempt_*/*/std*.log"):
        old = path.stat().st_size - (KEPT_MIB << 20)
        if old > 0:
            subprocess.run(["fallocate", "--punch-hole", "--length", str(old), str(path)], check=True)


def _written(site: Path) -> int | None:
    """Bytes that all workers have logged; None before all have begun."""
    accounts = [site / f"written-node{number}" for number in NODES]
    with contextlib.suppress(OSError, ValueError):
        return sum(int(account.read_text()) for account in accounts)
    return None


def _events(site: Path) -> Counter[str]:
    """All journals together, up to the end of the job, after which the members hang up; and a copy of each."""
    found: Counter[str] = Counter()
    for number in NODES:
        for path in (site / "disk" / f"node{number}").glob("*/events.jsonl"):
            text = path.read_text()
            (site / f"node{number}-events.jsonl").write_text(text)
            names = [json.loads(line)["event"] for line in text.splitlines()]
            found.update(takewhile(lambda name: name not in OVER, names))
    return found
