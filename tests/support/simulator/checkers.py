"""What must hold in every history, checked by somebody who is not the system under test."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from holdfast.protocol.charter import VOTERS_MIN, Charter
from holdfast.protocol.messages import Assign


class BrokenPromiseError(AssertionError):
    """A checker found a history that must not be. The message carries seed, time and story."""


@dataclass
class WorldChecker:
    """Sees every start and end of workers, everywhere."""

    worlds: dict[tuple[int, int], dict[str, tuple[int, int, int]]] = field(default_factory=dict)
    """(coordinator, generation) -> host -> (rank_base, nproc, world_size)."""
    alive: dict[str, int] = field(default_factory=dict)
    """Host -> the generation whose workers are alive on it."""
    holders: dict[tuple[int, int, int], tuple[str, int, int]] = field(default_factory=dict)
    """(coordinator, generation, rank) -> the process that has this rank."""
    budget: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Coordinator -> the newest generation that has begun, and the restarts that were used then."""
    safe_points: dict[tuple[int, int], int] = field(default_factory=dict)
    """(coordinator, generation) -> where its workers stop."""

    def assigned(self, coordinator: int, host: str, nproc: int, assign: Assign) -> None:
        world = self.worlds.setdefault((coordinator, assign.generation), {})
        if not nproc:
            return  # no worker of this host takes part: it may be a new agent on a host whose old one is not lost yet
        self._require(host not in world, f"{host} was assigned twice in generation {assign.generation}")
        world[host] = (assign.rank_base, nproc, assign.world_size)
        self._require(len({size for _, _, size in world.values()}) == 1, "two worlds share one generation number")
        taken: set[int] = set()
        for base, count, size in world.values():
            ranks = set(range(base, base + count))
            self._require(not taken & ranks, f"a rank exists twice in generation {assign.generation}: {world}")
            self._require(
                max(ranks) < size,
                f"a rank lies outside the world of generation {assign.generation}: {world}",
            )
            taken |= ranks

    def started(self, coordinator: int, host: str, assign: Assign, *, cut_off: set[str]) -> None:
        """`cut_off`: hosts that lost their link less than a fence ago; only there may an older generation still live."""
        generation = assign.generation
        self._require(host not in self.alive, f"{host} starts generation {generation} beside {self.alive.get(host)}")
        if assign.local_ranks != ():  # else no worker of it takes part yet
            self._begun(coordinator, host, assign, cut_off)
            self.alive[host] = generation

    def gathered(self, host: str, generation: int) -> None:
        """All workers of this host have left their generation, and wait for their place in that one."""
        self.alive[host] = generation

    def continued(self, coordinator: int, host: str, assign: Assign, *, cut_off: set[str]) -> None:
        """Running workers of this host go on in this generation."""
        alive = self.alive.get(host)
        self._require(alive == assign.generation, f"{host} goes on in {assign.generation}, its workers are in {alive}")
        self._begun(coordinator, host, assign, cut_off)

    def has_rank(self, rank: tuple[int, int, int], process: tuple[str, int, int]) -> None:
        """This process has the rank (coordinator, generation, rank)."""
        holder = self.holders.setdefault((self._job(rank[0]), *rank[1:]), process)
        self._require(holder == process, f"{holder} and {process} are both {rank}")

    def _begun(self, coordinator: int, host: str, assign: Assign, cut_off: set[str]) -> None:
        generation = assign.generation
        world = self.worlds[(coordinator, generation)]
        size = next(iter(world.values()))[2]
        self._require(sum(count for _, count, _ in world.values()) == size, "workers start before all ranks are given")
        job = self._job(coordinator)
        newest, used = self.budget.get(job, (0, 0))
        self._require(generation >= newest, f"generation {generation} begins on {host} after {newest}")
        self._require(assign.restart_count >= used, f"{assign.restart_count} restarts are used after {used} were")
        self.budget[job] = generation, assign.restart_count
        for other, older in self.alive.items():
            if older != generation:
                self._require(
                    other in cut_off,
                    f"{other} still runs generation {older} when {host} starts generation {generation}",
                )

    def _job(self, coordinator: int) -> int:
        """The same for all coordinators whose generations have one order."""
        return coordinator

    def ended(self, host: str) -> None:
        self.alive.pop(host, None)

    def told(self, coordinator: int, generation: int, reached: int, safe_point: int) -> None:
        """A worker that has reached this safe point is told to stop at that one."""
        agreed = self.safe_points.setdefault((coordinator, generation), safe_point)
        self._require(agreed == safe_point, f"generation {generation} stops at {agreed} here and at {safe_point} there")
        self._require(reached < safe_point, f"a worker is to stop at {safe_point}, which it may have passed")

    def found_hung(self, generation: int, *, hangs: bool) -> None:
        self._require(hangs, f"generation {generation} is told to hang, and all is well")

    def ended_as_hung(self, generation: int, still_s: float, timeout_s: float) -> None:
        """Its workers are stopped because they hang, as they have for so long."""
        text = f"generation {generation} is ended as hung after {still_s:.3f} s of at least {timeout_s:g}"
        self._require(still_s >= timeout_s, text)

    def _require(self, condition: bool, text: str) -> None:
        if not condition:
            raise BrokenPromiseError(text)


