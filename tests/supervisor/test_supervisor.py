"""The supervisor with real processes: what workers are given at their start, and that none of them is left at the end."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.supervisor import client, processes
from holdfast.supervisor.client import (
    ProcessEnded,
    ProcessStarted,
    SpawnFailed,
    SupervisorClient,
    SupervisorDied,
    SupervisorKilled,
    TreeKilled,
    revive_supervisor,
)
from tests.support.limits import limit_s, until

NUISANCE = """
    import os, signal, sys, time
    def note():
        with open(sys.argv[1], "a") as file:
            file.write(f"{os.getpid()}\\n")
    if os.fork() == 0:                                    # a daemon: own session, double fork
        os.setsid()
        if os.fork() == 0:
            note()
            time.sleep(1000)
        os._exit(0)
    if os.fork() == 0:                                    # deaf to SIGTERM
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note()
        time.sleep(1000)
    if os.fork() == 0:                                    # stopped
        note()
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    note()
    time.sleep(1000)
"""
NUISANCE_PROCESSES = 4


def nuisance(pids: Path) -> list[str]:
    """A program of four processes of the kinds that launchers leave behind; each writes its pid to a file."""
    return [sys.executable, "-c", textwrap.dedent(NUISANCE), str(pids)]


def noted(pids: Path) -> list[int]:
    return [int(line) for line in pids.read_text().split()] if pids.exists() else []


def status_of(text: str) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def signals(mask: str) -> int:
    """A mask of /proc/PID/status without signals 32 and 33: the C library's own, which no program can set or clear and
    which a test run may inherit as ignored."""
    return int(mask, 16) & ~(0b11 << 31)


async def output_of(bench: Any, argv: list[str], **options: Any) -> str:
    """What a program prints, run by the supervisor."""
    with tempfile.TemporaryFile() as file:
        fds = {1: file.fileno(), 2: file.fileno(), **options.pop("fds", {})}
        bench.supervisor.spawn("probe", argv, fds=fds, **options)
        await bench.next(ProcessStarted)
        ended = await bench.next(ProcessEnded)
        file.seek(0)
        text = file.read().decode()
        assert ended.exit_code == 0, text
        return text


# --- starting ---------------------------------------------------------------------------------------------------------


async def test_a_program_starts_and_its_end_is_told(bench: Any) -> None:
    bench.supervisor.spawn("a", ["sh", "-c", "exit 7"])
    started = await bench.next(ProcessStarted)
    ended = await bench.next(ProcessEnded)
    assert (started.key, ended) == ("a", ProcessEnded("a", started.pid, 7))
    bench.supervisor.spawn("b", ["sleep", "100"])
    pid = (await bench.next(ProcessStarted)).pid
    bench.supervisor.signal("b", signal.SIGUSR1)
    assert await bench.next(ProcessEnded) == ProcessEnded("b", pid, -signal.SIGUSR1)
    bench.supervisor.signal("b", signal.SIGTERM)  # too late: nothing happens


async def test_what_cannot_be_executed_is_said(bench: Any, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")

    bench.supervisor.spawn("a", ["no-such-program"])
    assert await bench.next(SpawnFailed) == SpawnFailed("a", errno.ENOENT, "No such file or directory: no-such-program")
    bench.supervisor.spawn("b", [str(plain)])
    assert (await bench.next(SpawnFailed)).errno == errno.EACCES
    bench.supervisor.spawn("c", ["true"], cwd="/no/such/folder")
    failed = await bench.next(SpawnFailed)
    assert (failed.errno, failed.text) == (errno.ENOENT, "No such file or directory: /no/such/folder")
    bench.supervisor.spawn("d", ["true"], cpus=[100_000])
    assert (await bench.next(SpawnFailed)).errno == errno.EINVAL
    bench.supervisor.spawn("e", ["true"])  # no "ended" of the failed ones in between
    assert (await bench.next(ProcessStarted)).key == "e"
    await bench.next(ProcessEnded)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the agent, from which the supervisor is forked."""
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("DROPPED", "1")


