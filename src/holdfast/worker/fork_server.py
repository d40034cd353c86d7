"""The fork server: imports a node's heavy modules once and forks workers, which run as if they were started by exec.

    bootstrap.py fork-server THIS_FOLDER CONTROL_FD

CONTROL_FD is one end of a socket pair; supervisor/fork_server_client.py has the other. Messages of seqpacket.py:

    first     {"modules", "first_path", "argv"}: what to import, and a worker's command line
    then      {"argv", "env_set", "env_unset", "cwd", "cpus", "fds", "supervisor"}: fork a worker; descriptors: its
              answer's socket, then one for each number in "fds"
              {"park", "supervisor"}: fork a standby, which reads from its answer's socket (its only descriptor) which
              worker it is to become, in a message as above
              {"next": modules, "supervisor"}: fork the next fork server, whose control socket is its answer's socket
    to supervisor {"is": "ready" | "left_out", "text"} and {"is": "unfit", "module", "text"}; then it ends

On its answer's socket a worker sends `pid N` when it is the supervisor's own child, and runs when it receives `go`. For
a worker that could not be forked, `no WHY` is sent. End of file from the supervisor means that the worker is no longer
wanted. A standby sends `pid N` when it is parked, and again when it becomes a worker.

A fork server that imports forks nobody, and a restart must not wait for an import. So the modules that only restarts
need are imported by a copy, the next fork server. It sends `pid N`, imports, reports as the first one did, and serves
requests from then on. The supervisor then closes the control socket of the old one, which ends after its last fork.

Workers are forked twice, so that they become children of the supervisor (a subreaper), which is every worker's parent.
Standard library only and nothing of holdfast: it runs under any Python that the user chose. forking.py removes the
differences that a fork makes; the tests compare a forked worker with one that was started by exec."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    # The bootstrap sets these names: there is no holdfast to import them from.
    from holdfast import seqpacket  # noqa: TC004
    from holdfast.worker import forking  # noqa: TC004

TEXT_MAX = 500
"""Length at which a text for people is cut: the error of an import may be long."""
BATCH_MAX = 64
"""Number of workers that share one intermediate process; their descriptors are open at once."""
THREADS_END_S_MAX = 0.1
"""Limit for joined threads to disappear: one may still be listed for a moment."""
NAME = b"hf-fork-server"

READ_BY_LIBRARIES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_", "PYTORCH_", "PYTHON", "LD_", "MALLOC_")
"""Beginnings of variables that libraries read when they are loaded, without os.environ."""


class UnfitError(Exception):
    """The reason why this process must not be forked into workers: they then start by exec."""


def serve(control_fd: int) -> None:
    """Import and serve. Returns only in the workers; each of them is then the process that its command line names."""
    fork_server = ForkServer(high_socket(control_fd))
    try:
        fork_server.run()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the supervisor is gone


# --- importing --------------------------------------------------------------------------------------------------------


class WatchedEnvironment(dict):  # type: ignore[type-arg]
    """Data for os.environ that notes which variables were read."""

    def __init__(self, data: dict[bytes, bytes], read_names: set[str]) -> None:
        super().__init__(data)
        self.read_names = read_names

    def __getitem__(self, key: bytes) -> bytes:
        self.read_names.add(os.fsdecode(key))
        value: bytes = super().__getitem__(key)
        return value

    def __contains__(self, key: object) -> bool:
        if isinstance(key, bytes):
            self.read_names.add(os.fsdecode(key))
        return super().__contains__(key)


class Importer:
    """Imports modules, and notes which environment variables the imports changed and read."""

    def __init__(self) -> None:
        self.read_names: set[str] = set()
        """Variables that the imports have read."""
        self.initial = dict(os.environ)
        """The environment before the imports."""
        self.changed: dict[str, str | None] = {}
        """Variables that the imports have set; None: deleted."""
        self._tracers = tracers()
        """The tracers of this process at its start, such as a coverage tool's, which workers have too."""

    def load(self, module: str) -> str:
        """Import one module. Returns the reason if it failed. Raises UnfitError when its effects cannot be forked."""
        before = dict(os.environ)
        data: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
        watched = WatchedEnvironment(data, self.read_names)
        os.environ._data = os.environb._data = watched  # type: ignore[attr-defined]
        try:
            __import__(module)
            trouble = ""
        except BaseException as error:  # noqa: BLE001 - a module may raise anything, SystemExit too
            trouble = f"{module} cannot be imported: {type(error).__name__}: {error}".partition("\n")[0]
        finally:
            data.clear()
            data.update(watched)
            os.environ._data = os.environb._data = data  # type: ignore[attr-defined]

        after = dict(os.environ)
        self.changed |= {name: after.get(name) for name in before.keys() | after if before.get(name) != after.get(name)}
        check_forkable()
        # Not a tracer of all Pythons, as coverage: an executed worker has it, too
        # (test_what_traces_every_python_from_its_start_does_not_keep_workers_from_being_forked).
        if tracers() != self._tracers:
            raise UnfitError("a tracer is at work")
        return trouble

    def environment(self, wanted: dict[str, str]) -> dict[str, str]:
        """The wanted environment as the imports would have left it. Raises UnfitError when they would have behaved
        differently in it."""
        differing = {name for name in wanted.keys() | self.initial.keys() if wanted.get(name) != self.initial.get(name)}
        for name in sorted(differing):
            if name in self.read_names or name.startswith(READ_BY_LIBRARIES):
                raise UnfitError(f"{name} is the worker's own and is read while modules are imported")
        result = dict(wanted)
        for name, value in self.changed.items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = value
        return result


