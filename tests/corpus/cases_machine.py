"""Faults of machines: memory, disks, limits, libraries. Ranks 0 to 3 are on node a, 4 to 7 on node b."""

from __future__ import annotations

from tests.corpus.telling import NCCL_REMOTE, SITE, STORE_GONE, case, cut, fails

MACHINE = [
    case("kernel_oom", "HF203", 6, fails(6, code=-9, oom=True), cut(0)),
    case(
        "oom_killed_silently",
        "HF204",
        4,
        *(cut(rank, NCCL_REMOTE) for rank in (0, 1, 2, 3, 5)),
        fails(4, code=-9),
        hard=True,
    ),
    case(
        "shm_full",
        "HF216",
        0,
        fails(
            0,
            "RuntimeError: unable to write to file </torch_4711_1234_5>: No space left on device (28)",
            stderr="ERROR: Unexpected bus error encountered "
            "in worker. This might be caused by insufficient shared memory (shm).\n",
        ),
    ),
    case(
        "shm_open",
        "HF216",
        3,
        fails(
            3,
            "RuntimeError: unable to open shared memory object </torch_213_99> in read-write mode: No such file or directory (2)",
        ),
    ),
    case(
        "loader_bus_error",
        "HF216",
        2,
        fails(
            2,
            "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared "
            "memory. Please try to raise your shared memory limit.",
            frames=(f"{SITE}/torch/utils/data/dataloader.py",),
        ),
    ),
    case(
        "loader_exited_shm",
        "HF216",
        2,
        fails(
            2,
            "RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly",
            after="_queue.Empty",
            stderr="ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\nTraceback ...\n",
        ),
    ),
    case(
        "loader_killed",
        "HF215",
        7,
        cut(0, NCCL_REMOTE),
        fails(7, "RuntimeError: DataLoader worker (pid 31) is killed by signal: Killed. "),
        hard=True,
    ),
    case(
        "loader_segfault",
        "HF215",
        1,
        fails(1, "RuntimeError: DataLoader worker (pid(s) 77, 78) exited unexpectedly", after="_queue.Empty"),
    ),
    case(
        "ancdata",
        "HF230",
        5,
        fails(5, "RuntimeError: received 0 items of ancdata", frames=(f"{SITE}/torch/multiprocessing/reductions.py",)),
    ),
    case(
        "shm_files",
        "HF230",
        5,
        fails(
            5,
            "RuntimeError: unable to open shared memory object </torch_9_1> in read-write mode: Too many open files (24)",
        ),
    ),
    case("quota", "HF214", 0, fails(0, "OSError: [Errno 122] Disk quota exceeded: '/mnt/ckpt/step_900.pt'"), cut(4)),
    case(
        "no_fork",
        "HF231",
        6,
        fails(
            6,
            "BlockingIOError: [Errno 11] Resource temporarily unavailable",
            frames=("/usr/lib/python3.11/multiprocessing/popen_fork.py",),
        ),
    ),
    case(
        "openblas_threads",
        "HF231",
        6,
        fails(
            6,
            code=-11,
            stderr="OpenBLAS blas_thread_init: pthread_create failed for thread 63 of 64: Resource temporarily unavailable\n",
        ),
    ),
    case(
        "numpy_memory",
        "HF239",
        1,
        fails(
            1,
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 29.8 GiB for an array with shape (4000000000,) and data type float64",
        ),
    ),
    case(
        "bad_alloc",
        "HF239",
        3,
        fails(
            3,
            code=-6,
            stderr="terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
        ),
    ),
    case(
        "stale_handle",
        "HF217",
        4,
        fails(4, "OSError: [Errno 116] Stale file handle: '/mnt/nfs/data/shard-003.tar'"),
        cut(2),
    ),
    case("read_only", "HF218", 4, fails(4, "OSError: [Errno 30] Read-only file system: '/ckpt/last.pt'")),
    case(
        "file_on_one_node",
        "HF217",
        4,
        cut(0, late=False),
        fails(4, "FileNotFoundError: [Errno 2] No such file or directory: '/data/train/meta.json'"),
        hard=True,
    ),
    case(
        "module_on_one_node",
        "HF211",
        5,
        fails(5, "ModuleNotFoundError: No module named 'flash_attn'"),
        fails(4, "ModuleNotFoundError: No module named 'flash_attn'"),
        cut(0, STORE_GONE),
    ),
    case("no_torch", "HF211", 4, fails(4, "ModuleNotFoundError: No module named 'torch'")),
    case(
        "glibc",
        "HF212",
        6,
        fails(
            6,
            "ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.32' not found (required by /opt/venv/lib/python3.11/site-packages/flash_attn_2_cuda.so)",
        ),
    ),
    case(
        "abi",
        "HF212",
        0,
        fails(
            0,
            "ImportError: /opt/venv/lib/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationENSt7",
        ),
    ),
    case(
        "numpy_abi",
        "HF212",
        0,
        fails(
            0,
            "ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header, got 88 from PyObject",
        ),
    ),
    case(
        "fixed_port",
        "HF213",
        1,
        fails(
            1,
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, "
            "name: EADDRINUSE, message: address already in use",
            frames=(f"{SITE}/torch/distributed/rendezvous.py",),
        ),
        cut(0, STORE_GONE, late=True),
    ),
]
