"""Collects the facts about this agent once a second, on the agent's loop, for metrics and health checks.

Each second a new `VitalsSample` replaces the old one. Other threads read only the newest, so no thread waits for
another. Knows the journal's events; knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, structs

from holdfast.protocol.rank_progress import JobView, RankProgress, Stage

BEAT_S = 1.0
STALL_S = 15.0
"""Time without a turn after which a loop counts as stalled (s): by a disk, a debugger or a lack of CPU time."""
assert STALL_S > 5 * BEAT_S
STEP_WINDOW_S = 30.0
"""Time over which the duration of a step is averaged (s)."""
LOOKS_MAX = 64
"""Number of looks that are kept: more than STEP_WINDOW_S of them."""


class RankFacts(Struct, frozen=True, kw_only=True):
    """Facts about one worker of this node."""

    rank: int
    local_rank: int
    steps_total: int
    """Number of steps of this local rank in all generations since the start of the agent."""
    own_s_total: float
    """The same for the own part of its steps (s)."""
    step_s: float | None
    """Mean duration of the steps in the last STEP_WINDOW_S; None: there were none."""
    age_s: float


class VitalsSample(Struct, frozen=True, kw_only=True):
    """The facts about an agent at one moment."""

    taken_s: float
    """Time of the sample by the loop's clock. Its age shows how long the agent has been stalled."""
    run_id: str
    node: str
    generation: int = 0
    restart_count: int = 0
    world_size: int = 0
    wanted: int = 0
    """Number of workers of this node in this generation."""
    alive: int = 0
    phases_s: dict[str, float] = {}
    """Durations of the phases of the newest start."""
    exits: dict[str, int] = {}
    """Number of workers of this node that have ended, by exit code."""
    failures: dict[str, int] = {}
    """Number of generations that failed, by code of the verdict; only on the coordinator's node."""
    regroups: int = 0
    """Number of generations that running workers have formed."""
    copies: dict[str, int] = {}
    """Copies of states in memory that this node sent (`sent`, `failed`), and on the node of rank 0 also `skipped`."""
    copied_bytes: int = 0
    copied_s: float = 0.0
    ranks: tuple[RankFacts, ...] = ()
    job: JobView | None = None
    """The coordinator's view; None: the coordinator is not on this node."""
    ended: str = ""
    """The kind of the job's end, in one word; empty: it has not ended."""
    exit_code: int = 0


