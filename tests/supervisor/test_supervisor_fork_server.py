"""The supervisor and its fork server with real processes: who forks, who reaps, and what happens when one of them cannot."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.supervisor import processes
from holdfast.supervisor.client import (
    SupervisorDied,
    TreeKilled,
)
from tests.supervisor.conftest import HEAVY

# --- who forks, who reaps ---------------------------------------------------------------------------------------------


async def test_one_import_for_all_workers_and_the_supervisor_is_their_parent(site: Any) -> None:
    site.start_fork_server("heavy")
    keys = [f"w{number}" for number in range(20)]
    for key in keys:
        site.spawn(key, "probe.py", "x", "y")
    assert await site.end_of(*keys) == [0] * 20
    for key in keys:
        assert site.output(key).split() == [str(site.pids[key]), str(site.bench.supervisor.handle.pid), "3"]
    assert len(site.imports()) == 1
    assert site.imports()[0] not in site.pids.values()


async def test_exit_codes_and_signals_come_from_the_worker_itself(site: Any) -> None:
    site.write("seven.py", "raise SystemExit(7)")
    site.write("wrong.py", "import heavy\nraise ValueError('mine')")
    site.write("waits.py", "import time\ntime.sleep(100)")
    site.start_fork_server("heavy")
    site.spawn("seven", "seven.py")
    site.spawn("wrong", "wrong.py")
    site.spawn("waits", "waits.py")
    await site.until(lambda: "waits" in site.pids)
    site.bench.supervisor.signal("waits", signal.SIGUSR1)
    assert await site.end_of("seven", "wrong", "waits") == [7, 1, -signal.SIGUSR1]
    trace = site.output("wrong").splitlines()
    assert trace[0].startswith("Traceback")
    assert trace[1] == f'  File "{site.folder}/wrong.py", line 2, in <module>'
    assert trace[-1] == "ValueError: mine"
    assert not site.told or "imported" in site.told[0]


async def test_descriptors_folder_and_cpus_as_for_exec(site: Any) -> None:
    cpu = min(os.sched_getaffinity(0))

    site.write(
        "place.py",
        """
        import os
        print(os.getcwd(), os.sched_getaffinity(0), sorted(map(int, os.listdir("/proc/self/fd")))[:-1])
        print(os.read(3, 9), os.read(4, 9), os.path.exists("/proc/self/fd/500"), os.environ["MINE"])
        """,
    )
    site.start_fork_server("heavy")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"three")
        fds = {3: theirs.fileno(), 4: os.memfd_create("four")}
        os.write(fds[4], b"four")
        os.lseek(fds[4], 0, 0)
        site.spawn("w", "place.py", fds=fds, cwd="/", cpus=[cpu], env_set={"MINE": "\udcff"})
        os.close(fds[4])
        assert await site.end_of("w") == [0]
    lines = site.output("w").encode(errors="surrogateescape").splitlines()
    assert lines[0].decode() == f"/ {{{cpu}}} [0, 1, 2, 3, 4]"
    assert lines[1].startswith(b"b'three' b'four' False ")


async def test_what_imports_print_and_set_reaches_every_worker(site: Any) -> None:
    site.write("heavy.py", site.heavy + "\n    os.environ['BY_IMPORT'] = '1'\n    print('heavy is here', flush=True)\n")
    site.write("asks.py", "import os\nprint(os.environ['BY_IMPORT'])")
    site.start_fork_server("heavy")
    site.spawn("a", "asks.py")
    site.spawn("b", "asks.py")
    await site.end_of("a", "b")
    assert site.output("a") == site.output("b") == "heavy is here\n1\n"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="OpenBLAS starts no thread for one CPU")
async def test_openblas_ends_its_threads_for_a_fork_and_starts_them_again(site: Any) -> None:
    pytest.importorskip("numpy")

    site.write("pool.py", "import os, numpy\ntasks = len(os.listdir('/proc/self/task'))\n")
    site.write(
        "uses.py",
        """
        import os, pool, numpy
        before = len(os.listdir("/proc/self/task"))
        matrix = numpy.ones((600, 600))
        print(pool.tasks, before, float((matrix @ matrix).sum()), len(os.listdir("/proc/self/task")))
        """,
    )
    site.start_fork_server("pool", threads=2)
    site.spawn("w", "uses.py", env_set={"OMP_NUM_THREADS": "2"})
    assert await site.end_of("w") == [0]
    assert site.output("w") == "2 1 216000000.0 2\n"
    assert [text.partition(" in ")[0] for text in site.told] == ["imported pool"]


# --- ended before it has begun ----------------------------------------------------------------------------------------


def slow_import(site: Any, name: str = "heavy", before: str = HEAVY) -> Callable[[], None]:
    """Makes a module wait for leave; returns what gives it."""
    gate = site.folder / "gate"
    os.mkfifo(gate)
    site.write(f"{name}.py", f"{before}\n    open({str(gate)!r}).read()\n")

    def open_gate() -> None:
        with open(gate, "w"):
            return

    return open_gate


async def test_a_signal_ends_a_worker_that_is_not_there_yet(site: Any) -> None:
    go_on = slow_import(site)
    site.start_fork_server("heavy")
    site.spawn("ended")
    site.spawn("goes")
    site.bench.supervisor.signal("ended", signal.SIGTERM)
    site.bench.supervisor.signal("goes", signal.SIGCONT)
    assert await site.end_of("ended") == [-signal.SIGTERM]
    go_on()
    assert await site.end_of("goes") == [0]
    assert site.output("ended") == ""


async def test_kill_tree_ends_those_that_are_not_there_yet_and_spares_the_fork_server(site: Any) -> None:
    go_on = slow_import(site)
    site.start_fork_server("heavy")
    for key in ("a", "b"):
        site.spawn(key)
    site.spawn("service", service=True)
    site.bench.supervisor.kill_tree()
    await site.until(lambda: {"a", "b"} <= site.ended.keys())
    assert isinstance(await site.take(), TreeKilled)
    go_on()
    site.spawn("c")
    assert await site.end_of("a", "b", "service", "c") == [-9, -9, 0, 0]
    assert len(site.imports()) == 1
    assert site.output("a") == site.output("b") == ""


# --- when there is no fork server -----------------------------------------------------------------------------------------


async def test_a_killed_fork_server_is_built_again_and_nobody_waits_for_that(site: Any) -> None:
    site.write("waits.py", "import time\ntime.sleep(100)")
    site.start_fork_server("heavy")
    site.spawn("old", "waits.py")
    first = await site.fork_server()
    await site.until(lambda: "old" in site.pids)
    site.told.clear()
    os.kill(first, signal.SIGKILL)
    await site.until(lambda: any("built again" in text for text in site.told))
    site.spawn("meanwhile")
    assert await site.end_of("meanwhile") == [0]
    await site.fork_server()
    (second,) = set(site.imports()) - {first, site.pids["meanwhile"]}
    assert processes.is_alive(second)
    count = len(site.imports())
    site.spawn("after")
    assert await site.end_of("after") == [0]
    assert len(site.imports()) == count, "it was not forked"
    assert processes.is_alive(site.pids["old"]), "a worker lives on without the fork server that it came from"


async def test_one_that_dies_while_it_imports_is_not_built_again(site: Any) -> None:
    site.write(
        "heavy.py", site.heavy + "\n    if not open('/proc/self/cmdline').read().count('probe.py'): os.abort()\n"
    )
    site.start_fork_server("heavy")
    site.spawn("a")
    assert await site.end_of("a") == [0]
    assert site.told == ["the fork server ended with exit code -6; workers are started by exec"]


UNFIT = {
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(100,), daemon=True).start()",
        "1 thread",
    ),
    "child": ("import subprocess\nchild = subprocess.Popen(['sleep', '5'])", "started a process"),
    "tracer": ("import sys\nsys.setprofile(lambda *_: None)", "a tracer"),
    "cuda": ("import sys, torch", "initialised CUDA"),
    "missing": ("import no_such_module", "No module named"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "asks": ("import os\nos.environ.get('RANK')", "RANK is the worker's own"),
    "spec": ("import os\n'RANK' in os.environ", "RANK is the worker's own"),
}


@pytest.mark.parametrize("kind", UNFIT)
async def test_what_cannot_be_forked_is_executed_and_one_line_says_why(site: Any, kind: str) -> None:
    source, why = UNFIT[kind]

    site.write("odd.py", source)
    site.write("torch.py", "class cuda:\n    is_initialized = staticmethod(lambda: True)\n")
    site.write("asks.py", "import sys\nprint('odd' in sys.modules)")
    site.start_fork_server("odd")
    for key in ("a", "b"):
        site.spawn(key, "asks.py", env_set={"RANK": "3"})
    assert await site.end_of("a", "b") == [0, 0]
    assert site.output("a") == site.output("b") == "False\n"
    said = [text for text in site.told if why in text]
    assert len(said) == 1, site.told


async def test_what_traces_every_python_from_its_start_does_not_keep_workers_from_being_forked(site: Any) -> None:
    """As coverage.py does with its start-up file: a worker that is executed would be traced as well."""

    site.write("sitecustomize.py", "import sys\nsys.setprofile(lambda *_: None)\n")
    site.write("asks.py", "import sys\nprint('heavy' in sys.modules, sys.getprofile() is not None)")
    traced = {"PYTHONPATH": str(site.folder)}
    site.start_fork_server("heavy", env_set=traced)
    site.spawn("a", "asks.py", env_set=traced)
    assert await site.end_of("a") == [0]
    assert site.output("a") == "True True\n", site.told


async def test_an_unfit_module_is_left_out_and_the_others_serve(site: Any) -> None:
    site.write("odd.py", UNFIT["thread"][0])
    site.start_fork_server("heavy", "odd", "missing")
    await site.fork_server()
    assert [text.partition(":")[0] for text in site.told if "odd" in text] == ["odd"]
    assert any(text.startswith("missing cannot be imported") for text in site.told)
    count = len(site.imports())
    site.spawn("a")
    assert await site.end_of("a") == [0]
    assert len(site.imports()) == count


async def test_variables_that_libraries_read_and_another_interpreter_lead_to_exec(site: Any) -> None:
    site.start_fork_server("heavy")
    await site.fork_server()
    site.spawn("threads", env_set={"OMP_NUM_THREADS": "7"})
    site.spawn("same", env_set={"OMP_NUM_THREADS": "1"})
    site.bench.supervisor.spawn("flags", [sys.executable, "-I", *site.argv()[1:]], warm=True)
    site.spawn("long", "probe.py", *["x" * 100_000] * 4)
    assert await site.end_of("threads", "same", "long") == [0, 0, 0]
    await site.end_of("flags")
    imported = site.imports()
    assert not {site.pids["same"], site.pids["long"]} & set(imported), "a long command line is forked like any"
    assert site.pids["threads"] in imported
    assert any("OMP_NUM_THREADS" in text for text in site.told)


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_nothing_outlives_the_supervisor(site: Any) -> None:
    site.write("waits.py", "import time\ntime.sleep(100)")
    site.start_fork_server("heavy")
    site.spawn("w", "waits.py")
    fork_server = await site.fork_server()
    await site.until(lambda: "w" in site.pids)
    os.kill(site.bench.supervisor.handle.pid, signal.SIGKILL)
    while not isinstance(await site.take(), SupervisorDied):
        pass
    await site.bench.until(lambda: not processes.is_alive(fork_server) and not processes.is_alive(site.pids["w"]))
    await site.bench.sweep()


# --- standbys, with real processes: parked, promoted, killed, and replaced --------------------------------------------


async def parked(site: Any, *modules: str, standby: int = 2, **more: Any) -> tuple[int, ...]:
    """A first worker has run; pids of the standbys that came then."""
    site.start_fork_server(*modules, standby=standby, **more)
    site.spawn("first")
    await site.end_of("first")
    site.parked = ()
    await site.until(lambda: len(site.parked) == standby)
    return site.parked


async def test_standbys_become_the_next_workers_and_others_take_their_place(site: Any) -> None:
    waiting = await parked(site, "heavy")
    assert site.own_bytes > 0
    for pid in waiting:
        assert site.name_of(pid) == "hf-standby"
    for key in ("a", "b", "c"):
        site.spawn(key, "probe.py", "x", "y")
    assert await site.end_of("a", "b", "c") == [0, 0, 0]
    assert (site.pids["a"], site.pids["b"]) == waiting
    for key in ("a", "b", "c"):
        assert site.output(key).split() == [str(site.pids[key]), str(site.bench.supervisor.handle.pid), "3"]
    await site.until(lambda: len(site.parked) == 2 and not set(site.parked) & set(waiting))
    assert len(site.imports()) == 1


async def test_the_end_of_a_generation_spares_the_standbys_and_the_end_of_the_supervisor_does_not(site: Any) -> None:
    waiting = await parked(site, "heavy")
    site.write("waits.py", "import time\ntime.sleep(100)")
    site.spawn("b", "waits.py")
    await site.until(lambda: "b" in site.pids)
    assert site.pids["b"] == waiting[0]
    site.bench.supervisor.kill_tree()
    assert await site.end_of("b") == [-9], "a standby that has become a worker is no longer spared"
    assert isinstance(await site.take(), TreeKilled)
    assert processes.is_alive(waiting[1])
    os.kill(site.bench.supervisor.handle.pid, signal.SIGKILL)
    while not isinstance(await site.take(), SupervisorDied):
        pass
    await site.bench.sweep()
    assert not processes.is_alive(waiting[1])


async def test_a_standby_that_was_killed_or_must_not_be_this_worker_costs_nothing(site: Any) -> None:
    waiting = await parked(site, "heavy", standby=3)
    os.kill(waiting[0], signal.SIGSTOP)
    os.kill(waiting[0], signal.SIGKILL)
    site.spawn("a")
    site.spawn("b", env_set={"OMP_NUM_THREADS": "7"})
    assert await site.end_of("a", "b") == [0, 0]
    assert site.pids["a"] not in (*waiting[:1], site.pids["b"])
    assert "OMP_NUM_THREADS is the worker's own" in site.told[-1]


async def test_a_standby_that_is_killed_when_it_has_answered_has_ended(site: Any) -> None:
    (pid,) = await parked(site, "heavy", standby=1)
    site.write("waits.py", "import time\ntime.sleep(100)")
    site.spawn("a", "waits.py")
    for number in range(100):  # the supervisor has its hands full, and hears the answer when it has reaped the dead
        site.bench.supervisor.spawn(f"other{number}", ["/bin/true"])
    stat = Path(f"/proc/{pid}/stat")
    await site.bench.until(lambda: site.name_of(pid) != "hf-standby" and stat.read_text().split(") ")[1][0] == "S")
    os.kill(pid, signal.SIGKILL)
    # Killed before it had answered, it would have been replaced by a fork, which nobody kills.
    await site.until(lambda: "a" in site.pids)
    if site.pids["a"] == pid:
        assert await site.end_of("a") == [-signal.SIGKILL]


# --- the next fork server: what only restarts need is imported where nobody waits for it ------------------------------


LATE = """
    import os
    print("late is here", flush=True)
    with open(os.path.join(os.path.dirname(__file__), "late_pid"), "w") as file:
        file.write(str(os.getpid()))
