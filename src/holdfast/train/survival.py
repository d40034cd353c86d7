"""ht.survive: a training function that goes on in the same process when the world around it changes.

    @ht.survive(snaps)
    def train():
        for epoch in state.epochs(10):
            for batch in loader:
                ...
                snaps.step(loss=loss)

    train()

When another rank is lost, the function is left by an exception and called again; everything that was made before it is
kept. In between, the rank forms a new process group with the ranks that are left (group.regroup), and all of them agree
on the newest step that one of them has completed. A rank that has not completed it, and a rank that joins, take the
state from one that has.

What makes a rank's state good. A step ends in `snaps.step()`. From there on until the optimizer's next step nothing
changes but what `Boundary` keeps: random numbers, buffers, the learning rate's schedule, a scaler, epoch and position
in the data, and whatever else is tracked and has a `state_dict()`. So a rank that was interrupted anywhere in that time
has completed its last step exactly. A rank that was interrupted later, between the optimizer's step and `snaps.step()`,
or that has changed parameters before the optimizer's step, takes the state of another.

What cannot be carried over a loss is refused before the first step is complete, or `ht.survive` is a plain call: then a
loss restarts all processes, as without it. One line at the start says which (`_say`), and carrying.py decides it.

Knows torch, the process group and the tracked objects. Knows nothing of nodes and agents: agent_channel.py talks to
them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.protocol.errors import HoldfastError, ProcessGroupError, TrackingError
from holdfast.protocol.train_contract import REPLACEMENT_VARIABLE, WHY_CHARACTERS_MAX, Survive
from holdfast.train import torch_private
from holdfast.train.accumulation import forget_pending
from holdfast.train.agent_channel import AgentChannel, ChannelLostError, Go
from holdfast.train.agreement import Peers
from holdfast.train.boundary import Boundary, noted_forward
from holdfast.train.carrying import PlainCall, Why, check_function, surviving_mode, why_plain
from holdfast.train.group import LONE_EXIT_PATIENCE_S, ProcessGroup, open_group, regroup
from holdfast.train.mistakes import SharedFacts
from holdfast.train.own_objects import Digests, unknown_objects
from holdfast.train.random_numbers import equal_parts, seed_random
from holdfast.train.reading import Saved, parts_of_slot
from holdfast.train.reducers import Order
from holdfast.train.save import image
from holdfast.train.state import Tracker
from holdfast.train.tracked import Choice, together
from holdfast.train.unnoticed_writes import ValueProbe
from holdfast.train.untracked import UntrackedOptimizers
from holdfast.worker import drain

if TYPE_CHECKING:
    from holdfast.train.snapshots_api import Snapshots

P = ParamSpec("P")
T = TypeVar("T")

NEWS_S = 5.0
"""After an error of the process group: how long to wait for the news that a rank was lost. Without it the error is the
program's own."""
COMPARE_STEPS_MAX = 20
"""By this step of a generation the ranks' random numbers are compared. If not, they are taken to be each rank's own."""
STOP_S = 60.0
"""After this rank has refused to go on: how long it waits to be stopped."""


class Released(BaseException):
    """Leaves the training function, which is then called again in another world."""


def survive(snaps: Snapshots) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a training function go on in this process when ranks are lost or join: it is called again.

    `snaps`: what `track` was called on, after `resume()`. All that the function needs is made before it; its own
    variables are lost. Between `resume()` and the function, and outside of `snaps.step()`'s loop, no rank may use the
    process group. Where a loss cannot be survived (without holdfast's agent, with --survive off, for sharded models …)
    it is a plain call. One line on rank 0's stderr says so, and why.

    Raises TrackingError without `resume()`, and for objects with a state that the function uses and that are not
    tracked.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*arguments: P.args, **keywords: P.kwargs) -> T:
            survivor = _of(snaps, function)
            if survivor is None:
                return function(*arguments, **keywords)
            return survivor.run(functools.partial(function, *arguments, **keywords))

        return run

    return decorate


