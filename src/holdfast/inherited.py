"""Handles what this process inherits and must not pass on: the limits of open files and processes, and secrets.

The soft limit of open files is raised to the hard limit, and a node that needs more is refused before any start.
Workers have the limit that the command was started with: the supervisor restores it for its children.

Secrets are the job's token and etcd's password. They are read once and then removed from the environment, so that no
started program finds them there.

It imports nothing heavy: the supervisor uses it.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Mapping

from holdfast.protocol.errors import EnvironmentValueError, PlatformError, RendezvousConfigError
from holdfast.text import PASSWORD_IN_URL

DESCRIPTORS_WANTED = 65_536
"""The soft limit of open files if the hard one allows it: a coordinator has a link to each of thousands of agents."""
DESCRIPTORS_OWN = 64
"""Descriptors of an agent or a supervisor without workers, with room for commands that ask it a question."""
DESCRIPTORS_PER_WORKER = 8
"""Descriptors for each worker: memory, worker's end and log file of two streams; the memory for its stacks; one
spare."""
DESCRIPTORS_PER_TERMINAL_WORKER = 12
"""Descriptors for each worker if our console is a terminal: each of the two streams also has a pseudo-terminal."""

THREADS_OWN = 3
"""Threads of an agent: its console, its journal and one more."""
THREADS_TRIED_MAX = 32
"""Number of threads that are tried, which takes some milliseconds. If there is room for these, but not for all workers,
each worker that cannot be started is reported."""
THREAD_STACK_BYTES = 256 * 1024
"""Small, since they only wait. aarch64 allows no less than 128 KiB."""
THREADS_END_S_MAX = 0.2
TASKS = "/proc/self/task"


def soft_limit() -> int:
    """The number of files that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit(wanted: int = DESCRIPTORS_WANTED) -> None:
    """Raise the soft limit as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))


def restore_limit(soft: int) -> None:
    """Restore the soft limit in a process that runs another program."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def needed(nproc: int, *, terminal: bool) -> int:
    """The number of descriptors that the agent, and the supervisor, need for this many workers. `terminal` says whether
    our console is one."""
    return DESCRIPTORS_OWN + (DESCRIPTORS_PER_TERMINAL_WORKER if terminal else DESCRIPTORS_PER_WORKER) * nproc


def provide_descriptors(nproc: int) -> None:
    """Make room for this many workers. Raises PlatformError if the hard limit is too low."""
    need = needed(nproc, terminal=os.isatty(1) or os.isatty(2))
    raise_limit(max(DESCRIPTORS_WANTED, need))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < need:
        raise PlatformError(
            f"{nproc} worker{'s' if nproc != 1 else ''} need {need} open files and the hard limit here is {hard} "
            "(`ulimit -Hn`); raise it, or start fewer workers per node"
        )


def provide_processes(nproc: int) -> None:
    """Check that this many workers, and the threads of the agent, can be started. Raises PlatformError.

    It starts that many threads and ends them: no file says for certain which limit counts (of the user, of a cgroup
    above), and how much of it others use.
    """
    need = THREADS_OWN + nproc
    can = _started_at_once(min(need, THREADS_TRIED_MAX))
    if can < min(need, THREADS_TRIED_MAX):
        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        limit = "" if soft == resource.RLIM_INFINITY else f" is {soft}"
        raise PlatformError(
            f"the agent and {nproc} worker{'s' if nproc != 1 else ''} need {need} more processes and threads, and only "
            f"{can} can be started here: raise this user's limit (`ulimit -u`{limit}), or the container's limit"
        )


