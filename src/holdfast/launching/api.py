"""`holdfast.launch`: converts parameters to a line of `holdfast run`, and the job's end to results or an exception.

Knows that line, the outcomes of jobs, cloudpickle, and the format of worker/call.py. The call and the answers are
pickled in memory files that only this job's processes inherit. agent_session.py runs the process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from types import ModuleType
from typing import Any, NamedTuple, Never, TypeVar

from holdfast.cli import grammar
from holdfast.cli.option_table import OPTIONS
from holdfast.cli.resolve import resolve
from holdfast.launching.agent_session import AgentReport, AgentSession
from holdfast.protocol.errors import (
    HoldfastError,
    InternalError,
    LaunchTimeoutError,
    MissingPackageError,
    PeerError,
    PicklingError,
    PlatformError,
    StoppedError,
    UsageError,
    WorkerError,
    WorkerFailedError,
)
from holdfast.protocol.outcome import Failure, Outcome, OutcomeKind, Verdict, job_exit_code
from holdfast.text import plural
from holdfast.worker import call
from holdfast.worker.call import ERROR, HEADER, NOTHING, TEXT_LENGTH, VALUE

PROTOCOL = 5
"""Pickle protocol of the call."""
R = TypeVar("R")

NOT_FOR_WORKERS = ("PYTHON_EXEC", "TORCHELASTIC_ERROR_FILE")
"""Another Python might not load the call; the error file belongs to a worker that calls launch, not to the job."""


def launch(
    fn: Callable[..., R],
    *args: Any,
    nproc: int | str = 1,
    nnodes: int | str | None = None,
    max_restarts: int = 0,
    rdzv_endpoint: str | None = None,
    rdzv_backend: str | None = None,
    rdzv_id: str | None = None,
    rdzv_conf: Mapping[str, object] | str | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    role: str | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    redirects: int | str | Mapping[int, int] | None = None,
    tee: int | str | Mapping[int, int] | None = None,
    local_ranks_filter: Iterable[int] | str | None = None,
    env: Mapping[str, str] | None = None,
    start_timeout: int | None = None,
    timeout: float | None = None,
    shutdown_timeout: int | None = None,
    numa_binding: str | None = None,
    token: str | None = None,
) -> dict[int, R]:
    """Run `fn(*args)` in fresh worker processes with torchrun's environment; return the results by rank.

    The function may be in a module or a notebook, a lambda or a closure: cloudpickle (extra `python`) copies it into
    memory that only the workers inherit. The workers get no thread, lock or CUDA context of the caller, and their
    changes do not affect the caller. For keyword arguments use functools.partial. In a job of several nodes, each node
    calls launch and gets the results of its own ranks.

    nproc: workers on this node: a number, "auto", "gpu" or "cpu"
    nnodes: number of nodes, or a range, "1:4"; 1 by default
    max_restarts: number of worker failures after which all workers are restarted
    rdzv_endpoint, rdzv_backend, rdzv_id, rdzv_conf: the rendezvous, as for `holdfast run`; with an endpoint the
        default backend is c10d; rdzv_conf may be a mapping
    node_rank, master_addr, master_port, role, log_dir, numa_binding: as for `holdfast run`
    redirects, tee, local_ranks_filter: the same; also a mapping of local rank to stream number, an iterable of ranks
    env: further environment variables of the workers
    start_timeout: whole seconds until enough nodes have joined, 600 by default
    timeout: seconds for the whole job; None: no limit
    shutdown_timeout: whole seconds from SIGTERM to SIGKILL when workers are stopped, 30 by default
    token: the job's secret; only agents that know it can join

    Raises WorkerFailedError, caused by the worker's own exception, when a worker failed and no restart was left;
    LaunchTimeoutError; PicklingError; MissingPackageError; StoppedError when a signal from outside ended the agent;
    PeerError and its subclasses for other nodes; CallerError and its subclasses for what `holdfast run` refuses. All
    are HoldfastErrors. Another exception in the caller (KeyboardInterrupt) stops the job and is then raised.
    """
    given = {name: value for name, value in locals().items() if name not in ("fn", "args", "env", "token", "timeout")}
    check(fn, timeout)
    return run(fn, args, command_line(given), environment(env or {}, token), timeout)


# --- parameters to a command line -------------------------------------------------------------------------------------


def check(fn: object, timeout: float | None) -> None:
    if not sys.platform.startswith("linux"):
        raise PlatformError(f"holdfast runs on Linux; this is {sys.platform}")
    if not callable(fn):
        raise UsageError(f"holdfast.launch runs functions; {fn!r} is not callable")
    if timeout is not None and not timeout > 0:
        raise UsageError(f"timeout={timeout}: must be above 0 seconds")


def command_line(given: Mapping[str, Any]) -> list[str]:
    """Options of `holdfast run` for launch's parameters of the same names, without those that are None."""
    options = {name.replace("_", "-"): value for name, value in given.items()}
    backend = options["rdzv-backend"] or ("c10d" if options["rdzv-endpoint"] is not None else None)
    start_timeout = options.pop("start-timeout")
    if str(options["nnodes"] or 1) in ("1", "1:1"):
        start_timeout = None  # no other node is waited for
    options |= {
        "nproc-per-node": options.pop("nproc"),
        "rdzv-backend": backend,
        "rdzv-conf": conf_text(options["rdzv-conf"], start_timeout, backend),
        "log-dir": None if options["log-dir"] is None else os.fspath(options["log-dir"]),
        "redirects": pairs_text(options["redirects"]),
        "tee": pairs_text(options["tee"]),
        "local-ranks-filter": ranks_text(options["local-ranks-filter"]),
    }
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


