"""Slurm, as an agent and `holdfast submit` see it: the variables of a step, and the answers of scontrol about a job.

Only the step's own variables count: SLURM_NODEID is 0 and SLURM_JOB_NUM_NODES is 4 in a batch script too, which is one
process. SLURM_STEP_* exist only where one process runs for each node.

A job that was requeued may have left processes behind. When a node's slurmd dies, its tasks live on, and Slurm starts
the job again on other nodes two minutes later. Old tasks that need no other node (one node, or an elastic job) would
train beside the new ones and overwrite their snapshots. So the first node's agent asks Slurm now and then whether its
start of the job is over, and then ends. The other agents end with their coordinator.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from holdfast.linux import process_stat, read_text
from holdfast.protocol.errors import EnvironmentValueError, NodesError
from holdfast.protocol.exit_codes import EXIT_FAILURE, EXIT_SIGNAL_BASE

HOSTS_MAX = 65_536
"""Slurm's own limit."""

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
"""One item between commas; commas in brackets belong to it."""
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


STEP_IDS_OF_SLURM = 0xFFFF_FFF0
"""First number of Slurm's own steps: the batch script, the shell of an interactive salloc, the external step."""
PORT_FIRST, PORTS = 20_000, 12_000
"""The ports of jobs: below those that Linux uses for outgoing connections (32768), above the usual ones of services."""
STEP_STRIDE, RESTART_STRIDE = 5_003, 7_919
"""Primes, so that steps and restarts of jobs with near ids get different ports."""
ANSWER_LIMIT_S = 10.0
"""Limit for an answer of scontrol."""

_TITLE = re.compile(r"slurmstepd: \[(\w+)(?:\+\w+)?\.(\w+)")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")


class SlurmStep(NamedTuple):
    """One step of a job, as one of its tasks sees it."""

    job_id: int
    step_id: int
    nodes: tuple[str, ...]
    """Host names by node rank."""
    node_rank: int
    tasks: tuple[int, ...]
    """Number of tasks on each node."""
    restarts: int = 0
    """Number of times that Slurm has restarted this job."""
    array_task: int | None = None
    cpus: int | None = None
    """Allocated CPUs of this node; None: unknown."""
    gpus: int | None = None
    switches: tuple[str, ...] = ()
    """The switches or blocks above this node, the outermost first; empty: the site has configured no topology."""

    @property
    def run_id(self) -> str:
        """The run id: the same in all tasks, and after a requeue, so that the same run continues."""
        name = f"{self.job_id}_{self.step_id}"
        return name if self.array_task is None else f"{name}_{self.array_task}"

    @property
    def port(self) -> int:
        """Port of the rendezvous: the same for all agents, different for other jobs, steps and restarts."""
        number = self.job_id + self.step_id * STEP_STRIDE + self.restarts * RESTART_STRIDE
        return PORT_FIRST + number % PORTS

    @property
    def name(self) -> str:
        restarted = f", restart {self.restarts}" if self.restarts else ""
        task = f" (array task {self.array_task})" if self.array_task is not None else ""
        return f"Slurm job {self.job_id}{task}, step {self.step_id}{restarted}"

    def check_one_agent_per_node(self) -> None:
        """Raises NodesError for several tasks on a node: each agent starts all workers of its node."""
        most = max(self.tasks)
        if most == 1:
            return
        node = self.nodes[self.tasks.index(most)] if len(self.tasks) == len(self.nodes) else "a node"
        raise NodesError(
            f"this Slurm step starts {most} tasks on {node}, and each would start all workers there; "
            "add --ntasks-per-node=1 to srun, or start with: holdfast run --slurm"
        )


def title_of_starter(task_pid: str) -> str:
    """Title of the slurmstepd that started this task: `slurmstepd: [7.0]`, or `[7.batch]` for a batch script.

    Empty if the process is not visible, as in a container.
    """
    task = process_stat(task_pid) if task_pid.isdecimal() else None
    return read_text(f"/proc/{task.parent}/cmdline") if task is not None else ""


def is_inherited(environ: Mapping[str, str], title: str) -> bool:
    """Whether these variables belong to the step that submitted this job: sbatch and salloc in a step pass them on.

    `title` is that of the process that started this task, which names the true step.
    """
    match = _TITLE.match(title)
    if match is None:
        return False
    job, step = match.groups()
    one_job = job.isdigit() and "SLURM_HET_SIZE" not in environ  # each component has its own number
    return step != environ["SLURM_STEP_ID"] or (one_job and job != environ.get("SLURM_JOB_ID"))


def read_step(environ: Mapping[str, str], title_of: Callable[[str], str] = title_of_starter) -> SlurmStep | None:
    """The step of which this process is a task; None in a batch script, in an interactive shell and outside of Slurm.

    Raises EnvironmentValueError for a value that Slurm would not write.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_STEP_NODELIST" not in environ:
        return None
    step_id = number(environ, "SLURM_STEP_ID")
    if step_id >= STEP_IDS_OF_SLURM or is_inherited(environ, title_of(environ.get("SLURM_TASK_PID", ""))):
        return None
    nodes = expand(environ["SLURM_STEP_NODELIST"])
    count = number(environ, "SLURM_STEP_NUM_NODES", len(nodes))
    node_rank = number(environ, "SLURM_NODEID")
    if count != len(nodes) or node_rank >= count:
        raise EnvironmentValueError(
            f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} names {len(nodes)} nodes, "
            f"but SLURM_STEP_NUM_NODES is {count} and SLURM_NODEID {node_rank}"
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
        switches=switches_above(environ),
    )


def switches_above(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The switches or blocks above this node, from SLURM_TOPOLOGY_ADDR.

    >>> switches_above({"SLURM_TOPOLOGY_ADDR": "core.leaf2.n7.a", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"})
    ('core', 'leaf2')
    """
    names = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    above = names.count(".")  # a node's own name may have dots
    return tuple(environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", above)[:above])


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit()):
        raise EnvironmentValueError(f"{name}={text or ''}: Slurm writes a whole number here")
    return int(text)


