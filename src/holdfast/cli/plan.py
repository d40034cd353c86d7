"""`--plan`: describes what would run where, without starting anything.

Pure text from a Resolution: the same line and environment give the same plan. Values that the rendezvous decides are
shown as <assigned>, random ones as <random>. At the end come the options that were given, with values and sources;
--json has all of them. Passwords are masked.
"""

from __future__ import annotations

import os
import shlex
import sys
from signal import Signals
from typing import TYPE_CHECKING, NotRequired, TypedDict

from holdfast import compile_caches
from holdfast.cli.grammar import FROM_FLAG, FROM_STEP
from holdfast.cli.option_table import LAUNCH_OPTIONS, flag_of
from holdfast.cli.rendezvous import losses_survived
from holdfast.cli.resolve import COMPILE_THREADS
from holdfast.protocol.messages import Assign, Start
from holdfast.protocol.options import CommandKind
from holdfast.protocol.train_contract import RUN_ID_VARIABLE
from holdfast.run_folder import safe_name
from holdfast.supervisor.worker_command import backends_text, worker_environment
from holdfast.text import plural, without_passwords

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.cli.grammar import Parsed
    from holdfast.cli.resolve import Resolution
    from holdfast.protocol.options import RunOptions


HEAD = "options, their values and sources"
ACTIONS = frozenset({"help", "version", "plan", "json"})
VALUE_COLUMNS_MAX = 40
"""Width of the column of values."""


class WorkerPlan(TypedDict):
    """A worker of this node."""

    local_rank: int
    command: str
    environment: dict[str, str]
    """Variables of this worker alone."""


class OptionValue(TypedDict):
    """One option of `holdfast run`."""

    name: str
    value: str
    """The value as on the command line; `-` for none. Passwords are masked."""
    source: str
    """`command line`, the name of a variable, file and line, `the Slurm step` or `default`."""


class PlanData(TypedDict):
    """What would run where. Texts are for people, as in the output without --json."""

    not_default: str
    job: str
    nodes: str
    slurm: NotRequired[str]
    rendezvous: str
    coordinator: str
    survives: str
    token: str
    workers_here: str
    threads: str
    compilers: str
    backends: NotRequired[str]
    caches: str
    preload: str
    standby: str
    stop: str
    drain: str
    hang: str
    health: NotRequired[str]
    time_outs: str
    logs: str
    watched: NotRequired[str]
    notices: list[str]
    environment: dict[str, str]
    """Variables of all workers here."""
    workers: list[WorkerPlan]
    options: list[OptionValue]


JSON_FORMS = dict.fromkeys(("run", "launch"), ((PlanData,),))


def option_values(parsed: Parsed) -> list[OptionValue]:
    return [OptionValue(name=name, value=value, source=source) for name, value, source in option_rows(parsed)]


def option_rows(parsed: Parsed) -> list[tuple[str, str, str]]:
    """Name, value and source of each option: those that were given first, then the defaults."""
    rows = [
        (flag_of(dest), shown(getattr(parsed.values, dest)), "command line" if source == FROM_FLAG else source)
        for dest, source in parsed.sources.items()
        if dest not in ACTIONS
    ]
    return sorted(rows, key=lambda row: row[2] == "default")


def changed_text(parsed: Parsed) -> str:
    """The options whose values are not the defaults."""
    defaults = {option.name: shown(option.default) for option in LAUNCH_OPTIONS}
    changed = [f"{name} {value}" for name, value, _ in option_rows(parsed) if defaults[name] != value]
    return ", ".join(changed) or "nothing"


def option_lines(parsed: Parsed) -> Iterator[str]:
    rows = option_rows(parsed)
    names = max(len(name) for name, _, _ in rows)
    values = min(max(len(value) for _, value, _ in rows), VALUE_COLUMNS_MAX)
    yield HEAD
    for name, value, source in rows:
        yield f"  {name:{names}}  {value:{values}}  {source}"


def given_lines(parsed: Parsed) -> list[str]:
    """The options that a flag, a variable, a file or a scheduler gave; nothing if there is none."""
    dests = [dest for dest in parsed.sources if dest not in ACTIONS]
    given = {dest: source for dest, source in parsed.sources.items() if dest in dests and parsed.given(dest)}
    if not given:
        return []
    rest = f"  the {len(dests) - len(given)} other options have their defaults; --plan --json lists them"
    return ["", *option_lines(parsed._replace(sources=given)), rest]


