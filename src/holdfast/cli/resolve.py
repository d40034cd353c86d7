"""Converts a parsed command line to RunOptions, by torchrun's rules, and back to the line of another node.

Reads the environment that it is given, the affinity mask and the file system; starts nothing. The rules of the
rendezvous are in rendezvous.py, those of the worker's command in program.py. The functions for single values raise
ValueError: their caller knows the option.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from signal import SIGCHLD, SIGCONT, SIGINT, SIGQUIT, SIGTERM, SIGWINCH
from typing import TYPE_CHECKING, NamedTuple

from holdfast import compile_caches
from holdfast.cli import rendezvous
from holdfast.cli.devices import THIS_NODE, Count, Probes, count_cpus, count_processes, has_gpus, has_infiniband
from holdfast.cli.grammar import ABOUT_US
from holdfast.cli.option_table import EVENT_HANDLERS, FLAG, HOSTS, LIST, OPTIONS, TABLES, Option, flag_of
from holdfast.cli.program import preload, worker_command
from holdfast.protocol.errors import (
    BindingError,
    CacheDirError,
    EnvironmentValueError,
    LogDirError,
    LogOptionsError,
    MissingPackageError,
    ProcessesError,
    UsageError,
)
from holdfast.protocol.options import Endpoint, LogOptions, RunOptions, Std
from holdfast.protocol.policy import Limits
from holdfast.protocol.ranks_text import ranks_of
from holdfast.protocol.time_outs import TimeOut, inversions, ladder, sentence
from holdfast.rendezvous.conf import PORT_MAX
from holdfast.text import is_loopback, plural, without_passwords

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.cli.grammar import Parsed
    from holdfast.protocol.policy import JobSpec


LOOPBACK = "127.0.0.1"
UNCATCHABLE = ("SIGKILL", "SIGSTOP")
STREAMS = ("0", "1", "2", "3")
ONLY_HERE = frozenset({*ABOUT_US, "plan", "json", "config", "no_config"})
"""Options that are not passed on to other nodes."""
STARTED_BY_OTHERS = ("SLURM_STEP_ID", "KUBERNETES_SERVICE_HOST")
"""Variables that are set when no person starts the other nodes."""
STOP_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
STOP_GRACE_S = 30.0
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
HEALTH_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
LOGS_SPECS_GROUP = "torchrun.logs_specs"


class Resolution(NamedTuple):
    """The options of the run, and the reasons that `--plan` shows."""

    options: RunOptions
    devices: Count
    cpus: int
    time_outs: tuple[TimeOut, ...]


def resolve(parsed: Parsed, environ: Mapping[str, str], probes: Probes = THIS_NODE) -> Resolution:
    """Resolve the line. Raises a CallerError for the first invalid option."""
    given = parsed.values
    notices = list(parsed.notices)
    if parsed.cpus is not None:
        probes = probes._replace(cpus=min(parsed.cpus, count_cpus(probes).number))
    check_plain_values(parsed)
    patience = Limits(stop_grace_s=stop_grace_s(parsed, environ), **parsed.fields("limits"))
    rdzv = rendezvous.resolve(parsed, environ, patience=patience, notices=notices)
    check_packages(parsed, rdzv.job.backend)
    devices = node_size(parsed, environ, probes)
    time_outs = check_time_outs(rdzv, environ, notices, gpus=devices.kind == "gpu" or has_gpus(probes))
    cpus = count_cpus(probes).number
    report_crowd(parsed, devices.number, cpus, notices)
    check_virtual_local_rank(parsed, environ, devices.number)
    signals = signals_to_handle(parsed, notices)
    command = worker_command(parsed, environ, notices)
    threads = omp_num_threads(environ, devices.number, cpus)
    logs = log_options(parsed, environ, devices.number, notices)
    metrics, (health, health_if_free) = served(parsed, "metrics"), health_check(parsed, environ, notices)
    counted = "OMP_NUM_THREADS" in environ or threads is not None
    imports = preload(parsed, command, rdzv.job, counted=counted, installed=probes.installed or is_installed)
    options = RunOptions(
        **rdzv._asdict(),
        **parsed.fields(),
        nproc=devices.number,
        command=command,
        logs=logs,
        switches=parsed.switches,
        signals=signals,
        preempt_signal=preempt_signal(parsed),
        share_store=environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1",
        omp_num_threads=threads,
        compile_threads=compile_threads(environ, devices.number, cpus),
        cache_dir=cache_folder(parsed, environ),
        cache_from=shared_cache_folder(parsed, environ),
        preload=imports,
        standby=given.standby == "on" and bool(imports.modules) and may_restart(rdzv.job),
        dashboard=served(parsed, "dashboard"),
        notify=targets(parsed),
        otel=span_receiver(parsed),
        metrics=metrics,
        health=health,
        health_command=health_command(parsed),
        preflight=preflight_level(given.preflight, devices, probes),
        watch_devices=(devices.kind != "cpu" and has_gpus(probes)) or has_infiniband(probes),
        watch_cards=rdzv.job.max_nodes > 1,
        health_if_free=health_if_free,
        notices=tuple(notices),
    )
    return Resolution(options, devices, cpus, time_outs)


def may_restart(job: JobSpec) -> bool:
    """Whether there can be a second generation."""
    return job.max_restarts > 0 or job.max_nodes > 1


PACKAGES = {
    "dashboard": ("dashboard", "starlette", "uvicorn"),
    "metrics": ("metrics", "prometheus_client"),
    "otel": ("otel", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
"""Packages that options need: the extra of holdfast that installs them, and their modules."""


def check_packages(parsed: Parsed, backend: str) -> None:
    """Raise MissingPackageError before anything starts."""
    wanted = [
        (parsed.as_written(dest), PACKAGES[dest]) for dest in PACKAGES if getattr(parsed.values, dest) is not None
    ]
    if backend == "etcd":
        wanted.append(("--rdzv-backend etcd", ("etcd", "etcd3gw")))
    for flag, (extra, *modules) in wanted:
        missing = [name for name in modules if not is_installed(name)]
        if missing:
            raise MissingPackageError(f"{flag} needs {' and '.join(missing)}: pip install 'holdfast[{extra}]'")


def is_installed(module: str) -> bool:
    """Whether this Python would find a module of this name."""
    from importlib.util import find_spec

    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


WORKERS_PER_CPU_MAX = 8
"""Number of workers for each CPU from which a notice says that it may be a mistake. They are started nevertheless."""


def report_crowd(parsed: Parsed, nproc: int, cpus: int, notices: list[str]) -> None:
    if nproc > WORKERS_PER_CPU_MAX * cpus:
        text = f"{nproc:,} workers share {plural(cpus, 'CPU')}; --nproc-per-node auto starts one worker per GPU or CPU"
        notices.append(f"{parsed.as_written('nproc_per_node')}: {text}")


def check_plain_values(parsed: Parsed) -> None:
    given = parsed.values
    for option in OPTIONS:
        number = getattr(given, option.dest) if option.range else None
        if number is not None and not option.accepts(number):
            raise parsed.error(option.dest, UsageError, f"must be {option.range}")
    if given.event_log_handler not in EVENT_HANDLERS:
        raise parsed.error("event_log_handler", UsageError, f"must be one of {', '.join(EVENT_HANDLERS)}")
    if given.logs_specs is not None and given.logs_specs != "default":
        raise parsed.error("logs_specs", UsageError, logs_specs_problem(given.logs_specs))


def logs_specs_problem(name: str) -> str:
    from importlib.metadata import entry_points

    installed = sorted({"default", *(entry.name for entry in entry_points(group=LOGS_SPECS_GROUP))})
    if name in installed:
        return "holdfast writes its own logs and cannot use this class; leave the option out, or use torchrun"
    return f"no such entry point in {LOGS_SPECS_GROUP}; installed: {', '.join(installed)}"


def node_size(parsed: Parsed, environ: Mapping[str, str], probes: Probes = THIS_NODE) -> Count:
    try:
        return count_processes(parsed.values.nproc_per_node, environ, probes)
    except ProcessesError as error:
        raise parsed.error("nproc_per_node", ProcessesError, str(error)) from None


def check_time_outs(
    rdzv: rendezvous.RendezvousOptions, environ: Mapping[str, str], notices: list[str], *, gpus: bool
) -> tuple[TimeOut, ...]:
    """The time-outs of the job. Those in the wrong order are named in a notice each."""
    from holdfast.supervisor.worker_command import nccl_is_nccl2  # most starts do not need it

    nccl2 = gpus and nccl_is_nccl2(sys.path, environ)
    found = ladder(rdzv.limits, environ, gpus=gpus, nodes=rdzv.job.max_nodes, nccl2=nccl2)
    notices.extend(sentence(each) for each in inversions(found))
    return found


def stop_grace_s(parsed: Parsed, environ: Mapping[str, str]) -> float:
    """Time from SIGTERM to SIGKILL: --shutdown-timeout, else torchrun's own variable, else 30 s."""
    seconds = parsed.values.shutdown_timeout
    if seconds is None:
        text = environ.get(STOP_GRACE_VARIABLE)
        if text is None:
            return STOP_GRACE_S
        if not is_number(text.strip()):
            raise EnvironmentValueError(f"{STOP_GRACE_VARIABLE}={text}: not a whole number of seconds, 0 or more")
        return float(text)
    return float(seconds)


