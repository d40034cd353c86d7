"""Resuming: all ranks agree on the newest state that every one of them can load, and load it.

A state in memory comes first, if it is at least as new as the disk and every rank finds all that it needs on its own
node, or, with copies on other nodes, on any node, from which it is fetched. Otherwise it is the newest snapshot on the
disk whose bytes are all valid; damaged ones are renamed and reported, suspect ones are left out (quarantine.py). Rank 0
decides, the others follow (agreement.py); a failure of one rank is reported to all, so that no rank waits for it.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from holdfast.protocol.errors import (
    HoldfastError,
    ShardingError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotGoneError,
    StateMismatchError,
)
from holdfast.train.agreement import Peers
from holdfast.train.copies import Copies, Sources
from holdfast.train.quarantine import Judged, Patience, end_without_progress, judged
from holdfast.train.random_numbers import seed_random
from holdfast.train.reading import ReadPlan, Saved, opened, parts_of_slot
from holdfast.train.reducers import Order
from holdfast.train.replicas import first_not_finite
from holdfast.train.save import ALONE_SAVE
from holdfast.train.snapshots import disk
from holdfast.train.snapshots import folder as folders
from holdfast.train.snapshots.copy_service import State, is_copy
from holdfast.train.snapshots.flush import meeting_number
from holdfast.train.snapshots.folder import RankFile, Survey
from holdfast.train.snapshots.layout import MANIFEST, FolderKind, Key, parse_name
from holdfast.train.snapshots.lease import FOLDER_ID
from holdfast.train.snapshots.remote import STORE_POLL_S, Location, RemotePath, location_of
from holdfast.train.snapshots.saver_client import Tier
from holdfast.train.snapshots.slots import Slot
from holdfast.train.state import Restored, Tracker
from holdfast.train.tracked import Choice, Compared, Fit, Targets, together, trained

_T = TypeVar("_T")

UNCHANGED_S = 2.0
"""The writer of an unfinished save that has not changed for this long counts as dead."""
REMOTE_UNCHANGED_S = 5.0
"""The same in an object store: this node's uploads are over then, and only small objects of a commit can be missing."""
AT_WORK_S_MAX = 300.0
"""Limit of the wait for a writer of this machine that is seen at work; less than the other ranks wait for this one."""
POLL_S = 0.02
"""Pause between two looks into a snapshot folder on a file system (s)."""


@dataclass(frozen=True)
class Resumed:
    """The state from which training continues."""

    step: int
    source: Literal["memory", "disk", "survivors"]
    """The origin of the state. `survivors`: this process replaces a lost one, and has the state of ranks that went on
    (`ht.survive`)."""
    world_then: int
    """The number of ranks of the job that saved it."""
    skipped: tuple[str, ...] = ()
    """Newer snapshots that were found damaged or are suspect, with the reasons."""
    notes: tuple[str, ...] = ()
    """Parts that were not restored as they were saved, because `strict=False` or `optional=` allowed it."""


NodeSlots = dict[int, Slot]
"""A state in memory, as this node has it: the slots by rank, those of its own ranks first."""


