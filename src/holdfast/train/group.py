"""The process group: made for any launcher, bound to this process's device, and left without a hang.

Knows torch.distributed and the launchers' variables, and of holdfast.train only the guards, which it switches on.

**Leaving.** Without a failure the ranks leave together: each reports to the store that it is done and waits for the
others, so that no rank closes a connection that a peer still uses. After an exception a rank does not wait.

Only torch's registration is destroyed then. A gloo group itself is left to the end of the process on purpose: its
destructor joins threads, and DDP's reducer may have the last reference to it and run the destructor while it has the
interpreter's lock. One of those threads may wait for that lock, or for a peer that is dead: a hang that no Python code
can end. (Measured with four ranks after DDP on two busy cores: 15 of 96 processes hung in or after torch's
destroy_process_group, with a barrier before it or without; of 340 processes that leave the group, none.) A few idle
threads and sockets stay. NCCL's communicators have GPU memory, so they are destroyed, or aborted after an exception.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from holdfast.protocol.errors import ProcessGroupError, SnapshotIncompleteError
from holdfast.train import torch_private
from holdfast.train.agent_channel import GroupSockets, is_replacement
from holdfast.train.agreement import PATIENCE_S, Peers
from holdfast.train.guards import active, enabled, guarded, renew_guards, replaced, watch
from holdfast.train.replica_check import check_by_default, checked, renew_checks


def ddp(module: nn.Module, group: ProcessGroup, **arguments: Any) -> DistributedDataParallel:
    """`module`, moved to this process's device, as DistributedDataParallel; `arguments` are DDP's own.

    Its replicas are compared now and then, and differences are reported: see `check_replicas`. On CUDA `device_ids` is
    this process's device. A module that spans several devices, or that is on its device already, is wrapped by hand:
    everything in holdfast.train takes any DDP, FSDP2 or plain module.
    Raises ProcessGroupError for a module that is sharded by FSDP2: it needs no DDP.
    """
    if any(isinstance(each, FSDPModule) for each in module.modules()):
        raise ProcessGroupError("The module is sharded by fully_shard already; use it as it is, without DDP.")
    # Moved before it is wrapped, and before an optimizer is made of its parameters.
    module = module.to(group.device)
    if group.device.type == "cuda":
        arguments.setdefault("device_ids", [group.device.index])
    model = DistributedDataParallel(module, **arguments)
    watch(model)
    if active():
        check_by_default(model)
    return model


DROP_S = 0.005
"""Pause between the end of a group's operations and its destruction."""
DROP_LIMIT_S = 1.0
"""A gloo group that is not destructed after this time is left to its thread."""
EXIT_PATIENCE_S = 60.0
"""Limit of a rank's wait at its exit for the others to be done too."""
LONE_EXIT_PATIENCE_S = 3.0
"""The same for a rank that has left `ht.survive` by sys.exit(). It is short: if the others do not do the same at this
moment, they need this rank, and have to notice its end soon."""

_groups = itertools.count()
"""A number for each group of this process. It is the same on all ranks: they make their groups in the same order."""


@dataclass(eq=False, slots=True)
class ProcessGroup:
    """This process's rank and the job's ranks. If the training function runs in `ht.survive`, `rank`, `world` and
    `store` change with the world: read them when they are needed, and keep no copy."""

    rank: int
    world: int
    """The number of the job's processes. A replacement has this number already before it joins the others, because the
    program computes with it."""
    local_rank: int
    """This process's number on its node; it chooses the device."""
    device: torch.device
    store: Any
    """A torch.distributed.Store with a prefix of ours, for small agreements."""
    connection: GroupConnection | None = None
    """The way in which this process joined; None: the program made the group itself, and no regroup is possible."""

    def mesh(self, **sizes: int) -> DeviceMesh:
        """A device mesh of all ranks: the names of its dimensions, from the outer to the inner one, with their sizes.

            mesh = pg.mesh(replicate=-1, shard=4)

        One size may be -1: the rest. In `ht.survive` make it in the training function: it is for the ranks that are
        there. Raises ProcessGroupError if the ranks cannot be divided so."""
        return init_device_mesh(self.device.type, _shape_of_mesh(self.world, sizes), mesh_dim_names=tuple(sizes))


