"""NCCL with one rank: another thread aborts the communicator while kernels run, and a new one works in the same process.

It calls what `ht.survive` calls in a regroup. Several ranks with NCCL need several GPUs: tests/gpu/test_gpu_survivors.py.
"""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from benchmarks.gpu.measuring import ON_GPU, note, say
from holdfast.train import torch_private

ROUNDS = 5
BUSY_CYCLES = 2_000_000_000
"""About a second of an H100's clock."""


def join() -> None:
    backend = "nccl" if ON_GPU else "gloo"
    device = torch.device("cuda", 0) if ON_GPU else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)


def reduce() -> float:
    ones = torch.ones(1 << 20, device="cuda" if ON_GPU else "cpu")
    dist.all_reduce(ones)
    return float(ones.sum())


def leave() -> None:
    if ON_GPU:
        torch_private.abort_groups()
    else:
        dist.destroy_process_group()


def main() -> None:
    if ON_GPU:
        torch.cuda.set_device(0)
    free_bytes = []
    for number in range(ROUNDS):
        began_s = time.monotonic()
        join()
        assert reduce() == 1 << 20, "the all-reduce of a new communicator is wrong"
        note(f"communicator {number}: made, first all-reduce", time.monotonic() - began_s, "s")
        if ON_GPU:
            torch.cuda._sleep(BUSY_CYCLES)
            dist.all_reduce(torch.ones(1 << 20, device="cuda"), async_op=True)
        began_s = time.monotonic()
        aborting = threading.Thread(target=leave)
        aborting.start()
        aborting.join()
        note(f"communicator {number}: aborted while kernels run", time.monotonic() - began_s, "s")
        if ON_GPU:
            torch.cuda.synchronize()
            free_bytes.append(torch.cuda.mem_get_info()[0])
    if ON_GPU:
        note("device memory that each abort has lost", (free_bytes[1] - free_bytes[-1]) / (ROUNDS - 2) / 2**20, "MiB")
    say("communicators in one process", ROUNDS)


if __name__ == "__main__":
    main()
