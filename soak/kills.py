"""Ranks and nodes of sharded models in ht.survive are killed at random moments, in jobs that come to their ends.

    python -m soak kills --minutes 60 --seed 1

Each job has another model (FSDP2, HSDP, replicas of tensor parallel models), other nodes, and another answer to a loss
(shrink, wait), drawn from the seed. A node is an agent on loopback: it is lost when all its processes are killed at
once, and another one comes a moment later. A kill comes when all ranks train, or soon after the one before: in a
regroup, in a resume, while replacements start.

A job that makes no step for STANDSTILL_S is ended, and counts as a fault, as does one whose weights, losses or steps
are not those of an undisturbed job. The folder of each such job is kept, with its journals.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil

SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "train" / "scripts" / "sharded.py"
STANDSTILL_S = 60.0
END_S = 30.0
"""After the last step, until all agents have ended."""
SOON, SOON_S = 0.4, 1.5
"""This share of the kills comes up to so long after the one before."""
CALM_S = 1.5
"""A kill comes up to so long after all ranks train."""
ALL_S = 20.0
"""All ranks need not train before the next kill, if that takes longer: fewer may go on for long."""
NODE_PAUSE_S = 3.0
"""Another node comes up to so long after the loss of one."""
POLL_S = 0.05
RELATIVE = 1e-7
"""Losses and weights of another number of ranks: their sums have another order."""
KINDS = ("fsdp", "hsdp", "grid")
GROUPS_OF = {"fsdp": 1, "hsdp": 2, "grid": 2}
"""The number of ranks has to be a multiple of this."""


@dataclass(frozen=True)
class Case:
    """One job."""

    kind: str
    nodes: int
    nproc: int
    how: str
    """Of --survive."""
    copies: int
    kills: int
    node_kills: float
    """The share of kills that take a whole node."""
    own: bool
    """Whether something is tracked that may differ between ranks: then a lost step is not taken from replicas."""
    epochs: int
    seed: str

    @property
    def ranks(self) -> int:
        """The number of ranks that train when all are there."""
        return self.nodes * self.nproc // GROUPS_OF[self.kind] * GROUPS_OF[self.kind]

    def script(self) -> dict[str, Any]:
        """CASE of the script."""
        case = {"kind": self.kind, "exact": True, "memory": 5, "disk": 40, "epochs": self.epochs, "by rank": True}
        case |= {"copies": self.copies, "pause_s": 0.01, "nothing of its own": not self.own}
        if GROUPS_OF[self.kind] > 1:
            case["multiple"] = GROUPS_OF[self.kind]
        return case

    def undisturbed(self) -> str:
        """The name of the undisturbed job that ends as this one should."""
        return f"{self.kind}-{self.ranks}-{self.epochs}-{self.own}"


def drawn(rng: Random, seed: int, number: int, kinds: Sequence[str] = KINDS, most: int = 3) -> Case:
    """The case of this number, on at most `most` nodes."""
    kind = kinds[number % len(kinds)]
    nodes_of = [(1, 4), (2, 2), (3, 2), (3, 2), (3, 1)]
    nodes, nproc = rng.choice([each for each in nodes_of if each[0] <= most])
    return Case(
        kind,
        nodes,
        nproc,
        how=rng.choice(("shrink", "wait")),
        copies=rng.choice((0, 1)) if nodes > 1 else 0,
        kills=rng.randint(2, 6),
        node_kills=rng.choice((0.2, 0.6, 1.0)) if nodes > 1 else 0.0,
        own=rng.random() < 0.3,
        epochs=30,
        seed=f"{seed} {number}",
    )


@dataclass
class Node:
    """An agent on loopback, and its screen."""

    number: int
    process: subprocess.Popen[bytes]
    logs: Path

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def workers(self) -> list[int]:
        """The processes of the ranks, also those that are starting."""
        found = []
        for each in family(self.process.pid)[1:]:
            with contextlib.suppress(psutil.Error):
                if "RANK" in each.environ():
                    found.append(each.pid)
        return found

    def all_can_go_on_since(self, since_s: float, nproc: int) -> bool:
        """Whether all its ranks have come to train since then."""
        for path in self.logs.glob("*/events.jsonl"):
            for line in reversed(path.read_bytes().splitlines()):
                event = json.loads(line) if line.endswith(b"}") else {}
                if event.get("event") == "can_go_on":
                    return float(event["monotonic"]) > since_s and len(event["local_ranks"]) == nproc
        return False

    def kill(self) -> None:
        """A node without power."""
        for each in family(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()


def family(pid: int) -> list[psutil.Process]:
    """This process, and all below it."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@dataclass
