"""`holdfast run` in a Slurm job: a step supplies options that were not given, and --slurm becomes one srun.

Imported only with --slurm or in the environment of a step. Each value of a flag, variable or file takes precedence over
the step's. With a given endpoint, the step still supplies the number of nodes and the rank of this one.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn

from holdfast.cli.grammar import FROM_STEP, Parsed
from holdfast.cli.rendezvous import node_range
from holdfast.inherited import TOKEN_VARIABLE, draw_token
from holdfast.launchers.slurm import SlurmStep, address_of, number, read_step
from holdfast.protocol.errors import EnvironmentValueError, MissingPackageError, NodesError, SupersededError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CHECK_VARIABLE = "HOLDFAST_SLURM_CHECK_S"
ENDPOINT_OPTIONS = ("rdzv_endpoint", "master_addr", "master_port")
OWN_BACKENDS = ("c10d", "static")
"""Backends whose endpoint is one of the job's nodes."""
PREEMPT_SIGNAL = "USR1"
"""Default of --preempt-signal with --slurm: the signal of sbatch's --signal."""


def complete(
    parsed: Parsed, environ: Mapping[str, str], *, address: Callable[[str], str] = address_of
) -> tuple[Parsed, SlurmStep | None]:
    """Add the step's values to the line. Returns the line and the step; None: this is no task of a step. Raises
    NodesError or EnvironmentValueError."""
    step = read_step(environ)
    if step is None:
        return parsed, None
    one_agent = max(step.tasks) == 1
    try:
        found = rendezvous_options(parsed, step, address)
    except NodesError as error:
        if number(environ, "SLURM_PROCID", 0):
            raise SystemExit(error.exit_code) from None  # only the first task reports the reason
        raise
    # Several agents on a node share its GPUs and CPUs, and the step does not say how.
    if not parsed.given("nproc_per_node") and step.gpus and one_agent:
        found["nproc_per_node"] = str(step.gpus)
    if parsed.values.slurm and not parsed.given("preempt_signal"):
        found["preempt_signal"] = PREEMPT_SIGNAL
    values = SimpleNamespace(**{**vars(parsed.values), **found})
    sources = {**parsed.sources, **dict.fromkeys(found, FROM_STEP)}
    if parsed.given("rdzv_conf"):
        sources["rdzv_conf"] = parsed.sources["rdzv_conf"]
    # Agents compare this number when they join. Steps of different jobs that form one have no common number.
    is_complete = most_nodes(parsed, step) <= len(step.nodes)
    return (
        parsed._replace(
            values=values,
            sources=sources,
            cpus=step.cpus if one_agent else None,
            requeues=step.restarts if is_complete else 0,
            switches=step.switches,
        ),
        step,
    )


def stands_alone(parsed: Parsed) -> bool:
    """Whether the job has one node, which needs no rendezvous."""
    return bool(parsed.values.standalone) or (
        parsed.given("nnodes") and most_nodes(parsed, None) == 1 and not gives_endpoint(parsed)
    )


def gives_endpoint(parsed: Parsed) -> bool:
    """Whether the line gives the endpoint, as torchrun's does."""
    foreign = parsed.given("rdzv_backend") and parsed.values.rdzv_backend not in OWN_BACKENDS
    return foreign or any(map(parsed.given, ENDPOINT_OPTIONS))


def most_nodes(parsed: Parsed, step: SlurmStep | None) -> int:
    """The number of nodes as given, else that of the step; 0 for a malformed number, which is reported later."""
    if step is not None and not parsed.given("nnodes"):
        return len(step.nodes)
    try:
        return node_range(parsed.values.nnodes)[1]
    except ValueError:
        return 0


def rendezvous_options(parsed: Parsed, step: SlurmStep, address: Callable[[str], str]) -> dict[str, object]:
    """The options of the rendezvous that no flag, variable or file gives. Raises NodesError."""
    if stands_alone(parsed):
        return {}
    several, elsewhere = len(step.nodes) > 1, gives_endpoint(parsed)
    static = parsed.given("rdzv_backend") and parsed.values.rdzv_backend == "static"
    if elsewhere and parsed.given("nnodes") and (max(step.tasks) > 1 or most_nodes(parsed, step) > len(step.nodes)):
        return {}  # several agents on a node, or several steps, form one job: one step cannot know all of it
    step.check_one_agent_per_node()
    found: dict[str, object] = {"rdzv_id": step.run_id}
    if several:
        found["nnodes"] = str(len(step.nodes))
        if not step.switches or static:  # otherwise the coordinator orders the nodes by their switches
            found["node_rank"] = step.node_rank
    if several and not elsewhere:
        found["rdzv_backend"] = "c10d"
    found = {dest: value for dest, value in found.items() if not parsed.given(dest)}
    return {**found, **endpoint_options(parsed, step, address)} if several and not elsewhere else found


