"""DataLoader: torch's loader, fed from one global order, that continues anywhere in an epoch with any world and
workers.

Knows torch's loader, and puts order, position and global batch together. Talks to no other rank: every rank comes to
the same plan from the same state.
"""

from __future__ import annotations

import difflib
import inspect
import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from holdfast.protocol.errors import DataError
from holdfast.train.data import (
    EVALUATES,
    SEQUENTIAL,
    SHUFFLED,
    EpochOrder,
    GlobalBatch,
    Position,
    Share,
    Tail,
    current_loader,
    order_of,
    rank_and_world,
    set_current_loader,
)
from holdfast.train.data.datasets import (
    BatchKey,
    Seeded,
    ShardedDataset,
    ShardOrder,
    ShardReader,
    first_changed,
    part_of,
    sample_seed,
    settings_of,
    shard_order_name,
    shard_sizes,
)
from holdfast.train.group import open_group
from holdfast.train.guards import GuardWarning, enabled, level_of_script
from holdfast.train.mistakes import ReadAhead

SHRUNK = "batch_size"
"""Name in a loader's state: the number of samples that a rank takes at once, after memory was short."""
ENDLESS = "Make a generator of it, once, before the loop over epochs: `while True: yield from loader`."
"""What to do with a loader that gives batches as long as another one does."""
OUTLIVES = "outlives_epochs"
"""Name in a loader's state: its passes go on when the script begins another epoch."""

TORCH_ARGUMENTS = (
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)
"""Arguments that are passed to torch's loader as they are."""


