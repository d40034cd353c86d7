"""One save: all ranks plan it if needed, copy their state into the tier's memory, exchange a message with rank 0, and
hand the copy over to the tier.

The copy is made before the ranks exchange messages, so that they wait for each other only afterwards. In a round each
rank reports how the copy went, and rank 0 decides what is done next (`SaveDecision`). A save has one round, or a few.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, NoReturn

import torch

from holdfast.protocol.errors import (
    HoldfastError,
    NotFiniteError,
    ReplicasDifferError,
    SnapshotError,
    SnapshotIncompleteError,
    SnapshotMemoryError,
    SnapshotWriteError,
)
from holdfast.text import listed
from holdfast.train import replicas, sharding
from holdfast.train.agreement import ENDING, FailedSaves, Peers, RankFailure, Timekeeper, node_key
from holdfast.train.copies import Copies
from holdfast.train.copying import copy_alike
from holdfast.train.mistakes import number_of
from holdfast.train.overlapping import CHANGED, Arrival, Overlapping, StateCopy
from holdfast.train.reading import Saved
from holdfast.train.reservation import MemoryReservation, foreseen_bytes
from holdfast.train.sharding import TEXT, EntryViews, Layout
from holdfast.train.snapshots import changes, disk
from holdfast.train.snapshots.changes import Keep, SaveRequest, Verified
from holdfast.train.snapshots.in_process import InProcessStaging, warn_of_disk
from holdfast.train.snapshots.lease import FOLDER_ID
from holdfast.train.snapshots.not_finite import FORMATS, Part, add_part, merged
from holdfast.train.snapshots.read_back import READ_BACK
from holdfast.train.snapshots.remote import Location, RemotePath
from holdfast.train.snapshots.saver_client import SaverClient, Tier
from holdfast.train.snapshots.saver_connection import STALL
from holdfast.train.state import Collected, Tracker
from holdfast.train.taken_folder import TakenFolder

ROUNDS_MAX = 4
"""Limit of the rounds of one save: a state that has another shape in each is an error."""
TEXT_ROOM = 1.25
"""The text's entry is this much larger than the text, whose length changes from save to save."""
TEXT_BLOCK_BYTES = 4096
FAILED_AT_THE_END = "failed at the end"
"""Name under which a rank posts the error of its last save (`Peers.post`)."""
CAUSE_S = 2.0
"""A rank whose last save is incomplete waits this long for the rank that knows why."""
POSTPONED_MAX = 10
"""A save is postponed at most this often while gradients are pending on some ranks and not on others. After that it is
made."""
ALONE_SAVE = -1
"""The number of the save, in the state that each rank leaves alone when another rank is lost."""
ATTEMPTS_PER_LEASE = 1000
"""Limit of the saves of one step by one life of a job, in an object store."""


@dataclass(frozen=True)
class SaveResult:
    """The result of a save."""

    durable: bool
    """Whether it goes to the disk; False: it is in memory alone."""
    failure: str = ""
    """The reason why this save, which was to go to the disk, or the newest that did, is not there; empty: none."""
    ask_at: int = 0
    """The step at which rank 0 is asked again whether a save is due; 0: as before."""
    postponed: bool = False
    """Whether nothing is saved, since gradients are pending on some rank."""


class Staged(Enum):
    """The result of a rank's copy into the tier's memory."""

    STAGED = "staged"
    UNPLANNED = "unplanned"
    """The state has another shape than the plan."""
    UNCOMPARED = "uncompared"
    """The replicas have to be compared first: no copy is made."""
    NO_ROOM = "no room"
    """Both slots are being written: there is no copy of this state."""
    FAILED = "failed"
    PENDING = "pending"
    """Gradients are pending: no copy is made."""


class SaveDecision(Enum):
    """Rank 0's decision in a round, for all ranks."""

    KEEP = "keep"
    """The state stays in memory, as far as there was room."""
    PERSIST = "persist"
    """The state goes to the disk."""
    PLAN = "plan"
    """All ranks make a plan, and compare replicas; another round follows."""
    COMPARE = "compare"
    """All ranks compare replicas; another round follows."""
    EXAMINE = "examine"
    """All ranks examine their tensors, since the state goes to the disk; another round follows."""
    SAVE_NOW = "save now"
    """The save was postponed too often: another round follows, as if no gradients were pending."""
    POSTPONE = "postpone"
    """Nothing is saved now."""
    DIFFER = "differ"
    """Replicas differ: all ranks raise."""
    FAIL = "fail"
    """All ranks raise."""


REPEATS = (SaveDecision.PLAN, SaveDecision.COMPARE, SaveDecision.EXAMINE, SaveDecision.SAVE_NOW)
"""Decisions after which another round follows."""


class _SaveReport(NamedTuple):
    """The report of one rank in a round."""

    staged: Staged
    failure: str
    """The error, if it is `Staged.FAILED`."""
    metrics: dict[str, float]
    step: int
    errors: list[list[str]]
    """Code and text of the errors in the background since the last report."""
    copies: list[Any] | None
    """Packed `CopyReport`; None: other nodes get no copies."""
    not_finite_step: int
    """The step of a save that the tier refused because a value is not finite; -1: none."""
    replicas: list[list[Any]] | None
    """Groups of ranks that have the same tensors as this one, each with this rank's digest of these; None: they were
    not compared, because nothing is to go to the disk."""


@dataclass(frozen=True)
class SaveRules:
    """The rules for the saves of a job; equal on all ranks."""

    failed_saves_max: int
    """The number of failed saves in a row after which all ranks raise."""
    replicas_differ: bool = False
    """Whether ranks may have different values of a parameter: see `SnapshotOptions`."""
    stops_not_finite: bool = False
    """Whether all ranks raise if a value in a save to the disk is not finite."""
    read_back: bool = False
    """Whether each rank reads its file back after a save, because retention needs that."""