def served(parsed: Parsed, dest: str) -> Endpoint | None:
    """The address of --dashboard, --metrics or --health, given as `[HOST:]PORT`; None: not given."""
    return None if getattr(parsed.values, dest) is None else parsed.converted(dest, serving_place)


def targets(parsed: Parsed) -> tuple[str, ...]:
    """The URLs and commands of --notify, one a line."""
    found = tuple(line.strip() for line in parsed.values.notify.splitlines() if line.strip())
    if not found:
        return ()
    from shutil import which  # it loads the compression modules

    for each in found:
        try:
            words = shlex.split(each)
        except ValueError as error:
            raise parsed.error("notify", UsageError, f"{each!r}: {error}") from None
        if each.startswith(("http://", "https://")):
            check_url(parsed, "notify", each)
        elif which(words[0]) is None:
            raise parsed.error("notify", UsageError, f"{words[0]!r} is neither a URL nor a program on this node")
    return found


def check_url(parsed: Parsed, dest: str, url: str) -> None:
    """Raise UsageError for a URL that has no host, or a port that is none: nobody would get what is sent there."""
    from urllib.parse import urlsplit  # few jobs need it

    try:
        wrong = "" if urlsplit(url).hostname and urlsplit(url).port != 0 else "it has no host, or no port"
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise parsed.error(dest, UsageError, f"{url!r} is no URL: {wrong}")


