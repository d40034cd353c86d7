"""One save: plan if needed, copy into the tier's memory, exchange a message with rank 0, hand over.

The copy is made before the ranks exchange messages, so that they wait for each other only afterwards.
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
    ReplicasDifferError,
    SnapshotError,
    SnapshotIncompleteError,
    SnapshotMemoryError,
    SnapshotWriteError,
)
from holdfast.text import listed
from holdfast.train import replicas, sharding
from holdfast.train.agreement import FailedSaves, Peers, RankFailure, Timekeeper, node_key
from holdfast.train.copies import Copies
from holdfast.train.reading import Saved
from holdfast.train.reservation import MemoryReservation, foreseen_bytes
from holdfast.train.sharding import TEXT, Layout, Places
from holdfast.train.snapshots import changes, disk
from holdfast.train.snapshots.changes import Keep, SaveRequest, Verified
from holdfast.train.snapshots.in_process import InProcessStaging, warn_of_disk
from holdfast.train.snapshots.layout import FINITE
from holdfast.train.snapshots.lease import FOLDER_ID, FolderLease
from holdfast.train.snapshots.read_back import READ_BACK
from holdfast.train.snapshots.remote import Location, RemotePath
from holdfast.train.snapshots.saver_client import SaverClient, Tier
from holdfast.train.snapshots.saver_connection import STALL
from holdfast.train.state import Collected, Tracker

TEXT_ROOM = 1.25
"""The text's entry is this much larger than the text, whose length changes from save to save."""
TEXT_BLOCK_BYTES = 4096
FAILED_AT_THE_END = "failed at the end"
CAUSE_S = 2.0
"""A rank whose last save is incomplete waits this long for the rank that knows why."""
POSTPONED_MAX = 10
"""A save is postponed so often while gradients are pending on some ranks and not on others. After that it is made."""
ATTEMPTS_PER_LEASE = 1000
"""Saves of one step by one life of a job."""


@dataclass(frozen=True)
class Done:
    """The result of a save."""

    durable: bool
    """It goes to the disk; otherwise it is in memory alone."""
    failure: str = ""
    """Why this one, which was to go to the disk, or the newest that did, is not there."""
    look_at: int = 0
    """Rank 0's word: when to ask again whether it is time; 0: it said nothing of it."""
    postponed: bool = False
    """Nothing is saved, since gradients are pending on some rank."""


class Staged(Enum):
    """What became of a rank's copy into the tier's memory."""

    STAGED = "staged"
    UNPLANNED = "unplanned"
    """The state has another shape than the plan."""
    NO_ROOM = "no room"
    """Both slots are being written: the next copy is made."""
    FAILED = "failed"
    PENDING = "pending"
    """Gradients are: no copy is made."""


class _Said(NamedTuple):
    """By one rank, in a round."""

    staged: Staged
    failure: str
    metrics: dict[str, float]
    step: int
    troubles: list[list[str]]
    copies: list[Any] | None
    looked: list[Any] | None
    """Packed `TensorFindings`; None: it was not looked at the tensors, because nothing is to go to the disk."""


class TensorFindings(NamedTuple):
    """One rank's look at the tensors of a state that goes to the disk."""

    replicas: list[list[Any]]
    """Ranks that hold the same tensors as this one, and its digest of these."""
    not_finite: str
    """Name of a trained tensor with a value that is not finite; empty: there is none."""


