"""Decides what `ht.survive` can carry over the loss of a rank, before the training function is called.

There are three answers: a loss can be survived; `ht.survive` is a plain call, for a `PlainCallReason`; or the program
has a mistake by which ranks would differ without any error, and a TrackingError names it.

An object with a state that the function uses, and that is not tracked, is such a mistake: a replacement would begin
with a new one, and a step that is given up would stay in it. Such objects are found by the names that the function
uses: in its closure, among the globals, and, for a method, among the attributes of its object. Objects that are hidden
deeper are not found."""

from __future__ import annotations

import inspect
import os
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from holdfast.protocol.errors import TrackingError
from holdfast.protocol.train_contract import SURVIVE_VARIABLE, Survive
from holdfast.train import torch_private
from holdfast.train.group import ProcessGroup
from holdfast.train.guards import GuardWarning, enabled
from holdfast.train.own_objects import is_data, unknown_data
from holdfast.train.replicas import total
from holdfast.train.state import Tracker


class PlainCallReason(Enum):
    """A reason why `ht.survive` is a plain call. The values complete the message "a plain call, because "."""

    NO_GROUP = "there is no ht.process_group()"
    OWN_GROUP = "the program has made the process group itself"
    OFF = "--survive off was given"
    NO_AGENT = "no agent of holdfast started this process"
    TORCH = "this version of torch was never tried"
    DDP = "a DDP module, or its process group, cannot be set up again for other ranks"
    OTHER = "replacements join in the resume() of other Snapshots, which comes first in this program"
    DIFFER = "the ranks have different parameters, and one could not take the state of another"
    DATA = "a tracked object hands out data and cannot follow another number of ranks"


@dataclass(frozen=True)
class PlainCall:
    """The answer that `ht.survive` is a plain call."""

    why: PlainCallReason
    detail: str = ""
    """The part of the program that is the reason."""

    def __str__(self) -> str:
        return f"a plain call, because {self.why.value}{f' ({self.detail})' if self.detail else ''}"


def surviving_mode() -> Survive:
    """The value of --survive, as far as this process knows."""
    return Survive(os.environ.get(SURVIVE_VARIABLE) or Survive.SHRINK.value)


def why_alone(group: ProcessGroup | None) -> PlainCall | None:
    """The answer that a loss cannot be survived, whatever is trained; None: it can."""
    if group is None:
        return PlainCall(PlainCallReason.NO_GROUP)
    if group.connection is None:
        return PlainCall(PlainCallReason.OWN_GROUP)
    return PlainCall(PlainCallReason.OFF) if surviving_mode() is Survive.OFF else None


def why_not_made_again(group: ProcessGroup | None) -> PlainCall | None:
    """The answer that a loss cannot be survived by a function that makes its models; None: it can."""
    if why := why_alone(group):
        return why
    missing = torch_private.mesh_names_missing()
    return PlainCall(PlainCallReason.TORCH, missing) if missing else None


def why_plain(group: ProcessGroup | None, tracker: Tracker) -> PlainCall | None:
    """The answer that a loss cannot be survived with these models, which were made before the function, with its
    reason; None: it can."""
    if why := why_alone(group):
        return why
    if any(map(is_sharded, tracker.models)):
        return None  # it is refused
    if reason := tracker.reducers.begin():
        return PlainCall(PlainCallReason.DDP, reason)
    detail = _data_that_stay(tracker)
    return PlainCall(PlainCallReason.DATA, detail) if detail else None


def is_sharded(model: nn.Module, *, recurse: bool = True) -> bool:
    """Whether parameters or buffers of the module are sharded over ranks, or replicated as DTensors."""
    return any(isinstance(each, DTensor) for each in (*model.parameters(recurse), *model.buffers(recurse)))


def why_data_stay(tracker: Tracker) -> str:
    """The reason why tracked data cannot follow another number of ranks; empty: they can, or need not."""
    detail = _data_that_stay(tracker)
    return f"{PlainCallReason.DATA.value} ({detail})" if detail else ""


def _data_that_stay(tracker: Tracker) -> str:
    data = [f"{name}: {type(each).__name__}" for name, each in unknown_data(tracker.others).items()]
    if not data or surviving_mode() is Survive.WAIT:
        return ""
    return f"{', '.join(data)}; --survive wait can carry it, and so can a method regroup(rank, world)"


# --- what the function uses -------------------------------------------------------------------------------------------


def check_function(function: Callable[..., Any], tracker: Tracker) -> None:
    """Raise TrackingError for a schedule, scaler, optimizer or averaged model that the function uses and that is not
    tracked; warn of other objects with a state, and of variables of its surroundings that it assigns."""
    tracked = {id(each) for each in (*tracker.models, *tracker.optimizers, *tracker.others.values())}
    name_of_function = name_of(function)
    moves: list[str] = []
    for name, each in used_by(function):
        if id(each) in tracked or not _has_a_state(each, tracked):
            continue
        if isinstance(each, _OF_TORCH):
            raise TrackingError(
                f"ht.survive: {name_of_function}() uses {name} (a {type(each).__name__}), which is not tracked\n"
                "a step that is given up would stay in it, and a replacement would begin with another one: "
                f"track({name.rpartition('.')[2]}=…)"
            )
        moves.append(name)
    moves += sorted(_assigned(function))
    if moves and enabled():
        warnings.warn(
            f"holdfast: {name_of_function}() uses or assigns {', '.join(moves)}, with a state that is not tracked. "
            "When a rank is lost the function is called again, and what the step that is given up did to it stays.\n"
            "Keep such values in an object with state_dict() and load_state_dict(), and track that.",
            GuardWarning,
            stacklevel=4,
        )


