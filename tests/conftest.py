"""What every test gets: its own home, a guard against leaks, and a few helpers to run the real command.

The guard fails a test that leaves a process, a thread or a descriptor behind, and puts back what a test has changed in
its own process (tests/support/surroundings.py). A process counts as the test's own when
it descends from the test process, or when its environment holds the HOLDFAST_TEST_ID that this test was given
(so daemons that changed their parent and their session are found too).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.support import ports
from tests.support.gloo_lines import without_gloo_lines
from tests.support.limits import limit_s, slowness
from tests.support.surroundings import Surroundings

LEAK_GRACE_S = 1.0
"""The product promises that nothing is alive one second after its end, on a quiet machine."""

TIMEOUT_S = 120.0
"""Of one test, where pyproject.toml says nothing else."""

TEST_ID = "HOLDFAST_TEST_ID"

# As a terminal would start us: `nohup make test &` leaves these ignored, and everything that a test starts inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _signum in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(_signum, signal.SIG_DFL)

PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)

# Threads that outlive a test on purpose.
THREADS_ALLOWED = (
    "pytest_timeout",  # the watchdog of pytest-timeout
    "execnet",  # the channel between pytest-xdist and its worker
    "QueueFeederThread",  # multiprocessing keeps it until its queue is collected
)

# Descriptors that libraries open once and keep.
DESCRIPTORS_ALLOWED = ("/dev/urandom", "/dev/null", "anon_inode:[eventpoll]")

# Assertions are rewritten once and kept, also where the environment forbids bytecode: that takes each process seconds.
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torchrun",
        choices=("replay", "live", "record"),
        default="replay",
        help="torchrun's side of tests/beside_torchrun: as recorded (default), run and held against the recording, or run "
        "and recorded",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Measure the machine once, before any test process starts, and scale the time limit of every test."""
    os.environ["PYTEST_TIMEOUT"] = f"{float(config.getini('timeout') or TIMEOUT_S) * slowness():.0f}"
    if config.getoption("numprocesses", None):
        rewrite_assertions(config)


def rewrite_assertions(config: pytest.Config) -> None:
    """What pytest does when it imports a test, and keeps: here once, before each of several test processes does it."""
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        folder = rewrite.get_cache_dir(path)
        kept = folder / (path.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, kept) is None and rewrite.try_makedirs(folder):
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, kept)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector: what is imported and collected stays, and need never be looked at."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        if (torch := sys.modules.get("torch")) is not None:
            # A test process on each core: more threads spin while they wait for each other (a step of four ranks that
            # are threads took 4 ms with one thread of torch, and up to a second with two).
            torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Scale the limits that tests have of their own, skip groups named "torch …" without torch, and have groups
    (`xdist_group`) keep together: pytest-xdist 3.8 writes a test's group where its id was before pytest 9.2, which looks
    elsewhere, and so groups are ignored."""
    has_torch = find_spec("torch") is not None
    for item in items:
        group = item.get_closest_marker("xdist_group")
        if group is not None and group.args[0].startswith("torch") and not has_torch:
            item.add_marker(pytest.mark.skip("torch is not installed"))
        own = item.get_closest_marker("timeout")
        if own is not None:
            item.add_marker(pytest.mark.timeout(limit_s(own.args[0])), append=False)
        with_group = vars(item).get("_nodeid")
        if with_group is not None and item.nodeid != with_group:
            item._id = type(item._id).parse(with_group)  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own, in which fixtures that are async contexts are entered."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
            for name, value in arguments.items():
                if isinstance(value, contextlib.AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**arguments)

    asyncio.run(run())
    return True


# --- the leak guard ---------------------------------------------------------------------------------------------------


def descendants(pid: int) -> set[int]:
    """All processes below `pid`, zombies included. Costs a tenth where the kernel lists the children of a task."""
    children = _children_of_task if os.path.exists(f"/proc/{pid}/task/{pid}/children") else _children_of_all()
    found: set[int] = set()
    todo = [pid]
    while todo:
        fresh = set(children(todo.pop())) - found
        found |= fresh
        todo.extend(fresh)
    return found


def _children_of_task(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def _children_of_all() -> Callable[[int], list[int]]:
    """The children of each process, by the parent that each process names."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    return lambda pid: children.get(pid, [])


def newest_pid() -> int:
    """The number of the newest process of this machine. They grow, and begin again when the largest is reached."""
    with open("/proc/loadavg", "rb") as file:
        return int(file.read().split()[-1])


