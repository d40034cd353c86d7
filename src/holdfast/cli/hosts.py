"""`holdfast run --hosts`, --hostfile and --host-discovery: converts a command line to a LaunchSpec.

The line is resolved here as the first host will read it, so that errors are reported before any login. Options from
flags, variables and files go to the agents as flags. Variables that they may need are sent too, never on a command
line.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import signal
import sys
import uuid
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from holdfast.cli import grammar, say
from holdfast.cli.devices import Probes
from holdfast.cli.option_table import HOSTS, OPTIONS, TABLES
from holdfast.cli.plan import given_lines, shown_job_id
from holdfast.cli.program import PYTHON_VARIABLE, find_program, folder_here
from holdfast.cli.rendezvous import node_range
from holdfast.cli.resolve import is_number, line_of_other_agent, resolve, shown_line
from holdfast.inherited import TOKEN_VARIABLE, draw_token
from holdfast.launchers.ssh.hosts import Expected, HostSpec, LaunchSpec, parse_file, parse_list, select
from holdfast.protocol.charter import VOTERS_MIN
from holdfast.protocol.errors import EndpointError, HostsError, NodesError, UsageError
from holdfast.protocol.options import CommandKind
from holdfast.text import is_loopback, listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.cli.grammar import Parsed
    from holdfast.protocol.options import RunOptions

VARIABLES_SENT = (
    "CUBLAS_*",
    "CUDA_*",
    "CUDNN_*",
    "GLOO_*",
    "HF_*",
    "HOLDFAST_*",
    "KMP_*",
    "LD_LIBRARY_PATH",
    "MKL_*",
    "NCCL_*",
    "OMP_*",
    "OPENBLAS_*",
    "PET_*",
    "PYTHONPATH",
    "PYTHON_EXEC",
    "PYTORCH_*",
    "TORCH*",
    "TRANSFORMERS_*",
    "UCX_*",
    "VIRTUAL_ENV",
)
"""Patterns of the variables that are sent to every host; --env adds more."""
OWN_OF_NODE = ("node_rank", "local_addr")
"""Options whose value differs from node to node."""
LOCK_BYTES = 16
FILE_BYTES_MAX = 1 << 20
"""Limit of a hostfile, and of the compared part of a script (far.py reads the same part)."""
CPUS_THERE = 1 << 20
"""A number of CPUs for hosts whose own number is unknown here: no number of workers is too large for it."""
UNKNOWN_ENDPOINT = "first.host:1"
"""A placeholder for the endpoint, which the launcher determines."""
UNKNOWN_MODULE, UNKNOWN_PROGRAM, UNKNOWN_SCRIPT = "$module", "$program", "$script"
"""Placeholders for what only the hosts know to exist: names with variables are not searched."""


def are_named(parsed: Parsed) -> bool:
    """Whether this line names hosts. Raises UsageError for an option that needs hosts if there are none."""
    given = parsed.values
    if given.hosts or given.hostfile or given.host_discovery:
        return True
    for option in OPTIONS:
        if option.group == HOSTS and parsed.sources[option.dest] == grammar.FROM_FLAG:
            raise UsageError(f"{parsed.as_written(option.dest)} needs --hosts, --hostfile or --host-discovery")
    return False


def execute(parsed: Parsed, command: str) -> int:
    """Plan or run the job. Returns its exit code. Raises CallerError."""
    hosts = read_hosts(parsed)
    spec, options = make_spec(parsed, command, hosts, os.environ)
    if parsed.values.plan:
        print(plan(parsed, spec, options))
        return 0
    for notice in options.notices:
        say(notice)
    from holdfast.launchers.ssh.launcher import run

    return run(spec, options.job.run_id)


def read_hosts(parsed: Parsed) -> list[HostSpec]:
    """The hosts after --include and --exclude; none with --host-discovery. Raises HostsError."""
    given = parsed.values
    sources = [dest for dest in ("hosts", "hostfile", "host_discovery") if getattr(given, dest)]
    if len(sources) > 1:
        raise UsageError(f"{' and '.join(parsed.as_written(dest) for dest in sources)} exclude each other")
    if given.host_discovery:
        if given.include or given.exclude:
            raise UsageError(
                "--include and --exclude select from --hosts and --hostfile, not from what --host-discovery prints"
            )
        return []
    if given.hosts:
        hosts = parse_list(given.hosts)
    else:
        hosts = parse_file(read_file(given.hostfile), given.hostfile)
        if not hosts:
            raise HostsError(f"--hostfile {given.hostfile} names no host")
    return select(hosts, given.include, given.exclude)


def read_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(FILE_BYTES_MAX).decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise HostsError(f"--hostfile {path}: {error.strerror}") from None


def make_spec(
    parsed: Parsed, command: str, hosts: Sequence[HostSpec], environ: Mapping[str, str]
) -> tuple[LaunchSpec, RunOptions]:
    """The launch spec, and the options of the first host's agent. Raises CallerError."""
    check_line(parsed)
    least, most = node_limits(parsed, len(hosts))
    alone = most == 1 and not parsed.given("rdzv_endpoint")
    run_id = parsed.values.rdzv_id if parsed.given("rdzv_id") and parsed.values.rdzv_id else str(uuid.uuid4())
    environ_there = environment(parsed, environ)
    if TOKEN_VARIABLE not in environ_there and "token_file" not in parsed.values.rdzv_conf:
        environ_there[TOKEN_VARIABLE] = draw_token()
    elastic = parsed.values.rdzv_backend if parsed.given("rdzv_backend") else "c10d"

    def line(host: HostSpec, index: int | None, endpoint: str) -> list[str]:
        replaced: dict[str, str | None] = {"nnodes": f"{least}:{most}", "rdzv_id": run_id, "standalone": None}
        if alone:
            replaced |= {"standalone": "", "rdzv_backend": None, "rdzv_endpoint": None}
        else:
            replaced |= {"rdzv_backend": elastic, "rdzv_endpoint": endpoint}
        if index is not None and index < most and not alone:
            replaced["node_rank"] = str(index)
        if host.slots is not None:
            replaced["nproc_per_node"] = str(host.slots)
        return line_of_other_agent(parsed, command, replaced)

    first = hosts[0] if hosts else HostSpec("first")
    options = resolve_there(parsed, line(first, 0, parsed.values.rdzv_endpoint or UNKNOWN_ENDPOINT), environ_there)
    if most > 1 and elastic == "c10d" and options.endpoint is not None and is_loopback(options.endpoint.host):
        raise parsed.error(
            "rdzv_endpoint", EndpointError, "means another machine on each host; leave it out, or name one host"
        )
    nproc = parsed.values.nproc_per_node
    spec = LaunchSpec(
        hosts=tuple(hosts),
        discovery=program_path(parsed.values.host_discovery),
        min_nodes=least,
        max_nodes=most,
        nproc=int(nproc) if is_number(nproc) else None,
        expected=expected(parsed, options),
        program=options.command.kind is CommandKind.PROGRAM,
        environ=environ_there,
        line=line,
        endpoint=parsed.values.rdzv_endpoint,
        alone=alone,
        succession=options.succession and most >= VOTERS_MIN,
        detach=parsed.values.on_disconnect == "detach",
        ssh=ssh_command(parsed),
        lock=f"holdfast-{secrets.token_hex(LOCK_BYTES)}",
        signals=tuple(dict.fromkeys([*options.signals, *([options.preempt_signal] if options.preempt_signal else [])])),
    )
    return spec, options


