"""Pods of real manifests on pretend hosts: they meet, are probed, replaced, asked to leave, and end as the Job's rules expect.

A pretend pod does what its manifest says, as a kubelet would. The agent is PID 1 of its container, its arguments and
variables are the manifest's, `$(NAME)` replaced by Kubernetes' rule, and its peers' names come into DNS (here
/etc/hosts) when the test says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.launchers.kubernetes import RUNS_PATH
from holdfast.linux import process_stat
from tests.conftest import descendants
from tests.kubernetes.manifests import IMAGE, agent_of, expanded, job_of, pod_of, printed
from tests.network.hosts import Host, PretendHosts, why_not
from tests.network.job_agents import SHORT_LEASE, WORKER, Agent, JobAgents
from tests.support.limits import limit_s, until

CLUSTER_RUNTIME = Path(__file__).parents[2] / "examples" / "kubernetes" / "cluster-training-runtime.yaml"
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


class Pods(JobAgents):
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

    def status(self, agent: Agent) -> str:
        """What `kubectl exec POD -- holdfast status` prints; empty: nothing yet."""
        inside = ["nsenter", "--target", str(init_of(agent)), "--all", "--"]
        done = subprocess.run(
            [*inside, sys.executable, "-m", "holdfast", "status"],
            capture_output=True,
            text=True,
            timeout=limit_s(30),
            check=False,
        )
        return done.stdout

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

    def find() -> int | None:
        stats = {pid: process_stat(pid) for pid in descendants(outer)}
        return next((pid for pid, stat in stats.items() if stat is not None and stat.parent == outer), None)

    return until(find, lambda: f"{outer} to have a child", 20)


def signal_pod(agent: Agent, signum: signal.Signals = signal.SIGTERM) -> None:
    """As the kubelet does: to PID 1 alone."""
    os.kill(init_of(agent), signum)


MakePods = Callable[..., Pods]

SAVING = WORKER.replace(
    "    note()\n    time", "    if should_stop():\n        sys.exit(0)\n    note()\n    time"
).replace("import json", "from holdfast.worker import should_stop\nimport json", 1)
"""Workers that leave at a safe point."""


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[MakePods]:
    """`pods(3, "--nodes", "2")`: three nodes, and a job submitted for them."""
    if why := why_not():
        pytest.skip(why)
    with ExitStack() as stack:

        def make(nodes: int, *line: str, script: str = WORKER) -> Pods:
            hosts = stack.enter_context(PretendHosts(nodes, tmp_path / "hosts"))
            job = Pods(hosts, tmp_path)
            job.script.write_text(script)
            job.manifests = printed(*IMAGE, *line, str(job.script)) if line else []
            return job

        yield make


def test_pods_meet_though_their_names_come_late(pods: MakePods) -> None:
    job = pods(2, "--nodes", "2", "--nproc-per-node", "2", "--name", "late")
    agents = [job.pod(1, 2), job.pod(0, 1)]
    for agent in agents:
        until(lambda host=agent.host: job.probe(host, "livenessProbe"), lambda: f"life\n{job.story()}", 20)
    assert not any(job.probe(agent.host, "readinessProbe") for agent in agents), "nobody has met anybody"
    assert job.generations == []
    job.names([("late-0.late", 1)])
    generation = job.trains([1, 2])
    assert [generation.place(f"node{number}") for number in (1, 2)] == [[0, 1], [2, 3]], "the index is the node's rank"
    for agent in agents:
        until(lambda host=agent.host: job.probe(host, "readinessProbe"), lambda: f"ready\n{job.story()}", 20)
        assert TOKEN not in agent.text
    job.finish_all(agents)
    job.check()


def test_pod_0_dies_and_comes_back_elsewhere(pods: MakePods) -> None:
    """A container that is killed costs one of --retries; the others wait for pod 0, whose name leads astray for a while."""
    job = pods(3, "--nodes", "2", "--name", "moved")
    job.names([("moved-0.moved", 1)])
    zero, one = job.pod(0, 1), job.pod(1, 2)
    first = job.trains([1, 2])
    signal_pod(zero, signal.SIGKILL)
    assert job.action(zero.end()) == "Count"
    assert job.action(137, disrupted=True) == "Ignore"
    zero = job.pod(0, 3)
    until(lambda: "waiting for the coordinator" in one.text, lambda: f"it to say that it waits\n{job.story()}", 20)
    job.names([("moved-0.moved", 3)])
    second = job.trains([2, 3], first.last_s())
    assert second.place("node3") == [0]
    job.finish_all([zero, one])
    job.check()


def test_a_pod_that_is_asked_to_leave_does_not_count(pods: MakePods) -> None:
    job = pods(2, "--nodes", "1:2", "--name", "asked", script=SAVING)
    job.names([("asked-0.asked", 1)])
    zero, one = job.pod(0, 1), job.pod(1, 2)
    first = job.trains([1, 2])
    signal_pod(one)
    assert one.end(pod_of(job.manifests)["terminationGracePeriodSeconds"]) == 75
    assert job.action(75) == "Ignore"
    job.trains([1], first.last_s(["node2"]))
    since_s = time.monotonic()
    one = job.pod(1, 2)
    job.trains([1, 2], since_s)
    job.finish_all([zero, one])
    job.check()


def test_what_cannot_work_fails_the_whole_job(pods: MakePods, tmp_path: Path) -> None:
    """A script that the image does not have: exit code 2, and the Job is not tried again."""
    job = pods(1, "--nodes", "2")
    job.manifests = printed(*IMAGE, "--nodes", "2", "/nowhere/train.py")
    agent = job.pod(0, 1)
    assert job.action(agent.end(20)) == "FailJob"
    assert "HF102" in agent.text


PET: dict[str, Any] = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "2",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
    "PET_MASTER_PORT": "29500",
}
"""What Kubeflow Trainer's torch runtime gives to its pods, beside PET_NODE_RANK."""