def conf_text(conf: Mapping[str, object] | str | None, start_timeout: int | None, backend: str | None) -> str | None:
    """The value of --rdzv-conf. The time-out has another key for the static backend, as for torchrun."""
    items = [f"{key}={value}" for key, value in conf.items()] if isinstance(conf, Mapping) else [conf] if conf else []
    if start_timeout is not None:
        items.append(f"{'timeout' if backend in (None, 'static') else 'join_timeout'}={start_timeout}")
    return ",".join(items) or None


def pairs_text(streams: int | str | Mapping[int, int] | None) -> str | None:
    """Streams as on the command line: `3`, or `0:1,1:3` by local rank."""
    if isinstance(streams, Mapping):
        return ",".join(f"{rank}:{int(stream)}" for rank, stream in streams.items())
    return None if streams is None else str(streams if isinstance(streams, str) else int(streams))


def ranks_text(ranks: Iterable[int] | str | None) -> str | None:
    return ranks if ranks is None or isinstance(ranks, str) else ",".join(map(str, ranks))


def environment(extra: Mapping[str, str], token: str | None) -> dict[str, str]:
    """The environment of the agent. Raises UsageError for names and values that no environment can contain."""
    for name, value in extra.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"env={{{name!r}: {value!r}}}: names and values of variables must be strings")
        if not name or "=" in name or "\0" in name + value:
            raise UsageError(f"env={{{name!r}: {value!r}}}: no environment can hold this")
    variables = {**os.environ, **extra}
    # The parameters of launch decide: variables that set options of `holdfast run` are not read.
    for name in (*NOT_FOR_WORKERS, *(name for option in OPTIONS for name in option.variables)):
        variables.pop(name, None)
    if token is not None:
        variables["HOLDFAST_TOKEN"] = token
    return variables


# --- the job ----------------------------------------------------------------------------------------------------------