def endpoint_options(parsed: Parsed, step: SlurmStep, address: Callable[[str], str]) -> dict[str, object]:
    """The endpoint on the step's first node. is_host makes that node's agent the coordinator, whatever the name
    resolves to there."""
    host = address(step.nodes[0])
    found: dict[str, object] = {"rdzv_endpoint": f"[{host}]:{step.port}" if ":" in host else f"{host}:{step.port}"}
    conf = parsed.values.rdzv_conf
    if "is_host" not in conf and not (parsed.given("rdzv_backend") and parsed.values.rdzv_backend == "static"):
        found["rdzv_conf"] = ",".join(filter(None, [conf, f"is_host={int(step.node_rank == 0)}"]))
    return found


def guard(step: SlurmStep, environ: Mapping[str, str]) -> None:
    """End this process when Slurm has ended this start of the job but could not end its tasks."""
    from holdfast.launchers.slurm import CHECK_S, watch

    check_s = float(number(environ, CHECK_VARIABLE, int(CHECK_S)))
    # One agent asks for all: thousands of nodes that ask would overload Slurm's controller.
    if step.node_rank != 0 or check_s == 0 or shutil.which("scontrol") is None:
        return

    def end(reason: str) -> NoReturn:
        error = SupersededError(f"{step.name}: {reason}; the processes that are left here end without saving")
        sys.stderr.write(f"holdfast: {error.code}: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)  # at once; the supervisor ends all workers

    watch(step.job_id, step.restarts, end, check_s=check_s)


def start_agents(parsed: Parsed, command: str, argv: Sequence[str]) -> int:
    """Run --slurm outside of a step: one srun starts an agent on each node of the job. Raises CallerError.

    Returns only with --plan.
    """
    line = srun_line(os.environ, command, argv)
    if not parsed.values.plan:
        become_srun(parsed, line)
    print(f"holdfast would start one agent on each node with\n\n{shlex.join(line)}")
    return 0


def become_srun(parsed: Parsed, line: list[str]) -> NoReturn:
    """Replace this process by srun, which passes signals on to the agents."""
    program = shutil.which(line[0])
    if program is None:
        raise MissingPackageError("srun is not on the PATH of this machine: --slurm needs Slurm's own commands")
    sys.stdout.flush()
    os.execve(program, line, srun_environment(parsed, os.environ))


def srun_line(environ: Mapping[str, str], command: str, argv: Sequence[str]) -> list[str]:
    """The srun command for one agent per node. No agent is ended because another one, or a node, has ended."""
    if "SLURM_JOB_ID" not in environ:
        raise UsageError(
            "--slurm is for a batch script or salloc, and this is not a Slurm job (SLURM_JOB_ID is not set); "
            "to submit a job write: holdfast submit --slurm -N NODES ..."
        )
    agent = [sys.executable, "-m", "holdfast", command, *argv]
    if ":" in agent:  # srun interprets a lone colon anywhere on the line
        agent = ["sh", "-c", f"exec {shlex.join(agent)}"]
    components = number(environ, "SLURM_HET_SIZE", 1)
    # Variables of components with another job's number are inherited from the job that submitted this one.
    if components == 1 or environ.get("SLURM_JOB_ID_HET_GROUP_0") != environ["SLURM_JOB_ID"]:
        return ["srun", *one_per_node(job_nodes(environ)), *agent]
    line = ["srun"]
    for index in range(components):
        nodes = job_nodes(environ, f"_HET_GROUP_{index}")
        line += [*([":"] if index else []), f"--het-group={index}", *one_per_node(nodes), *agent]
    return line


def one_per_node(nodes: int) -> list[str]:
    """Options of srun for one task on each node, none of which srun ends because of another one or of a lost node."""
    return [
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--no-kill",
        "--wait=0",
    ]


def job_nodes(environ: Mapping[str, str], component: str = "") -> int:
    """The number of nodes of the job, or of a component of a heterogeneous one. Raises EnvironmentValueError."""
    variable = f"SLURM_JOB_NUM_NODES{component}"
    nodes = number(environ, variable, number(environ, f"SLURM_NNODES{component}", 1))
    if nodes < 1:
        raise EnvironmentValueError(f"{variable}={nodes}: a job has at least one node")
    return nodes


def srun_environment(parsed: Parsed, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of srun: all of ours, with a token for this job. None of it is on a command line."""
    changed = dict(environ)
    changed["SLURM_EXPORT_ENV"] = "ALL"  # the value of `sbatch --export=...` would restrict it
    changed.setdefault("SLURM_CPU_BIND", "none")  # do not bind the agent to one CPU: its workers inherit it
    if TOKEN_VARIABLE not in changed and "token_file" not in parsed.values.rdzv_conf:
        changed[TOKEN_VARIABLE] = draw_token()
    return changed
