"""What is saved and restored: models, optimizers, everything else with a state_dict, random numbers, counters.

Three kinds of things are told apart. Tensors of models and optimizers are *shared*: sharded or replicated over the ranks,
each piece saved once. All other state is a rank's *own*: it comes back to the same rank, or, in another world, to the
ranks that take its place (rank modulo the old world). What is no tensor goes as text (codec.py).

Names are those of torch's get_state_dict, hence independent of DDP, FSDP2 and compile: `model.<fqn>` and
`optimizer.state.<fqn>.<what>`.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from holdfast.core.errors import ShardingError, TrackingError
from holdfast.train import codec
from holdfast.train.reading import Saved
from holdfast.train.sharding import OWN, TIED, local_tensor

FORMAT = 1


@dataclass
class Collected:
    """The state at one moment; tensors are the live ones, not copies."""

    shared: dict[str, torch.Tensor]
    own: dict[str, torch.Tensor]
    text: bytes
    """Of this rank; changes with every step."""

    def signature(self) -> tuple[Any, ...]:
        """Equal as long as a layout holds, and the tensors' shapes and types stay the same."""
        sharded = [(key, each.placements) for key, each in self.shared.items() if isinstance(each, DTensor)]
        return (list(self.shared), list(self.own), sharded)


@dataclass
class Targets:
    """The shared tensors of a state that is to be restored."""

    fill: dict[str, torch.Tensor] = field(default_factory=dict)
    """To be filled."""
    filled: dict[str, torch.Tensor] = field(default_factory=dict)
    """That have their values already."""

    def all(self) -> dict[str, torch.Tensor]:
        return {**self.fill, **self.filled}


class TrainState:
    """Where training is: what `track` returns."""

    def __init__(self) -> None:
        self.step = 0
        """Calls of `Snapshots.step()` in all lives of this job."""
        self.epoch = 0
        self._follow: Callable[[int], None] = lambda _epoch: None
        self._finish: Callable[[], None] = lambda: None
        self._save: Callable[[], None] = lambda: None

    def epochs(self, count: int, *, save: bool = False) -> Iterator[int]:
        """The epochs that are left of 0 … count-1. The first one may be half done: the loader goes on within it.

        What stands after the loader's loop runs again after a resume from a state that was saved before its end; with `save`
        the state is saved to the disk after each epoch's body, and a resume from there goes on with the next epoch.
        After the last one the state is saved, if `every` says that anything is: what comes next may need the whole training.
        """
        while self.epoch < count:
            self._follow(self.epoch)
            yield self.epoch
            self.epoch += 1
            if save:
                self._follow(self.epoch)
                self._save()
        self._finish()


class Shared:
    """Tensors of models and optimizers, each once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        """Further names of a tensor, and its first one."""
        self._names: dict[int, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Under this name, or as another name of what is there."""
        codec.check_storable(name, tensor)
        first = self._names.setdefault(id(tensor), name)
        if first == name:
            self.tensors[name] = tensor
        else:
            self.tied[name] = first


# --- what is tracked --------------------------------------------------------------------------------------------------


