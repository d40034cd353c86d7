"""What can be wrong with a host: each is one clear message that names it, an end with 2, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ssh.conftest import MakeYard
from tests.ssh.ssh_hosts import SshHosts, make_yard, why_not
from tests.support.limits import until


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Two hosts for all these tests; only the first one has an sshd that stays."""
    if why := why_not():
        pytest.skip(why)
    with make_yard(2, tmp_path_factory.mktemp("ssh_hosts")) as made:
        made.end_sshd(2)
        yield made


@pytest.fixture
def two(shared: SshHosts) -> Iterator[SshHosts]:
    """As if they were new."""
    shared.renew()
    shared.start_sshd(2)
    yield shared
    shared.empty(10)
    shared.end_sshd(2)


def one_line(text: str, *parts: str) -> None:
    """A single message, of one or two lines, with all of these."""
    assert text.count("holdfast: HF14") == 1, text
    assert len(text.strip().splitlines()) <= 2, text
    assert all(part in text for part in parts), text


def test_a_host_that_is_not_there(two: SshHosts) -> None:
    two.configure("Host gone\n  HostName 10.77.0.99\n")
    text = two.refused("--hosts", "node1,gone")
    one_line(text, "HF141", "host gone", "cannot be reached by ssh", "No route to host")


def test_a_host_without_sshd(two: SshHosts) -> None:
    two.end_sshd(2)
    one_line(two.refused("--hosts", "node1,node2"), "HF141", "host node2", "Connection refused")


def test_a_jump_host_that_takes_one_login_at_a_time(ssh_hosts: MakeYard) -> None:
    three = ssh_hosts(3)
    three.start_sshd(3, "MaxStartups 1:100:1")
    three.configure("Host node1 node2\n  ProxyJump node3\n")
    launcher = three.run("--hosts", "node1,node2", "--no-python", script=Path(shutil.which("hostname")))
    assert launcher.end() == 0, launcher.text


def test_a_name_that_does_not_resolve(two: SshHosts) -> None:
    one_line(two.refused("--hosts", "node1,nowhere"), "HF141", "host nowhere", "does not resolve")


def test_a_host_key_that_has_changed(two: SshHosts) -> None:
    two.configure("Host *\n  StrictHostKeyChecking yes\n  LogLevel QUIET\n")
    keys = [(two.keys / f"{name}.pub").read_text() for name in ("hostkey", "otherkey")]
    (two.keys / "known_hosts").write_text("".join(f"[node{n}]:2222 {key}" for n, key in enumerate(keys, 1)))
    text = two.refused("--hosts", "node1,node2")
    one_line(text, "HF141", "host node2", "host key has changed", f"{two.keys}/known_hosts:2", "ssh-keygen -R")


def test_a_host_key_that_nobody_knows(two: SshHosts) -> None:
    two.configure("Host *\n  StrictHostKeyChecking ask\n")
    (two.keys / "known_hosts").write_text(f"[node1]:2222 {(two.keys / 'hostkey.pub').read_text()}")
    one_line(two.refused("--hosts", "node1,node2"), "HF141", "host node2", "not known here", "ssh node2")


def test_a_password_prompt_is_never_waited_for(two: SshHosts) -> None:
    two.start_sshd(2, "AuthorizedKeysFile none", "PasswordAuthentication yes", "KbdInteractiveAuthentication yes")
    one_line(two.refused("--hosts", "node2"), "HF141", "host node2", "no login without a password", "BatchMode")


def test_a_login_that_never_ends(two: SshHosts, tmp_path: Path) -> None:
    """sshd takes the connection and says nothing."""
    two.end_sshd(2)
    listening = tmp_path / "listening"
    silent = (
        "import sys, socket, time; s = socket.create_server(('0.0.0.0', 2222)); open(sys.argv[1], 'w'); time.sleep(600)"
    )
    program = two.hosts[2].start([sys.executable, "-I", "-c", silent, listening])
    until(listening.exists, "the program to listen")
    # The host that answers is not asked: on a busy machine it may need more than this second.
    two.wrap_ssh("-o ConnectTimeout=1")
    text = two.refused("--hosts", "node2")
    program.end()
    one_line(text, "HF141", "host node2", "cannot be reached by ssh", "timed out")


def test_no_such_python_there(two: SshHosts) -> None:
    two.start_sshd(2, f"ForceCommand sh -c 'exec {sys.executable}-gone -c 0'")
    one_line(two.refused("--hosts", "node2"), "HF141", "host node2", "cannot be started there", sys.executable)


def fake_site(two: SshHosts, name: str, files: dict[str, str]) -> None:
    """Node 2 finds these modules before all others."""
    folder = two.folder / name
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    command = f'ForceCommand PYTHONPATH={folder} exec sh -c "$SSH_ORIGINAL_COMMAND"'
    two.start_sshd(2, command)


def test_another_torch(two: SshHosts) -> None:
    fake_site(two, "torches", {"torch/version.py": "__version__ = '1.0.0+old'\n"})
    text = two.refused("--hosts", "node2")
    one_line(text, "HF142", "host node2", "torch 1.0.0+old there")


