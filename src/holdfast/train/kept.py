"""The state of a tracked object at one moment, as a step ended, so that it can be given back later in the same process.

`state_dict()` may return the live tensors of the object, or copies; which of both is not known, and to copy large
tensors in each step would cost as much as the step. So small tensors are copied, and large ones are watched: torch
counts the changes of a tensor in place. If one has changed since, the kept state is not the state of that moment any
more (`intact`), and the rank takes the state of another one. A write through `.data` in place is not counted; see
unnoticed_writes.py.

Knows nothing of ranks and steps.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from holdfast.train import torch_private
from holdfast.train.replicas import digests_of

SMALL_BYTES = 16 << 10
"""A tensor of at most this size is copied."""
_version, _address = torch_private.version, torch.Tensor.data_ptr
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
"""Types whose values cannot change."""


class WatchedTensors:
    """Notices whether tensors have changed since `note`: by torch's count of changes in place, and by the address of
    their memory, which `tensor.data = other` changes.

    Some programs move parameters to other memory in each step, with the values that they had: an LSTM on a GPU does, in
    `flatten_parameters()`. Those tensors are watched by their values instead (`watch_values`)."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._moving: list[torch.Tensor] = []
        """The tensors that are watched by their values."""
        self._digests: list[torch.Tensor] = []
        """Digests of these values at the last `note`."""
        self._noted: tuple[list[int], list[int]] = [], []
        """Counts of changes, and addresses, at the last `note`."""
        self.watch(tensors)

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Watch these tensors instead, from the next `note` on."""
        there = list(dict.fromkeys(tensors))
        self._moving = [each for each in there if each in set(self._moving)] if self._moving else []
        moving = set(self._moving)
        self._tensors = [each for each in there if each not in moving]
        # A tensor made in inference mode has no count of changes, and nothing may change it in place outside of it.
        self._counted = [each for each in self._tensors if not each.is_inference()]

    def note(self) -> None:
        """Begin to watch for changes, from the tensors as they are now."""
        # This is done in each step, for all parameters: without a loop in Python, and without a further call.
        self._noted = [*map(_version, self._counted)], [*map(_address, self._tensors)]
        if self._moving:
            self._digests = digests_of(self._moving)

    def intact(self) -> bool:
        """Whether nothing has changed them since `note`."""
        if self._noted != ([*map(_version, self._counted)], [*map(_address, self._tensors)]):
            return False
        return not self._moving or all(map(torch.equal, self._digests, digests_of(self._moving)))

    def watch_values(self) -> None:
        """Watch those tensors that are in other memory by their values from now on. The caller knows that the values
        are those of the last `note`."""
        versions, addresses = self._noted
        counted = zip(self._counted, versions, strict=True)
        changed = [each for each, version in counted if _version(each) != version]
        changed += [each for each, at in zip(self._tensors, addresses, strict=True) if _address(each) != at]
        self._moving += dict.fromkeys(changed)
        moving = set(self._moving)
        self._tensors = [each for each in self._tensors if each not in moving]
        self._counted = [each for each in self._counted if each not in moving]
        self.note()


class KeptState:
    """The kept state of one object."""

    def __init__(self, state: Any) -> None:
        """`state`: the value that `state_dict()` returned."""
        large: list[torch.Tensor] = []
        self._tree = _kept(state, large)
        self._watched = WatchedTensors(large)
        self._watched.note()

    def intact(self) -> bool:
        """Whether the kept state is still that of the moment at which it was kept."""
        return self._watched.intact()

    def give_back(self, take: Callable[[Any], object]) -> Any:
        """Give the state to `take`, the object's `load_state_dict()`. Returns a copy of it.

        The object may change what it gets, so it gets a copy. Only large tensors are shared; an object that still has
        them copies them onto themselves."""
        take(_kept(self._tree, []))
        self._watched.note()
        return _kept(self._tree, [])


class ExtraStates:
    """What modules keep beside parameters and buffers, in `get_extra_state()`: a number of calls, scales, settings."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [each for each in modules if type(each).get_extra_state is not nn.Module.get_extra_state]
        self.any = bool(self._modules)
        """Whether there are any."""
        self._kept: list[KeptState] = []

    def keep(self) -> None:
        self._kept = [KeptState(each.get_extra_state()) for each in self._modules]

    def intact(self) -> bool:
        """Whether what was kept is still the state of that moment."""
        return all(each.intact() for each in self._kept)

    def restore(self) -> None:
        """Give the modules what was kept last, as far as it is known."""
        if self._kept:
            for module, kept in zip(self._modules, self._kept, strict=True):
                if kept.intact():
                    kept.give_back(module.set_extra_state)


def _kept(value: Any, large: list[torch.Tensor]) -> Any:
    """A copy of this tree that shares its large tensors, which are added to `large`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        if value.nbytes <= SMALL_BYTES:
            return value.detach().clone()
        large.append(value)
        return value
    if kind is dict or kind is OrderedDict:  # the state of a module is an OrderedDict
        return kind((key, _kept(each, large)) for key, each in value.items())
    if kind is list:
        return [_kept(each, large) for each in value]
    if kind is deque:
        return deque((_kept(each, large) for each in value), value.maxlen)
    if kind is tuple:
        return tuple(_kept(each, large) for each in value)
    if _is_array(value):
        return value.copy()
    return copy.deepcopy(value)


def _is_array(value: Any) -> bool:
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray)