def _shape_of_mesh(world: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes, with the rest in place of -1. Raises ProcessGroupError."""
    wanted = ", ".join(f"{name}={size}" for name, size in sizes.items())
    known = math.prod(size for size in sizes.values() if size != -1)
    rests = list(sizes.values()).count(-1)
    if not sizes or rests > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ProcessGroupError(f"mesh({wanted}): give each dimension a size of at least 1; one of them may be -1.")
    if world % known or (not rests and world != known):
        raise ProcessGroupError(f"mesh({wanted}) does not fit {world} ranks.")
    return tuple(world // known if size == -1 else size for size in sizes.values())


@dataclass(slots=True)
class GroupConnection:
    """The facts that are needed to join again, in another world."""

    backend: str | None
    timeout_s: float | None
    sockets: GroupSockets = field(default_factory=GroupSockets)
    outlives: Callable[[BaseException], bool] | None = None
    """A function that says whether an error of the group is the consequence of a loss that this process survives; None:
    it survives none."""
    exit_patience_s: float = EXIT_PATIENCE_S
    on_nccl: bool = False
    """Whether the group uses NCCL. After `_abort_process_group` torch does not know it any more."""
    hook: Callable[..., object] | None = None
    """The sys.excepthook that torch has made, which names the rank."""
    wrapped_hook: Callable[..., object] = sys.excepthook
    """The hook that torch has wrapped."""
    generation_store: Any = None
    """The store of a generation that was formed by running processes, also for those that do not train in it; None: it
    is another one."""
    entering: Callable[[Any], object] = lambda _: None
    """A function that is called with that store, before the ranks of the generation wait for each other."""

    def end_operations(self) -> None:
        """End every operation of the group's ranks in this process. Any thread may call it, and again."""
        self.sockets.cut()
        if not self.on_nccl:
            torch_private.end_gloo_operations()
        elif dist.is_initialized():  # else it has aborted them before
            torch_private.abort_groups()

    @contextlib.contextmanager
    def wrapping_once(self) -> Iterator[None]:
        """Let torch wrap the original hook when a group is made in this block, not its own wrapper of an earlier group:
        a traceback shall name only the newest rank."""
        if sys.excepthook is self.hook:
            sys.excepthook = self.wrapped_hook
        self.wrapped_hook = sys.excepthook
        yield
        self.hook = sys.excepthook


def is_outlived(error: BaseException) -> bool:
    """Whether this error of the group is the consequence of a loss after which this process goes on with others."""
    group = open_group()
    connection = None if group is None else group.connection
    return connection is not None and connection.outlives is not None and connection.outlives(error)


_open: list[ProcessGroup] = []
"""The group of `process_group()`, while it is open. One per process, as torch's default group is."""


def open_group() -> ProcessGroup | None:
    """The group that `process_group()` has joined; None outside of it."""
    return _open[-1] if _open else None


@contextlib.contextmanager
def process_group(
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    guards: bool = True,
) -> Iterator[ProcessGroup]:
    """Join the group that the launcher describes in the environment; a world of one without a launcher.

        with ht.process_group() as pg:
            model = ht.ddp(Net(), pg)

    It works under holdfast run, torchrun and in one plain process. `device`: by default the GPU with this process's
    local rank if there is CUDA, else the CPU; it becomes the current device. `backend`: by default nccl on CUDA, else
    gloo. `timeout_s`: limit of a collective; None: torch's default. `guards`: warn about common mistakes (guards.py).

    A group that exists already is used as it is and left alone at exit. Raises ProcessGroupError when the environment
    does not describe a group or there is no such device.
    """
    variables = _LauncherVariables.of_environment()
    connection = None if dist.is_initialized() else GroupConnection(backend, timeout_s)
    if connection is not None:
        chosen = _choose_device(device, variables.local_rank)
        _join(variables, chosen, connection)
    else:
        chosen = torch.device(device) if device is not None else _device_in_use()
    rank, world = (variables.rank, variables.world) if variables.alone else (dist.get_rank(), dist.get_world_size())
    store = dist.PrefixStore(f"holdfast.train.{next(_groups)}", torch_private.default_store())
    group = ProcessGroup(rank, world, variables.local_rank, chosen, store, connection)
    clean = False
    _open.append(group)
    try:
        guard = guarded(group) if guards and enabled() else contextlib.nullcontext()
        with _subgroups_noted(group), guard, checked(group):
            try:
                yield group
                clean = True
            except SystemExit as end:
                clean = end.code in (None, 0)
                raise
    finally:
        _open.remove(group)
        if connection is not None:
            _leave(group, clean=clean, patience_s=connection.exit_patience_s)


def regroup(group: ProcessGroup, generation: int, ranks: Callable[[int], int] = lambda world: world) -> Peers | None:
    """Leave the group's old world, whose members may be dead, and join the one that the environment describes now.

    `group` gets its new rank and world. Returns the ranks of the new world. All of them call this, and no thread may be
    in an operation of the old world any more. `ranks`: the number of ranks that are used, of those that are there; the
    others are alone, and get None. Raises RuntimeError and ProcessGroupError, like `process_group`.
    """
    assert group.connection is not None
    _destroy(group)
    variables = _LauncherVariables.of_environment()
    name = _name_of(generation)
    used = replace(variables, world=ranks(variables.world))
    if not 0 <= used.world <= variables.world:
        raise ProcessGroupError(f"ht.survive(ranks=…): {used.world} of {variables.world} ranks would train")
    if variables.rank >= used.world:
        _enter_generation(group.connection, name, _store_of_generation(variables, {}))
        _join(replace(variables, alone=True), group.device, group.connection, name)
        group.rank, group.world, group.store = variables.rank, used.world, torch_private.default_store()
        renew_checks(0, 1, None)
        return None
    _join(used, group.device, group.connection, name)
    group.rank, group.world = used.rank, used.world
    whole = dist.PrefixStore(name, torch_private.default_store())
    group.store = dist.PrefixStore("train", whole)
    renew_guards(group.rank, group.world, dist.PrefixStore("guards", whole))
    renew_checks(group.rank, group.world, dist.PrefixStore("replicas", whole))
    return Peers(group.rank, group.world, dist.PrefixStore("peers", whole) if group.world > 1 else None)


def _destroy(group: ProcessGroup) -> None:
    """Destroy torch's groups, and destruct them: a process may be regrouped hundreds of times."""
    assert group.connection is not None
    if not dist.is_initialized():  # NCCL: the order to regroup has aborted it; or a rank was lost while it was made
        torch_private.forget_half_a_group()
    elif group.connection.on_nccl:
        torch_private.abort_groups()
    else:
        # This rank may have come here by itself: then operations in other threads still wait.
        group.connection.end_operations()
        groups = torch_private.all_groups()
        dist.destroy_process_group()
        _forget_kept(groups)
        # gloo's threads drop the tensors of operations that have failed, for which they need the interpreter's lock;
        # the destructor, which holds the lock, waits for these threads.
        time.sleep(DROP_S)
        # gloo may have lost an operation, for which the destructor waits for ever.
        dropping = threading.Thread(target=groups.clear, name="holdfast-drop", daemon=True)
        dropping.start()
        dropping.join(DROP_LIMIT_S)
    group.store = group.connection.generation_store = None
    group.connection.sockets.forget()


def _forget_kept(groups: Sequence[Any]) -> None:
    """Drop the references of worker/progress.py to these groups, which it keeps so that they are never destructed."""
    kept: dict[int, Any] = getattr(dist.distributed_c10d, "_holdfast_kept", {})
    for each in groups:
        if kept.pop(id(each), None) is not None:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(each))


