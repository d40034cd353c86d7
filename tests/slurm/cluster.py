"""A real Slurm of three nodes on loopback: munged, slurmctld and three slurmd, without systemd and cgroups.

The daemons are nobody's children, as on a cluster: what a test leaves behind in them is found by its environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.linux import process_stat
from tests.processes.conftest import is_alive
from tests.support.limits import limit_s, until
from tests.support.ports import free_port

NODES = ("n1", "n2", "n3")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
CALL_S = 20.0
READY_S = 30.0
GONE_S = 5.0
SECOND_S = 1.2

CONF = """\
ClusterName=holdfast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/pids/slurmctld
SlurmdPidFile={folder}/pids/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SlurmctldParameters=preempt_send_user_signal
ReturnToService=0
SlurmdTimeout=300
InactiveLimit=0
KillWait={kill}
MinJobAge=300
MessageTimeout={message}
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str:
    """Why there can be no Slurm here; empty when there can."""
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm slurmctld slurmd slurm-client munge)"
    return ""


class Cluster:
    """`start()` it, and `stop()` it whatever happens."""

    def __init__(self, topology: str = "") -> None:
        """`topology`: a topology.conf, of a tree of switches."""
        self._topology = topology
        self.folder = Path(tempfile.mkdtemp(prefix="hfslurm"))  # a socket's path must be short
        self.conf = self.folder / "slurm.conf"
        self._reaper: subprocess.Popen[bytes] | None = None

    @property
    def environ(self) -> dict[str, str]:
        """For whoever talks to it."""
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        return {**os.environ, "SLURM_CONF": str(self.conf), "PATH": path}

    def start(self) -> None:
        for name in ("state", "munge", "pids"):
            (self.folder / name).mkdir(mode=0o755)
        os.chmod(self.folder / "munge", 0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        ports = [free_port() for _ in range(1 + len(NODES))]
        host = os.uname().nodename.partition(".")[0]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000 State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        # Steps make their port of it: another cluster on this host must not have the same.
        first = 1000 + os.getpid() % 50_000
        waits = {"message": round(limit_s(2.5)), "kill": round(limit_s(5)), "grace": round(limit_s(10))}
        self.conf.write_text(
            CONF.format(host=host, port=ports[0], first=first, folder=self.folder, nodes=nodes, **waits)
        )
        if self._topology:
            (self.folder / "topology.conf").write_text(self._topology)
            with self.conf.open("a") as conf:
                conf.write("TopologyPlugin=topology/tree\n")
        reap = 'tail --pid="$1" -f /dev/null; for each in "$2"/pids/*; do kill -9 "$(cat "$each")"; done'
        self._reaper = self._spawn("sh", "-c", reap, "reaper", str(os.getpid()), str(self.folder))
        self._daemon(
            *("munged", "--force", "--num-threads=2", f"--key-file={key}", f"--socket={self.folder}/munge.sock"),
            *(f"--pid-file={self.folder}/pids/munged", f"--log-file={self.folder}/munged.log"),
            f"--seed-file={self.folder}/munge/seed",
        )
        self._daemon("slurmctld", "-f", str(self.conf))
        for node in NODES:
            self.boot(node)
        until(lambda: self.idle() == len(NODES), self.story, READY_S)

    def boot(self, node: str) -> None:
        """Start its slurmd."""
        (self.folder / f"spool.{node}").mkdir(exist_ok=True)
        self._daemon("slurmd", "-N", node, "-f", str(self.conf))

    def whole(self) -> None:
        """No jobs, and all nodes there: as a test finds it."""
        with contextlib.suppress(AssertionError):
            self.call("scancel", "--user=root", "--full")
        self.end_tasks()
        for node in NODES:
            if not self.has_slurmd(node):
                self.boot(node)
        self.call("scontrol", "update", f"nodename={','.join(NODES)}", "state=resume", check=False)
        until(lambda: not self.call("squeue", "-h") and self.idle() == len(NODES), self.story, READY_S)

    def stop(self) -> None:
        self.end_tasks()
        for path in (self.folder / "pids").glob("*"):
            end(int(path.read_text()))
        for pid in self.living_here():  # a slurmstepd goes on telling a controller that is no more
            end(pid)
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- what it is asked ----------------------------------------------------------------------------------------

    def call(self, *line: str, check: bool = True, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
        done = subprocess.run(
            line,
            env={**self.environ, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s(CALL_S),
            check=False,
        )
        assert not (check and done.returncode), f"{line}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def idle(self) -> int:
        return self.call("sinfo", "-h", "-N", "-p", "main", "-o", "%t", check=False).split().count("idle")

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says of it."""
        words = self.call("scontrol", "--oneliner", "show", "job", number, check=False).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def is_over(self, number: str) -> bool:
        return self.job(number).get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def release(self, number: str, *changes: str) -> None:
        """A requeued job waits two minutes; not this one."""
        until(lambda: self.job(number)["JobState"] == "PENDING", self.story)
        time.sleep(SECOND_S)  # a slurmd takes a job that it has ended in the same second for one that is to be ended
        until(
            lambda: self.call("scontrol", "update", f"jobid={number}", "starttime=now", check=False) == "", self.story
        )

    def story(self) -> str:
        logs = "\n".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("*.log")))
        return f"{self.call('sinfo', '-N', '-l', check=False)}\n{self.call('squeue', check=False)}\n{logs}"

    # --- what may happen to its nodes ----------------------------------------------------------------------------

    def has_slurmd(self, node: str) -> bool:
        return is_alive(int((self.folder / "pids" / node).read_text()))

    def kill_slurmd(self, node: str) -> None:
        """The daemon alone; its tasks live on, as they do in reality."""
        end(int((self.folder / "pids" / node).read_text()))

    def crash(self, node: str) -> None:
        """All that runs there, at once."""
        self.kill_slurmd(node)
        self.end_tasks(node)

    def declare_down(self, node: str) -> None:
        """What the controller finds out by itself after SlurmdTimeout."""
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def end_tasks(self, node: str = "") -> None:
        """Every task, and the daemons that hold them: first, so that they cannot tell of it."""
        tasks = list(self.tasks(node))
        daemons = dict.fromkeys(parent for task in tasks if (parent := step_of(task)))
        for pid in (*daemons, *tasks):
            end(pid)

    def living_here(self) -> list[int]:
        """Daemons of this Slurm: its folder is theirs."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{name}/cwd").removesuffix(" (deleted)") == str(self.folder):
                        found.append(int(name))
        return found

    def tasks(self, node: str = "") -> Iterator[int]:
        """Processes that Slurm started, on one node or on all."""
        wanted = [f"SLURM_CONF={self.conf}".encode(), f"SLURMD_NODENAME={node}".encode()]
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                if wanted[0] in variables and any(
                    each == wanted[1] if node else each.startswith(wanted[1]) for each in variables
                ):
                    yield int(name)

    # --- processes -----------------------------------------------------------------------------------------------

    def _daemon(self, *line: str) -> None:
        """It forks itself into the background."""
        null, wait_s = subprocess.DEVNULL, limit_s(CALL_S)
        with (self.folder / "daemons.out").open("ab") as out:
            subprocess.run(line, env=self._bare(), stdin=null, stdout=out, stderr=out, timeout=wait_s, check=True)

    def _spawn(self, *line: str) -> subprocess.Popen[bytes]:
        null = subprocess.DEVNULL
        return subprocess.Popen(line, env=self._bare(), stdin=null, stdout=null, stderr=null, start_new_session=True)

    def _bare(self) -> dict[str, str]:
        """Without the mark by which a test finds what it has left behind."""
        return {name: value for name, value in self.environ.items() if not name.startswith("HOLDFAST_")}


def step_of(pid: int) -> int | None:
    """The slurmstepd whose child this is."""
    task = process_stat(pid)
    parent = process_stat(task.parent) if task is not None else None
    return task.parent if task is not None and parent is not None and parent.name == "slurmstepd" else None


def end(pid: int) -> None:
    """SIGKILL, and wait until it is no more."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid), f"process {pid} to be gone", GONE_S)
