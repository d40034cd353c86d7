"""Faults of GPUs. Ranks 0 to 3 are on node a, 4 to 7 on node b; failures in the order in which they were heard of."""

from __future__ import annotations

from tests.corpus.telling import C10D, NCCL, NCCL_REMOTE, OOM, SITE, STORE_GONE, case, cut, fails, watchdog

CUDA_TAIL = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
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
