"""`holdfast run` in a Slurm job: the step fills in options that were not given, and --slurm becomes one srun.

Imported only where --slurm is given or the environment is a step's. What flags, variables or files say wins, value by
value; where they say where the nodes meet, the step still says how many there are and which one this is.
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
from holdfast.launchers.slurm import SlurmStep, address_of, number, read_step
from holdfast.protocol.errors import EnvironmentValueError, MissingPackageError, NodesError, SupersededError, UsageError
from holdfast.runtime.secret_variables import TOKEN_VARIABLE, draw_token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CHECK_VARIABLE = "HOLDFAST_SLURM_CHECK_S"
PLACE = ("rdzv_endpoint", "master_addr", "master_port")
OWN_PLACE_BACKENDS = ("c10d", "static")
NOTICE = "USR1"
"""What is taken for sbatch's --signal with --slurm, which has no other use for it."""


def take_in(
    parsed: Parsed, environ: Mapping[str, str], *, address: Callable[[str], str] = address_of
) -> tuple[Parsed, SlurmStep | None]:
    """The same line, completed by what the step says. Raises NodesError or EnvironmentValueError."""
    step = read_step(environ)
    if step is None:
        return parsed, None
    one_agent = max(step.tasks) == 1
    try:
        found = meeting(parsed, step, address)
    except NodesError as error:
        if number(environ, "SLURM_PROCID", 0):
            raise SystemExit(error.exit_code) from None  # the first task says why, once
        raise
    if not parsed.given("nproc_per_node") and step.gpus and one_agent:
        found["nproc_per_node"] = str(step.gpus)
    if parsed.values.slurm and not parsed.given("preempt_signal"):
        found["preempt_signal"] = NOTICE
    values = SimpleNamespace(**{**vars(parsed.values), **found})
    sources = {**parsed.sources, **dict.fromkeys(found, FROM_STEP)}
    if parsed.given("rdzv_conf"):
        sources["rdzv_conf"] = parsed.sources["rdzv_conf"]
    whole = most_nodes(parsed, step) <= len(step.nodes)
    return (
        parsed._replace(
            values=values,
            sources=sources,
            cpus=step.cpus if one_agent else None,
            requeues=step.restarts if whole else 0,
        ),
        step,
    )


def stands_alone(parsed: Parsed) -> bool:
    """Whether the line is about one node, which needs no rendezvous."""
    return bool(parsed.values.standalone) or (parsed.given("nnodes") and is_one(parsed) and not says_where(parsed))


def says_where(parsed: Parsed) -> bool:
    """Whether the line says where the nodes meet, as torchrun's does."""
    foreign = parsed.given("rdzv_backend") and parsed.values.rdzv_backend not in OWN_PLACE_BACKENDS
    return foreign or any(map(parsed.given, PLACE))


def is_one(parsed: Parsed) -> bool:
    return most_nodes(parsed, None) == 1


def most_nodes(parsed: Parsed, step: SlurmStep | None) -> int:
    """As given, else as many as the step has. A malformed number is complained about later, as ever."""
    if step is not None and not parsed.given("nnodes"):
        return len(step.nodes)
    try:
        return node_range(parsed.values.nnodes)[1]
    except ValueError:
        return 0


def meeting(parsed: Parsed, step: SlurmStep, address: Callable[[str], str]) -> dict[str, object]:
    """How the tasks of this step find each other, as far as no option says it. Raises NodesError."""
    if stands_alone(parsed):
        return {}
    several, elsewhere = len(step.nodes) > 1, says_where(parsed)
    if elsewhere and parsed.given("nnodes") and (max(step.tasks) > 1 or most_nodes(parsed, step) > len(step.nodes)):
        return {}  # several agents on a node, or several steps, meet there: no step speaks for all of them
    step.check_one_agent_per_node()
    found: dict[str, object] = {"rdzv_id": step.run_id}
    if several:
        found["nnodes"] = str(len(step.nodes))
        found["node_rank"] = step.node_rank
    if several and not elsewhere:
        found["rdzv_backend"] = "c10d"
    found = {dest: value for dest, value in found.items() if not parsed.given(dest)}
    return {**found, **place(parsed, step, address)} if several and not elsewhere else found