class SuccessionChecker(WorldChecker):
    """Of jobs whose coordinators succeed each other. All coordinators of one job share its generations and its budget."""

    def __init__(self) -> None:
        super().__init__()
        self.newest: Charter | None = None
        """The newest charter that counts."""
        self._job_of: dict[int, int] = {}
        """The first coordinator of the job, by coordinator."""
        self._writers: dict[tuple[object, ...], int] = {}
        """By whose job each charter was written."""
        self._present = 0
        self._deciding: dict[tuple[int, int], int] = {}
        """The coordinator that has decided, by job and term."""

    def leads(self, coordinator: int, charter: Charter | None) -> None:
        """A coordinator begins: it was elected and continues this charter, or founds a job."""
        self._job_of[coordinator] = coordinator if charter is None else self._writers[self._key(charter)]

    def wrote(self, coordinator: int, charter: Charter) -> None:
        self._writers[self._key(charter)] = self._job_of[coordinator]

    @staticmethod
    def _key(charter: Charter) -> tuple[object, ...]:
        return charter.position, charter.voters

    def committed(self, coordinator: int, term: int, charter: Charter, living: Collection[str]) -> None:
        """A charter counts. `living`: voters of the newest one that have not ended."""
        job, newest = self._job_of[coordinator], self.newest
        if job != self._present and charter.generation:
            self._founded(coordinator, living)
            self._present, newest = job, None
        if job != self._present:
            return
        decides = self._deciding.setdefault((job, term), coordinator)
        self._require(decides == coordinator, f"coordinators {decides} and {coordinator} both decide in term {term}")
        if newest is not None:
            before, after = (newest.generation, newest.restarts), (charter.generation, charter.restarts)
            self._require(charter.position > newest.position, f"{charter.position} counts after {newest.position}")
            self._require(all(a >= b for a, b in zip(after, before, strict=True)), f"{after} counts after {before}")
        self.newest = charter

    def _founded(self, coordinator: int, living: Collection[str]) -> None:
        """Another job begins. There is only one while a majority of the voters could continue the one before."""
        newest = self.newest
        if newest is None or newest.outcome is not None or len(newest.seats) < VOTERS_MIN:
            return
        text = f"coordinator {coordinator} founds a second job while {sorted(living)} could continue the one before"
        self._require(not newest.carried_by(living), text)

    def goes_on(self, text: str, *, running: bool) -> None:
        self._require(running, text)

    def _job(self, coordinator: int) -> int:
        return self._job_of[coordinator]