"""
ASKS = "import heavy, sys\nprint('late' in sys.modules)"


async def importing(site: Any, *later: str, standby: int = 0) -> int:
    """The pid of the next fork server, in the middle of its imports. A worker has run."""
    site.write("asks.py", ASKS)
    site.start_fork_server("heavy", later=later or ("late",), standby=standby)
    site.spawn("first", "asks.py")
    await site.end_of("first")
    path = site.folder / "late_pid"
    await site.bench.until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


async def replaced(site: Any) -> None:
    await site.until(lambda: any(text.endswith(", for restarts") for text in site.told))


def forked(site: Any, *keys: str) -> bool:
    """Whether these workers have imported the heavy module with one of the fork servers."""
    return not {site.pids[key] for key in keys} & set(site.imports())


async def test_workers_are_forked_while_the_next_fork_server_imports(site: Any) -> None:
    slow_import(site, "late", LATE)
    await importing(site)
    for key in ("a", "b"):
        site.spawn(key, "asks.py")
    assert await site.end_of("a", "b") == [0, 0]
    assert forked(site, "a", "b")
    assert site.output("a") == "False\n", "and do not repeat what it has printed"


async def test_it_takes_the_first_one_s_place_when_it_has_imported(site: Any) -> None:
    go_on = slow_import(site, "late", LATE)
    following = await importing(site)
    (first,) = site.imports()
    go_on()
    await replaced(site)
    site.spawn("a", "asks.py")
    assert await site.end_of("a") == [0]
    assert site.output("a") == "late is here\nTrue\n"
    assert forked(site, "a")
    await site.bench.until(lambda: not processes.is_alive(first))
    assert processes.is_alive(following)
    assert len(site.told) == 2, site.told


async def test_a_worker_that_it_forked_sees_what_one_that_was_executed_sees(site: Any) -> None:
    probe = Path(__file__).parents[1] / "fork_server" / "scripts" / "probe.py"
    (site.folder / "sees.py").write_text(probe.read_text())
    site.write("late.py", "import os\nopen(os.path.join(os.path.dirname(__file__), 'late_pid'), 'w').write('1')")
    job = {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "OMP_NUM_THREADS": "1"}

    async def seen(key: str) -> Any:
        probed = {"HOLDFAST_PROBE_RANKS": "1", "HOLDFAST_PROBE_FILE": f"{site.folder}/{key}."}
        site.spawn(key, "sees.py", "light", env_set={**job, **probed})
        assert await site.end_of(key) == [0], site.output(key)
        return json.loads((site.folder / f"{key}.0.0").read_text())

    executed = await seen("executed")
    await importing(site)
    await replaced(site)
    forked = await seen("forked")
    assert "late" in forked["modules"]
    assert {*forked["same"]} == {*executed["same"]}
    for what, value in executed["same"].items():
        if what != "descriptors":  # the names of the files of their output
            assert forked["same"][what] == value, what
    assert {*forked["same"]["descriptors"]} == {*executed["same"]["descriptors"]}


async def test_no_request_is_lost_when_it_takes_over(site: Any) -> None:
    go_on = slow_import(site, "late", LATE)
    await importing(site)
    keys = [f"w{number}" for number in range(60)]
    for key in keys[:30]:
        site.spawn(key, "asks.py")
    go_on()
    for key in keys[30:]:
        site.spawn(key, "asks.py")
    assert await site.end_of(*keys) == [0] * 60
    assert forked(site, *keys)
    await replaced(site)


async def test_standbys_are_there_before_it_and_again_with_what_it_has_imported(site: Any) -> None:
    go_on = slow_import(site, "late", LATE)
    await importing(site, standby=2)
    await site.until(lambda: len(site.parked) == 2)
    early = site.parked
    site.spawn("a", "asks.py")
    await site.end_of("a")
    assert (site.pids["a"], site.output("a")) == (early[0], "False\n")
    go_on()
    await replaced(site)
    await site.until(lambda: len(site.parked) == 2 and not set(site.parked) & set(early))
    await site.bench.until(lambda: not any(map(processes.is_alive, early)))
    site.spawn("b", "asks.py")
    await site.end_of("b")
    assert (site.pids["b"], site.output("b")) == (site.parked[0], "late is here\nTrue\n")


async def test_one_that_is_killed_while_it_imports_is_reported_and_the_first_one_goes_on(site: Any) -> None:
    slow_import(site, "late", LATE)
    os.kill(await importing(site), signal.SIGKILL)
    await site.until(lambda: any("ended" in text for text in site.told))
    assert site.told[1:] == ["late: the process that imports for restarts ended with exit code -9; left out"]
    site.spawn("a", "asks.py")
    assert await site.end_of("a") == [0]
    assert forked(site, "a")


async def test_one_that_is_suspended_delays_no_worker_and_ends_with_the_supervisor(site: Any) -> None:
    slow_import(site, "late", LATE)
    following = await importing(site)
    os.kill(following, signal.SIGSTOP)
    site.spawn("a", "asks.py")
    assert await site.end_of("a") == [0]
    assert forked(site, "a")
    os.kill(site.bench.supervisor.handle.pid, signal.SIGKILL)
    while not isinstance(await site.take(), SupervisorDied):
        pass
    await site.bench.until(lambda: not processes.is_alive(following))
    await site.bench.sweep()


async def test_kill_tree_spares_it(site: Any) -> None:
    go_on = slow_import(site, "late", LATE)
    following = await importing(site)
    site.bench.supervisor.kill_tree()
    while not isinstance(await site.take(), TreeKilled):
        pass
    go_on()
    await replaced(site)
    assert processes.is_alive(following)


async def test_an_import_for_restarts_that_raises_is_reported_once_and_the_first_one_goes_on(site: Any) -> None:
    site.write("late.py", LATE + "\n    raise ValueError('boom')")
    following = await importing(site)
    await site.bench.until(lambda: not processes.is_alive(following))
    for key in ("a", "b"):
        site.spawn(key, "asks.py")
        assert await site.end_of(key) == [0]
    assert forked(site, "a", "b")
    assert site.told[1:] == ["late cannot be imported: ValueError: boom"]


async def test_what_cannot_be_forked_is_left_out_and_the_rest_is_imported_for_restarts(site: Any) -> None:
    site.write("odd.py", UNFIT["thread"][0])
    site.write("late.py", LATE)
    await importing(site, "odd", "late")
    await replaced(site)
    site.spawn("a", "asks.py")
    await site.end_of("a")
    assert site.output("a") == "late is here\nTrue\n"
    assert len(site.imports()) == 1, "the first one has served until then"
    assert [text.partition(":")[0] for text in site.told if "odd" in text] == ["odd"]


@pytest.mark.parametrize("killed", ["first", "both"])
async def test_when_the_first_one_is_killed_it_ends_too_and_both_are_built_again(site: Any, killed: str) -> None:
    slow_import(site, "late", LATE)
    following = await importing(site)
    (first,) = site.imports()
    site.write("late.py", LATE)
    os.kill(site.bench.supervisor.handle.pid, signal.SIGSTOP)  # it reaps both in one go
    os.kill(first, signal.SIGKILL)
    if killed == "both":
        os.kill(following, signal.SIGKILL)
    os.kill(site.bench.supervisor.handle.pid, signal.SIGCONT)
    await replaced(site)
    assert not processes.is_alive(following)
    site.spawn("a", "asks.py")
    await site.end_of("a")
    assert site.output("a") == "late is here\nTrue\n"
    assert forked(site, "a")


async def test_one_that_is_killed_after_it_took_over_is_built_again(site: Any) -> None:
    site.write("late.py", LATE)
    following = await importing(site)
    await replaced(site)
    site.told.clear()
    os.kill(following, signal.SIGKILL)
    await replaced(site)
    assert site.told[0] == "the fork server ended with exit code -9; it is built again"
    site.spawn("a", "asks.py")
    await site.end_of("a")
    assert site.output("a") == "late is here\nTrue\n"
    assert forked(site, "a")
