"""Commands beside real jobs: each node tells of the whole job, and may end it; nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.runtime.running import reachable
from tests.processes.conftest import Agent, JobFolder, c10d, coordinators_first, holdfast, is_alive, told
from tests.support.documents import checked
from tests.support.limits import limit_s, until

pytestmark = pytest.mark.usefixtures("registry")
HOLD = "meet()\nwhile True: time.sleep(1)"
LOOP = """
from holdfast.worker import should_stop
should_stop()  # from here on it can save
meet()
while not should_stop():
    time.sleep(0.01)
note("saved")
"""
COMMAND_S = limit_s(30.0)


def refused(*args: str | Path) -> str:
    done = holdfast(*args)
    assert (done.returncode, done.stdout) == (2, ""), (done.returncode, done.stdout)
    assert "Traceback" not in done.stderr
    return done.stderr


def kill(agent: Agent) -> None:
    """The only job that runs."""
    holdfast("kill")
    agent.end()


@contextlib.contextmanager
def beside(*args: str) -> Iterator[Any]:
    """A command in a process of its own, for as long as the job runs or it is told to end."""
    line = [sys.executable, "-m", "holdfast", *args]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process


def job(job_folder: JobFolder, script: str, *args: str, name: str = "train.py", count: int = 2) -> Agent:
    before = len(job_folder.trail("up"))
    agent = job_folder.start("--standalone", f"--nproc-per-node={count}", *args, job_folder.script(script, name))
    job_folder.wait(before + count, "up")
    until(lambda: entries(job_folder), "an entry in the list")
    return agent


def connected(agent: Agent) -> socket.socket:
    """A client of its control socket."""
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(limit_s(10))
    with reachable(str(agent.folder / "control.sock")) as path:
        client.connect(path)
    return client


def entries(job_folder: JobFolder) -> list[Path]:
    return list((job_folder.folder / "running").glob("*.json"))


def pair(job_folder: JobFolder, endpoint: str, script: str) -> list[Agent]:
    line = c10d(endpoint, "2", "--rdzv-id=two")
    agents = [job_folder.start(*line, job_folder.script(script)) for _ in range(2)]
    job_folder.wait(2, "up")
    until(lambda: len(entries(job_folder)) == 2, "two entries in the list")
    return agents


# --- the whole job from every node ------------------------------------------------------------------------------------


def test_both_nodes_tell_of_the_same_world(job_folder: JobFolder, endpoint: str) -> None:
    agents = pair(job_folder, endpoint, HOLD)
    views = [told("status", agent.folder) for agent in agents]
    for view in views:
        assert (view["run_id"], view["whole"], view["world_size"], view["generation"]) == ("two", True, 2, 1)
        assert {node["group_rank"] for node in view["nodes"]} == {0, 1}
    assert {node["member"] for node in views[0]["nodes"]} == {node["member"] for node in views[1]["nodes"]}
    assert "2 ranks on 2 nodes" in holdfast("status").stdout, "two agents of one job are one job"
    done = holdfast("kill")
    assert (done.returncode, "kill sent to 2 nodes" in done.stdout) == (0, True), done.stderr
    assert [agent.end() for agent in agents] == [137, 137]
    job_folder.all_gone()
    assert not entries(job_folder)


def test_stop_saves_first_on_all_nodes(job_folder: JobFolder, endpoint: str) -> None:
    agents = pair(job_folder, endpoint, LOOP)
    end = told("stop", "two")
    assert (end["ended"], end["kind"], end["exit_code"], end["nodes"]) == (True, "preempted", 75, 2)
    assert "holdfast stop" in end["message"]
    assert len(job_folder.trail("saved")) == 2
    assert [agent.end() for agent in agents] == [75, 75]
    job_folder.all_gone()
    assert not entries(job_folder)


def test_kill_asks_nobody(job_folder: JobFolder) -> None:
    agent = job(job_folder, "on_signal('SIGTERM')\nchild()\ndaemon()\n" + HOLD)
    assert told("kill")["exit_code"] == 137
    assert agent.end() == 137
    assert not job_folder.trail("signal")
    job_folder.all_gone()


def test_without_a_coordinator_a_node_tells_of_itself(job_folder: JobFolder, endpoint: str) -> None:
    agents = pair(job_folder, endpoint, HOLD)
    host, guest = coordinators_first(agents)
    host.signal(signal.SIGSTOP)
    until(lambda: guest.events("link_lost"), "the guest has lost its coordinator")
    view = told("status", guest.folder)
    assert view["whole"] is False
    assert any("coordinator does not answer" in notice for notice in view["notices"])
    host.signal(signal.SIGCONT)
    holdfast("kill", guest.folder)
    guest.signal(signal.SIGKILL)


# --- which job --------------------------------------------------------------------------------------------------------


def test_one_of_two_jobs_is_killed(job_folder: JobFolder) -> None:
    one = job(job_folder, HOLD, "--rdzv-id=alpha", name="one.py", count=1)
    other = job(job_folder, HOLD, "--rdzv-id=beta", name="other.py", count=1)
    until(lambda: len(entries(job_folder)) == 2, "two entries")
    shown = holdfast("status").stdout
    assert one.folder.name in shown
    assert other.folder.name in shown
    for command in ("stacks", "stop", "kill"):
        assert "HF127: 2 jobs run on this host" in refused(command)
    assert told("kill", other.folder.name)["ended"] is True
    other.end()
    assert one.process.poll() is None
    kill(one)
    assert "has ended: signalled, exit code 137" in refused("stop", one.folder)


def test_no_job(job_folder: JobFolder, tmp_path: Path) -> None:
    assert "HF127: no job of this user runs on this host" in refused("status")
    assert "is no run folder" in refused("stop", tmp_path)
    assert "is no run folder" in refused("kill", tmp_path / "nowhere")
    assert "HF101" in refused("status", "--nonsense")


# --- the socket -------------------------------------------------------------------------------------------------------


def test_socket_and_list_are_the_users_alone(job_folder: JobFolder, registry: Path) -> None:
    agent = job(job_folder, HOLD)
    told_mode = os.stat(agent.folder / "control.sock")
    assert stat.S_ISSOCK(told_mode.st_mode)
    assert stat.S_IMODE(told_mode.st_mode) == 0o600
    assert stat.S_IMODE(os.stat(registry).st_mode) == 0o700
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in entries(job_folder)] == [0o600]
    kill(agent)
    assert not (agent.folder / "control.sock").exists()


AS_NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
client = socket.socket(socket.AF_UNIX)
os.chdir(os.path.dirname(sys.argv[1]))
client.connect(os.path.basename(sys.argv[1]))
client.sendall(b'{"ask": "kill"}\\n')
print(client.recv(65536).decode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.xdist_group("folders open to others")
def test_another_user_is_refused(job_folder: JobFolder) -> None:
    agent = job(job_folder, HOLD)
    path = str(agent.folder / "control.sock")
    line = [sys.executable, "-c", AS_NOBODY, path]
    outside = subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert "PermissionError" in outside.stderr
    with opened(agent.folder):
        inside = subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert json.loads(inside.stdout)["code"] == "HF128", inside.stderr
    assert agent.process.poll() is None
    assert told("status")["phase"] == "running"
    kill(agent)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[None]:
    """Everybody may go to the socket, as if somebody had been careless: the agent itself has to refuse.

    The folders above belong to all test processes: tests that open them run one after the other.
    """
    with widened(dict.fromkeys((folder, *parents_in_tmp(folder)), 0o755) | {folder / "control.sock": 0o777}):
        yield


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.xdist_group("folders open to others")
def test_the_command_of_another_user_says_whose_it_is(job_folder: JobFolder) -> None:
    agent = job(job_folder, HOLD)
    agent.folder.chmod(0o700)
    with widened(dict.fromkeys(parents_in_tmp(agent.folder), 0o055)):
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY_COMMAND, str(agent.folder)],
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    assert "HF128" in done.stderr
    assert "belongs to another user (uid 0)" in done.stderr
    kill(agent)


AS_NOBODY_COMMAND = """
import locale, os, shutil, sys
import holdfast.cli, holdfast.extensions.status.command
holdfast.extensions.status.command.status_parser().format_help()
os.environ["HOLDFAST_RUNTIME_DIR"] = "/proc"
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(holdfast.cli.main(["status", sys.argv[1]]))
"""


@contextlib.contextmanager
def widened(bits: Mapping[Path, int]) -> Iterator[None]:
    """These permissions in addition; afterwards what was there."""
    before = {path: stat.S_IMODE(path.stat().st_mode) for path in bits}
    for path, mode in before.items():
        path.chmod(mode | bits[path])
    try:
        yield
    finally:
        for path, mode in before.items():
            path.chmod(mode)


def parents_in_tmp(folder: Path) -> list[Path]:
    """The folders above it, up to /tmp, which is open to everybody."""
    return [path for path in folder.parents if Path("/tmp") in path.parents]


def test_a_long_log_dir(job_folder: JobFolder) -> None:
    long = job_folder.folder.joinpath(*("deep" * 12 for _ in range(4)))
    agent = job(job_folder, HOLD, "--log-dir", str(long))
    folder = next(long.iterdir())
    assert len(str(folder / "control.sock")) > 108
    assert (folder / "control.sock").exists()
    assert told("status", folder)["world_size"] == 2
    kill(agent)


def test_without_log_files(job_folder: JobFolder) -> None:
    agent = job(job_folder, HOLD, "--log-dir", "/dev/null")
    assert told("status")["world_size"] == 2
    assert "keeps no logs" in refused("logs")
    assert told("kill")["exit_code"] == 137
    agent.end()
    assert not list((job_folder.folder / "running").iterdir()), "the socket was there, and is removed too"


# --- agents in trouble, clients in trouble ----------------------------------------------------------------------------


def test_what_a_killed_agent_left_is_cleared_away(job_folder: JobFolder) -> None:
    agent = job(job_folder, HOLD)
    agent.signal(signal.SIGKILL)
    agent.end()
    assert entries(job_folder)
    assert "HF127: no job of this user runs on this host" in refused("status")
    assert not entries(job_folder)
    assert not (agent.folder / "control.sock").exists()
    job_folder.all_gone()


def test_an_agent_that_stands_still_is_not_waited_for_for_ever(job_folder: JobFolder) -> None:
    agent = job(job_folder, HOLD)
    agent.signal(signal.SIGSTOP)
    text = refused("status")
    assert "HF129" in text
    assert f"kill -CONT {agent.pid}" in text
    agent.signal(signal.SIGCONT)
    assert told("status")["phase"] in ("running", "gathering", "stopping", "preparing")
    kill(agent)


def test_clients_that_stall_stall_nobody(job_folder: JobFolder) -> None:
    agent = job(job_folder, HOLD)
    with contextlib.ExitStack() as stack:
        for greeting in (b"", b'{"ask": ', b'{"ask": "status"}\n', b"x" * 9000, b'{"ask": "format the disk"}\n'):
            client = stack.enter_context(connected(agent))
            client.sendall(greeting)  # and nothing is ever read
        assert told("status")["phase"] == "running"
        holdfast("kill")
        assert agent.end() == 137
    job_folder.all_gone()


def test_nonsense_is_answered_by_a_refusal(job_folder: JobFolder) -> None:
    agent = job(job_folder, HOLD)
    for line in (b"\n", b"[]\n", b'{"ask": "format"}\n', b'{"ask": "kill", "now": true}\n', b"\xff\xfe\n", b"x" * 9000):
        with connected(agent) as client:
            client.sendall(line)
            assert json.loads(client.recv(65536))["code"] == "HF128", line
    assert is_alive(agent.pid)
    kill(agent)


# --- watching ---------------------------------------------------------------------------------------------------------


def test_watch_goes_on_until_the_job_ends(job_folder: JobFolder) -> None:
    agent = job(job_folder, HOLD)
    with beside("status", "--watch", "0.1", "--json") as watching:
        first, second = watching.stdout.readline(), watching.stdout.readline()
        assert checked("status", first)["time"] < checked("status", second)["time"]
        kill(agent)
        rest, err = watching.communicate(timeout=COMMAND_S)
    assert watching.returncode == 0, err
    assert all(checked("status", each)["run_id"] for each in rest.splitlines())


def test_ctrl_c_leaves_a_watch_cleanly(job_folder: JobFolder) -> None:
    agent = job(job_folder, HOLD)
    with beside("status", "--watch") as watching:
        assert watching.stdout.readline().startswith("run ")
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=COMMAND_S)
    assert (watching.returncode, err) == (0, "")
    kill(agent)


# --- stacks and logs --------------------------------------------------------------------------------------------------


def test_stacks_name_the_odd_rank(job_folder: JobFolder) -> None:
    body = "def odd():\n    hold()\ndef even():\n    hold()\nmeet()\nodd() if RANK == 1 else even()"
    agent = job(job_folder, body, count=3)
    view: Any = {}

    def both() -> bool:
        view.update(told("stacks"))
        return len(view["groups"]) == 2 and all(each["stack"] >= 0 for each in view["ranks"])

    until(both, lambda: json.dumps(view, indent=1))
    assert sorted(each["ranks"] for each in view["groups"]) == [[0, 2], [1]]
    text = holdfast("stacks").stdout
    assert "ranks 0, 2 on" in text
    assert "odd  " in text
    assert [each["rank"] for each in told("stacks", "--rank", "1")["ranks"]] == [1]
    assert "no rank 7 answered" in refused("stacks", "--rank", "7")
    kill(agent)


def test_logs_of_a_job_that_runs_and_has_ended(job_folder: JobFolder) -> None:
    script = """
