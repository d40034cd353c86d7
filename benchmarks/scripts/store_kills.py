"""One writer to a real S3 server after the other is killed, in every phase of a save and at random moments.

    store_kills.py COUNT SEED          prints a JSON object: kills, correct resumes, faults

After each kill: every snapshot that was committed before is there and is found; the newest is whole, bit for bit, and
is that of the killed writer if it had reached its commit; the next life clears what is left, unfinished uploads too.
"""

from __future__ import annotations

import json
import os
import random
import sys

from holdfast.train.snapshots import folder, remote
from holdfast.train.snapshots.changes import Keep, prune
from tests.train.snapshots.saves import content, load
from tests.support.object_store import BUCKET, ObjectStore, Saves

ITEMS = 3_000_000
PHASES = ("begun", "part 1", "part 2", "written", "recorded", "gathered", "durable")
URL = f"s3://{BUCKET}/run"


def judge(step: int, phase: str, committed: list[int]) -> list[str]:
    """What is wrong after this kill. `committed`: the steps before it; the new ones are put there."""
    faults = []
    found = folder.survey(URL)
    steps = [each.step for each in found.committed]
    if found.problems or steps[: len(committed)] != committed or set(steps) - {*committed, step}:
        faults.append(f"step {step}, {phase}: {steps}, {found.problems}")
    if phase == "durable" and steps[-1:] != [step]:
        faults.append(f"step {step} was committed and is not found")
    newest = found.newest_valid
    if newest is not None and load(newest) != [content(newest.step, rank, ITEMS) for rank in range(2)]:
        faults.append(f"step {newest.step} is not what was saved")
    folder.clear_debris(found)
    fs = remote.filesystem(URL)
    if fs.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads"):
        faults.append(f"step {step}, {phase}: uploads are left")
    committed[:] = [each.step for each in prune(URL, Keep(last=2)).kept]
    return faults


def main(count: int, seed: int) -> None:
    remote.PART_BYTES = 5 << 20
    draw = random.Random(seed)
    store = ObjectStore()
    killing = Saves(store.environ())
    try:
        os.environ.update(store.environ())
        committed: list[int] = []
        faults: list[str] = []
        kills = correct = step = 0
        took_s = 1.0
        while kills < count:
            step += 1
            phase = draw.choice((*PHASES, "any")) if step > 1 else ""
            after_s = draw.uniform(0.02, took_s) if phase == "any" else 0.0
            status = killing.run(URL, step, phase, items=ITEMS, after_s=after_s)
            found = judge(step, phase if status else "durable", committed)
            kills += status == -9
            correct += status == -9 and not found
            faults += found
            if kills % 20 == 0:
                print(kills, faults, file=sys.stderr, flush=True)
        print(json.dumps({"kills": kills, "resumed correctly": correct, "faults": faults[:5]}))
    finally:
        killing.close()
        store.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
