"""Names of torch that are not public: holdfast.train uses them here and nowhere else.

Such a name may change with every version of torch. So each has one function or constant of ours, which says for what it
is needed, and what happens if torch does not have it: an error that names it (HF126), or another way. All names were
tried on torch 2.13.0, and on 2.14.1 and 2.15.0 unless a comment says otherwise.

Two programs do not use this file, since they run where holdfast is not imported: store_server.py, and the bootstrap of
a worker (worker/progress.py).

Knows torch. Must not know for what the names are used.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import tensor as dtensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.protocol.errors import ProcessGroupError

TRIED = "2.13 to 2.15"


def _needed(owner: Any, name: str, by: str) -> Any:
    """This attribute of torch. Raises ProcessGroupError if torch does not have it."""
    found = getattr(owner, name, None)
    if found is None:
        raise ProcessGroupError(_missing(owner, name, by))
    return found


def _missing(owner: Any, name: str, by: str) -> str:
    where = getattr(owner, "__name__", type(owner).__name__)
    return f"{by} needs {where}.{name}, which torch {torch.__version__} does not have; holdfast was tried with {TRIED}"


# --- process groups ---------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """The store of the default process group, for agreements of our own. torch has no public way to it.

    Raises ProcessGroupError where torch does not have it."""
    return _needed(dist.distributed_c10d, "_get_default_store", "ht.process_group")()


def all_groups() -> list[Any]:
    """The process groups that exist, to destruct them and to count their operations. Empty where torch does not have
    the list: then a regroup may leave threads of the old groups."""
    return list(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", ()))


def end_gloo_operations() -> None:
    """End every operation of this process's gloo groups, which are of no use after that. Any thread may call it.

    gloo has no call for that, and to shut its connections is not enough. An operation that fails because one peer died
    may still be owed data by another. When these come, gloo has no place for them: it never reads from that connection
    again, does not see that it is shut, and the other operations that need it wait for their whole time-out. But if one
    receive operation reaches its time-out, gloo gives up all connections of the group, and every operation fails.

    Where torch does not have the names, nothing happens: the agent ends a process that waits too long."""
    for group in all_groups():
        with contextlib.suppress(RuntimeError, AttributeError):  # among others: the group has no backend for the CPU
            backend = group._get_backend(torch.device("cpu"))
            backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
            if isinstance(backend, dist.ProcessGroupGloo) and backend.size() > 1:
                for each in range(_gloo_interfaces()):
                    _reach_a_timeout(backend, _TAGS_MAX - each)


_TAGS_MAX = 2**31 - 1
"""The largest tag of a receive operation: no program is likely to use those near it."""


def _gloo_interfaces() -> int:
    """The number of network interfaces that gloo uses, each with its own connections. A tag chooses one in turn."""
    return len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))


def _reach_a_timeout(backend: Any, tag: int) -> None:
    """Receive from any rank what none sends. It sends nothing itself."""
    with contextlib.suppress(RuntimeError):
        backend.recv_anysource([torch.empty(1)], tag).wait(timedelta(milliseconds=1))


def forget_half_a_group() -> None:
    """Let torch name the next default group as a fresh process does: after one that could not be made it has counted
    it, and the ranks would look for each other under different names. Where torch does not have the count, nothing
    happens."""
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    if hasattr(world, "group_count"):
        world.group_count = 0


def abort_groups() -> None:
    """End NCCL's operations, in which a rank waits for a dead one.

    torch aborts all groups within a batch of their operations, and nccl2 refuses a batch while one is under way
    ("startCoalescing called while a batch is already active"): a rank may wait in one, as FSDP's are. Then each group
    is aborted by itself, which ends the batch, and torch's own call forgets them. Never ran on a GPU.

    Raises ProcessGroupError where torch does not have it."""
    c10d = dist.distributed_c10d
    abort = _needed(c10d, "_abort_process_group", "to leave an NCCL group")
    try:
        abort()
    except RuntimeError:
        batch = c10d._coalescing_manager
        for each in all_groups():
            each.abort()
        c10d._coalescing_manager = lambda _group, _device=None: contextlib.nullcontext()
        try:
            abort()
        finally:
            c10d._coalescing_manager = batch


GROUP_MAKER = "_new_process_group_helper"
"""The function of `torch.distributed.distributed_c10d` through which all groups are made, to know their sockets. Where
torch does not have it, a rank that waits in a group of the program's own notices a loss only by that group's
time-out."""


def collectives_begun(group: Any) -> int:
    """Operations that this process has begun in a group; 0 where torch or the backend cannot tell: the guard against
    `torch.save` on one rank is then silent."""
    with contextlib.suppress(RuntimeError, AttributeError):
        return int(group._get_sequence_number_for_group())
    return 0


def broadcast_coalesced(group: Any, tensors: list[torch.Tensor], bytes_max: int) -> None:
    """Rank 0's values for these tensors, as DDP sends its buffers. Where torch does not have it, one by one."""
    at_once = getattr(dist, "_broadcast_coalesced", None)
    if at_once is not None:
        at_once(group, tensors, bytes_max, 0)
    else:
        for each in tensors:
            dist.broadcast(each, group=group, group_src=0)


