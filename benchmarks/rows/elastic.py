"""Nodes come, die, fall silent; the endpoint's node and etcd's leader die: until the job trains (again), on pretend hosts.

One worker a node, DDP on gloo. All launchers run the same script on the same hosts with the same names. Times end with
the first step that every rank has done; beside them stands when the last rank's script had come how far.
"""

from __future__ import annotations

import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.elastic import PARTS, Job, job, why_not
from benchmarks.harness import (
    HOLDFAST,
    TORCHRUN,
    TUNED,
    BenchmarkError,
    HalfwayError,
    Launcher,
    Metric,
    Row,
    Sample,
)

if TYPE_CHECKING:
    from tests.network.hosts import PretendHosts

JOIN_LIMIT_S = 70.0
KILL_LIMIT_S = 70.0
SILENCE_LIMIT_S = 60.0
RETURN_LIMIT_S = 30.0
AWAY_S = 5.0
"""So long the endpoint's node is away."""
SETTLED_S = 0.5
"""A job trains undisturbed for so long before something is done to it."""
ETCD_LEASE_S = 5
"""The default of `lease_ttl`."""
ETCD_HOST, ETCD_PORT = 3, 2379
ETCD_READY_S = 20.0


def metrics(name: str, value_max: float) -> tuple[Metric, ...]:
    """The bound is on the whole; the parts tell where the time goes, from the event to each of them."""
    parts = (Metric(f"{name}: {part}", "s", digits=2) for part in PARTS)
    return (Metric(name, "s", value_max=value_max, digits=2), *parts)


def measure_join(launcher: Launcher, folder: Path) -> Sample:
    with job(launcher, folder, "1:3", hosts=3) as running:
        sample = running.two_train().sample("two come")
        time.sleep(SETTLED_S)
        try:
            joined_s = running.start(3)
            return {**sample, **running.trains(3, joined_s, JOIN_LIMIT_S).sample("a third joins")}
        except BenchmarkError as error:
            raise HalfwayError(str(error), sample) from error


def two(running: Job) -> None:
    """Two nodes in training for a while."""
    running.two_train()
    time.sleep(SETTLED_S)


def measure_kill(launcher: Launcher, folder: Path) -> Sample:
    with job(launcher, folder, "1:2", hosts=2) as running:
        two(running)
        since_s = time.monotonic()
        running.hosts[2].kill()
        running.forget(2)
        return running.trains(1, since_s, KILL_LIMIT_S).sample("survivor")


def measure_silence(launcher: Launcher, folder: Path) -> Sample:
    with job(launcher, folder, "1:2", hosts=2) as running:
        two(running)
        since_s = time.monotonic()
        running.hosts.unplug(2)
        running.forget(2)
        return running.trains(1, since_s, SILENCE_LIMIT_S).sample("survivor")


def measure_endpoint(launcher: Launcher, folder: Path) -> Sample:
    with job(launcher, folder, "1:2", hosts=2) as running:
        two(running)
        since_s = time.monotonic()
        running.hosts[1].kill()
        running.must_live(2, since_s, AWAY_S)
        running.hosts[1].boot()
        back_s = running.start(1)
        return running.trains(2, back_s, RETURN_LIMIT_S).sample("all")


def measure_etcd(backend: str, launcher: Launcher, folder: Path) -> Sample:
    endpoint = f"node{ETCD_HOST}:{ETCD_PORT}"
    prepare = partial(start_etcd, folder)
    with job(launcher, folder, "1:2", hosts=3, backend=backend, endpoint=endpoint, prepare=prepare) as running:
        two(running)
        elected = running.events("elected")
        if not elected:
            raise BenchmarkError("nobody says that it was elected")
        leader, _ = elected[-1]
        since_s = time.monotonic()
        running.hosts[leader].kill()
        running.forget(leader)
        return running.trains(1, since_s, RETURN_LIMIT_S).sample("survivor")


ASK_ETCD = """
import sys, time, urllib.request
until_s = time.monotonic() + float(sys.argv[2])
while True:
    try:
        if b'"true"' in urllib.request.urlopen(sys.argv[1] + "/health", timeout=1).read():
            break
    except OSError:
        assert time.monotonic() < until_s, "etcd does not answer"
    time.sleep(0.05)
"""


def start_etcd(folder: Path, hosts: PretendHosts) -> None:
    """A server on a host of its own, with both APIs; it answers."""
    host = hosts[ETCD_HOST]
    url = f"http://{host.v4}:{ETCD_PORT}"
    data = ("--data-dir", str(folder / "etcd"), "--unsafe-no-fsync", "--enable-v2=true")
    host.start(["etcd", *data, "--listen-client-urls", url, "--advertise-client-urls", url])
    host.run([sys.executable, "-I", "-c", ASK_ETCD, url, str(ETCD_READY_S)], ETCD_READY_S + 5)


def why_not_etcd() -> str:
    return why_not() or ("" if shutil.which("etcd") else "etcd is not installed (Debian: etcd-server)")


ROWS = (
    Row(
        name="elastic-join",
        title="`--nnodes 1:3`",
        metrics=(*metrics("two come", 3.5), *metrics("a third joins", 3.5)),
        measure=measure_join,
        repeat={HOLDFAST.name: 20, TUNED.name: 2, TORCHRUN.name: 2},
        group="elastic",
        strict=True,
        why_not=why_not,
    ),
    Row(
        name="elastic-kill",
        title="SIGKILL of a whole node, agent and workers at once",
        metrics=metrics("survivor", 1.5),
        measure=measure_kill,
        repeat={HOLDFAST.name: 20, TUNED.name: 2, TORCHRUN.name: 2},
        group="elastic",
        strict=True,
        why_not=why_not,
    ),
    Row(
        name="elastic-silence",
        title="a node falls silent, its link is down",
        metrics=metrics("survivor", 10.0),
        measure=measure_silence,
        repeat={HOLDFAST.name: 5, TUNED.name: 1, TORCHRUN.name: 1},
        group="elastic",
        strict=True,
        why_not=why_not,
    ),
    Row(
        name="elastic-endpoint",
        title=f"the rendezvous' node killed, restarted {AWAY_S:g} s later: from then",
        metrics=metrics("all", 4.0),
        measure=measure_endpoint,
        repeat={HOLDFAST.name: 5, TUNED.name: 2, TORCHRUN.name: 2},
        group="elastic",
        strict=True,
        why_not=why_not,
    ),
    *(
        Row(
            name=f"elastic-{backend}",
            title=f"`{backend}`: the leader's node killed",
            metrics=metrics("survivor", ETCD_LEASE_S + 3.0),
            measure=partial(measure_etcd, backend),
            repeat={HOLDFAST.name: 5},
            group="elastic",
            strict=True,
            why_not=why_not_etcd,
        )
        for backend in ("etcd", "etcd-v2")
    ),
)
