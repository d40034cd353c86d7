"""From typing `holdfast run --hosts` to the first line of a script on the screen, on four pretend hosts with an sshd each.

Beside it what ssh alone costs: the slowest of four logins at the same time. The bound is on what is added to that.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.harness import HOLDFAST, BenchmarkError, Launcher, Metric, Row, Sample
from tests.ssh.ssh_hosts import SshHosts, make_yard, why_not

HOSTS = 4
LIMIT_S = 60.0
POLL_S = 0.005
SCRIPT = "import os\nprint('first line of', os.environ['RANK'], flush=True)\n"


def logins_s(ssh_hosts: SshHosts) -> float:
    """All at once; until the slowest one has run `true` over there."""
    began = time.monotonic()
    ssh = str(ssh_hosts.folder / "bin" / "ssh")
    running = [ssh_hosts.login_host.start([ssh, f"node{number}", "true"]) for number in range(1, HOSTS + 1)]
    if any(each.wait(LIMIT_S) for each in running):
        raise BenchmarkError("ssh does not get to the hosts")
    return time.monotonic() - began


def measure(_: Launcher, folder: Path) -> Sample:
    with make_yard(HOSTS, folder) as ssh_hosts:
        script = folder / "line.py"
        script.write_text(SCRIPT)
        logins_s(ssh_hosts)  # host keys are learnt
        login_s = logins_s(ssh_hosts)
        began = time.monotonic()
        agent = ssh_hosts.run("--hosts", ssh_hosts.names, script=script)
        while "first line of" not in agent.text:
            if not agent.program.running or time.monotonic() > began + LIMIT_S:
                raise BenchmarkError(f"no line: {agent.text}")
            time.sleep(POLL_S)
        first_s = time.monotonic() - began
        code = agent.end()
        if code != 0:
            raise BenchmarkError(f"exit code {code}: {agent.text}")
    return {"over the slowest login": first_s - login_s, "first line": first_s, "slowest login": login_s}


ROW = Row(
    name="ssh",
    title="`--hosts` with four hosts → first line",
    metrics=(
        Metric("over the slowest login", "s", value_max=1.5, digits=2),
        Metric("first line", "s", digits=2),
        Metric("slowest login", "s", digits=2),
    ),
    measure=measure,
    repeat={HOLDFAST.name: 9},
    why_not=why_not,
)