def forget_meshes() -> None:
    """Clear DTensor's caches, which have device meshes of groups that are gone. A mesh of a later world with the same
    ranks is equal to such a one: an operation would get that, with groups of other ranks, and no mesh would ever be
    freed. `mesh_names_missing` is asked before. Tried on 2.11.0, 2.13.0 and 2.15.0; 2.6.0 does not have the names."""
    for owner, name in _CACHES_OF_MESHES:
        getattr(owner(), name).cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    dtensors._random._rng_tracker = None  # it has a mesh as well, and is made again
    if torch.__version__.startswith(_VERSIONS_THAT_KEEP_MESHES):
        for each in gc.get_objects():
            if issubclass(type(each), DeviceMesh):  # not isinstance: a weak proxy may be dead
                getattr(each, "_pg_registry", {}).clear()


_VERSIONS_THAT_KEEP_MESHES = ("2.11.", "2.12.")
"""torch 2.11 loses a reference in C++ for some operations on DTensors, so that their meshes are never freed. At least
they must not keep the groups, each with threads and descriptors. 2.13 frees them; 2.12 was not tried. Where a mesh does
not have the list, the groups stay."""


def mesh_names_missing() -> str:
    """A sentence about a name that `forget_meshes` needs, and which torch does not have; empty: none is missing."""
    for owner, name in _CACHES_OF_MESHES:
        try:
            found = hasattr(getattr(owner(), name), "cache_clear")
        except AttributeError:
            found = False
        if not found:
            where = f"{name} of torch.distributed.tensor, which torch {torch.__version__} does not have and 2.13 has"
            return f"ht.survive with a sharded model needs {where}"
    of_random = getattr(dtensors, "_random", None)
    others = ((torch._C, "_clear_DTensor_sharding_propagator_cache"), (of_random, "_rng_tracker"))
    return next((_missing(at, name, "ht.survive") for at, name in others if not hasattr(at, name)), "")


_CACHES_OF_MESHES: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: DTensor._op_dispatcher.sharding_propagator, "propagate_op_sharding"),
    (lambda: DTensor._op_dispatcher.sharding_propagator, "_propagate_tensor_meta_cached"),
    (lambda: dtensors._redistribute, "_gen_transform_infos"),
    (lambda: dtensors._collective_utils.MeshTopoInfo, "build_from_mesh"),
)
"""Functions of torch with a cache whose keys or values are device meshes."""


# --- tensors ----------------------------------------------------------------------------------------------------------


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


foreach_copy: Callable[..., object] = getattr(torch, "_foreach_copy_", _copy_each)
"""Copies many small tensors in one call: a state of 1,000 tensors is copied at each boundary. Where torch does not have
it, one by one."""