def place(parsed: Parsed, step: SlurmStep, address: Callable[[str], str]) -> dict[str, object]:
    """The step's first node, which hosts whatever its name resolves to there; another one never meets itself."""
    host = address(step.nodes[0])
    found: dict[str, object] = {"rdzv_endpoint": f"[{host}]:{step.port}" if ":" in host else f"{host}:{step.port}"}
    conf = parsed.values.rdzv_conf
    if "is_host" not in conf and not (parsed.given("rdzv_backend") and parsed.values.rdzv_backend == "static"):
        found["rdzv_conf"] = ",".join(filter(None, [conf, f"is_host={int(step.node_rank == 0)}"]))
    return found


def guard(step: SlurmStep, environ: Mapping[str, str]) -> None:
    """Ends this process when Slurm has ended this life of the job and could not end its tasks."""
    from holdfast.launchers.slurm import CHECK_S, watch

    check_s = float(number(environ, CHECK_VARIABLE, int(CHECK_S)))
    if step.node_rank != 0 or check_s == 0 or shutil.which("scontrol") is None:
        return

    def end(reason: str) -> NoReturn:
        error = SupersededError(f"{step.name}: {reason}; what is left of it here ends, without saving")
        sys.stderr.write(f"holdfast: {error.code}: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)  # at once, whatever the other threads do; the supervisor ends all workers

    watch(step.job_id, step.restarts, end, check_s=check_s)


def start_agents(parsed: Parsed, command: str, argv: Sequence[str]) -> int:
    """--slurm outside of a step: one srun starts an agent on each node of the job. Raises CallerError.

    Returns for --plan only.
    """
    words = srun_line(os.environ, command, argv)
    if not parsed.values.plan:
        become_srun(parsed, words)
    print(f"holdfast would start one agent on each node, by\n\n{shlex.join(words)}")
    return 0


def become_srun(parsed: Parsed, words: list[str]) -> NoReturn:
    """A signal to this process is one to srun then, which passes it on to the agents."""
    program = shutil.which(words[0])
    if program is None:
        raise MissingPackageError("srun is not on the PATH of this machine: --slurm needs Slurm's own commands")
    sys.stdout.flush()
    os.execve(program, words, srun_environment(parsed, os.environ))


def srun_line(environ: Mapping[str, str], command: str, argv: Sequence[str]) -> list[str]:
    """One agent per node; none is ended because another one, or its node, has ended."""
    if "SLURM_JOB_ID" not in environ:
        raise UsageError(
            "--slurm is for a batch script or salloc, and this is no Slurm job (SLURM_JOB_ID is not set); "
            "from here write: holdfast submit --slurm -N NODES ..."
        )
    agent = [sys.executable, "-m", "holdfast", command, *argv]
    if ":" in agent:  # a lone colon is srun's, wherever it is
        agent = ["sh", "-c", f"exec {shlex.join(agent)}"]
    components = number(environ, "SLURM_HET_SIZE", 1)
    if (
        environ.get("SLURM_JOB_ID_HET_GROUP_0") != environ["SLURM_JOB_ID"]
    ):  # the job that submitted this one had components
        components = 1
    if components == 1:
        return ["srun", *one_per_node(job_nodes(environ)), *agent]
    words = ["srun"]
    for index in range(components):
        nodes = job_nodes(environ, f"_HET_GROUP_{index}")
        words += [*([":"] if index else []), f"--het-group={index}", *one_per_node(nodes), *agent]
    return words


def one_per_node(nodes: int) -> list[str]:
    return [
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--no-kill",
        "--wait=0",
    ]


def job_nodes(environ: Mapping[str, str], component: str = "") -> int:
    """How many nodes the job has, or a component of a heterogeneous one. Raises EnvironmentValueError."""
    variable = f"SLURM_JOB_NUM_NODES{component}"
    nodes = number(environ, variable, number(environ, f"SLURM_NNODES{component}", 1))
    if nodes < 1:
        raise EnvironmentValueError(f"{variable}={nodes}: a job has at least one node")
    return nodes


def srun_environment(parsed: Parsed, environ: Mapping[str, str]) -> dict[str, str]:
    """The whole environment goes along, with a secret that is this job's; nothing of it is on a command line."""
    changed = dict(environ)
    changed["SLURM_EXPORT_ENV"] = "ALL"  # what `sbatch --export=...` left there would cut it
    changed.setdefault("SLURM_CPU_BIND", "none")  # the workers share their node's CPUs: no single one for the agent
    if TOKEN_VARIABLE not in changed and "token_file" not in parsed.values.rdzv_conf:
        changed[TOKEN_VARIABLE] = draw_token()
    return changed
