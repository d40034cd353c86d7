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


async def test_one_import_for_all_workers_and_the_supervisor_is_their_parent(preloaded: Any) -> None:
    preloaded.start_fork_server("heavy")
    keys = [f"w{number}" for number in range(20)]
    for key in keys:
        preloaded.spawn(key, "probe.py", "x", "y")
    assert await preloaded.end_of(*keys) == [0] * 20
    for key in keys:
        assert preloaded.output(key).split() == [
            str(preloaded.pids[key]),
            str(preloaded.bench.supervisor.handle.pid),
            "3",
        ]
    assert len(preloaded.imports()) == 1
    assert preloaded.imports()[0] not in preloaded.pids.values()


async def test_exit_codes_and_signals_come_from_the_worker_itself(preloaded: Any) -> None:
    preloaded.write("seven.py", "raise SystemExit(7)")
    preloaded.write("wrong.py", "import heavy\nraise ValueError('mine')")
    preloaded.write("waits.py", "import time\ntime.sleep(100)")
    preloaded.start_fork_server("heavy")
    preloaded.spawn("seven", "seven.py")
    preloaded.spawn("wrong", "wrong.py")
    preloaded.spawn("waits", "waits.py")
    await preloaded.until(lambda: "waits" in preloaded.pids)
    preloaded.bench.supervisor.signal("waits", signal.SIGUSR1)
    assert await preloaded.end_of("seven", "wrong", "waits") == [7, 1, -signal.SIGUSR1]
    trace = preloaded.output("wrong").splitlines()
    assert trace[0].startswith("Traceback")
    assert trace[1] == f'  File "{preloaded.folder}/wrong.py", line 2, in <module>'
    assert trace[-1] == "ValueError: mine"
    assert not preloaded.told or "imported" in preloaded.told[0]


async def test_descriptors_folder_and_cpus_as_for_exec(preloaded: Any) -> None:
    cpu = min(os.sched_getaffinity(0))

    preloaded.write(
        "place.py",
        """
        import os
        print(os.getcwd(), os.sched_getaffinity(0), sorted(map(int, os.listdir("/proc/self/fd")))[:-1])
        print(os.read(3, 9), os.read(4, 9), os.path.exists("/proc/self/fd/500"), os.environ["MINE"])
        """,
    )
    preloaded.start_fork_server("heavy")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"three")
        fds = {3: theirs.fileno(), 4: os.memfd_create("four")}
        os.write(fds[4], b"four")
        os.lseek(fds[4], 0, 0)
        preloaded.spawn("w", "place.py", fds=fds, cwd="/", cpus=[cpu], env_set={"MINE": "\udcff"})
        os.close(fds[4])
        assert await preloaded.end_of("w") == [0]
    lines = preloaded.output("w").encode(errors="surrogateescape").splitlines()
    assert lines[0].decode() == f"/ {{{cpu}}} [0, 1, 2, 3, 4]"
    assert lines[1].startswith(b"b'three' b'four' False ")


async def test_what_imports_print_and_set_reaches_every_worker(preloaded: Any) -> None:
    preloaded.write(
        "heavy.py", preloaded.heavy + "\n    os.environ['BY_IMPORT'] = '1'\n    print('heavy is here', flush=True)\n"
    )
    preloaded.write("asks.py", "import os\nprint(os.environ['BY_IMPORT'])")
    preloaded.start_fork_server("heavy")
    preloaded.spawn("a", "asks.py")
    preloaded.spawn("b", "asks.py")
    await preloaded.end_of("a", "b")
    assert preloaded.output("a") == preloaded.output("b") == "heavy is here\n1\n"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="OpenBLAS starts no thread for one CPU")
async def test_openblas_ends_its_threads_for_a_fork_and_starts_them_again(preloaded: Any) -> None:
    pytest.importorskip("numpy")

    preloaded.write("pool.py", "import os, numpy\ntasks = len(os.listdir('/proc/self/task'))\n")
    preloaded.write(
        "uses.py",
        """
        import os, pool, numpy
        before = len(os.listdir("/proc/self/task"))
        matrix = numpy.ones((600, 600))
        print(pool.tasks, before, float((matrix @ matrix).sum()), len(os.listdir("/proc/self/task")))
        """,
    )
    preloaded.start_fork_server("pool", threads=2)
    preloaded.spawn("w", "uses.py", env_set={"OMP_NUM_THREADS": "2"})
    assert await preloaded.end_of("w") == [0]
    assert preloaded.output("w") == "2 1 216000000.0 2\n"
    assert [text.partition(" in ")[0] for text in preloaded.told] == ["imported pool"]