class Vitals:
    """Listens to the journal and looks at the workers. One per agent; `facts` may be read by any thread."""

    def __init__(
        self,
        run_id: str,
        node: str,
        look: Callable[[], tuple[RankProgress, ...]],
        view: Callable[[], JobView | None],
        fault: Callable[[str, Exception], None],
    ) -> None:
        """`fault` gets the first error in this class; the job continues."""
        self._fault = fault
        self._faulty = False
        self._loop = asyncio.get_running_loop()
        self._look, self._view = look, view
        self._ranks: dict[int, int] = {}
        """The rank of each local rank that takes part."""
        self._carried: dict[int, tuple[int, float]] = {}
        """Steps and own seconds of earlier generations, by local rank."""
        self._seen: dict[int, RankProgress] = {}
        """The newest progress of each local rank in this generation. A worker that has ended stays in it."""
        self._looks: deque[tuple[float, dict[int, int]]] = deque(maxlen=LOOKS_MAX)
        """Looks of the last STEP_WINDOW_S: the time, and the number of steps by local rank."""
        self._timer: asyncio.TimerHandle | None = None
        self.facts = VitalsSample(taken_s=self._loop.time(), run_id=run_id, node=node)
        self._known = structs.replace(self.facts, copies={"sent": 0, "failed": 0, "skipped": 0})
        """The facts from the journal; the next sample has them."""

    def start(self) -> None:
        self._beat()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        try:
            self._gather()
        except Exception as error:  # noqa: BLE001 - an error in an observer must not end the job
            self.facts = structs.replace(self.facts, taken_s=self._loop.time())
            if not self._faulty:
                self._faulty = True
                self._fault("vitals", error)
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    # ---------------------------------------------------------------- facts from the journal

    def heard(self, event: str, fields: Mapping[str, Any]) -> None:
        """Handle an event of the journal, on the agent's loop."""
        known = self._known
        match event:
            case "generation":
                self._carry()
                survivors = fields.get("local_ranks")
                places = range(fields["nproc"]) if survivors is None else survivors
                self._ranks = {local_rank: fields["rank_base"] + place for place, local_rank in enumerate(places)}
                self._learn(
                    generation=fields["generation"],
                    restart_count=fields["restart_count"],
                    world_size=fields["world_size"],
                    wanted=fields["nproc"],
                    alive=0 if survivors is None else len(survivors),
                    regroups=known.regroups + (survivors is not None),
                )
            case "worker_started":
                self._learn(alive=known.alive + 1)
            case "worker_ended":
                wanted = max(0, known.wanted - 1) if fields["exit_code"] == 0 else known.wanted
                exits = _one_more(known.exits, str(fields["exit_code"]))
                self._learn(alive=max(0, known.alive - 1), wanted=wanted, exits=exits)
            case "coordinator.verdict":
                self._learn(failures=_one_more(known.failures, fields["code"]))
            case "phases":
                phases_s = {
                    name[:-2]: seconds for name, seconds in fields.items() if name.endswith("_s") and name != "until_s"
                }
                self._learn(phases_s=phases_s)
            case "snapshot_copy":
                result = "sent" if not fields["why"] else "failed" if fields["rank"] >= 0 else "skipped"
                self._learn(
                    copies=_one_more(known.copies, result),
                    copied_bytes=known.copied_bytes + fields["size_bytes"],
                    copied_s=known.copied_s + fields["took_s"],
                )
            case "ended":
                self._learn(ended=fields["kind"], exit_code=fields["exit_code"])
                self._gather()

    def _learn(self, **facts: Any) -> None:
        self._known = structs.replace(self._known, **facts)

    def _carry(self) -> None:
        """Add the steps of a generation that is over to the totals."""
        for local_rank, seen in self._seen.items():
            steps, own_s = self._carried.get(local_rank, (0, 0.0))
            self._carried[local_rank] = (steps + seen.steps, own_s + seen.own_s)
        self._seen = {}
        self._looks.clear()

    # ---------------------------------------------------------------- facts from the workers

    def _gather(self) -> None:
        now = self._loop.time()
        if not self._known.ended:
            progress = self._look()
            self._seen |= {each.local_rank: each for each in progress}
            for spare in (each for each in progress if each.stage is Stage.SPARE):
                del self._seen[spare.local_rank]  # it makes no steps: the age of its newest one means nothing
        self._looks.append((now, {local_rank: each.steps for local_rank, each in self._seen.items()}))
        while len(self._looks) > 2 and now - self._looks[0][0] > STEP_WINDOW_S:
            self._looks.popleft()
        # A replacement may make steps a moment before its rank is known.
        ranks = tuple(self._rank(each) for _, each in sorted(self._seen.items()) if each.local_rank in self._ranks)
        self.facts = structs.replace(self._known, taken_s=now, ranks=ranks, job=self._view())

    def _rank(self, seen: RankProgress) -> RankFacts:
        steps, own_s = self._carried.get(seen.local_rank, (0, 0.0))
        began_s, first = self._looks[0][0], self._looks[0][1].get(seen.local_rank, 0)
        made = seen.steps - first
        return RankFacts(
            rank=self._ranks[seen.local_rank],
            local_rank=seen.local_rank,
            steps_total=steps + seen.steps,
            own_s_total=own_s + seen.own_s,
            step_s=(self._looks[-1][0] - began_s) / made if made > 0 else None,
            age_s=seen.age_s,
        )


def _one_more(counts: Mapping[str, int], key: str) -> dict[str, int]:
    return {**counts, key: counts.get(key, 0) + 1}


def health(facts: VitalsSample, now_s: float) -> dict[str, object]:
    """`alive`: the agent's loop is not stalled, and its job has not failed. `ready`: also every local worker runs."""
    stalled_s = max(0.0, now_s - facts.taken_s)
    failed = bool(facts.ended) and facts.exit_code != 0
    status = "stalled" if stalled_s > STALL_S else "failed" if failed else facts.ended or "ok"
    alive = status not in ("stalled", "failed")
    return {
        "status": status,
        "alive": alive,
        "ready": alive and not facts.ended and 0 < facts.wanted <= facts.alive,
        "run_id": facts.run_id,
        "node": facts.node,
        "generation": facts.generation,
        "workers": facts.alive,
        "workers_wanted": facts.wanted,
        "stalled_s": round(stalled_s, 1),
        "step_age_s": min((round(each.age_s, 1) for each in facts.ranks), default=None),
    }
