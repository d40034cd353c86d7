"""Four pretend hosts, an agent on each, and the faults: does what the schedule says, and writes down what it did.

It also plays the scheduler: an agent that is gone is started again after a pause, and what it left on its node is ended
before (systemd, Slurm and Kubernetes do the same) and written down. A job without a step for STANDSTILL_S is ended on
all nodes and started again, as a person who looks at it would do: that too is written down.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from soak import launchers, ledger
from soak.disk import Disk
from soak.launchers import Launcher
from soak.schedule import PAUSE_S, Fault
from tests.network.hosts import PretendHosts, Program
from tests.support.limits import limit_s as scaled

NODES = 4
STANDSTILL_S = 120.0
"""Long enough for a start on a small machine that is hit again and again; a person would hardly look more often."""
FIRST_STEP_S_MAX = 120.0
REUNION_S_MAX = 120.0
"""After the last fault: until all nodes train together."""
END_S_MAX = 90.0
LEFT_S_MAX = 1.0
"""After the end of an agent: until nothing of it is left."""
LOOK_EVERY_S = 0.05
TORCHS_OWN = "torchinductor_"
"""A cache that torch keeps among the temporary files, for ever."""
WORDS_MAX = 120
DELAY_MS, JITTER_MS, LOSS_PERCENT = 20, 5, 2.0

WORKER_SIGNALS = {
    "worker killed": signal.SIGKILL,
    "worker exits with 3": signal.SIGUSR2,
    "worker raises": signal.SIGUSR1,
    "worker stopped": signal.SIGSTOP,
}


@dataclass
class Place:
    """A node, as the scheduler sees it."""

    number: int
    program: Program | None = None
    up: bool = True
    told: bool = False
    """The rig has ended the agent itself."""
    ended_s: float = 0.0
    again_s: float = 0.0
    """When the agent is to be started again."""


class Rig:
    def __init__(
        self, site: Path, hosts: PretendHosts, disk: Disk, launcher: Launcher, script: Path, seed: int
    ) -> None:
        self.site, self.hosts, self.disk, self.launcher, self.script = site, hosts, disk, launcher, script
        self._rng = Random(f"scheduler {seed}")
        self._places = {number: Place(number) for number in range(1, NODES + 1)}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = 0
        self._delay: subprocess.Popen[bytes] | None = None
        self._events = (site / "rig.jsonl").open("a", buffering=1)
        self._finishing = False
        self._stalled_s = 0.0
        """When the disk was last seen to stand still."""
        self._calm_s = 0.0
        """The watch over standstills begins anew here."""
        for name in ("ledger", "screens", "tmp", "disk/snapshots", "disk/logs"):
            (site / name).mkdir(parents=True)
        (site / "progress").touch()

    # ---------------------------------------------------------------- the run

    def run(self, faults: Iterable[Fault], seconds: float) -> None:
        """All of it, from the first agent to the last process."""
        try:
            self._run(list(faults), seconds)
        finally:
            self.disk.thaw()
            self._events.close()

    def _run(self, faults: list[Fault], seconds: float) -> None:
        self.note("start", launcher=self.launcher.name, seconds=seconds)
        for place in self._places.values():
            self._start(place)
        self._until(self._stepped, FIRST_STEP_S_MAX, "first step")
        origin_s = time.monotonic()
        self.note("chaos")
        for fault in faults:
            self._at(origin_s + fault.at_s, lambda fault=fault: self._apply(fault))  # type: ignore[misc]
        self._until(lambda: time.monotonic() > origin_s + seconds, 2 * seconds, "end of the time")
        self.note("calm")
        together = self._until(self._all_train, REUNION_S_MAX, "all nodes to train together")
        self.note("reunion", together=together)
        self._finishing = True
        (self.site / "finish").touch()
        ended = self._until(self._all_ended, END_S_MAX, "the agents to end")
        self.note(
            "finished", ended=ended, codes={str(place.number): self._code(place) for place in self._places.values()}
        )
        time.sleep(scaled(LEFT_S_MAX))
        self._look_for_leftovers()
        self.note("end")

    def note(self, event: str, **fields: object) -> None:
        self._events.write(json.dumps({"t": time.monotonic(), "event": event, **fields}) + "\n")

    def _until(self, condition: Callable[[], bool], limit_s: float, what: str) -> bool:
        """Go on playing until it is so; false when it was not within `limit_s`."""
        end = time.monotonic() + scaled(limit_s)
        while not condition():
            if time.monotonic() > end:
                self.note("not in time", what=what, limit_s=scaled(limit_s))
                return False
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
            self._mind_the_agents()
            self._mind_standstill()
            time.sleep(LOOK_EVERY_S)
        return True

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        self._counter += 1
        heapq.heappush(self._due, (when_s, self._counter, action))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(time.monotonic() + seconds, action)

    # ---------------------------------------------------------------- agents

    def _start(self, place: Place) -> None:
        log_dir = self.site / "disk" / "logs" / f"node{place.number}"
        screen = self.site / "screens" / f"node{place.number}-{time.monotonic():.0f}.txt"
        with screen.open("wb") as file:
            place.program = self.hosts[place.number].start(
                self.launcher.command(log_dir, self.site, self.script),
                cwd=self.site,
                env={**self.launcher.environment, "TMPDIR": str(self.site / "tmp"), "HOME": str(self.site)},
                stdout=file,
            )
        place.told, place.again_s = False, 0.0
        self.note("agent started", node=place.number)

    def _mind_the_agents(self) -> None:
        now = time.monotonic()
        if self.disk.stalled:
            self._stalled_s = now
        for place in self._places.values():
            if place.program is not None and not place.program.running:
                self.note("agent ended", node=place.number, code=self._code(place), told=place.told)
                place.program, place.ended_s = None, now
                if not place.again_s:
                    place.again_s = now + self._rng.uniform(*PAUSE_S)
                if not any(each.program for each in self._places.values()) and not self._finishing:
                    self.note("no agent left", told=place.told)
            elif place.program is None and self._may_start(place, now):
                self._clean(place)
                self._start(place)

    def _may_start(self, place: Place, now: float) -> bool:
        """Not before all of the last agent must be gone; what waits for a stalled disk cannot go."""
        due_s = max(place.again_s, max(place.ended_s, self._stalled_s) + scaled(LEFT_S_MAX))
        return place.up and place.again_s > 0 and due_s <= now and not self._finishing

    def _clean(self, place: Place) -> None:
        """End what a dead agent left on its node."""
        left = launchers.left(self.hosts[place.number].pids())
        if not left:
            return
        self.note("left behind", node=place.number, processes=[_words(pid) for pid in left])
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _code(self, place: Place) -> int | None:
        return place.program.wait(scaled(1.0)) if place.program is not None and not place.program.running else None

    def _all_ended(self) -> bool:
        return all(place.program is None or not place.program.running for place in self._places.values())

    # ---------------------------------------------------------------- looking at the job

    def _stepped(self) -> bool:
        return any(life.steps for life in ledger.recent(self.site / "ledger", 5.0))

    def _all_train(self) -> bool:
        lives = [life for life in ledger.recent(self.site / "ledger", 1.0) if life.steps]
        together = {(life.generation, life.host) for life in lives}
        return len(together) == NODES and len({generation for generation, _ in together}) == 1

    def _mind_standstill(self) -> None:
        now = time.monotonic()
        if self._finishing or now < self._calm_s:
            return
        self._calm_s = now + 1.0
        if time.time() - (self.site / "progress").stat().st_mtime < scaled(STANDSTILL_S):
            return
        self.note("stands still", limit_s=scaled(STANDSTILL_S))
        self._calm_s = now + scaled(STANDSTILL_S)
        for place in self._places.values():
            if place.up:
                for pid in self.hosts[place.number].pids():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                place.told = True

    def _look_for_leftovers(self) -> None:
        for place in self._places.values():
            host = self.hosts[place.number]
            left = [_words(pid) for pid in launchers.left(host.pids())]
            shared = host.run(["ls", "-A", "/dev/shm"]).split()
            self.note("leftovers", node=place.number, processes=left, shared_memory=shared)
        made = [name for name in sorted(os.listdir(self.site / "tmp")) if not name.startswith(TORCHS_OWN)]
        self.note("leftovers", node=0, temporary=made)

    # ---------------------------------------------------------------- faults

    def _apply(self, fault: Fault) -> None:
        place = self._places.get(fault.node)
        self.note("fault", **fault.as_json())
        before = len(self._due)
        match fault.kind:
            case kind if kind in WORKER_SIGNALS:
                hit = self._signal(
                    launchers.workers(self._pids(fault.node), self.site), WORKER_SIGNALS[kind], fault.lasts_s
                )
            case "agent killed" | "agent told to leave" | "agent stopped":
                hit = place is not None and self._fault_of_agent(place, fault)
            case "supervisor killed":
                hit = self._signal(launchers.supervisors(self._pids(fault.node)), signal.SIGKILL)
            case "store host killed":
                hit = self._kill_store()
            case "node killed" | "node crashed" | "coordinator's node killed":
                assert place is not None
                hit = self._fault_of_node(place, fault)
            case _:
                hit = self._fault_between(fault)
        if not hit:
            self.note("missed", kind=fault.kind, at_s=fault.at_s)
        elif len(self._due) > before:
            self._after(fault.lasts_s, lambda: self.note("over", kind=fault.kind, node=fault.node))

    def _pids(self, node: int) -> list[int]:
        return self.hosts[node].pids() if self._places[node].up else []

    def _signal(self, pids: list[int], signum: int, lasts_s: float = 0.0) -> bool:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        if pids and signum == signal.SIGSTOP:
            self._after(lasts_s, lambda: self._signal(pids, signal.SIGCONT) and None)
        return bool(pids)

    def _kill_store(self) -> bool:
        """Whoever serves it: with torchrun that is rank 0's agent or worker."""
        if self.launcher.store_in not in {"agent", "worker"}:
            everywhere = [pid for number in self._places for pid in self._pids(number)]
            return self._signal(launchers.store_hosts(everywhere), signal.SIGKILL)
        firsts = [life for life in ledger.recent(self.site / "ledger", STANDSTILL_S) if life.rank == 0]
        if not firsts:
            return False
        name = max(firsts, key=lambda life: life.born_s).host
        place = next(place for place in self._places.values() if self.hosts[place.number].name == name)
        if self.launcher.store_in == "worker":
            return self._signal(launchers.workers(self._pids(place.number), self.site), signal.SIGKILL)
        if place.program is None or not place.program.running:
            return False
        place.program.signal(signal.SIGKILL)
        place.told, place.again_s = True, time.monotonic() + self._rng.uniform(*PAUSE_S)
        return True

    def _fault_of_agent(self, place: Place, fault: Fault) -> bool:
        program = place.program
        if program is None or not program.running:
            return False
        if fault.kind == "agent stopped":
            program.signal(signal.SIGSTOP)
            self._after(fault.lasts_s, lambda: _go_on(program))
            return True
        program.signal(signal.SIGKILL if fault.kind == "agent killed" else signal.SIGTERM)
        place.told, place.again_s = True, time.monotonic() + fault.pause_s
        return True

    def _fault_of_node(self, place: Place, fault: Fault) -> bool:
        silent = fault.kind == "node crashed"
        place.up, place.told = False, True
        place.again_s = time.monotonic() + fault.lasts_s + fault.pause_s
        if silent:
            self.hosts.crash(place.number)
        else:
            self.hosts[place.number].kill()

        def back() -> None:
            self.hosts[place.number].boot()
            if silent:
                self.hosts.plug(place.number)
            place.up = True

        self._after(fault.lasts_s, back)
        return True

    def _fault_between(self, fault: Fault) -> bool:
        """Cables and disk."""
        over: Callable[[], None] = self.hosts.heal
        match fault.kind:
            case "link down":
                self.hosts.unplug(fault.node)
            case "partition 2|2":
                self.hosts.partition(fault.others, [number for number in self._places if number not in fault.others])
            case "delay and loss":
                self.hosts.lose(fault.node, LOSS_PERCENT)
                self._slow_down(fault.node)
                over = self._speed_up
            case "disk full":
                self.disk.fill()
                over = self.disk.empty
            case "disk stalls":
                self.disk.stall(fault.lasts_s)
                over = self.disk.thaw
            case _:
                raise ValueError(fault.kind)
        self._after(fault.lasts_s, over)
        return True

    def _slow_down(self, number: int) -> None:
        script = Path(__file__).resolve().parent / "delayline.py"
        words = (sys.executable, str(script), f"v{number}", "br0", str(DELAY_MS), str(JITTER_MS))
        self._delay = self.hosts.on_switch(words)

    def _speed_up(self) -> None:
        if self._delay is not None:
            self._delay.terminate()
            self._delay.wait(scaled(10.0))
            self._delay = None
        self.hosts.heal()


def _go_on(program: Program) -> None:
    if program.running:
        program.resume()
        with contextlib.suppress(RuntimeError, ProcessLookupError):
            program.signal(signal.SIGCONT)


def _words(pid: int) -> str:
    """Its command line, without the folders of this machine."""
    words = launchers.command_line(pid).decode(errors="replace").split("\0")
    return " ".join(word.rpartition("/")[2] for word in words)[:WORDS_MAX].strip()
