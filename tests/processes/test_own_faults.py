"""A fault of holdfast itself ends the agent loudly: exit code 70, the story, and nothing left alive."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BROKEN = """
import sys
from holdfast import cli
from holdfast.core.{part} import machine

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
