"""What scripts share in which ranks are lost at chosen places: SCRIPT FOLDER CASE

CASE is a JSON object. Of it this module knows `faults`: [[local rank, where, steps so far]], each a kill that happens once;
and `exact`: numbers have double precision. Each rank writes FOLDER/steps.LOCAL_RANK, with a digest of its weights after each
step, and at its end FOLDER/end.LOCAL_RANK, a JSON object.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(sys.argv[1])
LOCAL_RANK = int(os.environ["LOCAL_RANK"])
CASE: dict[str, Any] = json.loads(sys.argv[2])
BATCH = 2

torch.set_num_threads(1)
if CASE.get("exact"):
    torch.set_default_dtype(torch.float64)


class World:
    """Of the present generation."""

    size = 0


def reach(where: str, step: int) -> None:
    """A place where a rank may be lost. It waits until the others have come there: what they do is not left to chance."""
    for index, fault in enumerate(CASE.get("faults", [])):
        if fault[1:] == [where, step] and not (FOLDER / f"fault.{index}").exists():
            (FOLDER / f"there.{index}.{LOCAL_RANK}").touch()
            if fault[0] == LOCAL_RANK:
                while len(list(FOLDER.glob(f"there.{index}.*"))) < World.size:
                    time.sleep(0.002)
                (FOLDER / f"fault.{index}").touch()
                os.kill(os.getpid(), signal.SIGKILL)


def row(index: int) -> torch.Tensor:
    return torch.sin(torch.arange(8.0, dtype=torch.get_default_dtype()) * (index + 1))


def loader_options() -> dict[str, Any]:
    """Of ht.DataLoader. `global` in CASE: samples of a step, however many ranks there are."""
    if "global" in CASE:
        return {"batch_size": CASE["global"], "global_batch_size": CASE["global"], "shuffle": True, "seed": 7}
    return {"batch_size": BATCH, "shuffle": True, "seed": 7}


def digest(tensors: Iterable[torch.Tensor]) -> str:
    held = hashlib.sha256()
    for each in tensors:
        held.update(each.detach().numpy().tobytes())
    return held.hexdigest()[:16]


def step_is_done(step: int, weights: Iterable[torch.Tensor]) -> None:
    with (FOLDER / f"steps.{LOCAL_RANK}").open("a") as file:
        file.write(f"{step} {World.size} {digest(weights)}\n")


def end(**found: Any) -> None:
    (FOLDER / f"end.{LOCAL_RANK}").write_text(json.dumps(found))
