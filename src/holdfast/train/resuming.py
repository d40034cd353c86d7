"""Resuming: all ranks agree on the newest state that every one of them can load, and load it.

Memory first, when it is at least as new as the disk and every rank finds all that it needs on its own node, or, with
copies on other nodes, anywhere: then it is fetched. Otherwise
the newest snapshot on the disk whose bytes are all valid; damaged ones are renamed and reported, suspect ones are left
out (quarantine.py). Rank 0 decides, the others follow (agreement.py); a failure of one rank is reported to all, so that
no rank waits for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

from holdfast.protocol.errors import (
    HoldfastError,
    ShardingError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotFolderError,
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
from holdfast.train.snapshots import folder as folders
from holdfast.train.snapshots import lease as leases
from holdfast.train.snapshots.copy_service import State, is_copy
from holdfast.train.snapshots.flush import rescue_attempt
from holdfast.train.snapshots.folder import RankFile, Survey
from holdfast.train.snapshots.layout import MANIFEST, FolderKind, Key, parse_name
from holdfast.train.snapshots.lease import FOLDER_ID, FolderLease
from holdfast.train.snapshots.remote import STORE_POLL_S, Location, RemotePath, location_of
from holdfast.train.snapshots.saver_client import Tier
from holdfast.train.snapshots.slots import Slot
from holdfast.train.state import Restored, Tracker
from holdfast.train.tracked import Choice, Compared, Fit, Targets, together, trained

_T = TypeVar("_T")

STANDSTILL_S = 2.0
"""The writer of an unfinished save that has not changed for this long is assumed dead."""
REMOTE_STANDSTILL_S = 5.0
"""The same in an object store: this node's uploads are over then, and what is left is a commit of small objects."""
AT_WORK_S_MAX = 300.0
"""Except when its writer is seen at work; at most this long, and less than the other ranks wait for us."""
POLL_S = 0.02


@dataclass(frozen=True)
class Resumed:
    """The state from which training continues."""

    step: int
    source: Literal["memory", "disk", "survivors"]
    """`survivors`: this process replaces a lost one, and has the state of ranks that went on (`ht.survive`)."""
    world_then: int
    """Ranks of the job that saved it."""
    skipped: tuple[str, ...] = ()
    """Newer snapshots that were found damaged or are suspect, and why."""
    notes: tuple[str, ...] = ()
    """What was not restored as it was saved, because `strict=False` or `optional=` allowed it."""