@contextlib.contextmanager
def _subgroups_noted(group: ProcessGroup) -> Iterator[None]:
    """Note the sockets of groups that the program makes itself in this block (new_group, device meshes): they are cut
    in a regroup, too."""
    c10d = dist.distributed_c10d
    make = getattr(c10d, torch_private.GROUP_MAKER, None)
    if group.connection is None or make is None:
        yield
        return
    sockets = group.connection.sockets

    @functools.wraps(make)
    def noted(*arguments: Any, **keywords: Any) -> Any:
        with sockets.noting():
            return make(*arguments, **keywords)

    with replaced(c10d, **{torch_private.GROUP_MAKER: noted}):
        yield


@dataclass(frozen=True, slots=True)
class _LauncherVariables:
    """The variables that a launcher sets for a process."""

    rank: int
    world: int
    local_rank: int
    launched: bool
    alone: bool = False
    """Whether this is a replacement: it makes a world of one until it joins the others (see survival.py)."""

    @classmethod
    def of_environment(cls) -> _LauncherVariables:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not os.environ.get(name)]
        if "RANK" in missing and "WORLD_SIZE" in missing:
            return cls(0, 1, 0, launched=False)
        if missing and not dist.is_initialized():
            raise ProcessGroupError(
                f"The environment describes half a process group: {', '.join(missing)} is not set.\n"
                "Start the script with holdfast run or torchrun; without a launcher unset RANK and WORLD_SIZE."
            )
        rank, world = _number("RANK", "0"), _number("WORLD_SIZE", "1")
        # Without LOCAL_RANK (srun, mpirun and the like have variables of their own) one node is assumed.
        return cls(rank, world, _number("LOCAL_RANK", str(rank)), launched=True, alone=is_replacement())


