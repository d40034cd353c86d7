"""Faults at random, one on top of the other, for a while; disks that stall or are full; torch over the network.

Whatever happened, no two generations lived at once, and when all is well again all nodes train.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from soak import disk
from tests.network.hosts import why_not
from tests.network.job_agents import FENCE_S, LEASE_S, SHORT_LEASE, JobAgents
from tests.support.limits import limit_s, until

SEED = int(os.environ.get("CHAOS_SEED", "7"))
CHAOS_S = float(os.environ.get("CHAOS_S", "12"))
NODES = (1, 2, 3, 4)


@pytest.mark.slow
@pytest.mark.timeout(CHAOS_S + 150)
def test_faults_at_random(job_agents) -> None:
    job: JobAgents = job_agents(len(NODES))
    # A coordinator whose machine was lost knows of no previous leader, unless somebody tells it. One that is cut off tells
    # nobody, and has stopped after a fence.
    job.c10d("2:4", conf=f"{SHORT_LEASE},settle={FENCE_S:g},last_call_timeout={LEASE_S * 20:.0f}")
    job.start_all(NODES)
    job.trains(NODES)
    rng = random.Random(SEED)
    end = time.monotonic() + CHAOS_S
    unplugged: set[int] = set()
    log = []
    while time.monotonic() < end:
        number = rng.choice(NODES)
        what = rng.choice(("kill", "crash", "unplug", "plug", "plug", "agent"))
        log.append(f"{time.monotonic():.2f} {what} {number}")
        if what == "plug":
            job.hosts.plug(number)
            unplugged.discard(number)
        elif what == "unplug":
            job.hosts.unplug(number)
            unplugged.add(number)
        elif what == "agent":
            for agent in running(job, number):
                agent.signal(signal.SIGKILL)
                until(lambda agent=agent: not agent.program.running, job.story)
            job.start(number)
        else:
            if what == "crash":
                job.hosts.crash(number)
                unplugged.add(number)
            else:
                job.hosts[number].kill()
            time.sleep(rng.uniform(0.0, 1.0))
            job.hosts[number].boot()
            job.start(number)
        time.sleep(rng.uniform(0.0, 2.0))
    for number in unplugged:
        job.hosts.plug(number)
    since_s = time.monotonic()
    print("\n".join(log))
    try:
        all_train(job, since_s)
        job.check()
    finally:
        print(job.story())
    job.finish_all([agent for agent in job.agents if agent.program.running])


def running(job: JobAgents, number: int) -> list:
    return [agent for agent in job.agents if agent.host.number == number and agent.program.running]


def all_train(job: JobAgents, since_s: float) -> None:
    """The newest generation has all nodes and is still at work a second later; who gave up meanwhile is told."""
    names = {f"node{number}" for number in NODES}

    def good() -> bool:
        newest = job.generations[-1]
        return newest.hosts == names and newest.complete and newest.last_s() > since_s + 1.0

    until(good, lambda: f"all to train\n{job.story()}")


# --- a short soak: workers without torch, a fixed seed ----------------------------------------------------------------


ROOT = Path(__file__).resolve().parent.parent.parent
MINUTES, SOAK_SEED, GAP_S = 0.25, 3, 3.0
LIMIT_S = 200.0


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_a_short_soak(tmp_path: Path) -> None:
    if why := why_not() or disk.why_not():
        pytest.skip(why)
    job_folder = tmp_path / "soak" / "holdfast"
    line = [sys.executable, "-m", "soak", "--folder", job_folder.parent, "chaos", "--launchers", "holdfast"]
    options = ["--worker", "plain", "--minutes", MINUTES, "--seed", SOAK_SEED, "--gap", GAP_S, "--results", "none"]
    done = subprocess.run(
        map(str, [*line, *options]), cwd=ROOT, capture_output=True, text=True, timeout=limit_s(LIMIT_S)
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    events = [json.loads(line) for line in (job_folder / "rig.jsonl").read_text().splitlines()]
    happened = [event["event"] for event in events]
    assert happened.count("fault") == len(json.loads((job_folder / "schedule.json").read_text())) >= 4
    assert (happened[0], happened[-1]) == ("start", "end")
    assert [event["together"] for event in events if event["event"] == "reunion"] == [True]


# --- torch over the network: ranks meet at MASTER_ADDR, talk by gloo, and go on when a node is gone -------------------


STEPS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
job_folder, world = os.environ["SITE"], dist.get_world_size()
progress = os.open(f"{job_folder}/world{world}.rank{dist.get_rank()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
while True:
    total = torch.tensor([1.0, float(os.path.exists(job_folder + "/finish"))])
    dist.all_reduce(total)
    assert total[0].item() == world, total
    os.write(progress, b".")
    if total[1].item() == world:
        break
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_training_goes_on_without_a_killed_node(job_agents) -> None:
    job: JobAgents = job_agents(3)
    job.c10d("2:3")
    job.script.write_text(STEPS)
    agents = job.start_all([1, 2, 3])
    until(lambda: steps(job, 3) > 20, job.story, 90)
    job.hosts[3].kill()
    until(lambda: steps(job, 2) > 0, job.story)
    job.finish_all(agents[:2])


def steps(job: JobAgents, world: int) -> int:
    """How many steps the slowest rank of this world has done."""
    files = [job.folder / f"world{world}.rank{rank}" for rank in range(world)]
    return min(os.path.getsize(file) if file.exists() else 0 for file in files)


# --- A disk that stalls under a node's logs between the two phases of a start: the node is not lost -------------------


def with_disks(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program that mounts disks which can stall and be full."""
    if why := why_not() or disk.why_not():
        pytest.skip(why)
    line = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", program, str(folder)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=limit_s(90))
    assert done.returncode == 0, done.stderr
    return done