_OF_TORCH = (LRScheduler, GradScaler, Optimizer, AveragedModel)
"""Classes whose objects change in a training that uses them."""


def _has_a_state(each: Any, tracked: Collection[int]) -> bool:
    """Whether the object changes as training goes on: a schedule, a scaler, early stopping. Three kinds do not count:
    modules, since many are never trained (see UntrackedModules); objects that hand out data, since an evaluation's
    loader needs no state; and objects that gather tracked ones, as the state for torch.distributed.checkpoint does."""
    if isinstance(each, AveragedModel):
        return True
    if isinstance(each, (type, types.ModuleType, nn.Module)) or is_data(each):
        return False
    if isinstance(each, GradScaler) and not each.is_enabled():
        return False
    try:
        has_a_state = callable(each.state_dict) and callable(each.load_state_dict)
        parts = [*vars(each).values()]
    except Exception:  # noqa: BLE001 - an attribute of another library's proxy may raise anything
        return False
    return has_a_state and (isinstance(each, _OF_TORCH) or not any(id(part) in tracked for part in parts))


class UntrackedModules:
    """The modules with a state that the function uses and that are no part of a tracked model. Most of them never
    change: losses, frozen teachers. So they are compared in some steps. What a module does not save is left out: a
    table that is made when it is needed."""

    def __init__(self, function: Callable[..., Any], tracker: Tracker) -> None:
        parts = [part for model in tracker.models for part in (*model.modules(), *model.parameters())]
        inside = [
            value for each in tracker.others.values() if hasattr(each, "__dict__") for value in vars(each).values()
        ]
        parts += [part for each in inside if isinstance(each, nn.Module) for part in each.modules()]
        self._tracked = {id(each): each for each in parts}
        self._found: dict[str, list[nn.Module]] = {}
        self._function = name_of(function)
        for name, each in used_by(function):
            if isinstance(each, nn.Module):
                self._find(name, each)
        self._digests = {name: self._digest(modules) for name, modules in self._found.items()}

    def _find(self, name: str, module: nn.Module) -> None:
        """Note the largest modules in this one that have no part of a tracked model. Sharded ones are left out: FSDP2
        exchanges their parameters in each pass."""
        if id(module) in self._tracked or is_sharded(module):
            return
        within = list(module.modules())
        if not any(id(each) in self._tracked for each in within):
            self._found[name] = within
            return
        self._found[name] = [module]
        for path, child in module.named_children():
            self._find(f"{name}.{path}", child)

    def _digest(self, modules: Sequence[nn.Module]) -> str:
        tensors = []
        for each in modules:
            unsaved = torch_private.unsaved_buffers_of(each)
            saved = (buffer for name, buffer in each.named_buffers(recurse=False) if name not in unsaved)
            tensors += [part for part in (*each.parameters(recurse=False), *saved) if id(part) not in self._tracked]
        return total([each for each in tensors if type(each) in _PLAIN_TENSORS and _has_values(each)])

    def warn_of_changes(self) -> None:
        """Warn of those that have changed since the beginning, once."""
        changed = [name for name, digest in self._digests.items() if self._digest(self._found[name]) != digest]
        for name in changed:
            del self._digests[name]
        if changed and enabled():
            warnings.warn(
                f"holdfast: {self._function}() uses {', '.join(changed)}: training changes the state of such a module, "
                "and it is not tracked. When a rank is lost, what the step that is given up did to it stays, and a "
                "replacement begins with a new one.\n"
                f"Track it: track({changed[0].rpartition('.')[2]}=…)",
                GuardWarning,
                stacklevel=5,
            )


_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "the training function")


def used_by(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The names that the function uses from outside of it, with their values."""
    plain, owner = _plain(function)
    if plain is None:
        return
    attributes = {name for code in _codes(plain.__code__) for name in code.co_names}
    for name, each in vars(owner).items() if hasattr(owner, "__dict__") else ():
        if name in attributes:
            yield f"self.{name}", each
    for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # the variable is assigned later
    names = {name for operation, name in _operations(plain) if operation in ("LOAD_GLOBAL", "LOAD_NAME")}
    yield from ((name, plain.__globals__[name]) for name in sorted(names & plain.__globals__.keys()))


def _assigned(function: Callable[..., Any]) -> set[str]:
    """Variables of its surroundings that the function assigns (`nonlocal`, `global`)."""
    plain, _ = _plain(function)
    if plain is None:
        return set()
    shared = set(plain.__code__.co_freevars)
    operations = _operations(plain)
    return {
        name
        for operation, name in operations
        if operation == "STORE_GLOBAL" or (operation == "STORE_DEREF" and name in shared)
    }


def _plain(function: Callable[..., Any]) -> tuple[types.FunctionType | None, object]:
    """The function without decorators (None: it is not written in Python), and the object of which it is a method."""
    unwrapped = inspect.unwrap(function)
    owner = getattr(unwrapped, "__self__", None)
    plain = getattr(unwrapped, "__func__", unwrapped)
    return (plain if isinstance(plain, types.FunctionType) else None), owner


def _operations(function: types.FunctionType) -> list[tuple[str, str]]:
    """The instructions of the function and of those within it: the name of each operation, and that of its operand."""
    import dis  # imported here: it takes 5 ms

    return [
        (each.opname, str(each.argval))
        for code in _codes(function.__code__)
        for each in dis.get_instructions(code)
        if each.opname != "STORE_DEREF" or each.argval in code.co_freevars
    ]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of those within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
