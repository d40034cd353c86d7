"""Any fault of one's own among any victims, in any order of arrival: the victims are never blamed."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from holdfast.core.outcome import Evidence, Failure
from holdfast.insight.causes import judge
from tests.corpus.telling import (
    C10D,
    GLOO_CLOSED,
    GLOO_RESET,
    NCCL_REMOTE,
    SITE,
    STORE_BROKEN,
    STORE_GONE,
    fails,
    watchdog,
)

OWN = [
    ("HF207", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB"),
    ("HF207", "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ("HF221", "torch.AcceleratorError: CUDA error: device-side assert triggered"),
    ("HF222", "RuntimeError: CUDA error: an uncorrectable NVLink error was detected during the execution"),
    ("HF219", "RuntimeError: No CUDA GPUs are available"),
    ("HF220", "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"),
    ("HF211", "ModuleNotFoundError: No module named 'deepspeed'"),
    ("HF212", "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"),
    ("HF213", "OSError: [Errno 98] Address already in use"),
    ("HF214", "OSError: [Errno 28] No space left on device: '/ckpt/model.pt'"),
    ("HF214", "RuntimeError: [enforce fail at inline_container.cc:588] . PytorchStreamWriter failed writing file data/12: file write failed"),
    ("HF215", "RuntimeError: DataLoader worker (pid 12345) is killed by signal: Segmentation fault. "),
    ("HF215", "RuntimeError: DataLoader timed out after 120 seconds"),
    ("HF216", "OSError: [Errno 28] No space left on device: '/psm_1234abcd'"),
    ("HF217", "FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'"),
    ("HF217", "RuntimeError: Parent directory /ckpt/run1 does not exist."),
    ("HF218", "PermissionError: [Errno 13] Permission denied: '/ckpt'"),
    ("HF226", "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one."),
    ("HF227", "RuntimeError: [1]: params[0] in this process with sizes [5, 4] appears not to match sizes of the same param in process 0."),
    ("HF228", "RuntimeError: Function 'LogSoftmaxBackward0' returned nan values in its 0th output."),
    ("HF230", "OSError: [Errno 24] Too many open files"),
    ("HF231", "RuntimeError: can't start new thread"),
    ("HF237", "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"),
    ("HF238", "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out."),
    ("HF239", "MemoryError"),
    ("HF201", "ValueError: Expected input batch_size (32) to match target batch_size (64)."),
    ("HF201", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x784 and 512x10)"),
    ("HF201", "KeyError: 'input_ids'"),
    ("HF201", "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
]  # fmt: skip

COMPLAINTS = [
    GLOO_CLOSED,
    GLOO_RESET,
    NCCL_REMOTE,
    STORE_GONE,
    STORE_BROKEN,
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [192.168.1.4]:1234",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    "RuntimeError: NCCL communicator was aborted on rank 3.",
    (
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1. Original reason for failure was: [Rank 1] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600013 milliseconds before timing out."
    ),
    "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0.",
    "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms",
    "RuntimeError: NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:514, unhandled system error, NCCL version 2.4.8",
    "RuntimeError: Application timeout caused pair closure",
    "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (node-a, 29500).",
    "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//7",
    "RuntimeError: Broken pipe",
    "RuntimeError: Connection reset by peer",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
]

NATIVE = [
    "terminate called after throwing an instance of 'gloo::IoException'\n  what():  [pair.cc:553] Connection closed by peer [10.0.0.2]:4711\n",
    "[rank1]:[E ProcessGroupNCCL.cpp:1564] [PG 0 Rank 1] Received a timeout signal from this local rank and will start to dump the debug info.\n",
    "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  NCCL error in: x.cpp:1, remote process exited or there was a network error\n",
]


def victim(rank: int, choice: random.Random) -> Failure:
    kind = choice.randrange(6)
    if kind == 0:
        return watchdog(rank)
    if kind == 1:
        return fails(rank, code=-6, stderr=choice.choice(NATIVE))
    says = choice.choice(COMPLAINTS)
    if kind == 2:
        return fails(rank, "ValueError: training did not finish", after=says, frames=(C10D,))
    if kind == 3:
        told = fails(rank, says, frames=(C10D,))
        return structs.replace(told, message="", error_type="", traceback="")  # logged, and sys.exit(1)
    return fails(rank, says, frames=(f"{SITE}/torch/nn/parallel/distributed.py", C10D))


def culprits(rank: int, choice: random.Random) -> tuple[str, Failure]:
    kind = choice.randrange(8)
    if kind == 0:
        return "HF204", fails(rank, code=-9)
    if kind == 1:
        return "HF205", fails(rank, code=3)
    if kind == 2:
        return "HF223", fails(rank, code=-11, stderr="Fatal Python error: Segmentation fault\n")
    code, says = choice.choice(OWN)
    if kind == 3:
        return code, fails(rank, GLOO_CLOSED, after=says)  # and a collective while it cleans up
    if kind == 4:
        told = fails(rank, says)
        return code, structs.replace(told, message="", error_type="", traceback="")
    return code, fails(rank, says)


@pytest.mark.parametrize("seed", range(40))
def test_the_fault_is_found_wherever_it_arrives(seed: int) -> None:
    choice = random.Random(seed)
    for _ in range(25):
        rank, size = choice.randrange(8), choice.randrange(2, 9)
        code, culprit = culprits(rank, choice)
        others = [victim(other, choice) for other in range(8) if other != rank][: size - 1]
        order = [culprit, *others]
        choice.shuffle(order)
        verdict = judge(_evidence(order))
        assert verdict.culprit is culprit, (culprit, [each.message for each in order])
        assert verdict.code == code, (verdict.cause, culprit)


@pytest.mark.parametrize("seed", range(40))
def test_a_fault_that_ends_after_the_stop_is_found(seed: int) -> None:
    """Its victims were faster: their reports began the stop, which ended it by a signal while it still wrote."""
    choice = random.Random(seed)
    for _ in range(10):
        code, says = choice.choice(OWN)
        culprit = fails(7, says, code=choice.choice([1, -15]), late=True)
        others = [victim(rank, choice) for rank in range(choice.randrange(1, 7))]
        late = [structs.replace(each, after_stop=True, exit_code=-15) for each in others[1:]]
        verdict = judge(_evidence([others[0], *late, culprit]))
        assert verdict.culprit is culprit
        assert verdict.code == code


@pytest.mark.parametrize("seed", range(10))
def test_without_a_fault_nobody_is_accused_of_one(seed: int) -> None:
    choice = random.Random(seed)
    for _ in range(20):
        order = [victim(rank, choice) for rank in range(choice.randrange(1, 8))]
        verdict = judge(_evidence(order))
        assert verdict.code in {"HF208", "HF209", "HF210", "HF224", "HF225"}, (verdict.cause, order)
        lost = judge(structs.replace(_evidence(order), lost_nodes=("b (silent)",)))
        assert (lost.code, lost.culprit) == ("HF306", None)


def _evidence(order: list[Failure]) -> Evidence:
    return Evidence(generation=1, restarts=0, failures=tuple(order), lost_nodes=(), gave_up="", hosts=("a", "b"))