def check_forkable() -> None:
    """Raise UnfitError for threads, children and devices, which a fork does not copy."""
    if len(os.listdir("/proc/self/task")) > 1:
        # OpenBLAS ends its threads before each fork and starts them again when needed; other threads stay.
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        deadline = time.monotonic() + THREADS_END_S_MAX
        while (threads := len(os.listdir("/proc/self/task")) - 1) and time.monotonic() < deadline:
            time.sleep(0.001)
        if threads:
            raise UnfitError(f"it has started {threads} thread{'s' if threads > 1 else ''}, which a fork would lose")
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if name.startswith("/dev/nvidia"):
            raise UnfitError(f"it has opened {name}, and a CUDA context cannot be forked")
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        raise UnfitError("it has initialised CUDA, and a CUDA context cannot be forked")
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        pass
    else:
        raise UnfitError("it has started a process, which would not be the worker's own")


def tracers() -> tuple[object, object]:
    """The functions that trace and profile this thread."""
    return sys.gettrace(), sys.getprofile()


# --- serving ----------------------------------------------------------------------------------------------------------


class ForkServer:
    """The fork server's one thread: imports, then forks a process for each request."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._control_fd = control.fileno()
        self._program_at = len(sys.orig_argv) - len(sys.argv)
        """Index of the program in the interpreter's arguments."""
        self._start = list(sys.orig_argv[: self._program_at + 1])
        """The interpreter, its options and our program: a worker that begins differently cannot be forked here."""
        self._importer = Importer()
        with open("/proc/self/comm", "rb") as file:
            self._comm = file.read().rstrip(b"\n")
        self._opened: set[int] = set()
        """Descriptors that imports have left open."""

    def run(self) -> None:
        """Serve requests. Returns only in the workers."""
        forking.set_name(NAME)
        received = seqpacket.receive(self._control)
        if received is None:
            os._exit(0)  # the supervisor is gone
        first, _ = received
        if not getattr(sys.flags, "safe_path", False):
            sys.path.insert(0, first["first_path"])
        sys.argv = first["argv"][self._program_at + 2 :]
        self._import_all(first["modules"])

        while not isinstance(became := self._fork_all(self._requests()), forking.WorkerRequest):
            if isinstance(became, forking.NextRequest):
                self._import_all(became.modules)

    def _import_all(self, modules: list[str]) -> None:
        began = time.monotonic()
        done, failed = [], set[str]()
        for module in modules:
            if module.partition(".")[0] in failed:  # a part of a package that is not there
                continue
            trouble = self._import(module)
            if trouble:
                failed.add(module)
                self._report("left_out", trouble)
            else:
                done.append(module)
        if not done:
            self._end_unfit("", "no module is left to be imported ahead")
        self._freeze_objects()
        self._report("ready", f"{', '.join(done)} in {time.monotonic() - began:.2f} s")

    def _import(self, module: str) -> str:
        threshold = gc.get_threshold()
        gc.set_threshold(0)  # an import makes little garbage: collecting takes a fifth of the time of torch's
        try:
            return self._importer.load(module)
        except UnfitError as unfit:
            self._end_unfit(module, f"{module}: {unfit}")
        finally:
            if gc.get_threshold()[0] == 0:  # else the module has set its own threshold
                gc.set_threshold(*threshold)

    def _freeze_objects(self) -> None:
        """Freeze all present objects, which live on in all workers: then the collector does not copy their pages."""
        gc.collect()
        gc.freeze()
        self._opened = {int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2} - {self._control.fileno()}
        self._opened = {fd for fd in self._opened if is_open(fd)}

    def _end_unfit(self, module: str, text: str) -> NoReturn:
        self._report("unfit", text, module=module)
        os._exit(0)

    def _report(self, what: str, text: str, **more: str) -> None:
        seqpacket.send(self._control, {"is": what, "text": text[:TEXT_MAX], **more})

    def _requests(self) -> list[forking.Request]:
        """All requests that wait: they share the first of the two forks.

        Ends the process when there is none and none can come any more: the supervisor is gone, or has another fork
        server.
        """
        requests: list[forking.Request] = []
        while not requests or (len(requests) < BATCH_MAX and seqpacket.is_readable(self._control)):
            received = seqpacket.receive(self._control)
            if received is not None:
                requests.append(forking.read_request(*received))
            elif requests:
                break  # these first
            else:
                os._exit(0)
        return requests

    def _fork_all(self, requests: list[forking.Request]) -> forking.Request | None:
        """Fork a process for each request. Returns None here, and in each forked process its request."""
        ready: list[tuple[forking.Request, forking.ForkedWorker | None]] = []
        for request in requests:
            if not isinstance(request, forking.WorkerRequest):
                ready.append((request, None))
            elif forked_worker := self._forked_worker(request, self._foreign(request, requests)):
                ready.append((request, forked_worker))

        try:
            intermediate = os.fork() if ready else -1
        except OSError as error:
            intermediate = -1
            for request, _ in ready:
                request.refuse(f"fork failed: {error.strerror}")
        if intermediate == 0:
            self._control.detach()  # the forked processes close it by its number, among the foreign descriptors
            for request, forked_worker in ready:
                became = self._fork_from(os.getpid(), request, forked_worker, self._foreign(request, requests))
                if became is not None:
                    return became
            os._exit(0)

        if intermediate > 0:
            os.waitpid(intermediate, 0)
        for request in requests:
            request.close()
        return None

    def _foreign(self, request: forking.Request, requests: list[forking.Request]) -> list[int]:
        """Descriptors of this process that this request must not inherit."""
        return [self._control_fd, *(fd for other in requests if other is not request for fd in other.descriptors)]

    def _forked_worker(self, request: forking.WorkerRequest, foreign: list[int]) -> forking.ForkedWorker | None:
        """Prepare a worker; None: the request was refused."""
        if request.argv[: len(self._start)] != self._start:
            request.refuse("another interpreter is wanted")
            return None
        if self._opened & request.fds.keys():
            request.refuse(f"an import keeps descriptor {min(self._opened & request.fds.keys())} open")
            return None
        given = {**self._importer.initial, **request.env_set}
        for name in request.env_unset:
            given.pop(name, None)
        try:
            environment = self._importer.environment(given)
        except UnfitError as unfit:
            request.refuse(str(unfit))
            return None
        return forking.ForkedWorker(request, given, environment, foreign, self._program_at, self._comm)

    def _fork_from(
        self,
        intermediate: int,
        request: forking.Request,
        forked_worker: forking.ForkedWorker | None,
        foreign: list[int],
    ) -> forking.Request | None:
        """Fork one process from the intermediate process. Returns None there, and the request in the new process, once
        that has its own identity."""
        try:
            if os.fork() != 0:
                return None
        except OSError as error:
            request.refuse(f"fork failed: {error.strerror}")
            return None
        try:
            if isinstance(request, forking.NextRequest):
                self._become_next(intermediate, request, foreign)
                return request
            if forked_worker is None:
                request, forked_worker = self._wait_as_standby(intermediate, request, foreign)
            forked_worker.begin(intermediate)
        except BaseException as error:  # noqa: BLE001 - the child must not live on as a second fork server
            request.refuse(f"{type(error).__name__}: {error}")
            os._exit(1)
        return request

    def _become_next(self, intermediate: int, request: forking.NextRequest, foreign: list[int]) -> None:
        """Become the next fork server, with the answer's socket as control socket."""
        for fd in foreign:
            os.close(fd)
        os.setsid()
        forking.copy_output()  # the first one's workers must not repeat what is printed here
        answer = socket.socket(fileno=request.answer)
        forking.enlist(answer, intermediate, request.supervisor)
        self._control = high_socket(answer.detach())
        self._control_fd = self._control.fileno()

    def _wait_as_standby(
        self, intermediate: int, request: forking.Request, foreign: list[int]
    ) -> tuple[forking.Request, forking.ForkedWorker]:
        """Wait until a worker is wanted, for any time."""
        for fd in foreign:
            os.close(fd)
        answer = forking.park(request.answer, intermediate, request.supervisor)
        received = seqpacket.receive(answer)
        if received is None:
            os._exit(0)  # no worker is wanted any more
        message, fds = received
        request = forking.WorkerRequest(message, [answer.detach(), *fds])
        forked_worker = self._forked_worker(request, [])
        if forked_worker is None:
            os._exit(0)
        return request, forked_worker


def high_socket(fd: int) -> socket.socket:
    """Move a socket to a number that no worker uses."""
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, forking.FD_MIN)
    os.close(fd)
    return socket.socket(fileno=high)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