def ssh_command(parsed: Parsed) -> tuple[str, ...]:
    """The command of --ssh and its arguments, split as a shell does."""
    words = tuple(parsed.converted("ssh", shlex.split))
    if not parsed.given("ssh"):
        return words  # the first login shows whether `ssh` exists
    if not words or find_program(words[0], os.environ) is None:
        raise parsed.error("ssh", UsageError, "no such program")
    return words


def check_line(parsed: Parsed) -> None:
    """Raise CallerError for options that make no sense when one line starts all nodes."""
    for dest in OWN_OF_NODE:
        if parsed.given(dest):
            raise parsed.error(dest, UsageError, "is for one node; with --hosts each host gets its own value")
    if parsed.values.slurm:
        raise parsed.error("slurm", UsageError, "starts the agents by srun; leave out this option or the hosts")
    if parsed.values.standalone:
        raise parsed.error("standalone", UsageError, "means one node; leave out this option or the hosts")
    if parsed.given("rdzv_backend") and parsed.values.rdzv_backend == "static":
        raise parsed.error("rdzv_backend", UsageError, "with --hosts the nodes meet by c10d (the default) or etcd")


def node_limits(parsed: Parsed, count: int) -> tuple[int, int]:
    """The range of nodes. `count` is the number of hosts that are named, 0 with discovery. Raises NodesError."""
    if not parsed.given("nnodes"):
        if not count:
            raise NodesError(
                "--host-discovery needs --nnodes MIN:MAX, the number of hosts that the job needs and may have"
            )
        return count, count
    least, most = parsed.converted("nnodes", node_range, NodesError)
    if count and count < least:
        raise parsed.error("nnodes", NodesError, f"only {count} host{'s are' if count > 1 else ' is'} named")
    if count > most:
        raise parsed.error("nnodes", NodesError, f"{count} hosts are named; --include or --exclude choose some")
    return least, min(most, count) if count else most


