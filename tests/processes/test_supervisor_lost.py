"""The process that holds the workers is gone: at an agent's birth, again and again, or it cannot be there at all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

AT_BIRTH = """
import os, signal, sys
from holdfast import cli
from holdfast.runtime.workers import keeper, preload

begin = preload.begin

def killed_first(handle, options):
    os.kill(handle.pid, signal.SIGKILL)
    os.waitid(os.P_PID, handle.pid, os.WEXITED | os.WNOWAIT)
    begin(handle, options)

preload.begin = killed_first
sys.exit(cli.main(["run", *sys.argv[1:]]))
"""

EVER_AGAIN = """
import sys
from holdfast import cli
from holdfast.runtime.workers import crew, keeper, keeper_client

revive = keeper_client.revive_keeper

def revive_and_kill(dead, spare=()):
    handle = revive(dead, spare)
    import os, signal
    os.kill(handle.pid, signal.SIGKILL)
    return handle

crew.revive_keeper = revive_and_kill
from holdfast.runtime.workers.preload import begin
from holdfast.runtime.workers import preload

def killed(handle, options):
    import os, signal
    os.kill(handle.pid, signal.SIGKILL)

preload.begin = killed
sys.exit(cli.main(["run", *sys.argv[1:]]))
"""

NOT_AGAIN = EVER_AGAIN.replace(
    "handle = revive(dead, spare)", 'raise BlockingIOError(11, "Resource temporarily unavailable")'
)

NO_PROC = """
import sys
from holdfast import cli
from holdfast.runtime.workers import keeper

keeper.PROC = "/nowhere/self/fd"
sys.exit(cli.main(["run", *sys.argv[1:]]))
"""

NO_FORK = """
import os, sys
from holdfast import cli

def fork():
    raise BlockingIOError(11, "Resource temporarily unavailable")

os.fork = fork
sys.exit(cli.main(["run", *sys.argv[1:]]))
"""


def start(site, tmp_path: Path, text: str, *more: str):
    program = tmp_path / "program.py"
    program.write_text(text)
    script = site.script("meet()")
    return site.start("--standalone", *more, script, program=[sys.executable, str(program)])


@pytest.mark.parametrize("more", [(), ("--preempt-signal", "USR1")])
def test_killed_at_birth_it_is_replaced(site, tmp_path: Path, more: tuple[str, ...]) -> None:
    """With an order on its way, and with none."""
    agent = start(site, tmp_path, AT_BIRTH, *more)
    assert agent.end() == 0, agent.text
    assert len(site.trail("up")) == 1


@pytest.mark.parametrize("text", [EVER_AGAIN, NOT_AGAIN], ids=["ends", "does not start"])
def test_one_that_never_stays_ends_the_agent(site, tmp_path: Path, text: str) -> None:
    agent = start(site, tmp_path, text)
    assert agent.end() == 70, agent.text
    assert "HF903" in agent.text
    assert agent.verdict["code"] == "HF903"
    assert len(agent.events("keeper_died")) <= 6
    site.all_gone()


@pytest.mark.parametrize(("text", "word"), [(NO_PROC, "/proc"), (NO_FORK, "ulimit -u")])
def test_a_machine_that_cannot_have_one(site, tmp_path: Path, text: str, word: str) -> None:
    agent = start(site, tmp_path, text)
    assert agent.end() == 2, agent.text
    assert "HF112" in agent.text
    assert word in agent.text
    assert agent.text.count("\n") == 1, agent.text
    assert site.trail() == []
