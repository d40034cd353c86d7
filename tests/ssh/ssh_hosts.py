"""Pretend hosts with an sshd each, and one more host from which `holdfast run --hosts` is typed.

Adapts `tests.network.hosts`; adds keys, configuration and the user's `ssh`, which is a small script in front of the
system's, because ssh looks for its configuration in the real home folder whatever HOME says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.network.hosts import Host, PretendHosts, Program
from tests.network.hosts import why_not as why_no_hosts
from tests.network.job_agents import WAIT_S, Agent, JobAgents
from tests.support.limits import until

PORT = 2222
SSHD = "/usr/sbin/sshd"
TOOLS = ("ssh", "ssh-keygen")


@cache
def why_not() -> str:
    """Why this machine cannot have hosts with sshd; empty when it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or not os.access(SSHD, os.X_OK):
        return f"needs {', '.join([*missing, 'sshd'])} (Debian: openssh-client, openssh-server)"
    return why_no_hosts()


@cache
def key_pair(name: str) -> dict[str, str]:
    """The files of an ssh key, made once for all tests of this process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        return {each.name: each.read_text() for each in (path, path.with_suffix(".pub"))}


class SshHosts:
    """Hosts node1 … nodeN with sshd; the last one, without it, is where people type."""

    def __init__(self, hosts: PretendHosts, count: int, folder: Path) -> None:
        self.hosts = hosts
        self.count = count
        self.folder = folder
        self.login_host = hosts[count + 1]
        self.job_agents = JobAgents(hosts, folder)
        self.keys = folder / "keys"
        self.daemons: dict[int, Program] = {}
        self._make_keys()
        for number in range(1, count + 1):
            self.start_sshd(number)

    def _make_keys(self) -> None:
        self.keys.mkdir(mode=0o700)
        for name in ("id", "hostkey", "otherkey"):
            for file, text in key_pair(name).items():
                (self.keys / file).write_text(text)
                (self.keys / file).chmod(0o600)
        shutil.copy(self.keys / "id.pub", self.keys / "authorized_keys")
        (self.keys / "known_hosts").write_text("")
        self.configure("")
        (self.folder / "bin").mkdir()
        self.wrap_ssh()
        Path("/run/sshd").mkdir(exist_ok=True)

    def wrap_ssh(self, options: str = "") -> None:
        """The user's ssh. These options win over those that it is given."""
        wrapper = self.folder / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.keys}/config {options} "$@"\n')
        wrapper.chmod(0o755)

    def configure(self, before: str) -> None:
        """The user's ssh_config; what comes first counts."""
        (self.keys / "config").write_text(
            f"{before}\nHost *\n  User root\n  Port {PORT}\n  IdentityFile {self.keys}/id\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.keys}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
            "  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
        )

    def start_sshd(self, number: int, *more: str, key: str = "hostkey") -> None:
        """(Again, with other settings: the first one of each counts.)"""
        self.end_sshd(number)
        host = self.hosts[number]
        config = self.keys / f"sshd{number}"
        lines = [
            *more,
            f"Port {PORT}",
            "ListenAddress 0.0.0.0",
            "ListenAddress ::",
            f"HostKey {self.keys}/{key}",
            f"AuthorizedKeysFile {self.keys}/authorized_keys",
            "PasswordAuthentication no",
            "UsePAM no",
            "StrictModes no",
            "PermitRootLogin yes",
            "UseDNS no",
            "PidFile none",
        ]
        config.write_text("\n".join(lines) + "\n")
        log = self.folder / f"sshd{number}.txt"
        with log.open("wb") as file:
            self.daemons[number] = host.start([SSHD, "-D", "-e", "-f", config], stdout=file)
        until(lambda: log.read_text().count("Server listening") == 2, lambda: f"sshd to listen: {log.read_text()}")

    def end_sshd(self, number: int) -> None:
        """(If there is one.)"""
        if number in self.daemons:
            self.daemons.pop(number).end()
            # Its process ends a moment after the one that was waited for, and has the port until then.
            listening = ["ss", "--listening", "--tcp", "--numeric"]
            until(lambda: f":{PORT} " not in self.hosts[number].run(listening), f"port {PORT} to be free")

    def renew(self) -> None:
        """Forget what a test before this one has set or left; its jobs have ended."""
        self.configure("")
        self.wrap_ssh()
        (self.keys / "known_hosts").write_text("")
        (self.folder / "trail.jsonl").unlink()
        (self.folder / "finish").unlink(missing_ok=True)
        self.job_agents = JobAgents(self.hosts, self.folder)

    @property
    def names(self) -> str:
        return ",".join(f"node{number}" for number in range(1, self.count + 1))

    def run(
        self,
        *line: str | Path,
        script: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Agent:
        """`holdfast run …` at the login_host."""
        name = f"launcher{len(self.job_agents.agents)}"
        screen = self.folder / f"{name}.txt"
        command = [sys.executable, "-m", "holdfast.run", *line, script or self.job_agents.script]
        with screen.open("wb") as file:
            program = self.login_host.start(
                command, cwd=cwd or self.folder, env={**self.variables(), **(env or {})}, stdout=file
            )
        agent = Agent(self.login_host, program, screen)
        self.job_agents.agents.append(agent)
        return agent

    def variables(self) -> dict[str, str]:
        """The user's environment at the login_host."""
        return {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PET_LOG_DIR": str(self.folder / "logs"),
            "HOLDFAST_ENV": "SITE",
            "SITE": str(self.folder),
        }

    def refused(self, *line: str | Path, script: Path | None = None, cwd: Path | None = None) -> str:
        """A line that must be refused: what it says, for an exit code of 2."""
        agent = self.run(*line, script=script, cwd=cwd)
        code = agent.end()
        assert code == 2, f"{code}: {agent.text}"
        return agent.text

    def left(self, host: Host) -> list[str]:
        """Command lines of what runs there, but for sshd itself."""
        daemon = self.daemons.get(host.number)
        own = {daemon.pid} if daemon is not None and daemon.running else set()
        lines = []
        for pid in host.pids():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if pid not in own and state not in "ZX" and words and not words.startswith(("sleep 3600", "sshd: /usr")):
                lines.append(f"{pid} {words}")
        return lines

    def empty(self, limit_s: float = WAIT_S, numbers: range | None = None) -> None:
        """Nothing is left on the hosts."""
        hosts = [self.hosts[number] for number in numbers or range(1, self.count + 2)]
        until(
            lambda: not any(self.left(host) for host in hosts),
            lambda: f"{ {host.name: self.left(host) for host in hosts} } to end\n{self.job_agents.story()}",
            limit_s,
        )


@contextmanager
def make_yard(count: int, folder: Path) -> Iterator[SshHosts]:
    with PretendHosts(count + 1, folder / "hosts") as hosts:
        yield SshHosts(hosts, count, folder)