print("from", RANK, flush=True)
print("trouble", RANK, file=sys.stderr, flush=True)
meet()
while not os.path.exists("finish"):
    time.sleep(0.01)
print("last", RANK)
"""
    agent = job(job_folder, script)
    # A thread of the agent moves the output into the files.
    until(lambda: holdfast("logs", "--rank", "1", "--stdout").stdout == "from 1\n", "the output of rank 1")
    until(lambda: holdfast("logs", "--rank", "0", "--stdout").stdout == "from 0\n", "the output of rank 0")
    with beside("logs", "--follow", "--grep", "last|from") as following:
        assert {following.stdout.readline(), following.stdout.readline()} == {"0| from 0\n", "1| from 1\n"}
        (job_folder.folder / "finish").touch()
        rest, err = following.communicate(timeout=COMMAND_S)
    assert (following.returncode, err) == (0, "")
    assert sorted(rest.splitlines()) == ["0| last 0", "1| last 1"]
    assert agent.end() == 0
    assert holdfast("logs", agent.folder, "--stderr").stdout == "0| trouble 0\n1| trouble 1\n"
    assert "no generation 4" in refused("logs", agent.folder, "--generation", "4")
    assert "no such rank" in refused("logs", agent.folder, "--rank", "9")
    assert "HF101" in refused("logs", agent.folder, "--grep", "(")


def test_who_waits_for_the_end_is_answered_after_the_log_files_are_written(job_folder: JobFolder) -> None:
    """So neither `holdfast logs` after `holdfast stop`, nor `holdfast logs -f` misses the last lines. The disk stands
    still: the file is a pipe without a reader, and the agent gives up after a while, with a message."""
    script = """
