"""Two pretended nodes with copies=1, and no save to the disk: one node after the other is lost with its memory. At the
end one state is on the disk, and both nodes are lost together.

copied_nodes.py FOLDER COUNT SEED        prints a JSON object: resumes by source, faults, and the steps that each loss cost

As in node_kills.py; a lost node's place is taken by a newcomer that has nothing. A node is lost once a state of this life is on
both nodes; in every second life once what was resumed is, and then it is the other node, before any step.
"""

from __future__ import annotations

import glob
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import node_kills
from node_kills import LIMIT_S, NODES, RUN_ID, STEPS, build, calm, end, fingerprint, kill, lines, savers, start, train

import holdfast.train as ht
from holdfast.train.snapshots import folder as folders

EVERY = 4


def life(folder: Path, say: Any, *, stays: bool, durable: bool) -> None:
    model, optimizer = build(3)
    node_kills.torch.manual_seed(int(os.environ["RANK"]))
    snaps = ht.Snapshots(
        folder, every=None, memory_every=EVERY, keep=None, copies=1, options=ht.SnapshotOptions(fresh_ok=True)
    )
    snaps.track(model=model, optimizer=optimizer)
    resumed = snaps.resume()
    say(f"resumed {snaps.state.step} {resumed.source if resumed else 'nothing'} {fingerprint(model, optimizer)}")
    before = snaps.state.step
    while stays:
        snaps._opened.check()  # type: ignore[union-attr]
        if not snaps._opened.copying:  # type: ignore[union-attr]
            say(f"again {snaps._opened.copy_error}")  # type: ignore[union-attr]
            time.sleep(LIMIT_S)
        time.sleep(0.01)
    while snaps.state.step < STEPS:
        train(model, optimizer)
        snaps.step()
        if durable and snaps.state.step == before + 2:
            snaps.save()
        plan = snaps._saving._copies._plan  # type: ignore[union-attr]
        say(f"step {snaps.state.step} {int(plan._kept is not None and plan._kept[0] > before)}")  # rank 0 knows
        time.sleep(0.01)  # longer than a copy of so little


def lose(node: int, ranks: list[tuple[int, int]]) -> None:
    for pid in (ranks[node][0], *savers(node)):
        kill(pid)
    for path in glob.glob(f"/dev/shm/holdfast-*-{RUN_ID}-{node}-*"):
        shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    folder, count, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    ranks, host = start(calm)
    expected = [lines(out, time.monotonic() + LIMIT_S) for _, out in ranks]
    end(ranks, host)
    found: Counter[str] = Counter()
    faults: list[str] = []
    cost: list[int] = []
    reached, lost = 0, -1
    for number in range(count + 2):
        durable = number == count
        stays = number % 2 == 1 and number < count
        ranks, host = start(lambda say: life(folder, say, stays=stays, durable=durable))  # noqa: B023 - it is called now
        said = [lines(out, time.monotonic() + LIMIT_S, 1) for _, out in ranks]
        if not all(said):
            faults.append(f"life {number}: it did not resume: {said}")
            break
        told = [each[0].split() for each in said]
        step = int(told[0][1])
        found[told[0][2]] += 1
        if number:
            cost.append(reached - step)
            if number % 2 == 0 and step != reached:
                faults.append(f"life {number}: a second loss took {reached - step} steps along")
        for rank, each in enumerate(told):
            if each[1:3] != told[0][1:3] or (step and each[3] != expected[rank][step]):
                faults.append(f"life {number}: rank {rank} is not what it was: {each}")
        reached = step
        if stays:
            again = [
                each[1:] or lines(out, time.monotonic() + LIMIT_S, 1)
                for each, (_, out) in zip(said, ranks, strict=True)
            ]
            if again != [["again "]] * NODES:
                faults.append(f"life {number}: what was resumed is not on both nodes: {again}")
            lost = 1 - lost
            lose(lost, ranks)
            end(ranks, host)
            continue
        while reached < STEPS and not (more := lines(ranks[0][1], time.monotonic() + LIMIT_S, 1))[-1].endswith(" 1"):
            reached = int(more[-1].split()[1])
        if reached == STEPS:
            faults.append(f"life {number}: no copy arrived in {STEPS - step} steps")
        time.sleep(chance.uniform(0, 0.1))
        deadline = time.monotonic() + LIMIT_S
        if durable:
            while not (saved := folders.survey(folder).committed) and time.monotonic() < deadline:
                time.sleep(0.01)
            faults += [] if saved else ["nothing came to the disk"]
        lost = chance.randrange(NODES)
        for node in range(NODES) if durable else (lost,):
            lose(node, ranks)
        rest = lines(ranks[0][1], time.monotonic() + 0.2)
        reached = int(rest[-1].split()[1]) if rest else reached
        end(ranks, host)
    for node in range(NODES):
        lose(node, [(pid, 0) for pid in savers(node)] * NODES) if savers(node) else None
    print(json.dumps({"resumed": found, "faults": faults, "cost": cost}))


if __name__ == "__main__":
    main()
