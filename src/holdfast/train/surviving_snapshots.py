"""What `ht.survive` needs of Snapshots, and they of it: neither side imports the other.

Snapshots hold all that is tracked, saved and restored. In `ht.survive` a call of the training function goes on in one
world after the other (survival.py), or makes the tracked objects again in each (remaking.py). The names with an
underscore are for these two files alone, and not for programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from holdfast.train.agreement import Peers, Schedule
    from holdfast.train.generation_calls import FunctionsCalled
    from holdfast.train.save import Saving
    from holdfast.train.state import Tracker, TrainState

T = TypeVar("T")


class SurvivingCall(Protocol):
    """The call of a training function in `ht.survive`, as far as its Snapshots know it."""

    def run(self, function: Callable[[], T]) -> T: ...

    def at_boundary(self) -> None: ...

    def withdraw(self, why: str) -> None: ...


class RemakingCall(SurvivingCall, Protocol):
    """The same for a function that makes its model again in each generation."""

    def check(self, tracker: Tracker) -> None: ...

    def begin_anew(self, tracker: Tracker) -> None: ...

    def resumed(self, steps_lost: int) -> bool: ...

    def outlives(self, error: BaseException) -> bool: ...


class SnapshotsLike(Protocol):
    """Snapshots, as far as such a call knows them. The attributes are explained where they are made."""

    _functions: FunctionsCalled | None
    _made_in: str
    _new_world: tuple[Peers, int] | None
    _not_survived: str
    _remaker: RemakingCall | None
    _survival_said: bool
    _survivor: SurvivingCall | None
    _unsaved: str
    _durable_epoch: int
    _saving: Saving | None
    _schedule: Schedule
    _tracker: Tracker

    @property
    def state(self) -> TrainState: ...

    @property
    def resumed(self) -> bool: ...

    @property
    def memory_place(self) -> str: ...

    @property
    def _is_joined_in(self) -> bool: ...

    @property
    def _replicas_differ(self) -> bool: ...

    def _go_on(self, peers: Peers, generation: int, schedule: Sequence[int], durable: Sequence[Any]) -> None: ...

    def _let_go(self) -> None: ...

    def _rest(self) -> None: ...

    def _save_at_safe_point(self, *, leaves: bool, nodes: int) -> None: ...

    def _stop_saving(self) -> Saving | None: ...