def _of(snaps: Snapshots, function: Callable[..., Any]) -> Survivor | None:
    """None: it is a plain call."""
    if not snaps.resumed:
        raise TrackingError("ht.survive: call snaps.resume() before the training function")
    survivor = snaps._survivor
    if survivor is not None:
        check_function(function, snaps._tracker)
        return survivor  # a replacement, which has joined in resume()
    if snaps._not_survived:
        return None
    group = open_group()
    why = why_plain(group, snaps._tracker)
    channel = AgentChannel.open() if why is None else None
    if why is None and channel is None:
        why = PlainCall(Why.NO_AGENT)
    _say(group, snaps, why)
    if channel is None or group is None:
        return None
    check_function(function, snaps._tracker)
    return Survivor(snaps, group, channel)


def _say(group: ProcessGroup | None, snaps: Snapshots, why: PlainCall | None) -> None:
    """Say on rank 0, once, what a loss will do."""
    if snaps._survival_said or (group.rank if group is not None else int(os.environ.get("RANK") or 0)) != 0:
        return
    snaps._survival_said = True
    if why is not None:
        text = f"{why}; if a rank is lost, all are started again"
    elif surviving_mode() is Survive.WAIT:
        text = "if a rank is lost, the others keep their processes and wait for its replacement"
    else:
        text = "if a rank is lost, the others keep their processes and go on without it until its replacement joins"
    sys.stderr.write(f"holdfast: ht.survive: {text}\n")