def run(
    fn: Callable[..., R], args: tuple[Any, ...], argv: Sequence[str], variables: dict[str, str], timeout: float | None
) -> dict[int, R]:
    """Run the job. Returns the results of this node's ranks."""
    script = call.__file__
    # Resolved here as well as by the agent, so that errors are raised here with their own class.
    nproc = resolve(grammar.parse([*argv, "--", script], variables, OPTIONS), variables).options.nproc
    with ExitStack() as files:
        call_fd, *answer_fds = (os.memfd_create(f"holdfast-{index}", os.MFD_CLOEXEC) for index in range(nproc + 1))
        for fd in (call_fd, *answer_fds):
            files.callback(os.close, fd)
        write_call(call_fd, fn, args)
        line = [*argv, f"--nproc-per-node={nproc}", "--", script]
        with closing(AgentSession(line, variables, call_fd, answer_fds)) as session:
            try:
                session.serve(timeout)
            except LaunchTimeoutError:
                session.end(signal.SIGTERM)
                raise
            except BaseException:
                session.end(signal.SIGINT)
                raise
            report = session.report()

        if report.outcome is None or report.outcome.kind is not OutcomeKind.SUCCEEDED:
            fail(report, answer_fds)
        return dict(result(local_rank, read_answer(fd)) for local_rank, fd in enumerate(answer_fds))


def result(local_rank: int, answer: Answered | None) -> tuple[int, Any]:
    """Rank and value of an answer. Raises WorkerError for a worker that left by sys.exit(0) or os._exit(0)."""
    if answer is None or not answer.has_value:
        who = f"local rank {local_rank}" if answer is None else f"rank {answer.rank}"
        raise WorkerError(f"{who} ended with exit code 0 before the function had returned")
    return answer.rank, answer.value


# --- the end ----------------------------------------------------------------------------------------------------------


def fail(report: AgentReport, answer_fds: Sequence[int]) -> Never:
    """Raise the error that the agent reported."""
    outcome = report.outcome
    if outcome is None:
        raise error_of(report.code, report.message)
    if outcome.kind is OutcomeKind.SIGNALLED:
        raise with_exit_code(StoppedError(outcome.message), outcome)
    verdict = outcome.verdict
    if verdict is None:
        raise with_exit_code(error_of(outcome.code, outcome.message), outcome)
    if verdict.culprit is None:
        text = f"{verdict.cause}\n{verdict.advice}" if verdict.advice else verdict.cause
        raise with_exit_code(error_of(verdict.code, text), outcome)
    raise worker_failed(verdict, verdict.culprit, report.folder) from cause(verdict.culprit, answer_fds)


def error_of(code: str, message: str) -> HoldfastError:
    """An error of the class with this code. Codes of verdicts have no class: it is then a WorkerError, or a PeerError
    for HF3xx."""
    classes: list[type[HoldfastError]] = [HoldfastError]
    while classes:
        kind = classes.pop()
        if kind.code == code:
            return kind(message)
        classes.extend(kind.__subclasses__())
    return PeerError(message) if code.startswith("HF3") else WorkerError(message)


def with_exit_code(error: HoldfastError, outcome: Outcome) -> HoldfastError:
    error.exit_code = outcome.exit_code
    return error


def worker_failed(verdict: Verdict, culprit: Failure, folder: str) -> WorkerFailedError:
    ended = f"signal {-culprit.exit_code}" if culprit.exit_code < 0 else f"exit code {culprit.exit_code}"
    details = [f"rank {culprit.rank} on {culprit.host}, {ended}"]
    details += [f"after {plural(verdict.restarts, 'restart')}"] if verdict.restarts else []
    details += [f"log: {culprit.stderr_file}"] if culprit.stderr_file else []
    error = WorkerFailedError(
        f"{verdict.cause}\n{', '.join(details)}", exit_code=job_exit_code(verdict), rank=culprit.rank, host=culprit.host
    )
    error.verdict_code = verdict.code
    error.log_file = culprit.stderr_file
    error.run_folder = folder
    if verdict.advice:
        error.add_note(f"advice: {verdict.advice}")
    return error


def cause(culprit: Failure, answer_fds: Sequence[int]) -> BaseException | None:
    """The culprit's own exception if it ran on this node, else its traceback as text, if there is one.

    Rank and process id are compared: a worker of another node or of an earlier attempt is not the culprit.
    """
    for fd in answer_fds:
        answer = read_answer(fd)
        if answer is not None and answer.error is not None and (answer.rank, answer.pid) == (culprit.rank, culprit.pid):
            return answer.error
    return RemoteTracebackError(culprit.traceback) if culprit.traceback else None


