"""The wall clock is set back by an hour while a job runs: nothing counts on it.

What is set back is Python's `time.time` and `time.time_ns` in agents and workers; the machine's clock is everybody's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from tests.support.limits import limit_s

HOUR_S = 3600.0
LEASE_S = limit_s(1.5)

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

SCRIPT = """
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


def test_nobody_is_lost(site, tmp_path: Path, free_port: Callable[[], int]) -> None:
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    set_back = tmp_path / "set_back"
    env = {"PYTHONPATH": str(tmp_path / "clock"), "SET_BACK": str(set_back)}
    args = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    conf = ("--rdzv-conf", f"settle=1,lease={LEASE_S:g}")
    agents = [site.start(*args, *conf, site.script(SCRIPT), env=env) for _ in range(2)]
    site.wait(2, "training", world=2)
    set_back.touch()
    time.sleep(LEASE_S + 1)  # whoever measures a lease or a ping by it has been wrong by now
    (site.folder / "finish").touch()
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text + agents[1].text
    assert len(site.trail("up")) == 2, "a generation was formed anew"
    for each in site.wait(2, "done"):
        assert -HOUR_S < each["passed"] < -HOUR_S / 2, "the workers' clock was not set back"
    for agent in agents:
        assert len(steps_back(agent)) == 1, agent.events()
        assert not agent.events("link_lost")
        assert not agent.events("fenced")
    started = [each for agent in agents for each in agent.events("coordinator.started")]
    assert [each["generation"] for each in started] == [1]
    site.all_gone()
