"""A fault of holdfast itself ends the agent loudly: exit code 70, the story, and nothing left alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.conftest import until
from tests.support.limits import limit_s

BROKEN = """
import sys
from holdfast import cli
from holdfast.{part} import {part}_machine as machine

handle = machine.{kind}.handle
calls = 0

def broken(self, now, event):
    global calls
    calls += 1
    assert calls < {calls}, "the test broke it"
    return handle(self, now, event)

machine.{kind}.handle = broken
sys.exit(cli.main(["run", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("calls", [1, 4, 8])
@pytest.mark.parametrize(("part", "kind"), [("agent", "AgentMachine"), ("coordinator", "CoordinatorMachine")])
def test_a_broken_invariant_ends_the_agent(site, tmp_path: Path, part: str, kind: str, calls: int) -> None:
    program = tmp_path / "broken.py"
    program.write_text(BROKEN.format(part=part, kind=kind, calls=calls))
    script = site.script("child()\nmeet()\nhold()")
    agent = site.start("--standalone", "--nproc-per-node", "2", script, program=[sys.executable, str(program)])
    assert agent.end() == 70, agent.text
    assert "HF901" in agent.text
    assert "the test broke it" in agent.text
    site.all_gone()


SLOW_NAMES = """
import socket, sys, time
from holdfast import cli

def never(*_, **__):
    time.sleep(600)

socket.getaddrinfo = never
sys.exit(cli.main(["run", *sys.argv[1:]]))
"""


def test_a_dead_name_server_does_not_hold_up_the_end(site, tmp_path: Path) -> None:
    import signal

    program = tmp_path / "slow.py"
    program.write_text(SLOW_NAMES)
    args = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "some.name:29400", site.script(""))
    agent = site.start(*args, program=[sys.executable, str(program)])
    agent.says("waiting for the coordinator")
    agent.signal(signal.SIGINT)
    assert agent.end() == 130, agent.text


# --- a message that breaks the coordinator ends the job on all nodes, with a verdict ----------------------------------


POISONED = """
import sys
from holdfast import cli
from holdfast.coordinator import coordinator_machine as machine
from holdfast.protocol.messages import Leave

handle = machine.CoordinatorMachine.handle

def poisoned(self, now, event):
    if isinstance(getattr(event, "message", None), Leave):
        raise OverflowError("int too big to convert")
    return handle(self, now, event)

machine.CoordinatorMachine.handle = poisoned
sys.exit(cli.main(["run", *sys.argv[1:]]))
"""


def test_what_breaks_the_coordinator_ends_the_job_everywhere(site, endpoint: str, tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text(POISONED)
    script = site.script("meet()\nhold()")
    three = ("--nnodes", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "mine", script)
    host = site.start(*three, program=[sys.executable, str(program)])
    site.joined(1)
    sender, other = site.start(*three), site.start(*three)
    site.wait(3, "up")
    sender.signal(15)
    assert host.end() == 70, host.text
    assert "OverflowError" in host.text
    assert host.verdict["exit_code"] == 70
    assert other.end() == 70, other.text
    assert other.verdict["code"] == "HF901"
    assert sender.end() != 0
    site.all_gone()


# --- whatever only watches, shows or explains may fail in every way: a healthy job ends as if it had not --------------


BROKEN_VIEWS = """
import sys

def broken(*_, **__):
    raise RuntimeError("the test broke it")

from holdfast.coordinator.coordinator_machine import CoordinatorMachine
CoordinatorMachine.view = broken
from holdfast.runtime.control_handlers import OwnNode
OwnNode.view = OwnNode.stacks = broken
from holdfast.supervisor.stack_sampler import StackSampler
StackSampler.look = broken
from holdfast.supervisor import evidence
evidence.SHM = None
from holdfast.metrics.listeners import TorchEvents
TorchEvents.heard = broken
from holdfast.diagnosis import causes, hangs, screen
hangs.examine = screen.render = causes.judge = broken
from holdfast import cli
sys.exit(cli.main(["run", *sys.argv[1:]]))
"""

STEPS = """
import mmap, struct
from holdfast.worker import beat
for _ in range(40):
    beat()
    time.sleep(0.05)
meet("stepped")
"""


def test_a_job_goes_on_whatever_fails_that_only_looks(site, tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text(BROKEN_VIEWS)
    conf = "hang_report=1"
    observed = ("--metrics", "0", "--health", "0", "--event-log-handler", "console", "--rdzv-conf", conf)
    script = site.script(STEPS + "while not os.path.exists('finish'): time.sleep(0.05)")
    env = {"HOLDFAST_RUNTIME_DIR": str(tmp_path / "runtime")}
    agent = site.start(
        "--standalone", "--nproc-per-node", "2", *observed, script, env=env, program=[sys.executable, str(program)]
    )
    site.wait(2, "stepped")
    for command in ("status", "stacks"):
        asked = subprocess.run(
            [sys.executable, "-m", "holdfast", command],
            env={**os.environ, **env},
            capture_output=True,
            timeout=limit_s(30),
        )
        assert (asked.returncode, b"Traceback" in asked.stderr) != (0, True)
    until(lambda: {"vitals", "status", "listener", "look", "examine"} <= {each["what"] for each in agent.events("insight_fault")},
          lambda: f"{agent.events('insight_fault')} {agent.text}")  # fmt: skip
    (site.folder / "finish").touch()
    assert agent.end() == 0, agent.text
    assert "Traceback" not in agent.text


def test_a_failure_is_told_in_few_words_where_nobody_finds_better_ones(site, tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text(BROKEN_VIEWS)
    agent = site.start(
        "--standalone", "--max-restarts", "1", site.script("sys.exit(7)"), program=[sys.executable, str(program)]
    )
    assert agent.end() == 7, agent.text
    assert "holdfast: failed, exit code 7: rank 0 on" in agent.text
    faults = [each["what"] for each in agent.events("insight_fault")]
    assert faults.count("judge") >= 2
    assert faults[-1] == "render"


def test_a_stop_is_a_stop_though_the_view_fails(site, tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text(BROKEN_VIEWS)
    agent = site.start("--standalone", site.script("meet(); hold()"), program=[sys.executable, str(program)])
    site.wait(1, "up")
    agent.signal(signal.SIGTERM)
    assert agent.end() == 143
