"""Faults of holdfast itself and of the machine under it: a broken invariant, too few descriptors, a clock that is set back.

A fault of holdfast ends the agent loudly: exit code 70, the story, and nothing left alive. The clock that is set back is
Python's `time.time` and `time.time_ns` in agents and workers; the machine's clock is everybody's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.inherited import needed
from tests.processes.conftest import c10d
from tests.support.limits import limit_s, until
from tests.support.second_user import everybodys_folder

BROKEN = """
from holdfast.{part} import {part} as machine

handle = machine.{kind}.handle
calls = 0

def broken(self, now, event):
    global calls
    calls += 1
    assert calls < {calls}, "the test broke it"
    return handle(self, now, event)

machine.{kind}.handle = broken
"""


@pytest.mark.parametrize("calls", [1, 4, 8])
@pytest.mark.parametrize(("part", "kind"), [("agent", "Agent"), ("coordinator", "Coordinator")])
def test_a_broken_invariant_ends_the_agent(job_folder, part: str, kind: str, calls: int) -> None:
    script = job_folder.script("child()\nmeet()\nhold()")
    program = job_folder.changed(BROKEN.format(part=part, kind=kind, calls=calls))
    agent = job_folder.ends(70, "--standalone", "--nproc-per-node", "2", script, program=program)
    assert "HF901" in agent.text
    assert "the test broke it" in agent.text
    job_folder.all_gone()


SLOW_NAMES = """
import socket, time

def never(*_, **__):
    time.sleep(600)

socket.getaddrinfo = never
"""


def test_a_dead_name_server_does_not_hold_up_the_end(job_folder) -> None:
    agent = job_folder.start(*c10d("some.name:29400"), job_folder.script(""), program=job_folder.changed(SLOW_NAMES))
    agent.says("waiting for the coordinator")
    agent.signal(signal.SIGINT)
    assert agent.end() == 130, agent.text


# --- a message that breaks the coordinator ends the job on all nodes, with a verdict ----------------------------------


POISONED = """
from holdfast.coordinator import coordinator as machine
from holdfast.protocol.messages import Leave

handle = machine.Coordinator.handle

def poisoned(self, now, event):
    if isinstance(getattr(event, "message", None), Leave):
        raise OverflowError("int too big to convert")
    return handle(self, now, event)

machine.Coordinator.handle = poisoned
"""


def test_what_breaks_the_coordinator_ends_the_job_everywhere(job_folder, endpoint: str) -> None:
    script = job_folder.script("meet()\nhold()")
    three = (*c10d(endpoint, "3", "--rdzv-id", "mine"), script)
    host = job_folder.start(*three, program=job_folder.changed(POISONED))
    job_folder.joined(1)
    sender, other = job_folder.start(*three), job_folder.start(*three)
    job_folder.wait(3, "up")
    sender.signal(15)
    assert host.end() == 70, host.text
    assert "OverflowError" in host.text
    assert host.verdict["exit_code"] == 70
    assert other.end() == 70, other.text
    assert other.verdict["code"] == "HF901"
    assert sender.end() != 0
    job_folder.all_gone()


# --- whatever only watches, shows or explains may fail in every way: a healthy job ends as if it had not --------------


BROKEN_VIEWS = """
def broken(*_, **__):
    raise RuntimeError("the test broke it")

from holdfast.coordinator.coordinator import Coordinator
Coordinator.view = broken
from holdfast.runtime.node_extension import Node
Node.view = broken
from holdfast.supervisor.stack_sampler import StackSampler
StackSampler.look = broken
from holdfast.supervisor import ends
ends.SHM = None
from holdfast.extensions.torch_events.node import TorchEvents
TorchEvents.heard = broken
from holdfast.diagnosis import causes, hangs, screen
hangs.examine = screen.render = causes.judge = broken
"""

STEPS = """
import mmap, struct
from holdfast.worker import beat
for _ in range(40):
    beat()
    time.sleep(0.05)