NO_OVERLAP, OVERLAP = 0, 1
"""Answers of `overlap`; 2: perhaps."""


def overlap(tensor: torch.Tensor) -> int:
    """Whether items of a tensor share memory, as those of an expanded one do. Where torch cannot tell: perhaps, and the
    tensor is copied item by item."""
    look = getattr(torch, "_debug_has_internal_overlap", None)
    return 2 if look is None else int(look(tensor))


def _no_version(_: torch.Tensor) -> int:
    return 0


version: Callable[[torch.Tensor], int] = (
    operator.attrgetter("_version") if hasattr(torch.Tensor, "_version") else _no_version
)
"""The count of a tensor's changes in place, to notice what a forward pass has changed. If torch does not have it, it is
0: such a change is then not noticed."""


def local_part(tensor: DTensor) -> torch.Tensor:
    """The part of a sharded tensor that this process holds. `to_local()` is public, and makes a node of autograd and
    waits: some microseconds for each tensor of a state."""
    part: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor.to_local() if part is None else part


def generator_address(generator: torch.Generator) -> int:
    """The address of a generator's C++ object, to read its state without a copy. If torch does not have it, it is 0:
    then the public, slower way is taken."""
    return int(getattr(generator, "_cdata", 0))


# --- modules, scalers, planners ---------------------------------------------------------------------------------------


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers, to notice that one was exchanged: `named_buffers` walks through all modules each time.
    All versions of torch have it, and many programs use it."""
    buffers: dict[str, torch.Tensor | None] = module._buffers
    return buffers


def parts_of(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], dict[str, nn.Module | None]]:
    """A module's own parameters, and the modules within it, to notice that one was exchanged: `named_parameters` walks
    through all modules each time. All versions of torch have them."""
    return module._parameters, module._modules


def unsaved_buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Those of a module's own buffers that are not in its state_dict: `register_buffer(…, persistent=False)`."""
    return {name: module._buffers.get(name) for name in sorted(module._non_persistent_buffers_set)}


def uncompiled(model: nn.Module) -> nn.Module:
    """The module within torch.compile's. Where torch has another name for it, the compiled one: gradients that are
    accumulated in it are then exchanged in each micro-batch."""
    return getattr(model, "_orig_mod", model)


def steps_of(schedule: Any) -> Any:
    """A value that changes with each step of a schedule: its count, or those of the parts of a ChainedScheduler, which
    has none."""
    own = getattr(schedule, "last_epoch", None)
    return own if own is not None else [steps_of(each) for each in getattr(schedule, "_schedulers", ())]


def kinds_of_replicated() -> list[type]:
    """The class that torch's composable `replicate` mixes into a module, which then hides a DDP module; empty where it
    is not used or not known: such a module then counts as a plain one."""
    kind = getattr(sys.modules.get("torch.distributed._composable.replicate"), "DDP", None)
    return [kind] if isinstance(kind, type) and hasattr(kind, "set_requires_gradient_sync") else []


def hidden_wrapper(module: Any) -> Any:
    """The DDP module that `replicate` hides in this one; None before its first forward pass."""
    replicate = getattr(sys.modules.get("torch.distributed._composable.replicate"), "replicate", None)
    return None if replicate is None else getattr(replicate.state(module), "_ddp", None)


def has_schedule(optimizer: Any) -> bool:
    """Whether a schedule of torch sets this optimizer's rate. False where torch leaves no mark: then one that is
    not tracked is not noticed."""
    return bool(getattr(optimizer.step, "_wrapped_by_lr_sched", False))


def fsdp_exchanges(model: Any) -> bool:
    """Whether the next backward pass of an FSDP2 module exchanges gradients. False where torch cannot tell: the guard
    against exchanges in each micro-batch is then silent."""
    with contextlib.suppress(AttributeError):
        return any(each.reduce_grads for each in _fsdp_groups(model))
    return False


