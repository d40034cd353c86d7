"""Looking at real processes in every state: what comes of it, what is kept, and that nobody is hurt."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from holdfast.linux import process_stat
from holdfast.protocol.board_layout import LOOK_SIGNAL
from holdfast.protocol.rank_progress import Collective, KernelWait, Polling, RankSample
from holdfast.supervisor import processes
from holdfast.supervisor import stack_sampler as stack_sampler_module
from holdfast.supervisor.board import Board
from holdfast.supervisor.kernel_wait import is_connecting
from holdfast.supervisor.stack_sampler import (
    FIRST_LOOKS_MAX,
    LATER_LOOKS_MAX,
    StackFiles,
    StackSampler,
    Tally,
    _polled,
    _recorded,
)
from tests.supervisor.conftest import no_threads
from tests.supervisor.looks import (
    HOLDS_THE_LOCK,
    SLEEPS,
    SPINS,
    Start,
    functions,
    is_at_rest,
    look,
)
from tests.support.limits import until

pytestmark = pytest.mark.usefixtures("patient_looks")


def test_one_that_sleeps_and_one_that_holds_the_lock(board: Board, start: Start, tmp_path: Path) -> None:
    processes = start(SLEEPS), start(HOLDS_THE_LOCK, 1)
    until(lambda: is_at_rest(board, processes[0]), "the worker to be where it stays")
    asleep, native = look(board, *processes, folder=tmp_path)
    assert functions(asleep) == [("<module>", 3)]
    assert asleep.source == "time.sleep(600)"
    assert (asleep.local_rank, asleep.pid, asleep.state) == (0, processes[0].pid, "S")
    assert functions(native) == [("native", 5), ("<module>", 7)]
    text = Path(native.file).read_text()
    assert native.file == str(tmp_path / "stacks" / "gen3_1_rank5.txt")
    assert f"rank 5, local rank 1, process {processes[1].pid}, state S" in text
    assert "in native\n" in text
    assert f"\n{processes[1].pid} python" in text.replace(Path(sys.executable).name, "python")
    assert [process.poll() for process in processes] == [None, None]


def test_one_that_waits_for_a_lock_which_another_thread_has(board: Board, start: Start) -> None:
    """Python does not say who holds a lock: the program's text does, where both threads name the same one."""
    source = """
import threading, time
lock, other = threading.Lock(), threading.Lock()
def saver(lock):
    with lock:
        time.sleep(600)
threading.Thread(target=saver, args=(other,), daemon=True).start()
threading.Thread(target=saver, args=(lock,), daemon=True).start()
time.sleep(0.1)
print('up')
with lock:
    pass
"""
    process = start(source)
    samples: list[RankSample] = []

    def waits() -> bool:
        samples[:] = look(board, process)
        return functions(samples[0]) == [("<module>", 11)] and bool(samples[0].threads)

    until(waits, lambda: str(samples))
    assert samples[0].source == "with lock:"
    assert samples[0].note.startswith("it takes lock, and another thread is inside lock: in saver at ")
    assert [frames[0].function for frames in samples[0].threads] == ["saver", "saver"]


def test_one_that_spins(board: Board, start: Start) -> None:
    process = start(SPINS)
    first = look(board, process)[0]
    until(lambda: look(board, process)[0].cpu_s > first.cpu_s + 0.02, "the worker to be where it stays")
    ((function, line),) = functions(look(board, process)[0])
    assert function == "<module>"
    assert line in (2, 3)


def test_one_that_is_stopped_is_not_asked(board: Board, start: Start, tmp_path: Path) -> None:
    process = start(SLEEPS)
    process.send_signal(signal.SIGSTOP)
    until(lambda: process_stat(process.pid).state == "T", "the worker to be where it stays")  # type: ignore[union-attr]
    (sample,) = look(board, process, folder=tmp_path, times=3)
    assert (sample.state, sample.frames) == ("T", ())
    assert "did not write its stacks" in Path(sample.file).read_text()
    assert not processes.signals(process.pid).pending(LOOK_SIGNAL), "it would answer all of them when it goes on"
    process.send_signal(signal.SIGCONT)
    until(lambda: bool(look(board, process)[0].frames), "the worker to be where it stays")


