"""The keeper and its nursery with real processes: who forks, who reaps, and what happens when one of them cannot."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.runtime.workers import processes
from holdfast.runtime.workers.keeper_client import (
    KeeperDied,
    PreloadTold,
    ProcessEnded,
    ProcessStarted,
    StandbyTold,
    TreeGone,
    sweep,
)
from holdfast.runtime.workers.preload import FOLDER
from holdfast.runtime.workers.spawn import BOOTSTRAP

OnBench = Callable[..., None]

HEAVY = """
    import os
    with open(os.path.join(os.path.dirname(__file__), "imports"), "a") as file:
        file.write(f"{os.getpid()}\\n")
"""
PROBE = """
    import os, sys
    import heavy
    with open("/proc/self/stat") as file:
        parent = int(file.read().rpartition(")")[2].split()[1])
    print(os.getpid(), parent, len(sys.argv), flush=True)
"""


class Site:
    """A folder with a heavy module and a script, and workers that run it on a bench."""

    def __init__(self, bench: Any, folder: Path) -> None:
        self.bench = bench
        self.folder = folder
        self.told: list[str] = []
        self.ended: dict[str, ProcessEnded] = {}
        self.pids: dict[str, int] = {}
        self.parked: tuple[int, ...] = ()
        self.own_bytes = 0
        self.write("heavy.py", HEAVY)
        self.write("probe.py", PROBE)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(text))

    def nurse(self, *modules: str, later: tuple[str, ...] = (), threads: int = 1, standby: int = 0) -> None:
        self.bench.keeper.nurse(
            {
                "do": "nurse",
                "argv": [sys.executable, "-u", BOOTSTRAP, "nursery", FOLDER, "3"],
                "env_set": {"OMP_NUM_THREADS": str(threads)},
                "modules": list(modules),
                "later": list(later),
                "standby": standby,
                "worker": {"argv": self.argv(), "first_path": str(self.folder)},
            }
        )

    def argv(self, script: str = "probe.py", *arguments: str) -> list[str]:
        return [sys.executable, "-u", BOOTSTRAP, "script", str(self.folder / script), *arguments]

    def spawn(self, key: str, *line: str, **options: Any) -> None:
        with open(self.folder / f"{key}.out", "ab") as file:
            fds = {1: file.fileno(), 2: file.fileno(), **options.pop("fds", {})}
            self.bench.keeper.spawn(key, self.argv(*line), fds=fds, warm=True, **options)

    async def take(self) -> Any:
        event = await asyncio.wait_for(self.bench.events.get(), 20)
        match event:
            case PreloadTold(text):
                self.told.append(text)
            case StandbyTold(pids, own_bytes):
                self.parked, self.own_bytes = pids, own_bytes
            case ProcessStarted(key, pid):
                self.pids[key] = pid
            case ProcessEnded(key):
                self.ended[key] = event
        return event

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.take()

    async def end_of(self, *keys: str) -> list[int]:
        await self.until(lambda: set(keys) <= self.ended.keys())
        return [self.ended[key].exit_code for key in keys]

    def output(self, key: str) -> str:
        return (self.folder / f"{key}.out").read_text(errors="surrogateescape")

    def name_of(self, pid: int) -> str:
        return Path(f"/proc/{pid}/comm").read_text().strip()

    def imports(self) -> list[int]:
        """The process of every import of the heavy module."""
        return [int(line) for line in (self.folder / "imports").read_text().split()]

    async def nursery(self) -> int:
        """Its pid, once it is ready."""
        await self.until(lambda: any(text.startswith("imported") for text in self.told))
        return self.imports()[-1]


@pytest.fixture
def on_site(on_bench: OnBench, tmp_path: Path) -> Callable[..., None]:
    def run(scenario: Callable[[Site], Any]) -> None:
        on_bench(lambda bench: scenario(Site(bench, tmp_path)))

    return run


# --- who forks, who reaps ---------------------------------------------------------------------------------------------


def test_one_import_for_all_workers_and_the_keeper_is_their_parent(on_site: Any) -> None:
    async def scenario(site: Site) -> None:
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
    async def scenario(site: Site) -> None:
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

    async def scenario(site: Site) -> None:
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
    async def scenario(site: Site) -> None:
        site.write("heavy.py", HEAVY + "\n    os.environ['BY_IMPORT'] = '1'\n    print('heavy is here', flush=True)\n")
        site.write("asks.py", "import os\nprint(os.environ['BY_IMPORT'])")
        site.nurse("heavy")
        site.spawn("a", "asks.py")
        site.spawn("b", "asks.py")
        await site.end_of("a", "b")
        assert site.output("a") == site.output("b") == "heavy is here\n1\n"

    on_site(scenario)


def test_later_modules_are_there_for_a_restart(on_site: Any) -> None:
    async def scenario(site: Site) -> None:
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

    async def scenario(site: Site) -> None:
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


def slow_import(site: Site) -> Callable[[], None]:
    """Makes the heavy module wait for leave; returns what gives it."""
    gate = site.folder / "gate"
    os.mkfifo(gate)
    site.write("heavy.py", f"{HEAVY}\n    open({str(gate)!r}).read()\n")

    def open_gate() -> None:
        with open(gate, "w"):
            return

    return open_gate


def test_a_signal_ends_a_worker_that_is_not_there_yet(on_site: Any) -> None:
    async def scenario(site: Site) -> None:
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
    async def scenario(site: Site) -> None:
        go_on = slow_import(site)
        site.nurse("heavy")
        for key in ("a", "b"):
            site.spawn(key)
        site.spawn("service", service=True)
        site.bench.keeper.kill_tree()
        await site.until(lambda: {"a", "b"} <= site.ended.keys())
        assert isinstance(await site.take(), TreeGone)
        go_on()
        site.spawn("c")
        assert await site.end_of("a", "b", "service", "c") == [-9, -9, 0, 0]
        assert len(site.imports()) == 1
        assert site.output("a") == site.output("b") == ""

    on_site(scenario)


# --- standbys ---------------------------------------------------------------------------------------------------------


async def parked(site: Site, *modules: str, standby: int = 2, **more: Any) -> tuple[int, ...]:
    """A first worker has run; pids of the standbys that came then."""
    site.nurse(*modules, standby=standby, **more)
    site.spawn("first")
    await site.end_of("first")
    site.parked = ()
    await site.until(lambda: len(site.parked) == standby)
    return site.parked


def test_standbys_become_the_next_workers_and_others_take_their_place(on_site: Any) -> None:
    async def scenario(site: Site) -> None:
        waiting = await parked(site, "heavy")
        assert site.own_bytes > 0
        for pid in waiting:
            assert site.name_of(pid) == "hf-standby"
        for key in ("a", "b", "c"):
            site.spawn(key, "probe.py", "x", "y")
        assert await site.end_of("a", "b", "c") == [0, 0, 0]
        assert (site.pids["a"], site.pids["b"]) == waiting
        for key in ("a", "b", "c"):
            assert site.output(key).split() == [str(site.pids[key]), str(site.bench.keeper.handle.pid), "3"]
        await site.until(lambda: len(site.parked) == 2 and not set(site.parked) & set(waiting))
        assert len(site.imports()) == 1

    on_site(scenario)


def test_standbys_have_what_is_imported_for_restarts(on_site: Any) -> None:
    async def scenario(site: Site) -> None:
        site.write("late.py", "")
        site.write("asks.py", "import sys\nprint('late' in sys.modules)")
        (pid,) = await parked(site, "heavy", standby=1, later=("late",))
        site.spawn("next", "asks.py")
        await site.end_of("next")
        assert (site.pids["next"], site.output("next")) == (pid, "True\n")

    on_site(scenario)


def test_what_is_left_for_restarts_is_imported_by_a_nursery_that_was_built_again(on_site: Any) -> None:
    async def scenario(site: Site) -> None:
        site.write("odd.py", UNFIT["thread"][0])
        site.write("late.py", "")
        site.write("asks.py", "import sys\nprint('late' in sys.modules)")
        (pid,) = await parked(site, "heavy", standby=1, later=("odd", "late"))
        site.spawn("next", "asks.py")
        await site.end_of("next")
        assert (site.pids["next"], site.output("next")) == (pid, "True\n")

    on_site(scenario)


def test_the_end_of_a_generation_spares_the_standbys_and_the_end_of_the_keeper_does_not(on_site: Any) -> None:
    async def scenario(site: Site) -> None:
        waiting = await parked(site, "heavy")
        site.write("waits.py", "import time\ntime.sleep(100)")
        site.spawn("b", "waits.py")
        await site.until(lambda: "b" in site.pids)
        assert site.pids["b"] == waiting[0]
        site.bench.keeper.kill_tree()
        assert await site.end_of("b") == [-9], "a standby that has become a worker is no longer spared"
        assert isinstance(await site.take(), TreeGone)
        assert processes.is_alive(waiting[1])
        os.kill(site.bench.keeper.handle.pid, signal.SIGKILL)
        while not isinstance(await site.take(), KeeperDied):
            pass
        await asyncio.to_thread(sweep, site.bench.keeper.handle)
        assert not processes.is_alive(waiting[1])

    on_site(scenario)


def test_a_standby_that_was_killed_or_must_not_be_this_worker_costs_nothing(on_site: Any) -> None:
    async def scenario(site: Site) -> None:
        waiting = await parked(site, "heavy", standby=3)
        os.kill(waiting[0], signal.SIGSTOP)
        os.kill(waiting[0], signal.SIGKILL)
        site.spawn("a")
        site.spawn("b", env_set={"OMP_NUM_THREADS": "7"})
        assert await site.end_of("a", "b") == [0, 0]
        assert site.pids["a"] not in (*waiting[:1], site.pids["b"])
        assert "OMP_NUM_THREADS is the worker's own" in site.told[-1]

    on_site(scenario)


def test_a_standby_that_is_killed_when_it_has_answered_has_ended(on_site: Any) -> None:
    async def scenario(site: Site) -> None:
        (pid,) = await parked(site, "heavy", standby=1)
        site.write("waits.py", "import time\ntime.sleep(100)")
        site.spawn("a", "waits.py")
        for number in range(100):  # the keeper has its hands full, and hears the answer when it has reaped the dead
            site.bench.keeper.spawn(f"other{number}", ["/bin/true"])
        stat = Path(f"/proc/{pid}/stat")
        await site.bench.until(lambda: site.name_of(pid) != "hf-standby" and stat.read_text().split(") ")[1][0] == "S")
        os.kill(pid, signal.SIGKILL)
        # Killed before it had answered, it would have been replaced by a fork, which nobody kills.
        await site.until(lambda: "a" in site.pids)
        if site.pids["a"] == pid:
            assert await site.end_of("a") == [-signal.SIGKILL]

    on_site(scenario)


# --- when there is no nursery -----------------------------------------------------------------------------------------


def test_a_killed_nursery_is_built_again_and_nobody_waits_for_that(on_site: Any) -> None:
    async def scenario(site: Site) -> None:
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
    async def scenario(site: Site) -> None:
        site.write("heavy.py", HEAVY + "\n    if not open('/proc/self/cmdline').read().count('probe.py'): os.abort()\n")
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

    async def scenario(site: Site) -> None:
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


def test_an_unfit_module_is_left_out_and_the_others_serve(on_site: Any) -> None:
    async def scenario(site: Site) -> None:
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
    async def scenario(site: Site) -> None:
        site.nurse("heavy")
        await site.nursery()
        site.spawn("threads", env_set={"OMP_NUM_THREADS": "7"})
        site.spawn("same", env_set={"OMP_NUM_THREADS": "1"})
        site.bench.keeper.spawn("flags", [sys.executable, "-I", *site.argv()[1:]], warm=True)
        site.spawn("long", "probe.py", *["x" * 100_000] * 4)
        assert await site.end_of("threads", "same", "long") == [0, 0, 0]
        await site.end_of("flags")
        imported = site.imports()
        assert site.pids["same"] not in imported
        assert {site.pids["threads"], site.pids["long"]} <= set(imported)
        assert any("OMP_NUM_THREADS" in text for text in site.told)

    on_site(scenario)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_nothing_outlives_the_keeper(on_site: Any) -> None:
    async def scenario(site: Site) -> None:
        site.write("waits.py", "import time\ntime.sleep(100)")
        site.nurse("heavy")
        site.spawn("w", "waits.py")
        nursery = await site.nursery()
        await site.until(lambda: "w" in site.pids)
        handle = site.bench.keeper.handle
        os.kill(handle.pid, signal.SIGKILL)
        while not isinstance(await site.take(), KeeperDied):
            pass
        await site.bench.until(lambda: not processes.is_alive(nursery) and not processes.is_alive(site.pids["w"]))
        await asyncio.to_thread(sweep, handle)

    on_site(scenario)
