"""Measures the GPUs of a node with torch, for `holdfast doctor --gpu full`. It is run by its path under the Python that
the workers use, in a process of its own.

    python gpu_checkup.py measure DEVICE S      one line of JSON: products of matrices on each device for S seconds,
                                                copies, and all-reduces between all devices
    python gpu_checkup.py reduce DEVICE RANK WORLD PORT
                                                one rank of an all-reduce; each prints the rate

DEVICE is cuda or cpu: on cpu the same code runs, with small sizes. Each result of a product has a digest: the same
product must have the same bits each time, and on each GPU of the same model. Standard library and torch only.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

SIDE = {"cuda": 8192, "cpu": 256}
"""Rows of the matrices."""
COPY_BYTES = {"cuda": 256 * 2**20, "cpu": 4 * 2**20}
REDUCE_BYTES = {"cuda": 256 * 2**20, "cpu": 4 * 2**20}
REDUCES = 5
COPIES = 5
SEED = 20
PR_SET_PDEATHSIG = 1
CPU_RANKS = 2
REDUCE_S_MAX = 60.0
WAIT_S_MAX = 30.0
POLL_S = 0.01


def measure(kind: str, seconds: float) -> dict[str, Any]:
    """All measurements of this node. Raises any exception of torch."""
    import torch

    count = torch.cuda.device_count() if kind == "cuda" else 1
    # The same numbers on each device: made once, on the CPU.
    generator = torch.Generator().manual_seed(SEED)
    pair = [torch.randn(SIDE[kind], SIDE[kind], generator=generator).to(torch.bfloat16) for _ in range(2)]
    with ThreadPoolExecutor(max(1, count)) as pool:
        devices = list(pool.map(lambda index: _device(torch, kind, index, pair, seconds), range(count)))
    ranks = count if kind == "cuda" else CPU_RANKS
    found: dict[str, Any] = {"kind": kind, "devices": devices}
    if ranks > 1:
        found["reduce"] = all_reduce(kind, ranks, {})
        if kind == "cuda":
            found["reduce_without_p2p"] = all_reduce(kind, ranks, {"NCCL_P2P_DISABLE": "1"})
    return found


def _device(torch: Any, kind: str, index: int, pair: list[Any], seconds: float) -> dict[str, Any]:
    """One device. An error is a result: the others are measured all the same."""
    device = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
    name = torch.cuda.get_device_name(index) if kind == "cuda" else "CPU"
    try:
        rates = _products(torch, kind, device, pair, seconds) | _copies(torch, kind, device)
    except Exception as error:  # noqa: BLE001 - whatever it is, the doctor reports it
        return {"index": index, "name": name, "error": f"{type(error).__name__}: {first_line(error)}"}
    return {"index": index, "name": name, **rates}


def _products(torch: Any, kind: str, device: Any, pair: list[Any], seconds: float) -> dict[str, Any]:
    left, right = (each.to(device) for each in pair)
    digests = {_digest(torch, left @ right)}
    _wait(torch, kind, device)
    began = time.monotonic()
    products = 0
    while products < 2 or time.monotonic() - began < seconds:
        result = left @ right
        products += 1
        if products % 10 == 1:
            digests.add(_digest(torch, result))
    _wait(torch, kind, device)
    operations = 2 * SIDE[kind] ** 3 * products
    return {"tflops": operations / (time.monotonic() - began) / 1e12, "digests": sorted(digests)}


def _digest(torch: Any, result: Any) -> str:
    """A number in which each bit of the result counts, and its place."""
    bits = result.view(torch.int16).to(torch.int64).flatten()
    weights = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int64)
    return f"{int((bits * weights).sum()) & (2**64 - 1):016x}"


def _copies(torch: Any, kind: str, device: Any) -> dict[str, float]:
    size = COPY_BYTES[kind]
    host = torch.ones(size, dtype=torch.uint8, pin_memory=kind == "cuda")
    here, there = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    ways = {"to_device_bytes_s": (here, host), "to_host_bytes_s": (host, here), "device_bytes_s": (there, here)}
    rates = {}
    for name, (target, source) in ways.items():
        target.copy_(source)
        _wait(torch, kind, device)
        began = time.monotonic()
        for _ in range(COPIES):
            target.copy_(source, non_blocking=True)
        _wait(torch, kind, device)
        rates[name] = COPIES * size / max(1e-9, time.monotonic() - began)
    if not bool((there == 1).all()):
        raise ArithmeticError("a copy on the device has other bytes")
    return rates


def _wait(torch: Any, kind: str, device: Any) -> None:
    if kind == "cuda":
        torch.cuda.synchronize(device)


def all_reduce(kind: str, ranks: int, variables: dict[str, str]) -> dict[str, Any]:
    """The rate of all-reduces between all devices of this node, one process for each."""
    import torch.distributed as dist

    limit = timedelta(seconds=WAIT_S_MAX)
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=limit)
    command = [sys.executable, os.path.abspath(__file__), "reduce", kind]
    with ExitStack() as files:  # NCCL may write more than a pipe holds
        out, err = ([files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)] for _ in range(2))
        started = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), str(store.port)],
                env={**os.environ, **variables},
                stdout=out[rank],
                stderr=err[rank],
            )
            for rank in range(ranks)
        ]
        failed = _first_failure(started)
        shown = out[0] if failed is None else err[failed]
        shown.seek(0)
        lines = [line for line in shown.read().splitlines() if line.strip()]
    if failed is None:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    if failed < 0:
        return {"error": f"it did not end within {REDUCE_S_MAX:g} s"}
    why = lines[-1] if lines else f"its process ended with {started[failed].returncode}"
    return {"error": f"{'GPU' if kind == 'cuda' else 'process'} {failed}: {why}"[:500]}


def _first_failure(started: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The index of the process that failed first, which has the cause: the others wait for it in vain, and say that.
    None: all have ended well; -1: they take too long. None of them runs any more."""
    until = time.monotonic() + REDUCE_S_MAX
    try:
        while True:
            ends = [each.poll() for each in started]
            if any(ends) or None not in ends:
                return next((index for index, code in enumerate(ends) if code), None)
            if time.monotonic() > until:
                return -1
            time.sleep(POLL_S)
    finally:
        for each in started:
            each.kill()
            each.wait()