def test_one_that_connects_is_not_interrupted(board: Board, start: Start) -> None:
    """As torch's client of the store does it, in native code: a signal ended that poll, and the job with it."""
    source = """
import ctypes, socket
full = socket.socket()
full.bind(('127.0.0.1', 0))
full.listen(0)
held = []
while True:  # until nobody takes the connection
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex(full.getsockname())
    held.append(one)
    entry = (ctypes.c_int * 2)(one.fileno(), 4)
    if not ctypes.CDLL(None).poll(entry, 1, 200):
        break
print('up')
ended = ctypes.CDLL(None).poll(entry, 1, 20_000)
raise SystemExit(f'poll returned {ended}')
"""
    process = start(source)
    until(lambda: is_connecting(process.pid, process.pid), "it connects")
    (sample,) = look(board, process)
    assert (sample.frames, process.poll()) == ((), None)
    assert is_connecting(process.pid, process.pid)


def test_one_that_has_become_another_program(board: Board, start: Start) -> None:
    process = start("import os\nprint('up', flush=True)\nos.execv('/bin/sleep', ['sleep', '600'])")

    def sleeps() -> bool:
        """Not only has its name: on a busy machine it is still being loaded then."""
        stat = process_stat(process.pid)
        return stat is not None and (stat.name, stat.state) == ("sleep", "S")

    until(sleeps, "the worker to be where it stays")
    (sample,) = look(board, process)
    assert (sample.frames, sample.state, process.poll()) == ((), "S", None)


def test_one_that_has_closed_all_it_had(board: Board, start: Start, tmp_path: Path) -> None:
    own = tmp_path / "own"
    process = start(
        f"import os, time\nos.closerange(3, 1024)\nfd = os.open({str(own)!r}, os.O_CREAT | os.O_WRONLY)\n"
        "os.dup2(fd, 600)\nprint('up')\ntime.sleep(600)"
    )
    (sample,) = look(board, process)
    assert sample.frames == ()
    assert own.read_bytes() == b"", "nothing is written into what is not ours"


def test_a_program_that_is_no_python(board: Board, start: Start) -> None:
    process = start("", line=["/bin/sleep", "600"])
    (sample,) = look(board, process, times=2)
    assert (sample.frames, process.poll()) == ((), None)


def test_one_that_has_ended(board: Board, start: Start, tmp_path: Path) -> None:
    process = start("print('up')")
    process.wait()
    (sample,) = look(board, process, folder=tmp_path)
    assert (sample.state, sample.frames) == ("", ())


def test_children_write_nothing_and_are_told_of(board: Board, start: Start) -> None:
    source = """
import os, signal, time
if (stopped := os.fork()) == 0:
    time.sleep(600)
if (dead := os.fork()) == 0:
    os._exit(1)
os.kill(stopped, signal.SIGSTOP)
os.waitid(os.P_PID, stopped, os.WSTOPPED | os.WNOWAIT)
os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
print('up')
time.sleep(600)
"""
    (sample,) = look(board, start(source))
    assert functions(sample)[0][1] in (10, 11)
    stopped, dead = sample.note.split("; ")
    assert stopped.endswith(" is stopped")
    assert dead.endswith(" is dead")


GRANDCHILD = """
import os, subprocess, sys, time
works = "open('file', 'wb').write(b'x' * 300_000); print('up', flush=True)\\nwhile True: pass"
run = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
subprocess.run([sys.executable, '-c', run, works])
"""