def _number(name: str, default: str) -> int:
    text = os.environ.get(name) or default
    if not text.isdecimal():
        raise ProcessGroupError(f"{name}={text!r} is not a number; the launcher sets it.")
    return int(text)


def _choose_device(wanted: str | torch.device | None, local_rank: int) -> torch.device:
    """Choose the device and make it the current one, so that a plain "cuda" means it."""
    device = torch.device(wanted if wanted is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda":
        return device
    index = local_rank if device.index is None else device.index
    count = torch.cuda.device_count()
    if index >= count:
        raise ProcessGroupError(
            f"Local rank {local_rank} wants GPU {index}, and this process sees {count}.\n"
            "Start at most one process per GPU (--nproc-per-node gpu), or use process_group(device='cpu')."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _device_in_use() -> torch.device:
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _join(variables: _LauncherVariables, device: torch.device, connection: GroupConnection, name: str = "") -> None:
    """Make torch's default group. `name`: the name of a world that is formed by running processes, which have a fresh
    store; empty: the processes were just started."""
    timeout_s = connection.timeout_s
    wait = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    with connection.sockets.noting(), connection.wrapping_once():
        if variables.alone or not variables.launched:
            store: Any = dist.HashStore()
        elif name:
            store = _enter_generation(connection, name, _store_of_generation(variables, wait))
            _meet(dist.PrefixStore("meets", store), variables.world)
        else:
            store, _rank, _world = next(dist.rendezvous("env://", variables.rank, variables.world, **wait))
            store = _without_the_dead(store, variables, timeout_s)
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            connection.backend or ("nccl" if on_gpu else "gloo"),
            store=store,
            rank=0 if variables.alone else variables.rank,
            world_size=1 if variables.alone else variables.world,
            device_id=device if on_gpu else None,
            **wait,
        )
        connection.on_nccl = "nccl" in dist.get_backend()


def _meet(store: Any, world: int) -> None:
    """Wait until all ranks of a generation are there. One may be lost on its way: this wait can be cut, and while gloo
    connects two ranks, one of them waits for the other in a way that cannot."""
    if store.add("here", 1) == world:
        store.set("all", "1")
    store.wait(["all"])


def store_ahead(generation: int, environment: Mapping[str, str]) -> Any:
    """A client of the store of a generation that this process has not entered yet. It needs one that an agent serves.
    Raises RuntimeError."""
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return dist.PrefixStore(_name_of(generation), dist.TCPStore(address, port, is_master=False, wait_for_workers=False))


def _name_of(generation: int) -> str:
    return f"holdfast.generation.{generation}"


def _enter_generation(connection: GroupConnection, name: str, store: Any) -> Any:
    """Note the store of a generation that was formed by running processes."""
    connection.generation_store = named = dist.PrefixStore(name, store)
    connection.entering(named)
    return named


def _store_of_generation(variables: _LauncherVariables, wait: Mapping[str, timedelta]) -> Any:
    """A client of the store whose address the variables have now. torch's env:// would use the first address again."""
    serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and variables.rank == 0
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT", "0")
    return dist.TCPStore(address, port, variables.world, is_master=serves, multi_tenant=True, **wait)


def _without_the_dead(store: Any, variables: _LauncherVariables, timeout_s: float | None) -> Any:
    """The store without the keys of an earlier group, which would be mistaken for this one's: gloo hangs on the
    addresses of dead processes.

    torchrun keeps one store over its restarts. It counts them per node, so all ranks know the same number only if there
    is one node; on several nodes they agree on a random word. Under holdfast run every attempt has a fresh store.
    """
    one_node = os.environ.get("GROUP_WORLD_SIZE") == "1"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_node else "0"
    fresh = dist.PrefixStore(f"holdfast.{attempt}.{next(_groups)}", store)
    if one_node or variables.world == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return fresh
    try:
        patience_s = PATIENCE_S if timeout_s is None else timeout_s
        peers = Peers.meeting(fresh, variables.rank, variables.world, patience_s, "ht.process_group()")
    except SnapshotIncompleteError as error:
        raise ProcessGroupError(f"The group did not form: {error.args[0].splitlines()[0]}.") from error
    return peers.store


def _leave(group: ProcessGroup, *, clean: bool, patience_s: float) -> None:
    """Leave the group. `clean`: without an exception; then wait for the others."""
    if not dist.is_initialized():
        return  # the program destroyed it
    together = dist.get_world_size() > 1  # False also in a replacement that has not joined the others
    if together:
        _wait_for_others(group, patience_s) if clean else _release_others(group)
    if "nccl" in dist.get_backend():
        if not clean:
            # Aborted, not destroyed: to wait for operations of dead peers would delay the exception's traceback.
            with contextlib.suppress(RuntimeError, AttributeError):
                torch_private.abort_groups()
            return
    elif together:
        for each in torch_private.all_groups():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # so it is never destructed: see the module's docstring
    dist.destroy_process_group()


def _wait_for_others(group: ProcessGroup, patience_s: float) -> None:
    """Wait until all ranks are done, or some are gone, so that waiting is useless."""
    patience = timedelta(seconds=patience_s)
    with contextlib.suppress(RuntimeError):  # torch raises it for time-outs, and for a store whose host has left
        if group.store.add("done", 1) == group.world:
            group.store.set("all_done", b"1")
        group.store.wait(["all_done"], patience)
        if group.store.get("all_done") != b"1":
            return
        # Rank 0 may be the store's host (if no launcher serves one): it leaves when the others have read the answer.
        if group.store.add("read", 1) == group.world:
            group.store.set("all_read", b"1")
        if group.rank == 0:
            group.store.wait(["all_read"], patience)


def _release_others(group: ProcessGroup) -> None:
    """End the wait of ranks that wait for this one at their exit. It does not wait: a store's `set` has no answer."""
    with contextlib.suppress(RuntimeError):
        group.store.set("all_done", b"0")