# --- ended before it has begun ----------------------------------------------------------------------------------------


def slow_import(preloaded: Any, name: str = "heavy", before: str = HEAVY) -> Callable[[], None]:
    """Makes a module wait for leave; returns what gives it."""
    gate = preloaded.folder / "gate"
    os.mkfifo(gate)
    preloaded.write(f"{name}.py", f"{before}\n    open({str(gate)!r}).read()\n")

    def open_gate() -> None:
        with open(gate, "w"):
            return

    return open_gate


async def test_a_signal_ends_a_worker_that_is_not_there_yet(preloaded: Any) -> None:
    go_on = slow_import(preloaded)
    preloaded.start_fork_server("heavy")
    preloaded.spawn("ended")
    preloaded.spawn("goes")
    preloaded.bench.supervisor.signal("ended", signal.SIGTERM)
    preloaded.bench.supervisor.signal("goes", signal.SIGCONT)
    assert await preloaded.end_of("ended") == [-signal.SIGTERM]
    go_on()
    assert await preloaded.end_of("goes") == [0]
    assert preloaded.output("ended") == ""


async def test_kill_tree_ends_those_that_are_not_there_yet_and_spares_the_fork_server(preloaded: Any) -> None:
    go_on = slow_import(preloaded)
    preloaded.start_fork_server("heavy")
    for key in ("a", "b"):
        preloaded.spawn(key)
    preloaded.spawn("service", service=True)
    preloaded.bench.supervisor.kill_tree()
    await preloaded.until(lambda: {"a", "b"} <= preloaded.ended.keys())
    assert isinstance(await preloaded.take(), TreeKilled)
    go_on()
    preloaded.spawn("c")
    assert await preloaded.end_of("a", "b", "service", "c") == [-9, -9, 0, 0]
    assert len(preloaded.imports()) == 1
    assert preloaded.output("a") == preloaded.output("b") == ""


# --- when there is no fork server -----------------------------------------------------------------------------------------


async def test_a_killed_fork_server_is_built_again_and_nobody_waits_for_that(preloaded: Any) -> None:
    preloaded.write("waits.py", "import time\ntime.sleep(100)")
    preloaded.start_fork_server("heavy")
    preloaded.spawn("old", "waits.py")
    first = await preloaded.fork_server()
    await preloaded.until(lambda: "old" in preloaded.pids)
    preloaded.told.clear()
    os.kill(first, signal.SIGKILL)
    await preloaded.until(lambda: any("built again" in text for text in preloaded.told))
    preloaded.spawn("meanwhile")
    assert await preloaded.end_of("meanwhile") == [0]
    await preloaded.fork_server()
    (second,) = set(preloaded.imports()) - {first, preloaded.pids["meanwhile"]}
    assert processes.is_alive(second)
    count = len(preloaded.imports())
    preloaded.spawn("after")
    assert await preloaded.end_of("after") == [0]
    assert len(preloaded.imports()) == count, "it was not forked"
    assert processes.is_alive(preloaded.pids["old"]), "a worker lives on without the fork server that it came from"


async def test_one_that_dies_while_it_imports_is_not_built_again(preloaded: Any) -> None:
    preloaded.write(
        "heavy.py", preloaded.heavy + "\n    if not open('/proc/self/cmdline').read().count('probe.py'): os.abort()\n"
    )
    preloaded.start_fork_server("heavy")
    preloaded.spawn("a")
    assert await preloaded.end_of("a") == [0]
    assert preloaded.told == [
        "the fork server ended with exit code -6; each worker imports by itself: starts are slower"
    ]


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
async def test_what_cannot_be_forked_is_executed_and_one_line_says_why(preloaded: Any, kind: str) -> None:
    source, why = UNFIT[kind]

    preloaded.write("odd.py", source)
    preloaded.write("torch.py", "class cuda:\n    is_initialized = staticmethod(lambda: True)\n")
    preloaded.write("asks.py", "import sys\nprint('odd' in sys.modules)")
    preloaded.start_fork_server("odd")
    for key in ("a", "b"):
        preloaded.spawn(key, "asks.py", env_set={"RANK": "3"})
    assert await preloaded.end_of("a", "b") == [0, 0]
    assert preloaded.output("a") == preloaded.output("b") == "False\n"
    said = [text for text in preloaded.told if why in text]
    assert len(said) == 1, preloaded.told


