"""Turns a process that was forked from the fork server into the worker that exec would have made.

Every difference that a program could see is removed here; tests compare both kinds of worker. Loaded by the bootstrap
beside fork_server.py. Standard library only and nothing of holdfast.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import os
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FD_MIN = 500
"""Smallest number of our descriptors: a worker's own get the numbers that they would get after exec."""
OUTPUT_BYTES_MAX = 1_000_000
"""Length up to which each worker repeats the output of the imports."""

STANDBY_NAME = b"hf-standby"

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 1, 15, 35, 14


class Request:
    """A request for a process. Owns its descriptors."""

    def __init__(self, message: dict[str, Any], answer: int) -> None:
        self.supervisor: int = message["supervisor"]
        """Process id of the supervisor, which becomes the process' parent."""
        self.answer = answer
        """Descriptor of the socket on which the process answers."""

    @property
    def descriptors(self) -> list[int]:
        return [self.answer]

    def refuse(self, why: str) -> None:
        """Answer that no process is forked: the supervisor then starts a worker by exec."""
        try:
            os.write(self.answer, f"no {why}".encode(errors="backslashreplace"))
        except OSError:
            return  # the supervisor has closed the socket

    def close(self) -> None:
        for fd in self.descriptors:
            os.close(fd)


class WorkerRequest(Request):
    """A request for a worker."""

    def __init__(self, message: dict[str, Any], fds: list[int]) -> None:
        answer, *given = fds
        super().__init__(message, answer)
        self.argv: list[str] = message["argv"]
        self.env_set: dict[str, str] = message["env_set"]
        self.env_unset: list[str] = message["env_unset"]
        self.cwd: str | None = message["cwd"]
        self.cpus: list[int] | None = message["cpus"]
        self.fds: dict[int, int] = dict(zip(message["fds"], given, strict=True))
        """The number in the worker -> the descriptor here."""

    @property
    def descriptors(self) -> list[int]:
        return [self.answer, *self.fds.values()]


class StandbyRequest(Request):
    """A request for a standby: a process that learns later which worker it is to become."""


class NextRequest(Request):
    """A request for the next fork server, which imports these modules too."""

    def __init__(self, message: dict[str, Any], answer: int) -> None:
        super().__init__(message, answer)
        self.modules: list[str] = message["next"]


def read_request(message: dict[str, Any], fds: list[int]) -> Request:
    """The request in a message of the supervisor."""
    if "park" in message:
        return StandbyRequest(message, *fds)
    if "next" in message:
        return NextRequest(message, *fds)
    return WorkerRequest(message, fds)


def park(answer: int, intermediate: int, supervisor: int) -> socket.socket:
    """Become a standby of the supervisor. Returns the socket on which the request for the worker will arrive."""
    set_name(STANDBY_NAME)
    sock = socket.socket(fileno=answer)
    enlist(sock, intermediate, supervisor)
    return sock


def enlist(answer: socket.socket, intermediate: int, supervisor: int) -> None:
    """Become the supervisor's child, and report our pid to it."""
    become_child_of(supervisor, intermediate)
    answer.sendall(b"pid %d" % os.getpid())


class ForkedWorker:
    """Turns a copy of the fork server into the worker that exec would have made."""

    def __init__(
        self,
        request: WorkerRequest,
        given: dict[str, str],
        environment: dict[str, str],
        foreign: list[int],
        program_at: int,
        comm: bytes,
    ) -> None:
        """`given` is the environment that exec would pass, `environment` the same after the imports. `foreign` are
        descriptors of other requests, `program_at` is the index of the program in the interpreter's arguments, and
        `comm` the name that the process had before it became the fork server."""
        self._request = request
        self._given = given
        self._environment = environment
        self._foreign = foreign
        self._program_at = program_at
        self._comm = comm

    def begin(self, intermediate: int) -> None:
        """Become the worker. Returns when the supervisor has sent `go`; otherwise the process ends."""
        request = self._request
        os.setsid()  # a worker leads its session: one signal reaches all that it starts
        answer = self._place_descriptors()
        if request.cpus:
            os.sched_setaffinity(0, request.cpus)
        if request.cwd is not None:
            os.chdir(request.cwd)
        put_environment(self._environment)
        sys.orig_argv = list(request.argv)
        sys.argv = list(request.argv[self._program_at :])
        set_name(self._comm)
        show_as(request.argv, self._given)
        renew_modules()
        enlist(answer, intermediate, request.supervisor)
        # A signal may have ended this worker before it was there (test_a_signal_ends_a_worker_that_is_not_there_yet).
        if answer.recv(16) != b"go":
            os._exit(1)
        answer.close()

    def _place_descriptors(self) -> socket.socket:
        """Put the worker's descriptors at their numbers, and close all others of the fork server."""
        printed = [printed_to(fd) for fd in (1, 2)]
        request = self._request
        for fd in self._foreign:
            os.close(fd)
        # First all to high numbers: one may have the number at which another belongs.
        answer = fcntl.fcntl(request.answer, fcntl.F_DUPFD_CLOEXEC, FD_MIN)
        high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FD_MIN) for number, fd in request.fds.items()}
        request.close()
        request.answer = answer
        for number, fd in high.items():
            os.dup2(fd, number, inheritable=True)
            os.close(fd)
        renew_streams()
        # By exec each worker would import, and print this itself
        # (test_what_imports_print_and_set_reaches_every_worker).
        for fd, text in zip((1, 2), printed, strict=True):
            write_all(fd, text)
        return socket.socket(fileno=answer)