class _Model:
    """Tensors of a module by the names that torch's get_model_state_dict gives them."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self._names: dict[str, str] = {}
        self._made: set[str] | None = None
        """Raw names of tensors that `state_dict` makes (an extra state): nobody can fill them in place."""

    def fqn(self, raw: str) -> str:
        """Without what DDP, compile and activation checkpointing put in front."""
        if raw not in self._names:
            found = _get_fqns(self.module, raw)
            self._names[raw] = next(iter(found)) if len(found) == 1 else raw
        return self._names[raw]

    def collect(self, shared: Shared, encoder: codec.Encoder) -> Any:
        """Adds the tensors; returns the rest, encoded."""
        rest = {}
        # Not detached: parameters and buffers that are tied are known by being one object, on every rank alike.
        state = self.module.state_dict(keep_vars=True)
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

    def restore_rest(self, rest: Mapping[str, Any], tensor: Callable[[str], torch.Tensor]) -> None:
        """The tensors were filled in place."""
        if rest:
            state = get_model_state_dict(self.module)
            state.update({fqn: codec.decode(value, tensor) for fqn, value in rest.items()})
            set_model_state_dict(self.module, state)


class _Optimizer:
    """An optimizer's state by the names of its parameters, as torch's get_optimizer_state_dict has it.

    That function is not called for a save: it would run `step()` to make state that is not there yet, and renames
    everything each time. Tests compare.
    """

    def __init__(self, name: str, optimizer: Optimizer, models: list[_Model]) -> None:
        self.name, self.optimizer, self._models = name, optimizer, models
        self._fqns: dict[torch.Tensor, str] = {}

    def _fqn(self, parameter: torch.Tensor) -> str:
        if parameter not in self._fqns:
            several = len(self._models) > 1
            self._fqns = {
                each: f"{model.name}.{model.fqn(raw)}" if several else model.fqn(raw)
                for model in self._models
                for raw, each in model.module.named_parameters()
            }
        if parameter not in self._fqns:
            raise TrackingError(f"{self.name} has parameters of no tracked model: track(model=…, {self.name}=…)")
        return self._fqns[parameter]

    def collect(self, shared: Shared, encoder: codec.Encoder) -> Any:
        """Adds the tensors; returns the rest, encoded."""
        groups: list[Any] = []
        state: dict[str, dict[str, Any]] = {}
        for group in self.optimizer.param_groups:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append(encoder.encode(options, f"{self.name}.param_groups[{len(groups)}]"))
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
                        shared.tensors[name] = value
                        rest[what] = None
                    else:
                        rest[what] = [encoder.encode(value, f"{self.name}.state.{fqn}.{what}")]
        params = [[self._fqn(each) for each in group["params"]] for group in self.optimizer.param_groups]
        return {"groups": groups, "params": params, "state": state}

    def targets(self, saved: Saved, told: Mapping[str, Any], into: Targets) -> None:
        """Tensors to fill: those that are there, and new ones for what a fresh optimizer does not have yet."""
        parameters = self.parameters()
        for fqn, rest in codec.section(told, "state").items():
            parameter = parameters.get(fqn)
            if parameter is None:
                raise ShardingError(f"{self.name} has no parameter {fqn}, the one in the snapshot has")
            held = self.optimizer.state.get(parameter, {})
            for what, value in rest.items():
                if value is None:
                    _target(saved, f"{self.name}.state.{fqn}.{what}", held.get(what), parameter, into)

    def parameters(self) -> dict[str, torch.Tensor]:
        return {self._fqn(each): each for group in self.optimizer.param_groups for each in group["params"]}

    def restore(
        self, told: Mapping[str, Any], filled: Mapping[str, torch.Tensor], tensor: Callable[[str], torch.Tensor]
    ) -> None:
        numbers = {fqn: number for number, fqn in enumerate(self.parameters())}
        params, groups = told["params"], told["groups"]
        mine = [[self._fqn(each) for each in group["params"]] for group in self.optimizer.param_groups]
        if [sorted(each) for each in mine] != [sorted(each) for each in params]:
            raise ShardingError(f"{self.name} has other parameter groups than the one in the snapshot")
        state = {
            numbers[fqn]: {
                what: filled[f"{self.name}.state.{fqn}.{what}"] if value is None else codec.decode(value[0], tensor)
                for what, value in rest.items()
            }
            for fqn, rest in told["state"].items()
        }
        options = [
            {**codec.decode(group, tensor), "params": [numbers[fqn] for fqn in fqns]}
            for group, fqns in zip(groups, mine, strict=True)
        ]
        self.optimizer.load_state_dict({"state": state, "param_groups": options})
        if type(self.optimizer).load_state_dict is Optimizer.load_state_dict:
            self._undo_casts(state)

    def _undo_casts(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """torch's gives state the type of its parameter: float32 master weights of bfloat16 ones would be rounded."""
        for number, parameter in enumerate(self.parameters().values()):
            held = self.optimizer.state[parameter] if number in state else {}
            for what, exact in state.get(number, {}).items():
                cast = held.get(what)
                if isinstance(exact, torch.Tensor) and isinstance(cast, torch.Tensor) and cast.dtype != exact.dtype:
                    held[what] = exact.to(cast.device)