async def test_what_traces_every_python_from_its_start_does_not_keep_workers_from_being_forked(preloaded: Any) -> None:
    """As coverage.py does with its start-up file: a worker that is executed would be traced as well."""

    preloaded.write("sitecustomize.py", "import sys\nsys.setprofile(lambda *_: None)\n")
    preloaded.write("asks.py", "import sys\nprint('heavy' in sys.modules, sys.getprofile() is not None)")
    traced = {"PYTHONPATH": str(preloaded.folder)}
    preloaded.start_fork_server("heavy", env_set=traced)
    preloaded.spawn("a", "asks.py", env_set=traced)
    assert await preloaded.end_of("a") == [0]
    assert preloaded.output("a") == "True True\n", preloaded.told


async def test_an_unfit_module_is_left_out_and_the_others_serve(preloaded: Any) -> None:
    preloaded.write("odd.py", UNFIT["thread"][0])
    preloaded.start_fork_server("heavy", "odd", "missing")
    await preloaded.fork_server()
    assert [text.partition(":")[0] for text in preloaded.told if "odd" in text] == ["odd"]
    assert any(text.startswith("missing cannot be imported") for text in preloaded.told)
    count = len(preloaded.imports())
    preloaded.spawn("a")
    assert await preloaded.end_of("a") == [0]
    assert len(preloaded.imports()) == count


async def test_variables_that_libraries_read_and_another_interpreter_lead_to_exec(preloaded: Any) -> None:
    preloaded.start_fork_server("heavy")
    await preloaded.fork_server()
    preloaded.spawn("threads", env_set={"OMP_NUM_THREADS": "7"})
    preloaded.spawn("same", env_set={"OMP_NUM_THREADS": "1"})
    preloaded.bench.supervisor.spawn("flags", [sys.executable, "-I", *preloaded.argv()[1:]], warm=True)
    preloaded.spawn("long", "probe.py", *["x" * 100_000] * 4)
    assert await preloaded.end_of("threads", "same", "long") == [0, 0, 0]
    await preloaded.end_of("flags")
    imported = preloaded.imports()
    assert not {preloaded.pids["same"], preloaded.pids["long"]} & set(imported), (
        "a long command line is forked like any"
    )
    assert preloaded.pids["threads"] in imported
    assert any("OMP_NUM_THREADS" in text for text in preloaded.told)


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_nothing_outlives_the_supervisor(preloaded: Any) -> None:
    preloaded.write("waits.py", "import time\ntime.sleep(100)")
    preloaded.start_fork_server("heavy")
    preloaded.spawn("w", "waits.py")
    fork_server = await preloaded.fork_server()
    await preloaded.until(lambda: "w" in preloaded.pids)
    os.kill(preloaded.bench.supervisor.handle.pid, signal.SIGKILL)
    while not isinstance(await preloaded.take(), SupervisorDied):
        pass
    await preloaded.bench.until(
        lambda: not processes.is_alive(fork_server) and not processes.is_alive(preloaded.pids["w"])
    )
    await preloaded.bench.sweep()


# --- standbys, with real processes: parked, promoted, killed, and replaced --------------------------------------------


async def parked(preloaded: Any, *modules: str, standby: int = 2, **more: Any) -> tuple[int, ...]:
    """A first worker has run; pids of the standbys that came then."""
    preloaded.start_fork_server(*modules, standby=standby, **more)
    preloaded.spawn("first")
    await preloaded.end_of("first")  # on a busy machine they may come before its end is told
    await preloaded.until(lambda: len(preloaded.parked) == standby)
    return preloaded.parked


async def test_standbys_become_the_next_workers_and_others_take_their_place(preloaded: Any) -> None:
    waiting = await parked(preloaded, "heavy")
    assert preloaded.own_bytes > 0
    for pid in waiting:
        assert preloaded.name_of(pid) == "hf-standby"
    for key in ("a", "b", "c"):
        preloaded.spawn(key, "probe.py", "x", "y")
    assert await preloaded.end_of("a", "b", "c") == [0, 0, 0]
    assert (preloaded.pids["a"], preloaded.pids["b"]) == waiting
    for key in ("a", "b", "c"):
        assert preloaded.output(key).split() == [
            str(preloaded.pids[key]),
            str(preloaded.bench.supervisor.handle.pid),
            "3",
        ]
    await preloaded.until(lambda: len(preloaded.parked) == 2 and not set(preloaded.parked) & set(waiting))
    assert len(preloaded.imports()) == 1


