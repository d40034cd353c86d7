"""Real jobs on pretend hosts with sshd, started from a login_host by one line, and what breaks them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.ssh.conftest import MakeYard
from tests.ssh.ssh_hosts import SshHosts
from tests.support.limits import limit_s, until

GONE_S = 10.0
"""A launcher that was killed leaves nothing on any host after this."""


def test_three_hosts_train_and_end_with_the_job(ssh_hosts: MakeYard) -> None:
    three = ssh_hosts(3)
    launcher = three.run("--hosts", "node1:2,node2,node3")
    generation = three.job_agents.trains([1, 2, 3])
    assert generation.world == 4
    assert [generation.place(f"node{number}") for number in (1, 2, 3)] == [[0, 1], [2], [3]]
    assert generation.master == three.hosts[1].v4
    three.job_agents.finish_all([launcher])
    three.empty()


def test_a_failure_is_told_once_with_the_workers_own_code(ssh_hosts: MakeYard) -> None:
    two = ssh_hosts(2)
    script = two.folder / "fails.py"
    script.write_text(
        "import os, sys, time\n"
        f"said = {str(two.folder / 'said')!r}\n"
        "print('hello from', os.environ['RANK'], flush=True)\n"
        "if os.environ['RANK'] == '0':\n    open(said, 'w').close()\n    time.sleep(600)\n"
        "while not os.path.exists(said):\n    time.sleep(0.01)\n"
        "raise SystemExit(7)\n"
    )
    launcher = two.run("--hosts", two.names, script=script)
    assert launcher.end() == 7, launcher.text
    assert launcher.text.count("job FAILED") == 1, launcher.text
    assert "node1:0| hello from 0" in launcher.text
    assert "node2:1| hello from 1" in launcher.text
    two.empty()


def test_the_environment_goes_along_unseen_and_strangers_are_refused(ssh_hosts: MakeYard) -> None:
    """The token is the run's own."""
    two = ssh_hosts(2)
    script = two.job_agents.script
    names = "NCCL_DEBUG", "MINE", "OTHER"
    shows = f"import os\nif os.environ['RANK'] == '1':\n    print('GOT', *map(os.environ.get, {names}), os.getcwd())\n"
    script.write_text(shows + script.read_text())
    secrets = {"NCCL_DEBUG": "hush-1", "MINE": "hush-2", "OTHER": "hush-3"}
    launcher = two.run("--hosts", two.names, "--rdzv-id", "known", "--env", "SITE", "--env", "MI*", env=secrets)
    generation = two.job_agents.trains([1, 2])
    launcher.says("GOT hush-1 hush-2 None " + str(two.folder))
    for pid in (pid for host in two.hosts for pid in host.pids()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"hush" not in words, words
        assert b"HOLDFAST_TOKEN" not in words, words
    agents = [line for line in two.left(two.hosts[1]) if "holdfast-agent known" in line]
    assert len(agents) == 2, agents  # guard and agent; the supervisor has a command line of its own
    listening = two.hosts[1].run(["ss", "--listening", "--tcp", "--numeric", "--processes"])
    ports = {line.split()[3].rpartition(":")[2] for line in listening.splitlines() if "python" in line}
    ports.discard(str(generation.port))  # of the workers' store
    assert ports
    for port in ports:
        two.job_agents.args = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "known")
        two.job_agents.args += (
            "--rdzv-endpoint",
            f"node1:{port}",
            "--rdzv-conf",
            f"join_timeout={round(limit_s(1.5))}",
        )
        stranger = two.job_agents.start(2)
        assert stranger.end() != 0, stranger.text
    two.job_agents.finish_all([launcher])


def test_ctrl_c_stops_everything_everywhere(ssh_hosts: MakeYard) -> None:
    two = ssh_hosts(2)
    launcher = two.run("--hosts", two.names)
    two.job_agents.trains([1, 2])
    launcher.signal(signal.SIGINT)
    assert launcher.end() == 130, launcher.text
    two.empty(2.0)


def test_an_end_during_the_login(ssh_hosts: MakeYard) -> None:
    """One host is slow to let us in: neither Ctrl-C nor a killed launcher waits for it."""
    two = ssh_hosts(2)
    two.start_sshd(2, "ForceCommand sleep 600")
    launcher = two.run("--hosts", two.names)
    until(lambda: any("sleep 600" in line for line in two.left(two.hosts[2])), lambda: launcher.text)
    launcher.signal(signal.SIGINT)
    assert launcher.end(GONE_S) == 130, launcher.text
    launcher = two.run("--hosts", two.names)
    until(lambda: any("holdfast-agent" in line for line in two.left(two.hosts[1])), lambda: launcher.text)
    launcher.signal(signal.SIGKILL)
    two.empty(GONE_S, numbers=range(1, 2))
    two.empty(GONE_S, numbers=range(3, 4))
    two.start_sshd(2)


