"""What a Slurm step tells the processes in it, by its own variables and never by the job-wide ones.

SLURM_NODEID is 0 and SLURM_JOB_NUM_NODES is 4 in a batch script too, which is one process: only SLURM_STEP_* say that
there is one process for each node.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from typing import NamedTuple

from holdfast.linux import process_stat, read_text
from holdfast.protocol.errors import EnvironmentValueError, NodesError

HOSTS_MAX = 65_536
"""Slurm's own limit."""

_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


STEP_IDS_OF_SLURM = 0xFFFF_FFF0
"""From here on: the batch script, the shell of an interactive salloc, the external step."""
PORT_FIRST, PORTS = 20_000, 12_000
"""Below the ports that Linux gives to outgoing connections (32768), above those that services like."""
STEP_STRIDE, RESTART_STRIDE = 5_003, 7_919
"""Primes: steps and restarts of jobs whose ids are near each other do not fall on each other's ports."""
ANSWER_LIMIT_S = 10.0

_TITLE = re.compile(r"slurmstepd: \[(\w+)(?:\+\w+)?\.(\w+)")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")


class SlurmStep(NamedTuple):
    """One step of a job, as one of its tasks sees it."""

    job_id: int
    step_id: int
    nodes: tuple[str, ...]
    """By node rank."""
    node_rank: int
    tasks: tuple[int, ...]
    """On each node."""
    restarts: int = 0
    """How often Slurm has started this job anew."""
    array_task: int | None = None
    cpus: int | None = None
    """Of this node; None: not told."""
    gpus: int | None = None

    @property
    def run_id(self) -> str:
        """The same in all tasks, and when the job was requeued: then it is the same run that goes on."""
        name = f"{self.job_id}_{self.step_id}"
        return name if self.array_task is None else f"{name}_{self.array_task}"

    @property
    def port(self) -> int:
        """Where the agents meet: the same for all of them, and another one for every job, step and restart near by."""
        number = self.job_id + self.step_id * STEP_STRIDE + self.restarts * RESTART_STRIDE
        return PORT_FIRST + number % PORTS

    @property
    def name(self) -> str:
        restarted = f", restart {self.restarts}" if self.restarts else ""
        task = f" (array task {self.array_task})" if self.array_task is not None else ""
        return f"Slurm job {self.job_id}{task}, step {self.step_id}{restarted}"

    def check_one_agent_per_node(self) -> None:
        """Raises NodesError: each agent starts all workers of its node, two of them would start them twice."""
        most = max(self.tasks)
        if most == 1:
            return
        node = self.nodes[self.tasks.index(most)] if len(self.tasks) == len(self.nodes) else "a node"
        raise NodesError(
            f"this Slurm step starts {most} tasks on {node}, and each would start all workers there; "
            "add --ntasks-per-node=1 to srun, or start with: holdfast run --slurm"
        )


def title_of_starter(task_pid: str) -> str:
    """Of the slurmstepd that started this task: `slurmstepd: [7.0]`, of a batch script `[7.batch]`; empty: not to be
    seen."""
    task = process_stat(task_pid) if task_pid.isdecimal() else None
    return read_text(f"/proc/{task.parent}/cmdline") if task is not None else ""


def is_inherited(environ: Mapping[str, str], title: str) -> bool:
    """Whether the step is that of whoever submitted this job: sbatch and salloc in a step hand its variables on."""
    match = _TITLE.match(title)
    if match is None:
        return False
    job, step = match.groups()
    one_job = job.isdigit() and "SLURM_HET_SIZE" not in environ  # each component has a number of its own
    return step != environ["SLURM_STEP_ID"] or (one_job and job != environ.get("SLURM_JOB_ID"))