def shown(value: object) -> str:
    """A value as on the command line; `-` for none."""
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return ",".join(map(str, value)) or "-"
    return without_passwords(str(value))


ASSIGNED, RANDOM = "<assigned>", "<random>"
BY_RENDEZVOUS = (
    "RANK",
    "WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def facts_of(parsed: Parsed, resolution: Resolution, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The plan's lines about the job and this node: names and texts."""
    options = resolution.options
    job_id = shown_job_id(parsed, options)
    return [
        ("not default", changed_text(parsed)),
        ("job", f"id {job_id}, up to {options.job.max_restarts} restarts after worker failures"),
        ("nodes", node_text(options)),
        *([("slurm", slurm)] if (slurm := slurm_text(parsed)) else []),
        ("rendezvous", rendezvous_text(options)),
        ("coordinator", coordinator_text(options)),
        ("survives", losses_survived(options)),
        ("token", "yes: only agents that have it can join" if options.token else "none"),
        ("workers here", workers_text(resolution)),
        ("threads", threads_text(resolution, environ)),
        ("compilers", compilers_text(options, environ)),
        *([("backends", backends)] if (backends := _backends_text(options, environ)) else []),
        ("caches", caches_text(options, environ)),
        ("preload", preload_text(options)),
        ("standby", standby_text(options)),
        ("stop", stop_text(options)),
        ("drain", drain_text(options)),
        ("hang", hang_text(options)),
        *([("health", health)] if (health := health_text(options)) else []),
        ("time-outs", ", ".join(each.words for each in resolution.time_outs)),
        ("logs", log_text(options, job_id)),
        *([("watched", watched)] if (watched := watched_text(options)) else []),
    ]


def document(parsed: Parsed, resolution: Resolution, environ: Mapping[str, str]) -> dict[str, object]:
    """The whole plan for JSON."""
    options = resolution.options
    common, own = environments(parsed, options, environ)
    return {
        **{name.replace(" ", "_").replace("-", "_"): text for name, text in facts_of(parsed, resolution, environ)},
        "notices": list(options.notices),
        "environment": common,
        "workers": [
            {"local_rank": local_rank, "command": command_text(options, local_rank), "environment": variables}
            for local_rank, variables in enumerate(own)
        ],
        "options": option_values(parsed),
    }


def render(parsed: Parsed, resolution: Resolution, environ: Mapping[str, str]) -> str:
    """The whole plan."""
    options = resolution.options
    lines = ["holdfast would run this; nothing was started.", ""]
    lines += [f"{name:14}{text}" for name, text in facts_of(parsed, resolution, environ)]
    lines += [f"{'notice' if index == 0 else '':14}{text}" for index, text in enumerate(options.notices)]
    common, own = environments(parsed, options, environ)
    lines += ["", "variables of every worker here"]
    lines += [f"  {name}={value}" for name, value in sorted(common.items())]
    for local_rank, variables in enumerate(own):
        lines += ["", f"local rank {local_rank}", f"  {command_text(options, local_rank)}"]
        lines += [f"  {name}={value}" for name, value in sorted(variables.items())]
    return "\n".join([*lines, *given_lines(parsed)])


def shown_job_id(parsed: Parsed, options: RunOptions) -> str:
    return options.job.run_id if options.job.run_id == parsed.values.rdzv_id else RANDOM


def node_text(options: RunOptions) -> str:
    job = options.job
    if job.max_nodes == 1:
        return "1, this one"
    number = str(job.max_nodes) if job.min_nodes == job.max_nodes else f"{job.min_nodes} to {job.max_nodes}"
    if options.node_rank is None:
        return number
    return f"{number}; this one is node {options.node_rank}{'' if job.fixed_ranks else ' if that is free'}"


def slurm_text(parsed: Parsed) -> str:
    """The values that come from the Slurm step; empty: there is none."""
    from_step = [dest for dest, source in parsed.sources.items() if source == FROM_STEP]
    texts = [f"{flag_of(dest)} {getattr(parsed.values, dest)}" for dest in from_step]
    texts += [f"restart {parsed.requeues}"] if parsed.requeues else []
    return f"from the Slurm step: {', '.join(texts)}" if texts else ""


def rendezvous_text(options: RunOptions) -> str:
    if options.standalone:
        return "none needed: standalone, on a free port of the loopback interface"
    patience = f"waits {options.limits.join_s:g} s for {options.job.min_nodes}"
    return f"{options.job.backend} at {options.meeting_point}, {patience}"


def coordinator_text(options: RunOptions) -> str:
    if options.standalone:
        return "this agent"
    if options.is_host is not None:
        return "this agent, by is_host" if options.is_host else "another agent, by is_host"
    if options.is_elected:
        return f"an agent elected through {options.job.backend}; another one if its node is lost"
    later = "; another one if its node is lost" if options.succession else ""
    return f"the agent on the machine that owns {options.endpoint.host}{later}"


def workers_text(resolution: Resolution) -> str:
    devices = resolution.devices
    if devices.source == "given":
        return str(devices.number)
    return f"{devices.number}, one per {devices.kind} ({devices.source})"


def threads_text(resolution: Resolution, environ: Mapping[str, str]) -> str:
    threads, nproc = resolution.options.omp_num_threads, resolution.options.nproc
    if threads is not None:
        return f"OMP_NUM_THREADS={threads}: {resolution.cpus} CPUs for {nproc} workers"
    if "OMP_NUM_THREADS" in environ:
        return f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}, already set"
    return "OMP_NUM_THREADS stays unset: one worker may use all CPUs"


