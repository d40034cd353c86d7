"""A training with long steps in which a rank is lost: slow_survivor.py FOLDER LAST

A step is one call that nothing interrupts, longer than a worker may usually take to leave its generation. In step LOST_IN
rank 1 is killed while all are in that call. At the end, after step LAST, each process writes FOLDER/end.PID: its worlds.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import holdfast.train as ht
from holdfast.protocol.policy import Limits

LOST_IN = 4
FOLDER, LAST = Path(sys.argv[1]), int(sys.argv[2])
STEP_US = int((Limits().release_s + 1.0) * 1e6)


def main() -> None:
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)  # without Python's lock: other threads run meanwhile
    snaps = ht.Snapshots(FOLDER / "runs", every=None)
    with ht.process_group() as pg, snaps:
        model = ht.ddp(nn.Linear(4, 1), pg)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        state = snaps.track(model=model, optimizer=optimizer)
        snaps.resume()
        worlds: list[int] = []

        @ht.survive(snaps)
        def train() -> None:
            worlds.append(pg.world)
            while state.step < LAST:
                mark = FOLDER / "lost"
                if state.step + 1 == LOST_IN and pg.rank == 1 and not mark.exists():
                    mark.touch()
                    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
                libc.usleep(STEP_US)
                optimizer.zero_grad()
                loss = model(torch.ones(2, 4)).mean()
                loss.backward()
                optimizer.step()
                snaps.step(loss=loss)

        train()
        (FOLDER / f"end.{os.getpid()}").write_text(json.dumps(worlds))


main()