def _check_tied(saved: Saved, name: str, first: str) -> None:
    """ShardingError when they are one tensor now and were two when they were saved."""
    was, now = saved.pieces.get(name), saved.pieces.get(first)
    if was is None or was is now:
        return
    if now is None or not _same_bits(saved.fresh(name), saved.fresh(first)):
        raise ShardingError(f"{name} and {first} are one tensor now, and were two in the snapshot")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    same: bool = torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    return same


def _target(saved: Saved, key: str, held: Any, parameter: torch.Tensor, into: Targets) -> None:
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
    """As the parameter is."""
    tensor: torch.Tensor = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return tensor


def _refuse_fsdp1(name: str, module: nn.Module) -> None:
    """Its parameters are flat pieces of many, and their names and state come only by collectives: a save would stall for
    gathering the whole model. FSDP2 has neither.
    """
    if any(isinstance(each, FullyShardedDataParallel) for each in module.modules()):
        raise TrackingError(
            f"track({name}=…): FullyShardedDataParallel (FSDP1) is not supported: shard with fully_shard (FSDP2),\n"
            "or save yourself: torch.distributed.checkpoint.save(…, storage_writer=ht.SnapshotWriter(folder, step=…))"
        )


@dataclass
class Tracker:
    """Everything that is tracked, by the names it was given."""

    state: TrainState = field(default_factory=TrainState)
    _models: list[_Model] = field(default_factory=list)
    _optimizers: list[_Optimizer] = field(default_factory=list)
    _others: dict[str, Any] = field(default_factory=dict)

    def add(self, objects: Mapping[str, Any]) -> None:
        """TrackingError for what cannot be tracked, and for a name that is taken."""
        for name, each in objects.items():
            if "/" in name or name in self.names():
                raise TrackingError(f"track({name}=…): the name is taken, or has a slash")
            if isinstance(each, nn.Module):
                _refuse_fsdp1(name, each)
                self._models.append(_Model(name, each))
            elif isinstance(each, Optimizer) and type(each).state_dict is Optimizer.state_dict:
                self._optimizers.append(_Optimizer(name, each, self._models))
            elif callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None)):
                self._others[name] = each
            else:
                hint = (
                    "\ntake ht.DataLoader, or track its ht.DistributedSampler" if isinstance(each, DataLoader) else ""
                )
                raise TrackingError(
                    f"track({name}=…): a {type(each).__name__} has no state_dict() and load_state_dict(){hint}"
                )
        self.state._follow = self._set_epoch

    def names(self) -> set[str]:
        return {*(each.name for each in self._models), *(each.name for each in self._optimizers), *self._others}

    @property
    def optimizers(self) -> list[Optimizer]:
        found = [each.optimizer for each in self._optimizers]
        return found + [each for each in self._others.values() if isinstance(each, Optimizer)]

    def note_trained(self) -> None:
        """The batch in the loop's body is trained: loaders count it."""
        for each in self._others.values():
            if callable(note := getattr(each, "trained", None)):
                note()

    def _set_epoch(self, epoch: int) -> None:
        for each in self._others.values():
            if callable(follow := getattr(each, "set_epoch", None)):
                follow(epoch)

    def collect(self, rank: int, world: int) -> Collected:
        """What there is to save now. codec.StateTypeError names what cannot be saved."""
        shared = Shared()
        encoder = codec.Encoder(f"{OWN}{rank}/")
        tree = {
            "format": FORMAT,
            "rank": rank,
            "world": world,
            "step": self.state.step,
            "epoch": self.state.epoch,
            "models": {each.name: each.collect(shared, encoder) for each in self._models},
            "optimizers": {each.name: each.collect(shared, encoder) for each in self._optimizers},
            "others": {name: encoder.encode(each.state_dict(), name) for name, each in self._others.items()},
            "random": encoder.encode(random_state(), "random"),
            TIED: shared.tied,
        }
        return Collected(shared.tensors, encoder.tensors, codec.dumps(tree))

    def targets(self, saved: Saved, rank: int) -> Targets:
        """The shared tensors to fill before `restore`."""
        shared, encoder = Shared(), codec.Encoder()
        for model in self._models:
            model.collect(shared, encoder)
        for name, first in shared.tied.items():
            _check_tied(saved, name, first)
        into = Targets(fill=shared.tensors)
        told = _told(saved, rank)
        for optimizer in self._optimizers:
            optimizer.targets(saved, _merged(saved, told, optimizer.name), into)
        return into

    def restore(self, saved: Saved, rank: int, world: int, filled: Mapping[str, torch.Tensor]) -> int:
        """Give everything its state, after `filled` (the targets) were. Returns the world then."""
        told = _told(saved, rank)
        world_then: int = codec.expect(told.get("world"), int, "world")
        missing = self.names() - {name for part in ("models", "optimizers", "others") for name in told[part]}
        if missing:
            raise ShardingError(f"the snapshot has nothing for {', '.join(sorted(missing))}")
        for model in self._models:
            model.restore_rest(codec.section(told["models"], model.name), saved.fresh)
        for optimizer in self._optimizers:
            optimizer.restore(_merged(saved, told, optimizer.name), filled, saved.fresh)
        for name, each in self._others.items():
            each.load_state_dict(codec.decode(told["others"][name], saved.fresh))
        self.state.step = codec.expect(told.get("step"), int, "step")
        self.state.epoch = codec.expect(told.get("epoch"), int, "epoch")
        set_random_state(codec.decode(told["random"], saved.fresh), None if world == world_then else (rank, world))
        return world_then