def _started_at_once(count: int) -> int:
    """Start this many threads at the same time, and end them. Returns how many could be started."""
    import threading  # here, since the supervisor only needs the rest of this module

    stay = threading.Event()
    threads: list[threading.Thread] = []
    tasks, stack_bytes = len(os.listdir(TASKS)), threading.stack_size(THREAD_STACK_BYTES)
    try:
        with contextlib.suppress(RuntimeError):  # "can't start new thread"
            for _ in range(count):
                thread = threading.Thread(target=stay.wait, daemon=True)
                thread.start()
                threads.append(thread)
    finally:
        threading.stack_size(stack_bytes)
        stay.set()
        for thread in threads:
            thread.join()
    deadline = time.monotonic() + THREADS_END_S_MAX
    while len(os.listdir(TASKS)) > tasks and time.monotonic() < deadline:
        time.sleep(0.001)  # they count in the kernel a little longer than in Python
    return len(threads)


TOKEN_BYTES_MAX = 4096
TOKEN_VARIABLE = "HOLDFAST_TOKEN"
TOKEN_CHARS_MIN = 20
"""Length of a token below which there is a warning: with a recorded handshake, all of them can be tried offline."""
TOKEN_BYTES = 32
"""Number of random bytes in a token that we draw."""


def read_token(path: str | None, environ: Mapping[str, str]) -> bytes | None:
    """The job's secret: the file that --rdzv-conf names, else HOLDFAST_TOKEN, else none.

    Raises RendezvousConfigError or EnvironmentValueError when it is announced and empty: ignoring that would mean no
    token.
    """
    if path is not None:
        return _from_file(path)
    text = environ.get(TOKEN_VARIABLE)
    if text is None:
        return None
    secret = text.rstrip("\r\n").encode(errors="surrogateescape")
    if not secret:
        raise EnvironmentValueError(f"{TOKEN_VARIABLE} is empty; unset it for a job without a token")
    return secret


def _from_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            secret = file.read(TOKEN_BYTES_MAX + 1).rstrip(b"\r\n")
    except OSError as error:
        raise RendezvousConfigError(f"--rdzv-conf token_file={path}: {error.strerror}") from None
    if not secret:
        raise RendezvousConfigError(f"--rdzv-conf token_file={path}: the file is empty")
    if len(secret) > TOKEN_BYTES_MAX:
        raise RendezvousConfigError(f"--rdzv-conf token_file={path}: longer than {TOKEN_BYTES_MAX} bytes")
    return secret


def draw_token() -> str:
    """Make a random token of letters and digits, for a file, a variable or a Secret."""
    import secrets  # here, since only a command that draws a token needs it

    return secrets.token_hex(TOKEN_BYTES)


def weakness(secret: bytes) -> str:
    """The warning about a token that can be guessed; empty: it is long enough."""
    if len(secret) >= TOKEN_CHARS_MIN:
        return ""
    return (
        f"the job token has {len(secret)} characters: anyone who reaches the endpoint can guess it offline; "
        "`holdfast token` draws one that cannot be guessed"
    )


_MAY_HOLD_ONE = {
    "PET_RDZV_CONF": re.compile(r"(?:^|,)\s*password\s*="),
    "PET_RDZV_ENDPOINT": PASSWORD_IN_URL,
}
"""Variables that may hold etcd's password."""


def secret_variables(environ: Mapping[str, str]) -> list[str]:
    """Our variables that hold a secret in this environment."""
    held = [name for name, secret in _MAY_HOLD_ONE.items() if secret.search(environ.get(name, ""))]
    return [*([TOKEN_VARIABLE] if TOKEN_VARIABLE in environ else []), *held]


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a program that is not ours."""
    hidden = secret_variables(environ)
    return {name: value for name, value in environ.items() if name not in hidden}


def forget_secrets() -> None:
    """Remove the secrets from this process's environment, once they are read, so that its children do not inherit them.

    They are overwritten in memory, too, where /proc/PID/environ would show them to every process of this user.
    """
    names = secret_variables(os.environ)
    if not names:
        return
    import ctypes  # costs milliseconds, only for a job with a token

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    for name in names:
        address = libc.getenv(name.encode())
        if address:
            ctypes.memset(address, ord("*"), len(os.environb[name.encode()]))
        del os.environ[name]
