"""What the campaign measures: one program per part, `python -m benchmarks.gpu.parts.NAME`. ALL is the order of the run:
what has never run on a GPU comes before what only gives figures."""

from __future__ import annotations

from benchmarks.gpu.campaign import Part

ALL: tuple[Part, ...] = (
    Part("facts", "the machine", 40),
    Part("gpu_tests", "tests/gpu", 120, shows="the tests in `tests/gpu`"),
    Part(
        "survivors_nccl",
        "NCCL, one rank: abort of a communicator while kernels run, and a new one in the same process",
        45,
        shows="the abort of an NCCL communicator by another thread, and a new communicator in the same process",
    ),
    Part(
        "survivors_gloo",
        "3 ranks on one GPU, gloo on CUDA tensors: one is killed, the others go on in `ht.survive`",
        60,
        shows="survivors in processes that have a CUDA context",
    ),
    Part(
        "saves", "saves of a state on the device", 90, shows="saves from a GPU, and a resume that is equal bit for bit"
    ),
    Part(
        "suspended",
        "a worker is suspended while kernels run",
        50,
        shows="a worker that is suspended while its GPU works",
    ),
    Part("memory", "GPU memory after the agent is killed", 40, shows="GPU memory after the end of killed workers"),
    Part("starts", "start and kill → third step, beside torchrun", 90, shows="forked workers that use CUDA"),
    Part("preflight", "holdfast doctor", 60, shows="the checks of `holdfast doctor` on a GPU"),
    Part(
        "caches", "a compiled model: empty and kept folder of kernels", 90, shows="`--cache-dir` with kernels for a GPU"
    ),
)
