"""Standbys, with real processes: parked, promoted, killed, and replaced."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from holdfast.runtime.workers import processes
from holdfast.runtime.workers.keeper_client import (
    KeeperDied,
    TreeKilled,
)


async def parked(site: Any, *modules: str, standby: int = 2, **more: Any) -> tuple[int, ...]:
    """A first worker has run; pids of the standbys that came then."""
    site.nurse(*modules, standby=standby, **more)
    site.spawn("first")
    await site.end_of("first")
    site.parked = ()
    await site.until(lambda: len(site.parked) == standby)
    return site.parked


def test_standbys_become_the_next_workers_and_others_take_their_place(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
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
    async def scenario(site: Any) -> None:
        site.write("late.py", "")
        site.write("asks.py", "import sys\nprint('late' in sys.modules)")
        (pid,) = await parked(site, "heavy", standby=1, later=("late",))
        site.spawn("next", "asks.py")
        await site.end_of("next")
        assert (site.pids["next"], site.output("next")) == (pid, "True\n")

    on_site(scenario)


def test_what_is_left_for_restarts_is_imported_by_a_nursery_that_was_built_again(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
        site.write("odd.py", "import sys\nsys.setprofile(lambda *_: None)")
        site.write("late.py", "")
        site.write("asks.py", "import sys\nprint('late' in sys.modules)")
        (pid,) = await parked(site, "heavy", standby=1, later=("odd", "late"))
        site.spawn("next", "asks.py")
        await site.end_of("next")
        assert (site.pids["next"], site.output("next")) == (pid, "True\n")

    on_site(scenario)


def test_the_end_of_a_generation_spares_the_standbys_and_the_end_of_the_keeper_does_not(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
        waiting = await parked(site, "heavy")
        site.write("waits.py", "import time\ntime.sleep(100)")
        site.spawn("b", "waits.py")
        await site.until(lambda: "b" in site.pids)
        assert site.pids["b"] == waiting[0]
        site.bench.keeper.kill_tree()
        assert await site.end_of("b") == [-9], "a standby that has become a worker is no longer spared"
        assert isinstance(await site.take(), TreeKilled)
        assert processes.is_alive(waiting[1])
        os.kill(site.bench.keeper.handle.pid, signal.SIGKILL)
        while not isinstance(await site.take(), KeeperDied):
            pass
        await site.bench.sweep()
        assert not processes.is_alive(waiting[1])

    on_site(scenario)


def test_a_standby_that_was_killed_or_must_not_be_this_worker_costs_nothing(on_site: Any) -> None:
    async def scenario(site: Any) -> None:
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
    async def scenario(site: Any) -> None:
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
