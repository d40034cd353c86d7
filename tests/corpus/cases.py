"""Faults of GPUs, networks and several nodes, written down by hand: who is to blame and what it is called.

Ranks 0 to 3 are on node a, 4 to 7 on node b. The order of failures is the order in which the coordinator heard of them.
"""

from __future__ import annotations

from tests.corpus.telling import (
    C10D,
    GLOO_CLOSED,
    GLOO_RESET,
    NCCL,
    NCCL_REMOTE,
    SITE,
    STORE_BROKEN,
    STORE_GONE,
    TRAIN,
    Case,
    case,
    cut,
    fails,
    watchdog,
)

CUDA_TAIL = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.01 GiB. GPU 2 has a total capacity of 79.10 GiB of which 3.38 GiB is free. "
    "Including non-PyTorch memory, this process has 75.71 GiB memory in use."
)
SEGFAULT = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f0 (most recent call first):\n  File "/data/job/train.py", line 9 in step\n'

GPU = [
    case("cuda_oom", "HF207", 5, fails(5, OOM), cut(1, NCCL_REMOTE, late=True), cut(6, NCCL_REMOTE, late=True)),
    case(
        "cublas_alloc",
        "HF207",
        0,
        fails(0, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ),
    case(
        "oom_in_nccl",
        "HF207",
        3,
        fails(
            3,
            NCCL
            + "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\n"
            "Last error:\nCuda failure 2 'out of memory'",
            frames=(C10D,),
        ),
    ),
    case(
        "device_assert",
        "HF221",
        2,
        fails(2, "RuntimeError: CUDA error: device-side assert triggered" + CUDA_TAIL),
        cut(4, NCCL_REMOTE, late=True),
    ),
    case(
        "illegal_access",
        "HF221",
        6,
        cut(0, NCCL_REMOTE),
        fails(6, "RuntimeError: CUDA error: an illegal memory access was encountered" + CUDA_TAIL),
        hard=True,
    ),
    case("ecc", "HF222", 4, fails(4, "RuntimeError: CUDA error: uncorrectable ECC error encountered" + CUDA_TAIL)),
    case(
        "ecc_by_watchdog",
        "HF222",
        7,
        watchdog(1),
        fails(
            7,
            code=-6,
            stderr="[E ProcessGroupNCCL.cpp:916] [Rank 7] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered\n"
            "terminate called after throwing an instance of 'std::runtime_error'\n  what():  [Rank 7] NCCL watchdog thread terminated with exception: "
            "CUDA error: uncorrectable ECC error encountered\n",
        ),
        hard=True,
    ),
    case("fell_off_the_bus", "HF222", 1, fails(1, "RuntimeError: CUDA error: unknown error" + CUDA_TAIL)),
    case(
        "ordinal",
        "HF220",
        7,
        fails(
            7,
            "RuntimeError: CUDA error: invalid device ordinal" + CUDA_TAIL,
            frames=(f"{SITE}/torch/cuda/__init__.py",),
        ),
    ),
    case(
        "duplicate_gpu",
        "HF220",
        1,
        fails(
            1,
            NCCL
            + "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.3\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
            "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
            frames=(C10D,),
        ),
    ),
    case(
        "driver_mismatch",
        "HF219",
        4,
        fails(
            4,
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an "
            "error? Error 803: system has unsupported display driver / cuda driver combination. The NVIDIA driver on your system is too old (found version 12020).",
        ),
        cut(0, STORE_GONE, late=True),
    ),
    case(
        "no_driver",
        "HF219",
        5,
        fails(
            5,
            "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from http://www.nvidia.com/",
        ),
    ),
    case(
        "forked_cuda",
        "HF219",
        0,
        fails(
            0,
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method",
        ),
    ),
]

NETWORK = [
    case(
        "nccl_system_error",
        "HF208",
        (0, 4),
        fails(
            0,
            NCCL
            + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclSystemError: System call (e.g. socket, malloc) or external library "
            "call failed or device error.\nLast error:\nsocketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host",
            frames=(C10D,),
        ),
        fails(
            4,
            NCCL
            + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclSystemError: System call failed.\nLast error:\n"
            "socketStartConnect: Connect to 172.17.0.1<4521> failed : Software caused connection abort",
            frames=(C10D,),
            late=True,
        ),
    ),
    case(
        "no_interface",
        "HF208",
        4,
        fails(
            4,
            NCCL
            + "internal error - please report this issue to the NCCL developers, NCCL version 2.27.3\nncclInternalError: Internal check failed.\n"
            "Last error:\nBootstrap : no socket interface found",
            frames=(C10D,),
        ),
        cut(0, STORE_BROKEN),
    ),
    case(
        "gloo_interface",
        "HF208",
        2,
        fails(
            2,
            "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth9",
        ),
    ),
    case(
        "gloo_hostname",
        "HF208",
        5,
        fails(
            5,
            "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:211] rv == 0. Unable to resolve hostname to a (local) address",
        ),
        cut(1, late=True),
    ),
    case(
        "watchdogs_everywhere",
        "HF209",
        tuple(range(8)),
        *(watchdog(rank, late=rank > 1) for rank in (3, 1, 0, 2, 4, 5)),
    ),
    case(
        "watchdogs_but_one_raised",
        "HF201",
        2,
        watchdog(0),
        watchdog(1),
        fails(2, "IndexError: list index out of range", late=True),
        watchdog(5, late=True),
        hard=True,
    ),
    case(
        "one_rank_behind",
        "HF209",
        6,
        watchdog(0),
        watchdog(1),
        watchdog(2),
        watchdog(6, seq=1570, enqueued=1570),
        watchdog(4),
        hard=True,
    ),
    case(
        "another_collective", "HF225", 3, watchdog(0), watchdog(1), watchdog(3, op="BROADCAST"), watchdog(4), hard=True
    ),
    case("all_cut", "HF210", (0, 5), cut(0, NCCL_REMOTE), cut(5, NCCL_REMOTE, late=True)),
    case(
        "timed_out_then_cut",
        "HF209",
        3,
        cut(0, GLOO_CLOSED),
        cut(1, GLOO_RESET),
        fails(
            3,
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out "
            "waiting 1800000ms for recv operation to complete",
            frames=(C10D,),
        ),
        hard=True,
    ),
    case(
        "store_wait",
        "HF224",
        (1, 4),
        fails(
            1,
            "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//7",
            frames=(C10D,),
        ),
        fails(
            4,
            "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//7",
            frames=(C10D,),
            late=True,
        ),
    ),
    case(
        "store_unreachable",
        "HF224",
        (4, 5),
        fails(
            4,
            "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (node-a, 29500).",
            frames=(f"{SITE}/torch/distributed/rendezvous.py",),
        ),
        fails(
            5,
            "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (node-a, 29500).",
            frames=(f"{SITE}/torch/distributed/rendezvous.py",),
        ),
    ),
    case(
        "gloo_full_mesh",
        "HF224",
        (0, 4),
        fails(
            0,
            "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
            frames=(C10D,),
        ),
        cut(4, late=True),
    ),
    case(
        "no_master",
        "HF224",
        0,
        fails(
            0,
            "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR expected, but not set",
        ),
    ),
    case("finished_early", "HF229", (0, 1), cut(0), cut(1, late=True), done=(5,)),
    case("node_lost", "HF306", (), cut(0, NCCL_REMOTE), cut(3, STORE_GONE, late=True), lost=("b (connection closed)",)),
    case(
        "node_lost_abort",
        "HF306",
        (),
        watchdog(2),
        cut(1, STORE_BROKEN),
        lost=("b (silent for more than 6 s)",),
        hard=True,
    ),
    case(
        "node_lost_late_noise",
        "HF306",
        (),
        cut(1),
        fails(2, "AttributeError: 'NoneType' object has no attribute 'close'", late=True),
        lost=("b (connection closed)",),
        hard=True,
    ),
]

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

SCRIPT = [
    case(
        "state_dict",
        "HF237",
        (0, 1),
        fails(
            0,
            "RuntimeError: Error(s) in loading state_dict for GPT:\n\tsize mismatch for wte.weight: copying a param with shape torch.Size([50257, 768]) from "
            "checkpoint, the shape in current model is torch.Size([50304, 768]).",
        ),
    ),
    case(
        "torn_safetensors",
        "HF237",
        3,
        fails(3, "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer"),
    ),
    case(
        "ddp_params",
        "HF227",
        2,
        fails(
            2,
            "RuntimeError: DDP expects same model across all ranks, but Rank 2 has 4 params, while rank 0 has inconsistent 6 params.",
            frames=(C10D,),
        ),
        cut(0),
    ),
    case(
        "gloo_sizes",
        "HF225",
        (0, 1),
        fails(
            1,
            "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 16 vs 8",
            frames=(C10D,),
        ),
        cut(0),
    ),
    case(
        "fingerprints",
        "HF225",
        (0, 1),
        fails(
            0,
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=7, "
            "OpType=ALLREDUCE, TensorShape=[2]), but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=7, OpType=BARRIER).",
            frames=(C10D,),
        ),
    ),
    case(
        "nan_guard",
        "HF228",
        6,
        fails(6, "ValueError: Loss is NaN at iteration 4500, stopping training", line="raise ValueError(text)"),
        cut(2),
    ),
    case(
        "distribution_nan",
        "HF228",
        1,
        fails(
            1,
            "ValueError: Expected parameter logits (Tensor of shape (4, 9)) of distribution Categorical to satisfy the constraint IndependentConstraint(Real(), 1), "
            "but found invalid values:\ntensor([[nan, nan]], device='cuda:1')",
        ),
    ),
    case(
        "loss_differs",
        "HF236",
        0,
        fails(
            0,
            "RuntimeError: loss differs between ranks: 1.24, 1.31: replicas are out of sync",
            line="raise RuntimeError(text)",
        ),
    ),
    case(
        "launch_style",
        "HF233",
        (0, 1),
        fails(
            1,
            code=2,
            stderr="usage: train.py [-h] --local_rank LOCAL_RANK\ntrain.py: error: the following arguments are required: --local_rank\n",
        ),
    ),
    case(
        "click_usage",
        "HF232",
        0,
        fails(
            0,
            code=2,
            stderr="Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: No such option: --epoch (Possible options: --epochs)\n",
        ),
    ),
    case("syntax", "HF201", 4, fails(4, "SyntaxError: invalid syntax (train.py, line 12)")),
    case(
        "hub_refused",
        "HF238",
        3,
        fails(
            3,
            "requests.exceptions.ConnectionError: (MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url\"), 'Connection "
            "reset by peer')",
            frames=(f"{SITE}/requests/adapters.py",),
            after="ConnectionResetError: [Errno 104] Connection reset by peer",
        ),
        cut(0),
    ),
    case(
        "s3_reset",
        "HF238",
        5,
        fails(
            5,
            "ConnectionResetError: [Errno 104] Connection reset by peer",
            frames=(f"{SITE}/urllib3/response.py", "/usr/lib/python3.11/ssl.py"),
        ),
        cut(1, NCCL_REMOTE),
        hard=True,
    ),
    case(
        "time_limit",
        "HF235",
        0,
        fails(
            0,
            code=-15,
            stderr="slurmstepd: error: *** JOB 4711 ON node-a CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***\n",
        ),
    ),
    case(
        "save_deadlock",
        "HF234",
        1,
        fails(
            1,
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete",
            frames=(C10D,),
            stderr="UserWarning: Rank 0 alone called torch.save, and the others ran ahead\n",
        ),
    ),
    case("native_crash", "HF223", 6, fails(6, code=-11, stderr=SEGFAULT), cut(0), cut(1)),
    case(
        "heap",
        "HF223",
        2,
        fails(
            2, code=-6, stderr="malloc(): invalid size (unsorted)\n" + SEGFAULT.replace("Segmentation fault", "Aborted")
        ),
        cut(3),
    ),
    case(
        "shell_child_killed",
        "HF204",
        3,
        fails(3, code=137, stderr="run.sh: line 4: 77 Killed                  python train.py\n"),
    ),
    case("shell_not_found", "HF205", 3, fails(3, code=127, stderr="run.sh: line 4: pyhton: command not found\n")),
]

HARD = [
    case("victim_first", "HF207", 4, cut(0, NCCL_REMOTE), cut(1, STORE_GONE), fails(4, OOM), hard=True),
    case("victims_abort", "HF205", 5, watchdog(0), watchdog(1), fails(5, code=7), hard=True),
    case(
        "two_independent",
        "HF217",
        3,
        fails(3, "FileNotFoundError: [Errno 2] No such file or directory: 'a.bin'"),
        fails(6, OOM),
        cut(0),
        hard=True,
    ),
    case(
        "late_culprit",
        "HF201",
        6,
        cut(0),
        cut(1, late=True),
        fails(6, "KeyError: 'input_ids'", code=-15, late=True),
        hard=True,
    ),
    case(
        "stopped_handler",
        "HF210",
        0,
        cut(0),
        fails(3, "RuntimeError: received SIGTERM, saving and leaving", late=True, line="raise RuntimeError(text)"),
        hard=True,
    ),
    case(
        "loader_of_the_stop",
        "HF210",
        1,
        cut(1),
        fails(2, "RuntimeError: DataLoader worker (pid 9) is killed by signal: Terminated. ", late=True),
        hard=True,
    ),
    case(
        "quoted_in_value_error",
        "HF201",
        2,
        cut(0),
        fails(2, f"ValueError: cannot parse log line: {GLOO_CLOSED!r}", line="raise ValueError(text)"),
        hard=True,
    ),
    case(
        "quoted_by_user",
        "HF201",
        2,
        cut(5, NCCL_REMOTE),
        fails(2, "RuntimeError: the report says: connection closed by peer", line="raise RuntimeError(text)"),
        hard=True,
    ),
    case(
        "wrapped_victim",
        "HF204",
        7,
        fails(0, "RuntimeError: epoch 3 failed", after=GLOO_CLOSED, frames=(C10D,)),
        fails(7, code=-9),
        hard=True,
    ),
    case(
        "fault_then_cleanup",
        "HF201",
        1,
        cut(4),
        fails(1, GLOO_RESET, after="ZeroDivisionError: division by zero"),
        hard=True,
    ),
    case(
        "logged_and_left",
        "HF207",
        6,
        fails(
            0,
            code=1,
            stderr=f'ERROR training failed\nTraceback (most recent call last):\n  File "{TRAIN}", line 3, in <module>\n    step()\n'
            f'  File "{C10D}", line 9, in wait\n    work.wait()\n{GLOO_CLOSED}\n',
        ),
        fails(6, OOM),
        hard=True,
    ),
    case(
        "python_socket_victim",
        "HF201",
        2,
        fails(0, "ConnectionResetError: [Errno 104] Connection reset by peer"),
        fails(2, "TypeError: forward() missing 1 required positional argument: 'mask'"),
        hard=True,
    ),
    case(
        "deepspeed_victim",
        "HF239",
        4,
        fails(1, STORE_BROKEN, frames=(f"{SITE}/deepspeed/comm/torch.py", C10D)),
        fails(4, "MemoryError"),
        hard=True,
    ),
    case(
        "aborted_communicator",
        "HF201",
        3,
        fails(
            0,
            "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0. Original reason for failure was: [Rank 0] Watchdog caught "
            "collective operation timeout",
            frames=(C10D,),
        ),
        fails(3, "AssertionError: vocabulary differs from the tokenizer's"),
        hard=True,
    ),
    case(
        "sigabrt_collateral",
        "HF204",
        5,
        fails(
            1,
            code=-6,
            stderr="terminate called after throwing an instance of 'gloo::IoException'\n  what():  [/pytorch/third_party/gloo/gloo/transport/tcp/"
            "pair.cc:553] Connection closed by peer [10.0.0.2]:4711\n",
        ),
        fails(5, code=-9),
        hard=True,
    ),
    case("silent_abort", "HF205", 3, fails(0, code=-6), fails(3, code=3), hard=True),
]

CASES: list[Case] = [*GPU, *NETWORK, *MACHINE, *SCRIPT, *HARD]