def test_what_the_processes_below_it_do_is_counted(
    board: Board, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    process = start(GRANDCHILD)
    (first,) = look(board, process)
    assert first.children_bytes >= 300_000
    seen = [first]

    def has_worked() -> bool:
        seen[:] = look(board, process)
        return bool(seen[0].children_cpu_s > first.children_cpu_s + 0.1)

    until(has_worked, "the process below it to be seen at work")
    (later,) = seen
    assert later.cpu_s < first.cpu_s + 0.1, "it does nothing itself"
    assert later.at_s > first.at_s
    assert later.children_wanted_s - first.children_wanted_s > 0.05, "used, or waited for"
    assert not first.note


def test_what_has_ended_meanwhile_stays_in_the_tally() -> None:
    first = Tally().and_now({1: 10, 2: 20})
    assert (first.total, first.and_now({2: 25, 3: 7}).total) == (30, 42)
    assert first.and_now({2: 5}).total == 30, "another one of that number"
    assert first.and_now({}).and_now({1: 11}).total == 31, "missed in between"


ORPHAN = """
import os, subprocess, sys, time
works = f"import os; print('up', flush=True)\\nwhile os.path.exists('/proc/{os.getpid()}'): pass"
begin = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=SESSION)"
subprocess.run([sys.executable, '-c', begin, works])
time.sleep(600)
"""


@pytest.mark.parametrize("own_session", [False, True])
def test_a_process_whose_parent_is_gone_is_still_its(board: Board, start: Start, own_session: bool) -> None:
    """A daemon of its own, as the agents of cloud tools are: the supervisor has adopted it."""
    processes.become_subreaper()
    try:
        process = start(ORPHAN.replace("SESSION", str(own_session)))
        other = start("import time; print('up'); time.sleep(600)", 1)
        before = look(board, process, other)
        seen = list(before)

        def has_worked() -> bool:
            seen[:] = look(board, process, other)
            return bool(seen[0].children_cpu_s > before[0].children_cpu_s + 0.1)

        until(has_worked, "what it has left behind to be seen at work")
    finally:
        processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 0)
    assert seen[0].cpu_s < before[0].cpu_s + 0.1, "it does nothing itself"
    assert seen[1].children_cpu_s == 0.0, "that is not the other one's"


READS = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
sender = socket.create_connection(server.getsockname())
receiver, _ = server.accept()
receiver.settimeout(60)
print('up')
while True:
    sender.sendall(bytes(1000))
    receiver.recv(1000)
    time.sleep(0.01)
"""


def test_what_comes_from_the_network_is_counted(board: Board, start: Start) -> None:
    """By recv(), which no other number shows."""
    process = start(READS)
    (first,) = look(board, process)
    seen = [first]

    def has_read() -> bool:
        seen[:] = look(board, process)
        return bool(seen[0].talked_bytes >= first.talked_bytes + 10_000)

    until(has_read, "bytes to be seen")
    assert seen[0].moved_bytes < first.moved_bytes + 1000


def test_what_other_machines_have_had_of_the_processors(tmp_path: Path) -> None:
    assert processes.stolen_s(str(tmp_path)) == 0, "where that may not be known"
    ticks = os.sysconf("SC_CLK_TCK")
    lines = [f"{name} 9 8 7 6 5 4 3 {stolen * ticks} 0 0\n" for name, stolen in (("cpu ", 6), ("cpu0", 2), ("cpu1", 4))]
    (tmp_path / "stat").write_text("".join([*lines, "intr 9 9 9\n"]))
    assert processes.stolen_s(str(tmp_path)) == 3


def test_what_disks_and_network_file_systems_have_moved(tmp_path: Path) -> None:
    assert processes.disk_bytes(str(tmp_path)) == 0, "where that may not be known"
    (tmp_path / "diskstats").write_text(
        "   8       0 sda 100 5 2000 30 200 7 4000 60 0 90 90 0 0 0 0 0 0\n"
        " 259       0 nvme0n1 1 0 10 0 2 0 20 0 0 0 0 0 0 0 0 0 0\n"
    )
    assert processes.disk_bytes(str(tmp_path)) == (2000 + 4000 + 10 + 20) * 512
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountstats").write_text(
        "device /dev/sda mounted on / with fstype ext4\n"
        "device nas:/data mounted on /data with fstype nfs4 statvers=1.1\n\tage:\t9\n\tbytes:\t1 2 3 4 50 60 7 8\n"
    )
    assert processes.disk_bytes(str(tmp_path)) == (2000 + 4000 + 10 + 20) * 512 + 50 + 60


def test_what_it_has_written_for_us_is_not_its_own(board: Board, start: Start) -> None:
    """Otherwise who is looked at would seem to save a file."""
    process = start(SLEEPS)
    until(lambda: is_at_rest(board, process), "the worker to be where it stays")

    async def scenario() -> list[int]:
        stack_sampler = StackSampler(board, 3, lambda local_rank: 4 + local_rank, time.time())
        return [(await stack_sampler.look({0: process.pid}, None))[0].moved_bytes for _ in range(4)]

    before, *after = asyncio.run(scenario())
    assert after == [before] * 3


def test_more_threads_than_are_written(board: Board, start: Start, tmp_path: Path) -> None:
    source = """
