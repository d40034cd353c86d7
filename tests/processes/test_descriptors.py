"""Limits of open files: what is needed is there before anything starts, and a shortage later on is no silent one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from holdfast.runtime.inherited import needed

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


def test_more_workers_than_the_soft_limit_has_room_for(site) -> None:
    agent = site.start("--standalone", "--nproc-per-node", "12", site.script(SAY_LIMIT), program=limited(40, 4096))
    assert agent.end() == 0, agent.text
    assert [each["soft"] for each in site.trail("limit")] == [40] * 12, "workers keep the limit that was given to us"


def test_the_hard_limit_that_is_asked_for_is_enough(site) -> None:
    nproc = 24
    limit = needed(nproc, terminal=False)
    script = site.script("print('out', flush=True)\nos.write(2, b'err\\n')\nmeet()\nprint('end', flush=True)")
    agent = site.start("--standalone", "--nproc-per-node", str(nproc), script, program=limited(limit, limit))
    assert agent.end() == 0, agent.text
    assert len({each["rank"] for each in site.trail("up")}) == nproc


def test_a_hard_limit_that_is_too_low(site) -> None:
    agent = site.start("--standalone", "--nproc-per-node", "4", site.script("meet()"), program=limited(64, 64))
    assert agent.end() == 2, agent.text
    assert "HF112" in agent.text
    assert "ulimit -Hn" in agent.text
    assert agent.text.count("\n") == 1, agent.text
    assert site.trail() == []


BROKEN = """
import errno, sys
from holdfast import cli
from holdfast.supervisor import generation

class Board:
    def __init__(self, nproc):
        raise OSError(errno.EMFILE, "Too many open files")

generation.Board = Board
sys.exit(cli.main(["run", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("guest", [False, True])
def test_an_oserror_in_a_callback_ends_the_agent(site, endpoint: str, tmp_path: Path, guest: bool) -> None:
    """On a second node it comes with a message of the coordinator's, where asyncio would swallow it."""
    program = tmp_path / "broken.py"
    program.write_text(BROKEN)
    script = site.script("meet()\nhold()")
    if guest:
        two = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "mine", script)
        site.start(*two)
        site.joined(1)
        agent = site.start(*two, program=[sys.executable, str(program)])
    else:
        agent = site.start("--standalone", script, program=[sys.executable, str(program)])
    assert agent.end() == 70, agent.text
    assert "HF901" in agent.text
    assert "Too many open files" in agent.text
    assert agent.verdict["exit_code"] == 70
    assert json.dumps(agent.verdict["verdict"]["cause"]).count("Too many open files") == 1
    assert agent.events("fault")
    site.all_gone()
