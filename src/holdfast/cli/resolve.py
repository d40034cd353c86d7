"""A parsed command line to RunOptions: every rule by which torchrun turns its options into a job.

Reads the environment that it is given, the affinity mask and the file system; starts nothing. Rendezvous is in
cli/rendezvous.py, the worker's command in program.py, single values in values.py.
"""

from __future__ import annotations

import os
from signal import SIGCHLD, SIGCONT, SIGINT, SIGQUIT, SIGTERM, SIGWINCH
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli import rendezvous as meeting
from holdfast.cli import values
from holdfast.cli.devices import THIS_NODE, Count, Probes, count_cpus, count_processes
from holdfast.cli.program import preload, worker_command
from holdfast.protocol.errors import (
    BindingError,
    EnvironmentValueError,
    LogDirError,
    LogOptionsError,
    ProcessesError,
    UsageError,
)
from holdfast.protocol.options import Endpoint, LogOptions, RunOptions, Std, StreamChoice
from holdfast.protocol.policy import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.cli.grammar import Parsed
    from holdfast.protocol.policy import JobSpec

STOP_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
STOP_GRACE_S = 30.0
HEALTH_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
EVENT_HANDLERS = ("null", "console", "dynamic_rendezvous")
LOGS_SPECS_GROUP = "torchrun.logs_specs"


class Resolution(NamedTuple):
    """The options of the run, and the reasons that `--plan` shows."""

    options: RunOptions
    devices: Count
    cpus: int


def resolve(parsed: Parsed, environ: Mapping[str, str], probes: Probes = THIS_NODE) -> Resolution:
    """Resolve the line. Raises a fitting CallerError for the first thing that cannot be done."""
    given = parsed.values
    notices = list(parsed.notices)
    if parsed.cpus is not None:
        probes = probes._replace(cpus=min(parsed.cpus, count_cpus(probes).number))
    check_plain_values(parsed)
    patience = Limits(
        stop_grace_s=stop_grace_s(parsed, environ), drain_s=given.drain_timeout, hang_timeout_s=given.hang_timeout
    )
    place = meeting.resolve(parsed, environ, patience=patience, notices=notices)
    devices = node_size(parsed, environ, probes)
    cpus = count_cpus(probes).number
    check_virtual_local_rank(parsed, environ, devices.number)
    signals = signals_to_handle(parsed, notices)
    command = worker_command(parsed, environ, notices)
    threads = omp_num_threads(environ, devices.number, cpus)
    logs = log_options(parsed, environ, devices.number, notices)
    metrics, (health, health_if_free) = served(parsed, "metrics"), health_check(parsed, environ, notices)
    imports = preload(parsed, command, place.job, counted="OMP_NUM_THREADS" in environ or threads is not None)
    options = RunOptions(
        job=place.job,
        limits=place.limits,
        nproc=devices.number,
        command=command,
        logs=logs,
        endpoint=place.endpoint,
        standalone=place.standalone,
        is_host=place.is_host,
        token=place.token,
        etcd=place.etcd,
        third_party=place.third_party,
        role=given.role,
        node_rank=place.node_rank,
        local_addr=given.local_addr,
        signals=signals,
        signals_text=given.signals_to_handle,
        preempt_signal=preempt_signal(parsed),
        virtual_local_rank=given.virtual_local_rank,
        numa_binding=given.numa_binding,
        share_store=environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1",
        omp_num_threads=threads,
        preload=imports,
        standby=given.standby == "on" and bool(imports.modules) and may_restart(place.job),
        start_method=given.start_method,
        event_log_handler=given.event_log_handler,
        metrics=metrics,
        health=health,
        health_if_free=health_if_free,
        monitor_interval_s=given.monitor_interval,
        notices=tuple(notices),
    )
    return Resolution(options, devices, cpus)


def may_restart(job: JobSpec) -> bool:
    """Whether there can be a second generation."""
    return job.max_restarts > 0 or job.max_nodes > 1