meet("stepped")
"""


def faults(agent) -> list[dict]:
    return agent.events("observer_fault") + agent.events("coordinator.observer_fault")


def test_a_job_goes_on_whatever_fails_that_only_looks(job_folder, tmp_path: Path) -> None:
    conf = "hang_report=1"
    observed = ("--metrics", "0", "--health", "0", "--event-log-handler", "console", "--rdzv-conf", conf)
    script = job_folder.script(STEPS + "while not os.path.exists('finish'): time.sleep(0.05)")
    env = {"HOLDFAST_RUNTIME_DIR": str(tmp_path / "runtime")}
    agent = job_folder.start(
        "--standalone", "--nproc-per-node", "2", *observed, script, env=env, program=job_folder.changed(BROKEN_VIEWS)
    )
    job_folder.wait(2, "stepped")
    for command in ("status", "stacks"):
        asked = subprocess.run(
            [sys.executable, "-m", "holdfast", command],
            env={**os.environ, **env},
            capture_output=True,
            timeout=limit_s(30),
        )
        assert (asked.returncode, b"Traceback" in asked.stderr) != (0, True)
    until(lambda: {"vitals", "status", "listener", "look", "examine"} <= {each["what"] for each in faults(agent)},
          lambda: f"{agent.events('observer_fault')} {agent.text}")  # fmt: skip
    (job_folder.folder / "finish").touch()
    assert agent.end() == 0, agent.text
    assert "Traceback" not in agent.text


def test_a_failure_is_told_in_few_words_where_nobody_finds_better_ones(job_folder) -> None:
    agent = job_folder.ends(
        7,
        "--standalone",
        "--max-restarts",
        "1",
        job_folder.script("sys.exit(7)"),
        program=job_folder.changed(BROKEN_VIEWS),
    )
    assert "holdfast: failed, exit code 7: rank 0 on" in agent.text
    faults = [each["what"] for each in agent.events("observer_fault")]
    assert faults.count("judge") >= 2
    assert faults[-1] == "render"


def test_a_stop_is_a_stop_though_the_view_fails(job_folder) -> None:
    agent = job_folder.start(
        "--standalone", job_folder.script("meet(); hold()"), program=job_folder.changed(BROKEN_VIEWS)
    )
    job_folder.wait(1, "up")
    agent.signal(signal.SIGTERM)
    assert agent.end() == 143


# --- limits of open files: what is needed is there before anything starts, and a shortage later is no silent one ---------


LIMITED = """
import os, resource, sys
soft, hard = map(int, sys.argv[1:3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
os.execv(sys.executable, [sys.executable, "-m", "holdfast.run", *sys.argv[3:]])
"""

SAY_LIMIT = """
import resource
note("limit", soft=resource.getrlimit(resource.RLIMIT_NOFILE)[0])
meet()
"""


def limited(soft: int, hard: int) -> list[str]:
    return [sys.executable, "-c", LIMITED, str(soft), str(hard)]


def test_more_workers_than_the_soft_limit_has_room_for(job_folder) -> None:
    job_folder.ends(
        0, "--standalone", "--nproc-per-node", "24", job_folder.script(SAY_LIMIT), program=limited(40, 4096)
    )
    assert [each["soft"] for each in job_folder.trail("limit")] == [40] * 24, (
        "workers keep the limit that was given to us"
    )


def test_the_hard_limit_that_is_asked_for_is_enough(job_folder) -> None:
    nproc = 24
    limit = needed(nproc, terminal=False)
    script = job_folder.script("print('out', flush=True)\nos.write(2, b'err\\n')\nmeet()\nprint('end', flush=True)")
    job_folder.ends(0, "--standalone", "--nproc-per-node", str(nproc), script, program=limited(limit, limit))
    assert len({each["rank"] for each in job_folder.trail("up")}) == nproc


def test_a_hard_limit_that_is_too_low(job_folder) -> None:
    agent = job_folder.ends(
        2, "--standalone", "--nproc-per-node", "4", job_folder.script("meet()"), program=limited(64, 64)
    )
    assert "HF112" in agent.text
    assert "ulimit -Hn" in agent.text
    assert agent.text.count("\n") == 1, agent.text
    assert job_folder.trail() == []


def few_processes(limit: int) -> list[str]:
    """holdfast as a user who may have so many processes and threads: root has no such limit. The user reads what root
    reads, because Python itself may be in root's home."""
    rights = "-all,+dac_read_search,+dac_override"
    who = ["--reuid=65534", "--regid=65534", "--clear-groups", f"--inh-caps={rights}", f"--ambient-caps={rights}"]
    return ["prlimit", f"--nproc={limit}", "setpriv", *who, sys.executable, "-m", "holdfast.run"]


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root, with setpriv, becomes another user"
)
@pytest.mark.parametrize("imports", ["", "import torch"], ids=["plain", "with a fork server"])
def test_a_limit_of_processes_that_is_too_low_is_reported_before_the_start(job_folder, imports: str) -> None:
    """Found later, after 30 s, as a fault of holdfast: the console's thread could not be started, and was waited for."""
    with everybodys_folder() as common:
        script = common / "train.py"
        script.write_text(imports)
        line = ["--standalone", "--nproc-per-node", "2", "--log-dir", str(common), str(script)]
        agent = job_folder.ends(2, *line, program=few_processes(5))
    assert "HF112" in agent.text
    assert "ulimit -u` is 5" in agent.text
    assert agent.text.count("\n") == 1, agent.text
    assert job_folder.trail() == []


FULL_TABLE = """
import errno
from holdfast.supervisor import generation

class Board:
    def __init__(self, nproc):
        raise OSError(errno.EMFILE, "Too many open files")

generation.Board = Board
"""


@pytest.mark.parametrize("guest", [False, True])
def test_an_oserror_in_a_callback_ends_the_agent(job_folder, endpoint: str, guest: bool) -> None:
    """On a second node it comes with a message of the coordinator's, where asyncio would swallow it."""
    program = job_folder.changed(FULL_TABLE)
    script = job_folder.script("meet()\nhold()")
    if guest:
        two = (*c10d(endpoint, "2", "--rdzv-id", "mine"), script)
        job_folder.start(*two)
        job_folder.joined(1)
        agent = job_folder.start(*two, program=program)
    else:
        agent = job_folder.start("--standalone", script, program=program)
    assert agent.end() == 70, agent.text
    assert "HF901" in agent.text
    assert "Too many open files" in agent.text
    assert agent.verdict["exit_code"] == 70
    assert json.dumps(agent.verdict["verdict"]["cause"]).count("Too many open files") == 1
    assert agent.events("fault")
    job_folder.all_gone()


# --- the wall clock is set back by an hour while a job runs: nothing counts on it ---------------------------------------


HOUR_S = 3600.0
LEASE_S = limit_s(4)

SITECUSTOMIZE = f"""
import os, time

_real_ns = time.time_ns


def _shifted_ns():
    try:
        os.stat(os.environ["SET_BACK"])
    except OSError:
        return _real_ns()
    return _real_ns() - {int(HOUR_S)} * 10**9


time.time_ns = _shifted_ns
time.time = lambda: _shifted_ns() / 1e9
"""

TAKES_TIME = """
from trail import *
meet()
began = time.time()
note("training")
while not os.path.exists("finish"):
    time.sleep(0.02)
note("done", passed=time.time() - began)
"""


def steps_back(agent) -> list[float]:
    """By how much the wall clock jumped back between two events of this agent, seconds."""
    stamps = [each["time"] - each["monotonic"] for each in agent.events() if "monotonic" in each]
    return [before - after for before, after in pairwise(stamps) if before - after > 60]


def test_nobody_is_lost(job_folder, tmp_path: Path, endpoint: str) -> None:
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    set_back = tmp_path / "set_back"
    env = {"PYTHONPATH": str(tmp_path / "clock"), "SET_BACK": str(set_back)}
    args = c10d(endpoint, "1:2", "--rdzv-conf", f"settle=20,lease={LEASE_S:g}")
    agents = [job_folder.start(*args, job_folder.script(TAKES_TIME), env=env) for _ in range(2)]
    job_folder.wait(2, "training", world=2)
    set_back.touch()
    time.sleep(LEASE_S + 1)  # whoever measures a lease or a ping by it has been wrong by now
    (job_folder.folder / "finish").touch()
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text + agents[1].text
    assert len(job_folder.trail("up")) == 2, "a generation was formed anew"
    for each in job_folder.wait(2, "done"):
        assert -HOUR_S < each["passed"] < -HOUR_S / 2, "the workers' clock was not set back"
    for agent in agents:
        assert len(steps_back(agent)) == 1, agent.events()
        assert not agent.events("link_lost")
        assert not agent.events("fenced")
    started = [each for agent in agents for each in agent.events("coordinator.started")]
    assert [each["generation"] for each in started] == [1]
    job_folder.all_gone()
