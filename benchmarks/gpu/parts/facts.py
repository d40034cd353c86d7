"""The machine: device, driver, versions, and whether our compiled part is there."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib.metadata import version
from importlib.util import find_spec

import torch

from benchmarks.gpu.measuring import ON_GPU, note, say


def main() -> None:
    say("python", platform.python_version())
    say("torch", torch.__version__)
    say("kernel", platform.release())
    note("cores", len(os.sched_getaffinity(0)))
    say(
        "holdfast",
        version("holdfast") + (", with" if find_spec("holdfast.train._stream") else ", WITHOUT") + " its compiled part",
    )
    shm = os.statvfs("/dev/shm")
    note("/dev/shm", shm.f_blocks * shm.f_frsize / 2**30, "GiB")
    if not ON_GPU:
        say("device", "cpu")
        return
    say("device", torch.cuda.get_device_name(0))
    say("CUDA", torch.version.cuda)
    say("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    note("device memory", torch.cuda.get_device_properties(0).total_memory / 2**30, "GiB")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        line = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,mig.mode.current", "--format=csv,noheader"]
        say("driver, mode, MIG", subprocess.run(line, capture_output=True, text=True, timeout=20).stdout.strip())


if __name__ == "__main__":
    main()
