"""Jobs whose ranks do not complete their optimizer steps at the same calls of `snaps.step()`. Prints what each rank found, as
JSON.

pending_ranks.py FOLDER

Each rank has a stage of its own, as in a pipeline, and an optimizer and a scaler for it. Gradients are dropped at the loop's
begin, as in torch's tutorials, so those of a step that was skipped are still there when `snaps.step()` is called.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from snapshot_ranks import ranks
from torch import nn

import holdfast.train as ht
from holdfast.protocol.board_layout import BOARD_NAME, BOARD_VARIABLE, SAFE_POINT, SLOT_WORDS, WORD_BYTES, save_word
from holdfast.train.snapshots import folder as folders

CALLS = 24


def job(folder: Path, steps_at: Callable[[int, int], bool], **options: Any) -> Any:
    """`steps_at(rank, call)`: whether the scaler does not skip the optimizer's step. Returns the steps at which this rank's
    gradients were pending, and the warnings."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.ModuleDict({f"stage{rank}": nn.Linear(3, 3)})
    optimizer = torch.optim.Adam(stage.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    snaps = ht.Snapshots(folder, keep=None, **options)
    state = snaps.track(model=stage, optimizer=optimizer)
    snaps.resume()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            while state.step < CALLS:
                optimizer.zero_grad()
                skips = not steps_at(rank, state.step + 1)
                loss = stage[f"stage{rank}"](torch.ones(3)).sum() * (float("inf") if skips else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                snaps.step()
        finally:
            snaps.close()
    return [str(each.message) for each in told if "postponed" in str(each.message)]


def left(*arguments: Any, **options: Any) -> Any:
    try:
        return job(*arguments, **options)
    except SystemExit as error:
        return f"left with {error.code}"


def steps(folder: Path) -> list[int]:
    return [each.step for each in folders.survey(folder).committed]


def skips_alone(odd: int, skipped: Collection[int], rank: int, call: int) -> bool:
    return rank != odd or call not in skipped


def in_turn(rank: int, call: int) -> bool:
    return call % 2 == rank


def board(word: int, value: int, world: int) -> int:
    """As an agent asks for something at a safe point. Returns the board's descriptor."""
    words = memoryview(bytearray((1 + world) * SLOT_WORDS * WORD_BYTES)).cast("Q")
    words[word] = value
    fd = os.memfd_create(BOARD_NAME)
    os.write(fd, words)
    os.environ[BOARD_VARIABLE] = f"/proc/{os.getpid()}/fd/{fd}@"
    return fd


def with_board(work: Callable[[], Any]) -> Any:
    os.environ[BOARD_VARIABLE] += str((1 + dist.get_rank()) * SLOT_WORDS)
    return work()


def main(folder: Path) -> dict[str, Any]:
    found = {}
    alone = partial(skips_alone, 1, {1, 2, 6, 7, 12})
    for every in ("4 steps", "0.001s"):
        place = folder / every[0]
        said = ranks(3, partial(job, place, alone, every=every, memory_every=5), f"skips{every}")
        found[every] = {"said": said, "steps": steps(place)}
    said = ranks(2, partial(job, folder / "turns", in_turn, every="6 steps", memory_every=None), "turns")
    found["in turn"] = {"said": said, "steps": steps(folder / "turns")}
    for what, word in (("stop", SAFE_POINT), ("save", save_word(6))):
        fd = board(word, 6, 3)
        work = partial(left, folder / what, alone, every="1h", memory_every=None)
        said = ranks(3, partial(with_board, work), what)
        found[what] = {"said": said, "steps": steps(folder / what)}
        del os.environ[BOARD_VARIABLE]
        os.close(fd)
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