Held = dict[int, Slot]
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
    """States in memory of another folder, which had this name before, are left out."""
    life: str = ""
    """A random word, the same on all ranks: notes of this life carry it."""
    origin: Key | None = None
    """What was loaded; a state in memory has the number of the attempt as which the saver would write it."""
    adopted: Saved | None = None
    """Of a state in memory: its `settling` has to be done before anybody stages a new one."""
    skipped: list[str] = field(default_factory=list)
    _orders: list[Order] = field(default_factory=list)
    """Of the gradients, in the state that was loaded."""
    _state: State | None = None
    """In memory, from which training goes on."""
    _compared: dict[tuple[Any, ...], tuple[Saved, Compared]] = field(default_factory=dict)
    """By the slots."""
    _misfit: StateMismatchError | None = None
    """Of a state in memory."""
    _must_be_finite: bool = False
    """The disk has a state whose values are finite. Nobody has looked at those of the state that is being loaded, which
    is in memory, or was written from there after a crash: if they are not, it is passed over."""
    _passed_over: set[Key] = field(default_factory=set)
    """Rank 0's: snapshots that are known to have values that are not finite, and were reported."""
    _judged: Judged | None = None
    """Rank 0's."""
    _suspects: list[tuple[int, str]] = field(default_factory=list)
    """Steps, and why."""

    def run(self) -> Resumed | None:
        """None: there is nothing to go on from. All ranks return the same, or all raise. SystemExit for want of
        progress."""
        resumed = self._from_memory() or self._from_disk()
        if resumed is None and self._misfit is not None:
            raise self._misfit  # a beginning from zero would lose that state
        if self._judged is not None:
            self._judged.begin(self.path, self.life, self.origin)
        if resumed is not None:
            self.tracker.reducers.resume(self._orders, resumed.world_then, self.peers)
        self.tier.forget(resumed.step if resumed else -1)
        if self._state is not None and self.copies is not None:
            self.copies.send_again(str(self.path), self._state, self.peers)
        for note in resumed.notes if resumed is not None and self.peers.rank == 0 else ():
            warnings.warn(f"holdfast: {note}", RuntimeWarning, stacklevel=4)
        return resumed

    # --- memory -------------------------------------------------------------------------------------------------------

    def _from_memory(self) -> Resumed | None:
        held = self._held_states()
        mine = [[state, next(iter(slots.values())).world, list(slots)] for state, slots in held.items()]
        # Nobody fetches from a node that has nothing: a newcomer does not wait for its saver, which just starts.
        said = self.peers.gather([mine, self.copies.report().address if mine and self.copies is not None else []])
        word = self.peers.tell(self._first_word(said, held) if said else None)
        if word["over"]:
            end_without_progress(word["over"])
        self.life, self._suspects = word["life"], [(step, why) for step, why in word["suspects"]]
        self._must_be_finite = word["must_be_finite"]
        for step, attempt, save, world, where in word["offers"]:
            state = (step, attempt, save)
            sources = Sources(world, {owner: (host, port) for owner, host, port in where})
            resumed = self._from_slots(step, self._gathered(state, held.get(state, {}), sources))
            if resumed is not None:
                self.origin = Key(step, attempt)
                self._state = state
                if self.copies is not None:
                    self.copies.keep(state)
                return resumed
        return None

    def _held_states(self) -> dict[State, Held]:
        held: dict[State, Held] = {}
        for each in self.tier.held(str(self.path)):
            assert each.request is not None
            if each.request.note.get(FOLDER_ID) != self.folder_id:
                continue
            held.setdefault(each.request.identity, {}).setdefault(each.rank, each)
        return held

    def _gathered(self, state: State, held: Held, sources: Sources) -> list[Slot]:
        """What this rank loads the state from: its node's own slots, also copies, or what other nodes have as well."""
        if self.copies is None or not sources.is_complete:
            return list(held.values())
        own = {rank: slot for rank, slot in held.items() if slot.path is not None and not is_copy(slot.path)}
        lacks = True
        for use in (own, held):
            lacks = lacks and self._lacks(use, sources)
            if not any(self.peers.share(lacks)):
                return self._enough(own, held, sources)
        for everything in (False, True) if sources.world == self.peers.world else (True,):
            wanted = sources.missing(list(held), self.peers, self.copies.node, lacks=lacks, everything=everything)
            failed = self.copies.bring(str(self.path), state, wanted, sources.where, own=not everything)
            self.skipped += [f"step {state[0]} in memory: {failed}"] if failed else []
            self.peers.share(None)  # the other ranks of this node have fetched theirs
            held = self._held_states().get(state, held)
            lacks = lacks and self._lacks(held, sources)
            if not any(self.peers.share(lacks)):
                break
        return self._enough(own, held, sources)

    def _enough(self, own: Held, held: Held, sources: Sources) -> list[Slot]:
        return list((held if self._lacks(own, sources) else own).values())

    def _lacks(self, held: Held, sources: Sources) -> bool:
        """Whether this rank needs more than these slots."""
        if not held or (sources.world == self.peers.world and self.peers.rank not in held):
            return True
        try:
            return bool(self._compare_held(list(held.values()))[1].missing)
        except (ShardingError, SnapshotDamagedError):
            return True

    def _first_word(self, said: list[Any], held: dict[State, Held]) -> dict[str, Any]:
        """Rank 0: what is suspect, and which states in memory to try."""
        life = os.urandom(8).hex()
        word: dict[str, Any] = {"over": "", "life": life, "suspects": [], "offers": [], "must_be_finite": False}
        found_at: dict[State, Sources] = {}
        for theirs, address in said:
            for (step, attempt, save), world, owners in theirs:
                where = found_at.setdefault((step, attempt, save), Sources(world, {})).where
                for owner in owners if address and address[1] else ():
                    where.setdefault(owner, tuple(address))
        offers = [{(step, attempt, save) for (step, attempt, save), _, _ in theirs} for theirs, _ in said]
        try:
            self._judged = judged(self.path, self.patience, (Key(each[0], each[1]) for each in set().union(*offers)))
            found = folders.survey(self.path)
        except SnapshotError:
            return word  # the disk is looked at next, and says it then
        suspects = self._judged.suspects
        word |= {
            "over": self._judged.over,
            "suspects": [(key.step, f"{key.name} is suspect: {why}") for key, why in suspects.items()],
        }
        common = set.intersection(*offers) | {state for state, sources in found_at.items() if sources.is_complete}
        chosen = [(state, found_at[state]) for state in self._choose(common, held, found)]
        as_told = [
            (*state, each.world, [(owner, *address) for owner, address in each.where.items()]) for state, each in chosen
        ]
        on_disk = any(each.manifest.finite for each in found.committed)
        return {**word, "offers": as_told, "must_be_finite": on_disk}

    def _choose(self, common: set[State], held: dict[State, Held], found: Survey) -> list[State]:
        """Rank 0: what every rank has something of, or can fetch, newest first, and is not suspect or older than the
        disk."""
        assert self._judged is not None
        good = {each for each in common if Key(each[0], each[1]) not in self._judged.suspects}
        if good or found.committed or found.suspects:
            common = good  # else a suspect state is better than none
        newest_step = -1 if found.preferred is None else found.preferred.step

        def age(offer: State) -> tuple[int, int]:
            own = next(iter(held.get(offer, {}).values()), None)
            return offer[0], 0 if own is None else own.sequence

        return sorted((offer for offer in common if offer[0] >= newest_step), key=age, reverse=True)

    def _from_slots(self, step: int, held: list[Slot]) -> Resumed | None:
        """None when not every rank finds all that it needs, or something is damaged."""
        compared = self._on_all(lambda: self._compare_held(held))
        if compared is None:
            return None
        saved, findings = compared
        if any(self.peers.share(bool(findings.missing))):
            return None  # on another node, or not saved at all: the disk knows
        try:
            fit = together(self.peers, findings, self.choice)
        except StateMismatchError as error:
            self._misfit = error
            return None
        found = self._on_all(lambda: self._prepare(saved, fit))
        if found is None:
            return None
        name, loaded = self._look_at(*found) if self._must_be_finite else ("", False)
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
        """Once for the same slots: the other ranks wait for it."""
        which = tuple((slot.path, slot.sequence, slot.unix_s) for slot in held)
        if which not in self._compared:
            saved = Saved([part for each in held for part in parts_of_slot(each.data, each.path)])
            self._compared[which] = self._compare(saved)
        return self._compared[which]

    def _pass_over(self, what: str) -> None:
        """All ranks do; say it once."""
        self.skipped.append(what)
        if self.peers.rank == 0:
            warnings.warn(f"holdfast: passed over: {what}", RuntimeWarning, stacklevel=5)

    def _on_all(self, work: Callable[[], _T]) -> _T | None:
        """None when it failed on some rank: pieces are on another node, or torn, or do not fit what is tracked."""
        result: _T | None = None
        mine: Exception | None = None
        word = ""
        try:
            result = work()
        except (ShardingError, SnapshotDamagedError):
            word = "not here"
        except Exception as error:  # noqa: BLE001 - raised below: the other ranks must not wait for us
            mine, word = error, f"{type(error).__name__}: {error}"
        said = self.peers.share([word, mine is not None])
        if mine is not None:
            raise mine
        self._raise_for(said)
        return None if any(text for text, _ in said) else result

    def _raise_for(self, said: list[Any]) -> None:
        for rank, (text, is_error) in enumerate(said):
            if is_error:
                raise SnapshotError(f"rank {rank} could not resume: {text}")

    # --- the disk -----------------------------------------------------------------------------------------------------

    def _from_disk(self) -> Resumed | None:
        self._together(self._await_previous_worker)
        passed: set[Key] = set()
        while True:
            word = self.peers.tell(self._next_on_disk(passed) if self.peers.rank == 0 else None)
            self.skipped = list(word.get("skipped", self.skipped))
            if "error" in word:
                raise word["error"] if isinstance(word["error"], HoldfastError) else SnapshotError(word["error"])
            if not word["path"]:
                self._clear()
                return None
            path = location_of(word["path"])
            _, damage = self._together(lambda path=path: self._check(path))  # type: ignore[misc]
            resumed = None
            if not damage:
                self._must_be_finite = word["must_be_finite"]
                resumed, damage = self._from_folder(word["step"], path)
            if resumed is None and not damage:
                if self.peers.rank == 0:
                    passed.add(Key(word["step"], word["attempt"]))
                continue
            if resumed is not None:
                self._clear()
                self.origin = Key(word["step"], word["attempt"])
                return resumed
            self.skipped.append(f"{path.name}: {damage}")
            if self.peers.rank == 0:
                passed.add(Key(word["step"], word["attempt"]))
                folders.quarantine(path, damage)

    def _next_on_disk(self, passed: set[Key]) -> dict[str, Any]:
        """Rank 0: what to try now."""
        try:
            found = folders.survey(self.path)
            for problem in found.problems:
                if problem.damaged and problem.key not in passed:
                    self.skipped.append(f"{problem.path.name}: {problem.error}")
                    passed.add(problem.key)
                    folders.quarantine(problem.path, str(problem.error))
            left = [
                tuple(each for each in some if each.key not in passed) for some in (found.committed, found.suspects)
            ]
            chosen = folders.choose(replace(found, committed=left[0], suspects=left[1]), fresh_ok=self.fresh_ok)
        except HoldfastError as error:
            return {"error": error if self.peers.world == 1 else str(error)}
        if chosen is None:
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
        """Wait for saves of the previous workers, which may become the newest: the node's saver knows, or the folder
        changes."""
        self.tier.await_previous_worker()
        if self.peers.rank:
            return
        before: set[tuple[Location, int]] = set()
        give_up = time.monotonic() + AT_WORK_S_MAX
        remote = isinstance(self.path, RemotePath)
        standstill_s = REMOTE_STANDSTILL_S if remote else STANDSTILL_S
        deadline = time.monotonic() + standstill_s
        while now := _unfinished(folders.survey(self.path)):
            if now != before:
                before, deadline = now, time.monotonic() + standstill_s
            elif time.monotonic() > deadline:
                # A slow disk moves nothing for longer; a process of this machine that is at it can be seen.
                if time.monotonic() > give_up or not any(folders.is_being_written(path) for path, _ in now):
                    break
                deadline = time.monotonic() + standstill_s
            time.sleep(STORE_POLL_S if remote else POLL_S)

    def _clear(self) -> None:
        """What saves without an end have left; not before it was counted as what was saved here."""
        if self.peers.rank == 0:
            with contextlib.suppress(SnapshotError):
                folders.clear_debris(folders.survey(self.path))

    def _check(self, path: Location) -> int:
        """This rank's share of reading every byte."""
        snapshot = folders.inspect(path)
        for rank in range(self.peers.rank, snapshot.manifest.world, self.peers.world):
            with RankFile(snapshot, rank) as file:
                file.check()
        return 0

    def _from_folder(self, step: int, path: Location) -> tuple[Resumed | None, str]:
        """None and why, when the snapshot is damaged; None alone: it is whole, and has values that are not finite."""
        with contextlib.ExitStack() as files:
            compared, damage = self._together(lambda: self._compare(files.enter_context(opened(folders.inspect(path)))))
            if damage:
                return None, damage
            saved, findings = compared
            fit = together(self.peers, findings, self.choice)
            found, damage = self._together(lambda: self._prepare(saved, fit))
            if damage:
                return None, damage
            name, loaded = self._look_at(*found) if self._must_be_finite else ("", False)
            if name:
                self._pass_over(f"{path.name}: {name} has values that are not finite")
                return None, ""
            restored, damage = self._together(lambda: self._restore(*found, fit, loaded=loaded))
            return (None, damage) if damage else (self._resumed(step, "disk", restored, fit), "")

    # --- both ---------------------------------------------------------------------------------------------------------

    def _compare(self, saved: Saved) -> tuple[Saved, Compared]:
        return saved, self.tracker.compare(saved, self.peers.rank, self.choice, self.peers.world)

    def _prepare(self, saved: Saved, fit: Fit) -> tuple[ReadPlan, Targets]:
        targets = self.tracker.targets(saved, self.peers.rank, fit)
        return saved.prepare(targets.fill), targets

    def _look_at(self, prepared: ReadPlan, targets: Targets) -> tuple[str, bool]:
        """Load it, and look for values that are not finite: name of such a tensor of any rank, and whether this rank
        has loaded it. If it could not, `_restore` reports why. All ranks call it."""
        name, loaded = "", False
        with contextlib.suppress(Exception):
            prepared.load()
            loaded = True
            name = first_not_finite(trained(targets.all(), targets.roles))
        return next(filter(None, self.peers.share(name)), ""), loaded

    def _restore(self, prepared: ReadPlan, targets: Targets, fit: Fit, *, loaded: bool = False) -> Restored:
        if not loaded:
            prepared.load()
        return self.tracker.restore(prepared.saved, self.peers.rank, self.peers.world, targets.all(), fit)

    def _resumed(self, step: int, source: Literal["memory", "disk"], restored: Restored, fit: Fit) -> Resumed:
        """An optional object that refused its state on some rank keeps its initial state on all."""
        self._orders = restored.orders
        if restored.seed:
            # In memory a rank may see the states of some ranks alone: all have to use the same.
            said = self.peers.share([restored.seed, restored.equal])
            known = [set(equal) for _, equal in said if equal is not None]
            equal = set.intersection(*known) if known else set()
            seed_random(said[0][0].encode(), self.peers.rank, self.peers.world, equal)
        refused: dict[str, str] = {}
        for each in self.peers.share(restored.refused) if fit.optional else ():
            refused = {**each, **refused}
        for name in sorted(refused):
            self.tracker.put_back(name, restored)
        notes = (*fit.notes, *(f"{name} is not restored: {why}" for name, why in sorted(refused.items())))
        skipped = (*self.skipped, *(why for then, why in self._suspects if then >= step))
        return Resumed(step, source, restored.world_then, skipped, notes)

    def _together(self, work: Callable[[], _T]) -> tuple[_T, str]:
        """All ranks do it. Returns its result and no text, or a text when the snapshot is at fault; else all raise."""
        mine: Exception | None = None
        result: Any = None
        word: dict[str, str] = {}
        try:
            result = work()
        except (SnapshotDamagedError, SnapshotGoneError) as error:
            word = {"damage": str(error)}
        except HoldfastError as error:
            mine, word = error, {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - raised below: the other ranks must not wait for us
            mine, word = error, {"error": f"{type(error).__name__}: {error}"}
        said = self.peers.share(word)
        if mine is not None:
            raise mine
        self._raise_for([(each.get("error"), "error" in each) for each in said])
        return result, next((each["damage"] for each in said if "damage" in each), "")


def _unfinished(found: Survey) -> set[tuple[Location, int]]:
    """What there is of attempts that would be newer than anything committed: names and sizes."""
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


class TakenFolder(NamedTuple):
    """The snapshot folder of one life of the job."""

    lease: FolderLease | None
    """Rank 0's."""
    number: int
    """The lease's, for all ranks."""
    rescue: int
    """The attempt as which the saver writes what only memory has."""
    secret: str
    """For all ranks."""
    folder_id: str
    """See LeaseOwner."""


def take_folder(path: Location, peers: Peers, lease: FolderLease | None, lost: int = 0) -> TakenFolder:
    """Rank 0 takes the folder for this job, unless it has its `lease`. `lost`: see leases.acquire. SnapshotError."""
    word: dict[str, Any] = {}
    failure: HoldfastError | None = None
    before = lease
    if peers.rank == 0:
        try:
            run_id, job_uid = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("HOLDFAST_JOB_UID", "")
            lease = lease or leases.acquire(path, run_id, lost=lost, job_uid=job_uid)
            word = {"number": lease.number, "line": lease.line, "rescue": rescue_attempt()}
            word |= {"secret": secrets.token_hex(32), "folder_id": lease.folder_id}
        except HoldfastError as error:
            failure, word = error, {"error": str(error)}
    try:
        word = peers.tell(word)
    except BaseException:  # also of an interruption: the caller does not learn of a new one
        if lease is not None and lease is not before:
            lease.release()
        raise
    if failure is not None:
        raise failure
    if "error" in word:
        raise SnapshotError(f"rank 0: {word['error']}")
    try:
        _see_one_folder(path, peers, word)
    except BaseException:
        if lease is not None and lease is not before:
            lease.release()
        raise
    return TakenFolder(lease, int(word["number"]), int(word["rescue"]), str(word["secret"]), str(word["folder_id"]))


def _see_one_folder(path: Location, peers: Peers, word: dict[str, Any]) -> None:
    """All ranks see the lease that rank 0 has taken, or all raise SnapshotFolderError. In an object store all do."""
    if isinstance(path, RemotePath) or peers.world == 1:
        return
    seen = peers.rank == 0 or leases.is_seen(path, word["number"], word["line"], leases.SEEN_S)
    blind = [(rank, host) for rank, (sees, host) in enumerate(peers.share([seen, os.uname().nodename])) if not sees]
    if blind:
        ranks = ", ".join(f"{rank} on {host}" for rank, host in blind[:4]) + (" …" if len(blind) > 4 else "")
        raise SnapshotFolderError(
            f"{path} is not one folder for all ranks: what rank 0 writes there, rank {ranks} cannot see\n"
            "the snapshot folder has to be on a disk that all nodes share, or in an object store"
        )
