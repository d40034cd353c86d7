"""Whatever only watches, shows or explains may fail in every way: a healthy job ends as if it had not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.processes.conftest import until
from tests.support.limits import limit_s

BROKEN = """
import sys

def broken(*_, **__):
    raise RuntimeError("the test broke it")

from holdfast.core.coordinator.machine import CoordinatorMachine
CoordinatorMachine.view = broken
from holdfast.runtime.answers import OwnNode
OwnNode.view = OwnNode.stacks = broken
from holdfast.runtime.workers.looker import Looker
Looker.look = broken
from holdfast.runtime.workers import machine_facts
machine_facts.SHM = None
from holdfast.runtime.observing.torch_events import TorchEvents
TorchEvents.heard = broken
from holdfast.insight import hangs, screen, verdicts
hangs.examine = screen.render = verdicts.judge = broken
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
    program.write_text(BROKEN)
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
    program.write_text(BROKEN)
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
    program.write_text(BROKEN)
    agent = site.start("--standalone", site.script("meet(); hold()"), program=[sys.executable, str(program)])
    site.wait(1, "up")
    agent.signal(signal.SIGTERM)
    assert agent.end() == 143