async def test_the_end_of_a_generation_spares_the_standbys_and_the_end_of_the_supervisor_does_not(
    preloaded: Any,
) -> None:
    waiting = await parked(preloaded, "heavy")
    preloaded.write("waits.py", "import time\ntime.sleep(100)")
    preloaded.spawn("b", "waits.py")
    await preloaded.until(lambda: "b" in preloaded.pids)
    assert preloaded.pids["b"] == waiting[0]
    preloaded.bench.supervisor.kill_tree()
    assert await preloaded.end_of("b") == [-9], "a standby that has become a worker is no longer spared"
    assert isinstance(await preloaded.take(), TreeKilled)
    assert processes.is_alive(waiting[1])
    os.kill(preloaded.bench.supervisor.handle.pid, signal.SIGKILL)
    while not isinstance(await preloaded.take(), SupervisorDied):
        pass
    await preloaded.bench.sweep()
    assert not processes.is_alive(waiting[1])


async def test_a_standby_that_was_killed_or_must_not_be_this_worker_costs_nothing(preloaded: Any) -> None:
    waiting = await parked(preloaded, "heavy", standby=3)
    os.kill(waiting[0], signal.SIGSTOP)
    os.kill(waiting[0], signal.SIGKILL)
    preloaded.spawn("a")
    preloaded.spawn("b", env_set={"OMP_NUM_THREADS": "7"})
    assert await preloaded.end_of("a", "b") == [0, 0]
    assert preloaded.pids["a"] not in (*waiting[:1], preloaded.pids["b"])
    assert "OMP_NUM_THREADS is the worker's own" in preloaded.told[-1]


async def test_a_standby_that_is_killed_when_it_has_answered_has_ended(preloaded: Any) -> None:
    (pid,) = await parked(preloaded, "heavy", standby=1)
    preloaded.write("waits.py", "import time\ntime.sleep(100)")
    preloaded.spawn("a", "waits.py")
    for number in range(100):  # the supervisor has its hands full, and hears the answer when it has reaped the dead
        preloaded.bench.supervisor.spawn(f"other{number}", ["/bin/true"])
    stat = Path(f"/proc/{pid}/stat")
    await preloaded.bench.until(
        lambda: preloaded.name_of(pid) != "hf-standby" and stat.read_text().split(") ")[1][0] == "S"
    )
    os.kill(pid, signal.SIGKILL)
    # Killed before it had answered, it would have been replaced by a fork, which nobody kills.
    await preloaded.until(lambda: "a" in preloaded.pids)
    if preloaded.pids["a"] == pid:
        assert await preloaded.end_of("a") == [-signal.SIGKILL]


# --- the next fork server: what only restarts need is imported where nobody waits for it ------------------------------


LATE = """
    import os
    print("late is here", flush=True)
    with open(os.path.join(os.path.dirname(__file__), "late_pid"), "w") as file:
        file.write(str(os.getpid()))
"""
ASKS = "import heavy, sys\nprint('late' in sys.modules)"


async def importing(preloaded: Any, *later: str, **options: Any) -> int:
    """The pid of the next fork server, in the middle of its imports. A worker has run."""
    preloaded.write("asks.py", ASKS)
    preloaded.start_fork_server("heavy", later=later or ("late",), **options)
    preloaded.spawn("first", "asks.py")
    await preloaded.end_of("first")
    path = preloaded.folder / "late_pid"
    await preloaded.bench.until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


async def replaced(preloaded: Any) -> None:
    await preloaded.until(lambda: any(text.endswith(", for restarts") for text in preloaded.told))


def forked(preloaded: Any, *keys: str) -> bool:
    """Whether these workers have imported the heavy module with one of the fork servers."""
    return not {preloaded.pids[key] for key in keys} & set(preloaded.imports())


