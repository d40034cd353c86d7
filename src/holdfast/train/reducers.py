"""The reducers of DDP modules: the parameters with which they were built, the order of their buckets, and how they are
built again for other ranks.

A reducer is bound to its process group, so when ranks are lost each DDP module gets a new one. It is built with the
parameters of the first one, not with those that need gradients at that moment: parameters may be frozen in between (the
discriminator of a GAN, layers that are unfrozen one after the other), and a static graph has to be learned again.
Whether that is possible is known before training begins (`why_not`).

A reducer groups the gradients in buckets: at first in the order of the parameters, after its first backward pass in
the order in which that made them. Sums over more than two ranks depend on the position of a number in its bucket. So a
new reducer begins with the order that the one before it had found: then a job that was regrouped or started again
computes, bit for bit, the same as an undisturbed one.

Knows DistributedDataParallel. Must not know when a group is left, or how a snapshot is made. DDP's private names are in
torch_private.py.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from holdfast.protocol.errors import ProcessGroupError
from holdfast.train import torch_private
from holdfast.train.agreement import Peers

Order = list[int]
"""Numbers of a DDP module's parameters that need gradients, in the order in which a backward pass made these; empty:
not known."""

ONE_SUM = 2
"""Largest world in which the order of buckets does not matter: two numbers have the same sum in any order.
"""

HOOKS_WITHOUT_STATE = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
STATES_OF_HOOKS = ("PowerSGDState", "PostLocalSGDState")
"""Classes of torch with what a communication hook keeps from step to step: errors of compression, a count."""
WRAPPERS_OF_HOOKS = (
    "fp16_compress_wrapper.<locals>.fp16_compress_wrapper_hook",
    "bf16_compress_wrapper.<locals>.bf16_compress_wrapper_hook",
)


class Reducers:
    """The DDP modules within some models. Their reducers are built again for another process group, or with the order
    that a snapshot has."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = list(models)
        self._wrappers = [
            each for model in models for each in model.modules() if isinstance(each, DistributedDataParallel)
        ]
        self._within = len(self._wrappers)
        """The number of wrappers that are within the models; they come first. `begin` finds the others."""
        self._parameters = list(dict.fromkeys(each for model in models for each in model.parameters()))
        self._orders: list[Order] = [[] for _ in self._wrappers]
        self._built: dict[int, list[nn.Parameter] | None] = {}
        """The parameters in each reducer, in no certain order, by the wrapper's number; read when they are needed."""
        self._hooks: list[tuple[list[tuple[Any, Any]], str]] = []
        """The communication hooks of each wrapper, and the name of a built-in one, while the reducers are dropped."""
        self.unknown = True
        """Whether the order of some module is not known yet: `mark` is called after each complete step."""
        self._used: set[int] = set()
        """Numbers of the wrappers that had a forward pass with this reducer before the last `mark`, while their order
        was not known."""
        self._graded: list[int] = []
        self._connected = True
        """Whether they have reducers: not between `disconnect` and `connect`."""

    @property
    def orders(self) -> list[Order]:
        """The orders of the DDP modules within the models, for a snapshot."""
        self._read_orders()
        return self._orders[: self._within]

    @property
    def all_orders(self) -> list[Order]:
        """The orders of all DDP modules of this process, as far as they are known."""
        return self._orders

    @property
    def frozen(self) -> list[int]:
        """Numbers of the models' parameters that need no gradient."""
        return [number for number, each in enumerate(self._parameters) if not each.requires_grad]

    @property
    def graded(self) -> list[int]:
        """Numbers of the models' parameters that had a gradient when the old world was left."""
        return self._graded

    def _read_orders(self, numbers: Collection[int] | None = None) -> None:
        """Ask reducers for the orders that are not known yet. `numbers`: of these wrappers only."""
        for number, wrapper in enumerate(self._wrappers):
            if numbers is not None and number not in numbers:
                continue
            if not self._orders[number] and _makes_other_buckets(wrapper) and "reducer" in wrapper.__dict__:
                self._orders[number] = torch_private.gradient_order(wrapper)
        pairs = zip(self._orders, self._wrappers, strict=True)
        self.unknown = any(not order and _makes_other_buckets(wrapper) for order, wrapper in pairs)

    def _built_with(self, number: int) -> list[nn.Parameter] | None:
        if number not in self._built:
            self._built[number] = torch_private.reduced_parameters(self._wrappers[number])
        return self._built[number]

    # --- before training ---------------------------------------------------------------------------------------------

    def kept_by_hook(self) -> str:
        """The class of what a hook of torch's keeps from step to step; empty: none does. What a hook of the script's
        own keeps cannot be seen."""
        if torch_private.reducer_names_missing():
            return ""
        wrappers = self._wrappers
        if not wrappers and dist.is_initialized():  # the modules within may be tracked; not those of another training
            ours = set(self._parameters)
            wrappers = [each for each in _others_than(()) if not ours.isdisjoint(each.module.parameters())]
        states = (state for each in wrappers for _, state in torch_private.comm_hooks(each))
        return next((kind for each in states if (kind := type(each).__name__) in STATES_OF_HOOKS), "")

    def why_not(self) -> str:
        """A sentence that says why these models cannot be carried into another world; empty: they can."""
        for wrapper in self._wrappers:
            if why := why_not(wrapper):
                return why
        for model in self._models:
            for name, module in model.named_modules():
                for attribute, value in vars(module).items():
                    own = isinstance(module, DistributedDataParallel) and attribute == "process_group"
                    if isinstance(value, (dist.ProcessGroup, DeviceMesh)) and not own:
                        where = f"{name or type(module).__name__}.{attribute}"
                        return f"{where} is a {type(value).__name__}, which ends with the ranks that it was made for"
        return ""

    def begin(self) -> str:
        """Read the parameters with which the reducers were built, before training. Returns why these models cannot be
        carried into another world; empty: they can.

        A program may track the module within a DDP module, or track only some of its models: so all DDP modules of this
        process are examined."""
        if why := self.why_not() or self._find_others() or self.why_not():
            return why
        for number, wrapper in enumerate(self._wrappers):
            if self._built_with(number) is None:
                return f"{_name(wrapper)} has sparse gradients, and parameters were frozen after it was built"
        return ""

    def _find_others(self) -> str:
        """Find the DDP modules of this process that are not within the models. Returns why one of them cannot be
        carried; empty: all can."""
        if not (found := _others_than(self._wrappers)):
            return ""
        gc.collect()  # a module that is not used any more is no reason
        del found

        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        first: dict[DistributedDataParallel, int] = {}
        for each in _others_than(self._wrappers):
            unknown = [name for name, parameter in each.module.named_parameters() if parameter not in numbers]
            if unknown:
                return f"{_name(each)} is not tracked: another rank could not get {unknown[0]} from this one"
            first[each] = min(numbers[parameter] for parameter in each.module.parameters())
        for each in sorted(first, key=first.__getitem__):  # in the same order on all ranks
            self._wrappers.append(each)
            self._orders.append([])
            self.unknown = True
        return ""

    def mark(self) -> None:
        """Note the orders that a complete step has found."""
        self._read_orders()
        for number, wrapper in enumerate(self._wrappers):
            if not self._orders[number] and number not in self._used and torch_private.was_used(wrapper):
                self._used.add(number)

    # --- leaving a world, and entering another -----------------------------------------------------------------------

    def disconnect(self) -> None:
        """Drop all references to the old process group, and the gradients: of a step that is not completed, or views
        of a reducer's memory.

        If a module's first step is given up after its backward pass, it is done again with the buckets of a first step:
        the order that this pass has found does not count (test_survival.py, "the first step"). That of a static graph
        is known only after its second step (test_reducers.py, "static twice")."""
        if not self._connected:  # a rank was lost before the next world was entered
            return
        self._connected = False
        self._read_orders(self._used)
        self._used = set()
        self._graded = [
            number for number, each in enumerate(self._parameters) if each.grad is not None and not each.grad.is_sparse
        ]
        for parameter in self._parameters:
            parameter.grad = None
        self._hooks.clear()
        for number, wrapper in enumerate(self._wrappers):
            self._built_with(number)
            # The states are process groups or None: the default group, then and now.
            hooks = [(hook, None) for hook, _ in torch_private.comm_hooks(wrapper)]
            self._hooks.append((hooks, torch_private.hook_name(wrapper)))
            torch_private.drop_reducer(wrapper, group=True)

    def connect(self, orders: Sequence[Order], frozen: Sequence[int], graded: Sequence[int]) -> None:
        """Build the reducers for the default group, after `disconnect`. The arguments are `all_orders`, `frozen` and
        `graded` of the rank from whose step all go on. Raises ProcessGroupError if a module has other parameters than
        those with which it was built."""
        for number, wrapper in enumerate(self._wrappers):
            if number < len(orders):
                self._orders[number] = list(orders[number])
                self.unknown |= not orders[number]
            self._build(number, wrapper, *self._hooks[number])
        now_frozen = set(frozen)
        for number, each in enumerate(self._parameters):
            _require_gradient(each, number not in now_frozen)
        # A program that calls zero_grad(set_to_none=False) has gradients of zeros at the beginning of a step. Adam's
        # averages then move even a parameter that the step does not use; without a gradient they would not.
        for number in graded:
            self._parameters[number].grad = torch.zeros_like(self._parameters[number])
        self._connected = True

    def _build(self, number: int, wrapper: DistributedDataParallel, hooks: list[tuple[Any, Any]], builtin: str) -> None:
        built = self._built_with(number)
        assert built is not None  # see `begin`
        with _needing_gradients(wrapper, built):
            if set(torch_private.parameters_to_reduce(wrapper)) != set(built):
                raise ProcessGroupError(f"{_name(wrapper)} has other parameters than those that it was built with.")
            torch_private.build_reducer(wrapper, self._orders[number], hooks, builtin)

    # --- after a restart of all --------------------------------------------------------------------------------------

    def resume(self, orders: Sequence[Order], world_then: int, peers: Peers) -> None:
        """Let each module begin with the order that a snapshot has for it, if it fits on every rank. All ranks call
        this; the orders of rank 0 are used. `world_then`: the size of the world that saved the snapshot."""
        if not world_then == peers.world > ONE_SUM:
            return
        of_rank_0 = peers.broadcast(list(orders) if peers.rank == 0 else None)
        if not of_rank_0:
            return
        same = len(of_rank_0) == self._within
        fits = [same and self._can_begin_with(number, order) for number, order in enumerate(of_rank_0)]
        for number, fits_on_ranks in enumerate(zip(*peers.all_gather(fits), strict=True)):
            if all(fits_on_ranks):
                wrapper = self._wrappers[number]
                self._orders[number] = list(of_rank_0[number])
                hooks, builtin = torch_private.comm_hooks(wrapper), torch_private.hook_name(wrapper)
                torch_private.drop_reducer(wrapper, group=False)  # the process group may be one of the program's own
                self._build(number, wrapper, hooks, builtin)

    def take_in(self, unfrozen: Collection[nn.Parameter], peers: Peers) -> None:
        """Let the modules exchange the gradients of parameters that were frozen when they were made, and that a resume
        has unfrozen; all ranks call this. `not_exchanged` finds those with which that is not possible."""
        mine = [number for number, each in enumerate(self._wrappers) if self._can_take_in(each, set(unfrozen))]
        for number in set(mine).intersection(*peers.all_gather(mine)):
            wrapper = self._wrappers[number]
            wanted = {*(self._built_with(number) or ()), *unfrozen} - _ignored_by(wrapper)
            self._built[number] = [each for each in wrapper.module.parameters() if each in wanted]
            hooks, builtin = torch_private.comm_hooks(wrapper), torch_private.hook_name(wrapper)
            torch_private.drop_reducer(wrapper, group=False)
            self._build(number, wrapper, hooks, builtin)

    def _can_take_in(self, wrapper: DistributedDataParallel, unfrozen: Collection[nn.Parameter]) -> bool:
        """Whether some of these parameters are missing in its reducer, which can be built again: see
        `_can_begin_with`."""
        within = set(wrapper.module.parameters())
        if not within.intersection(unfrozen) or not _can_be_built_again(wrapper):
            return False
        built = torch_private.reduced_parameters(wrapper)
        return built is not None and bool(within.intersection(unfrozen) - _ignored_by(wrapper) - set(built))

    def _can_begin_with(self, number: int, order: Order) -> bool:
        """Whether the module had no backward pass in this process, and has parameters for this order."""
        wrapper = self._wrappers[number]
        return (
            _makes_other_buckets(wrapper)
            and _can_be_built_again(wrapper)
            and sorted(order) == list(range(len(self._built_with(number) or ())))
        )


