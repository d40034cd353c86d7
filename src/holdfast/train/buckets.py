"""The order of the gradients in the buckets of DDP's reducers.

A reducer groups the gradients in buckets: at first in the order of the parameters, after its first backward pass in
the order in which that made them. Sums over more than two ranks depend on the place of a number in its bucket. So a
new reducer begins with the order that the one before it had found: then a job that was regrouped or started again
computes, bit for bit, what an undisturbed one does.

Knows DistributedDataParallel, and neither when a group is left nor how a snapshot is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.train.agreement import Peers

Order = list[int]
"""Numbers of a DDP module's parameters that need gradients, in the order in which a backward pass made these."""


ONE_SUM = 2
"""So many numbers, or fewer, have the same sum in any order."""

OTHER_KINDS = ("find_unused_parameters", "mixed_precision", "_use_python_reducer", "_delay_all_reduce_params")
"""Attributes of DDP modules whose reducers never make other buckets, or consist of more than `__setstate__` builds."""


class Reducers:
    """The DDP modules within some models. Their reducers are built again for another process group, or with the order
    that a snapshot has."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._wrappers = [
            each for model in models for each in model.modules() if isinstance(each, DistributedDataParallel)
        ]
        self._orders: list[Order] = []
        self._hooks: list[Any] = []

    @property
    def orders(self) -> list[Order]:
        """The order of parameters by module; empty before the first backward pass."""
        return [] if self._hooks else self._orders

    def observe(self) -> None:
        """Note the order of the next backward pass, if none is known."""
        if self._orders or not self._wrappers:
            return
        for wrapper in self._wrappers:
            order: Order = []
            self._orders.append(order)
            for number, parameter in enumerate(_parameters(wrapper)):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_noting(order, number)))

    def observed(self) -> None:
        """A backward pass is over."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def forget(self) -> None:
        """Stop observing. Records of an unfinished pass are dropped."""
        if self._hooks:
            self._orders.clear()
            self.observed()

    def disconnect(self) -> None:
        """Drop all references to the old process group."""
        for wrapper in self._wrappers:
            for name in ("reducer", "logger", "process_group"):
                wrapper.__dict__.pop(name, None)

    def resume(self, orders: Sequence[Order], world_then: int, peers: Peers) -> None:
        """Begin with the orders of a snapshot of so many ranks, if they fit these modules on every rank. All ranks call
        it; rank 0's orders count."""
        if not world_then == peers.world > ONE_SUM:
            return
        told = peers.tell(list(orders) if peers.rank == 0 else None)
        if told and all(peers.share(self._can_begin_with(told))):
            for wrapper in self._wrappers:
                for name in ("reducer", "logger"):  # its process group may be one of the program's
                    del wrapper.__dict__[name]
            self.connect(told)

    def _can_begin_with(self, orders: Sequence[Order]) -> bool:
        """Whether no module had a backward pass in this process, or is of a kind that has no such buckets. Never on a
        GPU: an ordinary restart must not depend on what was not tried there."""
        return len(orders) == len(self._wrappers) and all(
            sorted(order) == list(range(len(parameters := _parameters(wrapper))))
            and all(each.grad is None and each.device.type == "cpu" for each in parameters)
            and not any(getattr(wrapper, name, None) for name in OTHER_KINDS)
            for order, wrapper in zip(orders, self._wrappers, strict=True)
        )

    def connect(self, orders: Sequence[Order]) -> None:
        """Build the reducers, as DDP does when it is unpickled: for the default group, if they are disconnected.
        `orders`: equal on all ranks."""
        self._orders = [list(order) for order in orders]
        for number, wrapper in enumerate(self._wrappers):
            hooks, wrapper._comm_hooks = wrapper._comm_hooks, []
            with _in_order(wrapper, orders[number] if orders else []):
                wrapper.__setstate__(dict(wrapper.__dict__))
            for hook, state in hooks:
                wrapper.register_comm_hook(state, hook)


def _parameters(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters in DDP's own order and numbering."""
    parameters: list[nn.Parameter] = wrapper._build_params_for_reducer()[0]
    return parameters


def _noting(order: Order, number: int) -> Any:
    def note(_: Any) -> None:
        if number not in order:
            order.append(number)

    return note


def _sizes(wrapper: DistributedDataParallel) -> list[int]:
    """Limits of the buckets after the first backward pass, as the reducer has them."""
    listed: list[int] = list(getattr(wrapper, "bucket_bytes_cap_list", ()))  # newer versions of torch
    cap: int = wrapper.bucket_bytes_cap
    first: int = dist._DEFAULT_FIRST_BUCKET_BYTES if wrapper.bucket_bytes_cap_default else cap
    return listed or [first, cap]


@contextlib.contextmanager
def _in_order(wrapper: DistributedDataParallel, order: Order) -> Iterator[None]:
    """The reducer that is made in this block has the buckets that a reducer makes after a pass in this order."""
    if wrapper.find_unused_parameters or sorted(order) != list(range(len(_parameters(wrapper)))):
        yield  # it never makes other buckets, or no order is known
        return
    assign = dist._compute_bucket_assignment_by_size

    def in_order(parameters: list[Any], _: list[int], sparse: list[bool], *__: Any) -> Any:
        sizes = _sizes(wrapper)  # those it is called with are for the first pass: one bucket without a limit
        found = assign([parameters[each] for each in order], sizes, [sparse[each] for each in order], order)
        return tuple(list(reversed(part)) for part in found)  # DDP reverses both: its own order is that of the forward

    dist._compute_bucket_assignment_by_size = in_order
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = assign
