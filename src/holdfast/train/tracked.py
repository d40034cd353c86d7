"""Models and optimizers: their live tensors, by the names of torch's get_state_dict, and the way to fill these again.

Those names do not depend on DDP, FSDP2 or compile: `model.<fqn>` and `optimizer.state.<fqn>.<what>`.

Each rank compares what it tracks with what was saved (`Compared`); the findings of all ranks are put together
(`together`), so that every rank restores the same and raises the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.protocol.errors import ShardingError, StateMismatchError, TrackingError
from holdfast.text import listed
from holdfast.train import state_codec as codec
from holdfast.train import torch_private
from holdfast.train.agreement import Peers
from holdfast.train.reading import Saved
from holdfast.train.sharding import local_tensor

NAMES_MAX = 8
"""Limit of the names of each kind in a message."""


@dataclass(frozen=True)
class Choice:
    """The arguments of `Snapshots.resume()`."""

    strict: bool = True
    only: frozenset[str] | None = None
    optional: frozenset[str] = frozenset()

    @classmethod
    def of(cls, strict: bool, only: Iterable[str] | None, optional: Iterable[str]) -> Choice:
        """Accept a single name instead of a sequence."""
        return cls(strict, None if only is None else _names(only), _names(optional))


def _names(given: Iterable[str]) -> frozenset[str]:
    return frozenset([given] if isinstance(given, str) else given)


@dataclass
class Compared:
    """The findings of one rank. Names of tensors are `<object>.<name>`."""

    wanted: frozenset[str] = frozenset()
    """Objects to restore."""
    held: set[str] = field(default_factory=set)
    """Names of all tensors and objects that this rank tracks: in a pipeline another rank has others."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """Names that the snapshot lacks, by tracked object: the object itself or parts of it."""
    unexpected: list[str] = field(default_factory=list)
    """Names that the snapshot has and this rank does not have."""
    problems: dict[str, str] = field(default_factory=dict)
    """The reason why an object does not fit, by tracked object."""
    converted: dict[str, str] = field(default_factory=dict)
    """A text about tensors whose types differ from those of the snapshot, by tracked model."""


@dataclass(frozen=True)
class Fit:
    """The agreement on what is restored; equal on all ranks."""

    restored: frozenset[str]
    """The objects that get their state."""
    missing: frozenset[str] = frozenset()
    """The tensors of these objects that keep their present values."""
    optional: frozenset[str] = frozenset()
    """Objects that keep their initial state when they refuse the saved one."""
    notes: tuple[str, ...] = ()
    """Differences from the saved state, for a warning."""


def together(peers: Peers, mine: Compared, choice: Choice) -> Fit:
    """Combine the findings of all ranks; every rank calls this. Raises StateMismatchError, on all of them."""
    reports = peers.all_gather([mine.missing, mine.unexpected, mine.problems, mine.converted])
    missing: dict[str, list[str]] = {}
    problems: dict[str, str] = {}
    converted: dict[str, str] = {}
    left: set[str] = set()
    for lacks, extra, wrong, types in reports:
        for name, parts in lacks.items():
            missing[name] = sorted({*missing.get(name, ()), *parts})
        left |= set(extra)
        problems |= wrong
        converted |= types
    if choice.strict:
        problems = {**converted, **problems}
    if left:  # a part that another rank of a pipeline has is not unexpected
        left = left.difference(*peers.all_gather(sorted(left & mine.held)))

    unfit = {name for name in (*missing, *problems) if name in choice.optional}
    notes = [f"{name} is not restored: {problems.get(name) or _lacking(missing[name])}" for name in sorted(unfit)]
    lacking = [each for name, parts in sorted(missing.items()) if name not in unfit for each in parts]
    unexpected = sorted(each for each in left if each not in choice.optional)
    wrong = [problems[name] for name in sorted(problems) if name not in unfit]
    whole = [name for name, parts in missing.items() if name not in unfit and parts == [name]]
    if wrong or (choice.strict and (lacking or unexpected)):
        raise StateMismatchError(_mismatch(wrong, lacking, unexpected))
    if lacking:
        notes.append(f"not in the snapshot, and left as they are: {listed_names(lacking)}")
    if unexpected:
        notes.append(f"in the snapshot, and not tracked: {listed_names(unexpected)}")
    notes += [text for name, text in sorted(converted.items()) if name not in unfit]
    return Fit(mine.wanted - unfit - set(whole), frozenset(lacking), choice.optional, tuple(notes))


def _lacking(parts: Sequence[str]) -> str:
    return f"the snapshot lacks {listed_names(parts)}"


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def listed_names(names: Sequence[str]) -> str:
    return listed(names, NAMES_MAX)


def _mismatch(wrong: Sequence[str], lacking: Sequence[str], unexpected: Sequence[str]) -> str:
    lines = [*wrong]
    if lacking:
        lines.append(f"tracked now, and not in the snapshot: {listed_names(lacking)}")
    if unexpected:
        lines.append(f"in the snapshot, and not tracked now: {listed_names(unexpected)}")
    return "\n".join(
        [
            *lines,
            "Track what was saved; or call resume(optional=[name, …]) to leave out tracked objects that do not fit,",
            "resume(only=[name, …]) to restore these alone, resume(strict=False) to restore what is on both sides,",
            "and to convert numbers to the types of what is tracked now.",
        ]
    )


def optimizer_problem(name: str, saved_state: Mapping[str, Any], kind: str, defaults: Iterable[str], kinds: Any) -> str:
    """The reason why this optimizer cannot continue from that state; empty: its class allows it. `kinds`: the names of
    classes in the snapshot."""
    was = kinds.get(name)
    if was is not None:
        return "" if was == kind else f"{name} is a {kind} now, and a {was} in the snapshot"
    # A snapshot that does not name the class: if only one side has options that the other lacks, the version of torch
    # differs; if both have, the class does.
    saved = {key for group in saved_state["groups"] for key in group} - {"initial_lr"}
    now = set(defaults)
    if now - saved and saved - now:
        return (
            f"{name} is a {kind} now, and another optimizer in the snapshot: "
            f"that has the options {listed_names(sorted(saved - now))}, not {listed_names(sorted(now - saved))}"
        )
    return ""


def groups_problem(name: str, now: Sequence[Sequence[str]], then: Sequence[Sequence[str]]) -> str:
    """The difference between these parameter groups, given by names, and those of the snapshot; empty: there is
    none."""
    if [sorted(each) for each in now] == [sorted(each) for each in then]:
        return ""
    counted = f"{name} has other parameter groups than the one in the snapshot: {len(now)}, then {len(then)}"
    if len(then) > len(now) and [sorted(each) for each in then[: len(now)]] == [sorted(each) for each in now]:
        return f"{counted}; a group was added after training had begun: call add_param_group() before resume(), too"
    flat_now, flat_then = {each for group in now for each in group}, {each for group in then for each in group}
    if flat_now - flat_then:
        counted += f"; new: {listed_names(sorted(flat_now - flat_then))}"
    if flat_then - flat_now:
        counted += f"; gone: {listed_names(sorted(flat_then - flat_now))}"
    return counted


class Role(Enum):
    """The role of a tensor."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    """Each rank may have its own values: statistics of BatchNorm, numbers that a module draws."""
    OPTIMIZER = "optimizer"


def trained(tensors: Mapping[str, torch.Tensor], roles: Mapping[str, Role]) -> dict[str, torch.Tensor]:
    """The tensors among these that training changes: it may write numbers into them that are not finite. In a frozen
    parameter or a buffer such numbers are intended (a mask). A tensor without a role belongs to an optimizer."""
    return {
        name: each
        for name, each in tensors.items()
        if (role := roles.get(name, Role.OPTIMIZER)) is Role.OPTIMIZER
        or (role is Role.PARAMETER and each.requires_grad)
    }


@dataclass
class Targets:
    """The shared tensors of a state that is to be restored."""

    fill: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that have to be filled, by name."""
    filled: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that have their values already, by name."""
    roles: dict[str, Role] = field(default_factory=dict)
    """The roles of the tensors that belong to models, by name."""

    def all(self) -> dict[str, torch.Tensor]:
        return {**self.fill, **self.filled}


class Shared:
    """Tensors of models and optimizers, each once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.roles: dict[str, Role] = {}
        self.tied: dict[str, str] = {}
        """Further names of a tensor, and its first one."""
        self._names: dict[int, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a model's tensor under this name, or the name as another one of a tensor that is already there."""
        codec.check_storable(name, tensor)
        first = self._names.setdefault(id(tensor), name)
        if first == name:
            self.tensors[name] = tensor
            self.roles[name] = Role.PARAMETER if isinstance(tensor, nn.Parameter) else Role.BUFFER
        else:
            self.tied[name] = first


class TrackedModel:
    """Tensors of a module by the names that torch's get_model_state_dict gives them."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self._names: dict[str, str] = {}
        self._made: set[str] | None = None
        """Raw names of tensors that `state_dict` makes (an extra state): they cannot be filled in place. None: not
        known yet."""

    def fqn(self, raw: str) -> str:
        """The name without the prefixes of DDP, compile and activation checkpointing."""
        if raw not in self._names:
            found = torch_private.official_names(self.module, raw)
            self._names[raw] = next(iter(found)) if len(found) == 1 else raw
        return self._names[raw]

    def live(self) -> dict[str, Any]:
        """The state, not detached: so tied parameters and buffers are the same object, on every rank."""
        state: dict[str, Any] = self.module.state_dict(keep_vars=True)
        return state

    def collect(self, state: Mapping[str, Any], shared: Shared, encoder: codec.Encoder) -> Any:
        """Add the tensors of the live state to `shared`. Returns the rest, encoded."""
        rest = {}
        if self._made is None:
            live = {id(each) for each in (*self.module.parameters(), *self.module.buffers())}
            self._made = {raw for raw, value in state.items() if id(value) not in live}
        for raw, value in state.items():
            fqn = self.fqn(raw)
            if isinstance(value, torch.Tensor) and raw not in self._made:
                shared.add(f"{self.name}.{fqn}", value)
            else:
                rest[fqn] = encoder.encode(value, f"{self.name}.{fqn}")
        return rest

    def compare(self, saved: Saved, models: Mapping[str, Any], there: Collection[str], found: Compared) -> None:
        """Compare tensors and other entries with those of the snapshot, which contains the objects `there`."""
        shared = Shared()
        rest = {f"{self.name}.{fqn}" for fqn in self.collect(self.live(), shared, codec.Encoder())}
        held = {*shared.tensors, *shared.tied, *rest}
        others = [name for name in there if name.startswith(f"{self.name}.")]
        was = {
            key
            for key in saved.pieces
            if key.startswith(f"{self.name}.") and not any(key.startswith(f"{other}.") for other in others)
        }
        was |= {f"{self.name}.{fqn}" for fqn in codec.section(models, self.name)}
        missing = sorted(({*shared.tensors} | rest) - was)
        if missing:
            found.missing[self.name] = missing
        found.unexpected += sorted(was - held)
        found.held |= held
        types: list[str] = []
        for key, tensor in shared.tensors.items():
            then = saved.whole_shape(key)
            if then is None:
                continue
            if then[0] != tuple(tensor.shape):
                found.problems[self.name] = (
                    f"{key} has the shape {list(tensor.shape)}, and {list(then[0])} in the snapshot"
                )
                break
            if then[1] != tensor.dtype:
                types.append(f"{key} is {_type(tensor.dtype)}, and {_type(then[1])} in the snapshot")
        if types:
            more = f", and {len(types) - 1} more tensors of this model" if len(types) > 1 else ""
            found.converted[self.name] = f"{types[0]}{more}"

    def restore_rest(self, rest: Mapping[str, Any], tensor: codec.Get) -> None:
        """Restore all that is not a tensor; the tensors were filled in place."""
        if rest:
            state = get_model_state_dict(self.module)
            state.update({fqn: codec.decode(value, tensor) for fqn, value in rest.items()})
            set_model_state_dict(self.module, state)


class TrackedOptimizer:
    """An optimizer's state by the names of its parameters, as torch's get_optimizer_state_dict has it.

    That function is not called for a save: it would run `step()` to make state that is not there yet, and renames
    everything each time. Tests compare.
    """

    def __init__(self, name: str, optimizer: Optimizer, models: list[TrackedModel]) -> None:
        self.name, self.optimizer, self._models = name, optimizer, models
        self._fqns: dict[torch.Tensor, str] = {}

    def _fqn(self, parameter: torch.Tensor) -> str:
        if parameter not in self._fqns:
            self._fqns = self._named([each.name for each in self._models])
        return self._known(self._fqns, parameter)

    def _known(self, names: Mapping[torch.Tensor, str], parameter: torch.Tensor) -> str:
        if parameter not in names:
            raise TrackingError(f"{self.name} has parameters of no tracked model: track(model=…, {self.name}=…)")
        return names[parameter]

    def _named(self, models: Collection[str]) -> dict[torch.Tensor, str]:
        """Parameters by their names in a snapshot of these models: with the model's, unless there is only one."""
        alone = next(iter(models)) if len(models) == 1 else None
        return {
            each: model.fqn(raw) if model.name == alone else f"{model.name}.{model.fqn(raw)}"
            for model in self._models
            for raw, each in model.module.named_parameters()
        }

    def _groups_in(self, models: Collection[str]) -> list[list[str]]:
        names = self._named(models)
        return [[self._known(names, each) for each in group["params"]] for group in self.optimizer.param_groups]

    def live(self) -> list[Any]:
        """All entries of the state."""
        held = self.optimizer.state
        return [
            *chain.from_iterable((*group["params"], None) for group in self.optimizer.param_groups),
            *held,
            *chain.from_iterable(held.values()),
            *chain.from_iterable(each.values() for each in held.values()),
        ]

    def groups(self, encoder: codec.Encoder) -> list[Any]:
        """Options of the parameter groups, encoded."""
        return [
            encoder.encode(
                {key: value for key, value in group.items() if key not in ("params", "param_names")},
                f"{self.name}.param_groups[{number}]",
            )
            for number, group in enumerate(self.optimizer.param_groups)
        ]

    def collect(self, shared: Shared, encoder: codec.Encoder) -> Any:
        """Add the tensors to `shared`. Returns the rest without the groups' options, encoded."""
        state: dict[str, dict[str, Any]] = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                held = self.optimizer.state.get(parameter)
                if not held:
                    continue
                fqn = self._fqn(parameter)
                rest: dict[str, Any] = {}
                state[fqn] = rest
                for what, value in held.items():
                    if isinstance(value, torch.Tensor):
                        name = f"{self.name}.state.{fqn}.{what}"
                        codec.check_storable(name, value)
                        shared.tensors[name], shared.roles[name] = value, Role.OPTIMIZER
                        rest[what] = None
                    else:
                        rest[what] = [encoder.encode(value, f"{self.name}.state.{fqn}.{what}")]
        params = [[self._fqn(each) for each in group["params"]] for group in self.optimizer.param_groups]
        # State of no parameter: of the whole optimizer, or of a module. That of parameters that are in no group any
        # more is left out, as torch does.
        more = [
            [encoder.encode(key, f"a key of {self.name}.state"), encoder.encode(value, f"{self.name}.state[{key!r}]")]
            for key, value in self.optimizer.state.items()
            if not isinstance(key, torch.Tensor)
        ]
        return {"params": params, "state": state, **({"more": more} if more else {})}

    def compare(
        self, part: Mapping[str, Any], models: Collection[str], kinds: Mapping[str, str], found: Compared
    ) -> None:
        """Compare class and parameter groups with those of the snapshot, which contains these models."""
        now = self._groups_in(models)
        kind = type(self.optimizer).__name__
        problem = optimizer_problem(self.name, part, kind, self.optimizer.defaults, kinds)
        problem = problem or groups_problem(self.name, now, part["params"])
        if problem:
            found.problems[self.name] = problem

    def targets(self, saved: Saved, part: Mapping[str, Any], models: Collection[str], into: Targets) -> None:
        """Tensors to fill: existing ones, and new ones for state that a fresh optimizer does not have yet."""
        for key, what, parameter in self.saved_tensors(part, models):
            _target(saved, key, self.optimizer.state.get(parameter, {}).get(what), parameter, into)

    def saved_tensors(
        self, part: Mapping[str, Any], models: Collection[str]
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The tensors of a saved state: the key, its last part, and the parameter to which each belongs."""
        names = self._named(models)
        parameters = {names[each]: each for group in self.optimizer.param_groups for each in group["params"]}
        for fqn, rest in codec.section(part, "state").items():
            for what, value in rest.items() if fqn in parameters else ():
                if value is None:
                    yield f"{self.name}.state.{fqn}.{what}", what, parameters[fqn]

    def restore(
        self,
        part: Mapping[str, Any],
        models: Collection[str],
        filled: Mapping[str, torch.Tensor],
        saved: Saved,
    ) -> None:
        tensor = saved.fresh
        groups, mine = part["groups"], self._groups_in(models)
        numbers = {fqn: number for number, fqn in enumerate(chain.from_iterable(mine))}
        state = {
            numbers[fqn]: {
                what: filled[f"{self.name}.state.{fqn}.{what}"] if value is None else codec.decode(value[0], tensor)
                for what, value in rest.items()
            }
            for fqn, rest in part["state"].items()
        }
        options = [
            {**codec.decode(group, tensor), "params": [numbers[fqn] for fqn in fqns]}
            for group, fqns in zip(groups, mine, strict=True)
        ]
        more = {codec.decode(key, tensor): codec.decode(value, tensor) for key, value in part.get("more", ())}
        self.optimizer.load_state_dict({"state": {**state, **more}, "param_groups": options})
        if type(self.optimizer).load_state_dict is Optimizer.load_state_dict:
            self._undo_casts(state, saved)

    def _undo_casts(self, state: Mapping[int, Mapping[str, Any]], saved: Saved) -> None:
        """Give the state its saved types again: torch's load_state_dict converts it to the type of the parameter, so
        float32 master weights of bfloat16 parameters would be rounded. That of a parameter whose own type has changed
        stays converted: a step needs both to fit."""
        was = {
            each: then[1]
            for model in self._models
            for raw, each in model.module.named_parameters()
            if (then := saved.whole_shape(f"{model.name}.{model.fqn(raw)}")) is not None
        }
        parameters = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        for number, parameter in enumerate(parameters):
            if was.get(parameter, parameter.dtype) != parameter.dtype:
                continue
            held = self.optimizer.state[parameter] if number in state else {}
            for what, exact in state.get(number, {}).items():
                cast = held.get(what)
                if isinstance(exact, torch.Tensor) and isinstance(cast, torch.Tensor) and cast.dtype != exact.dtype:
                    held[what] = exact.to(cast.device)


def check_tied(saved: Saved, name: str, first: str) -> None:
    """Raise StateMismatchError if two names are the same tensor now, and were two different ones in the snapshot."""
    was, now = saved.pieces.get(name), saved.pieces.get(first)
    if was is None or was is now:
        return
    if now is None or not _same_bits(saved.fresh(name), saved.fresh(first)):
        raise StateMismatchError(f"{name} and {first} are one tensor now, and were two in the snapshot")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    same: bool = torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    return same


def _target(saved: Saved, key: str, held: Any, parameter: torch.Tensor, into: Targets) -> None:
    """Add the tensor of an optimizer's state to the targets: `held`, if it has the saved shape and type, otherwise a
    new one. Raises ShardingError."""
    found = saved.whole_shape(key)
    if found is None:
        raise ShardingError(f"{key} is not in the snapshot")
    shape, dtype = found
    if isinstance(held, torch.Tensor) and tuple(held.shape) == shape and held.dtype == dtype:
        into.fill[key] = held
        return
    sharded = isinstance(parameter, DTensor) and shape == tuple(parameter.shape)
    like_parameter = shape == tuple(parameter.shape)  # otherwise a counter, or a factored moment: replicated
    device = local_tensor(parameter).device if like_parameter else torch.device("cpu")
    local_shape = local_tensor(parameter).shape if sharded else shape
    fresh = torch.empty(local_shape, dtype=dtype, device=device)
    target = _as_sharded(fresh, parameter) if sharded else fresh
    match = saved.match(key, target)
    adopted = saved.adopt(match) if match is not None and device.type == "cpu" else None
    if adopted is None:
        into.fill[key] = target
    else:
        into.filled[key] = _as_sharded(adopted, parameter) if sharded else adopted


def _as_sharded(local: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Shard this tensor as the parameter is sharded."""
    tensor: torch.Tensor = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return tensor
