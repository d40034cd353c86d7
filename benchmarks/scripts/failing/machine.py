"""Memory, shared memory, threads: what the machine has no more of."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from multiprocessing import shared_memory

from .parts import one


@one(1, "HF239")
def memory_limit_of_addresses() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    kept = [bytes(2**24) for _ in range(1000)]
    print(len(kept))


@one(1, "HF239", says="Unable to allocate")
def array_too_large() -> None:
    import numpy as np

    print(np.ones((200_000, 30_000_000)).sum())


@one(1, "HF239")
def bad_alloc() -> None:
    sys.stderr.write("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n")
    sys.stderr.flush()
    os.abort()


@one(1, "HF239")
def child_cannot_be_forked() -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@one(1, "HF203", world="small-memory")
def kernel_runs_out_of_memory() -> None:
    kept = [b"x" * 2**24 for _ in range(1000)]
    print(len(kept))


@one(1, "HF216", world="small-shm")
def shared_memory_is_too_small() -> None:
    block = shared_memory.SharedMemory(create=True, size=2**26)
    block.buf[:] = bytes(2**26)


@one(1, "HF216", world="small-shm", flags=("--preload=torch",))
def shared_tensor_is_too_large() -> None:
    import torch

    torch.ones(2**24).share_memory_()


@one(1, "HF231")
def thread_cannot_start() -> None:
    def start_new_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    threading._start_new_thread = start_new_thread  # type: ignore[attr-defined]
    threading.Thread(target=print).start()


@one(1, "HF231")
def process_cannot_start() -> None:
    if os.geteuid() == 0:
        os.setresuid(64123, 64123, 64123)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    subprocess.run(["true"], check=True)