def environment(parsed: Parsed, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to send, by VARIABLES_SENT and --env. Those that set options are not sent: the options become
    flags."""
    options = {variable for option in OPTIONS for variable in option.variables}
    names = [name.strip() for name in parsed.values.env.split(",") if name.strip()]
    for name in names:
        if "=" in name:
            raise parsed.error(
                "env",
                UsageError,
                f"export {name.partition('=')[0]} and give only its name: everybody can see values on a line",
            )
        if not any(fnmatchcase(each, name) for each in environ):
            raise parsed.error("env", UsageError, f"{name} is not set here")
    patterns = [*VARIABLES_SENT, *names]
    return {
        name: value
        for name, value in environ.items()
        if name not in options
        and not (name == "VIRTUAL_ENV" and parsed.values.python)
        and any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def resolve_there(parsed: Parsed, words: Sequence[str], environ: Mapping[str, str]) -> RunOptions:
    """Resolve the line as an agent will.

    The script or program is checked only if it has the same path here, a program that is searched on PATH only if it is
    there, and a module only if the hosts search for it as this machine would: in this folder, with this Python. Each
    host searches for itself.
    """
    there = grammar.parse(words[1:], {}, TABLES[words[0]])
    there = there._replace(notices=parsed.notices)
    given = there.values
    # Only the hosts know their devices, programs and folders. The agent of each checks its own line.
    if not is_number(given.nproc_per_node):
        given.nproc_per_node = "1"
    given.health_command = given.notify = ""
    given.log_dir = os.devnull
    environ = {name: value for name, value in environ.items() if name != PYTHON_VARIABLE}
    script, folder = there.values.training_script, parsed.values.cwd
    if there.values.module and (folder or parsed.values.python):
        there.values.training_script = UNKNOWN_MODULE
    if there.values.no_python:
        there.values.training_script = program_here(script, folder, environ) or UNKNOWN_PROGRAM
    elif folder and not os.path.isabs(script) and not there.values.module:
        here = os.path.join(folder, script)
        there.values.training_script = here if os.path.exists(here) else UNKNOWN_SCRIPT
    return resolve(there, environ, Probes(cpus=CPUS_THERE)).options


def program_here(name: str, folder: str, environ: Mapping[str, str]) -> str:
    """The program under the path that it has on the hosts; empty: it is for them to find it."""
    if "/" not in name:
        path = environ.get("PATH") or os.environ.get("PATH", "")
        return name if find_program(name, {"PATH": path}) is not None else ""
    path = os.path.join(folder, name)
    return path if not folder or os.path.exists(path) else ""


def expected(parsed: Parsed, options: RunOptions) -> Expected:
    """What the hosts must have in common with this machine. With --python they must agree with the first host."""
    from holdfast.supervisor.worker_command import torch_versions
    from holdfast.version import __version__

    kind = options.command.kind
    named = parsed.values.python
    script = "" if kind is CommandKind.MODULE or "$" in parsed.values.training_script else parsed.values.training_script
    return Expected(
        python="" if named else ".".join(map(str, sys.version_info[:3])),
        holdfast=__version__,
        torch="" if named else torch_versions(sys.path).get("torch", ""),
        script=hash_of(options.command.target) if script and kind is not CommandKind.PROGRAM else "",
        path=script,
        cwd=parsed.values.cwd or working_folder(),
        interpreter=named or sys.executable,
    )


def hash_of(path: str) -> str:
    """The hash of a file; empty when the script is not here."""
    try:
        with open(os.path.join(path, "__main__.py") if os.path.isdir(path) else path, "rb") as file:
            return hashlib.sha256(file.read(FILE_BYTES_MAX)).hexdigest()
    except OSError:
        return ""


def working_folder() -> str:
    """The working folder under the shell's name, which other machines know too (automounted homes)."""
    by_shell = os.environ.get("PWD", "")
    try:
        return by_shell if os.path.isabs(by_shell) and os.path.samefile(by_shell, ".") else os.getcwd()
    except OSError:
        return folder_here()


def program_path(name: str) -> str:
    """The absolute path of --host-discovery. Raises HostsError."""
    if not name:
        return ""
    if not os.path.isfile(name):
        raise HostsError(f"--host-discovery {name}: no such file")
    if not os.access(name, os.X_OK):
        raise HostsError(f"--host-discovery {name} is not executable; chmod +x it")
    return os.path.abspath(name)


def plan(parsed: Parsed, spec: LaunchSpec, options: RunOptions) -> str:
    """The text of --plan: the agents that would be started, and where."""
    run_id = shown_job_id(parsed, options)
    hosts = [f"{each}:{each.slots}" if each.slots is not None else str(each) for each in spec.hosts]
    rendezvous = "one node, none needed" if spec.alone else spec.endpoint or "a free port of the first host"
    number = str(spec.min_nodes) if spec.min_nodes == spec.max_nodes else f"{spec.min_nodes} to {spec.max_nodes}"
    endings = ", ".join(signal.Signals(each).name for each in spec.signals)
    example = spec.line(spec.hosts[0] if spec.hosts else HostSpec("HOST"), 0, spec.endpoint or "ENDPOINT")
    facts = [
        ("job", f"id {run_id}"),
        ("hosts", listed(hosts, 16) if hosts else f"those that {spec.discovery} prints"),
        ("nodes", number),
        ("rendezvous", rendezvous),
        ("token", "yes: only agents that have it can join"),
        ("python", spec.expected.interpreter),
        ("folder", spec.expected.cwd),
        ("variables", ", ".join(sorted(spec.environ))),
        ("disconnect", "the agents continue" if spec.detach else "the agents end"),
        ("signals", f"{endings} go to all hosts; a second one kills"),
        ("each host", shown_line(example).replace(options.job.run_id, run_id)),
    ]
    lines = [f"{name:14}{text}" for name, text in facts]
    return "\n".join(["holdfast would run this; nothing was started.", "", *lines, *given_lines(parsed)])