def why_not(wrapper: DistributedDataParallel) -> str:
    """A sentence that says why this module's reducer cannot be built again for other ranks so that it computes the
    same; empty: it can. docs/survive.md lists it."""
    named = _name(wrapper)
    if missing := torch_private.reducer_names_missing():
        return missing
    if option := torch_private.has_other_reducer(wrapper):
        return f"{named} has {option}, which cannot be set up again for other ranks"
    if hasattr(wrapper, "device_mesh") or wrapper.process_group is not dist.group.WORLD:
        return f"{named} has a process group of its own, which ends with the ranks that it was made for"
    if torch_private.is_joined(wrapper):
        return f"{named} is in join(), in which ranks do different numbers of steps"
    if hasattr(wrapper, "buffer_hook"):
        return f"{named} has a hook for its buffers, whose state other ranks cannot get"
    if any(torch_private.steps_in_backward(each) for each in wrapper.module.parameters()):
        return f"{named} has optimizers that step in the backward pass, so an interrupted step cannot be undone"
    for hook, state in torch_private.comm_hooks(wrapper):
        if not _is_without_state(hook) or not (state is None or state is dist.group.WORLD):
            called = getattr(hook, "__qualname__", type(hook).__name__).partition(".<locals>")[0]
            return f"{named} has the communication hook {called}, whose state other ranks cannot get"
    ignored = wrapper.parameters_to_ignore
    for name, each in wrapper.module.named_parameters():
        if name in ignored and each.requires_grad:
            return f"{named} does not exchange gradients of {name}, so each rank has another one"
    return ""


