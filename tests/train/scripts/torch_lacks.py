"""Prints what tests need and this torch lacks, as JSON: for each need the reason; empty: it has it."""

import json

import torch

from holdfast.train import torch_private

streams = "" if hasattr(torch.cpu.Stream, "record_event") else f"torch {torch.__version__} has no FSDP2 on CPUs"
recorded = hasattr(torch._C._distributed_c10d, "FlightRecorderHook")
recorder = "" if recorded else f"torch {torch.__version__} does not record the collectives of every backend; 2.15 does"
counted = torch.__version__.startswith("2.6.")
buffers = f"DDP of torch {torch.__version__} changes all buffers in each step" if counted else ""
print(
    json.dumps(
        {
            "meshes": torch_private.mesh_names_missing(),
            "fsdp": streams,
            "recorder": recorder,
            "constant buffers": buffers,
        }
    )
)