def span_receiver(parsed: Parsed) -> str | None:
    """The URL of --otel."""
    url: str | None = parsed.values.otel
    if url is None:
        return None
    if not url.startswith(("http://", "https://")):
        raise parsed.error("otel", UsageError, "must be the URL of an OTLP/HTTP receiver, as in http://collector:4318")
    check_url(parsed, "otel", url)
    return url


def preflight_level(given: str, devices: Count, probes: Probes) -> str:
    """The checks before the first generation: of themselves only where workers use GPUs."""
    if given != "auto":
        return given
    return "quick" if devices.kind == "gpu" or (devices.kind != "cpu" and has_gpus(probes)) else "off"


def health_command(parsed: Parsed) -> str:
    """The command of --health-command; empty: there is none."""
    command: str = parsed.values.health_command.strip()
    if not command:
        return ""
    from shutil import which  # it loads the compression modules

    try:
        words = shlex.split(command)
    except ValueError as error:
        raise parsed.error("health_command", UsageError, str(error)) from None
    if not words or which(words[0]) is None:
        raise parsed.error("health_command", UsageError, "there is no such program on this node")
    return command


def health_check(parsed: Parsed, environ: Mapping[str, str], notices: list[str]) -> tuple[Endpoint | None, bool]:
    """The address of the health check, and whether torchrun's variable requested it: then it is only served if the port
    is free, and an error in the variable does not prevent the start."""
    endpoint, text = served(parsed, "health"), environ.get(HEALTH_VARIABLE)
    if endpoint is not None or text is None:
        return endpoint, False
    try:
        return serving_place(text), True
    except ValueError:
        notices.append(f"{HEALTH_VARIABLE}={text} is not a port: no health check is served")
        return None, False


