"""ht.survive for a function that makes its model itself: sharded models, device meshes, groups of its own.

    @ht.survive(snaps)
    def train():
        model = fully_shard(Net().to(pg.device))  # for the ranks that are there
        optimizer = torch.optim.AdamW(model.parameters())
        loader = ht.DataLoader(...)
        state = snaps.track(model=model, optimizer=optimizer, loader=loader)
        snaps.resume()
        for epoch in state.epochs(10):
            ...

    train()

The shards of a lost rank are in its memory alone, and other ranks' shards have another form. So nothing that the
function has made is carried over a loss. Its frame is left, everything in it is let go, the process joins the next
generation, and the function is called again in the same process: `snaps.resume()` in it takes the newest state that is
complete over the memory of the ranks, also those that are lost (snapshots/slots.py), on any number of ranks. What was
made before the function, and the process itself, are kept.

Where living ranks have all parts of the last complete step, they leave these in memory before (replica_state.py).

Such a state is complete before training begins: without one a first loss would leave objects changed that were made
before the function and are tracked in it. So `resume()` saves to memory when it finds nothing.

A model that was made before the function is refused: its shards, or its process group, end with the ranks that they
were made for.

Knows the tracked objects and Snapshots. Knows nothing of nodes and agents.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import secrets
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.linux import boot_id
from holdfast.protocol.errors import MadeBeforeError, ProcessGroupError
from holdfast.train import torch_private
from holdfast.train.agent_channel import AgentChannel, Go, Release, is_replacement
from holdfast.train.agreement import Peers
from holdfast.train.carrying import check_function, is_sharded, name_of, used_by, why_data_stay
from holdfast.train.data.loader import DataLoader
from holdfast.train.data.sampler import DistributedSampler
from holdfast.train.generation_calls import FunctionsCalled, GenerationCalls, RegroupReport, Released
from holdfast.train.group import ProcessGroup, store_ahead
from holdfast.train.guards import GuardWarning, enabled
from holdfast.train.own_objects import FirstStates
from holdfast.train.quarantine import forget_previous_end
from holdfast.train.random_numbers import RandomNumbers, RandomRecord, random_state, set_random_state
from holdfast.train.replica_state import ReplicaState, replica_state
from holdfast.train.snapshots.saver_connection import key_of_life
from holdfast.train.state import Tracker
from holdfast.train.step_agreement import Decision, Speaker, StepAgreement, is_known
from holdfast.train.step_links import NoAgreement, await_news, meet
from holdfast.train.surviving_snapshots import SnapshotsLike
from holdfast.train.unsaved_buffers import UnsavedBuffers
from holdfast.train.untracked import UntrackedOptimizers
from holdfast.worker import drain

T = TypeVar("T")

SPARE_POLL_S = 0.05
"""Pause between two looks of a spare (s)."""
NONE_FIT_S = 600.0
"""Limit of the wait for more ranks, if none of those that are there would train."""
ASK_POLL_S = 2e-3
"""Pause between two looks for what the other ranks know of a step (s)."""
ASK_S = 60.0
"""Limit of the wait for another generation, after the store of one was lost."""
DECIDED = "decided"
"""Prefix of the keys in the store under which the ranks of a generation write the newest step that they know to be
done."""
TRAINED, LEFT = "trained", "left"
"""Keys in the store under which the ranks that train say that they have ended, or that all leave the training function
at a safe point."""


def multiple_of(number: int) -> Callable[[int], int]:
    """A rule for `survive(snaps, ranks=…)`: a multiple of this number of ranks trains, and the rest wait as spares. So
    a mesh with a dimension of this size fits after a loss."""
    if number < 1:
        raise ProcessGroupError(f"multiple_of({number}): at least 1")
    return lambda world: world - world % number


class Remaker:
    """One process whose training function makes its model again in each generation. `Snapshots` calls it."""

    def __init__(
        self,
        snaps: SnapshotsLike,
        group: ProcessGroup,
        channel: AgentChannel,
        function: Callable[..., Any],
        ranks: Callable[[int], int] | None = None,
    ) -> None:
        """`ranks`: the number of ranks that train, of those that are there; None: all. Raises MadeBeforeError for what
        was made before the function and ends with a generation."""
        ranks = ranks or (lambda world: world)
        self._snaps, self._function = snaps, function
        self._older = _modules_and_data()
        """The modules, loaders and samplers that were made before the function was called, by their identities."""
        self._check_made_before()
        self._calls = GenerationCalls(group, channel, FunctionsCalled(), ranks)
        self._all_fit = ranks(group.world) == group.world
        """Whether all ranks of the generation in which this process was started train."""
        self._spare = False
        """Whether this rank does not train in the present generation."""
        self._random = random_state()
        """Random numbers before the first call: a call that finds no state begins with the same weights."""
        self._optimizers: UntrackedOptimizers | None = None
        """Optimizers that step the present models; None: there is no model yet."""
        self._replicas: ReplicaState | None = None
        """The state after the last complete step; None: a loss loses parts of it, or there is no model yet."""
        self._decided = Decision("", 0)
        """The newest step that this rank knows to be done by all ranks, in the last world in which they agreed on
        steps. It stays until all ranks are in the next such world."""
        self._unsaved: UnsavedBuffers | None = None
        """The buffers that no state has, while it is not known whether training changes them; None: it is known, or
        there are none."""
        self._unsaved_known = False
        """Whether it is known, in this process."""
        self._warned = False
        """Whether it was said that the ranks do not agree on steps."""
        self._checked = False
        """Whether the function was checked."""
        self._first_states = FirstStates({})
        """Those of the tracked objects before the first call gave them any."""

    def run(self, train: Callable[[], T]) -> T:
        """Call the function until it returns, or raises an exception that is not the consequence of a loss."""
        with contextlib.ExitStack() as hooks:
            hooks.callback(register_optimizer_step_pre_hook(self._note_stepping).remove)
            hooks.callback(self._leave)
            self._calls.on_entering(self._tell)
            self._snaps._survivor = self._snaps._remaker = self
            if is_replacement():
                self._calls.channel.say("ready")
                self._calls.entering(self._enter)
            elif not self._all_fit:
                self._spare = self._calls.refusing_errors(self._calls.leave_out_spares) is None
            found = self._calls.run(lambda: self._wait_as_spare() if self._spare else self._train(train), self)
        if self._spare:
            raise SystemExit(0)  # the others have ended the training
        return cast("T", found)

    def _train(self, train: Callable[[], T]) -> T:
        found = train()
        store = self._calls.generation_store
        with contextlib.suppress(RuntimeError):  # the store is gone, so there is no spare
            if store is not None:
                store.set(TRAINED, "1")
        return found

    def _wait_as_spare(self) -> None:
        """Wait until the others have ended the training. Raises Released when this rank is to train."""
        calls, group = self._calls, self._calls.group
        sys.stderr.write(f"holdfast: ht.survive: rank {group.rank} waits as a spare: ranks= lets {group.world} train\n")
        calls.step_is_done()
        drain.wait_as_spare(True)
        none_fit_by_s = inf if group.world else time.monotonic() + NONE_FIT_S
        try:
            while not calls.generation_store.check([TRAINED]):
                calls.leave_if_cut()
                if time.monotonic() > none_fit_by_s:
                    raise ProcessGroupError(
                        "ht.survive(ranks=…): the ranks that are there are too few, so none trains, and no others came "
                        f"within {NONE_FIT_S:g} s"
                    )
                if not drain.asked():
                    time.sleep(SPARE_POLL_S)
                elif drain.should_stop():
                    return  # the whole job stops here
        finally:
            drain.wait_as_spare(False)

    # --- what the calls ask -----------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """Nothing is prepared: the function makes everything."""

    def may_interrupt(self) -> bool:
        # Whatever is half done belongs to the function, and is let go. But a state that is half marked is of no step.
        return self._replicas is None or not self._replicas.stepping

    def step(self) -> int:
        return self._snaps._tracker.step

    def at_safe_point(self, release: Release) -> None:
        if self._spare:
            self._await_others()
            return
        if not release.at_once:
            self._snaps._save_at_safe_point(leaves=release.leaves, nodes=release.nodes)
        store = self._calls.generation_store
        if store is not None and self._calls.group.rank == 0:
            store.set(LEFT, "1")

    def _await_others(self) -> None:
        """Wait, as a spare at a safe point, until the others leave for it, too. If training ends before, this rank ends
        with them: it would wait in vain for the next generation, and all would be started again."""
        calls = self._calls
        while calls.group.world and not calls.generation_store.check([LEFT]):
            calls.leave_if_cut()
            if calls.generation_store.check([TRAINED]):
                raise SystemExit(0)
            time.sleep(SPARE_POLL_S)

    def leave_world(self) -> None:
        """Let everything go."""
        self._optimizers = self._unsaved = None
        self._note_decided()
        saving, replicas, self._replicas = self._snaps._stop_saving(), self._replicas, None
        if replicas is not None:
            if saving is not None:
                replicas.leave(saving)
            replicas.close()
        del saving, replicas
        self._snaps._let_go()
        gc.collect()  # modules, their hooks and meshes refer to each other
        torch_private.forget_meshes()

    def enter_world(self, go: Go, report: RegroupReport) -> None:  # noqa: ARG002 - `resumed` completes it
        self._enter(go)

    def _enter(self, go: Go) -> None:
        peers = self._calls.enter(go)
        forget_previous_end()
        self._spare = peers is None
        if peers is None:
            self._snaps._rest()
        else:
            self._snaps._new_world = peers, self._calls.functions.generation
        set_random_state(self._random)

    # --- a step of which some ranks may know that it is done, and others do not: see step_agreement.py ---------------

    def _note_decided(self) -> None:
        if self._replicas is not None:
            self._decided = self._decided._replace(step=max(self._decided.step, self._replicas.decided))

    def _tell(self, store: Any, rank: int) -> None:
        """Write what this rank knows into the store of the next generation, in which it has this number."""
        store.set(f"{DECIDED}/{rank}", json.dumps(self._decided))

    def _is_known(self, step: int) -> bool:
        """A rank was lost, and this one has all its gradients of this step, but does not know whether all have. Wait
        until all ranks that are left wait for the next generation, or have a place in it already. Returns whether one
        of them knows it."""
        channel = self._calls.channel
        channel.arrive()
        self._note_decided()
        while True:
            told = self._told_by_all(channel.look_ahead())
            if told is not None:
                return is_known(self._decided._replace(step=step), told)

    def _told_by_all(self, go: Go) -> list[Decision] | None:
        """What all ranks of the next generation know; None: it was given up, since another rank was lost."""
        channel = self._calls.channel
        rank, world = int(go.environment["RANK"]), int(go.environment["WORLD_SIZE"])
        keys = [f"{DECIDED}/{each}" for each in range(world)]
        try:
            store = store_ahead(go.generation, go.environment)
            self._tell(store, rank)
            while channel.is_due(go):
                if store.check(keys):
                    return [Decision(*json.loads(each)) for each in store.multi_get(keys)]
                time.sleep(ASK_POLL_S)
        except RuntimeError:  # the store is lost: so is this generation
            until_s = time.monotonic() + ASK_S
            while channel.is_due(go):
                if time.monotonic() > until_s:
                    raise
                time.sleep(ASK_POLL_S)
        return None

    def _leave(self) -> None:
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None
        self._snaps._survivor = self._snaps._remaker = None
        self._calls.leave()

    # --- what Snapshots calls ---------------------------------------------------------------------------------------

    def check(self, tracker: Tracker) -> None:
        """Check what is tracked, before it gets its state. Raises TrackingError."""
        for name, model in tracker.named_models():
            if any(self._is_older(each) for each in model.modules()):
                raise _refusal(f"{name}, which it tracks,", self._function)
        for name, follower in tracker.followers().items():
            if self._is_older(follower) and not getattr(follower, "_follows_group", True):
                raise _refusal(f"{name}, which has ranks of its own,", self._function)
        tracker.random_record = RandomRecord.at(self._snaps.memory_place, RandomNumbers().states)
        if not self._checked:
            self._checked = True
            check_function(self._function, tracker)
            self._first_states = FirstStates(tracker.others)

    def begin_anew(self, tracker: Tracker) -> None:
        """A call found no state and begins at step 0: objects that were made before the function have seen steps."""
        self._calls.refusing_errors(lambda: self._first_states.give_back(tracker.others))

    def resumed(self, steps_lost: int) -> bool:
        """Everything that is tracked has its state. `steps_lost`: steps that are done again. Returns whether a rank
        leaves its state for others when one is lost (replica_state.py); equal on all ranks."""
        self._snaps._made_in = name_of(self._function)
        tracker, report = self._snaps._tracker, self._calls.functions.report
        if report is not None:
            report.step, report.steps_lost = self._snaps._tracker.step, steps_lost
        self._unsaved = None
        if not self._unsaved_known and enabled() and (unsaved := UnsavedBuffers(tracker.named_models())).any:
            self._unsaved = unsaved
        for parameter in (each for model in tracker.models for each in model.parameters()):
            parameter.grad = None  # it may have been made before: then it has a part of a step that is given up
        for each in tracker.others.values():
            if isinstance(each, GradScaler):  # it may have been made before: then it has noted a step that is given up
                torch_private.forget_steps(each)
        self._optimizers = UntrackedOptimizers(tracker.models, tracker.optimizers, tracker.others.values())
        if why := why_data_stay(tracker):
            self.withdraw(why)
        elif not self._snaps.memory_place:
            self.withdraw("states are not in memory, from which the ranks could go on")
        elif not self._snaps._replicas_differ:
            self._replicas = replica_state(tracker, self._snaps.memory_place, self._calls.group.world)
        return self._agree_on_steps()

    def _agree_on_steps(self) -> bool:
        """Let the ranks agree on each step before an optimizer changes anything, if they have replicas of each part.
        All ranks call this. Returns whether one of them has such replicas."""
        group, replicas, place = self._calls.group, self._replicas, self._snaps.memory_place
        if group.world == 1:
            return False
        # A world may have several calls of resume(): each needs messages of its own.
        store = dist.PrefixStore("steps", group.store)
        peers = Peers.meeting(store, group.rank, group.world, call="ht.survive (resume() in its function)")
        answers = peers.all_gather([_identity(place) if replicas is not None else "", secrets.token_hex(32)])
        places, word = [where for where, _ in answers], answers[0][1]
        self._decided = Decision(word[:16], 0)  # nobody has an open step of an earlier world any more
        if replicas is None or not all(places):
            return any(places)
        own = [rank for rank, where in enumerate(places) if where == places[group.rank]]
        one_node, speaker = len(own) == group.world, None
        if not one_node:
            found = meet(peers, places, key_of_life(Path(place), word), self._calls.is_cut)
            if isinstance(found, NoAgreement):
                self._warn_of_no_agreement(found)
                return True
            links = found
            if links:
                decides = group.rank == 0
                speaker = Speaker(links, decides=decides, await_news=lambda limit_s: await_news(links, limit_s))
        path = os.path.join(place, f"{word[:16]}.steps")
        with contextlib.suppress(OSError):  # without room for it, no step is ever decided
            replicas.agree(StepAgreement(path, own.index(group.rank), len(own), speaker, one_node=one_node))
        return True

    def _warn_of_no_agreement(self, why: NoAgreement) -> None:
        """Say once, on rank 0, what is not promised in this job."""
        if self._calls.group.rank == 0 and not self._warned:
            self._warned = True
            sys.stderr.write(
                f"holdfast: ht.survive: the ranks of several nodes do not agree on each step: {why.value}; a rank that "
                "is lost in an exchange of gradients may cost the steps since the last state in memory (memory_every=)"
                "\n"
            )

    def outlives(self, error: BaseException) -> bool:
        """Whether this process goes on after the error, which is the consequence of a loss."""
        return not self._calls.withdrawn and self._calls.is_consequence(error)

    def at_boundary(self) -> None:
        """A step is complete. Raises Released if the training function is to be left here, and TrackingError if an
        optimizer is not tracked."""
        # After a step's work the processor's caches have none of this, and each call costs about a microsecond: so
        # what has nothing to do is not called.
        if self._optimizers is not None and self._optimizers.found:
            self._optimizers.check()
        if self._replicas is not None:
            self._replicas.mark()
        if self._unsaved is not None:
            self._look_at_unsaved(self._unsaved)
        calls = self._calls
        if calls.functions.report is not None:
            calls.step_is_done()
        if calls.channel.released is not None:
            calls.leave_if_cut()

    def _look_at_unsaved(self, unsaved: UnsavedBuffers) -> None:
        """Warn, once, of buffers that training changes and that no state has."""
        changed = unsaved.at_step()
        if changed is None:
            return
        self._unsaved, self._unsaved_known = None, True
        if changed:
            warnings.warn(
                f"holdfast: ht.survive: training changes {changed[0]}, a buffer with persistent=False: no state has it,"
                " and after a loss it has its first value. If its value counts: register_buffer(…, persistent=True)",
                GuardWarning,
                stacklevel=5,
            )

    def withdraw(self, why: str) -> None:
        """Make this a plain call from now on: a loss is not survived any more. `why`: the reason, for a message."""
        if self._calls.withdraw(why, self._leave):
            self._snaps._not_survived = why

    def _note_stepping(self, optimizer: Optimizer, *_: Any) -> None:
        optimizers, replicas = self._optimizers, self._replicas
        if optimizers is None or not (id(optimizer) in optimizers.tracked or optimizers.note(optimizer)):
            return
        if replicas is None or replicas.stepping:
            return
        if not replicas.begin_stepping(self._calls.is_cut, self._is_known):
            raise Released

    # --- what was made before ---------------------------------------------------------------------------------------

    def _check_made_before(self) -> None:
        used = list(used_by(self._function))
        for name, each in used:
            if isinstance(each, (DeviceMesh, dist.ProcessGroup)):
                raise _refusal(f"{name}, a {type(each).__name__},", self._function)
        check_not_sharded(((name, each) for name, each in used if isinstance(each, nn.Module)), self._function)
        # Not all that the function uses is found by its names.
        rest = (each for reference in self._older.values() if (each := reference()) is not None)
        modules = ((f"a {type(each).__name__}", each) for each in rest if isinstance(each, nn.Module))
        check_not_sharded(modules, self._function, recurse=False)

    def _is_older(self, each: object) -> bool:
        reference = self._older.get(id(each))
        return reference is not None and reference() is each


def check_not_sharded(
    modules: Iterable[tuple[str, nn.Module]], function: Callable[..., Any], *, recurse: bool = True
) -> None:
    """Raise MadeBeforeError if one of these modules, each with its name, is sharded: they were made before the
    function. `recurse`: look at the modules within as well."""
    for name, each in modules:
        if is_sharded(each, recurse=recurse):
            raise _refusal(f"{name}, which is sharded,", function)


def _identity(folder: str) -> str:
    """Names this folder among those of all nodes."""
    try:
        found = os.stat(folder)
    except OSError:
        return ""
    return f"{boot_id()} {found.st_dev}:{found.st_ino}"


def _refusal(what: str, function: Callable[..., Any]) -> MadeBeforeError:
    name = f"{name_of(function)}()"
    return MadeBeforeError(
        f"ht.survive: {what} was made before {name}, and ends with the ranks that it was made for: make it in {name}, "
        "with its optimizer, and call snaps.track() and snaps.resume() there"
    )


def _modules_and_data() -> dict[int, weakref.ref[Any]]:
    """All modules of this process, and our loaders and samplers, by their identities."""
    gc.collect()  # a module that is not used any more is no reason to refuse
    kinds = (nn.Module, DataLoader, DistributedSampler)
    # Not isinstance: an object that stands for another one may answer it with work of its own.
    return {id(each): weakref.ref(each) for each in gc.get_objects() if issubclass(type(each), kinds)}
