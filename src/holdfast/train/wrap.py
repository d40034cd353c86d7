"""DistributedDataParallel with the right device. Knows the process group's device and the guards."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from holdfast.core.errors import ProcessGroupError
from holdfast.train.group import ProcessGroup
from holdfast.train.guards import watch


def ddp(module: nn.Module, group: ProcessGroup, **arguments: Any) -> DistributedDataParallel:
    """`module`, moved to this process's device, as DistributedDataParallel; `arguments` are DDP's own.

    On CUDA `device_ids` is this process's device. A module that spans several devices, or that has been put where it
    belongs already, is wrapped by hand: everything in holdfast.train takes any DDP, FSDP2 or plain module.
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
    return model
