"""What the scripts of the campaign share: stamps in the job's folder, and the device of a rank."""

from __future__ import annotations

import os
import time

OUT = os.environ["GPU_OUT"]
ON_GPU = os.environ.get("GPU_DEVICE", "cuda") == "cuda"
DEVICE = "cuda:0" if ON_GPU else "cpu"
"""All ranks are on one GPU."""
RANK = os.environ.get("RANK", "0")


def stamp(name: str, value: float | None = None) -> None:
    """Leave a number, or the time, as `name`: whole or not at all."""
    beside = f"{OUT}/.{name}"
    with open(beside, "w") as file:
        file.write(repr(time.monotonic() if value is None else value))
    os.rename(beside, f"{OUT}/{name}")


def synchronize() -> None:
    """Wait for the device."""
    if ON_GPU:
        import torch

        torch.cuda.synchronize()