def fsdp_holds_gradients(model: Any) -> bool:
    """Whether an FSDP2 module has gradients that were not exchanged yet, or only in part: these are not in `.grad` of
    its parameters. False where torch cannot tell: then a state may be saved without them."""
    with contextlib.suppress(AttributeError):
        for group in _fsdp_groups(model):
            if getattr(group, "_partial_reduce_output", None) is not None:
                return True
            for each in group.fsdp_params:
                whole = getattr(each, "_unsharded_param", None)  # it has none before the first forward pass
                if each.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                    return True
    return False


def _fsdp_groups(model: Any) -> list[Any]:
    state = model._get_fsdp_state()
    several = hasattr(state, "_fsdp_param_groups")  # torch 2.9 has one group: None for a module without parameters
    groups = state._fsdp_param_groups if several else [state._fsdp_param_group]
    return [each for each in groups if each is not None]


def scale_of(scaler: GradScaler) -> list[torch.Tensor | None]:
    """A scaler's scale and the steps since it last grew; None before its first step. `get_scale()` waits for the GPU.

    Raises ProcessGroupError where torch does not have it."""
    if not (hasattr(scaler, "_scale") and hasattr(scaler, "_growth_tracker")):
        raise ProcessGroupError(_missing(scaler, "_scale", "ht.survive with a GradScaler"))
    return [scaler._scale, scaler._growth_tracker]


def set_scale(scaler: GradScaler, scale: torch.Tensor | None, growth: torch.Tensor | None) -> None:
    """Go back to what `scale_of` gave. What the scaler notes of a step that was interrupted is dropped: it may have
    unscaled gradients."""
    scaler._scale, scaler._growth_tracker = scale, growth
    scaler._per_optimizer_states.clear()


def forget_steps(scaler: GradScaler) -> None:
    """Drop what a scaler has noted of a step that is given up: it would take another optimizer's gradients for
    unscaled. Where torch has another name for it, nothing is dropped; only a scaler that is older than the optimizer
    needs it."""
    getattr(scaler, "_per_optimizer_states", {}).clear()


def caches_plans(planner: Any) -> bool:
    """Whether a planner of torch.distributed.checkpoint gives plans without their data. Where torch does not have the
    attribute, planners do not."""
    return bool(getattr(planner, "_enable_plan_caching", False))


def flat_state(state: Any) -> tuple[dict[str, Any], Any]:
    """The names that torch.distributed.checkpoint gives the leaves of a nested state, and what `nested_state` needs.

    Raises ImportError where torch does not have it."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, mapping = flatten_state_dict(state)
    return flat, mapping


def nested_state(flat: dict[str, Any], mapping: Any) -> Any:
    """The nested state of these leaves."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    return unflatten_state_dict(flat, mapping)


def official_names(module: nn.Module, raw: str) -> set[str]:
    """A parameter's names in `get_model_state_dict`. Where torch does not have the function, the names are those of the
    module, without the prefixes of DDP, torch.compile and activation checkpointing."""
    try:
        from torch.distributed.checkpoint.state_dict import _get_fqns
    except ImportError:
        parts = [each for each in raw.split(".") if each not in ("_orig_mod", "_checkpoint_wrapped_module")]
        wrapped = isinstance(uncompiled(module), DistributedDataParallel)
        return {".".join(parts[1:] if wrapped else parts)}
    return set(_get_fqns(module, raw))


def kinds_of_passes() -> list[Any]:
    """The class of a DataLoader's iterators, and of torchdata's, to count the batches of a pass that has begun already.
    Empty where torch does not have it: a training loop over such a pass is then not noticed."""
    found = getattr(torch.utils.data.dataloader, "_BaseDataLoaderIter", None)
    return [] if found is None else [found]


MAKER_OF_PASSES = "_get_iterator"
"""The method of torchdata's loader that makes its iterators. Where it is missing, passes that begin within an epoch
draw a random number."""


def batches_taken(batches: Any) -> int:
    """The number of batches that an iterator of a DataLoader has handed out, also before its state was loaded; 0: torch
    does not have it."""
    return int(getattr(batches, "_num_yielded", 0))