PROGRAM = """
import json, os, sys, time
from pathlib import Path
from soak.disk import mounted
from tests.network.hosts import PretendHosts

job_folder = Path(sys.argv[1])
(job_folder / "train.py").write_text(
    "import pathlib, sys, time\\nwhile not pathlib.Path(sys.argv[1], 'finish').exists(): time.sleep(0.05)\\n")

slowness = float(os.environ["TEST_SLOWNESS"])
lease_s = 1.5 * slowness

def until(condition):
    end = time.monotonic() + 30 * slowness
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

for name in "12":
    (job_folder / name).mkdir()
with mounted(job_folder / "1", 16) as first, mounted(job_folder / "2", 16) as second, PretendHosts(2, job_folder / "hosts") as hosts:
    def start(number, disk):
        meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1", "--rdzv-conf", f"lease={lease_s:g}"]
        line = [sys.executable, "-m", "holdfast.run", *meeting, "--log-dir", disk.path, job_folder / "train.py", job_folder]
        return hosts[number].start(line, cwd=job_folder)
    agents = [start(1, first)]
    until(lambda: any("joined" in path.read_text() for path in first.path.glob("*/events.jsonl")))
    first.stall(60 * slowness)
    agents.append(start(2, second))
    until(lambda: list(second.path.glob("*/attempt_0")))
    time.sleep(0.5)  # node 2 is prepared, node 1 is not
    second.stall(1.5 * lease_s)
    first.thaw()
    until(lambda: not second.stalled)
    (job_folder / "finish").touch()
    codes = [agent.wait(20 * slowness) for agent in agents]
    text = "".join(path.read_text() for path in first.path.glob("*/events.jsonl"))
    print(json.dumps({"codes": codes, "events": [json.loads(line)["event"] for line in text.splitlines()]}))
"""


@pytest.mark.slow
def test_a_disk_that_stalls_between_the_two_phases(tmp_path: Path) -> None:
    done = with_disks(PROGRAM, tmp_path)
    told = json.loads(done.stdout)
    assert told["codes"] == [0, 0]
    before_the_end = told["events"][: told["events"].index("coordinator.over")]
    assert before_the_end.count("coordinator.started") == 1, before_the_end
    assert "coordinator.lost" not in before_the_end


FULL_PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from soak.disk import mounted

job_folder = Path(sys.argv[1])
(job_folder / "train.py").write_text(
    "import os, sys, time\\nfrom pathlib import Path\\n"
    "Path(sys.argv[1], os.environ['TORCHELASTIC_RESTART_COUNT']).write_text(str(os.getpid()))\\n"
    "while not Path(sys.argv[1], 'finish').exists(): time.sleep(0.05)\\n")

def pid_of(restart):
    end = time.monotonic() + 30 * float(os.environ["TEST_SLOWNESS"])
    while not ((job_folder / restart).exists() and (job_folder / restart).read_text()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return int((job_folder / restart).read_text())

with mounted(job_folder, 16) as disk:
    line = [sys.executable, "-m", "holdfast.run", "--standalone", "--max-restarts", "1", "--log-dir", disk.path]
    job = subprocess.Popen([*map(str, line), str(job_folder / "train.py"), str(job_folder)])
    first = pid_of("0")
    disk.fill()
    os.kill(first, signal.SIGKILL)
    pid_of("1")
    disk.empty()
    (job_folder / "finish").touch()
    sys.exit(job.wait(30 * float(os.environ["TEST_SLOWNESS"])))
"""


def test_a_log_disk_that_is_full_at_a_restart_does_not_end_the_job(tmp_path: Path) -> None:
    done = with_disks(FULL_PROGRAM, tmp_path)
    assert "the log files of this run cannot be written" in done.stderr
