"""What must hold in every history, checked by somebody who is not the system under test."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from holdfast.protocol.charter import NO_CHARTER, VOTERS_MIN, Charter, CharterPosition
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
    suspended: set[str] = field(default_factory=set)
    """Hosts whose workers are suspended: they may be alive beside those of a newer generation."""
    waiting: set[str] = field(default_factory=set)
    """Hosts whose workers wait for their place in the generation that `alive` has, and train in none."""
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
            self.waiting.discard(host)

    def gathered(self, host: str, generation: int) -> None:
        """All workers of this host have left their generation, and wait for their place in that one."""
        self.alive[host] = generation
        self.waiting.add(host)

    def continued(self, coordinator: int, host: str, assign: Assign, *, cut_off: set[str]) -> None:
        """Running workers of this host go on in this generation."""
        alive = self.alive.get(host)
        self._require(alive == assign.generation, f"{host} goes on in {assign.generation}, its workers are in {alive}")
        self._begun(coordinator, host, assign, cut_off)
        self.waiting.discard(host)

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
        for other, its in self.alive.items():
            # A start may be late: the others may have been ordered to wait for a newer generation meanwhile, for a
            # loss, and this host gets that order next (succession seeds 2594 and 3812).
            newer = other in self.waiting and its > generation
            if its != generation and not newer and other not in self.suspended:
                text = f"{other} still runs generation {its} when {host} starts generation {generation}"
                self._require(other in cut_off, text)

    def _job(self, coordinator: int) -> int:
        """The same for all coordinators whose generations have one order."""
        return coordinator

    def ended(self, host: str) -> None:
        self.alive.pop(host, None)
        self.waiting.discard(host)
        self.suspended.discard(host)

    def let_run(self, coordinator: int, host: str, *, cut_off: set[str]) -> None:
        """The workers of this host were suspended and run again: no newer generation has begun."""
        self.suspended.discard(host)
        generation = self.alive.get(host)
        newest, _ = self.budget.get(self._job(coordinator), (0, 0))
        if generation is not None and host not in cut_off:
            text = f"the workers of {host} run again in generation {generation}, and {newest} has begun"
            self._require(generation >= newest, text)

    def told(self, coordinator: int, generation: int, reached: int, safe_point: int) -> None:
        """A worker that has reached this safe point is told to stop at that one."""
        agreed = self.safe_points.setdefault((coordinator, generation), safe_point)
        self._require(agreed == safe_point, f"generation {generation} stops at {agreed} here and at {safe_point} there")
        self._require(reached < safe_point, f"a worker is to stop at {safe_point}, which it may have passed")

    def saves(self, reached: int, safe_point: int) -> None:
        """Workers that have reached this safe point are told to save at that one, and to go on."""
        self._require(reached < safe_point, f"a worker is to save at {safe_point}, which it may have passed")

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

    def __init__(
        self,
        apart: Callable[[str, str], bool] = lambda _, __: False,
        living: Callable[[int], Collection[str]] = lambda _: (),
        leads: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """`apart`: whether these hosts cannot hear each other, or could not a moment ago. `living`: voters of the newest
        charter that this founder can know of, and that could go on without it. `leads`: whether this coordinator is
        alive and has not stepped down."""
        super().__init__()
        self._apart = apart
        self._living = living
        self._leads = leads
        self._job_of: dict[int, int] = {}
        """The first coordinator of the job, by coordinator."""
        self._line_of: dict[int, int] = {}
        """The founder since which all coordinators were elected, by coordinator: from then on, no term has two."""
        self._writers: dict[tuple[object, ...], int] = {}
        """By whom each charter was written."""
        self._begins_after: dict[int, CharterPosition] = {}
        """The charter that a coordinator continues."""
        self._continues: dict[int, int] = {}
        """By whom it was written."""
        self._decided: dict[int, int] = {}
        """The coordinator that has written the newest charter, by job."""
        self._founders: dict[int, CharterPosition] = {}
        """Those that have decided nothing yet, and what they continue."""
        self._newest: dict[int, Charter] = {}
        """The newest charter that counts, by job."""
        self._at_work_for: dict[str, int] = {}
        """The job whose workers a host had last."""
        self._starters: dict[tuple[int, int], int] = {}
        """By whom each generation was started, by job and number."""
        self._present = 0
        """The job of the latest term."""
        self._elected: dict[tuple[int, int], int] = {}
        """By founder and term."""
        self._deciding: dict[tuple[int, int], int] = {}
        """The coordinator that has decided, by job and term."""

    @property
    def newest(self) -> Charter | None:
        return self._newest.get(self._present)

    def leads(self, coordinator: int, charter: Charter | None, term: int) -> None:
        """A coordinator begins: it was elected and continues this charter, or founds a job."""
        if charter is None:
            self._job_of[coordinator] = self._line_of[coordinator] = coordinator
            self._founders[coordinator] = NO_CHARTER
            return
        self._continue(coordinator, charter)
        other = self._elected.setdefault((self._line_of[coordinator], term), coordinator)
        self._require(other == coordinator, f"coordinators {other} and {coordinator} are both elected in term {term}")

    def charter_reported(self, coordinator: int, charter: Charter) -> None:
        """A coordinator that founded the job continues this charter, as it has heard."""
        before = self._founders.get(self._writers[self._key(charter)], charter.position)
        self._continue(coordinator, charter)
        self._line_of[coordinator] = coordinator
        self._founders[coordinator] = before  # of one that has decided nothing: what that one continued

    def _continue(self, coordinator: int, charter: Charter) -> None:
        writer = self._writers[self._key(charter)]
        self._job_of[coordinator], self._line_of[coordinator] = self._job_of[writer], self._line_of[writer]
        self._begins_after[coordinator], self._continues[coordinator] = charter.position, writer
        if writer in self._founders:  # no charter of that one has counted yet
            self._founders[coordinator] = self._founders[writer]

    def _precedes(self, coordinator: int, later: int) -> bool:
        """Whether the later one continues what this one has written. A founder that continues older charters has a
        number as large as any, and may have heard of nothing that the later one wrote."""
        while later and later != coordinator:
            later = self._continues.get(later, 0)
        return later == coordinator

    def wrote(self, coordinator: int, charter: Charter) -> None:
        self._writers.setdefault(self._key(charter), coordinator)

    @staticmethod
    def _key(charter: Charter) -> tuple[object, ...]:
        return charter.position, charter.voters

    def started(self, coordinator: int, host: str, assign: Assign, *, cut_off: set[str]) -> None:
        if assign.local_ranks != ():
            self._founds(coordinator)
            number = assign.generation
            first = self._starters.setdefault((self._job_of[coordinator], number), coordinator)
            self._require(
                first == coordinator, f"coordinators {first} and {coordinator} both start generation {number}"
            )
            self._alike(coordinator, host, number, cut_off)
        super().started(coordinator, host, assign, cut_off=cut_off)

    def _alike(self, coordinator: int, host: str, number: int, cut_off: set[str]) -> None:
        """A job that was founded again may use numbers of the one before, and not while its workers live."""
        job = self._job_of[coordinator]
        for other, older in self.alive.items():
            foreign = self._at_work_for.get(other) != job and other not in self.suspended
            if older == number and foreign and not self._apart(host, other):
                text = f"{other} still runs generation {older} of another job when {host} starts one of that number"
                self._require(other in cut_off, text)

    def _begun(self, coordinator: int, host: str, assign: Assign, cut_off: set[str]) -> None:
        """Where a job was founded a second time, on one side of a divided network, the other side may run the first."""
        job = self._job_of[coordinator]
        beyond = {other for other in self.alive if self._at_work_for.get(other) != job and self._apart(host, other)}
        super()._begun(coordinator, host, assign, cut_off | beyond)
        self._at_work_for[host] = job

    def committed(self, coordinator: int, term: int, charter: Charter) -> None:
        """A charter counts."""
        decided = self._decided.get(self._job_of[coordinator], 0)
        if charter.position <= self._begins_after.get(decided, NO_CHARTER) and self._precedes(coordinator, decided):
            self._founders.pop(coordinator, None)  # its voters confirmed it in time, and the successor continues it
            return
        if charter.generation:
            self._founds(coordinator)
        job = self._job_of[coordinator]
        decides = self._deciding.setdefault((job, term), coordinator)
        self._require(decides == coordinator, f"coordinators {decides} and {coordinator} both decide in term {term}")
        older, newest = self._newest.get(job), self.newest
        if older is not None:
            before, after = (older.generation, older.restarts), (charter.generation, charter.restarts)
            self._require(charter.position > older.position, f"{charter.position} counts after {older.position}")
            self._require(all(a >= b for a, b in zip(after, before, strict=True)), f"{after} counts after {before}")
        self._newest[job], self._decided[job] = charter, coordinator
        if newest is None or charter.position.term > newest.position.term:
            self._present = job

    def _founds(self, coordinator: int) -> None:
        """A founder that decides for the first time, or a successor that continues what it wrote, begins another job if
        it does not continue the newest charter."""
        reported, newest = self._founders.pop(coordinator, None), self.newest
        if reported is None:
            return
        for later in [each for each, before in self._continues.items() if before == coordinator]:
            self._founders.pop(later, None)
        if newest is not None and self._job_of[coordinator] == self._present and reported >= newest.position:
            before = self._decided[self._present]
            if before == coordinator or not self._leads(before):
                return  # else that one is its only voter, cut off from this founder: from now on there are two jobs
        if newest is not None and newest.outcome is None and len(newest.seats) >= VOTERS_MIN:
            living = self._living(coordinator)
            text = f"coordinator {coordinator} founds a second job while {sorted(living)} could continue the one before"
            self._require(not newest.carried_by(living), text)
        self._job_of[coordinator] = self._present = coordinator

    def goes_on(self, text: str, *, running: bool) -> None:
        self._require(running, text)

    def alone(self, coordinators: Collection[int]) -> None:
        """These run a job, and hear each other for long."""
        jobs = {self._job_of[each] for each in coordinators}
        self._require(len(jobs) < 2, f"coordinators {sorted(coordinators)} run two jobs side by side")

    def _job(self, coordinator: int) -> int:
        return self._job_of[coordinator]
