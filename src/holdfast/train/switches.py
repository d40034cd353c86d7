"""Keeps which parameters need gradients, and which modules are in eval(), where training has changed that.

A script may unfreeze its backbone, or set BatchNorm to eval(), once, in the first step of some epoch. A resume in a
later epoch does not come by that line. So a snapshot has what differs from the time before the resume, when the script
had made its models, and the resume sets it again. What the script itself sets before the resume stays, if training has
not changed it since: a script that was edited to freeze a layer freezes it.

The modes are noted when an optimizer has stepped: then they are those with which the model is trained. When a snapshot
is made, an evaluation may have set others. Which parameters need gradients is read when the snapshot is made: while an
optimizer steps, a GAN may have frozen what the other one steps.

Knows models. Knows neither snapshots nor ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import state_codec as codec
from holdfast.train.module_parts import ModuleParts
from holdfast.train.tracked import TrackedModel

_is_training = attrgetter("training")
GRADIENTS, TRAINING, OTHERWISE = "requires_grad", "training", "otherwise"
"""Keys of a model's entry in a snapshot: parameters that need a gradient or do not, by name; the mode of the model; the
names of the modules in it that have the other mode."""


class Switches:
    """What training switches on and off in the tracked models."""

    def __init__(self, models: Sequence[TrackedModel]) -> None:
        """`models`: a list to which further ones may be added until `begin`."""
        self._models = models
        self._parts: ModuleParts | None = None
        """The modules whose modes were noted."""
        self._modes: list[bool] = []
        self._first: list[list[bool]] = []
        """What was set before the state was restored."""
        self._began: dict[str, dict[str, Any]] = {}
        """The same as the entry of each model."""
        self.unfrozen: list[nn.Parameter] = []
        """Parameters that `restore` let need a gradient."""

    def begin(self) -> None:
        """Note what the script has set, before a state is restored. Only the first call does something."""
        if self._parts is None:
            self._parts = ModuleParts([each.module for each in self._models], only_modules=True)
            self.note()
            self._first = self._now()
            self._began = {each.name: self._entry(each) for each in self._models}

    def note(self, *_: object) -> None:
        """Note the modes that are set now. torch calls this after an optimizer's step: it has no loop in Python."""
        if self._parts is None or is_compiling():
            return
        self._parts.renew()
        self._modes = [*map(_is_training, self._parts.modules)]

    def put_modes_back(self) -> None:
        """Give the modules the modes that were noted last."""
        assert self._parts is not None
        for module, mode in zip(self._parts.modules, self._modes, strict=True):
            module.training = mode

    def _now(self) -> list[list[bool]]:
        """Whether each parameter needs a gradient now, and the modes that were noted."""
        return [[each.requires_grad for model in self._models for each in model.module.parameters()], self._modes]

    def _entry(self, model: TrackedModel) -> dict[str, Any]:
        """The same for this model, by name."""
        assert self._parts is not None
        modes = dict(zip(self._parts.modules, self._modes, strict=True))
        named = {name: modes[each] for name, each in named_modules(model.module) if each in modes}
        root = named.get("", True)
        return {
            GRADIENTS: {model.fqn(raw): each.requires_grad for raw, each in model.module.named_parameters()},
            TRAINING: root,
            OTHERWISE: sorted(name for name, mode in named.items() if mode != root),
        }

    def changed(self) -> dict[str, Any]:
        """What differs now from the time before the restore, by model; empty for most programs."""
        if self._parts is None or self._now() == self._first:
            return {}
        found = {}
        for model in self._models:
            now, began = self._entry(model), self._began[model.name]
            then = began[GRADIENTS]
            entry: dict[str, Any] = {}
            if gradients := {name: on for name, on in now[GRADIENTS].items() if then.get(name, on) != on}:
                entry[GRADIENTS] = gradients
            if any(now[key] != began[key] for key in (TRAINING, OTHERWISE)):
                entry |= {key: now[key] for key in (TRAINING, OTHERWISE)}
            if entry:
                found[model.name] = entry
        return found

    def restore(self, saved: Mapping[str, Any], names: Collection[str]) -> None:
        """Set what a snapshot has, in the models with these names. `saved`: from `changed`."""
        self.begin()
        self.unfrozen = []
        for model in self._models:
            if model.name not in names:
                continue
            entry = codec.section(saved, model.name)
            gradients = codec.section(entry, GRADIENTS)
            for raw, each in model.module.named_parameters():
                wanted = gradients.get(model.fqn(raw), each.requires_grad)
                if wanted != each.requires_grad:
                    each.requires_grad_(wanted)
                    self.unfrozen += [each] if wanted else []
            named = named_modules(model.module)
            if not dict(named)[""].training:
                continue  # the script evaluates it, or calls train() before it trains, which sets all modes
            # A rank that gets the state within the job may be in another mode than at its beginning.
            modes = entry if TRAINING in entry else self._began[model.name]
            root, otherwise = modes[TRAINING], set(modes[OTHERWISE])
            for name, module in named:
                module.training = root != (name in otherwise)
        self.note()


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules, with names that do not depend on DDP, torch.compile and activation checkpointing. A wrapper has the
    name of the module within, and comes before it."""
    found = []
    dropped: set[str] = set()
    names: dict[str, str] = {"": ""}
    for path, module in model.named_modules():
        if path:
            parent, _, name = path.rpartition(".")
            is_within = name in ("_orig_mod", "_checkpoint_wrapped_module") or (name == "module" and parent in dropped)
            names[path] = names[parent] if is_within else f"{names[parent]}.{name}".lstrip(".")
        if isinstance(module, DistributedDataParallel):
            dropped.add(path)
        found.append((names[path], module))
    return found