class Job:
    """The agents of one case."""

    case: Case
    folder: Path
    port: int
    nodes: dict[int, Node] = field(default_factory=dict)
    started: int = 0

    def note(self, text: str) -> None:
        with (self.folder / "kills.txt").open("a") as file:
            file.write(f"{time.monotonic():.3f} step {self.step()}: {text}\n")

    def step(self) -> int:
        try:
            return int((self.folder / "now").read_text() or 0)
        except (FileNotFoundError, ValueError):
            return -1

    def start(self, number: int) -> None:
        logs = self.folder / f"logs{self.started}"
        line = [sys.executable, "-m", "holdfast.run", "--nproc-per-node", str(self.case.nproc), "--log-dir", str(logs)]
        line += ["--max-restarts", "100000", "--survive", self.case.how]
        if self.case.nodes == 1:
            line.append("--standalone")
        else:
            line += ["--nnodes", f"1:{self.case.nodes}", "--rdzv-backend", "c10d", "--rdzv-conf", "settle=4"]
            line += ["--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        line += [str(SCRIPT), str(self.folder), json.dumps(self.case.script())]
        with (self.folder / f"screen{self.started}.txt").open("wb") as screen:
            process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=screen, stderr=screen, env=environment(self.folder)
            )
        self.nodes[number] = Node(number, process, logs)
        self.started += 1

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()


def environment(folder: Path) -> dict[str, str]:
    """Nothing of an outer launcher."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC_", "HOLDFAST_"))}
    own = {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    return {**kept, **own, "HOLDFAST_RUNTIME_DIR": str(folder / "running")}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class FaultError(Exception):
    """A job stands still, fails, or has wrong numbers."""


def play(case: Case, folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Run the job with its kills. Returns what its ranks have at the end, and the number of kills. Raises FaultError."""
    folder.mkdir(parents=True)
    rng, job = Random(case.seed), Job(case, folder, free_port())
    try:
        for number in range(case.nodes):
            job.start(number)
        kills = _kill_all(job, rng)
        _await_end(job)
    except FaultError:
        _look(job)
        raise
    finally:
        job.close()
    codes = [node.process.returncode for node in job.nodes.values()]
    if any(codes):
        raise FaultError(f"exit codes {codes}")
    ends = sorted(folder.glob("end.*"), key=lambda path: int(path.suffix[1:]))
    return [json.loads(path.read_text()) for path in ends], kills


