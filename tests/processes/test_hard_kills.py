"""SIGKILL and SIGSTOP of what holdfast itself consists of: the agent, the supervisor, the store host."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import alive as is_alive
from tests.conftest import descendants
from tests.processes.conftest import c10d, coordinators_first
from tests.support.limits import limit_s, until

SIX = "child()\ndaemon()\nmeet()\nhold()"


def test_nothing_outlives_a_killed_agent(job_folder) -> None:
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", job_folder.script(SIX))
    job_folder.wait(2, "up")
    assert len(job_folder.trail("child")) == 4
    supervisor = agent.supervisor
    agent.signal(signal.SIGKILL)
    job_folder.all_gone()
    assert not Path(f"/proc/{supervisor}").exists() or agent.end() == 137


def test_nothing_outlives_agents_that_are_killed_by_their_command_line(job_folder) -> None:
    """As `pkill -9 -f holdfast` does: the supervisor, which is a fork of the agent, has a command line of its own."""
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", job_folder.script(SIX))
    job_folder.wait(2, "up")
    line = Path(f"/proc/{agent.pid}/cmdline").read_bytes()
    alike = [pid for pid in descendants(agent.pid) if Path(f"/proc/{pid}/cmdline").read_bytes() == line]
    assert alike == [], "the agent alone has this command line"
    assert Path(f"/proc/{agent.supervisor}/cmdline").read_bytes().rstrip(b"\0") == b"hf-supervisor"
    agent.signal(signal.SIGKILL)
    job_folder.all_gone()


def test_a_command_of_notify_does_not_outlive_a_killed_agent(job_folder) -> None:
    """Neither what it has started, in a session of its own."""
    pids = job_folder.folder / "pids"
    command = job_folder.folder / "notify.sh"
    command.write_text(f"#!/bin/sh\nsetsid sleep 1000 & echo $! >> {pids}\necho $$ >> {pids}\nsleep 1000\n")
    command.chmod(0o755)
    script = job_folder.script("meet()\nif ROUND: hold()\nsys.exit(1)")
    line = ("--standalone", "--max-restarts", "1", "--notify", str(command), script)
    agent = job_folder.start(*line)
    until(lambda: pids.exists() and len(pids.read_text().split()) >= 2, lambda: agent.text)
    agent.signal(signal.SIGKILL)
    until(lambda: not [pid for pid in map(int, pids.read_text().split()) if is_alive(pid)], "the end of all")


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_killed_supervisor_takes_its_workers_along(job_folder, restarts: int) -> None:
    """They failed, and that costs a restart, on the store's node too; nothing is left in either case."""
    script = job_folder.script("child()\ndaemon()\nmeet()\nif len(all_notes()) < 11: hold()")
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), script)
    job_folder.wait(2, "up")
    os.kill(agent.supervisor, signal.SIGKILL)
    assert agent.end() == (0 if restarts else 137), agent.text
    if not restarts:
        assert agent.verdict["verdict"]["code"] == "HF204"
        assert agent.verdict["verdict"]["culprit"]["exit_code"] == -9
    job_folder.all_gone()
    assert "Traceback" not in agent.text


def test_a_supervisor_killed_after_the_port_of_the_next_store_was_announced(job_folder) -> None:
    """The port is lost with it: that generation ends at once, and the next one gets a store that works."""
    script = job_folder.script(
        "import socket\n"
        "meet()\n"
        "if ROUND < 4: sys.exit(1)\n"
        "while not os.path.exists('killed'): time.sleep(0.01)\n"
        "socket.create_connection(('127.0.0.1', int(PORT)), 60 * SLOWNESS).close()\n"
        "note('reached')"
    )
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "6", script)
    # After the fourth quick failure the next generation is prepared, and starts a second later.
    until(lambda: list(agent.logs.glob("*/attempt_4/1/stderr.log")), "the next generation to be prepared")
    supervisor = agent.supervisor
    os.kill(supervisor, signal.SIGKILL)
    # Workers of that generation may have begun by now. They end with the supervisor.
    until(lambda: not is_alive(supervisor), "the end of the supervisor")
    (job_folder.folder / "killed").touch()
    assert agent.end() == 0, agent.text
    assert len(job_folder.trail("reached")) == 2
    assert "Traceback" not in agent.text