def check_plain_values(parsed: Parsed) -> None:
    given = parsed.values
    if given.max_restarts < 0:
        raise parsed.error("max_restarts", UsageError, "must be 0 or more")
    if not 0 < given.monitor_interval < float("inf"):
        raise parsed.error("monitor_interval", UsageError, "must be a positive number of seconds")
    if not 0 < given.drain_timeout < float("inf"):
        raise parsed.error("drain_timeout", UsageError, "must be a positive number of seconds")
    if not 0 <= given.hang_timeout < float("inf"):
        raise parsed.error("hang_timeout", UsageError, "must be a number of seconds, 0 for never")
    if given.min_ranks < 1:
        raise parsed.error("min_ranks", UsageError, "must be 1 or more")
    if given.exclude_after < 0:
        raise parsed.error("exclude_after", UsageError, "must be 0 or more")
    if given.event_log_handler not in EVENT_HANDLERS:
        raise parsed.error("event_log_handler", UsageError, f"must be one of {', '.join(EVENT_HANDLERS)}")
    if given.logs_specs is not None and given.logs_specs != "default":
        raise parsed.error("logs_specs", UsageError, logs_specs_problem(given.logs_specs))


def logs_specs_problem(name: str) -> str:
    from importlib.metadata import entry_points

    installed = sorted({"default", *(entry.name for entry in entry_points(group=LOGS_SPECS_GROUP))})
    if name in installed:
        return "holdfast keeps its own logs and cannot use this class; leave it out, or use torchrun"
    return f"no such entry point in {LOGS_SPECS_GROUP}; installed: {', '.join(installed)}"


def node_size(parsed: Parsed, environ: Mapping[str, str], probes: Probes) -> Count:
    try:
        return count_processes(parsed.values.nproc_per_node, environ, probes)
    except ProcessesError as error:
        raise parsed.error("nproc_per_node", ProcessesError, str(error)) from None


def stop_grace_s(parsed: Parsed, environ: Mapping[str, str]) -> float:
    """--shutdown-timeout, else torchrun's own variable, else 30 s."""
    seconds = parsed.values.shutdown_timeout
    if seconds is None:
        text = environ.get(STOP_GRACE_VARIABLE)
        if text is None:
            return STOP_GRACE_S
        if not values.is_number(text.strip()):
            raise EnvironmentValueError(f"{STOP_GRACE_VARIABLE}={text}: not a whole number of seconds, 0 or more")
        return float(text)
    if seconds < 0:
        raise parsed.error("shutdown_timeout", UsageError, "must be 0 or more seconds")
    return float(seconds)


def served(parsed: Parsed, dest: str) -> Endpoint | None:
    """`[HOST:]PORT` of --metrics or --health."""
    text = getattr(parsed.values, dest)
    if text is None:
        return None
    try:
        return values.serving_place(text)
    except ValueError as error:
        raise parsed.error(dest, UsageError, str(error)) from None


def health_check(parsed: Parsed, environ: Mapping[str, str], notices: list[str]) -> tuple[Endpoint | None, bool]:
    """Where, and whether it was torchrun's variable that asked: that one never keeps a job from starting."""
    place, text = served(parsed, "health"), environ.get(HEALTH_VARIABLE)
    if place is not None or text is None:
        return place, False
    try:
        return values.serving_place(text), True
    except ValueError:
        notices.append(f"{HEALTH_VARIABLE}={text} is no port: no health check is served")
        return None, False


def signals_to_handle(parsed: Parsed, notices: list[str]) -> tuple[int, ...]:
    try:
        numbers, unknown = values.signal_numbers(parsed.values.signals_to_handle)
    except ValueError as error:
        raise parsed.error("signals_to_handle", UsageError, str(error)) from None
    notices.extend(f"{parsed.said('signals_to_handle')}: {name} is no signal and is left out" for name in unknown)
    return numbers