@dataclass
class _Landing:
    """A state whose copy from a device overlaps with the next step, and what follows when it is in its slot."""

    copy: StateCopy
    step: int
    commit: SaveRequest
    persist: SaveRequest | None = None
    """The request to write it to the disk; None: it stays in memory."""


class Saving:
    """The saves of one rank."""

    def __init__(
        self,
        tracker: Tracker,
        peers: Peers,
        tier: Tier,
        clock: Timekeeper,
        taken: TakenFolder,
        rules: SaveRules,
        copies: Copies | None = None,
        overlapping: Overlapping | None = None,
    ) -> None:
        """`clock`: rank 0's. `taken`: the folder, with the lease on rank 0. `copies`: None: other nodes get none.
        `overlapping`: None: training waits for copies from GPUs."""
        self.tier = tier
        self._tracker, self._peers = tracker, peers
        self._clock, self._taken, self._rules, self._copies = clock, taken, rules, copies
        self._begun_at: tuple[int, int] = (-1, 0)
        """The step that was begun last, and how often it was begun; used in an object store only."""
        self._failed = FailedSaves(rules.failed_saves_max)
        self.errors: list[SnapshotError] = []
        """Errors in the background on this rank, which the others do not know yet."""
        self._last_failure: RankFailure | None = None
        """The failure of earlier saves that was reported in the newest save; None: there was none."""
        self._saves = 0
        """The number of saves since this life began; equal on all ranks."""
        self._disagreed = 0
        """The number of calls since the last save at which gradients were pending on some ranks and not on others;
        counted on rank 0."""
        self._compared_step = tracker.step
        """The last step at which replicas were compared for the disk, and equal."""
        self._first_step = tracker.step
        """The step from which these ranks go on."""
        self._equal_step: int | None = None
        """The last step at which the replicas of the present plan were found equal; None: it is not known that they
        are."""
        self._was_equal: bool | None = None
        """Whether all ranks had the same state before the first step; None: it was not asked."""
        self.compares_first_step = False
        """Whether replicas are compared after the first step, also without a save, since others may need this rank's
        state when one is lost; equal on all ranks."""
        self._layout: Layout | None = None
        """The plan; None: there is none yet."""
        self._whole: tuple[int, int, int] | None = None
        """The identity of the newest state that all ranks have in memory; None: there is none."""
        self._staged = 0
        """The number of states that were staged since the layout was planned."""
        self._trained: list[Part] = []
        """See `_trained_parts`; of the state that was staged last."""
        self._trained_of: list[bool] | None = None
        """The truth for each shared tensor whether it took part in training when `_trained` was made; None: it was not
        made with this layout."""
        self._merged: list[Part] = []
        """The same parts, merged for a slot's header."""
        self._signature: tuple[Any, ...] = ()
        """The shape of the state for which the layout was planned."""
        self._views: dict[int, EntryViews] = {}
        """Views of the tier's memory, by its address."""
        self._reservation: MemoryReservation | None = None
        """The memory that is being taken; None: all of it was."""
        self._to_copy: deque[Callable[[], None]] = deque()
        """Functions that copy adopted pages: those that are still to be called."""
        self._copying: threading.Thread | None = None
        self._copy_error: SnapshotMemoryError | None = None
        self._overlapping = overlapping
        self._landing: _Landing | None = None
        """The state that is still being copied from a device; None: there is none."""

    @property
    def busy(self) -> bool:
        """Whether a state is on its way to the disk."""
        return self.tier.busy or (self._landing is not None and self._landing.persist is not None)

    @property
    def plans_ahead(self) -> bool:
        """Whether a plan or a comparison is due, also without a save."""
        return self._layout is None or (self.compares_first_step and self.uncompared)

    @property
    def uncompared(self) -> bool:
        """Whether no state may be used for other ranks before replicas are compared; equal on all ranks. They are
        compared once for each plan, and once more after the first step: what the program has made with one seed on
        all ranks differs only then."""
        if self._rules.replicas_differ or self._peers.world == 1:
            return False
        return self._equal_step is None or self._equal_step == self._first_step < self._tracker.step

    @property
    def peers(self) -> Peers:
        return self._peers

    def stop(self) -> None:
        """Stop what runs in the background: another object saves from now on, into the same memory."""
        self._discard()
        if self._overlapping is not None:
            self._overlapping.stop()
        self._stop_reserving()
        with contextlib.suppress(SnapshotMemoryError):
            self.await_copied()

    def regroup(self, peers: Peers, generation: int, taken: TakenFolder) -> None:
        """Save with the ranks of this generation from now on. All ranks call this; the next save makes a new plan."""
        self._discard()
        self._stop_reserving()
        self.await_copied()
        self._peers, self._taken = peers, taken
        self._saves = 0
        self._layout = self._equal_step = None
        self._first_step = self._tracker.step
        self._was_equal = self.compares_first_step = True
        self.tier.regroup(peers.rank, peers.world, generation)

    def copy_adopted(self, adopted: Saved) -> None:
        """Begin to copy the pages of old slots in which training goes on: it has to be done before any rank stages a
        new state there."""
        self._to_copy.extend(adopted.copies_to_make())
        self._copying = threading.Thread(target=self._copy_some, name="holdfast-adopt")
        self._copying.start()

    def _copy_some(self) -> None:
        try:
            with contextlib.suppress(IndexError):
                while True:
                    self._to_copy.popleft()()
        except SnapshotMemoryError as error:
            self._copy_error = error

    def await_copied(self) -> None:
        """Wait until the adopted pages are copied. This also comes before the first optimizer step: pages that are
        copied one by one, as the step writes to them, take five times as long. Raises SnapshotMemoryError."""
        if self._copying is not None:
            self._copy_some()  # this thread helps the background thread
            self._copying.join()
            self._copying = None
        if self._copy_error is not None:
            raise self._copy_error

    def ask(self, step: int) -> tuple[bool, int]:
        """Ask rank 0 whether a save to the disk is due now, and at which step to ask again."""
        answer = None
        if self._peers.rank == 0:
            now_s = time.monotonic()
            ends = any(each.code in ENDING for each in self.errors)  # the save reports it to all ranks
            answer = [ends or (self._clock.due(now_s) and not self.busy), self._clock.next_ask(step, now_s)]
        durable, ask_at = self._peers.broadcast(answer)
        return bool(durable), int(ask_at)

    def take_ahead(self) -> None:
        """Take memory in the background for the state after the first step, as far as its size can be foreseen."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        size_bytes = foreseen_bytes(self._tracker.models, self._tracker.optimizers, ranks)
        if size_bytes:
            self._reservation = MemoryReservation(self.tier.reserving(size_bytes), self.tier.states)

    # --- states that are copied while training goes on: see overlapping.py --------------------------------------------

    def advance(self) -> None:
        """Commit the state that is being copied from a device, if it is there. It never waits; call it when a step is
        complete."""
        if self._landing is not None and (arrival := self._landing.copy.advance()) is not Arrival.UNDER_WAY:
            self._land(self._landing, arrival)

    def settle(self) -> None:
        """Wait until no state is being copied from a device. The next save reports an error."""
        if self._landing is not None:
            self._land(self._landing, self._landing.copy.finish())

    def end_copies(self) -> None:
        """Wait until no state is being copied, and take no more memory for copies."""
        self.settle()
        if self._overlapping is not None:
            self._overlapping.stop()

    def _discard(self) -> None:
        """Drop the state that is being copied: another rank was lost, and an operation on the device may have ended
        half done."""
        if self._landing is not None:
            self._landing.copy.finish()
            self._landing = None

    def give_up(self) -> None:
        """Commit the state that is being copied, if it is there, and stop otherwise: this process ends after an error,
        and waits for no device."""
        if self._landing is not None and not self._landing.copy.compared:
            self.advance()
        if self._landing is not None:
            self._landing.copy.give_up()
            self._landing = None
        if self._overlapping is not None:
            self._overlapping.stop()

    def _land(self, landing: _Landing, arrival: Arrival) -> SnapshotError | None:
        """Commit the state, and hand it over if it goes to the disk. Returns the error; None: there was none."""
        self._landing = None
        failure: SnapshotError | None = None
        match arrival:
            case Arrival.TORN:
                failure = SnapshotWriteError(f"step {landing.step} was not saved: {CHANGED}")
                self._stop_overlapping(landing.step)
            case Arrival.FAILED:
                failure = landing.copy.error(landing.step)
            case _:
                failure = self._committed(landing.commit)
        if failure is None and landing.persist is not None:
            self._persist(landing.persist)
        elif failure is not None:
            if arrival is not Arrival.TORN or landing.persist is not None:  # otherwise the warning is enough
                self.errors.append(failure)
            if landing.persist is not None:
                changes.refuse(landing.persist, str(failure))  # otherwise rank 0 would wait for this rank's part
        return failure

    def _committed(self, request: SaveRequest) -> SnapshotError | None:
        """Commit. Returns the error."""
        try:
            self.tier.commit(request)
        except SnapshotError as error:
            return error
        except ValueError as error:
            return SnapshotWriteError(str(error))
        self._staged += 1
        return None

    def _stop_overlapping(self, step: int) -> None:
        assert self._overlapping is not None
        self._overlapping.off = CHANGED
        warnings.warn(
            f"holdfast: the copy of step {step} was dropped: {CHANGED}.\nThe older state stays. From now on training "
            "waits for each copy from the GPU, as with SnapshotOptions(overlap=False).",
            RuntimeWarning,
            stacklevel=5,
        )

    def gather_errors(self) -> None:
        """Gather the errors of the background. The next save reports them to all ranks: one rank alone must not
        raise."""
        checks = [self.tier.check] if self._taken.lease is None else [self.tier.check, self._taken.lease.check]
        for check in checks:
            while (error := _raised(check)) is not None and str(error) not in map(str, self.errors):
                self.errors.append(error)

    def save(
        self,
        *,
        durable: bool,
        metrics: Mapping[str, Any],
        demanded: bool = False,
        pending: bool = False,
        overlaps: bool = False,
    ) -> SaveResult:
        """Save the state; all ranks call this together.

        `durable`: to the disk; False: rank 0 decides whether a save to the disk is due. A problem is a warning, unless
        the program `demanded` the save, or there were too many problems in a row: then all ranks raise a SnapshotError.
        `pending`: this rank has gradients of an optimizer step that is not complete. `overlaps`: whether it may return
        before the state is copied from a GPU.
        """
        self._saves += 1
        self._last_failure = None
        began_s = time.monotonic()
        numbers = _numbers(metrics)
        failure, staged = "", False
        for _ in range(ROUNDS_MAX):
            with self._peers.calling("snaps.save()" if demanded else "snaps.step()"):
                answer = self._round(
                    numbers, durable=durable, demanded=demanded, staged=staged, pending=pending, overlaps=overlaps
                )
            decision = SaveDecision(answer["do"])
            failure = self._take_failure(answer.get("failure"), answer.get("not_finite_step", -1)) or failure
            match decision:
                case SaveDecision.FAIL:
                    raise SnapshotError(answer["text"])
                case SaveDecision.DIFFER:
                    self._raise_difference(answer["ranks"])
                case SaveDecision.POSTPONE:
                    if not pending:
                        self.settle()
                        # This rank's copy is dropped: otherwise the next try would overwrite the slot with the last
                        # state that all ranks have.
                        self.tier.drop(self._tracker.step - 1)
                    return SaveResult(durable=False, failure=failure, postponed=True)
            if decision not in REPEATS:
                break
            staged, pending = decision is SaveDecision.EXAMINE, False
            if decision in (SaveDecision.PLAN, SaveDecision.COMPARE):
                self._compare(plans=decision is SaveDecision.PLAN)
        else:
            raise SnapshotError("the tracked state has another shape each time it is looked at")

        if decision is SaveDecision.PERSIST:
            self._clock.saved(time.monotonic())  # on every rank: any of them may be rank 0 of a later world
            self._compared_step = self._tracker.step
            request = self._request(answer["attempt"], answer["metrics"])
            stall_s = round(time.monotonic() - began_s, 6)
            request = replace(
                request,
                note={**request.note, STALL: stall_s},
                trained=self._trained,
                stops_not_finite=self._rules.stops_not_finite,
            )
            if self._landing is None:
                self._persist(request)
            else:
                self._landing.persist = request
        if answer.get("whole"):
            self._whole = self._request(self._taken.rescue, {}).identity
            self._remove_added_slot()
        if self._copies is not None:
            self._copies.follow(answer.get("copies", {}), self._peers.rank, self._tracker.step)
        return SaveResult(decision is SaveDecision.PERSIST, failure, answer.get("ask_at", 0))

    def _take_failure(self, report: Mapping[str, Any] | None, not_finite_step: int = -1) -> str:
        """Warn of the failure of earlier saves that rank 0 reports, or raise a SnapshotError, on all ranks, if it is
        fatal. Returns its text; empty: there is none. `not_finite_step`: see `drop_not_finite`."""
        if report is None:
            return ""
        failure = self._last_failure = RankFailure(**report)
        if failure.fatal:
            if failure.code == NotFiniteError.code:
                self.drop_not_finite(not_finite_step)
            raise disk.error_of(failure.code, failure.text)
        if self._peers.rank == 0:
            warnings.warn(f"holdfast: {failure.text}", RuntimeWarning, stacklevel=6)
        return failure.text

    def _persist(self, request: SaveRequest) -> None:
        """Hand the copy over. An error is reported in the next save."""
        try:
            self.tier.persist(request)
        except (SnapshotError, ValueError) as error:
            failure = error if isinstance(error, SnapshotError) else SnapshotWriteError(str(error))
            self.errors.append(failure)
            changes.refuse(request, str(failure))  # otherwise rank 0 would wait for this rank's part

    def wait(self) -> None:
        """Wait until everything is committed, on every rank. If that failed on one, all ranks raise the cause, and not
        the errors that followed from it on other ranks."""
        self.settle()
        failure: HoldfastError | None = self.errors.pop(0) if self.errors else None
        try:
            self.tier.wait()
        except HoldfastError as error:
            failure = failure or error
        code, text = ("", "") if failure is None else (failure.code, str(failure))
        reports = self._peers.all_gather([code, text, self.tier.not_finite_step])
        failed = [(rank, code, text) for rank, (code, text, _) in enumerate(reports) if text]
        causes = [each for each in failed if each[1] != SnapshotIncompleteError.code] or failed
        if not causes:
            return
        rank, code, text = causes[0]
        if code == NotFiniteError.code:
            self.drop_not_finite(reports[rank][2])
            raise NotFiniteError(text)
        if failure is not None and (rank == self._peers.rank or failure.code != SnapshotIncompleteError.code):
            raise failure
        raise disk.error_of(code, f"rank {rank}: {text}")

    def cause_of(self, error: SnapshotError) -> SnapshotError | None:
        """The error of another rank from which this one follows; None: this is the cause, or no rank posts it in time.
        `close` calls it, which not every rank need call: so the ranks cannot exchange messages."""
        if not isinstance(error, SnapshotIncompleteError):
            self._peers.post(FAILED_AT_THE_END, [self._peers.rank, error.code, str(error)])
            return None
        last = self._last_failure
        if last is not None and last.code != SnapshotIncompleteError.code:
            return disk.error_of(last.code, last.text)  # the save before failed, and this one was to make it good
        found = self._peers.posted(FAILED_AT_THE_END, CAUSE_S)
        if found is None or found[0] == self._peers.rank:
            return None
        rank, code, text = found
        return disk.error_of(code, f"rank {rank}: {text}")

    # --- one round: every rank copies and reports how that went; rank 0 decides what is next --------------------------

    def _round(
        self,
        metrics: Mapping[str, float],
        *,
        durable: bool,
        demanded: bool,
        staged: bool,
        pending: bool,
        overlaps: bool,
    ) -> dict[str, Any]:
        """Copy, report to rank 0, and return its answer: its decision ("do"), and what belongs to that. `staged`: the
        copy was made in the round before, and rank 0 has decided that it goes to the disk."""
        failure: Exception | None = None
        text = ""
        replicated: list[list[Any]] | None = None
        try:
            if pending:
                copy = Staged.PENDING
            else:
                collected = self._collect()
                copy = Staged.STAGED
                if not staged:
                    copy = self._stage(collected, metrics, wait=durable, overlaps=overlaps)
                if copy is Staged.STAGED and (durable or staged):
                    replicated = self._digests(collected)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for us
            failure, copy, text = error, Staged.FAILED, f"{type(error).__name__}: {error}"
        self.gather_errors()
        errors = [[each.code, str(each)] for each in self.errors]
        self.errors.clear()
        copies = None if self._copies is None else self._copies.report()
        step, not_finite_step = self._tracker.step, self.tier.not_finite_step
        reports = self._peers.gather([copy.value, text, metrics, step, errors, copies, not_finite_step, replicated])
        answer: dict[str, Any] | None = None
        if reports:  # on rank 0
            unpacked = [_SaveReport(Staged(value), *rest) for value, *rest in reports]
            answer = self._decide(unpacked, durable=durable, demanded=demanded)
        answer = self._peers.broadcast(answer)
        if failure is not None:
            raise failure
        assert answer is not None
        return answer

    def _decide(self, reports: Sequence[_SaveReport], *, durable: bool, demanded: bool) -> dict[str, Any]:
        """Rank 0's decision, for all ranks, with what belongs to it. `reports`: in order of rank."""
        step, now_s = self._tracker.step, time.monotonic()
        for rank, each in enumerate(reports):
            if each.staged is Staged.FAILED:
                return {"do": SaveDecision.FAIL.value, "text": f"rank {rank} failed: {each.failure}"}
            if each.step != step:
                hint = "every rank has to call step() and save() equally often: not inside `if rank == 0:`"
                text = f"rank 0 saves after step {step}, rank {rank} after step {each.step}\n{hint}"
                return {"do": SaveDecision.FAIL.value, "text": text}

        answer: dict[str, Any] = {"do": SaveDecision.KEEP.value}
        failure = self._failed.reported([each.errors for each in reports], busy=self.busy)
        if failure is not None:
            answer["failure"] = asdict(failure)
            if failure.fatal:
                return {**answer, "not_finite_step": max(each.not_finite_step for each in reports)}

        if waits := [rank for rank, each in enumerate(reports) if each.staged is Staged.PENDING]:
            return {**answer, "do": self._postpone(waits, len(reports)).value}
        self._disagreed = 0
        if any(each.staged is Staged.UNPLANNED for each in reports):
            return {**answer, "do": SaveDecision.PLAN.value}
        if any(each.staged is Staged.UNCOMPARED for each in reports):
            return {**answer, "do": SaveDecision.COMPARE.value}

        all_staged = answer["whole"] = all(each.staged is Staged.STAGED for each in reports)
        persist = durable or (self._clock.due(now_s) and not self.busy and all_staged)
        replicated = [each.replicas for each in reports if each.replicas is not None]
        if persist and len(replicated) < len(reports):
            # The save is due by the clock, which only this rank has: the others did not know that it goes to the disk.
            return {**answer, "do": SaveDecision.EXAMINE.value}
        if persist and (differ := _differing(replicated)):
            return {**answer, "do": SaveDecision.DIFFER.value, "ranks": differ}

        if self._copies is not None:
            copies = [each.copies or () for each in reports]
            answer["copies"] = self._copies.decide(copies, (step, self._taken.rescue, self._saves), staged=all_staged)
        if persist:
            self._clock.saved(now_s)  # also when it cannot begin: the next attempt comes after another interval
            try:
                number = self._begin(step)
            except SnapshotError as error:
                answer["failure"] = asdict(self._failed.not_begun(error, demanded=demanded))
            else:
                self._failed.handed_over()
                metrics = _means([each.metrics for each in reports])
                answer |= {"attempt": number, "metrics": metrics}
                answer["do"] = SaveDecision.PERSIST.value
        answer["ask_at"] = self._clock.next_ask(step, now_s)
        return answer

    def _postpone(self, waits: Sequence[int], world: int) -> SaveDecision:
        """Postpone the save, since gradients are pending on the ranks `waits`, until they are pending on none. If the
        ranks' optimizer steps never end at the same call, as may be in local SGD, it is made nevertheless, after
        POSTPONED_MAX calls: then some gradients are lost when the job goes on from the snapshot."""
        self._disagreed += len(waits) < world
        if self._disagreed <= POSTPONED_MAX:
            return SaveDecision.POSTPONE
        warnings.warn(
            f"holdfast: a save was postponed at {POSTPONED_MAX} calls of snaps.step(), since some ranks had gradients "
            "of an optimizer step that was not complete, and others had none. It is made now, without such gradients "
            f"(rank {listed(waits)}).\nLet the optimizers of all ranks step at the same call now and then, so that a "
            "resume loses no gradients.",
            RuntimeWarning,
            stacklevel=7,
        )
        return SaveDecision.SAVE_NOW

    def resumed_from(self, state: tuple[int, int, int] | None, *, begins: bool) -> None:
        """Note the state in memory from which all ranks go on; None: it was not in memory. `begins`: there was no state
        at all. Otherwise all ranks have read the same values."""
        self._whole = state
        self._equal_step = None if begins else self._first_step

    def leave_alone(self, *, tensors: bool) -> bool:
        """Leave the present state in memory, without the other ranks, since one of them was lost: all that this rank
        has, for no rank can be asked what others have. Returns whether that was possible. `tensors`: whether those are
        of the same step as the rest; False: they are left out.

        It takes the place of the oldest state in this rank's memory. That must not be the newest one that is whole,
        since this one may lack a part: if the loss came during a save, one more state is kept from then on. A spare
        that trains since the last regroup, and a replacement, may have no part of the whole one."""
        self._discard()
        if not isinstance(self.tier, SaverClient):
            return False
        slots, step, whole = self.tier.slots, self._tracker.step, self._whole
        if whole is not None and whole[0] == step:
            return False
        requests = [slot.request for slot in slots.committed()]
        oldest = requests[-1] if len(requests) > 1 else None
        if oldest is not None and oldest.identity == whole and len(requests) == slots.count and not slots.add():
            return False
        collected = self._tracker.collect(self._peers.rank, self._peers.world, alone=True)
        layout = sharding.alone(collected.shared if tensors else {}, collected.own, _text_room(collected))
        memory = self.tier.stage(step, layout.size_bytes, wait=False)
        if memory is None or not fill(memory, layout, _views_of(layout, memory), collected):
            return False
        note = {"save": ALONE_SAVE, FOLDER_ID: self._taken.folder_id}
        about = (str(self._taken.path), step, self._taken.rescue)
        parts = merged(_trained_parts(layout, collected))
        stops = self._rules.stops_not_finite
        self.tier.commit(SaveRequest(*about, self._peers.rank, self._peers.world, note, {"metrics": {}}, parts, stops))
        return True

    def _remove_added_slot(self) -> None:
        """Remove the slot that `leave_alone` has added: all ranks have a newer state in memory now, and have copied the
        pages of old slots in which they went on (`plan`)."""
        settled = self._landing is None and self._reservation is None
        if settled and isinstance(self.tier, SaverClient) and self.tier.slots.remove_added():
            self._views.clear()  # they keep the mapping

    def _begin(self, step: int) -> int:
        """Begin an attempt, on rank 0. Returns its number. Raises SnapshotError."""
        if (lease := self._taken.lease) is not None:
            lease.confirm()
            if isinstance(self._taken.path, RemotePath):
                # Each lease has its own numbers: the store has given the lease's number once, so these are unique
                # without another request, for which training would wait.
                self._begun_at = (step, self._begun_at[1] + 1 if self._begun_at[0] == step else 0)
                return lease.number * ATTEMPTS_PER_LEASE + self._begun_at[1]
        return changes.begin(self._taken.path, step, make=False)

    # --- what goes to the disk ----------------------------------------------------------------------------------------

    def _digests(self, collected: Collected) -> list[list[Any]]:
        """The groups of ranks that have the same tensors as this one, each with this rank's digest of these."""
        assert self._layout is not None
        return [
            [group.ranks, replicas.total([collected.shared[name] for name in group.names])]
            for group in self._layout.replicas
        ]

    def _searched(self, request: SaveRequest, collected: Collected) -> SaveRequest:
        """The same request, for a state in memory: if the saver writes it after a crash, it looks for values that are
        not finite, as in any save to the disk."""
        assert self._layout is not None
        trains = [each.requires_grad for each in collected.shared.values()]  # a program may unfreeze layers
        if trains != self._trained_of:
            self._trained, self._trained_of = _trained_parts(self._layout, collected), trains
            self._merged = merged(self._trained)
        return replace(request, trained=self._merged, stops_not_finite=self._rules.stops_not_finite)

    def drop_uncompared(self) -> None:
        """Drop the states since the last comparison, which may be wrong: the saver would write them when this process
        ends."""
        self.settle()
        self.tier.drop(self._compared_step)

    def is_equal_everywhere(self) -> bool:
        """Whether all ranks have the same parameters and optimizers, or need not, so that one can take the state of
        another; all ranks call this before they train. They are compared in the first call only."""
        if self._was_equal is None:
            collected = self._collect()
            names = [name for name in collected.shared if name not in collected.buffers]
            digest = replicas.total([collected.shared[name] for name in names])
            first, *others = self._peers.all_gather(["" if self._rules.replicas_differ else digest, names])
            self._was_equal = self.compares_first_step = all(each == first for each in others)
        return self._was_equal

    def _differing_now(self) -> list[int]:
        """The ranks of a group whose replicas differ now; empty: there is none. All ranks call this, with a plan."""
        if not self.uncompared:
            return []
        answers = self._peers.gather(self._digests(self._collect()))
        differ: list[int] = self._peers.broadcast(_differing(answers) if answers else None)
        if not differ:
            self._equal_step = self._tracker.step
        return differ

    def _raise_difference(self, ranks: list[int]) -> NoReturn:
        """Raise ReplicasDifferError, since these ranks have different digests. All ranks call it."""
        self.drop_uncompared()
        assert self._layout is not None
        group = next((each for each in self._layout.replicas if list(each.ranks) == ranks), None)
        shared, mine = self._collect().shared, []
        if group is not None:
            names = group.names if self._peers.rank == ranks[0] else ()
            mine = [names, replicas.each_digest([shared[name] for name in group.names])]
        answers = self._peers.gather(mine)  # rank 0 may have none of these tensors, so one of `ranks` sends the names
        found = None
        if answers:
            found = replicas.first_difference({rank: answers[rank][1] for rank in ranks}, answers[ranks[0]][0])
        raise ReplicasDifferError(self._peers.broadcast(_text_of_difference(found, self._tracker.step)))

    def drop_not_finite(self, step: int) -> None:
        """Drop the states from this step on: its values are not finite, and the saver would write the newest one when
        this process ends."""
        self.settle()
        self.tier.drop(step - 1)

    def _collect(self) -> Collected:
        return self._tracker.collect(self._peers.rank, self._peers.world)

    def _stage(self, collected: Collected, metrics: Mapping[str, float], *, wait: bool, overlaps: bool) -> Staged:
        """Copy the state into the tier's memory. `wait`: for a slot. `overlaps`: it may return before the state is
        copied from a GPU. Raises SnapshotError."""
        self.settle()
        layout = self._layout
        if layout is None or collected.signature() != self._signature:
            return Staged.UNPLANNED
        room = layout.file.spans[TEXT]
        if len(collected.text) > room.stop - room.start:
            return Staged.UNPLANNED
        if self.uncompared:
            return Staged.UNCOMPARED

        self._await_reserved(self._staged + 1)
        try:
            memory = self.tier.stage(self._tracker.step, layout.size_bytes, wait=wait)
        except SnapshotMemoryError as error:
            # When memory was reserved, the saver had locked this slot, which was a previous worker's: it has to grow
            # only now.
            self._use_disk_alone(error)
            memory = self.tier.stage(self._tracker.step, layout.size_bytes, wait=wait)
        if memory is None:
            return Staged.NO_ROOM
        request = self._searched(self._request(self._taken.rescue, metrics), collected)
        began = fill(memory, layout, self._views_in(memory, layout), collected, self._overlapping)
        if began is None:
            return Staged.UNPLANNED
        if began.copy is None:
            self.tier.commit(request)
            self._staged += 1
            return Staged.STAGED
        self._landing = _Landing(began.copy, self._tracker.step, request)
        if overlaps and self._copies is None:  # copies on other nodes are sent behind the commit
            return Staged.STAGED
        if (failure := self._land(self._landing, self._landing.copy.finish())) is None:
            return Staged.STAGED
        if failure not in self.errors:  # the copy had parts of two steps: another thread trains? Once more, with a wait
            return self._stage(collected, metrics, wait=wait, overlaps=False)
        self.errors.remove(failure)
        raise failure

    def _views_in(self, memory: memoryview, layout: Layout) -> EntryViews:
        """The views of this memory, which are made once for each slot."""
        address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        if address not in self._views:
            if len(self._views) > 2:
                self._views.clear()  # slots have grown, and have other addresses
            self._views[address] = _views_of(layout, memory)
        return self._views[address]

    def _request(self, number: int, metrics: Mapping[str, float]) -> SaveRequest:
        """The request to save the current state. `number`: the attempt's."""
        assert self._layout is not None
        note: dict[str, Any] = {"save": self._saves, FOLDER_ID: self._taken.folder_id}
        if self._rules.read_back:
            note[READ_BACK] = True
        if self._layout.beside is not None:
            note["file_bytes"] = self._layout.file.size_bytes
        peers, state = self._peers, self._tracker.state
        metadata: dict[str, Any] = {"metrics": dict(metrics), "epoch": state.epoch}
        return SaveRequest(str(self._taken.path), self._tracker.step, number, peers.rank, peers.world, note, metadata)

    # --- the plan -----------------------------------------------------------------------------------------------------

    def plan_ahead(self, *, pending: bool) -> None:
        """Plan before a save is due, so that the first one costs no more than the others; all ranks call this together.
        Nothing is done while gradients are `pending` on one of them: its optimizer has no state before its first step.
        """
        if any(self._peers.all_gather(pending)):
            return
        if self.compares_first_step:
            self._compare(plans=True)
        else:
            self.plan()

    def _compare(self, *, plans: bool) -> None:
        """Compare replicas, with another plan if this one `plans`; all ranks call this. Raises ReplicasDifferError."""
        if plans:
            self.plan()
        if differ := self._differing_now():
            self._raise_difference(differ)

    def has_equal_replicas(self) -> bool:
        """Plan, and compare replicas before the first step; all ranks call this. They may differ even in a program that
        is right, if its DDP makes them equal later."""
        self.plan()
        return not self._differing_now()

    def plan(self) -> None:
        """Make a plan, and begin to take memory for it in the background; all ranks call this together. If one rank
        fails, all raise: to plan, the ranks wait for each other."""
        failure: Exception | None = None
        try:
            self.settle()
            self._stop_reserving()
            self.await_copied()  # no rank stages before all have planned, hence before all have copied adopted pages
            collected = self._collect()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for us
            failure = error
        answers = self._peers.all_gather("" if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(answers):
            if text:
                raise SnapshotError(f"rank {rank} failed: {text}")

        self._views.clear()
        self._trained_of = None
        self._equal_step = None
        if isinstance(self.tier, SaverClient):
            self.tier.drop_fetched()  # all ranks have copied adopted pages, so no rank needs it any more
        loose = set(collected.shared) if self._rules.replicas_differ else collected.buffers
        self._layout = _plan(self._peers, f"{node_key()}:{self.tier.place}", collected, loose)
        if self._overlapping is not None:
            tensors = [
                collected.shared[key] if key in collected.shared else collected.own[key] for _, key in self._layout.keys
            ]
            self._overlapping.take_ahead([sharding.local_tensor(each) for each in tensors])
        self._signature = collected.signature()
        self._staged = 0
        self._reservation = MemoryReservation(self.tier.reserving(self._layout.size_bytes), self.tier.states)

    def _stop_reserving(self) -> None:
        """Take no more memory for now. What was taken counts for the next plan, and an error will come again there."""
        if self._reservation is not None:
            self._reservation.stop()
            self._reservation = None

    def _await_reserved(self, states: int) -> None:
        """Wait until this number of states has room."""
        if self._reservation is None:
            return
        error = self._reservation.finish(states)
        if error is not None or states >= self.tier.states:
            self._reservation = None
        if error is not None:
            self._use_disk_alone(error)

    def _use_disk_alone(self, error: SnapshotMemoryError) -> None:
        """Save to the disk only from now on, since there is no memory."""
        warn_of_disk(error)
        self.tier.close(ahead=False)
        self.tier = InProcessStaging()
        if self._copies is not None:
            self._copies.end()


class Pruner:
    """Rank 0's retention. Only one thread calls its methods."""

    def __init__(self, path: Location, keep: Keep) -> None:
        self._path, self._keep = path, keep
        self._verified = Verified()
        self._due = False
        """Whether a new snapshot makes a deletion due."""
        self._thread: threading.Thread | None = None

    def begin_after(self, saving: Saving) -> None:
        """Delete old snapshots once the new one is written."""
        self._due = True
        self._verified.read = saving.tier.read_back
        self.check(saving)

    def check(self, saving: Saving) -> None:
        """Start if the new snapshot is on the disk. It never waits."""
        running = self._thread is not None and self._thread.is_alive()
        if self._due and not running and not saving.busy:
            self._due = False
            # A daemon: after an error the process does not wait for it, and a deletion may be interrupted anywhere.
            self._thread = threading.Thread(target=self._prune, name="holdfast-retention", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Delete now, if that is due."""
        if self._thread is not None:
            self._thread.join()
        if self._due:
            self._due = False
            self._prune()

    def _prune(self) -> None:
        try:
            done = changes.prune(self._path, self._keep, verified=self._verified)
        except SnapshotError as error:
            # The new snapshot is saved. That old ones take more room than the user wants must not end the training.
            warnings.warn(f"holdfast: old snapshots were not deleted: {error}", RuntimeWarning, stacklevel=2)
            return
        for path, why in done.damaged:
            warnings.warn(f"holdfast: {path.name} was set aside: {why}", RuntimeWarning, stacklevel=2)


def image(tracker: Tracker) -> torch.Tensor:
    """The image of everything that is tracked, as a rank of a world of one saves it; for `reading.parts_of_slot`."""
    collected = tracker.collect(0, 1)
    layout = _plan(Peers(0, 1), "", collected)
    data = torch.empty(layout.size_bytes, dtype=torch.uint8)
    memory = memoryview(data.numpy())
    fill(memory, layout, _views_of(layout, memory), collected)
    return data


def _plan(peers: Peers, node: str, collected: Collected, loose: Collection[str] = ()) -> Layout:
    """The layout of this rank's image. `loose`: names of tensors that may differ between the ranks that have them."""
    return sharding.plan(peers, node, collected.shared, collected.own, _text_room(collected), loose)


def _trained_parts(layout: Layout, collected: Collected) -> list[Part]:
    """The parts of this rank's file with numbers that training changes: its writer looks whether they are finite, so
    that training does not read them."""
    spans = layout.file.spans
    written = [(name, key) for name, key in layout.keys if name in spans and key in collected.shared]
    trained = collected.trained(key for _, key in written)
    parts: list[Part] = []
    for name, key in written:
        kind = "" if key not in trained else str(trained[key].dtype).removeprefix("torch.")
        if kind in FORMATS:
            add_part(parts, spans[name], kind)
    return parts


def _text_room(collected: Collected) -> int:
    """The size of the text's entry in bytes."""
    return -(-int(len(collected.text) * TEXT_ROOM) // TEXT_BLOCK_BYTES) * TEXT_BLOCK_BYTES


def _differing(replicated: Sequence[list[list[Any]]]) -> list[int]:
    """The ranks of a group whose digests of the same tensors differ; empty: there is none."""
    digests: dict[tuple[int, ...], set[str]] = {}
    for each in replicated:
        for ranks, digest in each:
            digests.setdefault(tuple(ranks), set()).add(digest)
    return next((list(ranks) for ranks, different in digests.items() if len(different) > 1), [])


def _text_of_difference(found: tuple[str, replicas.ReplicaDifference] | None, step: int) -> str:
    which = f"{found[1]} in {found[0]}" if found is not None else "the ranks differ"
    return (
        f"the ranks have different values of the same tensor after step {step}: {which}\n"
        "A snapshot would mix them, so none was made. Did a step skip DDP's exchange of gradients? Or does each rank\n"
        "have a part of its own (a stage of a pipeline, a shard by hand)? Track that, and its optimizer, by another\n"
        "name on each rank: track(**{f'stage{rank}': model}). If the ranks are to differ, as in local SGD:\n"
        "options=ht.SnapshotOptions(replicas_differ=True) saves the values of the first rank that has the tensor."
    )


def _views_of(layout: Layout, memory: memoryview) -> EntryViews:
    views = layout.views(memory)
    return EntryViews([views[name] for name, _ in layout.keys])


class Filled(NamedTuple):
    """The result of a copy into a slot."""

    copy: StateCopy | None
    """The part that is still on its way from a device; None: all of it is there."""


def fill(
    memory: memoryview,
    layout: Layout,
    places: EntryViews,
    collected: Collected,
    overlapping: Overlapping | None = None,
) -> Filled | None:
    """Copy the state into this memory; with `overlapping` the copies from devices are only begun. Returns None, and
    copies nothing, if it does not fit the layout."""
    tensors = [collected.shared[key] if key in collected.shared else collected.own[key] for _, key in layout.keys]
    sources = places.sources(tensors)
    if sources is None:
        return None
    copy = None
    rest: Sequence[int] = range(len(sources))
    if overlapping is not None:
        optimized = [key in collected.optimized for _, key in layout.keys]
        copy, rest = overlapping.begin(places.views, sources, optimized)
    copy_alike([places.views[number] for number in rest], [sources[number] for number in rest])
    for begin, each in layout.images:
        memory[begin:][: len(each.header)] = each.header
    room = layout.file.spans[TEXT]
    memory[room] = collected.text.ljust(room.stop - room.start)
    return Filled(copy)


def _raised(check: Callable[[], None]) -> SnapshotError | None:
    """The error that this raises; None: none."""
    try:
        check()
    except SnapshotError as error:
        return error
    return None


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, as plain numbers. A tensor of a GPU is waited for here and nowhere else."""
    return {name: number for name, value in metrics.items() if (number := number_of(value)) is not None}


def _means(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the ranks that have it."""
    names = sorted({name for each in metrics for name in each})
    values = {name: [each[name] for each in metrics if name in each] for name in names}
    return {name: sum(each) / len(each) for name, each in values.items()}