def _is_without_state(hook: Any) -> bool:
    """Whether a communication hook is one of torch's that compute the same in every process. A hook of the program may
    have a state (a counter, a random generator, a closure), which cannot be seen."""
    if any(hook is each for each in HOOKS_WITHOUT_STATE):
        return True
    if getattr(hook, "__module__", "") != default_hooks.__name__ or hook.__qualname__ not in WRAPPERS_OF_HOOKS:
        return False
    return all(_is_without_state(cell.cell_contents) for cell in hook.__closure__ or ())


def _makes_other_buckets(wrapper: DistributedDataParallel) -> bool:
    """Whether its reducer makes other buckets after the first backward pass."""
    finds = wrapper.find_unused_parameters and not wrapper.static_graph
    return not finds and not torch_private.has_other_reducer(wrapper)


def _others_than(wrappers: Sequence[DistributedDataParallel]) -> list[DistributedDataParallel]:
    """DDP modules of this process that are not among these."""
    known = {id(each) for each in wrappers}
    # To ask 300,000 objects with issubclass() takes 0.1 s, and a look into a set a quarter of that.
    kinds, todo = {DistributedDataParallel}, [DistributedDataParallel]
    while todo:
        fresh = set(todo.pop().__subclasses__()) - kinds
        kinds |= fresh
        todo.extend(fresh)
    return [each for each in gc.get_objects() if type(each) in kinds and id(each) not in known]