def pass_of(loader: Any) -> Any:
    """The iterator that torchdata's loader has made last; None where it is not known: a training loop over it, begun
    before `track()`, is then taken for one over data that is not tracked."""
    return getattr(loader, "_iterator", None)


def parts_of_pass(batches: Any) -> tuple[Any, Any]:
    """The dataset and the sampler of a DataLoader's iterator; None where torch has other names for them."""
    return getattr(batches, "_dataset", None), getattr(batches, "_index_sampler", None)


# --- DistributedDataParallel ------------------------------------------------------------------------------------------
# Reducers cannot be built again by public names: see reducers.py. `reducer_names_missing` is asked before a training
# function begins in `ht.survive`, which is a plain call where one is missing. Tried on 2.13.0; 2.14.1 has them, too.

_OF_WRAPPERS = (
    "__setstate__",
    "_build_params_for_reducer",
    "_get_ddp_logging_data",
    "_register_builtin_comm_hook",
)
_OF_REDUCERS = ("_get_zeros_like_grad_buckets", "_remove_autograd_hooks")


def reducer_names_missing() -> str:
    """A sentence about a name that `build_reducer` and what is below need, and which torch does not have; empty: none
    is missing."""
    owners = (
        (DistributedDataParallel, _OF_WRAPPERS),
        (dist.Reducer, _OF_REDUCERS),
        (dist, ("_compute_bucket_assignment_by_size", "_DEFAULT_FIRST_BUCKET_BYTES")),
    )
    for owner, names in owners:
        for name in names:
            if not hasattr(owner, name):
                return _missing(owner, name, "ht.survive")
    return ""


def reduced_parameters(wrapper: DistributedDataParallel) -> list[nn.Parameter] | None:
    """The parameters that a DDP module's reducer was built with, in no certain order; None: not known, which happens
    with sparse gradients only. It needs memory for all gradients for a moment, which on the CPU is not touched."""
    try:
        return [each for bucket in wrapper.reducer._get_zeros_like_grad_buckets() for each in bucket.parameters()]
    except RuntimeError:  # a bucket of a sparse gradient has no memory that zeros could be like
        now = parameters_to_reduce(wrapper)
        return now if len(now) == wrapper._get_ddp_logging_data()["num_parameter_tensors"] else None


