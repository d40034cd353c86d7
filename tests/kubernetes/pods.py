"""Pretend pods: what a manifest says, done on a pretend host as a kubelet would.

The agent is PID 1 of its container, its arguments and variables are the manifest's, `$(NAME)` replaced by Kubernetes'
rule, and its peers' names come into DNS (here /etc/hosts) when the test says so.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.launchers.kubernetes import RUNS_PATH
from holdfast.linux import process_stat
from tests.conftest import descendants
from tests.kubernetes.manifests import agent_of, job_of
from tests.network.fleet import Agent, Fleet
from tests.network.hosts import Host, PretendHosts

TOKEN = "0123456789abcdef" * 4
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")

ASK = """
import os, sys, urllib.request, urllib.error
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=5 * float(os.environ["TEST_SLOWNESS"])).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print(0)
"""


class Pods(Fleet):
    """A job whose agents are pods of a manifest."""

    def __init__(self, hosts: PretendHosts, folder: Path) -> None:
        super().__init__(hosts, folder)
        self.manifests: list[dict[str, Any]] = []
        self.names(())

    def names(self, known: Iterable[tuple[str, int]]) -> None:
        """What DNS says from now on, on every node: names and the numbers of the nodes where those pods are."""
        book = "127.0.0.1 localhost\n" + "".join(f"{self.hosts[node].v4} {name}\n" for name, node in known)
        for host in self.hosts:
            host.hosts_file.write_text(f"{book}{host.v4} {host.name}\n")

    def pod(self, index: int, node: int) -> Agent:
        """Start the pod of this index there."""
        spec = agent_of(self.manifests)
        own = {"JOB_COMPLETION_INDEX": str(index), "POD_IP": self.hosts[node].v4, "HOLDFAST_TOKEN": TOKEN}
        given = {each["name"]: expanded(each["value"], own) for each in spec["env"] if "value" in each}
        words = [expanded(word, {**own, **given}) for word in spec["args"]]
        assert spec["command"] == ["holdfast", "run"]
        runs = str(self.folder / f"runs-{len(self.agents)}")
        words = [word.replace(RUNS_PATH, runs) for word in words]
        return self.container(node, words, {**own, **given})

    def container(self, node: int, words: list[str], env: Mapping[str, str]) -> Agent:
        """`holdfast run` with these words as PID 1."""
        screen = self.folder / f"agent{len(self.agents)}-node{node}.txt"
        with screen.open("wb") as file:
            program = self.hosts[node].start(
                [*CONTAINER, sys.executable, "-m", "holdfast", "run", *words],
                cwd=self.folder,
                env={**env, "SITE": str(self.folder)},
                stdout=file,
            )
        agent = Agent(self.hosts[node], program, screen)
        self.agents.append(agent)
        return agent

    def probe(self, host: Host, kind: str) -> bool:
        """What the kubelet finds out by this probe of the manifest."""
        spec = agent_of(self.manifests)
        get = spec[kind]["httpGet"]
        (port,) = [each["containerPort"] for each in spec["ports"] if each["name"] == get["port"]]
        told = host.run([sys.executable, "-c", ASK, f"http://{host.v4}:{port}{get['path']}"])
        return 200 <= int(told) < 400

    def action(self, code: int, *, disrupted: bool = False) -> str:
        """What the Job does about a pod that ended so, by its first rule that fits."""
        for rule in job_of(self.manifests)["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if (code in codes["values"]) if codes else disrupted:
                return str(rule["action"])
        return "Count"


def init_of(agent: Agent) -> int:
    """The container's PID 1, as this machine counts."""
    outer = agent.program.pid
    for pid in descendants(outer):
        stat = process_stat(pid)
        if stat is not None and stat.parent == outer:
            return pid
    raise AssertionError(f"{outer} has no child")


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` replaced where there is such a variable; `$$` is one `$` and protects what follows."""

    def one(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([A-Za-z0-9_.-]+)\)", one, text)


def signal_pod(agent: Agent, signum: signal.Signals = signal.SIGTERM) -> None:
    """As the kubelet does: to PID 1 alone."""
    os.kill(init_of(agent), signum)