def marked(marker: str, newest_before: int) -> set[int]:
    """Processes other than this one whose environment at exec held HOLDFAST_TEST_ID=marker, and that began when
    `newest_before` was the newest: to read the environment of all processes took 7 % of the time of the test processes."""
    needle = f"{TEST_ID}={marker}".encode()
    oldest = newest_before if newest_pid() >= newest_before else 0
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) > oldest:
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if needle in file.read():
                    found.add(int(name))
    found.discard(os.getpid())
    return found


def alive(pid: int) -> bool:
    """Whether `pid` runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _describe(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return f"{pid}: gone"
    return f"{pid}: " + line.replace(b"\0", b" ").decode(errors="replace").strip()[:200]


def _descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _until_empty(find: Callable[[], set[int]]) -> set[int]:
    """What is still there after the grace. Nothing seen must be seen twice: a daemon that is just being forked can
    slip between the list of processes and a look at each."""
    deadline = time.monotonic() + limit_s(LEAK_GRACE_S)
    seen_empty = False
    while True:
        left = {pid for pid in find() if alive(pid)}
        if (not left and seen_empty) or time.monotonic() >= deadline:
            return left
        seen_empty = not left
        if left:
            time.sleep(0.02)


def family(pid: int) -> dict[int, int]:
    """This process and all below it, with the page faults of the children that each has waited for: the number grows
    with each of them."""
    return {each: faults for each in {pid, *descendants(pid)} if (faults := _faults_of_reaped(each)) is not None}


def _faults_of_reaped(pid: int) -> int | None:
    """Page faults of all children that `pid` has waited for; None: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[8]) + int(fields[10])  # proc(5): cminflt and cmajflt


@dataclass(frozen=True)
class Resources:
    processes: dict[int, int]
    threads: set[int]
    descriptors: dict[int, str]
    newest_pid: int

    @classmethod
    def now(cls) -> Resources:
        idents = {thread.ident for thread in threading.enumerate() if thread.ident is not None}
        return cls(family(os.getpid()), idents, _descriptors(), newest_pid())


def _leaked_processes(before: Resources, marker: str) -> list[str]:
    # A process of the test is below this one, or one of those below has waited for the one that it came from. Where
    # nothing of that has changed, there is nothing to look for among all that run here: most tests start no process.
    if family(os.getpid()) == before.processes:
        return []
    left = _until_empty(
        lambda: (descendants(os.getpid()) | marked(marker, before.newest_pid)) - before.processes.keys()
    )
    story = [f"process {_describe(pid)}" for pid in sorted(left)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # What has ended and nobody has waited for would be looked at again after each later test.
    for pid in family(os.getpid()).keys() - before.processes.keys():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return story


def _leaked_threads(before: Resources, allowed: tuple[str, ...]) -> list[str]:
    story = []
    for thread in threading.enumerate():
        if thread.ident in before.threads or thread.name.startswith(allowed):
            continue
        thread.join(limit_s(LEAK_GRACE_S))
        if thread.is_alive():
            story.append(f"thread {thread.name}")
    return story


def _leaked_descriptors(before: Resources) -> list[str]:
    def fresh() -> dict[int, str]:
        return {
            fd: target
            for fd, target in _descriptors().items()
            if before.descriptors.get(fd) != target and target not in DESCRIPTORS_ALLOWED
        }

    # A number that was reused is no leak: what counts is that there are more than before.
    if len(_descriptors()) > len(before.descriptors) and fresh():
        gc.collect()
        if len(_descriptors()) > len(before.descriptors):
            return [f"descriptor {fd} -> {target}" for fd, target in fresh().items()]
    return []


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes, threads or descriptors behind; end what it left."""
    marker = uuid.uuid4().hex
    extra = request.node.get_closest_marker("allow_threads")
    allowed = THREADS_ALLOWED + (tuple(extra.args) if extra is not None else ())
    os.environ[TEST_ID] = marker
    before, surroundings = Resources.now(), Surroundings.now()
    yield
    surroundings.restore()
    del os.environ[TEST_ID]
    # Where this process stood for an agent, orphans fell to it. They must not stay: nobody waits for them here.
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    leaks = _leaked_processes(before, marker) + _leaked_threads(before, allowed) + _leaked_descriptors(before)
    if leaks:
        pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)


# --- a home of its own ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """HOME and the XDG folders in a temporary folder: run folders never land in the real home."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("XDG_STATE_HOME", str(home / "state"))
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        patch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        for name in list(os.environ):
            # What a launcher around this test run left must not reach the launcher under test.
            if name.startswith(("PET_", "TORCHELASTIC_", "HOLDFAST_", "SLURM_")) and name not in (TEST_ID,):
                patch.delenv(name)
        patch.setenv("HOLDFAST_RUNTIME_DIR", str(home / "running"))
        yield home


# --- running the real thing -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """A command that ended: `code` as subprocess tells it (negative: signal), texts, wall seconds."""

    code: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.seconds:.1f} s\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