class Saving:
    """The saves of one rank."""

    def __init__(
        self,
        path: Location,
        tracker: Tracker,
        peers: Peers,
        tier: Tier,
        rescue: int,
        clock: Timekeeper,
        failed_saves_max: int,
        lease: FolderLease | None,
        copies: Copies | None = None,
        *,
        replicas_differ: bool = False,
        folder_id: str = "",
    ) -> None:
        """`rescue`: the attempt as which the saver writes what is only in memory; the same on all ranks. `lease`:
        rank 0's. `copies`: other nodes get copies. `replicas_differ`: see `SnapshotOptions`; `folder_id`: see
        LeaseOwner."""
        self.tier = tier
        self._replicas_differ, self._folder_id = replicas_differ, folder_id
        self._path, self._tracker, self._peers = path, tracker, peers
        self._begun_at: tuple[int, int] = (-1, 0)
        """In an object store: the step that was begun last, and how often."""
        self._rescue, self._clock, self._lease = rescue, clock, lease
        self._copies = copies
        self.retention = False
        """Whether each rank reads back what it wrote; equal on all."""
        self._failed = FailedSaves(failed_saves_max)
        self.troubles: list[SnapshotError] = []
        """What went wrong in the background on this rank, and the others do not know yet."""
        self._told: RankFailure | None = None
        """What the newest save was told of earlier ones."""
        self._saves = 0
        """Since this life began; equal on all ranks."""
        self._disagreed = 0
        """Since the last save: calls at which gradients were pending on some ranks and not on others. Rank 0's."""
        self._compared_step = tracker.state.step
        """Replicas were equal at this step."""
        self._layout: Layout | None = None
        self._staged = 0
        """States, since the layout was planned."""
        self._signature: tuple[Any, ...] = ()
        self._places: dict[int, Places] = {}
        """By address of the memory."""
        self._reservation: MemoryReservation | None = None
        self._to_settle: deque[Callable[[], None]] = deque()
        self._settling: threading.Thread | None = None
        self._unsettled: SnapshotMemoryError | None = None

    @property
    def planned(self) -> bool:
        return self._layout is not None

    def regroup(self, peers: Peers, generation: int, rescue: int, lease: FolderLease | None) -> None:
        """Save with the ranks of this generation from now on. All call it; the next save makes a new plan."""
        self._stop_reserving()
        self.await_settled()
        self._peers, self._rescue, self._lease = peers, rescue, lease
        self._saves = 0
        self._layout = None
        self.tier.regroup(peers.rank, peers.world, generation)

    def settle(self, adopted: Saved) -> None:
        """Training goes on in pages of old slots; have them copied before any rank stages a new state there."""
        self._to_settle.extend(adopted.settling())
        self._settling = threading.Thread(target=self._settle, name="holdfast-settle")
        self._settling.start()

    def _settle(self) -> None:
        try:
            with contextlib.suppress(IndexError):
                while True:
                    self._to_settle.popleft()()
        except SnapshotMemoryError as error:
            self._unsettled = error

    def await_settled(self) -> None:
        """Comes before the first optimizer step, too: pages copied one by one, as it writes to them, take five times
        as long."""
        if self._settling is not None:
            self._settle()  # with both hands
            self._settling.join()
            self._settling = None
        if self._unsettled is not None:
            raise self._unsettled

    def ask(self, step: int) -> tuple[bool, int]:
        """Rank 0's word: whether it is time to save to the disk now, and when to ask again."""
        word = None
        if self._peers.rank == 0:
            now_s = time.monotonic()
            word = [self._clock.due(now_s) and not self.tier.busy, self._clock.next_look(step, now_s)]
        durable, look_at = self._peers.tell(word)
        return bool(durable), int(look_at)

    def take_ahead(self) -> None:
        """Take memory in the background for what will be there after the first step, as far as it can be foreseen."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        size_bytes = foreseen_bytes(self._tracker.models, self._tracker.optimizers, ranks)
        if size_bytes:
            self._reservation = MemoryReservation(self.tier.reserving(size_bytes), self.tier.states)

    def look(self) -> None:
        """Gather what went wrong in the background. The next save reports it to all ranks: one rank alone must not
        raise."""
        checks = [self.tier.check] if self._lease is None else [self.tier.check, self._lease.check]
        for check in checks:
            while (error := _raised(check)) is not None and str(error) not in map(str, self.troubles):
                self.troubles.append(error)

    def save(self, *, durable: bool, metrics: Mapping[str, Any], demanded: bool = False, pending: bool = False) -> Done:
        """All ranks together. `durable`: to the disk; otherwise rank 0 decides whether it is time for that. What
        prevents it is a warning, unless it was `demanded` or was so too often: then all ranks raise. `pending`: this
        rank has gradients of an optimizer step that is not complete. SnapshotError.
        """
        self._saves += 1
        self._told = None
        began_s = time.monotonic()
        numbers = _numbers(metrics)
        failure, staged = "", False
        for _ in range(4):
            with self._peers.calling("snaps.save()" if demanded else "snaps.step()"):
                word = self._round(numbers, durable=durable, demanded=demanded, staged=staged, pending=pending)
            failure = self._hear(word.get("failure")) or failure
            if word["do"] == "fail":
                raise SnapshotError(word["text"])
            if word["do"] == "differ":
                self._raise_difference(word["ranks"])
            if word["do"] == "postpone":
                if not pending:
                    self.tier.drop(self._tracker.state.step - 1)  # else the next try takes the last slot of all ranks
                return Done(durable=False, failure=failure, postponed=True)
            if word["do"] not in ("plan", "look", "save now"):
                break
            staged, pending = word["do"] == "look", False
            if word["do"] == "plan":
                self.plan()
        else:
            raise SnapshotError("the tracked state has another shape each time it is looked at")
        if word["do"] == "persist":
            self._clock.saved(time.monotonic())  # on every rank: any of them may be rank 0 of a later world
            self._compared_step = self._tracker.state.step
            if word["not_finite"]:
                self._warn_of_not_finite(word["not_finite"])
            request = self._request(word["attempt"], word["metrics"], finite=not word["not_finite"])
            stall_s = round(time.monotonic() - began_s, 6)
            self._persist(replace(request, note={**request.note, STALL: stall_s}))
        if self._copies is not None:
            self._copies.follow(word.get("copies", {}), self._peers.rank, self._tracker.state.step)
        return Done(word["do"] == "persist", failure, word.get("look_at", 0))

    def _hear(self, word: Mapping[str, Any] | None) -> str:
        """What rank 0 says of failed saves; SnapshotError, on all ranks, when it is fatal."""
        if word is None:
            return ""
        failure = self._told = RankFailure(**word)
        if failure.fatal:
            raise disk.error_of(failure.code, failure.text)
        if self._peers.rank == 0:
            warnings.warn(f"holdfast: {failure.text}", RuntimeWarning, stacklevel=6)
        return failure.text

    def _persist(self, request: SaveRequest) -> None:
        try:
            self.tier.persist(request)
        except (SnapshotError, ValueError) as error:
            told = error if isinstance(error, SnapshotError) else SnapshotWriteError(str(error))
            self.troubles.append(told)
            changes.refuse(request, str(told))  # rank 0 would wait for this rank's part

    def wait(self) -> None:
        """Until everything is committed, on every rank; all raise when that went wrong on one: the cause, and not what
        followed from it on other ranks."""
        failure: HoldfastError | None = self.troubles.pop(0) if self.troubles else None
        try:
            self.tier.wait()
        except HoldfastError as error:
            failure = failure or error
        said = self._peers.share(["", ""] if failure is None else [failure.code, str(failure)])
        failed = [(rank, code, text) for rank, (code, text) in enumerate(said) if text]
        causes = [each for each in failed if each[1] != SnapshotIncompleteError.code] or failed
        if not causes:
            return
        rank, code, text = causes[0]
        if failure is not None and (rank == self._peers.rank or failure.code != SnapshotIncompleteError.code):
            raise failure
        raise disk.error_of(code, f"rank {rank}: {text}")

    def cause_of(self, error: SnapshotError) -> SnapshotError | None:
        """In `close`, which not every rank need call: the error of another rank from which this one follows. None: this
        is the cause, or nobody posts it in time."""
        if not isinstance(error, SnapshotIncompleteError):
            self._peers.post(FAILED_AT_THE_END, [self._peers.rank, error.code, str(error)])
            return None
        told = self._told
        if told is not None and told.code != SnapshotIncompleteError.code:
            return disk.error_of(told.code, told.text)  # of the save before, which has left its step to this one
        found = self._peers.posted(FAILED_AT_THE_END, CAUSE_S)
        if found is None or found[0] == self._peers.rank:
            return None
        rank, code, text = found
        return disk.error_of(code, f"rank {rank}: {text}")

    # --- one round: every rank copies and says how it went; rank 0 says what is next ----------------------------------

    def _round(
        self, metrics: Mapping[str, float], *, durable: bool, demanded: bool, staged: bool, pending: bool
    ) -> dict[str, Any]:
        """`staged`: it is, and rank 0 has decided that it goes to the disk."""
        failure: Exception | None = None
        text = ""
        looked: TensorFindings | None = None
        try:
            if pending:
                copy = Staged.PENDING
            else:
                collected = self._collect()
                copy = Staged.STAGED if staged else self._stage(collected, metrics, wait=durable)
                if copy is Staged.STAGED and (durable or staged):
                    looked = self._look_at_tensors(collected)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for us
            failure, copy, text = error, Staged.FAILED, f"{type(error).__name__}: {error}"
        self.look()
        troubles = [[each.code, str(each)] for each in self.troubles]
        self.troubles.clear()
        copied = None if self._copies is None else self._copies.report()
        said = self._peers.gather([copy.value, text, metrics, self._tracker.state.step, troubles, copied, looked])
        word: dict[str, Any] = self._peers.tell(
            self._judge([_Said(Staged(value), *rest) for value, *rest in said], durable=durable, demanded=demanded)
            if said
            else None
        )
        if failure is not None:
            raise failure
        return word

    def _judge(self, said: Sequence[_Said], *, durable: bool, demanded: bool) -> dict[str, Any]:
        """Rank 0 decides."""
        step, now_s = self._tracker.state.step, time.monotonic()
        for rank, each in enumerate(said):
            if each.staged is Staged.FAILED:
                return {"do": "fail", "text": f"rank {rank} failed: {each.failure}"}
            if each.step != step:
                hint = "every rank has to call step() and save() equally often: not inside `if rank == 0:`"
                text = f"rank 0 saves after step {step}, rank {rank} after step {each.step}\n{hint}"
                return {"do": "fail", "text": text}
        word: dict[str, Any] = {"do": "keep"}
        failure = self._failed.reported([each.troubles for each in said], busy=self.tier.busy)
        if failure is not None:
            word["failure"] = asdict(failure)
            if failure.fatal:
                return word
        if waits := [rank for rank, each in enumerate(said) if each.staged is Staged.PENDING]:
            return {**word, "do": self._postpone(waits, len(said))}
        self._disagreed = 0
        if any(each.staged is Staged.UNPLANNED for each in said):
            return {**word, "do": "plan"}
        all_there = all(each.staged is Staged.STAGED for each in said)
        persist = durable or (self._clock.due(now_s) and not self.tier.busy and all_there)
        looked = [TensorFindings(*each.looked) for each in said if each.looked is not None]
        if persist and len(looked) < len(said):  # by the clock, of which only this rank knows
            return {**word, "do": "look"}
        if persist and (differ := _differing(looked)):
            return {**word, "do": "differ", "ranks": differ}
        if self._copies is not None:
            reports = [each.copies or () for each in said]
            word["copies"] = self._copies.decide(reports, (step, self._rescue, self._saves), staged=all_there)
        if persist:
            self._clock.saved(now_s)  # also when it cannot begin: the next attempt comes after another interval
            try:
                number = self._begin(step)
            except SnapshotError as error:
                word["failure"] = asdict(self._failed.not_begun(error, demanded=demanded))
            else:
                self._failed.handed_over()
                not_finite = next((each.not_finite for each in looked if each.not_finite), "")
                metrics = _means([each.metrics for each in said])
                word |= {"do": "persist", "attempt": number, "metrics": metrics, "not_finite": not_finite}
        word["look_at"] = self._clock.next_look(step, now_s)
        return word

    def _postpone(self, waits: Sequence[int], world: int) -> str:
        """Gradients are pending on these ranks: save when they are on none. Where the ranks' optimizer steps never
        end at the same call, as may be in local SGD, some gradients are lost when the job goes on from a snapshot."""
        self._disagreed += len(waits) < world
        if self._disagreed <= POSTPONED_MAX:
            return "postpone"
        warnings.warn(
            f"holdfast: a save was postponed at {POSTPONED_MAX} calls of snaps.step(), since some ranks had gradients "
            "of an optimizer step that was not complete, and others had none. It is made now, without such gradients "
            f"(rank {listed(waits)}).\nLet the optimizers of all ranks step at the same call now and then, so that a "
            "resume loses no gradients.",
            RuntimeWarning,
            stacklevel=7,
        )
        return "save now"

    def _begin(self, step: int) -> int:
        if self._lease is not None:
            self._lease.confirm()
            if isinstance(self._path, RemotePath):
                # Its own numbers for each lease, which the store has given once: no request while training waits.
                self._begun_at = (step, self._begun_at[1] + 1 if self._begun_at[0] == step else 0)
                return self._lease.number * ATTEMPTS_PER_LEASE + self._begun_at[1]
        return changes.begin(self._path, step, make=False)

    # --- what goes to the disk ----------------------------------------------------------------------------------------

    def _look_at_tensors(self, collected: Collected) -> TensorFindings:
        assert self._layout is not None
        alike = [
            [group.ranks, replicas.total([collected.shared[name] for name in group.names])]
            for group in self._layout.replicas
        ]
        written = [
            key for name, key in self._layout.keys if name in self._layout.file.spans and key in collected.shared
        ]
        return TensorFindings(alike, replicas.first_not_finite(collected.trained(written)))

    def _raise_difference(self, ranks: list[int]) -> NoReturn:
        """These ranks have said different digests. All ranks call it."""
        self.tier.drop(self._compared_step)  # the saver would write the newest when this process ends
        assert self._layout is not None
        group = next((each for each in self._layout.replicas if list(each.ranks) == ranks), None)
        shared, mine = self._collect().shared, []
        if group is not None:
            names = group.names if self._peers.rank == ranks[0] else ()
            mine = [names, replicas.each_digest([shared[name] for name in group.names])]
        said = self._peers.gather(mine)  # rank 0 may have none of these tensors
        found = None
        if said:
            found = replicas.first_difference({rank: said[rank][1] for rank in ranks}, said[ranks[0]][0])
        raise ReplicasDifferError(self._peers.tell(_text_of_difference(found, self._tracker.state.step)))

    def _warn_of_not_finite(self, name: str) -> None:
        if self._peers.rank == 0:
            step = self._tracker.state.step
            warnings.warn(
                f"holdfast: {name} has values that are not finite after step {step}. The snapshot is marked: resume() "
                "prefers an older one, and retention keeps the newest without such values.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _collect(self) -> Collected:
        return self._tracker.collect(self._peers.rank, self._peers.world)

    def _stage(self, collected: Collected, metrics: Mapping[str, float], *, wait: bool) -> Staged:
        layout = self._layout
        if layout is None or collected.signature() != self._signature:
            return Staged.UNPLANNED
        room = layout.file.spans[TEXT]
        if len(collected.text) > room.stop - room.start:
            return Staged.UNPLANNED
        self._await_reserved(self._staged + 1)
        try:
            memory = self.tier.stage(self._tracker.state.step, layout.size_bytes, wait=wait)
        except SnapshotMemoryError as error:  # the saver had this slot when room was taken: it is a previous worker's
            self._use_disk_alone(error)
            memory = self.tier.stage(self._tracker.state.step, layout.size_bytes, wait=wait)
        if memory is None:
            return Staged.NO_ROOM
        if not fill(memory, layout, self._places_in(memory, layout), collected):
            return Staged.UNPLANNED
        self.tier.commit(self._request(self._rescue, metrics))
        self._staged += 1
        return Staged.STAGED

    def _places_in(self, memory: memoryview, layout: Layout) -> Places:
        address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        if address not in self._places:
            if len(self._places) > 2:
                self._places.clear()  # slots have grown, and are somewhere else
            self._places[address] = _places(layout, memory)
        return self._places[address]

    def _request(self, number: int, metrics: Mapping[str, float], *, finite: bool | None = None) -> SaveRequest:
        """`finite`: whether all values are; None: nobody has looked."""
        assert self._layout is not None
        note: dict[str, Any] = {"save": self._saves, FOLDER_ID: self._folder_id}
        if self.retention:
            note[READ_BACK] = True
        if self._layout.beside is not None:
            note["file_bytes"] = self._layout.file.size_bytes
        peers, state = self._peers, self._tracker.state
        metadata: dict[str, Any] = {"metrics": dict(metrics), "epoch": state.epoch}
        if finite is not None:
            metadata[FINITE] = finite
        return SaveRequest(str(self._path), state.step, number, peers.rank, peers.world, note, metadata)

    # --- the plan -----------------------------------------------------------------------------------------------------

    def plan_ahead(self, *, pending: bool) -> None:
        """Plan before anything is due, so that the first save costs no more than the others. All ranks together. Not
        while gradients are `pending` on one of them: its optimizer has no state before its first step."""
        if not any(self._peers.share(pending)):
            self.plan()

    def plan(self) -> None:
        """All ranks together; then memory is taken in the background. What one rank cannot do all raise: to plan, the
        ranks wait for each other."""
        failure: Exception | None = None
        try:
            self._stop_reserving()
            self.await_settled()  # nobody stages before all ranks have planned, hence before all have settled
            collected = self._collect()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for us
            failure = error
        said = self._peers.share("" if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(said):
            if text:
                raise SnapshotError(f"rank {rank} failed: {text}")
        self._places.clear()
        if isinstance(self.tier, SaverClient):
            self.tier.drop_fetched()  # all ranks have settled
        loose = set(collected.shared) if self._replicas_differ else collected.buffers
        self._layout = _plan(self._peers, f"{node_key()}:{self.tier.place}", collected, loose)
        self._signature = collected.signature()
        self._staged = 0
        self._reservation = MemoryReservation(self.tier.reserving(self._layout.size_bytes), self.tier.states)

    def _stop_reserving(self) -> None:
        """What was taken counts for the next plan, and what went wrong with the rest will go wrong again."""
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
        warn_of_disk(error)
        self.tier.close(ahead=False)
        self.tier = InProcessStaging()
        if self._copies is not None:
            self._copies.end()


class Pruner:
    """Rank 0's retention. Methods are called by one thread."""

    def __init__(self, path: Location, keep: Keep) -> None:
        self._path, self._keep = path, keep
        self._verified = Verified()
        self._due = False
        self._thread: threading.Thread | None = None

    def begin_after(self, tier: Tier) -> None:
        """There will be a new snapshot, once the tier has written it."""
        self._due = True
        self._verified.read = tier.read_back
        self.check(tier)

    def check(self, tier: Tier) -> None:
        """Start when the new snapshot is on the disk. Never waits."""
        running = self._thread is not None and self._thread.is_alive()
        if self._due and not running and not tier.busy:
            self._due = False
            # A daemon: after an error nobody waits for it. Whatever it deletes may be interrupted.
            self._thread = threading.Thread(target=self._prune, name="holdfast-retention", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Delete now what is due."""
        if self._thread is not None:
            self._thread.join()
        if self._due:
            self._due = False
            self._prune()

    def _prune(self) -> None:
        try:
            done = changes.prune(self._path, self._keep, verified=self._verified)
        except SnapshotError as error:
            # What was saved is there; that it takes more room than was asked for must not end the training.
            warnings.warn(f"holdfast: old snapshots were not deleted: {error}", RuntimeWarning, stacklevel=2)
            return
        for path, why in done.damaged:
            warnings.warn(f"holdfast: {path.name} was set aside: {why}", RuntimeWarning, stacklevel=2)


def image(tracker: Tracker) -> torch.Tensor:
    """All that is tracked, as the image that a rank of a world of one saves; for `reading.parts_of_slot`."""
    collected = tracker.collect(0, 1)
    layout = _plan(Peers(0, 1), "", collected)
    data = torch.empty(layout.size_bytes, dtype=torch.uint8)
    memory = memoryview(data.numpy())
    fill(memory, layout, _places(layout, memory), collected)
    return data


def _plan(peers: Peers, node: str, collected: Collected, loose: Collection[str] = ()) -> Layout:
    text_bytes = -(-int(len(collected.text) * TEXT_ROOM) // TEXT_BLOCK_BYTES) * TEXT_BLOCK_BYTES
    return sharding.plan(peers, node, collected.shared, collected.own, text_bytes, loose)


def _differing(looked: Sequence[TensorFindings]) -> list[int]:
    """Ranks whose digests of the same tensors differ; empty: there are none."""
    digests: dict[tuple[int, ...], set[str]] = {}
    for each in looked:
        for ranks, digest in each.replicas:
            digests.setdefault(tuple(ranks), set()).add(digest)
    return next((list(ranks) for ranks, said in digests.items() if len(said) > 1), [])


def _text_of_difference(found: tuple[str, replicas.ReplicaDifference] | None, step: int) -> str:
    which = f"{found[1]} in {found[0]}" if found is not None else "the ranks differ"
    return (
        f"the ranks have different values of the same tensor after step {step}: {which}\n"
        "A snapshot would mix them, so none was made. Did a step skip DDP's exchange of gradients, or does each rank\n"
        "train something alone that is tracked? If that is intended: options=ht.SnapshotOptions(replicas_differ=True)\n"
        "saves the values of the first rank that has the tensor."
    )


def _places(layout: Layout, memory: memoryview) -> Places:
    views = layout.views(memory)
    return Places([views[name] for name, _ in layout.keys])


def fill(memory: memoryview, layout: Layout, places: Places, collected: Collected) -> bool:
    """Copy the state into this memory. False, and nothing copied: it does not fit the layout."""
    sources = [collected.shared[key] if key in collected.shared else collected.own[key] for _, key in layout.keys]
    if not places.fill(sources):
        return False
    for begin, each in layout.images:
        memory[begin:][: len(each.header)] = each.header
    room = layout.file.spans[TEXT]
    memory[room] = collected.text.ljust(room.stop - room.start)
    return True


def _raised(check: Callable[[], None]) -> SnapshotError | None:
    try:
        check()
    except SnapshotError as error:
        return error
    return None


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers; what is none is left out of the snapshot. A tensor is waited for only here."""
    numbers = {}
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            continue
        try:
            numbers[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            continue
    return numbers


def _means(said: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Over the ranks that have the metric."""
    names = sorted({name for each in said for name in each})
    values = {name: [each[name] for each in said if name in each] for name in names}
    return {name: sum(each) / len(each) for name, each in values.items()}