def _told(saved: Saved, rank: int) -> dict[str, Any]:
    """The text that this rank goes on from: its own, or that of the rank whose place it takes."""
    texts = {text.get("rank"): text for text in saved.texts}
    if not texts:
        raise ShardingError("no rank's state is at hand")
    world_then = codec.expect(next(iter(texts.values())).get("world"), int, "world")
    found = texts.get(rank % world_then)
    if found is not None and found.get("format") == "dcp":
        raise ShardingError(
            "torch.distributed.checkpoint.save made the snapshot: load it with its load() and ht.SnapshotReader"
        )
    if found is None:
        raise ShardingError(f"the state of rank {rank % world_then} is not at hand")
    if found.get("format") != FORMAT:
        raise ShardingError(f"the snapshot has the format {found.get('format')}, this holdfast reads {FORMAT}")
    return found


def _merged(saved: Saved, told: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An optimizer's part, with the states of all parameters that any rank had (a pipeline's differ)."""
    mine = codec.section(told["optimizers"], name)
    if not mine:
        raise ShardingError(f"the snapshot has nothing for {name}")
    state = dict(mine["state"])
    for text in saved.texts:
        for fqn, rest in codec.section(codec.section(text["optimizers"], name), "state").items():
            state.setdefault(fqn, rest)
    wanted = {fqn for group in mine["params"] for fqn in group}
    return {**mine, "state": {fqn: rest for fqn, rest in state.items() if fqn in wanted}}


# --- random numbers ---------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Of Python, torch, numpy and CUDA, as far as they are in use."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, b"".join(word.to_bytes(4, "little") for word in words), gauss],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tobytes(), *rest]
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def set_random_state(state: Mapping[str, Any], place: tuple[int, int] | None) -> None:
    """`place`: None in the same world; otherwise (rank, world), and every rank gets a seed of its own, made from it all."""
    if place is not None:
        rank, world = place
        seed = hashlib.sha256(state["torch"] + f"/{rank}/{world}".encode()).digest()
        random.seed(seed)
        torch.manual_seed(int.from_bytes(seed[:7], "little"))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(list(seed))
        return
    version, packed, gauss = state["python"]
    words = tuple(int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4))
    random.setstate((version, words, gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if "numpy" in state:
        import numpy as np

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))
