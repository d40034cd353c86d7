"""Answers what `holdfast doctor` asks about torch. It is run by its path under the Python that the workers use, in a
process of its own.

    python checkup.py facts                    prints one line of JSON about torch and its GPUs, and ends
    python checkup.py reduce RANK WORLD S      makes a small all-reduce with gloo; rank 0 prints {"port": P} of its
                                               store, the others read `HOST PORT` from stdin; then one line of JSON says
                                               how it went, and the process stays until stdin ends: its peers may need
                                               it

torch's own output goes to stderr. Standard library and torch only: this file imports nothing of holdfast.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

ELEMENTS = 2**18
"""The number of floats in the all-reduce: a megabyte."""
ROUNDS = 3


def facts() -> dict[str, Any]:
    """Facts about torch. Raises any exception that the import of torch raises."""
    import torch

    distributed = torch.distributed.is_available()
    found: dict[str, Any] = {
        "cpu_s": time.process_time(),
        "load": os.getloadavg()[0] / (os.cpu_count() or 1),
        "version": str(torch.__version__),
        "cuda": str(getattr(torch.version, "cuda", None) or ""),
        "hip": str(getattr(torch.version, "hip", None) or ""),
        "distributed": distributed,
        "gloo": bool(distributed and torch.distributed.is_gloo_available()),
    }
    if found["cuda"] or found["hip"]:
        found |= gpu_facts(torch)
    return found


def gpu_facts(torch: Any) -> dict[str, Any]:
    """Facts about CUDA, or ROCm under the same names, and the GPUs; no context is made on any GPU."""
    found: dict[str, Any] = {"gpus": 0}
    try:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # noqa: BLE001 - a build without NCCL raises different exceptions
        sys.stderr.write(f"no NCCL: {error}\n")
    try:
        torch.cuda.init()
        found["gpus"] = torch.cuda.device_count()
        # ROCm's architectures have other names (gfx942), which do not follow from the version of a GPU.
        archs = [] if getattr(torch.version, "hip", None) else torch.cuda.get_arch_list()
        found["unsupported"] = [
            f"GPU {index} (sm_{major}{minor})"
            for index in range(found["gpus"])
            for major, minor in [torch.cuda.get_device_capability(index)]
            if archs and not any(runs_on(arch, major, minor) for arch in archs)
        ]
    except Exception as error:  # noqa: BLE001 - whatever it is, the doctor reports it
        found["gpu_error"] = first_line(error)
    return found


def runs_on(arch: str, major: int, minor: int) -> bool:
    """Whether code for this architecture runs on a GPU of this version: `sm_86` is code for GPUs of its own major
    version, from its minor one on; `compute_80` is compiled for any newer GPU."""
    kind, _, digits = arch.partition("_")
    number = int(digits.rstrip("af"))
    if kind == "compute":
        return number <= major * 10 + minor
    return number // 10 == major and number % 10 <= minor


def reduce(rank: int, world: int, limit_s: float) -> None:
    """Make the all-reduce, and print the result. Raises any exception of torch."""
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=limit_s)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False, timeout=limit)
        say({"port": store.port})
    else:
        host, port = sys.stdin.readline().split()
        store = dist.TCPStore(host, int(port), world, is_master=False, timeout=limit)
    began = time.monotonic()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    for _ in range(ROUNDS):
        values = torch.full((ELEMENTS,), float(rank + 1))
        dist.all_reduce(values)
        wanted = world * (world + 1) / 2
        if not bool((values == wanted).all()):
            raise ArithmeticError(f"the sum is {values[0].item()}, not {wanted}")
    say({"ok": True, "seconds": time.monotonic() - began})


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]


def main() -> None:
    try:
        if sys.argv[1] == "facts":
            say(facts())
        else:
            reduce(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    except Exception as error:  # noqa: BLE001 - the answer is what the doctor waits for
        say({"ok": False, "error": f"{type(error).__name__}: {first_line(error)}"})
    if sys.argv[1] == "reduce":
        sys.stdin.read()
    sys.stdout.flush()
    os._exit(0)  # a group whose peers are gone may abort in its destructor


if __name__ == "__main__":
    del sys.path[0]  # our folder: its files must not hide modules with the same names
    main()
