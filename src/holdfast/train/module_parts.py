"""The modules and parameters of some models, listed again when the program has exchanged, added or removed one.

Most programs never do. Some do in each step: the codebook of a VQ-VAE is often a new nn.Parameter after each forward
pass. A list that was made once would then contain tensors that nobody uses and that never change.

Knows torch's modules. Must not know for what the lists are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.train import torch_private


class ModuleParts:
    """The modules and parameters of some models, each once."""

    def __init__(self, models: Sequence[nn.Module], *, only_modules: bool = False) -> None:
        """`only_modules`: the parameters are not needed."""
        self._models, self._only_modules = models, only_modules
        self.modules: list[nn.Module] = []
        self.parameters: list[nn.Parameter] = []
        self._empty: list[Any] = []
        """The dictionaries in which the modules have their parameters and modules, as far as they had none when the
        lists were made."""
        self._contents: list[Any] = []
        """Views of the contents of the others."""
        self._seen: list[Any] = []
        """What was in them when the lists were made. It is held, so that no new object has the identity of an old
        one."""
        self._list()

    def have_changed(self) -> bool:
        """Whether the models have other parts than those that are listed."""
        # This is called in each step: without a loop in Python.
        if any(self._empty) or sum(map(len, self._contents)) != len(self._seen):
            return True
        return not all(map(is_, chain.from_iterable(self._contents), self._seen))

    def renew(self) -> bool:
        """List the parts again if they have changed. Returns whether they had."""
        if not self.have_changed():
            return False
        self._list()
        return True

    def _list(self) -> None:
        self.modules = [*dict.fromkeys(each for model in self._models for each in model.modules())]
        parts = [torch_private.parts_of(each) for each in self.modules]
        owners: list[Any] = [within for _, within in parts]
        if not self._only_modules:
            self.parameters = [*dict.fromkeys(each for model in self._models for each in model.parameters())]
            # FSDP2 puts whole parameters in the place of the sharded ones, and back, in each forward and backward pass.
            if not any(isinstance(each, DTensor) for each in self.parameters):
                owners += [own for own, _ in parts]
        self._empty = [each for each in owners if not each]
        self._contents = [each.values() for each in owners if each]
        self._seen = [*chain.from_iterable(self._contents)]
