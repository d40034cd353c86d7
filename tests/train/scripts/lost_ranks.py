"""What scripts share in which ranks are lost at chosen places: SCRIPT FOLDER CASE

CASE is a JSON object. Of it this module knows `faults`: [[local rank, where, steps so far]], each a kill that happens once, or,
with "wait" at its end, a wait for the file FOLDER/go on after STEP; with a number at its end it happens when so many ranks are there; `node`: each node has one worker, and this is its number,
in place of the local rank; and `exact`: numbers have double precision. Each rank writes FOLDER/steps.LOCAL_RANK, with a digest of its weights after each
step, and at its end FOLDER/end.LOCAL_RANK, a JSON object.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from dying import die

FOLDER = Path(sys.argv[1])
CASE: dict[str, Any] = json.loads(sys.argv[2])
LOCAL_RANK = int(CASE.get("node", os.environ["LOCAL_RANK"]))
BATCH = 2

torch.set_num_threads(1)
if CASE.get("exact"):
    torch.set_default_dtype(torch.float64)


class World:
    """Of the present generation."""

    size = 0


def reach(where: str, step: int) -> None:
    """A place where a rank may be lost. It waits until the others have come there: what they do is not left to chance."""
    due = [
        (index, fault[0], fault[3] if len(fault) > 3 else None)
        for index, fault in enumerate(CASE.get("faults", []))
        if fault[1:3] == [where, step] and not (FOLDER / f"fault.{index}").exists()
    ]
    for index, *_ in due:
        (FOLDER / f"there.{index}.{LOCAL_RANK}").touch()
    for index, rank, how in due:
        if rank == LOCAL_RANK:
            while len(list(FOLDER.glob(f"there.{index}.*"))) < (how if isinstance(how, int) else World.size):
                time.sleep(0.002)
            (FOLDER / f"fault.{index}").touch()
            while how == "wait":
                if (FOLDER / f"go on after {step}").exists():
                    return
                time.sleep(0.002)
            die()


def row(index: int) -> torch.Tensor:
    return torch.sin(torch.arange(8.0, dtype=torch.get_default_dtype()) * (index + 1))


def loader_options() -> dict[str, Any]:
    """Of ht.DataLoader. `global` in CASE: samples of a step, however many ranks there are; with `micro`, in micro-batches
    of BATCH samples."""
    if "global" in CASE:
        size = BATCH if CASE.get("micro") else CASE["global"]
        return {"batch_size": size, "global_batch_size": CASE["global"], "shuffle": True, "seed": 7}
    return {"batch_size": BATCH, "shuffle": True, "seed": 7}


def digest(tensors: Iterable[torch.Tensor]) -> str:
    held = hashlib.sha256()
    for each in tensors:
        held.update(each.detach().numpy().tobytes())
    return held.hexdigest()[:16]


def step_is_done(step: int, weights: Iterable[torch.Tensor]) -> None:
    with (FOLDER / f"steps.{LOCAL_RANK}").open("a") as file:
        file.write(f"{step} {World.size} {digest(weights)}\n")


def end(name: str | None = None, **found: Any) -> None:
    (FOLDER / f"end.{LOCAL_RANK if name is None else name}").write_text(json.dumps(found))


class Stopping:
    """Early stopping, an object of the program's own: an epoch that is counted twice shows in its state."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])