def test_a_stopped_agent_goes_on_when_continued(job_folder) -> None:
    """Longer than no lease, shorter than the fence: nobody notices."""
    script = job_folder.script("meet()\ntime.sleep(1.0)\nnote('end')")
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", script)
    job_folder.wait(2, "up")
    agent.signal(signal.SIGSTOP)
    job_folder.wait(2, "end")
    time.sleep(0.2)
    agent.signal(signal.SIGCONT)
    assert agent.end() == 0, agent.text
    assert len(job_folder.trail("up")) == 2


def test_a_standalone_agent_that_slept_beyond_its_lease(job_folder) -> None:
    """A laptop's lid, a debugger: agent and coordinator slept together, so nobody was cut off from anybody."""
    script = job_folder.script("meet()\ntime.sleep(2.5)\nnote('end')")
    agent = job_folder.start("--standalone", "--rdzv-conf", "lease=1", script)
    job_folder.wait(1, "up")
    agent.signal(signal.SIGSTOP)
    time.sleep(1.8)
    agent.signal(signal.SIGCONT)
    assert agent.end() == 0, agent.text
    assert len(job_folder.trail("up")) == 1, agent.text


def test_a_node_that_slept_beyond_its_lease_is_fenced_and_comes_back(job_folder, endpoint: str) -> None:
    script = job_folder.script(
        "on_signal('SIGTERM', exit_code=0)\nmeet()\n"
        "while WORLD == 1 or len({n['port'] for n in all_notes()}) < 3: time.sleep(0.02)"
    )
    conf = ("--rdzv-conf", f"lease={limit_s(0.6):g},settle=5")
    args = (*c10d(endpoint, "1:2", *conf), script)
    agents = [job_folder.start(*args) for _ in range(2)]
    job_folder.wait(2, "up", world=2)
    host, guest = coordinators_first(agents)
    guest.signal(signal.SIGSTOP)
    job_folder.wait(1, "up", world=1)
    guest.signal(signal.SIGCONT)
    assert (host.end(), guest.end()) == (0, 0), host.text + guest.text
    last = job_folder.trail("up")[-1]["port"]
    assert {each["world"] for each in job_folder.trail("up", port=last)} == {2}
    job_folder.all_gone()


# --- a supervisor that executes nothing -------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [False, True], ids=["raises", "is killed"])
def test_a_suspended_supervisor_delays_a_restart_and_keeps_no_process(job_folder, killed: bool) -> None:
    """A worker fails, and the supervisor reports no end and stops nobody. It is killed, with all that its workers have
    started."""
    script = job_folder.script(
        "child()\ndaemon()\nmeet()\n"
        "if ROUND: sys.exit(0)\n"
        "while RANK or not os.path.exists(__file__ + '.go'): time.sleep(0.01)\n"
        "raise RuntimeError"
    )
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script)
    job_folder.wait(2, "up")
    os.kill(agent.supervisor, signal.SIGSTOP)
    if killed:
        os.kill(job_folder.trail("up", rank=0)[0]["pid"], signal.SIGKILL)
    else:
        Path(f"{script}.go").touch()
    assert agent.end(60) == 0, agent.text
    assert len(agent.events("supervisor_killed")) == 1
    assert "hf-supervisor" in agent.text
    job_folder.all_gone()


@pytest.mark.parametrize("endless", [False, True], ids=["suspended", "in an endless loop"])
def test_the_workers_of_a_node_that_is_cut_off_end_though_its_supervisor_does_nothing(
    job_folder, endpoint: str, endless: bool
) -> None:
    """Beside them the others would go on."""
    script = job_folder.script("child()\ndaemon()\nmeet()\nhold()")
    args = (*c10d(endpoint, "2", "--rdzv-conf", f"lease={limit_s(0.6):g}"), script)
    agents = [job_folder.start(*args, program=job_folder.changed(ENDLESS)) for _ in range(2)]
    job_folder.wait(2, "up")
    host, guest = coordinators_first(agents)
    supervisor = guest.supervisor
    os.kill(supervisor, signal.SIGUSR2 if endless else signal.SIGSTOP)
    below = descendants(supervisor)
    host.signal(signal.SIGSTOP)
    until(lambda: not [pid for pid in below if is_alive(pid)], "the end of all workers")
    guest.signal(signal.SIGKILL)
    host.signal(signal.SIGKILL)


