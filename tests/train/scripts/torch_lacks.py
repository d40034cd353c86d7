"""Prints what tests need and this torch lacks, as JSON: for each need the reason; empty: it has it."""

import json

import torch

from holdfast.train import torch_private

streams = "" if hasattr(torch.cpu.Stream, "record_event") else f"torch {torch.__version__} has no FSDP2 on CPUs"
print(json.dumps({"meshes": torch_private.mesh_names_missing(), "fsdp": streams}))