def test_a_pod_of_kubeflow_trainer_works_as_it_is(pods: MakePods) -> None:
    """`torchrun train.py` becomes `holdfast run train.py`; names come late there, too."""
    job = pods(2)
    words = ["--log-dir", str(job.folder / "runs"), str(job.script)]
    agents = [job.container(node, words, {**PET, "PET_NODE_RANK": str(node - 1), "CONNECT": "1"}) for node in (2, 1)]
    until(lambda: "digits-node-0-0.digits" in agents[0].text, lambda: f"it to say what it waits for\n{job.story()}", 20)
    job.names([("digits-node-0-0.digits", 1)])
    generation = job.trains([1, 2])
    assert (generation.master, generation.port, generation.world) == ("digits-node-0-0.digits", 29500, 4)
    assert generation.place("node1") == [0, 1]
    job.finish_all(agents)
    job.check()


def test_a_pod_that_is_evicted_saves_or_is_killed_and_does_not_count(pods: MakePods) -> None:
    """The kubelet's SIGTERM, here to workers without safe points: they are ended, and the exit code says so."""
    job = pods(2, "--nodes", "1:2", "--name", "evicted", "--drain-timeout", "1", "--shutdown-timeout", "1")
    job.names([("evicted-0.evicted", 1)])
    zero, one = job.pod(0, 1), job.pod(1, 2)
    first = job.trains([1, 2])
    signal_pod(one)
    assert one.end(pod_of(job.manifests)["terminationGracePeriodSeconds"]) == 128 + signal.SIGTERM
    assert job.action(143, disrupted=True) == "Ignore", "evicted, preempted, or its node is drained"
    assert job.action(143) == "Count", "kubectl delete pod"
    job.trains([1], first.last_s(["node2"]))
    assert "can use up to 2 nodes" in job.status(zero)
    job.finish_all([zero])
    job.check()


