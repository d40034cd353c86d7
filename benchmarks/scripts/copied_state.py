"""Two pretended nodes with a 473 MB state each, and copies of it on the other one, timed in copies (train_state.py).

    copied_state.py FOLDER            prints numbers as JSON

Saves in memory, by turns without and with a copy; then a node is lost with its memory, and both ranks resume in new
processes. The bare transfer is measured beside it: as many bytes between two processes that do nothing else.
The newcomer needs new memory. Where the host of a virtual machine has taken free memory back, the first
access to each 2 MB of it costs up to 10 ms, 30 copies for this state, whoever does it. So as much as is needed is
touched and freed directly before.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_state import Copies, build, timed, train

from holdfast.snapshots import disk

FIRST, SAVES = 4, 32
"""Even numbers: the last save has its copy. The first ones take memory, and are not counted."""
NODES = 2
ARRIVES_S = 120.0


def start(what: str, folder: Path, port: int, rank: int, run: str) -> subprocess.Popen[str]:
    own = {"RANK": str(rank), "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": f"{run}-{rank}", "OMP_NUM_THREADS": "1"}
    world = {"WORLD_SIZE": str(NODES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    line = [sys.executable, __file__, str(folder), what]
    return subprocess.Popen(line, env={**os.environ, **own, **world}, stdout=subprocess.PIPE, text=True)


def life(what: str, folder: Path, run: str) -> list[dict[str, float]]:
    """What both ranks found."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = [start(what, folder, port, rank, run) for rank in range(NODES)]
    said = [each.communicate()[0].strip().rpartition("\n")[2] for each in ranks]
    if not all(said):
        raise RuntimeError(f"{what}: a rank failed")
    return [json.loads(each) for each in said]


def lose(run: str, node: int) -> None:
    """Its saver and its memory; its rank is dead."""
    (memory,) = Path("/dev/shm").glob(f"holdfast-*-{run}-{node}-*")
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        line = path.read_bytes()
        if b"holdfast.snapshots.saver" in line and str(memory).encode() in line:
            os.kill(int(path.parent.name), signal.SIGKILL)
    shutil.rmtree(memory)


def snapshots(folder: Path, model: Any, optimizer: Any) -> Any:
    import holdfast.train as ht

    snaps = ht.Snapshots(folder, every=None, memory_every=1, copies=1)
    snaps.track(model=model, optimizer=optimizer)
    return snaps


def saves(folder: Path) -> None:
    """Every second save has its copy, which arrives before the next save."""
    dist.init_process_group("gloo")
    model, optimizer = build()
    snaps = snapshots(folder, model, optimizer)
    snaps.resume()
    stalls: dict[bool, list[float]] = {False: [], True: []}
    arrived = []
    unit, copies = Copies(model), snaps._saving._copies
    for number in range(FIRST + SAVES):
        copied = number % 2 == 1
        snaps._saving._copies = copies if copied else None  # as with copies=0, in all other respects the same
        train(model, optimizer)
        unit.take()
        dist.barrier()
        took_s = timed(snaps.step)
        if number >= FIRST:
            stalls[copied].append(took_s)
        began_s = time.perf_counter()
        while copied and snaps._opened.copying and time.perf_counter() < began_s + ARRIVES_S:
            time.sleep(0.005)
            snaps._opened.check()
        if copied:
            arrived.append(time.perf_counter() - began_s)
        dist.barrier()
    mark = model[0].weight.double().sum().item()
    found = {"alone": statistics.median(stalls[False]), "copied": statistics.median(stalls[True])}
    print(json.dumps({**found, "copy": unit.s, "arrived": statistics.median(arrived), "mark": mark}))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def resumes(folder: Path) -> None:
    dist.init_process_group("gloo")
    model, optimizer = build()
    copy_s = Copies(model).s  # its memory is free now: see the top of this file
    snaps = snapshots(folder, model, optimizer)
    dist.barrier()
    took_s = timed(snaps.resume)
    resumed = snaps._life is not None and snaps.state.step
    mark = model[0].weight.double().sum().item()
    print(json.dumps({"resume": took_s, "copy": copy_s, "step": resumed, "mark": mark}))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def transfer_s() -> float:
    """Send a state's bytes over loopback, check each chunk, and write it into new memory; the median."""
    size_bytes = 3 * 4 * sum(each.numel() for each in build()[0].parameters())
    return statistics.median(_transfer_s(size_bytes) for _ in range(5))


def _transfer_s(size_bytes: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as listening, tempfile.TemporaryFile(dir="/dev/shm") as memory:
        sender = os.fork()
        if sender == 0:
            data = bytes(size_bytes)
            listening.accept()[0].sendall(data)
            os._exit(0)
        buffer = memoryview(mmap.mmap(-1, disk.CHUNK_BYTES))
        with socket.create_connection(listening.getsockname()) as sock:
            sock.recv(1, socket.MSG_PEEK)
            began_s, at = time.perf_counter(), 0
            while got := sock.recv_into(buffer, 0, socket.MSG_WAITALL):
                disk.chunk_crc(buffer[:got])
                at += os.pwrite(memory.fileno(), buffer[:got], at)
            took_s = time.perf_counter() - began_s
        os.waitpid(sender, 0)
    if at != size_bytes:
        raise RuntimeError(f"{at} of {size_bytes} bytes arrived")
    return took_s


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        what = sys.argv[2]
        torch.set_num_threads(1)
        resumes(folder / "copied") if what == "resumes" else saves(folder / "copied")
        return
    run = f"bench{os.getpid()}"
    copied = life("saves", folder, run)
    lose(run, 1)
    resumed = life("resumes", folder, run)
    if any(each["mark"] != copied[0]["mark"] for each in resumed):
        raise RuntimeError("what was resumed is not what was saved")
    unit = statistics.median(each["copy"] for each in (*copied, *resumed))
    stall = {of: max(each[of] for each in copied) for of in ("alone", "copied")}
    print(
        json.dumps(
            {
                "stall without": stall["alone"] / unit,
                "stall with": stall["copied"] / unit,
                "stall, relative": stall["copied"] / stall["alone"],
                "copy has arrived": max(each["arrived"] for each in copied) / unit,
                "resume of the newcomer": resumed[1]["resume"] / unit,
                "bare transfer": transfer_s() / unit,
                "copy": unit * 1000,
            }
        )
    )


if __name__ == "__main__":
    main()