async def test_workers_are_forked_while_the_next_fork_server_imports(preloaded: Any) -> None:
    slow_import(preloaded, "late", LATE)
    await importing(preloaded)
    for key in ("a", "b"):
        preloaded.spawn(key, "asks.py")
    assert await preloaded.end_of("a", "b") == [0, 0]
    assert forked(preloaded, "a", "b")
    assert preloaded.output("a") == "False\n", "and do not repeat what it has printed"


async def test_it_takes_the_first_one_s_place_when_it_has_imported(preloaded: Any) -> None:
    go_on = slow_import(preloaded, "late", LATE)
    following = await importing(preloaded)
    (first,) = preloaded.imports()
    go_on()
    await replaced(preloaded)
    preloaded.spawn("a", "asks.py")
    assert await preloaded.end_of("a") == [0]
    assert preloaded.output("a") == "late is here\nTrue\n"
    assert forked(preloaded, "a")
    await preloaded.bench.until(lambda: not processes.is_alive(first))
    assert processes.is_alive(following)
    assert len(preloaded.told) == 2, preloaded.told


async def test_a_worker_that_it_forked_sees_what_one_that_was_executed_sees(preloaded: Any) -> None:
    probe = Path(__file__).parents[1] / "fork_server" / "scripts" / "probe.py"
    (preloaded.folder / "sees.py").write_text(probe.read_text())
    preloaded.write("late.py", "import os\nopen(os.path.join(os.path.dirname(__file__), 'late_pid'), 'w').write('1')")
    job = {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "OMP_NUM_THREADS": "1"}

    async def seen(key: str) -> Any:
        probed = {"HOLDFAST_PROBE_RANKS": "1", "HOLDFAST_PROBE_FILE": f"{preloaded.folder}/{key}."}
        preloaded.spawn(key, "sees.py", "light", env_set={**job, **probed})
        assert await preloaded.end_of(key) == [0], preloaded.output(key)
        return json.loads((preloaded.folder / f"{key}.0.0").read_text())

    executed = await seen("executed")
    await importing(preloaded)
    await replaced(preloaded)
    forked = await seen("forked")
    assert "late" in forked["modules"]
    assert {*forked["same"]} == {*executed["same"]}
    for what, value in executed["same"].items():
        if what != "descriptors":  # the names of the files of their output
            assert forked["same"][what] == value, what
    assert {*forked["same"]["descriptors"]} == {*executed["same"]["descriptors"]}


async def test_no_request_is_lost_when_it_takes_over(preloaded: Any) -> None:
    go_on = slow_import(preloaded, "late", LATE)
    await importing(preloaded)
    keys = [f"w{number}" for number in range(60)]
    for key in keys[:30]:
        preloaded.spawn(key, "asks.py")
    go_on()
    for key in keys[30:]:
        preloaded.spawn(key, "asks.py")
    assert await preloaded.end_of(*keys) == [0] * 60
    assert forked(preloaded, *keys)
    await replaced(preloaded)


async def test_standbys_are_there_before_it_and_again_with_what_it_has_imported(preloaded: Any) -> None:
    go_on = slow_import(preloaded, "late", LATE)
    await importing(preloaded, standby=2)
    await preloaded.until(lambda: len(preloaded.parked) == 2)
    early = preloaded.parked
    preloaded.spawn("a", "asks.py")
    await preloaded.end_of("a")
    assert (preloaded.pids["a"], preloaded.output("a")) == (early[0], "False\n")
    go_on()
    await replaced(preloaded)
    await preloaded.until(lambda: len(preloaded.parked) == 2 and not set(preloaded.parked) & set(early))
    await preloaded.bench.until(lambda: not any(map(processes.is_alive, early)))
    preloaded.spawn("b", "asks.py")
    await preloaded.end_of("b")
    assert (preloaded.pids["b"], preloaded.output("b")) == (preloaded.parked[0], "late is here\nTrue\n")


async def test_one_that_is_killed_while_it_imports_is_reported_and_the_first_one_goes_on(preloaded: Any) -> None:
    slow_import(preloaded, "late", LATE)
    os.kill(await importing(preloaded), signal.SIGKILL)
    await preloaded.until(lambda: any("ended" in text for text in preloaded.told))
    assert preloaded.told[1:] == ["late: the process that imports for restarts ended with exit code -9; left out"]
    preloaded.spawn("a", "asks.py")
    assert await preloaded.end_of("a") == [0]
    assert forked(preloaded, "a")


