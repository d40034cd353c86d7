"""Jobs that fail in a known way: does verdict.json name the rank that an expert names, and a cause that one accepts?

The catalogue is in `scripts/failing`. torchrun names the rank that failed first by the clock, and no cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import HOLDFAST, POLL_S, SCRIPTS, Launcher, Metric, Row, Sample, end, environment
from benchmarks.scripts.failing import CASES, Case
from tests.corpus.messages import messages, right_share

AT_ONCE = 3
LIMIT_S = 90.0
JOIN_S = 20
SMALL_MEMORY = 400 * 2**20
MEMORY = Path("/sys/fs/cgroup/memory")
SMALL_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"', "sh")


@dataclass(frozen=True)
class Told:
    """What was said of a case."""

    case: Case
    verdict: dict[str, Any]
    """Empty: there was none."""
    seconds: float

    @property
    def code(self) -> str:
        return str(self.verdict.get("code", "none"))

    @property
    def rank(self) -> int | None:
        culprit = self.verdict.get("culprit")
        return None if culprit is None else int(culprit["rank"])

    @property
    def culprit_right(self) -> bool:
        named = set() if self.rank is None else {self.rank}
        return bool(self.verdict) and (named <= self.case.culprits if named else not self.case.culprits)

    @property
    def cause_right(self) -> bool:
        said = f"{self.verdict.get('cause', '')}; {self.verdict.get('advice', '')}"
        return self.code in self.case.codes and self.case.says in said

    def __str__(self) -> str:
        ranks = sorted(self.case.culprits) or "none"
        return (
            f"{self.case.name} ({self.seconds:.1f} s): wanted {ranks} {' '.join(sorted(self.case.codes))} {self.case.says!r}, "
            f"was rank {self.rank} {self.code} {self.verdict.get('cause', '')[:300]!r}"
        )


def measure(launcher: Launcher, folder: Path) -> Sample:
    told = tell(launcher, folder, list(CASES.values()))
    for each in told:
        if not (each.culprit_right and each.cause_right):
            print(f"    {each}")
    return {
        "cases": float(len(told)),
        "right culprit": sum(each.culprit_right for each in told) / len(told),
        "right cause": sum(each.cause_right for each in told) / len(told),
    }


def tell(launcher: Launcher, folder: Path, cases: list[Case]) -> list[Told]:
    """Each of them once, some side by side. What this machine cannot do is left out."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        told = list(pool.map(lambda case: _tell(launcher, folder / case.name, case), cases))
    return [each for each in told if each is not None]


def _tell(launcher: Launcher, folder: Path, case: Case) -> Told | None:
    folder.mkdir()
    for name, text in case.files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    began_s = time.monotonic()
    with contextlib.ExitStack() as held:
        try:
            world = held.enter_context(_world(case.world, folder))
        except OSError as error:
            print(f"    {case.name}: not measured: {error}")
            return None
        nodes = _start_nodes(launcher, folder, case, world)
        deadline_s = began_s + LIMIT_S
        for node in nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(max(0.1, deadline_s - time.monotonic()))
        for node in nodes:
            if node.poll() is None:
                end(node)
    return Told(case, _verdict(folder), time.monotonic() - began_s)


def _start_nodes(launcher: Launcher, folder: Path, case: Case, world: tuple[str, ...]) -> list[subprocess.Popen[bytes]]:
    preload = () if case.uses_torch or case.files else ("--preload=none",)
    common = [f"--nproc-per-node={case.ranks}", *preload, *case.flags]
    if case.nodes == 1:
        return [_start(launcher, folder, case, world, ["--standalone", *common])]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = [f"--nnodes={case.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    meeting += [f"--rdzv-id={case.name}", f"--rdzv-conf=join_timeout={JOIN_S}", *common]
    nodes = []
    for number in range(case.nodes):
        nodes.append(_start(launcher, folder, case, world, [*meeting, f"--node-rank={number}"]))
        _wait_for_listener(port)
    return nodes


def _wait_for_listener(port: int) -> None:
    """The first node owns the endpoint, as where each is a machine."""
    until_s = time.monotonic() + JOIN_S
    while f":{port:04X} 00000000:0000 0A" not in Path("/proc/net/tcp").read_text() and time.monotonic() < until_s:
        time.sleep(POLL_S)


def _start(
    launcher: Launcher, folder: Path, case: Case, world: tuple[str, ...], flags: list[str]
) -> subprocess.Popen[bytes]:
    own = next((name for name in ("train.py", "train.sh") if name in case.files), "")
    program = [str(folder / own)] if own else [str(SCRIPTS / "failures.py"), case.name]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [*world, *launcher.command, "--log-dir", str(folder / "logs"), *flags, *program, *case.arguments],
            cwd=folder,
            env=environment(folder, {**launcher.env, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _verdict(folder: Path) -> dict[str, Any]:
    """The one that all nodes told; what differs between them is none."""
    found = [json.loads(path.read_text())["verdict"] or {} for path in folder.glob("logs/*/verdict.json")]
    ends = {(each.get("code"), (each.get("culprit") or {}).get("rank")) for each in found}
    return found[0] if len(ends) == 1 else {}


@contextlib.contextmanager
def _world(name: str, folder: Path) -> Iterator[tuple[str, ...]]:
    """A command that makes a machine smaller. Raises OSError where that is not allowed."""
    if name == "small-shm":
        if os.geteuid() != 0:
            raise PermissionError("only root may mount a small /dev/shm")
        yield SMALL_SHM
    elif name == "small-memory":
        cgroup = MEMORY / re.sub(r"\W", "-", folder.parent.name)
        cgroup.mkdir()
        try:
            (cgroup / "memory.limit_in_bytes").write_text(str(SMALL_MEMORY))
            yield ("sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh")
        finally:
            _remove(cgroup)
    else:
        yield ()


def _remove(cgroup: Path) -> None:
    """It can be removed when the last process in it is gone, the kernel's work included."""
    for _ in range(100):
        try:
            cgroup.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return


HALVES = ("learned", "held_out")
"""Rules were written against the first half of tests/corpus/messages, and are judged by the second."""


def measure_messages(_launcher: Launcher, _folder: Path) -> Sample:
    return {f"right cause, {half}": right_share(messages(half)) for half in HALVES}


VERDICTS = Row(
    name="verdicts",
    title="jobs that fail in a known way",
    metrics=(
        Metric("right culprit", "", value_min=0.97, digits=3),
        Metric("right cause", "", value_min=0.96, digits=3),
        Metric("cases", "", digits=0),
    ),
    measure=measure,
    repeat={HOLDFAST.name: 1},
    group="diagnosis",
    strict=True,
)
MESSAGES = Row(
    name="messages",
    title="messages of libraries",
    metrics=tuple(Metric(f"right cause, {half}", "", value_min=0.95, digits=3) for half in HALVES),
    measure=measure_messages,
    repeat={HOLDFAST.name: 1},
    group="diagnosis",
    strict=True,
)
ROWS = (VERDICTS, MESSAGES)
