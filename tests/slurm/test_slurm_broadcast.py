"""Slurm sends --signal's USR1 to every process of a step, the keeper among them; no Slurm is needed to do the same."""

from __future__ import annotations

import os
import signal

from tests.conftest import descendants
from tests.processes.conftest import Site

DRAINS = """
from holdfast.worker import should_stop
meet()
while not should_stop():
    time.sleep(0.01)
note("saved")
"""


def test_a_signal_to_every_process_is_a_notice(site: Site) -> None:
    agent = site.start("--preempt-signal", "USR1", "--nproc-per-node", "2", site.script(DRAINS))
    site.wait(2, "up")
    for pid in {agent.pid, *descendants(agent.pid)}:
        os.kill(pid, signal.SIGUSR1)
    assert agent.end() == 75, agent.text
    assert len(site.trail("saved")) == 2


def test_workers_get_the_default_back(site: Site) -> None:
    """Without --preempt-signal it is torchrun's: passed on, and deadly to who has not asked for it."""
    agent = site.start(site.script("meet(); hold()"))
    site.wait(1, "up")
    agent.signal(signal.SIGUSR1)
    assert agent.end() == 128 + signal.SIGUSR1, agent.text