ENDLESS = """
import signal
from holdfast.supervisor import supervisor

class Supervisor(supervisor.Supervisor):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        signal.signal(signal.SIGUSR2, endless)

def endless(signum, frame):
    while True:
        pass

supervisor.Supervisor = Supervisor
"""

TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo")
meet()
if ROUND == 0 and len({n["port"] for n in all_notes()}) == 1:
    while True:
        time.sleep(0.05)
        dist.barrier()
dist.barrier()
note("end")
dist.destroy_process_group()
"""


@pytest.mark.xdist_group("torch jobs")
def test_a_killed_store_host_is_replaced(job_folder) -> None:
    """The generation is formed again, with a store of its own, or fails with a verdict."""
    script = job_folder.script("import torch\n" + TORCH)
    agent = job_folder.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script)
    job_folder.wait(2, "up", limit_s=60)
    os.kill(agent.find_below("store_server"), signal.SIGKILL)
    assert agent.end(60) == 0, agent.text
    assert len(job_folder.trail("end")) == 2
    job_folder.all_gone()


# --- the process that holds the workers is gone at an agent's start, again and again, or cannot be there --------------


AT_FORKING = """
import os, signal
from holdfast.supervisor import supervisor, worker_command

begin = worker_command.begin

def killed_first(handle, options):
    os.kill(handle.pid, signal.SIGKILL)
    os.waitid(os.P_PID, handle.pid, os.WEXITED | os.WNOWAIT)
    begin(handle, options)

worker_command.begin = killed_first
"""

EVER_AGAIN = """
from holdfast.runtime import worker_group
from holdfast.supervisor import client as supervisor_client

revive = supervisor_client.revive_supervisor

def revive_and_kill(dead, spare=()):
    handle = revive(dead, spare)
    import os, signal
    os.kill(handle.pid, signal.SIGKILL)
    return handle

worker_group.revive_supervisor = revive_and_kill
from holdfast.supervisor.worker_command import begin
from holdfast.supervisor import worker_command

def killed(handle, options):
    import os, signal
    os.kill(handle.pid, signal.SIGKILL)

worker_command.begin = killed
"""

NOT_AGAIN = EVER_AGAIN.replace(
    "handle = revive(dead, spare)", 'raise BlockingIOError(11, "Resource temporarily unavailable")'
)

NO_PROC = """
from holdfast.supervisor import supervisor

supervisor.PROC = "/nowhere/self/fd"
"""

NO_FORK = """
import os

def fork():
    raise BlockingIOError(11, "Resource temporarily unavailable")

os.fork = fork
"""


def start(job_folder, text: str, *more: str):
    return job_folder.start("--standalone", *more, job_folder.script("meet()"), program=job_folder.changed(text))


@pytest.mark.parametrize("more", [(), ("--preempt-signal", "USR1")])
def test_killed_at_forking_it_is_replaced(job_folder, more: tuple[str, ...]) -> None:
    """With an order on its way, and with none."""
    agent = start(job_folder, AT_FORKING, *more)
    assert agent.end() == 0, agent.text
    assert len(job_folder.trail("up")) == 1


@pytest.mark.parametrize("text", [EVER_AGAIN, NOT_AGAIN], ids=["ends", "does not start"])
def test_one_that_never_stays_ends_the_agent(job_folder, text: str) -> None:
    agent = start(job_folder, text)
    assert agent.end() == 70, agent.text
    assert "HF903" in agent.text
    assert agent.verdict["code"] == "HF903"
    assert len(agent.events("supervisor_died")) <= 6
    job_folder.all_gone()


@pytest.mark.parametrize(("text", "word"), [(NO_PROC, "/proc"), (NO_FORK, "ulimit -u")])
def test_a_machine_that_cannot_have_one(job_folder, text: str, word: str) -> None:
    agent = start(job_folder, text)
    assert agent.end() == 2, agent.text
    assert "HF112" in agent.text
    assert word in agent.text
    assert agent.text.count("\n") == 1, agent.text
    assert job_folder.trail() == []