def read_step(environ: Mapping[str, str], title_of: Callable[[str], str] = title_of_starter) -> SlurmStep | None:
    """The step that this process is a task of; None in a batch script, in an interactive shell and outside of Slurm.

    Raises EnvironmentValueError when a variable does not hold what Slurm writes into it.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_STEP_NODELIST" not in environ:
        return None
    step_id = number(environ, "SLURM_STEP_ID")
    if step_id >= STEP_IDS_OF_SLURM or is_inherited(environ, title_of(environ.get("SLURM_TASK_PID", ""))):
        return None
    nodes = expand(environ["SLURM_STEP_NODELIST"])
    told = number(environ, "SLURM_STEP_NUM_NODES", len(nodes))
    node_rank = number(environ, "SLURM_NODEID")
    if told != len(nodes) or node_rank >= told:
        raise EnvironmentValueError(
            f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} names {len(nodes)} nodes, "
            f"but SLURM_STEP_NUM_NODES is {told} and SLURM_NODEID {node_rank}"
        )
    array = "SLURM_ARRAY_TASK_ID"
    return SlurmStep(
        job_id=number(environ, "SLURM_JOB_ID"),
        step_id=step_id,
        nodes=nodes,
        node_rank=node_rank,
        tasks=tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1")),
        restarts=number(environ, "SLURM_RESTART_COUNT", 0),
        array_task=number(environ, array) if array in environ else None,
        cpus=number(environ, "SLURM_CPUS_ON_NODE", 0) or None,
        gpus=number(environ, "SLURM_GPUS_ON_NODE", 0) or None,
    )


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit()):
        raise EnvironmentValueError(f"{name}={text or ''}: Slurm writes a whole number here")
    return int(text)


def tasks_per_node(text: str) -> tuple[int, ...]:
    """`2(x3),1` in full.

    >>> tasks_per_node("2(x3),1")
    (2, 2, 2, 1)
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise EnvironmentValueError(f"SLURM_STEP_TASKS_PER_NODE={text}: Slurm writes counts like 2(x3),1 here")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return tuple(counts)


def address_of(host: str) -> str:
    """What to dial for a node's name: the name itself where it resolves, else the address that Slurm has for it.

    The name again when nobody knows: it may resolve a little later.
    """
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        match = _ADDRESS.search(ask_scontrol("show", "node", host).text)
        return match[1] if match else host
    return host


class ScontrolOutput(NamedTuple):
    """What scontrol said; `failed` when it could not say anything."""

    text: str
    failed: bool = False


def ask_scontrol(*words: str) -> ScontrolOutput:
    """Runs it, for at most ANSWER_LIMIT_S; both its streams."""
    program = shutil.which("scontrol")
    if program is None:
        return ScontrolOutput("scontrol is not on the PATH", failed=True)
    try:
        done = subprocess.run(
            [program, "--oneliner", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=ANSWER_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return ScontrolOutput(str(error), failed=True)
    return ScontrolOutput(done.stdout.decode(errors="replace"), failed=done.returncode != 0)


def expand(text: str) -> tuple[str, ...]:
    """All hosts, in order.

    Raises EnvironmentValueError when this is no list of hosts.

    >>> expand("login,node[01-03,7]")
    ('login', 'node01', 'node02', 'node03', 'node7')
    """
    hosts: list[str] = []
    for item in split(text):
        hosts.extend(expand_item(item, text))
        check_number(len(hosts), text)
    if not hosts:
        raise malformed(text, "it is empty")
    return tuple(hosts)


def split(text: str) -> list[str]:
    """At the commas outside of brackets. Raises EnvironmentValueError."""
    items = [""]
    depth = 0
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise malformed(text, "brackets do not match")
        if character == "," and not depth:
            items.append("")
        else:
            items[-1] += character
    if depth:
        raise malformed(text, "brackets do not match")
    return [item for item in items if item]


def expand_item(item: str, text: str) -> list[str]:
    """One item; several groups of numbers multiply, the last one counts fastest."""
    hosts = [""]
    at = 0
    for group in _GROUP.finditer(item):
        literal = item[at : group.start()]
        numbers = expand_group(group[1], text)
        check_number(len(hosts) * len(numbers), text)
        hosts = [host + literal + number for host in hosts for number in numbers]
        at = group.end()
    return [host + item[at:] for host in hosts]


def expand_group(group: str, text: str) -> list[str]:
    """`01-03,7` with the zeros that the first number of a range has."""
    numbers: list[str] = []
    for part in group.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise malformed(text, f"{part!r} is neither a number nor a range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise malformed(text, f"the range {part} ends before it begins")
        check_number(int(last) - int(first) + 1, text)
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        check_number(len(numbers), text)
    return numbers


def check_number(number: int, text: str) -> None:
    if number > HOSTS_MAX:
        raise malformed(text, f"it names more than {HOSTS_MAX} hosts")


def malformed(text: str, why: str) -> EnvironmentValueError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return EnvironmentValueError(f"{shown!r} is no list of Slurm's hosts: {why}")