# --- what is pickled --------------------------------------------------------------------------------------------------


class RemoteTracebackError(Exception):
    """The traceback of an exception in another process, as text: the cause of that exception here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text.rstrip()}\n"""'


class Answered(NamedTuple):
    """The answer of one worker. One with neither value nor error ended before the function had."""

    rank: int
    pid: int
    has_value: bool
    """Whether the function returned; its value may be None."""
    value: Any = None
    error: BaseException | None = None


def write_call(fd: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Pickle the call. Raises MissingPackageError without cloudpickle, PicklingError that names what cannot be
    pickled."""
    try:
        import cloudpickle
    except ImportError as error:
        raise MissingPackageError("holdfast.launch needs cloudpickle: pip install 'holdfast[python]'") from error
    with os.fdopen(os.dup(fd), "wb") as file, _module_by_value(function, cloudpickle):
        # The worker sets these before it unpickles the rest: modules must be found first.
        pickle.dump((sys.path, sys.argv), file, protocol=PROTOCOL)
        try:
            cloudpickle.dump((function, arguments), file, protocol=PROTOCOL)
        except Exception as error:
            culprit = _unpicklable(function, arguments, cloudpickle)
            raise PicklingError(f"{culprit} cannot be pickled: {type(error).__name__}: {error}") from error


def _unpicklable(function: Callable[..., Any], arguments: tuple[Any, ...], cloudpickle: ModuleType) -> str:
    for index, argument in enumerate(arguments):
        try:
            cloudpickle.dumps(argument, protocol=PROTOCOL)
        except Exception:  # noqa: BLE001 - any error of its __reduce__
            return f"argument {index} of the function ({type(argument).__qualname__})"
    return f"the function {getattr(function, '__qualname__', repr(function))} (or what it refers to)"


@contextlib.contextmanager
def _module_by_value(function: Callable[..., Any], cloudpickle: ModuleType) -> Iterator[None]:
    """Pickle the function's module by value if the workers could not import it from the same path."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__module__", None) or "__main__"
    module = sys.modules.get(name)
    if name == "__main__" or module is None or _can_be_imported(name):
        yield  # cloudpickle pickles __main__ by value anyway
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # another thread that launches from this module unregistered it
            cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(name: str) -> bool:
    """Whether a new process with the same path would find the module. A module in sys.modules proves nothing: it may
    have been loaded from a file that no path leads to."""
    path: Any = None
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        parent = ".".join(parts[:length])
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for finder in finders if (spec := finder.find_spec(parent, path))), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def read_answer(fd: int) -> Answered | None:
    """A worker's answer; None: it did not begin. Raises PicklingError for a value that cannot be unpickled."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            return None
        kind, rank, pid, length = HEADER.unpack(head)
        if kind == NOTHING:
            return Answered(rank, pid, has_value=False)
        if kind == VALUE:
            try:
                return Answered(rank, pid, has_value=True, value=pickle.load(file))
            except Exception as error:
                text = f"the result of rank {rank} cannot be unpickled: {type(error).__name__}: {error}"
                raise PicklingError(text) from error
        if kind == ERROR:
            return Answered(rank, pid, has_value=False, error=_read_error(file.read(length)))
    raise InternalError(f"a worker's answer has the unknown kind {kind!r}")


def _read_error(body: bytes) -> BaseException:
    """The exception, caused by its remote traceback; only the traceback if the exception cannot be unpickled."""
    (length,) = TEXT_LENGTH.unpack_from(body)
    text = body[TEXT_LENGTH.size : TEXT_LENGTH.size + length].decode()
    remote = RemoteTracebackError(text)
    try:
        error = pickle.loads(body[TEXT_LENGTH.size + length :])
    except Exception:  # noqa: BLE001 - the worker could not pickle it, or its constructor fails
        return remote
    if not isinstance(error, BaseException):
        return remote
    error.__cause__ = remote
    return error
