"""Two pretended nodes, killed and lost at random: trainers, savers, both, memory. Each life goes on from what all have.

node_kills.py FOLDER COUNT SEED          prints a JSON object: resumes by source, faults

Ranks are forked from one process that has imported torch once; each node has a run id, hence a /dev/shm folder and a saver
of its own. What every rank resumes is compared with a job that was never killed. FSDP2: each node has half of everything.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import random
import select
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import limit_s
from snapshot_ranks import _store_host
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast.train as ht
from holdfast.train import save as saving
from holdfast.train.snapshots import folder as folders

NODES = 2
STEPS = 150
LIMIT_S = limit_s(25)
RUN_ID = f"nodes{os.getpid()}"
KINDS = ("one trainer", "both trainers", "trainer and saver", "both of both", "saver", "node lost", "rank 0 lost")


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The batch comes from torch's own generator, which has to be restored, too."""
    model(torch.randn(4, 7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    held = hashlib.sha256()
    state = [value for each in optimizer.state.values() for value in each.values()]
    for tensor in (*model.parameters(), *state):
        held.update(getattr(tensor, "_local_tensor", tensor).detach().numpy().tobytes())
    held.update(torch.get_rng_state().numpy().tobytes())
    return held.hexdigest()[:16]


def life(folder: Path, seed: int, say: Any) -> None:
    model, optimizer = build(3)
    torch.manual_seed(dist.get_rank())
    chance = random.Random(seed)  # equal on all ranks
    # A life may be killed while it writes the job's first snapshot, and nothing else is on the disk then.
    snaps = ht.Snapshots(folder, every=None, memory_every=2, keep=None, options=ht.SnapshotOptions(fresh_ok=True))
    snaps.track(model=model, optimizer=optimizer)
    resumed = snaps.resume()
    source = resumed.source if resumed else "nothing"
    say(f"resumed {snaps.state.step} {source} {fingerprint(model, optimizer)}")
    before = snaps.state.step
    while snaps.state.step < STEPS:
        train(model, optimizer)
        snaps.step()
        if snaps.state.step == before + 3:
            say("under way")
        if chance.random() < 0.1:
            snaps.save()


def calm(say: Any) -> None:
    model, optimizer = build(3)
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS + 1):
        if step:
            train(model, optimizer)
        say(f"{fingerprint(model, optimizer)}")


def start(work: Any) -> tuple[list[tuple[int, int]], int]:
    """Fork a rank per node; returns pid and pipe of each, and the store's process."""
    host, port = _store_host()
    ranks = []
    for rank in range(NODES):
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(out)
            signal.alarm(int(LIMIT_S))
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(NODES), LOCAL_RANK="0")
            os.environ["TORCHELASTIC_RUN_ID"] = f"{RUN_ID}-{rank}"
            saving.node_key = lambda: str(rank)  # noqa: B023
            torch.set_num_threads(1)
            code = 1
            try:
                store = dist.TCPStore("127.0.0.1", port, None, False)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=NODES)
                with os.fdopen(into, "w", buffering=1) as file:
                    work(lambda text: print(text, file=file))
                code = 0
            except BaseException as error:  # noqa: BLE001
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        os.close(into)
        ranks.append((pid, out))
    return ranks, host


def lines(out: int, deadline: float, count: int = 0) -> list[str]:
    """So many lines, or all."""
    text = b""
    while not (count and text.count(b"\n") >= count):
        readable, _, _ = select.select([out], [], [], max(deadline - time.monotonic(), 0))
        if not readable or not (data := os.read(out, 65536)):
            break
        text += data
    return text.decode().splitlines()


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def savers(node: int) -> list[int]:
    """Of this pretended node; started by our ranks."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = Path(path).read_bytes()
            if b"holdfast.train.snapshots.saver" in line and f"-{RUN_ID}-{node}-".encode() in line:
                found.append(int(Path(path).parent.name))
    return found


def strike(kind: str, ranks: list[tuple[int, int]], chance: random.Random) -> None:
    node = chance.randrange(NODES)
    other = 1 - node
    pids = [pid for pid, _ in ranks]
    if kind == "rank 0 lost":
        node = 0
    if kind == "saver":
        for pid in savers(node):
            kill(pid)
        time.sleep(0.05)
        node = chance.randrange(NODES)
    kill(pids[node])
    if kind in ("both trainers", "both of both"):
        kill(pids[other])
    for each in {"trainer and saver": [node], "node lost": [node], "rank 0 lost": [0], "both of both": [0, 1]}.get(
        kind, []
    ):
        for pid in savers(each):
            kill(pid)
    if kind in ("node lost", "rank 0 lost"):
        for path in glob.glob(f"/dev/shm/holdfast-*-{RUN_ID}-{node}-*"):
            shutil.rmtree(path, ignore_errors=True)
    time.sleep(chance.choice([0, 0.01, 0.1]))
    for pid in pids:  # as a launcher ends them
        kill(pid)


def main() -> None:
    folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    ranks, host = start(calm)
    expected = [lines(out, time.monotonic() + LIMIT_S) for _, out in ranks]
    end(ranks, host)
    found: Counter[str] = Counter()
    faults: list[str] = []
    if any(len(each) != STEPS + 1 for each in expected):
        faults.append("the calm job did not come to its end")
    newest = 0
    for number in range(count + 1):
        before = committed(folder, faults)
        ranks, host = start(lambda say: life(folder, seed * 1000 + number, say))  # noqa: B023
        deadline = time.monotonic() + LIMIT_S
        said = [lines(out, deadline, 1) for _, out in ranks]
        if not all(said):
            faults.append(f"life {number}: it did not resume: {said}")
            end(ranks, host)
            break
        told = [each[0].split() for each in said]
        found[told[0][2]] += 1
        if told[0][1:3] != told[1][1:3]:
            faults.append(f"life {number}: the ranks differ: {said}")
        step = int(told[0][1])
        if step < before:
            faults.append(f"life {number}: resumed {step}, and {before} is on the disk")
        for rank, each in enumerate(told):
            if step and each[3] != expected[rank][step]:
                faults.append(f"life {number}: rank {rank}'s step {step} is not what it was ({each[2]})")
        newest = max(newest, step)
        if chance.random() < 0.8:
            lines(ranks[0][1], time.monotonic() + LIMIT_S, 1)
        time.sleep(chance.uniform(0, 0.1))
        strike(KINDS[(number + seed) % len(KINDS)], ranks, chance)
        end(ranks, host)
    for pid in (pid for node in range(NODES) for pid in savers(node)):
        kill(pid)  # they may wait for a node that is gone
    for path in glob.glob(f"/dev/shm/holdfast-*-{RUN_ID}-*"):
        shutil.rmtree(path, ignore_errors=True)
    print(json.dumps({"resumed": found, "faults": faults, "newest": newest}))


def committed(folder: Path, faults: list[str]) -> int:
    """The newest step on the disk; every snapshot has all ranks of one step."""
    newest = 0
    for snapshot in folders.survey(folder).committed:
        newest = max(newest, snapshot.step)
        if snapshot.manifest.world != NODES:
            faults.append(f"{snapshot.path.name} has {snapshot.manifest.world} ranks")
        with contextlib.suppress(folders.SnapshotGoneError):
            folders.verify(snapshot)
    return newest


def end(ranks: list[tuple[int, int]], host: int) -> None:
    for pid, out in ranks:
        kill(pid)
        os.waitpid(pid, 0)
        os.close(out)
    kill(host)
    os.waitpid(host, 0)


if __name__ == "__main__":
    main()
