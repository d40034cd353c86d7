"""Calls a training function in one generation after the other, in the same process: what all of `ht.survive` shares.

When a rank is lost, or at a safe point at which ranks join or leave, the function is left by an exception. The process
waits (agent_channel.py) for its rank in the next generation, joins that, and calls the function again. What
becomes of the state in between is decided by the `Rank`: survival.py keeps the model, remaking.py lets the function
make it again.

Knows the process group and the channel to the agent. Must not know what is trained.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist

from holdfast.protocol.errors import HoldfastError, NoValidSnapshotError, ReplicasDifferError, TrackingError
from holdfast.protocol.train_contract import REPLACEMENT_VARIABLE, WHY_CHARACTERS_MAX
from holdfast.train.accumulation import forget_pending
from holdfast.train.agent_channel import AgentChannel, ChannelLostError, Go, Release
from holdfast.train.agreement import Peers
from holdfast.train.boundary import Rates
from holdfast.train.group import LONE_EXIT_PATIENCE_S, ProcessGroup, regroup
from holdfast.train.mistakes import SharedFacts
from holdfast.train.random_numbers import States
from holdfast.worker import drain

T = TypeVar("T")

NEWS_S = 5.0
"""Limit of the wait for the news that a rank was lost, after an error of the process group. Without that news the error
is the program's own."""
STOP_S = 60.0
"""Limit of the wait to be stopped, after this rank has refused to go on."""


class Released(BaseException):
    """The exception by which the training function is left; it is then called again in another world. No Exception:
    the program's own handlers must not catch it."""


@dataclass
class RegroupReport:
    """The report to the agent about a regroup, which is sent after the first step of the new generation."""

    began_s: float
    step: int | None = None
    """The step from which training goes on; None: not known yet."""
    steps_lost: int = 0
    """The number of steps that some rank has completed and that are done again."""


@dataclass
class FunctionsCalled:
    """The training functions that this process has called with one `Snapshots`, one after the other, and what a call of
    the next one takes over from the call before."""

    count: int = 0
    """The number of functions so far. The same on all ranks in each step: they call them in the same order."""
    joined_in: int = 0
    """The number of the function in which the others were when this process joined them as a replacement; 0: it was
    started with them. It comes there through all functions before, which have nothing left to do."""
    random: States | None = None
    """The random numbers of the lost rank, until this process has come to that function; None: it has."""
    rates: Rates | None = None
    """The rates with which the others train, until then: code on the way to that function may change them again, and
    each rank would train with another one."""
    generation: int = 0
    """The current generation; 0: the one in which this process was started, whose number it does not know."""
    report: RegroupReport | None = None
    """The report that is sent with the first step of a new generation; None: none is due."""
    seeded: bool = False
    """Whether this process got new random numbers in the present world, and has done no step with them."""
    equal_generators: list[str] | None = None
    """The random generators from which all ranks draw the same numbers; None: not known yet."""
    equal_objects: list[str] = field(default_factory=list)
    """The tracked objects that were equal on all ranks when these were compared last."""


class Rank(Protocol):
    """What happens to the state of this rank when the training function is left and called again."""

    def begin_call(self) -> None:
        """The function is called next."""

    def may_interrupt(self) -> bool:
        """Whether the main thread may be interrupted now, inside the call of a module."""

    def at_safe_point(self, release: Release) -> None:
        """All ranks leave the function at this safe point."""

    def leave_world(self) -> None:
        """Let go of the old world, before this process has a place in the next one."""

    def enter_world(self, go: Go, report: RegroupReport) -> None:
        """Enter the next world (`GenerationCalls.enter`). It completes the report if it can.

        If a rank is lost meanwhile, this is left by an exception, and called again with another place. So whatever of
        the state it changes, it changes in one go, without a wait for other ranks."""

    def step(self) -> int:
        """The number of steps so far."""


