"""A disk that stalls under a node's logs between the two phases of a start: the node is not lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from soak import disk
from tests.network.hosts import why_not
from tests.support.limits import limit_s

ROOT = Path(__file__).resolve().parent.parent.parent

PROGRAM = """
import json, os, sys, time
from pathlib import Path
from soak.disk import mounted
from tests.network.hosts import PretendHosts

site = Path(sys.argv[1])
(site / "train.py").write_text(
    "import pathlib, sys, time\\nwhile not pathlib.Path(sys.argv[1], 'finish').exists(): time.sleep(0.05)\\n")

slowness = float(os.environ["TEST_SLOWNESS"])
lease_s = 1.5 * slowness

def until(condition):
    end = time.monotonic() + 30 * slowness
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

for name in "12":
    (site / name).mkdir()
with mounted(site / "1", 16) as first, mounted(site / "2", 16) as second, PretendHosts(2, site / "hosts") as hosts:
    def start(number, disk):
        meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1", "--rdzv-conf", f"lease={lease_s:g}"]
        line = [sys.executable, "-m", "holdfast.run", *meeting, "--log-dir", disk.path, site / "train.py", site]
        return hosts[number].start(line, cwd=site)
    agents = [start(1, first)]
    until(lambda: any("joined" in path.read_text() for path in first.path.glob("*/events.jsonl")))
    first.stall(60 * slowness)
    agents.append(start(2, second))
    until(lambda: list(second.path.glob("*/attempt_0")))
    time.sleep(0.5)  # node 2 is prepared, node 1 is not
    second.stall(1.5 * lease_s)
    first.thaw()
    until(lambda: not second.stalled)
    (site / "finish").touch()
    codes = [agent.wait(20 * slowness) for agent in agents]
    text = "".join(path.read_text() for path in first.path.glob("*/events.jsonl"))
    print(json.dumps({"codes": codes, "events": [json.loads(line)["event"] for line in text.splitlines()]}))
"""


@pytest.mark.slow
def test_a_disk_that_stalls_between_the_two_phases(tmp_path: Path) -> None:
    if why := why_not() or disk.why_not():
        pytest.skip(why)
    line = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=limit_s(90))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["codes"] == [0, 0]
    before_the_end = told["events"][: told["events"].index("coordinator.over")]
    assert before_the_end.count("coordinator.started") == 1, before_the_end
    assert "coordinator.lost" not in before_the_end


FULL_PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from soak.disk import mounted

site = Path(sys.argv[1])
(site / "train.py").write_text(
    "import os, sys, time\\nfrom pathlib import Path\\n"
    "Path(sys.argv[1], os.environ['TORCHELASTIC_RESTART_COUNT']).write_text(str(os.getpid()))\\n"
    "while not Path(sys.argv[1], 'finish').exists(): time.sleep(0.05)\\n")

def pid_of(restart):
    end = time.monotonic() + 30 * float(os.environ["TEST_SLOWNESS"])
    while not ((site / restart).exists() and (site / restart).read_text()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return int((site / restart).read_text())

with mounted(site, 16) as disk:
    line = [sys.executable, "-m", "holdfast.run", "--standalone", "--max-restarts", "1", "--log-dir", disk.path]
    job = subprocess.Popen([*map(str, line), str(site / "train.py"), str(site)])
    first = pid_of("0")
    disk.fill()
    os.kill(first, signal.SIGKILL)
    pid_of("1")
    disk.empty()
    (site / "finish").touch()
    sys.exit(job.wait(30 * float(os.environ["TEST_SLOWNESS"])))
"""


def test_a_log_disk_that_is_full_at_a_restart_does_not_end_the_job(tmp_path: Path) -> None:
    if why := why_not() or disk.why_not():
        pytest.skip(why)
    line = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", FULL_PROGRAM, str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=limit_s(90))
    assert done.returncode == 0, done.stderr
    assert "Generation 2 goes on without log files" in done.stderr
