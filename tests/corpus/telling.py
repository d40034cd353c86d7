"""How failures look when they reach the coordinator: the cases of cases.toml, which no CPU machine can make.

The texts are what torch, NCCL, CUDA and the kernel print, as users paste them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.protocol.outcome import Evidence, Failure, Verdict

SITE = "/opt/venv/lib/python3.11/site-packages"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
TRAIN = "/data/job/train.py"

GLOO_CLOSED = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[10.0.0.2]:40364. This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error."
)
GLOO_RESET = "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:29609: Connection reset by peer."
NCCL = "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2363, "
NCCL_REMOTE = (
    NCCL + "remote process exited or there was a network error, NCCL version 2.27.3\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\nsocketProgress: Connection closed by remote peer node-b<57557>"
)
STORE_GONE = "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
STORE_BROKEN = (
    "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by "
    "store->get('0'), but store->get('0') got error: Connection reset by peer"
)

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.01 GiB. GPU 2 has a total capacity of 79.10 GiB of which 3.38 GiB is free. "
    "Including non-PyTorch memory, this process has 75.71 GiB memory in use."
)
CUDA_TAIL = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
SEGFAULT = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f0 (most recent call first):\n  File "/data/job/train.py", line 9 in step\n'
TEXTS = {name: text for name, text in globals().items() if name.isupper()}
"""What the data files name in braces."""

HEAD = "Traceback (most recent call last):\n"
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"
BECAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
"""Between two tracebacks of a chain."""


@dataclass(frozen=True)
class Case:
    name: str
    culprits: tuple[int, ...]
    """Any of these is right; empty: no worker is to blame."""
    code: str
    evidence: Evidence
    hard: bool = False


def named(verdict: Verdict) -> int | None:
    """The rank that is to blame; None: no worker is."""
    return verdict.culprit.rank if verdict.culprit is not None else None


def data(name: str) -> dict[str, Any]:
    """A data file of this folder, its texts filled in."""
    return _filled(tomllib.loads((Path(__file__).parent / name).read_text()))  # type: ignore[no-any-return]


def _filled(value: Any) -> Any:
    match value:
        case dict():
            return {key: _filled(each) for key, each in value.items()}
        case list():
            return tuple(_filled(each) for each in value)
        case str():
            for name, text in TEXTS.items():
                value = value.replace(f"{{{name}}}", text)
    return value


def cases() -> list[Case]:
    """All of cases.toml."""
    return [_case(name=name, **entry) for name, entry in data("cases.toml")["case"].items()]


def _case(
    name: str,
    code: str,
    culprits: tuple[int, ...],
    failures: tuple[dict[str, Any], ...],
    hard: bool = False,
    lost: tuple[str, ...] = (),
    done: tuple[int, ...] = (),
) -> Case:
    evidence = Evidence(
        generation=1,
        restarts=0,
        failures=tuple(map(_failure, failures)),
        lost_nodes=lost,
        gave_up="no restart is left",
        done=done,
        hosts=("a", "b"),
    )
    return Case(name, culprits, code, evidence, hard)


def _failure(entry: dict[str, Any]) -> Failure:
    match entry:
        case {"cut": rank, **rest}:
            return cut(rank, **rest)
        case {"watchdog": rank, **rest}:
            return watchdog(rank, **rest)
    return fails(**entry)


def fails(
    rank: int,
    says: str = "",
    *,
    on: str = "",
    code: int = 1,
    stderr: str = "",
    frames: tuple[str, ...] = (),
    line: str = "loss.backward()",
    after: str = "",
    late: bool = False,
    oom: bool = False,
) -> Failure:
    """`after`: the exception during whose handling this one was raised; `line`: the innermost line of the traceback."""
    files = (TRAIN, *frames)
    places = "".join(f'  File "{file}", line {10 + number}, in step\n    {line}\n' for number, file in enumerate(files))
    traceback = f"{HEAD}{places}{says}\n" if says else ""
    if after:
        traceback = f"{HEAD}{places}{after}\n{HANDLING}{traceback}"
    return Failure(
        rank=rank,
        local_rank=rank % 4,
        host=on or ("a" if rank < 4 else "b"),
        pid=1000 + rank,
        exit_code=code,
        in_group=True,
        error_type=says.partition(":")[0].rpartition(".")[2] if says else "",
        message=says,
        traceback=traceback,
        stderr_tail=stderr or traceback,
        stderr_file=f"/tmp/run/attempt_0/{rank % 4}/stderr.log",
        after_stop=late,
        out_of_memory=oom,
        lived_s=12.0,
    )


def cut(rank: int, says: str = GLOO_CLOSED, *, late: bool = False, on: str = "") -> Failure:
    """A victim: its peer's connection closed."""
    return fails(rank, says, on=on, code=-15 if late else 1, frames=(C10D,), line="work.wait()", late=late)


def watchdog(rank: int, *, seq: int = 1580, op: str = "ALLREDUCE", enqueued: int = 1582, late: bool = False) -> Failure:
    """NCCL's watchdog ends the process with SIGABRT; all its words are on stderr."""
    work = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000)"
    stderr = (
        f"[rank{rank}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"{work} ran for 600060 milliseconds before timing out.\n"
        f"[rank{rank}]:[E321 02:07:08.465150152 ProcessGroupNCCL.cpp:1664] [PG 1 Rank {rank}] Exception (either an error or timeout) detected by "
        f"watchdog at work: {seq}, last enqueued NCCL work: {enqueued}, last completed NCCL work: {seq - 1}.\n"
        f"[rank{rank}]:[E321 02:07:09.465224069 ProcessGroupNCCL.cpp:630] [Rank {rank}] Some NCCL operations have failed or timed out. Due to the "
        "asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        f"  what():  [PG 1 Rank {rank}] Process group watchdog thread terminated with exception: [Rank {rank}] Watchdog caught collective operation "
        f"timeout: {work} ran for 600060 milliseconds before timing out.\n"
        "Exception raised from checkTimeout at ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:618 (most recent call first):\n"
        f"frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f3b6d41df86 in {SITE}/torch/lib/libc10.so)\n"
    )
    return fails(rank, code=-6, stderr=stderr, late=late)