def reduce(kind: str, rank: int, ranks: int, port: int) -> dict[str, float]:
    """This rank's part. Raises any exception of torch, and ArithmeticError for a wrong sum."""
    import torch
    import torch.distributed as dist

    _end_with_parent()
    limit = timedelta(seconds=WAIT_S_MAX)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=limit)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=ranks, timeout=limit
    )
    size = REDUCE_BYTES[kind]
    for round_ in range(REDUCES + 1):
        values = torch.full((size // 4,), float(rank + 1), device=device)
        if round_ == 1:  # the first one sets up the connections
            _wait(torch, kind, device)
            began = time.monotonic()
        dist.all_reduce(values)
    _wait(torch, kind, device)
    seconds = time.monotonic() - began
    wanted = ranks * (ranks + 1) / 2
    if not bool((values == wanted).all()):
        raise ArithmeticError(f"the sum is {values[0].item()}, not {wanted}")
    return {"bytes_s": REDUCES * size / seconds}


def _end_with_parent() -> None:
    """The kernel kills this process when the one that measures is gone: nobody else would."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]


def main() -> None:
    what, kind, *rest = sys.argv[1:]
    if what == "measure":
        try:
            found = measure(kind, float(rest[0]))
        except Exception as error:  # noqa: BLE001 - the answer is what the doctor waits for
            found = {"kind": kind, "devices": [], "error": f"{type(error).__name__}: {first_line(error)}"}
    else:
        rank, ranks, port = map(int, rest)
        found = reduce(kind, rank, ranks, port)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a group whose peers are gone may abort in its destructor


if __name__ == "__main__":
    del sys.path[0]  # our folder: its files must not hide modules with the same names
    main()