def compilers_text(options: RunOptions, environ: Mapping[str, str]) -> str:
    if options.compile_threads is not None:
        return f"{COMPILE_THREADS}={options.compile_threads}: processes of torch.compile for each worker"
    if COMPILE_THREADS in environ:
        return f"{COMPILE_THREADS}={environ[COMPILE_THREADS]}, already set"
    return f"{COMPILE_THREADS} stays unset: torch.compile of one worker may use all CPUs"


def _backends_text(options: RunOptions, environ: Mapping[str, str]) -> str:
    """The backends that the script's torch has; empty: nothing shows that it uses torch, or it runs under another
    Python."""
    command = options.command
    known = "torch" in options.preload.modules and command.python in ("", sys.executable)
    return backends_text(sys.path, environ) if known else ""


def caches_text(options: RunOptions, environ: Mapping[str, str]) -> str:
    if options.cache_dir is None:
        return "off: each library keeps compiled kernels in its own place"
    theirs = [name for name in compile_caches.VARIABLES if name in environ]
    but = f"; already set: {', '.join(theirs)}" if theirs else ""
    kept = f"compiled kernels are kept in {options.cache_dir}, {compile_caches.BYTES_MAX // 2**30} GiB at most{but}"
    if options.cache_from is None:
        return kept
    limits = f"{compile_caches.COPY_BYTES_MAX // 2**30} GiB in {compile_caches.COPY_S_MAX:g} s"
    return f"{kept}; an empty one is filled from {options.cache_from}, {limits} at most, and gives it what is new"


def preload_text(options: RunOptions) -> str:
    preload = options.preload
    later = f"; {', '.join(preload.later)} once they run" if preload.later else ""
    return f"{', '.join(preload.modules) or 'none'}{later} ({preload.why})"


def standby_text(options: RunOptions) -> str:
    if options.standby:
        workers = plural(options.nproc, "standby worker")
        return f"{workers} while the workers run; events.jsonl and holdfast report show their memory"
    return "none"


def stop_text(options: RunOptions) -> str:
    names = ", ".join(Signals(number).name for number in options.signals) or "no signal"
    return f"on {names}: SIGTERM to the workers, SIGKILL after {options.limits.stop_grace_s:g} s"


def drain_text(options: RunOptions) -> str:
    """The behaviour for a script that calls `should_stop()`; it does not concern other scripts."""
    signal = "any of these except SIGINT and SIGQUIT"
    if options.preempt_signal is not None:
        signal += f", and on {Signals(options.preempt_signal).name}"
    wait_s = options.limits.drain_s
    return f"scripts that call should_stop() go to their next safe point within {wait_s:g} s, on {signal}"