class GenerationCalls:
    """The calls of one training function in one process."""

    def __init__(
        self,
        group: ProcessGroup,
        channel: AgentChannel,
        functions: FunctionsCalled,
        ranks: Callable[[int], int] = lambda world: world,
    ) -> None:
        """`functions`: those that were called before, and what this call takes over. `ranks`: the number of ranks that
        train, of those that are there."""
        assert group.connection is not None
        self.group, self.channel, self._ranks = group, channel, ranks
        self._connection = group.connection
        self.functions = functions
        self.withdrawn = False
        """Whether a loss is not survived any more."""

    @property
    def generation_store(self) -> Any:
        """`GroupConnection.generation_store`."""
        return self._connection.generation_store

    def run(self, train: Callable[[], T], rank: Rank) -> T:
        """Call the function until it returns, or raises an exception that is not the consequence of a loss."""
        with contextlib.ExitStack() as hooks:
            hooks.callback(drain.before_stop, None)
            drain.before_stop(lambda: self._at_safe_point(rank))
            self._connection.outlives = self.is_consequence
            while True:
                try:
                    try:
                        rank.begin_call()
                        # From here on the main thread may be interrupted.
                        self.channel.train(self._cut, rank.may_interrupt, Released)
                        self.channel.say("can_go_on", generation=self.functions.generation)
                        return train()
                    finally:
                        self.channel.arrive()  # otherwise an interruption could come in the code that follows
                except BaseException as error:
                    if self.withdrawn or not self.is_consequence(error):
                        self._announce_exit(error, rank.step())
                        raise
                    # The function's variables belong to the old world, and must not outlive it.
                    traceback.clear_frames(error.__traceback__)
                self._regroup(rank)

    def _announce_exit(self, error: BaseException, step: int) -> None:
        """Print it, if this rank ends by `sys.exit(0)` in its training function: that is no loss, and the others cannot
        go on without it. The wait for a common end is short then: if the others do not end as well, they have to notice
        this soon."""
        if isinstance(error, SystemExit) and error.code in (None, 0) and not drain.stopping() and self.group.world > 1:
            self._connection.exit_patience_s = LONE_EXIT_PATIENCE_S
            sys.stderr.write(
                f"holdfast: rank {self.group.rank} ends: sys.exit(0) in its training function after step {step}. It is "
                "no loss, and the other ranks have to end as well.\n"
            )

    def leave(self) -> None:
        """Tell the agent that this process cannot survive a loss any more, and close the channel."""
        self.withdrawn = True
        self._connection.outlives = None
        self._connection.entering = lambda _: None
        with contextlib.suppress(ChannelLostError):
            self.channel.say("unable")
        self.channel.close()

    def withdraw(self, why: str, leave: Callable[[], object]) -> bool:
        """Make this a plain call from now on: print why a loss is not survived any more, and `leave`, which calls
        `self.leave`. False: it is one already. One rank alone may have found the reason; if several have, the first of
        them prints it."""
        if self.withdrawn:
            return False
        group = self.group
        if SharedFacts(group.rank, group.world, group.store).count("survive/withdrawn", 1) <= 1:
            seen = f", as rank {group.rank} has found" if group.world > 1 else ""
            sys.stderr.write(f"holdfast: ht.survive: {why}{seen}; if a rank is lost, all are started again\n")
        leave()
        drain.before_stop(None)
        return True

    # --- leaving the old world --------------------------------------------------------------------------------------

    def step_is_done(self) -> None:
        """Send the report, with a generation's first step."""
        report, self.functions.report = self.functions.report, None
        if report is not None:
            seconds = round(time.monotonic() - report.began_s, 3)
            about: dict[str, Any] = {"step": report.step or 0, "steps_lost": report.steps_lost, "seconds": seconds}
            with contextlib.suppress(ChannelLostError):
                self.channel.say("went_on", generation=self.functions.generation, **about)

    def leave_if_cut(self) -> None:
        """Raise Released if the function has to be left at once."""
        if self.is_cut():
            raise Released

    def is_cut(self) -> bool:
        """Whether a rank was lost, so that the function has to be left at once."""
        release = self.channel.released
        return release is not None and release.at_once

    def _at_safe_point(self, rank: Rank) -> None:
        """Handle the order to all ranks to stop after this step. Raises Released if they only regroup."""
        release = self.channel.catch_up()
        if release is not None:
            rank.at_safe_point(release)
            if release.leaves:
                drain.stop()
            raise Released

    def _cut(self) -> None:
        """End every wait in the process group. The channel's thread calls this."""
        self._connection.end_operations()

    def is_consequence(self, error: BaseException) -> bool:
        """Whether a loss, or a regroup, made the training function raise this. For an error of the process group it
        waits for the news of a loss, which may come later than the error."""
        if isinstance(error, Released):
            return True
        # torch does not know a group that was aborted any more: the next call of the program raises ValueError.
        forgotten = isinstance(error, ValueError) and self._connection.on_nccl and not dist.is_initialized()
        if not forgotten and not isinstance(error, (RuntimeError, HoldfastError, ConnectionError)):
            return False
        if isinstance(error, (torch.OutOfMemoryError, TrackingError, ReplicasDifferError, NoValidSnapshotError)):
            return False
        release = self.channel.catch_up()
        if (release is None or not release.at_once) and _is_of_the_group(error):
            release = self.channel.await_immediate(NEWS_S)
        return release is not None and release.at_once

    # --- entering the new one ---------------------------------------------------------------------------------------

    def _regroup(self, rank: Rank) -> None:
        """Enter the next generation."""
        report = RegroupReport(time.monotonic())
        self.channel.arrive()
        self.refusing_errors(rank.leave_world)
        self.entering(lambda go: rank.enter_world(go, report))
        self.functions.report = report

    def entering(self, work: Callable[[Go], T]) -> T:
        """Wait for a place in the next generation, and do the work that enters it. If another rank is lost meanwhile,
        come back and do it again. If it fails otherwise, all ranks restart."""
        while True:
            go = self.channel.await_go(self._cut)
            try:
                found = work(go)
                self.leave_if_cut()
            except ChannelLostError:
                raise
            except (Exception, Released) as error:  # noqa: BLE001 - whatever it is, all ranks restart
                if not self.is_consequence(error):
                    self._refuse(error)
                traceback.clear_frames(error.__traceback__)
                self.channel.arrive()
            else:
                return found

    def refusing_errors(self, work: Callable[[], T]) -> T:
        """Do the work. If it fails, whatever the error is, all ranks restart."""
        try:
            return work()
        except ChannelLostError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, all ranks restart
            self._refuse(error)

    def enter(self, go: Go) -> Peers | None:
        """Join the world of this generation: environment, process group. Nothing of the old one may be in use. Returns
        its ranks; None: this rank is a spare."""
        os.environ.update(go.environment)
        os.environ.pop(REPLACEMENT_VARIABLE, None)
        drain.begin_again()
        self.functions.generation = go.generation
        forget_pending()
        peers = regroup(self.group, go.generation, self._ranks)
        self.leave_if_cut()
        return peers

    def on_entering(self, tell: Callable[[Any, int], object]) -> None:
        """Call this with the store of each further generation, and this process's rank there, before its ranks wait for
        each other."""
        self._connection.entering = lambda store: tell(store, int(os.environ["RANK"]))

    def leave_out_spares(self) -> Peers | None:
        """Form the first world again, without the ranks that do not train. All ranks call this. Returns the ranks that
        train; None: this rank is a spare."""
        # Who has come here is in no collective operation of the program any more, which would fail with the group.
        Peers(self.group.rank, self.group.world, dist.PrefixStore("spares", self.group.store)).all_gather(0)
        return regroup(self.group, self.functions.generation, self._ranks)

    def _refuse(self, error: BaseException) -> NoReturn:
        """Let all ranks be restarted, and wait for that. Raising the exception here would make it look like the cause
        of the loss."""
        self.channel.say("refuse", why=f"{type(error).__name__}: {error}"[:WHY_CHARACTERS_MAX])
        time.sleep(STOP_S)
        raise error


def _is_of_the_group(error: BaseException) -> bool:
    """Whether a collective operation or the store raised this."""
    if isinstance(error, (dist.DistError, ConnectionError, HoldfastError)):
        return True
    # gloo raises a plain RuntimeError: only its text says where it comes from.
    text = str(error)
    return any(word in text for word in ("gloo", "Connection closed by peer", "NCCL", "TCPStore"))
