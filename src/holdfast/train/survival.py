"""ht.survive: a training function that goes on in the same process when the world around it changes.

    @ht.survive(snaps)
    def train():
        for epoch in state.epochs(10):
            for batch in loader:
                ...
                snaps.step(loss=loss)

    train()

When another rank is lost, the function is left by an exception and called again; everything that was made before the
call is kept. In between, the rank forms a new process group with the ranks that are left (group.regroup), and all of
them agree on the newest step that one of them has completed. A rank that has not completed it, and a rank that joins,
take the state from one that has.

A rank's state is clean if it is exactly that of a completed step. A step ends in `snaps.step()`. Between that and the
optimizer's next step only such things change as `Boundary` keeps: random numbers, buffers, the learning rate's
schedule, a scaler, epoch and position in the data, and all other tracked objects with a `state_dict()`. So a rank that
was interrupted anywhere in that time has a clean state. A rank that was interrupted later, between the optimizer's step
and `snaps.step()`, or that has changed parameters before the optimizer's step, takes the state of another.

remaking.py has the other form, in which the function makes the model itself.

A program whose state cannot be carried over a loss gets an error before the first step is complete, or `ht.survive` is
a plain call: then a loss restarts all processes, as without it. One line at the start says which (`_announce`);
carrying.py decides it.

Knows torch, the process group and the tracked objects. Knows nothing of nodes and agents: agent_channel.py talks to
them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from holdfast.protocol.errors import ProcessGroupError, TrackingError
from holdfast.protocol.train_contract import Survive
from holdfast.train import torch_private
from holdfast.train.agent_channel import AgentChannel, Go, Release, is_replacement
from holdfast.train.agreement import Peers
from holdfast.train.boundary import Boundary, KeptBuffer, noted_forward, put_back
from holdfast.train.carrying import (
    PlainCall,
    PlainCallReason,
    UntrackedModules,
    check_function,
    is_sharded,
    surviving_mode,
    why_alone,
    why_not_made_again,
    why_plain,
)
from holdfast.train.generation_calls import FunctionsCalled, GenerationCalls, RegroupReport
from holdfast.train.group import ProcessGroup, open_group
from holdfast.train.guards import replaced
from holdfast.train.mistakes import SharedFacts
from holdfast.train.own_objects import Digests, unknown_objects
from holdfast.train.random_numbers import equal_parts, seed_random
from holdfast.train.reading import Saved, parts_of_slot
from holdfast.train.reducers import Order
from holdfast.train.remaking import Remaker, check_not_sharded
from holdfast.train.save import image
from holdfast.train.state import Tracker
from holdfast.train.surviving_snapshots import SnapshotsLike, SurvivingCall
from holdfast.train.tracked import Choice, together
from holdfast.train.unnoticed_writes import ValueProbe
from holdfast.train.untracked import UntrackedOptimizers

P = ParamSpec("P")
T = TypeVar("T")

COMPARE_STEPS_MAX = 20
"""Limit of the steps of a generation in which the ranks' digests may arrive. If they have not, random numbers and
objects count as each rank's own."""