def test_a_lost_node_is_left_behind_and_its_pod_joins_elsewhere(pods: MakePods) -> None:
    conf = f"{SHORT_LEASE},settle={limit_s(1):g}"
    job = pods(3, "--nodes", "1:2", "--name", "lost", "--rdzv-conf", conf)
    job.names([("lost-0.lost", 1)])
    zero = job.pod(0, 1)
    job.pod(1, 2)
    job.trains([1, 2])
    since_s = time.monotonic()
    job.hosts.crash(2)
    job.trains([1], since_s)
    assert "node2" in zero.text
    since_s = time.monotonic()
    again = job.pod(1, 3)  # Kubernetes has given the node up: DisruptionTarget
    assert job.action(137, disrupted=True) == "Ignore"
    job.trains([1, 3], since_s)
    job.finish_all([zero, again])


def test_a_pod_without_its_image_holds_up_only_a_job_that_needs_it(pods: MakePods) -> None:
    """Pod 1 is never started: for the others it is the same as one that waits for a machine."""
    job = pods(1, "--nodes", "2", "--name", "whole")
    job.names([("whole-0.whole", 1)])
    zero = job.pod(0, 1)
    until(lambda: "1 of at least 2 nodes have joined" in job.status(zero), lambda: f"status\n{job.story()}", 20)
    signal_pod(zero, signal.SIGKILL)
    zero.end()
    job.manifests = printed(*IMAGE, "--nodes", "2", "--name", "whole", "--rdzv-conf", "join_timeout=1", str(job.script))
    zero = job.pod(0, 1)
    assert zero.end() == 1
    assert "1 of at least 2 nodes came" in zero.text
    assert job.action(1) == "Count"
    job.manifests = printed(*IMAGE, "--nodes", "1:2", "--name", "whole", str(job.script))
    zero = job.pod(0, 1)
    job.trains([1])
    job.finish_all([zero])


def test_the_runtime_of_the_cluster_begins_small_and_grows(pods: MakePods) -> None:
    """With the variables that Kubeflow Trainer sets, the file's command, and a TrainJob's args."""
    (runtime,) = yaml.safe_load_all(CLUSTER_RUNTIME.read_text())
    agent = agent_of([runtime])
    job = pods(2)
    job.names([("digits-node-0-0.digits", 1)])

    def start(index: int, node: int) -> Agent:
        own = {each["name"]: each["value"] for each in agent["env"] if "value" in each}
        own |= {**PET, "PET_NODE_RANK": str(index), "JOB_NAME": "digits", "POD_IP": job.hosts[node].v4}
        words = [expanded(word, own) for word in agent["command"]]
        assert words[:2] == ["holdfast", "run"]
        assert not [word for word in words if "$(" in word]
        runs = str(job.folder / f"runs-{index}")
        return job.container(node, [*(word.replace(RUNS_PATH, runs) for word in words[2:]), str(job.script)], own)

    zero = start(0, 1)
    first = job.trains([1])
    assert first.world == 2, "PET_NPROC_PER_NODE"
    since_s = time.monotonic()
    one = start(1, 2)
    grown = job.trains([1, 2], since_s)
    assert (grown.world, grown.place("node1")) == (4, [0, 1])
    job.finish_all([zero, one])
    job.check()


BUSY_AT_THE_START = """
import os, signal, sys, time
from holdfast.cli import run

def resolve(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)

run.resolve = resolve
run.main(["--standalone", "train.py"])
"""


def test_a_container_that_is_stopped_while_it_starts_ends() -> None:
    """The kernel keeps a first process from signals for which it has no handler yet: it would be killed after the grace."""
    if why := why_not():
        pytest.skip(why)
    done = subprocess.run([*CONTAINER, sys.executable, "-c", BUSY_AT_THE_START], timeout=limit_s(60), check=False)
    assert done.returncode == 128 + signal.SIGTERM