def signals_to_handle(parsed: Parsed, notices: list[str]) -> tuple[int, ...]:
    numbers, unknown = parsed.converted("signals_to_handle", signal_numbers)
    notices.extend(
        f"{parsed.as_written('signals_to_handle')}: {name} is not a signal and is ignored" for name in unknown
    )
    return numbers


def preempt_signal(parsed: Parsed) -> int | None:
    return None if parsed.values.preempt_signal is None else parsed.converted("preempt_signal", preempt_number)


def check_virtual_local_rank(parsed: Parsed, environ: Mapping[str, str], nproc: int) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        listed = environ.get(variable)
        if not parsed.values.virtual_local_rank or listed is None:
            continue
        length = len(listed.split(","))
        if length < nproc:
            problem = f"{nproc} workers, but {variable}={listed} names {length}"
            raise parsed.error("virtual_local_rank", BindingError, problem)


def omp_num_threads(environ: Mapping[str, str], nproc: int, cpus: int) -> int | None:
    """The value of OMP_NUM_THREADS for the workers; None, as with torchrun: it is set already, or one worker has all
    CPUs."""
    if "OMP_NUM_THREADS" in environ or nproc == 1:
        return None
    return max(1, cpus // nproc)


COMPILE_THREADS_MAX = 32
"""Number of processes that torch.compile starts at most by itself."""


def compile_threads(environ: Mapping[str, str], nproc: int, cpus: int) -> int | None:
    """The number of processes for each worker's torch.compile; None: torch's own number is right, or it is set already.

    torch.compile of each worker starts a process for each CPU of the node: 8 workers on 32 CPUs start 256.
    """
    if COMPILE_THREADS in environ or nproc == 1:
        return None
    return min(COMPILE_THREADS_MAX, max(1, cpus // nproc))


def cache_folder(parsed: Parsed, environ: Mapping[str, str]) -> str | None:
    """The absolute path of the folder for compiled kernels; None: --cache-dir off."""
    try:
        return compile_caches.folder_of(parsed.values.cache_dir, environ)
    except OSError:
        raise parsed.error("cache_dir", CacheDirError, "the current folder was deleted") from None


def shared_cache_folder(parsed: Parsed, environ: Mapping[str, str]) -> str | None:
    """The absolute path of the folder for compiled kernels that nodes share; None: --cache-from off."""
    given: str = parsed.values.cache_from
    if given in ("", "off"):
        return None
    own = cache_folder(parsed, environ)
    if own is None:
        raise parsed.error("cache_from", UsageError, "needs --cache-dir: kernels are copied into that folder")
    try:
        shared = os.path.abspath(os.path.expanduser(given))
    except OSError:
        raise parsed.error("cache_from", CacheDirError, "the current folder was deleted") from None
    if os.path.commonpath((own, shared)) in (own, shared):
        raise parsed.error("cache_from", UsageError, f"must be apart from --cache-dir {own}")
    return shared


def log_options(parsed: Parsed, environ: Mapping[str, str], nproc: int, notices: list[str]) -> LogOptions:
    given = parsed.values
    redirects, tee = (streams(parsed, dest, nproc, notices) for dest in ("redirects", "tee"))
    ranks = parsed.converted("local_ranks_filter", rank_list, LogOptionsError)
    report_absent(parsed, "local_ranks_filter", ranks or frozenset(), nproc, notices)
    job_ranks = frozenset(ranks_of(list(filter(None, [given.ranks_filter])), flag_of("ranks_filter"))) or None
    log_dir = log_folder(parsed, notices)
    if job_ranks is not None and log_dir is None:
        text = "the agent has to read the output to know whose it is: not with --log-dir /dev/null"
        raise parsed.error("ranks_filter", LogOptionsError, text)
    duplicates = {
        Std.OUT: tuple(text for text in given.duplicate_stdout_filters if text),
        Std.ERR: tuple(text for text in given.duplicate_stderr_filters if text),
    }
    for stream, dest in ((Std.OUT, "duplicate_stdout_filters"), (Std.ERR, "duplicate_stderr_filters")):
        if not duplicates[stream]:
            continue
        name = flag_of(dest)
        if log_dir is None:
            notices.append(f"{name} has no effect: with --log-dir {os.devnull} there are no files")
        elif not any(tee.get(rank, Std.NONE) & stream for rank in range(nproc)):
            notices.append(f"{name} has no effect: it applies to streams that are teed (--tee {stream.value})")
    if log_dir is None and any(redirects.get(rank) for rank in range(nproc)):
        notices.append(
            f"{parsed.as_written('redirects')} has no effect: with --log-dir {os.devnull} there are no files"
        )
    return LogOptions(
        log_dir=log_dir,
        log_dir_named=bool(given.log_dir),
        redirects=redirects,
        tee=tee,
        local_ranks_filter=ranks,
        ranks_filter=job_ranks,
        duplicate_stdout_filters=duplicates[Std.OUT],
        duplicate_stderr_filters=duplicates[Std.ERR],
        prefix_template=given.log_line_prefix_template or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or None,
        dedup=not given.no_dedup,
    )


def streams(parsed: Parsed, dest: str, nproc: int, notices: list[str]) -> dict[int, Std]:
    by_rank = parsed.converted(dest, lambda text: streams_by_rank(text, nproc), LogOptionsError)
    report_absent(parsed, dest, frozenset(by_rank), nproc, notices)
    return by_rank


def report_absent(parsed: Parsed, dest: str, ranks: frozenset[int], nproc: int, notices: list[str]) -> None:
    absent = sorted(rank for rank in ranks if not 0 <= rank < nproc)
    if absent:
        named = ", ".join(map(str, absent))
        notices.append(f"{parsed.as_written(dest)}: this node has no local rank {named}, only 0 to {nproc - 1}")


def log_folder(parsed: Parsed, notices: list[str]) -> str | None:
    """The absolute path of the log folder; None: no log files."""
    log_dir: str | None = parsed.values.log_dir
    if not log_dir:
        from holdfast.run_folder import TEMPORARY_NAME, default_log_dir

        folder = default_log_dir()
        if os.path.basename(folder).startswith(TEMPORARY_NAME):
            notices.append(f"no folder for logs in the home folder or the current folder: logs go to {folder}")
        return folder
    if log_dir == os.devnull:
        return None
    try:
        folder = os.path.abspath(log_dir)
    except OSError:
        raise parsed.error("log_dir", LogDirError, "the current folder was deleted") from None
    ancestor = folder
    while not os.path.lexists(ancestor):
        ancestor = os.path.dirname(ancestor)
    if not os.path.isdir(ancestor):
        raise parsed.error("log_dir", LogDirError, f"{ancestor} is a file, not a folder")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise parsed.error("log_dir", LogDirError, f"{ancestor} is not writable")
    return folder


# --- texts of single options to values, and back ----------------------------------------------------------------------


def streams_by_rank(text: str, nproc: int) -> dict[int, Std]:
    """Read the value of -r and -t: one digit for all `nproc` local ranks, or `RANK:DIGIT,...`.

    >>> streams_by_rank("0:3,12:1", 13)
    {0: <Std.ALL: 3>, 12: <Std.OUT: 1>}
    """
    if text in STREAMS:
        return dict.fromkeys(range(nproc), Std(int(text)))
    by_rank: dict[int, Std] = {}
    for item in text.split(","):
        rank, _, stream = item.partition(":")
        if not is_number(rank) or stream not in STREAMS:
            raise ValueError("must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or RANK:N,RANK:N")
        by_rank[int(rank)] = Std(int(stream))
    return by_rank


def is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def rank_list(text: str) -> frozenset[int] | None:
    """The ranks in `0,1`; None (all ranks) for an empty text.

    >>> sorted(rank_list("2,0"))
    [0, 2]
    """
    if not text:
        return None
    try:
        return frozenset(int(item) for item in text.split(","))
    except ValueError:
        raise ValueError("must be local ranks separated by commas, as in 0,1,2") from None


def serving_place(text: str) -> Endpoint:
    """The address in `[HOST:]PORT`: the loopback interface without a host, any free port for port 0.

    >>> str(serving_place("9400")), str(serving_place("0.0.0.0:9400")), str(serving_place("[::1]:9400"))
    ('127.0.0.1:9400', '0.0.0.0:9400', '[::1]:9400')
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        host = LOOPBACK
    elif host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("write an IPv6 address in brackets: [address]:port")
    if not is_number(port) or int(port) > PORT_MAX or not host:
        raise ValueError(f"write PORT or HOST:PORT; a port is a number from 0 to {PORT_MAX}")
    return Endpoint(host=host, port=int(port))


def signal_numbers(text: str) -> tuple[tuple[int, ...], list[str]]:
    """The signals in a comma-separated list, in order, and the unknown names.

    >>> signal_numbers("SIGTERM,SIGFOO")
    ((15,), ['SIGFOO'])
    """
    numbers: list[int] = []
    unknown: list[str] = []
    for name in (item.strip() for item in text.split(",")):
        if name in UNCATCHABLE:
            raise ValueError(f"{name} cannot be handled by any process")
        if name in signal.Signals.__members__:
            numbers.append(int(signal.Signals[name]))
        elif name:
            unknown.append(name)
    return tuple(dict.fromkeys(numbers)), unknown


def preempt_number(text: str) -> int:
    """The number of the signal of --preempt-signal; `USR1` means `SIGUSR1`."""
    name = text.strip().upper()
    numbers, _ = signal_numbers(name if name.startswith("SIG") else f"SIG{name}")
    if len(numbers) != 1:
        raise ValueError(f"{text!r} is not a signal")
    if numbers[0] in (SIGTERM, SIGINT, SIGQUIT, SIGWINCH, SIGCHLD, SIGCONT):
        raise ValueError(f"{text!r} already has a meaning (SIGTERM announces a preemption too); use USR1")
    return numbers[0]


def line_of_other_agent(parsed: Parsed, command: str, replaced: Mapping[str, str | None]) -> list[str]:
    """The line of another agent: all given options and then the `replaced` ones (None: without this option)."""
    words = [command]
    for option in TABLES[command]:
        if option.dest in replaced or option.group == HOSTS or option.dest in ONLY_HERE:
            continue
        if parsed.given(option.dest):
            words += words_of(option, getattr(parsed.values, option.dest))
    for dest, text in replaced.items():
        name = flag_of(dest)
        if text is not None:
            words.append(f"{name}={text}" if text else name)
    return [*words, "--", parsed.values.training_script, *parsed.values.training_script_args]


def words_of(option: Option, value: object) -> list[str]:
    if option.kind == FLAG:
        return [option.name] if value else []
    if option.kind == LIST:
        assert isinstance(value, (list, tuple))
        return [f"{option.name}=" + ",".join(str(item).replace(",", ",,") for item in value)]
    return [] if value is None else [f"{option.name}={value}"]


def how_others_join(parsed: Parsed, command: str, options: RunOptions, environ: Mapping[str, str]) -> str:
    """The instruction for the other nodes, in one line; empty: there are none, or something else starts their
    agents."""
    job, endpoint, own = options.job, options.endpoint, socket.gethostname()
    if options.standalone or job.max_nodes == 1 or any(name in environ for name in STARTED_BY_OTHERS):
        return ""
    line = line_of_others(parsed, command, options)
    if options.is_elected or not is_loopback(endpoint.host):
        return f"on each other node: {line}"
    is_static = job.fixed_ranks and not parsed.given("rdzv_endpoint")
    reachable = f"--master-addr {own}" if is_static else f"--rdzv-endpoint {own}:{endpoint.port or 'PORT'}"
    return (
        f"only this machine can reach {endpoint}. In another terminal here: {line}. "
        f"For nodes on other machines, start all nodes, this one too, with {reachable}"
    )


def line_of_others(parsed: Parsed, command: str, options: RunOptions) -> str:
    """The command line of each other node, for the console: it shows no password."""
    job = options.job
    replaced: dict[str, str | None] = {"node_rank": None, "local_addr": None}
    if job.fixed_ranks:
        replaced["node_rank"] = str(1 - (options.node_rank or 0)) if job.max_nodes == 2 else "RANK"
    words = line_of_other_agent(parsed, command, replaced)
    if not parsed.values.training_script.startswith("-"):
        words.remove("--")
    return shown_line(words)


def shown_line(words: Sequence[str]) -> str:
    """A command line for people: the options of the rendezvous may have passwords."""
    return shlex.join(["holdfast", *(without_passwords(each) if each.startswith("--rdzv") else each for each in words)])
