"""DDP modules in a world of one: why their reducers cannot be built again, and how they are. Prints a JSON object."""

from __future__ import annotations

import gc
import json
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import holdfast.train as ht
from holdfast.protocol.errors import ProcessGroupError
from holdfast.train import torch_private
from holdfast.train.reducers import Reducers

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


class Net(nn.Module):
    def __init__(self, **more: object) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        for name, each in more.items():
            setattr(self, name, each)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(rows))


def ddp(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Net(), **options)


def hooked(hook: Hook, state: object = None) -> DistributedDataParallel:
    model = ddp()
    model.register_comm_hook(state, hook)
    return model


calls: list[int] = []


def counting(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    calls.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket)


counting.__annotations__.clear()  # DDP compares them, and they are texts here


def mixed() -> DistributedDataParallel:
    return ddp(mixed_precision=_MixedPrecision(torch.bfloat16, torch.float32, torch.float32))


def delayed(all_of_them: bool = False) -> DistributedDataParallel:
    net = Net()
    net.second.requires_grad_(not all_of_them)
    named = [(f"first.{name}", each) for name, each in net.first.named_parameters()]
    return DistributedDataParallel(net, delay_all_reduce_named_params=named, param_to_hook_all_reduce=net.first.weight)


def by_compiler() -> DistributedDataParallel:
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        return ddp()
    finally:
        torch._dynamo.config.optimize_ddp = before


def buffers_hooked() -> DistributedDataParallel:
    model = ddp()
    model._register_buffer_comm_hook(None, lambda _, buffers: None)
    return model


def stepping() -> DistributedDataParallel:
    net = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    return DistributedDataParallel(net)


def fused() -> DistributedDataParallel:
    model = ddp()
    model._register_fused_optim(torch.optim.SGD, 0.1)
    return model


def ignoring() -> DistributedDataParallel:
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["second.weight"])
    return DistributedDataParallel(net)


def synced_norm() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), dist.new_group())


def sparse_and_frozen() -> DistributedDataParallel:
    model = DistributedDataParallel(Net(table=nn.Embedding(4, 4, sparse=True)))
    model.module.first.requires_grad_(False)
    return model


def joined() -> str:
    model = ddp()
    with model.join():
        return Reducers([model]).begin()


def untracked() -> str:
    model, other = ddp(), ddp()
    said = Reducers([model]).begin()
    del other
    return said


def of_module() -> str:
    """The module within is tracked."""
    model = ddp()
    reducers = Reducers([model.module])
    said = reducers.begin()
    return said or "not found" * (len(reducers.all_orders) != 1)


def without_a_name() -> str:
    names, torch_private._OF_REDUCERS = torch_private._OF_REDUCERS, ("_gone",)
    try:
        return Reducers([ddp()]).begin()
    finally:
        torch_private._OF_REDUCERS = names


NO_DEVICE = torch.version.cuda is not None and not torch.cuda.is_available()
"""This torch makes no module with mixed precision on this machine: it asks for the streams of a GPU."""