def test_the_second_ctrl_c_kills(ssh_hosts: MakeYard) -> None:
    two = ssh_hosts(2)
    script = two.job_agents.script
    script.write_text("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + script.read_text())
    launcher = two.run("--hosts", two.names)
    two.job_agents.trains([1, 2])
    launcher.signal(signal.SIGINT)
    launcher.says("stopping on all hosts")
    launcher.signal(signal.SIGINT)
    launcher.says("killing on all hosts")
    assert launcher.end(GONE_S) in (130, 137), launcher.text
    two.empty(GONE_S)


def test_a_killed_launcher_leaves_nothing_anywhere(ssh_hosts: MakeYard) -> None:
    two = ssh_hosts(2)
    script = two.job_agents.script  # workers that do not mind SIGTERM, as a hung one does not
    script.write_text("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + script.read_text())
    launcher = two.run("--hosts", two.names)
    two.job_agents.trains([1, 2])
    launcher.signal(signal.SIGKILL)
    two.empty(GONE_S)


def test_a_pulled_cable_is_survived_and_the_host_comes_back(ssh_hosts: MakeYard) -> None:
    three = ssh_hosts(3)
    launcher = three.run("--hosts", three.names, "--nnodes", "2:3")
    three.job_agents.trains([1, 2, 3])
    since_s = time.monotonic()
    three.hosts.unplug(3)
    second = three.job_agents.trains([1, 2], since_s)
    launcher.says("lost the ssh connection to node3")
    three.hosts.plug(3)
    three.job_agents.trains([1, 2, 3], second.born_s)
    three.job_agents.check(overlap_s=0.0)
    three.job_agents.finish_all([launcher])
    three.empty()


def test_the_coordinators_host_is_lost_and_comes_back(ssh_hosts: MakeYard) -> None:
    """The others elect another one. The host finds the job there, though it is the first endpoint."""
    three = ssh_hosts(3)
    launcher = three.run("--hosts", three.names, "--nnodes", "1:3", "--rdzv-conf", "lease=3600")
    three.job_agents.trains([1, 2, 3])
    since_s = time.monotonic()
    three.hosts[1].kill()
    second = three.job_agents.trains([2, 3], since_s)
    launcher.says("lost the ssh connection to node1")
    launcher.says("): lost node1, which had it")  # the coordinator now; of a later term if votes were split before
    three.hosts[1].boot()
    three.start_sshd(1)
    three.job_agents.trains([1, 2, 3], second.born_s)
    three.job_agents.check()
    three.job_agents.finish_all([launcher])
    three.empty()


def own_processes(ssh_hosts: SshHosts) -> tuple[int, int]:
    """The guard and the agent on node 2: the oldest ones."""
    mine = [line for line in ssh_hosts.left(ssh_hosts.hosts[2]) if "holdfast-agent" in line]
    guard, agent = sorted(int(line.split()[0]) for line in mine)[:2]
    return guard, agent


def test_an_agent_that_is_killed_is_started_again(ssh_hosts: MakeYard) -> None:
    """One that gives up is not, and stops those that would wait for it."""
    two = ssh_hosts(2)
    launcher = two.run("--hosts", two.names)
    two.job_agents.trains([1, 2])
    since_s = time.monotonic()
    _, agent = own_processes(two)
    os.kill(agent, signal.SIGKILL)
    two.job_agents.trains([1, 2], since_s)
    launcher.says("the agent on node2 was killed (exit code 137)")
    two.job_agents.check()
    since_s = time.monotonic()
    guard, _ = own_processes(two)
    os.kill(guard, signal.SIGKILL)  # takes its agent along
    two.job_agents.trains([1, 2], since_s)
    two.job_agents.check()
    _, agent = own_processes(two)
    os.kill(agent, signal.SIGQUIT)  # as somebody over there may do
    assert launcher.end() == 131, launcher.text
    assert "node2 has ended (131), and 1 of 2 hosts are too few: stopping" in launcher.text
    two.empty()


def test_detached_hosts_go_on_without_their_launcher(ssh_hosts: MakeYard) -> None:
    two = ssh_hosts(2)
    launcher = two.run("--hosts", two.names, "--on-disconnect", "detach")
    generation = two.job_agents.trains([1, 2])
    launcher.signal(signal.SIGKILL)
    until(lambda: not two.left(two.login_host), lambda: f"the login_host to be empty: {two.left(two.login_host)}")
    since_s = time.monotonic()
    until(lambda: generation_goes_on(two.folder, since_s + 1), two.job_agents.story)
    two.job_agents.finish()
    two.empty()
    assert len(two.job_agents.generations) == 1
    assert generation.complete


def generation_goes_on(folder: Path, after_s: float) -> bool:
    notes = [json.loads(line) for line in (folder / "trail.jsonl").read_text().splitlines()[-8:]]
    return {note["rank"] for note in notes if note["now"] > after_s} == {0, 1}


def test_signals_of_the_user_reach_all_workers(ssh_hosts: MakeYard) -> None:
    two = ssh_hosts(2)
    script = two.folder / "usr1.py"
    script.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    launcher = two.run("--hosts", two.names, script=script)
    until(lambda: launcher.text.count("ready") == 2, lambda: launcher.text)
    launcher.signal(signal.SIGUSR1)
    assert launcher.end() == 0, launcher.text


def test_one_host_and_an_address_of_version_six(ssh_hosts: MakeYard) -> None:
    one = ssh_hosts(1)
    launcher = one.run("--hosts", f"root@[{one.hosts[1].v6}]:2")
    assert one.job_agents.trains([1]).world == 2
    one.job_agents.finish_all([launcher])


def test_a_terminal_that_takes_nothing_holds_up_no_training(ssh_hosts: MakeYard, tmp_path: Path) -> None:
    one = ssh_hosts(1)
    script = one.folder / "loud.py"
    script.write_text("import os\nfor _ in range(20000):\n    print('x' * 100)\nopen('done', 'w').close()\n")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    command = ["sh", "-c", f"exec {sys.executable} -m holdfast.run --hosts node1 {script} > {pipe}"]
    program = one.login_host.start(command, cwd=one.folder, env=one.variables())
    until((one.folder / "done").exists, lambda: "the worker to end")
    os.set_blocking(reader, True)
    read = 0
    while data := os.read(reader, 1 << 16):
        read += data.count(b"\n")
    os.close(reader)
    assert program.wait(limit_s(10)) == 0
    assert read == 20000


# --- hosts that appear and disappear while a job runs, as a program of the user's says --------------------------------


def say(ssh_hosts: SshHosts, *hosts: str) -> str:
    """What the program prints from here on; its name."""
    program = ssh_hosts.folder / "discover"
    fresh = ssh_hosts.folder / "discover.new"
    fresh.write_text("#!/bin/sh\n" + "".join(f"echo {host}\n" for host in hosts))
    fresh.chmod(0o755)
    fresh.rename(program)
    return str(program)


def test_hosts_come_and_go(ssh_hosts: MakeYard) -> None:
    three = ssh_hosts(3)
    program = say(three, "node1:1", "node2:1")
    launcher = three.run("--host-discovery", program, "--nnodes", "1:3")
    three.job_agents.trains([1, 2])
    since_s = time.monotonic()
    say(three, "node1:1", "node2:1", "node3:1")
    three.job_agents.trains([1, 2, 3], since_s)
    since_s = time.monotonic()
    say(three, "node2:1", "node3:1")
    three.job_agents.trains([2, 3], since_s)
    launcher.says("node1 is no longer among the hosts")
    launcher.says("this node is the coordinator now")
    three.empty(numbers=range(1, 2))
    three.job_agents.check()
    three.job_agents.finish_all([launcher])
    three.empty()


def test_a_program_that_fails_changes_nothing_and_one_bad_host_keeps_nobody_waiting(ssh_hosts: MakeYard) -> None:
    one = ssh_hosts(1)
    program = say(one, "node1:1", "nowhere:1")
    launcher = one.run("--host-discovery", program, "--nnodes", "1:3")
    one.job_agents.trains([1])
    assert "host nowhere: its name does not resolve" in launcher.text
    say(one)
    launcher.says("no longer names any host; the hosts stay as they are")
    one.job_agents.finish_all([launcher])
    assert launcher.text.count("does not resolve") == 1, launcher.text


def test_the_job_waits_for_enough_hosts(ssh_hosts: MakeYard) -> None:
    two = ssh_hosts(2)
    launcher = two.run("--host-discovery", say(two, "node1:1"), "--nnodes", "2:2")
    launcher.says("1 of at least 2 hosts are ready; waiting for more")
    say(two, "node1:1", "node2:1")
    two.job_agents.trains([1, 2])
    two.job_agents.finish_all([launcher])


def test_a_program_that_never_worked_is_an_error(ssh_hosts: MakeYard) -> None:
    one = ssh_hosts(1)
    text = one.refused("--host-discovery", say(one, "a b c"), "--nnodes", "1:2")
    assert "HF140" in text
    assert "'b' is not valid" in text