def test_another_python(two: SshHosts) -> None:
    fake_site(two, "pythons", {"sitecustomize.py": "import sys\nsys.version_info = (3, 9, 1, 'final', 0)\n"})
    one_line(two.refused("--hosts", "node2"), "HF142", "host node2", "Python 3.9.1 there")


def test_another_holdfast_or_none(two: SshHosts) -> None:
    fake_site(two, "older", {"holdfast/__init__.py": "", "holdfast/version.py": "__version__ = '0.0.1'\n"})
    one_line(two.refused("--hosts", "node2"), "HF142", "host node2", "holdfast 0.0.1 there")
    fake_site(two, "none", {"holdfast/__init__.py": "raise ImportError\n"})
    one_line(two.refused("--hosts", "node2"), "HF142", "host node2", "not installed")


def test_a_script_that_is_here_only(two: SshHosts) -> None:
    own = two.login_host.run(["mktemp", "-d", "-p", "/dev/shm"]).strip()
    two.login_host.run(["cp", two.job_agents.script, f"{own}/train.py"])
    text = two.refused("--hosts", "node1,node2", "--cwd", two.folder, script=Path(own) / "train.py")
    assert text.count(f"the training script {own}/train.py cannot be read there (No such file or directory)") == 2
    assert "HF142: host node1: " in text
    assert "host node2: " in text


def test_a_script_that_differs(two: SshHosts) -> None:
    for host, text in ((two.login_host, "print(1)"), (two.hosts[2], "print(2)")):
        host.run(["sh", "-c", f"echo '{text}' > /dev/shm/train.py"])
    text = two.refused("--hosts", "node2", script=Path("/dev/shm/train.py"))
    one_line(text, "HF142", "host node2", "/dev/shm/train.py is another one there")


def test_a_host_that_is_mended_joins_while_the_job_runs(two: SshHosts) -> None:
    script = Path("/dev/shm/train.py")
    for host in (two.login_host, two.hosts[1]):
        host.run(["cp", two.job_agents.script, script])
    two.hosts[2].run(["sh", "-c", f"echo 'print(2)' > {script}"])
    launcher = two.run("--hosts", "node1,node2", "--nnodes", "1:2", script=script)
    assert two.job_agents.trains([1]).world == 1
    assert "is another one there" in launcher.text
    two.hosts[2].run(["cp", two.job_agents.script, script])
    assert two.job_agents.trains([1, 2]).world == 2
    two.job_agents.finish_all([launcher])


def test_a_folder_that_is_here_only(two: SshHosts) -> None:
    two.login_host.run(["mkdir", "-p", "/dev/shm/work"])
    text = two.refused("--hosts", "node2", "--cwd", "/dev/shm/work", script=two.job_agents.script)
    one_line(text, "HF142", "host node2", "working folder /dev/shm/work cannot be entered there")


def test_more_slots_than_cores(two: SshHosts) -> None:
    cores = len(os.sched_getaffinity(0))
    text = two.refused("--hosts", f"node1,node2:{cores + 1}")
    one_line(text, "HF142", "host node2", f"{cores + 1} workers, but {cores} CPU core")


def test_two_names_of_one_host(two: SshHosts) -> None:
    text = two.refused("--hosts", f"node1,{two.hosts[1].v4}")
    one_line(text, "HF140", f"host {two.hosts[1].v4} is the same machine as node1")
    launcher = two.run("--hosts", f"node1,{two.hosts[1].v4}", "--nnodes", "1:2")
    assert two.job_agents.trains([1]).world == 1
    two.job_agents.finish_all([launcher])
    assert "is the same machine as node1" in launcher.text
    assert "killed" not in launcher.text, "two names have one agent"


def test_no_ssh_at_all(two: SshHosts) -> None:
    folder = two.folder / "few"
    folder.mkdir()
    for tool in ("nsenter", "setpriv", "env"):
        (folder / tool).symlink_to(str(shutil.which(tool)))
    agent = two.run("--hosts", "node1", env={"PATH": str(folder)})
    assert agent.end() == 2
    one_line(agent.text, "HF141", "ssh cannot be started", "openssh-client")


def test_an_elastic_job_goes_on_without_a_bad_host(two: SshHosts) -> None:
    launcher = two.run("--hosts", "node1,nowhere", "--nnodes", "1:2", "--no-python", script=Path(shutil.which("true")))
    assert launcher.end() == 0, launcher.text
    assert "host nowhere: its name does not resolve" in launcher.text
    assert "continuing without it" in launcher.text


def test_the_greetings_of_a_login_shell_do_no_harm(two: SshHosts) -> None:
    two.start_sshd(
        2, """ForceCommand echo Welcome; echo welcome >&2; echo -n no line; exec sh -c "$SSH_ORIGINAL_COMMAND" """
    )
    launcher = two.run("--hosts", "node2", "--no-python", script=Path(shutil.which("hostname")))
    assert launcher.end() == 0, launcher.text
    assert launcher.text == "node2:0| node2\n"