@pytest.mark.usefixtures("environment")
async def test_environment_folder_and_cpus(bench: Any, tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    odd = "\udcff\n ü"  # a byte that is no UTF-8

    probe = "import os; print(dict(os.environ)); print(os.getcwd()); print(os.sched_getaffinity(0))"
    text = await output_of(
        bench,
        [sys.executable, "-c", probe],
        env_set={"ADDED": odd},
        env_unset=["DROPPED"],
        cwd=str(tmp_path),
        cpus=[cpu],
    )
    environment, cwd, cpus = text.splitlines()
    assert repr(odd) in environment
    assert "'KEPT': '1'" in environment
    assert "DROPPED" not in environment
    assert (cwd, cpus) == (str(tmp_path), f"{{{cpu}}}")


async def test_no_descriptor_leaks_into_a_worker(bench: Any, tmp_path: Path) -> None:
    listing = [sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd'), key=int)[:-1])"]
    assert (await output_of(bench, listing)).strip() == "['0', '1', '2']"
    with (tmp_path / "extra").open("w") as extra:
        script = "ls /proc/self/fd >&5; echo to-out; echo to-err >&2"
        text = await output_of(bench, ["sh", "-c", script], fds={5: extra.fileno()})
    assert text == "to-out\nto-err\n"
    assert {"0", "1", "2", "5"} <= set((tmp_path / "extra").read_text().split())


async def test_every_descriptor_gets_to_its_number(bench: Any, tmp_path: Path) -> None:
    numbers = range(9, 2, -1)  # among them all numbers that the supervisor itself uses, in another order

    files = {number: (tmp_path / str(number)).open("w") for number in numbers}
    script = "; ".join(f"echo {number} >&{number}" for number in numbers)
    bench.supervisor.spawn("a", ["sh", "-c", script], fds={number: file.fileno() for number, file in files.items()})
    for file in files.values():
        file.close()
    await bench.next(ProcessStarted)
    assert (await bench.next(ProcessEnded)).exit_code == 0
    assert [int((tmp_path / str(number)).read_text()) for number in numbers] == list(numbers)


async def test_a_worker_leads_its_own_session_with_fresh_signals(bench: Any) -> None:
    status = status_of(await output_of(bench, ["cat", "/proc/self/status"]))
    assert [signals(status[name]) for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd")] == [0, 0, 0, 0]
    pid, group, session = (await output_of(bench, ["sh", "-c", "cut -d' ' -f1,5,6 /proc/$$/stat"])).split()
    assert pid == group == session


@pytest.mark.parametrize("bench", [(signal.SIGHUP,)], indirect=True)
async def test_a_signal_ignored_at_the_agents_start_stays_ignored(bench: Any) -> None:
    status = status_of(await output_of(bench, ["cat", "/proc/self/status"]))
    assert signals(status["SigIgn"]) == 1 << (signal.SIGHUP - 1)


# --- ending -----------------------------------------------------------------------------------------------------------


async def test_kill_tree_leaves_nothing_but_services(bench: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    bench.supervisor.spawn("service", ["sh", "-c", "sleep 1000 & wait"], service=True)
    service = (await bench.next(ProcessStarted)).pid
    for key in ("a", "b"):
        bench.supervisor.spawn(key, nuisance(pids))
        await bench.next(ProcessStarted)
    await bench.until(lambda: len(noted(pids)) == 2 * NUISANCE_PROCESSES)
    await bench.until(lambda: len(processes.descendants(service)) == 1)
    bench.supervisor.kill_tree()
    ended = [await bench.next(ProcessEnded) for _ in range(2)]
    assert {event.exit_code for event in ended} == {-signal.SIGKILL}
    assert await bench.next(TreeKilled) == TreeKilled(())
    assert not [pid for pid in noted(pids) if processes.is_alive(pid)]
    assert processes.is_alive(service)
    assert len(processes.descendants(service)) == 1


async def test_kill_tree_of_what_ended_workers_left(bench: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    bench.supervisor.spawn("a", nuisance(pids))
    await bench.next(ProcessStarted)
    await bench.until(lambda: len(noted(pids)) == NUISANCE_PROCESSES)
    bench.supervisor.signal("a", signal.SIGTERM)
    await bench.next(ProcessEnded)
    assert [pid for pid in noted(pids) if processes.is_alive(pid)]
    bench.supervisor.kill_tree()
    await bench.next(TreeKilled)
    assert not [pid for pid in noted(pids) if processes.is_alive(pid)]
    bench.supervisor.kill_tree()  # with nothing to kill: answered all the same
    assert await bench.next(TreeKilled) == TreeKilled(())


async def test_kill_tree_outruns_a_tree_that_keeps_forking(bench: Any) -> None:
    # Bounded, because a tree that grows without end would take the machine with it, should the supervisor ever lose.
    forking = """
        import os, time
        for _ in range(100):
            if os.fork() == 0:
                os.setsid()
                for _ in range(3):
                    time.sleep(0.05)
                    if os.fork() == 0:
                        os.setsid()
                        break
                time.sleep(1000)
            time.sleep(0.02)
        time.sleep(1000)
    """

    bench.supervisor.spawn("a", [sys.executable, "-c", textwrap.dedent(forking)])
    await bench.next(ProcessStarted)
    await bench.until(lambda: len(processes.descendants(bench.supervisor.handle.pid)) > 4)
    bench.supervisor.kill_tree()
    await bench.next(ProcessEnded)
    assert await bench.next(TreeKilled) == TreeKilled(())
    assert not processes.descendants(bench.supervisor.handle.pid)


async def test_close_ends_services_too(bench: Any) -> None:
    bench.supervisor.spawn("service", ["sleep", "1000"], service=True)
    seen = [(await bench.next(ProcessStarted)).pid, bench.supervisor.handle.pid]
    await bench.close()
    assert not [pid for pid in seen if processes.is_alive(pid)]
    assert not bench.supervisor.alive


async def test_a_supervisor_that_is_killed_takes_its_workers_along_and_can_be_replaced(
    bench: Any, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"

    bench.supervisor.spawn("a", nuisance(pids))
    leader = (await bench.next(ProcessStarted)).pid
    await bench.until(lambda: len(noted(pids)) == NUISANCE_PROCESSES)
    os.kill(bench.supervisor.handle.pid, signal.SIGKILL)
    await bench.next(SupervisorDied)
    await bench.until(lambda: not processes.is_alive(leader))  # by its parent-death signal
    bench.supervisor.spawn("ignored", ["true"])  # no effect, no exception
    handle = await asyncio.to_thread(revive_supervisor, bench.supervisor.handle, bench.others)
    bench.supervisor = SupervisorClient(handle, bench.events.put_nowait)
    assert not [pid for pid in noted(pids) if processes.is_alive(pid)]
    assert (await output_of(bench, ["echo", "again"])) == "again\n"


async def test_a_supervisor_whose_agent_does_not_listen_still_kills(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SPAWN_CONFIRM_S_MAX", limit_s(60))
    bench.supervisor.spawn("a", ["sleep", "1000"])
    pid = (await bench.next(ProcessStarted)).pid
    supervisor = bench.supervisor
    asyncio.get_running_loop().remove_reader(supervisor.handle.sock)
    for number in range(600):  # more events than a socket holds
        if number == 599:
            supervisor.kill_tree(confirm_s=limit_s(60))  # it confirms, and is not heard for a while
        else:
            supervisor.spawn(f"x{number}", ["/nonexistent"])
    await bench.until(lambda: not processes.is_alive(pid))
    asyncio.get_running_loop().add_reader(supervisor.handle.sock, supervisor._readable)
    kinds = []
    while not kinds or kinds[-1] is not TreeKilled:
        kinds.append(type(await bench.next(object)))
    # One that is killed between fork and exec has ended, and has not failed to start.
    assert kinds.count(SpawnFailed) + kinds.count(ProcessEnded) == 600
    assert kinds.count(SpawnFailed) > 500


# --- a supervisor that executes nothing -------------------------------------------------------------------------------


def order_to_kill(supervisor: SupervisorClient) -> None:
    supervisor.kill_tree(confirm_s=0.2)


ORDERS: dict[str, Callable[[SupervisorClient], None]] = {
    "kill": order_to_kill,
    "signal": lambda supervisor: supervisor.signal("a", signal.SIGTERM, to_end=True),
    "start": lambda supervisor: supervisor.spawn("b", ["true"]),
    "fence": lambda supervisor: supervisor.fence(time.monotonic() + 0.1),
    "suspend": lambda supervisor: supervisor.fence(time.monotonic() + 1000, time.monotonic() + 0.1),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
async def test_a_suspended_supervisor_is_killed_with_all_processes_when_it_does_not_execute_an_order(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Callable[[SupervisorClient], None]
) -> None:
    pids = tmp_path / "pids"
    bench.supervisor.spawn("a", nuisance(pids))
    await bench.next(ProcessStarted)
    await bench.until(lambda: len(noted(pids)) == NUISANCE_PROCESSES)
    bench.supervisor._at_once_s = 0.2
    for name in ("CONFIRM_S_MAX", "SPAWN_CONFIRM_S_MAX"):
        monkeypatch.setattr(client, name, 0.2)
    os.kill(bench.supervisor.handle.pid, signal.SIGSTOP)
    order(bench.supervisor)
    await bench.next(SupervisorKilled)
    await bench.next(SupervisorDied)
    await bench.sweep()
    assert not [pid for pid in noted(pids) if processes.is_alive(pid)]


async def test_a_suspended_supervisor_is_killed_with_all_processes_at_the_end(bench: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    bench.supervisor.spawn("a", nuisance(pids))
    await bench.next(ProcessStarted)
    await bench.until(lambda: len(noted(pids)) == NUISANCE_PROCESSES)
    os.kill(bench.supervisor.handle.pid, signal.SIGSTOP)
    bench.supervisor._at_once_s = 0.2
    await bench.close()
    assert not [pid for pid in noted(pids) if processes.is_alive(pid)]


async def test_a_supervisor_that_is_continued_in_time_is_left_alone(bench: Any) -> None:
    bench.supervisor.spawn("a", ["sleep", "1000"])
    await bench.next(ProcessStarted)
    os.kill(bench.supervisor.handle.pid, signal.SIGSTOP)
    bench.supervisor.kill_tree(confirm_s=limit_s(20.0))
    await asyncio.sleep(0.1)
    os.kill(bench.supervisor.handle.pid, signal.SIGCONT)
    assert (await bench.next(ProcessEnded)).key == "a"
    await bench.next(TreeKilled)
    assert bench.supervisor.alive


async def test_time_in_which_the_agent_does_not_run_is_not_the_supervisors(bench: Any) -> None:
    """The whole node was suspended: the supervisor has had no time either."""
    bench.supervisor.spawn("a", ["sleep", "1000"])
    await bench.next(ProcessStarted)
    os.kill(bench.supervisor.handle.pid, signal.SIGSTOP)
    confirm_s = limit_s(1)
    bench.supervisor.kill_tree(confirm_s=confirm_s)
    time.sleep(1.2 * confirm_s)  # noqa: ASYNC251 - nothing of this process runs meanwhile
    os.kill(bench.supervisor.handle.pid, signal.SIGCONT)
    await bench.next(ProcessEnded)
    await bench.next(TreeKilled)
    assert bench.supervisor.alive


def test_a_suspended_supervisor_kills_all_when_its_agent_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    agent, supervisor = start_agent([["sleep", "1000"], nuisance(pids)])
    until(lambda: len(noted(pids)) == NUISANCE_PROCESSES, "all that the worker starts")
    everyone = [supervisor, *noted(pids)]
    os.kill(supervisor, signal.SIGSTOP)
    agent.kill()
    try:
        until(lambda: not [pid for pid in everyone if processes.is_alive(pid)], "the end of all")
    finally:
        for pid in filter(processes.is_alive, everyone):
            os.kill(pid, signal.SIGKILL)
        agent.communicate()


# --- the end of the agent ---------------------------------------------------------------------------------------------

AGENT = """
    from holdfast.supervisor.supervisor import fork_supervisor
    handle = fork_supervisor()
    import asyncio, sys
    from holdfast.supervisor.client import SupervisorClient, ProcessStarted

    async def main():
        started = asyncio.Queue()
        client = SupervisorClient(handle, started.put_nowait)
        for number, argv in enumerate(eval(sys.argv[1])):
            client.spawn(str(number), argv, service=number == 0)
            event = await started.get()
            assert isinstance(event, ProcessStarted), event
        print(handle.pid, flush=True)
        await asyncio.sleep(1000)

    asyncio.run(main())
"""


def start_agent(commands: list[list[str]], **options: Any) -> tuple[subprocess.Popen[str], int]:
    """An agent of few words; returns it with its supervisor's pid when all commands run."""
    agent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(AGENT), repr(commands)], stdout=subprocess.PIPE, text=True, **options
    )
    assert agent.stdout is not None
    return agent, int(agent.stdout.readline())


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_nothing_outlives_the_agent(tmp_path: Path, signum: signal.Signals) -> None:
    pids = tmp_path / "pids"
    agent, supervisor = start_agent([["sleep", "1000"], *[nuisance(pids)] * 2])
    until(lambda: len(noted(pids)) == 2 * NUISANCE_PROCESSES, "all that the workers start")
    # The first child of each double fork may still be ending.
    until(lambda: len(processes.descendants(supervisor)) == 1 + 2 * NUISANCE_PROCESSES, "only these")
    everyone = [supervisor, *processes.descendants(supervisor)]
    assert Path(f"/proc/{supervisor}/comm").read_text() == "hf-supervisor\n"
    agent.send_signal(signum)
    try:
        until(lambda: not [pid for pid in everyone if processes.is_alive(pid)], "the end of all")
    finally:
        for pid in filter(processes.is_alive, everyone):
            os.kill(pid, signal.SIGKILL)
        agent.communicate()


def test_under_nohup_the_workers_ignore_sighup_and_nothing_else() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as status, os.fdopen(writer, "w"):
        command = ["sh", "-c", f"cat /proc/self/status >/proc/{os.getpid()}/fd/{writer}; exec sleep 1000"]
        agent, _ = start_agent([command], preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        lines = [status.readline() for _ in range(20)]
        while not lines[-1].startswith("SigCgt"):
            lines.append(status.readline())
    agent.kill()
    agent.communicate()
    assert signals(status_of("".join(lines))["SigIgn"]) == 1 << (signal.SIGHUP - 1)


async def test_terminal_signals_do_not_end_the_supervisor(bench: Any) -> None:
    assert await output_of(bench, ["echo", "ready"]) == "ready\n"  # it has come so far as to ignore them
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        os.kill(bench.supervisor.handle.pid, signum)
    assert await output_of(bench, ["echo", "still"]) == "still\n"


OF_ANOTHER_USER = """
import asyncio, os, signal
from holdfast.supervisor.client import ProcessStarted, SupervisorClient
from holdfast.supervisor.supervisor import exec_supervisor


async def main():
    events = asyncio.Queue()
    supervisor = SupervisorClient(exec_supervisor(()), events.put_nowait)
    (up, says_up), (hears, go) = os.pipe(), os.pipe()
    line = ["setpriv", "--reuid=65534", "--clear-groups", "sh", "-c", "echo up; read go"]
    supervisor.spawn("a", line, fds={0: hears, 1: says_up})
    os.close(says_up)
    supervisor.spawn("b", ["sleep", "1000"])
    for _ in range(2):
        assert isinstance(await events.get(), ProcessStarted)
    os.read(up, 3)  # it is of another user now
    supervisor.signal("a", signal.SIGTERM)
    supervisor.signal("b", signal.SIGTERM)
    ended = [await events.get()]
    os.write(go, b"\\n")
    ended.append(await events.get())
    print([(each.key, each.exit_code) for each in ended])
    await supervisor.close()


asyncio.run(main())
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root, with setpriv, becomes another user"
)
def test_a_worker_of_another_user_costs_no_other_worker() -> None:
    """As `sudo` in front of a program makes it: nobody but root may signal it, a right that is taken away here."""
    line = ["setpriv", "--bounding-set=-kill", sys.executable, "-c", OF_ANOTHER_USER]
    done = subprocess.run(line, capture_output=True, text=True, timeout=limit_s(60))
    assert done.stdout.splitlines()[-1:] == ["[('b', -15), ('a', 0)]"], done.stdout + done.stderr


async def test_a_start_that_fails_without_a_file_names_the_program(bench: Any) -> None:
    bench.supervisor.spawn("a", ["sleep", "1000"], cpus=[100_000])
    failed = await bench.next(SpawnFailed)
    assert failed.text.endswith(": sleep"), failed.text