def watched_text(options: RunOptions) -> str:
    """The addresses at which the job can be observed; empty: none."""
    servers = (("dashboard", options.dashboard), ("metrics", options.metrics), ("health", options.health))
    texts = [f"{name} at {endpoint}" for name, endpoint in servers if endpoint is not None]
    if options.event_log_handler == "console":
        texts.append("torchelastic's events on stderr")
    return ", ".join(texts)


def hang_text(options: RunOptions) -> str:
    limits = options.limits
    then = f"restart if none changes for {limits.hang_timeout_s:g} s" if limits.hang_timeout_s else "no restart"
    steps = f"{limits.hang_steps} steps (at most {limits.hang_report_max_s:g} s)"
    return f"no step for {limits.hang_report_s:g} s and {steps}: all stacks are sampled; {then}"


def health_text(options: RunOptions) -> str:
    """The checks of this node before a generation; empty: there are none."""
    parts = [f"{options.preflight} preflight before the first generation"] if options.preflight != "off" else []
    parts += [f"before each generation: {options.health_command}"] if options.health_command else []
    return "; ".join([*parts, "a node that fails is parked"]) if parts else ""


def log_text(options: RunOptions, job_id: str) -> str:
    folder = attempt_folder(options, job_id)
    return f"{folder}/<local rank>/" if folder is not None else "no files"


def attempt_folder(options: RunOptions, job_id: str) -> str | None:
    """The folder of the first attempt."""
    if options.logs.log_dir is None:
        return None
    name = job_id if job_id == RANDOM else safe_name(job_id)
    return os.path.join(options.logs.log_dir, f"{name}_{RANDOM}", "attempt_0")


def command_text(options: RunOptions, local_rank: int) -> str:
    """The command as in torchrun: without holdfast's bootstrap."""
    from holdfast.supervisor.worker_command import bootstrap_for, worker_argv

    argv = worker_argv(options, local_rank)
    bootstrap = bootstrap_for(options.command.python or sys.executable)
    if bootstrap in argv:
        at = argv.index(bootstrap)
        argv[at : at + 2] = ["-m"] if options.command.kind is CommandKind.MODULE else []
    return shlex.join(argv)


def environments(
    parsed: Parsed, options: RunOptions, environ: Mapping[str, str]
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The variables common to all workers here, and the others of each worker."""
    each = [environment(parsed, options, environ, local_rank) for local_rank in range(options.nproc)]
    varying = {"LOCAL_RANK", "RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE"}
    if options.virtual_local_rank:
        varying |= {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}
    common = {name: value for name, value in each[0].items() if name not in varying}
    own = [{name: value for name, value in variables.items() if name in varying} for variables in each]
    return common, own


def environment(parsed: Parsed, options: RunOptions, environ: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The variables of one worker, with <assigned> for all that the rendezvous decides."""
    job, job_id = options.job, shown_job_id(parsed, options)
    folder = attempt_folder(options, job_id)
    alone = job.max_nodes == 1
    assign = Assign(
        generation=1,
        restart_count=0,
        group_rank=options.node_rank or 0,
        group_world_size=job.max_nodes,
        rank_base=0,
        world_size=options.nproc,
        role_rank_base=0,
        role_world_size=options.nproc,
        hosts_store=alone,
    )
    variables = worker_environment(
        options,
        assign,
        Start(generation=1, master_addr=ASSIGNED, master_port=0, job_uid=ASSIGNED),
        local_rank,
        error_file=os.path.join(folder, str(local_rank), "error.json") if folder is not None else "",
        parent=environ,
    )
    if options.cache_dir is not None:
        variables |= compile_caches.variables(options.cache_dir, environ)
    known: set[str] = set()
    if alone:
        known |= set(BY_RENDEZVOUS) - {"MASTER_ADDR", "MASTER_PORT"}
    if job.min_nodes == job.max_nodes:
        known.add("GROUP_WORLD_SIZE")
    if job.fixed_ranks:
        known |= {"GROUP_RANK", "NODE_RANK"}
    variables.update(dict.fromkeys(set(BY_RENDEZVOUS) - known, ASSIGNED))
    variables["TORCHELASTIC_RUN_ID"] = job_id
    if RUN_ID_VARIABLE in variables and not environ.get(RUN_ID_VARIABLE):
        variables[RUN_ID_VARIABLE] = job_id
    return variables