MADE: dict[str, Callable[[], nn.Module]] = {
    "plain": ddp,
    **({} if NO_DEVICE else {"mixed_precision": mixed}),
    "delayed": delayed,
    "all delayed": lambda: delayed(True),
    "own group": lambda: ddp(process_group=dist.new_group()),
    "mesh": lambda: ddp(device_mesh=init_device_mesh("cpu", (1,))),
    "default group": lambda: ddp(process_group=dist.group.WORLD),
    "buffer hook": buffers_hooked,
    "optimizer in backward": stepping,
    "fused optimizer": fused,
    "PowerSGD": lambda: hooked(powerSGD_hook, PowerSGDState(None)),
    "wrapped PowerSGD": lambda: hooked(default_hooks.fp16_compress_wrapper(powerSGD_hook), PowerSGDState(None)),
    "local SGD": lambda: hooked(post_localSGD_hook, PostLocalSGDState(None, None, 10)),
    "quantization": lambda: hooked(quantization_hooks.quantization_pertensor_hook),
    "no exchange": lambda: hooked(debugging_hooks.noop_hook),
    "own hook": lambda: hooked(counting),
    "wrapped own hook": lambda: hooked(default_hooks.fp16_compress_wrapper(counting)),
    "float16": lambda: hooked(default_hooks.fp16_compress_hook),
    "float16 of all": lambda: hooked(default_hooks.fp16_compress_hook, dist.group.WORLD),
    "float16 of some": lambda: hooked(default_hooks.fp16_compress_hook, dist.new_group()),
    "wrapped sum": lambda: hooked(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "ignored": ignoring,
    "synced norm": synced_norm,
    "holds a group": lambda: DistributedDataParallel(Net(group=dist.group.WORLD)),
    "holds a mesh": lambda: DistributedDataParallel(Net(mesh=init_device_mesh("cpu", (1,)))),
    "sparse and frozen": sparse_and_frozen,
}
ASKED: dict[str, Callable[[], str]] = {
    "joined": joined,
    "untracked": untracked,
    "of a module": of_module,
    "without a name": without_a_name,
    "python reducer": lambda: reason(by_compiler),  # the last one, for torch never drops it
}


def reason(make: Callable[[], nn.Module]) -> str:
    try:
        model = make()
    except (RuntimeError, TypeError) as error:
        return f"torch: {error}"
    return Reducers([model]).begin()


class Three:
    """Three ranks that all say the same."""

    rank, world = 0, 3

    def broadcast(self, what: Any) -> Any:
        return what

    def all_gather(self, what: Any) -> list[Any]:
        return [what] * self.world


def buckets(model: DistributedDataParallel) -> list[list[str]]:
    names = {id(each): name for name, each in model.module.named_parameters()}
    return [
        [names[id(each)] for each in bucket.parameters()] for bucket in model.reducer._get_zeros_like_grad_buckets()
    ]


def resumed() -> Any:
    """A parameter was frozen after the module was built, and the job goes on from a snapshot."""
    model = ddp(bucket_cap_mb=0.00001)
    model.module.first.weight.requires_grad_(False)
    Reducers([model]).resume([[1, 0, 3, 2]], 3, Three())  # type: ignore[arg-type]
    return buckets(model), [each.requires_grad for each in model.parameters()]


def exchanged() -> str:
    """A parameter is another object than that with which the module was built."""
    model = ddp()
    reducers = Reducers([model])
    reducers.begin()
    model.module.first.weight = nn.Parameter(torch.zeros(4, 4))
    reducers.disconnect()
    try:
        reducers.connect([], [], [])
    except ProcessGroupError as error:
        return str(error)
    return ""


def warned_of_hook(model: DistributedDataParallel, tracked: nn.Module) -> bool:
    """Whether two steps of a training that has snapshots warn of what the hook of this module keeps."""
    optimizer = torch.optim.SGD(tracked.parameters(), lr=0.1)
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(record=True) as told,
        ht.Snapshots(folder, every=None) as snaps,
    ):
        warnings.simplefilter("always")
        snaps.track(model=tracked, optimizer=optimizer)
        snaps.resume()
        for _ in range(2):
            (model if tracked is model.module else tracked)(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            snaps.step()
    return any("keeps a PowerSGDState from step to step" in str(each.message) for each in told)


def hooks_warned_of() -> dict[str, bool]:
    halves = hooked(default_hooks.fp16_compress_hook)
    found = {"halves": warned_of_hook(halves, halves)}
    for name in ("tracked", "the module within is tracked", "another one is tracked"):
        model = hooked(powerSGD_hook, PowerSGDState(None, start_powerSGD_iter=2))
        tracked = {"tracked": model, "the module within is tracked": model.module}.get(name, Net())
        found[name] = warned_of_hook(model, tracked)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, Any] = {}
    for name, make in MADE.items():
        found[name] = reason(make)
        gc.collect()
    for name, ask in ASKED.items():
        found[name] = ask()
        gc.collect()
    more = {"resumed": resumed(), "exchanged": exchanged(), "hooks": hooks_warned_of()}
    print(json.dumps({"no_device": NO_DEVICE, "reasons": found, **more}))


main()
