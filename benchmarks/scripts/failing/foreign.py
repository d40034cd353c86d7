"""What GPUs, NCCL and well-known libraries say, as text: this catalogue has to run where none of them is."""

from __future__ import annotations

import os
import sys
import time

from .parts import every, one, rank


@one(1, "HF207", torch=True)
def gpu_memory() -> None:
    import torch

    raise torch.cuda.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 3.91 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.21 GiB is "
        "free. Including non-PyTorch memory, this process has 77.93 GiB memory in use."
    )


@one(1, "HF207")
def gpu_memory_for_cublas() -> None:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@one(0, "HF221", torch=True)
def label_beyond_the_classes() -> None:
    raise RuntimeError(
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API "
        "call, so the stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    )


@one(1, "HF222")
def gpu_has_a_broken_memory() -> None:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


@one(1, "HF220")
def no_such_gpu() -> None:
    raise RuntimeError("CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?")


@every("0 1", "HF219")
def torch_without_cuda() -> None:
    import torch

    torch.nn.Linear(2, 2).to("cuda")


@every("0 1", "HF219", says="gloo")
def nccl_without_cuda() -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl")


NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, {kind}, NCCL version 2.27.5\n{more}\n"
    "Last error:\n{last}"
)


@every("0 1", "HF208")
def nccl_finds_no_route() -> None:
    import torch.distributed as dist

    kind = "unhandled system error (run with NCCL_DEBUG=INFO for details)"
    more = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
    raise dist.DistBackendError(
        NCCL.format(
            kind=kind, more=more, last="socketPollConnect: connect to 10.3.0.7<41233> returned No route to host"
        )
    )


@every("1", "HF201", says="batch 7")
def nccl_complains_before_the_culprit() -> None:
    import torch.distributed as dist

    if rank() == 1:
        time.sleep(0.5)
        raise IndexError("batch 7 has no labels")
    kind = "remote process exited or there was a network error"
    more = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
    raise dist.DistBackendError(
        NCCL.format(kind=kind, more=more, last="socketProgress: Connection closed by remote peer")
    )


@every("0 1 2", "HF209", ranks=3)
def watchdog_of_nccl() -> None:
    sys.stderr.write(
        f"[rank{rank()}]:[E1119 10:15:03.7 ProcessGroupNCCL.cpp:685] [Rank {rank()}] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=9031, OpType=ALLREDUCE, NumelIn=26214400, NumelOut=26214400, Timeout(ms)=600000) ran "
        "for 600009 milliseconds before timing out.\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    )
    sys.stderr.flush()
    os.abort()


@every("2", "HF209 HF225", ranks=3)
def watchdog_sees_one_behind() -> None:
    number = 411 if rank() != 2 else 410
    sys.stderr.write(
        f"[rank{rank()}]:[E1119 10:15:03.7 ProcessGroupNCCL.cpp:685] [Rank {rank()}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, NumelIn=512, NumelOut=512, Timeout(ms)=600000) ran for "
        "600061 milliseconds before timing out.\n"
    )
    sys.stderr.flush()
    os.abort()


@one(1, "HF201", says="untagged enum")
def tokenizer_is_newer() -> None:
    raise Exception("data did not match any variant of untagged enum ModelWrapper at line 757481 column 3")  # noqa: TRY002


@every("0 1", "HF217 HF238")
def tokenizer_is_not_here() -> None:
    raise OSError(
        "Can't load tokenizer for 'team/our-llama'. If you were trying to load it from 'https://huggingface.co/models', "
        "make sure you don't have a local directory with the same name. Otherwise, make sure 'team/our-llama' is the "
        "correct path to a directory containing all relevant files for a LlamaTokenizerFast tokenizer."
    )


@one(1, "HF201", says="MisconfigurationException")
def lightning_is_misconfigured() -> None:
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    raise MisconfigurationException("No `training_step()` method defined. Lightning `Trainer` expects as minimum one.")


@one(1, "HF201", says="not in index")
def column_is_missing() -> None:
    raise KeyError("['label_id', 'file'] not in index")


@one(1, "HF201", says="Invalid token")
def token_of_a_language() -> None:
    raise ValueError("Invalid token '<|im_end|>' in the chat template")


@every("0 1", "HF212")
def compiler_is_missing() -> None:
    class InductorError(RuntimeError):
        pass

    raise InductorError(
        "InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')"
    )