def printed_to(fd: int) -> bytes:
    """The output of the imports: the content of a memory file of the fork server."""
    try:
        return os.pread(fd, min(os.fstat(fd).st_size, OUTPUT_BYTES_MAX), 0)
    except OSError:
        return b""


def copy_output() -> None:
    """Give this fork server its own files for the output of imports, which begin with the output so far."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        copy = os.memfd_create(name)
        write_all(copy, printed_to(fd))
        os.dup2(copy, fd, inheritable=True)
        os.close(copy)


def write_all(fd: int, text: bytes) -> None:
    while text:
        text = text[os.write(fd, text) :]


def renew_streams() -> None:
    """Make new sys.stdin, sys.stdout and sys.stderr as the interpreter does, in place: modules may hold references."""
    for fd, stream in enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__)):
        if stream is not None:
            renew_stream(fd, stream)


def renew_stream(fd: int, stream: Any) -> None:
    """Make one stream new, with the settings that a start by exec would give it: they depend on what is at `fd`."""
    encoding, errors, buffer, unbuffered = stream.encoding, stream.errors, stream.buffer, stream.write_through
    # Not the old one: it remembers whether it could seek, also over __init__. The fork server's output is a memory
    # file, which can, and a worker's may be a terminal or a pipe, which cannot: the stream's __init__ would raise then.
    raw: Any = io.FileIO(fd, "wb" if fd else "rb", closefd=False)
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[fd]
    if hasattr(buffer, "raw"):
        buffer.__init__(raw, raw._blksize)
    else:  # as with `python -u`
        buffer = raw
    lines = not unbuffered and (raw.isatty() or fd == 2)
    stream.__init__(buffer, encoding, errors, newline="\n", line_buffering=lines, write_through=unbuffered)
    stream.mode = "w" if fd else "r"


def put_environment(environment: dict[str, str]) -> None:
    """Set os.environ, the C library's environment and that of children, in the order that exec would give."""
    os.environ.clear()
    os.environ.update(environment)


def renew_modules() -> None:
    """Renew what modules made once at their import: random states, secrets, thread ids and times."""
    modules = sys.modules
    if "numpy.random" in modules:
        modules["numpy.random"].seed()  # `random` reseeds itself after a fork
    if "torch" in modules:
        modules["torch"].default_generator.seed()  # as at its import; CUDA's generators begin with a constant
    if "multiprocessing.process" in modules:
        process: Any = modules["multiprocessing.process"].current_process()
        process.authkey = os.urandom(32)
    if "threading" in modules:
        modules["threading"].main_thread()._set_native_id()
    if "logging" in modules:
        now = time.time_ns() if sys.version_info >= (3, 13) else time.time()
        modules["logging"]._startTime = now  # type: ignore[attr-defined]


def become_child_of(supervisor: int, intermediate: int) -> None:
    """Wait until we have become a child of the supervisor, then end with it.

    The supervisor is a subreaper: it becomes the parent when the intermediate process has ended.
    """
    if os.getppid() == intermediate:
        try:
            ended = os.pidfd_open(intermediate)
        except ProcessLookupError:
            pass
        else:
            waiting = select.poll()
            waiting.register(ended, select.POLLIN)
            waiting.poll()
            os.close(ended)
    prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != supervisor:
        os._exit(1)  # the supervisor died before the call above, so no signal would ever kill this process


# --- the system -------------------------------------------------------------------------------------------------------


def set_name(name: bytes) -> None:
    """Set the name in /proc/self/comm."""
    prctl(_PR_SET_NAME, ctypes.c_char_p(name))


def prctl(option: int, *arguments: Any) -> None:
    """Call prctl(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    padded = [*arguments, *[ctypes.c_ulong(0)] * (4 - len(arguments))]
    if libc.prctl(option, *padded) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_MAP_FIELDS = (
    "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
    "arg_start", "arg_end", "env_start", "env_end", "auxv",
)  # fmt: skip
_STAT_FIELDS = {
    "start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46, "start_brk": 47,
}  # fmt: skip


class _Map(ctypes.Structure):
    """The kernel's struct prctl_mm_map."""

    _fields_ = [
        *[(name, ctypes.c_uint64) for name in _MAP_FIELDS],
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


_shown: list[Any] = []
"""Memory that the kernel shows as /proc/self/cmdline and environ until the process ends, so it is never freed."""


def show_as(argv: list[str], environment: dict[str, str]) -> None:
    """Show the worker's own command line in ps, top and pkill. A kernel without this shows the fork server's.

    The kernel takes all addresses at once, so the other ones are read from /proc/self/stat and given back.
    """
    with open("/proc/self/stat", "rb") as file:  # not by holdfast.linux: a worker starts without our package
        stat = file.read().rpartition(b")")[2].split()
    texts = [argv, [f"{name}={value}" for name, value in environment.items()]]
    _shown[:] = [ctypes.create_string_buffer(b"".join(os.fsencode(text) + b"\0" for text in each)) for each in texts]
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    wanted = _Map(exe_fd=0xFFFFFFFF, brk=libc.sbrk(ctypes.c_ssize_t(0)))
    for name, number in _STAT_FIELDS.items():
        setattr(wanted, name, int(stat[number - 3]))
    for name, buffer in zip(("arg", "env"), _shown, strict=True):
        setattr(wanted, f"{name}_start", ctypes.addressof(buffer))
        setattr(wanted, f"{name}_end", ctypes.addressof(buffer) + ctypes.sizeof(buffer) - 1)
    try:
        prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(wanted), ctypes.c_ulong(ctypes.sizeof(wanted)))
    except OSError:
        return
