"""Snapshots: the state of a training job, kept in memory every few steps and on the disk every few minutes.

    snaps = ht.Snapshots("runs/a", every="2min", memory_every=20, keep=ht.Keep(last=3, best=("loss", "min")))
    state = snaps.track(model=model, optimizer=opt, scheduler=sched, loader=loader)
    resumed = snaps.resume()
    ...
        snaps.step(loss=loss)

A save costs the training one copy of this rank's part into a slot, and a message to rank 0 over the store while it has
no other work: the plan is made once, and the saver writes to the disk (snapshots/saver_client.py). Only the main thread
exchanges messages with other ranks, and only in these methods, which every rank calls equally often.

Knows when, what and where to save; state.py, sharding.py, save.py and resuming.py know how.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast import worker
from holdfast.protocol.errors import (
    IntervalError,
    NotFiniteError,
    ReplicasDifferError,
    SnapshotError,
    SnapshotIncompleteError,
    SnapshotWriteError,
    TrackingError,
)
from holdfast.protocol.train_contract import RUN_ID_VARIABLE, SAVER_VARIABLE
from holdfast.train import replica_check
from holdfast.train.agent_channel import is_replacement
from holdfast.train.agreement import Interval, Peers, Schedule, Timekeeper, check_options
from holdfast.train.continued_pass import ContinuedPasses
from holdfast.train.copies import Copies
from holdfast.train.device_streams import DeviceStreams
from holdfast.train.guards import same_loss, watch
from holdfast.train.overlapping import Overlapping
from holdfast.train.pending import PendingGradients, WherePending
from holdfast.train.quarantine import OwnLife, Patience
from holdfast.train.reading import Saved
from holdfast.train.reducers import not_exchanged
from holdfast.train.reentry import OwnCounts, Whereabouts
from holdfast.train.resuming import Resumed, Resumer
from holdfast.train.save import ALONE_SAVE, Pruner, SaveRules, Saving
from holdfast.train.snapshots import folder as folders
from holdfast.train.snapshots import lease as leases
from holdfast.train.snapshots.changes import Keep
from holdfast.train.snapshots.in_process import open_tier
from holdfast.train.snapshots.remote import RemotePath, absolute
from holdfast.train.snapshots.saver_client import Tier
from holdfast.train.state import Tracker, TrainState
from holdfast.train.surviving_snapshots import RemakingCall, SurvivingCall
from holdfast.train.taken_folder import TakenFolder, take_folder
from holdfast.train.tracked import Choice
from holdfast.train.untracked import (
    NOT_TRACKED,
    OWN_GENERATOR,
    UntrackedData,
    UntrackedGenerators,
    UntrackedOptimizers,
    without_its_schedule,
)

if TYPE_CHECKING:
    from holdfast.train.generation_calls import FunctionsCalled

__all__ = ["Keep", "Resumed", "SnapshotOptions", "Snapshots", "TrainState"]


@dataclass(frozen=True)
class SnapshotOptions:
    """Options for the run of a job with snapshots. None of them changes what is trained. Raises IntervalError."""

    fresh_ok: bool = False
    """Whether `resume()` may return None if the folder has only unfinished or damaged snapshots."""
    failed_saves_max: int = 5
    """All ranks raise after this number of failed saves to the disk in a row. Until then rank 0 warns."""
    exit_on_stop: bool = True
    """Whether the process leaves with exit code 0 when the launcher asks to stop and all is saved. False:
    `Snapshots.stopping` is set."""
    suspect_within_steps: int | None = None
    """A failure that repeats, or a loss that is not finite, within this number of steps after `resume()` makes the
    snapshot suspect. None: the interval of snapshots, at least 3; 0: never."""
    restarts_without_progress: int | None = 3
    """The number of restarts in a row that may fail before the job's best step. Then it ends with exit code 93. None:
    any number."""
    staging_folder: str | os.PathLike[str] | None = None
    """A local folder through which the saver uploads to a URL, so that memory is free sooner. None: no such folder."""
    copies_bytes_per_s: float | None = None
    """Bytes per second that a node may send with `copies=1`. None: no limit."""
    replicas_differ: bool = False
    """Whether ranks may have different values of a parameter (local SGD); a snapshot then has those of the first rank
    that has it. False: that is an error at each save to the disk, and at the first ones to memory."""
    nonfinite: Literal["report", "stop"] = "report"
    """What follows if a parameter or optimizer value in a save to the disk is nan or infinite, which the saver finds
    while it writes. "report": rank 0 warns, and the snapshot is marked. "stop": there is no snapshot, and all ranks
    raise NotFiniteError at the next save; `close()` raises it on rank 0. After a crash, when the saver writes the
    newest state in memory, the next start warns."""
    overlap: bool = False
    """Whether the copy of a state on GPUs overlaps with the next step. It takes memory of the host as large as this
    rank's part. `save()`, jobs with `copies=1` and functions in `ht.survive` wait for the copy. False: all saves do.
    It has not run on a GPU yet."""

    def __post_init__(self) -> None:
        if type(self.failed_saves_max) is not int or self.failed_saves_max < 1:
            raise IntervalError(f"failed_saves_max={self.failed_saves_max!r}: a number of saves, at least 1")
        if self.copies_bytes_per_s is not None and not self.copies_bytes_per_s > 0:
            raise IntervalError(f"copies_bytes_per_s={self.copies_bytes_per_s!r}: more than 0, or None")
        if self.nonfinite not in ("report", "stop"):
            raise IntervalError(f'nonfinite={self.nonfinite!r}: "report" or "stop"')
        self.patience(None)

    def patience(self, interval_steps: int | None) -> Patience:
        """The limits for lives without progress. `interval_steps`: steps between two snapshots; None: not known."""
        return Patience.of(self.suspect_within_steps, interval_steps, self.restarts_without_progress)


@dataclass(frozen=True)
class _Before:
    """What this rank did in the world before, if its training function makes again what is tracked."""

    step: int = -1
    """The last step that it has completed; -1: it was in no world before."""
    durable_step: int = -1
    """The step of the last save to the disk."""
    durable_epoch: int = 0
    unsaved: str = ""
    """See `Snapshots._unsaved`."""
    errors: Sequence[SnapshotError] = ()
    """Errors in the background that the other ranks do not know yet."""

    def packed(self) -> list[Any]:
        """The fields that the other ranks need."""
        return [self.step, self.durable_step, self.durable_epoch, self.unsaved]


_first_resumed: list[weakref.ref[Snapshots]] = []
"""The Snapshots whose `resume()` was called first: in it a replacement joins the others. One per process, as its rank
is."""


class Snapshots:
    """The snapshots of one job in one folder, which all its ranks see, or under the URL of an object store.

    folder        a path, made if it is missing, for one job at a time; or s3://bucket/run, gs://, az://, any URL of
                  fsspec
    every         interval of saves to the disk: "5min", "500 steps" (s, min, h, d, steps); None: only by save() and
                  when asked to stop
    memory_every  steps from one copy in memory to the next; None: only states that go to the disk are in memory
    keep          which snapshots stay on the disk; None: all
    copies        1: states in memory are also sent to another node, so that after the loss of a node the job goes on
                  from memory
    options       SnapshotOptions

    Use it as a context manager; otherwise it is closed when the process ends. Raises IntervalError, RetentionError,
    SnapshotURLError."""

    _streams_of_device: Callable[[], DeviceStreams] = DeviceStreams
    """Makes what copies from GPUs; tests put a double in its place."""

    _functions: FunctionsCalled | None = None
    """The training functions that were called in `ht.survive`, if what they train was made before; None: there were
    none."""

    _whereabouts: Whereabouts | None = None
    """Looks whether the script asks where it goes on after a resume; None: it was looked at."""

    _position_kept = False
    """Whether a trainer skips the batches that are trained: its loader need not be tracked."""

    _position_unknown = ""
    """A warning about the loader of the training loop, for the first save that may be within an epoch; empty: none."""

    _counts: OwnCounts | None = None
    """Looks for variables of the script that count steps, after a resume; None: it was looked for."""

    _joined = False
    """Whether this process has joined ranks that went on, in place of a lost one."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: str | None = "5min",
        memory_every: int | None = 20,
        keep: Keep | None = Keep(),  # noqa: B008 - frozen
        copies: int = 0,
        *,
        options: SnapshotOptions = SnapshotOptions(),
    ) -> None:
        if not isinstance(options, SnapshotOptions):
            raise IntervalError(f"options={options!r}: write ht.SnapshotOptions(exit_on_stop=False, …)")
        self.path = absolute(folder)
        self._options = options
        self._stage = "" if options.staging_folder is None else os.path.abspath(options.staging_folder)
        self.stopping = False
        """Whether the launcher asked to stop and everything is on the disk: the script leaves with exit code 0."""
        check_options(memory_every, keep, copies)
        interval = Interval.of(every)
        self._schedule = Schedule(interval, memory_every)
        self._patience = options.patience(memory_every or interval.steps)
        self._life: OwnLife | None = None
        self._clock = Timekeeper(interval.seconds)
        self._keep = keep
        self._copies_wanted = bool(copies)
        self._copies: Copies | None = None
        self._tracker = Tracker()
        self._tracker.state._save = self._save_epoch
        if every is not None:
            self._tracker.state._finish = self._save_the_last
        self._durable_epoch = 0
        """Epoch of the newest state on the disk; 1 means that epoch 0 was completed."""
        self._unsaved = ""
        """The reason why the newest state that was to go to the disk is not there; empty: it is."""
        self._used = False
        """Whether step() or save() was called."""
        self._pending = PendingGradients()
        self._save_wanted = False
        """Whether `holdfast save` has asked for a save, and gradients were pending since then."""
        self._passes: ContinuedPasses | None = None
        self._untracked: UntrackedData | None = None
        self._beat: Callable[[], object] | None = getattr(worker, "beat", None)
        self._metrics: dict[str, Any] = {}
        self._peers: Peers | None = None
        self._opened: Tier | None = None
        self._saving: Saving | None = None
        self._lease: leases.FolderLease | None = None
        self._taken: TakenFolder | None = None
        self._pruner: Pruner | None = None
        self._closed = False
        self._process = 0
        """Pid of the process that has opened them; 0: not opened yet. A forked child has another one."""
        self._until_first_step: list[Callable[[], object]] = []
        """Functions that are called after the first step: they end what only that step needs."""
        self._survivor: SurvivingCall | None = None
        """The survivor while the training function runs in `ht.survive`; None: it does not."""
        self._remaker: RemakingCall | None = None
        """The same, if the function makes what is tracked, and calls `resume()`; None: it does not."""
        self._made_in = ""
        """The name of the function in which `resume()` was called, in `ht.survive`; empty: there is none."""
        self._new_world: tuple[Peers, int] | None = None
        """The ranks, and the generation, in which the function makes everything again, until it has called `resume()`;
        None: the world is the one in which this process was started."""
        self._before = _Before()
        self._at_safe_point: WherePending | None = None
        """The ranks on which gradients are pending, while `step()` is at a safe point; None: it is not."""
        self._survival_said = False
        """Whether the line about `ht.survive` was printed."""
        self._not_survived = ""
        """The reason why a loss is not survived any more, though it was at first; empty: there is none."""

    @property
    def state(self) -> TrainState:
        """The counters of the training, which `track` returns: step, epoch, `epochs()`."""
        return self._tracker.state

    @property
    def resumed(self) -> bool:
        """Whether resume() was called, or the first step() without it."""
        return self._saving is not None

    @functools.cached_property
    def _generators(self) -> UntrackedGenerators:
        return UntrackedGenerators()

    @property
    def _replicas_differ(self) -> bool:
        return self._options.replicas_differ

    @property
    def _is_joined_in(self) -> bool:
        """Whether the `resume()` of these Snapshots is the one in which a replacement joins the others."""
        return not _first_resumed or _first_resumed[0]() is self

    @property
    def memory_place(self) -> str:
        """A folder in memory that outlives this process; empty: there is none."""
        tier = self._current_tier
        return os.environ.get(SAVER_VARIABLE, "").partition("@")[0] if tier is None else tier.place

    @property
    def _current_tier(self) -> Tier | None:
        """The tier that was opened, or the one that replaced it when there was no room."""
        return self._opened if self._saving is None else self._saving.tier

    # --- what is saved ------------------------------------------------------------------------------------------------

    def track(self, *unnamed: Any, **objects: Any) -> TrainState:
        """Save and restore these objects: modules, their optimizers, anything with state_dict() and load_state_dict().

        Random numbers and counters are saved as well. Call it before resume(). Raises TrackingError.
        """
        if unnamed:
            raise TrackingError("track() takes names, which go into the snapshot: track(model=…, optimizer=…)")
        if self._saving is not None:
            raise TrackingError("track() comes before resume(), which restores it, and before the first step()")
        before, models_before = len(self._tracker.optimizers), len(self._tracker.models)
        self._tracker.add(objects)
        for model in self._tracker.models:
            watch(model)  # a second call for the same model does nothing
        for model in self._tracker.models[models_before:]:
            self._pending.watch_model(model)
        for optimizer in self._tracker.optimizers[before:]:
            self._pending.watch(optimizer)
            optimizer.register_step_post_hook(self._tracker.switches.note)
        if self._passes is None:
            self._passes = ContinuedPasses(self._tracker.others.values, self._tracker.note_pass)
            self.state._pending = lambda: self._pending.now() is WherePending.HERE
        # It replaces the same function of torch as the line above, and has to be called before that.
        if self._untracked is None and not self._position_kept:
            self._tracker.looks_for_cycles = True
            self._untracked = UntrackedData(self._tracker.others.values)
        return self.state

    def _position_is_kept(self) -> None:
        """Note that a trainer skips the batches that are trained: its loader need not be tracked."""
        self._stop_watching_data()
        self._position_kept = True
        self._tracker.looks_for_cycles = False

    def _stop_watching_data(self) -> None:
        if self._untracked is not None:
            self._untracked.stop()

    # --- going on -----------------------------------------------------------------------------------------------------

    def resume(
        self, *, strict: bool = True, only: Iterable[str] | None = None, optional: Iterable[str] = ()
    ) -> Resumed | None:
        """Go on from the newest state that every rank can load; None: nothing was ever saved here.

        Every rank calls it, once, after `track` and before the first step. The tracked objects have to be those that
        were saved:

        strict    False: tensors and objects that are on one side only are named in a warning, and are no error
        only      restore these objects alone (fine-tuning), with step, epoch and random numbers. The next save has
                  everything: a restart with the same `only` restores all of it
        optional  objects that keep their initial state, with a warning, if the snapshot lacks them or they do not fit:
                  an average of the weights that was added later, the loader of a dataset that has grown

        Raises NoValidSnapshotError if there are only remains of saves (unless `fresh_ok`), StateMismatchError if the
        tracked objects do not fit the snapshot. Ends the process with exit code 93 for lack of progress.
        """
        choice = Choice.of(strict, only, optional)
        if self._closed:
            raise TrackingError("these snapshots are closed")
        if self._saving is not None:
            raise TrackingError("resume() comes once, after track() and before the first step() or save()")
        if unknown := sorted((choice.only or set()) - self._tracker.names()):
            raise TrackingError(f"resume(only=…): nothing is tracked as {', '.join(unknown)}")
        if not _first_resumed:
            _first_resumed.append(weakref.ref(self))
        if is_replacement():  # of a rank that has its model already
            with self._closed_by_failure():
                return self._resume_from_survivors()

        if self._remaker is not None:
            self._remaker.check(self._tracker)
        given_id = os.environ.get(RUN_ID_VARIABLE, "")
        with self._closed_by_failure():
            peers, tier = self._open()
            assert self._taken is not None
            resumer = Resumer(
                *(self.path, self._tracker, peers, tier, self._options.fresh_ok, self._patience, choice, self._copies),
                folder_id=self._taken.folder_id,
            )
            began_as = self.state.run_id
            resumed = resumer.run()
            if peers.rank == 0 and self.state.run_id != began_as and given_id:
                sys.stderr.write(
                    f"holdfast: {RUN_ID_VARIABLE} is now {self.state.run_id}, that of the snapshot, so that loggers "
                    "continue its run\n"
                )

        if resumed is not None and choice.only is None and peers.rank == 0 and self._remaker is None:
            self._whereabouts = self._tracker.whereabouts(resumed)
        if resumed is not None and choice == Choice() and peers.rank == 0:  # otherwise the script fills in the rest
            self._tracker.note_resumed()
            self._counts = OwnCounts(self._tracker.step, self._tracker.epoch_of_script())
        self._life = OwnLife(self.path, resumer.life)
        if choice.only is not None:
            self._tracker.chosen = tuple(sorted(choice.only))
        with self._closed_by_failure():
            self._tracker.check_data(peers)
        saving = self._begin(peers, tier)
        if resumed is None:
            self._tracker.find_own_buffers(peers)
        if resumer.adopted is not None:
            self._copy_adopted(saving, resumer.adopted)
        else:
            saving.take_ahead()
        if self._remaker is not None:
            with self._closed_by_failure():
                self._begin_remade(self._remaker, saving, resumed, resumer.state)
        return resumed

    @contextlib.contextmanager
    def _closed_by_failure(self) -> Iterator[None]:
        """Close everything after an error in the block: a rank that cannot begin gives the folder back."""
        try:
            yield
        except BaseException as error:
            if self._peers is not None and not (self._remaker is not None and self._remaker.outlives(error)):
                self._abandon()
            raise

    def _copy_adopted(self, saving: Saving, adopted: Saved) -> None:
        """Copy the pages of the state that was in memory, in the background, during the first batch; the first
        optimizer step waits for that."""
        saving.copy_adopted(adopted)
        for each in self._tracker.optimizers:
            self._until_first_step.append(each.register_step_pre_hook(lambda *_: saving.await_copied()).remove)

    def _open(self) -> tuple[Peers, Tier]:
        """Find the other ranks, open the memory, and take the folder for this job alone."""
        if not self._tracker.names():
            raise TrackingError("nothing is tracked: call track(model=…, optimizer=…) first")
        peers = Peers.of_this_process() if self._new_world is None else self._new_world[0]
        self._peers = peers
        tier = self._opened or self._open_tier(peers.rank, peers.world)
        if self._new_world is None:
            self._take_folder(peers)
        else:
            tier.regroup(peers.rank, peers.world, self._new_world[1])
            self._take_folder_again(peers)
            self._regroup_data(peers)
        return peers, tier

    def _open_tier(self, rank: int, world: int) -> Tier:
        """Open the memory."""
        remote = isinstance(self.path, RemotePath)
        stage, copies = self._stage if remote else "", self._copies_wanted
        tier = self._opened = open_tier(rank=rank, world=world, remote=remote, stage=stage, copies=copies)
        self._copies = Copies(tier, self._options.copies_bytes_per_s or 0.0, str(self.path)) if copies else None
        self._process = os.getpid()
        atexit.register(self._at_exit)
        return tier

    def _take_folder(self, peers: Peers, *, lost: int = 0) -> TakenFolder:
        """Take the folder; all ranks call this. Rank 0 gets the lease, and begins retention. `lost`: the number of a
        lease whose owner was lost."""
        self._taken = taken = take_folder(self.path, peers, self._lease, lost)
        self._lease = taken.lease
        if not self.state.run_id:  # otherwise this is another world of the same training
            self.state._name(taken.training_id)
        if self._copies is not None:
            self._copies.begin(taken.secret, peers.rank, peers.world)
        if peers.rank == 0 and self._keep is not None and self._pruner is None:
            self._pruner = Pruner(self.path, self._keep)
        return taken

    # --- other worlds: see survival.py ------------------------------------------------------------------------------

    def _resume_from_survivors(self) -> Resumed:
        from holdfast.train.survival import join  # only a replacement needs it

        step, self._joined = join(self), True
        assert self._peers is not None
        return Resumed(step, "survivors", self._peers.world)

    def _go_on(self, peers: Peers, generation: int, schedule: Sequence[int], durable: Sequence[Any]) -> None:
        """Save as one of the ranks of this generation from now on. `schedule`, `durable`: see survival.RankReport."""
        self._peers = peers
        tier = self._open_tier(peers.rank, peers.world) if self._saving is None else None  # a replacement
        taken = self._take_folder_again(peers)
        if tier is not None:
            self._begin(peers, tier)
        assert self._saving is not None
        self._saving.regroup(peers, generation, taken)
        self._schedule.follow(schedule)  # all ranks save at the same steps
        self._durable_epoch, self._unsaved = durable
        self._pending.begin_again()
        self._save_wanted = False  # equal on all ranks: a replacement does not know of the request
        if self._copies is not None:  # saved and copied at once, for another loss before the next save
            self._save(self._saving, durable=False)

    def _take_folder_again(self, peers: Peers) -> TakenFolder:
        """Take the folder in another world; all ranks call this."""
        if peers.rank:  # it is rank 0's
            self._give_folder_back()
        # The newest lease was given back, or its owner is lost: the new rank 0 need not wait for it.
        lost = max(peers.all_gather(0 if self._taken is None else self._taken.number))
        return self._take_folder(peers, lost=lost)

    # --- functions that make again what is tracked: see remaking.py --------------------------------------------------

    def _give_folder_back(self) -> None:
        """Give the lease to another rank: this one does not train."""
        if self._lease is not None:
            self._lease.release()
            self._lease = self._pruner = None

    def _rest(self) -> None:
        """This rank does not train in the present world: others have the folder, and newer states."""
        self._give_folder_back()
        self._schedule.start(0)
        self._unsaved = ""

    def _stop_saving(self) -> Saving | None:
        """Stop what saves in the background. Returns the object that saves; None: there is none."""
        if self._saving is not None:
            self._saving.stop()
        return self._saving

    def _let_go(self) -> None:
        """Let go of all that is tracked: the training function makes it again, and calls `track` and `resume`. Memory,
        folder and schedule are kept."""
        if self._saving is not None:
            self._opened = self._saving.tier
            if self._new_world is None:  # otherwise training has not begun again since the last loss
                facts = (self._tracker.step, self._schedule.durable_step, self._durable_epoch, self._unsaved)
                self._before = _Before(*facts, self._saving.errors)
        self._stop_hooks()
        self._tracker = self._tracker.emptied()
        self._saving = self._passes = self._untracked = self._life = None
        self._pending = PendingGradients()
        self._metrics, self._save_wanted, self._at_safe_point = {}, False, None

    def _regroup_data(self, peers: Peers) -> None:
        """Let data follow the world: they may have been made before the training function. Those with ranks of their
        own were made in it (`Remaker.check`)."""
        for each in self._tracker.followers().values():
            if getattr(each, "_follows_group", True):
                each.regroup(peers.rank, peers.world)

    def _begin_remade(
        self, remaker: RemakingCall, saving: Saving, resumed: Resumed | None, state: tuple[int, int, int] | None
    ) -> None:
        """Begin to train what the training function has made; all ranks call this. `state`: that in memory from which
        it goes on."""
        lost = 0
        if self._new_world is not None:
            reports = saving.peers.all_gather(self._before.packed())
            newest = max((_Before(*each) for each in reports), key=lambda each: each.durable_step)
            step, lost = self._tracker.step, max(0, max(each[0] for each in reports) - self._tracker.step)
            if resumed is None or resumed.source != "disk":  # otherwise `_begin` has set what the disk has
                self._schedule.follow([min(newest.durable_step, step), step, step + 1])
                self._durable_epoch, self._unsaved = newest.durable_epoch, newest.unsaved
            saving.errors += self._before.errors
        saving.resumed_from(state, begins=resumed is None)
        if lost and resumed is None and saving.peers.rank == 0:
            warnings.warn(
                f"holdfast: ht.survive: {lost} steps are lost: no state of them was complete in memory, and none was "
                "on the disk. Training begins at step 0.\nOn several nodes, use copies=1, or a shorter every=.",
                RuntimeWarning,
                stacklevel=3,
            )
        if self._new_world is not None and resumed is None:
            remaker.begin_anew(self._tracker)
        self._new_world, self._before = None, _Before()
        saving.compares_first_step = remaker.resumed(lost)
        # From now on there is a state of all that is tracked, also of what is older, and it is whole on each node. But
        # where training begins, and ranks differ, there is none: after a loss in the first step it begins again.
        if (resumed is None and saving.has_equal_replicas()) or (state is not None and state[2] == ALONE_SAVE):
            self._save(saving, durable=False)

    def _save_at_safe_point(self, *, leaves: bool, nodes: int) -> None:
        """Save the step that was just completed, at a safe point at which all ranks leave the training function. It
        goes to the disk if some rank `leaves` the job, whose memory may go with it, or if the ranks of the next
        generation are on several `nodes`, which cannot read each other's memory without copies."""
        if self._saving is None or self._at_safe_point is None:
            return  # the program asks for safe points itself, and it is not known whether a step is complete
        assert self._peers is not None
        readable = nodes == 1 or (self._copies is not None and self._copies.report().port > 0)
        durable = any(self._peers.all_gather(leaves or not readable))
        pending = self._at_safe_point is WherePending.HERE
        if self._save(self._saving, durable=durable, pending=pending) and durable:
            try:
                self._wait(self._saving)
            except SnapshotIncompleteError:
                # Of an earlier save, for which a lost rank's part never came: this state has to reach the disk.
                self._save(self._saving, durable=True, pending=pending)
                self._wait(self._saving)

    def _begin(self, peers: Peers, tier: Tier) -> Saving:
        """Begin to count steps, and make the object that saves."""
        assert self._taken is not None
        if self._life is None:
            self._life = OwnLife(self.path)
        step, self._durable_epoch = self._tracker.step, self.state.epoch
        worker.at_step(step)
        self._schedule.start(step)
        if self._before.step < 0:  # otherwise the time since the last save goes on
            self._clock.start(step, time.monotonic())
        self._watch_optimizers()
        self._tracker.switches.begin()
        self._tracker.numbers.begin()
        state = self.state  # the tracker would keep the models alive
        replica_check.counted_by(lambda: state._step)
        if self._options.replicas_differ:
            replica_check.may_differ(self._tracker.models)
        rules = SaveRules(
            self._options.failed_saves_max,
            self._options.replicas_differ,
            stops_not_finite=self._options.nonfinite == "stop",
            read_back=self._keep is not None,
        )
        streams = self._streams_of_device()
        parameters = (each for model in self._tracker.models for each in model.parameters())
        away = self._options.overlap and any(map(streams.on_device, parameters))
        overlapping = Overlapping(streams) if away else None
        self._saving = saving = Saving(
            self._tracker, peers, tier, self._clock, self._taken, rules, self._copies, overlapping
        )
        return saving

    def _watch_optimizers(self) -> None:
        """Warn after the first step if an optimizer of a tracked model is not tracked."""
        seen = UntrackedOptimizers(self._tracker.models, self._tracker.optimizers, self._tracker.others.values())
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: seen.note(optimizer))

        def look() -> None:
            hook.remove()
            if seen.found and self._peers is not None and self._peers.rank == 0 and self._survivor is None:
                warnings.warn(
                    f"holdfast: an optimizer of the class {seen.found} steps a tracked model and is not tracked: after "
                    "a resume it begins with an empty state.\nGive it to track(), too.",
                    RuntimeWarning,
                    stacklevel=4,
                )
            self._warn_of_schedules()
            self._warn_of_hooks()
            self._check_unfrozen()

        self._until_first_step.append(look)

    def _check_unfrozen(self) -> None:
        """Raise TrackingError if the gradient of a parameter that the resume has unfrozen is not exchanged: each rank
        would train another one."""
        if self._peers is None or self._peers.world == 1 or self._options.replicas_differ:
            return
        if name := not_exchanged(self._tracker.switches.unfrozen):
            raise TrackingError(
                f"{name} needed a gradient when the snapshot was made, and DistributedDataParallel was made while it "
                "was frozen: the ranks do not exchange its gradient\n"
                "unfreeze it, and make DistributedDataParallel, in each epoch from that one on, as `if epoch >= 1`"
            )

    def _warn_of_schedules(self) -> None:
        """Warn if the schedule of a tracked optimizer is not tracked. (In `ht.survive` that is refused.)"""
        found = without_its_schedule(self._tracker.optimizers, self._tracker.others.values())
        if found and self._peers is not None and self._peers.rank == 0 and self._survivor is None:
            warnings.warn(
                f"holdfast: a schedule sets the learning rate of the {found}, and is not tracked: after a resume it "
                "begins again, from the rate of that moment.\nGive it to track(), too.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _warn_of_hooks(self) -> None:
        """Warn if a communication hook keeps something from step to step."""
        kept = self._tracker.reducers.kept_by_hook()
        if kept and self._peers is not None and self._peers.rank == 0:
            warnings.warn(
                f"holdfast: a communication hook of DDP keeps a {kept} from step to step, which no snapshot has: after "
                "a resume it begins again, so that losses differ from those of an undisturbed run.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _saving_or_begin(self) -> Saving:
        """The object that saves. Without resume() a new run begins here. Raises TrackingError if there is something to
        resume from."""
        if self._closed:
            raise TrackingError("these snapshots are closed")
        if self._saving is None:
            if self._remaker is not None:
                raise TrackingError(
                    "ht.survive: call snaps.resume() before the training function, or snaps.track() and snaps.resume() "
                    "in it"
                )
            with self._closed_by_failure():
                peers, tier = self._open()
                if not peers.broadcast(self._may_begin_new_run() if peers.rank == 0 else None):
                    raise TrackingError(f"{self.path} has snapshots already: call resume() before the first step")
                self._tracker.check_data(peers)
            return self._begin(peers, tier)
        return self._saving

    def _may_begin_new_run(self) -> bool:
        """Whether a new run may begin in this folder. Beside good snapshots its work would be lost: the next resume()
        takes those, and retention deletes its own, which have smaller steps."""
        found = folders.survey(self.path)
        return found.fresh or (self._options.fresh_ok and not found.committed and not found.suspects)

    # --- training -----------------------------------------------------------------------------------------------------

    def step(self, **metrics: Any) -> None:
        """Count a complete step, and save if that is due. Call it once per batch, at the end of the loop's body, on
        every rank.

        Metrics (numbers, or tensors of one number) go into the snapshot; `Keep(best=…)` compares them. While gradients
        of an optimizer step are pending (pending.py) nothing is saved; a save that was due is made after that step.
        When the launcher asks to stop, everything is saved and the process leaves with exit code 0 (see
        `exit_on_stop`). An error in the background is reported to all ranks in the next save. It is a warning; after
        `failed_saves_max` failures in a row, or when another job has taken the folder, it is a SnapshotError on all
        ranks at the same step.
        """
        saving = self._saving_or_begin()
        self._used = True
        self._tracker.step += 1
        self._tracker.note_trained()
        if self._beat is not None:
            self._beat()
        worker.at_step(self._tracker.step)
        self._metrics = metrics
        self._check_background(saving)

        stepped = self._pending.stepped or not self._tracker.optimizers
        pending = self._pending.at_step()
        if pending is WherePending.EVERYWHERE:
            return
        if pending is WherePending.NONE:
            self._complete(metrics, stepped=stepped)

        # Every rank does the rest at the same calls, whatever it knows of its gradients: see pending.py.
        self._at_safe_point = pending
        try:
            stops = worker.should_stop()  # False if the ranks only regroup: see survival.py
        finally:
            self._at_safe_point = None
        if stops:
            self._warn_of_position(stacklevel=3)
            self._drain(saving, pending=pending is WherePending.HERE)
            return
        self._save_if_due(saving, pending=pending is WherePending.HERE)

    def _complete(self, metrics: Mapping[str, Any], *, stepped: bool) -> None:
        """Do what belongs to the end of an optimizer step on this rank. It waits for no other rank."""
        if self._life is not None:  # also if a scaler has skipped the optimizer's step
            self._life.losses.step(self._tracker.step, metrics, stepped=stepped)
        if self._untracked is not None and (text := self._untracked.at_step()):
            self._note_untracked_data(text)
        self._look_at_variables()
        if self._whereabouts is not None and not self._whereabouts.at_step():
            self._whereabouts = None
        if not self._tracker.numbers.idle:
            self._look_at_numbers()
        while self._until_first_step:  # the hooks cannot remove themselves: torch iterates over them while they run
            self._until_first_step.pop()()
        if self._survivor is not None:
            self._survivor.at_boundary()
        if self._keep is not None and self._keep.best is not None and self._keep.best[0] in metrics:
            same_loss(metrics[self._keep.best[0]])  # warns if the ranks' values differ: that of rank 0 decides for all

    def _look_at_numbers(self) -> None:
        """Warn of a Python number in a module that has begun again after a resume."""
        begun_again = self._tracker.numbers.step(self._tracker.epochs())
        # A replacement has a number that the ranks that went on have not.
        if begun_again and (self._joined or (self._peers is not None and self._peers.rank == 0)):
            warnings.warn(f"holdfast: {begun_again}", RuntimeWarning, stacklevel=4)

    def _look_at_variables(self) -> None:
        """Warn of a variable of the training loop that begins again after a resume: a random generator, a count."""
        if self._counts is None and self._generators.done:
            return  # as in nearly every step
        frame = sys._getframe(3)
        if self._counts is not None and not self._counts.at_step(
            frame, self._tracker.step, self._tracker.epoch_of_script()
        ):
            self._counts = None
        if self._generators.done:
            return
        epoch = None if self._schedule.within_epochs else self._tracker.epoch_of_script()
        name = self._generators.at_step(frame, self._tracker.others.values(), epoch)
        if name and self._peers is not None and self._peers.rank == 0:
            warnings.warn(OWN_GENERATOR.format(name), RuntimeWarning, stacklevel=4)

    def _note_untracked_data(self, text: str) -> None:
        if self._survivor is not None:
            self._survivor.withdraw("the training loop is over a loader whose position is not tracked")
        self._position_unknown = text
        if self._schedule.within_epochs or text is not NOT_TRACKED:  # the others are wrong at an epoch's end, too
            self._warn_of_position(stacklevel=5)
        elif self._untracked is not None and self._peers is not None and self._peers.rank == 0:
            self._tracker.own_order = self._untracked.order

    def _warn_of_position(self, stacklevel: int) -> None:
        """Warn, once, that the position in the epoch of the state that is saved is not known."""
        text, self._position_unknown = self._position_unknown, ""
        if text and self._peers is not None and self._peers.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)

    def _save_if_due(self, saving: Saving, *, pending: bool) -> None:
        step, schedule = self._tracker.step, self._schedule
        self._save_wanted |= worker.should_save()
        if self._save_wanted:
            self._warn_of_position(stacklevel=4)
        durable = self._save_wanted or schedule.durable_due(step)
        if not durable and schedule.ask_due(step):
            durable, schedule.ask_at = saving.ask(step)
        if durable or schedule.memory_due(step):
            self._save(saving, durable=durable, pending=pending)
        elif saving.plans_ahead:
            saving.plan_ahead(pending=pending)

    def save(self, *, wait: bool = False) -> None:
        """Save to the disk now; every rank calls it. After its return, the end of this process does not prevent the
        save.

        With `wait` it returns when the snapshot is committed. Raises SnapshotError, on all ranks, and TrackingError
        between the optimizer's step and step(), and between two micro-batches of one step."""
        if self._pending.stepped:
            self._tracker.check_counted()
        self._check_pending(raises=True)
        saving = self._saving_or_begin()
        if (again := self._tracker.schedule_to_step_again()) and self._peers is not None and self._peers.rank == 0:
            warnings.warn(
                f"holdfast: save() in the body of an epoch, after {again} has stepped: a resume from it runs the code "
                "after the loader's loop again, and the schedule steps twice.\n"
                "In place of save() write state.epochs(…, save=True), which saves after the body.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._check_background(saving)
        self._warn_of_position(stacklevel=3)
        self._save(saving, durable=True, demanded=True)
        if wait:
            self._wait(saving)

    def _check_pending(self, *, raises: bool) -> None:
        """Complain of a save while gradients are pending, which are in no snapshot: after a resume that step would lack
        their samples. Raises TrackingError, if it may, where all ranks know of them."""
        pending = self._pending.now()
        if pending is WherePending.NONE:
            return
        text = (
            "gradients of an optimizer step are pending, and snapshots have none: after a resume from this save their "
            "samples would be in no step\n"
            "save after the optimizer's step, or leave it to snaps.step(), which waits for that"
        )
        # Of gradients that are added up by hand a rank knows its own alone: if it raised, the others would wait for it.
        if raises and pending is WherePending.EVERYWHERE:
            raise TrackingError(text)
        warnings.warn(f"holdfast: {text}", RuntimeWarning, stacklevel=4)

    def _wait(self, saving: Saving) -> None:
        try:
            saving.wait()
        except SnapshotError as error:
            self._unsaved = str(error)
            raise

    def _save_the_last(self) -> None:
        """Save the last state, unless the disk has it: all epochs are trained, on every rank."""
        newest = (self._schedule.durable_step, self._durable_epoch)
        if self._saving is not None and ((self._tracker.step, self.state.epoch) != newest or self._unsaved):
            self._save_epoch()

    def _save_epoch(self) -> None:
        if not self._closed:
            self._check_pending(raises=False)
            self._save(self._saving_or_begin(), durable=True)

    def _save(self, saving: Saving, *, durable: bool, demanded: bool = False, pending: bool = False) -> bool:
        """Save. `pending`: gradients are pending on this rank. Returns False if nothing is saved yet, since gradients
        are pending on some rank: the save stays due."""
        self._used = True
        if durable and self._life is not None and not pending:
            self._life.losses.read_all()
        # In `ht.survive` a loss may end NCCL's operations half done: then nothing shall be under way.
        overlaps = not demanded and self._survivor is None
        done = saving.save(
            durable=durable, metrics=self._metrics, demanded=demanded, pending=pending, overlaps=overlaps
        )
        if done.postponed:
            return False
        self._save_wanted = False
        if done.ask_at:
            self._schedule.ask_at = done.ask_at
        self._schedule.saved(self._tracker.step, done.durable or (durable and bool(done.failure)))
        self._unsaved = "" if done.durable else done.failure or self._unsaved
        if done.durable:
            self._durable_epoch = self.state.epoch
        if done.durable and self._pruner is not None:
            self._pruner.begin_after(saving)
        return True

    def _drain(self, saving: Saving, *, pending: bool) -> None:
        """Save and leave, as the launcher asks: all ranks call this after the same step. If gradients are pending, all
        call it again after the next step, since `should_stop()` stays True."""
        if not self._save(saving, durable=True, demanded=True, pending=pending):
            return
        self._wait(saving)
        self.stopping = True
        if self._options.exit_on_stop:
            raise SystemExit(0)

    def _check_background(self, saving: Saving) -> None:
        """Gather errors of the background, and delete old snapshots if that is due."""
        saving.advance()
        saving.gather_errors()
        if self._pruner is not None:
            self._pruner.check(saving)

    @property
    def _is_in_child(self) -> bool:
        """Whether this is a copy in a forked child: lease and saver belong to its parent."""
        return self._process not in (0, os.getpid())

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for saves that are being written, and give the folder back. Errors of the background are raised here.

        Steps that are only in memory are written by the saver. It may be called again."""
        if self._closed or self._is_in_child:
            return
        self._closed = True
        self._remove_hooks()
        if self._pending.stepped and not self._used:
            warnings.warn(
                "holdfast: the optimizer has stepped and snaps.step() was never called: nothing was saved.\n"
                "Call it at the end of the loop's body, on every rank.",
                RuntimeWarning,
                stacklevel=2,
            )
        with contextlib.ExitStack() as last:
            if self._lease is not None:
                last.callback(self._lease.release)
            if self._current_tier is not None:
                ahead = self._schedule.saved_step > self._schedule.durable_step or bool(self._unsaved)
                last.callback(self._current_tier.close, ahead=ahead)
                if self._saving is not None:
                    self._saving.end_copies()
                try:
                    if self._current_tier.busy:
                        self._current_tier.wait()
                    self._raise_unsaved(self._current_tier)
                except SnapshotError as error:
                    if isinstance(error, NotFiniteError) and self._saving is not None:
                        self._saving.drop_not_finite(self._saving.tier.not_finite_step)
                    cause = None if self._saving is None else self._saving.cause_of(error)
                    if cause is None:
                        raise
                    raise cause from None
                if self._pruner is not None:  # not after an error: it would wait for a snapshot that was not written
                    self._pruner.finish()

    def _stop_hooks(self) -> None:
        """Remove what was set up for the tracked objects."""
        self._stop_watching_data()
        if self._passes is not None:
            self._passes.stop()
        while self._until_first_step:  # they are left if no step was made
            self._until_first_step.pop()()

    def _remove_hooks(self) -> None:
        self._stop_hooks()
        atexit.unregister(self._at_exit)

    def _raise_unsaved(self, tier: Tier) -> None:
        """Raise an error of the background, unless a later save has made it good."""
        if self._saving is not None:
            self._saving.gather_errors()
            for error in self._saving.errors:
                raise error
            if self._unsaved:
                raise SnapshotWriteError(f"the newest state is not on the disk: {self._unsaved}")
        tier.check()

    def _abandon(self, error: BaseException | None = None) -> None:
        """Close everything after an error, without any wait: the saver writes states that are only in memory."""
        if self._is_in_child:
            return
        if self._life is not None and error is not None:
            self._life.failed(error, self._tracker.step)
        self._closed = True
        self._remove_hooks()
        if self._saving is not None:
            self._saving.give_up()
        if isinstance(error, ReplicasDifferError) and self._saving is not None:
            self._saving.drop_uncompared()
        if self._current_tier is not None:
            self._current_tier.close(ahead=True)
        if self._lease is not None:
            self._lease.release()

    def _at_exit(self) -> None:
        """Close everything at the interpreter's exit. If an exception ended the program, the interpreter has printed it
        and left it in `sys.last_value`."""
        if (error := getattr(sys, "last_value", None)) is not None:
            self._abandon(error)
        else:
            self.close()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._abandon(error)
