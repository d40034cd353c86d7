"""Two pretended nodes without copies: one is lost with its memory, and the other one's saver waits for it in vain.

lost_memory.py FOLDER DURABLE         prints the ranks' lines of the next life. DURABLE: a step that is on the disk, or 0
"""

from __future__ import annotations

import glob
import json
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import node_kills
from copied_nodes import lose
from node_kills import LIMIT_S, NODES, build, end, kill, lines, savers, start, train

import holdfast.train as ht

STEPS = 3


def life(folder: Path, durable: int, say: Any) -> None:
    model, optimizer = build(3)
    with (
        warnings.catch_warnings(record=True) as warned,
        ht.Snapshots(folder, every=None, memory_every=1, keep=None) as snaps,
    ):
        warnings.simplefilter("always")
        snaps.track(model=model, optimizer=optimizer)
        resumed = snaps.resume()
        texts = [str(each.message) for each in warned if "lost" in str(each.message)]
        say(json.dumps([snaps.state.step, resumed.source if resumed else "nothing", texts]))
        while snaps.state.step < STEPS:
            train(model, optimizer)
            snaps.step()
            if snaps.state.step == durable:
                snaps.save(wait=True)
        say("trained")
        time.sleep(LIMIT_S)


def main() -> None:
    folder, durable = Path(sys.argv[1]), int(sys.argv[2])
    ranks, host = start(lambda say: life(folder, durable, say))
    for _, out in ranks:
        assert len(lines(out, time.monotonic() + LIMIT_S, 2)) == 2
    lose(1, ranks)
    end(ranks, host)
    until_s = time.monotonic() + LIMIT_S
    while not glob.glob(f"{folder}/attempt.*") and time.monotonic() < until_s:
        time.sleep(0.01)
    assert glob.glob(f"{folder}/attempt.*"), "the saver of node 0 does not wait"

    ranks, host = start(lambda say: life(folder, 0, say))
    found = [lines(out, time.monotonic() + LIMIT_S, 1) for _, out in ranks]
    end(ranks, host)
    for node in range(NODES):
        for pid in savers(node):
            kill(pid)
    for path in glob.glob(f"/dev/shm/holdfast-*-{node_kills.RUN_ID}-*"):
        shutil.rmtree(path, ignore_errors=True)
    print(json.dumps([json.loads(each[0]) if each else None for each in found]))


if __name__ == "__main__":
    main()
