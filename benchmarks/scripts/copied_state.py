"""Two pretended nodes with a 473 MB state each, and copies of it on the other one, timed in copies (train_state.py).

    copied_state.py FOLDER            prints numbers as JSON

Saves in memory without and with copies=1; then a node is lost with its memory, and both ranks resume in new processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_state import Copies, build, timed, train

SAVES = 10
NODES = 2
ARRIVES_S = 120.0


def start(what: str, folder: Path, port: int, rank: int, run: str) -> subprocess.Popen[str]:
    own = {"RANK": str(rank), "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": f"{run}-{rank}", "OMP_NUM_THREADS": "1"}
    world = {"WORLD_SIZE": str(NODES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    line = [sys.executable, __file__, str(folder), what]
    return subprocess.Popen(line, env={**os.environ, **own, **world}, stdout=subprocess.PIPE, text=True)


def life(what: str, folder: Path, run: str) -> list[dict[str, float]]:
    """What both ranks found."""
    with __import__("socket").create_server(("127.0.0.1", 0)) as probe:
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


def snapshots(folder: Path, copies: int, model: Any, optimizer: Any) -> Any:
    import holdfast.train as ht

    snaps = ht.Snapshots(folder, every=None, memory_every=1, copies=copies)
    snaps.track(model=model, optimizer=optimizer)
    return snaps


def saves(folder: Path, copies: int) -> None:
    """Every second save has its copy: the one after it comes while that is on its way, or when it has arrived."""
    dist.init_process_group("gloo")
    model, optimizer = build()
    snaps = snapshots(folder, copies, model, optimizer)
    snaps.resume()
    stalls, arrived = [], []
    unit = Copies(model)
    for number in range(SAVES + 2):
        train(model, optimizer)
        unit.take()
        dist.barrier()
        took_s = timed(snaps.step)
        if number > 1:
            stalls.append(took_s)
        began_s = time.perf_counter()
        while copies and snaps._opened.copying and time.perf_counter() < began_s + ARRIVES_S:
            time.sleep(0.005)
            snaps._opened.check()
        arrived.append(time.perf_counter() - began_s)
        dist.barrier()
    mark = model[0].weight.double().sum().item()
    print(
        json.dumps(
            {"stall": statistics.mean(stalls), "copy": unit.s, "arrived": statistics.median(arrived), "mark": mark}
        )
    )
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def resumes(folder: Path) -> None:
    dist.init_process_group("gloo")
    model, optimizer = build()
    unit = Copies(model)
    snaps = snapshots(folder, 1, model, optimizer)
    dist.barrier()
    took_s = timed(snaps.resume)
    unit.take(4)
    resumed = snaps._life is not None and snaps.state.step
    mark = model[0].weight.double().sum().item()
    print(json.dumps({"resume": took_s, "copy": unit.s, "step": resumed, "mark": mark}))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        what = sys.argv[2]
        torch.set_num_threads(1)
        resumes(folder / "copied") if what == "resumes" else saves(folder / what, int(what == "copied"))
        return
    run = f"bench{os.getpid()}"
    alone = life("alone", folder, f"{run}a")
    copied = life("copied", folder, f"{run}c")
    lose(f"{run}c", 1)
    resumed = life("resumes", folder, f"{run}c")
    if any(each["mark"] != copied[0]["mark"] for each in resumed):
        raise RuntimeError("what was resumed is not what was saved")
    unit = statistics.median(each["copy"] for each in (*alone, *copied, *resumed))
    stall = [max(each["stall"] for each in of) for of in (alone, copied)]
    print(
        json.dumps(
            {
                "stall without": stall[0] / unit,
                "stall with": stall[1] / unit,
                "stall, relative": stall[1] / stall[0],
                "copy has arrived": max(each["arrived"] for each in copied) / unit,
                "resume of the newcomer": resumed[1]["resume"] / unit,
                "copy": unit * 1000,
            }
        )
    )


if __name__ == "__main__":
    main()