def parameters_to_reduce(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters with which a reducer would be built now, in DDP's numbering."""
    parameters: list[nn.Parameter] = wrapper._build_params_for_reducer()[0]
    return parameters


def gradient_order(wrapper: DistributedDataParallel) -> list[int]:
    """Numbers of the parameters in the order in which a reducer puts them into its buckets after its first backward
    pass; empty: that is not known, or torch does not have it."""
    try:
        wrapper.logger.set_runtime_stats_and_log()  # otherwise the data are those of the last forward pass's beginning
        facts = wrapper._get_ddp_logging_data()
    except AttributeError:
        return []
    text = facts.get("rebuilt_per_bucket_param_indices") or facts.get("prev_iteration_grad_ready_order_indices") or ""
    order = [int(each) for each in text.replace(",", " ").split()]
    return order if sorted(order) == list(range(facts.get("num_parameter_tensors", 0))) else []


def was_used(wrapper: DistributedDataParallel) -> bool:
    """Whether the module had a forward pass with its reducer. False if torch does not count them."""
    try:
        wrapper.logger.set_runtime_stats_and_log()
        return int(wrapper._get_ddp_logging_data().get("iteration", 0)) > 0
    except AttributeError:
        return False


def comm_hooks(wrapper: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """The functions that exchange gradients instead of DDP, with their states."""
    return list(wrapper._comm_hooks)


def is_joined(wrapper: DistributedDataParallel) -> bool:
    """Whether the module is inside `with model.join():`."""
    return bool(getattr(getattr(wrapper, "_join_config", None), "enable", False))


def steps_in_backward(parameter: nn.Parameter) -> bool:
    """Whether an optimizer changes the parameter within the backward pass (`_apply_optimizer_in_backward`)."""
    return hasattr(parameter, "_in_backward_optimizers")


def has_other_reducer(wrapper: DistributedDataParallel) -> str:
    """The option for which a DDP module's gradients are not, or not only, exchanged by its reducer; empty: there is
    none. `build_reducer` cannot do such modules."""
    if getattr(wrapper, "_use_python_reducer", False):
        return "torch._dynamo.config.optimize_ddp = 'python_reducer'"
    if getattr(wrapper, "mixed_precision", None) is not None:
        return "mixed_precision"
    return "delay_all_reduce_named_params" if getattr(wrapper, "_delay_all_reduce_params", None) else ""


def drop_reducer(wrapper: DistributedDataParallel, *, group: bool) -> None:
    """Drop a DDP module's reducer. `group`: drop the process group, too: the next reducer is for the default one."""
    reducer = wrapper.__dict__.get("reducer")
    if reducer is not None:
        # Other references may keep it alive: without its hooks it takes part in no backward pass any more.
        reducer._remove_autograd_hooks()
    for name in ("reducer", "logger", *(["process_group"] if group else ())):
        wrapper.__dict__.pop(name, None)


BUILTIN = "BuiltinCommHookType."


def hook_name(wrapper: DistributedDataParallel) -> str:
    """The name of the function that exchanges gradients, as DDP has noted it; empty: none was registered."""
    return str(wrapper._get_ddp_logging_data().get("comm_hook") or "")


def build_reducer(
    wrapper: DistributedDataParallel, order: Sequence[int], hooks: Sequence[tuple[Any, Any]], builtin: str
) -> None:
    """Give a DDP module without a reducer a new one, as when it is unpickled. `order`: the order of its gradients
    (`gradient_order`); empty: not known. `hooks`, `builtin`: from `comm_hooks` and `hook_name`."""
    wrapper.require_forward_param_sync = True
    wrapper._has_rebuilt_buckets = False
    # A reducer learns a static graph in its first backward pass, at the end of which the gradients are exchanged. The
    # module, not the reducer, starts that exchange, and `__setstate__` does not reset the module.
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False
    wrapper._comm_hooks = []
    with _buckets_in_order(wrapper, list(order)):
        wrapper.__setstate__(dict(wrapper.__dict__))
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)
    if builtin.startswith(BUILTIN):  # these are not among `_comm_hooks`
        wrapper._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, builtin.removeprefix(BUILTIN)))


def _bucket_sizes(wrapper: DistributedDataParallel) -> list[int]:
    """The reducer's limits of the buckets after the first backward pass (bytes)."""
    listed: list[int] = list(getattr(wrapper, "bucket_bytes_cap_list", ()))  # from DDP's argument bucket_cap_mb_list
    cap: int = wrapper.bucket_bytes_cap
    first: int = dist._DEFAULT_FIRST_BUCKET_BYTES if wrapper.bucket_bytes_cap_default else cap
    return listed or [first, cap]


@contextlib.contextmanager
def _buckets_in_order(wrapper: DistributedDataParallel, order: list[int]) -> Iterator[None]:
    """Let the reducer that is made in this block have the buckets that it would make after a backward pass in this
    order."""
    assign = dist._compute_bucket_assignment_by_size

    def in_order(parameters: list[Any], limits: list[int], sparse: list[bool], *more: Any) -> Any:
        if sorted(order) != list(range(len(parameters))):
            return assign(parameters, limits, sparse, *more)
        sizes = _bucket_sizes(wrapper)  # `limits` are for the first pass: one bucket without a limit
        found = assign([parameters[each] for each in order], sizes, [sparse[each] for each in order], order)
        return tuple(list(reversed(part)) for part in found)  # DDP reverses both: its own order is that of the forward

    dist._compute_bucket_assignment_by_size = in_order
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = assign
