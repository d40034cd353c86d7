"""A message that breaks the coordinator ends the job on all nodes, with a verdict, and costs its sender the link."""

from __future__ import annotations

import sys
from pathlib import Path

BROKEN = """
import sys
from holdfast import cli
from holdfast.core.coordinator import machine
from holdfast.core.protocol import Leave

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
    program.write_text(BROKEN)
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
