"""The keeper and its nursery with real processes: who forks, who reaps, and what happens when one of them cannot."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.runtime.workers import processes
from holdfast.runtime.workers.keeper_client import (
    KeeperDied,
    TreeKilled,
)

OnBench = Callable[..., None]

# --- who forks, who reaps ---------------------------------------------------------------------------------------------


def test_one_import_for_all_workers_and_the_keeper_is_their_parent(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
        site.nurse("heavy")
        keys = [f"w{number}" for number in range(20)]
        for key in keys:
            site.spawn(key, "probe.py", "x", "y")
        assert await site.end_of(*keys) == [0] * 20
        for key in keys:
            assert site.output(key).split() == [str(site.pids[key]), str(site.bench.keeper.handle.pid), "3"]
        assert len(site.imports()) == 1
        assert site.imports()[0] not in site.pids.values()

    on_site(scenario)


def test_exit_codes_and_signals_come_from_the_worker_itself(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
        site.write("seven.py", "raise SystemExit(7)")
        site.write("wrong.py", "import heavy\nraise ValueError('mine')")
        site.write("waits.py", "import time\ntime.sleep(100)")
        site.nurse("heavy")
        site.spawn("seven", "seven.py")
        site.spawn("wrong", "wrong.py")
        site.spawn("waits", "waits.py")
        await site.until(lambda: "waits" in site.pids)
        site.bench.keeper.signal("waits", signal.SIGUSR1)
        assert await site.end_of("seven", "wrong", "waits") == [7, 1, -signal.SIGUSR1]
        trace = site.output("wrong").splitlines()
        assert trace[0].startswith("Traceback")
        assert trace[1] == f'  File "{site.folder}/wrong.py", line 2, in <module>'
        assert trace[-1] == "ValueError: mine"
        assert not site.told or "imported" in site.told[0]

    on_site(scenario)


def test_descriptors_folder_and_cpus_as_for_exec(on_site: Any) -> None:
    cpu = min(os.sched_getaffinity(0))

    async def scenario(site: Any) -> None:
        site.write(
            "place.py",
            """
            import os
            print(os.getcwd(), os.sched_getaffinity(0), sorted(map(int, os.listdir("/proc/self/fd")))[:-1])
            print(os.read(3, 9), os.read(4, 9), os.path.exists("/proc/self/fd/500"), os.environ["MINE"])
            """,
        )
        site.nurse("heavy")
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

    on_site(scenario)


def test_what_imports_print_and_set_reaches_every_worker(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
        site.write(
            "heavy.py", site.heavy + "\n    os.environ['BY_IMPORT'] = '1'\n    print('heavy is here', flush=True)\n"
        )
        site.write("asks.py", "import os\nprint(os.environ['BY_IMPORT'])")
        site.nurse("heavy")
        site.spawn("a", "asks.py")
        site.spawn("b", "asks.py")
        await site.end_of("a", "b")
        assert site.output("a") == site.output("b") == "heavy is here\n1\n"

    on_site(scenario)


def test_later_modules_are_there_for_a_restart(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
        site.write("late.py", "")
        site.write("asks.py", "import sys\nprint('late' in sys.modules)")
        site.nurse("heavy", later=("late",))
        site.spawn("first", "asks.py")
        await site.end_of("first")
        await site.until(lambda: any("for restarts" in text for text in site.told))
        site.spawn("second", "asks.py")
        await site.end_of("second")
        assert (site.output("first"), site.output("second")) == ("False\n", "True\n")

    on_site(scenario)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="OpenBLAS starts no thread for one CPU")
def test_openblas_ends_its_threads_for_a_fork_and_starts_them_again(on_site: Any) -> None:
    pytest.importorskip("numpy")

    async def scenario(site: Any) -> None:
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
        site.nurse("pool", threads=2)
        site.spawn("w", "uses.py", env_set={"OMP_NUM_THREADS": "2"})
        assert await site.end_of("w") == [0]
        assert site.output("w") == "2 1 216000000.0 2\n"
        assert [text.partition(" in ")[0] for text in site.told] == ["imported pool"]

    on_site(scenario)


# --- ended before it has begun ----------------------------------------------------------------------------------------


def slow_import(site: Any) -> Callable[[], None]:
    """Makes the heavy module wait for leave; returns what gives it."""
    gate = site.folder / "gate"
    os.mkfifo(gate)
    site.write("heavy.py", f"{site.heavy}\n    open({str(gate)!r}).read()\n")

    def open_gate() -> None:
        with open(gate, "w"):
            return

    return open_gate


def test_a_signal_ends_a_worker_that_is_not_there_yet(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
        go_on = slow_import(site)
        site.nurse("heavy")
        site.spawn("ended")
        site.spawn("goes")
        site.bench.keeper.signal("ended", signal.SIGTERM)
        site.bench.keeper.signal("goes", signal.SIGCONT)
        assert await site.end_of("ended") == [-signal.SIGTERM]
        go_on()
        assert await site.end_of("goes") == [0]
        assert site.output("ended") == ""

    on_site(scenario)


def test_kill_tree_ends_those_that_are_not_there_yet_and_spares_the_nursery(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
        go_on = slow_import(site)
        site.nurse("heavy")
        for key in ("a", "b"):
            site.spawn(key)
        site.spawn("service", service=True)
        site.bench.keeper.kill_tree()
        await site.until(lambda: {"a", "b"} <= site.ended.keys())
        assert isinstance(await site.take(), TreeKilled)
        go_on()
        site.spawn("c")
        assert await site.end_of("a", "b", "service", "c") == [-9, -9, 0, 0]
        assert len(site.imports()) == 1
        assert site.output("a") == site.output("b") == ""

    on_site(scenario)


# --- when there is no nursery -----------------------------------------------------------------------------------------


def test_a_killed_nursery_is_built_again_and_nobody_waits_for_that(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
        site.write("waits.py", "import time\ntime.sleep(100)")
        site.nurse("heavy")
        site.spawn("old", "waits.py")
        first = await site.nursery()
        await site.until(lambda: "old" in site.pids)
        site.told.clear()
        os.kill(first, signal.SIGKILL)
        await site.until(lambda: any("built again" in text for text in site.told))
        site.spawn("meanwhile")
        assert await site.end_of("meanwhile") == [0]
        await site.nursery()
        (second,) = set(site.imports()) - {first, site.pids["meanwhile"]}
        assert processes.is_alive(second)
        count = len(site.imports())
        site.spawn("after")
        assert await site.end_of("after") == [0]
        assert len(site.imports()) == count, "it was not forked"
        assert processes.is_alive(site.pids["old"]), "a worker lives on without the nursery that it came from"

    on_site(scenario)


def test_one_that_dies_while_it_imports_is_not_built_again(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
        site.write(
            "heavy.py", site.heavy + "\n    if not open('/proc/self/cmdline').read().count('probe.py'): os.abort()\n"
        )
        site.nurse("heavy")
        site.spawn("a")
        assert await site.end_of("a") == [0]
        assert site.told == ["the nursery ended with exit code -6; workers are started by exec"]

    on_site(scenario)


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
def test_what_cannot_be_forked_is_executed_and_one_line_says_why(on_site: Any, kind: str) -> None:
    source, why = UNFIT[kind]

    async def scenario(site: Any) -> None:
        site.write("odd.py", source)
        site.write("torch.py", "class cuda:\n    is_initialized = staticmethod(lambda: True)\n")
        site.write("asks.py", "import sys\nprint('odd' in sys.modules)")
        site.nurse("odd")
        for key in ("a", "b"):
            site.spawn(key, "asks.py", env_set={"RANK": "3"})
        assert await site.end_of("a", "b") == [0, 0]
        assert site.output("a") == site.output("b") == "False\n"
        said = [text for text in site.told if why in text]
        assert len(said) == 1, site.told

    on_site(scenario)


def test_what_traces_every_python_from_its_start_does_not_keep_workers_from_being_forked(on_site: Any) -> None:
    """As coverage.py does with its start-up file: a worker that is executed would be traced as well."""

    async def scenario(site: Any) -> None:
        site.write("sitecustomize.py", "import sys\nsys.setprofile(lambda *_: None)\n")
        site.write("asks.py", "import sys\nprint('heavy' in sys.modules, sys.getprofile() is not None)")
        traced = {"PYTHONPATH": str(site.folder)}
        site.nurse("heavy", env_set=traced)
        site.spawn("a", "asks.py", env_set=traced)
        assert await site.end_of("a") == [0]
        assert site.output("a") == "True True\n", site.told

    on_site(scenario)


def test_an_unfit_module_is_left_out_and_the_others_serve(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
        site.write("odd.py", UNFIT["thread"][0])
        site.nurse("heavy", "odd", "missing")
        await site.nursery()
        assert [text.partition(":")[0] for text in site.told if "odd" in text] == ["odd"]
        assert any(text.startswith("missing cannot be imported") for text in site.told)
        count = len(site.imports())
        site.spawn("a")
        assert await site.end_of("a") == [0]
        assert len(site.imports()) == count

    on_site(scenario)


def test_variables_that_libraries_read_and_another_interpreter_lead_to_exec(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
        site.nurse("heavy")
        await site.nursery()
        site.spawn("threads", env_set={"OMP_NUM_THREADS": "7"})
        site.spawn("same", env_set={"OMP_NUM_THREADS": "1"})
        site.bench.keeper.spawn("flags", [sys.executable, "-I", *site.argv()[1:]], warm=True)
        site.spawn("long", "probe.py", *["x" * 100_000] * 4)
        assert await site.end_of("threads", "same", "long") == [0, 0, 0]
        await site.end_of("flags")
        imported = site.imports()
        assert not {site.pids["same"], site.pids["long"]} & set(imported), "a long command line is forked like any"
        assert site.pids["threads"] in imported
        assert any("OMP_NUM_THREADS" in text for text in site.told)

    on_site(scenario)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_nothing_outlives_the_keeper(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
        site.write("waits.py", "import time\ntime.sleep(100)")
        site.nurse("heavy")
        site.spawn("w", "waits.py")
        nursery = await site.nursery()
        await site.until(lambda: "w" in site.pids)
        os.kill(site.bench.keeper.handle.pid, signal.SIGKILL)
        while not isinstance(await site.take(), KeeperDied):
            pass
        await site.bench.until(lambda: not processes.is_alive(nursery) and not processes.is_alive(site.pids["w"]))
        await site.bench.sweep()

    on_site(scenario)
