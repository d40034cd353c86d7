"""The modules and parameters of some models, listed again when the program has exchanged, added or removed one.

Most programs never do. Some do in each step: the codebook of a VQ-VAE is often a new nn.Parameter after each forward
pass. A list that was made once would then contain tensors that nobody uses and that never change.

Knows torch's modules. Must not know for what the lists are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.train import torch_private


class ModuleParts:
    """The modules and parameters of some models, each once."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self.modules: list[nn.Module] = []
        self.parameters: list[nn.Parameter] = []
        self._owners: list[Any] = []
        """The dictionaries in which the modules have their parameters and modules."""
        self._filled: list[Any] = []
        """Those of them that had something when the lists were made."""
        self._values_of: Callable[[Any], Iterable[Any]] = dict.values
        self._seen: list[Any] = []
        """What was in them when the lists were made. It is held, so that no new object has the identity of an old
        one."""
        self.renew()

    def have_changed(self) -> bool:
        """Whether the models have other parts than those that are listed."""
        # This is called in each step: without a loop in Python.
        if not len(self._seen) == sum(map(len, self._owners)) == sum(map(len, self._filled)):
            return True
        return not all(map(is_, chain.from_iterable(map(self._values_of, self._filled)), self._seen))

    def renew(self) -> bool:
        """List the parts again if they have changed. Returns whether they had."""
        if self._owners and not self.have_changed():
            return False
        self.modules = [*dict.fromkeys(each for model in self._models for each in model.modules())]
        self.parameters = [*dict.fromkeys(each for model in self._models for each in model.parameters())]
        # FSDP2 puts whole parameters in the place of the sharded ones, and back, in each forward and backward pass.
        sharded = any(isinstance(each, DTensor) for each in self.parameters)
        pairs = map(torch_private.parts_of, self.modules)
        self._owners = [owner for own, within in pairs for owner in ((within,) if sharded else (own, within))]
        self._filled = [each for each in self._owners if each]
        self._values_of = dict.values if all(type(each) is dict for each in self._filled) else methodcaller("values")
        self._seen = [*chain.from_iterable(map(self._values_of, self._filled))]
        return True