def _can_be_built_again(wrapper: DistributedDataParallel) -> bool:
    """Whether a resume may build its reducer again: it had no backward pass in this process. False on a GPU: an
    ordinary restart must not depend on something that was not tried there."""
    return (
        not torch_private.reducer_names_missing()
        and not torch_private.has_other_reducer(wrapper)
        and all(each.grad is None and each.device.type == "cpu" for each in wrapper.module.parameters())
    )


def _ignored_by(wrapper: DistributedDataParallel) -> set[nn.Parameter]:
    return {each for name, each in wrapper.module.named_parameters() if name in wrapper.parameters_to_ignore}


def not_exchanged(parameters: Collection[nn.Parameter]) -> str:
    """The name of one of these parameters that belongs to a DDP module, while none exchanges its gradients; empty:
    there is none, or that is not known."""
    if not parameters:
        return ""
    names: dict[nn.Parameter, str] = {}
    exchanged: set[nn.Parameter] = set()
    gc.collect()  # a module that is not used any more exchanges nothing
    for wrapper in _others_than(()):
        if not set(parameters).intersection(wrapper.module.parameters()):
            continue
        if torch_private.reducer_names_missing() or torch_private.has_other_reducer(wrapper):
            return ""
        if (built := torch_private.reduced_parameters(wrapper)) is None:
            return ""
        exchanged |= {*built, *_ignored_by(wrapper)}
        names |= {each: name for name, each in wrapper.module.named_parameters()}
    return next((names[each] for each in parameters if each in names and each not in exchanged), "")


def _name(wrapper: DistributedDataParallel) -> str:
    return f"DistributedDataParallel of {type(wrapper.module).__name__}"


@contextlib.contextmanager
def _needing_gradients(wrapper: DistributedDataParallel, built: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let exactly these parameters of the module need gradients in the block."""
    needing = set(built)
    before = [(each, each.requires_grad) for each in wrapper.module.parameters()]
    for each, _ in before:
        _require_gradient(each, each in needing)
    try:
        yield
    finally:
        for each, required in before:
            _require_gradient(each, required)


def _require_gradient(parameter: nn.Parameter, required: bool) -> None:
    if parameter.requires_grad != required:
        parameter.requires_grad_(required)