async def test_one_that_hangs_is_reported_once_and_takes_its_place_if_it_goes_on(preloaded: Any) -> None:
    go_on = slow_import(preloaded, "late", LATE)
    following = await importing(preloaded, later_s=0.1)
    await preloaded.until(lambda: len(preloaded.told) > 1)
    who = f"late: the process that imports for restarts (pid {following})"
    assert preloaded.told[1] == f"{who} is not ready after 0.1 s; workers import this themselves until it is"
    preloaded.spawn("a", "asks.py")
    assert await preloaded.end_of("a") == [0]
    assert forked(preloaded, "a")
    go_on()
    await replaced(preloaded)
    assert len(preloaded.told) == 3, preloaded.told


async def test_one_that_is_suspended_delays_no_worker_and_ends_with_the_supervisor(preloaded: Any) -> None:
    slow_import(preloaded, "late", LATE)
    following = await importing(preloaded)
    os.kill(following, signal.SIGSTOP)
    preloaded.spawn("a", "asks.py")
    assert await preloaded.end_of("a") == [0]
    assert forked(preloaded, "a")
    os.kill(preloaded.bench.supervisor.handle.pid, signal.SIGKILL)
    while not isinstance(await preloaded.take(), SupervisorDied):
        pass
    await preloaded.bench.until(lambda: not processes.is_alive(following))
    await preloaded.bench.sweep()


async def test_kill_tree_spares_it(preloaded: Any) -> None:
    go_on = slow_import(preloaded, "late", LATE)
    following = await importing(preloaded)
    preloaded.bench.supervisor.kill_tree()
    while not isinstance(await preloaded.take(), TreeKilled):
        pass
    go_on()
    await replaced(preloaded)
    assert processes.is_alive(following)


async def test_an_import_for_restarts_that_raises_is_reported_once_and_the_first_one_goes_on(preloaded: Any) -> None:
    preloaded.write("late.py", LATE + "\n    raise ValueError('boom')")
    following = await importing(preloaded)
    await preloaded.bench.until(lambda: not processes.is_alive(following))
    for key in ("a", "b"):
        preloaded.spawn(key, "asks.py")
        assert await preloaded.end_of(key) == [0]
    assert forked(preloaded, "a", "b")
    assert preloaded.told[1:] == ["late cannot be imported: ValueError: boom"]


async def test_what_cannot_be_forked_is_left_out_and_the_rest_is_imported_for_restarts(preloaded: Any) -> None:
    preloaded.write("odd.py", UNFIT["thread"][0])
    preloaded.write("late.py", LATE)
    await importing(preloaded, "odd", "late")
    await replaced(preloaded)
    preloaded.spawn("a", "asks.py")
    await preloaded.end_of("a")
    assert preloaded.output("a") == "late is here\nTrue\n"
    assert len(preloaded.imports()) == 1, "the first one has served until then"
    assert [text.partition(":")[0] for text in preloaded.told if "odd" in text] == ["odd"]


@pytest.mark.parametrize("killed", ["first", "both"])
async def test_when_the_first_one_is_killed_it_ends_too_and_both_are_built_again(preloaded: Any, killed: str) -> None:
    slow_import(preloaded, "late", LATE)
    following = await importing(preloaded)
    (first,) = preloaded.imports()
    preloaded.write("late.py", LATE)
    os.kill(preloaded.bench.supervisor.handle.pid, signal.SIGSTOP)  # it reaps both in one go
    os.kill(first, signal.SIGKILL)
    if killed == "both":
        os.kill(following, signal.SIGKILL)
    os.kill(preloaded.bench.supervisor.handle.pid, signal.SIGCONT)
    await replaced(preloaded)
    assert not processes.is_alive(following)
    preloaded.spawn("a", "asks.py")
    await preloaded.end_of("a")
    assert preloaded.output("a") == "late is here\nTrue\n"
    assert forked(preloaded, "a")


async def test_one_that_is_killed_after_it_took_over_is_built_again(preloaded: Any) -> None:
    preloaded.write("late.py", LATE)
    following = await importing(preloaded)
    await replaced(preloaded)
    preloaded.told.clear()
    os.kill(following, signal.SIGKILL)
    await replaced(preloaded)
    assert preloaded.told[0] == "the fork server ended with exit code -9; it is built again"
    preloaded.spawn("a", "asks.py")
    await preloaded.end_of("a")
    assert preloaded.output("a") == "late is here\nTrue\n"
    assert forked(preloaded, "a")
