"""Prints what tests need and this torch lacks, as JSON: for each need the reason; empty: it has it."""

import json

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import torch_private

streams = "" if hasattr(torch.cpu.Stream, "record_event") else f"torch {torch.__version__} has no FSDP2 on CPUs"
recorded = hasattr(torch._C._distributed_c10d, "FlightRecorderHook")
recorder = "" if recorded else f"torch {torch.__version__} does not record the collectives of every backend; 2.15 does"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.BatchNorm1d(2).eval())  # in each step DDP copies rank 0's buffers to all ranks
before = model.module.running_mean._version
model(torch.ones(1, 2))
counted = model.module.running_mean._version > before
buffers = f"torch {torch.__version__} counts it as a change that DDP copies rank 0's buffers" if counted else ""
try:
    dist.all_reduce(torch.ones(1), dist.ReduceOp.AVG)
    averages = ""
except (RuntimeError, ValueError):
    averages = f"torch {torch.__version__} cannot average with gloo"
dist.destroy_process_group()
held = f"torch {torch.__version__} may hold a rank in a group that another rank no longer joins"
half = held if torch.__version__.startswith("2.6.") else ""
dropped = f"torch {torch.__version__} drops the reason for which a checkpoint's description cannot be read"
reasons = dropped if torch.__version__.startswith(("2.9.", "2.11.")) else ""
print(
    json.dumps(
        {
            "meshes": torch_private.mesh_names_missing(),
            "fsdp": streams,
            "recorder": recorder,
            "constant buffers": buffers,
            "half a group": half,
            "averages": averages,
            "reasons": reasons,
        }
    )
)