RunCli = Callable[..., Finished]


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def run_cli() -> RunCli:
    """`run_cli(args, env=…, timeout=…, cwd=…, module=…)`: run `python -m holdfast.run args`, return what came of it.

    `env` is added to this process's environment (a value of None removes a name). After `timeout` seconds of a quiet
    machine the whole process group is killed and the test fails with what was printed until then.
    """

    def run(
        args: Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        timeout: float = 60.0,
        cwd: Path | None = None,
        module: str = "holdfast.run",
    ) -> Finished:
        merged = {**os.environ, **(env or {})}
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            env={name: value for name, value in merged.items() if value is not None},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=limit_s(timeout))
        except subprocess.TimeoutExpired:
            _end_group(process)
            out, err = process.communicate()
            pytest.fail(
                f"no end within {limit_s(timeout)} s: {' '.join(args)}\n--- stdout\n{out}\n--- stderr\n{err}",
                pytrace=False,
            )
        except BaseException:
            _end_group(process)
            raise
        return Finished(process.returncode, without_gloo_lines(out), err, time.monotonic() - started)

    return run


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of what a process imports, or how large it is: `make coverage` does not measure what it starts."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


@pytest.fixture(scope="session")
def warm() -> Iterator[object]:
    """Runs programs that need torch and may be forked from a process that has imported it."""
    from tests.warm import Warm

    made = Warm()
    yield made
    made.close()


@pytest.fixture(scope="session")
def trainer_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Jobs that share an import of torch and of the libraries of trainers, which takes most of their processor time. Tests
    that use it are in one group. `warm` is free for others meanwhile."""
    from tests.warm import Warm
    from tests.warm_jobs import WarmJobs

    own = Warm()
    with WarmJobs(own, tmp_path_factory.mktemp("jobs"), "accelerate", "lightning", "transformers.trainer") as made:
        yield made
    own.close()


@pytest.fixture(scope="session")
def torch_lacks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The reasons for which this torch is too old for some tests. Not asked of `warm`, which may serve jobs already."""
    # An import of torch takes seconds: of several test processes one asks, and the others wait for its answer.
    of_run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        of_run = of_run.parent
    with open(of_run / "torch_lacks.json", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        answer = file.read()
        if not answer:
            line = [sys.executable, str(Path(__file__).parent / "train" / "scripts" / "torch_lacks.py")]
            done = subprocess.run(line, capture_output=True, text=True, timeout=limit_s(60))
            assert done.returncode == 0, done.stderr
            answer = without_gloo_lines(done.stdout)
            file.write(answer)
    found: dict[str, str] = json.loads(answer)
    return found


@pytest.fixture(scope="session")
def meshes_made_again(torch_lacks: dict[str, str]) -> None:
    """For tests of sharded models in `ht.survive`: skips them where torch lacks what that needs."""
    if torch_lacks["meshes"]:
        pytest.skip(torch_lacks["meshes"])


@pytest.fixture(scope="session")
def fsdp_on_cpus(torch_lacks: dict[str, str]) -> None:
    """For tests with FSDP2: skips them where torch has it on GPUs alone."""
    if torch_lacks["fsdp"]:
        pytest.skip(torch_lacks["fsdp"])


@pytest.fixture(scope="session")
def agent_server() -> Iterator[object]:
    """Starts agents that share an import of holdfast."""
    from tests.processes.agent_server import AgentServer

    made = AgentServer()
    yield made
    made.close()


@pytest.fixture
def tmp_log_dir(tmp_path: Path) -> Path:
    """A folder for --log-dir that does not exist yet."""
    return tmp_path / "logs"


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Picks ports. Where the product can pick one itself (port 0), let it."""
    return ports.free_port