import threading, time
for _ in range(120):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def main():
    print('up')
    time.sleep(600)
main()
"""
    process, folders = start(source), itertools.count()
    samples: list[RankSample] = []

    def all_written() -> bool:
        """Not before its main thread sleeps: until then that one alone is asked."""
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        samples[:] = look(board, process, folder=folder)
        file = samples[0].file
        return bool(file) and Path(file).read_text().count("(most recent call first)") == 100

    until(all_written, lambda: str(samples))
    assert functions(samples[0]) == [], "the main thread is left out, and no other is taken for it"


def test_looks_at_the_same_time_do_not_mix(board: Board, start: Start) -> None:
    process = start(SLEEPS)
    until(lambda: is_at_rest(board, process), "the worker to be where it stays")

    async def scenario() -> list[tuple[RankSample, ...]]:
        stack_sampler = StackSampler(board, 1, int, time.time())
        async with asyncio.TaskGroup() as tasks:
            looks = [tasks.create_task(stack_sampler.look({0: process.pid}, None)) for _ in range(5)]
        return [each.result() for each in looks]

    assert {functions(samples[0])[0] for samples in asyncio.run(scenario())} == {("<module>", 3)}


def test_a_look_that_cannot_start_keeps_no_descriptor(
    board: Board, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread is left: that is when jobs hang, and are looked at again and again."""
    process = start(SLEEPS)
    stack_sampler = StackSampler(board, 1, int, time.time())

    async def scenario() -> None:
        before = len(os.listdir("/proc/self/fd"))
        with no_threads(monkeypatch), pytest.raises(RuntimeError):
            await stack_sampler.look({0: process.pid}, None)
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(scenario())


def test_a_board_that_is_closed_meanwhile(start: Start, board: Board, tmp_path: Path) -> None:
    process = start(SLEEPS)
    until(lambda: is_at_rest(board, process), "the worker to be where it stays")

    async def scenario() -> None:
        stack_sampler = StackSampler(board, 1, int, time.time())
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(stack_sampler.look({0: process.pid}, tmp_path))
            await asyncio.sleep(0)
            first.cancel()

    asyncio.run(scenario())
    until(lambda: bool(look(board, process)[0].frames), "the worker to be where it stays")


def test_a_program_read_from_a_pipe_is_not_read_again(board: Board, start: Start, tmp_path: Path) -> None:
    process = start(
        "exec(compile(\"import time\\nprint('up')\\ntime.sleep(600)\", 'PIPE', 'exec'))".replace(
            "PIPE", str(tmp_path / "pipe")
        )
    )
    os.mkfifo(tmp_path / "pipe")
    (sample,) = look(board, process)
    assert sample.frames
    assert sample.source == ""