@dataclass
class Resumer:
    """One call of resume(), on one rank."""

    path: Location
    tracker: Tracker
    peers: Peers
    tier: Tier
    fresh_ok: bool
    patience: Patience
    choice: Choice = field(default_factory=Choice)
    copies: Copies | None = None
    folder_id: str = ""
    """The identity of the folder: states in memory of another folder, which had its name before, are left out."""
    life: str = ""
    """A random word, the same on all ranks, which identifies this life in its notes."""
    origin: Key | None = None
    """The key of the loaded state; one in memory has the number of the attempt as which the saver would write it."""
    adopted: Saved | None = None
    """The loaded state in memory: its `copies_to_make` have to be made before any rank stages a new one. None: the
    state was not in memory."""
    skipped: list[str] = field(default_factory=list)
    """Newer states that were not loaded, with the reasons."""
    _orders: list[Order] = field(default_factory=list)
    """The order of the gradients of each DDP module, in the state that was loaded."""
    state: State | None = None
    """The identity of the state in memory from which training goes on; None: the state was not in memory."""
    _compared: dict[tuple[Any, ...], tuple[Saved, Compared]] = field(default_factory=dict)
    """States that were compared with the tracked objects, by their slots."""
    _misfit: StateMismatchError | None = None
    """The error of a state in memory that does not fit the tracked objects."""
    _must_be_finite: bool = False
    """Whether the disk has a state whose values are finite. The state that is being loaded was not checked for that: it
    is in memory, or was written from there without the check. If its values are not finite, it is passed over."""
    _damage_lasts: bool = False
    """Whether a rank has found damage in the newest snapshot that was tried, and not an outage."""
    _passed_over: set[Key] = field(default_factory=set)
    """Snapshots that are known to have values that are not finite, and were reported; on rank 0."""
    _judged: Judged | None = None
    """The judgement of earlier lives; on rank 0."""
    _suspects: list[tuple[int, str]] = field(default_factory=list)
    """Steps of suspect states, with the reasons."""
    _lost: dict[int, int] = field(default_factory=dict)
    """Lives of this job of which no state in memory is whole any more, with the newest step of each; on rank 0. Their
    savers may still wait for parts that are lost with a node."""

    def run(self) -> Resumed | None:
        """Load a state; None: there is nothing from which to go on. All ranks return the same, or all raise. Raises
        SystemExit for lack of progress."""
        resumed = self._from_memory() or self._from_disk()
        if resumed is None and self._misfit is not None:
            raise self._misfit  # to begin from zero would lose that state

        if self._judged is not None:
            self._judged.begin(self.path, self.life, self.origin)
        if resumed is not None:
            self.tracker.reducers.take_in(self.tracker.switches.unfrozen, self.peers)
            self.tracker.reducers.resume(self._orders, resumed.world_then, self.peers)
        self.tier.forget(resumed.step if resumed else -1)
        if self.state is not None and self.copies is not None:
            self.copies.send_again(str(self.path), self.state, self.peers)
        for note in resumed.notes if resumed is not None and self.peers.rank == 0 else ():
            warnings.warn(f"holdfast: {note}", RuntimeWarning, stacklevel=4)
        return resumed

    # --- memory -------------------------------------------------------------------------------------------------------

    def _from_memory(self) -> Resumed | None:
        """Load a state in memory; None: there is none that every rank can load."""
        held = self._held_states()
        mine = [[state, next(iter(slots.values())).world, list(slots)] for state, slots in held.items()]
        # A node without states has no address here: a newcomer must not wait for its saver, which just starts.
        reports = self.peers.gather([mine, self.copies.report().address if mine and self.copies is not None else []])
        answer = self.peers.broadcast(self._offer_states(reports, held) if reports else None)
        if answer["over"]:
            end_without_progress(answer["over"])

        self.life, self._suspects = answer["life"], [(step, why) for step, why in answer["suspects"]]
        self._must_be_finite = answer["must_be_finite"]
        for step, attempt, save, world, where in answer["offers"]:
            state = (step, attempt, save)
            sources = Sources(world, {owner: (host, port) for owner, host, port in where})
            resumed = self._from_slots(step, self._gathered(state, held.get(state, {}), sources))
            if resumed is not None:
                self.origin = Key(step, attempt)
                self.state = state
                if self.copies is not None:
                    self.copies.keep(state)
                return resumed
        return None

    def _held_states(self) -> dict[State, NodeSlots]:
        """The states of this folder in this node's memory."""
        held: dict[State, NodeSlots] = {}
        for each in self.tier.held(str(self.path)):
            assert each.request is not None
            if each.request.note.get(FOLDER_ID) != self.folder_id:
                continue
            held.setdefault(each.request.identity, {}).setdefault(each.rank, each)
        return held

    def _gathered(self, state: State, held: NodeSlots, sources: Sources) -> list[Slot]:
        """The slots from which this rank loads the state: its node's own ones; if some rank lacks a part, also copies
        for other nodes; and if some rank still lacks one, also what is fetched from other nodes."""
        if self.copies is None or not (sources.is_complete or _may_have_all_parts(state)):
            return list(held.values())

        own = {rank: slot for rank, slot in held.items() if slot.path is not None and not is_copy(slot.path)}
        lacks = True
        for use in (own, held):
            lacks = lacks and self._lacks(use, sources)
            if not any(self.peers.all_gather(lacks)):
                return self._enough(own, held, sources)

        # In a world of the same size a rank needs its own state at first, and others only if that lacks a part.
        for everything in (False, True) if sources.world == self.peers.world else (True,):
            wanted = sources.missing(list(held), self.peers, self.copies.node, lacks=lacks, everything=everything)
            failed = self.copies.bring(str(self.path), state, wanted, sources.where, own=not everything)
            self.skipped += [f"step {state[0]} in memory: {failed}"] if failed else []
            self.peers.all_gather(None)  # wait until the other ranks of this node have fetched theirs
            held = self._held_states().get(state, held)
            lacks = lacks and self._lacks(held, sources)
            if not any(self.peers.all_gather(lacks)):
                break
        return self._enough(own, held, sources)

    def _enough(self, own: NodeSlots, held: NodeSlots, sources: Sources) -> list[Slot]:
        """The node's own slots, if these are enough for this rank; else all."""
        return list((held if self._lacks(own, sources) else own).values())

    def _lacks(self, held: NodeSlots, sources: Sources) -> bool:
        """Whether this rank needs more than these slots."""
        if not held or (sources.world == self.peers.world and self.peers.rank not in held):
            return True
        try:
            saved, found = self._compare_held(list(held.values()))
            return bool(found.missing) or self.tracker.lacks_parts(saved, self.peers.rank)
        except (ShardingError, SnapshotDamagedError):
            return True

    def _offer_states(self, reports: list[Any], held: dict[State, NodeSlots]) -> dict[str, Any]:
        """Rank 0's answer to the ranks' reports of their states: what is suspect, and the states in memory to try."""
        life = os.urandom(8).hex()
        answer: dict[str, Any] = {"over": "", "life": life, "suspects": [], "offers": [], "must_be_finite": False}
        found_at: dict[State, Sources] = {}
        for theirs, address in reports:
            for (step, attempt, save), world, owners in theirs:
                where = found_at.setdefault((step, attempt, save), Sources(world, {})).where
                for owner in owners if address and address[1] else ():
                    where.setdefault(owner, tuple(address))
        offers = [{(step, attempt, save) for (step, attempt, save), _, _ in theirs} for theirs, _ in reports]
        self._lost = _lost_lives(theirs for theirs, _ in reports)

        try:
            self._judged = judged(self.path, self.patience, (Key(each[0], each[1]) for each in set().union(*offers)))
            found = folders.survey(self.path)
        except SnapshotError:
            return answer  # `_from_disk` comes next, and raises the same error
        suspects = self._judged.suspects
        answer |= {
            "over": self._judged.over,
            "suspects": [(key.step, f"{key.name} is suspect: {why}") for key, why in suspects.items()],
        }
        fetched = {each for each, at in found_at.items() if at.is_complete or (at.where and _may_have_all_parts(each))}
        common = set.intersection(*offers) | fetched
        chosen = [(state, found_at[state]) for state in self._choose(common, held, found)]
        packed = [
            (*state, each.world, [(owner, *address) for owner, address in each.where.items()]) for state, each in chosen
        ]
        on_disk = any(each.manifest.finite for each in found.committed)
        return {**answer, "offers": packed, "must_be_finite": on_disk}

    def _choose(self, common: set[State], held: dict[State, NodeSlots], found: Survey) -> list[State]:
        """The states to try, the newest first: `common` are those of which every rank has a part, or can fetch it. None
        of the result is suspect or older than the disk. Rank 0 calls it."""
        assert self._judged is not None
        good = {each for each in common if Key(each[0], each[1]) not in self._judged.suspects}
        if good or found.committed or found.suspects:
            common = good  # if there is nothing else at all, a suspect state is better than none
        newest_step = -1 if found.preferred is None else found.preferred.step

        def age(offer: State) -> tuple[int, int]:
            own = next(iter(held.get(offer, {}).values()), None)
            return offer[0], 0 if own is None else own.sequence

        return sorted((offer for offer in common if offer[0] >= newest_step), key=age, reverse=True)

    def _from_slots(self, step: int, held: list[Slot]) -> Resumed | None:
        """Load the state of this step from these slots; None: not every rank finds all that it needs, or something is
        damaged."""
        compared = self._on_all(lambda: self._compare_held(held))
        if compared is None:
            return None
        saved, findings = compared
        if any(self.peers.all_gather(bool(findings.missing))):
            return None  # it is on another node, or was not saved at all: a snapshot on the disk shows that
        try:
            fit = together(self.peers, findings, self.choice)
        except StateMismatchError as error:
            self._misfit = error
            return None
        found = self._on_all(lambda: self._prepare(saved, fit))
        if found is None:
            return None
        name, loaded = self._load_and_examine(*found) if self._must_be_finite else ("", False)
        if name:
            self._pass_over(f"step {step} in memory: {name} has values that are not finite")
            return None
        restored, damage = self._together(lambda: self._restore(*found, fit, loaded=loaded))
        if damage:
            self.skipped.append(f"step {step} in memory: {damage}")
            return None
        self.adopted = saved
        return self._resumed(step, "memory", restored, fit)

    def _compare_held(self, held: list[Slot]) -> tuple[Saved, Compared]:
        """The state in these slots, compared with the tracked objects. That is done once: the other ranks wait for
        it."""
        identity = tuple((slot.path, slot.sequence, slot.unix_s) for slot in held)
        if identity not in self._compared:
            saved = Saved([part for each in held for part in parts_of_slot(each.data, each.path)])
            self._compared[identity] = self._compare(saved)
        return self._compared[identity]

    def _pass_over(self, what: str) -> None:
        """Note that a state is passed over; all ranks call this. Rank 0 warns of it."""
        self.skipped.append(what)
        if self.peers.rank == 0:
            warnings.warn(f"holdfast: passed over: {what}", RuntimeWarning, stacklevel=5)

    def _on_all(self, work: Callable[[], _T]) -> _T | None:
        """Do the work; all ranks do. Returns its result; None: on some rank a part is on another node, or damaged. If
        it raises anything else on one rank, all raise."""
        result: _T | None = None
        mine: Exception | None = None
        problem = ""
        try:
            result = work()
        except (ShardingError, SnapshotDamagedError):
            problem = "not here"
        except Exception as error:  # noqa: BLE001 - raised below: the other ranks must not wait for us
            mine, problem = error, f"{type(error).__name__}: {error}"
        answers = self.peers.all_gather([problem, mine is not None])
        if mine is not None:
            raise mine
        self._raise_for(answers)
        return None if any(text for text, _ in answers) else result

    def _raise_for(self, answers: list[Any]) -> None:
        """Raise the error of another rank, if there is one."""
        for rank, (text, is_error) in enumerate(answers):
            if is_error:
                raise SnapshotError(f"rank {rank} could not resume: {text}")

    # --- the disk -----------------------------------------------------------------------------------------------------

    def _from_disk(self) -> Resumed | None:
        """Load a snapshot; None: the folder has none."""
        self._together(self._await_previous_worker)
        passed: set[Key] = set()  # snapshots that were tried; used on rank 0
        while True:
            chosen = self.peers.broadcast(self._next_on_disk(passed) if self.peers.rank == 0 else None)
            self.skipped = list(chosen.get("skipped", self.skipped))
            if (error := chosen.get("error")) is not None:
                raise error if isinstance(error, HoldfastError) else disk.error_of(*error)
            if not chosen["path"]:
                self._clear()
                return None

            path = location_of(chosen["path"])
            _, damage = self._together(lambda path=path: self._check(path))  # type: ignore[misc]
            resumed = None
            if not damage:
                self._must_be_finite = chosen["must_be_finite"]
                resumed, damage = self._from_folder(chosen["step"], path)
            if resumed is None and not damage:  # its values are not finite
                if self.peers.rank == 0:
                    passed.add(Key(chosen["step"], chosen["attempt"]))
                continue
            if resumed is not None:
                self._clear()
                self.origin = Key(chosen["step"], chosen["attempt"])
                return resumed

            self.skipped.append(f"{path.name}: {damage}")
            if self.peers.rank == 0:
                passed.add(Key(chosen["step"], chosen["attempt"]))
                if self._damage_lasts:
                    folders.quarantine(path, damage)

    def _next_on_disk(self, passed: set[Key]) -> dict[str, Any]:
        """The snapshot that all ranks try next: its path, empty if there is none; or an error. Rank 0 calls it."""
        try:
            found = self._survey()
            for problem in found.problems:
                if problem.damaged and problem.key not in passed:
                    self.skipped.append(f"{problem.path.name}: {problem.error}")
                    passed.add(problem.key)
                    if folders.is_lasting(problem.error):
                        folders.quarantine(problem.path, str(problem.error))
            left = [
                tuple(each for each in some if each.key not in passed) for some in (found.committed, found.suspects)
            ]
            chosen = folders.choose(replace(found, committed=left[0], suspects=left[1]), fresh_ok=self.fresh_ok)
        except HoldfastError as error:
            return {"error": error if self.peers.world == 1 else [error.code, str(error)]}
        if chosen is None:
            if self._lost:
                warnings.warn(
                    f"holdfast: parts of step {max(self._lost.values())}, which was in memory, are lost with their "
                    "node, and the disk has no snapshot: training starts from the beginning",
                    RuntimeWarning,
                    stacklevel=5,
                )
            return {"path": ""}
        for each in left[0]:
            if each.key > chosen.key and each.key not in self._passed_over:
                self._passed_over.add(each.key)
                self._pass_over(f"{each.key.name}: it has values that are not finite")
        return {
            "path": str(chosen.path),
            "step": chosen.key.step,
            "attempt": chosen.key.attempt,
            "skipped": self.skipped,
            "must_be_finite": chosen.manifest.finite is None and any(each.manifest.finite for each in left[0]),
        }

    def _await_previous_worker(self) -> None:
        """Wait for saves of the previous workers, which may become the newest snapshot. The node's saver knows of its
        own ones; others show by changes in the folder, for which rank 0 waits."""
        self.tier.await_previous_worker()
        if self.peers.rank:
            return

        before: set[tuple[Location, int]] = set()
        give_up = time.monotonic() + AT_WORK_S_MAX
        remote = isinstance(self.path, RemotePath)
        unchanged_s = REMOTE_UNCHANGED_S if remote else UNCHANGED_S
        deadline = time.monotonic() + unchanged_s
        while now := _unfinished(self._survey()):
            if now != before:
                before, deadline = now, time.monotonic() + unchanged_s
            elif time.monotonic() > deadline:
                # A slow disk may show no change for longer, but a process of this machine can be seen to write.
                if time.monotonic() > give_up or not any(folders.is_being_written(path) for path, _ in now):
                    break
                deadline = time.monotonic() + unchanged_s
            time.sleep(STORE_POLL_S if remote else POLL_S)

    def _survey(self) -> Survey:
        """The content of the folder without the meeting places of lives whose states are lost: no state was written
        there, and none will be. Raises SnapshotError."""
        found, meetings = folders.survey(self.path), {meeting_number(each) for each in self._lost}
        named = [(each, parse_name(each.name)) for each in found.debris]
        left = tuple(each for each, name in named if name is None or name.key.attempt not in meetings)
        return replace(found, debris=left)

    def _clear(self) -> None:
        """Delete the remains of saves that have not ended. This comes last: until a snapshot was chosen they show that
        something was saved here."""
        if self.peers.rank == 0:
            with contextlib.suppress(SnapshotError):
                folders.clear_debris(folders.survey(self.path))

    def _check(self, path: Location) -> int:
        """Read and check this rank's share of the snapshot's files: together the ranks read every byte."""
        snapshot = folders.inspect(path)
        for rank in range(self.peers.rank, snapshot.manifest.world, self.peers.world):
            with RankFile(snapshot, rank) as file:
                file.check()
        return 0

    def _from_folder(self, step: int, path: Location) -> tuple[Resumed | None, str]:
        """Load this snapshot. Returns None and the damage, if it is damaged; None and an empty text, if it has values
        that are not finite."""
        with contextlib.ExitStack() as files:
            compared, damage = self._together(lambda: self._compare(files.enter_context(opened(folders.inspect(path)))))
            if damage:
                return None, damage
            saved, findings = compared
            fit = together(self.peers, findings, self.choice)
            found, damage = self._together(lambda: self._prepare(saved, fit))
            if damage:
                return None, damage
            name, loaded = self._load_and_examine(*found) if self._must_be_finite else ("", False)
            if name:
                self._pass_over(f"{path.name}: {name} has values that are not finite")
                return None, ""
            restored, damage = self._together(lambda: self._restore(*found, fit, loaded=loaded))
            return (None, damage) if damage else (self._resumed(step, "disk", restored, fit), "")

    # --- both ---------------------------------------------------------------------------------------------------------

    def _compare(self, saved: Saved) -> tuple[Saved, Compared]:
        """The saved state, and how it fits the tracked objects."""
        return saved, self.tracker.compare(saved, self.peers.rank, self.choice, self.peers.world)

    def _prepare(self, saved: Saved, fit: Fit) -> tuple[ReadPlan, Targets]:
        """The plan to read the state, and the tensors that it fills."""
        targets = self.tracker.targets(saved, self.peers.rank, fit)
        return saved.prepare(targets.fill), targets

    def _load_and_examine(self, prepared: ReadPlan, targets: Targets) -> tuple[str, bool]:
        """Load the state, and look for values that are not finite; all ranks call this. Returns the name of such a
        tensor of any rank, and whether this rank has loaded the state. If it could not, `_restore` reports why."""
        name, loaded = "", False
        with contextlib.suppress(Exception):
            prepared.load()
            loaded = True
            name = first_not_finite(trained(targets.all(), targets.roles))
        return next(filter(None, self.peers.all_gather(name)), ""), loaded

    def _restore(self, prepared: ReadPlan, targets: Targets, fit: Fit, *, loaded: bool = False) -> Restored:
        if not loaded:
            prepared.load()
        return self.tracker.restore(prepared.saved, self.peers.rank, self.peers.world, targets.all(), fit)

    def _resumed(self, step: int, source: Literal["memory", "disk"], restored: Restored, fit: Fit) -> Resumed:
        """The result of a resume. If an optional object refused its state on some rank, it gets its initial state back
        on all."""
        self._orders = restored.orders
        if restored.seed:
            self._seed(restored)

        refused: dict[str, str] = {}
        for each in self.peers.all_gather(restored.refused) if fit.optional else ():
            refused = {**each, **refused}
        for name in sorted(refused):
            self.tracker.put_back(name, restored)

        lost = dict.fromkeys(note for notes in self.peers.all_gather(restored.notes) for note in notes)
        notes = (*fit.notes, *lost, *(f"{name} is not restored: {why}" for name, why in sorted(refused.items())))
        skipped = (*self.skipped, *(why for then, why in self._suspects if then >= step))
        return Resumed(step, source, restored.world_then, skipped, notes)

    def _seed(self, restored: Restored) -> None:
        """Seed the random generators, in a world of another size; all ranks call this."""
        # From memory a rank may have read the states of only some ranks: all have to use the same seed.
        answers = self.peers.all_gather([restored.seed, restored.equal, restored.apart])
        known = [equal for _, equal, _ in answers if equal is not None]
        within = set.intersection(*map(set, known)) if known else set()
        equal = {name for name in within if len({each[name] for each in known}) == 1}
        seed_random(answers[0][0].encode(), self.peers.rank, self.peers.world, equal)
        if groups := sorted((within - equal).union(*(apart for _, _, apart in answers))):
            restored.notes.append(
                f"groups of ranks drew the same random numbers ({', '.join(groups)}), as in tensor parallelism, and "
                f"each of {self.peers.world} ranks draws its own now: seed each group again after resume()"
            )

    def _together(self, work: Callable[[], _T]) -> tuple[_T, str]:
        """Do the work; all ranks do. Returns its result, and the damage of the snapshot that some rank has found;
        empty: none. If it raises anything else on one rank, all raise."""
        mine: Exception | None = None
        result: Any = None
        answer: dict[str, Any] = {}
        try:
            result = work()
        except (SnapshotDamagedError, SnapshotGoneError) as error:
            answer = {"damage": str(error), "lasts": folders.is_lasting(error)}
        except HoldfastError as error:
            mine, answer = error, {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - raised below: the other ranks must not wait for us
            mine, answer = error, {"error": f"{type(error).__name__}: {error}"}
        answers = self.peers.all_gather(answer)
        if mine is not None:
            raise mine
        self._raise_for([(each.get("error"), "error" in each) for each in answers])
        self._damage_lasts = any(each.get("lasts") for each in answers)
        return result, next((each["damage"] for each in answers if "damage" in each), "")


def _may_have_all_parts(state: State) -> bool:
    """Whether some of its ranks may have all of this state: they have left it when they lost another one. Whether that
    is so is seen when it is compared with what is tracked."""
    return state[2] == ALONE_SAVE


def _lost_lives(reports: Iterable[list[Any]]) -> dict[int, int]:
    """Lives (attempt numbers) of which no state is whole, with the newest step of each. `reports`: the states that each
    rank's node holds in memory, each with its world and the ranks whose parts are there."""
    here: dict[State, set[int]] = {}
    whole: set[int] = set()
    for (step, attempt, save), world, ranks in (state for theirs in reports for state in theirs):
        owners = here.setdefault((step, attempt, save), set())
        owners.update(ranks)
        if len(owners) == world:
            whole.add(attempt)
    return {attempt: step for step, attempt, _ in sorted(here) if attempt not in whole}


def _unfinished(found: Survey) -> set[tuple[Location, int]]:
    """Names and sizes in the attempts that would be newer than any committed snapshot."""
    newest = found.newest_valid
    files: set[tuple[Location, int]] = set()
    for path in found.debris:
        named = parse_name(path.name)
        if named is None or named.kind is FolderKind.GONE or (newest is not None and named.key < newest.key):
            continue
        with contextlib.suppress(OSError):
            if isinstance(path, RemotePath):
                sizes = path.sizes()
                files |= {(path / name, size) for name, size in sizes.items() if MANIFEST not in sizes}
                continue
            files.add((path, 0))
            files |= {(each, each.stat().st_size) for each in path.iterdir()}
    return files