def survive(
    snaps: SnapshotsLike, *, ranks: Callable[[int], int] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a training function go on in this process when ranks are lost or join: it is called again.

    What is made before the function is kept, what it makes is made again. `snaps`: the Snapshots, in one of two forms.
    After `track()` and `resume()` they are kept with the model, and on the CPU no step is lost. Otherwise the function
    calls both, and makes the model, as it has to be for a sharded one: then training goes on from the newest state in
    memory. `ranks`: for such a function the number of ranks that train, of those that are there (`multiple_of`); the
    others wait as spares.

    Between `resume()` and the function, and outside of `snaps.step()`'s loop, no rank may use the process group. If a
    loss cannot be survived (without holdfast's agent, with --survive off …) it is a plain call. One line on rank 0's
    stderr says so, and why.

    Raises TrackingError for objects with a state that the function uses and that are not tracked, MadeBeforeError for
    a sharded model, a device mesh or a process group that was made before the function.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*arguments: P.args, **keywords: P.kwargs) -> T:
            survivor = _survivor_of(snaps, function, ranks)
            if survivor is None:
                return function(*arguments, **keywords)
            return survivor.run(functools.partial(function, *arguments, **keywords))

        return run

    return decorate


def _survivor_of(
    snaps: SnapshotsLike, function: Callable[..., Any], ranks: Callable[[int], int] | None
) -> SurvivingCall | None:
    """The survivor that calls the function; None: it is a plain call. Raises TrackingError."""
    keeps = snaps.resumed  # the models were made before the function
    if keeps and ranks is not None:
        raise TrackingError("ht.survive(ranks=…): call snaps.track() and snaps.resume() in the training function")
    if not keeps and snaps._tracker.names():
        raise TrackingError(
            "ht.survive: call snaps.resume() before the training function, or snaps.track() and snaps.resume() in it"
        )
    survivor = snaps._survivor
    if survivor is not None:
        check_function(function, snaps._tracker)
        return survivor  # a replacement, which has joined in resume()
    if snaps._not_survived:
        return None
    if snaps._made_in:
        raise TrackingError(
            f"ht.survive: {snaps._made_in}() makes what it tracks, and was called already: call one such function, once"
        )
    group = open_group()
    why = why_alone(group)
    if why is None and not snaps._is_joined_in:
        why = PlainCall(PlainCallReason.OTHER)
    elif why is None:
        why = _why_not_kept(group, snaps) if keeps else why_not_made_again(group)
    channel = AgentChannel.open() if why is None else None
    if why is None and channel is None:
        why = PlainCall(PlainCallReason.NO_AGENT)
    if channel is None or group is None:
        _announce(group, snaps, why, keeps=keeps)
        return None
    try:
        if keeps:
            check_not_sharded(snaps._tracker.named_models(), function)
            check_function(function, snaps._tracker)
            modules = UntrackedModules(function, snaps._tracker) if group.rank == 0 else None
            found: SurvivingCall = Survivor(snaps, group, channel, modules)
        else:
            found = Remaker(snaps, group, channel, function, ranks)
    except BaseException:
        channel.close()
        raise
    if not is_replacement():
        _announce(group, snaps, None, keeps=keeps)
    return found


def _why_not_kept(group: ProcessGroup | None, snaps: SnapshotsLike) -> PlainCall | None:
    """The answer that a loss cannot be survived with the models of these Snapshots, with its reason; None: it can. All
    ranks call this."""
    # Sharded models are refused. The ranks are compared first: what else is a reason may be so on some ranks only.
    assert snaps._saving is not None
    alike = any(map(is_sharded, snaps._tracker.models)) or snaps._saving.is_equal_everywhere()
    why = why_plain(group, snaps._tracker)
    return PlainCall(PlainCallReason.DIFFER) if why is None and not alike else why


def _announce(group: ProcessGroup | None, snaps: SnapshotsLike, why: PlainCall | None, *, keeps: bool) -> None:
    """Print on rank 0, once, what a loss will do. `keeps`: the model is kept."""
    if snaps._survival_said or (group.rank if group is not None else int(os.environ.get("RANK") or 0)) != 0:
        return
    snaps._survival_said = True
    makes = "" if keeps else ", make the model again"
    if why is not None:
        text = f"{why}; if a rank is lost, all are started again"
    else:
        waits = surviving_mode() is Survive.WAIT
        then = "wait for its replacement" if waits else "go on without it until its replacement joins"
        text = f"if a rank is lost, the others keep their processes{makes} and {then}"
    sys.stderr.write(f"holdfast: ht.survive: {text}\n")


class Survivor:
    """One process that goes on in one generation after the other. `at_boundary` is called at the end of each step."""

    def __init__(
        self,
        snaps: SnapshotsLike,
        group: ProcessGroup,
        channel: AgentChannel,
        modules: UntrackedModules | None = None,
    ) -> None:
        """`modules`: those of which this rank warns if they change; None: it does not."""
        self._modules = modules
        self._snaps, self._tracked_state = snaps, snaps.state
        if snaps._functions is None:
            snaps._functions = FunctionsCalled()
        self._functions = snaps._functions
        self._calls = GenerationCalls(group, channel, self._functions)
        self._uninterrupted = channel.uninterrupted
        self._boundary = Boundary(snaps._tracker, snaps.memory_place)
        self._probe = ValueProbe()
        self._optimizers = UntrackedOptimizers(
            snaps._tracker.models, snaps._tracker.optimizers, snaps._tracker.others.values()
        )
        self._reducers = snaps._tracker.reducers
        self._stepping = False
        """Whether an optimizer has begun to step since the last boundary: then the state is not that of a completed
        step."""
        self._no_step_yet = True
        """Whether no step was completed in this generation."""
        self._compared = False
        """Whether the ranks were compared in this generation."""
        self._facts: SharedFacts | None = None
        """The store in which the ranks leave their digests after the first step of a generation."""
        self._steps = 0
        """Optimizer steps that were completed in this generation while the comparison was due."""
        self._first_step = -1
        """The step that the first of them completed. Micro-batches count, so the next one may be several later."""
        self._clean = True
        """Whether the state that this process has outside of its training function is that of a completed step."""
        self._adopts = False
        """Whether this rank is being brought to the state that was agreed on."""
        self._home = [group.rank, group.world]
        """This rank's number, and the world's size, in the world in which the ranks agreed on a state last."""
        self._steps_lost = 0
        """`Agreement.steps_lost` since the last world was left, the largest one if there were several agreements."""

    def run(self, train: Callable[[], T]) -> T:
        """Call the function until it returns, or raises an exception that is not the consequence of a loss."""
        with contextlib.ExitStack() as hooks:
            # The hook sees all optimizers: one may step another one, as SAM does, and only the outer one is tracked.
            hooks.callback(register_optimizer_step_pre_hook(self._note_stepping).remove)
            hooks.callback(register_optimizer_step_post_hook(self._note_stepped).remove)
            for model in self._snaps._tracker.models:
                hooks.enter_context(noted_forward(model, self._boundary.forward_done))
            hooks.callback(self._leave)
            self._snaps._tracker.switches.note()

            state = self._snaps.state
            follow = functools.partial(self._begin_epoch, follow=state._follow)
            hooks.enter_context(replaced(state, _follow=follow))

            self._snaps._survivor = self
            self._functions.count += 1
            # Since resume() a replacement may have drawn numbers, which the lost rank had not.
            if self._functions.random is not None:
                self._boundary.set_random(self._functions.random)
            if self._functions.rates is not None:
                self._boundary.set_rates(self._functions.rates)
            joins = 0 < self._functions.count <= self._functions.joined_in
            self._boundary.mark(self._snaps.state, begins=True, enters=joins)
            self._begin_step()
            if self._functions.count < self._functions.joined_in:
                self._boundary.after_forward = self._refuse_training
            else:
                self._functions.random = self._functions.rates = None
            self._reducers.mark()

            return self._calls.run(train, self)

    def _refuse_training(self) -> None:
        """Raise TrackingError for a forward pass of the training in a function that the others have left: its gradients
        would become a part of theirs."""
        if torch.is_grad_enabled():
            raise TrackingError(
                f"ht.survive: the other ranks are in training function {self._functions.joined_in} of these Snapshots, "
                f"and this replacement trains in number {self._functions.count}\n"
                "a function that is called again after its end has to return at once: let state.epochs() or state.step "
                "decide how long it trains"
            )

    def begin_call(self) -> None:
        self._no_step_yet, self._steps, self._facts, self._compared = True, 0, None, False

    def may_interrupt(self) -> bool:
        return not self._stepping

    def at_safe_point(self, release: Release) -> None:
        """Nothing is done: the state after the last step is kept."""

    def step(self) -> int:
        return self._snaps._tracker.step

    def _leave(self) -> None:
        """Tell the agent that this process cannot survive a loss any more, and release everything."""
        self._snaps._survivor = None
        self._calls.leave()
        self._boundary.objects.close()

    def _note_stepping(self, optimizer: Optimizer, *_: Any) -> None:
        """Note that an optimizer of the tracked models begins to step. torch calls this."""
        if id(optimizer) not in self._optimizers.tracked and not self._optimizers.note(optimizer):
            return
        if not self._stepping:
            with self._uninterrupted:  # an interruption comes before this or not at all: half a step cannot be undone
                self._stepping = True
            self._boundary.note_drawn()

    def _note_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Note that an optimizer of the tracked models has stepped. torch calls this."""
        if id(optimizer) in self._optimizers.tracked:
            self._boundary.note_drawn()

    def _begin_epoch(self, epoch: int, follow: Callable[[int], None]) -> None:
        """Examine the first step of an epoch: see unnoticed_writes.py. `follow`: what the state does then."""
        follow(epoch)
        if not self._calls.withdrawn and self._boundary.after_forward is None:
            self._probe.look(self._boundary.parameters)
            self._boundary.after_forward = self._look_for_writes

    def _begin_step(self) -> None:
        if self._probe.begin_step():
            self._probe.look(self._boundary.parameters)
        # Most steps are not examined: these have no further call in each forward pass.
        self._boundary.after_forward = self._look_for_writes if self._probe.looks else None

    def _look_for_writes(self) -> None:
        """Withdraw if the program has changed parameters in a way that cannot be noticed when a step is interrupted:
        see unnoticed_writes.py."""
        if self._calls.withdrawn or self._stepping:
            return
        if not self._probe.changed():
            self._boundary.moved()
        elif self._boundary.untouched():
            self.withdraw(
                "the program changes parameters through .data, or in a CUDA graph, which cannot be noticed when a step "
                "is interrupted"
            )

    def _may_have_written(self) -> bool:
        """Whether this step, which was interrupted, may have changed parameters in such a way."""
        return self._probe.changed() or (not self._probe.looks and self._probe.is_new(self._boundary.passes))

    def withdraw(self, why: str) -> None:
        """Make this a plain call from now on: a loss is not survived any more. `why`: the reason, for a message."""
        if self._calls.withdraw(why, self._leave):
            self._snaps._not_survived = why

    def at_boundary(self) -> None:
        """Keep the state of the step that was just completed. Raises Released if the training function is to be left
        here, and TrackingError if an optimizer is not tracked."""
        # After a step's work the processor's caches have none of this, and each call costs about a microsecond: so what
        # has nothing to do is not called.
        if self._optimizers.found:
            self._optimizers.check()
        if self._probe.looks:
            if self._modules is not None:
                self._modules.warn_of_changes()
            self._look_for_writes()
            if self._calls.withdrawn:
                return

        self._probe.end_step(self._boundary.passes)
        self._boundary.mark(self._tracked_state)
        self._begin_step()
        if self._reducers.unknown:
            self._reducers.mark()
        if not self._compared:
            self._compare_ranks()
        if self._no_step_yet:
            self._no_step_yet = self._functions.seeded = False
            self._calls.step_is_done()
            if why := self._reducers.why_not():  # the function itself may use join(), or set a communication hook
                self.withdraw(why)
                return

        self._stepping = False  # only now: a state that is half marked is that of no step
        if self._calls.channel.released is not None:
            self._calls.leave_if_cut()

    def _compare_ranks(self) -> None:
        """Find out which random generators and which tracked objects are equal on all ranks, after a generation's first
        step, which is the same step on all ranks. It does not wait: the other ranks' digests may arrive in later steps.
        """
        self._steps += 1
        if self._steps == 1:
            group = self._calls.group
            # The digests are named by it, also when they are read some steps later.
            self._first_step = step = self._boundary.step
            self._facts = SharedFacts(group.rank, group.world, group.store)
            self._facts.post(f"random/{step}", self._boundary.random_digests())
            self._facts.post(f"objects/{step}", self._boundary.objects.whole_digests())
        elif self._facts is not None and (found := self._facts.posted(f"objects/{self._first_step}")) is not None:
            # Compared once only: after a regroup the ranks' numbers follow from what was equal before.
            if self._functions.equal_generators is None:
                digests = self._facts.posted(f"random/{self._first_step}") or []
                self._functions.equal_generators = sorted(equal_parts(digests))
            self._functions.equal_objects = sorted(equal_parts(found))
            self._compared = True
        elif self._steps == COMPARE_STEPS_MAX:
            self._compared = True

    # --- entering the new one ---------------------------------------------------------------------------------------

    def leave_world(self) -> None:
        """Go back to the last boundary."""
        self._snaps._tracker.switches.put_modes_back()  # it may have been interrupted in an evaluation
        self._boundary.rewind(self._snaps.state)
        self._clean = not self._stepping and self._boundary.untouched() and not self._may_have_written()
        self._steps_lost = 0

    def enter_world(self, go: Go, report: RegroupReport) -> None:
        """Enter the next generation. If another rank is lost before the ranks have agreed on a state, this one still
        has that of the boundary; later it has the agreed one. It tells the others which in the generation that
        follows."""
        agreement = self._agree(go, step=self._boundary.step)
        self._probe.begin_world()
        self._begin_step()
        report.step, report.steps_lost = agreement.chosen.step, self._steps_lost
        self._snaps._tracker.switches.put_modes_back()  # also where the world was left at a safe point

    def _agree(self, go: Go, *, step: int) -> Agreement:
        """Enter the next generation, and agree with the other ranks on the state. `step`: see RankReport."""
        calls, boundary, snaps = self._calls, self._boundary, self._snaps
        if self._adopts:
            raise ProcessGroupError("the state that was agreed on could not be taken over completely")
        self._reducers.disconnect()
        peers = calls.enter(go)
        assert peers is not None  # all ranks train
        positions = boundary.positions() if step >= 0 else {}
        own = RankReport(
            step,
            self._functions.count,
            self._clean and step >= 0,
            self._home,
            boundary.epoch,
            positions,
            schedule=snaps._schedule.state(),
            durable=[snaps._durable_epoch, snaps._unsaved],
            seed=boundary.seed,
            orders=self._reducers.all_orders,
            frozen=self._reducers.frozen,
            graded=self._reducers.graded,
            objects=boundary.objects.digests(),
            equal_generators=self._functions.equal_generators,
            equal_objects=self._functions.equal_objects,
            seeded=self._functions.seeded,
            random=boundary.random_digests() if self._functions.equal_generators is None else {},
        )
        agreement = Agreement.reach(peers, own)
        data = agreement.transfer(snaps._tracker, calls.group.device, peers.rank)
        self._adopt(agreement, peers, data, survived=step >= 0)
        snaps._go_on(peers, calls.functions.generation, agreement.chosen.schedule, agreement.chosen.durable)
        return agreement

    def _adopt(self, agreement: Agreement, peers: Peers, data: Transferred | None, *, survived: bool) -> None:
        """Bring this rank to the chosen state. It waits for no other rank, so it is done completely or not at all: half
        of it would be the state of no step."""
        chosen, boundary, functions = agreement.chosen, self._boundary, self._functions
        self._adopts = True
        functions.equal_generators, functions.equal_objects = chosen.equal_generators, chosen.equal_objects
        self._reducers.connect(chosen.orders, chosen.frozen, chosen.graded)
        functions.seeded = agreement.apply(self._snaps, peers, boundary, data, survived=survived)
        boundary.mark(self._snaps.state, begins=True, enters=True)
        self._stepping, self._clean = False, True
        self._home = [peers.rank, peers.world]
        self._steps_lost = max(self._steps_lost, agreement.steps_lost)
        self._adopts = False

    def join(self) -> int:
        """Join the others as a replacement, in `resume()`. Returns the step from which it goes on."""
        self._calls.channel.say("ready")
        # If another rank is lost meanwhile, it is a replacement again.
        chosen = self._calls.entering(lambda go: self._agree(go, step=-1).chosen)
        functions, boundary = self._functions, self._boundary
        functions.joined_in, functions.random, functions.rates = chosen.function, boundary.random, boundary.rates
        return chosen.step


def join(snaps: SnapshotsLike) -> int:
    """Take the state of the other ranks, in a process that was started for a lost one: `Survivor.join`.

    Raises ProcessGroupError if this process has no group, or no agent.
    """
    group = open_group()
    channel = AgentChannel.open()
    if group is None or group.connection is None or channel is None:
        raise ProcessGroupError("This process replaces a lost one: it needs ht.process_group() and holdfast's agent.")
    if why := snaps._tracker.reducers.begin():
        raise ProcessGroupError(f"This process replaces a lost one, and cannot join the others: {why}.")
    survivor = snaps._survivor = Survivor(snaps, group, channel)
    return survivor.join()


# --- the state of all ranks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankReport:
    """The report of one rank to the others, from which they reach an agreement."""

    step: int
    """The last step that the rank has completed; -1: it is a replacement."""
    function: int
    """`FunctionsCalled.count`."""
    clean: bool
    """Whether the rank has done nothing since then that changes more than the boundary keeps."""
    before: list[int]
    """The rank's number and the world's size in the last world in which the ranks agreed on a state: its steps since
    then were done there."""
    epoch: int
    positions: dict[str, dict[str, Any]]
    """The positions of the loaders and samplers after that step, by name."""
    schedule: list[int]
    """`Schedule.state`."""
    durable: list[Any]
    """The epoch of the newest state on the disk, and why the newest one that was to go there is not."""
    seed: str
    """`Boundary.seed`."""
    orders: list[Order]
    """The order of the gradients of each DDP module."""
    frozen: list[int]
    """Numbers of the parameters that needed no gradient after that step."""
    graded: list[int]
    """Numbers of the parameters that had a gradient when the old world was left."""
    objects: Digests
    """Digests of the states of tracked objects of which only `state_dict()` is known."""
    equal_generators: list[str] | None
    """The random generators from which all ranks draw the same numbers; None: not known."""
    equal_objects: list[str]
    """Tracked objects that were equal on all ranks when these were compared."""
    seeded: bool = False
    """`FunctionsCalled.seeded`."""
    random: dict[str, str] = field(default_factory=dict)
    """Digests of its random generators after that step, if it is not known which are equal on all ranks."""


@dataclass(frozen=True)
class Agreement:
    """The agreement of all ranks of a new world: the state from which they go on."""

    chosen: RankReport
    """The report of the rank `source`. Its step is the newest that a clean rank has completed."""
    source: int
    """The lowest rank that has completed that step, and nothing more."""
    behind: tuple[int, ...]
    """Ranks that take their state from the source."""
    steps_lost: int
    """The number of steps that some rank has completed and that are done again."""
    same_ranks: bool
    """Whether every survivor has the rank that it had, in a world of the same size."""
    same_numbers: bool
    """Whether every rank, also a lost one, can go on with the random numbers that it had after the chosen step. It
    cannot if a rank was given new ones since then, in a world that some ranks never entered."""
    objects: tuple[Digests, ...]
    """The digests of the survivors that have completed the chosen step."""

    @classmethod
    def reach(cls, peers: Peers, own: RankReport) -> Agreement:
        """Reach an agreement with the other ranks; every rank calls this. Raises ProcessGroupError, on all ranks, if no
        rank is clean, or if they are in different training functions: what one has drawn or done between these, the
        other has not."""
        reports = [RankReport(**each) for each in peers.all_gather(asdict(own))]
        functions = {each.function for each in reports if each.step >= 0}
        if len(functions) > 1:
            raise ProcessGroupError(
                f"some ranks had begun training function {max(functions)} of these Snapshots, and others had not"
            )
        survivors = [(rank, each) for rank, each in enumerate(reports) if each.step >= 0]
        if not survivors:
            raise ProcessGroupError("every rank that had the state of a completed step is lost")
        clean = [rank for rank, each in enumerate(reports) if each.clean]
        if not clean:
            raise ProcessGroupError(
                "every rank was between its optimizer's step and snaps.step(), or had changed parameters before that "
                "step, so no state is complete\n"
                "call snaps.step() directly after the optimizer and the scheduler, and communicate after it"
            )
        source = max(clean, key=lambda rank: (reports[rank].step, -rank))
        chosen = reports[source]
        if chosen.equal_generators is None:  # a rank was lost before the ranks could compare them: see `_compare_ranks`
            numbers = [each.random for _, each in survivors if each.step == chosen.step]
            if len(numbers) > 1:
                chosen = replace(chosen, equal_generators=sorted(equal_parts(numbers)))
        same_ranks = all(each.before == [rank, peers.world] for rank, each in survivors)
        return cls(
            chosen=chosen,
            source=source,
            behind=tuple(rank for rank, each in enumerate(reports) if not each.clean or each.step != chosen.step),
            steps_lost=max(0, max(each.step for each in reports) - chosen.step),
            same_ranks=same_ranks,
            same_numbers=same_ranks and not any(each.seeded and each.step == chosen.step for _, each in survivors),
            objects=tuple(each.objects for each in reports if each.step == chosen.step),
        )

    def apply(
        self, snaps: SnapshotsLike, peers: Peers, boundary: Boundary, data: Transferred | None, *, survived: bool
    ) -> bool:
        """Bring this rank to the chosen state. `data`: from `transfer`. `survived`: this process is no replacement.
        Returns whether the rank has new random numbers."""
        tracker, step = snaps._tracker, self.chosen.step
        boundary.objects.check_world(same_ranks=self.same_ranks)
        tracker.regroup(peers.rank, peers.world)
        if data is not None:
            states = _take_over(tracker, data.image)
            _take_over_unsaved(tracker, data.unsaved)
            boundary.objects.follow(
                step,
                states,
                survived=survived,
                theirs=self.chosen.objects,
                survivors=self.objects,
                equal_objects=self.chosen.equal_objects,
            )
        if survived:
            boundary.complete(step)

        snaps.state.step, snaps.state.epoch = step, self.chosen.epoch
        tracker.set_positions(self.chosen.positions)
        if self.same_numbers and boundary.restore_random(step, survived=survived):
            return False
        seed_random(self.chosen.seed.encode(), peers.rank, peers.world, self.chosen.equal_generators or ())
        return True

    def transfer(self, tracker: Tracker, device: torch.device, rank: int) -> Transferred | None:
        """Send everything that is tracked from the source to the ranks behind; every rank calls this. Returns the
        source's state on these, None on others. It changes nothing."""
        if not self.behind:
            return None
        on = device if "nccl" in dist.get_backend() else torch.device("cpu")
        if rank == self.source:
            parts = [part.to(on) for part in (image(tracker), _unsaved_buffers(tracker))]
            sizes = torch.tensor([len(part) for part in parts], device=on)
            for each in self.behind:
                for message in (sizes, *parts):
                    dist.send(message, each)
        elif rank in self.behind:
            sizes = torch.zeros(2, dtype=torch.int64, device=on)
            dist.recv(sizes, self.source)
            parts = [torch.empty(size, dtype=torch.uint8, device=on) for size in sizes.tolist()]
            for part in parts:
                dist.recv(part, self.source)
            return Transferred(*(part.cpu() for part in parts))
        return None


class Transferred(NamedTuple):
    """What a rank that is behind gets from the source, as bytes."""

    image: torch.Tensor
    """The state of everything that is tracked."""
    unsaved: torch.Tensor
    """The buffers of the models that no state_dict has."""


def _unsaved_buffers(tracker: Tracker) -> torch.Tensor:
    """The buffers that no state_dict has, as bytes: {(number of the model, module, name): value}."""
    file = io.BytesIO()
    torch.save({place: buffers[name] for place, buffers, name in _unsaved_places(tracker)}, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _unsaved_places(
    tracker: Tracker,
) -> Iterator[tuple[tuple[int, str, str], dict[str, torch.Tensor | None], str]]:
    for number, model in enumerate(tracker.models):
        for path, module in model.named_modules():
            for name in torch_private.unsaved_buffers_of(module):
                yield (number, path, name), torch_private.buffers_of(module), name


def _take_over_unsaved(tracker: Tracker, data: torch.Tensor) -> None:
    """Give the buffers that no state_dict has the values of the source."""
    values = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True, map_location="cpu")
    kept = []
    for place, buffers, name in _unsaved_places(tracker):
        value, there = values.get(place), buffers.get(name)
        if value is not None and there is not None:
            value = value.to(there.device)
        kept.append(KeptBuffer(buffers, name, value, value))
    put_back(kept)


def _take_over(tracker: Tracker, data: torch.Tensor) -> dict[str, Any]:
    """Give everything that is tracked the state of this image, except objects whose state may be the source's
    own. Returns the states of these."""
    saved = Saved(parts_of_slot(memoryview(data.numpy())))
    choice = Choice()
    fit = together(Peers(0, 1), tracker.compare(saved, 0, choice), choice)
    own = unknown_objects(tracker.others).keys()
    fit = replace(fit, restored=fit.restored - own)
    targets = tracker.targets(saved, 0, fit)
    saved.prepare(targets.fill).load()
    tracker.restore(saved, 0, 1, targets.all(), fit)
    return {name: tracker.state_in(saved, name) for name in own}