class Survivor:
    """One process that goes on in one generation after the other."""

    def __init__(self, snaps: Snapshots, group: ProcessGroup, channel: AgentChannel) -> None:
        assert group.connection is not None
        self._snaps, self._tracked_state = snaps, snaps.state
        self._group, self._connection = group, group.connection
        self._channel = channel
        self._uninterrupted = channel.uninterrupted
        self._generation = 0
        """0: the one in which this process was started, whose number it does not know."""
        self._boundary = Boundary(snaps._tracker, snaps.memory_place)
        self._probe = ValueProbe(each for model in snaps._tracker.models for each in model.parameters())
        self._optimizers = UntrackedOptimizers(
            snaps._tracker.models, snaps._tracker.optimizers, snaps._tracker.others.values()
        )
        self._reducers = snaps._tracker.reducers
        self._stepping = False
        """An optimizer has begun to step since the last boundary: the state is not that of a completed step."""
        self._first = True
        """No step was done in this generation."""
        self._news: dict[str, Any] | None = None
        """For the agent, with the first step of a new generation."""
        self._joined = False
        """This is a replacement that has joined, and its training function was not called yet."""
        self._withdrawn = False
        """A loss is not survived any more."""
        self._equal: list[str] | None = None
        """The random generators from which all ranks draw the same numbers; None: not known yet."""
        self._alike: list[str] = []
        """Tracked objects that were equal on all ranks then."""
        self._compared = False
        """That is known of this generation."""
        self._facts: SharedFacts | None = None
        """For the ranks' digests of their generators, after the first step of a generation."""
        self._steps = 0
        """Done in this generation."""

    def run(self, train: Callable[[], T]) -> T:
        """Call the function until it returns, or raises an exception that is not the consequence of a loss."""
        with contextlib.ExitStack() as hooks:
            # Of all optimizers: one may step another one, as SAM does, and only the outer one is tracked.
            hooks.callback(register_optimizer_step_pre_hook(self._note_stepping).remove)
            for model in self._snaps._tracker.models:
                hooks.enter_context(noted_forward(model, self._boundary.forward_done))
            hooks.callback(self._leave)
            hooks.callback(drain.before_stop, None)
            drain.before_stop(self._at_safe_point)
            modes = [(each, each.training) for model in self._snaps._tracker.models for each in model.modules()]
            self._snaps._survivor = self
            self._connection.outlives = self._is_consequence
            if self._joined:  # what this process has drawn since resume() its rank has not drawn
                self._boundary.restore_random(self._boundary.step, survived=True)
            self._joined = False
            self._boundary.mark(self._snaps.state, begins=True)
            self._begin_step()
            self._reducers.mark()
            while True:
                try:
                    try:
                        self._begin()
                        return train()
                    finally:
                        self._channel.arrive()  # an interruption could hit what follows
                except BaseException as error:
                    if self._withdrawn or not self._is_consequence(error):
                        self._announce_exit(error)
                        raise
                    traceback.clear_frames(error.__traceback__)  # what the function held belongs to the old world
                self._regroup()
                for module, mode in modes:  # it may have been interrupted in an evaluation
                    module.training = mode

    def _begin(self) -> None:
        self._first, self._steps, self._facts, self._compared = True, 0, None, False
        self._channel.train(self._cut, lambda: not self._stepping, Released)
        self._channel.say("able", generation=self._generation)

    def _announce_exit(self, error: BaseException) -> None:
        """`sys.exit(0)` in the training function ends this rank, and the others cannot go on without it: say so now. If
        they do not do the same they have to learn it soon, and not after the wait for a common end."""
        if isinstance(error, SystemExit) and error.code in (None, 0) and not drain.stopping() and self._group.world > 1:
            self._connection.exit_patience_s = LONE_EXIT_PATIENCE_S
            step, rank = self._snaps.state.step, self._group.rank
            sys.stderr.write(
                f"holdfast: rank {rank} ends: sys.exit(0) in its training function after step {step}. It is no loss, "
                "and the other ranks have to end as well.\n"
            )

    def _leave(self) -> None:
        self._withdrawn = True
        self._snaps._survivor = None
        self._connection.outlives = None
        with contextlib.suppress(ChannelLostError):
            self._channel.say("unable")
        self._channel.close()
        self._boundary.objects.close()

    def _note_stepping(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in self._optimizers.tracked and not self._optimizers.note(optimizer):
            return
        if not self._stepping:
            with self._uninterrupted:
                self._stepping = True

    def _begin_step(self) -> None:
        self._probe.begin_step()
        # Not one more call in each forward pass: most steps are not looked at.
        self._boundary.after_forward = self._look_for_writes if self._probe.looks else None

    def _look_for_writes(self) -> None:
        """Whether the program has changed parameters in a way that cannot be noticed later: see unnoticed_writes.py."""
        if self._withdrawn or self._stepping:
            return
        if not self._probe.changed():
            self._boundary.moved()
        elif self._boundary.untouched():
            self.withdraw(
                "the program changes parameters through .data, or in a CUDA graph, which cannot be noticed when a step "
                "is interrupted"
            )

    def withdraw(self, why: str) -> None:
        """From here on this is a plain call."""
        if self._withdrawn:
            return
        self._snaps._not_survived = why
        group = self._group
        # One rank alone may have found the reason. If all have, the first one of them says it.
        if SharedFacts(group.rank, group.world, group.store).count("survive/withdrawn", 1) <= 1:
            seen = f", as rank {group.rank} has found" if group.world > 1 else ""
            sys.stderr.write(f"holdfast: ht.survive: {why}{seen}; if a rank is lost, all are started again\n")
        self._leave()
        drain.before_stop(None)

    def at_boundary(self) -> None:
        """A step is complete. Raises Released when the training function is to be left here, and TrackingError where
        an optimizer is not tracked."""
        if self._optimizers.found:
            raise TrackingError(
                f"ht.survive: an optimizer of the class {self._optimizers.found} steps a tracked model, and is not "
                "tracked: a replacement would begin with an empty state\n"
                "give it to track(), too; one that another optimizer wraps by a name of its own: "
                "track(…, base=optimizer.base_optimizer)"
            )
        if self._probe.looks:
            self._look_for_writes()
            if self._withdrawn:
                return
        self._boundary.mark(self._tracked_state)
        self._begin_step()
        self._reducers.mark()
        if not self._compared:
            self._compare_ranks()
        if self._first:
            self._first = False
            self._report()
            if why := self._reducers.why_not():  # since the function began: a join(), a communication hook
                self.withdraw(why)
                return
        self._stepping = False  # not before: half of a mark is the state of no step
        release = self._channel.released
        if release is not None and release.cut:
            raise Released

    def _compare_ranks(self) -> None:
        """Find out which random generators and which tracked objects are equal on all ranks: after a generation's first
        step, which is the same step on all. It does not wait."""
        self._steps += 1
        step = self._boundary.step - self._steps + 1  # the first one, by which the ranks' facts are named
        if self._steps == 1:
            self._facts = SharedFacts(self._group.rank, self._group.world, self._group.store)
            self._facts.post(f"random/{step}", self._boundary.random_digests())
            self._facts.post(f"objects/{step}", self._boundary.objects.whole_digests())
        elif self._facts is not None and (found := self._facts.posted(f"objects/{step}")) is not None:
            if self._equal is None:  # later the ranks draw what they drew then
                self._equal = sorted(equal_parts(self._facts.posted(f"random/{step}") or []))
            self._alike = sorted(equal_parts(found))
            self._compared = True
        elif self._steps == COMPARE_STEPS_MAX:
            self._compared = True

    def _at_safe_point(self) -> None:
        """All ranks were asked to stop after this step. Raises Released when they only regroup."""
        release = self._channel.catch_up()
        if release is not None:
            if release.leaves:
                drain.stop()
            raise Released

    def _report(self) -> None:
        if self._news is None:
            return
        began_s = self._news.pop("began_s")
        seconds = round(time.monotonic() - began_s, 3)
        with contextlib.suppress(ChannelLostError):
            self._channel.say("went_on", **self._news, seconds=seconds)
        self._news = None

    # --- leaving the old world --------------------------------------------------------------------------------------

    def _cut(self) -> None:
        self._connection.sockets.cut()
        if self._connection.on_nccl and dist.is_initialized():
            torch_private.abort_groups()

    def _is_consequence(self, error: BaseException) -> bool:
        """Whether a loss, or a regroup, made the training function raise this. Waits for the news of a loss."""
        if isinstance(error, Released):
            return True
        if not isinstance(error, (RuntimeError, HoldfastError, ConnectionError)):
            return False
        if isinstance(error, (torch.OutOfMemoryError, TrackingError)):
            return False
        release = self._channel.catch_up()
        if (release is None or not release.cut) and _is_of_the_group(error):
            release = self._channel.await_cut(NEWS_S)
        return release is not None and release.cut

    # --- entering the new one ---------------------------------------------------------------------------------------

    def _regroup(self) -> None:
        began_s = time.monotonic()
        self._channel.arrive()
        try:
            self._boundary.rewind(self._snaps.state)
            handed = self._go_on(step=self._boundary.step, clean=not self._stepping and self._boundary.untouched())
            self._boundary.mark(self._snaps.state, begins=True)
            self._begin_step()
            self._stepping = False
            self._news = {
                "generation": self._generation,
                "step": handed.chosen.step,
                "steps_lost": handed.steps_lost,
                "began_s": began_s,
            }
        except ChannelLostError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, all ranks restart
            self._refuse(error)

    def _go_on(self, *, step: int, clean: bool) -> Handed:
        """Wait for this rank's place in the next generation, take it, and agree with the other ranks on the state.
        `step`, `clean`: see Own."""
        before, boundary, snaps = [self._group.rank, self._group.world], self._boundary, self._snaps
        peers = self._enter(self._channel.await_go())
        positions = boundary.positions() if step >= 0 else {}
        own = Own(
            step,
            clean,
            before,
            boundary.epoch,
            positions,
            schedule=snaps._schedule.state(),
            durable=[snaps._durable_epoch, snaps._unsaved],
            seed=boundary.seed,
            orders=self._reducers.all_orders,
            frozen=self._reducers.frozen,
            graded=self._reducers.graded,
            objects=boundary.objects.digests(),
            equal=self._equal,
            alike=self._alike,
        )
        handed = Handed.share(peers, own)
        self._equal, self._alike = handed.chosen.equal, handed.chosen.alike
        self._reducers.connect(handed.chosen.orders, handed.chosen.frozen, handed.chosen.graded)
        handed.apply(snaps, self._group, peers, boundary, survived=step >= 0)
        snaps._go_on(peers, self._generation, handed.chosen.schedule, handed.chosen.durable)
        return handed

    def _enter(self, go: Go) -> Peers:
        """Join the world of this generation: environment, process group, models."""
        os.environ.update(go.environment)
        os.environ.pop(REPLACEMENT_VARIABLE, None)
        drain.begin_again()
        self._generation = go.generation
        forget_pending()
        self._reducers.disconnect()
        return regroup(self._group, go.generation)

    def _refuse(self, error: Exception) -> NoReturn:
        """Have all ranks restarted, and wait for that: our exception would be taken for the cause of the loss."""
        self._channel.say("refuse", why=f"{type(error).__name__}: {error}"[:WHY_CHARACTERS_MAX])
        time.sleep(STOP_S)
        raise error

    def join(self) -> int:
        """A replacement takes its place among the others, in its `resume()`. Returns the step that it goes on from."""
        self._channel.say("ready")
        try:
            step = self._go_on(step=-1, clean=False).chosen.step
        except ChannelLostError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, all ranks restart
            self._refuse(error)
        self._boundary.mark(self._snaps.state, begins=True)
        self._joined = True
        return step


def join(snaps: Snapshots) -> int:
    """Take the state of the other ranks, in a process that was started for a lost one: `Survivor.join`.

    Raises ProcessGroupError where this process has no group, or no agent.
    """
    group = open_group()
    channel = AgentChannel.open()
    if group is None or group.connection is None or channel is None:
        raise ProcessGroupError("This process replaces a lost one: it needs ht.process_group() and holdfast's agent.")
    if why := snaps._tracker.reducers.begin():
        raise ProcessGroupError(f"This process replaces a lost one, and cannot join the others: {why}.")
    survivor = snaps._survivor = Survivor(snaps, group, channel)
    return survivor.join()


def _is_of_the_group(error: BaseException) -> bool:
    """Whether a collective operation or the store raised this."""
    if isinstance(error, (dist.DistError, ConnectionError, HoldfastError)):
        return True
    text = str(error)
    return any(word in text for word in ("gloo", "Connection closed by peer", "NCCL", "TCPStore"))


# --- the state of all ranks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own:
    """What one rank tells the others when they agree."""

    step: int
    """The last one that it has completed; -1: it is a replacement."""
    clean: bool
    """It has done nothing since then that changes more than the boundary keeps."""
    before: list[int]
    """Its rank and the world's size in the old world."""
    epoch: int
    positions: dict[str, dict[str, Any]]
    """Of the loaders and samplers after that step, by name."""
    schedule: list[int]
    durable: list[Any]
    seed: str
    orders: list[Order]
    """Of the gradients, by DDP module."""
    frozen: list[int]
    """Numbers of the parameters that needed no gradient after that step."""
    graded: list[int]
    """Numbers of those that had one when the old world was left."""
    objects: Digests
    """Of the states of tracked objects that only their `state_dict()` is known of."""
    equal: list[str] | None
    """The random generators from which all ranks draw the same numbers; None: not known."""
    alike: list[str]
    """Tracked objects that were equal on all ranks when these were compared."""


@dataclass(frozen=True)
class Handed:
    """The agreement of all ranks of a new world."""

    chosen: Own
    """All go on from here: of the rank `source`. Its step is the newest that a rank has completed."""
    source: int
    """A rank that has completed that step, and nothing more."""
    behind: tuple[int, ...]
    """Ranks that take their state from the source."""
    steps_lost: int
    same_places: bool
    """Every rank has the place that it had, in a world of the same size."""
    objects: tuple[Digests, ...]
    """Of the survivors that have completed the chosen step."""

    @classmethod
    def share(cls, peers: Peers, own: Own) -> Handed:
        """Agree. Every rank calls it. Raises ProcessGroupError, on all ranks alike, when no rank is clean."""
        said = [Own(**each) for each in peers.share(asdict(own))]
        good = [rank for rank, each in enumerate(said) if each.clean]
        if not good:
            raise ProcessGroupError(
                "every rank was between its optimizer's step and snaps.step(), or had changed parameters before that "
                "step, so no state is complete\n"
                "call snaps.step() directly after the optimizer and the scheduler, and communicate after it"
            )
        source = max(good, key=lambda rank: (said[rank].step, -rank))
        chosen = said[source]
        return cls(
            chosen=chosen,
            source=source,
            behind=tuple(rank for rank, each in enumerate(said) if not each.clean or each.step != chosen.step),
            steps_lost=max(0, max(each.step for each in said) - chosen.step),
            same_places=all(each.step < 0 or each.before == [rank, peers.world] for rank, each in enumerate(said)),
            objects=tuple(each.objects for each in said if each.step == chosen.step),
        )

    def apply(self, snaps: Snapshots, group: ProcessGroup, peers: Peers, boundary: Boundary, *, survived: bool) -> None:
        """Bring this rank to that state. Every rank calls it. `survived`: this is no replacement."""
        tracker, step = snaps._tracker, self.chosen.step
        boundary.objects.check_world(same_places=self.same_places)
        tracker.regroup(peers.rank, peers.world)
        states = self._transfer(tracker, group.device, peers.rank) if self.behind else {}
        if peers.rank in self.behind:
            boundary.objects.follow(
                step,
                states,
                survived=survived,
                theirs=self.chosen.objects,
                survivors=self.objects,
                alike=self.chosen.alike,
            )
        if survived:
            boundary.complete(step)
        snaps.state.step, snaps.state.epoch = step, self.chosen.epoch
        tracker.set_positions(self.chosen.positions)
        if not (self.same_places and boundary.restore_random(step, survived=survived)):
            seed_random(self.chosen.seed.encode(), peers.rank, peers.world, self.chosen.equal or ())

    def _transfer(self, tracker: Tracker, device: torch.device, rank: int) -> dict[str, Any]:
        """Send everything that is tracked to the ranks behind. Returns, there, the states of the source's own objects
        (own_objects.py), which no object was given yet."""
        on = device if "nccl" in dist.get_backend() else torch.device("cpu")
        if rank == self.source:
            data = image(tracker).to(on)
            size = torch.tensor([len(data)], device=on)
            for each in self.behind:
                dist.send(size, each)
                dist.send(data, each)
        elif rank in self.behind:
            size = torch.zeros(1, dtype=torch.int64, device=on)
            dist.recv(size, self.source)
            data = torch.empty(int(size.item()), dtype=torch.uint8, device=on)
            dist.recv(data, self.source)
            return _take_over(tracker, data.cpu())
        return {}


def _take_over(tracker: Tracker, data: torch.Tensor) -> dict[str, Any]:
    """Give everything that is tracked the state of this image, except objects whose state may be the source's
    own: it returns those states."""
    saved = Saved(parts_of_slot(memoryview(data.numpy())))
    choice = Choice()
    fit = together(Peers(0, 1), tracker.compare(saved, 0, choice), choice)
    own = unknown_objects(tracker.others).keys()
    fit = replace(fit, restored=fit.restored - own)
    targets = tracker.targets(saved, 0, fit)
    saved.prepare(targets.fill).load()
    tracker.restore(saved, 0, 1, targets.all(), fit)
    return {name: tracker.state_in(saved, name) for name in own}