class DataLoader:
    """A loader of this rank's batches, from one order per (seed, epoch) that all ranks share.

    batch_size         samples per rank and batch (1); with `global_batch_size` the most that a rank takes at once
    global_batch_size  samples per optimizer step of all ranks together, kept whatever the world
                       (micro-batches and weights follow)
    micro_batches      batches per optimizer step when `global_batch_size` is not given, which is then
                       batch_size * world * micro_batches
    tail               the epoch's last, smaller global batch: "even" (default), "drop" or "pad"
    seed               seed of the order and of the augmentations (0); has to be equal on all ranks
    seed_samples       seed `random`, numpy, torch and the dataset's generators from (seed, epoch, index) for each
                       sample
    ranks              (rank, world) if they are not the process group's: those among the data-parallel groups
    shrink_on_oom      if a rank runs out of memory within `ht.accumulate`, all ranks repeat that optimizer step with
                       half as many samples at once, and keep that size; needs `global_batch_size`
    resumable          whether a `for` that was left by `break` is continued by the next one. None: if the loader's
                       position is kept, by `Snapshots.track` or by a call of `state_dict()`. False: each `for`
                       begins an epoch, and so does a restart; for validation data that are tracked

    `torch_arguments`: pin_memory, timeout, worker_init_fn, multiprocessing_context, prefetch_factor,
    persistent_workers and pin_memory_device are torch's. `drop_last=True` is `tail="drop"`, and a `generator` gives
    the seed. Raises DataError (a ValueError) for any other argument, and for values that contradict each other."""

    _length_asked = False
    """Whether a loop's body has asked for the number of batches (reentry.py)."""

    _has_given_rest = _length_asked_after = False
    """Whether a pass came to its end since the last resume, and whether the number of batches was asked for then."""

    _copied: dict[str, Any] | None = None
    """What the dataset's attributes were when persistent worker processes got their copies; None: none did."""

    _outlives_epochs = False
    """Whether a pass went on after a `set_epoch`: an iterator without end, beside another loader."""

    _beside_another = False
    """Whether a step had batches of another tracked loader, too, and nothing was said about it."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool = False,
        *,
        seed: int | None = None,
        global_batch_size: int | None = None,
        micro_batches: int | None = None,
        tail: Tail | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        ranks: tuple[int, int] | None = None,
        resumable: bool | None = None,
        shrink_on_oom: bool = False,
        seed_samples: bool = True,
        **torch_arguments: Any,
    ) -> None:
        _refuse_unknown(torch_arguments)
        drop_last, generator = map(torch_arguments.get, ("drop_last", "generator"))
        self.dataset = dataset
        self._rank, self._world = rank_and_world(ranks)
        self._follows_group = ranks is None
        tail = _tail(tail, drop_last=bool(drop_last))
        self._keeps_global_batch = global_batch_size is not None
        """Whether an optimizer step has `global_batch_size=` samples, whatever the world."""
        if shrink_on_oom and not self._keeps_global_batch:
            raise DataError("shrink_on_oom=True needs global_batch_size=: optimizer steps have to stay what they are.")
        self._shrinks_on_oom = shrink_on_oom
        self._shrunk = 0
        """The number of samples that a rank takes at once, after memory was short; 0: it never was."""
        self._repeat_step = False
        """Whether the current optimizer step is to be handed out again."""
        self._plan_for = _planner(batch_size, micro_batches, global_batch_size, tail)
        self._plan = self._planned(self._world)

        if seed is None:
            seed = 0 if generator is None else generator.initial_seed()
        seed = operator.index(seed)
        length, order, self._order_of, source = _source(dataset, seed, shuffle=shuffle)
        self._position = Position(seed, length, order, part_of(dataset))
        self._share: Share | None = None

        self._batches = _Batches()
        self._generator = torch.Generator()
        self._torch = TorchLoader(
            Seeded(source, seed, enabled=seed_samples),
            batch_sampler=self._batches,
            num_workers=num_workers,
            collate_fn=collate_fn,
            generator=self._generator,
            **{name: torch_arguments[name] for name in TORCH_ARGUMENTS if name in torch_arguments},
        )

        self._passes = 0
        """The number of passes that began, and of states that were loaded: either ends the pass before."""
        self._open_pass = 0
        """The number of the pass that is under way; 0: none is."""
        self._asked_epoch: int | None = None
        """The epoch of a `set_epoch` during a pass, for the next one; None: there was none."""
        self._resumable = bool(resumable)
        self._resumable_given = resumable is not None
        self._trains = self._another_trains = False
        """Whether `snaps.step()` has counted a batch in this loader's own loop, and in another tracked loader's."""
        self._has_passed = False
        """Whether a pass came to its end."""
        self._was_evaluation = False
        """Whether it was an evaluation's when the loaded state was saved."""
        self._read_ahead = ReadAhead(_warn)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the rest of the epoch; the next `for` goes over the next one. Only one pass goes on at a time.

        If the position is kept (`resumable`), a `for` that was left by `break` is continued by the next one, from
        the first batch that is not known to be trained; otherwise the next one begins the next epoch. Looking at a
        batch by `next(iter(loader))` loses none. `set_epoch` begins an epoch from its start.
        """
        position = self._position
        if (
            self._follows_group
            and open_group() is not None
            and (here := rank_and_world(None)) != (self._rank, self._world)
        ):
            self._set_rank(*here)  # the world has changed: only tracked loaders get a call of `regroup`
        if self._asked_epoch is not None:
            self._begin_epoch(self._asked_epoch)
        if not self._resumes and position.cursor:
            position.set_epoch(position.epoch + 1)

        self._passes += 1
        this_pass = self._passes
        self._share = self._asked_epoch = None
        if not position.begin() and self._resumes:
            self._has_given_rest = True
            return

        self._open_pass = this_pass
        self._read_ahead.begin()
        outside = current_loader()
        try:
            for batch in self._rest():
                set_current_loader(self)
                yield batch
                if this_pass != self._passes:
                    raise DataError("Another pass over this loader, or a state loaded into it, has ended this one.")
                # The loop goes on with this pass: a `set_epoch` in its body was for nothing.
                self._outlives_epochs |= self._asked_epoch is not None
                self._asked_epoch = None
                position.count_pending()
        finally:
            if self._open_pass == this_pass:
                self._open_pass = 0
            if current_loader() is self:
                set_current_loader(outside)
        self._has_passed = self._has_given_rest = True
        position.finish()

    def _rest(self) -> Iterator[Any]:
        """The batches that are left of the epoch; after `_shrink` those from that optimizer step on, with fewer samples
        each."""
        position, epoch = self._position, self._position.epoch
        order, self._repeat_step = self._order_of(epoch), True
        while self._repeat_step:
            self._repeat_step = False
            self._generator.manual_seed(sample_seed(position.seed, epoch, position.cursor))
            shares = self._plan.deal(self._rank, position.cursor, position.length)
            fetched = self._batches.begin(epoch, order, shares)
            if self._torch.persistent_workers:
                self._look_at_copies()
            for batch in self._torch:
                self._share = fetched.popleft()
                position.hand_out(self._share.cursor)
                self._read_ahead.batch()
                yield batch
                if self._repeat_step:
                    break

    def _look_at_copies(self) -> None:
        """Warn, once, if the dataset has changed since the worker processes got their copies of it."""
        now = settings_of(self.dataset)
        if self._copied is None:
            self._copied = now
        if changed := first_changed(self._copied, now):
            self._copied = {}
            _warn(
                "persistent_workers",
                f"{changed!r} of the dataset has changed since its worker processes were started, and with "
                "persistent_workers=True these still have the old value: samples are read with that one, and after a "
                "restart with the new one.\nLeave persistent_workers out.",
            )

    def __len__(self) -> int:
        """The number of batches in a whole epoch for this rank; every rank has the same."""
        self._length_asked |= self._open_pass > 0
        self._length_asked_after |= self._has_given_rest
        return self._plan.batches(0, self._position.length)

    @property
    def batch_number(self) -> int:
        """The number of the batch in the loop's body within its epoch, from 0; in the last one it is `len(loader) - 1`.
        After a resume it goes on, where `enumerate(loader)` begins at 0 again."""
        self._position.known = True
        if self._share is None:
            return 0
        left = self._plan.batches(self._share.step_start, self._position.length)
        return self._plan.batches(0, self._position.length) - left + self._share.micro

    @property
    def remaining(self) -> int:
        """The number of batches left in this epoch for this rank; every rank has the same."""
        return self._plan.batches(self._position.cursor, self._position.length)

    @property
    def share(self) -> Share | None:
        """The last batch's part in its optimizer step: `.weight`, `.micro`, `.micro_batches`, `.last`."""
        return self._share

    @property
    def micro_batches(self) -> int:
        """Batches per optimizer step; constant as long as the world is."""
        return self._plan.micro_batches

    def _samples_ahead(self, count: int) -> list[int]:
        """The number of samples, of all ranks together, of the optimizer step that the last batch belongs to, and of
        the steps after it in the epoch; for at most `count` steps."""
        cursor = self._position.cursor if self._share is None else self._share.step_start
        return self._plan.samples_ahead(cursor, self._position.length, count)

    @property
    def batch_size(self) -> int:
        """The number of samples in the largest batch that this rank gets."""
        return self._plan.batch_size

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step of all ranks together."""
        return self._plan.size

    def _shrink(self) -> None:
        """Take half as many samples at once from now on, and hand out the current optimizer step again, from its first
        sample. All ranks call this in the same step."""
        self._shrunk = -(-self.batch_size // 2)
        self._plan = self._planned(self._world)
        self._position.give_up()
        self._read_ahead.begin()
        self._repeat_step = True

    def _planned(self, world: int) -> GlobalBatch:
        """The division of optimizer steps for this world, with smaller batches after `_shrink`."""
        plan = self._plan_for(world)
        if self._shrunk and self._shrunk < plan.batch_size:
            return GlobalBatch.kept(plan.size, world, self._shrunk, plan.tail)
        return plan

    @property
    def epoch(self) -> int:
        """The epoch that the current pass is in; between two passes the one that comes next."""
        self._position.known = True
        return self._position.epoch

    @property
    def cursor(self) -> int:
        """Samples of this epoch that are trained, on all ranks together."""
        self._position.known = True
        return self._position.cursor

    def regroup(self, rank: int, world: int) -> None:
        """Go on as this rank of another world, after the last batch that is known to be trained.

        Raises DataError if the loader was given `ranks`."""
        if not self._follows_group:
            raise DataError("The loader has ranks= of its own: it cannot follow the process group.")
        self._set_rank(*rank_and_world((rank, world)))
        self.load_state_dict(self._trained_position())

    def _set_rank(self, rank: int, world: int) -> None:
        """Take this rank's part from now on."""
        self._rank, self._world, self._plan = rank, world, self._planned(world)

    def _trained_position(self) -> dict[str, Any]:
        """The same as `state_dict()`, but the batch in the loop's body counts as not trained."""
        self._position.give_up()
        return self._with_rest(self._position.state_dict())

    def _identity(self) -> list[Any] | None:
        """What has to be equal on all ranks; None: the script divides the data."""
        return self._position.identity() if self._follows_group else None

    def _keep_position(self) -> None:
        """Note that the position is kept: a `for` that is left early is continued by the next one, unless
        `resumable=False` was given."""
        if not self._resumable_given:
            self._resumable = True

    def set_epoch(self, epoch: int) -> None:
        """Let the next `for` go over `epoch` from its start. A loaded state is kept: its own epoch goes on at its
        cursor, and an earlier epoch gives no batch, since it is finished. A pass that is under way is not changed, also
        after a resume."""
        if self._open_pass:
            self._asked_epoch = epoch
        elif not (self._outlives_epochs and self._position.is_left_behind(epoch)):
            self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        """Let the next pass go over this epoch. Warn, once, if that gives up a pass of it or of a later one."""
        if self._beside_another and self._position.goes_back(epoch):
            self._beside_another = False
            if self._rank == 0:
                warnings.warn(
                    "holdfast: a loader that is used beside another one starts again in each epoch before its pass is "
                    "complete: a resume at an epoch's end takes the rest of that pass, and so other samples.\n"
                    f"{ENDLESS}",
                    RuntimeWarning,
                    stacklevel=3,
                )
        self._position.set_epoch(epoch)

    def trained(self, samples: int | None = None) -> None:
        """Count the batch in the loop's body as trained. `snaps.step()` calls this; a second call changes nothing.

        Asking for the next batch counts it, too. Once `trained` has been called on a loader, `state_dict()` counts
        only the batches that were counted in one of these ways; until then it counts the batch in the loop's body, too.
        `samples` of this rank are not needed. Raises DataError if they are fewer than the batch has.
        """
        if samples is not None and self._in_body and self._share is not None:
            size = self._share.stop - self._share.start
            if samples < size:
                raise DataError(f"trained({samples}): the batch has {size} samples, and counts as a whole.")
        self._keep_position()
        if self._in_body:
            self._trains = True
            self._read_ahead.stepped()
        self._position.trained()

    @property
    def _given(self) -> Share | None:
        """The last batch of the pass that is under way; None: there is none."""
        return self._share if self._open_pass else None

    def _note_no_batch(self) -> None:
        """Note that `snaps.step()` was called twice, and no batch was taken in between."""
        self._read_ahead.stepped_again()

    def _continues(self) -> bool:
        """Whether the next pass begins within an epoch."""
        return self._resumes and not self._position.begins_epoch

    def _note_another(self) -> None:
        """Note that another tracked loader's batch was trained."""
        self._another_trains = True

    @property
    def _evaluates(self) -> bool:
        """Whether only an evaluation goes over it: its passes come to their end, and the training counts the batches of
        another loader meanwhile. Each of its passes is a whole one, also after a resume: an epoch of the training may
        have several, so their number says nothing of what is trained."""
        if self._trains or (self._resumable_given and self._resumable):
            return False
        return self._was_evaluation or (self._another_trains and self._has_passed)

    @property
    def _resumes(self) -> bool:
        """Whether a pass goes on at the position that is kept."""
        return self._resumable and not self._evaluates

    def state_dict(self) -> dict[str, Any]:
        """The position: seed, epoch, cursor, length and the order's name; after memory was short also the number of
        samples that a rank takes at once. It is equal on all ranks, and fits any world and any num_workers."""
        self._keep_position()
        state = self._with_rest(self._position.state_dict())
        if self._evaluates:
            state[EVALUATES] = True
        return state if self._resumes else {**state, "cursor": 0}

    def _with_rest(self, state: dict[str, Any]) -> dict[str, Any]:
        shrunk = {SHRUNK: self._shrunk} if self._shrunk else {}
        return {**state, **shrunk, **({OUTLIVES: True} if self._outlives_epochs else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at this position. Raises DataStateError if the state belongs to another dataset, seed or order."""
        self._keep_position()
        self._position.load_state_dict(state)
        self._was_evaluation |= state.get(EVALUATES) is True
        self._outlives_epochs = state.get(OUTLIVES) is True
        shrunk = state.get(SHRUNK, 0)
        if self._shrinks_on_oom and type(shrunk) is int:
            self._shrunk = max(shrunk, 0)
            self._plan = self._planned(self._world)
        self._passes += 1
        self._open_pass, self._asked_epoch = 0, None
        self._share = None

    def _go_back(self, state: Mapping[str, Any]) -> None:
        """Go on at this position, unless a pass is under way."""
        if not self._open_pass and self._trained_position() != state:
            self.load_state_dict(state)

    @property
    def _in_body(self) -> bool:
        """Whether the loop's body has a batch that is not known to be trained."""
        return self._open_pass > 0 and self._position.pending_cursor is not None


def _warn(_mistake: str, text: str) -> None:
    if enabled():
        warnings.warn(f"holdfast: {text}", GuardWarning, stacklevel=level_of_script())


def _planner(
    batch_size: int | None, micro_batches: int | None, global_batch_size: int | None, tail: Tail
) -> Callable[[int], GlobalBatch]:
    """The function that divides optimizer steps for a world of any size. Raises DataError."""
    if global_batch_size is None:
        samples, count = 1 if batch_size is None else batch_size, 1 if micro_batches is None else micro_batches
        return lambda world: GlobalBatch.following(world, samples, count, tail)
    if micro_batches is not None:
        raise DataError("micro_batches= follows from global_batch_size=, batch_size= and the world: leave it out.")
    size = global_batch_size
    return lambda world: GlobalBatch.kept(size, world, batch_size, tail)


class _Batches:
    """The batch sampler of torch's loader, which may draw far ahead of the loop."""

    def __init__(self) -> None:
        self._keys: Iterator[BatchKey] = iter(())

    def begin(self, epoch: int, order: EpochOrder, shares: Iterator[Share]) -> deque[Share]:
        """Begin a pass with these shares. Returns a queue: the shares that torch's loader has drawn and the loop has
        not got yet."""
        fetched: deque[Share] = deque()

        def keys() -> Iterator[BatchKey]:
            for share in shares:
                fetched.append(share)
                yield BatchKey(epoch, order.share(share))

        self._keys = keys()
        return fetched

    def __iter__(self) -> Iterator[BatchKey]:
        return self._keys


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    """Raise DataError for an argument that this loader does not have."""
    for name, value in given.items():
        if name in ("sampler", "batch_sampler"):
            if value is not None:
                raise DataError(
                    f"{name}= cannot be given: this loader makes the order of the samples itself, "
                    "so that it can go on anywhere.\n"
                    "Say shuffle=, seed= and batch_size=; for a part of the data give a torch.utils.data.Subset. "
                    "With a sampler of your own keep torch's DataLoader; it begins each epoch from its start."
                )
        elif name not in (*TORCH_ARGUMENTS, "drop_last", "generator"):
            own = [each for each in inspect.signature(DataLoader).parameters if each != "torch_arguments"]
            close = difflib.get_close_matches(name, [*own, *TORCH_ARGUMENTS], 1)
            hint = f" Did you mean {close[0]}=?" if close else ""
            raise DataError(f"DataLoader has no argument {name}=.{hint}")


def _tail(tail: Tail | None, *, drop_last: bool) -> Tail:
    if drop_last and tail not in (None, "drop"):
        raise DataError(f"drop_last=True contradicts tail={tail!r}.")
    return "drop" if drop_last else tail or "even"


def _source(dataset: Any, seed: int, *, shuffle: bool) -> tuple[int, str, Callable[[int], EpochOrder], Any]:
    """Length and name of the order, the function that gives an epoch's order, and the dataset to read by index. Raises
    DataError for a dataset in which no position is possible."""
    if isinstance(dataset, ShardedDataset):
        sizes = shard_sizes(dataset)

        def shard_order(epoch: int) -> EpochOrder:
            return ShardOrder(sizes, seed, epoch, shuffle=shuffle)

        return int(sizes.sum()), shard_order_name(sizes, shuffle=shuffle), shard_order, ShardReader(dataset)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__} can only be read from its start, "
            "so no position in it survives a restart or resize.\n"
            "Give a dataset with __len__ and __getitem__, or make it a holdfast.train.ShardedDataset."
        )
    length = len(dataset)

    def order(epoch: int) -> EpochOrder:
        return order_of(length, seed, epoch, shuffle=shuffle)

    return length, SHUFFLED if shuffle else SEQUENTIAL, order, dataset
