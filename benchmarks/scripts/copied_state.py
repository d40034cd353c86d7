"""Two nodes of a job on loopback, with a 473 MB state each and copies of it on the other one, timed in copies
(train_state.py).

    copied_state.py FOLDER            prints numbers as JSON
    copied_state.py FOLDER NUMBER     a rank below the agent of this number

Saves in memory, by turns without and with a copy; then everything of one node is killed, its memory is removed, and an
agent without anything takes its place. Both ranks resume in new processes. The bare transfer is measured beside it: as
many bytes between two processes that do nothing else.
The newcomer needs new memory. Where the host of a virtual machine has taken free memory back, the first
access to each 2 MB of it costs up to 10 ms, 30 copies for this state, whoever does it. What the lost node had is free
directly before the newcomer fetches, and so is what the unit was measured with, before it resumes.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from train_state import Copies, build, timed, train

from holdfast.train.snapshots import disk

FIRST, SAVES = 4, 32
"""Even numbers: the last save has its copy. The first ones take memory, and are not counted."""
NODES = 2
ARRIVES_S = FINDS_S = 120.0


def start(folder: Path, number: int, port: int) -> subprocess.Popen[bytes]:
    """An agent, which starts this script."""
    flags = ["--nnodes", str(NODES), "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--log-dir", str(folder / f"{number}")]
    line = [sys.executable, "-m", "holdfast", "run", *flags, __file__, str(folder), str(number)]
    with (folder / f"screen.{number}").open("wb") as screen:
        return subprocess.Popen(line, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=screen, stderr=screen)


def said(folder: Path, what: str) -> list[dict[str, float]]:
    """What both ranks found."""
    paths = [folder / f"{what}.{rank}" for rank in range(NODES)]
    deadline_s = time.monotonic() + FINDS_S
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline_s:
            screens = [path.read_text()[-300:] for path in sorted(folder.glob("screen.*"))]
            raise RuntimeError(f"{what}: not within {FINDS_S:g} s: {screens}")
        time.sleep(0.05)
    return [json.loads(path.read_text()) for path in paths]


def say(folder: Path, what: str, found: dict[str, float]) -> None:
    rank = os.environ["RANK"]
    (folder / f"new.{rank}").write_text(json.dumps({**found, "agent": int(sys.argv[2])}))
    (folder / f"new.{rank}").rename(folder / f"{what}.{rank}")


def lose(agent: subprocess.Popen[bytes]) -> None:
    """All processes of this node at once, and its memory."""
    all_of_it = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
    lines = [each.cmdline() for each in all_of_it]
    for each in all_of_it:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    agent.wait()
    (memory,) = {word for line in lines for word in line if word.startswith("/dev/shm/holdfast-")}
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
    say(folder.parent, "saves", {**found, "copy": unit.s, "arrived": statistics.median(arrived), "mark": mark})
    signal.pause()


def resumes(folder: Path) -> None:
    dist.init_process_group("gloo")
    model, optimizer = build()
    copy_s = Copies(model).s  # its memory is free now: see the top of this file
    snaps = snapshots(folder, model, optimizer)
    dist.barrier()
    began_s = time.perf_counter()
    resumed = snaps.resume()
    took_s = time.perf_counter() - began_s
    if resumed is None or resumed.source != "memory":
        raise RuntimeError(f"not resumed from memory: {resumed}")
    mark = model[0].weight.double().sum().item()
    say(folder.parent, "resumes", {"resume": took_s, "copy": copy_s, "step": resumed.step, "mark": mark})


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


def prefetch_s(folder: Path, number: int) -> float:
    """How long it took to fetch a state before the worker asked for it; 0: it was fetched while the worker waited."""
    journals = [path.read_text() for path in (folder / str(number)).glob("*/events.jsonl")]
    events = [json.loads(line) for journal in journals for line in journal.splitlines()]
    return sum(each["took_s"] for each in events if each["event"] == "snapshot_fetched" and each.get("ahead"))


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        torch.set_num_threads(1)
        resumes(folder / "copied") if list(folder.glob("saves.*")) else saves(folder / "copied")
        return
    folder.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    agents = [start(folder, number, port) for number in range(NODES)]
    try:
        copied = said(folder, "saves")
        lost = int(copied[1]["agent"])
        lose(agents[lost])
        lost_s = time.monotonic()
        agents[lost] = start(folder, NODES, port)
        resumed = said(folder, "resumes")
        ready_s = time.monotonic() - lost_s
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait()
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
                "fetched before it": prefetch_s(folder, NODES) / unit,
                "loss to resumed": ready_s,
                "bare transfer": transfer_s() / unit,
                "copy": unit * 1000,
            }
        )
    )


if __name__ == "__main__":
    main()