def _kill_all(job: Job, rng: Random) -> int:
    case, kills, since_s = job.case, 0, time.monotonic()
    again: dict[int, float] = {}
    """Nodes that are lost, and when another one comes in their place."""
    soon = False
    while kills < case.kills:
        began_s = time.monotonic()
        for _ in _watched(job, again):
            now_s = time.monotonic()
            all_can_go_on = len(job.nodes) == case.nodes and all(
                node.all_can_go_on_since(since_s, case.nproc) for node in job.nodes.values()
            )
            if soon or all_can_go_on or (job.step() >= 0 and now_s > began_s + ALL_S):
                break
        else:
            break
        pause_s = time.monotonic() + rng.uniform(0.0, SOON_S if soon else CALM_S)
        for _ in _watched(job, again):
            if time.monotonic() > pause_s:
                break
        else:
            break
        since_s = time.monotonic()
        whole = rng.random() < case.node_kills and not again and len(job.nodes) == case.nodes
        node = job.nodes[rng.choice(sorted(job.nodes))]
        if whole:
            job.note(f"node {node.number} (pid {node.process.pid})")
            del job.nodes[node.number]
            node.kill()
            again[node.number] = time.monotonic() + rng.uniform(0.0, NODE_PAUSE_S)
        elif pids := node.workers():
            job.note(f"worker {(victim := rng.choice(pids))} of node {node.number}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        else:
            continue
        kills += 1
        soon = not soon and rng.random() < SOON
    for _ in _watched(job, again):
        if not again:
            break
    return kills


def _watched(job: Job, again: dict[int, float]) -> Iterator[None]:
    """Look at the job again and again, until an agent ends. Raises FaultError if it stands still."""
    step, moved_s = job.step(), time.monotonic()
    while all(node.runs for node in job.nodes.values()):
        now_s = time.monotonic()
        for number in [number for number, at_s in again.items() if now_s > at_s]:
            del again[number]
            job.start(number)
        if job.step() != step:
            step, moved_s = job.step(), now_s
        if now_s > moved_s + STANDSTILL_S:
            raise FaultError(f"no step for {STANDSTILL_S:g} s after step {step}")
        yield
        time.sleep(POLL_S)


def _await_end(job: Job) -> None:
    for _ in _watched(job, {}):
        pass
    end_s = time.monotonic() + END_S
    while any(node.runs for node in job.nodes.values()):
        if time.monotonic() > end_s:
            raise FaultError(f"an agent has ended, and others not within {END_S:g} s")
        time.sleep(POLL_S)


def _look(job: Job) -> None:
    """Write down where all are."""
    for command in ("status", "stacks"):
        for node in job.nodes.values():
            for folder in node.logs.glob("*"):
                line = [sys.executable, "-m", "holdfast", command, folder.name]
                with (
                    (job.folder / f"{command}.{node.number}.txt").open("wb") as file,
                    contextlib.suppress(subprocess.TimeoutExpired),
                ):
                    subprocess.run(line, stdout=file, stderr=file, env=environment(job.folder), timeout=30, check=False)


def judge(case: Case, found: Sequence[Mapping[str, Any]], reference: Mapping[str, Any]) -> None:
    """Raises FaultError if the job has not ended as the undisturbed one."""
    if not found:
        raise FaultError("no rank came to the end")
    if len({json.dumps(each["parameters"]) for each in found}) > 1:
        raise FaultError("the ranks have different weights")
    for each in found:
        for name in ("step", "rates"):
            if each[name] != reference[name]:
                raise FaultError(f"{name}: {each[name]}, undisturbed {reference[name]}")
        worlds = {world for _, _, world, *_ in each["calls"]}
        exact = worlds == {case.ranks} and case.nodes == 1 and case.how == "wait"
        if exact and each["parameters"] != reference["parameters"]:
            raise FaultError("not the bits of the undisturbed job")
        for name in ("weights", "losses"):
            theirs = reference[name]
            near = len(each[name]) == len(theirs) and all(
                math.isclose(one, other, rel_tol=RELATIVE, abs_tol=RELATIVE)
                for one, other in zip(each[name], theirs, strict=True)
            )
            if not near:
                first = next(
                    (n for n, (a, b) in enumerate(zip(each[name], theirs, strict=False)) if abs(a - b) > RELATIVE), -1
                )
                raise FaultError(f"{name} differ: {len(each[name])} and {len(theirs)}, first {first}")


NOTED = ("coordinator.regroup_refused", "coordinator.stopping", "not_released", "suspended")
"""Events that show why a loss took long."""


def restarts_of(site: Path) -> list[str]:
    """Why all were started again, and what took long, from the journals."""
    found = []
    for path in site.glob("logs*/*/events.jsonl"):
        for line in path.read_bytes().splitlines():
            event = json.loads(line) if line.endswith(b"}") else {}
            name = event.get("event", "")
            if name in NOTED:
                about = " ".join(str(event[each]) for each in ("reason", "text") if event.get(each))
                found.append((event["monotonic"], f"{path.parts[-3]} {name} {about}"))
            elif name == "worker.went_on" and event["steps_lost"]:
                about = f"from step {event['step']}, {event['steps_lost']} lost"
                found.append((event["monotonic"], f"{path.parts[-3]} rank {event['rank']} goes on {about}"))
    return [f"{at_s:.1f} {text}" for at_s, text in sorted(found)]


def kills(seed: int, minutes: float, folder: Path, kinds: Sequence[str], first: int = 0, most: int = 3) -> int:
    """Returns the number of jobs with a fault."""
    end_s, faults, number = time.monotonic() + 60 * minutes, 0, first
    references: dict[str, Mapping[str, Any]] = {}
    while time.monotonic() < end_s:
        case = drawn(Random(f"{seed} {number}"), seed, number, kinds, most)
        site = folder / f"{number}-{case.kind}-{case.nodes}x{case.nproc}-{case.how}"
        began_s, done, problem = time.monotonic(), 0, ""
        try:
            if (name := case.undisturbed()) not in references:
                ranks = case.ranks
                calm = Case(case.kind, 1, ranks, "off", 0, 0, 0.0, case.own, case.epochs, "0")
                references[name] = play(calm, folder / f"undisturbed-{name}")[0][0]
            found, done = play(case, site)
            judge(case, found, references[name])
        except FaultError as error:
            problem = str(error)
            faults += 1
        restarts = len([*site.glob("logs*/*/attempt_*")]) - len([*site.glob("logs*")])
        took_s = time.monotonic() - began_s
        about = f"copies={case.copies} nodes={case.node_kills:g} own={case.own} kills={done} restarts={restarts}"
        print(f"{site.name} {about} {took_s:.0f} s: {problem or 'good'}", flush=True)
        for reason in restarts_of(site):
            print(f"    {reason}", flush=True)
        if not problem:
            shutil.rmtree(site)
        number += 1
    return faults