def test_code_that_belongs_to_no_line_has_no_source(board: Board, start: Start) -> None:
    """Compilers make such code. Line 0 is not the last line of the file."""
    source = "import time\ndef waits():\n    print('up')\n    time.sleep(600)\n"
    process = start(source + "waits.__code__ = waits.__code__.replace(co_linetable=b'')\nwaits()")
    until(lambda: functions(look(board, process)[0])[:1] == [("waits", 0)], "the worker to be where it stays")
    assert look(board, process)[0].source == ""


def test_a_program_that_python_warns_of_or_cannot_parse_is_no_trouble_of_the_agents() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert _polled(b'pattern = "\\d"', (1,)) == (Polling.NOTHING, "")
        assert _polled(b"-" * 20_000 + b"1", (1,)) == (Polling.NOTHING, "")
    assert shown == []


def test_what_a_worker_has_copied_is_counted(board: Board, start: Start, tmp_path: Path) -> None:
    process = start(SLEEPS)
    (before,) = look(board, process)
    (still,) = look(board, process)
    copies = start(
        f"open({str(tmp_path / 'copy')!r}, 'wb').write(bytes(4_000_000))\nprint('up')\nimport time\ntime.sleep(99)\n"
    )
    (after,) = look(board, copies)
    assert still.moved_bytes - before.moved_bytes < 100_000
    assert after.moved_bytes - before.moved_bytes > 4_000_000


IDLE_THREADS = (
    "import threading\nfor _ in range(4): threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
)
RUNS = "def f(n): return n if n == 0 else f(n - 1)\nprint('up')\nwhile True: f(9)\n"


def test_who_runs_is_asked_for_its_main_thread_alone_and_lives(board: Board, start: Start, tmp_path: Path) -> None:
    """Another thread that wrote its stack down would read what it changes: one look in forty ended in SIGSEGV."""
    runs, sleeps = start(IDLE_THREADS + RUNS), start(IDLE_THREADS + SLEEPS, 1)
    one, other = look(board, runs, sleeps, folder=tmp_path, times=8)
    assert one.frames[-1].function == other.frames[-1].function == "<module>"
    assert Path(one.file).read_text().count("(most recent call first)") == 1
    assert Path(other.file).read_text().count("(most recent call first)") == 5
    assert (runs.poll(), sleeps.poll()) == (None, None)


# --- what is kept of looks: how much, where the disk fails, NCCL's recorder, py-spy -----------------------------------


def test_what_is_kept_is_bounded(board: Board, start: Start, tmp_path: Path) -> None:
    process = start("", line=["/bin/sleep", "600"])
    look(board, process, folder=tmp_path, times=FIRST_LOOKS_MAX + LATER_LOOKS_MAX + 5)
    assert len(list((tmp_path / "stacks").iterdir())) == FIRST_LOOKS_MAX + LATER_LOOKS_MAX


def test_a_folder_that_cannot_be_written_costs_the_evidence_alone(board: Board, start: Start, tmp_path: Path) -> None:
    (tmp_path / "stacks").write_text("in the way")
    process = start(SLEEPS)
    until(lambda: is_at_rest(board, process), "the worker to be where it stays")
    (sample,) = look(board, process, folder=tmp_path)
    assert (functions(sample), sample.file) == ([("<module>", 3)], "")


@pytest.mark.parametrize(
    ("variable", "value", "place"),
    [
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "trace_", "trace_"),
        ("TORCH_FR_DUMP_TEMP_FILE", "trace_", "trace_"),
        ("XDG_CACHE_HOME", "cache", "cache/torch/comm_lib_trace_rank_"),
        ("HOME", "", ".cache/torch/comm_lib_trace_rank_"),
    ],
)
def test_what_nccl_has_recorded(
    board: Board,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    place: str,
) -> None:
    for name in ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / value))
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    old, new = tmp_path / f"{place}4", tmp_path / f"{place}5"
    old.write_bytes(b"of another job")
    os.utime(old, (1e9, 1e9))
    new.write_bytes(b"of this one")
    os.utime(new, (4e9, 4e9))
    line = ["/bin/sleep", "600"]
    look(board, start("", line=line), start("", 1, line=line), folder=tmp_path)
    assert [path.name for path in (tmp_path / "stacks").glob("*nccl*")] == ["gen3_nccl_trace_rank5"]
    assert (tmp_path / "stacks" / "gen3_nccl_trace_rank5").read_bytes() == b"of this one"


