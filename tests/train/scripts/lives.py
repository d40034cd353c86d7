"""Lives of a job of one rank, one after the other, forked from one launcher: lives.py COUNT CASE FOLDER

What a life says ends with an empty line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from typing import Any

from torch import nn

import holdfast.train as ht


def tell(**said: Any) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


class Counter:
    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def live(number: int, case: str, folder: str) -> None:
    model, counter = nn.Linear(3, 2), Counter()
    snaps = ht.Snapshots(folder, every=None, memory_every=1)
    snaps.track(model=model, counter=counter)
    resumed = snaps.resume()
    tell(source=resumed and resumed.source, count=counter.count, bias=model.bias.tolist())
    if case not in ("saves", "fork"):
        tell(skipped=list(resumed.skipped) if resumed else [])

    def change(count: int) -> None:
        counter.count = count
        nn.init.constant_(model.bias, count)

    match case:
        case "saves":  # each at step 0
            for each in range(counter.count + 1, counter.count + 4 - number):
                change(each)
                snaps.save(wait=True)
        case "poisoned" if number == 0:
            snaps.save(wait=True)
            snaps.step()
            nn.init.constant_(model.bias, float("nan"))
            snaps.step()
            snaps.step()
        case "removed" | "moved" if number == 0:
            snaps.save(wait=True)
            change(1)
            snaps.step()
            os.rename(folder, f"{folder}.before")  # at once: the saver may be writing into it
            if case == "removed":
                shutil.rmtree(f"{folder}.before", ignore_errors=True)
        case "unsaved" if number == 0:
            change(1)
            snaps.step()
        case "fork":
            change(1)
            snaps.save(wait=True)
            if os.fork() == 0:
                sys.exit(0)
            os.wait()
            with open(next(each.path for each in os.scandir(folder) if each.name.startswith("lease"))) as lease:
                tell(free="free" in lease.read())
            change(2)
            snaps.save(wait=True)
            change(3)
            snaps.step()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    for life in range(int(sys.argv[1])):
        pid = os.fork()
        if pid == 0:
            os.environ.update(LOCAL_RANK="0", TORCHELASTIC_RESTART_COUNT=str(life))
            live(life, *sys.argv[2:])
        os.waitpid(pid, 0)
        print(flush=True)