from pathlib import Path
meet()
file = next(Path(".").glob(f"logs*/*/attempt_0/{RANK}/stdout.log"))
file.unlink()
os.mkfifo(file)
note("stalled")
while not os.path.exists("finish"):
    time.sleep(0.01)
print("last")
"""
    agent = job(job_folder, script, count=1)
    job_folder.wait(1, "stalled")
    with connected(agent) as client:
        client.sendall(b"{}\n")
        (job_folder.folder / "finish").touch()
        assert b"exit_code" in client.makefile("rb").readline()
        assert "5 bytes of output are not in the log files: the disk stands still" in agent.text
    assert agent.end() == 0


def test_follow_goes_over_to_the_next_generation(job_folder: JobFolder) -> None:
    script = """
print("round", ROUND, flush=True)
meet()
while not os.path.exists(f"go{ROUND}"):
    time.sleep(0.01)
sys.exit(1 if ROUND == 0 else 0)
"""
    agent = job(job_folder, script, "--max-restarts=1", count=1)
    with beside("logs", "-f", "--rank", "0", "--stdout") as following:
        assert following.stdout.readline() == "round 0\n"
        (job_folder.folder / "go0").touch()
        assert following.stdout.readline() == "round 1\n"
        (job_folder.folder / "go1").touch()
        rest, err = following.communicate(timeout=COMMAND_S)
    assert (following.returncode, rest, err) == (0, "", "")
    assert agent.end() == 0
    assert holdfast("logs", agent.folder, "--generation", "1", "--stdout").stdout == "0| round 0\n"


def test_the_agent_starts_no_slower_for_it(job_folder: JobFolder) -> None:
    """What listens for commands is asyncio's own: no module is loaded for it but ours. Extensions are loaded when they
    are needed."""
    code = (
        "import sys, asyncio, msgspec, holdfast.runtime.agent_service as before; names = set(sys.modules); "
        "import holdfast.runtime.control, holdfast.runtime.control_requests; "
        "print(sorted(name for name in set(sys.modules) - names)); "
        "print([name for name in sys.modules if name.startswith('holdfast.extensions.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=COMMAND_S, check=True)
    assert done.stdout.split() == ["[]", "[]"]