def test_a_full_disk_leaves_the_earlier_copy_of_a_trace_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    kept = tmp_path / "kept"
    kept.mkdir()
    files = StackFiles(3, int, 0.0)
    (tmp_path / "trace_0").write_bytes(b"earlier")
    files._copy_trace(kept, 0)
    (tmp_path / "trace_0").write_bytes(b"x" * 2_000_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))  # a longer file fails as on a full disk
    try:
        files._copy_trace(kept, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [(path.name, path.read_bytes()) for path in kept.iterdir()] == [("gen3_nccl_trace_rank0", b"earlier")]
    files._copy_trace(kept, 0)
    assert (kept / "gen3_nccl_trace_rank0").stat().st_size == 2_000_000, "when there is room again"


def test_native_stacks_where_py_spy_is(
    board: Board, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "spied: $*"\n')
    spy.chmod(0o755)
    monkeypatch.setattr("holdfast.supervisor.stack_sampler.py_spy", lambda: str(spy))
    process = start(SLEEPS)
    until(lambda: is_at_rest(board, process), "the worker to be where it stays")

    async def scenario() -> str:
        stack_sampler = StackSampler(board, 1, int, time.time())
        (sample,) = await stack_sampler.look({0: process.pid}, tmp_path)
        assert stack_sampler._files._spying is not None
        await stack_sampler._files._spying
        await stack_sampler.close()
        return Path(sample.file).read_text()  # noqa: ASYNC240

    assert asyncio.run(scenario()).endswith(f"py-spy dump --native:\nspied: dump --native --pid {process.pid}\n")


def test_a_spy_that_does_not_end_is_ended_by_the_next_look(
    board: Board, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nexec sleep 600\n")
    spy.chmod(0o755)
    monkeypatch.setattr("holdfast.supervisor.stack_sampler.py_spy", lambda: str(spy))
    (sample,) = look(board, start(SLEEPS), folder=tmp_path, times=3)
    assert "py-spy" not in Path(sample.file).read_text()


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_others_put_in_the_place_of_a_trace_is_left_alone(
    board: Board, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The flight recorder's files are in /tmp, under names that anybody can guess."""
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "trace_"))
    process = start(SLEEPS)
    if kind == "pipe":
        os.mkfifo(tmp_path / "trace_4")
    elif kind == "folder":
        (tmp_path / "trace_4").mkdir()
    else:
        (tmp_path / "secret").write_text("of mine")
        (tmp_path / "trace_4").symlink_to(tmp_path / "secret")
    before = len(os.listdir("/proc/self/fd"))
    (sample,) = look(board, process, folder=tmp_path)
    assert sample.file
    assert list((tmp_path / "stacks").glob("*nccl*")) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_disk_that_stalls_is_waited_for_by_one_thread(
    board: Board, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, stalled = threading.Event(), []
    monkeypatch.setattr(stack_sampler_module, "KEEP_S_MAX", 0.05)
    monkeypatch.setattr(StackFiles, "keep", lambda *_: (stalled.append(1), free.wait())[0])
    process = start(SLEEPS)
    try:
        (sample,) = look(board, process, folder=tmp_path, times=4)
        assert functions(sample)
        assert len(stalled) == 1
    finally:
        free.set()


WAITS = {
    "a sleep": ("time.sleep(600)", KernelWait.SLEEP),
    "a lock": ("lock = threading.Lock(); lock.acquire(); print('up'); lock.acquire()", KernelWait.THREAD),
    "an event": ("threading.Event().wait()", KernelWait.THREAD),
    "a child": ("subprocess.Popen(['sleep', '600']).wait()", KernelWait.CHILD),
    "a pipe": ("os.read(os.pipe()[0], 1)", KernelWait.CHILD),
    "a peer": ("socket.create_connection(server.getsockname()).recv(1)", KernelWait.SOCKET),
    "a peer, with a time-out": (
        "peer = socket.create_connection(server.getsockname()); peer.settimeout(600); print('up'); peer.recv(1)",
        KernelWait.SOCKET,
    ),
}
IMPORTS = (
    "import os, socket, subprocess, threading, time\nserver = socket.create_server(('127.0.0.1', 0))\nprint('up')\n"
)


@pytest.mark.parametrize("name", WAITS)
def test_what_the_main_thread_waits_for(board: Board, start: Start, name: str) -> None:
    line, waits_for = WAITS[name]
    process = start(IMPORTS + line)
    seen = [KernelWait.UNKNOWN]

    def waits() -> bool:
        seen[:] = [look(board, process)[0].waits_for]
        return seen == [waits_for]

    until(waits, lambda: str(seen))
    for child in processes.families({process.pid: b""})[process.pid]:
        os.kill(child.pid, signal.SIGKILL)


MOVES = """
import socket, threading, time
server = socket.create_server(('127.0.0.1', 0))
sender = socket.create_connection(server.getsockname())
receiver, _ = server.accept()
def send():
    with open('/dev/null', 'wb', buffering=0) as file:
        while True:
            sender.sendall(bytes(1000))
            file.write(bytes(1000))
            time.sleep(0.01)
threading.Thread(target=send, daemon=True).start()
silent = socket.create_connection(server.getsockname())
print('up')
silent.recv(1)
"""


def test_what_other_threads_move_is_counted_apart(board: Board, start: Start) -> None:
    process = start(MOVES)
    (first,) = look(board, process)
    seen = [first]

    def moved() -> bool:
        seen[:] = look(board, process)
        both = seen[0].moved_bytes - first.moved_bytes, seen[0].talked_bytes - first.talked_bytes
        return min(both) > 10_000 and seen[0].waits_for is KernelWait.SOCKET

    until(moved, lambda: str(seen))
    assert seen[0].main_moved_bytes - first.main_moved_bytes < 1000
    assert seen[0].awaited_bytes < 1000, "of the connection for which the main thread waits"


def test_the_exception_that_it_handles(board: Board, start: Start) -> None:
    """It is asked once, and goes on to wait."""
    source = "import threading\nprint('up')\ntry:\n    raise ValueError('shard 17\\nis corrupt')\n"
    process = start(source + "except ValueError:\n    threading.Event().wait()\n")
    seen: list[RankSample] = []

    def waits() -> bool:
        seen[:] = look(board, process, times=3)
        return bool(seen[0].handles)

    until(waits, lambda: str(seen))
    assert seen[0].handles.startswith("ValueError: shard 17 is corrupt, raised at ")
    assert seen[0].handles.endswith(".py:4")
    assert seen[0].frames[-1].line == 6
    assert process.poll() is None


@pytest.mark.parametrize("end", ["time.sleep(600)", "try:\n    time.sleep(600)\nexcept ValueError:\n    pass"])
def test_without_an_exception_nothing_is_handled(board: Board, start: Start, end: str) -> None:
    process = start("import time\nprint('up')\n" + end)
    assert look(board, process, times=2)[0].handles == ""
    assert process.poll() is None


RECORDED = """
import os, sys, threading, types
from importlib.machinery import SourceFileLoader
package = {package!r}
layout = SourceFileLoader("layout", package + "/protocol/board_layout.py").load_module()
worker = SourceFileLoader("worker", package + "/extensions/hangs/worker.py").load_module()
worker.layout = layout
entry = '{{"process_group": ["0", "default_pg"], "pg_id": 0, "collective_seq_id": 812, "p2p_seq_id": 0, "is_p2p": false,'
entry += '"profiling_name": "gloo:all_reduce", "input_sizes": [[4096]], "input_dtypes": ["Float"], "state": "scheduled",'
entry += '"retired": false, "time_created_ns": 9000000000000000000}}'
native = types.SimpleNamespace(FlightRecorderHook=None)
native._dump_fr_trace_json = lambda *_: '{{"pg_status": {{}}, "entries": [' + entry + "]}}"
sys.modules["torch._C._distributed_c10d"] = native
c10d = types.SimpleNamespace(_world=types.SimpleNamespace(pg_backend_config={{1: "cpu:gloo,cuda:gloo"}}))
path, _, slot = os.environ["HOLDFAST_BOARD"].rpartition("@")
import mmap
words = memoryview(mmap.mmap(os.open(path, os.O_RDWR), 0)).cast("Q")
recorder = worker.Recorder(c10d)
recorder.serve(os.path.dirname(path), words, int(slot))
asks = words[int(slot) + layout.RECORDER]
{then}
"""
"""A program with a torch of its own, whose flight recorder has one collective."""


def recorded(then: str) -> str:
    return RECORDED.format(package=str(Path(stack_sampler_module.__file__).parents[1]), then=then)


def test_a_worker_whose_main_thread_waits_answers_which_collective_it_is_in(
    board: Board, start: Start, tmp_path: Path
) -> None:
    process = start(recorded("print('up')\nthreading.Lock().acquire() and threading.Event().wait()"))
    for times in (1, 2):
        (sample,) = look(board, process, folder=tmp_path, times=times)
        assert sample.collectives == (Collective("default_pg", 812, "all_reduce", "[4096] float32"),)
    assert "collective 812 of default_pg: all_reduce [4096] float32, not done\n" in Path(sample.file).read_text()


def test_an_exception_with_the_bytes_of_a_file_name_does_not_cost_the_collectives(board: Board, start: Start) -> None:
    then = "print('up')\ntry:\n    raise ValueError(os.fsdecode(b'shard \\xff'))\nexcept ValueError:\n"
    process = start(recorded(then + "    threading.Event().wait()"))
    (sample,) = look(board, process)
    assert sample.collectives == (Collective("default_pg", 812, "all_reduce", "[4096] float32"),)
    assert sample.handles.startswith("ValueError: shard ?, raised at ")


def test_an_answer_that_is_no_text_is_none() -> None:
    fd = os.memfd_create("stacks")
    os.write(fd, b'{"number": 1, "collectives": [], "handles": "\xff"}\n')
    assert _recorded(fd, 1) is None
    os.close(fd)


def test_a_worker_that_keeps_the_interpreters_lock_does_not_answer_and_has_its_stack(
    board: Board, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_sampler_module, "RECORDED_S_MAX", 0.6)  # its answer is awaited in vain
    process = start(recorded(HOLDS_THE_LOCK))
    (sample,) = look(board, process)
    assert sample.collectives == ()
    assert sample.frames[0].function == "native"


def test_nothing_is_written_into_a_descriptor_that_the_program_uses_for_something_else(
    board: Board, start: Start, tmp_path: Path
) -> None:
    """A program may close all descriptors but its own, as a daemon does."""
    theirs = tmp_path / "theirs"
    os.mkfifo(theirs)
    then = f"os.dup2(os.open({str(theirs)!r}, os.O_RDWR), asks)\nos.set_blocking(asks, False)\nprint('up')\n"
    process = start(recorded(then + "import time\ntime.sleep(600)"))
    (sample,) = look(board, process)
    assert sample.collectives == ()
    with open(theirs, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as pipe:
        assert pipe.read(1) is None, "it is empty, and still open"