def preempt_signal(parsed: Parsed) -> int | None:
    """The signal's number; `USR1` and `SIGUSR1` are equal."""
    text = parsed.values.preempt_signal
    if text is None:
        return None
    name = text.strip().upper()
    try:
        numbers, _ = values.signal_numbers(name if name.startswith("SIG") else f"SIG{name}")
    except ValueError as error:
        raise parsed.error("preempt_signal", UsageError, str(error)) from None
    if len(numbers) != 1:
        raise parsed.error("preempt_signal", UsageError, f"{text!r} is no signal")
    if numbers[0] in (SIGTERM, SIGINT, SIGQUIT, SIGWINCH, SIGCHLD, SIGCONT):
        raise parsed.error(
            "preempt_signal", UsageError, f"{text!r} has a meaning of its own (SIGTERM is a notice already); take USR1"
        )
    return numbers[0]


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
    """None where torchrun leaves it alone: it is set already, or one worker has all CPUs."""
    if "OMP_NUM_THREADS" in environ or nproc == 1:
        return None
    return max(1, cpus // nproc)


def log_options(parsed: Parsed, environ: Mapping[str, str], nproc: int, notices: list[str]) -> LogOptions:
    given = parsed.values
    redirects, tee = (streams(parsed, dest, nproc, notices) for dest in ("redirects", "tee"))
    try:
        ranks = values.rank_list(given.local_ranks_filter)
    except ValueError as error:
        raise parsed.error("local_ranks_filter", LogOptionsError, str(error)) from None
    say_absent(parsed, "local_ranks_filter", ranks or frozenset(), nproc, notices)
    log_dir = log_folder(parsed, notices)
    duplicates = {
        Std.OUT: tuple(text for text in given.duplicate_stdout_filters if text),
        Std.ERR: tuple(text for text in given.duplicate_stderr_filters if text),
    }
    for stream, dest in ((Std.OUT, "duplicate_stdout_filters"), (Std.ERR, "duplicate_stderr_filters")):
        if not duplicates[stream]:
            continue
        name = "--" + dest.replace("_", "-")
        if log_dir is None:
            notices.append(f"{name} has no effect: with --log-dir {os.devnull} there are no files")
        elif not any(tee.for_rank(rank) & stream for rank in range(nproc)):
            notices.append(f"{name} has no effect: it applies to streams that are teed (--tee {stream.value})")
    if log_dir is None and any(redirects.for_rank(rank) for rank in range(nproc)):
        notices.append(f"{parsed.said('redirects')} has no effect: with --log-dir {os.devnull} there are no files")
    return LogOptions(
        log_dir=log_dir,
        redirects=redirects,
        tee=tee,
        local_ranks_filter=ranks,
        duplicate_stdout_filters=duplicates[Std.OUT],
        duplicate_stderr_filters=duplicates[Std.ERR],
        prefix_template=given.log_line_prefix_template or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or None,
        dedup=not given.no_dedup,
    )


def streams(parsed: Parsed, dest: str, nproc: int, notices: list[str]) -> StreamChoice:
    try:
        choice = values.stream_choice(getattr(parsed.values, dest))
    except ValueError as error:
        raise parsed.error(dest, LogOptionsError, str(error)) from None
    say_absent(parsed, dest, frozenset(choice.by_local_rank), nproc, notices)
    return choice


def say_absent(parsed: Parsed, dest: str, ranks: frozenset[int], nproc: int, notices: list[str]) -> None:
    absent = values.absent_ranks(ranks, nproc)
    if absent:
        named = ", ".join(map(str, absent))
        notices.append(f"{parsed.said(dest)}: this node has no local rank {named}, only 0 to {nproc - 1}")


def log_folder(parsed: Parsed, notices: list[str]) -> str | None:
    """The log folder, absolute; None when no files are wanted."""
    log_dir: str | None = parsed.values.log_dir
    if not log_dir:
        from holdfast.runtime.run_folder import TEMPORARY_NAME, default_log_dir

        folder = default_log_dir()
        if os.path.basename(folder).startswith(TEMPORARY_NAME):
            notices.append(f"neither the home nor the current folder can be written: logs go to {folder}")
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
        raise parsed.error("log_dir", LogDirError, f"{ancestor} cannot be written")
    return folder