def tasks_per_node(text: str) -> tuple[int, ...]:
    """The number of tasks on each node, from Slurm's short form.

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
    """The address to connect to for a node's name: the name if it resolves, else the address that Slurm has for it.

    If Slurm has none, the name again: it may resolve a little later.
    """
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        match = _ADDRESS.search(ask_scontrol("show", "node", host).text)
        return match[1] if match else host
    return host


class ScontrolOutput(NamedTuple):
    """The output of scontrol, or the reason why there is none (`failed`)."""

    text: str
    failed: bool = False


def ask_scontrol(*words: str) -> ScontrolOutput:
    """Run scontrol for at most ANSWER_LIMIT_S; returns both of its streams."""
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
    """The hosts in Slurm's short form, in order.

    Raises EnvironmentValueError for a malformed list.

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
    """Split at the commas outside of brackets. Raises EnvironmentValueError."""
    if _ITEM.sub("", text.strip()).strip(","):
        raise malformed(text, "brackets do not match")
    return _ITEM.findall(text.strip())


def expand_item(item: str, text: str) -> list[str]:
    """The hosts of one item. Several groups of numbers are combined; the last one varies fastest."""
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
    """The numbers in `01-03,7`, with the leading zeros of the first number of a range."""
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


# --- the job, as scontrol shows it ------------------------------------------------------------------------------------

CHECK_S = 30.0
"""Interval of the questions about the job: well below the two minutes for which Slurm delays a requeued job.

One agent per job asks, not each node's: scontrol's answers come from a single daemon for the whole cluster.
"""

_GONE = "Invalid job id"
OVER = (
    *("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"),  # Slurm starts it again
    *("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"),
    *("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED"),
)
"""States in which this start of the job is over. COMPLETING is not among them: Slurm ends the tasks, and they may
save."""

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "RESIZING", "SIGNALING", "STOPPED")

_FIELD = re.compile(r"(?:^|\s)(\w+)=(\S*)")


class JobState(NamedTuple):
    """A job, as `scontrol show job` describes it."""

    state: str
    reason: str
    """Slurm's reason for a job that waits; "None" if there is none."""
    nodes: str
    """The allocated nodes in Slurm's short form; empty while the job waits."""
    log: str
    """Path of the job's output; empty: unknown."""
    status: int
    """Exit status as a shell shows it."""

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def over(self) -> bool:
        return self.state not in (*WAITING, *ACTIVE)


def read_job(answer: ScontrolOutput) -> JobState | None:
    """The state in an answer of `scontrol show job`; None: the answer describes no job."""
    fields = dict(_FIELD.findall(answer.text))
    if answer.failed or "JobState" not in fields:
        return None
    # A path may have spaces: it ends where another field begins.
    log = re.search(r"\bStdOut=(.*?)(?: \w+=|$)", answer.text, re.MULTILINE)
    return JobState(
        state=fields["JobState"],
        reason=fields.get("Reason", "None"),
        nodes=fields.get("NodeList", ""),
        log=log[1] if log and log[1] != "(null)" else "",
        status=exit_status(fields["JobState"], fields.get("ExitCode", "0:0")),
    )


def exit_status(state: str, text: str) -> int:
    """Convert Slurm's `CODE:SIGNAL` to an exit status; a job that did not complete never has status 0.

    >>> exit_status("FAILED", "3:0"), exit_status("FAILED", "0:9"), exit_status("CANCELLED", "0:0")
    (3, 137, 1)
    """
    code, _, signum = text.partition(":")
    status = int(code) if code.isdigit() else EXIT_FAILURE
    if signum.isdigit() and int(signum):
        return EXIT_SIGNAL_BASE + int(signum)
    return status if status or state == "COMPLETED" else EXIT_FAILURE


def over(answer: ScontrolOutput, job_id: int, restarts: int) -> str:
    """The reason why this start of the job is over; empty: it is not, or Slurm gives no answer.

    `restarts` is the number of restarts that this process knows: a higher one means that Slurm has started the job
    again.
    """
    if answer.failed:
        return "Slurm no longer knows the job" if _GONE in answer.text else ""
    # The number of an array is also the number of one of its tasks, and scontrol prints a line for each task.
    record = next((line for line in answer.text.splitlines() if line.startswith(f"JobId={job_id} ")), "")
    fields = dict(_FIELD.findall(record))
    state, restart = fields.get("JobState", ""), fields.get("Restarts", "")
    if state in ("", "COMPLETING"):
        return ""
    if restart.isdecimal() and int(restart) > restarts:
        return f"Slurm has requeued it (restart {restart})"
    return f"its state is {state}" if state in OVER else ""


def watch(job_id: int, restarts: int, end: Callable[[str], None], *, check_s: float) -> None:
    """Call `end` once with the reason when this start of the job is over, from a daemon thread."""

    def ask_until_over() -> None:
        while True:
            time.sleep(check_s)
            reason = over(ask_scontrol("show", "job", str(job_id)), job_id, restarts)
            if reason:
                end(reason)
                return

    threading.Thread(target=ask_until_over, name="holdfast-slurm", daemon=True).start()
